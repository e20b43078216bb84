package oracle

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
)

// FuzzReply shows every oracle what a hostile model, a broken server and an odd
// request may hold. None may crash, and the verdict must be writable.
func FuzzReply(f *testing.F) {
	tool := `[{"type":"function","function":{"name":"read","parameters":{"type":"object","properties":{"path":{"type":"string"}}}}}]`
	f.Add("text", "", "read", `{"path":"a"}`, tool, `{"type":"object"}`, false)
	f.Add(`{"name":"read","arguments":{"path":"a"}}`, "so", "", "", "", "", true)
	f.Add("```json\n{{{{\n```", "<｜DSML｜", "\xff", `{"path":"</path>`, `[{"function":7}]`, `{"$ref":"#"}`, true)
	f.Add("\U0001F600!!!!!!!!!!!!!!!!!!!!!!!!!!", "", "read", `[[[[`, `{"type":`, `{"pattern":"("}`, false)
	f.Fuzz(func(t *testing.T, content, reasoning, name, arguments, tools, schema string, textCall bool) {
		request, _ := json.Marshal(map[string]any{"messages": []any{map[string]any{"role": "user", "content": reasoning}}})
		if json.Valid([]byte(tools)) {
			request = []byte(`{"messages":[],"tools":` + tools + `}`)
		}
		body, err := json.Marshal(map[string]any{"choices": []any{map[string]any{"index": 0, "finish_reason": "stop", "message": map[string]any{
			"role": "assistant", "content": content, "reasoning_content": reasoning,
			"tool_calls": []any{map[string]any{"id": "a", "type": "function", "function": map[string]any{"name": name, "arguments": arguments}}},
		}}}})
		if err != nil {
			t.Fatal(err)
		}
		j := newJudgement(history.Header{RunKey: "00", Sessions: 2}, Registry)
		for id := range int64(4) {
			op := history.Op{
				ID: id + 1, Phase: history.Main, Status: 200, Outcome: history.OK, LastByte: time.Second, Request: request,
				Chunks: []history.Chunk{{At: time.Second, Data: body}},
			}
			switch id {
			case 0:
				op.Expect.Call = &history.Call{Name: "read", Arguments: map[string]string{"path": reasoning}}
				op.Expect.TextCall = textCall
			case 1:
				op.Expect.Schema = json.RawMessage(schema)
			case 2:
				op.Expect = history.Expect{Copy: []string{reasoning, name}, Same: "x", MinChars: 3}
			case 3:
				op.Expect = history.Expect{Answer: reasoning, Distance: 3, Same: "x"}
				op.Chunks[0].Data = []byte(content)
			}
			j.op(&op)
		}
		j.finish()
		for _, c := range j.crashes {
			t.Errorf("%s crashed at op %d: %s", c.Oracle, c.Op, c.Panic)
		}
		if _, err := json.Marshal(j.verdict(false)); err != nil {
			t.Error(err)
		}
	})
}

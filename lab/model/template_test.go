package model

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/culprit-project/culprit/openai"
)

func call(name, arguments string) openai.ToolCall {
	return openai.ToolCall{ID: "call_1", Type: "function", Function: openai.FunctionCall{Name: name, Arguments: arguments}}
}

func TestConversation(t *testing.T) {
	tok := testTokenizer(t)
	tools := []openai.Tool{
		{Type: "function", Function: openai.Function{
			Name:       "assign_berth",
			Parameters: json.RawMessage(`{"type":"object","properties":{"ship":{"type":"string"},"berth":{}},"required":["ship"]}`),
		}},
		{Type: "function", Function: openai.Function{Name: "stop"}},
	}
	messages := []openai.Message{
		{Role: "system", Content: "ship Aurora"},
		{Role: "user", Content: "berth?"},
		{Role: "assistant", ToolCalls: []openai.ToolCall{call("assign_berth", `{"ship":"Aurora","berth":"q7","n": {"a": [1, 2]}}`)}},
		{Role: "tool", Content: "is x9", ToolCallID: "call_1"},
		{Role: "assistant", Content: "berth is x9", Reasoning: "left out"},
		{Role: "assistant", Content: "so", ToolCalls: []openai.ToolCall{call("a", "{}"), call("b", "not JSON")}},
	}
	const want = "<｜begin｜><｜Tools｜>assign_berth(ship berth)\nstop()\n<｜System｜>ship Aurora<｜User｜>berth?<｜Assistant｜>" +
		"<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"assign_berth\">\n" +
		"<｜DSML｜parameter name=\"ship\" string=\"true\">Aurora</｜DSML｜parameter>\n" +
		"<｜DSML｜parameter name=\"berth\" string=\"true\">q7</｜DSML｜parameter>\n" +
		"<｜DSML｜parameter name=\"n\" string=\"false\">{\"a\":[1,2]}</｜DSML｜parameter>\n" +
		"</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end｜>" +
		"<｜Tool｜>is x9<｜Assistant｜>berth is x9<｜end｜>" +
		"<｜Assistant｜>so\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"a\">\n</｜DSML｜invoke>\n" +
		"<｜DSML｜invoke name=\"b\">\nnot JSON</｜DSML｜invoke>\n</｜DSML｜tool_calls><｜end｜>"
	got, err := tok.Conversation(messages, tools)
	if err != nil {
		t.Fatal(err)
	}
	if text := tok.Decode(got); text != want {
		t.Errorf("got  %q\nwant %q", text, want)
	}

	for k := range messages {
		prefix, err := tok.Conversation(messages[:k], tools)
		if err != nil {
			t.Fatal(err)
		}
		if len(prefix) >= len(got) || !slices.Equal(prefix, got[:len(prefix)]) {
			t.Errorf("the rendering of %d messages is no prefix of the whole", k)
		}
		prompt, err := tok.Prompt(messages[:k], tools)
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(prompt, append(prefix, AssistantRole)) {
			t.Errorf("the prompt of %d messages is not their rendering and the assistant's role", k)
		}
	}
}

func TestConversationErrors(t *testing.T) {
	tok := testTokenizer(t)
	if _, err := tok.Conversation([]openai.Message{{Role: "robot"}}, nil); err == nil {
		t.Error("an unknown role gave no error")
	}
	for _, schema := range []string{`[]`, `{"properties":[]}`, `{`} {
		tools := []openai.Tool{{Function: openai.Function{Name: "f", Parameters: json.RawMessage(schema)}}}
		if _, err := tok.Conversation(nil, tools); err == nil {
			t.Errorf("schema %s gave no error", schema)
		}
	}
}

// TestWrittenCallsKeepTheirTokens walks the way of a call that the model
// writes: its tokens are decoded, a client sends the text's parts back, and
// the next round's prompt must hold the same tokens, or the cache misses.
func TestWrittenCallsKeepTheirTokens(t *testing.T) {
	tok := testTokenizer(t)
	m := openai.Message{Role: "assistant", ToolCalls: []openai.ToolCall{
		call("assign_berth", `{"ship":"Aurora is","code":"x2-is7 ship","text":" two  spaces ","quote":"\"q\">"}`),
	}}
	written := tok.Encode(AssistantText(&m))
	if again := tok.Encode(tok.Decode(written)); !slices.Equal(again, written) {
		t.Errorf("tokens %v come back as %v", written, again)
	}
}

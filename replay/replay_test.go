package replay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

func readText(t *testing.T, text string) *Trace {
	t.Helper()
	trace, err := read(bufio.NewReader(strings.NewReader(text)))
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// body is a request's as a map, so that the order of members doesn't matter.
func body(t *testing.T, r Request) map[string]any {
	t.Helper()
	var m map[string]any
	if err := json.Unmarshal(r.Body, &m); err != nil {
		t.Fatalf("%s: %v", r.Body, err)
	}
	return m
}

func TestFormats(t *testing.T) {
	user := func(text string) any { return map[string]any{"role": "user", "content": text} }
	assistant := func(text string) any { return map[string]any{"role": "assistant", "content": text} }
	tests := []struct {
		name, text, format string
		bodies             []map[string]any
		at                 []time.Duration
		left               int
	}{
		{
			name:   "request bodies, as K2VV has them",
			text:   `{"messages":[{"role":"user","content":"a"}],"tools":[],"stream":true,"check_type":"x"}` + "\n\n" + `{"messages":[{"role":"user","content":"b"}]}` + "\n",
			format: "messages",
			bodies: []map[string]any{{"messages": []any{user("a")}, "tools": []any{}, "stream": true}, {"messages": []any{user("b")}}},
			at:     []time.Duration{0, 0},
		},
		{
			name:   "ShareGPT",
			text:   `[{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"},{"from":"human","value":"c"}]},{"conversations":[{"from":"tool","value":"?"}]}]`,
			format: "sharegpt",
			bodies: []map[string]any{{"messages": []any{user("a")}, "stream": true}, {"messages": []any{user("a"), assistant("b"), user("c")}, "stream": true}},
			at:     []time.Duration{0, 0},
			left:   1,
		},
		{
			name: "OpenTelemetry",
			text: `{"resourceSpans":[{"scopeSpans":[{"spans":[` +
				`{"startTimeUnixNano":"1700000002000000000","endTimeUnixNano":"1700000003000000000","attributes":[` +
				`{"key":"gen_ai.request.model","value":{"stringValue":"m"}},{"key":"gen_ai.request.max_tokens","value":{"intValue":"7"}},` +
				`{"key":"gen_ai.system_instructions","value":{"stringValue":"[{\"type\":\"text\",\"content\":\"be brief\"}]"}},` +
				`{"key":"gen_ai.input.messages","value":{"stringValue":"[{\"role\":\"user\",\"parts\":[{\"type\":\"text\",\"content\":\"b\"}]},{\"role\":\"assistant\",\"parts\":[{\"type\":\"tool_call\",\"id\":\"1\",\"name\":\"f\",\"arguments\":{\"x\":1}}]},{\"role\":\"tool\",\"parts\":[{\"type\":\"tool_call_response\",\"id\":\"1\",\"result\":\"ok\"}]}]"}}]},` +
				`{"startTimeUnixNano":1700000001000000000,"attributes":[{"key":"gen_ai.input.messages","value":{"arrayValue":{"values":[{"kvlistValue":{"values":[` +
				`{"key":"role","value":{"stringValue":"user"}},{"key":"parts","value":{"arrayValue":{"values":[{"kvlistValue":{"values":[{"key":"type","value":{"stringValue":"text"}},{"key":"content","value":{"stringValue":"a"}}]}}]}}}]}}]}}}]},` +
				`{"startTimeUnixNano":"1","attributes":[{"key":"http.method","value":{"stringValue":"GET"}}]}]}]}]}`,
			format: "otel",
			bodies: []map[string]any{
				{"messages": []any{user("a")}, "stream": true},
				{"messages": []any{
					map[string]any{"role": "system", "content": "be brief"},
					user("b"),
					map[string]any{"role": "assistant", "content": "", "tool_calls": []any{map[string]any{"id": "1", "type": "function", "function": map[string]any{"name": "f", "arguments": `{"x":1}`}}}},
					map[string]any{"role": "tool", "tool_call_id": "1", "content": "ok"},
				}, "stream": true, "model": "m", "max_tokens": 7.0},
			},
			at:   []time.Duration{0, time.Second},
			left: 1,
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			trace := readText(t, tt.text)
			if trace.Format != tt.format || trace.Left != tt.left || trace.Shape() {
				t.Errorf("format %q, %d left out", trace.Format, trace.Left)
			}
			var bodies []map[string]any
			var at []time.Duration
			for _, r := range trace.Requests {
				bodies, at = append(bodies, body(t, r)), append(at, r.At)
			}
			if d := cmp.Diff(tt.bodies, bodies); d != "" {
				t.Errorf("bodies (-want +got):\n%s", d)
			}
			if d := cmp.Diff(tt.at, at); d != "" {
				t.Errorf("times: %s", d)
			}
		})
	}
}

// TestConversationsWithoutTimes: a conversation's requests follow one another.
func TestConversationsWithoutTimes(t *testing.T) {
	trace := readText(t, `[{"conversations":[{"from":"human","value":"a"},{"from":"gpt","value":"b"},{"from":"human","value":"c"}]},{"conversations":[{"from":"human","value":"d"}]}]`)
	w, err := trace.Workload(Options{})
	if err != nil {
		t.Fatal(err)
	}
	var turns []int
	for i := range w.Sessions() {
		s, n := w.Session(i, false), 0
		for _, more := s.Next(nil); more; _, more = s.Next(nil) {
			n++
		}
		turns = append(turns, n)
	}
	if d := cmp.Diff([]int{2, 1}, turns); d != "" {
		t.Errorf("turns of each row: %s", d)
	}
}

func TestReadErrors(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"empty", "  \n", "empty"},
		{"no format", `{"prompt":"x"}`, "it has none of messages"},
		{"two formats", `{"messages":[]}` + "\n" + `{"input_length":3}`, "line 2: it looks like mooncake"},
		{"half a line", `{"messages":[{"role":`, "line 1: not a JSON object"},
		{"other CSV", "a,b\n1,2\n", `"Request tokens"`},
		{"CSV without numbers", "Timestamp,Request tokens\nx,2\n", `line 2: time "x"`},
		{"short CSV", "Timestamp,Model,Request tokens\n1,2\n", "line 2 has 2 columns"},
		{"a time that can't be", `{"input_length":1,"timestamp":-5}`, "a time of -5 ms"},
		{"another history", "\x28\xb5\x2f\xfd12345", "history"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := read(bufio.NewReader(strings.NewReader(tt.text))); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q in it", err, tt.want)
			}
		})
	}
}

// recorded writes a history and reads it as a trace.
func recorded(t *testing.T, ops ...history.Op) *Trace {
	t.Helper()
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	w, err := history.Create(path, history.Header{Workload: json.RawMessage(`{"kind":"agent"}`)})
	if err != nil {
		t.Fatal(err)
	}
	for i := range ops {
		op := &ops[i]
		op.ID = int64(i + 1)
		if op.Phase == "" {
			op.Phase = history.Main
		}
		if op.Request == nil {
			op.Request = json.RawMessage(fmt.Sprintf(`{"stream":true,"messages":[{"role":"user","content":"op %d"}], "x":[1, 2]}`, i+1))
		}
		if err := w.Op(op); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	trace, err := Read(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	return trace
}

// turns plays all sessions and returns their turns.
func turns(t *testing.T, w *Workload) [][]workload.Turn {
	t.Helper()
	var out [][]workload.Turn
	for i := range w.Sessions() {
		s := w.Session(i, false)
		var row []workload.Turn
		for {
			turn, more := s.Next(nil)
			if !more {
				break
			}
			row = append(row, turn)
		}
		out = append(out, row)
	}
	return out
}

func TestHistory(t *testing.T) {
	const s = time.Second
	trace := recorded(t,
		history.Op{Session: 4, Sent: 10 * s, LastByte: 12 * s, Outcome: history.OK, Expect: history.Expect{Answer: "x"}},
		history.Op{Session: 4, Sent: 11 * s, LastByte: 20 * s, Outcome: history.OK}, // in parallel to the first
		history.Op{Session: 4, Sent: 13 * s, LastByte: 14 * s, Outcome: history.Cancelled, Chunks: []history.Chunk{{Data: []byte("a")}, {Data: []byte("b")}}},
		history.Op{Session: 5, Sent: 12 * s, LastByte: 15 * s, Outcome: history.Cancelled},
		history.Op{Phase: history.Control, Session: 4, Sent: 1 * s, LastByte: 2 * s, Outcome: history.OK},
		history.Op{Session: 6, Sent: 14 * s, LastByte: 15 * s, Outcome: history.OK, Request: json.RawMessage(`{"unreadable":"x"}`)},
	)
	if trace.Left != 2 || len(trace.Requests) != 4 || trace.HasModel() {
		t.Fatalf("%d requests, %d left out", len(trace.Requests), trace.Left)
	}
	if peak, mean := trace.Concurrency(); peak != 3 || mean != 1.5 {
		t.Errorf("concurrency %d, %g", peak, mean)
	}
	w, err := trace.Workload(Options{Speed: 2})
	if err != nil {
		t.Fatal(err)
	}
	got := turns(t, w)
	type short struct {
		Body   string
		At     time.Duration
		Chunks int
		After  time.Duration
	}
	var rows [][]short
	for _, row := range got {
		var r []short
		for _, turn := range row {
			r = append(r, short{string(turn.Body), turn.At, turn.CancelChunks, turn.CancelAfter})
		}
		rows = append(rows, r)
	}
	raw := func(op int) string {
		return fmt.Sprintf(`{"stream":true,"messages":[{"role":"user","content":"op %d"}], "x":[1, 2]}`, op)
	}
	want := [][]short{
		{{raw(1), 1, 0, 0}, {raw(3), 1500 * time.Millisecond, 2, 0}},
		{{raw(2), 500 * time.Millisecond, 0, 0}},
		{{raw(4), 1 * s, 0, 3 * s}},
	}
	if d := cmp.Diff(want, rows); d != "" {
		t.Errorf("rows (-want +got):\n%s", d)
	}
	if got[0][0].Expect.Answer != "x" {
		t.Error("what was expected is lost")
	}
}

func TestOnly(t *testing.T) {
	all := func() *Trace {
		return recorded(t,
			history.Op{Session: 1, Sent: 5, Outcome: history.OK}, history.Op{Session: 2, Sent: 6, Outcome: history.OK},
			history.Op{Session: 1, Sent: 7, Outcome: history.OK}, history.Op{Session: 3, Sent: 8, Outcome: history.OK})
	}
	tests := []struct {
		list string
		want []int64
		err  string
	}{
		{"", []int64{1, 2, 3, 4}, ""},
		{"2", []int64{2}, ""},
		{"s1, 4", []int64{1, 3, 4}, ""},
		{"2-3", []int64{2, 3}, ""},
		{"9", nil, "none of the 4"},
		{"3-2", nil, "want op numbers"},
		{"x", nil, "want op numbers"},
	}
	for _, tt := range tests {
		t.Run(tt.list, func(t *testing.T) {
			trace := all()
			err := trace.Only(tt.list)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Errorf("error %v, want %q in it", err, tt.err)
				}
				return
			}
			var got []int64
			for _, r := range trace.Requests {
				got = append(got, r.Op)
			}
			if d := cmp.Diff(tt.want, got); d != "" || err != nil || trace.Requests[0].At != 0 {
				t.Errorf("%s, %v, first at %v", d, err, trace.Requests[0].At)
			}
		})
	}
}

// TestShape takes lengths, times and shared prefixes from traces without text.
func TestShape(t *testing.T) {
	tests := []struct {
		name, text string
		rounds     []int
		lines      []int
		at         [][]time.Duration
	}{
		{
			"Mooncake", `{"timestamp":1000,"input_length":400,"output_length":5,"hash_ids":[1,2]}` + "\n" +
				`{"timestamp":1500,"input_length":100,"output_length":5,"hash_ids":[9]}` + "\n" +
				`{"timestamp":3000,"input_length":700,"output_length":5,"hash_ids":[1,2,3]}`,
			[]int{2, 1},
			[]int{20, 5},
			[][]time.Duration{{1, 2 * time.Second}, {500 * time.Millisecond}},
		},
		{
			"BurstGPT", "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,120,18,138,Conversation log\n45.5,GPT-4,60,2,62,API log\n",
			[]int{1, 1},
			[]int{6, 3},
			[][]time.Duration{{1}, {40500 * time.Millisecond}},
		},
		{
			"BurstGPT with sessions, a failed request, and a short one",
			"Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n" +
				"5.0,a,1.2,ChatGPT,472,18,490,Conversation log\n6,b,0.3,GPT-4,7,0,7,API log\n7,a,2.5,ChatGPT,600,30,630,Conversation log\n",
			[]int{2, 1},
			[]int{23, 2},
			[][]time.Duration{{1, 2 * time.Second}, {time.Second}},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			trace := readText(t, tt.text)
			if !trace.Shape() || !trace.Timed {
				t.Fatalf("trace %+v", trace)
			}
			w, err := trace.Workload(Options{Plan: workload.Plan{Kind: "agent", Seed: 1}})
			if err != nil {
				t.Fatal(err)
			}
			var rounds, lines []int
			var at [][]time.Duration
			for i := range w.Sessions() {
				s := w.Session(i, false)
				var reply *openai.Reply
				var times []time.Duration
				n := 0
				for {
					turn, more := s.Next(reply)
					if !more {
						break
					}
					if n == 0 {
						lines = append(lines, strings.Count(string(turn.Request.Messages[0].Content), "\n"))
					}
					if turn.Expect.Call == nil {
						t.Error("a turn without a known answer")
					}
					n++
					times = append(times, turn.At)
					reply = workload.RightReply(turn)
				}
				rounds, at = append(rounds, n), append(at, times)
			}
			if d := cmp.Diff(tt.rounds, rounds); d != "" {
				t.Errorf("rounds: %s", d)
			}
			if d := cmp.Diff(tt.at, at); d != "" {
				t.Errorf("times: %s", d)
			}
			if lines[0]-lines[1] != tt.lines[0]-tt.lines[1] {
				t.Errorf("prompts of %v lines; the contexts should have %v", lines, tt.lines)
			}
		})
	}
}

func TestFidelity(t *testing.T) {
	const ms = time.Millisecond
	trace := recorded(t, history.Op{Session: 1, Sent: 0, LastByte: 100 * ms, Outcome: history.OK}, history.Op{Session: 2, Sent: 50 * ms, LastByte: 100 * ms, Outcome: history.Cancelled})
	path := filepath.Join(t.TempDir(), "h")
	w, err := history.Create(path, history.Header{})
	if err != nil {
		t.Fatal(err)
	}
	for i, op := range []history.Op{
		{Planned: 0, Sent: 2 * ms, LastByte: 22 * ms, Outcome: history.OK},
		{Planned: 50 * ms, Sent: 60 * ms, LastByte: 62 * ms, Outcome: history.Cancelled},
	} {
		op.ID, op.Phase, op.Request = int64(i+1), history.Main, json.RawMessage(`{}`)
		if err := w.Op(&op); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := history.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	got, err := trace.Fidelity(r)
	if err != nil {
		t.Fatal(err)
	}
	want := Fidelity{Requests: 2, Sent: 2, Timed: true, LateMS: [3]float64{2, 2, 10}, HungUp: 1, HungUpNow: 1, Peak: 2, PeakNow: 1, Mean: 1.5, MeanNow: 22.0 / 60}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func FuzzRead(f *testing.F) {
	for _, s := range []string{
		`{"messages":[{"role":"user","content":"a"}],"timestamp":3}`, `[{"conversations":[{"from":"human","value":"a"}]}]`,
		`{"input_length":5,"hash_ids":[1],"timestamp":1}`, "Timestamp,Request tokens\n1,2\n",
		`{"resourceSpans":[{"scopeSpans":[{"spans":[{"startTimeUnixNano":"1","attributes":[{"key":"gen_ai.input.messages","value":{"stringValue":"[{\"role\":\"user\",\"parts\":[]}]"}}]}]}]}]}`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		trace, err := read(bufio.NewReader(bytes.NewReader(b)))
		if err != nil {
			return
		}
		for _, r := range trace.Requests {
			if r.Body != nil && !json.Valid(r.Body) {
				t.Errorf("body %q", r.Body)
			}
			if r.At < 0 {
				t.Errorf("at %v", r.At)
			}
		}
		if len(trace.Requests) < 50 && !trace.Shape() && len(trace.Requests) > 0 {
			w, err := trace.Workload(Options{})
			if err != nil {
				t.Fatal(err)
			}
			n := 0
			for _, row := range turns(t, w) {
				n += len(row)
			}
			if n != len(trace.Requests) {
				t.Errorf("%d turns of %d requests", n, len(trace.Requests))
			}
		}
	})
}

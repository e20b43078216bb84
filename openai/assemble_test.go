package openai_test

import (
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/openai"
)

// delta is a chunk of choice 0.
func delta(fields string) string { return `{"choices":[{"index":0,"delta":{` + fields + `}}]}` }

func call(fields string) string { return delta(`"tool_calls":[{` + fields + `}]`) }

func assemble(chunks ...string) *openai.Reply {
	var a openai.Assembler
	for _, c := range chunks {
		a.Add([]byte(c))
	}
	return a.Reply()
}

func function(id, name, arguments string) openai.ToolCall {
	return openai.ToolCall{ID: id, Function: openai.FunctionCall{Name: name, Arguments: arguments}}
}

func TestAssembler(t *testing.T) {
	const head = `"index":0,"id":"a","function":{"name":"get"`
	finish := `{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`
	for _, test := range []struct {
		name   string
		chunks []string
		want   openai.Reply
	}{
		{"nothing", nil, openai.Reply{}},
		{
			"chat",
			[]string{
				`{"id":"x","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":null},"finish_reason":null}],"usage":null,"error":null}`,
				delta(`"content":"Hel"`), delta(`"content":"lo\n\u00e9\ud83d\ude00"`),
				`{"id":"x","model":"m","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`,
				`{"id":"x","model":"m","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":{"cached_tokens":4}}}`,
				"[DONE]",
			},
			openai.Reply{
				ID: "x", Model: "m", Content: "Hello\né😀", FinishReason: "stop", Done: true,
				Usage: &openai.Usage{PromptTokens: 7, CompletionTokens: 2, TotalTokens: 9, CachedTokens: 4},
			},
		},
		{"text completion", []string{`{"choices":[{"text":"a","index":0}]}`, `{"choices":[{"text":"b","index":0,"finish_reason":"length"}]}`}, openai.Reply{Content: "ab", FinishReason: "length"}},
		{"reasoning", []string{delta(`"reasoning_content":"hm"`), delta(`"reasoning":"m","content":"x"`)}, openai.Reply{Reasoning: "hmm", Content: "x"}},
		{"content in parts", []string{delta(`"content":[{"type":"text","text":"a"},{"text":"b","type":"text"}]`)}, openai.Reply{Content: "ab"}},
		{"spaces", []string{" \n{ \"choices\" : [ { \"delta\" : { \"content\" : \"a\" } , \"index\" : 0 } ] }\r\n", " [DONE] "}, openai.Reply{Content: "a", Done: true}},
		{
			"usage in every chunk",
			[]string{
				`{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":7,"completion_tokens":1,"total_tokens":8}}`,
				`{"choices":[{"index":0,"delta":{"content":"b"}}],"usage":{"prompt_tokens":7,"completion_tokens":2,"total_tokens":9,"prompt_tokens_details":null}}`,
			},
			openai.Reply{Content: "ab", Usage: &openai.Usage{PromptTokens: 7, CompletionTokens: 2, TotalTokens: 9, CachedTokens: -1}},
		},
		{
			"cached tokens by tier",
			[]string{
				`{"choices":[{"index":0,"delta":{"content":"a"}}],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":6,"cached_tokens_details":{"device":2,"host":4}}}}`,
			},
			openai.Reply{Content: "a", Usage: &openai.Usage{PromptTokens: 7, CachedTokens: 6, ByTier: &openai.CachedByTier{Device: 2, Host: 4}}},
		},
		{
			"cached tokens by tier as SGLang says it, before or after the usage",
			[]string{
				`{"choices":[],"sglext":{"cached_tokens_details":{"device":1,"host":2,"storage":3,"storage_backend":"file"}}}`,
				`{"choices":[{"index":0,"delta":{"content":"a"}}],"sglext":null,"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":6,"cached_tokens_details":null}}}`,
			},
			openai.Reply{Content: "a", Usage: &openai.Usage{PromptTokens: 7, CachedTokens: 6, ByTier: &openai.CachedByTier{Device: 1, Host: 2, Storage: 3}}},
		},
		{
			"details of cached tokens that say nothing of tiers",
			[]string{`{"choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":6,"cached_tokens_details":{"text_tokens":6}}}}`},
			openai.Reply{Usage: &openai.Usage{PromptTokens: 7, CachedTokens: 6}},
		},
		{
			"usage of wrong types",
			[]string{`{"choices":[],"usage":{"prompt_tokens":-7,"completion_tokens":"2","total_tokens":9.5}}`},
			openai.Reply{Usage: &openai.Usage{CachedTokens: -1}, Anomalies: []string{openai.WrongType}},
		},
		{
			"logprobs",
			[]string{`{"choices":[{"index":0,"delta":{"content":"a"},"logprobs":{"content":[{"token":"a","logprob":-0.5,"bytes":[97],"top_logprobs":[{"token":"a","logprob":-0.5},{"token":"b","logprob":-1e1}]}]}}]}`},
			openai.Reply{Content: "a", Logprobs: []openai.TokenLogprob{{Token: "a", Logprob: -0.5, Top: []openai.TokenLogprob{{Token: "a", Logprob: -0.5}, {Token: "b", Logprob: -10}}}}},
		},
		{
			"logprobs of a text completion",
			[]string{`{"choices":[{"index":0,"text":"ab","logprobs":{"text_offset":[0,1],"token_logprobs":[null,-2],"tokens":["a","b"],"top_logprobs":[null,{"b":-2,"c":-3}]}}]}`},
			openai.Reply{Content: "ab", Logprobs: []openai.TokenLogprob{{Token: "a"}, {Token: "b", Logprob: -2, Top: []openai.TokenLogprob{{Token: "b", Logprob: -2}, {Token: "c", Logprob: -3}}}}},
		},
		{
			"tool call in pieces",
			[]string{call(head + `,"arguments":""},"type":"function"`), call(`"index":0,"function":{"name":"_it","arguments":"{\"k\""}`), call(`"index":0,"function":{"arguments":":1}"}`)},
			openai.Reply{ToolCalls: []openai.ToolCall{{ID: "a", Type: "function", Function: openai.FunctionCall{Name: "get_it", Arguments: `{"k":1}`}}}},
		},
		{
			"two tool calls in one chunk",
			[]string{delta(`"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":"{}"}},{"index":1,"id":"b","function":{"name":"g","arguments":"[]"}}]`)},
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "f", "{}"), function("b", "g", "[]")}},
		},
		{
			"tool call index with a gap",
			[]string{call(`"index":0,"id":"a","function":{"name":"f"}`), call(`"index":2,"id":"b","function":{"name":"g"}`)},
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "f", ""), function("b", "g", "")}, Anomalies: []string{openai.ToolIndexGap}},
		},
		{
			"tool call indexes out of order",
			[]string{
				call(`"index":1,"id":"b","function":{"name":"g","arguments":"1"}`), call(`"index":0,"id":"a","function":{"name":"f","arguments":"2"}`),
				call(`"index":1,"function":{"arguments":"3"}`), call(`"index":0,"function":{"arguments":"4"}`),
			},
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "f", "24"), function("b", "g", "13")}, Anomalies: []string{openai.ToolIndexGap, openai.ToolIndexBack}},
		},
		{
			"tool calls without index",
			[]string{call(`"id":"a","function":{"name":"f","arguments":"{"}`), call(`"function":{"arguments":"}"}`), call(`"id":"b","function":{"name":"g","arguments":"{}"}`), call(`"id":"a","function":{"arguments":" "}`)},
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "f", "{} "), function("b", "g", "{}")}, Anomalies: []string{openai.ToolIndexMissing, openai.ToolIndexBack}},
		},
		{
			"tool calls without index or id",
			[]string{call(`"function":{"name":"f","arguments":"{"}`), call(`"function":{"arguments":"}"}`), call(`"function":{"name":"g","arguments":"{}"}`)},
			openai.Reply{ToolCalls: []openai.ToolCall{function("", "f", "{}"), function("", "g", "{}")}, Anomalies: []string{openai.ToolIndexMissing, openai.ToolIDMissing}},
		},
		{
			"a tool call's head in every delta, as llama-cpp-python sends it",
			[]string{call(head + `,"arguments":"{"}`), call(head + `,"arguments":"}"}`)},
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "get", "{}")}, Anomalies: []string{openai.ToolNameRepeated}},
		},
		{
			"a tool call's id changes",
			[]string{call(head + `,"arguments":"{"}`), call(`"index":0,"id":"b","function":{"arguments":"}"}`)},
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "get", "{}")}, Anomalies: []string{openai.ToolIDChanged}},
		},
		{
			"arguments as an object",
			[]string{call(head + `,"arguments": {"k": [1, "\u00e9"]} }`)},
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "get", `{"k": [1, "\u00e9"]}`)}, Anomalies: []string{openai.ToolArgumentsObject}},
		},
		{"error in mid-stream", []string{delta(`"content":"a"`), `{"error":{"message":"out of memory","type":"server_error","code":500,"param":null}}`}, openai.Reply{Content: "a", Err: &openai.APIError{Message: "out of memory", Type: "server_error", Code: "500"}}},
		{"error as text", []string{`{"error":"overloaded","error_type":"busy"}`}, openai.Reply{Err: &openai.APIError{Message: "overloaded", Type: "busy"}}},
		{"error without its own object", []string{`{"object":"error","message":"no","type":"Bad","code":400}`}, openai.Reply{Err: &openai.APIError{Message: "no", Type: "Bad", Code: "400"}}},
		{"text after an error", []string{`{"error":"a"}`, `{"error":"b"}`, delta(`"content":"x"`)}, openai.Reply{Content: "x", Err: &openai.APIError{Message: "a"}, Anomalies: []string{openai.AfterError}}},
		{"another choice", []string{`{"choices":[{"delta":{"content":"x"},"finish_reason":"stop","index":1},{"index":0,"delta":{"content":"a"}}]}`}, openai.Reply{Content: "a", Anomalies: []string{openai.OtherChoice}}},
		{"after done", []string{"[DONE]", delta(`"content":"x"`), "[DONE]"}, openai.Reply{Content: "x", Done: true, Anomalies: []string{openai.AfterDone}}},
		{"after finish", []string{finish, delta(`"content":""`), finish, delta(`"content":"x"`)}, openai.Reply{Content: "x", FinishReason: "stop", Anomalies: []string{openai.AfterFinish}}},
		{"finish reason changes", []string{finish, `{"choices":[{"index":0,"delta":{},"finish_reason":"length"}]}`}, openai.Reply{FinishReason: "stop", Anomalies: []string{openai.FinishChanged}}},
		{"id and model change", []string{`{"id":"x","model":"m","choices":[]}`, `{"id":"y","model":"n","choices":[]}`}, openai.Reply{ID: "x", Model: "m", Anomalies: []string{openai.IDChanged, openai.ModelChanged}}},
		{"role changes", []string{delta(`"role":"user","content":"a"`)}, openai.Reply{Content: "a", Anomalies: []string{openai.RoleChanged}}},
		{"cut JSON", []string{delta(`"content":"a"`), `{"choices":[{"index":0,"delta":{"content":"b"`, delta(`"content":"c"`)}, openai.Reply{Content: "ac", Anomalies: []string{openai.InvalidJSON}}},
		{"something after the JSON", []string{delta(`"content":"a"`) + "}"}, openai.Reply{Anomalies: []string{openai.InvalidJSON}}},
		{"two values", []string{delta(`"content":"a"`) + delta(`"content":"a"`)}, openai.Reply{Anomalies: []string{openai.InvalidJSON}}},
		{"not JSON", []string{"", "\x00", "oops"}, openai.Reply{Anomalies: []string{openai.InvalidJSON}}},
		{"not an object", []string{`[1]`}, openai.Reply{Anomalies: []string{openai.WrongType, openai.UnknownChunk}}},
		{"wrong types", []string{`{"id":1,"choices":[{"index":0,"delta":{"content":5,"tool_calls":"x"},"finish_reason":7}, "x"]}`}, openai.Reply{Anomalies: []string{openai.WrongType}}},
		{"a ping", []string{`{"type":"ping"}`}, openai.Reply{Anomalies: []string{openai.UnknownChunk}}},
		{"bytes that aren't UTF-8", []string{delta("\"content\":\"\xff\xc3\"")}, openai.Reply{Content: "\xff\xc3"}},
		{"half a surrogate pair", []string{delta(`"content":"a\ud83db\ude00\ud83d\u0041"`)}, openai.Reply{Content: "a\uFFFDb\uFFFD\uFFFDA"}},
		{"deep nesting", []string{strings.Repeat("[", 1<<20), strings.Repeat(`{"a":`, 1<<20)}, openai.Reply{Anomalies: []string{openai.InvalidJSON}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(&test.want, assemble(test.chunks...)); diff != "" {
				t.Errorf("reply (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTooManyToolCalls(t *testing.T) {
	var a openai.Assembler
	for i := range 2000 {
		a.Add([]byte(call(`"id":"` + strings.Repeat("x", i+1) + `"`)))
	}
	r := a.Reply()
	if len(r.ToolCalls) != 1024 || !slices.Contains(r.Anomalies, openai.TooManyToolCalls) {
		t.Errorf("%d calls, anomalies %q", len(r.ToolCalls), r.Anomalies)
	}
}

// A reply is the caller's: neither more chunks nor another stream change it.
func TestReplyIsTheCallers(t *testing.T) {
	first := []string{
		`{"id":"x","choices":[{"index":0,"delta":{"content":"abc","reasoning":"def"},"logprobs":{"content":[{"token":"a","logprob":-1}]}}],"usage":{"prompt_tokens":1}}`,
		call(`"index":1,"id":"a","function":{"name":"f","arguments":"{}"}`),
	}
	want := assemble(first...)
	var a openai.Assembler
	for _, c := range first {
		a.Add([]byte(c))
	}
	got := a.Reply()
	more := []string{
		delta(`"content":"xyz","reasoning":"uvw","role":"user"`), "no JSON",
		`{"choices":[{"index":0,"delta":{},"logprobs":{"content":[{"token":"b","logprob":-2}]}}],"usage":{"prompt_tokens":2}}`,
		call(`"index":0,"id":"b","function":{"name":"g","arguments":"[]"}`),
	}
	for _, c := range more {
		a.Add([]byte(c))
	}
	a.Reset()
	for _, c := range more {
		a.Add([]byte(c))
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the first reply changed (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(assemble(more...), a.Reply()); diff != "" {
		t.Errorf("an assembler used again differs from a new one (-new +again):\n%s", diff)
	}
}

// Add leaves the data it is given alone.
func TestAddKeepsData(t *testing.T) {
	var a openai.Assembler
	chunk := delta(`"content":"abcdef","role":"assistant"`)
	for range 3 {
		data := []byte(chunk)
		a.Add(data)
		a.Add([]byte(delta(`"content":"xy\nz"`)))
		if string(data) != chunk {
			t.Fatalf("data is now %s", data)
		}
	}
}

// What is put together doesn't depend on how the text was cut into deltas.
func TestAnyCutOfTheText(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	const text = `He said "no\yes" é 😀` + "\n\t\x01{}[],:"
	for range 200 {
		var chunks, callChunks []string
		for rest := []rune(text); len(rest) > 0; {
			n := 1 + random.IntN(len(rest))
			chunks = append(chunks, delta(`"content":`+quote(string(rest[:n]))))
			callChunks = append(callChunks, call(`"index":0,"id":"a","function":{"arguments":`+quote(string(rest[:n]))+`}`))
			rest = rest[n:]
		}
		if got := assemble(chunks...).Content; got != text {
			t.Fatalf("content %q, want %q, from %q", got, text, chunks)
		}
		if got := assemble(callChunks...).ToolCalls[0].Function.Arguments; got != text {
			t.Fatalf("arguments %q, want %q, from %q", got, text, callChunks)
		}
	}
}

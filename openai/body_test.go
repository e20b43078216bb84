package openai_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/openai"
)

func quote(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b)
}

func TestReadBody(t *testing.T) {
	long := strings.Repeat("x", 5000)
	for _, test := range []struct {
		name, body string
		want       openai.Reply
	}{
		{
			"chat",
			`{"id":"x","object":"chat.completion","model":"m","choices":[{"index":0,"message":{"role":"assistant","content":"hi","reasoning_content":"r","tool_calls":[]},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":2,"total_tokens":3}}`,
			openai.Reply{ID: "x", Model: "m", Content: "hi", Reasoning: "r", FinishReason: "stop", Usage: &openai.Usage{PromptTokens: 1, CompletionTokens: 2, TotalTokens: 3, CachedTokens: -1}},
		},
		{
			"tool calls have no index",
			`{"choices":[{"index":0,"message":{"content":null,"tool_calls":[{"id":"a","function":{"name":"f","arguments":"{}"}},{"id":"b","function":{"name":"g","arguments":"{}"}}]}}]}`,
			openai.Reply{ToolCalls: []openai.ToolCall{function("a", "f", "{}"), function("b", "g", "{}")}},
		},
		{"text completion", `{"choices":[{"index":0,"text":"hi","finish_reason":"length"}]}`, openai.Reply{Content: "hi", FinishReason: "length"}},
		{"error object", `{"error":{"message":"no","type":"invalid_request_error","param":null,"code":"bad"}}`, openai.Reply{Err: &openai.APIError{Message: "no", Type: "invalid_request_error", Code: "bad"}}},
		{"error at the top", `{"object":"error","message":"no","type":"BadRequestError","param":null,"code":400}`, openai.Reply{Err: &openai.APIError{Message: "no", Type: "BadRequestError", Code: "400"}}},
		{"FastAPI", `{"detail":"Not Found"}`, openai.Reply{Err: &openai.APIError{Message: "Not Found"}}},
		{"FastAPI's list", `{"detail": [{"loc":["body","model"],"msg":"field required"}]}`, openai.Reply{Err: &openai.APIError{Message: `[{"loc":["body","model"],"msg":"field required"}]`}}},
		{"plain text", "Internal Server Error\n", openai.Reply{Err: &openai.APIError{Message: "Internal Server Error"}, Anomalies: []string{openai.InvalidJSON}}},
		{"nothing", "", openai.Reply{Err: &openai.APIError{Message: "the body is empty"}, Anomalies: []string{openai.InvalidJSON}}},
		{"long text", long, openai.Reply{Err: &openai.APIError{Message: long[:4096]}, Anomalies: []string{openai.InvalidJSON}}},
		{"long error", `{"error":"` + long + `"}`, openai.Reply{Err: &openai.APIError{Message: long[:4096]}}},
		{"cut in a character", strings.Repeat("x", 4095) + "é", openai.Reply{Err: &openai.APIError{Message: long[:4095] + "\uFFFD"}, Anomalies: []string{openai.InvalidJSON}}},
		{"something else", `{"ok":true}`, openai.Reply{Err: &openai.APIError{Message: `{"ok":true}`}, Anomalies: []string{openai.UnknownChunk}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			if diff := cmp.Diff(&test.want, openai.ReadBody([]byte(test.body))); diff != "" {
				t.Errorf("reply (-want +got):\n%s", diff)
			}
		})
	}
}

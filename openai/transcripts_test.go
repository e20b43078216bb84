package openai_test

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/openai"
)

// The transcripts are what real servers put on their sockets, byte for byte.
// record.py makes them. What is expected here was read off the files by eye.
const transcripts = "testdata/transcripts"

// heard is what a transcript's body says.
type heard struct {
	status int
	events []event // nil when it isn't a stream
	reply  *openai.Reply
	broken string // why the body ended before its end
}

// hear reads a transcript from source as a client reads its socket.
func hear(t *testing.T, source io.Reader) heard {
	t.Helper()
	response, err := http.ReadResponse(bufio.NewReader(source), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	h := heard{status: response.StatusCode}
	if !strings.Contains(response.Header.Get("Content-Type"), "text/event-stream") {
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatal(err)
		}
		h.reply = openai.ReadBody(body)
		return h
	}
	var a openai.Assembler
	h.events = []event{}
	for r := openai.NewReader(response.Body, zero, 0); ; {
		e, err := r.Next()
		if err != nil {
			if !errors.Is(err, io.EOF) {
				h.broken = err.Error()
			}
			h.reply = a.Reply()
			return h
		}
		h.events = append(h.events, event{e.Name, string(e.Data)})
		a.Add(e.Data)
	}
}

// However the network cuts a transcript, it says the same.
func TestTranscriptsCutAnywhere(t *testing.T) {
	files, err := filepath.Glob(filepath.Join(transcripts, "*.http"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no transcripts in %s (%v)", transcripts, err)
	}
	random := rand.New(rand.NewPCG(3, 4))
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			raw, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			want := hear(t, bytes.NewReader(raw))
			same := func(got heard, how string) {
				t.Helper()
				if diff := cmp.Diff(want, got, cmp.AllowUnexported(heard{})); diff != "" {
					t.Fatalf("%s (-whole +cut):\n%s", how, diff)
				}
			}
			for _, most := range []int{1, 2, 3, 50, 300} {
				same(hear(t, &pieces{raw, func() int { return 1 + random.IntN(most) }}), "cut at random")
			}
			// In two: everywhere in small ones, here and there in large ones.
			for cut := 1; cut < len(raw); cut += 1 + random.IntN(1+len(raw)/30) {
				same(hear(t, io.MultiReader(bytes.NewReader(raw[:cut]), bytes.NewReader(raw[cut:]))), "cut in two")
			}
		})
	}
}

func TestTranscripts(t *testing.T) {
	const sentence = "The capital of France is devenue\nThe capital of France is"
	const glyphs = "Crème 日本語 👩‍👩‍👧 🇳🇴 𝒳"
	usage := func(prompt, completion, cached int) *openai.Usage {
		return &openai.Usage{PromptTokens: prompt, CompletionTokens: completion, TotalTokens: prompt + completion, CachedTokens: cached}
	}
	weather := []openai.ToolCall{{Type: "function", Function: openai.FunctionCall{Name: "get_weather", Arguments: `{"city": "Paris"}`}}}
	for _, test := range []struct {
		name   string
		events int // 0 when it isn't a stream
		want   openai.Reply
	}{
		{"vllm-chat", 0, openai.Reply{Content: sentence, FinishReason: "length", Usage: usage(14, 12, -1)}},
		{"vllm-chat-stream", 14, openai.Reply{Content: sentence, FinishReason: "length", Done: true}},
		{"vllm-chat-stream-usage", 15, openai.Reply{Content: sentence, FinishReason: "length", Usage: usage(14, 12, -1), Done: true}},
		{"vllm-chat-stream-stop", 5, openai.Reply{Content: "The capital of ", FinishReason: "stop", Done: true}},
		{"vllm-chat-stream-one-token", 3, openai.Reply{Content: "The", FinishReason: "length", Done: true}},
		{"vllm-chat-stream-n2", 11, openai.Reply{Content: "The 'significance", FinishReason: "length", Done: true, Anomalies: []string{openai.OtherChoice}}},
		{"vllm-close", 5, openai.Reply{Content: "The capital of", FinishReason: "length", Done: true}},
		{"vllm-text", 0, openai.Reply{Content: " France. The The The The The The", FinishReason: "length", Usage: usage(5, 8, -1)}},
		{"vllm-text-stream", 10, openai.Reply{Content: " France. The The The The The The", FinishReason: "length", Usage: usage(5, 8, -1), Done: true}},
		{"vllm-tool", 0, openai.Reply{ToolCalls: weather, FinishReason: "tool_calls", Usage: usage(356, 30, -1)}},
		{"vllm-tool-stream", 10, openai.Reply{ToolCalls: weather, FinishReason: "tool_calls", Done: true}},
		{"vllm-tool-named-stream", 10, openai.Reply{ToolCalls: weather, FinishReason: "stop", Done: true}},
		{"vllm-unicode-stream", 22, openai.Reply{Content: glyphs, FinishReason: "stop", Done: true}},
		{"vllm-unicode", 0, openai.Reply{Content: glyphs, FinishReason: "stop", Usage: usage(14, 48, -1)}},
		{"vllm-think-reasoning", 0, openai.Reply{Reasoning: "\nIt is Paris.\n", Content: "\n\nParis", FinishReason: "stop", Usage: usage(14, 14, 0)}},
		{"vllm-think-reasoning-stream", 14, openai.Reply{Reasoning: "\nIt is Paris.\n", Content: "\n\nParis", FinishReason: "stop", Done: true}},
		{"vllm-think-chat-cached-again", 5, openai.Reply{Reasoning: "one two", FinishReason: "length", Usage: usage(330, 2, 256), Done: true}},
		{"vllm-error-unknown-model", 0, openai.Reply{Err: &openai.APIError{Message: "The model `no-such-model` does not exist. Valid aliases: gemma-3-270m.", Type: "NotFoundError", Code: "404"}}},
		{"vllm-not-found", 0, openai.Reply{Err: &openai.APIError{Message: "Not Found"}}},
		{"llama-chat-stream", 15, openai.Reply{Content: sentence, FinishReason: "length", Done: true}},
		{"llama-chat-stream-usage", 16, openai.Reply{Content: sentence, FinishReason: "length", Usage: usage(14, 12, 9), Done: true}},
		{"llama-tool", 0, openai.Reply{ToolCalls: slices.Concat(weather, weather), FinishReason: "length", Usage: usage(356, 60, 1)}},
		{"llama-tool-stream", 17, openai.Reply{ToolCalls: slices.Concat(weather, weather), FinishReason: "length", Done: true}},
		{"llama-tool-end-stream", 10, openai.Reply{ToolCalls: weather, FinishReason: "tool_calls", Done: true}},
		{"llama-unicode-stream", 22, openai.Reply{Content: glyphs, FinishReason: "stop", Done: true}},
		{"llama-unicode-stream-cut", 2, openai.Reply{FinishReason: "length", Done: true}},
		{"llama-reasoning-stream", 11, openai.Reply{Reasoning: "It is Paris.\n", Content: "Paris", FinishReason: "stop", Done: true}},
		{"llama-error-too-long-stream", 0, openai.Reply{Err: &openai.APIError{Message: "request (5010 tokens) exceeds the available context size (1024 tokens), try increasing it", Type: "exceed_context_size_error", Code: "400"}}},
		{"llama-cpp-python-text", 0, openai.Reply{Content: " the capital of France. It is located", FinishReason: "length", Usage: usage(6, 8, -1)}},
		{"llama-cpp-python-text-stream", 10, openai.Reply{Content: " the capital of France. It is located", FinishReason: "length", Done: true}},
		{"llama-cpp-python-unicode-stream", 22, openai.Reply{Content: glyphs, FinishReason: "stop", Done: true}},
		{"llama-cpp-python-unicode-stream-cut", 4, openai.Reply{Content: "\U0001242B", FinishReason: "length", Done: true}},
		{"llama-cpp-python-interrupted", 28, openai.Reply{Content: strings.Repeat("one two three four ", 6) + "one two", Done: true}},
		{"llama-cpp-python-error-too-long-stream", 0, openai.Reply{}},
		{"llama-cpp-python-error-malformed", 0, openai.Reply{Err: &openai.APIError{Message: "Internal Server Error"}, Anomalies: []string{openai.InvalidJSON}}},
		{
			"llama-cpp-python-error-too-long", 0,
			openai.Reply{Err: &openai.APIError{
				Message: "This model's maximum context length is 1024 tokens. However, you requested 5036 tokens (5024 in the messages, 12 in the completion). Please reduce the length of the messages or completion.",
				Type:    "invalid_request_error", Code: "context_length_exceeded",
			}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			raw, err := os.ReadFile(filepath.Join(transcripts, test.name+".http"))
			if err != nil {
				t.Fatal(err)
			}
			got := hear(t, bytes.NewReader(raw))
			if broken := test.name == "llama-cpp-python-interrupted"; (got.broken == io.ErrUnexpectedEOF.Error()) != broken {
				t.Errorf("broken: %q", got.broken)
			}
			if len(got.events) != test.events {
				t.Errorf("%d events, want %d", len(got.events), test.events)
			}
			if test.want.FinishReason != "" && (got.reply.ID == "" || got.reply.Model != "gemma-3-270m") {
				t.Errorf("id %q, model %q", got.reply.ID, got.reply.Model)
			}
			got.reply.ID, got.reply.Model = "", "" // the id is another one in each recording
			for i := range got.reply.ToolCalls {
				if got.reply.ToolCalls[i].ID == "" {
					t.Errorf("tool call %d has no id", i)
				}
				got.reply.ToolCalls[i].ID = ""
			}
			if diff := cmp.Diff(&test.want, got.reply); diff != "" {
				t.Errorf("reply (-want +got):\n%s", diff)
			}
		})
	}
}

// A server's log-probabilities come one for each token of the text.
func TestTranscriptsLogprobs(t *testing.T) {
	for name, want := range map[string][]openai.TokenLogprob{
		"vllm-text-stream-logprobs": {
			{Token: " France", Logprob: -1.3538219928741455, Top: []openai.TokenLogprob{{Token: " France", Logprob: -1.3538219928741455}, {Token: " of", Logprob: -2.4788219928741455}}},
			{Token: ".", Logprob: -1.766520619392395, Top: []openai.TokenLogprob{{Token: ".", Logprob: -1.766520619392395}, {Token: " of", Logprob: -1.891520619392395}}},
			{Token: " The", Logprob: -1.8255763053894043, Top: []openai.TokenLogprob{{Token: " The", Logprob: -1.8255763053894043}, {Token: " .", Logprob: -2.0755763053894043}}},
		},
		"llama-cpp-python-chat-logprobs": {
			{Token: "<", Logprob: -1.0086148977279663, Top: []openai.TokenLogprob{{Token: "<", Logprob: -1.0086148977279663}, {Token: "The", Logprob: -1.4203351736068726}}},
			{Token: "|", Logprob: -0.028903720900416374, Top: []openai.TokenLogprob{{Token: "|", Logprob: -0.028903720900416374}, {Token: "im", Logprob: -5.940524578094482}}},
			{Token: "im", Logprob: -0.008421385660767555, Top: []openai.TokenLogprob{{Token: "im", Logprob: -0.008421385660767555}, {Token: "i", Logprob: -7.06374979019165}}},
			{Token: "_", Logprob: -0.00017081231635529548, Top: []openai.TokenLogprob{{Token: "_", Logprob: -0.00017081231635529548}, {Token: "__", Logprob: -10.317370414733887}}},
		},
	} {
		raw, err := os.ReadFile(filepath.Join(transcripts, name+".http"))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, hear(t, bytes.NewReader(raw)).reply.Logprobs); diff != "" {
			t.Errorf("%s: log-probabilities (-want +got):\n%s", name, diff)
		}
	}
	for _, name := range []string{"vllm-chat-stream-logprobs", "llama-cpp-python-chat-stream-logprobs", "llama-cpp-python-text-stream-logprobs"} {
		raw, err := os.ReadFile(filepath.Join(transcripts, name+".http"))
		if err != nil {
			t.Fatal(err)
		}
		reply := hear(t, bytes.NewReader(raw)).reply
		var text string
		for _, l := range reply.Logprobs {
			text += l.Token
		}
		if text != reply.Content || text == "" {
			t.Errorf("%s: the tokens make %q, the text is %q", name, text, reply.Content)
		}
	}
}

package investigate

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/openai"
)

// Tool is something that a model may read.
type Tool struct {
	Name, Description string
	Parameters        string // JSON schema
	Do                func(arguments json.RawMessage) (string, error)
}

// Model is an investigator that is a model behind an OpenAI-compatible URL. It
// looks at the case through tools that can only read.
type Model struct {
	Called  string
	BaseURL string // without /v1
	Model   string
	Header  http.Header // with secrets
	Client  *http.Client
	Tools   []Tool
	// Calls is how many times the model is asked at most (30), and Tokens how
	// many tokens it may use in all, prompts included (400,000).
	Calls, Tokens int
}

// Name implements [Investigator].
func (m *Model) Name() string { return m.Called }

const (
	toolAnswerLimit = 24 << 10
	replyLimit      = 16 << 20
)

// Investigate implements [Investigator].
func (m *Model) Investigate(ctx context.Context, brief string) ([]byte, error) {
	calls, budget := cmp.Or(m.Calls, 30), cmp.Or(m.Tokens, 400_000)
	messages := []openai.Message{
		{Role: "system", Content: "You investigate why a server for language models gives wrong answers under load. Your tools only read. Answer as the brief asks."},
		{Role: "user", Content: openai.Text(brief)},
	}
	var tools []openai.Tool
	for _, t := range m.Tools {
		tools = append(tools, openai.Tool{Type: "function", Function: openai.Function{Name: t.Name, Description: t.Description, Parameters: json.RawMessage(t.Parameters)}})
	}
	used := 0
	for call := range calls {
		last := call == calls-1 || used >= budget*3/4
		request := openai.ChatRequest{Model: m.Model, Messages: messages, Tools: tools}
		if last && call > 0 {
			request.Tools = nil
			request.Messages = append(slices.Clip(messages), openai.Message{Role: "user", Content: "Your budget is nearly used up. Answer now, with the JSON object alone."})
		}
		reply, err := m.ask(ctx, request)
		if err != nil {
			return nil, err
		}
		if reply.Usage != nil {
			used += reply.Usage.PromptTokens + reply.Usage.CompletionTokens
		} else {
			used += len(brief) / 4
		}
		if len(reply.ToolCalls) == 0 || request.Tools == nil {
			return []byte(reply.Content), nil
		}
		if used >= budget {
			return []byte(reply.Content), fmt.Errorf("its budget of %d tokens is used up", budget)
		}
		messages = append(messages, openai.Message{Role: "assistant", Content: openai.Text(reply.Content), ToolCalls: reply.ToolCalls})
		for _, c := range reply.ToolCalls {
			messages = append(messages, openai.Message{Role: "tool", ToolCallID: c.ID, Content: openai.Text(m.do(c))})
		}
	}
	return nil, fmt.Errorf("it came to no answer in %d calls", calls)
}

// do calls a tool. What goes wrong is told to the model.
func (m *Model) do(c openai.ToolCall) string {
	i := slices.IndexFunc(m.Tools, func(t Tool) bool { return t.Name == c.Function.Name })
	if i < 0 {
		return fmt.Sprintf("error: there is no tool %q", c.Function.Name)
	}
	text, err := m.Tools[i].Do(json.RawMessage(cmp.Or(strings.TrimSpace(c.Function.Arguments), "{}")))
	if err != nil {
		return "error: " + err.Error()
	}
	if len(text) > toolAnswerLimit {
		text = strings.ToValidUTF8(text[:toolAnswerLimit], "") + "\n... cut"
	}
	return text
}

func (m *Model) ask(ctx context.Context, request openai.ChatRequest) (*openai.Reply, error) {
	body, err := json.Marshal(request)
	if err != nil {
		return nil, err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, m.BaseURL+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	maps.Copy(r.Header, m.Header)
	r.Header.Set("Content-Type", "application/json")
	response, err := cmp.Or(m.Client, http.DefaultClient).Do(r)
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", m.Model, err)
	}
	defer response.Body.Close()
	data, err := io.ReadAll(io.LimitReader(response.Body, replyLimit))
	if err != nil {
		return nil, fmt.Errorf("ask %s: %w", m.Model, err)
	}
	reply := openai.ReadBody(data)
	switch {
	case response.StatusCode != http.StatusOK:
		return nil, fmt.Errorf("ask %s: HTTP status %s: %.200q", m.Model, response.Status, data)
	case reply.Err != nil:
		return nil, fmt.Errorf("ask %s: %w", m.Model, errors.New(reply.Err.Error()))
	}
	return reply, nil
}

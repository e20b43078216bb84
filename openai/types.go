// Package openai speaks the wire format of OpenAI-compatible servers: request
// and reply types, a reader of server-sent events that survives what servers
// really send, and the assembly of streamed deltas into one reply.
//
// It is the only package that the tester and the lab share, so its test data
// are byte-for-byte transcripts of other people's servers.
//
// Stability: stable.
package openai

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// ChatRequest is the body of POST /v1/chat/completions. Zero values are left
// out, so that a server sees only what was asked for.
type ChatRequest struct {
	Model          string          `json:"model,omitempty"`
	Messages       []Message       `json:"messages"`
	Tools          []Tool          `json:"tools,omitempty"`
	ToolChoice     json.RawMessage `json:"tool_choice,omitempty"`
	ResponseFormat json.RawMessage `json:"response_format,omitempty"`
	MaxTokens      int             `json:"max_tokens,omitempty"`
	Temperature    *float64        `json:"temperature,omitempty"`
	TopP           *float64        `json:"top_p,omitempty"`
	Seed           *int64          `json:"seed,omitempty"`
	Stop           []string        `json:"stop,omitempty"`
	Logprobs       bool            `json:"logprobs,omitempty"`
	TopLogprobs    int             `json:"top_logprobs,omitempty"`
	Stream         bool            `json:"stream,omitempty"`
	StreamOptions  *StreamOptions  `json:"stream_options,omitempty"`
}

// StreamOptions asks for a last chunk that carries the usage.
type StreamOptions struct {
	IncludeUsage bool `json:"include_usage"`
}

// Message is one turn of a conversation.
type Message struct {
	Role       string     `json:"role"`
	Content    Text       `json:"content"`
	Reasoning  string     `json:"reasoning_content,omitempty"`
	ToolCalls  []ToolCall `json:"tool_calls,omitempty"`
	ToolCallID string     `json:"tool_call_id,omitempty"`
	Name       string     `json:"name,omitempty"`
}

// Text is a message's text. On the wire it may also be null or a list of text
// parts; both are read, and a plain string is written.
type Text string

// UnmarshalJSON reads a string, null, or a list of parts of type "text". A
// part of another type is an error that names it.
func (t *Text) UnmarshalJSON(b []byte) error {
	b = bytes.TrimSpace(b)
	switch {
	case bytes.Equal(b, []byte("null")):
		*t = ""
		return nil
	case len(b) > 0 && b[0] == '[':
		var parts []struct {
			Type string `json:"type"`
			Text string `json:"text"`
		}
		if err := json.Unmarshal(b, &parts); err != nil {
			return err
		}
		var s strings.Builder
		for _, p := range parts {
			if p.Type != "text" {
				return fmt.Errorf("content part of type %q is not supported, only \"text\"", p.Type)
			}
			s.WriteString(p.Text)
		}
		*t = Text(s.String())
		return nil
	default:
		return json.Unmarshal(b, (*string)(t))
	}
}

// Tool describes a function that the model may call.
type Tool struct {
	Type     string   `json:"type"`
	Function Function `json:"function"`
}

// Function is a tool's name and the JSON Schema of its arguments.
type Function struct {
	Name        string          `json:"name"`
	Description string          `json:"description,omitempty"`
	Parameters  json.RawMessage `json:"parameters,omitempty"`
}

// ToolCall is one call in an assistant's message. Arguments is text that
// should be a JSON object; a broken server may send anything.
type ToolCall struct {
	ID       string       `json:"id,omitempty"`
	Type     string       `json:"type,omitempty"`
	Function FunctionCall `json:"function"`
}

// FunctionCall names the function and carries its arguments as text.
type FunctionCall struct {
	Name      string `json:"name"`
	Arguments string `json:"arguments"`
}

// Usage counts tokens. CachedTokens is prompt_tokens_details.cached_tokens,
// -1 when the server doesn't report it.
type Usage struct {
	PromptTokens     int
	CompletionTokens int
	TotalTokens      int
	CachedTokens     int
	ByTier           *CachedByTier // nil when the server doesn't say
}

// CachedByTier is where the cached tokens of a prompt were found:
// cached_tokens_details, in the usage or in SGLang's sglext.
type CachedByTier struct{ Device, Host, Storage int }

// TokenLogprob is one generated token with its log-probability (nats) and the
// alternatives the server gave.
type TokenLogprob struct {
	Token   string         `json:"token"`
	Logprob float64        `json:"logprob"`
	Top     []TokenLogprob `json:"top_logprobs,omitempty"`
}

// APIError is the error object of an OpenAI-shaped reply or stream event.
type APIError struct {
	Message string `json:"message"`
	Type    string `json:"type,omitempty"`
	Code    string `json:"code,omitempty"`
}

func (e *APIError) Error() string { return e.Message }

// Reply is everything that a server said in answer to one request, put
// together from its chunks or from one body. Strings hold exactly the bytes
// that came; they may be invalid UTF-8.
type Reply struct {
	ID           string
	Model        string
	Content      string
	Reasoning    string
	ToolCalls    []ToolCall
	FinishReason string // empty when none came
	Usage        *Usage // nil when none came
	Logprobs     []TokenLogprob
	Err          *APIError // an error object in the body or in mid-stream
	Done         bool      // the stream's [DONE] came
	Anomalies    []string  // what was out of order on the wire, each kind once
}

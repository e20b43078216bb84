package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/culprit-project/culprit/lab"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/openai"
)

// sampling is what both kinds of requests have.
type sampling struct {
	Model         string                `json:"model"`
	Temperature   *float64              `json:"temperature"`
	TopP          *float64              `json:"top_p"`
	Seed          *int64                `json:"seed"`
	Stop          stopStrings           `json:"stop"`
	MaxTokens     *int                  `json:"max_tokens"`
	Stream        bool                  `json:"stream"`
	StreamOptions *openai.StreamOptions `json:"stream_options"`
	RID           string                `json:"rid"`

	// Where the request's two halves meet, from a router.
	BootstrapHost string  `json:"bootstrap_host"`
	BootstrapPort int     `json:"bootstrap_port"`
	BootstrapRoom *uint64 `json:"bootstrap_room"`
}

type chatRequest struct {
	sampling
	Messages            []openai.Message `json:"messages"`
	Tools               []openai.Tool    `json:"tools"`
	ToolChoice          json.RawMessage  `json:"tool_choice"`
	MaxCompletionTokens *int             `json:"max_completion_tokens"`
	Logprobs            bool             `json:"logprobs"`
	TopLogprobs         *int             `json:"top_logprobs"`
}

type completionRequest struct {
	sampling
	Prompt   json.RawMessage `json:"prompt"`
	Logprobs *int            `json:"logprobs"`
}

// stopStrings is one string or a list.
type stopStrings []string

func (s *stopStrings) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '"' {
		*s = make(stopStrings, 1)
		return json.Unmarshal(b, &(*s)[0])
	}
	return json.Unmarshal(b, (*[]string)(s))
}

// unsupported are members that change what is asked for in a way that this
// server can't follow, with the values that ask for nothing. Members that it
// doesn't know are left alone, as other servers do.
var unsupported = []struct {
	name    string
	allowed []any
}{
	{"n", []any{1.0}},
	{"best_of", []any{1.0}},
	{"response_format", []any{map[string]any{"type": "text"}}},
	{"parallel_tool_calls", []any{true}},
	{"functions", []any{[]any{}}},
	{"function_call", []any{"none", "auto"}},
	{"frequency_penalty", []any{0.0}},
	{"presence_penalty", []any{0.0}},
	{"repetition_penalty", []any{1.0}},
	{"logit_bias", []any{map[string]any{}}},
	{"top_k", []any{-1.0, 0.0}},
	{"min_p", []any{0.0}},
	{"min_tokens", []any{0.0}},
	{"ignore_eos", []any{false}},
	{"stop_token_ids", []any{[]any{}}},
	{"echo", []any{false}},
	{"suffix", []any{""}},
	{"modalities", []any{[]any{"text"}}},
	{"audio", nil},
	{"prediction", nil},
	{"regex", nil},
	{"ebnf", nil},
	{"json_schema", nil},
	{"structured_outputs", nil},
	{"guided_json", nil},
	{"guided_regex", nil},
	{"guided_choice", nil},
	{"guided_grammar", nil},
	{"continue_final_message", []any{false}},
}

// read decodes a request's body into v.
func read(w http.ResponseWriter, r *http.Request, v any) *failure {
	body, f := readBody(w, r)
	if f != nil {
		return f
	}
	if err := json.Unmarshal(body, v); err != nil {
		return badJSON(err)
	}
	var members map[string]any
	if err := json.Unmarshal(body, &members); err != nil {
		return badJSON(err)
	}
	for _, u := range unsupported {
		value, ok := members[u.name]
		harmless := value == nil || u.name == "response_format" && isSchema(value) ||
			slices.ContainsFunc(u.allowed, func(a any) bool { return reflect.DeepEqual(a, value) })
		if ok && !harmless {
			return &failure{
				status: http.StatusBadRequest, param: u.name, code: "unsupported_parameter",
				message: fmt.Sprintf("%s is not supported by this server%s", u.name, unless(u.allowed)),
			}
		}
	}
	return nil
}

// isSchema says whether a response format is a JSON schema. It is taken, and
// nothing enforces it: the model writes the object that the prompt asks for in
// words, as it was taught to.
func isSchema(format any) bool {
	f, _ := format.(map[string]any)
	schema, _ := f["json_schema"].(map[string]any)
	_, ok := schema["schema"].(map[string]any)
	return ok && f["type"] == "json_schema"
}

func unless(allowed []any) string {
	if len(allowed) == 0 {
		return ""
	}
	b, err := json.Marshal(allowed[0])
	if err != nil {
		return ""
	}
	return fmt.Sprintf(", unless it is %s", b)
}

// readBody reads up to BodyLimit. Of a larger body it reads on for a while:
// many clients look at the answer only when they have sent everything.
func readBody(w http.ResponseWriter, r *http.Request) ([]byte, *failure) {
	const patience = 64 << 20
	body, err := io.ReadAll(io.LimitReader(r.Body, BodyLimit+1))
	if err != nil {
		return nil, bad("", "the body can't be read: %v", err)
	}
	if len(body) <= BodyLimit {
		return body, nil
	}
	if r.ContentLength <= patience {
		_, _ = io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, patience)) // the answer is the same if it fails
	}
	w.Header().Set("Connection", "close")
	return nil, &failure{
		status: http.StatusRequestEntityTooLarge, code: "request_too_large",
		message: fmt.Sprintf("the body is larger than the limit of %d bytes", BodyLimit),
	}
}

func badJSON(err error) *failure {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		if e.Field == "" {
			return bad("", "the body is a JSON %s, want an object", e.Value)
		}
		param := strings.TrimPrefix(e.Field, "sampling.")
		return bad(param, "%s is a JSON %s, want %s", param, e.Value, wanted(e.Type))
	}
	if e, ok := errors.AsType[*json.SyntaxError](err); ok {
		return bad("", "the body is not valid JSON: %v, at byte %d", e, e.Offset)
	}
	return bad("", "the body can't be used: %v", err)
}

// wanted names a Go type in JSON's terms.
func wanted(t reflect.Type) string {
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int, reflect.Int64, reflect.Uint64:
		return "a whole number"
	case reflect.Float64:
		return "a number"
	case reflect.Slice:
		return "a list"
	case reflect.Struct, reflect.Map:
		return "an object"
	default:
		return "a " + t.Kind().String()
	}
}

// request checks what both kinds have.
func (s *Server) request(r *http.Request, p *sampling) (lab.Request, *failure) {
	req := lab.Request{ID: p.RID, Stop: p.Stop, Temperature: 1, TopP: 1}
	if req.ID == "" {
		req.ID = r.Header.Get("X-Request-Id")
	}
	if len(req.ID) > maxIDBytes || strings.ContainsFunc(req.ID, func(c rune) bool { return c < ' ' || c > '~' }) {
		return req, bad("rid", "the request's id is longer than %d bytes or not printable ASCII", maxIDBytes)
	}
	if p.Model != "" { // a server of one model can do without
		if f := s.knows(p.Model); f != nil {
			return req, f
		}
	}
	if t := p.Temperature; t != nil {
		if req.Temperature = *t; *t < 0 || *t > 2 {
			return req, bad("temperature", "temperature is %v, not within 0 and 2", *t)
		}
	}
	if t := p.TopP; t != nil {
		if req.TopP = *t; *t <= 0 || *t > 1 {
			return req, bad("top_p", "top_p is %v, not above 0 and at most 1", *t)
		}
	}
	if p.BootstrapRoom != nil {
		if p.BootstrapHost == "" || p.BootstrapPort < 1 || p.BootstrapPort > 65535 {
			return req, bad("bootstrap_host", "bootstrap_room needs bootstrap_host and bootstrap_port, and they are %q and %d", p.BootstrapHost, p.BootstrapPort)
		}
		req.Room = &lab.Room{Address: net.JoinHostPort(p.BootstrapHost, strconv.Itoa(p.BootstrapPort)), Number: *p.BootstrapRoom}
	}
	if p.Seed != nil {
		seed := uint64(*p.Seed)
		req.Seed = &seed
	}
	if len(p.Stop) > MaxStops {
		return req, bad("stop", "stop has %d strings, the limit is %d", len(p.Stop), MaxStops)
	}
	for _, stop := range p.Stop {
		if stop == "" || len(stop) > MaxStopBytes {
			return req, bad("stop", "a stop string has %d bytes, not within 1 and %d", len(stop), MaxStopBytes)
		}
	}
	if p.StreamOptions != nil && !p.Stream {
		return req, bad("stream_options", "stream_options is only for streams: set stream to true")
	}
	return req, maxTokens(&req, "max_tokens", p.MaxTokens)
}

func maxTokens(r *lab.Request, name string, n *int) *failure {
	if n == nil {
		return nil
	}
	r.MaxTokens = *n
	if *n < 1 {
		return bad(name, "%s is %d, less than 1", name, *n)
	}
	return nil
}

// chatRequest turns a body into a request; useTools says that calls are to be
// looked for in the reply.
func (s *Server) chatRequest(r *http.Request, c *chatRequest) (req lab.Request, useTools bool, f *failure) {
	if req, f = s.request(r, &c.sampling); f != nil {
		return req, false, f
	}
	if f := maxTokens(&req, "max_completion_tokens", c.MaxCompletionTokens); f != nil {
		return req, false, f
	}
	req.Logprobs = c.Logprobs
	if n := c.TopLogprobs; n != nil {
		req.TopLogprobs = *n
		switch {
		case *n < 0 || *n > MaxTopLogprobs:
			return req, false, bad("top_logprobs", "top_logprobs is %d, not within 0 and %d", *n, MaxTopLogprobs)
		case *n > 0 && !c.Logprobs:
			return req, false, bad("top_logprobs", "top_logprobs needs logprobs to be true")
		}
	}
	if len(c.Messages) == 0 {
		return req, false, bad("messages", "messages is missing or empty")
	}
	for i, tool := range c.Tools {
		if tool.Type != "function" || tool.Function.Name == "" {
			return req, false, bad("tools", `tools[%d] has type %q and the name %q; want type "function" and a name`, i, tool.Type, tool.Function.Name)
		}
	}
	tools := c.Tools
	switch choice := string(c.ToolChoice); choice {
	case "", "null", `"auto"`:
	case `"none"`:
		tools = nil
	default:
		return req, false, &failure{
			status: http.StatusBadRequest, param: "tool_choice", code: "unsupported_parameter",
			message: fmt.Sprintf("tool_choice %.100s is not supported: nothing constrains what this model writes; use \"auto\" or \"none\"", choice),
		}
	}
	prompt, err := s.tokenizer.Prompt(c.Messages, tools)
	if err != nil {
		return req, false, bad("messages", "%v", err)
	}
	req.Prompt = prompt
	return req, len(tools) > 0, nil
}

// completionRequest turns a body into a request.
func (s *Server) completionRequest(r *http.Request, c *completionRequest) (lab.Request, *failure) {
	req, f := s.request(r, &c.sampling)
	if f != nil {
		return req, f
	}
	if n := c.Logprobs; n != nil {
		req.Logprobs, req.TopLogprobs = true, *n
		if *n < 0 || *n > MaxTopLogprobs {
			return req, bad("logprobs", "logprobs is %d, not within 0 and %d", *n, MaxTopLogprobs)
		}
	}
	req.Prompt, f = s.promptTokens(c.Prompt)
	return req, f
}

// promptTokens reads a prompt: text, which begins a sequence, or tokens, which
// are taken as they are; or a list of one of these.
func (s *Server) promptTokens(prompt json.RawMessage) ([]model.Token, *failure) {
	var text string
	if json.Unmarshal(prompt, &text) == nil && len(prompt) > 0 && prompt[0] == '"' {
		if text == "" {
			return nil, bad("prompt", "the prompt is empty")
		}
		return s.tokenizer.AppendEncode([]model.Token{model.Begin}, text), nil
	}
	var tokens []model.Token
	if json.Unmarshal(prompt, &tokens) == nil && len(tokens) > 0 {
		return tokens, nil
	}
	var list []json.RawMessage
	if json.Unmarshal(prompt, &list) != nil || len(list) == 0 {
		return nil, bad("prompt", "prompt is missing, empty, or not a string or a list of tokens")
	}
	if len(list) > 1 {
		return nil, bad("prompt", "prompt has %d members that aren't all tokens; this server takes one prompt a request", len(list))
	}
	if len(list[0]) > 0 && (list[0][0] == '"' || list[0][0] == '[' && !strings.Contains(string(list[0][1:]), "[")) {
		return s.promptTokens(list[0])
	}
	return nil, bad("prompt", "prompt is not a string or a list of tokens")
}

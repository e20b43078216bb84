package api

import (
	"errors"
	"fmt"
	"math"
	"net/http"
	"strings"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/culprit-project/culprit/lab"
	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/openai"
)

// envelope is a reply, or a chunk of one.
type envelope struct {
	ID      string   `json:"id"`
	Object  string   `json:"object"`
	Created int64    `json:"created"` // seconds since 1970
	Model   string   `json:"model"`
	Choices []choice `json:"choices"`
	Usage   *usage   `json:"usage,omitempty"`
}

type choice struct {
	Index        int     `json:"index"`
	Message      any     `json:"message,omitempty"`
	Delta        any     `json:"delta,omitempty"`
	Text         *string `json:"text,omitempty"`
	Logprobs     any     `json:"logprobs"`
	FinishReason *string `json:"finish_reason"`
}

type message struct {
	Role      string            `json:"role"`
	Content   *string           `json:"content"`
	ToolCalls []openai.ToolCall `json:"tool_calls,omitempty"`
}

type delta struct {
	Role      string      `json:"role,omitempty"`
	Content   *string     `json:"content,omitempty"`
	ToolCalls []callDelta `json:"tool_calls,omitempty"`
}

type callDelta struct {
	Index    int    `json:"index"`
	ID       string `json:"id,omitempty"`
	Type     string `json:"type,omitempty"`
	Function struct {
		Name      string `json:"name,omitempty"`
		Arguments string `json:"arguments"`
	} `json:"function"`
}

type usage struct {
	PromptTokens     int           `json:"prompt_tokens"`
	CompletionTokens int           `json:"completion_tokens"`
	TotalTokens      int           `json:"total_tokens"`
	PromptDetails    promptDetails `json:"prompt_tokens_details"`
}

type promptDetails struct {
	CachedTokens int `json:"cached_tokens"`
	ByTier       struct {
		Device int `json:"device"`
		Host   int `json:"host"`
	} `json:"cached_tokens_details"`
}

func usageOf(u lab.Usage) *usage {
	v := &usage{PromptTokens: u.Prompt, CompletionTokens: u.Completion, TotalTokens: u.Prompt + u.Completion}
	v.PromptDetails.CachedTokens = u.Device + u.Host
	v.PromptDetails.ByTier.Device, v.PromptDetails.ByTier.Host = u.Device, u.Host
	return v
}

// reply is one answer on its way.
type reply struct {
	server  *Server
	w       http.ResponseWriter
	stream  *lab.Stream
	id      string
	created int64
	chat    bool
	parser  *Parser // where calls are looked for
	request *lab.Request

	previous model.Token // before the next one whose logprob is written
	offset   int         // characters of text before it
	calls    int
}

func (s *Server) chat(w http.ResponseWriter, r *http.Request) *failure {
	var c chatRequest
	if f := read(w, r, &c); f != nil {
		return f
	}
	req, useTools, f := s.chatRequest(r, &c)
	if f != nil {
		return f
	}
	p := &reply{chat: true}
	if useTools {
		p.parser = &Parser{}
	}
	return s.run(w, r, &req, &c.sampling, p)
}

func (s *Server) completion(w http.ResponseWriter, r *http.Request) *failure {
	var c completionRequest
	if f := read(w, r, &c); f != nil {
		return f
	}
	req, f := s.completionRequest(r, &c)
	if f != nil {
		return f
	}
	return s.run(w, r, &req, &c.sampling, &reply{})
}

// run submits a request and writes the reply. The engine ends the request when
// the client hangs up, for then r's context ends.
func (s *Server) run(w http.ResponseWriter, r *http.Request, req *lab.Request, c *sampling, p *reply) *failure {
	n := s.number.Add(1)
	if req.ID == "" {
		req.ID = fmt.Sprintf("%s-%d", s.ID, n)
	}
	prefix := "cmpl-"
	if p.chat {
		prefix = "chatcmpl-"
	}
	p.server, p.w, p.request, p.id, p.created = s, w, req, prefix+req.ID, time.Now().Unix()
	stream, err := s.Engine.Submit(r.Context(), *req)
	if err != nil {
		return p.failed(err)
	}
	p.stream, p.previous = stream, req.Prompt[len(req.Prompt)-1]
	w.Header().Set("X-Request-Id", req.ID)
	if !c.Stream {
		return p.whole()
	}
	return p.chunks(c.StreamOptions != nil && c.StreamOptions.IncludeUsage)
}

// failed is the answer to a request that the engine refuses or that failed.
func (p *reply) failed(err error) *failure {
	param := "prompt"
	if p.chat {
		param = "messages"
	}
	if e, ok := errors.AsType[*lab.TooLongError](err); ok {
		return &failure{status: http.StatusBadRequest, param: param, code: "context_length_exceeded", message: e.Error()}
	}
	switch {
	case errors.Is(err, lab.ErrShutDown):
		return &failure{status: http.StatusServiceUnavailable, message: err.Error()}
	case errors.Is(err, lab.ErrInternal):
		return &failure{status: http.StatusInternalServerError, message: err.Error()}
	default:
		return bad(param, "%v", err)
	}
}

// deltas turns a token's text into what the client gets.
func (p *reply) deltas(text string) []Delta {
	if p.parser != nil {
		return p.parser.Write(text)
	}
	if text == "" {
		return nil
	}
	return []Delta{{Content: text}}
}

// last returns what comes after the last token.
func (p *reply) last(end *lab.Ending) []Delta {
	d := p.deltas(end.Text)
	if p.parser != nil {
		p.parser.Drop = p.server.Engine.Strikes(fault.ParserDrop, end.Usage)
		d = append(d, p.parser.Close()...)
	}
	return d
}

// finish is the reason as OpenAI has it.
func (p *reply) finish(e *lab.Ending) *string {
	reason := string(e.Reason)
	if e.Reason == lab.Stop && p.calls > 0 {
		reason = "tool_calls"
	}
	return &reason
}

func (p *reply) envelope(object string, c choice) *envelope {
	return &envelope{ID: p.id, Object: object, Created: p.created, Model: p.server.Model, Choices: []choice{c}}
}

// whole answers in one piece.
func (p *reply) whole() *failure {
	var tokens []lab.Token
	var deltas []Delta
	var raw strings.Builder
	for t := range p.stream.Tokens() {
		tokens = append(tokens, t)
		raw.WriteString(t.Text)
		deltas = append(deltas, p.deltas(t.Text)...)
	}
	end := p.stream.Ending()
	raw.WriteString(end.Text)
	deltas = append(deltas, p.last(&end)...)
	if end.Reason == lab.Failed {
		return p.failed(end.Err)
	}
	p.server.markup.count(p.parser, raw.String())

	var text strings.Builder
	var calls []openai.ToolCall
	for _, d := range deltas {
		text.WriteString(d.Content)
		switch {
		case d.Name != "":
			calls = append(calls, openai.ToolCall{ID: p.callID(d.Call), Type: "function", Function: openai.FunctionCall{Name: d.Name}})
		case d.Arguments != "":
			calls[d.Call].Function.Arguments += d.Arguments
		}
	}
	p.calls = len(calls)
	content := text.String()
	c := choice{FinishReason: p.finish(&end), Logprobs: p.logprobs(tokens)}
	object := "text_completion"
	if p.chat {
		object = "chat.completion"
		m := message{Role: "assistant", Content: &content, ToolCalls: calls}
		if content == "" && len(calls) > 0 {
			m.Content = nil
		}
		c.Message = m
	} else {
		c.Text = &content
	}
	e := p.envelope(object, c)
	e.Usage = usageOf(end.Usage)
	answer(p.w, http.StatusOK, e)
	return nil
}

// chunks answers with a stream, which begins when there is a token: what goes
// wrong before still gets a status of its own.
func (p *reply) chunks(withUsage bool) *failure {
	var out *openai.Writer
	var raw strings.Builder
	for t := range p.stream.Tokens() {
		if out == nil {
			out = p.open()
		}
		raw.WriteString(t.Text)
		p.send(out, p.deltas(t.Text), []lab.Token{t})
	}
	end := p.stream.Ending()
	if out == nil {
		if end.Reason == lab.Failed {
			return p.failed(end.Err)
		}
		out = p.open()
	}
	raw.WriteString(end.Text)
	p.send(out, p.last(&end), nil)
	p.server.markup.count(p.parser, raw.String())
	if end.Reason == lab.Failed {
		p.event(out, p.failed(end.Err).body())
	} else {
		c := choice{FinishReason: p.finish(&end)}
		p.chunk(out, c, Delta{})
	}
	if withUsage {
		e := p.envelope(p.object(), choice{})
		e.Choices, e.Usage = []choice{}, usageOf(end.Usage)
		p.event(out, e)
	}
	_ = out.Done() // nobody can be told that the client has gone
	return nil
}

// open begins a stream.
func (p *reply) open() *openai.Writer {
	h := p.w.Header()
	h.Set("Content-Type", "text/event-stream; charset=utf-8")
	h.Set("Cache-Control", "no-cache")
	out := openai.NewWriter(p.w, http.NewResponseController(p.w).Flush)
	if p.chat {
		empty := ""
		p.event(out, p.envelope(p.object(), choice{Delta: delta{Role: "assistant", Content: &empty}}))
	}
	return out
}

func (p *reply) object() string {
	if p.chat {
		return "chat.completion.chunk"
	}
	return "text_completion"
}

// send writes what a token brought; its logprob goes with the first chunk.
func (p *reply) send(out *openai.Writer, deltas []Delta, tokens []lab.Token) {
	logprobs := p.logprobs(tokens)
	if logprobs != nil && len(deltas) == 0 {
		deltas = []Delta{{}}
	}
	for _, d := range deltas {
		p.chunk(out, choice{Logprobs: logprobs}, d)
		logprobs = nil
	}
}

// chunk writes one delta.
func (p *reply) chunk(out *openai.Writer, c choice, d Delta) {
	switch {
	case !p.chat:
		c.Text = &d.Content
	case d.Name != "" || d.Arguments != "":
		call := callDelta{Index: d.Call}
		call.Function.Name, call.Function.Arguments = d.Name, d.Arguments
		if d.Name != "" {
			call.ID, call.Type = p.callID(d.Call), "function"
			p.calls++
		}
		c.Delta = delta{ToolCalls: []callDelta{call}}
	case d.Content != "":
		c.Delta = delta{Content: &d.Content}
	default:
		c.Delta = delta{}
	}
	p.event(out, p.envelope(p.object(), c))
}

// event writes one event. A client that has gone is noticed by the request's
// context, not here.
func (p *reply) event(out *openai.Writer, v any) { _ = out.Event(marshal(v)) }

func (p *reply) callID(n int) string { return fmt.Sprintf("call_%s_%d", p.request.ID, n) }

type tokenLogprob struct {
	Token   string          `json:"token"`
	Logprob float64         `json:"logprob"`
	Bytes   []int           `json:"bytes"`
	Top     *[]tokenLogprob `json:"top_logprobs,omitempty"`
}

// logprobs writes the tokens' log-probabilities, nil if they weren't asked
// for. A token's text is what it adds after the one before it.
func (p *reply) logprobs(tokens []lab.Token) any {
	if !p.request.Logprobs || len(tokens) == 0 {
		return nil
	}
	if p.chat {
		list := []tokenLogprob{}
		for _, t := range tokens {
			entry, top := p.tokenLogprob(t.ID, t.Logprob), []tokenLogprob{}
			for _, l := range t.Top {
				top = append(top, p.tokenLogprob(l.ID, l.Logprob))
			}
			entry.Top = &top
			list = append(list, entry)
			p.previous = t.ID
		}
		return map[string]any{"content": list, "refusal": nil}
	}
	texts, values, tops, offsets := []string{}, []float64{}, []map[string]float64{}, []int{}
	for _, t := range tokens {
		text := p.tokenText(t.ID)
		texts, values, offsets = append(texts, string(text)), append(values, finite(t.Logprob)), append(offsets, p.offset)
		p.offset += utf8.RuneCount(text)
		top := map[string]float64{}
		for _, l := range t.Top {
			top[string(p.tokenText(l.ID))] = finite(l.Logprob)
		}
		tops = append(tops, top)
		p.previous = t.ID
	}
	return map[string]any{"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}
}

func (p *reply) tokenText(id model.Token) []byte {
	return p.server.tokenizer.AppendText(nil, p.previous, id)
}

func (p *reply) tokenLogprob(id model.Token, logprob float64) tokenLogprob {
	text := p.tokenText(id)
	l := tokenLogprob{Token: string(text), Logprob: finite(logprob), Bytes: make([]int, len(text))}
	for i, b := range text {
		l.Bytes[i] = int(b)
	}
	return l
}

// finite replaces what JSON can't hold by OpenAI's number for "hardly ever".
func finite(logprob float64) float64 {
	if math.IsNaN(logprob) || math.IsInf(logprob, 0) {
		return -9999
	}
	return logprob
}

// markupCounts counts the replies in which calls were looked for, by what was
// found.
type markupCounts struct{ none, strict, lenient, malformed atomic.Uint64 }

// count judges a whole reply's text.
func (m *markupCounts) count(p *Parser, text string) {
	if p == nil {
		return
	}
	_, calls, err := ParseStrict(text)
	switch {
	case err == nil && len(calls) > 0:
		m.strict.Add(1)
	case err == nil:
		m.none.Add(1)
	case p.calls > 0:
		m.lenient.Add(1)
	default:
		m.malformed.Add(1)
	}
}

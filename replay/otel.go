package replay

import (
	"bytes"
	"encoding/json"
	"strconv"
	"strings"
	"time"
)

// OpenTelemetry's spans as OTLP's JSON has them, with the attributes of the
// semantic conventions for generative AI:
// https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans

type resourceSpans struct {
	ScopeSpans []struct {
		Spans []span `json:"spans"`
	} `json:"scopeSpans"`
}

type span struct {
	Start      json.RawMessage `json:"startTimeUnixNano"` // OTLP's JSON has 64 bits as strings
	End        json.RawMessage `json:"endTimeUnixNano"`
	Attributes []keyValue      `json:"attributes"`
}

type keyValue struct {
	Key   string `json:"key"`
	Value value  `json:"value"`
}

type value struct {
	String *string         `json:"stringValue"`
	Int    json.RawMessage `json:"intValue"`
	Double *float64        `json:"doubleValue"`
	Bool   *bool           `json:"boolValue"`
	Array  *struct {
		Values []value `json:"values"`
	} `json:"arrayValue"`
	Map *struct {
		Values []keyValue `json:"values"`
	} `json:"kvlistValue"`
}

// plain is the value as JSON has it. A string that holds a list or an object is
// that: exporters that can't send structure send it so.
func (v *value) plain() any {
	switch {
	case v.String != nil:
		if s := strings.TrimSpace(*v.String); (strings.HasPrefix(s, "[") || strings.HasPrefix(s, "{")) && json.Valid([]byte(s)) {
			return json.RawMessage(s)
		}
		return *v.String
	case v.Int != nil:
		return json.RawMessage(bytes.Trim(v.Int, `"`))
	case v.Double != nil:
		return *v.Double
	case v.Bool != nil:
		return *v.Bool
	case v.Array != nil:
		list := []any{}
		for _, e := range v.Array.Values {
			list = append(list, e.plain())
		}
		return list
	case v.Map != nil:
		object := map[string]any{}
		for _, e := range v.Map.Values {
			object[e.Key] = e.Value.plain()
		}
		return object
	}
	return nil
}

// part of a message of gen_ai.input.messages.
type part struct {
	Type      string          `json:"type"`
	Content   string          `json:"content"`
	ID        string          `json:"id"`
	Name      string          `json:"name"`
	Arguments json.RawMessage `json:"arguments"`
	Result    json.RawMessage `json:"result"`
	Response  json.RawMessage `json:"response"`
}

// parameters are the attributes that are members of a request, by their names
// there.
var parameters = map[string]string{
	"gen_ai.request.model": "model", "gen_ai.request.max_tokens": "max_tokens", "gen_ai.request.temperature": "temperature",
	"gen_ai.request.top_p": "top_p", "gen_ai.request.seed": "seed", "gen_ai.request.frequency_penalty": "frequency_penalty",
	"gen_ai.request.presence_penalty": "presence_penalty", "gen_ai.request.stop_sequences": "stop", "gen_ai.tool.definitions": "tools",
}

// spans takes the spans of chats that hold their messages.
func (t *Trace) spans(l line, _ []byte) error {
	t.Timed = true
	for _, r := range l.ResourceSpans {
		for _, scope := range r.ScopeSpans {
			for _, s := range scope.Spans {
				if q, ok := s.request(); ok {
					t.add(q)
				} else {
					t.Left++
				}
			}
		}
	}
	return nil
}

func (s *span) request() (Request, bool) {
	q := Request{Stream: true}
	body := map[string]any{"stream": true}
	var messages []map[string]any
	for _, a := range s.Attributes {
		if name, ok := parameters[a.Key]; ok {
			body[name] = a.Value.plain()
			continue
		}
		switch a.Key {
		case "gen_ai.conversation.id":
			if a.Value.String != nil {
				q.Conversation = *a.Value.String
			}
		case "gen_ai.system_instructions":
			if m := message("system", a.Value.plain()); m != nil {
				messages = append([]map[string]any{m}, messages...)
			}
		case "gen_ai.input.messages":
			var list []struct {
				Role  string
				Parts json.RawMessage
			}
			b, err := json.Marshal(a.Value.plain())
			if err != nil || json.Unmarshal(b, &list) != nil {
				return q, false
			}
			for _, m := range list {
				if m := message(m.Role, m.Parts); m != nil {
					messages = append(messages, m)
				}
			}
		}
	}
	start, ok := nanoseconds(s.Start)
	if !ok || len(messages) == 0 {
		return q, false
	}
	q.At = start
	if end, ok := nanoseconds(s.End); ok && end > start {
		q.End = end
	}
	body["messages"] = messages
	b, err := json.Marshal(body)
	q.Body = b
	return q, err == nil
}

func nanoseconds(raw json.RawMessage) (time.Duration, bool) {
	n, err := strconv.ParseInt(string(bytes.Trim(raw, `"`)), 10, 64)
	return time.Duration(n), err == nil && n > 0
}

// message turns parts into a message of a request; nil when they aren't parts.
// What isn't text or a tool call is left out.
func message(role string, parts any) map[string]any {
	b, err := json.Marshal(parts)
	var list []part
	if err != nil || json.Unmarshal(b, &list) != nil {
		return nil
	}
	m := map[string]any{"role": role}
	var text strings.Builder
	var calls []any
	for _, p := range list {
		switch p.Type {
		case "text":
			text.WriteString(p.Content)
		case "tool_call":
			calls = append(calls, map[string]any{"id": p.ID, "type": "function", "function": map[string]any{"name": p.Name, "arguments": unquoted(p.Arguments)}})
		case "tool_call_response":
			if p.Result == nil {
				p.Result = p.Response
			}
			text.WriteString(unquoted(p.Result))
			m["role"], m["tool_call_id"] = "tool", p.ID
		}
	}
	m["content"] = text.String()
	if calls != nil {
		m["tool_calls"] = calls
	}
	return m
}

// unquoted is a string's text, or another value's JSON.
func unquoted(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return s
	}
	return string(raw)
}

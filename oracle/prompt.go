package oracle

import (
	"bytes"
	"iter"
	"strconv"
)

// given yields every text that the model was given or asked for: what stands
// there may stand in the reply. It decodes the request.
func (v *View) given() iter.Seq[string] {
	return func(yield func(string) bool) {
		expect := &v.Op.Expect
		texts := append([]string{expect.Answer, string(expect.Schema)}, expect.Copy...)
		if expect.Call != nil {
			for _, value := range expect.Call.Arguments {
				texts = append(texts, value)
			}
		}
		if r := v.Request(); r != nil {
			for i := range r.Messages {
				m := &r.Messages[i]
				texts = append(texts, string(m.Content), m.Reasoning)
				for _, call := range m.ToolCalls {
					texts = append(texts, call.Function.Name, call.Function.Arguments)
				}
			}
			for _, tool := range r.Tools {
				texts = append(texts, tool.Function.Name, tool.Function.Description, string(tool.Function.Parameters))
			}
			texts = append(texts, string(r.ResponseFormat))
		}
		for _, s := range texts {
			if s != "" && !yield(s) {
				return
			}
		}
	}
}

// maxTokens returns the request's max_tokens, 0 if it has none. It doesn't
// decode the request: every quote inside a string is escaped, so the name in
// bare quotes is the member's.
func (v *View) maxTokens() int {
	key := []byte(`"max_tokens":`)
	for rest := []byte(v.Op.Request); ; {
		at := bytes.Index(rest, key)
		if at < 0 {
			return 0
		}
		rest = bytes.TrimLeft(rest[at+len(key):], " ")
		end := bytes.IndexFunc(rest, func(r rune) bool { return r < '0' || r > '9' })
		if n, err := strconv.Atoi(string(rest[:max(end, 0)])); err == nil {
			return n
		} // else a tool's parameter of that name
	}
}

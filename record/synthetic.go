package record

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/json"
	"regexp"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/oracle"
)

// synthesize replaces what people and the model wrote in an op by text of the
// same structure. A word becomes another of the same length in the same
// script, the same one wherever it stands, in whatever op: so equal prompts
// stay equal, shared prefixes stay shared, and a reply that repeats or garbles
// its prompt still does. The words follow from a key that is forgotten with
// the recording.
//
// What stays: punctuation and spaces, the control text of models, the tools'
// names and schemas, JSON's syntax, everything beside the messages (model,
// sampling, usage, finish reasons).
func synthesize(op *history.Op, key []byte) {
	s := synthesizer{key: key, keep: map[string]bool{"true": true, "false": true, "null": true}}
	if b, ok := s.request(op.Request); ok {
		op.Request = b
	}
	s.replies(op.Chunks)
}

type synthesizer struct {
	key  []byte
	keep map[string]bool
}

// request rewrites the texts of a request's messages.
func (s *synthesizer) request(body []byte) (json.RawMessage, bool) {
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber()
	var r map[string]any
	if d.Decode(&r) != nil {
		return nil, false
	}
	s.learn(r["tools"])
	s.learn(r["response_format"])
	if messages, ok := r["messages"].([]any); ok {
		for _, m := range messages {
			s.message(m)
		}
	}
	delete(r, "user")
	delete(r, "metadata")
	return encode(r), true
}

func encode(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(err) // it was decoded from JSON
	}
	return bytes.TrimSpace(b.Bytes())
}

// learn keeps the words of what isn't anybody's text: schemas and names.
func (s *synthesizer) learn(v any) {
	switch v := v.(type) {
	case map[string]any:
		for name, value := range v {
			if name != "description" {
				s.words(name)
				s.learn(value)
			}
		}
	case []any:
		for _, value := range v {
			s.learn(value)
		}
	case string:
		s.words(v)
	}
}

func (s *synthesizer) words(text string) {
	for _, w := range word.FindAllString(text, -1) {
		s.keep[w] = true
	}
}

// message rewrites one message, whichever shape its content has.
func (s *synthesizer) message(v any) {
	m, ok := v.(map[string]any)
	if !ok {
		return
	}
	for _, field := range []string{"content", "reasoning_content", "reasoning", "refusal"} {
		switch content := m[field].(type) {
		case string:
			m[field] = s.text(content)
		case []any:
			for _, part := range content {
				if p, ok := part.(map[string]any); ok {
					if text, ok := p["text"].(string); ok {
						p["text"] = s.text(text)
					}
					delete(p, "image_url")
					delete(p, "input_audio")
					delete(p, "file")
				}
			}
		}
	}
	delete(m, "name")
	for _, f := range functions(m) {
		if arguments, ok := f["arguments"].(string); ok {
			f["arguments"] = s.text(arguments)
		}
	}
}

// functions are the functions of a message's or delta's tool calls.
func functions(m map[string]any) []map[string]any {
	var out []map[string]any
	calls, _ := m["tool_calls"].([]any)
	for _, c := range calls {
		if call, ok := c.(map[string]any); ok {
			if f, ok := call["function"].(map[string]any); ok {
				out = append(out, f)
			}
		}
	}
	return out
}

// replies rewrites the texts that a reply's chunks carry. A word may be cut
// anywhere between two chunks, so each text is put together, rewritten, and
// cut at the same characters again.
func (s *synthesizer) replies(chunks []history.Chunk) {
	type fragment struct {
		in    map[string]any
		field string
		runes int
	}
	decoded := make([]map[string]any, len(chunks))
	texts := map[string]*strings.Builder{}
	fragments := map[string][]fragment{}
	add := func(name string, in map[string]any, field string) {
		text, ok := in[field].(string)
		if !ok || text == "" {
			return
		}
		if texts[name] == nil {
			texts[name] = new(strings.Builder)
		}
		texts[name].WriteString(text)
		fragments[name] = append(fragments[name], fragment{in, field, utf8.RuneCountInString(text)})
	}
	for i, c := range chunks {
		d := json.NewDecoder(bytes.NewReader(c.Data))
		d.UseNumber()
		if d.Decode(&decoded[i]) != nil {
			if !bytes.Contains(c.Data, []byte("[DONE]")) {
				chunks[i].Data = []byte(s.text(string(c.Data))) // damage keeps its shape
			}
			continue
		}
		choices, _ := decoded[i]["choices"].([]any)
		for _, v := range choices {
			choice, ok := v.(map[string]any)
			if !ok {
				continue
			}
			delete(choice, "logprobs")
			for _, part := range []string{"delta", "message"} {
				m, ok := choice[part].(map[string]any)
				if !ok {
					continue
				}
				for _, field := range []string{"content", "reasoning_content", "reasoning", "refusal"} {
					add(field, m, field)
				}
				calls, _ := m["tool_calls"].([]any)
				for _, c := range calls {
					call, _ := c.(map[string]any)
					if f, ok := call["function"].(map[string]any); ok {
						index, _ := call["index"].(json.Number)
						add("arguments "+index.String(), f, "arguments")
					}
				}
			}
		}
	}
	for name, b := range texts {
		rest := s.text(b.String())
		for _, f := range fragments[name] {
			end := 0
			for range f.runes {
				_, n := utf8.DecodeRuneInString(rest[end:])
				end += n
			}
			f.in[f.field], rest = rest[:end], rest[end:]
		}
	}
	for i, d := range decoded {
		if d != nil {
			chunks[i].Data = encode(d)
		}
	}
}

var (
	// kept stays as it is: the control text of models, which damage leaves in
	// texts, and escapes, which hold JSON within JSON together.
	kept = regexp.MustCompile(`<[|｜][^<>\s]{0,60}[|｜]>|<0x[0-9A-F]{2}>|\\u[0-9A-Fa-f]{4}|\\.|` + controlText())
	word = regexp.MustCompile(`[\pL\pN_]+`)
)

func controlText() string {
	literals := oracle.Markup()
	slices.SortFunc(literals, func(a, b string) int { return len(b) - len(a) }) // the longest that fits
	for i, l := range literals {
		literals[i] = regexp.QuoteMeta(l)
	}
	return strings.Join(literals, "|")
}

// text rewrites a text, character for character.
func (s *synthesizer) text(text string) string {
	var b strings.Builder
	b.Grow(len(text))
	for {
		at := kept.FindStringIndex(text)
		if at == nil {
			break
		}
		b.WriteString(word.ReplaceAllStringFunc(text[:at[0]], s.word))
		b.WriteString(text[at[0]:at[1]])
		text = text[at[1]:]
	}
	b.WriteString(word.ReplaceAllStringFunc(text, s.word))
	return b.String()
}

// word is the word that stands for another: letters for letters, capitals for
// capitals, digits for digits, each within its script.
func (s *synthesizer) word(w string) string {
	if s.keep[w] {
		return w
	}
	mac := hmac.New(sha256.New, s.key)
	mac.Write([]byte(w))
	random := mac.Sum(nil)
	at := 0
	next := func(n int) int {
		if at+2 > len(random) {
			more := sha256.Sum256(random)
			random, at = more[:], 0
		}
		v := int(random[at])<<8 | int(random[at+1])
		at += 2
		return v % n
	}
	last, lastOut := rune(-1), rune(0)
	return strings.Map(func(r rune) rune {
		if r != last { // a run of one character stays one
			lastOut = other(r, last < 0, next)
		}
		last = r
		return lastOut
	}, w)
}

// other draws another character of the same kind.
func other(r rune, first bool, next func(int) int) rune {
	switch {
	case r == '0' && first: // no number begins with a zero that didn't before
		return r
	case r >= '1' && r <= '9' && first:
		return rune('1' + next(9))
	case r >= '0' && r <= '9':
		return rune('0' + next(10))
	case r >= 'a' && r <= 'z':
		return rune('a' + next(26))
	case r >= 'A' && r <= 'Z':
		return rune('A' + next(26))
	case unicode.Is(unicode.Latin, r):
		return 'é'
	}
	for _, block := range blocks {
		if r >= block.low && r <= block.high {
			return block.low + rune(next(int(block.high-block.low+1)))
		}
	}
	return r // a script that isn't in the table: better plain than of another script
}

// blocks are the scripts that replies are written in most: stretches in which
// every character is a letter.
var blocks = []struct{ low, high rune }{
	{'α', 'ρ'},
	{'Α', 'Ρ'},
	{'а', 'я'},
	{'А', 'Я'},
	{'א', 'ת'},
	{'ب', 'غ'},
	{'अ', 'ह'},
	{'ก', 'ฮ'},
	{'ぁ', 'ん'},
	{'ァ', 'ン'},
	{'一', '鿋'},
	{'가', '힣'},
}

package api

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/culprit-project/culprit/openai"
)

// DSML, DeepSeek's markup for tool calls. A call is
//
//	<｜DSML｜invoke name="NAME">
//	<｜DSML｜parameter name="KEY" string="true">TEXT</｜DSML｜parameter>
//	<｜DSML｜parameter name="KEY" string="false">JSON</｜DSML｜parameter>
//	</｜DSML｜invoke>
//
// and calls stand within one wrapper, two line feeds after any text.
const (
	mark           = "｜DSML｜"
	openCalls      = "<" + mark + "tool_calls>"
	closeCalls     = "</" + mark + "tool_calls>"
	openInvoke     = "<" + mark + `invoke name="`
	closeInvoke    = "</" + mark + "invoke>"
	openParameter  = "<" + mark + `parameter name="`
	closeParameter = "</" + mark + "parameter>"
	separator      = "\n\n"
	nameLimit      = 256 // bytes of a name
)

// Delta is the next thing in a reply: text, or something of a call.
type Delta struct {
	Content   string
	Call      int    // the call's number, from 0, if the delta has no content
	Name      string // begins the call
	Arguments string // more of its arguments: put together they are a JSON object
}

// Parser finds tool calls in a reply as it comes. It forgives what a reader
// can: white space between tags, a wrapper that isn't closed, a call without
// parameters closed in its first tag, arguments as one JSON object, a value
// that should be JSON and isn't (it becomes a string). What is no call is text
// and comes through as it is, markup and all: a call that isn't whole at the
// end, one outside a wrapper, one with other markup in it. So a call is
// delivered when it is whole. How the text is cut makes no difference. The
// zero value is ready.
type Parser struct {
	// Drop throws away what is held back at the reply's end: the fault
	// parser-drop.
	Drop bool

	rest   string // not delivered yet
	inside bool   // a wrapper with a call in it is open
	calls  int
}

// Write takes more text and returns what is certain.
func (p *Parser) Write(text string) []Delta {
	p.rest += text
	return p.scan(false)
}

// Close returns what is left at the reply's end.
func (p *Parser) Close() []Delta {
	if p.Drop {
		p.rest = ""
	}
	return p.scan(true)
}

func (p *Parser) scan(end bool) (deltas []Delta) {
	content := func(n int) {
		if n > 0 {
			deltas = append(deltas, Delta{Content: p.rest[:n]})
			p.rest = p.rest[n:]
		}
	}
	for {
		head := 0 // of rest, that belongs to a call that follows
		if !p.inside {
			at := strings.Index(p.rest, openCalls)
			if at < 0 {
				held := 0
				if !end {
					held = max(overlap(p.rest, openCalls), overlap(p.rest, separator+openCalls))
				}
				content(len(p.rest) - held)
				return deltas
			}
			content(len(strings.TrimSuffix(p.rest[:at], separator)))
			head = strings.Index(p.rest, openCalls) + len(openCalls)
		}
		r := reader{rest: p.rest[head:]}
		r.space()
		tag := r.take(openInvoke, closeCalls)
		var call parsedCall
		if tag == openInvoke {
			call = r.invoke()
		}
		switch {
		case r.more && !end:
			return deltas
		case r.more && p.inside && strings.TrimSpace(p.rest) == "": // the wrapper isn't closed
			p.rest = ""
			return deltas
		case r.more || r.bad || head > 0 && tag == closeCalls:
			p.inside = false
			content(head)
		case tag == closeCalls:
			p.inside, p.rest = false, r.rest
		default:
			deltas = append(deltas, Delta{Call: p.calls, Name: call.name})
			for _, fragment := range call.arguments {
				deltas = append(deltas, Delta{Call: p.calls, Arguments: fragment})
			}
			p.calls++
			p.inside, p.rest = true, r.rest
		}
	}
}

// parsedCall is a whole call.
type parsedCall struct {
	name      string
	arguments []string // fragments of JSON
}

// reader reads markup. It comes to know that there must be more text, or that
// the text is bad whatever follows; from then on it takes nothing.
type reader struct {
	rest      string
	more, bad bool
}

func (r *reader) stuck() bool { return r.more || r.bad }

func (r *reader) space() { r.rest = strings.TrimLeft(r.rest, " \t\r\n") }

// take takes the first of the literals that is there, and returns it.
func (r *reader) take(literals ...string) string {
	if r.stuck() {
		return ""
	}
	for _, l := range literals {
		if strings.HasPrefix(r.rest, l) {
			r.rest = r.rest[len(l):]
			return l
		}
		r.more = r.more || strings.HasPrefix(l, r.rest)
	}
	r.bad = !r.more
	return ""
}

// name reads a name and the quotation mark after it.
func (r *reader) name() string {
	if r.stuck() {
		return ""
	}
	n := strings.IndexAny(r.rest, "\"<>\n")
	r.more = n < 0 && len(r.rest) <= nameLimit
	r.bad = !r.more && (n <= 0 || n > nameLimit || r.rest[n] != '"')
	if r.stuck() {
		return ""
	}
	name := r.rest[:n]
	r.rest = r.rest[n+1:]
	return name
}

// until reads up to a closing tag, which it takes; other markup before it is
// bad.
func (r *reader) until(tag string) string {
	if r.stuck() {
		return ""
	}
	n := strings.Index(r.rest, "<"+mark)
	if m := strings.Index(r.rest, "</"+mark); n < 0 || m >= 0 && m < n {
		n = m
	}
	if n < 0 {
		r.more = true
		return ""
	}
	text := r.rest[:n]
	r.rest = r.rest[n:]
	r.take(tag)
	return text
}

// invoke reads a call from its name on.
func (r *reader) invoke() (call parsedCall) {
	call.name = r.name()
	if r.take(">", "/>") == "/>" {
		call.arguments = []string{"{}"}
		return call
	}
	r.space()
	if strings.HasPrefix(r.rest, "{") {
		object := strings.TrimSpace(r.until(closeInvoke))
		r.bad = r.bad || !r.more && !isObject(object)
		call.arguments = []string{object}
		return call
	}
	separator := "{"
	for r.take(openParameter, closeInvoke) == openParameter {
		call.arguments = append(call.arguments, separator+r.parameter())
		separator = ","
		r.space()
	}
	if len(call.arguments) == 0 {
		separator = "{}"
	} else {
		separator = "}"
	}
	call.arguments = append(call.arguments, separator)
	return call
}

// parameter reads a parameter from its name on, as a member of a JSON object.
func (r *reader) parameter() string {
	key := r.name()
	r.take(` string="`)
	kind := r.take(`true">`, `false">`)
	value := r.until(closeParameter)
	if kind == `true">` || !json.Valid([]byte(value)) {
		value = quote(value)
	}
	return quote(key) + ":" + strings.TrimSpace(value)
}

func quote(s string) string { return string(marshal(s)) }

func isObject(s string) bool { return strings.HasPrefix(s, "{") && json.Valid([]byte(s)) }

// overlap is the length of the longest end of text that tag begins with, the
// whole tag excepted.
func overlap(text, tag string) int {
	for n := min(len(text), len(tag)-1); n > 0; n-- {
		if strings.HasSuffix(text, tag[:n]) {
			return n
		}
	}
	return 0
}

// ParseStrict reads a whole reply in which each byte is where the model was
// taught to put it. Anything else is an error that says where.
func ParseStrict(text string) (content string, calls []openai.FunctionCall, err error) {
	content, markup, found := strings.Cut(text, openCalls+"\n")
	if strings.Contains(content, mark) {
		return "", nil, fmt.Errorf("byte %d: markup outside of a call", strings.Index(content, mark))
	}
	if !found {
		return content, nil, nil
	}
	r := strict{text: text, at: len(text) - len(markup)}
	if content != "" {
		text, ok := strings.CutSuffix(content, separator)
		if !ok || text == "" {
			return "", nil, fmt.Errorf("byte %d: no text and two line feeds before the calls", len(content))
		}
		content = text
	}
	for r.err == nil && (len(calls) == 0 || r.peek(openInvoke)) {
		calls = append(calls, r.invoke())
	}
	r.want(closeCalls)
	if r.err == nil && r.at != len(r.text) {
		r.fail("text after the calls")
	}
	if r.err != nil {
		return "", nil, r.err
	}
	return content, calls, nil
}

type strict struct {
	text string
	at   int
	err  error // the first
}

func (r *strict) fail(what string) {
	if r.err == nil {
		r.err = fmt.Errorf("byte %d: %s", r.at, what)
	}
}

func (r *strict) peek(literal string) bool { return strings.HasPrefix(r.text[r.at:], literal) }

func (r *strict) want(literal string) {
	switch {
	case r.err != nil:
	case r.peek(literal):
		r.at += len(literal)
	default:
		r.fail(fmt.Sprintf("want %q, found %.40q", literal, r.text[r.at:]))
	}
}

// until reads up to a literal, which it takes.
func (r *strict) until(literal string) string {
	if r.err != nil {
		return ""
	}
	n := strings.Index(r.text[r.at:], literal)
	if n < 0 {
		r.fail(fmt.Sprintf("no %q", literal))
		return ""
	}
	s := r.text[r.at : r.at+n]
	r.at += n + len(literal)
	return s
}

func (r *strict) name() string {
	s := r.until(`"`)
	if r.err == nil && (s == "" || len(s) > nameLimit || strings.ContainsAny(s, "<>\n")) {
		r.fail(fmt.Sprintf("%.40q is no name", s))
	}
	return s
}

func (r *strict) invoke() (call openai.FunctionCall) {
	r.want(openInvoke)
	call.Name = r.name()
	r.want(">\n")
	if r.err == nil && r.peek("{") {
		call.Arguments = r.until(closeInvoke + "\n")
		if !isObject(call.Arguments) {
			r.fail("arguments that are no JSON object")
		}
		return call
	}
	var arguments strings.Builder
	seen := map[string]bool{}
	separator := "{"
	for r.err == nil && r.peek(openParameter) {
		r.want(openParameter)
		key := r.name()
		r.want(` string="`)
		kind := r.until(`">`)
		value := r.until(closeParameter + "\n")
		switch {
		case seen[key]:
			r.fail(fmt.Sprintf("parameter %q for the second time", key))
		case strings.Contains(value, mark):
			r.fail("markup in a value")
		case kind == "true":
			value = quote(value)
		case kind != "false":
			r.fail(fmt.Sprintf(`string="%.40s"`, kind))
		case !json.Valid([]byte(value)):
			r.fail("a value that is no JSON")
		}
		seen[key] = true
		arguments.WriteString(separator + quote(key) + ":" + value)
		separator = ","
	}
	r.want(closeInvoke + "\n")
	if len(seen) == 0 {
		arguments.WriteString("{")
	}
	call.Arguments = arguments.String() + "}"
	return call
}

package oracle

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/coregx/ahocorasick"
	"github.com/go-faster/jx"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// Classes of a reply that should have been one known tool call. An op gets at
// most one of them: the first that applies, in this order. MarkupLeak is also
// judged where no call was due.
const (
	MarkupLeak     Class = "MarkupLeak"     // call markup in text, name or arguments
	DroppedCall    Class = "DroppedCall"    // no call where one was due
	InvalidJSON    Class = "InvalidJson"    // arguments that aren't a JSON object
	UnknownName    Class = "UnknownName"    // a tool that the request doesn't have
	SchemaMismatch Class = "SchemaMismatch" // arguments that the tool's schema refuses
	WrongArgument  Class = "WrongArgument"  // a sound call, but not the right one
)

// ToolCall judges ops whose only right tool call is known.
var ToolCall = Oracle{
	Name:    "toolcall",
	Classes: []Class{MarkupLeak, DroppedCall, InvalidJSON, UnknownName, SchemaMismatch, WrongArgument},
	New: func(history.Header) Observer {
		return &toolCallObserver{toolsets: map[string]toolset{}}
	},
}

// markup is what the common families of models write around tool calls, and
// what is left of it when it is damaged. None of it belongs into what a user
// or a program reads: a server takes it out when it turns it into tool_calls.
var markup = mustAutomaton(markupLiterals)

var markupLiterals = []string{
	"DSML", "<｜", "｜>", "tool▁call", "function<｜", // DeepSeek: fullwidth bars
	"<tool_call", "</tool_call", "<function=", "</function>", "<parameter=", "</parameter>", // Hermes, Qwen, and others in their wake
	"<tools>", "</tools>", "<TOOLCALL>", "</TOOLCALL>", "<function_call", "</function_call", "<start_function_call>",
	"<invoke", "</invoke>", "<parameter name", "<arg_key>", "<arg_value>", "</arg_key>", "</arg_value>", // XML dialects, GLM
	"[TOOL_CALLS]", "[/TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[TOOL_RESULTS]", // Mistral
	"<|python_tag|>", "<|tool_call", "<|tool▁", "<|tool_response", "<|action_start|>", "<|action_end|>", "<|plugin|>", "<|interpreter|>", // Llama, Kimi, InternLM
	"<|START_ACTION|>", "<|END_ACTION|>", // Command
	"<|channel|>", "<|message|>", "<|call|>", "<|constrain|>", "to=functions.", // Harmony
}

// Markup returns what the oracles know of models' own control text: call
// markup, and special tokens that don't have the form <|...|>.
func Markup() []string { return slices.Concat(markupLiterals, bracketTokens, angleTokens) }

// mustAutomaton compiles literals that are known to be good.
func mustAutomaton(literals []string) *ahocorasick.Automaton {
	a, err := ahocorasick.NewBuilder().AddStrings(literals).Build()
	if err != nil {
		panic(err)
	}
	return a
}

type toolCallObserver struct {
	toolsets map[string]toolset // by the bytes of the request's tools
	buf      []byte
}

// toolset is a request's tools by name; nil for one whose schema is missing or
// unusable.
type toolset map[string]*jsonschema.Schema

func (o *toolCallObserver) Op(v *View, rec *Recorder) {
	if !v.Complete() {
		return
	}
	if v.Op.Expect.Call == nil {
		rec.Trial(v.Op.ID, MarkupLeak)
		if note := o.leak(v.Texts()); note != "" {
			rec.Violation(Violation{Class: MarkupLeak, Op: v.Op.ID, Want: "text without call markup", Got: shownReply(v.Reply), Note: note})
		}
		return
	}
	rec.Trial(v.Op.ID, ToolCall.Classes...)
	var class Class
	var note string
	if v.Op.Expect.TextCall {
		class, note = o.textCall(v)
	} else {
		class, note = o.call(v)
	}
	if class != "" {
		if v.Reply.FinishReason == "length" {
			note += "; the reply was cut at the token limit"
		}
		rec.Violation(Violation{Class: class, Op: v.Op.ID, Want: shownCall(v.Op.Expect.Call), Got: shownReply(v.Reply), Note: note})
	}
}

// Event is for observers that look beside the ops.
func (o *toolCallObserver) Event(*history.Event, *Recorder) {}

// Finish has nothing left to say.
func (o *toolCallObserver) Finish(*Recorder) {}

// call classifies a reply that should hold one entry of tool_calls.
func (o *toolCallObserver) call(v *View) (Class, string) {
	if note := o.leak(v.Texts()); note != "" {
		return MarkupLeak, note
	}
	calls := v.Reply.ToolCalls
	if len(calls) == 0 {
		return DroppedCall, fmt.Sprintf("no tool call; finish reason %q", v.Reply.FinishReason)
	}
	want := v.Op.Expect.Call
	arguments := make([]map[string]any, len(calls))
	for i, c := range calls {
		var note string
		if arguments[i], note = decodeArguments(c.Function.Arguments); note != "" {
			return InvalidJSON, note
		}
		if note := tail(arguments[i], want); note != "" {
			return MarkupLeak, note
		}
	}
	tools := o.tools(v.Op.Request)
	for _, c := range calls {
		if _, ok := tools[c.Function.Name]; tools != nil && !ok {
			return UnknownName, fmt.Sprintf("the request has no tool %q", c.Function.Name)
		}
	}
	for i, c := range calls {
		if note := mismatch(tools[c.Function.Name], arguments[i]); note != "" {
			return SchemaMismatch, note
		}
	}
	if note := difference(want, calls[0].Function.Name, arguments[0]); note != "" {
		return WrongArgument, note
	}
	if len(calls) > 1 {
		return WrongArgument, fmt.Sprintf("%d calls where one was due", len(calls))
	}
	return "", ""
}

// textCall classifies a reply that should hold the call as JSON in its text,
// {"name": ..., "arguments": {...}}. What stands around the object is the
// model's manner, not an error: fences, prose, a second thought.
func (o *toolCallObserver) textCall(v *View) (Class, string) {
	name, arguments, found := findTextCall(v.Reply.Content)
	if !found {
		if strings.Contains(v.Reply.Content, "{") {
			return InvalidJSON, "no JSON object with a name and arguments can be read from the text"
		}
		if note := o.leak(v.Texts()); note != "" {
			return MarkupLeak, note
		}
		return DroppedCall, fmt.Sprintf("no JSON object in the text; finish reason %q", v.Reply.FinishReason)
	}
	want := v.Op.Expect.Call
	parts := []Text{{"name", name}}
	for _, key := range slices.Sorted(maps.Keys(arguments)) {
		parts = append(parts, Text{"argument " + strconv.Quote(key), shownValue(arguments[key])})
	}
	if note := o.leak(parts); note != "" {
		return MarkupLeak, note
	}
	if note := tail(arguments, want); note != "" {
		return MarkupLeak, note
	}
	if tools := o.tools(v.Op.Request); tools != nil {
		schema, ok := tools[name]
		if !ok {
			return UnknownName, fmt.Sprintf("the request has no tool %q", name)
		}
		if note := mismatch(schema, arguments); note != "" {
			return SchemaMismatch, note
		}
	}
	if note := difference(want, name, arguments); note != "" {
		return WrongArgument, note
	}
	return "", ""
}

// leak says where call markup stands in the texts; "" when nowhere.
func (o *toolCallObserver) leak(texts []Text) string {
	for _, t := range texts {
		o.buf = append(o.buf[:0], t.Text...)
		if m, ok := markup.Find(o.buf, 0); ok {
			return fmt.Sprintf("%q in %s", o.buf[m.Start:m.End], t.Where)
		}
	}
	return ""
}

// tail finds the end of an XML element, "Paris</city>", in a string argument
// that should have none: an XML dialect cut in the wrong place.
func tail(arguments map[string]any, want *history.Call) string {
	for key, value := range arguments {
		s, _ := value.(string)
		start := strings.LastIndex(s, "</")
		if start < 0 || strings.Contains(want.Arguments[key], "</") {
			continue
		}
		if end := strings.TrimSpace(s[start:]); strings.HasSuffix(end, ">") {
			return fmt.Sprintf("%q at the end of argument %q", end, key)
		}
	}
	return ""
}

// tools reads the request's tools; nil when it has none.
func (o *toolCallObserver) tools(request []byte) toolset {
	var raw jx.Raw
	d := jx.GetDecoder()
	defer jx.PutDecoder(d)
	d.ResetBytes(request)
	err := d.ObjBytes(func(d *jx.Decoder, key []byte) (err error) {
		if string(key) == "tools" {
			raw, err = d.Raw()
			return err
		}
		return d.Skip()
	})
	if err != nil || len(raw) == 0 {
		return nil
	}
	if t, ok := o.toolsets[string(raw)]; ok {
		return t
	}
	t := compileTools(raw)
	o.toolsets[string(raw)] = t
	return t
}

func compileTools(raw []byte) toolset {
	var tools []openai.Tool
	if err := json.Unmarshal(raw, &tools); err != nil || len(tools) == 0 {
		return nil
	}
	t := toolset{}
	for _, tool := range tools {
		// A schema that can't be compiled judges nothing: it is the
		// request that is odd, not the reply.
		schema, _ := compileSchema(tool.Function.Parameters)
		t[tool.Function.Name] = schema
	}
	return t
}

// decodeArguments reads a call's arguments. A call without any may leave the
// text empty.
func decodeArguments(text string) (map[string]any, string) {
	if strings.TrimSpace(text) == "" {
		return map[string]any{}, ""
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(text))
	if err != nil {
		return nil, "arguments: " + err.Error()
	}
	object, ok := value.(map[string]any)
	if !ok {
		return nil, "arguments: not a JSON object"
	}
	return object, ""
}

// A call is looked for at so many places of so long a text: a hostile reply of
// a million braces costs no more.
const (
	maxTextObjects = 64
	maxTextBytes   = 256 << 10
)

// findTextCall finds the first JSON object in the text that looks like a call.
func findTextCall(text string) (name string, arguments map[string]any, found bool) {
	text = text[:min(len(text), maxTextBytes)]
	for range maxTextObjects {
		start := strings.IndexByte(text, '{')
		if start < 0 {
			break
		}
		text = text[start:]
		d := json.NewDecoder(strings.NewReader(text))
		d.UseNumber()
		var object map[string]any
		if d.Decode(&object) == nil {
			if name, arguments, found = asCall(object); found {
				return name, arguments, true
			}
		}
		text = text[1:]
	}
	return "", nil, false
}

// asCall reads an object as a call. Models vary the two keys.
func asCall(object map[string]any) (name string, arguments map[string]any, ok bool) {
	for _, key := range []string{"name", "tool", "function"} {
		if name, ok = object[key].(string); ok {
			break
		}
	}
	if !ok {
		return "", nil, false
	}
	for _, key := range []string{"arguments", "parameters", "args"} {
		if arguments, ok = object[key].(map[string]any); ok {
			return name, arguments, true
		}
	}
	return "", nil, false
}

// difference says how a call differs from the right one; "" when it doesn't.
func difference(want *history.Call, name string, arguments map[string]any) string {
	if name != want.Name {
		return fmt.Sprintf("tool %q instead of %q", name, want.Name)
	}
	for _, key := range slices.Sorted(maps.Keys(want.Arguments)) {
		value, ok := arguments[key]
		if !ok {
			return fmt.Sprintf("argument %q is missing", key)
		}
		if !sameValue(want.Arguments[key], value) {
			return fmt.Sprintf("argument %q: %q instead of %q", key, clip(shownValue(value), 200), clip(want.Arguments[key], 200))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(arguments)) {
		if _, ok := want.Arguments[key]; !ok {
			return fmt.Sprintf("argument %q was not asked for", key)
		}
	}
	return ""
}

// sameValue compares a JSON value with the expected one, which is kept as
// text: a number is equal to it by value, anything else by its text.
func sameValue(want string, got any) bool {
	if n, ok := got.(json.Number); ok {
		w, err := strconv.ParseFloat(want, 64)
		g, err2 := n.Float64()
		return err == nil && err2 == nil && w == g
	}
	return shownValue(got) == want
}

// shownValue is a JSON value as text: a string as it is, the rest as JSON.
func shownValue(value any) string {
	if s, ok := value.(string); ok {
		return s
	}
	b, err := json.Marshal(value)
	if err != nil {
		return fmt.Sprint(value)
	}
	return string(b)
}

// shownCall is a call as a reader likes to see it: name {"key":"value"}.
func shownCall(c *history.Call) string {
	b, err := json.Marshal(c.Arguments)
	if err != nil {
		return c.Name
	}
	return c.Name + " " + string(b)
}

// shownReply is a reply in the same form: the calls, else the text.
func shownReply(r *openai.Reply) string {
	parts := make([]string, 0, 2+len(r.ToolCalls))
	for _, c := range r.ToolCalls {
		parts = append(parts, c.Function.Name+" "+c.Function.Arguments)
	}
	if r.Content != "" {
		parts = append(parts, r.Content)
	}
	if len(parts) == 0 && r.Reasoning != "" {
		parts = append(parts, "(reasoning only) "+r.Reasoning)
	}
	if len(parts) == 0 {
		return "(nothing)"
	}
	return strings.Join(parts, "\n")
}

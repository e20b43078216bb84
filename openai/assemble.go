package openai

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/go-faster/jx"
)

// What can be out of order on the wire, as Reply.Anomalies names it.
const (
	InvalidJSON         = "invalid-json"          // an event or body that isn't one JSON value; nothing of it is used
	WrongType           = "wrong-type"            // a field of another JSON type than the protocol has
	UnknownChunk        = "unknown-chunk"         // an object without choices, usage or error
	OtherChoice         = "other-choice"          // a choice whose index isn't 0, when one was asked for; it is left out
	AfterDone           = "after-done"            // data after [DONE]
	AfterFinish         = "after-finish"          // text or tool calls after the finish reason
	AfterError          = "after-error"           // text, tool calls or a finish reason after an error
	FinishChanged       = "finish-changed"        // a second finish reason, other than the first
	IDChanged           = "id-changed"            // a chunk with another id than the first
	ModelChanged        = "model-changed"         // a chunk with another model than the first
	RoleChanged         = "role-changed"          // a role other than assistant
	ToolIndexMissing    = "tool-index-missing"    // a streamed tool call without index
	ToolIndexGap        = "tool-index-gap"        // a tool call whose index skips one
	ToolIndexBack       = "tool-index-back"       // a tool call goes on after a later one began
	ToolIDMissing       = "tool-id-missing"       // a tool call without id
	ToolIDChanged       = "tool-id-changed"       // a tool call's id, other than its first
	ToolNameRepeated    = "tool-name-repeated"    // a delta that gives a call's name once more; it is taken once
	TooManyToolCalls    = "too-many-tool-calls"   // more than 1024; the rest is left out
	ToolArgumentsObject = "tool-arguments-object" // arguments as JSON, not as a string of JSON; its text is kept
)

const (
	errorTextLimit = 4 << 10 // bytes kept of an error's text
	maxToolCalls   = 1 << 10
	noIndex        = -1
)

var done = []byte("[DONE]")

// Assembler puts a stream's deltas together. The zero value is ready. Nothing
// that a server sends makes it panic: what can't be used is left out and named
// in the reply's Anomalies.
//
// Strings keep their bytes, whether or not they are UTF-8. An escape of half a
// surrogate pair becomes U+FFFD.
type Assembler struct {
	reply     Reply // all but what is below
	content   []byte
	reasoning []byte
	calls     []call // by position in the reply
	lastCall  int    // position of the call that the last delta was for
	usage     Usage
	byTier    *CachedByTier
	hasUsage  bool

	dec   jx.Decoder
	chunk chunk
	frame frame
}

// call is a tool call in the making. The buffers are used again.
type call struct {
	index           int
	id, kind        string
	name, arguments []byte
}

// Add takes one event's data.
func (a *Assembler) Add(data []byte) {
	if a.reply.Done {
		a.anomaly(AfterDone)
	}
	if isDone(data) {
		a.reply.Done = true
		return
	}
	a.add(data, true)
}

func (a *Assembler) add(data []byte, streamed bool) {
	if a.addFramed(data) {
		return
	}
	c := &a.chunk
	c.reset()
	a.dec.ResetBytes(data)
	if err := c.decode(&a.dec); err != nil || !atEnd(&a.dec) {
		a.anomaly(InvalidJSON)
		return
	}
	a.apply(c, streamed)
	a.learn(data)
}

func isDone(data []byte) bool {
	return len(data) < 64 && bytes.Equal(bytes.TrimSpace(data), done)
}

// frame is what the chunks of a stream have in common: nearly all of their
// bytes. A chunk that starts with head and ends with tail differs from the one
// that they were learned from in one string alone, and all that it does is to
// append that string to text.
type frame struct {
	head, tail []byte // with the string's quotes; empty when there is no frame
	text       textKind
}

type textKind int

const (
	contentText textKind = iota
	reasoningText
	argumentsText // of the last call
)

// addFramed adds a chunk that fits the frame, several times faster than
// decoding the whole of it.
func (a *Assembler) addFramed(data []byte) bool {
	f := &a.frame
	if len(f.head) == 0 || len(data) < len(f.head)+len(f.tail) || !bytes.HasPrefix(data, f.head) || !bytes.HasSuffix(data, f.tail) {
		return false
	}
	if a.reply.FinishReason != "" || a.reply.Err != nil {
		return false // there may be an anomaly to name
	}
	a.dec.ResetBytes(data[len(f.head)-1 : len(data)-len(f.tail)+1])
	buf := a.framed()
	text, err := a.dec.StrAppend(*buf)
	if err != nil || !atEnd(&a.dec) {
		return false
	}
	*buf = text
	return true
}

func (a *Assembler) framed() *[]byte {
	switch a.frame.text {
	case reasoningText:
		return &a.reasoning
	case argumentsText:
		return &a.calls[a.lastCall].arguments
	default:
		return &a.content
	}
}

// learn makes the frame of the chunk that was just applied, if it did nothing
// but append one text.
func (a *Assembler) learn(data []byte) {
	c, f := &a.chunk, &a.frame
	f.head = f.head[:0]
	if c.texts != 1 || len(c.text) == 0 || len(c.finish) > 0 || c.hasUsage || c.byTier != nil || c.err != nil || len(c.logprobs) > 0 {
		return
	}
	switch {
	case len(c.content) > 0:
		f.text = contentText
	case len(c.reasoning) > 0:
		f.text = reasoningText
	case len(c.calls) == 1 && c.calls[0].onlyArguments() && len(a.calls) < maxToolCalls:
		f.text = argumentsText
	default:
		return
	}
	start := cap(data) - cap(c.text) // slices of one array end at the same place
	if start < 1 || start >= len(data) || &data[start] != &c.text[0] {
		return // the string had escapes, and is a copy
	}
	f.head = append(f.head, data[:start]...)
	f.tail = append(f.tail[:0], data[start+len(c.text):]...)
}

func (a *Assembler) apply(c *chunk, streamed bool) {
	if c.wrongType {
		a.anomaly(WrongType)
	}
	if c.otherChoice {
		a.anomaly(OtherChoice)
	}
	if !c.hasChoices && !c.hasUsage && c.err == nil {
		a.anomaly(UnknownChunk)
	}
	a.first(&a.reply.ID, c.id, IDChanged)
	a.first(&a.reply.Model, c.model, ModelChanged)
	if len(c.role) > 0 && string(c.role) != "assistant" {
		a.anomaly(RoleChanged)
	}
	if c.hasUsage {
		a.usage, a.hasUsage = c.usage, true
	}
	if c.byTier != nil {
		a.byTier = c.byTier
	}

	text := len(c.content) > 0 || len(c.reasoning) > 0 || len(c.calls) > 0
	if text && a.reply.FinishReason != "" {
		a.anomaly(AfterFinish)
	}
	if a.reply.Err != nil && (text || len(c.finish) > 0) {
		a.anomaly(AfterError)
	}
	a.content = append(a.content, c.content...)
	a.reasoning = append(a.reasoning, c.reasoning...)
	for i := range c.calls {
		a.addCall(&c.calls[i], streamed)
	}
	a.reply.Logprobs = append(a.reply.Logprobs, c.logprobs...)
	a.first(&a.reply.FinishReason, c.finish, FinishChanged)
	if c.err != nil && a.reply.Err == nil {
		a.reply.Err = c.err
	}
}

// addCall adds a delta to its tool call.
func (a *Assembler) addCall(d *callDelta, streamed bool) {
	if !d.hasIndex {
		d.index = a.guessIndex(d, streamed)
	}
	// calls is in the order of its indexes.
	i, known := slices.BinarySearchFunc(a.calls, d.index, func(c call, index int) int { return cmp.Compare(c.index, index) })
	if !known {
		if len(a.calls) == maxToolCalls {
			a.anomaly(TooManyToolCalls)
			return
		}
		a.newCall(i, d, streamed)
	}
	if i < a.lastCall {
		a.anomaly(ToolIndexBack)
	}
	a.lastCall = i
	c := &a.calls[i]
	if len(d.id) > 0 && string(d.id) != c.id {
		if c.id == "" {
			c.id = string(d.id)
		} else {
			a.anomaly(ToolIDChanged)
		}
	}
	if len(d.kind) > 0 && c.kind == "" {
		c.kind = string(d.kind)
	}
	// A name may come in parts. A delta that has the id again is a server
	// that puts the call's whole head into every delta.
	if len(c.name) > 0 && len(d.id) > 0 && bytes.Equal(d.name, c.name) {
		a.anomaly(ToolNameRepeated)
	} else {
		c.name = append(c.name, d.name...)
	}
	if d.object {
		a.anomaly(ToolArgumentsObject)
	}
	c.arguments = append(c.arguments, d.arguments...)
}

// guessIndex finds the call that a delta without index belongs to: the one
// with its id, a new one when it has a new id or comes in a whole reply, or
// else the last one.
func (a *Assembler) guessIndex(d *callDelta, streamed bool) int {
	next := 0
	if n := len(a.calls); n > 0 {
		next = a.calls[n-1].index + 1
	}
	if !streamed {
		return next
	}
	a.anomaly(ToolIndexMissing)
	if len(d.id) > 0 {
		for i := range a.calls {
			if a.calls[i].id == string(d.id) {
				return a.calls[i].index
			}
		}
		return next
	}
	if len(a.calls) == 0 || (len(d.name) > 0 && len(a.calls[a.lastCall].arguments) > 0) {
		return next
	}
	return a.calls[a.lastCall].index
}

// newCall makes room at position i.
func (a *Assembler) newCall(i int, d *callDelta, streamed bool) {
	if d.index != len(a.calls) && streamed {
		a.anomaly(ToolIndexGap)
	}
	if len(d.id) == 0 {
		a.anomaly(ToolIDMissing)
	}
	if len(a.calls) < cap(a.calls) {
		spare := a.calls[:len(a.calls)+1][len(a.calls)]
		a.calls = slices.Insert(a.calls, i, call{index: d.index, name: spare.name[:0], arguments: spare.arguments[:0]})
	} else {
		a.calls = slices.Insert(a.calls, i, call{index: d.index})
	}
	if i <= a.lastCall && len(a.calls) > 1 {
		a.lastCall++ // it moved
	}
}

// first keeps the first value that isn't empty; another one later is out of order.
func (a *Assembler) first(have *string, value []byte, anomaly string) {
	switch {
	case len(value) == 0 || string(value) == *have:
	case *have == "":
		*have = string(value)
	default:
		a.anomaly(anomaly)
	}
}

func (a *Assembler) anomaly(kind string) {
	if !slices.Contains(a.reply.Anomalies, kind) {
		a.reply.Anomalies = append(a.reply.Anomalies, kind)
	}
}

// Reply returns the reply so far; it is the caller's.
func (a *Assembler) Reply() *Reply {
	r := a.reply
	r.Content = string(a.content)
	r.Reasoning = string(a.reasoning)
	if len(a.calls) > 0 {
		r.ToolCalls = make([]ToolCall, len(a.calls))
		for i, c := range a.calls {
			r.ToolCalls[i] = ToolCall{ID: c.id, Type: c.kind, Function: FunctionCall{Name: string(c.name), Arguments: string(c.arguments)}}
		}
	}
	if a.hasUsage {
		usage := a.usage
		usage.ByTier = a.byTier
		r.Usage = &usage
	}
	// What is appended later must not be seen through this reply.
	r.Logprobs = slices.Clip(r.Logprobs)
	r.Anomalies = slices.Clip(r.Anomalies)
	return &r
}

// Reset makes the assembler ready for another stream.
func (a *Assembler) Reset() {
	a.reply = Reply{}
	a.content, a.reasoning = a.content[:0], a.reasoning[:0]
	a.calls, a.lastCall = a.calls[:0], 0
	a.hasUsage, a.byTier = false, nil
	a.frame.head = a.frame.head[:0]
}

// ReadBody reads a reply that was not streamed, or an error body. Whatever
// isn't a reply becomes its Err: an error object in one of the shapes that
// servers use, or the text itself, cut to 4 KiB.
func ReadBody(data []byte) *Reply {
	var a Assembler
	a.add(data, false)
	r := a.Reply()
	if r.Err == nil && !a.chunk.hasChoices {
		r.Err = &APIError{Message: cmp.Or(cut(bytes.TrimSpace(data)), "the body is empty")}
	}
	return r
}

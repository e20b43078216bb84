// Package oracle judges a history: pure functions from the record of a run to
// a verdict. Nothing here reaches the network, so a stored run can be judged
// again by today's oracles.
//
// [Judge] streams a history once. For each op it makes a [View] and shows it
// to every oracle of the [Registry]; an oracle says which classes of violation
// the op could have shown (a trial) and which it did show, and nothing else.
// Rates, intervals, tests against the control arm and the verdict are made
// from these counts, by the rules of the table [Classes].
//
// To add an oracle: one file, a small good and a bad history in testdata, a
// row in registry.go, and its classes with their reasons in thresholds.go.
//
// Stability: may change.
package oracle

import (
	"encoding/json"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// Version is the version of the oracles as a whole. It goes up whenever the
// same history may get another verdict.
const Version = 1

// Status is a verdict in one word.
type Status string

// The verdicts, and what each means for the run.
const (
	Clean        Status = "clean"
	Corrupt      Status = "corrupt"
	Wedged       Status = "wedged"
	Numerics     Status = "numerics"      // differs, but isn't wrong
	NotExercised Status = "not-exercised" // what was to be tested never happened
	Void         Status = "void"          // the server wasn't what the arm claimed
	Inconclusive Status = "inconclusive"  // an assumption failed, an oracle crashed, or a base rate is missing
)

// Class names one kind of violation, as reports show it.
type Class string

// Violation is one op that broke one rule.
type Violation struct {
	Class Class
	Op    int64 // 0 when it isn't about one op
	Want  string
	Got   string
	Note  string
	// Severity orders violations of one class: reports show the worst.
	// Equal ones keep the order of the ops.
	Severity float64
}

// Oracle makes observers.
type Oracle struct {
	Name    string
	Classes []Class // what its observers may report
	New     func(history.Header) Observer
}

// Observer is one oracle at work on one history. It sees each op and event
// once, in the order of the file (ops are written when they end, not when they
// are sent), and must not keep the pointers.
type Observer interface {
	Op(v *View, rec *Recorder)
	Event(e *history.Event, rec *Recorder)
	// Finish comes after the last record, for what can only be said then.
	Finish(rec *Recorder)
}

// View is one op as oracles see it: the record and the reply put together. It
// is valid only during the call it is passed to.
type View struct {
	Op    *history.Op
	Reply *openai.Reply // never nil; empty when nothing came

	request *openai.ChatRequest
	decoded bool
	texts   []Text
}

// Text is one part of a reply that a user or a program would read.
type Text struct {
	Where string // "content", "reasoning", "name" or "arguments"
	Text  string
}

// Complete says that the reply came to its end without an error, so that what
// is missing in it is really missing.
func (v *View) Complete() bool {
	return v.Op.Outcome == history.OK && v.Reply.Err == nil
}

// Texts returns the parts of the reply that aren't empty.
func (v *View) Texts() []Text {
	if v.texts != nil {
		return v.texts
	}
	v.texts = make([]Text, 0, 2+2*len(v.Reply.ToolCalls))
	add := func(where, text string) {
		if text != "" {
			v.texts = append(v.texts, Text{where, text})
		}
	}
	add("content", v.Reply.Content)
	add("reasoning", v.Reply.Reasoning)
	for _, c := range v.Reply.ToolCalls {
		add("name", c.Function.Name)
		add("arguments", c.Function.Arguments)
	}
	return v.texts
}

// Request decodes the op's request; nil when it can't be decoded. It costs
// more than all the rest of an op's judging, so ask for it only where
// something already looks wrong, or for few ops.
func (v *View) Request() *openai.ChatRequest {
	if !v.decoded {
		v.decoded = true
		var r openai.ChatRequest
		if json.Unmarshal(v.Op.Request, &r) == nil {
			v.request = &r
		}
	}
	return v.request
}

// Package oracle judges a history: pure functions from the record of a run to
// a verdict. Nothing here reaches the network, so a stored run can be judged
// again by today's oracles.
//
// Stability: may change.
package oracle

import (
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

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

// View is one op as oracles see it: the record, the reply put together, and
// the request decoded. It is valid only during the call it is passed to.
type View struct {
	Op      *history.Op
	Reply   *openai.Reply
	Request *openai.ChatRequest // nil when the request can't be decoded
}

// Judge is one oracle at work on one history. It sees each op and event once,
// in the order of the file (ops are written when they end, not when they are
// sent), and must not keep the pointers.
type Judge interface {
	Op(v *View)
	Event(e *history.Event)
	// Finish returns what was found, after the last record.
	Finish() []Violation
}

// Violation is one op that broke one rule.
type Violation struct {
	Class Class
	Op    int64 // 0 when it isn't about one op
	Want  string
	Got   string
	Note  string
}

// Oracle makes judges.
type Oracle struct {
	Name    string
	Classes []Class // what its judges may report
	New     func(history.Header) Judge
}

// Class names one kind of violation, as reports show it.
type Class string

package oracle

import (
	"fmt"
	"math/bits"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/culprit-project/culprit/history"
)

// Recorder takes what observers say and keeps count. Its memory is some 150
// bytes per op and a few examples per class, whatever the history's size.
type Recorder struct {
	rows    []row
	legs    map[string]string // one copy of each name
	index   map[int64]int     // op id to its row
	classes []classTally      // in the order of Classes
	byClass map[Class]int
	oracle  *Oracle // at work now: it may report its own classes only
}

// row is what is kept of an op.
type row struct {
	id                 int64
	phase              history.Phase
	session, turn      int
	leg                string
	inFlight           int
	requestBytes       int
	promptTokens       int // -1 when not reported
	cachedTokens       int // -1 when not reported
	tier               tier
	distance           int // turns between telling and asking; -1 when nothing was to be recalled
	planned, sent, end time.Duration
	outcome            history.Outcome
	trials, violations classSet
}

// classSet is a set of classes, by their place in Classes.
type classSet uint64

func (s classSet) has(class int) bool { return s>>class&1 == 1 }

// maxClasses is what a classSet can hold; a test keeps Classes below it.
const maxClasses = bits.UintSize

// classTally is what is kept of a class beside the rows.
type classTally struct {
	rule             Rule
	samples, failing int          // that aren't about one op
	worst            [2][]Example // by arm
}

// Example is one violation to be read by people.
type Example struct {
	Op       int64         `json:"op"`
	Phase    history.Phase `json:"phase,omitempty"`
	Session  int           `json:"session"`
	Turn     int           `json:"turn"`
	Leg      string        `json:"leg,omitempty"`
	Want     string        `json:"want"`
	Got      string        `json:"got"`
	Note     string        `json:"note,omitempty"`
	severity float64
}

const (
	// maxExamples of a class are kept and shown, for each arm.
	maxExamples = 3
	// maxExampleBytes of each text of an example are kept: enough to read
	// what happened, and the op has the rest.
	maxExampleBytes = 2000
)

// The arms of a run. Everything but the control phase is under load or comes
// after it.
const (
	mainArm = iota
	controlArm
)

func (r *row) arm() int {
	if r.phase == history.Control {
		return controlArm
	}
	return mainArm
}

// corruptClasses are those that mean corruption.
func (r *Recorder) corruptClasses() classSet {
	var s classSet
	for class, t := range r.classes {
		if t.rule.Means == Corrupt {
			s |= 1 << class
		}
	}
	return s
}

// beside says that the op was sent beside the sessions, whose rate under load
// is compared with their rate alone: it is no part of that comparison.
func (r *row) beside() bool {
	return r.phase == history.Recovery || r.phase == history.Sentinel
}

func newRecorder() *Recorder {
	r := &Recorder{index: map[int64]int{}, legs: map[string]string{}, byClass: map[Class]int{}}
	for i, rule := range Classes {
		r.classes = append(r.classes, classTally{rule: rule})
		r.byClass[rule.Class] = i
	}
	return r
}

// add makes an op known, before any observer sees it.
func (r *Recorder) add(v *View) {
	op := v.Op
	w := row{
		id: op.ID, phase: op.Phase, session: op.Session, turn: op.Turn, inFlight: op.InFlight,
		requestBytes: len(op.Request), promptTokens: -1, cachedTokens: -1, distance: -1,
		planned: op.Planned, sent: op.Sent, end: op.LastByte, outcome: op.Outcome,
	}
	if leg := op.Expect.Leg; leg != "" {
		if _, ok := r.legs[leg]; !ok {
			r.legs[leg] = leg
		}
		w.leg = r.legs[leg]
	}
	if op.Expect.Answer != "" {
		w.distance = op.Expect.Distance
	}
	if u := v.Reply.Usage; u != nil {
		w.promptTokens, w.cachedTokens, w.tier = u.PromptTokens, u.CachedTokens, tierOf(u)
	}
	r.index[op.ID] = len(r.rows)
	r.rows = append(r.rows, w)
}

// Trial says that an op could have shown these classes; an op is one trial of
// a class however often this is said. op 0 is a sample that isn't about one
// op; each call counts.
func (r *Recorder) Trial(op int64, classes ...Class) {
	for _, c := range classes {
		class := r.class(c)
		if op == 0 {
			r.classes[class].samples++
		} else {
			r.row(op).trials |= 1 << class
		}
	}
}

// Violation says that a trial failed; several violations of one class by one
// op count once. A violation is a trial too.
func (r *Recorder) Violation(v Violation) {
	class := r.class(v.Class)
	t := &r.classes[class]
	e := Example{
		Op: v.Op, Want: clip(v.Want, maxExampleBytes), Got: clip(v.Got, maxExampleBytes),
		Note: clip(v.Note, maxExampleBytes), severity: v.Severity,
	}
	arm := mainArm
	if v.Op == 0 {
		t.failing++
	} else {
		w := r.row(v.Op)
		again := w.violations.has(class)
		w.trials |= 1 << class
		w.violations |= 1 << class
		arm = w.arm()
		e.Phase, e.Session, e.Turn, e.Leg = w.phase, w.session, w.turn, w.leg
		if again && slices.ContainsFunc(t.worst[arm], func(o Example) bool { return o.Op == v.Op && o.severity >= e.severity }) {
			return
		}
		t.worst[arm] = slices.DeleteFunc(t.worst[arm], func(o Example) bool { return o.Op == v.Op })
	}
	at, _ := slices.BinarySearchFunc(t.worst[arm], e, worse)
	if at < maxExamples {
		t.worst[arm] = slices.Insert(t.worst[arm], at, e)
		t.worst[arm] = t.worst[arm][:min(len(t.worst[arm]), maxExamples)]
	}
}

// worse orders examples: the most severe first, then the earliest op.
func worse(a, b Example) int {
	switch {
	case a.severity > b.severity:
		return -1
	case a.severity < b.severity:
		return 1
	default:
		return int(a.Op - b.Op)
	}
}

// class finds a class of the oracle at work. Reporting any other is a mistake
// in the oracle, and is treated as its crash.
func (r *Recorder) class(c Class) int {
	class, ok := r.byClass[c]
	if !ok {
		panic(fmt.Sprintf("class %q has no row in the table of classes", c))
	}
	if r.oracle != nil && !slices.Contains(r.oracle.Classes, c) {
		panic(fmt.Sprintf("class %q isn't declared by the oracle", c))
	}
	return class
}

func (r *Recorder) row(op int64) *row {
	i, ok := r.index[op]
	if !ok {
		panic(fmt.Sprintf("there is no op %d", op))
	}
	return &r.rows[i]
}

// clip shortens a text to about n bytes, at a character's end.
func clip(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + " ... (" + fmt.Sprint(len(s)-n) + " more bytes)"
}

// around shows a piece of a text with what stands beside it.
func around(text string, start, end int) string {
	const beside = 120
	from, to := max(0, start-beside), min(len(text), end+beside)
	s := strings.ToValidUTF8(text[from:to], "")
	if from > 0 {
		s = "... " + s
	}
	if to < len(text) {
		s += " ..."
	}
	return s
}

// Package amplify searches for the load under which a failure is most
// frequent, and measures what it finds on runs of their own. It sends nothing
// and has no clock: shapes and outcomes in, the next trial out.
//
// Stability: may change.
package amplify

import (
	"encoding/json"
	"maps"
	"slices"

	"github.com/culprit-project/culprit/workload"
)

// Shape is a load: what is sent, and how. Its sessions, seed and run key don't
// count; each trial has its own.
type Shape struct {
	Workload    workload.Plan `json:"workload"` // complete
	Concurrency int           `json:"concurrency,omitempty"`
	RequestRate float64       `json:"request_rate,omitempty"`
	Waves       bool          `json:"waves,omitempty"`
}

// Settings are the shape's, by their names in a case: of the workload and of
// the load. What isn't set isn't there.
func (s Shape) Settings() map[string]any {
	settings := map[string]any{}
	for _, part := range []any{s.Workload, s} {
		b, err := json.Marshal(part)
		if err == nil {
			err = json.Unmarshal(b, &settings)
		}
		if err != nil {
			panic(err) // numbers and texts
		}
	}
	for _, name := range []string{"version", "seed", "run_key", "sessions", "workload"} {
		delete(settings, name)
	}
	for name, value := range settings {
		if n, ok := value.(float64); ok && n == float64(int(n)) {
			settings[name] = int(n)
		}
	}
	return settings
}

// turns is how many requests a session has.
func (s Shape) turns() int {
	w, err := workload.New(s.Workload)
	if err != nil {
		return 1
	}
	return max(workload.Turns(w, 0), 1)
}

// Move changes a shape in one way. It says false where it would change nothing.
type Move struct {
	Name  string
	Apply func(Shape) (Shape, bool)
}

// Moves are the changes that are tried: those under which servers were seen to
// fail more often.
func Moves() []Move {
	moves := []Move{
		{"2x concurrency", func(s Shape) (Shape, bool) {
			s.Concurrency *= 2
			return s, s.RequestRate == 0
		}},
		{"1/2 concurrency", func(s Shape) (Shape, bool) {
			s.Concurrency /= 2
			return s, s.RequestRate == 0 && s.Concurrency > 1 // one alone is what a control is for
		}},
		{"waves", func(s Shape) (Shape, bool) {
			s.Waves = true
			return s, s.RequestRate == 0
		}},
		{"2x rate", func(s Shape) (Shape, bool) {
			s.RequestRate *= 2
			return s, s.RequestRate > 0
		}},
		{"fillers", func(s Shape) (Shape, bool) {
			w := &s.Workload
			if w.Fillers > 0 {
				return s, false
			}
			w.Fillers, w.FillerLines = 1, max(s.lines(), 8)
			return s, true
		}},
		knob("2x fillers", func(w *workload.Plan) *int { return &w.Fillers }, twice),
		knob("2x filler lines", func(w *workload.Plan) *int { return &w.FillerLines }, twice),
		{"cancels", func(s Shape) (Shape, bool) {
			s.Workload.CancelEvery = 3
			return s, true
		}},
		{"mixed lengths", func(s Shape) (Shape, bool) {
			s.Workload.ShortEvery = 2
			return s, s.Workload.ContextLines+s.Workload.CopyLines > 0
		}},
		knob("2x context", func(w *workload.Plan) *int { return &w.ContextLines }, twice),
		knob("1/2 context", func(w *workload.Plan) *int { return &w.ContextLines }, half),
		{"2x outputs", func(s Shape) (Shape, bool) {
			s.Workload.CopyLines *= 2
			s.Workload.MaxTokens *= 2
			return s, s.Workload.CopyLines > 0
		}},
		knob("2x rounds", func(w *workload.Plan) *int { return &w.Rounds }, twice),
		knob("1/2 rounds", func(w *workload.Plan) *int { return &w.Rounds }, half),
	}
	for _, kind := range workload.Kinds() {
		moves = append(moves, Move{kind, func(s Shape) (Shape, bool) { return s.as(kind) }})
	}
	return moves
}

func twice(n int) int { return 2 * n }
func half(n int) int  { return n / 2 }

func knob(name string, field func(*workload.Plan) *int, change func(int) int) Move {
	return Move{name, func(s Shape) (Shape, bool) {
		n := field(&s.Workload)
		*n = change(*n)
		return s, *n > 0
	}}
}

// lines is about how many lines of facts a prompt has.
func (s Shape) lines() int {
	const unknown = 24
	switch w := s.Workload; {
	case w.ContextLines > 0:
		return w.ContextLines
	case w.CopyLines > 0:
		return w.CopyLines
	}
	return unknown
}

// as is another kind of workload with prompts of about the same length, so that
// it fits where this one does, under the same knobs of the load.
func (s Shape) as(kind string) (Shape, bool) {
	from := s.Workload
	if from.Kind == kind {
		return s, false
	}
	to := workload.Plan{
		Kind: kind, Version: from.Version, Seed: from.Seed, RunKey: from.RunKey, Sessions: from.Sessions,
		Logprobs: from.Logprobs, TopLogprobs: from.TopLogprobs,
	}
	defaults, err := to.WithDefaults()
	if err != nil {
		return s, false
	}
	lines := s.lines()
	scale := func(n *int, of, lines int) {
		if of > 0 {
			*n = max(lines, 2)
		}
	}
	scale(&to.ContextLines, defaults.ContextLines, lines)
	switch kind {
	case "echo": // what is copied stands in the prompt and in the reply
		scale(&to.CopyLines, defaults.CopyLines, lines*3/4)
	case "recall": // a round tells two lines
		to.Rounds = max(lines/3, 2)
	case "evict":
		to.Fillers = 1
		scale(&to.FillerLines, defaults.FillerLines, lines*3/2)
	}
	// A model that thinks needs the room that it was given.
	usual := func(p workload.Plan) int {
		p.MaxTokens = 0
		p, _ = p.WithDefaults() // 0 where it can't be had, which is no less than that
		return p.MaxTokens
	}
	if from.MaxTokens > usual(from) {
		to.MaxTokens = max(from.MaxTokens, usual(to))
	}
	if defaults.OnError != "" {
		to.OnError = from.OnError
	}
	if defaults.Tools != "" {
		to.Tools = from.Tools
	}
	to.ShortEvery = from.ShortEvery
	if defaults.CancelChunks == 0 && from.CancelEvery > 0 {
		to.CancelEvery, to.CancelWithinMS, to.CancelChunks = from.CancelEvery, from.CancelWithinMS, from.CancelChunks
	}
	if from.Kind != "evict" && from.Fillers > 0 {
		to.Fillers, to.FillerLines = from.Fillers, from.FillerLines
	}
	s.Workload = to
	return s, true
}

// apply makes a shape by a move, and says whether it is one that differs, that
// a workload can be made of, and that leaves the fixed settings alone.
func apply(m Move, s Shape, fixed []string) (Shape, bool) {
	out, ok := m.Apply(s)
	if !ok {
		return s, false
	}
	var err error
	if out.Workload, err = out.Workload.WithDefaults(); err != nil {
		return s, false
	}
	before, after := s.Settings(), out.Settings()
	if maps.Equal(before, after) {
		return s, false
	}
	for _, name := range fixed {
		if before[name] != after[name] {
			return s, false
		}
	}
	return out, true
}

// inverse says that two moves undo each other.
func inverse(a, b string) bool {
	pair := func(a, b string) bool {
		return len(a) > 2 && len(b) > 4 && a[:2] == "2x" && b[:3] == "1/2" && a[2:] == b[3:]
	}
	return pair(a, b) || pair(b, a) || isKind(a) && isKind(b)
}

func isKind(move string) bool { return slices.Contains(workload.Kinds(), move) }

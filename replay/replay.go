// Package replay turns recorded traffic into a workload: the same bytes at the
// same times, hung up on at the same places. It reads culprit's histories and
// the formats that others keep traffic in; of traces that hold no text it
// takes the shape, for the self-checking workload.
//
// Stability: may change.
package replay

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// Trace is traffic that was, in the order of sending.
type Trace struct {
	Format   string         // what it was read from: history, messages, sharegpt, otel, mooncake, burstgpt
	Header   history.Header // of a history; else zero
	Requests []Request
	Timed    bool // the requests' times are known
	Left     int  // requests that couldn't be read, or that aren't replayed

	conversations int // read so far, where they have no names
}

// Request is one request of a trace: its body, or, in a trace without text, its
// shape.
type Request struct {
	Op           int64 // its number in the trace, from 1
	Conversation string
	At           time.Duration // since the trace's first
	Body         json.RawMessage
	Stream       bool
	Expect       history.Expect // of a history of our own

	End          time.Duration // when the reply ended; 0 when that isn't known
	HungUp       bool
	HungUpAfter  time.Duration
	HungUpChunks int // received before that; where there were some, they decide

	InputTokens int     // of a shape
	Blocks      []int64 // of a shape: blocks of the prompt, equal where prefixes are
}

// Shape says that the trace holds no text.
func (t *Trace) Shape() bool { return len(t.Requests) > 0 && t.Requests[0].Body == nil }

// HasModel says that the requests name the model that they want.
func (t *Trace) HasModel() bool {
	for _, q := range t.Requests {
		var r struct{ Model string }
		if q.Body == nil || json.Unmarshal(q.Body, &r) != nil || r.Model == "" {
			return false
		}
	}
	return true
}

// Only keeps the requests that a list names: numbers and ranges of ops, and
// sN for all of conversation N, as in "3,17-40,s12".
func (t *Trace) Only(list string) error {
	if list == "" {
		return nil
	}
	type span struct{ from, to int64 }
	var spans []span
	conversations := map[string]bool{}
	for item := range strings.SplitSeq(list, ",") {
		item = strings.TrimSpace(item)
		if name, ok := strings.CutPrefix(item, "s"); ok && name != "" {
			conversations[name] = true
			continue
		}
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		a, err1 := strconv.ParseInt(from, 10, 64)
		b, err2 := strconv.ParseInt(to, 10, 64)
		if err1 != nil || err2 != nil || a > b {
			return fmt.Errorf("only %q: want op numbers, ranges and sN for a conversation, as in 3,17-40,s12", item)
		}
		spans = append(spans, span{a, b})
	}
	had := len(t.Requests)
	t.Requests = slices.DeleteFunc(t.Requests, func(r Request) bool {
		return !conversations[r.Conversation] && !slices.ContainsFunc(spans, func(s span) bool { return r.Op >= s.from && r.Op <= s.to })
	})
	if len(t.Requests) == 0 {
		return fmt.Errorf("only %s: none of the %d requests is one of these", list, had)
	}
	t.rebase()
	return nil
}

// rebase sorts the requests and lets the first be sent at once.
func (t *Trace) rebase() {
	slices.SortStableFunc(t.Requests, func(a, b Request) int { return cmp.Compare(a.At, b.At) })
	if len(t.Requests) == 0 {
		return
	}
	first := t.Requests[0].At
	for i := range t.Requests {
		t.Requests[i].At -= first
		if t.Requests[i].End > 0 {
			t.Requests[i].End -= first
		}
	}
}

// Concurrency is the largest number of the trace's requests that were open at
// once, and the mean over the time from the first to the last; 0 when their
// ends aren't known.
func (t *Trace) Concurrency() (peak int, mean float64) {
	spans := make([][2]time.Duration, 0, len(t.Requests))
	for _, r := range t.Requests {
		if r.End > 0 {
			spans = append(spans, [2]time.Duration{r.At, r.End})
		}
	}
	return concurrency(spans)
}

func concurrency(spans [][2]time.Duration) (peak int, mean float64) {
	type edge struct {
		at time.Duration
		by int
	}
	var edges []edge
	var open time.Duration
	for _, s := range spans {
		edges = append(edges, edge{s[0], 1}, edge{s[1], -1})
		open += s[1] - s[0]
	}
	slices.SortFunc(edges, func(a, b edge) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.by, b.by)) })
	n := 0
	for _, e := range edges {
		n += e.by
		peak = max(peak, n)
	}
	if len(edges) > 0 {
		if d := edges[len(edges)-1].at - edges[0].at; d > 0 {
			mean = float64(open) / float64(d)
		}
	}
	return peak, mean
}

// Options says how a trace is played.
type Options struct {
	Speed float64 // 2 plays twice as fast; 0 is 1
	// Of a shape: the workload that takes it, and how many tokens one of its
	// lines of context is about.
	Plan          workload.Plan
	TokensPerLine int
}

// Workload is a trace to be played. A session is a row of requests that follow
// one another, as they did: the next waits for the end of the one before, and
// for its time.
type Workload struct {
	kind  string
	rows  [][]Request
	speed float64
	timed bool
	agent []workload.Workload // of a shape, one a session
}

// minLines and maxLines bound a shape's context, whatever a trace asks for: two
// facts are the least that a session asks about.
const (
	minLines = 2
	maxLines = 2000
)

// Workload makes a trace playable.
func (t *Trace) Workload(o Options) (*Workload, error) {
	if len(t.Requests) == 0 {
		return nil, fmt.Errorf("replay: there is nothing to be replayed; %d requests can't be", t.Left)
	}
	if o.Speed < 0 {
		return nil, fmt.Errorf("replay: a speed of %g is asked for; want more than 0", o.Speed)
	}
	w := &Workload{kind: "replay", speed: cmp.Or(o.Speed, 1), timed: t.Timed}
	if t.Shape() {
		w.kind = "agent"
		return w, w.shape(t, o)
	}
	// The rows of each conversation: its parallel requests are rows of their
	// own, where it is known which were.
	rows := map[string][]int{}
	for _, r := range t.Requests {
		row := -1
		for _, i := range rows[r.Conversation] {
			if end := w.rows[i][len(w.rows[i])-1].End; end > 0 && end <= r.At || !t.Timed {
				row = i
				break
			}
		}
		if row < 0 || r.Conversation == "" {
			row = len(w.rows)
			w.rows = append(w.rows, nil)
			rows[r.Conversation] = append(rows[r.Conversation], row)
		}
		w.rows[row] = append(w.rows[row], r)
	}
	return w, nil
}

// shape makes rows of requests whose prompts extend one another, and gives each
// a session of the self-checking workload with as much context as the first
// request has.
func (w *Workload) shape(t *Trace, o Options) error {
	perLine := max(1, cmp.Or(o.TokensPerLine, DefaultTokensPerLine))
	byBlock := map[int64]int{} // last block of a row's last prompt
	byName := map[string]int{}
	for _, r := range t.Requests {
		row, ok := -1, false
		if r.Conversation != "" {
			row, ok = byName[r.Conversation]
		}
		for i := len(r.Blocks) - 1; i >= 0 && !ok; i-- {
			row, ok = byBlock[r.Blocks[i]]
		}
		if !ok {
			row = len(w.rows)
			w.rows = append(w.rows, nil)
		}
		w.rows[row] = append(w.rows[row], r)
		if r.Conversation != "" {
			byName[r.Conversation] = row
		}
		if n := len(r.Blocks); n > 0 {
			byBlock[r.Blocks[n-1]] = row
		}
	}
	rounds := 0
	for _, row := range w.rows {
		rounds = max(rounds, len(row))
	}
	made := map[int]workload.Workload{}
	for _, row := range w.rows {
		lines := min(max(minLines, row[0].InputTokens/perLine), maxLines)
		if made[lines] == nil {
			p := o.Plan
			p.Kind, p.Sessions, p.Rounds, p.ContextLines = "agent", len(w.rows), rounds, lines
			complete, err := p.WithDefaults()
			if err != nil {
				return err
			}
			if made[lines], err = workload.New(complete); err != nil {
				return err
			}
		}
		w.agent = append(w.agent, made[lines])
	}
	return nil
}

// DefaultTokensPerLine is about what a line of the agent workload's facts takes
// with common tokenizers.
const DefaultTokensPerLine = 20

// Kind is the workload's name: "replay", or that of the self-checking workload
// that took the trace's shape.
func (w *Workload) Kind() string { return w.kind }

// Sessions is the number of rows.
func (w *Workload) Sessions() int { return len(w.rows) }

// Session makes one row's.
func (w *Workload) Session(i int, alone bool) workload.Session {
	if i >= len(w.rows) {
		return &session{}
	}
	s := &session{w: w, row: w.rows[i]}
	if w.agent != nil {
		s.agent = w.agent[i].Session(i, alone)
	}
	return s
}

type session struct {
	w     *Workload
	row   []Request
	next  int
	agent workload.Session
}

func (s *session) Next(prev *openai.Reply) (workload.Turn, bool) {
	if s.next == len(s.row) {
		return workload.Turn{}, false
	}
	r := s.row[s.next]
	s.next++
	at := time.Duration(0)
	if s.w.timed {
		at = max(1, time.Duration(float64(r.At)/s.w.speed)) // 0 is no time
	}
	if s.agent != nil {
		t, more := s.agent.Next(prev)
		t.At = at
		return t, more
	}
	t := workload.Turn{Body: r.Body, NoStream: !r.Stream, Expect: r.Expect, At: at}
	switch {
	case r.HungUp && r.HungUpChunks > 0:
		t.CancelChunks = r.HungUpChunks
	case r.HungUp:
		t.CancelAfter = max(r.HungUpAfter, time.Millisecond)
	}
	return t, true
}

package oracle

import (
	"cmp"
	"math/bits"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/history"
)

// Percentiles of durations, in milliseconds, exact to 3%.
type Percentiles struct {
	N     int     `json:"n"`
	P50MS float64 `json:"p50_ms"`
	P90MS float64 `json:"p90_ms"`
	P99MS float64 `json:"p99_ms"`
	MaxMS float64 `json:"max_ms"`
}

// durations is a histogram with 32 steps per doubling, so that any number of
// chunks costs the same memory.
type durations struct {
	counts [64 * durationSteps]int32
	n      int
	max    time.Duration
}

const (
	durationBits  = 5
	durationSteps = 1 << durationBits
)

func (d *durations) add(t time.Duration) {
	t = max(t, 0)
	d.counts[durationStep(t)]++
	d.n++
	d.max = max(d.max, t)
}

// durationStep is the step that holds t: below 32 ns exactly t, above it the
// doubling and the five bits after the leading one.
func durationStep(t time.Duration) int {
	if t < durationSteps {
		return int(t)
	}
	shift := bits.Len64(uint64(t)) - durationBits - 1
	return shift<<durationBits + int(t>>shift)
}

// durationFrom is the least duration of a step.
func durationFrom(step int) time.Duration {
	if step < 2*durationSteps {
		return time.Duration(step)
	}
	shift := step>>durationBits - 1
	return time.Duration(step-shift<<durationBits) << shift
}

// quantile returns the middle of the step that holds the quantile.
func (d *durations) quantile(q float64) time.Duration {
	left := int(q * float64(d.n))
	for step, count := range d.counts {
		left -= int(count)
		if left < 0 {
			return min((durationFrom(step)+durationFrom(step+1))/2, d.max)
		}
	}
	return d.max
}

func (d *durations) percentiles() *Percentiles {
	if d.n == 0 {
		return nil
	}
	return &Percentiles{
		N: d.n, P50MS: ms(d.quantile(0.50)), P90MS: ms(d.quantile(0.90)), P99MS: ms(d.quantile(0.99)), MaxMS: ms(d.max),
	}
}

func ms(t time.Duration) float64 { return float64(t.Microseconds()) / 1000 }

// PhaseResult counts what happened in one phase of a run.
type PhaseResult struct {
	Phase            history.Phase           `json:"phase"`
	Ops              int                     `json:"ops"`
	Outcomes         map[history.Outcome]int `json:"outcomes"`
	HTTP             map[int]int             `json:"http"` // ops by status; 0 when no response came
	Errors           []ErrorCount            `json:"errors,omitempty"`
	Chunks           int                     `json:"chunks"`
	PromptTokens     int                     `json:"prompt_tokens"`
	CachedTokens     int                     `json:"cached_tokens"`
	CompletionTokens int                     `json:"completion_tokens"`
	FromMS           float64                 `json:"from_ms"`        // first request sent
	ToMS             float64                 `json:"to_ms"`          // last reply ended
	Late             *Percentiles            `json:"late,omitempty"` // sent after planned
	FirstChunk       *Percentiles            `json:"first_chunk,omitempty"`
	BetweenChunks    *Percentiles            `json:"between_chunks,omitempty"`
	Total            *Percentiles            `json:"total,omitempty"`
}

// ErrorCount is one message and how many ops ended with it, or with the same
// words and other numbers.
type ErrorCount struct {
	Message string `json:"message"` // the example's
	Ops     int    `json:"ops"`
	Example int64  `json:"example"` // an op that did
	words   string
}

// words is a message of a status without its numbers: a prompt's length, a
// port or an address in it make no other error.
func words(status int, message string) string {
	return strconv.Itoa(status) + strings.Map(func(r rune) rune {
		if '0' <= r && r <= '9' {
			return -1
		}
		return r
	}, message)
}

// maxErrors is how many different messages a phase keeps; what comes later is
// counted by outcome and status alone.
const maxErrors = 20

// phases keeps the counts of each phase, in order of appearance.
type phases struct {
	all []*phaseTally
}

type phaseTally struct {
	PhaseResult
	from, to                               time.Duration
	late, firstChunk, betweenChunks, total durations
	started, ended                         bool
	endedWhy                               string
}

func (p *phases) of(phase history.Phase) *phaseTally {
	for _, t := range p.all {
		if t.Phase == phase {
			return t
		}
	}
	t := &phaseTally{PhaseResult: PhaseResult{Phase: phase, Outcomes: map[history.Outcome]int{}, HTTP: map[int]int{}}}
	p.all = append(p.all, t)
	return t
}

func (p *phases) event(e *history.Event) {
	switch e.Kind {
	case history.Started:
		p.of(history.Phase(e.Name)).started = true
	case history.Ended:
		t := p.of(history.Phase(e.Name))
		t.ended, t.endedWhy = true, e.Text
	default:
	}
}

func (p *phases) op(v *View) {
	op, t := v.Op, p.of(v.Op.Phase)
	if t.Ops == 0 || op.Sent < t.from {
		t.from = op.Sent
	}
	t.to = max(t.to, op.LastByte)
	t.Ops++
	t.Outcomes[op.Outcome]++
	t.HTTP[op.Status]++
	t.late.add(op.Sent - op.Planned)
	if op.Outcome == history.OK {
		t.total.add(op.LastByte - op.Sent)
	}
	if len(op.Chunks) > 0 && op.Stream {
		t.firstChunk.add(op.Chunks[0].At - op.Sent)
		for i := 1; i < len(op.Chunks); i++ {
			t.betweenChunks.add(op.Chunks[i].At - op.Chunks[i-1].At)
		}
	}
	t.Chunks += len(op.Chunks)
	if u := v.Reply.Usage; u != nil {
		t.PromptTokens += max(u.PromptTokens, 0)
		t.CompletionTokens += max(u.CompletionTokens, 0)
		t.CachedTokens += max(u.CachedTokens, 0)
	}
	if op.Outcome == history.Failed || v.Reply.Err != nil {
		t.failed(v)
	}
}

// failed keeps what the server or the connection said.
func (t *phaseTally) failed(v *View) {
	message := v.Op.Error
	if v.Reply.Err != nil && v.Reply.Err.Message != "" {
		message = v.Reply.Err.Message
	}
	message = clip(message, 300)
	shape := words(v.Op.Status, message)
	i := slices.IndexFunc(t.Errors, func(e ErrorCount) bool { return e.words == shape })
	switch {
	case i >= 0:
		t.Errors[i].Ops++
	case len(t.Errors) < maxErrors:
		t.Errors = append(t.Errors, ErrorCount{Message: message, Ops: 1, Example: v.Op.ID, words: shape})
	}
}

func (p *phases) results() []PhaseResult {
	out := make([]PhaseResult, 0, len(p.all))
	for _, t := range p.all {
		r := t.PhaseResult
		r.FromMS, r.ToMS = ms(t.from), ms(t.to)
		r.Late, r.FirstChunk, r.BetweenChunks, r.Total = t.late.percentiles(), t.firstChunk.percentiles(), t.betweenChunks.percentiles(), t.total.percentiles()
		slices.SortStableFunc(r.Errors, func(a, b ErrorCount) int { return cmp.Compare(b.Ops, a.Ops) })
		out = append(out, r)
	}
	return out
}

// Package shrink finds the smallest workload that still fails often enough to
// be worth running. Whether a smaller one does is a matter of chance, so each
// is run until that is decided, and the one that is left is measured on runs
// of its own.
//
// Stability: may change.
package shrink

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/stats"
)

// Size is what may be made smaller.
type Size struct {
	Sessions     int     `json:"sessions"`
	Concurrency  int     `json:"concurrency,omitempty"`  // at once; of an open loop at most, 0: as many as come
	RequestRate  float64 `json:"request_rate,omitempty"` // requests a second of an open loop; 0 in a closed one
	Rounds       int     `json:"rounds"`
	ContextLines int     `json:"context_lines,omitempty"`
	MaxTokens    int     `json:"max_tokens"`
}

// Requests is how many a run sends, about.
func (s Size) Requests() int { return s.Sessions * s.Rounds }

func (s Size) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d sessions x %d rounds", s.Sessions, s.Rounds)
	if s.RequestRate > 0 {
		fmt.Fprintf(&b, ", %.3g a second", s.RequestRate)
	} else {
		fmt.Fprintf(&b, ", %d at once", s.Concurrency)
	}
	if s.ContextLines > 0 {
		fmt.Fprintf(&b, ", %d lines", s.ContextLines)
	}
	fmt.Fprintf(&b, ", %d tokens", s.MaxTokens)
	return b.String()
}

// within says that s is no larger than t in anything: if t is too small, so is s.
func (s Size) within(t Size) bool {
	return s.Sessions <= t.Sessions && s.Concurrency <= t.Concurrency && s.RequestRate <= t.RequestRate &&
		s.Rounds <= t.Rounds && s.ContextLines <= t.ContextLines && s.MaxTokens <= t.MaxTokens
}

// smaller are the sizes to be tried next: an eighth, a half, three quarters of
// one dimension, those that save requests first. Each sends fewer requests, or
// as many with less of something else, so that the search ends. No prompt has
// more lines than most, all of them no more than total.
func (s Size) smaller(most, total int) []Size {
	var out []Size
	add := func(t Size) {
		t.Concurrency = min(t.Concurrency, t.Sessions)
		if t != s && t.Sessions > 0 && t.Rounds > 0 && (t.Concurrency > 0 || t.RequestRate >= minRate) &&
			t.MaxTokens >= minTokens && (t.ContextLines >= minLines || s.ContextLines == 0) {
			out = append(out, t)
		}
	}
	shares := []float64{0.125, 0.5, 0.75}
	cut := func(n *int, share float64) { *n = int(math.Ceil(share * float64(*n))) }
	for _, share := range shares {
		t := s
		cut(&t.Sessions, share)
		add(t)
		// Fewer conversations that are longer, half as long again together, fill a
		// cache as the more did. What of it isn't needed goes later.
		t.ContextLines = min(s.ContextLines*s.Sessions/t.Sessions*3/2, total/t.Sessions, most)
		if t.Sessions < s.Sessions && t.ContextLines > s.ContextLines {
			add(t)
		}
		t = s
		cut(&t.Rounds, share)
		add(t)
	}
	for _, share := range shares {
		for _, change := range []func(*Size){
			func(t *Size) { cut(&t.ContextLines, share) },
			func(t *Size) { cut(&t.MaxTokens, share) },
			func(t *Size) { cut(&t.Concurrency, share) },
			func(t *Size) { t.RequestRate *= share },
		} {
			t := s
			change(&t)
			add(t)
		}
	}
	return out
}

const (
	// minLines is what a workload's prompt has at least.
	minLines = 2
	// minTokens leaves a reply room for a tool call.
	minTokens = 32
	// minRate, in requests a second, bounds how long a run is waited for.
	minRate = 1
)

// Outcome is what became of a run of one size.
type Outcome struct {
	Failures int // ops that failed as those of the run that is being shrunk
	Ops      int
	Sure     int // of Failures: those that no model makes by itself
	Lost     int // ops without a whole reply
	// Alone and AloneOps are those of the same conversations played alone.
	Alone, AloneOps int
}

// Failed says that the run showed the failure, and not the model's own mistakes:
// more than twice as often as alone. Where it is the model, as many ops here and
// there do so in a quarter of the runs at most.
func (o Outcome) Failed() bool {
	if o.AloneOps == 0 {
		return o.Failures > 0
	}
	return o.Sure > 0 || o.Failures*o.AloneOps > 2*o.Alone*o.Ops
}

// Options says what a size must keep.
type Options struct {
	// Try plays a size; with alone also its conversations alone, as a control.
	Try      func(ctx context.Context, s Size, alone bool) (Outcome, error)
	Measures int // runs that the last size is measured on; 0 is DefaultMeasures
	Runs     int // at most, before those; 0 is DefaultRuns
	Step     func(s Size, n int, o Outcome)
	Decided  func(s Size, failed, runs int, kept bool)
}

// What an Options field of zero means.
const (
	DefaultMeasures = 10
	DefaultRuns     = 100
)

// A size is kept when it seems to fail in nine runs of ten rather than in one
// of two: A. Wald's sequential test with an error of one in nineteen on each
// side. Five runs that fail in a row keep a size, two that don't refuse it.
const (
	useful, useless = 0.9, 0.5
	decided         = 2.89 // log 18
)

// Result is the smallest size that was found, and what it is worth.
type Result struct {
	From     Size `json:"from"`
	To       Size `json:"to"`
	Runs     int  `json:"runs"` // that it took
	Requests int  `json:"requests"`
	Early    bool `json:"ended_early,omitempty"` // the runs were used up
	Measured      // of To
	// Smaller are sizes that were kept, by luck: when they were measured they
	// failed too seldom.
	Smaller []Measured `json:"smaller,omitempty"`
}

// Measured is what a size did in runs that nothing was decided by but whether
// the size before it is measured, too.
type Measured struct {
	Size    Size  `json:"size"`
	Failing Share `json:"failing_runs"`
	Rate    Share `json:"failing_ops"`       // of their ops, each run a cluster
	Alone   Share `json:"failing_ops_alone"` // the same, of the conversations played alone
}

// Share is a share with its 95% interval.
type Share struct {
	Failures int     `json:"failures"`
	Trials   int     `json:"trials"`
	Low      float64 `json:"low"`
	High     float64 `json:"high"`
}

// NotReproducedError says that even the size to begin with doesn't fail.
type NotReproducedError struct {
	Size Size
	Runs int
}

func (e *NotReproducedError) Error() string {
	return fmt.Sprintf("shrink: %s didn't fail often enough in %d runs to begin with; raise its rate first (more sessions, or the server as it was)", e.Size, e.Runs)
}

// Search makes from smaller as long as it goes on failing. With an error it
// returns the smallest size so far, which wasn't measured.
func Search(ctx context.Context, from Size, o Options) (Result, error) {
	if o.Measures == 0 {
		o.Measures = DefaultMeasures
	}
	if o.Runs == 0 {
		o.Runs = DefaultRuns
	}
	r := Result{From: from, To: from}
	try := func(s Size, alone bool) (Outcome, error) {
		out, err := o.Try(ctx, s, alone)
		r.Runs, r.Requests = r.Runs+1, r.Requests+out.Ops+out.AloneOps
		if err == nil && o.Step != nil {
			o.Step(s, r.Runs, out)
		}
		return out, err
	}
	// What the server takes in a prompt is between what it took and what it didn't.
	took, most := from.ContextLines, math.MaxInt
	fails := func(s Size) (bool, error) {
		evidence, failed := 0.0, 0
		for runs := 1; ; runs++ {
			// The first run told the failure from the model's own mistakes. It
			// makes others where contexts are longer or replies are cut off.
			out, err := try(s, s.ContextLines != from.ContextLines || s.MaxTokens != from.MaxTokens)
			if err != nil {
				return false, err
			}
			switch {
			case out.Failed():
				failed++
				evidence += math.Log(useful / useless)
			case s.ContextLines > took && 2*out.Lost >= out.Ops:
				most = (took + s.ContextLines) / 2
				evidence = -decided
			default:
				evidence += math.Log((1 - useful) / (1 - useless))
			}
			if s.ContextLines <= most {
				took = max(took, s.ContextLines)
			}
			if kept := evidence >= decided; kept || evidence <= -decided || r.Runs >= o.Runs {
				if o.Decided != nil {
					o.Decided(s, failed, runs, kept)
				}
				return kept, nil
			}
		}
	}
	switch kept, err := fails(from); {
	case err != nil:
		return r, err
	case !kept:
		return r, &NotReproducedError{from, r.Runs}
	}
	kept := []Size{from}
	var refused []Size // for being too small: so is what is within one of them
	for shrunk := true; shrunk && r.Runs < o.Runs; {
		shrunk = false
		for _, s := range r.To.smaller(most, from.Sessions*from.ContextLines) {
			if r.Runs >= o.Runs || slices.ContainsFunc(refused, s.within) {
				continue
			}
			still, err := fails(s)
			if err != nil {
				return r, err
			}
			if still {
				r.To, kept = s, append(kept, s)
			}
			if shrunk = still || s.ContextLines > most; shrunk {
				break // other sizes are the next
			}
			refused = append(refused, s)
		}
	}
	r.Early = r.Runs >= o.Runs
	for back := 1; ; back++ {
		size := kept[len(kept)-back]
		measured, err := measure(size, o.Measures, try)
		if err != nil {
			return r, err
		}
		r.To, r.Measured = size, measured
		if 10*measured.Failing.Failures >= 7*o.Measures || back == min(mostMeasured, len(kept)) {
			return r, nil
		}
		r.Smaller = append(r.Smaller, measured)
	}
}

// mostMeasured is how many sizes are measured until one fails in seven runs of
// ten; what fails in nine of ten does that in 99 of 100 measurements.
const mostMeasured = 3

func measure(s Size, runs int, try func(Size, bool) (Outcome, error)) (Measured, error) {
	m := Measured{Size: s}
	var clusters, alone []stats.Cluster
	for range runs {
		out, err := try(s, true)
		if err != nil {
			return m, err
		}
		if out.Failed() {
			m.Failing.Failures++
		}
		clusters = append(clusters, stats.Cluster{Failures: out.Failures, Trials: out.Ops})
		alone = append(alone, stats.Cluster{Failures: out.Alone, Trials: out.AloneOps})
	}
	m.Failing.Trials = runs
	m.Failing.Low, m.Failing.High = stats.Wilson(m.Failing.Failures, runs, 0.95)
	m.Rate, m.Alone = share(clusters), share(alone)
	return m, nil
}

func share(runs []stats.Cluster) Share {
	rate := stats.ClusterRate(runs, 0.95)
	return Share{rate.Failures, rate.Trials, rate.Low, rate.High}
}

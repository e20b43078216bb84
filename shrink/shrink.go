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
	"strings"

	"github.com/culprit-project/culprit/stats"
)

// Size is what may be made smaller.
type Size struct {
	Sessions     int `json:"sessions"`
	Concurrency  int `json:"concurrency"`
	Rounds       int `json:"rounds"`
	ContextLines int `json:"context_lines,omitempty"`
	MaxTokens    int `json:"max_tokens"`
}

// Requests is how many a run sends, about.
func (s Size) Requests() int { return s.Sessions * s.Rounds }

func (s Size) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%d sessions x %d rounds, %d at once", s.Sessions, s.Rounds, s.Concurrency)
	if s.ContextLines > 0 {
		fmt.Fprintf(&b, ", %d lines", s.ContextLines)
	}
	fmt.Fprintf(&b, ", %d tokens", s.MaxTokens)
	return b.String()
}

// smaller are the sizes to be tried next: each dimension halved, then by a
// quarter, what saves the most requests first.
func (s Size) smaller() []Size {
	var out []Size
	add := func(t Size) {
		t.Concurrency = min(t.Concurrency, t.Sessions)
		if t != s && t.Sessions > 0 && t.Rounds > 0 && t.Concurrency > 0 && t.MaxTokens >= minTokens {
			out = append(out, t)
		}
	}
	for _, share := range []int{2, 4} { // take away a half, a quarter
		cut := func(n int) int { return n - n/share }
		for _, change := range []func(*Size){
			func(t *Size) { t.Sessions = cut(t.Sessions) },
			func(t *Size) { t.Rounds = cut(t.Rounds) },
			func(t *Size) { t.ContextLines = cut(t.ContextLines) },
			func(t *Size) { t.MaxTokens = cut(t.MaxTokens) },
			func(t *Size) { t.Concurrency = cut(t.Concurrency) },
		} {
			t := s
			change(&t)
			add(t)
		}
	}
	return out
}

// minTokens leaves a reply room for a tool call.
const minTokens = 32

// Outcome is what became of a run of one size.
type Outcome struct {
	Failures int // ops that failed as those of the run that is being shrunk
	Ops      int
	Dir      string
}

// Failed says that the run showed the failure.
func (o Outcome) Failed() bool { return o.Failures > 0 }

// Options says what a size must keep.
type Options struct {
	Try      func(ctx context.Context, s Size) (Outcome, error)
	Measures int // runs that the last size is measured on; 0 is DefaultMeasures
	Runs     int // at most, before those; 0 is DefaultRuns
	Step     func(s Size, n int, o Outcome)
	Decided  func(s Size, kept bool)
}

// What an Options field of zero means.
const (
	DefaultMeasures = 10
	DefaultRuns     = 60
)

// A size is kept when it seems to fail in nine runs of ten rather than in one
// of two: A. Wald's sequential test with an error of a tenth on each side.
const (
	useful, useless = 0.9, 0.5
	decided         = 2.197 // log 9
)

// Result is the smallest size that was found, and what it is worth.
type Result struct {
	From     Size  `json:"from"`
	To       Size  `json:"to"`
	Runs     int   `json:"runs"` // that it took
	Requests int   `json:"requests"`
	Early    bool  `json:"ended_early,omitempty"` // the runs were used up
	Failing  Share `json:"failing_runs"`          // of the runs that it was measured on
	Rate     Share `json:"failing_ops"`           // of their ops, each run a cluster
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

// Search makes from smaller as long as it goes on failing.
func Search(ctx context.Context, from Size, o Options) (Result, error) {
	if o.Measures == 0 {
		o.Measures = DefaultMeasures
	}
	if o.Runs == 0 {
		o.Runs = DefaultRuns
	}
	r := Result{From: from, To: from}
	try := func(s Size) (Outcome, error) {
		out, err := o.Try(ctx, s)
		r.Runs, r.Requests = r.Runs+1, r.Requests+out.Ops
		if err == nil && o.Step != nil {
			o.Step(s, r.Runs, out)
		}
		return out, err
	}
	fails := func(s Size) (bool, error) {
		evidence := 0.0
		for {
			out, err := try(s)
			if err != nil {
				return false, err
			}
			if out.Failed() {
				evidence += math.Log(useful / useless)
			} else {
				evidence += math.Log((1 - useful) / (1 - useless))
			}
			// At the most it takes some ten runs: the evidence moves by half a
			// nat at least with each, and back by three times that.
			if kept := evidence >= decided; kept || evidence <= -decided || r.Runs >= o.Runs {
				if o.Decided != nil {
					o.Decided(s, kept)
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
	refused := map[Size]bool{}
	for shrunk := true; shrunk && r.Runs < o.Runs; {
		shrunk = false
		for _, s := range r.To.smaller() {
			if refused[s] || r.Runs >= o.Runs {
				continue
			}
			kept, err := fails(s)
			if err != nil {
				return r, err
			}
			if kept {
				r.To, shrunk = s, true
				break
			}
			refused[s] = true
		}
	}
	r.Early = r.Runs >= o.Runs
	var clusters []stats.Cluster
	for range o.Measures {
		out, err := try(r.To)
		if err != nil {
			return r, err
		}
		if out.Failed() {
			r.Failing.Failures++
		}
		clusters = append(clusters, stats.Cluster{Failures: out.Failures, Trials: out.Ops})
	}
	r.Failing.Trials = o.Measures
	r.Failing.Low, r.Failing.High = stats.Wilson(r.Failing.Failures, o.Measures, 0.95)
	rate := stats.ClusterRate(clusters, 0.95)
	r.Rate = Share{rate.Failures, rate.Trials, rate.Low, rate.High}
	return r, nil
}

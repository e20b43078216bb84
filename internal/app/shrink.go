package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/shrink"
	"github.com/culprit-project/culprit/target"
)

// ShrinkOptions is what shrink is asked for.
type ShrinkOptions struct {
	Server        // its BaseURL is the run's, where none is given
	Run    string // a run directory that failed
	Runs   int
	Output string
	Tool   string
}

// Shrink finds the smallest workload that fails as a run did.
func Shrink(ctx context.Context, o ShrinkOptions, out Output) error {
	plan, err := experiment.ReadPlan(o.Run)
	if err != nil {
		return usage("%w\nIs %s a run directory?", err, o.Run)
	}
	if plan.Replay != nil || plan.Workload.Kind == recorded || plan.Workload.Sessions == 0 {
		return usage("shrink %s: it wasn't made by a workload; send less of recorded traffic with culprit replay --only", o.Run)
	}
	v, err := experiment.Judge(o.Run)
	if err != nil {
		return &NoVerdictError{err}
	}
	classes := convicting(v)
	if len(classes) == 0 {
		return usage("shrink %s: its verdict is %s, so there is no failure to keep", o.Run, v.Status)
	}
	plan.BaseURL, err = target.ParseBaseURL(cmp.Or(o.BaseURL, plan.BaseURL))
	if err != nil {
		return &UsageError{err}
	}
	plan.Model = cmp.Or(o.Model, plan.Model)
	plan.Tool = o.Tool
	plan.Workload.RunKey = "" // each run gets one of its own, as it gets a seed
	server := target.Server{BaseURL: plan.BaseURL, Header: o.headers(), Client: http.DefaultClient}
	if _, err := server.Identify(ctx); err != nil {
		return &NoVerdictError{fmt.Errorf("%w\nIs the server up, as it was when it failed?", err)}
	}
	dir := cmp.Or(o.Output, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-shrink"))
	if _, err := os.Stat(dir); err == nil {
		return usage("shrink: %s exists; choose another directory with --output", dir)
	}
	from := shrink.Size{
		Sessions: plan.Workload.Sessions, Concurrency: cmp.Or(plan.Concurrency, plan.Workload.Sessions), Rounds: plan.Workload.Rounds,
		ContextLines: plan.Workload.ContextLines, MaxTokens: plan.Workload.MaxTokens,
	}
	out.Progress.Printf("shrinking %s\nas long as %s shows in nine runs of ten\n", from, strings.Join(classes, ", "))
	n := 0
	result, err := shrink.Search(ctx, from, shrink.Options{
		Runs: o.Runs,
		Try: func(ctx context.Context, s shrink.Size) (shrink.Outcome, error) {
			n++
			p := sized(plan, s)
			p.Workload.Seed += uint64(n)
			p.Workload.RunKey = FreshKey()
			run := filepath.Join(dir, fmt.Sprintf("%03d", n))
			v, err := experiment.Run(ctx, experiment.Options{Dir: run, Plan: p, Header: o.headers(), Logger: out.Logger})
			if err == nil {
				err = ctx.Err()
			}
			if err != nil {
				return shrink.Outcome{}, err
			}
			o := shrink.Outcome{Ops: ops(v), Dir: run}
			for _, c := range v.Classes {
				if slices.Contains(classes, string(c.Class)) {
					o.Failures += c.Main.Failures
				}
			}
			return o, nil
		},
		Step: func(s shrink.Size, n int, o shrink.Outcome) {
			out.Progress.Progress(fmt.Sprintf("run %d: %d of %d failed; %s", n, o.Failures, o.Ops, s))
		},
		Decided: func(s shrink.Size, kept bool) {
			what := "too small"
			if kept {
				what = "still fails"
			}
			out.Progress.Printf("  %-11s  %s\n", what, s)
		},
	})
	if _, ok := errors.AsType[*shrink.NotReproducedError](err); ok {
		return &NoVerdictError{err}
	}
	if err != nil {
		return err
	}
	config := filepath.Join(dir, "workload.yaml")
	if err := os.WriteFile(config, []byte(shrunkConfig(plan, result, o.Run)), 0o644); err != nil {
		return err
	}
	if err := experiment.WriteJSON(filepath.Join(dir, "shrink.json"), result); err != nil {
		return err
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, struct {
			Dir    string `json:"dir"`
			Config string `json:"config"`
			shrink.Result
		}{dir, config, result})
	}
	share := func(s shrink.Share) string {
		return fmt.Sprintf("%d of %d [%.0f, %.0f]%%", s.Failures, s.Trials, 100*s.Low, 100*s.High)
	}
	out.Screen.Printf("\n%d requests instead of %d: %s\n", result.To.Requests(), result.From.Requests(), result.To)
	out.Screen.Printf("  fails in     %s of the runs that it was measured on\n", share(result.Failing))
	out.Screen.Printf("  of its ops   %s\n", share(result.Rate))
	out.Screen.Printf("  it took      %d runs, %d requests\n", result.Runs, result.Requests)
	if result.Early {
		out.Screen.Printf("  and ended early: a smaller one may do; go on with a larger --runs\n")
	}
	out.Screen.Printf("\n  culprit run -c %s --base-url %s\n", term.Safe(config), term.Safe(plan.BaseURL))
	return nil
}

// convicting are the classes that decided for a run's verdict.
func convicting(v *oracle.Verdict) []string {
	var out []string
	for _, c := range v.Classes {
		if c.Main.Failures > 0 && (c.Means == oracle.Corrupt || c.Means == oracle.Wedged) && (v.Status == oracle.Corrupt || v.Status == oracle.Wedged) {
			out = append(out, string(c.Class))
		}
	}
	return out
}

func ops(v *oracle.Verdict) int {
	for _, p := range v.Phases {
		if p.Phase == "main" {
			return p.Ops
		}
	}
	return 0
}

// sized is a plan made smaller. It has no control: what counts are failures of
// the kind that were told from the model's own already.
func sized(p experiment.Plan, s shrink.Size) experiment.Plan {
	p.Control, p.Shards = 0, 0
	p.Workload.Sessions, p.Workload.Rounds, p.Workload.ContextLines, p.Workload.MaxTokens = s.Sessions, s.Rounds, s.ContextLines, s.MaxTokens
	if p.RequestRate == 0 {
		p.Concurrency = s.Concurrency
	}
	return p
}

// shrunkConfig is a file for run -c.
func shrunkConfig(p experiment.Plan, r shrink.Result, from string) string {
	s := r.To
	text := fmt.Sprintf("# Shrunk from %s: %d requests instead of %d. It failed in %d of %d runs (95%%: %.0f to %.0f%%).\nworkload: %s\nsessions: %d\nrounds: %d\n",
		filepath.Base(from), s.Requests(), r.From.Requests(), r.Failing.Failures, r.Failing.Trials, 100*r.Failing.Low, 100*r.Failing.High,
		p.Workload.Kind, s.Sessions, s.Rounds)
	if s.ContextLines > 0 {
		text += fmt.Sprintf("context_lines: %d\n", s.ContextLines)
	}
	text += fmt.Sprintf("max_tokens: %d\n", s.MaxTokens)
	if p.RequestRate > 0 {
		return text + fmt.Sprintf("request_rate: %g\n", p.RequestRate)
	}
	return text + fmt.Sprintf("concurrency: %d\n", s.Concurrency)
}

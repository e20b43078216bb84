package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/shrink"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// ShrinkOptions is what shrink is asked for.
type ShrinkOptions struct {
	Server        // its BaseURL is the run's, where none is given
	Run    string // a run directory that failed
	Runs   int
	Output string
	Tool   string
}

// mostAlone is how many conversations of a run are played alone, too: they take
// their time one after the other.
const mostAlone = 10

// The directory that shrink makes, beside the run's, and its files.
const (
	shrinkSuffix       = "-shrink"
	shrinkWorkloadFile = "workload.yaml"
	shrinkFile         = "shrink.json"
)

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
	dir := cmp.Or(o.Output, filepath.Clean(o.Run)+shrinkSuffix)
	if _, err := os.Stat(dir); err == nil {
		return usage("shrink: %s exists; choose another directory with --output", dir)
	}
	from := shrink.Size{
		Sessions: plan.Workload.Sessions, Rounds: plan.Workload.Rounds, Concurrency: plan.Concurrency, RequestRate: plan.RequestRate,
		ContextLines: plan.Workload.ContextLines, MaxTokens: plan.Workload.MaxTokens,
	}
	if plan.RequestRate == 0 {
		from.Concurrency = cmp.Or(from.Concurrency, from.Sessions)
	}
	out.Progress.Printf("shrinking %s\nas long as %s shows in nine runs of ten\n", from, strings.Join(classes, ", "))
	n := 0
	result, err := shrink.Search(ctx, from, shrink.Options{
		Runs: o.Runs,
		Try: func(ctx context.Context, s shrink.Size, alone bool) (shrink.Outcome, error) {
			n++
			p := sized(plan, s)
			if alone {
				p.Control = min(s.Sessions, mostAlone)
			}
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
			return shown(v, classes, alone), nil
		},
		Step: func(s shrink.Size, n int, o shrink.Outcome) {
			if !out.Progress.Live {
				return // what is decided is enough for a log
			}
			alone := ""
			if o.AloneOps > 0 {
				alone = fmt.Sprintf(", alone %d of %d", o.Alone, o.AloneOps)
			}
			out.Progress.Progress(fmt.Sprintf("run %d: %d of %d failed%s; %s", n, o.Failures, o.Ops, alone, s))
		},
		Decided: func(s shrink.Size, failed, runs int, kept bool) {
			what := "too small"
			if kept {
				what = "still fails"
			}
			out.Progress.Printf("  %-11s  %2d/%-2d  %s\n", what, failed, runs, s)
		},
	})
	if _, ok := errors.AsType[*shrink.NotReproducedError](err); ok {
		return &NoVerdictError{err}
	}
	stopped := ctx.Err() != nil
	switch {
	case err != nil && !stopped:
		return err
	case err != nil && result.To == result.From:
		return &NoVerdictError{fmt.Errorf("shrink: stopped after %d runs, before anything smaller was seen to fail", result.Runs)}
	}
	config := filepath.Join(dir, shrinkWorkloadFile)
	text, err := shrunkConfig(plan, result, o.Run)
	if err != nil {
		return err
	}
	if err := os.WriteFile(config, text, 0o644); err != nil {
		return err
	}
	if err := experiment.WriteJSON(filepath.Join(dir, shrinkFile), result); err != nil {
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
	if stopped {
		out.Screen.Printf("  stopped      before it was measured, after %d runs\n", result.Runs)
	} else {
		out.Screen.Printf("  fails in     %s of the runs that it was measured on\n", share(result.Failing))
		out.Screen.Printf("  of its ops   %s\n", share(result.Rate))
		out.Screen.Printf("  alone        %s\n", share(result.Alone))
		for _, m := range result.Smaller {
			out.Screen.Printf("  fails less   %s: %s\n", m.Size, share(m.Failing))
		}
		out.Screen.Printf("  it took      %d runs, %d requests\n", result.Runs, result.Requests)
	}
	if result.Early {
		out.Screen.Printf("  and ended early: a smaller one may do; go on with a larger --runs\n")
	}
	out.Screen.Printf("\n  culprit run -c %s --base-url %s\n  culprit bundle %s --workload %s\n", term.Safe(config), term.Safe(plan.BaseURL), term.Safe(o.Run), term.Safe(config))
	if stopped {
		return &NoVerdictError{errors.New("shrink: stopped before the workload was measured")}
	}
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

// shown counts the ops of some classes.
func shown(v *oracle.Verdict, classes []string, alone bool) shrink.Outcome {
	failed, sure, failedAlone := map[int64]bool{}, map[int64]bool{}, map[int64]bool{}
	for _, c := range v.Classes {
		if !slices.Contains(classes, string(c.Class)) {
			continue
		}
		for _, op := range c.Ops {
			failed[op] = true
			if c.Source != oracle.Model {
				sure[op] = true
			}
		}
		for _, op := range c.ControlOps {
			failedAlone[op] = true
		}
	}
	phase := func(name history.Phase) oracle.PhaseResult {
		i := slices.IndexFunc(v.Phases, func(p oracle.PhaseResult) bool { return p.Phase == name })
		if i < 0 {
			return oracle.PhaseResult{}
		}
		return v.Phases[i]
	}
	main := phase(history.Main)
	o := shrink.Outcome{Failures: len(failed), Sure: len(sure), Ops: main.Ops, Lost: main.Ops - main.Outcomes[history.OK] - main.Outcomes[history.Cancelled]}
	if alone {
		o.Alone, o.AloneOps = len(failedAlone), phase(history.Control).Ops
	}
	return o
}

// sized is a plan made smaller. One conversation is played alone first, so that
// the load begins with a cold cache, as it does after a whole control.
func sized(p experiment.Plan, s shrink.Size) experiment.Plan {
	p.Control, p.Shards = 1, 0
	p.Workload.Sessions, p.Workload.Rounds, p.Workload.ContextLines, p.Workload.MaxTokens = s.Sessions, s.Rounds, s.ContextLines, s.MaxTokens
	p.Concurrency, p.RequestRate = s.Concurrency, s.RequestRate
	return p
}

// shrunkConfig is a file for run -c, with all that the plan asks for; the seed
// and the key of its canaries are anybody's.
func shrunkConfig(p experiment.Plan, r shrink.Result, from string) ([]byte, error) {
	w, s := p.Workload, r.To
	defaults, err := workload.Plan{Kind: w.Kind}.WithDefaults()
	if err != nil {
		return nil, err
	}
	var extra string
	if len(p.ExtraBody) > 0 {
		text, err := json.Marshal(p.ExtraBody)
		if err != nil {
			return nil, err
		}
		extra = string(text)
	}
	unless := func(value, usual string) string {
		if value == usual {
			return ""
		}
		return value
	}
	text, err := yaml.Marshal(struct {
		Kind         string         `yaml:"workload"`
		Sessions     int            `yaml:"sessions"`
		Rounds       int            `yaml:"rounds"`
		ContextLines int            `yaml:"context_lines,omitempty"`
		MaxTokens    int            `yaml:"max_tokens"`
		Concurrency  int            `yaml:"concurrency,omitempty"`
		RequestRate  float64        `yaml:"request_rate,omitempty"`
		Waves        bool           `yaml:"waves,omitempty"`
		Control      bool           `yaml:"control"`
		Tools        string         `yaml:"tools,omitempty"`
		OnError      string         `yaml:"on_error,omitempty"`
		Logprobs     int            `yaml:"logprobs,omitempty"`
		Set          map[string]int `yaml:"set,omitempty"`
		Timeout      time.Duration  `yaml:"timeout,omitempty"`
		NoStream     bool           `yaml:"no_stream,omitempty"`
		ExtraBody    string         `yaml:"extra_body,omitempty"`
	}{
		w.Kind, s.Sessions, s.Rounds, s.ContextLines, s.MaxTokens, s.Concurrency, s.RequestRate, p.Waves, true,
		unless(w.Tools, defaults.Tools), unless(w.OnError, defaults.OnError), w.TopLogprobs, setKnobs(w),
		time.Duration(p.TimeoutMS) * time.Millisecond, p.NoStream, extra,
	})
	if err != nil {
		return nil, err
	}
	head := fmt.Sprintf("# Shrunk from %s: %d requests instead of %d. ", filepath.Base(from), s.Requests(), r.From.Requests())
	if r.Failing.Trials == 0 {
		head += "How often it fails wasn't measured.\n"
	} else {
		head += fmt.Sprintf("It failed in %d of %d runs (95%%: %.0f to %.0f%%).\n", r.Failing.Failures, r.Failing.Trials, 100*r.Failing.Low, 100*r.Failing.High)
	}
	return append([]byte(head), text...), nil
}

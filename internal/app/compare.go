package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/target"
)

// CompareOptions is what compare is asked for. Its RunOptions say what servers
// that run already are sent, and take the place of a case's own settings.
type CompareOptions struct {
	RunOptions
	A, B       string // URLs, arms of cases, or names of Sweep's arms
	Sweep      Sweep
	Ratio      float64
	Difference float64
	Error      float64
	Pairs      int
	Wall       time.Duration
	Interleave bool
	Resume     bool
	Workers    Workers // who plays the blocks; the zero value is nobody else
	Launcher   *target.Launcher
}

// Compare puts two servers under the same load and says which fails more often.
func Compare(ctx context.Context, o CompareOptions, out Output) (experiment.Ordering, error) {
	if o.Ratio < 0 || o.Ratio > 1 || o.Difference < 0 || o.Difference >= 1 || o.Error < 0 || o.Error >= 0.5 || o.Pairs < 0 {
		return "", usage("--ratio must be above 0 and at most 1, --difference between 0 and 1, --error between 0 and 0.5, --pairs not negative")
	}
	if o.Resume && o.Output == "" {
		return "", usage("--resume goes on in the directory of --output; give it")
	}
	options := experiment.CompareOptions{
		Dir:   cmp.Or(o.Output, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-compare")),
		Ratio: o.Ratio, Difference: o.Difference, Error: o.Error, Pairs: o.Pairs, Interleave: o.Interleave, Seed: cmp.Or(o.Seed, 1), Resume: o.Resume,
		Tool: o.Tool, Launcher: o.Launcher, Header: o.headers(), Logger: cmp.Or(out.Logger, slog.New(slog.DiscardHandler)),
	}
	names, err := o.sides(&options)
	if err != nil {
		return "", err
	}
	plan, err := together(&options)
	if err != nil {
		return "", err
	}
	if !o.Workers.none() && o.Sweep.Command != "" {
		return "", usage("--workers and --nats are for arms of a case, which --serve-cmd isn't; write one")
	}
	for _, side := range []*experiment.Side{&options.A, &options.B} {
		if err := o.Workers.check(side.Case, false); err != nil {
			return "", err
		}
	}
	options.Defaults()
	report.CompareBefore(out.Progress, names, describe(plan), &options, plan.Workload.Rounds)
	if o.DryRun {
		return experiment.NoDifference, nil
	}
	if o.Wall > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, o.Wall, fmt.Errorf("the budget of %s is used up", o.Wall))
		defer cancel()
	}
	options.Step = func(b experiment.Block, c experiment.Comparison) { report.Block(out.Progress, b, c) }
	options.Load = bothProgress(out.Progress)
	end := func(bool) error { return nil }
	if !o.Workers.none() {
		options.Crew = func() (experiment.Crew, error) {
			crew := experiment.HuntOptions{Dir: options.Dir, Case: options.A.Case, Tool: o.Tool, Launcher: o.Launcher, Header: options.Header, Logger: options.Logger}
			stop, err := o.Workers.start(ctx, &crew, out)
			if err == nil {
				end = stop
			}
			return crew.Crew, err
		}
	}
	result, err := experiment.Compare(ctx, options)
	err = errors.Join(err, end(true)) // one that goes on asks anew for what hasn't come
	switch {
	case errors.Is(err, fs.ErrPermission), errors.Is(err, fs.ErrExist):
		return "", err
	case err != nil:
		return "", &NoVerdictError{fmt.Errorf("compare: %w", err)}
	}
	if out.Screen == nil {
		return result.Ordering, writeJSON(out.JSON, struct {
			Dir string `json:"dir"`
			A   string `json:"a"`
			B   string `json:"b"`
			experiment.Comparison
		}{options.Dir, names[0], names[1], result})
	}
	report.Comparison(out.Screen, names, result, options.Dir)
	return result.Ordering, nil
}

// bothProgress shows two runs that go on at once in one line.
func bothProgress(s *term.Screen) func(int, experiment.Progress) {
	show := progress(s)
	var mu sync.Mutex
	var last [2]experiment.Progress
	return func(side int, p experiment.Progress) {
		mu.Lock()
		defer mu.Unlock()
		last[side] = p
		both := last[0]
		if both.Sessions == 0 || both.Elapsed == 0 {
			both = p
		} else if other := last[1]; other.Sessions > 0 {
			both.Add(other)
			both.Elapsed = max(both.Elapsed, other.Elapsed)
		}
		show(both)
	}
}

// sides finds out what A and B are. It returns how they are named.
func (o *CompareOptions) sides(options *experiment.CompareOptions) ([2]string, error) {
	names := [2]string{o.A, o.B}
	if o.Sweep.Command != "" {
		c, arms, err := o.Sweep.read()
		if err != nil {
			return names, err
		}
		if err := o.override(c); err != nil {
			return names, err
		}
		if o.A == "" && o.B == "" && len(arms) == 2 {
			names = [2]string{arms[0].Name, arms[1].Name}
		}
		for i, side := range []*experiment.Side{&options.A, &options.B} {
			at := slices.IndexFunc(arms, func(a experiment.NamedArm) bool { return a.Name == names[i] })
			if at < 0 {
				var known []string
				for _, a := range arms {
					known = append(known, fmt.Sprintf("%q", a.Name))
				}
				return names, usage("compare %q: want two of the arms of --serve-params: %s", names[i], strings.Join(known, ", "))
			}
			*side = experiment.Side{Case: c, Arm: arms[at].Arm}
		}
		return names, nil
	}
	if o.A == "" || o.B == "" {
		return names, usage("compare what? Give two URLs, or arms of cases as in case.yaml and case.yaml:graph=safe")
	}
	cases := map[string]*experiment.Case{}
	for i, side := range []*experiment.Side{&options.A, &options.B} {
		var err error
		if *side, err = o.side(names[i], cases); err != nil {
			return names, err
		}
	}
	return names, nil
}

// side is a URL, a case or an arm of one.
func (o *CompareOptions) side(what string, cases map[string]*experiment.Case) (experiment.Side, error) {
	path, spec := what, ""
	if _, err := os.Stat(path); err != nil {
		if at := strings.Index(what, ":"); at > 0 {
			path, spec = what[:at], what[at+1:]
		}
	}
	if _, err := os.Stat(path); err == nil {
		c := cases[path]
		if c == nil {
			if c, err = experiment.ReadCase(path); err != nil {
				return experiment.Side{}, &UsageError{err}
			}
			if err := o.override(c); err != nil {
				return experiment.Side{}, err
			}
			cases[path] = c
		}
		arm, err := parseArm(c, spec)
		if err != nil {
			return experiment.Side{}, usage("compare %s: %w", what, err)
		}
		return experiment.Side{Case: c, Arm: arm}, nil
	}
	if !strings.Contains(what, ":") {
		return experiment.Side{}, usage("compare %s: want a URL, a case (a directory with %s), or an arm of one, as in case.yaml:graph=safe", what, experiment.CaseFile)
	}
	run := o.RunOptions
	run.BaseURL, run.Control = what, false
	plan, err := run.plan()
	if err != nil {
		return experiment.Side{}, err
	}
	return experiment.Side{Case: experiment.ServerCase(plan.BaseURL), Plan: plan}, nil
}

// override puts what was asked for in the place of a case's own settings.
func (o *RunOptions) override(c *experiment.Case) error {
	if o.Model != "" {
		c.Model = o.Model
	}
	if err := c.Override(o.settings()); err != nil {
		return &UsageError{err}
	}
	return nil
}

// settings are what was asked for, by their names in a case.
func (o *RunOptions) settings() map[string]any {
	settings := map[string]any{}
	set := func(name string, value any, given bool) {
		if given {
			settings[name] = value
		}
	}
	set("kind", o.Kind, o.Kind != "")
	set("sessions", o.Sessions, o.Sessions != 0)
	set("rounds", o.Rounds, o.Rounds != 0)
	set("context_lines", o.ContextLines, o.ContextLines != 0)
	set("max_tokens", o.MaxTokens, o.MaxTokens != 0)
	set("tools", o.Tools, o.Tools != "")
	set("on_error", o.OnError, o.OnError != "")
	set("top_logprobs", o.TopLogprobs, o.TopLogprobs != 0)
	set("seed", o.Seed, o.Seed != 0)
	set("concurrency", o.Concurrency, o.Concurrency != 0)
	set("request_rate", o.RequestRate, o.RequestRate != 0)
	set("waves", true, o.Waves)
	set("timeout", o.Timeout.String(), o.Timeout != 0)
	set("stream", false, o.NoStream)
	set("extra_body", json.RawMessage(o.ExtraBody), o.ExtraBody != "")
	for name, value := range o.Knobs {
		set(name, value, true)
	}
	return settings
}

// parseArm reads an arm: "" is the failing one, "safe" has everything safe, and
// FACTOR=LEVEL, or a level's name alone where one factor has it, changes the
// failing one. Several are separated by commas.
func parseArm(c *experiment.Case, spec string) (design.Arm, error) {
	arm := c.Space.Failing()
	for word := range strings.SplitSeq(spec, ",") {
		factor, level, named := strings.Cut(strings.TrimSpace(word), "=")
		switch {
		case factor == "" || !named && factor == "failing":
			continue
		case !named && factor == string(design.Safe):
			arm = c.Space.Safe()
			continue
		case !named:
			factor, level = "", factor
		}
		var found []string
		for _, f := range c.Space.Factors {
			at := f.Level(level)
			switch {
			case factor != "" && f.Name != factor:
				continue
			case at < 0 && level == string(design.Suspect):
				at = f.Failing()
			case at < 0 && level == string(design.Safe):
				at = f.Safe()
			}
			if at >= 0 {
				found = append(found, f.Name)
				arm[f.Name] = f.Levels[at].Name
			}
		}
		switch {
		case len(found) == 0:
			return nil, fmt.Errorf("no factor %q with a level %q; the failing arm is %s", factor, level, c.Space.Failing())
		case len(found) > 1:
			return nil, fmt.Errorf("level %q is one of several factors: %s; write FACTOR=%s", level, strings.Join(found, ", "), level)
		}
	}
	if !c.Space.Allowed(arm) {
		return nil, fmt.Errorf("the case forbids the arm %s", arm)
	}
	return arm, nil
}

// together makes sure that both can be compared, and completes the options. It
// returns A's plan.
func together(o *experiment.CompareOptions) (experiment.Plan, error) {
	var plans [2]experiment.Plan
	launched := 0
	for i, s := range []*experiment.Side{&o.A, &o.B} {
		plans[i] = s.Plan
		if s.Arm == nil {
			continue
		}
		arm, err := s.Case.Render(s.Arm)
		if err != nil {
			return plans[0], &UsageError{err}
		}
		plans[i] = arm.Plan
		if len(arm.Processes) > 0 {
			launched++
		}
	}
	a, b := plans[0].Workload, plans[1].Workload
	if a.Kind != b.Kind || a.Seed != b.Seed || a.Rounds != b.Rounds || a.ContextLines != b.ContextLines || a.RunKey != b.RunKey {
		return plans[0], usage("compare: the workloads of A (%s) and B (%s) aren't the same, so their requests make no pairs", describe(plans[0]), describe(plans[1]))
	}
	if launched == 2 && plans[0].BaseURL == plans[1].BaseURL {
		o.Interleave = true // both answer at one port
	}
	o.Conversations = max(a.Sessions, b.Sessions, plans[0].Concurrency, plans[1].Concurrency)
	return plans[0], nil
}

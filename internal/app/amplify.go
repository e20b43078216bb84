package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/amplify"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/nearest"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// AmplifyOptions is what amplify is asked for. Zero values take defaults.
type AmplifyOptions struct {
	Server          // header and key alone
	Case     string // a case.yaml, or the directory that it is in
	Dir      string // where the trials go; empty is amplify/ in the case's directory
	Budget   amplify.Budget
	By       string // "minute" or "request"
	Seed     uint64
	Only     []string // names of the moves that are tried; none means all
	Resume   bool
	DryRun   bool
	Launcher *target.Launcher
	Tool     string
}

// WorkloadFile is a load as run and hunt take it with -c.
const WorkloadFile = "workload.yaml"

// Amplify finds the load under which a case's failing arm fails most, and shows
// what that rests on.
func Amplify(ctx context.Context, o AmplifyOptions, out Output) (amplify.Status, error) {
	c, err := experiment.ReadCase(o.Case)
	if err != nil {
		return "", &UsageError{err}
	}
	search, err := c.AmplifySearch()
	if err != nil {
		return "", &UsageError{err}
	}
	search.Seed, search.PerRequest = cmp.Or(o.Seed, search.Seed), o.By == "request"
	search.Budget = amplify.DefaultBudget(search.Base)
	search.Budget = amplify.Budget{
		Launches: cmp.Or(o.Budget.Launches, c.Budget.Launches, search.Budget.Launches),
		Requests: cmp.Or(o.Budget.Requests, c.Budget.Requests, search.Budget.Requests),
		Wall:     cmp.Or(o.Budget.Wall, c.Budget.Wall),
	}
	if search.Moves, err = o.moves(); err != nil {
		return "", err
	}
	search.Decided = func(text string) { out.Progress.Printf("  -> %s\n", term.Safe(text)) }
	least := search.Least()
	if search.Budget.Requests < least.Requests || !search.NoLaunch && search.Budget.Launches < least.Launches {
		return "", usage("%w; give --requests and --launches that allow it", &amplify.BudgetError{Least: least})
	}
	dir := cmp.Or(o.Dir, filepath.Join(filepath.Dir(c.Path), "amplify"))
	report.AmplifyBefore(out.Progress, c.Path, search)
	if o.DryRun {
		return amplify.Raised, nil
	}
	if search.Budget.Wall > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, search.Budget.Wall, experiment.ErrWall)
		defer cancel()
	}
	r, err := experiment.Amplify(ctx, experiment.AmplifyOptions{
		Dir: dir, Case: c, Tool: o.Tool, Search: search, Launcher: o.Launcher, Header: o.headers(), Resume: o.Resume,
		Step: func(s experiment.AmplifyStep) { report.AmplifyStep(out.Progress, s) }, Load: progress(out.Progress), Logger: out.Logger,
	})
	if errors.Is(err, fs.ErrPermission) {
		return "", err
	}
	failing, failed := c.Render(c.Space.Failing())
	err = errors.Join(err, failed)
	var next []string
	if r.Best != nil && failed == nil {
		path := filepath.Join(dir, WorkloadFile)
		if err := os.WriteFile(path, []byte(amplified(r, failing.Plan)), 0o644); err != nil {
			return "", err
		}
		next = []string{
			fmt.Sprintf("culprit hunt %s -c %s -o %s", shellWord(o.Case), shellWord(path), shellWord(filepath.Join(filepath.Dir(dir), "hunt"))),
			fmt.Sprintf("culprit run -c %s --base-url %s", shellWord(path), shellWord(c.BaseURL)),
		}
	}
	if len(r.Tried) > 0 {
		if out.Screen == nil {
			err = errors.Join(err, writeJSON(out.JSON, struct {
				Dir string `json:"dir"`
				amplify.Result
			}{dir, r}))
		} else {
			report.Amplified(out.Screen, r, next)
		}
	}
	switch {
	case err != nil && ctx.Err() != nil:
		return "", &NoVerdictError{fmt.Errorf("amplify: %w\nNothing is lost: the same command with --resume goes on", context.Cause(ctx))}
	case err != nil:
		return "", &NoVerdictError{err}
	}
	return r.Status, nil
}

// moves are the changes that are asked for.
func (o *AmplifyOptions) moves() ([]amplify.Move, error) {
	all := amplify.Moves()
	if len(o.Only) == 0 {
		return all, nil
	}
	var names []string
	for _, m := range all {
		names = append(names, m.Name)
	}
	var moves []amplify.Move
	for _, name := range o.Only {
		at := slices.Index(names, name)
		if at < 0 {
			return nil, usage("--only %q: did you mean %q? There are %s", name, nearest.Name(name, names), strings.Join(names, ", "))
		}
		moves = append(moves, all[at])
	}
	return moves, nil
}

// amplified is a file for run -c and hunt -c.
func amplified(r amplify.Result, p experiment.Plan) string {
	b := r.Best
	head := fmt.Sprintf("# %s: %d of %d requests broke on %d launches (95%%: %.2g to %.2g%%);\n# under the case's own load, %d of %d.\n",
		b.Name, b.Failures, b.Requests, b.Launches, 100*b.Rate.Low, 100*b.Rate.High, r.Base.Failures, r.Base.Requests)
	if b.Name == r.Base.Name {
		head = fmt.Sprintf("# The case's own load: %d of %d requests broke on %d launches (95%%: %.2g to %.2g%%).\n", b.Failures, b.Requests, b.Launches, 100*b.Rate.Low, 100*b.Rate.High)
	}
	return head + loadFile(b.Shape, p)
}

// loadFile is a load as a file of run's flags, with what a plan says beside it.
func loadFile(s amplify.Shape, p experiment.Plan) string {
	settings := s.Settings()
	settings["workload"], settings["sessions"] = settings["kind"], max(p.Workload.Sessions, s.Concurrency)
	delete(settings, "kind")
	if p.TimeoutMS > 0 {
		settings["timeout"] = time.Duration(p.TimeoutMS) * time.Millisecond
	}
	if p.NoStream {
		settings["no_stream"] = true
	}
	if len(p.ExtraBody) > 0 {
		if b, err := json.Marshal(p.ExtraBody); err == nil { // it was read from JSON
			settings["extra_body"] = "'" + strings.ReplaceAll(string(b), "'", "''") + "'" // a YAML string
		}
	}
	var lines, knobs []string
	for name, value := range settings {
		switch name {
		case "workload", "sessions", "rounds", "context_lines", "max_tokens", "tools", "on_error", "concurrency", "request_rate", "waves",
			"timeout", "no_stream", "extra_body":
			lines = append(lines, fmt.Sprintf("%s: %v\n", name, value))
		case "logprobs": // comes with top_logprobs
		case "top_logprobs":
			lines = append(lines, fmt.Sprintf("logprobs: %v\n", value))
		default:
			knobs = append(knobs, fmt.Sprintf("%s: %v", name, value))
		}
	}
	slices.Sort(lines)
	if len(knobs) > 0 {
		slices.Sort(knobs)
		lines = append(lines, "set: {"+strings.Join(knobs, ", ")+"}\n")
	}
	return strings.Join(lines, "")
}

// setKnobs are the knobs of a workload that have no flag of their own, where
// they aren't the kind's defaults.
func setKnobs(w workload.Plan) map[string]int {
	usual, err := workload.Plan{Kind: w.Kind}.WithDefaults()
	if err != nil {
		return nil
	}
	defaults := amplify.Shape{Workload: usual}.Settings()
	set := map[string]int{}
	for name, value := range (amplify.Shape{Workload: w}).Settings() {
		n, number := value.(int)
		if number && value != defaults[name] && !slices.Contains([]string{"rounds", "context_lines", "max_tokens", "top_logprobs"}, name) {
			set[name] = n
		}
	}
	return set
}

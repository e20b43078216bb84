package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// HuntOptions is what hunt is asked for. Zero values take the case's own, or
// defaults.
type HuntOptions struct {
	Server           // header and key alone
	Case     string  // a case.yaml, or the directory that it is in
	Dir      string  // where the trials go; empty is the case's directory
	Seed     uint64  // of the search
	MinRate  float64 // of failure, that is looked for
	Wall     time.Duration
	Launches int
	Requests int
	Resume   bool
	// Hypotheses runs what tells the case's hypotheses apart, in place of the
	// search.
	Hypotheses bool
	Workers    Workers
	DryRun     bool
	UI         string // address that the page is served on while the hunt runs; empty is none
	Launcher   *target.Launcher
	Tool       string
	Sweep      Sweep      // in place of Case
	Load       RunOptions // what is sent, in place of the case's own
	Made       bool       // the command made the case itself, so only culprit hunt can go on with it
}

// Hunt finds the culprit of a case and shows what it rests on.
func Hunt(ctx context.Context, o HuntOptions, out Output) (status search.Status, err error) {
	c, dir, err := o.read()
	if err != nil {
		return "", err
	}
	options, err := o.search(c)
	if err != nil {
		return "", err
	}
	h := huntScreen{out: out, subject: c, live: report.NewHunting(out.Progress, c)}
	forecasts, err := foresee(c, options)
	if err != nil {
		return "", err
	}
	if err := o.Workers.check(c, o.Hypotheses); err != nil {
		return "", err
	}
	h.live.Before(options, forecasts)
	if o.DryRun {
		return search.Found, nil
	}
	if wall := cmp.Or(o.Wall, c.Budget.Wall); wall > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, wall, fmt.Errorf("the budget of %s is used up", wall))
		defer cancel()
	}
	if h.book, err = newBook(ctx, c, dir); err != nil {
		return "", err
	}
	defer h.book.Close() //nolint:errcheck // what was written is committed
	if err := h.book.readFiles(ctx); err != nil {
		return "", err
	}
	hunt := experiment.HuntOptions{
		Dir: dir, Case: c, Tool: o.Tool, Search: options, Launcher: o.Launcher, Header: o.headers(), Resume: o.Resume,
		Preflight: h.live.Preflight, Unready: h.live.Unready, Step: h.step, Load: progress(out.Progress), Logger: cmp.Or(out.Logger, slog.New(slog.DiscardHandler)),
	}
	if o.UI != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", fmt.Errorf("make case directory: %w", err)
		}
		if h.page, err = serveLive(ctx, o.UI, c, dir, o.Tool, h.book); err != nil {
			return "", err
		}
		out.Progress.Printf("\nWatch it at %s (the page follows the hunt)\n", h.page.URL)
		defer func() { h.page.Close(endText(dir, err)) }()
		load := hunt.Load
		hunt.Load = func(p experiment.Progress) {
			load(p)
			h.page.Now(progressText(p))
		}
	}
	if o.Hypotheses {
		return huntHypotheses(ctx, o, hunt, &h)
	}
	if hunt.Odds, err = h.book.prior(ctx, o.Resume); err != nil {
		return "", err
	}
	end, err := o.Workers.start(ctx, &hunt, out)
	if err != nil {
		return "", err
	}
	finding, err := experiment.Hunt(ctx, hunt)
	err = errors.Join(err, end(err == nil))
	h.note(ctx)
	switch {
	case ctx.Err() != nil:
		return "", &NoVerdictError{fmt.Errorf("hunt: %w\nNothing is lost: %s goes on", context.Cause(ctx), o.resumedBy(dir))}
	case errors.Is(err, fs.ErrPermission):
		return "", err
	case err != nil:
		return "", &NoVerdictError{err}
	}
	record, err := experiment.ReadHunt(dir)
	if err != nil {
		return "", err
	}
	standing, err := h.book.keepStanding(ctx, dir)
	if err != nil {
		return "", err
	}
	if err := writeHuntPage(record, standing, o.Tool); err != nil {
		return "", err
	}
	return finding.Status, showHunt(record, out)
}

// resumedBy is what goes on with a hunt that was stopped.
func (o *HuntOptions) resumedBy(dir string) string {
	if !o.Made {
		return "the same command with --resume"
	}
	text := "culprit hunt --resume " + shellWord(dir)
	if o.Seed != 0 {
		text += fmt.Sprintf(" --seed %d", o.Seed)
	}
	if o.MinRate != 0 {
		text += fmt.Sprintf(" --min-rate %g", o.MinRate)
	}
	return text
}

// foresee says what a hunt may take when one call in five breaks, or one
// in fifty.
func foresee(c *experiment.Case, o search.Options) ([]search.Forecast, error) {
	const hunts = 20
	var out []search.Forecast
	for _, rate := range []float64{0.2, 0.02} {
		f, err := search.Foresee(len(c.Space.Factors), rate, o, hunts)
		if err != nil {
			return nil, &UsageError{err}
		}
		out = append(out, f)
	}
	return out, nil
}

// read reads the case, or makes it of the sweep, and says where the trials go.
func (o *HuntOptions) read() (*experiment.Case, string, error) {
	if o.Sweep.Command == "" {
		if o.Case == "" {
			return nil, "", usage("hunt what? Give a case (culprit init writes one from a live server), or --serve-cmd and --serve-params")
		}
		c, err := experiment.ReadCase(o.Case)
		if err != nil {
			return nil, "", &UsageError{err}
		}
		dir := cmp.Or(o.Dir, filepath.Dir(c.Path))
		if len(o.Load.settings()) == 0 {
			return c, dir, nil
		}
		if err := o.Load.override(c); err != nil {
			return nil, "", err
		}
		if o.Dir == "" { // what a case's directory has is of its own load
			if o.Resume {
				return nil, "", usage("hunt: a hunt under another load than the case's has a directory of its own: give it with --output")
			}
			dir = filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-hunt")
		}
		return c, dir, nil
	}
	if o.Case != "" {
		return nil, "", usage("hunt: give a case or --serve-cmd, not both")
	}
	c, _, err := o.Sweep.read()
	if err != nil {
		return nil, "", err
	}
	if err := o.Load.override(c); err != nil {
		return nil, "", err
	}
	dir := cmp.Or(o.Dir, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-hunt"))
	c, err = c.WriteSweep(dir)
	return c, dir, err
}

// search turns the case and what was asked for into the search's options.
func (o *HuntOptions) search(c *experiment.Case) (search.Options, error) {
	failing, err := c.Render(c.Space.Failing())
	if err != nil {
		return search.Options{}, &UsageError{err}
	}
	return search.Options{
		Seed:    cmp.Or(o.Seed, failing.Plan.Workload.Seed),
		Error:   c.Error,
		MinRate: o.MinRate,
		Budget:  search.Budget{Launches: cmp.Or(o.Launches, c.Budget.Launches), Requests: cmp.Or(o.Requests, c.Budget.Requests)},
		// As many as it takes for the load to be what it is in the failing arm.
		Batch: max(failing.Plan.Concurrency, 1) * max(failing.Plan.Workload.Rounds, 1),
	}, nil
}

// huntScreen shows a hunt as it goes.
type huntScreen struct {
	out     Output
	subject *experiment.Case
	live    *report.Hunting
	book    *book     // nil writes none
	failed  bool      // the book couldn't be written
	page    *livePage // nil where none is served
}

// note enters what is new into the ledger. That it can't be written doesn't end
// a hunt: everything is in the run directories, and the next command enters it.
func (h *huntScreen) note(ctx context.Context) {
	if h.book == nil {
		return
	}
	if err := h.book.sync(context.WithoutCancel(ctx)); err != nil && !h.failed {
		h.failed = true
		h.out.Progress.Printf("The ledger couldn't be written: %s\n", err)
	}
}

func (h *huntScreen) step(step experiment.Step) {
	if step.Ended {
		h.note(context.Background())
		h.page.Refresh()
	} else {
		h.page.Trial(fmt.Sprintf("Trial %d: %s. ", step.Number, report.ArmText(h.subject.Space, step.Trial.Proposal.Arm)))
		h.page.Now("The server is launched.")
	}
	h.live.Step(step)
}

// again are the commands that show what a hunt found.
func again(r *experiment.Record) []report.Command {
	var out []report.Command
	if len(r.Result.Causes) > 0 {
		arm, err := r.Case.Render(r.Whole(r.Result.Causes[0].With.Arm))
		if err == nil && len(arm.Processes) > 0 {
			for _, p := range arm.Processes {
				out = append(out, report.Command{Shows: p.Name + ", with nothing but the cause", Line: shellLine(p)})
			}
			out = append(out, report.Command{Shows: "the load that breaks it", Line: runLine(arm.Plan)})
		}
	}
	if worst := r.Worst(); worst != nil {
		dir := filepath.Join(r.Dir, worst.Dir)
		out = append(out, report.Command{Shows: "the trial with the most broken calls", Line: "culprit check " + shellWord(dir)})
		if v, err := experiment.ReadVerdict(dir); err == nil && len(v.Broken.Ops) > 0 {
			op := v.Broken.Ops[0]
			for _, c := range v.Classes {
				if c.Means == oracle.Corrupt && len(c.Examples) > 0 && c.Examples[0].Op > 0 {
					op = c.Examples[0].Op
					break
				}
			}
			out = append(out, report.Command{Shows: "one broken call, with everything that came back", Line: fmt.Sprintf("culprit check --op %d %s", op, shellWord(dir))})
		}
	}
	return out
}

// shellLine starts a process as a person would.
func shellLine(p target.Process) string {
	var words []string
	for _, name := range slices.Sorted(maps.Keys(p.Env)) {
		words = append(words, name+"="+shellWord(p.Env[name]))
	}
	for _, w := range p.Command {
		words = append(words, shellWord(w))
	}
	line := strings.Join(words, " ")
	if p.Dir != "" {
		line = "cd " + shellWord(p.Dir) + " && " + line
	}
	if p.Host != "" {
		line = "ssh " + shellWord(p.Host) + " " + shellWord(line)
	}
	return line
}

var plainWord = regexp.MustCompile(`^[A-Za-z0-9_@%+=:,./-]+$`)

// shellWord quotes for a POSIX shell.
func shellWord(word string) string {
	if plainWord.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// runLine is the command that sends what a plan sends, as far as flags can say.
func runLine(p experiment.Plan) string {
	w := p.Workload
	words := []string{"culprit", "run", "--base-url", shellWord(p.BaseURL), "--workload", w.Kind, "--seed", fmt.Sprint(w.Seed)}
	add := func(flag string, n int) {
		if n > 0 {
			words = append(words, flag, fmt.Sprint(n))
		}
	}
	add("--sessions", w.Sessions)
	add("--rounds", w.Rounds)
	add("--context-lines", w.ContextLines)
	add("--max-tokens", w.MaxTokens)
	add("--concurrency", p.Concurrency)
	if p.RequestRate > 0 {
		words = append(words, "--request-rate", fmt.Sprint(p.RequestRate))
	}
	if p.Waves {
		words = append(words, "--waves")
	}
	set := setKnobs(w)
	for _, name := range slices.Sorted(maps.Keys(set)) {
		words = append(words, "--set", fmt.Sprintf("%s=%d", name, set[name]))
	}
	return strings.Join(words, " ")
}

// WriteCase writes a case's file into a new directory and returns its path.
func WriteCase(dir, text string) (string, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make case directory: %w", err)
	}
	path := filepath.Join(dir, experiment.CaseFile)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return "", fmt.Errorf("write case: %w", err)
	}
	return path, nil
}

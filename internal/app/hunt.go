package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
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
	DryRun     bool
	Launcher   *target.Launcher
	Tool       string
	Sweep      Sweep      // in place of Case
	Load       RunOptions // what Sweep's servers are sent
}

// Hunt finds the culprit of a case and shows what it rests on.
func Hunt(ctx context.Context, o HuntOptions, out Output) (search.Status, error) {
	c, dir, err := o.read()
	if err != nil {
		return "", err
	}
	options, err := o.search(c)
	if err != nil {
		return "", err
	}
	h := huntScreen{out: out, subject: c}
	h.before(options)
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
		Step: h.step, Load: progress(out.Progress), Logger: cmp.Or(out.Logger, slog.New(slog.DiscardHandler)),
	}
	if o.Hypotheses {
		return huntHypotheses(ctx, o, hunt, &h)
	}
	if hunt.Odds, err = h.book.prior(ctx, o.Resume); err != nil {
		return "", err
	}
	finding, err := experiment.Hunt(ctx, hunt)
	h.note(ctx)
	switch {
	case ctx.Err() != nil:
		return "", &NoVerdictError{fmt.Errorf("hunt: %w\nNothing is lost: the same command with --resume goes on", context.Cause(ctx))}
	case errors.Is(err, fs.ErrPermission):
		return "", err
	case err != nil:
		return "", &NoVerdictError{err}
	}
	if out.Screen == nil {
		return finding.Status, writeJSON(out.JSON, struct {
			Dir string `json:"dir"`
			experiment.Result
		}{dir, finding})
	}
	report.Hunt(out.Screen, finding, h.trials, dir)
	return finding.Status, nil
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
		return c, cmp.Or(o.Dir, filepath.Dir(c.Path)), nil
	}
	if o.Case != "" {
		return nil, "", usage("hunt: give a case or --serve-cmd, not both")
	}
	c, _, err := o.Sweep.read()
	if err != nil {
		return nil, "", err
	}
	return c, cmp.Or(o.Dir, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-hunt")), o.Load.override(c)
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
	trials  []experiment.Trial
	book    *book // nil writes none
	failed  bool  // the book couldn't be written
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

// before says what is varied, and what it may cost.
func (h *huntScreen) before(o search.Options) {
	s := h.out.Progress
	var names []string
	for _, f := range h.subject.Space.Factors {
		safe := f.Levels[f.Safe()].Name
		names = append(names, fmt.Sprintf("%s (%s or %s)", f.Name, f.Levels[f.Failing()].Name, safe))
	}
	s.Printf("%s: %d factors: %s\n", h.subject.Path, len(names), strings.Join(names, ", "))
	requests := func(rate float64) int { return int(3/rate) + 1 } // none of so many: the rate is below, with 95% probability
	s.Printf("To see that an arm fails less than 1%% of the time takes %d requests in it, less than 0.1%% takes %d; a trial has at least %d.\n",
		requests(0.01), requests(0.001), o.Batch)
	if o.Budget.Launches > 0 {
		s.Printf("At most %d launches.\n", o.Budget.Launches)
	}
	s.Printf("\n")
}

func (h *huntScreen) step(step experiment.Step) {
	if step.Ended {
		h.trials = append(h.trials, step.Trial)
		h.note(context.Background())
	}
	if step.Resumed && !step.Ended {
		return
	}
	report.Trial(h.out.Progress, h.subject.Space, step)
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

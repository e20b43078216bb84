package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/ledger"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/report"
)

// ReportOptions is what report is asked for.
type ReportOptions struct {
	Dir    string // of a run or a hunt
	Page   bool   // write the page instead of showing it
	Output string // the page's file; empty is report.html in Dir
	Tool   string
}

// Report shows a stored run or hunt as it is, or writes its page. Nothing is
// judged again.
func Report(ctx context.Context, o ReportOptions, out Output) error {
	plan, err := experiment.ReadPlan(o.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return o.hunt(ctx, out)
	}
	if err != nil {
		return &UsageError{err}
	}
	v, err := experiment.ReadVerdict(o.Dir)
	if err != nil {
		return &UsageError{err}
	}
	if !o.Page {
		_, err := show(o.Dir, plan, v, out)
		return err
	}
	return o.write(out, func(w io.Writer) error { return runPage(w, o.Dir, plan, v, o.Tool) })
}

func (o *ReportOptions) hunt(ctx context.Context, out Output) error {
	if !slices.ContainsFunc([]string{experiment.RunsDir, experiment.ExperimentsDir, ledger.File, hypothesis.Dir}, func(name string) bool {
		_, err := os.Stat(filepath.Join(o.Dir, name))
		return err == nil
	}) {
		return usage("report: %s is neither a run (it has no %s) nor a hunt (it has no %s/)", o.Dir, experiment.PlanFile, experiment.RunsDir)
	}
	record, err := experiment.ReadHunt(o.Dir)
	if err != nil {
		return &UsageError{err}
	}
	if !o.Page {
		return showHunt(record, out)
	}
	standing, err := readStanding(ctx, o.Dir)
	if err != nil { // the rest is worth a page
		out.Progress.Printf("The page is without hypotheses: %s\n", err)
	}
	return o.write(out, func(w io.Writer) error { return huntPage(w, record, standing, o.Tool) })
}

func (o *ReportOptions) write(out Output, page func(io.Writer) error) error {
	path := cmp.Or(o.Output, filepath.Join(o.Dir, report.PageFile))
	if err := writeFile(path, page); err != nil {
		return err
	}
	out.Screen.Printf("%s\n", path)
	return nil
}

func showHunt(r *experiment.Record, out Output) error {
	if out.Screen == nil {
		return writeJSON(out.JSON, struct {
			Dir string `json:"dir"`
			experiment.Result
		}{r.Dir, *r.Result})
	}
	report.Hunt(out.Screen, r, again(r))
	return nil
}

func writeHuntPage(r *experiment.Record, standing *report.Standing, tool string) error {
	return writeFile(filepath.Join(r.Dir, report.PageFile), func(w io.Writer) error { return huntPage(w, r, standing, tool) })
}

func huntPage(w io.Writer, r *experiment.Record, standing *report.Standing, tool string) error {
	return report.HuntPage(w, r, report.PageOptions{Tool: tool, Made: time.Now(), Again: again(r), Hypotheses: standing})
}

// standingFile is where the hypotheses stood when a hunt ended whose directory
// isn't its case's: the ledger stays beside the case.
const standingFile = "hypotheses.json"

// keepStanding writes it.
func (b *book) keepStanding(ctx context.Context, dir string) (*report.Standing, error) {
	s, err := b.standing(ctx)
	if err != nil || len(s.Hypotheses) == 0 {
		return nil, err
	}
	if sameDir(dir, b.dir()) {
		return &s, nil
	}
	return &s, experiment.WriteJSON(filepath.Join(dir, standingFile), s)
}

// readStanding is where the hypotheses of a hunt's case stand: by the ledger
// beside the case, or else as it was when the hunt ended. It is nil where there
// are none.
func readStanding(ctx context.Context, dir string) (*report.Standing, error) {
	for _, name := range []string{ledger.File, hypothesis.Dir} {
		if _, err := os.Stat(filepath.Join(dir, name)); err == nil {
			s, err := Hypotheses(ctx, HypothesisOptions{Case: dir})
			return &s, err
		}
	}
	b, err := os.ReadFile(filepath.Join(dir, standingFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read hypotheses: %w", err)
	}
	var s report.Standing
	if err := json.Unmarshal(b, &s); err != nil {
		return nil, fmt.Errorf("read %s: %w", filepath.Join(dir, standingFile), err)
	}
	s.Dir = filepath.Dir(s.Case)
	return &s, nil
}

// sameDir says whether two paths are of one directory.
func sameDir(a, b string) bool {
	x, err1 := os.Stat(a)
	y, err2 := os.Stat(b)
	return errors.Join(err1, err2) == nil && os.SameFile(x, y)
}

func writeRunPage(dir string, plan experiment.Plan, v *oracle.Verdict, tool string) error {
	return writeFile(filepath.Join(dir, report.PageFile), func(w io.Writer) error { return runPage(w, dir, plan, v, tool) })
}

func runPage(w io.Writer, dir string, plan experiment.Plan, v *oracle.Verdict, tool string) error {
	return report.RunPage(w, v, report.Run{Dir: dir, Workload: describe(plan)}, tool, time.Now())
}

// writeFile writes a page whole or not at all.
func writeFile(path string, content func(io.Writer) error) error {
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(temp.Name()) //nolint:errcheck // it was renamed, or the error is reported
	err = content(temp)
	err = errors.Join(err, temp.Chmod(0o644), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

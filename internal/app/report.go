package app

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/culprit-project/culprit/experiment"
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
func Report(o ReportOptions, out Output) error {
	plan, err := experiment.ReadPlan(o.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return o.hunt(out)
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

func (o *ReportOptions) hunt(out Output) error {
	if _, err := os.Stat(filepath.Join(o.Dir, experiment.RunsDir)); err != nil {
		return usage("report: %s is neither a run (it has no %s) nor a hunt (it has no %s/)", o.Dir, experiment.PlanFile, experiment.RunsDir)
	}
	record, err := experiment.ReadHunt(o.Dir)
	if err != nil {
		return &UsageError{err}
	}
	if !o.Page {
		return showHunt(record, out)
	}
	return o.write(out, func(w io.Writer) error { return report.HuntPage(w, record, o.Tool, time.Now(), again(record)) })
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

func writeHuntPage(r *experiment.Record, tool string) error {
	return writeFile(filepath.Join(r.Dir, report.PageFile), func(w io.Writer) error {
		return report.HuntPage(w, r, tool, time.Now(), again(r))
	})
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

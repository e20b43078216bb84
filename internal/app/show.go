package app

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/report"
)

// readVerdict reads a run's verdict as it was written.
func readVerdict(dir string) (*oracle.Verdict, error) {
	b, err := os.ReadFile(filepath.Join(dir, experiment.VerdictFile))
	if err != nil {
		return nil, fmt.Errorf("read verdict: %w", err)
	}
	v := new(oracle.Verdict)
	if err := json.Unmarshal(b, v); err != nil {
		return nil, fmt.Errorf("read verdict of %s: %w", dir, err)
	}
	return v, nil
}

// ShowRun shows a run's verdict as it was written, and judges nothing.
func ShowRun(dir string, out Output) (oracle.Status, error) {
	plan, err := experiment.ReadPlan(dir)
	if err != nil {
		return "", usage("%w\nIs %s a run directory?", err, dir)
	}
	v, err := readVerdict(dir)
	if err != nil {
		return "", usage("%w\nHas it been judged? culprit check %s", err, dir)
	}
	return show(dir, plan, v, out)
}

// RunStatus is a run's verdict in a word.
func RunStatus(dir string) string {
	v, err := readVerdict(dir)
	if err != nil {
		return "not judged"
	}
	return string(v.Status)
}

// ShowHunt shows what a case's hunt has come to.
func ShowHunt(o HypothesisOptions, out Output) error {
	c, err := experiment.ReadCase(o.Case)
	if err != nil {
		return &UsageError{err}
	}
	base := cmp.Or(o.Dir, filepath.Dir(c.Path))
	trials, err := c.ReadTrials(base)
	if err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(base, experiment.FindingFile))
	if err != nil {
		return usage("%s has no finding yet; it has %d trials: culprit hunt", c.Path, len(trials))
	}
	var r experiment.Result
	if err := json.Unmarshal(b, &r); err != nil {
		return fmt.Errorf("read finding: %w", err)
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, r)
	}
	report.Hunt(out.Screen, r, trials, base)
	return nil
}

package app

import (
	"cmp"
	"path/filepath"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
)

// ShowRun shows a run's verdict as it was written, and judges nothing.
func ShowRun(dir string, out Output) (oracle.Status, error) {
	plan, err := experiment.ReadPlan(dir)
	if err != nil {
		return "", usage("%w\nIs %s a run directory?", err, dir)
	}
	v, err := experiment.ReadVerdict(dir)
	if err != nil {
		return "", usage("%w\nHas it been judged? culprit check %s", err, dir)
	}
	return show(dir, plan, v, out)
}

// RunStatus is a run's verdict in a word.
func RunStatus(dir string) string {
	v, err := experiment.ReadVerdict(dir)
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
	r, err := experiment.ReadHunt(cmp.Or(o.Dir, filepath.Dir(c.Path)))
	if err != nil {
		return err
	}
	if r.Result.Status == search.Running {
		return usage("%s has no finding yet; it has %d trials: culprit hunt", c.Path, len(r.Trials))
	}
	return showHunt(r, out)
}

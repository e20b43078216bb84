package app

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/bundle"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/shrink"
)

// BundleOptions is what bundle is asked for.
type BundleOptions struct {
	What   string // a run directory, or a case
	Trials string // of a case: where they are; empty is the case's directory
	Output string // empty is the name of what is bundled, with -bundle
	// Workload is a file for run -c, which repro.py plays in place of the run's
	// requests; empty is what shrink made of the run or of the case, if it did.
	Workload string
	Read     func(path string) (RunOptions, error) // reads it
	Tool     string
}

// mostArms is how many arms of a case without a finding go into a bundle.
const mostArms = 12

// Bundle gathers what a server's maintainers ask for.
func Bundle(o BundleOptions, out Output) error {
	b := bundle.Options{Run: o.What, Tool: o.Tool}
	name := strings.TrimSuffix(filepath.Clean(o.What), ".yaml")
	places := []string{filepath.Join(o.What, "*")}
	if _, err := os.Stat(filepath.Join(o.What, experiment.PlanFile)); err != nil {
		c, err := experiment.ReadCase(o.What)
		if err != nil {
			return usage("bundle %s: it is no run directory, and as a case: %w", o.What, err)
		}
		base := cmp.Or(o.Trials, filepath.Dir(c.Path))
		if err := caseBundle(c, base, &b); err != nil {
			return err
		}
		places = []string{filepath.Join(base, "*"), filepath.Join(base, experiment.RunsDir, "*")}
	}
	file := o.Workload
	if file == "" {
		file = shrunkWorkload(append(places, filepath.Clean(b.Run)+shrinkSuffix))
	}
	if file != "" {
		var err error
		if b.Workload, err = o.workload(file, b.Run); err != nil {
			return err
		}
	}
	b.Dir = cmp.Or(o.Output, name+"-bundle")
	made, err := bundle.Write(b)
	if err != nil {
		return &UsageError{err}
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, made)
	}
	out.Screen.Printf("%s\n", term.Safe(filepath.Join(made.Dir, bundle.ReadmeFile)))
	for _, f := range made.Files {
		if f != bundle.ReadmeFile {
			out.Screen.Printf("  %s\n", term.Safe(f))
		}
	}
	if b.Workload != nil {
		w := b.Workload.Plan.Workload
		out.Screen.Printf("%s plays %s: %d sessions x %d rounds\n", bundle.ReproFile, term.Safe(file), w.Sessions, w.Rounds)
	}
	if made.NoRepro != "" {
		out.Screen.Printf("no %s: %s\n", bundle.ReproFile, made.NoRepro)
	}
	if made.Masked {
		out.Screen.Printf("the text of users is replaced, letter by letter\n")
	}
	return nil
}

// shrunkWorkload is the youngest workload that shrink wrote into one of the
// directories, or none.
func shrunkWorkload(places []string) (file string) {
	var youngest time.Time
	for _, place := range places {
		found, err := filepath.Glob(filepath.Join(place, shrinkFile))
		if err != nil {
			continue // a name with brackets: then it is given by --workload
		}
		for _, path := range found {
			if info, err := os.Stat(path); err == nil && info.ModTime().After(youngest) {
				file, youngest = filepath.Join(filepath.Dir(path), shrinkWorkloadFile), info.ModTime()
			}
		}
	}
	return file
}

// workload reads a file for run -c as the plan of a run like that in dir, and
// what shrink measured of it, if that lies beside.
func (o *BundleOptions) workload(file, dir string) (*bundle.Workload, error) {
	run, err := experiment.ReadPlan(dir)
	if err != nil {
		return nil, err
	}
	options, err := o.Read(file)
	if err != nil {
		return nil, &UsageError{err}
	}
	options.BaseURL, options.Model = run.BaseURL, cmp.Or(options.Model, run.Model)
	w := new(bundle.Workload)
	if w.Plan, err = options.plan(); err != nil {
		return nil, err
	}
	text, err := os.ReadFile(filepath.Join(filepath.Dir(file), shrinkFile))
	if errors.Is(err, fs.ErrNotExist) {
		return w, nil
	}
	var measured shrink.Result
	if err == nil {
		err = json.Unmarshal(text, &measured)
	}
	if err != nil {
		return nil, fmt.Errorf("read what shrink measured: %w", err)
	}
	w.Failures, w.Trials = measured.Rate.Failures, measured.Rate.Trials
	return w, nil
}

// caseBundle takes the trial that shows the failure best, and one of each arm
// that the finding rests on.
func caseBundle(c *experiment.Case, base string, b *bundle.Options) error {
	trials, err := c.Trials(base, experiment.RunsDir)
	if err != nil {
		return err
	}
	trials = slices.DeleteFunc(trials, func(e experiment.Evidence) bool { return e.Void != "" || e.Requests == 0 })
	if len(trials) == 0 {
		return usage("bundle %s: its hunt has no trials that count yet", c.Path)
	}
	worst := slices.MaxFunc(trials, func(x, y experiment.Evidence) int { return cmp.Compare(x.Failures, y.Failures) })
	if worst.Failures == 0 {
		return usage("bundle %s: in no trial anything broke", c.Path)
	}
	text, err := os.ReadFile(filepath.Join(base, experiment.FindingFile))
	switch {
	case err == nil:
		b.Finding = new(experiment.Result)
		if err := json.Unmarshal(text, b.Finding); err != nil {
			return fmt.Errorf("read finding: %w", err)
		}
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("read finding: %w", err)
	}
	named := map[string]string{c.Space.Failing().String(): "as-it-fails"}
	if b.Finding != nil && b.Finding.Status == search.Found {
		for _, cause := range b.Finding.Causes {
			whole := c.Space.Failing()
			maps.Copy(whole, cause.With.Arm)
			named[whole.String()] = "culprit-alone"
			for _, w := range cause.Without {
				whole := c.Space.Failing()
				maps.Copy(whole, w.Arm)
				named[whole.String()] = "without-" + w.Factor
			}
		}
	}
	b.Run = worst.Path()
	seen := map[string]bool{}
	for _, e := range trials {
		key := e.Arm.String()
		name := named[key]
		if seen[key] || name == "" && (b.Finding != nil || len(b.Arms) >= mostArms) {
			continue
		}
		seen[key] = true
		b.Arms = append(b.Arms, bundle.Arm{Name: cmp.Or(name, e.Arm.Hash()), Arm: e.Arm, Dir: e.Path()})
	}
	return nil
}

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

	"github.com/culprit-project/culprit/bundle"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
)

// BundleOptions is what bundle is asked for.
type BundleOptions struct {
	What   string // a run directory, or a case
	Trials string // of a case: where they are; empty is the case's directory
	Output string // empty is the name of what is bundled, with -bundle
	Tool   string
}

// mostArms is how many arms of a case without a finding go into a bundle.
const mostArms = 12

// Bundle gathers what a server's maintainers ask for.
func Bundle(o BundleOptions, out Output) error {
	b := bundle.Options{Run: o.What, Tool: o.Tool}
	name := strings.TrimSuffix(filepath.Clean(o.What), ".yaml")
	if _, err := os.Stat(filepath.Join(o.What, experiment.PlanFile)); err != nil {
		c, err := experiment.ReadCase(o.What)
		if err != nil {
			return usage("bundle %s: it is no run directory, and as a case: %w", o.What, err)
		}
		if err := caseBundle(c, cmp.Or(o.Trials, filepath.Dir(c.Path)), &b); err != nil {
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
	if made.NoRepro != "" {
		out.Screen.Printf("no %s: %s\n", bundle.ReproFile, made.NoRepro)
	}
	if made.Masked {
		out.Screen.Printf("the text of users is replaced, letter by letter\n")
	}
	return nil
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

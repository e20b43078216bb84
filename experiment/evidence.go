package experiment

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// Subject is what predictions may speak of.
func (c *Case) Subject() hypothesis.Subject {
	s := hypothesis.Subject{Space: c.Space, Logs: slices.Sorted(maps.Keys(c.Logs))}
	for _, p := range c.processes {
		s.Processes = append(s.Processes, p.name)
	}
	if c.Probes != nil {
		for _, p := range c.Probes.Probes {
			s.Probes = append(s.Probes, cmp.Or(p.As, p.ID)) // as the history has it
		}
	}
	return s
}

// Evidence is an observation with where it came from. Full reads what only new
// evidence needs: counters and the attestation.
type Evidence struct {
	Kind   string // run, attestation, finding
	Source string // relative to the case's directory
	Taken  time.Time
	hypothesis.Observation

	dir  string
	path string // of the attestation; empty is none
}

// Trials lists what a case's trials are evidence of, in the order of running.
// dirs are under base: RunsDir, ExperimentsDir.
func (c *Case) Trials(base, dirs string) ([]Evidence, error) {
	paths, err := filepath.Glob(filepath.Join(base, dirs, "*", TrialFile))
	if err != nil {
		return nil, err
	}
	slices.Sort(paths)
	var list []Evidence
	var trials []Trial
	first := map[int]string{} // by launch
	for _, path := range paths {
		if filepath.Ext(filepath.Dir(path)) == ".partial" {
			continue
		}
		t, err := readTrial(path)
		if err != nil {
			return nil, err
		}
		if t.Space != c.Space.Fingerprint() {
			continue // of other factors than the case has now
		}
		info, err := os.Stat(path)
		if err != nil {
			return nil, fmt.Errorf("read trial: %w", err)
		}
		dir := filepath.Dir(path)
		e := Evidence{Kind: "run", Source: c.source(dir), Taken: info.ModTime(), dir: dir}
		trials = append(trials, t)
		numbers := launchNumbers(trials)
		launch := first[numbers[len(numbers)-1]]
		if launch == "" {
			launch = e.Source
			first[numbers[len(numbers)-1]] = launch
		}
		e.Arm = c.Space.Failing()
		maps.Copy(e.Arm, t.Proposal.Arm)
		e.Launch, e.Requests, e.Failures = launch, t.Observation.Requests, t.Observation.Failures
		if !t.Observation.Outcome.Counts() {
			e.Void = t.Note
		}
		list = append(list, e)
	}
	return list, nil
}

// ReadTrials reads the trials of a case's hunt, in the order of running.
func (c *Case) ReadTrials(base string) ([]Trial, error) {
	paths, err := filepath.Glob(filepath.Join(base, RunsDir, "*", TrialFile))
	if err != nil {
		return nil, err
	}
	slices.Sort(paths)
	var list []Trial
	for _, path := range paths {
		t, err := readTrial(path)
		if err != nil {
			return nil, err
		}
		if t.Space == c.Space.Fingerprint() {
			list = append(list, t)
		}
	}
	return list, nil
}

func readTrial(path string) (t Trial, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return t, fmt.Errorf("read trial: %w", err)
	}
	if err := json.Unmarshal(b, &t); err != nil {
		return t, fmt.Errorf("read %s: %w", path, err)
	}
	if t.Observation == nil {
		return t, fmt.Errorf("read %s: it has no observation", path)
	}
	return t, nil
}

// source names evidence by its path from the case's directory.
func (c *Case) source(path string) string {
	base, err1 := filepath.Abs(filepath.Dir(c.Path))
	absolute, err2 := filepath.Abs(path)
	if relative, err := filepath.Rel(base, absolute); errors.Join(err, err1, err2) == nil && filepath.IsLocal(relative) {
		return filepath.ToSlash(relative)
	}
	return filepath.ToSlash(absolute)
}

// Stray is a run or an attestation that no hunt of the case made: what it was
// taken under is read from itself.
func (c *Case) Stray(path string) (Evidence, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Evidence{}, err
	}
	e := Evidence{Source: c.source(path), Taken: info.ModTime(), Observation: hypothesis.Observation{Live: design.Arm{}}}
	if !info.IsDir() {
		e.Kind, e.path = "attestation", path
		return e, c.readLive(&e)
	}
	e.Kind, e.dir, e.Launch = "run", path, e.Source
	plan, err := ReadPlan(path)
	if err != nil {
		return e, err
	}
	if _, err := os.Stat(filepath.Join(path, TrialFile)); err == nil {
		return e, fmt.Errorf("%s is a trial of a hunt, which the ledger has by itself when it is under the case's directory", path)
	}
	b, err := os.ReadFile(filepath.Join(path, VerdictFile))
	if err != nil {
		return e, fmt.Errorf("%w\nHas it been judged? culprit check %s", err, path)
	}
	var v oracle.Verdict
	if err := json.Unmarshal(b, &v); err != nil {
		return e, fmt.Errorf("read %s: %w", filepath.Join(path, VerdictFile), err)
	}
	o := search.Observation{Outcome: search.Ran}
	note := observe(&v, v.Broken.Main.Failures, &o)
	e.Requests, e.Failures = o.Requests, o.Failures
	if !o.Outcome.Counts() {
		e.Void = note
	}
	if err := c.readClient(&e, plan); err != nil {
		return e, err
	}
	e.path = filepath.Join(path, AttestFile)
	return e, c.readLive(&e)
}

// Path is the run directory; empty where it is none.
func (e *Evidence) Path() string { return e.dir }

// readLive says which levels an attestation shows.
func (c *Case) readLive(e *Evidence) error {
	a, err := e.ReadAttestation()
	if err != nil || a == nil {
		return err
	}
	if e.Kind == "attestation" {
		e.Attestation = a // its file may go
	}
	for _, f := range c.Space.Factors {
		if level := c.LevelOf(a, f.Name); level != "" {
			e.Live[f.Name] = level
		}
	}
	return nil
}

// readClient says which levels of the client's own factors a plan has.
func (c *Case) readClient(e *Evidence, p Plan) error {
	b, err := json.Marshal(p)
	if err != nil {
		return err
	}
	var plan map[string]any
	if err := json.Unmarshal(b, &plan); err != nil {
		return err
	}
	workload, _ := plan["workload"].(map[string]any)
	plan["stream"] = !p.NoStream
	for _, f := range c.Space.Factors {
		if !f.ClientSide {
			continue
		}
		value, ok := workload[f.Name]
		if !ok {
			value = plan[f.Name]
		}
		for _, l := range f.Levels {
			if fmt.Sprint(c.levels[f.Name][l.Name].setting) == fmt.Sprint(value) {
				e.Live[f.Name] = l.Name
			}
		}
	}
	return nil
}

// ReadAttestation reads the attestation; nil where there is none.
func (e *Evidence) ReadAttestation() (*target.Attestation, error) {
	path := e.path
	if path == "" {
		if e.dir == "" {
			return nil, nil
		}
		path = filepath.Join(e.dir, AttestFile)
	}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) && e.dir != "" {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read attestation: %w", err)
	}
	a := new(target.Attestation)
	if err := json.Unmarshal(b, a); err != nil {
		return nil, fmt.Errorf("read %s: it is no attestation: %w", path, err)
	}
	return a, nil
}

// ReadCounts fills in what the run's counters did.
func (e *Evidence) ReadCounts() error {
	if e.dir == "" {
		return nil
	}
	r, err := history.Open(filepath.Join(e.dir, HistoryFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer r.Close()
	e.Counts, err = hypothesis.CountsOf(func() (*history.Event, error) {
		for {
			record, err := r.Next()
			if errors.Is(err, io.EOF) {
				return nil, nil
			}
			if err != nil {
				return nil, err
			}
			if record.Event != nil {
				return record.Event, nil
			}
		}
	})
	if err != nil {
		return fmt.Errorf("read counts of %s: %w", e.dir, err)
	}
	return nil
}

// FindingEvidence is what a hunt came to; false where it came to none.
func (c *Case) FindingEvidence(base string) (e Evidence, ok bool, err error) {
	path := filepath.Join(base, FindingFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return e, false, nil
	}
	if err != nil {
		return e, false, fmt.Errorf("read finding: %w", err)
	}
	var f Result
	if err := json.Unmarshal(b, &f); err != nil {
		return e, false, fmt.Errorf("read finding: %w", err)
	}
	info, err := os.Stat(path)
	if err != nil {
		return e, false, err
	}
	if f.Status != search.Found {
		return e, false, nil
	}
	e = Evidence{Kind: "finding", Source: c.source(path), Taken: info.ModTime()}
	e.Finding = &hypothesis.FindingResult{Error: f.Error}
	for _, cause := range f.Causes {
		e.Finding.Causes = append(e.Finding.Causes, cause.Set)
	}
	return e, true, nil
}

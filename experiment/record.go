package experiment

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

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/stats"
	"github.com/culprit-project/culprit/target"
)

// BeliefFile is what the search believed after a trial, in its directory.
const BeliefFile = "belief.json"

// Contrast compares all launches in which a cause was there with all in which
// none was, whatever the other levels were. Where the cause is none of the
// factors, it compares the failing arm with everything safe.
type Contrast struct {
	With    search.Evidence `json:"with"`
	Without search.Evidence `json:"without"`
}

// WayOut is a level that makes the failure go away by itself.
type WayOut struct {
	Factor string  `json:"factor"`
	Level  string  `json:"level"`
	Cost   float64 `json:"cost,omitempty"` // as the case states it
	// Speed is tokens per second as a share of the failing arm's, over so many
	// launches; 0 is not measured.
	Speed    float64 `json:"speed,omitempty"`
	Launches int     `json:"launches,omitempty"`
}

// conclude adds to a finding what the trials show beyond it.
func (r *Result) conclude(c *Case, space design.Space, dispersion stats.Dispersion, trials []Trial) {
	var group func(design.Arm) int // 0 with a cause, 1 without, -1 neither
	switch r.Status {
	case search.Found:
		group = func(a design.Arm) int {
			if slices.ContainsFunc(r.Causes, func(cause search.Cause) bool { return contains(space, a, cause.Set) }) {
				return 0
			}
			return 1
		}
		r.WaysOut = waysOut(c, space, r.Causes, trials)
	case search.NoneOfThese:
		arms := []string{space.Failing().Hash(), space.Safe().Hash()}
		group = func(a design.Arm) int { return slices.Index(arms, a.Hash()) }
	case search.NotReproduced, search.Undecided, search.Running:
		return
	}
	var groups [2][]stats.Cluster // with a cause, and without
	index := [2]map[int]int{{}, {}}
	launches := launchNumbers(trials)
	for i, t := range trials {
		if !t.counts() || t.Proposal.Phase == search.Sweep {
			continue // other levels are listed by themselves
		}
		g := group(t.Proposal.Arm)
		if g < 0 {
			continue
		}
		at, known := index[g][launches[i]] // client-side factors change within a launch
		if !known {
			at = len(groups[g])
			index[g][launches[i]] = at
			groups[g] = append(groups[g], stats.Cluster{})
		}
		groups[g][at].Failures += t.Observation.Failures
		groups[g][at].Trials += t.Observation.Requests
	}
	r.Contrast = &Contrast{pool(groups[0], dispersion), pool(groups[1], dispersion)}
}

// counts says that the trial is evidence.
func (t *Trial) counts() bool {
	return t.Observation != nil && t.Observation.Requests > 0 && t.Observation.Outcome.Counts()
}

func pool(launches []stats.Cluster, d stats.Dispersion) search.Evidence {
	e := search.Evidence{Launches: len(launches), High: 1}
	for _, l := range launches {
		e.Requests += l.Trials
		e.Failures += l.Failures
	}
	if len(launches) > 0 {
		e.Low, e.High = stats.AnytimeInterval(launches, d, 0.95)
	}
	return e
}

// waysOut are the single levels that each cause needs, the cheapest first: by
// what the case says, else by the speed that was measured.
func waysOut(c *Case, space design.Space, causes []search.Cause, trials []Trial) []WayOut {
	var out []WayOut
	if len(causes) != 1 {
		return nil // no single level may be enough
	}
	speed := func(arm design.Arm) (mean float64, launches int) {
		n := 0
		for _, t := range trials {
			if t.counts() && t.TokensPerS > 0 && t.Proposal.Arm.Hash() == arm.Hash() {
				mean += t.TokensPerS
				n++
				if t.Proposal.Launch {
					launches++
				}
			}
		}
		return mean / float64(max(n, 1)), launches
	}
	failing, _ := speed(space.Failing())
	for _, name := range slices.Sorted(maps.Keys(causes[0].Set)) {
		arm := space.Failing()
		i := slices.IndexFunc(space.Factors, func(f design.Factor) bool { return f.Name == name })
		f := space.Factors[i]
		arm[name] = f.Levels[f.Safe()].Name
		w := WayOut{Factor: name, Level: arm[name], Cost: c.Notes[name].Cost}
		if safe, launches := speed(arm); safe > 0 && failing > 0 {
			w.Speed, w.Launches = safe/failing, launches
		}
		out = append(out, w)
	}
	slices.SortStableFunc(out, func(a, b WayOut) int { return cmp.Compare(a.loss(), b.loss()) })
	return out
}

func (w WayOut) loss() float64 {
	switch {
	case w.Cost != 0:
		return w.Cost
	case w.Speed != 0:
		return 1 - w.Speed
	}
	return 1
}

// Record is what a hunt has left in its directory.
type Record struct {
	Dir      string
	Case     *Case
	Trials   []Trial
	Beliefs  []*search.Progress // after each trial; nil where it isn't there
	Asked    []Trial            // what hypotheses asked for, each on a launch of its own
	Untested []Unmet
	Base     *Base   // nil: the case asks for no control
	Result   *Result // its status is running while it goes on
}

// ReadHunt reads a hunt's directory.
func ReadHunt(dir string) (*Record, error) {
	c, err := ReadCase(dir)
	if err != nil {
		return nil, err
	}
	r := &Record{Dir: dir, Case: c}
	if r.Trials, err = readTrials(dir, RunsDir); err != nil {
		return nil, err
	}
	if r.Asked, err = readTrials(dir, ExperimentsDir); err != nil {
		return nil, err
	}
	for _, t := range r.Trials {
		var belief search.Progress
		ok, err := readJSON(filepath.Join(dir, t.Dir, BeliefFile), &belief)
		if err != nil {
			return nil, err
		}
		if ok {
			r.Beliefs = append(r.Beliefs, &belief)
		} else {
			r.Beliefs = append(r.Beliefs, nil)
		}
	}
	if _, err := readJSON(filepath.Join(dir, PreflightFile), &r.Untested); err != nil {
		return nil, err
	}
	var base Base
	if ok, err := readJSON(filepath.Join(dir, BaseFile), &base); err != nil {
		return nil, err
	} else if ok {
		r.Base = &base
	}
	r.Result = &Result{Finding: search.Finding{Status: search.Running, Text: "it goes on, or was stopped; culprit hunt --resume goes on"}}
	for _, t := range r.Trials {
		r.Result.Requests += t.Observation.Requests
		if t.Launches() {
			r.Result.Launches++
		}
	}
	var result Result
	ok, err := readJSON(filepath.Join(dir, FindingFile), &result)
	if ok {
		r.Result = &result
	}
	return r, err
}

// readTrials reads the trials that have come to their end.
func readTrials(dir, under string) (trials []Trial, err error) {
	entries, err := os.ReadDir(filepath.Join(dir, under))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("read hunt: %w", err)
	}
	for _, e := range entries {
		if !e.IsDir() || filepath.Ext(e.Name()) == ".partial" {
			continue
		}
		var t Trial
		ok, err := readJSON(filepath.Join(dir, under, e.Name(), TrialFile), &t)
		if err != nil {
			return nil, err
		}
		if !ok || t.Observation == nil {
			continue // still running, or killed
		}
		t.Dir = filepath.Join(under, e.Name())
		trials = append(trials, t)
	}
	return trials, nil
}

// AskedArms pools what hypotheses asked for by arm, in the order of running.
func (r *Record) AskedArms() []search.Evidence {
	launches := map[string][]stats.Cluster{}
	var arms []design.Arm
	for _, t := range r.Asked {
		if !t.counts() {
			continue
		}
		key := t.Proposal.Arm.Hash()
		if launches[key] == nil {
			arms = append(arms, t.Proposal.Arm)
		}
		launches[key] = append(launches[key], stats.Cluster{Failures: t.Observation.Failures, Trials: t.Observation.Requests})
	}
	var out []search.Evidence
	for _, arm := range arms {
		e := pool(launches[arm.Hash()], stats.Dispersed())
		e.Arm = arm
		out = append(out, e)
	}
	return out
}

// ReadAttestation reads what was really running in a run.
func ReadAttestation(dir string) (*target.Attestation, error) {
	var a target.Attestation
	path := filepath.Join(dir, AttestFile)
	if ok, err := readJSON(path, &a); !ok {
		return nil, cmp.Or(err, fmt.Errorf("read attestation: %s isn't there", path))
	}
	return &a, nil
}

// Number is a trial's, from 1; those that hypotheses asked for are numbered by
// themselves.
func (r *Record) Number(t *Trial) int {
	same := func(o Trial) bool { return o.Dir == t.Dir }
	return 1 + max(slices.IndexFunc(r.Trials, same), slices.IndexFunc(r.Asked, same))
}

// readJSON reads a file if it is there.
func readJSON(path string, into any) (there bool, err error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("read hunt: %w", err)
	}
	if err := json.Unmarshal(b, into); err != nil {
		return false, fmt.Errorf("read %s: %w", path, err)
	}
	return true, nil
}

// Whole adds to an arm the settings that take no effect, as they are in the
// failing arm: so it was launched.
func (r *Record) Whole(arm design.Arm) design.Arm {
	whole, failing := maps.Clone(arm), r.Case.Space.Failing()
	for _, u := range r.Untested {
		whole[u.Factor] = failing[u.Factor]
	}
	return whole
}

// Worst is the trial with the most broken replies; nil when there are none.
func (r *Record) Worst() *Trial { return worst(r.Trials) }

// WorstAsked is the same of those that hypotheses asked for.
func (r *Record) WorstAsked() *Trial { return worst(r.Asked) }

func worst(trials []Trial) *Trial {
	var worst *Trial
	for i := range trials {
		if t := &trials[i]; t.Observation.Failures > 0 && (worst == nil || t.Observation.Failures > worst.Observation.Failures) {
			worst = t
		}
	}
	return worst
}

// ReadVerdict reads a run directory's verdict.
func ReadVerdict(dir string) (*oracle.Verdict, error) {
	var v oracle.Verdict
	path := filepath.Join(dir, VerdictFile)
	if ok, err := readJSON(path, &v); !ok {
		return nil, cmp.Or(err, fmt.Errorf("read verdict: %s isn't there; make it with culprit check %s", path, dir))
	}
	return &v, nil
}

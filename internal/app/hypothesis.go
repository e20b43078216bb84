package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/ledger"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/target"
)

// HypothesisOptions is what the commands on hypotheses are asked for.
type HypothesisOptions struct {
	Case string // a case.yaml, or the directory that it is in
	Dir  string // where the trials are; empty is the case's directory
}

// book is a case with its ledger.
type book struct {
	subject *experiment.Case
	base    string // where the trials are
	ledger  *ledger.Ledger
	now     time.Time
}

// openBook opens a case's ledger, and enters what is in the case's directory
// and not in the ledger yet: hypotheses in files, trials, the finding.
func openBook(ctx context.Context, o HypothesisOptions) (*book, error) {
	c, err := experiment.ReadCase(o.Case)
	if err != nil {
		return nil, &UsageError{err}
	}
	b, err := newBook(ctx, c, o.Dir)
	if err != nil {
		return nil, err
	}
	if err := errors.Join(b.readFiles(ctx), b.sync(ctx)); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

func newBook(ctx context.Context, c *experiment.Case, base string) (*book, error) {
	dir := filepath.Dir(c.Path)
	l, err := ledger.Open(ctx, filepath.Join(dir, ledger.File))
	if err != nil {
		return nil, err
	}
	return &book{subject: c, base: cmp.Or(base, dir), ledger: l, now: time.Now()}, nil
}

func (b *book) Close() error { return b.ledger.Close() }

func (b *book) dir() string { return filepath.Dir(b.subject.Path) }

// readFiles enters the hypotheses that are in files.
func (b *book) readFiles(ctx context.Context) error {
	list, sources, err := hypothesis.ReadFiles(b.dir())
	if err != nil {
		return &UsageError{err}
	}
	for i := range list {
		if _, err := b.add(ctx, list[i], sources[i]); err != nil {
			return fmt.Errorf("%s: %w", filepath.Join(b.dir(), sources[i]), err)
		}
	}
	return nil
}

// add checks a hypothesis and enters it.
func (b *book) add(ctx context.Context, w hypothesis.Written, source string) (added bool, err error) {
	if _, err := w.Check(b.subject.Subject()); err != nil {
		return false, &UsageError{err}
	}
	h := ledger.Hypothesis{Name: w.Name, Statement: strings.TrimSpace(w.Statement), Source: source, Written: b.now}
	for _, text := range w.Predictions {
		h.Predictions = append(h.Predictions, ledger.Prediction{Text: text})
	}
	added, err = b.ledger.Add(ctx, h)
	if _, differs := errors.AsType[*ledger.DiffersError](err); differs {
		return false, &UsageError{err}
	}
	return added, err
}

// sync enters the evidence that isn't in the ledger yet, and judges.
func (b *book) sync(ctx context.Context) error {
	var all []experiment.Evidence
	for _, dirs := range []string{experiment.RunsDir, experiment.ExperimentsDir} {
		list, err := b.subject.Trials(b.base, dirs)
		if err != nil {
			return err
		}
		all = append(all, list...)
	}
	finding, ok, err := b.subject.FindingEvidence(b.base)
	if err != nil {
		return err
	}
	if ok {
		all = append(all, finding)
	}
	return b.enter(ctx, all)
}

// enter adds evidence, the oldest first, and judges all predictions by it.
func (b *book) enter(ctx context.Context, all []experiment.Evidence) error {
	known, err := b.ledger.Evidence(ctx)
	if err != nil {
		return err
	}
	have := map[string]bool{}
	for _, e := range known {
		have[e.Source] = true
	}
	slices.SortStableFunc(all, func(x, y experiment.Evidence) int { return x.Taken.Compare(y.Taken) })
	for i := range all {
		e := &all[i]
		if have[e.Source] {
			continue
		}
		if err := e.ReadCounts(); err != nil {
			return err
		}
		content, err := json.Marshal(e.Observation)
		if err != nil {
			return err
		}
		if _, _, err := b.ledger.AddEvidence(ctx, ledger.Evidence{Kind: e.Kind, Source: e.Source, Content: content, Taken: e.Taken}); err != nil {
			return err
		}
	}
	return b.judge(ctx)
}

// judge judges each prediction by each piece of evidence that hasn't judged it.
func (b *book) judge(ctx context.Context) error {
	evidence, err := b.ledger.Evidence(ctx)
	if err != nil {
		return err
	}
	hypotheses, err := b.ledger.Hypotheses(ctx)
	if err != nil {
		return err
	}
	judged, err := b.ledger.Judgements(ctx)
	if err != nil {
		return err
	}
	type pair struct{ prediction, evidence int64 }
	done := map[pair]bool{}
	for _, j := range judged {
		done[pair{j.Prediction, j.Evidence}] = true
	}
	observations := make([]hypothesis.Observation, len(evidence))
	for i, e := range evidence {
		if err := json.Unmarshal(e.Content, &observations[i]); err != nil {
			return fmt.Errorf("read evidence %s of the ledger: %w", e.Source, err)
		}
		if e.Kind == "run" {
			observations[i].Attest = func() (*target.Attestation, error) { return b.attestation(e) }
		}
	}
	var fresh []ledger.Judgement
	for _, h := range hypotheses {
		for _, lp := range h.Predictions {
			p, err := hypothesis.Parse(lp.Text, b.subject.Subject())
			if err != nil {
				continue // of a case as it was before
			}
			for i, e := range evidence {
				if done[pair{lp.ID, e.ID}] {
					continue
				}
				j, bears := p.Judge(b.subject.Space, observations[:i+1])
				if !bears {
					continue
				}
				j.Prediction, j.Evidence, j.Judged = lp.ID, e.ID, b.now
				fresh = append(fresh, j)
			}
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	return b.ledger.Judge(ctx, fresh)
}

// attestation reads that of a run, if its file is still there.
func (b *book) attestation(e ledger.Evidence) (*target.Attestation, error) {
	if e.Kind != "run" {
		return nil, nil
	}
	path := filepath.FromSlash(e.Source)
	if !filepath.IsAbs(path) {
		path = filepath.Join(b.dir(), path)
	}
	a, err := readAttestation(filepath.Join(path, experiment.AttestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return a, err
}

// standing is where everything in a case's ledger stands.
func (b *book) standing(ctx context.Context) (report.Standing, error) {
	s := report.Standing{Case: b.subject.Path, Dir: b.dir()}
	hypotheses, err1 := b.ledger.Hypotheses(ctx)
	evidence, err2 := b.ledger.Evidence(ctx)
	judgements, err3 := b.ledger.Judgements(ctx)
	if err := errors.Join(err1, err2, err3); err != nil {
		return s, err
	}
	s.Evidence = len(evidence)
	byID := map[int64]ledger.Evidence{}
	for _, e := range evidence {
		byID[e.ID] = e
	}
	byPrediction := map[int64][]ledger.Judgement{}
	for _, j := range judgements {
		byPrediction[j.Prediction] = append(byPrediction[j.Prediction], j)
	}
	for _, h := range hypotheses {
		sh := report.Hypothesis{Name: h.Name, Statement: h.Statement, Source: h.Source, Written: h.Written, Verdict: ledger.Supported}
		for _, p := range h.Predictions {
			sp := report.Prediction{Text: p.Text, Verdict: ledger.Undecided, Error: 1, Why: "nothing has been seen that bears on it"}
			list := byPrediction[p.ID]
			slices.SortStableFunc(list, func(x, y ledger.Judgement) int { return cmp.Compare(x.Evidence, y.Evidence) })
			for _, j := range list {
				e := byID[j.Evidence]
				before := e.Taken.Before(h.Written)
				sp.Evidence = append(sp.Evidence, report.Judgement{
					Source: e.Source, Kind: e.Kind, Verdict: j.Verdict, Number: j.Number, Error: j.Error, Why: j.Text, Before: before,
				})
				if j.Verdict != ledger.Rejected {
					sp.Verdict, sp.Number, sp.Error, sp.Why, sp.Before = j.Verdict, j.Number, j.Error, j.Text, before
				} else if sp.Error == 1 && sp.Verdict == ledger.Undecided {
					sp.Why = j.Text
				}
			}
			sh.Predictions = append(sh.Predictions, sp)
		}
		sh.Settle()
		s.Hypotheses = append(s.Hypotheses, sh)
	}
	return s, nil
}

// candidates are the hypotheses that aren't settled, with the predictions that
// aren't.
func (b *book) candidates(s report.Standing) (open []hypothesis.Candidate) {
	for _, h := range s.Hypotheses {
		if h.Verdict != ledger.Undecided {
			continue
		}
		c := hypothesis.Candidate{Name: h.Name}
		for _, sp := range h.Predictions {
			p, err := hypothesis.Parse(sp.Text, b.subject.Subject())
			if err == nil && sp.Verdict == ledger.Undecided {
				c.Predictions = append(c.Predictions, p)
			}
		}
		if len(c.Predictions) > 0 {
			open = append(open, c)
		}
	}
	return open
}

// next ranks the experiments that would tell the open hypotheses apart.
func (b *book) next(ctx context.Context, s report.Standing) ([]hypothesis.Experiment, error) {
	failing, err := b.subject.Render(b.subject.Space.Failing())
	if err != nil {
		return nil, &UsageError{err}
	}
	disputed, err := b.disputed(ctx)
	if err != nil {
		return nil, err
	}
	trials, err := b.subject.ReadTrials(b.base)
	if err != nil {
		return nil, err
	}
	cost, n := 0.0, 0.0
	for _, t := range trials {
		if t.Observation.LaunchCost > 0 {
			cost, n = cost+t.Observation.LaunchCost, n+1
		}
	}
	if n > 0 {
		cost /= n
	}
	return hypothesis.Next(b.subject.Space, b.candidates(s), hypothesis.Options{
		LaunchCost: cost, Batch: max(failing.Plan.Concurrency, 1) * max(failing.Plan.Workload.Rounds, 1), Disputed: disputed,
	}), nil
}

// disputed are pairs of hypotheses that investigators contradict each other by.
func (b *book) disputed(ctx context.Context) ([][2]string, error) {
	claims, err1 := b.ledger.Claims(ctx)
	hypotheses, err2 := b.ledger.Hypotheses(ctx)
	if err := errors.Join(err1, err2); err != nil {
		return nil, err
	}
	by := map[int64]string{}
	for _, c := range claims {
		by[c.Hypothesis] = c.Investigator
	}
	var of []hypothesis.Candidate
	who := map[string]string{}
	for _, h := range hypotheses {
		if by[h.ID] == "" {
			continue
		}
		c := hypothesis.Candidate{Name: h.Name}
		who[h.Name] = by[h.ID]
		for _, lp := range h.Predictions {
			if p, err := hypothesis.Parse(lp.Text, b.subject.Subject()); err == nil {
				c.Predictions = append(c.Predictions, p)
			}
		}
		of = append(of, c)
	}
	return slices.DeleteFunc(hypothesis.Contradictions(b.subject.Space, of), func(p [2]string) bool { return who[p[0]] == who[p[1]] }), nil
}

// AddHypothesis checks a hypothesis, enters it, and judges it by what is known.
func AddHypothesis(ctx context.Context, o HypothesisOptions, w hypothesis.Written, source string, out Output) error {
	b, err := openBook(ctx, o)
	if err != nil {
		return err
	}
	defer b.Close() //nolint:errcheck // what was written is committed
	if _, err := b.add(ctx, w, source); err != nil {
		return err
	}
	if err := b.judge(ctx); err != nil {
		return err
	}
	return b.show(ctx, w.Name, out)
}

// Hypotheses is where every hypothesis of a case stands, with all evidence.
func Hypotheses(ctx context.Context, o HypothesisOptions) (report.Standing, error) {
	b, err := openBook(ctx, o)
	if err != nil {
		return report.Standing{}, err
	}
	defer b.Close() //nolint:errcheck // what was written is committed
	return b.standing(ctx)
}

// ListHypotheses shows where every hypothesis stands.
func ListHypotheses(ctx context.Context, o HypothesisOptions, out Output) error {
	s, err := Hypotheses(ctx, o)
	if err != nil {
		return err
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, s)
	}
	report.Hypotheses(out.Screen, s)
	return nil
}

// ShowHypothesis shows one with all its evidence.
func ShowHypothesis(ctx context.Context, o HypothesisOptions, name string, out Output) error {
	b, err := openBook(ctx, o)
	if err != nil {
		return err
	}
	defer b.Close() //nolint:errcheck // what was written is committed
	return b.show(ctx, name, out)
}

func (b *book) show(ctx context.Context, name string, out Output) error {
	s, err := b.standing(ctx)
	if err != nil {
		return err
	}
	h, err := s.Find(name)
	if err != nil {
		return &UsageError{err}
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, h)
	}
	report.ShowHypothesis(out.Screen, h)
	return nil
}

// NextExperiment shows which experiment would tell most, and what its outcomes
// would mean.
func NextExperiment(ctx context.Context, o HypothesisOptions, out Output) error {
	b, err := openBook(ctx, o)
	if err != nil {
		return err
	}
	defer b.Close() //nolint:errcheck // what was written is committed
	s, err := b.standing(ctx)
	if err != nil {
		return err
	}
	list, err := b.next(ctx, s)
	if err != nil {
		return err
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, struct {
			Experiments []hypothesis.Experiment `json:"experiments"`
		}{slices.Concat([]hypothesis.Experiment{}, list)})
	}
	report.Next(out.Screen, b.subject.Space, s, list, o.Case)
	return nil
}

// JudgeEvidence enters runs and attestations that no hunt made, as evidence.
func JudgeEvidence(ctx context.Context, o HypothesisOptions, paths []string, out Output) error {
	b, err := openBook(ctx, o)
	if err != nil {
		return err
	}
	defer b.Close() //nolint:errcheck // what was written is committed
	var all []experiment.Evidence
	for _, path := range paths {
		e, err := b.subject.Stray(path)
		if err != nil {
			return &UsageError{err}
		}
		all = append(all, e)
	}
	if err := b.enter(ctx, all); err != nil {
		return err
	}
	s, err := b.standing(ctx)
	if err != nil {
		return err
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, s)
	}
	for _, e := range all {
		report.Judged(out.Screen, s, e.Source)
	}
	return nil
}

// odds are the search's prior from settled hypotheses.
func (b *book) odds(s report.Standing) map[string]float64 {
	settled := map[*hypothesis.Prediction]ledger.Verdict{}
	for _, h := range s.Hypotheses {
		for _, sp := range h.Predictions {
			if p, err := hypothesis.Parse(sp.Text, b.subject.Subject()); err == nil {
				settled[p] = sp.Verdict
			}
		}
	}
	return hypothesis.Odds(b.subject.Space, settled)
}

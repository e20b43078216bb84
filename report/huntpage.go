package report

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

type huntPage struct {
	Causes      []causePage
	Contrast    *rates
	WaysOut     []wayOutRow
	Levels      *rates
	Arms        rates
	Posterior   *posteriorPage
	Differences []difference
	Uncounted   []string
	Cost        string
	Trials      []trialRow
}

type causePage struct {
	N           int
	Title       string
	Levels      []levelRow
	Certificate rates
}

type levelRow struct{ Factor, Note, Suspect, Safe string }

type wayOutRow struct{ Setting, Cost string }

type posteriorPage struct{ Factors, Sets *steps }

type difference struct {
	Arm  string
	Open bool
	Rows []differenceRow
}

type differenceRow struct{ What, A, B string }

type trialRow struct {
	N                                                                     int
	Phase, Arm, Class, Result, Why, Launch, Took, Note, Dir, Ops, Command string
}

func (p *huntPage) sections() []section {
	var out []section
	add := func(there bool, id, title string) {
		if there {
			out = append(out, section{id, title})
		}
	}
	for _, c := range p.Causes {
		add(true, fmt.Sprintf("cause%d", c.N), c.Title)
	}
	add(p.Contrast != nil, "contrast", "All launches together")
	add(p.WaysOut != nil, "out", "Way out")
	add(p.Levels != nil, "levels", "Other levels")
	add(len(p.Arms.Rows) > 0, "arms", "Arms")
	add(p.Posterior != nil, "posterior", "What the search thought")
	return out
}

func (p *huntPage) recordSections() []section {
	var out []section
	if p.Differences != nil {
		out = append(out, section{"attest", "What differed"})
	}
	if p.Uncounted != nil {
		out = append(out, section{"void", "Not counted"})
	}
	return append(out, section{"trials", "Trials"})
}

func newHuntPage(r *experiment.Record) *huntPage {
	f := r.Result
	p := &huntPage{
		Cost: fmt.Sprintf("%s, %s judged requests, %s in all.", counted(f.Launches, "launch", "launches"), count(f.Requests), term.Duration(total(r.Trials))),
	}
	for i, c := range f.Causes {
		p.Causes = append(p.Causes, newCausePage(r, i, c))
	}
	if k := f.Contrast; k != nil {
		p.Contrast = newRates("launches", []rateRow{evidenceRow("with the cause", k.With), evidenceRow("without it", k.Without)})
	}
	for _, w := range f.WaysOut {
		p.WaysOut = append(p.WaysOut, wayOutRow{visible(r.Case.Setting(w.Factor, w.Level)), costText(w)})
	}
	if len(f.Levels) > 0 {
		var rows []rateRow
		for _, l := range f.Levels {
			row := evidenceRow(visible(r.Case.Setting(l.Factor, l.Level)), l.Evidence)
			row.Note = fails(l.Fails)
			rows = append(rows, row)
		}
		p.Levels = newRates("level", rows)
	}
	p.Arms = *newRates("arm", armRows(r))
	p.Posterior = newPosterior(r)
	p.Differences = differences(r)
	if text := baseText(r.Base); text != "" {
		p.Uncounted = append(p.Uncounted, text)
	}
	for _, u := range r.Untested {
		p.Uncounted = append(p.Uncounted, visible(unmetText(r.Case, u)))
	}
	for i, t := range r.Trials {
		p.Trials = append(p.Trials, newTrialRow(r, i, t))
		if !t.Observation.Outcome.Counts() {
			p.Uncounted = append(p.Uncounted, fmt.Sprintf("Trial %d, %s: %s", i+1, t.Observation.Outcome, visible(firstLine(t.Note))))
		}
	}
	return p
}

func newCausePage(r *experiment.Record, i int, c search.Cause) causePage {
	p := causePage{N: i + 1, Title: "The cause"}
	if len(r.Result.Causes) > 1 {
		p.Title = fmt.Sprintf("Cause %d of %d", i+1, len(r.Result.Causes))
	}
	for _, f := range r.Case.Space.Factors {
		if level, ok := c.Set[f.Name]; ok {
			p.Levels = append(p.Levels, levelRow{
				f.Name, visible(r.Case.Notes[f.Name].Note),
				visible(r.Case.LevelText(f.Name, level)), visible(r.Case.LevelText(f.Name, f.Levels[f.Safe()].Name)),
			})
		}
	}
	with := "these alone, all else safe"
	if len(c.Set) == 0 {
		with = "everything safe"
	}
	rows := []rateRow{evidenceRow(with, c.With)}
	for _, w := range c.Without {
		rows = append(rows, evidenceRow("all as it fails, but "+w.Factor+" safe", w))
	}
	p.Certificate = *newRates("arm", rows)
	return p
}

// armRows has each arm that ran, by the last interval that the search had.
func armRows(r *experiment.Record) []rateRow {
	trials := map[string][]int{}
	for i, t := range r.Trials {
		if t.Observation.Requests > 0 {
			key := t.Proposal.Arm.Hash()
			trials[key] = append(trials[key], i+1)
		}
	}
	var seen []search.Evidence
	for _, b := range slices.Backward(r.Beliefs) {
		if b != nil {
			seen = slices.Clone(b.Arms)
			break
		}
	}
	slices.SortStableFunc(seen, func(a, b search.Evidence) int { return cmp.Compare(brokenShare(b), brokenShare(a)) })
	var rows []rateRow
	for _, e := range seen {
		row := evidenceRow(arm(r.Case.Space, e.Arm), e)
		row.Trials = trials[e.Arm.Hash()]
		rows = append(rows, row)
	}
	return rows
}

// newPosterior is nil where nothing was narrowed down.
func newPosterior(r *experiment.Record) *posteriorPage {
	first, last := -1, -1
	for i, b := range r.Beliefs {
		if b != nil && len(b.Leading) > 0 {
			if first < 0 {
				first = i
			}
			last = i
		}
	}
	if first < 0 {
		return nil
	}
	draw := func(rows []stepRow, of func(row int, b *search.Progress) float64) *steps {
		s := &steps{From: first + 1, To: last + 1}
		for i, row := range rows {
			var values []float64
			for _, b := range r.Beliefs[first : last+1] {
				value := 0.0
				if b != nil {
					value = of(i, b)
				}
				values = append(values, value)
			}
			s.add(row.Name, first+1, values)
		}
		return s
	}
	var factors []stepRow
	for _, f := range r.Case.Space.Factors {
		if !slices.ContainsFunc(r.Untested, func(u experiment.Unmet) bool { return u.Factor == f.Name }) {
			factors = append(factors, stepRow{Name: f.Name})
		}
	}
	p := &posteriorPage{Factors: draw(factors, func(i int, b *search.Progress) float64 { return b.Needed[factors[i].Name] })}

	type set struct {
		arm  design.Arm
		most float64
	}
	var sets []*set
	find := func(arm design.Arm) *set {
		i := slices.IndexFunc(sets, func(s *set) bool { return s.arm.Hash() == arm.Hash() })
		if i < 0 {
			sets = append(sets, &set{arm: arm})
			i = len(sets) - 1
		}
		return sets[i]
	}
	for _, b := range r.Beliefs {
		if b != nil {
			for _, l := range b.Leading {
				s := find(l.Set)
				s.most = max(s.most, l.Probability)
			}
		}
	}
	slices.SortStableFunc(sets, func(a, b *set) int { return cmp.Compare(b.most, a.most) })
	const mostSets = 8
	sets = sets[:min(len(sets), mostSets)]
	var rows []stepRow
	for _, s := range sets {
		rows = append(rows, stepRow{Name: setNames(s.arm)})
	}
	p.Sets = draw(append(rows, stepRow{Name: "none of these"}), func(i int, b *search.Progress) float64 {
		if i == len(sets) {
			return b.None
		}
		for _, l := range b.Leading {
			if l.Set.Hash() == sets[i].arm.Hash() {
				return l.Probability
			}
		}
		return 0
	})
	return p
}

// differences compares each arm's server with the failing arm's, as they were
// read back.
func differences(r *experiment.Record) []difference {
	read := func(t experiment.Trial) *target.Attestation {
		a, err := experiment.ReadAttestation(filepath.Join(r.Dir, t.Dir))
		if err != nil {
			return nil // an arm that didn't start has none
		}
		return a
	}
	var failing *target.Attestation
	failed := ""
	var out []difference
	seen := map[string]bool{}
	for _, t := range r.Trials { // the failing arm comes first
		key := t.Proposal.Arm.Hash()
		if seen[key] {
			continue
		}
		a := read(t)
		if a == nil {
			continue
		}
		seen[key] = true
		if failing == nil {
			failing, failed = a, key
			continue
		}
		if key == failed {
			continue
		}
		d := difference{Arm: arm(r.Case.Space, t.Proposal.Arm)}
		for _, x := range target.Diff(failing, a) {
			if x.Kind != target.NoiseDiff {
				d.Rows = append(d.Rows, differenceRow{visible(strings.TrimSpace(fmt.Sprintf("%s %s %s", x.Process, x.Kind, x.Name))), visible(cutText(x.A)), visible(cutText(x.B))})
			}
		}
		for _, c := range r.Result.Causes {
			d.Open = d.Open || slices.ContainsFunc(c.Without, func(e search.Evidence) bool { return e.Arm.Hash() == key })
		}
		out = append(out, d)
	}
	slices.SortStableFunc(out, func(a, b difference) int {
		switch {
		case a.Open == b.Open:
			return 0
		case a.Open:
			return -1
		}
		return 1
	})
	return out
}

// cutText bounds what a table shows of a value.
func cutText(text string) string {
	const most = 300
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + fmt.Sprintf(" ... (%d more bytes)", len(text)-most)
}

func newTrialRow(r *experiment.Record, i int, t experiment.Trial) trialRow {
	o := t.Observation
	row := trialRow{
		N: i + 1, Phase: phaseWord(t.Proposal.Phase), Arm: arm(r.Case.Space, t.Proposal.Arm), Why: visible(t.Proposal.Why),
		Launch: "The same launch", Took: term.Duration(time.Duration(t.LaunchMS+t.RunMS) * time.Millisecond), Note: visible(t.Note), Dir: filepath.ToSlash(t.Dir),
		Class: "clean", Result: fmt.Sprintf("%d of %d broken", o.Failures, o.Requests),
	}
	if t.Proposal.Launch || o.Launched {
		row.Launch = "A new launch"
	}
	switch {
	case o.Outcome != search.Ran:
		row.Class = "warn"
		row.Result = string(o.Outcome)
		if o.Requests > 0 {
			row.Result += fmt.Sprintf(", %d of %d broken", o.Failures, o.Requests)
		}
	case o.Failures > 0:
		row.Class = "fails"
	}
	if o.Failures > 0 {
		if v, err := experiment.ReadVerdict(filepath.Join(r.Dir, t.Dir)); err == nil && len(v.Broken.Ops) > 0 {
			row.Ops, row.Command = opList(v.Broken.Ops), fmt.Sprintf("culprit check --op %d %s", v.Broken.Ops[0], row.Dir)
		}
	}
	return row
}

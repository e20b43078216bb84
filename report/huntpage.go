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
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

type huntPage struct {
	Causes      []causePage
	Contrast    *rates
	WaysOut     []wayOutRow
	Levels      *rates
	Paths       *codePaths
	Arms        rates
	Asked       rates // what hypotheses asked for
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

type posteriorPage struct{ Factors, Sets beliefPage }

type difference struct {
	Arm  string
	Open bool
	Rows []differenceRow
	More int // that there is no room for
}

type differenceRow struct{ What, A, B string }

type trialRow struct {
	N                                                                     int
	Phase, Arm, Class, Result, Why, Launch, Took, Note, Dir, Ops, Command string
	Links                                                                 *opLinks     // in place of Ops, where the page has them
	Example                                                               *examplePage // of what broke
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
	add(p.Paths != nil, "paths", "Code paths")
	add(p.WaysOut != nil, "out", "Way out")
	add(p.Levels != nil, "levels", "Other levels")
	add(len(p.Arms.Rows) > 0, "arms", "Arms")
	add(len(p.Asked.Rows) > 0, "asked", "Arms asked for")
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
	if p.Trials != nil {
		out = append(out, section{"trials", "Trials"})
	}
	return out
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
		with, without := "with the cause", "without it"
		if f.Status == search.NoneOfThese {
			with, without = "as where it fails", "everything safe"
		}
		p.Contrast = newRates("arms", []rateRow{evidenceRow(with, k.With), evidenceRow(without, k.Without)})
	}
	p.Paths = newCodePaths(r)
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
	p.Asked = *newRates("arm", askedRows(r))
	p.Posterior = newPosterior(r)
	p.Differences = differences(r)
	if text := baseText(r); text != "" {
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
	trials := map[string][]trialLink{}
	for i, t := range r.Trials {
		if t.Observation.Requests > 0 {
			key := t.Proposal.Arm.Hash()
			trials[key] = append(trials[key], trialLink{i + 1, fmt.Sprintf("#trial%d", i+1)})
		}
	}
	var seen []search.Evidence
	for _, b := range slices.Backward(r.Beliefs) {
		if b != nil {
			seen = slices.Clone(b.Arms)
			break
		}
	}
	return evidenceRows(r, seen, trials)
}

// askedRows has each arm that a hypothesis asked for.
func askedRows(r *experiment.Record) []rateRow {
	trials := map[string][]trialLink{}
	for i, t := range r.Asked {
		if t.Observation.Requests > 0 {
			key := t.Proposal.Arm.Hash()
			trials[key] = append(trials[key], trialLink{i + 1, filepath.ToSlash(filepath.Join(t.Dir, experiment.VerdictFile))})
		}
	}
	return evidenceRows(r, r.AskedArms(), trials)
}

// evidenceRows are the most broken first.
func evidenceRows(r *experiment.Record, seen []search.Evidence, trials map[string][]trialLink) []rateRow {
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
	over := func(name string, of func(*search.Progress) float64) belief {
		list := belief{Name: name}
		for _, b := range r.Beliefs[first : last+1] {
			value := 0.0
			if b != nil {
				value = of(b)
			}
			list.Values = append(list.Values, value)
		}
		return list
	}
	var factors, sets []belief
	for _, f := range r.Case.Space.Factors {
		if !slices.ContainsFunc(r.Untested, func(u experiment.Unmet) bool { return u.Factor == f.Name }) {
			factors = append(factors, over(f.Name, func(b *search.Progress) float64 { return b.Needed[f.Name] }))
		}
	}
	for _, set := range leadingSets(r) {
		sets = append(sets, over(setNames(set), func(b *search.Progress) float64 {
			for _, l := range b.Leading {
				if l.Set.Hash() == set.Hash() {
					return l.Probability
				}
			}
			return 0
		}))
	}
	sets = append(sets, over("none of these", func(b *search.Progress) float64 { return b.None }))
	return &posteriorPage{newBeliefPage(first+1, factors), newBeliefPage(first+1, sets)}
}

// leadingSets are the sets that were ever among the likeliest, the likeliest
// first.
func leadingSets(r *experiment.Record) []design.Arm {
	const most = 8
	var sets []design.Arm
	likeliest := map[string]float64{}
	for _, b := range r.Beliefs {
		if b == nil {
			continue
		}
		for _, l := range b.Leading {
			key := l.Set.Hash()
			if _, seen := likeliest[key]; !seen {
				sets = append(sets, l.Set)
			}
			likeliest[key] = max(likeliest[key], l.Probability)
		}
	}
	slices.SortStableFunc(sets, func(a, b design.Arm) int { return cmp.Compare(likeliest[b.Hash()], likeliest[a.Hash()]) })
	return sets[:min(len(sets), most)]
}

// beliefPage is beliefs as a chart and as a table.
type beliefPage struct {
	Chart chart
	Names []string
	Rows  []beliefRow
}

type beliefRow struct {
	Trial  int
	Values []string
}

func newBeliefPage(first int, list []belief) beliefPage {
	p := beliefPage{Chart: newBeliefs(first, list)}
	for _, b := range list {
		p.Names = append(p.Names, b.Name)
		for i, v := range b.Values {
			if i == len(p.Rows) {
				p.Rows = append(p.Rows, beliefRow{Trial: first + i})
			}
			p.Rows[i].Values = append(p.Rows[i].Values, short(v))
		}
	}
	return p
}

// mostDifferenceBytes bounds what the page has of attestations.
const mostDifferenceBytes = 250_000

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
	trials := slices.Concat(r.Trials, r.Asked)
	// Beside the failing arm where it ran, else beside the first.
	if i := slices.IndexFunc(trials, func(t experiment.Trial) bool {
		return arm(r.Case.Space, t.Proposal.Arm) == asItFails && read(t) != nil
	}); i > 0 {
		trials[0], trials[i] = trials[i], trials[0]
	}
	var failing *target.Attestation
	room := mostDifferenceBytes
	var out []difference
	seen := map[string]bool{}
	for _, t := range trials {
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
			failing = a
			continue
		}
		d := difference{Arm: arm(r.Case.Space, t.Proposal.Arm)}
		for _, x := range target.Diff(failing, a) {
			if x.Kind == target.NoiseDiff {
				continue
			}
			if room <= 0 {
				d.More++
				continue
			}
			row := differenceRow{visible(strings.TrimSpace(fmt.Sprintf("%s %s %s", x.Process, x.Kind, x.Name))), visible(cutText(x.A)), visible(cutText(x.B))}
			room -= escapedLen(row.What) + escapedLen(row.A) + escapedLen(row.B) + 100
			d.Rows = append(d.Rows, row)
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

// stopped ends a sentence.
func stopped(text string) string {
	if text == "" || strings.HasSuffix(text, "?") || strings.HasSuffix(text, ".") {
		return text
	}
	return text + "."
}

func newTrialRow(r *experiment.Record, i int, t experiment.Trial) trialRow {
	o := t.Observation
	row := trialRow{
		N: i + 1, Phase: phaseWord(t.Proposal.Phase), Arm: arm(r.Case.Space, t.Proposal.Arm), Why: stopped(visible(t.Proposal.Why)),
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
			row.Example = trialExample(v)
			row.Ops = opList(v.Broken.Ops)
			op := v.Broken.Ops[0]
			if row.Example != nil {
				op = row.Example.Op
			}
			row.Command = fmt.Sprintf("culprit check --op %d %s", op, row.Dir)
		}
	}
	return row
}

// trialExample is one broken reply of a trial, nil where none was kept.
func trialExample(v *oracle.Verdict) *examplePage {
	const most = 600 // bytes of each text
	for _, c := range v.Classes {
		if c.Means != oracle.Corrupt {
			continue
		}
		for _, e := range c.Examples {
			if e.Op == 0 || len(e.Want) > most || len(e.Got) > most {
				continue
			}
			x := examplePage{Class: string(c.Class), Op: e.Op, Note: visible(e.Note)}
			x.Want, x.Got = marked(sameOrder(e.Want, e.Got), e.Got)
			return &x
		}
	}
	return nil
}

package report

import (
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
)

// codePaths is what probes counted in the arms of a finding's certificate.
type codePaths struct {
	Arms   []string // the cause first, then each arm without a part of it
	Rows   []pathRow
	Effect string // of the probes on the server
}

type pathRow struct {
	Name   string
	Counts []string // by arm
	Says   string
	rank   int
}

// newCodePaths is nil where no probes counted, or nothing was found.
func newCodePaths(r *experiment.Record) *codePaths {
	if r.Result == nil || r.Result.Status != search.Found || r.Case.Probes == nil {
		return nil
	}
	c := r.Result.Causes[0]
	arms := append([]search.Evidence{c.With}, c.Without...)
	counted := make([]armCounts, len(arms))
	p := &codePaths{Arms: []string{"with the cause"}}
	cost := 0.0
	names := map[string]bool{}
	for i, e := range arms {
		if i > 0 {
			p.Arms = append(p.Arms, e.Factor+" safe")
		}
		counted[i] = readArmCounts(r, e)
		cost = max(cost, counted[i].cost)
		for name := range counted[i].hits {
			names[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		if !shownPath(name) {
			continue
		}
		p.Rows = append(p.Rows, newPathRow(name, counted, p.Arms))
	}
	if len(p.Rows) == 0 {
		return nil
	}
	slices.SortStableFunc(p.Rows, func(a, b pathRow) int { return a.rank - b.rank })
	p.Effect = effectText(cost)
	return p
}

// effectText says what the probes themselves did to the server.
func effectText(cost float64) string {
	return fmt.Sprintf("Counting took at most %.2g%% of a core of any process; whether the probes change the failure, culprit probe cost measures.", cost)
}

// shownPath leaves out the calls of a probe's function: they are in the
// verdict.
func shownPath(name string) bool { return !strings.HasSuffix(name, "_entered") }

// armCounts are the counts of all trials of an arm that count.
type armCounts struct {
	hits     map[string]float64
	requests int
	broken   int
	cost     float64
}

func readArmCounts(r *experiment.Record, e search.Evidence) armCounts {
	a := armCounts{hits: map[string]float64{}}
	for _, t := range r.Trials {
		if t.Proposal.Arm.Hash() != e.Arm.Hash() || t.Observation.Requests == 0 || !t.Observation.Outcome.Counts() {
			continue
		}
		v, err := experiment.ReadVerdict(filepath.Join(r.Dir, t.Dir))
		if err != nil || len(v.Probes) == 0 {
			continue // it is gone, or was judged by an older program
		}
		a.requests += t.Observation.Requests
		a.broken += t.Observation.Failures
		a.cost = max(a.cost, v.CorePercent)
		for _, p := range v.Probes {
			a.hits[p.Name] += p.Count
		}
	}
	return a
}

// newPathRow says where a path ran. A count that isn't there is no zero, but
// for a label of an event that is.
func newPathRow(name string, arms []armCounts, names []string) pathRow {
	row := pathRow{Name: visible(name)}
	event, _, _ := strings.Cut(name, "{")
	var ran, clean, unknown []string
	for i, a := range arms {
		n, there := a.hits[name]
		if _, known := a.hits[event]; !there && !known {
			row.Counts = append(row.Counts, "?")
			unknown = append(unknown, names[i])
			continue
		}
		row.Counts = append(row.Counts, strconv.FormatFloat(100*n/float64(a.requests), 'g', 3, 64))
		if n > 0 {
			ran = append(ran, names[i])
		}
		if n > 0 && i > 0 && a.broken == 0 {
			clean = append(clean, names[i])
		}
	}
	with := arms[0].hits[name] > 0
	switch {
	case with && len(ran) == 1 && len(unknown) == 0:
		row.Says = "only where it breaks"
	case with && len(clean) > 0:
		row.Says, row.rank = "where nothing breaks too: "+strings.Join(clean, ", "), len(clean)
	case !with && len(ran) > 0:
		row.Says, row.rank = "not where it breaks", len(arms)
	case len(ran) == 0 && len(unknown) == 0:
		row.Says, row.rank = "never", len(arms)+1
	default:
		row.rank = len(arms)
	}
	return row
}

// terminal writes the arms as numbers, whose names stand below: they are long,
// and there may be many.
func (p *codePaths) terminal(s *term.Screen) {
	if p == nil {
		return
	}
	title(s, "Code paths: hits in 100 requests")
	head, legend := []string{"path", "cause"}, make([]string, 0, len(p.Arms))
	for i, name := range p.Arms[1:] {
		head = append(head, fmt.Sprintf("(%d)", i+1))
		legend = append(legend, fmt.Sprintf("(%d) %s", i+1, name))
	}
	rows := [][]string{head}
	var only []string
	for _, row := range p.Rows {
		if row.rank == 0 && row.Says != "" {
			only = append(only, row.Name)
		}
		rows = append(rows, append([]string{shortPath(row.Name, max(s.Columns()-4-8*len(p.Arms), 20))}, row.Counts...))
	}
	s.Printf("%s", s.Table("l"+strings.Repeat("r", len(p.Arms)), rows))
	text := strings.Join(legend, ", ") + ": all else as it fails."
	if len(only) > 0 {
		text += " Only where it breaks: " + strings.Join(only, ", ") + "."
	}
	paragraph(s, "  ", "  ", text+" It says where a path ran, not what it does. "+p.Effect)
}

// pathsTable is what a run says of its counts, on the page.
type pathsTable struct {
	Rows   []pathOfRun
	Effect string
}

type pathOfRun struct {
	Name, Count, With, Without, P string
	Goes                          bool
}

func newPathsTable(v *oracle.Verdict) *pathsTable {
	if len(v.Probes) == 0 {
		return nil
	}
	t := &pathsTable{Effect: effectText(v.CorePercent)}
	for _, p := range v.Probes {
		if shownPath(p.Name) {
			row := pathOfRun{visible(p.Name), fmt.Sprintf("%.0f", p.Count), share(p.With), share(p.Without), "-", p.Associated()}
			if p.Excess != nil {
				row.P = fmt.Sprintf("%.1g", p.Excess.PAdjusted)
			}
			t.Rows = append(t.Rows, row)
		}
	}
	return t
}

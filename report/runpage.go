package report

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/sergi/go-diff/diffmatchpatch"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
)

type runPage struct {
	Title, Where, Broken string
	Phases               []phaseRow
	Timeline             *timeline
	Ops                  []opPage
	OpsLeft              int
	Classes              *rates
	Paths                *pathsTable
	Breakdowns           []breakdownPage
	Examples             []examplePage
	Assumptions          []oracle.Assumption
}

type phaseRow struct {
	Name                   string
	Ops, Lost              int
	Took, Tokens, P50, P99 string
}

type breakdownPage struct {
	By    string
	Rates *rates
}

type examplePage struct {
	Class, Where, Note, Command string
	Op                          int64 // 0 where it isn't on the page
	Want, Got                   []piece
}

type piece struct {
	Text   string
	Marked bool
}

func (p *runPage) sections() []section {
	out := []section{{"run", "The run"}}
	if p.Timeline != nil {
		out = append(out, section{"timeline", "Timeline"})
	}
	if p.Paths != nil {
		out = append(out, section{"runpaths", "Code paths in this run"})
	}
	if p.Breakdowns != nil {
		out = append(out, section{"breakdowns", "Where it breaks"})
	}
	if p.Examples != nil {
		out = append(out, section{"examples", "Wanted and got"})
	}
	if p.Ops != nil {
		out = append(out, section{"ops", "Requests"})
	}
	return out
}

// shown are the ops that links can lead to.
func (p *runPage) shown() map[int64]bool {
	shown := map[int64]bool{}
	for _, op := range p.Ops {
		shown[op.ID] = true
	}
	return shown
}

// newRunPage reads a run's history too, where it is still there. where is the
// run's directory as the page links to it.
func newRunPage(dir, where string, v *oracle.Verdict) (*runPage, error) {
	p := &runPage{Where: filepath.ToSlash(where), Broken: brokenText(v), Assumptions: slices.Clone(v.Assumptions)}
	for i := range p.Assumptions {
		p.Assumptions[i].Found = visible(p.Assumptions[i].Found)
	}
	for _, phase := range v.Phases {
		row := phaseRow{
			Name: string(phase.Phase), Ops: phase.Ops, Lost: phase.Outcomes[history.Failed] + phase.Outcomes[history.TimedOut], Tokens: "-",
			Took: term.Duration(time.Duration((phase.ToMS - phase.FromMS) * float64(time.Millisecond))), P50: p50(phase.FirstChunk), P99: p99(phase.FirstChunk),
		}
		if took := (phase.ToMS - phase.FromMS) / 1000; phase.CompletionTokens > 0 && took > 0 {
			row.Tokens = fmt.Sprintf("%.0f", float64(phase.CompletionTokens)/took)
		}
		p.Phases = append(p.Phases, row)
	}
	command := func(op int64) string { return fmt.Sprintf("culprit check --op %d %s", op, quoted(cmp.Or(where, dir))) }
	examples := worst(v)
	var first []int64
	for _, e := range examples {
		if e.Op != 0 {
			first = append(first, e.Op)
		}
	}
	r, err := readRequests(filepath.Join(dir, experiment.HistoryFile), v, first, command)
	if err != nil {
		return nil, err
	}
	p.Timeline, p.Ops, p.OpsLeft = r.timeline, r.broken, r.left
	shown := p.shown()
	p.classes(v, shown)
	p.Paths = newPathsTable(v)
	if v.Broken.Main.Failures > 0 {
		for _, b := range v.Breakdowns {
			if len(b.Bins) < 2 {
				continue
			}
			var rows []rateRow
			for _, bin := range b.Bins {
				rows = append(rows, oracleRow(bin.Label, bin.Rate, bin.Ops, shown))
			}
			p.Breakdowns = append(p.Breakdowns, breakdownPage{"by " + b.By, newRates("", rows)})
		}
	}
	for _, e := range examples {
		want, got := marked(sameOrder(e.Want, e.Got), e.Got)
		x := examplePage{Class: string(e.class), Note: visible(e.Note), Want: want, Got: got}
		if e.Op != 0 {
			x.Where, x.Command = strings.TrimPrefix(e.where(), " in "), command(e.Op)
			if shown[e.Op] {
				x.Op = e.Op
			}
		}
		p.Examples = append(p.Examples, x)
	}
	return p, nil
}

func (p *runPage) classes(v *oracle.Verdict, shown map[int64]bool) {
	var rows []rateRow
	quiet := 0
	for _, c := range v.Classes {
		if c.Main.Failures == 0 && (c.Control == nil || c.Control.Failures == 0) {
			quiet++
			continue
		}
		row := oracleRow(string(c.Class), c.Main, c.Ops, shown)
		if c.Control != nil {
			row.Note = fmt.Sprintf("alone and cold %d of %d", c.Control.Failures, c.Control.Trials)
		}
		rows = append(rows, row)
	}
	if len(rows) > 0 {
		p.Classes = newRates("oracle", rows)
		p.Classes.Foot = fmt.Sprintf("%d others were tried and stayed quiet.", quiet)
		if text := falseAlarms(v); text != "" {
			p.Classes.Foot += " Found where nothing was wrong: " + text + "."
		}
	}
}

// sameOrder puts the arguments of the call that was wanted into the order of
// those that came, which is no difference.
func sameOrder(want, got string) string {
	name, object, found := strings.Cut(want, "{")
	_, other, alike := strings.Cut(got, "{")
	var arguments map[string]json.RawMessage
	if !found || !alike || json.Unmarshal([]byte("{"+object), &arguments) != nil {
		return want
	}
	var parts []string
	add := func(key string) {
		if value, ok := arguments[key]; ok {
			delete(arguments, key)
			quoted, _ := json.Marshal(key) //nolint:errchkjson // a string
			parts = append(parts, string(quoted)+":"+string(value))
		}
	}
	d := json.NewDecoder(strings.NewReader("{" + other))
	if _, err := d.Token(); err != nil {
		return want
	}
	for d.More() {
		key, err := d.Token()
		if err != nil {
			break
		}
		text, ok := key.(string)
		var value json.RawMessage
		if !ok || d.Decode(&value) != nil {
			break
		}
		add(text)
	}
	for _, key := range slices.Sorted(maps.Keys(arguments)) {
		add(key)
	}
	return name + "{" + strings.Join(parts, ",") + "}"
}

// marked finds what differs between two texts, letter by letter.
func marked(want, got string) (left, right []piece) {
	d := diffmatchpatch.New()
	d.DiffTimeout = 200 * time.Millisecond
	for _, part := range d.DiffCleanupSemantic(d.DiffMain(visible(want), visible(got), false)) {
		switch part.Type {
		case diffmatchpatch.DiffEqual:
			left, right = append(left, piece{part.Text, false}), append(right, piece{part.Text, false})
		case diffmatchpatch.DiffDelete:
			left = append(left, piece{part.Text, true})
		case diffmatchpatch.DiffInsert:
			right = append(right, piece{part.Text, true})
		}
	}
	return left, right
}

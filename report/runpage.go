package report

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
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
	Classes              *rates
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
	if p.Breakdowns != nil {
		out = append(out, section{"breakdowns", "Where it breaks"})
	}
	if p.Examples != nil {
		out = append(out, section{"examples", "Wanted and got"})
	}
	return out
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
	p.classes(v)
	if v.Broken.Main.Failures > 0 {
		for _, b := range v.Breakdowns {
			if len(b.Bins) < 2 {
				continue
			}
			var rows []rateRow
			for _, bin := range b.Bins {
				rows = append(rows, oracleRow(bin.Label, bin.Rate))
			}
			p.Breakdowns = append(p.Breakdowns, breakdownPage{"by " + b.By, newRates("", rows)})
		}
	}
	command := func(op int64) string { return fmt.Sprintf("culprit check --op %d %s", op, cmp.Or(where, dir)) }
	for _, e := range worst(v) {
		want, got := marked(e.Want, e.Got)
		x := examplePage{Class: string(e.class), Note: visible(e.Note), Want: want, Got: got}
		if e.Op != 0 {
			x.Where, x.Command = strings.TrimPrefix(e.where(), " in "), command(e.Op)
		}
		p.Examples = append(p.Examples, x)
	}
	var err error
	p.Timeline, err = newTimeline(filepath.Join(dir, experiment.HistoryFile), v)
	if p.Timeline != nil && len(v.Broken.Ops) > 0 {
		p.Timeline.Ops, p.Timeline.Command = opList(v.Broken.Ops), command(v.Broken.Ops[0])
	}
	return p, err
}

func (p *runPage) classes(v *oracle.Verdict) {
	var rows []rateRow
	quiet := 0
	for _, c := range v.Classes {
		if c.Main.Failures == 0 && (c.Control == nil || c.Control.Failures == 0) {
			quiet++
			continue
		}
		row := oracleRow(string(c.Class), c.Main)
		if c.Control != nil {
			row.Note = fmt.Sprintf("alone and cold %d of %d", c.Control.Failures, c.Control.Trials)
		}
		rows = append(rows, row)
	}
	if len(rows) > 0 {
		p.Classes = newRates("oracle", rows)
		p.Classes.Foot = fmt.Sprintf("%d others were tried and stayed quiet.", quiet)
	}
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

// timeline is a run's requests under load, a bar each.
type timeline struct {
	RowIs, Left, Label string
	Height             int
	Bars               []timeBar
	Ticks              []string
	Ops, Command       string
}

type timeBar struct {
	Class, Title string
	X, W         float64
	Y, H         int
}

const (
	timelineWidth = 1000
	mostBars      = 4000
	mostRows      = 160
)

// newTimeline is nil where there is no history.
func newTimeline(path string, v *oracle.Verdict) (*timeline, error) {
	r, err := history.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer r.Close()
	type bar struct {
		id       int64
		session  int
		turn     int
		from, to time.Duration
		broken   bool
		row      int
	}
	broken := map[int64]bool{}
	for _, id := range v.Broken.Ops {
		broken[id] = true
	}
	var bars []bar
	sessions, left := 0, 0
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, err
		}
		op := record.Op
		if op == nil || op.Phase != history.Main {
			continue
		}
		if len(bars) >= mostBars && !broken[op.ID] || len(bars) >= 2*mostBars {
			left++
			continue
		}
		bars = append(bars, bar{op.ID, op.Session, op.Turn, op.Sent, max(op.LastByte, op.Sent), broken[op.ID], op.Session})
		sessions = max(sessions, op.Session+1)
	}
	if len(bars) == 0 {
		return nil, nil
	}
	slices.SortFunc(bars, func(a, b bar) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.id, b.id)) })
	t := &timeline{RowIs: "a conversation"}
	rows := sessions
	if sessions > mostRows {
		// As few rows as there were requests open at once.
		t.RowIs = "a place among the requests that were open at once"
		var free []time.Duration
		for i := range bars {
			row := slices.IndexFunc(free, func(at time.Duration) bool { return at <= bars[i].from })
			if row < 0 {
				row = len(free)
				free = append(free, 0)
			}
			free[row], bars[i].row = bars[i].to, row
		}
		rows = len(free)
	}
	from, to := bars[0].from, bars[0].to
	for _, b := range bars {
		to = max(to, b.to)
	}
	each := max(min(400/rows, 12), 3)
	t.Height = each * rows
	scale := timelineWidth / max(float64(to-from), 1)
	n := 0
	for _, b := range bars {
		x := timeBar{Class: "sound", X: round(float64(b.from-from) * scale), W: max(round(float64(b.to-b.from)*scale), 1), Y: b.row * each, H: max(each-2, 1)}
		x.Title = fmt.Sprintf("op %d, session %d, round %d", b.id, b.session, b.turn+1)
		if b.broken {
			x.Class, x.H = "broken", max(each-1, 1)
			x.Title += ": broken"
			n++
		}
		t.Bars = append(t.Bars, x)
	}
	t.Label = fmt.Sprintf("%d requests over %s, %d of them broken", len(bars), term.Duration(to-from), n)
	if left > 0 {
		t.Left = fmt.Sprintf("%s sound requests more are left out.", count(left))
	}
	for i := range 5 {
		t.Ticks = append(t.Ticks, term.Duration((to-from)*time.Duration(i)/4))
	}
	t.Ticks[0] = "0"
	return t, nil
}

package report

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"io"
	"io/fs"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/workload"
)

// What a page holds of a run's requests, so that it stays small enough to be
// mailed: all of the timeline, every broken one in a line, and the first of
// them whole.
const (
	mostBars      = 2000
	mostOps       = 400
	mostOfClass   = 20
	mostOpsBytes  = 500_000
	mostPartBytes = 6000 // of a message or a reply
)

// opPage is a broken request.
type opPage struct {
	ID                   int64
	Line                 string
	Asked                []messagePage // empty: it isn't here
	Came, Error, Command string
}

type messagePage struct{ Role, Text string }

// opLinks lead from a figure to the requests behind it.
type opLinks struct {
	Count string
	Ops   []int64
	More  int
}

// linksTo is nil where there is nothing to lead to.
func linksTo(count string, ops []int64, shown map[int64]bool) *opLinks {
	const most = 12
	l := opLinks{Count: count}
	for _, id := range ops {
		if shown[id] && len(l.Ops) < most {
			l.Ops = append(l.Ops, id)
		}
	}
	if l.More = len(ops) - len(l.Ops); len(l.Ops) == 0 {
		return nil
	}
	return &l
}

// requests is what a run's history says, as far as the page shows it.
type requests struct {
	timeline *timeline
	broken   []opPage
	left     int // broken ones that aren't in broken
}

// timeline is a run's requests under load, a bar each.
type timeline struct {
	RowIs, Left string
	Chart       chart
}

// bar is a request in the timeline.
type bar struct {
	id       int64
	session  int
	turn     int
	from, to time.Duration
	broken   bool
	row      int
}

// readRequests reads a history; there is nothing where there is none. first are
// the ops that are shown whole before others. command shows one.
func readRequests(path string, v *oracle.Verdict, first []int64, command func(int64) string) (requests, error) {
	var out requests
	r, err := history.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return out, nil
	}
	if err != nil {
		return out, err
	}
	defer r.Close()
	broken, shown := map[int64]bool{}, map[int64]bool{}
	for i, id := range v.Broken.Ops {
		broken[id] = true
		shown[id] = i < mostOps
	}
	for _, id := range first {
		shown[id] = true
	}
	for _, c := range v.Classes {
		for _, id := range c.Ops[:min(len(c.Ops), mostOfClass)] {
			shown[id] = true
		}
	}
	var bars []bar
	var whole []history.Op
	left := 0
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return out, err
		}
		op := record.Op
		if op == nil {
			continue
		}
		if shown[op.ID] {
			whole = append(whole, kept(op))
		}
		if op.Phase != history.Main {
			continue
		}
		if len(bars) >= mostBars && !broken[op.ID] || len(bars) >= 2*mostBars {
			left++
			continue
		}
		bars = append(bars, bar{op.ID, op.Session, op.Turn, op.Sent, max(op.LastByte, op.Sent), broken[op.ID], op.Session})
	}
	slices.SortFunc(whole, func(a, b history.Op) int { return cmp.Compare(a.ID, b.ID) })
	out.left = max(len(v.Broken.Ops)-mostOps, 0)
	out.broken = opPages(whole, first, command)
	out.timeline = newTimeline(bars, left, shown)
	return out, nil
}

// kept is an op that outlives the reader's next record.
func kept(op *history.Op) history.Op {
	k := *op
	k.Request, k.Chunks = bytes.Clone(op.Request), slices.Clone(op.Chunks)
	for i := range k.Chunks {
		k.Chunks[i].Data = bytes.Clone(k.Chunks[i].Data)
	}
	return k
}

// opPages shows ops, as many whole as there is room for, those of first before
// the others.
func opPages(ops []history.Op, first []int64, command func(int64) string) []opPage {
	pages := make([]opPage, len(ops))
	order := make([]int, len(ops))
	for i := range ops {
		op := &ops[i]
		order[i] = i
		pages[i] = opPage{ID: op.ID, Command: command(op.ID), Line: fmt.Sprintf("session %d, round %d, sent at %s, took %s, %s",
			op.Session, op.Turn+1, term.Duration(op.Sent), term.Duration(op.LastByte-op.Sent), inFlight(op))}
		switch op.Phase {
		case history.Main:
		case history.Control:
			pages[i].Line = "control, " + pages[i].Line
		case history.Recovery, history.Sentinel: // of no session
			pages[i].Line = fmt.Sprintf("%s request %d, sent at %s, took %s", op.Phase, op.Turn+1, term.Duration(op.Sent), term.Duration(op.LastByte-op.Sent))
		}
	}
	slices.SortStableFunc(order, func(a, b int) int {
		rank := func(i int) int {
			if slices.Contains(first, ops[i].ID) {
				return 0
			}
			return 1
		}
		return rank(a) - rank(b)
	})
	room := mostOpsBytes
	for _, i := range order {
		if room <= 0 {
			break
		}
		room -= pages[i].fill(&ops[i])
	}
	return pages
}

func inFlight(op *history.Op) string {
	if op.InFlight <= 1 {
		return "alone"
	}
	return fmt.Sprintf("%d in flight", op.InFlight)
}

// fill adds what was asked and what came, and returns its size. The text of
// users isn't put into a file that is made to be sent: only workloads of our
// own are shown.
func (p *opPage) fill(op *history.Op) (size int) {
	if !slices.Contains(workload.Kinds(), op.Kind) {
		p.Error = "This is recorded traffic, so its text stays where it is."
		return 0
	}
	p.Asked = asked(op.Request)
	p.Came = visible(shortened(came(op)))
	p.Error = visible(shortened(op.Error))
	size = escapedLen(p.Came) + escapedLen(p.Error)
	for _, m := range p.Asked {
		size += escapedLen(m.Text)
	}
	return size
}

// escapedLen is how long a text is in the page.
func escapedLen(text string) int { return len(template.HTMLEscapeString(text)) }

// asked is a request's messages, or all of it where it has none.
func asked(request json.RawMessage) []messagePage {
	var r struct {
		Messages []struct {
			Role      string          `json:"role"`
			Content   json.RawMessage `json:"content"`
			ToolCalls json.RawMessage `json:"tool_calls"`
		} `json:"messages"`
	}
	if err := json.Unmarshal(request, &r); err != nil || len(r.Messages) == 0 {
		return []messagePage{{"request", visible(shortened(string(request)))}}
	}
	var out []messagePage
	for _, m := range r.Messages {
		var text string
		if err := json.Unmarshal(m.Content, &text); err != nil {
			text = string(m.Content)
		}
		if len(m.ToolCalls) > 0 {
			text = strings.TrimPrefix(text+"\n", "\n") + string(m.ToolCalls)
		}
		out = append(out, messagePage{visible(m.Role), visible(shortened(text))})
	}
	return out
}

// came is a reply as its chunks put it together.
func came(op *history.Op) string {
	var a openai.Assembler
	var body []byte
	for _, c := range op.Chunks {
		a.Add(c.Data)
		body = append(body, c.Data...)
	}
	if op.Stream && op.Status < 400 {
		return said(a.Reply())
	}
	return cmp.Or(said(openai.ReadBody(body)), string(body))
}

func said(r *openai.Reply) string {
	var parts []string
	for _, text := range []string{r.Reasoning, r.Content} {
		if text != "" {
			parts = append(parts, text)
		}
	}
	for _, c := range r.ToolCalls {
		parts = append(parts, c.Function.Name+"("+c.Function.Arguments+")")
	}
	if r.FinishReason != "" {
		parts = append(parts, "["+r.FinishReason+"]")
	}
	return strings.Join(parts, "\n")
}

// shortened leaves the middle out of a long text.
func shortened(text string) string {
	if len(text) <= mostPartBytes {
		return text
	}
	const half = mostPartBytes / 2
	head, tail := bytes.ToValidUTF8([]byte(text[:half]), nil), bytes.ToValidUTF8([]byte(text[len(text)-half:]), nil)
	return fmt.Sprintf("%s\n... (%s bytes more) ...\n%s", head, count(len(text)-2*half), tail)
}

const mostRows = 160

// newTimeline is nil where there is nothing to draw. shown are the ops that a
// bar can lead to.
func newTimeline(bars []bar, left int, shown map[int64]bool) *timeline {
	if len(bars) == 0 {
		return nil
	}
	slices.SortFunc(bars, func(a, b bar) int { return cmp.Or(cmp.Compare(a.from, b.from), cmp.Compare(a.id, b.id)) })
	t := &timeline{RowIs: "a conversation"}
	rows := place(bars)
	if rows > mostRows {
		t.RowIs = "a place among the requests that were open at once"
		rows = pack(bars)
	}
	start, end := bars[0].from, bars[0].to
	for _, b := range bars {
		end = max(end, b.to)
	}
	seconds := func(d time.Duration) float64 { return (d - start).Seconds() }
	var sound, broken boxes
	for _, b := range bars {
		s := box{seconds(b.from), seconds(b.to), float64(rows - 1 - b.row), 0.8, ink{Class: "sound"}}
		if !b.broken {
			sound = append(sound, s)
			continue
		}
		s.ink = ink{Class: "broken", Title: fmt.Sprintf("op %d, session %d, round %d: broken", b.id, b.session, b.turn+1)}
		if shown[b.id] {
			s.Href = fmt.Sprintf("#op%d", b.id)
		}
		broken = append(broken, s)
	}
	p := newPlot()
	p.X.Min, p.X.Max, p.Y.Min, p.Y.Max = 0, max(seconds(end), 0.001), 0, float64(rows)
	p.X.Tick.Marker = labelled(0, p.X.Max, func(s float64) string { return fmt.Sprintf("%g s", s) })
	p.Y.Color, p.Y.Tick.Color = ink{Class: "hidden"}, ink{Class: "hidden"}
	var numbers plot.ConstantTicks
	if t.RowIs == "a conversation" {
		for n := 0; n < rows; n += max(1, (rows+9)/10) {
			numbers = append(numbers, plot.Tick{Value: float64(rows-1-n) + 0.4, Label: fmt.Sprint(n)})
		}
	}
	p.Y.Tick.Marker = numbers
	p.Add(sound, broken)
	each := max(min(400/float64(rows), 12), 3)
	c := newCanvas("timeline", fmt.Sprintf("%d requests over %s, %d of them broken", len(bars), term.Duration(end-start), len(broken)),
		chartWidth, vg.Length(each*float64(rows)+26))
	p.Draw(c.area())
	t.Chart = c.chart
	if left > 0 {
		t.Left = fmt.Sprintf("%s sound requests more are left out.", count(left))
	}
	return t
}

// place gives each conversation a row, and says how many there are.
func place(bars []bar) (rows int) {
	for i := range bars {
		bars[i].row = bars[i].session
		rows = max(rows, bars[i].session+1)
	}
	return rows
}

// pack takes as few rows as there were requests open at once. bars are in the
// order of sending.
func pack(bars []bar) int {
	var free []time.Duration
	for i := range bars {
		row := slices.IndexFunc(free, func(at time.Duration) bool { return at <= bars[i].from })
		if row < 0 {
			row = len(free)
			free = append(free, 0)
		}
		free[row], bars[i].row = bars[i].to, row
	}
	return len(free)
}

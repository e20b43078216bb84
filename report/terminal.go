// Package report shows a verdict to people. It computes nothing: whatever it
// says is in the verdict.
//
// Stability: may change.
package report

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
)

// Run is what the report says about a run beside its verdict.
type Run struct {
	Dir      string
	Workload string   // one line: what was sent
	Files    []string // in Dir
}

// worstShown is how many examples are shown.
const worstShown = 3

// Terminal writes the report of one run.
func Terminal(s *term.Screen, v *oracle.Verdict, run Run) {
	headline(s, v)
	reasons(s, v)
	about(s, v, run)
	phases(s, v)
	classes(s, v)
	breakdowns(s, v)
	examples(s, v, run)
	files(s, run)
}

// statusStyle is the colour of a verdict; the word itself carries the meaning.
func statusStyle(status oracle.Status) term.Style {
	switch status {
	case oracle.Clean:
		return term.Green
	case oracle.Corrupt, oracle.Wedged:
		return term.Red
	case oracle.Numerics, oracle.NotExercised, oracle.Void, oracle.Inconclusive:
		return term.Yellow
	}
	return term.Bold
}

func headline(s *term.Screen, v *oracle.Verdict) {
	word := s.Paint(strings.ToUpper(string(v.Status)), term.Bold, statusStyle(v.Status))
	b := v.Broken.Main
	text := "no op could be judged"
	if b.Trials > 0 {
		text = fmt.Sprintf("%d of %d replies broken, %s %s", b.Failures, b.Trials, percent(b.Rate), interval(b))
	}
	if c := v.Broken.Control; c != nil {
		text += fmt.Sprintf("; alone and cold %d of %d", c.Failures, c.Trials)
	}
	s.Printf("\n%s  %s\n", word, text)
}

func reasons(s *term.Screen, v *oracle.Verdict) {
	for _, reason := range v.Reasons {
		paragraph(s, "  - ", "    ", term.Safe(reason))
	}
}

// paragraph wraps text after a first prefix, with another one on later lines.
func paragraph(s *term.Screen, first, rest, text string) {
	for i, line := range term.Wrap(text, s.Columns()-len(first)) {
		prefix := rest
		if i == 0 {
			prefix = first
		}
		s.Printf("%s%s\n", prefix, line)
	}
}

func title(s *term.Screen, text string) {
	s.Printf("\n%s\n", s.Paint(text, term.Bold))
}

func about(s *term.Screen, v *oracle.Verdict, run Run) {
	s.Printf("\n")
	server := v.Setup.Server
	if server == "" {
		server = "unknown server"
	}
	load := fmt.Sprintf("%d at once", v.Setup.Concurrency)
	if v.Setup.RequestRate > 0 {
		load = fmt.Sprintf("open loop at %g requests/s", v.Setup.RequestRate)
	}
	paragraph(s, "  sent    ", "          ", fmt.Sprintf("%s, %s, seed %d", run.Workload, load, v.Setup.Seed))
	paragraph(s, "  server  ", "          ", term.Safe(fmt.Sprintf("%s at %s, model %s", server, v.Setup.BaseURL, v.Setup.Model)))
}

func phases(s *term.Screen, v *oracle.Verdict) {
	rows := [][]string{{"phase", "ops", "lost", "took", "tokens/s", "first p50", "p99", "next p99", "late p99"}}
	for _, p := range v.Phases {
		took := time.Duration((p.ToMS - p.FromMS) * float64(time.Millisecond))
		rate := "-"
		if p.CompletionTokens > 0 && took > 0 {
			rate = fmt.Sprintf("%.0f", float64(p.CompletionTokens)/took.Seconds())
		}
		lost := p.Outcomes[history.Failed] + p.Outcomes[history.TimedOut]
		rows = append(rows, []string{
			string(p.Phase), fmt.Sprint(p.Ops), fmt.Sprint(lost), duration(took), rate,
			p50(p.FirstChunk), p99(p.FirstChunk), p99(p.BetweenChunks), p99(p.Late),
		})
	}
	if len(rows) > 1 {
		title(s, "Load")
		s.Printf("%s", s.Table("lrrrrrrrr", rows))
	}
	for _, p := range v.Phases {
		for _, e := range p.Errors {
			paragraph(s, "  ", "    ", fmt.Sprintf("%s: %d x %s (op %d)", p.Phase, e.Ops, term.Safe(e.Message), e.Example))
		}
	}
}

func p50(p *oracle.Percentiles) string {
	if p == nil {
		return "-"
	}
	return duration(time.Duration(p.P50MS * float64(time.Millisecond)))
}

func p99(p *oracle.Percentiles) string {
	if p == nil {
		return "-"
	}
	return duration(time.Duration(p.P99MS * float64(time.Millisecond)))
}

func classes(s *term.Screen, v *oracle.Verdict) {
	control := v.Broken.Control != nil
	head := []string{"oracle", "ops", "rate", "95%"}
	align := "lrrr"
	if control {
		head = append(head, "alone", "p")
		align += "rr"
	}
	rows := [][]string{append(head, "")}
	quiet := 0
	for _, c := range v.Classes {
		if c.Main.Failures == 0 && (c.Control == nil || c.Control.Failures == 0) {
			quiet++
			continue
		}
		row := []string{string(c.Class), fmt.Sprintf("%d/%d", c.Main.Failures, c.Main.Trials), percent(c.Main.Rate), interval(c.Main)}
		if control {
			alone, p := "-", "-"
			if c.Control != nil {
				alone = fmt.Sprintf("%d/%d", c.Control.Failures, c.Control.Trials)
			}
			if c.Excess != nil && c.Main.Failures > 0 {
				p = fmt.Sprintf("%.1g", c.Excess.PAdjusted)
			}
			row = append(row, alone, p)
		}
		mark := ""
		if c.Convicts {
			mark = s.Paint("<- "+string(c.Means), statusStyle(c.Means))
		}
		rows = append(rows, append(row, mark))
	}
	title(s, "By oracle")
	if len(rows) > 1 {
		s.Printf("%s", s.Table(align+"l", rows))
	}
	if quiet > 0 {
		paragraph(s, "  ", "  ", fmt.Sprintf("%d others were tried and stayed quiet.", quiet))
	}
}

// barColumns is the width of a breakdown's bars.
const barColumns = 24

func breakdowns(s *term.Screen, v *oracle.Verdict) {
	if v.Broken.Main.Failures == 0 {
		return
	}
	for _, b := range v.Breakdowns {
		if len(b.Bins) < 2 {
			continue
		}
		most := slices.MaxFunc(b.Bins, func(x, y oracle.Bin) int {
			return int(math.Copysign(1, x.Rate.Rate-y.Rate.Rate))
		}).Rate.Rate
		rows := [][]string{{b.By, "ops", "rate", "95%", ""}}
		for _, bin := range b.Bins {
			bar := ""
			if most > 0 {
				bar = strings.Repeat("▇", int(math.Round(barColumns*bin.Rate.Rate/most)))
			}
			rows = append(rows, []string{bin.Label, fmt.Sprintf("%d/%d", bin.Rate.Failures, bin.Rate.Trials), percent(bin.Rate.Rate), interval(bin.Rate), bar})
		}
		title(s, "Broken by "+b.By)
		s.Printf("%s", s.Table("lrrrl", rows))
	}
}

// examples shows the worst few, one of each class first: wanted beside got.
func examples(s *term.Screen, v *oracle.Verdict, run Run) {
	type shown struct {
		class oracle.Class
		oracle.Example
	}
	var worst []shown
	for nth := 0; len(worst) < worstShown && nth < worstShown; nth++ {
		for _, convicting := range []bool{true, false} {
			for _, c := range v.Classes {
				if c.Convicts == convicting && nth < len(c.Examples) && len(worst) < worstShown {
					worst = append(worst, shown{c.Class, c.Examples[nth]})
				}
			}
		}
	}
	if len(worst) == 0 {
		return
	}
	title(s, "Worst")
	for i, e := range worst {
		if i > 0 {
			s.Printf("\n")
		}
		where := ""
		if e.Op != 0 {
			where = fmt.Sprintf(" in op %d (%s, session %d, round %d)", e.Op, e.Phase, e.Session, e.Turn+1)
		}
		note := ""
		if e.Note != "" {
			note = ": " + term.Safe(e.Note)
		}
		paragraph(s, "  ", "    ", string(e.class)+where+note)
		sideBySide(s, e.Want, e.Got)
	}
	s.Printf("\n")
	paragraph(s, "  ", "  ", fmt.Sprintf("Everything about one op: culprit check --op N %s", run.Dir))
}

// sideLines bounds the height of an example.
const sideLines = 8

func sideBySide(s *term.Screen, want, got string) {
	columns := (s.Columns() - 7) / 2
	left := cut(term.Wrap(term.Safe(want), columns))
	right := cut(term.Wrap(term.Safe(got), columns))
	rows := [][]string{{"wanted", "got"}}
	for i := range max(len(left), len(right), 1) {
		rows = append(rows, []string{at(left, i), at(right, i)})
	}
	rows[0][0] += strings.Repeat(" ", max(columns-len("wanted"), 0))
	s.Printf("%s", s.Table("ll", rows))
}

func cut(lines []string) []string {
	if len(lines) > sideLines {
		lines = append(lines[:sideLines-1:sideLines-1], "…")
	}
	return lines
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return ""
}

func files(s *term.Screen, run Run) {
	if run.Dir == "" {
		return
	}
	s.Printf("\n")
	paragraph(s, "  files   ", "          ", run.Dir+"/ with "+strings.Join(run.Files, ", "))
}

// percent shows a share with the digits it has earned.
func percent(x float64) string {
	switch p := 100 * x; {
	case p == 0:
		return "0%"
	case p < 0.1:
		return fmt.Sprintf("%.2g%%", p)
	default:
		return fmt.Sprintf("%.1f%%", p)
	}
}

func interval(r oracle.Rate) string {
	return fmt.Sprintf("[%.1f, %.1f]", 100*r.Low, 100*r.High)
}

// duration shows three digits or so.
func duration(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%.1f s", d.Seconds())
	default:
		return d.Round(time.Second).String()
	}
}

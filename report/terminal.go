// Package report shows a verdict to people. It computes nothing: whatever it
// says is in the verdict.
//
// Stability: may change.
package report

import (
	"cmp"
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
	probes(s, v)
	breakdowns(s, v)
	logs(s, v)
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
	s.Printf("\n%s  %s\n", word, brokenText(v))
}

// brokenText says how many replies were broken.
func brokenText(v *oracle.Verdict) string {
	b, c := v.Broken.Main, v.Broken.Control
	text := "no op could be judged"
	if b.Trials > 0 {
		text = fmt.Sprintf("%d of %d replies wrong", b.Failures, b.Trials)
		switch {
		case c != nil:
			text += fmt.Sprintf(", %d of %d alone", c.Failures, c.Trials)
		case mayBeTheModels(v):
			text += ", perhaps the model's own mistakes"
		default:
			text += fmt.Sprintf(", %s %s", percent(b.Rate), interval(b))
		}
	}
	return text
}

// mayBeTheModels says that nothing tells whether the model or the server is
// wrong.
func mayBeTheModels(v *oracle.Verdict) bool {
	return v.Status != oracle.Corrupt && slices.ContainsFunc(v.Classes, func(c oracle.ClassResult) bool { return c.NeedsControl })
}

func reasons(s *term.Screen, v *oracle.Verdict) {
	for _, reason := range v.Reasons {
		paragraph(s, "  - ", "    ", term.Safe(reason))
	}
}

// paragraph wraps text after a first prefix, with another one on later lines.
func paragraph(s *term.Screen, first, rest, text string) {
	for i, line := range term.Wrap(text, s.Columns()-max(len(first), len(rest))) {
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
	paragraph(s, "  sent    ", "          ", sentText(v, run))
	paragraph(s, "  server  ", "          ", term.Safe(serverText(v)))
}

// sentText says what was sent.
func sentText(v *oracle.Verdict, run Run) string {
	sent := run.Workload
	switch {
	case v.Setup.RequestRate > 0:
		sent += fmt.Sprintf(", open loop at %g requests/s", v.Setup.RequestRate)
	case v.Setup.Concurrency > 0: // else at times that were recorded
		sent += fmt.Sprintf(", %d at once", v.Setup.Concurrency)
	}
	if v.Setup.Seed != 0 {
		sent += fmt.Sprintf(", seed %d", v.Setup.Seed)
	}
	return sent
}

// serverText says what it was sent to, in the server's words.
func serverText(v *oracle.Verdict) string {
	asked := fmt.Sprintf("%s at %s", cmp.Or(v.Setup.Server, "unknown server"), v.Setup.BaseURL)
	if v.Setup.Model != "" {
		asked += ", model " + v.Setup.Model
	}
	return asked
}

func phases(s *term.Screen, v *oracle.Verdict) {
	rows := [][]string{{"phase", "ops", "lost", "took", "tokens/s", "first p50", "first p99", "gap p99", "late p99"}}
	for _, p := range v.Phases {
		took := time.Duration((p.ToMS - p.FromMS) * float64(time.Millisecond))
		rate := "-"
		if p.CompletionTokens > 0 && took > 0 {
			rate = fmt.Sprintf("%.0f", float64(p.CompletionTokens)/took.Seconds())
		}
		lost := p.Outcomes[history.Failed] + p.Outcomes[history.TimedOut]
		rows = append(rows, []string{
			string(p.Phase), fmt.Sprint(p.Ops), fmt.Sprint(lost), term.Duration(took), rate,
			p50(p.FirstChunk), p99(p.FirstChunk), p99(p.BetweenChunks), p99(p.Late),
		})
	}
	if len(rows) > 1 {
		title(s, "Load")
		s.Printf("%s", s.Table("lrrrrrrrr", rows))
	}
	for _, p := range v.Phases {
		for _, e := range p.Errors {
			paragraph(s, "  ", "    ", fmt.Sprintf("%s: %d x “%s” (op %d)", p.Phase, e.Ops, term.Safe(e.Message), e.Example))
		}
	}
}

func p50(p *oracle.Percentiles) string {
	if p == nil {
		return "-"
	}
	return term.Duration(time.Duration(p.P50MS * float64(time.Millisecond)))
}

func p99(p *oracle.Percentiles) string {
	if p == nil {
		return "-"
	}
	return term.Duration(time.Duration(p.P99MS * float64(time.Millisecond)))
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
	switch {
	case quiet > 0 && len(rows) > 1:
		paragraph(s, "  ", "  ", fmt.Sprintf("%d others were tried and stayed quiet.", quiet))
	case quiet > 0:
		paragraph(s, "  ", "  ", fmt.Sprintf("All %d that were tried stayed quiet.", quiet))
	}
	if text := falseAlarms(v); text != "" {
		paragraph(s, "  ", "  ", "False alarms, as measured: "+text+".")
	}
	if acquitted(v) && v.Broken.Main.Failures > 0 && control {
		paragraph(s, "  ", "  ", "Replies are wrong alone about as often: these are the model's own mistakes, or a fault that needs no load. verdict.json has examples.")
	}
}

// acquitted says that nothing is held against the server's answers.
func acquitted(v *oracle.Verdict) bool {
	return v.Status == oracle.Clean || v.Status == oracle.Numerics
}

// falseAlarms says how often the oracles that fired were seen to be wrong.
func falseAlarms(v *oracle.Verdict) string {
	var order []string
	on := map[string][]string{}
	for _, c := range v.Classes {
		if f := c.FalseAlarm; f != nil && c.Main.Failures > 0 {
			if on[f.On] == nil {
				order = append(order, f.On)
			}
			on[f.On] = append(on[f.On], fmt.Sprintf("%s %d/%d", c.Class, f.Alarms, f.Trials))
		}
	}
	for i, what := range order {
		order[i] = fmt.Sprintf("%s on %s", strings.Join(on[what], ", "), what)
	}
	return strings.Join(order, "; ")
}

// probeRows of counts are shown, the most telling first.
const probeRows = 12

func probes(s *term.Screen, v *oracle.Verdict) {
	if len(v.Probes) == 0 {
		return
	}
	title(s, "Code paths")
	rows := [][]string{{"path", "count", "with it", "without", "p"}}
	left, goes := 0, false
	for _, p := range v.Probes {
		switch {
		case !shownPath(p.Name):
			continue
		case len(rows) > probeRows:
			left++
			continue
		}
		row := []string{shortPath(p.Name, s.Columns()-probeColumns), fmt.Sprintf("%.0f", p.Count), share(p.With), share(p.Without), "-"}
		if p.Excess != nil {
			row[4] = fmt.Sprintf("%.1g", p.Excess.PAdjusted)
		}
		if p.Associated() {
			row[0], goes = s.Paint(row[0]+" *", term.Bold), true
		}
		rows = append(rows, row)
	}
	s.Printf("%s", s.Table("lrrrr", rows))
	text := "Broken ops among those during which the count rose, and among the others."
	if goes {
		text += " * goes with the broken ones, beyond chance; that isn't to say that it breaks them."
	}
	if left > 0 {
		text += fmt.Sprintf(" %d more in verdict.json.", left)
	}
	paragraph(s, "  ", "  ", text+" "+effectText(v.CorePercent))
}

// probeColumns is what a row has beside the path's name.
const probeColumns = 42

// shortPath is a count's name in so many columns: if need be, with the values
// of its labels alone.
func shortPath(name string, columns int) string {
	name = term.Safe(name)
	if event, labels, ok := strings.Cut(name, "{"); ok && len(name) > columns {
		var values []string
		for label := range strings.SplitSeq(strings.TrimSuffix(labels, "}"), `",`) {
			_, value, _ := strings.Cut(label, "=")
			values = append(values, strings.Trim(value, `"`))
		}
		name = event + "{" + strings.Join(values, ", ") + "}"
	}
	return term.Clip(name, columns)
}

func share(r oracle.Rate) string {
	if r.Trials == 0 {
		return "-"
	}
	return fmt.Sprintf("%d/%d", r.Failures, r.Trials)
}

// barColumns is the width of a breakdown's bars.
const barColumns = 24

func breakdowns(s *term.Screen, v *oracle.Verdict) {
	if v.Broken.Main.Failures == 0 || acquitted(v) {
		return
	}
	title(s, "Where replies are wrong")
	first := true
	for _, b := range v.Breakdowns {
		highest := highestRate(b)
		if len(b.Bins) < 2 || highest == 0 {
			continue
		}
		if !first {
			s.Printf("\n")
		}
		first = false
		if b.By == oracle.ByIndex {
			inOrder(s, b, highest)
			continue
		}
		rows := [][]string{{"by " + b.By, "ops", "rate", "95%", ""}}
		for _, bin := range b.Bins {
			bar := strings.Repeat("▇", min(barColumns, int(math.Round(barColumns*bin.Rate.Rate/highest))))
			rows = append(rows, []string{bin.Label, fmt.Sprintf("%d/%d", bin.Rate.Failures, bin.Rate.Trials), percent(bin.Rate.Rate), interval(bin.Rate), bar})
		}
		s.Printf("%s", s.Table("lrrrl", rows))
	}
}

// logs says which of the case's patterns the server's logs matched.
func logs(s *term.Screen, v *oracle.Verdict) {
	if len(v.Logs) == 0 {
		return
	}
	title(s, "Counted in the server's logs")
	rows := [][]string{{"pattern", "lines", "first at", "first"}}
	for _, l := range v.Logs {
		rows = append(rows, []string{term.Safe(l.Name), fmt.Sprint(l.Lines), fmt.Sprintf("%.1f s", float64(l.AtMS)/1000), term.Clip(term.Safe(l.First), max(20, s.Columns()-40))})
	}
	s.Printf("%s", s.Table("lrrl", rows))
}

// highestRate is what the longest bar stands for. A bin of a few ops, whose
// rate is anything, doesn't set it.
func highestRate(b oracle.Breakdown) float64 {
	ops, highest := 0, 0.0
	for _, bin := range b.Bins {
		ops += bin.Rate.Trials
	}
	for _, bin := range b.Bins {
		if 20*bin.Rate.Trials >= ops {
			highest = max(highest, bin.Rate.Rate)
		}
	}
	return highest
}

// inOrder shows the parts of a run side by side.
func inOrder(s *term.Screen, b oracle.Breakdown, highest float64) {
	bars := []string{"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"}
	var rates, line strings.Builder
	for _, bin := range b.Bins {
		bar := " "
		if bin.Rate.Failures > 0 {
			bar = bars[min(int(bin.Rate.Rate/highest*float64(len(bars))), len(bars)-1)]
		}
		fmt.Fprintf(&rates, "%6.0f%%", 100*bin.Rate.Rate)
		line.WriteString("   " + strings.Repeat(bar, 4))
	}
	s.Printf("  %s\n%s\n%s\n", s.Paint(fmt.Sprintf("in the order of sending: %d parts of %s ops", len(b.Bins), partSize(b)), term.Faint),
		rates.String(), strings.TrimRight(line.String(), " "))
}

// partSize is how many ops a part of a run has.
func partSize(b oracle.Breakdown) string {
	low, high := b.Bins[0].Rate.Trials, b.Bins[0].Rate.Trials
	for _, bin := range b.Bins {
		low, high = min(low, bin.Rate.Trials), max(high, bin.Rate.Trials)
	}
	if low == high {
		return fmt.Sprint(low)
	}
	return fmt.Sprintf("%d or %d", low, high)
}

// example is one violation of a class.
type example struct {
	class oracle.Class
	oracle.Example
}

// worst returns the worst violations of what convicts, one of each class
// first. Where nothing could, for want of a control arm, it is what may be the
// model's own.
func worst(v *oracle.Verdict) []example {
	var classes []oracle.ClassResult
	for _, c := range v.Classes {
		switch {
		case acquitted(v) && c.Means == oracle.Corrupt:
		case c.Convicts, c.NeedsControl:
			classes = append(classes, c)
		case v.Broken.Convicts && c.Means == oracle.Corrupt && (c.Control == nil || c.Main.Rate > c.Control.Rate):
			classes = append(classes, c) // a part of what convicts as a whole
		}
	}
	rank := func(c oracle.ClassResult) int {
		switch {
		case c.Convicts && c.Means == v.Status:
			return 0
		case c.Convicts && c.Means == oracle.Corrupt:
			return 1
		case c.Means == oracle.Corrupt:
			return 2
		}
		return 3
	}
	slices.SortStableFunc(classes, func(a, b oracle.ClassResult) int { return cmp.Compare(rank(a), rank(b)) })
	var out []example
	for nth := 0; len(out) < worstShown && nth < worstShown; nth++ {
		for _, c := range classes {
			if nth < len(c.Examples) && len(out) < worstShown {
				out = append(out, example{c.Class, c.Examples[nth]})
			}
		}
	}
	return out
}

// examples shows the worst few: wanted beside got.
func examples(s *term.Screen, v *oracle.Verdict, run Run) {
	shown := worst(v)
	if len(shown) == 0 {
		return
	}
	if mayBeTheModels(v) {
		title(s, "Worst, perhaps the model's own")
	} else {
		title(s, "Worst")
	}
	op := int64(0)
	for i, e := range shown {
		if i > 0 {
			s.Printf("\n")
		}
		note := ""
		if e.Note != "" {
			note = ": " + term.Safe(e.Note)
		}
		paragraph(s, "  ", "    ", string(e.class)+e.where()+note)
		sideBySide(s, sameOrder(e.Want, e.Got), e.Got)
		op = cmp.Or(op, e.Op)
	}
	if op != 0 && run.Dir != "" {
		s.Printf("\n  Everything about one op:\n  culprit check --op %d %s\n", op, quoted(run.Dir))
	}
}

// where says which request it was.
func (e *example) where() string {
	switch {
	case e.Op == 0:
		return ""
	case e.Phase == history.Recovery:
		return fmt.Sprintf(" in op %d (plain request %d after a failure)", e.Op, e.Turn+1)
	case e.Phase == history.Sentinel:
		return fmt.Sprintf(" in op %d (one-token request %d beside the health checks)", e.Op, e.Turn+1)
	case e.Leg != "":
		return fmt.Sprintf(" in op %d (session %d, request %d: %s)", e.Op, e.Session, e.Turn+1, term.Safe(e.Leg))
	default:
		return fmt.Sprintf(" in op %d (session %d, round %d)", e.Op, e.Session, e.Turn+1)
	}
}

// quoted makes a path fit for a shell.
func quoted(path string) string {
	plain := func(r rune) bool {
		return r == '/' || r == '.' || r == '-' || r == '_' || r == '+' || r == ':' || '0' <= r && r <= '9' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
	}
	if path != "" && !strings.ContainsFunc(path, func(r rune) bool { return !plain(r) }) {
		return path
	}
	return "'" + strings.ReplaceAll(path, "'", `'\''`) + "'"
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

package report

import (
	"fmt"
	"strings"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
)

// CompareBefore says what is compared, and how many pairs it takes.
func CompareBefore(s *term.Screen, names [2]string, load string, o *experiment.CompareOptions, rounds int) {
	s.Printf("A  %s\nB  %s\n", term.Safe(names[0]), term.Safe(names[1]))
	how := "on both at once"
	if o.Interleave {
		how = "on one after the other, in an order that is drawn"
	}
	paragraph(s, "", "", fmt.Sprintf("%s, %s, block after block", load, how))
	paragraph(s, "", "", fmt.Sprintf("To see that B is better takes about %s pairs of requests if A fails 18%% of the time and B never, %s if 2%%, %s if 0.1%%. To see that they don't differ by %s takes %s if neither fails.",
		thousands(o.Foretold(0.18, rounds)), thousands(o.Foretold(0.02, rounds)), thousands(o.Foretold(0.001, rounds)), percent(o.Difference), thousands(o.ForetoldNone())))
	paragraph(s, "", "", "Evidence is how many times likelier what was seen is if the claim is true.")
	s.Printf("\n")
}

// thousands writes a number with its thousands apart.
func thousands(n int) string {
	text := fmt.Sprint(n)
	for at := len(text) - 3; at > 0; at -= 3 {
		text = text[:at] + "," + text[at:]
	}
	return text
}

// Block writes what a block showed, and what all of them come to.
func Block(s *term.Screen, b experiment.Block, c experiment.Comparison) {
	if b.Note != "" {
		paragraph(s, fmt.Sprintf("%3d  ", b.Number), "     ", s.Paint("doesn't count: "+term.Clip(term.Safe(firstLine(b.Note)), 3*s.Columns()), term.Yellow))
		return
	}
	p := b.Pairs
	paragraph(s, fmt.Sprintf("%3d  ", b.Number), "     ", fmt.Sprintf("%d pairs, A failed %d, B %d; better %s, worse %s, no difference %s of %s",
		p.Pairs(), p.A(), p.B(), weight(s, c.Evidence.Better, c.Enough), weight(s, c.Evidence.Worse, c.Enough), weight(s, c.Evidence.NoDifference, c.Enough), times(c.Enough)))
}

func weight(s *term.Screen, e, enough float64) string {
	if e >= enough {
		return s.Paint(times(e), term.Bold)
	}
	return times(e)
}

// times writes how many times likelier something is.
func times(e float64) string {
	switch {
	case e < 0.1:
		return "0"
	case e < 10:
		return fmt.Sprintf("%.1f", e)
	case e < 1e6:
		return thousands(int(e))
	}
	return "over 1,000,000"
}

// Comparison writes what a comparison came to.
func Comparison(s *term.Screen, names [2]string, c experiment.Comparison, dir string) {
	s.Printf("\n")
	less := "B fails less often than A"
	more := "B fails more often than A"
	if c.Ratio < 1 {
		less, more = fmt.Sprintf("B fails less than %g times as often as A", c.Ratio), fmt.Sprintf("A fails less than %g times as often as B", c.Ratio)
	}
	switch c.Ordering {
	case experiment.Better:
		headlineWord(s, "BETTER", term.Green, less)
	case experiment.Worse:
		headlineWord(s, "WORSE", term.Red, more)
	case experiment.NoDifference:
		headlineWord(s, "NO DIFFERENCE", term.Green, fmt.Sprintf("above %s", percent(c.Difference)))
	case experiment.Unordered:
		headlineWord(s, "UNDECIDED", term.Yellow, term.Safe(c.Why))
	}
	if c.Ordering != experiment.Unordered {
		paragraph(s, "  ", "  ", fmt.Sprintf("Wrong with probability under %s, whenever one looks. %s", percent(c.Error), scope(c)))
	}
	p := c.Pairs
	rows := [][]string{{"", "", "failed", "rate", "it alone"}}
	for i, failed := range []int{p.A(), p.B()} {
		rate := 0.0
		if p.Pairs() > 0 {
			rate = float64(failed) / float64(p.Pairs())
		}
		rows = append(rows, []string{string(rune('A' + i)), term.Clip(term.Safe(names[i]), s.Columns()-40), fmt.Sprintf("%d/%d", failed, p.Pairs()), percent(rate), fmt.Sprint([]int{p.OnlyA, p.OnlyB}[i])})
	}
	s.Printf("%s", s.Table("llrrr", rows))
	if o := c.OddsRatio; o != nil {
		text := fmt.Sprintf("B's odds of failing are %.2g to %.2g times A's (95%%, at all times)", o[0], o[1])
		if o[1] >= 1e5 {
			text = fmt.Sprintf("B's odds of failing are at least %.2g times A's (95%%, at all times)", o[0])
		}
		paragraph(s, "  ", "  ", text)
	}
	for _, b := range c.Blocks {
		if b.Note != "" {
			paragraph(s, "  ", "     ", fmt.Sprintf("Block %d doesn't count: %s", b.Number, term.Clip(term.Safe(firstLine(b.Note)), 240)))
		}
	}
	s.Printf("\n")
	paragraph(s, "  files   ", "          ", fmt.Sprintf("%s/ with %s and two run directories a block", dir, experiment.CompareFile))
	if len(c.Blocks) > 0 {
		last := c.Blocks[len(c.Blocks)-1]
		see := last.Dirs[0]
		if p.B() > p.A() {
			see = last.Dirs[1]
		}
		paragraph(s, "  see     ", "          ", fmt.Sprintf("culprit check %s", strings.TrimSuffix(dir, "/")+"/"+see))
	}
}

// scope says of what the claim is true.
func scope(c experiment.Comparison) string {
	switch {
	case c.Ordering == experiment.NoDifference:
		return "Said of the servers as they ran."
	case c.Launches:
		return fmt.Sprintf("%d launches of each.", c.Counted)
	}
	return "Said of these two servers as they ran: to speak of their settings, compare arms of a case, which are launched anew."
}

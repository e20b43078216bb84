package report

import (
	"fmt"
	"strings"

	"github.com/culprit-project/culprit/amplify"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
)

// AmplifyBefore says what a search for the load that fails most may cost.
func AmplifyBefore(s *term.Screen, path string, o amplify.Options) {
	names := o.Shapes()
	paragraph(s, "", "", fmt.Sprintf("%s: %d loads are tried on the failing arm, then what can be added to the best of them: %s",
		term.Safe(path), len(names), strings.Join(names, ", ")))
	for _, name := range o.Fixed {
		paragraph(s, "", "", fmt.Sprintf("%s is a factor of the case, so it stays as it is in the failing arm.", term.Safe(name)))
	}
	most := fmt.Sprintf("%s and %s requests", counted(o.Budget.Launches, "launch", "launches"), count(o.Budget.Requests))
	if o.NoLaunch {
		most = count(o.Budget.Requests) + " requests to the server that runs"
	}
	if o.Budget.Wall > 0 {
		most += ", in " + term.Duration(o.Budget.Wall)
	}
	by := "a minute of load"
	if o.PerRequest {
		by = "a request"
	}
	paragraph(s, "", "", fmt.Sprintf("It takes %s at most. What counts is failures in %s. About a third of it is for measuring what was chosen, on fresh launches.", most, by))
	if o.NoSafe {
		paragraph(s, "", "", "The case has no safe arm that may run, so the model's own mistakes can't be told from the fault's.")
	}
}

// AmplifyStep writes what a trial showed.
func AmplifyStep(s *term.Screen, step experiment.AmplifyStep) {
	if !step.Ended {
		return
	}
	t, out := step.Trial.Trial, step.Trial.Outcome
	var what string
	if out.Void != "" {
		what = s.Paint("doesn't count: "+term.Clip(term.Safe(firstLine(out.Void)), 2*s.Columns()), term.Yellow)
	} else {
		broken := fmt.Sprintf("%d of %d", out.Failures, out.Judged)
		if out.Failures > 0 && !t.Safe {
			broken = s.Paint(broken, term.Bold)
		}
		what = fmt.Sprintf("%s broke in %s", broken, term.Duration(out.Run))
	}
	where := ""
	if t.Safe {
		where = ", in the safe arm"
	}
	if step.Resumed {
		where += " (from an earlier start)"
	}
	launch := " "
	if t.Launch || out.Launched {
		launch = "*"
	}
	paragraph(s, fmt.Sprintf("%3d%s ", step.Number, launch), "     ", fmt.Sprintf("%s%s: %s", t.Name, where, what))
}

// Amplified writes what a search for the load that fails most came to. next are
// the commands that go on with it.
func Amplified(s *term.Screen, r amplify.Result, next []string) {
	s.Printf("\n")
	best := r.Best
	switch r.Status {
	case amplify.Raised:
		headlineWord(s, "RAISED", term.Red, fmt.Sprintf("%s: %s of requests break, %s", best.Name, percent(best.Rate.Value), factor(r)))
	case amplify.Nothing:
		headlineWord(s, "NOTHING FAILED", term.Yellow, fmt.Sprintf("in %s requests; under each of the loads a rate above %s would have shown if launches are alike, above %s if some hardly fail at all",
			count(judged(r)), percent(r.Shows), percent(r.ShowsDispersed)))
	case amplify.NotRaised:
		text := "no load was shown to fail more often than the case's own"
		switch {
		case best == nil:
			text += "; all that failed were given up"
		case best.Name != r.Base.Name:
			text += fmt.Sprintf("; %s seems to, %s", best.Name, factor(r))
		}
		headlineWord(s, "NOT RAISED", term.Yellow, text)
	case amplify.Unfinished:
		text := "it ended before anything was measured that can be stated"
		if best != nil {
			text = "it ended while " + best.Name + " was measured"
		}
		headlineWord(s, "UNFINISHED", term.Yellow, text)
	}
	if best != nil {
		s.Printf("\n  Measured on fresh launches and seeds, after the choice:\n")
		rows := [][]string{{"load", "launches", "broken", "rate", "95%, at any time", "a minute"}, measured(s, *best)}
		if best.Name != r.Base.Name {
			rows = append(rows, measured(s, r.Base))
		}
		s.Printf("%s", s.Table("lrrrrr", rows))
		if r.PerMinute > 0 {
			paragraph(s, "  ", "  ", fmt.Sprintf("%.3g times the failures in a minute of load.", r.PerMinute))
		}
		if best.Safe != nil {
			paragraph(s, "  ", "  ", fmt.Sprintf("Under the same load the safe arm broke %d of %s.", best.Safe.Failures, count(best.Safe.Trials)))
		}
		if best.Name != r.Base.Name {
			paragraph(s, "  ", "  ", "Of the case's own load the search's requests count too: it wasn't chosen for them. The factor is of the launches that played both.")
		}
	}
	if len(r.Tried) > 0 {
		s.Printf("\n  While searching (what was chosen looks better here than it is):\n")
		rows := [][]string{{"load", "launches", "broken", "rate", "95%, at any time", "a minute"}}
		var out []string
		for _, row := range r.Tried {
			if row.Out != "" {
				out = append(out, fmt.Sprintf("%s: %s", row.Name, term.Clip(term.Safe(firstLine(row.Out)), 3*s.Columns())))
				continue
			}
			rows = append(rows, measured(s, row))
		}
		s.Printf("%s", s.Table("lrrrrr", rows))
		for _, text := range out {
			paragraph(s, "  given up: ", "    ", text)
		}
	}
	used := fmt.Sprintf("%d of %d launches, %s of %s requests, %s", r.Used.Launches, r.Budget.Launches, count(r.Used.Requests), count(r.Budget.Requests), term.Duration(r.Used.Wall))
	if r.Budget.Wall > 0 {
		used += " of " + term.Duration(r.Budget.Wall)
	}
	s.Printf("\n")
	paragraph(s, "  used    ", "          ", used)
	for i, line := range next { // not wrapped: they are to be copied
		head := "          "
		if i == 0 {
			head = "  next    "
		}
		s.Printf("%s%s\n", head, term.Safe(line))
	}
}

// amount shows three digits, and thousands as such.
func amount(x float64) string {
	if x >= 1000 {
		return count(int(x))
	}
	return fmt.Sprintf("%.3g", x)
}

func judged(r amplify.Result) int {
	n := 0
	for _, row := range r.Tried {
		n += row.Requests
	}
	return n
}

func factor(r amplify.Result) string {
	switch f := r.Factor; {
	case r.Base.Out != "":
		return "and the case's own was given up: " + term.Safe(firstLine(r.Base.Out))
	case f.Value == 0:
		return fmt.Sprintf("at least %.2g times as many as under the case's own, of which none broke", f.Low)
	case f.High == 0:
		return fmt.Sprintf("%.3g times as many as under the case's own (95%%: at least %.2g)", f.Value, f.Low)
	default:
		return fmt.Sprintf("%.3g times as many as under the case's own (95%%: %.2g to %.2g)", f.Value, f.Low, f.High)
	}
}

func measured(s *term.Screen, r amplify.Row) []string {
	return []string{
		term.Clip(r.Name, s.Columns()-52), fmt.Sprint(r.Launches), fmt.Sprintf("%d/%s", r.Failures, count(r.Requests)), percent(r.Rate.Value),
		fmt.Sprintf("%s to %s", percent(r.Rate.Low), percent(r.Rate.High)), amount(r.PerMinute),
	}
}

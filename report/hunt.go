package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
)

// Trial writes a trial that begins, or what came of it.
func Trial(s *term.Screen, space design.Space, step experiment.Step) {
	t := step.Trial
	if !step.Ended {
		launch := "same server"
		if t.Proposal.Launch {
			launch = "fresh launch"
		}
		paragraph(s, fmt.Sprintf("%3d  ", step.Number), "     ", fmt.Sprintf("%s, %s: %s", phaseWord(t.Proposal.Phase), launch, t.Proposal.Why))
		s.Printf("     %s\n", arm(s, space, t.Proposal.Arm))
		return
	}
	o := t.Observation
	result := fmt.Sprintf("%d of %d broken", o.Failures, o.Requests)
	style := term.Green
	switch {
	case o.Outcome == search.Void || o.Outcome == search.Invalid:
		result, style = string(o.Outcome)+": "+term.Clip(term.Safe(firstLine(t.Note)), 3*s.Columns()), term.Yellow
	case o.Outcome == search.Wedged:
		result, style = "wedged, "+result, term.Red
	case o.Failures > 0:
		style = term.Red
	}
	if step.Resumed {
		result += " (from an earlier start)"
	}
	took := time.Duration(t.LaunchMS+t.RunMS) * time.Millisecond
	paragraph(s, "     -> ", "        ", fmt.Sprintf("%s  %s", s.Paint(result, style), s.Paint(term.Duration(took), term.Faint)))
	if beliefs := leading(step.Progress); beliefs != "" {
		paragraph(s, "        ", "        ", "suspected now: "+beliefs)
	}
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

func phaseWord(p search.Phase) string {
	switch p {
	case search.Reproduce:
		return "reproduce"
	case search.Narrow:
		return "narrow"
	case search.Control:
		return "look again"
	case search.Confirm:
		return "confirm"
	case search.Spot:
		return "spot check"
	case search.Sweep:
		return "sweep levels"
	}
	return string(p)
}

// arm shows what is turned to safe, the shorter way round.
func arm(s *term.Screen, space design.Space, a design.Arm) string {
	var suspect, safe []string
	for _, f := range space.Factors {
		if a[f.Name] == f.Levels[f.Failing()].Name {
			suspect = append(suspect, f.Name)
		} else {
			safe = append(safe, f.Name+"="+a[f.Name])
		}
	}
	switch {
	case len(safe) == 0:
		return "everything as where it fails"
	case len(safe) <= len(suspect):
		return "as where it fails, but " + strings.Join(safe, " ")
	case len(suspect) == 0:
		return "everything safe"
	default:
		return "all safe, but " + s.Paint(strings.Join(suspect, " "), term.Bold)
	}
}

// shownBelief is the smallest probability that is worth a reader's time.
const shownBelief = 0.05

func leading(p search.Progress) string {
	var parts []string
	for _, b := range p.Leading {
		if b.Probability >= shownBelief {
			name := "nothing that varies"
			if len(b.Set) > 0 {
				name = strings.Join(slices.Sorted(maps.Keys(b.Set)), " + ")
			}
			parts = append(parts, fmt.Sprintf("%s %.0f%%", name, 100*b.Probability))
		}
	}
	if p.None >= shownBelief {
		parts = append(parts, fmt.Sprintf("none of these %.0f%%", 100*p.None))
	}
	return strings.Join(parts, ", ")
}

// Hunt writes what a hunt came to: a sentence first, then what it rests on.
func Hunt(s *term.Screen, f experiment.Result, trials []experiment.Trial, dir string) {
	s.Printf("\n")
	switch f.Status {
	case search.Found:
		for _, c := range f.Causes {
			cause(s, c)
		}
		paragraph(s, "  ", "  ", fmt.Sprintf("Needed for the failure under this workload; wrong with probability under %s. Confirmed both ways on fresh launches.", percent(f.Error)))
	case search.NoneOfThese:
		headlineWord(s, "NONE OF THESE", term.Yellow, "it fails with every factor safe: the cause is something that the case doesn't vary")
		for _, c := range f.Causes {
			evidence(s, c)
		}
	case search.NotReproduced:
		headlineWord(s, "NOT REPRODUCED", term.Yellow, term.Safe(f.Text))
	case search.Undecided, search.Running:
		headlineWord(s, "UNDECIDED", term.Yellow, term.Safe(strings.TrimSpace(string(f.Reason)+": "+f.Text)))
	}
	if len(f.Levels) > 0 {
		levels(s, f.Finding)
	}
	uncounted(s, f.Untested, trials)
	s.Printf("\n")
	paragraph(s, "  cost    ", "          ", fmt.Sprintf("%d launches, %d judged requests, %s", f.Launches, f.Requests, term.Duration(total(trials))))
	paragraph(s, "  files   ", "          ", fmt.Sprintf("%s/ with %s and a run directory a trial", dir, experiment.FindingFile))
	if f.Status == search.Found && len(trials) > 0 {
		s.Printf("  see     culprit check %s\n", quoted(dir+"/"+worstTrial(trials).Dir))
	}
}

func total(trials []experiment.Trial) time.Duration {
	var ms int64
	for _, t := range trials {
		ms += t.LaunchMS + t.RunMS
	}
	return time.Duration(ms) * time.Millisecond
}

// worstTrial is the one with the most broken replies.
func worstTrial(trials []experiment.Trial) experiment.Trial {
	return slices.MaxFunc(trials, func(a, b experiment.Trial) int { return a.Observation.Failures - b.Observation.Failures })
}

func headlineWord(s *term.Screen, word string, style term.Style, text string) {
	s.Printf("%s  ", s.Paint(word, term.Bold, style))
	for i, line := range term.Wrap(text, s.Columns()-len(word)-2) {
		if i > 0 {
			s.Printf("%s", strings.Repeat(" ", len(word)+2))
		}
		s.Printf("%s\n", line)
	}
}

func cause(s *term.Screen, c search.Cause) {
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(c.Set)) {
		parts = append(parts, name+"="+c.Set[name])
	}
	together := " is needed for the failure"
	if len(parts) > 1 {
		together = " are needed together for the failure"
	}
	headlineWord(s, "CULPRIT", term.Red, strings.Join(parts, ", ")+together)
	evidence(s, c)
}

func evidence(s *term.Screen, c search.Cause) {
	rows := [][]string{{"arm", "launches", "broken", "rate", "95%"}}
	add := func(name string, e search.Evidence) {
		rate := 0.0
		if e.Requests > 0 {
			rate = float64(e.Failures) / float64(e.Requests)
		}
		// Few launches say little of what the next one will do, however many
		// requests each had: an interval that covers half of everything is none.
		interval := "-"
		if e.High-e.Low < 0.5 {
			interval = fmt.Sprintf("[%.1f, %.1f]", 100*e.Low, 100*e.High)
		}
		rows = append(rows, []string{name, fmt.Sprint(e.Launches), fmt.Sprintf("%d/%d", e.Failures, e.Requests), percent(rate), interval})
	}
	add("these alone, all else safe", c.With)
	for _, w := range c.Without {
		add("all as it fails, "+w.Factor+" safe", w)
	}
	s.Printf("%s", s.Table("lrrrr", rows))
}

func levels(s *term.Screen, f search.Finding) {
	rows := [][]string{{"factor", "level", "broken", ""}}
	for _, l := range f.Levels {
		word := "undecided"
		if l.Fails != nil {
			word = "clean"
			if *l.Fails {
				word = "fails too"
			}
		}
		rows = append(rows, []string{l.Factor, l.Level, fmt.Sprintf("%d/%d", l.Evidence.Failures, l.Evidence.Requests), word})
	}
	title(s, "Other levels of what is accused")
	s.Printf("%s", s.Table("llrl", rows))
}

// uncounted says which trials were no evidence, and why.
func uncounted(s *term.Screen, untested []experiment.Unmet, trials []experiment.Trial) {
	first := true
	for _, u := range untested {
		if first {
			title(s, "Not counted")
			first = false
		}
		paragraph(s, "  -  ", "     ", fmt.Sprintf("%s=%s never took effect, so its arms are void and nothing is said of it: %s", u.Factor, u.Level, term.Safe(u.Why)))
	}
	for i, t := range trials {
		if t.Observation.Outcome != search.Void && t.Observation.Outcome != search.Invalid {
			continue
		}
		if first {
			title(s, "Not counted")
			first = false
		}
		paragraph(s, fmt.Sprintf("  %d  ", i+1), "     ", fmt.Sprintf("%s: %s", t.Observation.Outcome, term.Clip(term.Safe(firstLine(t.Note)), 240)))
	}
}

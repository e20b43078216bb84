package report

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
)

// Hunt writes what a hunt came to: a sentence first, then what it rests on.
// again are commands that show it again.
func Hunt(s *term.Screen, r *experiment.Record, again []Command) {
	f := r.Result
	s.Printf("\n%s\n", s.Paint(strings.Repeat("─", s.Columns()), term.Faint))
	word, style := statusWord(f.Status)
	headlineWord(s, word, style, Sentence(r))
	if f.Status == search.Found {
		s.Printf("\n")
		paragraph(s, "  ", "  ", claimScope(r))
	}
	for i, c := range f.Causes {
		if len(f.Causes) > 1 {
			title(s, fmt.Sprintf("Cause %d of %d", i+1, len(f.Causes)))
		}
		cause(s, r.Case, c)
	}
	newCodePaths(r).terminal(s)
	if len(f.WaysOut) > 0 {
		waysOut(s, r)
	}
	if len(f.Levels) > 0 {
		levels(s, r)
	}
	uncounted(s, r)
	s.Printf("\n")
	paragraph(s, "  cost    ", "          ", fmt.Sprintf("%s, %s judged requests, %s", counted(f.Launches, "launch", "launches"), count(f.Requests), term.Duration(total(r.Trials))))
	paragraph(s, "  files   ", "          ", fmt.Sprintf("%s/ with %s and a run directory a trial", r.Dir, experiment.FindingFile))
	paragraph(s, "  page    ", "          ", r.Dir+"/"+PageFile+" has all of it with figures")
	commands(s, again)
}

// Command is one to be copied, and what it shows.
type Command struct{ Shows, Line string }

func commands(s *term.Screen, again []Command) {
	if len(again) == 0 {
		return
	}
	title(s, "See it again")
	for _, c := range again {
		paragraph(s, "  # ", "  # ", c.Shows)
		s.Printf("  %s\n", term.Safe(c.Line)) // whole, to be copied
	}
}

func statusWord(status search.Status) (string, term.Style) {
	switch status {
	case search.Found:
		return "CULPRIT", term.Red
	case search.NoneOfThese:
		return "NONE OF THESE", term.Yellow
	case search.NotReproduced:
		return "NOT REPRODUCED", term.Yellow
	case search.Undecided, search.Running:
	}
	return "UNDECIDED", term.Yellow
}

// Sentence says what a hunt came to, in a few sentences.
func Sentence(r *experiment.Record) string { return strings.Join(sentences(r), " ") }

func sentences(r *experiment.Record) []string {
	f := r.Result
	switch f.Status {
	case search.Found:
	case search.NoneOfThese:
		out := []string{"It fails with every setting safe: the cause is something that the case doesn't vary."}
		if k := f.Contrast; k != nil {
			out = append(out, fmt.Sprintf("With everything safe %s; as where it fails %s.", broke(k.Without), broke(k.With)))
		}
		return out
	case search.NotReproduced:
		return []string{"It wasn't seen to fail: " + term.Safe(f.Text) + "."}
	case search.Undecided, search.Running:
		return []string{strings.TrimPrefix(fmt.Sprintf("%s: %s.", f.Reason, term.Safe(f.Text)), ": ")}
	}
	var sets []string
	for _, c := range f.Causes {
		sets = append(sets, needed(r, c))
	}
	out := []string{strings.Join(sets, "; or, by itself, ") + "."}
	if k := f.Contrast; k != nil && k.With.Requests > 0 {
		with, without := "With it", "without it"
		if n := len(f.Causes[0].Set); len(f.Causes) > 1 {
			with, without = "With one of these", "with none"
		} else if n > 1 {
			with, without = "With all "+number(n), "without any one of them"
			if n == 2 {
				with = "With both"
			}
		}
		if f.Wedge {
			out = append(out, fmt.Sprintf("%s the server stopped answering in %s of %s; %s in %s of %s, through %s requests.",
				with, count(k.With.Failures), counted(k.With.Launches, "launch", "launches"), without, count(k.Without.Failures), counted(k.Without.Launches, "launch", "launches"), count(k.Without.Requests)))
		} else {
			out = append(out, fmt.Sprintf("%s %s; %s %s of %s, in %s.",
				with, broke(k.With), without, count(k.Without.Failures), count(k.Without.Requests), counted(k.Without.Launches, "launch", "launches")))
		}
	}
	for _, c := range f.Causes {
		for _, name := range slices.Sorted(maps.Keys(c.Skipped)) {
			levels := c.Skipped[name]
			text := term.Safe(strings.Join(levels, ", "))
			if n := len(levels); n > 4 {
				text = fmt.Sprintf("%s to %s (%d levels)", term.Safe(levels[0]), term.Safe(levels[n-1]), n)
			}
			out = append(out, fmt.Sprintf("It may begin before %s already: %s %s couldn't be run.", term.Safe(c.Set[name]), term.Safe(name), text))
		}
	}
	for _, a := range f.Unreached {
		out = append(out, fmt.Sprintf("Not run, since it doesn't start or is forbidden: %s; another arm stood in.", term.Safe(arm(r.Case.Space, a))))
	}
	return append(out, fmt.Sprintf("Wrong with probability under %s.", short(f.Error)))
}

func needed(r *experiment.Record, c search.Cause) string {
	var parts []string
	for _, f := range r.Case.Space.Factors { // in the case's order
		level, ok := c.Set[f.Name]
		if !ok {
			continue
		}
		if note := r.Case.Notes[f.Name].Note; note != "" {
			parts = append(parts, term.Safe(note))
		} else {
			parts = append(parts, term.Safe(r.Case.Setting(f.Name, level)))
		}
	}
	if len(parts) == 1 {
		return parts[0] + " is needed"
	}
	return strings.Join(parts[:len(parts)-1], ", ") + " and " + parts[len(parts)-1] + " are needed together"
}

// number writes small numbers as words.
func number(n int) string {
	words := []string{"none", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"}
	if n < len(words) {
		return words[n]
	}
	return fmt.Sprint(n)
}

func broke(e search.Evidence) string {
	return fmt.Sprintf("%s %s of calls broke (%s of %s, in %s)",
		percent(brokenShare(e)), bounds(e.Low, e.High), count(e.Failures), count(e.Requests), counted(e.Launches, "launch", "launches"))
}

func brokenShare(e search.Evidence) float64 { return float64(e.Failures) / float64(max(e.Requests, 1)) }

// bounds are in percent.
func bounds(low, high float64) string {
	return fmt.Sprintf("[%s, %s]", strings.TrimSuffix(short(low), "%"), strings.TrimSuffix(short(high), "%"))
}

// short is a percentage with no more digits than fit in a word.
func short(x float64) string {
	switch p := 100 * x; {
	case p == 0:
		return "0%"
	case p < 0.1:
		return "<0.1%"
	case p < 1:
		return fmt.Sprintf("%.1g%%", p)
	default:
		return fmt.Sprintf("%.0f%%", p)
	}
}

func claimScope(r *experiment.Record) string {
	load := "this workload"
	if p, err := r.Case.Render(r.Case.Space.Failing()); err == nil {
		load = fmt.Sprintf("this workload (%s, %s at once)", p.Plan.Workload.Kind, counted(p.Plan.Concurrency, "conversation", "conversations"))
		if p.Plan.RequestRate > 0 {
			load = fmt.Sprintf("this workload (%s, %g requests/s)", p.Plan.Workload.Kind, p.Plan.RequestRate)
		}
	}
	return "Needed for the failure under " + load + ": what these settings do wrong together is for their code to say."
}

func total(trials []experiment.Trial) time.Duration {
	var ms int64
	for _, t := range trials {
		ms += t.LaunchMS + t.RunMS
	}
	return time.Duration(ms) * time.Millisecond
}

func headlineWord(s *term.Screen, word string, style term.Style, text string) {
	for i, line := range term.Wrap(text, s.Columns()-len(word)-2) {
		first := s.Paint(word, term.Bold, style)
		if i > 0 {
			first = strings.Repeat(" ", len(word))
		}
		s.Printf("%s  %s\n", first, line)
	}
}

func cause(s *term.Screen, c *experiment.Case, cause search.Cause) {
	rows := [][]string{{"needed", "where it fails", "safe"}}
	for _, f := range c.Space.Factors {
		if level, ok := cause.Set[f.Name]; ok {
			rows = append(rows, []string{f.Name, term.Safe(c.LevelText(f.Name, level)), term.Safe(c.LevelText(f.Name, f.Levels[f.Safe()].Name))})
		}
	}
	if len(rows) > 1 {
		s.Printf("\n%s", s.Table("lll", rows))
	}
	heading, with := "Confirmed both ways, on fresh launches", "these alone, all else safe"
	if len(cause.Set) == 0 {
		heading, with = "Confirmed, on fresh launches", "everything safe"
	}
	title(s, heading)
	rows = [][]string{{"arm", "launches", "broken", "rate", "95%"}}
	add := func(name string, e search.Evidence, style term.Style) {
		rows = append(rows, []string{
			name, fmt.Sprint(e.Launches), s.Paint(count(e.Failures)+"/"+count(e.Requests), style), percent(brokenShare(e)), bounds(e.Low, e.High),
		})
	}
	add(with, cause.With, term.Red)
	for _, w := range cause.Without {
		add("all as it fails, but "+w.Factor+" safe", w, term.Green)
	}
	s.Printf("%s", s.Table("lrrrr", rows))
	paragraph(s, "  ", "  ", s.Paint("95%: of what a launch does, however often one looks. Few launches say little of the next.", term.Faint))
}

func waysOut(s *term.Screen, r *experiment.Record) {
	heading := "Way out"
	if len(r.Result.WaysOut) > 1 {
		heading = "Way out: any one of these, the cheapest first"
	}
	title(s, heading)
	rows := [][]string{{"setting", "cost"}}
	for _, w := range r.Result.WaysOut {
		rows = append(rows, []string{term.Safe(r.Case.Setting(w.Factor, w.Level)), costText(w)})
	}
	s.Printf("%s", s.Table("ll", rows))
}

func costText(w experiment.WayOut) string {
	switch {
	case w.Cost != 0:
		return short(w.Cost) + " of what the server does, says the case"
	case w.Speed != 0:
		return fmt.Sprintf("%.0f%% of the failing arm's tokens/s, %s", 100*w.Speed, counted(w.Launches, "launch", "launches"))
	}
	return "not measured"
}

func levels(s *term.Screen, r *experiment.Record) {
	rows := [][]string{{"factor", "level", "broken", ""}}
	for _, l := range r.Result.Levels {
		rows = append(rows, []string{l.Factor, term.Safe(r.Case.LevelText(l.Factor, l.Level)), count(l.Evidence.Failures) + "/" + count(l.Evidence.Requests), fails(l.Fails)})
	}
	title(s, "Other levels of what is accused")
	s.Printf("%s", s.Table("llrl", rows))
}

func fails(of *bool) string {
	switch {
	case of == nil:
		return "undecided"
	case *of:
		return "fails too"
	}
	return "clean"
}

// unmetText says why a level was never there.
func unmetText(c *experiment.Case, u experiment.Unmet) string {
	return fmt.Sprintf("%s never took effect, so its arm is void and nothing is said of %s: %s", c.Setting(u.Factor, u.Level), u.Factor, u.Why)
}

// baseText says what the model gets wrong by itself; empty where it gets nothing
// wrong, or where nobody looked.
func baseText(r *experiment.Record) string {
	b := r.Base
	if b == nil || len(b.Classes) == 0 {
		return ""
	}
	var classes []string
	for _, c := range b.Classes {
		classes = append(classes, string(c))
	}
	text := fmt.Sprintf("Alone and with everything safe the model got %d of %d replies wrong by itself (%s). Replies that are wrong in no other way aren't counted as broken.",
		b.Broken, b.Replies, strings.Join(classes, ", "))
	if r.Result.Status == search.NotReproduced {
		text += " A fault that only makes more of these isn't seen: they count in a case without control_sessions."
	}
	return text
}

// uncounted says which trials were no evidence, and why.
func uncounted(s *term.Screen, r *experiment.Record) {
	first := true
	line := func(number, text string) {
		if first {
			title(s, "Not counted")
			first = false
		}
		paragraph(s, number, strings.Repeat(" ", len(number)), text)
	}
	if text := baseText(r); text != "" {
		line("  -  ", text)
	}
	for _, u := range r.Untested {
		line("  -  ", term.Safe(unmetText(r.Case, u)))
	}
	for i, t := range r.Trials {
		if !t.Observation.Outcome.Counts() {
			line(fmt.Sprintf("  %d  ", i+1), fmt.Sprintf("%s: %s", t.Observation.Outcome, term.Clip(term.Safe(firstLine(t.Note)), 240)))
		}
	}
}

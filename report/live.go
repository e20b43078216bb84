package report

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// Hunting shows a hunt as it goes: what it may cost, then a line for each
// trial under the question that it answers, and what is thought now.
type Hunting struct {
	screen *term.Screen
	c      *experiment.Case
	why    string // shown last
	arm    string
	belief string
	timed  bool // how long it may take has been said
	begun  bool
	cost   []search.Forecast
}

// NewHunting shows hunts of a case.
func NewHunting(s *term.Screen, c *experiment.Case) *Hunting { return &Hunting{screen: s, c: c} }

// Before says what is varied, and what it may cost. forecasts are by how often
// the failing arm may fail, the most frequent first.
func (h *Hunting) Before(o search.Options, forecasts []search.Forecast) {
	s := h.screen
	h.cost = forecasts
	paragraph(s, "", "", fmt.Sprintf("%s: %d settings may be needed for the failure", h.c.Path, len(h.c.Space.Factors)))
	rows := [][]string{{"factor", "where it fails", "safe"}}
	for _, f := range h.c.Space.Factors {
		rows = append(rows, []string{f.Name, h.level(f, f.Failing()), h.level(f, f.Safe())})
	}
	s.Printf("\n%s\n", s.Table("lll", rows))
	if len(forecasts) > 0 {
		rows := [][]string{{"if so many calls break", "launches", "requests"}}
		for _, f := range forecasts {
			rows = append(rows, []string{percent(f.Rate), span(f.Launches), span(f.Requests)})
		}
		s.Printf("It may take, by simulated hunts over as many settings:\n%s", s.Table("rrr", rows))
	}
	requests := func(rate float64) string { return count(int(math.Ceil(3 / rate))) } // with none broken of so many, the rate is below with 95%
	text := fmt.Sprintf("To see a failure of 1%% takes %s requests in an arm, one of 0.1%% %s. A trial has %s or more.",
		requests(0.01), requests(0.001), count(o.Batch))
	if b := limits(o.Budget); b != "" {
		text += " At most " + b + "."
	}
	paragraph(s, "", "", text)
}

func limits(b search.Budget) string {
	var parts []string
	if b.Launches > 0 {
		parts = append(parts, counted(b.Launches, "launch", "launches"))
	}
	if b.Requests > 0 {
		parts = append(parts, count(b.Requests)+" requests")
	}
	return strings.Join(parts, " and ")
}

func counted(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return count(n) + " " + many
}

func span(of [2]int) string { return count(of[0]) + " to " + count(of[1]) }

// count shows a number with its thousands set apart.
func count(n int) string {
	text := fmt.Sprint(n)
	for i := len(text) - 3; i > 0; i -= 3 {
		text = text[:i] + "," + text[i:]
	}
	return text
}

func (h *Hunting) level(f design.Factor, i int) string {
	return term.Clip(term.Safe(h.c.LevelText(f.Name, f.Levels[i].Name)), (h.screen.Columns()-20)/2)
}

// Preflight says which settings take no effect.
func (h *Hunting) Preflight(unmet []experiment.Unmet) {
	s := h.screen
	if len(unmet) == 0 {
		return
	}
	s.Printf("\n%s  everything safe, read back from the live server: does each setting take?\n", s.Paint("ATTEST", term.Bold))
	for _, u := range unmet {
		paragraph(s, "  "+s.Paint("void", term.Yellow)+"  ", "        ", term.Safe(unmetText(h.c, u)))
	}
}

// Unready says that the server doesn't start with everything safe.
func (h *Hunting) Unready(e *target.LaunchError) {
	s := h.screen
	s.Printf("\n%s  everything safe doesn't start: the trials show which setting that is\n", s.Paint("ATTEST", term.Bold))
	paragraph(s, "        ", "        ", term.Safe(e.Reason+"; see "+e.LogFile))
}

// Step shows a trial that begins, or what came of it.
func (h *Hunting) Step(step experiment.Step) {
	s, t := h.screen, step.Trial
	if step.Resumed && !h.begun {
		s.Printf("\nThe first trials are from an earlier start, and aren't run again.\n")
	}
	h.begun = true
	why := phaseWord(t.Proposal.Phase) + ": " + t.Proposal.Why
	if why != h.why {
		h.why, h.arm = why, ""
		word := s.Paint(strings.ToUpper(phaseWord(t.Proposal.Phase)), term.Bold)
		s.Printf("\n")
		for i, line := range term.Wrap(why, s.Columns()) {
			if rest, ok := strings.CutPrefix(line, phaseWord(t.Proposal.Phase)+": "); ok && i == 0 {
				line = word + "  " + rest
			}
			s.Printf("%s\n", line)
		}
	}
	if text := arm(h.c.Space, t.Proposal.Arm); text != h.arm {
		h.arm = text
		paragraph(s, "  ", "    ", text)
	}
	if !step.Ended {
		return
	}
	s.Printf("%s\n", h.result(step))
	if h.duration(step) {
		h.timed = true
	}
	if belief := leading(step.Progress); belief != h.belief && belief != "" {
		h.belief = belief
		paragraph(s, "        ", "          ", "thought now: "+belief)
	}
}

// Columns of a line for a trial.
const (
	barWidth = 20
	barFull  = 0.5 // the rate that fills the bar
)

// result is one line: what broke, how often in this arm so far, how long it took.
func (h *Hunting) result(step experiment.Step) string {
	s, t := h.screen, step.Trial
	o := t.Observation
	number := fmt.Sprintf("%4d  ", step.Number)
	if !o.Outcome.Counts() {
		return number + s.Paint(string(o.Outcome), term.Yellow) + ": " + term.Clip(term.Safe(firstLine(t.Note)), s.Columns()-len(number)-len(o.Outcome)-3)
	}
	style := term.Green
	if o.Failures > 0 {
		style = term.Red
	}
	launch := "same launch"
	if t.Proposal.Launch || o.Launched {
		launch = "new launch"
	}
	took := term.Duration(time.Duration(t.LaunchMS+t.RunMS) * time.Millisecond)
	if step.Resumed {
		took = "earlier"
	}
	if o.Outcome == search.Wedged {
		launch = "WEDGED"
	}
	rate := float64(o.Failures) / float64(max(o.Requests, 1))
	full := min(int(math.Ceil(rate/barFull*barWidth)), barWidth)
	bar := s.Paint(strings.Repeat("█", full), style) + s.Paint(strings.Repeat("·", barWidth-full), term.Faint)
	return fmt.Sprintf("%s%-11s %11s broken %6s  %s %8s", number, launch,
		fmt.Sprintf("%d/%d", o.Failures, o.Requests), percent(rate), bar, took)
}

// duration says, once something has been measured, how long the rest may take.
func (h *Hunting) duration(step experiment.Step) bool {
	t := step.Trial
	if h.timed || len(h.cost) == 0 || t.RunMS == 0 || t.LaunchMS == 0 || t.Observation.Requests == 0 {
		return h.timed
	}
	launch, request := time.Duration(t.LaunchMS)*time.Millisecond, time.Duration(t.RunMS)*time.Millisecond/time.Duration(t.Observation.Requests)
	rate := float64(t.Observation.Failures) / float64(t.Observation.Requests)
	f := h.cost[0]
	for _, c := range h.cost {
		if math.Abs(math.Log(c.Rate)-math.Log(max(rate, 1e-4))) < math.Abs(math.Log(f.Rate)-math.Log(max(rate, 1e-4))) {
			f = c
		}
	}
	of := func(i int) string {
		d := time.Duration(f.Launches[i])*launch + time.Duration(f.Requests[i])*request
		if d < 100*time.Second {
			return fmt.Sprintf("%.0f s", d.Seconds())
		}
		return fmt.Sprintf("%.0f min", d.Minutes())
	}
	paragraph(h.screen, "        ", "          ", fmt.Sprintf("a launch takes %s, %d requests %s: the hunt may take %s to %s",
		term.Duration(launch), t.Observation.Requests, term.Duration(time.Duration(t.RunMS)*time.Millisecond), of(0), of(1)))
	return true
}

// firstLine leaves out what follows, such as the end of a log.
func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return strings.TrimSuffix(line, " ends with:")
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
	case search.Beside:
	}
	return string(p)
}

// asItFails names the failing arm.
const asItFails = "everything as where it fails"

// ArmText names an arm in words.
func ArmText(space design.Space, a design.Arm) string { return term.Safe(arm(space, a)) }

// arm names what is safe in it, or what isn't where that is shorter. A factor
// that takes no effect isn't varied, so the arm doesn't have it.
func arm(space design.Space, a design.Arm) string {
	var suspect, safe []string
	for _, f := range space.Factors {
		switch level, varied := a[f.Name]; {
		case !varied:
		case level == f.Levels[f.Failing()].Name:
			suspect = append(suspect, f.Name)
		case level == f.Levels[f.Safe()].Name:
			safe = append(safe, f.Name)
		default:
			safe = append(safe, f.Name+"="+level)
		}
	}
	switch {
	case len(safe) == 0:
		return asItFails
	case len(suspect) == 0:
		return "everything safe"
	case len(safe) <= len(suspect):
		return "as where it fails, but safe: " + strings.Join(safe, ", ")
	default:
		return "all safe, but as where it fails: " + strings.Join(suspect, ", ")
	}
}

const (
	// shownBelief is the smallest probability that is worth a reader's time.
	shownBelief = 0.05
	// mostBeliefs are shown at once.
	mostBeliefs = 3
)

func leading(p search.Progress) string {
	var parts []string
	for _, b := range p.Leading {
		if b.Probability >= shownBelief && len(parts) < mostBeliefs {
			parts = append(parts, fmt.Sprintf("%s %.0f%%", setNames(b.Set), 100*b.Probability))
		}
	}
	if p.None >= shownBelief {
		parts = append(parts, fmt.Sprintf("none of these %.0f%%", 100*p.None))
	}
	return strings.Join(parts, ", ")
}

func setNames(set design.Arm) string {
	if len(set) == 0 {
		return "nothing that varies"
	}
	return strings.Join(slices.Sorted(maps.Keys(set)), " + ")
}

package oracle

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
)

func probeEvent(at time.Duration, values map[string]float64) history.Event {
	return history.Event{At: at, Kind: history.Probe, Name: "pack", Values: values}
}

// A count that rises only while ops break is told from one that rises always
// and from one that never does.
func TestProbeResults(t *testing.T) {
	p := play{
		oracles: []Oracle{told(ForeignCanary)},
		main: func(session, turn int) Class {
			if turn == 2 && session%4 == 0 {
				return ForeignCanary
			}
			return ""
		},
		events: []history.Event{probeEvent(0, map[string]float64{"load": 0, "steps": 1, "never_ran": 0, "must:load": 0})},
	}
	for turn := range playRounds {
		values := map[string]float64{"steps": float64(10 * (turn + 1)), "core_percent": 0.5}
		if turn == 2 {
			values["load"], values["must:load"] = 7, 7
		}
		p.events = append(p.events, probeEvent(time.Duration(turn)*time.Second+time.Second/2, values))
	}
	v := p.judge()
	got := map[string][4]int{}
	var associated []string
	for _, r := range v.Probes {
		got[r.Name] = [4]int{r.With.Failures, r.With.Trials, r.Without.Failures, r.Without.Trials}
		if r.Associated() {
			associated = append(associated, r.Name)
		}
	}
	want := map[string][4]int{"load": {20, 80, 0, 240}, "steps": {20, 320, 0, 0}, "never_ran": {0, 0, 20, 320}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"load"}, associated); diff != "" {
		t.Error(diff)
	}
	if v.Probes[0].Name != "load" || v.CorePercent != 0.5 {
		t.Errorf("first is %s, cost %g", v.Probes[0].Name, v.CorePercent)
	}
	for _, a := range v.Assumptions {
		if a.Name == thatPathsRan && (!a.Holds || a.Found != "load ran 7 times") {
			t.Errorf("got %+v", a)
		}
	}
}

func TestForbiddenPath(t *testing.T) {
	v := play{oracles: []Oracle{Path, told(ForeignCanary)}, main: nothing, events: []history.Event{
		probeEvent(0, map[string]float64{"never:bad": 0, "never:other": 0}), probeEvent(time.Second, map[string]float64{"never:bad": 2}),
	}}.judge()
	if v.Status != Corrupt || !strings.Contains(strings.Join(v.Reasons, " "), "ForbiddenPath") {
		t.Errorf("got %s: %v", v.Status, v.Reasons)
	}
}

// A history may hold any number of names and values.
func TestManyCounts(t *testing.T) {
	var c counts
	for i := range 3 * maxCounts {
		c.event(&history.Event{Kind: history.Probe, Values: map[string]float64{strings.Repeat("x", i%1000+1): 1, "a": float64(i)}})
	}
	if len(c.names) > maxCounts || c.points > maxSamples {
		t.Errorf("%d names, %d values", len(c.names), c.points)
	}
}

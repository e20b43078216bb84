package experiment

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/stats"
)

const smallCase = `
target:
  processes: [{command: [server, "{{graph}}", "--dtype={{dtype}}", "--steps={{steps}}", "{{tier}}"]}]
  base_url: http://127.0.0.1:1
factors:
  graph: {suspect: [], safe: [--no-graph], note: captured decode}
  dtype: {suspect: bf16, safe: fp8, cost: 0.3}
  steps: {suspect: 8, safe: 1, levels: [1, 2, 4, 8]}
  tier:  {suspect: [--tier, "host"], safe: null}
workload: {kind: agent, sessions: 8}
`

func TestLevelsInWords(t *testing.T) {
	c, err := ParseCase("case.yaml", []byte(smallCase))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ factor, level, want string }{
		{"graph", "suspect", "no --no-graph"},
		{"graph", "safe", "--no-graph"},
		{"tier", "suspect", "--tier host"},
		{"tier", "safe", "no --tier host"},
		{"dtype", "bf16", "dtype=bf16"},
		{"steps", "4", "steps=4"},
	} {
		if got := c.Setting(tt.factor, tt.level); got != tt.want {
			t.Errorf("%s=%s is shown as %q, want %q", tt.factor, tt.level, got, tt.want)
		}
	}
	if want := (map[string]FactorNote{"graph": {Note: "captured decode"}, "dtype": {Cost: 0.3}}); !cmp.Equal(want, c.Notes) {
		t.Error(cmp.Diff(want, c.Notes))
	}
}

func TestConclude(t *testing.T) {
	c, err := ParseCase("case.yaml", []byte(smallCase))
	if err != nil {
		t.Fatal(err)
	}
	trial := func(launch bool, failures int, speed float64, changes ...string) Trial {
		arm := c.Space.Failing()
		for i := 0; i < len(changes); i += 2 {
			arm[changes[i]] = changes[i+1]
		}
		return Trial{
			Proposal:    search.Proposal{Arm: arm, Launch: launch},
			Observation: &search.Observation{Outcome: search.Ran, Requests: 100, Failures: failures}, TokensPerS: speed,
		}
	}
	void := trial(true, 100, 50)
	void.Observation.Outcome = search.Void
	trials := []Trial{
		trial(true, 20, 100),
		trial(false, 10, 100),               // the same launch
		trial(true, 15, 0, "steps", "4"),    // at the cause's own level
		trial(true, 0, 0, "steps", "2"),     // below it
		trial(true, 0, 50, "graph", "safe"), // half as fast
		trial(false, 1, 50, "graph", "safe"),
		trial(true, 0, 90, "steps", "1"),
		void,
	}
	r := Result{Finding: search.Finding{Status: search.Found, Causes: []search.Cause{{Set: design.Arm{"graph": "suspect", "steps": "4", "dtype": "bf16"}}}}}
	r.conclude(c, c.Space, stats.Dispersed(), trials)
	with, without := r.Contrast.With, r.Contrast.Without
	if with.Launches != 2 || with.Requests != 300 || with.Failures != 45 || with.Low <= 0 || with.High >= 1 {
		t.Errorf("with the cause: %+v", with)
	}
	if without.Launches != 3 || without.Requests != 400 || without.Failures != 1 {
		t.Errorf("without it: %+v", without)
	}
	want := []WayOut{
		{Factor: "steps", Level: "1", Speed: 0.9, Launches: 1},
		{Factor: "dtype", Level: "fp8", Cost: 0.3},
		{Factor: "graph", Level: "safe", Speed: 0.5, Launches: 1},
	}
	if diff := cmp.Diff(want, r.WaysOut); diff != "" {
		t.Error(diff)
	}

	// Where it fails with everything safe too, that arm is beside the failing one.
	safe := trial(true, 9, 0)
	safe.Proposal.Arm = c.Space.Safe()
	none := Result{Finding: search.Finding{Status: search.NoneOfThese, Causes: []search.Cause{{}}}}
	none.conclude(c, c.Space, stats.Dispersed(), append(trials, safe))
	if with, without := none.Contrast.With, none.Contrast.Without; with.Failures != 30 || with.Requests != 200 || without.Failures != 9 || without.Requests != 100 {
		t.Errorf("the failing arm: %+v, everything safe: %+v", with, without)
	}
	if none.WaysOut != nil {
		t.Errorf("ways out of what no setting causes: %+v", none.WaysOut)
	}
}

func TestContainsFollowsTheOrder(t *testing.T) {
	space := design.Space{Factors: []design.Factor{
		{Name: "n", Ordered: true, Levels: []design.Level{{Name: "80", Role: design.Suspect}, {Name: "8"}, {Name: "1", Role: design.Safe}}},
		{Name: "f", Levels: []design.Level{{Name: "on", Role: design.Suspect}, {Name: "off", Role: design.Safe}, {Name: "other"}}},
	}}
	for _, tt := range []struct {
		arm, set design.Arm
		want     bool
	}{
		{design.Arm{"n": "80", "f": "on"}, design.Arm{"n": "8"}, true},
		{design.Arm{"n": "8", "f": "on"}, design.Arm{"n": "8"}, true},
		{design.Arm{"n": "1", "f": "on"}, design.Arm{"n": "8"}, false},
		{design.Arm{"n": "8", "f": "on"}, design.Arm{"n": "80"}, false},
		{design.Arm{"n": "80", "f": "other"}, design.Arm{"f": "on"}, false},
		{design.Arm{"n": "80", "f": "off"}, design.Arm{}, true},
	} {
		if got := contains(space, tt.arm, tt.set); got != tt.want {
			t.Errorf("%s contains %s: %t", tt.arm, tt.set, got)
		}
	}
}

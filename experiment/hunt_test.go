package experiment

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// Where the server stopping is what is hunted, a launch fails once, in the
// request after those that it answered; one that is only slow goes on.
func TestStuck(t *testing.T) {
	verdict := func(class oracle.Class, convicts bool) *oracle.Verdict {
		return &oracle.Verdict{
			Classes: []oracle.ClassResult{{Class: class, Means: oracle.Wedged, Convicts: convicts}},
			Phases: []oracle.PhaseResult{
				{Phase: history.Main, Outcomes: map[history.Outcome]int{history.OK: 3, history.Cancelled: 1, history.TimedOut: 4}},
				{Phase: history.Recovery, Outcomes: map[history.Outcome]int{history.OK: 7}},
			},
		}
	}
	for _, tt := range []struct {
		name     string
		class    oracle.Class
		convicts bool
		want     search.Observation
	}{
		{"stopped", oracle.NoTokens, true, search.Observation{Outcome: search.Wedged, Requests: 5, Failures: 1, FirstFailure: 5, Poisoned: true}},
		{"healthy by its word", oracle.HealthLies, true, search.Observation{Outcome: search.Wedged, Requests: 5, Failures: 1, FirstFailure: 5, Poisoned: true}},
		{"slow", oracle.Stalled, true, search.Observation{Outcome: search.Ran, Requests: 4}},
		{"sound", oracle.NoTokens, false, search.Observation{Outcome: search.Ran, Requests: 4}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			v := verdict(tt.class, tt.convicts)
			var o search.Observation
			o.Outcome = search.Ran
			observe(v, 0, &o)
			if !tt.convicts {
				o.Outcome = search.Ran // that nothing was judged is another matter
			}
			stuck(v, &o)
			if diff := cmp.Diff(tt.want, o); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A server that doesn't start with everything safe is told, and the hunt goes on.
func TestLookAtSafeUnready(t *testing.T) {
	c, err := ParseCase("case.yaml", []byte(`target:
  processes: [{name: server, command: [sh, -c, "exit $0", "{{code}}"]}]
  base_url: http://127.0.0.1:1
  ready: {url: /health, timeout: 20s}
factors:
  code: {suspect: 0, safe: 3}
workload: {kind: agent}
`))
	if err != nil {
		t.Fatal(err)
	}
	var heard *target.LaunchError
	h := &hunt{HuntOptions: HuntOptions{Dir: t.TempDir(), Case: c, Launcher: &target.Launcher{}, Unready: func(e *target.LaunchError) { heard = e }}, space: c.Space}
	if unmet, err := h.lookAtSafe(t.Context()); err != nil || unmet != nil {
		t.Fatalf("got %v, %v", unmet, err)
	}
	if heard == nil || heard.Code != 3 {
		t.Errorf("heard %v", heard)
	}
}

package experiment

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/amplify"
	"github.com/culprit-project/culprit/workload"
)

const amplifyCase = `# A case.
target:
  processes:
    - {name: lab, command: [serve, "{{graph}}"]}
  base_url: http://127.0.0.1:1
factors:
  graph: {suspect: [], safe: [--eager]}
  concurrency: {suspect: 8, safe: 1}
workload: # what is sent
  kind: evict
  rounds: 3
  fillers: 2
  seed: 7
# The server is slow.
load: {timeout: 20m, control_sessions: 2}
budget: {launches: 9}
`

func parseAmplifyCase(t *testing.T) *Case {
	t.Helper()
	c, err := ParseCase("case.yaml", []byte(amplifyCase))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestOverride: another load takes the place of a case's own, in its file too;
// of another kind, with nothing left of the old one's knobs.
func TestOverride(t *testing.T) {
	for _, tt := range []struct {
		name     string
		settings map[string]any
		want     workload.Plan
	}{
		{"the same kind", map[string]any{"rounds": 5, "concurrency": 8}, workload.Plan{Kind: "evict", Rounds: 5, Fillers: 2, Seed: 7, Sessions: defaultSessions}},
		{"another", map[string]any{"kind": "agent", "cancel_every": 2, "waves": true}, workload.Plan{Kind: "agent", CancelEvery: 2, Seed: 7, Sessions: defaultSessions}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := parseAmplifyCase(t)
			if err := c.Override(tt.settings); err != nil {
				t.Fatal(err)
			}
			want, err := tt.want.WithDefaults()
			if err != nil {
				t.Fatal(err)
			}
			again, err := ParseCase("case.yaml", c.document)
			if err != nil {
				t.Fatalf("%v in\n%s", err, c.document)
			}
			for what, c := range map[string]*Case{"the case": c, "its file": again} {
				arm, err := c.Render(c.Space.Failing())
				if err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(want, arm.Plan.Workload); diff != "" {
					t.Errorf("%s (-want +got):\n%s", what, diff)
				}
				if arm.Plan.TimeoutMS != 20*60_000 || arm.Plan.Concurrency != 8 || arm.Plan.Waves != (tt.settings["waves"] != nil) || c.Budget.Launches != 9 {
					t.Errorf("%s: %+v", what, arm.Plan)
				}
			}
			if text := string(c.document); !strings.HasPrefix(text, "# A case.\n") || !strings.Contains(text, "# The server is slow.\n") || strings.Contains(text, "what is sent") {
				t.Errorf("the file is now\n%s", text)
			}
		})
	}
	if err := parseAmplifyCase(t).Override(map[string]any{"concurrency": 16}); err == nil || !strings.Contains(err.Error(), "concurrency is a factor") {
		t.Errorf("error %v", err)
	}
}

// TestWithLoad: a shape takes the place of the case's load, and its factors
// stay what they are.
func TestWithLoad(t *testing.T) {
	c := parseAmplifyCase(t)
	o, err := c.AmplifySearch()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"concurrency"}, o.Fixed); diff != "" || o.NoSafe || o.NoLaunch || o.Seed != 7 || o.Base.Concurrency != 8 {
		t.Errorf("%+v %s", o, diff)
	}
	for _, m := range amplify.Moves() {
		s, ok := m.Apply(o.Base)
		if !ok {
			continue
		}
		if s.Workload, err = s.Workload.WithDefaults(); err != nil {
			continue
		}
		for arm, concurrency := range map[string]int{"failing": 8, "safe": 1} {
			level := c.Space.Failing()
			if arm == "safe" {
				level = c.Space.Safe()
			}
			got, err := c.withLoad(s, 20).Render(level)
			if err != nil {
				t.Errorf("%s: %v", m.Name, err)
				continue
			}
			want := s.Workload
			want.Sessions, want.RunKey = 20, got.Plan.Workload.RunKey
			if diff := cmp.Diff(want, got.Plan.Workload); diff != "" {
				t.Errorf("%s, %s (-want +got):\n%s", m.Name, arm, diff)
			}
			if got.Plan.Concurrency != concurrency || got.Plan.Waves != s.Waves || got.Plan.TimeoutMS != 20*60_000 {
				t.Errorf("%s, %s: %+v", m.Name, arm, got.Plan)
			}
		}
	}
}

package report

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

var update = flag.Bool("update", false, "write the golden files anew")

const smallCase = `
target:
  processes: [{command: [server, "{{graph}}", "--dtype={{dtype}}", "{{cache}}"]}]
  base_url: http://127.0.0.1:1
factors:
  graph: {suspect: [], safe: [--no-graph], note: captured decode}
  dtype: {suspect: bf16, safe: fp8}
  cache: {suspect: [--cache], safe: []}
  dead:  {suspect: a, safe: b}
workload: {kind: agent, sessions: 8}
`

// found is a hunt that came to a finding.
func found(t *testing.T) *experiment.Record {
	c, err := experiment.ParseCase("case.yaml", []byte(strings.Replace(smallCase, "{{cache}}", "{{cache}}\", \"{{dead}}", 1)))
	if err != nil {
		t.Fatal(err)
	}
	set := design.Arm{"graph": "suspect", "dtype": "bf16"}
	return &experiment.Record{
		Dir: "hunt", Case: c,
		Untested: []experiment.Unmet{{Factor: "dead", Level: "b", Why: "it isn't read"}},
		Trials: []experiment.Trial{{
			Dir: "runs/0001", RunMS: 1500, LaunchMS: 500,
			Proposal:    search.Proposal{Arm: design.Arm{"graph": "suspect", "dtype": "bf16", "cache": "safe"}, Launch: true, Phase: search.Confirm, Why: "only these"},
			Observation: &search.Observation{Outcome: search.Ran, Requests: 160, Failures: 30},
		}, {
			Dir: "runs/0002", Note: "the server changed\nduring the run\x1b[31m",
			Observation: &search.Observation{Outcome: search.Void},
		}},
		Result: &experiment.Result{
			Finding: search.Finding{
				Status: search.Found, Error: 0.01, Launches: 12, Requests: 4321,
				Causes: []search.Cause{{
					Set: set, With: search.Evidence{Launches: 2, Requests: 160, Failures: 30, Low: 0.02, High: 0.7},
					Without: []search.Evidence{{Factor: "graph", Launches: 3, Requests: 640, High: 0.6}, {Factor: "dtype", Launches: 3, Requests: 640, High: 0.6}},
				}},
			},
			Contrast: &experiment.Contrast{
				With:    search.Evidence{Launches: 9, Requests: 1440, Failures: 256, Low: 0.14, High: 0.22},
				Without: search.Evidence{Launches: 8, Requests: 2240, High: 0.004},
			},
			WaysOut: []experiment.WayOut{{Factor: "graph", Level: "safe", Speed: 0.91, Launches: 3}, {Factor: "dtype", Level: "fp8", Cost: 0.2}},
		},
	}
}

func TestSentence(t *testing.T) {
	r := found(t)
	want := "captured decode and dtype=bf16 are needed together. With all two 17.8% [14, 22] of calls broke (256 of 1,440, in 9 launches); " +
		"without any one of them 0 of 2,240, in 8 launches. Wrong with probability under 1%."
	if diff := cmp.Diff(strings.Replace(want, "all two", "both", 1), Sentence(r)); diff != "" {
		t.Error(diff)
	}
	r.Result.Causes[0].Skipped = map[string][]string{"dtype": {"fp16", "tf32"}}
	if got := Sentence(r); !strings.Contains(got, "It may begin before bf16 already: dtype fp16, tf32 couldn't be run.") {
		t.Errorf("levels that were skipped: %q", got)
	}
	r.Result.Wedge = true
	if got := Sentence(r); !strings.Contains(got, "With both the server stopped answering in 256 of 9 launches; without any one of them in 0 of 8 launches, through 2,240 requests.") {
		t.Errorf("a wedge: %q", got)
	}
	r.Result.Unreached = []design.Arm{{"graph": "suspect", "dtype": "bf16", "cache": "safe", "dead": "a"}}
	if got := Sentence(r); !strings.Contains(got, "is forbidden: as where it fails, but safe: cache; another arm stood in.") {
		t.Errorf("an arm that couldn't be run: %q", got)
	}
	r.Result.Status = search.NoneOfThese
	if got := Sentence(r); !strings.Contains(got, "With everything safe 0% ") || !strings.Contains(got, "; as where it fails 17.8% [14, 22] of calls broke (256 of 1,440, in 9 launches).") {
		t.Errorf("none of these: %q", got)
	}
	r.Result.Status, r.Result.Reason, r.Result.Text = search.Undecided, search.OutOfBudget, "the budget of 3 launches is used up"
	if got := Sentence(r); got != "budget: the budget of 3 launches is used up." {
		t.Errorf("undecided is told as %q", got)
	}
}

// TestHuntOnTheTerminal keeps the whole of it in a file, to be read by people:
// go test ./report -update after a change that is meant.
func TestHuntOnTheTerminal(t *testing.T) {
	var out strings.Builder
	s := term.NewScreen(&out)
	r := found(t)
	live := NewHunting(s, r.Case)
	live.Before(search.Options{Batch: 8, Budget: search.Budget{Launches: 40}}, []search.Forecast{{Rate: 0.2, Launches: [2]int{10, 20}, Requests: [2]int{900, 3000}}})
	live.Preflight(r.Untested)
	live.Unready(&target.LaunchError{Process: "server", Reason: "the process ended with exit code 1 before http://127.0.0.1:30000/health_generate answered", LogFile: "/case/logs/preflight/server.log"})
	step := experiment.Step{Number: 1, Trial: r.Trials[0]}
	live.Step(step)
	step.Ended = true
	step.Progress = search.Progress{Leading: []search.Belief{{Set: r.Result.Causes[0].Set, Probability: 0.91}, {Probability: 0.01}}, None: 0.06}
	live.Step(step)
	live.Step(experiment.Step{Number: 2, Ended: true, Trial: r.Trials[1]})
	Hunt(s, r, []Command{{"the server", "server --dtype=bf16 " + strings.Repeat("--long ", 20)}})
	golden(t, "hunt.txt", out.String())
	for line := range strings.Lines(out.String()) {
		if len([]rune(line)) > 81 && !strings.Contains(line, "--long") {
			t.Errorf("wider than 80 columns: %s", line)
		}
	}
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", path, diff)
	}
}

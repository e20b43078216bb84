package experiment

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/search"
)

const evidenceCase = `
target:
  processes: [{name: decode, command: [python3, "{{graph}}"]}]
  base_url: http://127.0.0.1:1
  logs: {wedge: stuck}
probes: {packs: [sglang]}
factors:
  graph: {suspect: captured, safe: eager, attest: 'server_info.graph == level'}
  concurrency: {suspect: 8, safe: 1}
workload: {sessions: 8}
`

func evidenceSubject(t *testing.T) *Case {
	t.Helper()
	c, err := ParseCase(filepath.Join(t.TempDir(), CaseFile), []byte(evidenceCase))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestSubject(t *testing.T) {
	s := evidenceSubject(t).Subject()
	for _, tt := range []struct{ text, wrong string }{
		{"probe(copies, branch=token_granular) > 0", ""},
		{"probe(copeis) > 0", `nearest: "copies"`},
		{"logs(wedge) > 0", ""},
		{"logs(wdge) > 0", `nearest: "wedge"`},
		{"attest(decode, env.X) == 1", ""},
		{"attest(decod, env.X) == 1", `nearest: "decode"`},
	} {
		_, err := hypothesis.Parse(tt.text, s)
		if tt.wrong == "" && err != nil || tt.wrong != "" && (err == nil || !strings.Contains(err.Error(), tt.wrong)) {
			t.Errorf("%s: %v, want %q", tt.text, err, tt.wrong)
		}
	}
}

// Trials of one launch are one launch, void ones say why, and those of other
// factors aren't evidence.
func TestTrials(t *testing.T) {
	c := evidenceSubject(t)
	base := filepath.Dir(c.Path)
	write := func(dir string, trial Trial) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(base, RunsDir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := WriteJSON(filepath.Join(base, RunsDir, dir, TrialFile), trial); err != nil {
			t.Fatal(err)
		}
	}
	trial := func(launch bool, o search.Observation, note string, arm design.Arm) Trial {
		return Trial{Space: c.Space.Fingerprint(), Proposal: search.Proposal{Arm: arm, Launch: launch}, Observation: &o, Note: note}
	}
	write("0001", trial(true, search.Observation{Outcome: search.Ran, Requests: 8, Failures: 2}, "", design.Arm{"graph": "captured"}))
	write("0002", trial(false, search.Observation{Outcome: search.Ran, Requests: 8}, "", design.Arm{"graph": "captured", "concurrency": "1"}))
	write("0003", trial(true, search.Observation{Outcome: search.NotExercised}, "it was another", design.Arm{"graph": "eager"}))
	other := trial(true, search.Observation{Outcome: search.Ran, Requests: 8}, "", design.Arm{"graph": "eager"})
	other.Space = "another"
	write("0004", other)
	if err := os.MkdirAll(filepath.Join(base, RunsDir, "0005"), 0o755); err != nil { // cut short
		t.Fatal(err)
	}
	list, err := c.Trials(base, RunsDir)
	if err != nil {
		t.Fatal(err)
	}
	var got []hypothesis.Observation
	for _, e := range list {
		got = append(got, e.Observation)
	}
	want := []hypothesis.Observation{
		{Arm: design.Arm{"graph": "captured", "concurrency": "8"}, Launch: "runs/0001", Requests: 8, Failures: 2},
		{Arm: design.Arm{"graph": "captured", "concurrency": "1"}, Launch: "runs/0001", Requests: 8},
		{Arm: design.Arm{"graph": "eager", "concurrency": "8"}, Launch: "runs/0003", Void: "it was another"},
	}
	ignore := cmp.FilterPath(func(p cmp.Path) bool { return p.String() == "Attest" }, cmp.Ignore())
	if d := cmp.Diff(want, got, ignore); d != "" {
		t.Errorf("trials (-want +got):\n%s", d)
	}
}

// What a run that no hunt made was taken under is read from itself.
func TestStray(t *testing.T) {
	c := evidenceSubject(t)
	path := filepath.Join(t.TempDir(), "live.json")
	attestation := map[string]any{"format": 1, "endpoints": []any{map[string]any{"path": "/server_info", "body": map[string]any{"graph": "eager"}}}}
	b, err := json.Marshal(attestation)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o644); err != nil {
		t.Fatal(err)
	}
	e, err := c.Stray(path)
	if err != nil {
		t.Fatal(err)
	}
	if e.Kind != "attestation" || e.Live["graph"] != "eager" || e.Arm != nil || e.Attestation == nil {
		t.Errorf("%+v; want an eager server, and the attestation itself", e)
	}
	if _, err := c.Stray(filepath.Join(t.TempDir(), "nothing")); err == nil {
		t.Error("a file that isn't there is evidence")
	}
}

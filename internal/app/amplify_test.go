package app

import (
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/amplify"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/workload"
)

// TestLoadFile: the file says everything about a load, by the names of flags.
func TestLoadFile(t *testing.T) {
	plan, err := workload.Plan{Kind: "evict", Rounds: 2, Fillers: 1, FillerLines: 40, CancelEvery: 3, TopLogprobs: 5, Seed: 7}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	p := experiment.Plan{
		TimeoutMS: 20 * 60_000, ExtraBody: map[string]json.RawMessage{"chat_template_kwargs": json.RawMessage(`{"note":"it's"}`)},
		Workload: workload.Plan{Sessions: 80},
	}
	want := `concurrency: 16
context_lines: 48
extra_body: '{"chat_template_kwargs":{"note":"it''s"}}'
logprobs: 5
max_tokens: 32
rounds: 2
sessions: 80
timeout: 20m0s
waves: true
workload: evict
set: {cancel_chunks: 16, cancel_every: 3, cancel_within_ms: 40, filler_lines: 40, fillers: 1}
`
	if diff := cmp.Diff(want, loadFile(amplify.Shape{Workload: plan, Concurrency: 16, Waves: true}, p)); diff != "" {
		t.Error(diff)
	}
}

// TestRunLine: the command sends what the plan sends.
func TestRunLine(t *testing.T) {
	w, err := workload.Plan{Kind: "evict", Sessions: 16, Fillers: 1, CancelEvery: 3, CancelChunks: 4, Seed: 7}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	got := runLine(experiment.Plan{BaseURL: "http://a:1", Workload: w, Concurrency: 16, Waves: true})
	want := "culprit run --base-url http://a:1 --workload evict --seed 7 --sessions 16 --rounds 2 --context-lines 48 --max-tokens 32 --concurrency 16 --waves" +
		" --set cancel_chunks=4 --set cancel_every=3 --set cancel_within_ms=40 --set fillers=1"
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

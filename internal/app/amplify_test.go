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

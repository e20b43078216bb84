package app

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/amplify"
	"github.com/culprit-project/culprit/workload"
)

// TestLoadFile: the file says everything about a load, by the names of flags.
func TestLoadFile(t *testing.T) {
	plan, err := workload.Plan{Kind: "evict", Rounds: 2, Fillers: 1, FillerLines: 40, CancelEvery: 3, TopLogprobs: 5, Seed: 7}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	want := `concurrency: 16
context_lines: 48
logprobs: 5
max_tokens: 32
rounds: 2
sessions: 16
waves: true
workload: evict
set: {cancel_chunks: 16, cancel_every: 3, cancel_within_ms: 40, filler_lines: 40, fillers: 1}
`
	if diff := cmp.Diff(want, loadFile(amplify.Shape{Workload: plan, Concurrency: 16, Waves: true}, 16)); diff != "" {
		t.Error(diff)
	}
}

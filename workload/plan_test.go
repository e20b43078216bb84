package workload

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestPlanErrors(t *testing.T) {
	for _, test := range []struct {
		name string
		plan Plan
		want []string
	}{
		{"no kind", Plan{}, []string{"no kind given", "agent, recall, echo, burst, evict, churn, mixed"}},
		{"misspelt kind", Plan{Kind: "agnet"}, []string{`unknown kind "agnet"`, `did you mean "agent"`}},
		{"another misspelt kind", Plan{Kind: "Evicted"}, []string{`did you mean "evict"`}},
		{"newer plan", Plan{Kind: "agent", Version: Version + 1}, []string{"is of workload version 2", "can't send the same bytes"}},
		{"run key", Plan{Kind: "agent", RunKey: "secret"}, []string{"run_key", "hex"}},
		{"short run key", Plan{Kind: "agent", RunKey: "abcd"}, []string{"run_key", "8 bytes"}},
		{"negative sessions", Plan{Kind: "agent", Sessions: -1}, []string{"sessions is -1"}},
		{"one line", Plan{Kind: "agent", ContextLines: 1}, []string{"context_lines is 1, not within 2 and"}},
		{"foreign knob", Plan{Kind: "agent", CopyLines: 3}, []string{"kind agent has no copy_lines"}},
		{"lines of no filler", Plan{Kind: "agent", FillerLines: 3}, []string{"kind agent has no filler_lines"}},
		{"cancels of churn", Plan{Kind: "churn", CancelEvery: 3}, []string{"kind churn has no cancel_every"}},
		{"foreign choice", Plan{Kind: "echo", OnError: Repair}, []string{"kind echo has no on_error"}},
		{"choice", Plan{Kind: "agent", OnError: "retry"}, []string{`on_error is "retry"`, "continue, repair, stop"}},
		{"logprobs", Plan{Kind: "agent", TopLogprobs: 21}, []string{"top_logprobs is 21"}},
		{"two things", Plan{Kind: "echo", Tools: Text, Rounds: -3}, []string{"rounds is -3", "no tools"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := New(test.plan)
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q doesn't say %q", err, want)
				}
			}
		})
	}
}

// TestPlanFile: a plan with its defaults survives the way through a file, and
// the file is read strictly.
func TestPlanFile(t *testing.T) {
	for _, kind := range Kinds() {
		plan, err := Plan{Kind: kind, Seed: 1<<64 - 1}.WithDefaults()
		if err != nil {
			t.Fatal(err)
		}
		file, err := json.Marshal(plan)
		if err != nil {
			t.Fatal(err)
		}
		var read Plan
		if err := json.Unmarshal(file, &read); err != nil {
			t.Fatal(err)
		}
		again, err := read.WithDefaults()
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(plan, again); diff != "" {
			t.Errorf("%s changed on its way through a file: %s", kind, diff)
		}
	}
	for text, want := range map[string]string{
		`{"kind":"agent","session":4}`: `unknown key "session"; nearest known key: "sessions"`,
		`{"kind":7}`:                   "kind",
		`{"seed":-1}`:                  "seed",
	} {
		var p Plan
		if err := json.Unmarshal([]byte(text), &p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: error %v, want one that says %q", text, err, want)
		}
	}
}

// TestCopyBudget: a longer list gets more tokens, unless the plan says how
// many.
func TestCopyBudget(t *testing.T) {
	for _, test := range []struct {
		plan Plan
		want int
	}{
		{Plan{Kind: "echo"}, 64 + 16*40},
		{Plan{Kind: "echo", CopyLines: 100}, 64 + 16*100},
		{Plan{Kind: "echo", CopyLines: 100, MaxTokens: 500}, 500},
		{Plan{Kind: "mixed"}, 64 + 16*8},
		{Plan{Kind: "agent"}, 128},
	} {
		got, err := test.plan.WithDefaults()
		if err != nil || got.MaxTokens != test.want {
			t.Errorf("%+v: %d tokens, want %d (%v)", test.plan, got.MaxTokens, test.want, err)
		}
	}
}

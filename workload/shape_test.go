package workload

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/history"
)

// TestShaped: fillers and cancels come between the turns of any kind, and
// change nothing about these.
func TestShaped(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plan := Plan{Kind: rapid.SampledFrom(Kinds()).Draw(t, "kind"), Seed: rapid.Uint64().Draw(t, "seed"), Rounds: rapid.IntRange(1, 4).Draw(t, "rounds")}
		session := rapid.IntRange(0, 9).Draw(t, "session")
		want := play(mustNew(t, plan).Session(session, false), RightReply)

		plan.Fillers, plan.FillerLines = rapid.IntRange(0, 2).Draw(t, "fillers"), 4
		ownFillers, ownCancels := plan.Kind == "evict", plan.Kind == "churn"
		if ownFillers || plan.Fillers == 0 {
			plan.Fillers, plan.FillerLines = 0, 0
		}
		if !ownCancels {
			plan.CancelEvery = rapid.IntRange(0, 3).Draw(t, "cancel every")
		}
		w := mustNew(t, plan)
		all := play(w.Session(session, false), RightReply)
		if n := Turns(w, session); n != len(all) {
			t.Fatalf("%d turns, said %d", len(all), n)
		}
		var own []Turn
		cancelled, fillers := 0, 0
		for i, turn := range all {
			switch {
			case !ownCancels && (turn.CancelAfter > 0 || turn.CancelChunks > 0):
				cancelled++
				if diff := cmp.Diff(all[i+1].Request, turn.Request); diff != "" {
					t.Fatalf("another request is hung up on than the one that follows: %s", diff)
				}
			case !ownFillers && turn.Request.MaxTokens == 1:
				fillers++
			default:
				own = append(own, turn)
				continue
			}
			if diff := cmp.Diff(history.Expect{Canary: turn.Expect.Canary}, turn.Expect); diff != "" || turn.Expect.Canary == "" {
				t.Fatalf("it expects something: %s", diff)
			}
		}
		if diff := cmp.Diff(want, own); diff != "" {
			t.Fatalf("the turns of %s changed: %s", plan.Kind, diff)
		}
		if most := plan.Fillers * (len(own) - 1); fillers != most {
			t.Fatalf("%d fillers, want %d", fillers, most)
		}
		if plan.CancelEvery > 0 && (cancelled < len(own)/plan.CancelEvery || cancelled > len(own)/plan.CancelEvery+1) {
			t.Fatalf("%d of %d turns are hung up on, want each %d", cancelled, len(own), plan.CancelEvery)
		}
	})
}

// TestShortEvery: some sessions are short, and no less right.
func TestShortEvery(t *testing.T) {
	size := func(w Workload, i int) (n int) {
		turn, _ := w.Session(i, false).Next(nil)
		for _, m := range turn.Request.Messages {
			n += len(m.Content)
		}
		return n
	}
	for _, kind := range []string{"agent", "echo", "evict", "burst", "churn"} {
		w := mustNew(t, Plan{Kind: kind, ShortEvery: 3})
		var short []int
		for i := range 9 {
			if size(w, i) < size(mustNew(t, Plan{Kind: kind}), i)/2 {
				short = append(short, i)
			}
		}
		if !slices.Equal(short, []int{2, 5, 8}) {
			t.Errorf("%s: sessions %v are short", kind, short)
		}
		play(w.Session(2, false), RightReply)
	}
}

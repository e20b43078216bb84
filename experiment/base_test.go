package experiment

import (
	"testing"

	"github.com/culprit-project/culprit/oracle"
)

// What the model shows by itself doesn't count, but a reply that is also broken
// in another way does.
func TestBaseFailures(t *testing.T) {
	v := &oracle.Verdict{
		Broken: oracle.ClassResult{Main: oracle.Rate{Failures: 4, Trials: 10}, Ops: []int64{1, 2, 3, 4}},
		Classes: []oracle.ClassResult{
			{Class: oracle.WrongArgument, Means: oracle.Corrupt, Source: oracle.Model, Ops: []int64{1, 2, 3}},
			{Class: oracle.SpecialToken, Means: oracle.Corrupt, Source: oracle.Model, Ops: []int64{3, 4, 9}}, // 9 isn't of a session
			{Class: oracle.GreedyDiffers, Means: oracle.Numerics, Ops: []int64{2}},
		},
	}
	for want, b := range map[int]*Base{4: nil, 2: {Classes: []oracle.Class{oracle.WrongArgument}}, 3: {Classes: []oracle.Class{oracle.SpecialToken}}, 0: {Classes: []oracle.Class{oracle.WrongArgument, oracle.SpecialToken}}} {
		if got := b.failures(v); got != want {
			t.Errorf("with the base %+v there are %d failures, want %d", b, got, want)
		}
	}
	if got := (&Base{}).failures(v); got != 4 {
		t.Errorf("with a model that errs in no way of its own there are %d failures, want 4", got)
	}
}

package experiment

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/stats"
)

// Requests are matched by session and turn; what wasn't judged on both sides
// makes no pair.
func TestPairs(t *testing.T) {
	op := func(turn int, judged, failed bool) oracle.OpResult {
		return oracle.OpResult{Turn: turn, Judged: judged, Failed: failed}
	}
	a := map[int][]oracle.OpResult{
		0: {op(0, true, true), op(1, true, false), op(2, true, true)},
		1: {op(0, true, true), op(1, false, false)},
		2: {op(0, true, true)},
	}
	b := map[int][]oracle.OpResult{
		0: {op(2, true, false), op(0, true, true)},
		1: {op(0, true, false), op(1, true, true), op(3, true, true)},
	}
	want := [][]stats.Pair{{{A: true, B: true}, {A: true}}, {{A: true}}, nil}
	if diff := cmp.Diff(want, pairs(a, b)); diff != "" {
		t.Errorf("pairs (-want +got):\n%s", diff)
	}
}

// Of two blocks, each server begins one; which begins the first is drawn.
func TestFirst(t *testing.T) {
	drawn := map[int]int{}
	for seed := range uint64(200) {
		c := comparison{CompareOptions: CompareOptions{Seed: seed}}
		if c.first(1) == c.first(2) || c.first(3) == c.first(4) {
			t.Fatalf("with seed %d the blocks begin with %d, %d, %d, %d", seed, c.first(1), c.first(2), c.first(3), c.first(4))
		}
		drawn[c.first(1)]++
	}
	if drawn[0] < 60 || drawn[1] < 60 {
		t.Errorf("the first block begins with %v", drawn)
	}
}

// Blocks that don't count are no evidence, and don't go on for ever.
func TestVoidBlocks(t *testing.T) {
	c := comparison{CompareOptions: CompareOptions{Error: 0.01, A: Side{Case: ServerCase("a")}, B: Side{Case: ServerCase("b")}}, paired: stats.NewPaired(1, 0.01, stats.Independent())}
	lost := [][]stats.Pair{{{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}, {{A: true}}}
	for i := range voidLimit {
		if c.result.Why != "" {
			t.Fatalf("after %d blocks it gave up: %s", i, c.result.Why)
		}
		c.count(played{Block: Block{Number: i, Note: "the server restarted"}, conversations: lost})
	}
	if c.result.Why == "" || c.result.Ordering == Better || c.result.Pairs.Pairs() != 0 {
		t.Errorf("void blocks came to %+v", c.result)
	}
	c.count(played{conversations: lost})
	if c.result.Ordering != Better || c.result.Pairs.OnlyA != len(lost) || c.result.OddsRatio[1] > 1 {
		t.Errorf("a block that counts came to %+v", c.result)
	}
}

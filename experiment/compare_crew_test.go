package experiment

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/search"
)

// backwards delivers the last of three orders first, and each twice.
type backwards struct {
	asked []Order
	wait  []Order
}

func (c *backwards) Size() int                    { return 3 }
func (c *backwards) Release(context.Context, int) {}

func (c *backwards) Ask(_ context.Context, o Order) error {
	c.asked, c.wait = append(c.asked, o), append(c.wait, o, o)
	return nil
}

func (c *backwards) Next(context.Context) (*Delivery, error) {
	if len(c.wait) == 0 {
		return nil, errors.New("it waits for nothing")
	}
	o := c.wait[len(c.wait)-1]
	c.wait = c.wait[:len(c.wait)-1]
	return &Delivery{
		Number: o.Number, Worker: "w", Trial: &Trial{Note: "the server restarted", Observation: &search.Observation{Outcome: search.Ran}},
		Files: func(_ context.Context, dir string) error {
			return errors.Join(os.MkdirAll(filepath.Join(dir, halfDir(o.Number, 0)), 0o755), os.MkdirAll(filepath.Join(dir, halfDir(o.Number, 1)), 0o755))
		},
		Kept: func(context.Context) error { return nil },
	}, nil
}

// Blocks count once, and in the order of their numbers, whichever comes first.
func TestCompareWithCrew(t *testing.T) {
	parsed, err := ParseCase("case.yaml", []byte(crewCase))
	if err != nil {
		t.Fatal(err)
	}
	crew := &backwards{}
	failing, safe := parsed.Space.Failing(), parsed.Space.Safe()
	dir := filepath.Join(t.TempDir(), "out")
	var steps []int
	result, err := Compare(t.Context(), CompareOptions{
		Dir: dir, A: Side{Case: parsed, Arm: failing}, B: Side{Case: parsed, Arm: safe}, Conversations: 8, Interleave: true, Seed: 4, Tool: "t",
		Crew: func() (Crew, error) { return crew, nil },
		Step: func(b Block, _ Comparison) { steps = append(steps, b.Number) },
	})
	if err != nil || result.Why == "" {
		t.Fatalf("it came to %+v, %v", result, err)
	}
	if d := cmp.Diff([]int{1, 2, 3}, steps); d != "" {
		t.Errorf("blocks counted (-want +got):\n%s", d)
	}
	for _, b := range result.Blocks {
		for _, half := range b.Dirs {
			if _, err := os.Stat(filepath.Join(dir, half)); err != nil {
				t.Error(err)
			}
		}
		if c := (&comparison{CompareOptions: CompareOptions{Seed: 4}}); b.Worker != "w" || b.First != c.first(b.Number) {
			t.Errorf("block %+v", b)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, AheadDir)); err == nil {
		t.Error("what came ahead is still there")
	}
	numbers := map[int]bool{}
	for _, o := range crew.asked {
		if numbers[o.Number] || o.Launch != o.Number || o.Against == nil || !cmp.Equal(o.Against.Arm, safe) || !cmp.Equal(o.Arm, failing) || o.Requests != 8 {
			t.Errorf("order %+v", o)
		}
		numbers[o.Number] = true
	}
	if asked := slices.MaxFunc(crew.asked, func(a, b Order) int { return a.Number - b.Number }).Number; asked > 6 {
		t.Errorf("%d blocks were asked for", asked)
	}
}

package search

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/stats"
)

// One server is asked for what the search asks for, one after the other.
func TestCrewOfOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := sure(t)
		o := Options{Seed: rapid.Uint64().Draw(t, "seed")}
		want, steps := runHunt(t, w, o)
		got, bill, err := w.Hunt(o, 1, o.Seed)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("finding: %s", diff)
		}
		if len(bill.Told) != len(steps) {
			t.Fatalf("%d runs, and %d of the search by itself", len(bill.Told), len(steps))
		}
		for i, told := range bill.Told {
			if told.Beside || told.Number != i+1 {
				t.Errorf("run %d is %+v", i+1, told)
			}
			if diff := cmp.Diff(steps[i].Proposal, told.Proposal); diff != "" {
				t.Errorf("run %d: %s", i+1, diff)
			}
		}
	})
}

// With any number of servers a certain world's cause is found, no result is told
// twice, and what must be fresh is.
func TestCrew(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := sure(t)
		o := Options{Seed: rapid.Uint64().Draw(t, "seed")}
		servers := rapid.IntRange(1, 8).Draw(t, "servers")
		f, bill, err := w.Hunt(o, servers, o.Seed)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(names(w.Sets()), found(f)); diff != "" {
			t.Errorf("finding: %s", diff)
		}
		check(t, bill, o, w)
	})
}

// check looks whether what the search was told is in order, and tells another
// search the same.
func check(t *rapid.T, bill Bill, o Options, w *World) {
	t.Helper()
	seen := map[int]bool{}
	opened := map[int]bool{}
	began := units(0)
	s, err := New(w.Space(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	again := NewCrew(s, 1)
	defer again.Close()
	for i, told := range bill.Told {
		if seen[told.Number] {
			t.Errorf("ticket %d was told twice", told.Number)
		}
		seen[told.Number] = true
		if !told.Beside {
			if told.Proposal.Launch && opened[told.Launch] {
				t.Errorf("step %d: launch %d passes for a new one", i, told.Launch)
			}
			if told.Proposal.After && told.Ended < began {
				t.Errorf("step %d ended at %s, and what was told before began at %s", i, told.Ended, began)
			}
			began = max(began, told.Began)
			if p, _ := s.Next(); !cmp.Equal(p, told.Proposal) {
				t.Fatalf("step %d asks for %+v when it is told again, and asked for %+v", i, p, told.Proposal)
			}
		}
		opened[told.Launch] = true
		if err := again.Repeat(told); err != nil {
			t.Fatal(err)
		}
	}
	if p, more := s.Next(); more {
		t.Errorf("told all again, it goes on with %+v", p)
	}
}

// More servers don't make it err more often, and save time.
func TestCrewErrorRates(t *testing.T) {
	worlds := []struct {
		name    string
		world   World
		options Options
		hunts   int
	}{
		{"launches differ", World{Factors: 8, Causes: [][]int{{1, 4}}, Rate: 0.18, Base: 0.001, CV: 0.5}, Options{SpotChecks: -1, Batch: 32}, 4},
		{"an outage", World{Factors: 8, Causes: [][]int{{1, 4}}, Rate: 0.18, Base: 0.001, Outage: [2]float64{300, 1200}}, Options{SpotChecks: -1, Batch: 32, Dispersion: stats.Independent()}, 4},
		{"vanishes", World{Factors: 8, Causes: [][]int{{1, 4}}, Rate: 0.18, Base: 0.001, Vanishes: 700}, Options{SpotChecks: -1, Batch: 32, Dispersion: stats.Independent(), Budget: Budget{Cost: 30_000}}, 2},
	}
	for _, tt := range worlds {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			for _, servers := range []int{1, 4} {
				wrong, undecided, time, launches := 0, 0, 0.0, 0
				for seed := range uint64(tt.hunts) {
					o := tt.options
					o.Seed = seed
					f, bill, err := tt.world.Hunt(o, servers, seed)
					if err != nil {
						t.Fatal(err)
					}
					switch {
					case f.Status != Found:
						undecided++
					case !slices.Equal(found(f), names(tt.world.Sets())):
						wrong++
					}
					time += bill.Time
					launches += bill.Launches
				}
				t.Logf("%d servers: %d wrong, %d undecided of %d, time %.0f, launches %d", servers, wrong, undecided, tt.hunts, time/float64(tt.hunts), launches/tt.hunts)
				if wrong > 1 { // an error of 1% gives 2 or more once in 1,000 tests
					t.Errorf("%d of %d hunts are wrong", wrong, tt.hunts)
				}
			}
		})
	}
}

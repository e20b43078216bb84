package search

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/stats"
)

// step is a proposal and what came of it.
type step struct {
	Proposal    Proposal
	Observation Observation
}

// runHunt runs a search on a world to its end.
func runHunt(t rapid.TB, w *World, o Options) (Finding, []step) {
	t.Helper()
	s, err := New(w.Space(), o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	server := w.Serve(o.Seed)
	var steps []step
	for {
		p, ok := s.Next()
		if !ok {
			return s.Finding(), steps
		}
		obs := server.Run(p)
		steps = append(steps, step{p, obs})
		if err := s.Observe(obs); err != nil {
			t.Fatal(err)
		}
		if len(steps) > 100_000 {
			t.Fatalf("the search doesn't end: %+v", p)
		}
	}
}

func names(sets []design.Arm) []string {
	var out []string
	for _, s := range sets {
		out = append(out, s.String())
	}
	slices.Sort(out)
	return out
}

func found(f Finding) []string {
	var sets []design.Arm
	for _, c := range f.Causes {
		sets = append(sets, c.Set)
	}
	return names(sets)
}

// sure are worlds in which every request of a failing arm fails and no other.
func sure(t *rapid.T) *World {
	w := &World{Factors: rapid.IntRange(1, 9).Draw(t, "factors"), Rate: 1}
	size := rapid.IntRange(0, min(4, w.Factors)).Draw(t, "size")
	factors := make([]int, w.Factors)
	for i := range factors {
		factors[i] = i
	}
	w.Causes = [][]int{rapid.Permutation(factors).Draw(t, "cause")[:size]}
	if rapid.Bool().Draw(t, "ordered") {
		w.Levels = rapid.IntRange(2, 9).Draw(t, "levels")
		w.First = rapid.IntRange(1, w.Levels-1).Draw(t, "first")
	}
	for f := range factors {
		if rapid.IntRange(0, 3).Draw(t, "client side") == 0 {
			w.ClientSide = append(w.ClientSide, f)
		}
	}
	return w
}

func TestSureWorlds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := sure(t)
		f, steps := runHunt(t, w, Options{Seed: rapid.Uint64().Draw(t, "seed")})
		if diff := cmp.Diff(names(w.Sets()), found(f)); diff != "" {
			t.Fatalf("%s (%s: %s)", diff, f.Status, f.Text)
		}
		if want := map[bool]Status{true: NoneOfThese, false: Found}[len(w.Causes[0]) == 0]; f.Status != want {
			t.Fatalf("status is %s, want %s", f.Status, want)
		}
		for _, c := range f.Causes {
			if c.With.Failures == 0 || len(c.Without) != len(c.Set) {
				t.Fatalf("not confirmed both ways: %+v", c)
			}
			for _, e := range c.Without {
				if e.Failures != 0 {
					t.Fatalf("without %s it failed: %+v", e.Factor, e)
				}
			}
		}
		launches, requests := 0, 0
		for _, s := range steps {
			requests += s.Observation.Requests
			if s.Proposal.Launch {
				launches++
			}
		}
		if f.Launches != launches || f.Requests != requests {
			t.Fatalf("finding has %d launches and %d requests, the server %d and %d", f.Launches, f.Requests, launches, requests)
		}
	})
}

func TestSureWorldsWithSeveralCauses(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := &World{Factors: 7, Rate: 1}
		for range rapid.IntRange(2, 3).Draw(t, "causes") {
			size := rapid.IntRange(1, 3).Draw(t, "size")
			cause := rapid.Permutation([]int{0, 1, 2, 3, 4, 5, 6}).Draw(t, "cause")[:size]
			slices.Sort(cause)
			// Causes don't contain each other.
			w.Causes = slices.DeleteFunc(w.Causes, func(c []int) bool { return contains(c, cause) })
			if !slices.ContainsFunc(w.Causes, func(c []int) bool { return contains(cause, c) }) {
				w.Causes = append(w.Causes, cause)
			}
		}
		f, _ := runHunt(t, w, Options{Seed: rapid.Uint64().Draw(t, "seed"), Dispersion: stats.Independent()})
		if diff := cmp.Diff(names(w.Sets()), found(f)); diff != "" {
			t.Fatalf("%s (%s: %s)", diff, f.Status, f.Text)
		}
	})
}

func contains(set, part []int) bool {
	return !slices.ContainsFunc(part, func(f int) bool { return !slices.Contains(set, f) })
}

// What was observed, observed again, gives the same proposals and finding, at
// any point and however the rest goes on.
func TestReplay(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := sure(t)
		w.Rate = rapid.SampledFrom([]float64{0.05, 0.3, 1}).Draw(t, "rate")
		w.CV = rapid.SampledFrom([]float64{0, 1}).Draw(t, "cv")
		w.Poison = rapid.SampledFrom([]float64{0, 0.9}).Draw(t, "poison")
		o := Options{Seed: rapid.Uint64().Draw(t, "seed"), Budget: Budget{Requests: 20_000}}
		f, steps := runHunt(t, w, o)
		again, err := New(w.Space(), o)
		if err != nil {
			t.Fatal(err)
		}
		defer again.Close()
		for i, s := range steps {
			p, ok := again.Next()
			if diff := cmp.Diff(s.Proposal, p); !ok || diff != "" {
				t.Fatalf("step %d: %s", i, diff)
			}
			if err := again.Observe(s.Observation); err != nil {
				t.Fatal(err)
			}
		}
		if p, ok := again.Next(); ok {
			t.Fatalf("the search goes on: %+v", p)
		}
		if diff := cmp.Diff(f, again.Finding()); diff != "" {
			t.Fatal(diff)
		}
	})
}

// Observations of any kind, in any order, end in a finding and never panic.
func TestHostileObservations(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := sure(t)
		s, err := New(w.Space(), Options{Seed: 1, Budget: Budget{Launches: 60, Requests: 5000}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Close()
		for range 3000 {
			p, ok := s.Next()
			if !ok {
				if s.Finding().Status == Running {
					t.Fatal("ended without a finding")
				}
				return
			}
			o := Observation{Outcome: rapid.SampledFrom([]Outcome{Ran, Ran, Ran, Wedged, Invalid, Void, NotExercised}).Draw(t, "outcome")}
			o.Requests = rapid.IntRange(0, 2*p.Requests).Draw(t, "requests")
			o.Failures = rapid.IntRange(0, o.Requests).Draw(t, "failures")
			o.Poisoned = rapid.Bool().Draw(t, "poisoned")
			o.Launched = rapid.Bool().Draw(t, "launched")
			o.LaunchCost = float64(rapid.IntRange(0, 1000).Draw(t, "cost"))
			s.Progress(3)
			if err := s.Observe(o); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestObserveRefusesNonsense(t *testing.T) {
	w := World{Factors: 3, Causes: [][]int{{0}}, Rate: 1}
	s, err := New(w.Space(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	for _, o := range []Observation{
		{},
		{Outcome: Ran, Requests: 2, Failures: 3},
		{Outcome: Ran, Requests: -1},
		{Outcome: Ran, Requests: 2, Failures: 0, FirstFailure: 1},
		{Outcome: Ran, Requests: 2, Failures: 1, FirstFailure: 3},
		{Outcome: "won"},
		{Outcome: Ran, LaunchCost: -1},
	} {
		if err := s.Observe(o); err == nil {
			t.Errorf("observed %+v", o)
		}
	}
	if _, err := New(design.Space{}, Options{}); err == nil {
		t.Error("searched nothing")
	}
	if _, err := New(w.Space(), Options{Error: 2}); err == nil {
		t.Error("searched with an error of 2")
	}
}

// A model that is wrong in 6% by itself, and a fault with which it is in 18%:
// until it is asked whether both fail alike, it looks as if everything safe
// failed by the fault. It is found in 82 of 100; without that question in 60.
func TestOftenWrongAndAFault(t *testing.T) {
	found := 0
	for seed := range uint64(100) {
		w := World{Factors: 10, Causes: [][]int{{int(seed % 10), int(seed+3) % 10}}, Rate: 0.18, Base: 0.06}
		f, _ := runHunt(t, &w, Options{Seed: seed, Dispersion: stats.Independent(), SpotChecks: -1})
		switch {
		case f.Status != Found:
		case len(f.Causes) == 1 && len(f.Causes[0].Set) == 2 && f.Causes[0].Set[factorName(w.Causes[0][0])] != "" && f.Causes[0].Set[factorName(w.Causes[0][1])] != "":
			found++
		default:
			t.Errorf("seed %d: %+v, want %v", seed, f.Causes, w.Sets())
		}
	}
	if found < 80 {
		t.Errorf("found in %d of 100 hunts, want 80", found)
	}
}

// Worlds of which each breaks one of the assumptions that are easily made.
func TestWorlds(t *testing.T) {
	for _, tt := range []struct {
		name    string
		world   World
		options Options
		status  []Status
		reasons []Reason
		check   func(*testing.T, Finding, []step)
	}{
		{name: "one cause", world: World{Factors: 8, Causes: [][]int{{1, 4}}, Rate: 0.2, Base: 0.001}, status: []Status{Found}},
		{name: "launches differ", world: World{Factors: 6, Causes: [][]int{{2}}, Rate: 0.2, Base: 0.001, CV: 1}, status: []Status{Found}},
		{name: "no fault", world: World{Factors: 6}, status: []Status{NotReproduced}},
		{name: "weak model", world: World{Factors: 6, Causes: [][]int{{}}, Rate: 0.05, Base: 0.05}, status: []Status{NoneOfThese}},
		{
			name: "weak model and a fault", world: World{Factors: 6, Causes: [][]int{{3}}, Rate: 0.4, Base: 0.05},
			status: []Status{Found},
		},
		{name: "two causes", world: World{Factors: 8, Causes: [][]int{{0}, {2, 5}}, Rate: 0.2, Base: 0.001}, status: []Status{Found}},
		{name: "poisoned", world: World{Factors: 6, Causes: [][]int{{1, 3}}, Rate: 0.1, Base: 0.0005, Poison: 0.95}, status: []Status{Found}},
		{name: "ripens", world: World{Factors: 6, Causes: [][]int{{1, 3}}, Rate: 0.3, Base: 0.0005, Ripening: 60}, status: []Status{Found}},
		{name: "five needed", world: World{Factors: 8, Causes: [][]int{{0, 2, 3, 5, 7}}, Rate: 0.5, Base: 0.0005}, status: []Status{Found}},
		{
			name:  "an arm that doesn't start is learned",
			world: World{Factors: 8, Causes: [][]int{{1, 4}}, Rate: 0.3, Base: 0.001, Invalid: [][]int{{2, -4}}}, status: []Status{Found},
			check: func(t *testing.T, _ Finding, steps []step) {
				invalid := 0
				for _, s := range steps {
					if s.Observation.Outcome == Invalid {
						invalid++
					}
				}
				if invalid > 6 {
					t.Errorf("%d arms were tried that don't start", invalid)
				}
			},
		},
		{
			name:  "a factor that can't be taken away",
			world: World{Factors: 6, Causes: [][]int{{1}}, Rate: 0.4, Base: 0.001, Invalid: [][]int{{-2}}}, status: []Status{Undecided},
			reasons: []Reason{Unreachable},
		},
		{name: "the failing arm doesn't start", world: World{Factors: 3, Causes: [][]int{{1}}, Rate: 1, Invalid: [][]int{{0}}}, status: []Status{Undecided}, reasons: []Reason{Unreachable}},
		{
			name: "vanishes", world: World{Factors: 10, Causes: [][]int{{1, 4, 6}}, Rate: 0.2, Base: 0.001, Vanishes: 900},
			status: []Status{Undecided}, reasons: []Reason{Drift, Misfit},
		},
		{
			name: "budget", world: World{Factors: 10, Causes: [][]int{{1, 4}}, Rate: 0.2, Base: 0.001}, options: Options{Budget: Budget{Launches: 6}},
			status: []Status{Undecided}, reasons: []Reason{OutOfBudget},
			check: func(t *testing.T, f Finding, _ []step) {
				if f.Launches > 6 {
					t.Errorf("used %d launches of 6", f.Launches)
				}
			},
		},
		{
			name: "client's factors need no launch", world: World{Factors: 5, Causes: [][]int{{1, 3}}, Rate: 0.3, Base: 0.001, ClientSide: []int{0, 1, 2, 3, 4}},
			status: []Status{Found},
			check: func(t *testing.T, f Finding, steps []step) {
				for _, s := range steps {
					if s.Proposal.Launch && s.Proposal.Phase == Narrow {
						t.Errorf("a launch for %s", s.Proposal.Why)
					}
				}
			},
		},
		{
			name:  "a dose that hurts in the middle",
			world: World{Factors: 4, Causes: [][]int{{0, 2}}, Rate: 0.4, Base: 0.001, Levels: 7, First: 3, Last: 4, Failing: 4}, status: []Status{Found},
			check: func(t *testing.T, f Finding, _ []step) {
				fails := map[string]bool{}
				for _, l := range f.Levels {
					if l.Fails == nil {
						t.Errorf("level %s is undecided", l.Level)
						continue
					}
					fails[l.Level] = *l.Fails
				}
				want := map[string]bool{"0": false, "1": false, "5": false, "6": false}
				if diff := cmp.Diff(want, fails); diff != "" {
					t.Error(diff)
				}
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(3) {
				o := tt.options
				o.Seed = seed
				f, steps := runHunt(t, &tt.world, o)
				if !slices.Contains(tt.status, f.Status) {
					t.Errorf("seed %d: %s %s: %s, want %v", seed, f.Status, f.Reason, f.Text, tt.status)
					continue
				}
				if f.Status == Undecided && (!slices.Contains(tt.reasons, f.Reason) || f.Text == "") {
					t.Errorf("seed %d: undecided because of %s (%s), want %v", seed, f.Reason, f.Text, tt.reasons)
				}
				if f.Status == Found || f.Status == NoneOfThese {
					if diff := cmp.Diff(names(tt.world.Sets()), found(f)); diff != "" {
						t.Errorf("seed %d: %s", seed, diff)
					}
				}
				if tt.check != nil {
					tt.check(t, f, steps)
				}
			}
		})
	}
}

// A world that isn't monotone has no minimal sets to prove: spot checks refuse
// what would be confidently wrong, most of the time.
func TestSpotChecksSeeMasks(t *testing.T) {
	wrong, refused := 0, 0
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 3))
		p := r.Perm(8)
		w := World{Factors: 8, Causes: [][]int{p[:2]}, Rate: 0.3, Base: 0.001, Masks: [][2]int{{p[2], p[3]}}}
		f, _ := runHunt(t, &w, Options{Seed: seed, SpotChecks: 4, Dispersion: stats.Independent()})
		switch {
		case f.Status == Undecided:
			refused++
		case !slices.Equal(names(w.Sets()), found(f)):
			wrong++
		}
	}
	t.Logf("of 20: %d refused, %d wrong", refused, wrong)
	if refused < 8 {
		t.Errorf("only %d of 20 were refused", refused)
	}
}

// Few hunts of each kind; culprit simulate has the many.
func TestErrorRates(t *testing.T) {
	for _, tt := range []struct {
		name    string
		hunts   int
		world   func(r *rand.Rand) World
		options Options
	}{
		{"independent", 60, func(r *rand.Rand) World {
			return World{Factors: 10, Causes: [][]int{r.Perm(10)[:1+r.IntN(3)]}, Rate: 0.18, Base: 0.001}
		}, Options{Dispersion: stats.Independent(), SpotChecks: -1}},
		{"rare", 10, func(r *rand.Rand) World {
			return World{Factors: 10, Causes: [][]int{r.Perm(10)[:1+r.IntN(3)]}, Rate: 0.02, Base: 0.001}
		}, Options{Dispersion: stats.Independent(), SpotChecks: -1}},
		{"launches differ", 10, func(r *rand.Rand) World {
			return World{Factors: 8, Causes: [][]int{r.Perm(8)[:1+r.IntN(2)]}, Rate: 0.18, Base: 0.001, CV: 1}
		}, Options{SpotChecks: -1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			launches, abstained := 0, 0
			for seed := range uint64(tt.hunts) {
				w := tt.world(rand.New(rand.NewPCG(seed, 4)))
				tt.options.Seed = seed
				f, _ := runHunt(t, &w, tt.options)
				launches += f.Launches
				if f.Status != Found {
					abstained++
					continue
				}
				if diff := cmp.Diff(names(w.Sets()), found(f)); diff != "" {
					t.Errorf("seed %d: %s", seed, diff)
				}
			}
			t.Logf("%.1f launches a hunt, %d of %d undecided", float64(launches)/float64(tt.hunts), abstained, tt.hunts)
			if abstained > tt.hunts/10 {
				t.Errorf("%d of %d hunts were undecided", abstained, tt.hunts)
			}
		})
	}
}

func TestWhyIsReadable(t *testing.T) {
	w := World{Factors: 7, Causes: [][]int{{0, 2}}, Rate: 0.5, Base: 0.001, Levels: 4, First: 2}
	_, steps := runHunt(t, &w, Options{Seed: 3})
	seen := map[Phase]string{}
	for _, s := range steps {
		if s.Proposal.Why == "" || strings.Contains(s.Proposal.Why, "%!") {
			t.Errorf("why: %q", s.Proposal.Why)
		}
		seen[s.Proposal.Phase] = s.Proposal.Why
	}
	for _, phase := range []Phase{Reproduce, Narrow, Confirm, Spot, Sweep} {
		if seen[phase] == "" {
			t.Errorf("no proposal to %s", phase)
		}
	}
	t.Log(fmt.Sprint(seen))
}

// The certificate asks for one launch of each cause alone and of each region
// without one of its members, and nothing else is needed when all holds.
func TestCertificate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		causes [][]int
		want   []string // the arms that must be proven clean, by what is safe in them
	}{
		{"one", [][]int{{2}}, []string{"f02"}},
		{"two needed", [][]int{{0, 3}}, []string{"f00", "f03"}},
		{"two causes", [][]int{{0}, {1}}, []string{"f00 f01"}},
		{"overlapping", [][]int{{0, 1}, {0, 2}}, []string{"f00", "f01 f02"}},
		{"three causes", [][]int{{0}, {1}, {2, 3}}, []string{"f00 f01 f02", "f00 f01 f03"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := World{Factors: 5, Causes: tt.causes, Rate: 1}
			space := w.Space()
			s, err := New(space, Options{Seed: 5, Dispersion: stats.Independent(), SpotChecks: -1})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			server := w.Serve(1)
			for {
				p, ok := s.Next()
				if !ok {
					break
				}
				if err := s.Observe(server.Run(p)); err != nil {
					t.Fatal(err)
				}
			}
			var got []string
			for _, r := range s.hunt.proof.clean {
				got = append(got, strings.Join(s.hunt.off(r.arm), " "))
			}
			slices.Sort(got)
			for _, want := range tt.want {
				if !slices.Contains(got, want) {
					t.Errorf("not proven clean: all suspect but %s; proven: %q", want, got)
				}
			}
			for _, c := range tt.causes {
				set := make(arm, 5)
				for _, f := range c {
					set[f] = 1
				}
				if _, ok := s.hunt.proof.fails[set.key()]; !ok {
					t.Errorf("not proven to fail alone: %v", c)
				}
			}
		})
	}
}

// Arms that always fail and arms that never do make likelihoods that are hardly
// numbers any more, and they go on being some.
func TestExtremeLikelihoods(t *testing.T) {
	g := newGrid(Options{}.withDefaults())
	region := arm{1, 1, 1}
	p, _ := newPosterior(g, region, []float64{1, 1, 1}, 3, nil)
	arms := []arm{region, {1, 1, 0}, {0, 1, 1}}
	for launch := range 60 {
		for i, a := range arms {
			shown := stats.Cluster{Trials: 1 + 7*launch}
			if i < 2 {
				shown.Failures = shown.Trials
			}
			p.observe(a, launch, shown)
			if !(p.none.chance >= 0 && p.none.chance <= 1) {
				t.Fatalf("launch %d: the chance that no set explains it is %v", launch, p.none.chance)
			}
		}
	}
}

// An arm may be asked for long: what is believed stays numbers.
func TestLongVisit(t *testing.T) {
	g := newGrid(Options{Dispersion: stats.Independent()}.withDefaults())
	region := arm{1, 1, 1}
	p, _ := newPosterior(g, region, []float64{1, 1, 1}, 3, nil)
	p.observe(arm{1, 0, 0}, 1, stats.Cluster{Failures: 2, Trials: 100})
	for i := range 40_000 {
		more := stats.Cluster{Trials: 8}
		if i%8 == 0 {
			more.Failures = 1
		}
		p.observe(region, 2, more)
	}
	failing, _ := p.rates()
	mean := 0.0
	for i, w := range failing {
		mean += w * g.rates[i]
	}
	// The grid's nearest rate.
	if !(mean > 1.0/64/1.3 && mean < 1.3/64) {
		t.Errorf("the rate of failure is believed to be %g, after 5,000 of 320,000 requests failed", mean)
	}
}

// A level that seemed to be where failing begins, and lies far above it, isn't
// walked away from step by step: each step would be two claims.
func TestLevelFarTooHigh(t *testing.T) {
	const seed = 1<<32 + 17 // in 256 requests of a failing level 2 fail, in 32 of another none
	w := World{
		Factors: 1, Levels: 65, First: 11, Causes: [][]int{{0}},
		Rate: 0.02, Base: 0.001,
	}
	s, err := New(w.Space(), Options{Seed: seed, SpotChecks: -1, Dispersion: stats.Independent(), Steady: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	server := w.Serve(seed)
	for p, running := s.Next(); running; p, running = s.Next() {
		if err := s.Observe(server.Run(p)); err != nil {
			t.Fatal(err)
		}
	}
	f := s.Finding()
	if len(f.Causes) != 1 || f.Causes[0].Set["f00"] != "11" || server.Requests > 40_000 {
		t.Errorf("found %+v with %d requests, want level 11 with some 20,000", f.Causes, server.Requests)
	}
}

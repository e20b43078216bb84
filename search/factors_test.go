package search

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/stats"
)

// play runs a search against a function.
func play(t interface{ Fatal(...any) }, space design.Space, o Options, run func(Proposal) Observation) (Finding, []step) {
	s, err := New(space, o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	var steps []step
	for {
		p, ok := s.Next()
		if !ok {
			return s.Finding(), steps
		}
		obs := run(p)
		steps = append(steps, step{p, obs})
		if err := s.Observe(obs); err != nil {
			t.Fatal(err)
		}
		if len(steps) > 100_000 {
			t.Fatal("the search doesn't end")
		}
	}
}

// Combinations that are forbidden are never asked for, and what can be told
// without them is.
func TestForbidden(t *testing.T) {
	found := 0
	rapid.Check(t, func(t *rapid.T) {
		w := World{Factors: 6, Rate: 1, Causes: [][]int{rapid.Permutation([]int{0, 1, 2, 3, 4, 5}).Draw(t, "cause")[:rapid.IntRange(1, 3).Draw(t, "size")]}}
		space := w.Space()
		for range rapid.IntRange(1, 3).Draw(t, "forbidden") {
			p := rapid.Permutation([]int{0, 1, 2, 3, 4, 5}).Draw(t, "pair")
			space.Forbidden = append(space.Forbidden, design.Arm{factorName(p[0]): "on", factorName(p[1]): "off"})
		}
		server := w.Serve(1)
		f, _ := play(t, space, Options{Seed: rapid.Uint64().Draw(t, "seed"), SpotChecks: -1}, func(p Proposal) Observation {
			if !space.Allowed(p.Arm) {
				t.Fatalf("%s is forbidden", p.Arm)
			}
			return server.Run(p)
		})
		switch f.Status {
		case Found:
			found++
			// What a set needs by decree can't be told from what it needs.
			closed := maps.Clone(f.Causes[0].Set)
			for range space.Factors {
				for _, no := range space.Forbidden {
					for name, level := range no {
						if level == "on" && closed[name] == "on" {
							for other, level := range no {
								if level == "off" {
									closed[other] = "on"
								}
							}
						}
					}
				}
			}
			for name, level := range w.Sets()[0] {
				if closed[name] != level {
					t.Fatalf("found %s, it is %s", f.Causes[0].Set, w.Sets()[0])
				}
			}
			if len(closed) > len(f.Causes[0].Set) && len(f.Unreached) == 0 {
				t.Fatalf("found %s, and doesn't say that it wasn't run alone", f.Causes[0].Set)
			}
		case Undecided:
			if f.Reason != Unreachable {
				t.Fatalf("undecided: %s %s", f.Reason, f.Text)
			}
		default:
			t.Fatalf("%s: %s", f.Status, f.Text)
		}
	})
	if found == 0 {
		t.Error("nothing was ever found")
	}
}

// A factor whose levels have no order fails at the failing arm's level, and the
// others are swept.
func TestLevelsWithoutOrder(t *testing.T) {
	space := design.Space{Factors: []design.Factor{
		{Name: "backend", Levels: []design.Level{{Name: "torch", Role: design.Safe}, {Name: "triton"}, {Name: "flash", Role: design.Suspect}, {Name: "cutlass"}}},
		{Name: "graph", Levels: []design.Level{{Name: "off", Role: design.Safe}, {Name: "on", Role: design.Suspect}}},
		{Name: "cache", Levels: []design.Level{{Name: "off", Role: design.Safe}, {Name: "on", Role: design.Suspect}}},
	}}
	for seed := range uint64(5) {
		random := rand.New(rand.NewPCG(seed, 9))
		f, _ := play(t, space, Options{Seed: seed}, func(p Proposal) Observation {
			o := Observation{Outcome: Ran, Requests: p.Requests}
			bad := p.Arm["graph"] == "on" && (p.Arm["backend"] == "flash" || p.Arm["backend"] == "cutlass")
			for range p.Requests {
				if random.Float64() < map[bool]float64{true: 0.4, false: 0.001}[bad] {
					o.Failures++
				}
			}
			return o
		})
		if diff := cmp.Diff([]string{design.Arm{"backend": "flash", "graph": "on"}.String()}, found(f)); diff != "" {
			t.Fatalf("seed %d: %s (%s: %s)", seed, diff, f.Status, f.Text)
		}
		fails := map[string]bool{}
		for _, l := range f.Levels {
			if l.Fails != nil {
				fails[l.Level] = *l.Fails
			}
		}
		if diff := cmp.Diff(map[string]bool{"triton": false, "cutlass": true}, fails); diff != "" {
			t.Errorf("seed %d: %s", seed, diff)
		}
	}
}

// A server that wedges after a failure or two has shown those, and is launched
// again; one that never answers can't be measured.
func TestWedges(t *testing.T) {
	w := World{Factors: 6, Causes: [][]int{{1, 4}}, Rate: 0.25, Base: 0.0005}
	for seed := range uint64(3) {
		server := w.Serve(seed)
		wedged := false
		f, steps := play(t, w.Space(), Options{Seed: seed}, func(p Proposal) Observation {
			if wedged && !p.Launch {
				t.Fatal("a wedged server is used again")
			}
			o := server.Run(p)
			wedged = o.Failures > 1
			if wedged {
				o.Outcome = Wedged
			}
			return o
		})
		if diff := cmp.Diff(names(w.Sets()), found(f)); diff != "" {
			t.Errorf("seed %d after %d steps: %s (%s: %s)", seed, len(steps), diff, f.Status, f.Text)
		}
	}
	f, steps := play(t, w.Space(), Options{}, func(Proposal) Observation { return Observation{Outcome: Wedged} })
	if f.Reason != Unreachable || len(steps) > 5 {
		t.Errorf("%d steps of a server that never answers: %s %s", len(steps), f.Status, f.Reason)
	}
}

// commits is a history in which some commits don't start.
func commits(n int) design.Space {
	f := design.Factor{Name: "commit", Ordered: true}
	for i := range n {
		f.Levels = append(f.Levels, design.Level{Name: strconv.Itoa(i)})
	}
	f.Levels[0].Role, f.Levels[n-1].Role = design.Safe, design.Suspect
	return design.Space{Factors: []design.Factor{f}}
}

func TestCommitsThatDontStart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(3, 40).Draw(t, "commits")
		first := rapid.IntRange(1, n-1).Draw(t, "first bad")
		broken := map[int]bool{}
		for i := range n {
			if i != 0 && i != n-1 && rapid.IntRange(0, 3).Draw(t, "broken") == 0 {
				broken[i] = true
			}
		}
		f, steps := play(t, commits(n), Options{Seed: rapid.Uint64().Draw(t, "seed")}, func(p Proposal) Observation {
			at, _ := strconv.Atoi(p.Arm["commit"])
			o := Observation{Outcome: Ran, Requests: p.Requests}
			switch {
			case broken[at]:
				return Observation{Outcome: Invalid}
			case at >= first:
				o.Failures = p.Requests
			}
			return o
		})
		// Commits that don't start are skipped, as git bisect skip does.
		good := first - 1
		for broken[good] {
			good--
		}
		for broken[first] {
			first++
		}
		if diff := cmp.Diff([]string{"commit=" + strconv.Itoa(first)}, found(f)); diff != "" {
			t.Fatalf("%s (%s: %s)", diff, f.Status, f.Text)
		}
		var skipped []string
		for i := good + 1; i < first; i++ {
			skipped = append(skipped, strconv.Itoa(i))
		}
		if diff := cmp.Diff(skipped, f.Causes[0].Skipped["commit"]); diff != "" {
			t.Fatalf("skipped: %s", diff)
		}
		// The certificate has two claims, on launches of their own.
		var claims []string
		for _, s := range steps {
			if s.Proposal.Phase == Confirm && s.Proposal.Launch {
				claims = append(claims, s.Proposal.Arm["commit"])
			}
		}
		for _, at := range []int{first, good} {
			if !slices.Contains(claims, strconv.Itoa(at)) {
				t.Fatalf("%d wasn't confirmed on a new launch: %s", at, strings.Join(claims, " "))
			}
		}
	})
}

// Rates that change with time, and nothing else: nothing is accused.
func TestDriftAccusesNothing(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*World)
	}{
		{"half-life", func(w *World) { w.HalfLife = 2000 }},
		{"outage", func(w *World) { w.Outage = [2]float64{500, 1500} }},
		{"vanishes", func(w *World) { w.Vanishes = 1200 }},
		{"comes and goes", func(w *World) { w.Period = 600 }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for seed := range uint64(15) {
				w := World{Factors: 8, Causes: [][]int{{}}, Rate: 0.18, Base: 0.001}
				tt.change(&w)
				f, _ := runHunt(t, &w, Options{Seed: seed, SpotChecks: -1, Dispersion: stats.Dispersed(), Budget: Budget{Cost: 20_000}})
				for _, c := range f.Causes {
					if len(c.Set) > 0 {
						t.Errorf("seed %d: accuses %s", seed, c.Set)
					}
				}
			}
		})
	}
}

func ExampleSearch() {
	w := World{Factors: 3, Causes: [][]int{{0, 2}}, Rate: 1}
	s, err := New(w.Space(), Options{})
	if err != nil {
		panic(err)
	}
	defer s.Close()
	server := w.Serve(1)
	for {
		p, ok := s.Next()
		if !ok {
			break
		}
		if err := s.Observe(server.Run(p)); err != nil {
			panic(err)
		}
	}
	fmt.Println(s.Finding().Text)
	// Output: needed for the failure: f00=on f02=on
}

// A commit that doesn't start is skipped among flags too.
func TestCommitsThatDontStartAmongFlags(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(4, 8).Draw(t, "commits")
		first := rapid.IntRange(2, n-1).Draw(t, "first bad")
		broken := rapid.IntRange(1, n-2).Draw(t, "broken")
		space := commits(n)
		for i := range 4 {
			space.Factors = append(space.Factors, design.Factor{
				Name: factorName(i), Levels: []design.Level{{Name: "off", Role: design.Safe}, {Name: "on", Role: design.Suspect}},
			})
		}
		f, _ := play(t, space, Options{Seed: rapid.Uint64().Draw(t, "seed"), SpotChecks: -1}, func(p Proposal) Observation {
			at, _ := strconv.Atoi(p.Arm["commit"])
			o := Observation{Outcome: Ran, Requests: p.Requests}
			switch {
			case at == broken:
				return Observation{Outcome: Invalid}
			case at >= first && p.Arm["f03"] == "on":
				o.Failures = p.Requests
			}
			return o
		})
		if first == broken {
			first++
		}
		want := design.Arm{"commit": strconv.Itoa(first), "f03": "on"}
		if diff := cmp.Diff([]string{want.String()}, found(f)); diff != "" {
			t.Fatalf("%s (%s: %s)", diff, f.Status, f.Text)
		}
		var skipped []string
		if broken == first-1 {
			skipped = []string{strconv.Itoa(broken)}
		}
		if diff := cmp.Diff(skipped, f.Causes[0].Skipped["commit"]); diff != "" {
			t.Fatalf("skipped: %s", diff)
		}
	})
}

// A server that breaks everything may have been spoilt by its first failure: the
// client's other settings are tried on another.
func TestSpoiltServer(t *testing.T) {
	w := World{Factors: 6, Causes: [][]int{{1, 4}}, Rate: 1, ClientSide: []int{4}, Poison: 1, Unnoticed: true}
	for seed := range uint64(5) {
		server := w.Serve(seed)
		f, _ := play(t, w.Space(), Options{Seed: seed}, server.Run)
		if diff := cmp.Diff(names(w.Sets()), found(f)); diff != "" {
			t.Fatalf("seed %d: %s (%s: %s)", seed, diff, f.Status, f.Text)
		}
		for _, e := range f.Causes[0].Without {
			if e.Launches < 2 {
				t.Errorf("seed %d: %s is needed by one launch alone", seed, e.Factor)
			}
		}
	}
}

package app

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/stats"
)

// SimulateOptions is what simulate is asked for. Zero values take defaults.
type SimulateOptions struct {
	Hunts int    // in each row; 0 means 1000
	Seed  uint64 // 0 means 1
	// Table is combinations, assumptions, launches, order, null, or all.
	Table string
	Row   string // only rows whose names begin so
	// Workers adds hunts with so many servers at once, and how long they take.
	Workers int
}

// Tables are the names of what simulate can show.
func Tables() []string {
	return []string{"combinations", "launches", "assumptions", "order", "null"}
}

// Simulate hunts on synthetic servers, many times, and prints what it took and
// how often it was wrong, beside simple methods that are told the rates of
// failure, which the search isn't.
func Simulate(ctx context.Context, o SimulateOptions, out Output) error {
	if o.Hunts == 0 {
		o.Hunts = 1000
	}
	if o.Seed == 0 {
		o.Seed = 1
	}
	wanted := strings.Split(o.Table, ",")
	if o.Table == "" || o.Table == "all" {
		wanted = Tables()
	}
	for _, name := range wanted {
		if !slices.Contains(Tables(), name) {
			return usage("table %q: there are %s", name, strings.Join(Tables(), ", "))
		}
	}
	rows := map[string][]simulation{} // by table
	var names []string
	for _, name := range wanted {
		for _, c := range simulations(name) {
			names = append(names, c.name)
			if strings.HasPrefix(c.name, o.Row) {
				rows[name] = append(rows[name], c)
			}
		}
	}
	if len(rows) == 0 {
		return usage("no row begins with %q: there are\n  %s", o.Row, strings.Join(names, "\n  "))
	}
	// Hunts make much garbage and hold little.
	defer debug.SetGCPercent(debug.SetGCPercent(800))
	for _, name := range wanted {
		if len(rows[name]) == 0 {
			continue
		}
		out.Screen.Printf("\n%s: launches / requests = cost of a hunt, %d hunts a row\n", name, o.Hunts)
		for _, c := range rows[name] {
			if err := ctx.Err(); err != nil {
				return err
			}
			out.Progress.Progress(name + ": " + c.name)
			out.Screen.Printf("%s\n", c.name)
			for _, r := range c.row(o) {
				out.Screen.Printf("  %-17s %s\n", r[0], r[1])
			}
		}
	}
	out.Screen.Printf("\n* is told the rates, and asks as many requests of each arm as these need. A launch costs 120 requests.\n")
	return nil
}

// simulation is one row of a table: a family of worlds.
type simulation struct {
	name    string
	world   func(r *rand.Rand) search.World
	options search.Options
	bound   bool // independent requests, one cause: the bound and ddmin make sense
	leave   bool // leave-one-out makes sense
	null    bool // nothing may be accused
}

// outcome adds up what hunts came to.
type outcome struct {
	hunts, wrong, abstained int
	launches, requests      float64
	time                    float64 // with several servers at once, in requests
	reasons                 map[search.Reason]int
}

func (o *outcome) add(other outcome) {
	o.hunts += other.hunts
	o.wrong += other.wrong
	o.abstained += other.abstained
	o.launches += other.launches
	o.requests += other.requests
	o.time += other.time
	for k, v := range other.reasons {
		if o.reasons == nil {
			o.reasons = map[search.Reason]int{}
		}
		o.reasons[k] += v
	}
}

func (o outcome) String() string {
	n := float64(o.hunts)
	s := fmt.Sprintf("%.1f / %.0f = %.0f", o.launches/n, o.requests/n, (launchCost*o.launches+o.requests)/n)
	if o.time > 0 {
		s += fmt.Sprintf(", in the time of %.0f", o.time/n)
	}
	if o.wrong > 0 {
		s += fmt.Sprintf(" (%.1f%% wrong)", 100*float64(o.wrong)/n)
	}
	if o.abstained > 0 {
		var why []string
		for _, k := range slices.Sorted(maps.Keys(o.reasons)) {
			why = append(why, fmt.Sprintf("%s %d", k, o.reasons[k]))
		}
		s += fmt.Sprintf(" (%.1f%% abstained: %s)", 100*float64(o.abstained)/n, strings.Join(why, ", "))
	}
	return s
}

const launchCost = 120

func (s simulation) row(o SimulateOptions) [][2]string {
	var row [][2]string
	if s.bound {
		row = append(row, [2]string{"lower bound", lowerBound(s.world(rand.New(rand.NewPCG(o.Seed, 0))))})
	}
	if s.leave {
		row = append(row, [2]string{"leave-one-out*", s.many(o, leaveOneOut).String()})
	}
	if s.bound && s.leave {
		row = append(row, [2]string{"ddmin*", s.many(o, deltaDebug).String()})
	}
	posterior := s.options
	posterior.PosteriorOnly = 0.99
	row = append(row, [2]string{"posterior 0.99", s.many(o, hunter(posterior, s.null)).String()})
	if s.options.Steady {
		row = append(row, [2]string{"certified, steady", s.many(o, hunter(s.options, s.null)).String()})
	}
	guarded := s.options
	guarded.Steady = false
	row = append(row, [2]string{"certified", s.many(o, hunter(guarded, s.null)).String()})
	if o.Workers > 1 {
		row = append(row, [2]string{fmt.Sprintf("the same, %d at once", o.Workers), s.many(o, crewed(guarded, s.null, o.Workers)).String()})
	}
	return row
}

// many runs a method on many worlds, on all cores.
func (s simulation) many(o SimulateOptions, method func(w *search.World, seed uint64) outcome) outcome {
	var total outcome
	var mu sync.Mutex
	var wg sync.WaitGroup
	workers := runtime.GOMAXPROCS(0)
	for worker := range workers {
		wg.Go(func() {
			var mine outcome
			for i := worker; i < o.Hunts; i += workers {
				seed := o.Seed<<32 + uint64(i)
				w := s.world(rand.New(rand.NewPCG(seed, 1)))
				mine.add(method(&w, seed))
			}
			mu.Lock()
			defer mu.Unlock()
			total.add(mine)
		})
	}
	wg.Wait()
	return total
}

// hunter is the search itself.
func hunter(options search.Options, null bool) func(*search.World, uint64) outcome {
	return func(w *search.World, seed uint64) outcome {
		o := options
		o.Seed = seed
		s, err := search.New(w.Space(), o)
		if err != nil {
			panic(err) // the worlds are ours
		}
		defer s.Close()
		server := w.Serve(seed)
		for {
			p, ok := s.Next()
			if !ok {
				break
			}
			if err := s.Observe(server.Run(p)); err != nil {
				panic(err)
			}
		}
		got := judge(w, s.Finding(), null)
		got.launches, got.requests = float64(server.Launches), float64(server.Requests)
		return got
	}
}

// crewed is the search with several servers at once.
func crewed(options search.Options, null bool, workers int) func(*search.World, uint64) outcome {
	return func(w *search.World, seed uint64) outcome {
		o := options
		o.Seed = seed
		f, bill, err := w.Hunt(o, workers, seed)
		if err != nil {
			panic(err) // the worlds are ours
		}
		got := judge(w, f, null)
		got.launches, got.requests, got.time = float64(bill.Launches), float64(bill.Requests), bill.Time
		return got
	}
}

// judge says what one hunt came to.
func judge(w *search.World, f search.Finding, null bool) outcome {
	var sets []design.Arm
	for _, c := range f.Causes {
		sets = append(sets, c.Set)
	}
	got := outcome{hunts: 1}
	switch {
	case null:
		got.reasons = map[search.Reason]int{search.Reason(cmp.Or(string(f.Reason), string(f.Status))): 1}
		if slices.ContainsFunc(sets, func(s design.Arm) bool { return len(s) > 0 }) {
			got.wrong = 1
		} else {
			got.abstained = 1
		}
	case f.Status == search.Found, f.Status == search.NoneOfThese:
		if !sameSets(sets, w.Sets()) {
			got.wrong = 1
		}
	default:
		got.abstained = 1
		reason := f.Reason
		if f.Status == search.NotReproduced {
			reason = search.Reason(f.Status)
		}
		got.reasons = map[search.Reason]int{reason: 1}
	}
	return got
}

func sameSets(a, b []design.Arm) bool {
	names := func(sets []design.Arm) []string {
		var out []string
		for _, s := range sets {
			out = append(out, s.String())
		}
		slices.Sort(out)
		return out
	}
	return slices.Equal(names(a), names(b))
}

// bench runs arms for the simple methods: a launch each, and as many requests as
// decide between the two rates.
type bench struct {
	w       *search.World
	server  *search.Server
	n, most int // requests, failures that decide
	seen    map[string]bool
}

// fails says whether the arm with these factors suspect fails.
func (b *bench) fails(on []bool) bool {
	key := fmt.Sprint(on)
	if v, ok := b.seen[key]; ok {
		return v
	}
	b.server.Launch(on)
	failures := 0
	for i := range b.n {
		if failures >= b.most || failures+b.n-i < b.most {
			break
		}
		if b.server.Request(on) {
			failures++
		}
	}
	b.seen[key] = failures >= b.most
	return b.seen[key]
}

func (b *bench) outcome(found []int) outcome {
	o := outcome{hunts: 1, launches: float64(b.server.Launches), requests: float64(b.server.Requests)}
	slices.Sort(found)
	if len(b.w.Causes) != 1 || !slices.Equal(found, slices.Sorted(slices.Values(b.w.Causes[0]))) {
		o.wrong = 1
	}
	return o
}

// newBench takes how many arms that fail and that don't a method judges.
func newBench(w *search.World, seed uint64, failing, clean float64) *bench {
	n, most := trials(w.Rate, w.Base, failing, clean)
	return &bench{w: w, server: w.Serve(seed), n: n, most: most, seen: map[string]bool{}}
}

// leaveOneOut makes one factor safe at a time.
func leaveOneOut(w *search.World, seed uint64) outcome {
	size := 0
	if len(w.Causes) > 0 {
		size = len(w.Causes[0])
	}
	b := newBench(w, seed, float64(w.Factors-size), float64(size))
	on := make([]bool, w.Factors)
	for i := range on {
		on[i] = true
	}
	b.fails(on)
	var found []int
	for i := range on {
		on[i] = false
		if !b.fails(on) {
			found = append(found, i)
		}
		on[i] = true
	}
	return b.outcome(found)
}

// deltaDebug is ddmin with as many requests an arm as it takes.
func deltaDebug(w *search.World, seed uint64) outcome {
	// How many arms it judges when nothing is left to chance.
	failing, clean := 0.0, 0.0
	const dry = 20
	r := rand.New(rand.NewPCG(seed, 2))
	for range dry {
		cause := r.Perm(w.Factors)[:len(w.Causes[0])]
		ddmin(w.Factors, func(on []bool) bool {
			if slices.ContainsFunc(cause, func(f int) bool { return !on[f] }) {
				clean++
				return false
			}
			failing++
			return true
		})
	}
	b := newBench(w, seed, failing/dry, clean/dry)
	return b.outcome(ddmin(w.Factors, b.fails))
}

// ddmin is A. Zeller and R. Hildebrandt's (IEEE TSE 28, 2002).
func ddmin(factors int, fails func([]bool) bool) []int {
	test := func(set []int) bool {
		on := make([]bool, factors)
		for _, f := range set {
			on[f] = true
		}
		return fails(on)
	}
	var set []int
	for i := range factors {
		set = append(set, i)
	}
	for n := 2; len(set) > 1; {
		var parts [][]int
		for i := range n {
			if part := set[i*len(set)/n : (i+1)*len(set)/n]; len(part) > 0 {
				parts = append(parts, part)
			}
		}
		reduced := false
		for _, part := range parts {
			if test(part) {
				set, n, reduced = slices.Clone(part), 2, true
				break
			}
		}
		for i := 0; !reduced && n > 2 && i < len(parts); i++ {
			rest := slices.Concat(slices.Concat(parts[:i]...), slices.Concat(parts[i+1:]...))
			if test(rest) {
				set, n, reduced = rest, max(n-1, 2), true
			}
		}
		if !reduced {
			if n >= len(set) {
				break
			}
			n = min(2*n, len(set))
		}
	}
	return set
}

// trials is the smallest number of requests, and of failures among them, that
// tells arms that fail from arms that don't with an error of 1% over all.
func trials(rate, base, failing, clean float64) (n, most int) {
	for n = 1; ; n += max(1, n/50) {
		below, false1 := 0.0, 1.0 // P(fewer | rate), P(as many | base)
		for c := 1; c <= n; c++ {
			below += binomial(n, c-1, rate)
			false1 -= binomial(n, c-1, base)
			if failing*below > 0.01 {
				break
			}
			if failing*below+clean*max(false1, 0) <= 0.01 {
				return n, c
			}
		}
	}
}

func binomial(n, y int, p float64) float64 {
	a, _ := math.Lgamma(float64(n + 1))
	b, _ := math.Lgamma(float64(y + 1))
	c, _ := math.Lgamma(float64(n - y + 1))
	return math.Exp(a - b - c + float64(y)*math.Log(p) + float64(n-y)*math.Log1p(-p))
}

// lowerBound is what no method can beat on average with an error of 1%, one
// cause of known size and known rates: each arm tells at most whether it fails,
// and a request at most what a channel of these rates carries; or what it takes
// to verify the cause, if that is more.
func lowerBound(w search.World) string {
	const e = 0.01
	size := len(w.Causes[0])
	choices := 1.0
	for i := range size {
		choices = choices * float64(w.Factors-i) / float64(i+1)
	}
	if w.Levels > 0 {
		choices = float64(w.Levels - 1)
	}
	h := func(p float64) float64 { return -p*math.Log2(p) - (1-p)*math.Log2(1-p) }
	kl := func(a, b float64) float64 { return a*math.Log(a/b) + (1-a)*math.Log((1-a)/(1-b)) }
	bits := (1-e)*math.Log2(choices) - h(e)
	launches := max(bits, float64(size+1))
	capacity := 0.0
	for share := 0.01; share < 1; share += 0.01 {
		capacity = max(capacity, h(share*w.Rate+(1-share)*w.Base)-share*h(w.Rate)-(1-share)*h(w.Base))
	}
	requests := max(bits/capacity, kl(e, 1-e)*(float64(size)/kl(w.Base, w.Rate)+1/kl(w.Rate, w.Base)))
	return fmt.Sprintf("%.1f / %.0f = %.0f", launches, requests, launchCost*launches+requests)
}

// simulations are the rows of a table.
func simulations(table string) []simulation {
	independent := search.Options{Dispersion: stats.Independent(), SpotChecks: -1}
	steady := independent
	steady.Steady = true
	dispersed := search.Options{SpotChecks: -1}
	one := func(factors, size int, rate float64) func(*rand.Rand) search.World {
		return func(r *rand.Rand) search.World {
			return search.World{Factors: factors, Causes: [][]int{r.Perm(factors)[:size]}, Rate: rate, Base: 0.001}
		}
	}
	with := func(world func(*rand.Rand) search.World, change func(*search.World, *rand.Rand)) func(*rand.Rand) search.World {
		return func(r *rand.Rand) search.World {
			w := world(r)
			change(&w, r)
			return w
		}
	}
	var rows []simulation
	switch table {
	case "combinations":
		for _, factors := range []int{6, 10, 16, 30} {
			for size := 1; size <= 3; size++ {
				for _, rate := range []float64{0.18, 0.02} {
					rows = append(rows, simulation{
						name: fmt.Sprintf("%d factors, %d needed, rate %g", factors, size, rate), world: one(factors, size, rate),
						options: steady, bound: true, leave: true,
					})
				}
			}
		}
	case "launches":
		trusting := dispersed
		trusting.Steady = true
		for _, rate := range []float64{0.18, 0.02} {
			two := one(10, 2, rate)
			rows = append(rows, simulation{name: fmt.Sprintf("rate %g, launches alike", rate), world: two, options: trusting, leave: true})
			for _, cv := range []float64{0.5, 1, 1.5} {
				rows = append(rows, simulation{
					name: fmt.Sprintf("rate %g, CV %g", rate, cv), options: trusting, leave: true,
					world: with(two, func(w *search.World, _ *rand.Rand) { w.CV = cv }),
				})
			}
			rows = append(rows, simulation{
				name: fmt.Sprintf("rate %g, bursts of 5", rate), options: trusting, leave: true,
				world: with(two, func(w *search.World, _ *rand.Rand) { w.Burst = 5 }),
			})
		}
	case "assumptions":
		two := one(10, 2, 0.18)
		add := func(name string, change func(*search.World, *rand.Rand)) {
			rows = append(rows, simulation{name: name, world: with(two, change), options: independent})
		}
		add("two causes {A}, {B,C}", func(w *search.World, r *rand.Rand) { p := r.Perm(10); w.Causes = [][]int{p[:1], p[1:3]} })
		add("overlapping {A,B}, {A,C}", func(w *search.World, r *rand.Rand) {
			p := r.Perm(10)
			w.Causes = [][]int{{p[0], p[1]}, {p[0], p[2]}}
		})
		add("needs none of the factors", func(w *search.World, _ *rand.Rand) { w.Causes = [][]int{{}} })
		add("needs five, prior up to four", func(w *search.World, r *rand.Rand) { w.Causes = [][]int{r.Perm(10)[:5]} })
		add("half-life 2000", func(w *search.World, _ *rand.Rand) { w.HalfLife = 2000 })
		add("half-life 600", func(w *search.World, _ *rand.Rand) { w.HalfLife = 600 })
		add("outage at cost 500 to 1500", func(w *search.World, _ *rand.Rand) { w.Outage = [2]float64{500, 1500} })
		add("vanishes at cost 1200", func(w *search.World, _ *rand.Rand) { w.Vanishes = 1200 })
		add("two levels that modulate (x0.3)", func(w *search.World, r *rand.Rand) {
			p := others(r, w, 2)
			w.Modulators = map[int]float64{p[0]: 0.3, p[1]: 0.3}
		})
		add("poisoned after a failure", func(w *search.World, _ *rand.Rand) { w.Poison = 0.9 })
		add("poisoned, nobody notices, CV", func(w *search.World, _ *rand.Rand) { w.Poison, w.Unnoticed = 0.9, true })
		rows[len(rows)-1].options = dispersed
		add("a model that is wrong in 5% by itself", func(w *search.World, _ *rand.Rand) { w.Base = 0.05 })
		add("fails only after 40 requests", func(w *search.World, _ *rand.Rand) { w.Ripening = 40 })
		add("a pair that doesn't start", func(w *search.World, r *rand.Rand) {
			p := others(r, w, 2)
			w.Invalid = [][]int{{p[0], -p[1] - 1}}
		})
		add("a cause that can't be taken away", func(w *search.World, r *rand.Rand) {
			p := others(r, w, 1)
			w.Invalid = [][]int{{p[0], -w.Causes[0][0] - 1}}
		})
		add("not monotone, one pair of checks", func(w *search.World, r *rand.Rand) {
			p := others(r, w, 2)
			w.Masks = [][2]int{{p[0], p[1]}}
		})
		rows[len(rows)-1].options.SpotChecks = 1
		add("a factor of the client's", func(w *search.World, r *rand.Rand) { w.ClientSide = []int{w.Causes[0][0], others(r, w, 1)[0]} })
	case "order":
		for _, levels := range []int{16, 64, 256} {
			for _, rate := range []float64{0.18, 0.02} {
				rows = append(rows, simulation{
					name: fmt.Sprintf("%d patches, rate %g", levels, rate), options: steady, bound: true,
					world: func(r *rand.Rand) search.World {
						return search.World{Factors: 1, Levels: levels + 1, First: 1 + r.IntN(levels), Causes: [][]int{{0}}, Rate: rate, Base: 0.001}
					},
				})
			}
		}
	case "null":
		none := func(base float64) func(*rand.Rand) search.World {
			return func(*rand.Rand) search.World { return search.World{Factors: 10, Base: base} }
		}
		all := func(change func(*search.World, *rand.Rand)) func(*rand.Rand) search.World {
			return func(r *rand.Rand) search.World {
				w := search.World{Factors: 10, Causes: [][]int{{}}, Rate: 0.18, Base: 0.001}
				change(&w, r)
				return w
			}
		}
		add := func(name string, world func(*rand.Rand) search.World) {
			rows = append(rows, simulation{name: name, world: world, options: dispersed, null: true})
			rows[len(rows)-1].options.Budget.Cost = 30_000
		}
		add("no fault, clean", none(0.0001))
		add("no fault, base 0.001", none(0.001))
		add("numerics: a factor doubles 0.001", func(r *rand.Rand) search.World {
			return search.World{Factors: 10, Base: 0.001, Causes: [][]int{{r.IntN(10)}}, Rate: 0.002}
		})
		add("weak model, 5% wrong everywhere", all(func(w *search.World, _ *rand.Rand) { w.Rate = 0.05 }))
		add("weak model, 5%, launches differ", all(func(w *search.World, _ *rand.Rand) { w.Rate, w.CV = 0.05, 0.5 }))
		add("only drift: half-life 2000", all(func(w *search.World, _ *rand.Rand) { w.HalfLife = 2000 }))
		add("only drift: outage 500 to 1500", all(func(w *search.World, _ *rand.Rand) { w.Outage = [2]float64{500, 1500} }))
		add("only drift: vanishes at 1200", all(func(w *search.World, _ *rand.Rand) { w.Vanishes = 1200 }))
		add("only drift: comes and goes, 600 each", all(func(w *search.World, _ *rand.Rand) { w.Period = 600 }))
		add("only drift: comes and goes, 1500 each", all(func(w *search.World, _ *rand.Rand) { w.Period = 1500 }))
	}
	return rows
}

// others are factors that no cause has.
func others(r *rand.Rand, w *search.World, n int) []int {
	var out []int
	for _, f := range r.Perm(w.Factors) {
		if len(out) < n && !slices.ContainsFunc(w.Causes, func(c []int) bool { return slices.Contains(c, f) }) {
			out = append(out, f)
		}
	}
	return out
}

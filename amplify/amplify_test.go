package amplify

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/workload"
)

// server is a synthetic one: each move multiplies its rate of failure, and
// launches differ.
type server struct {
	r       *rand.Rand
	base    float64
	factors map[string]float64 // by move; 1 where there is none
	slow    map[string]float64 // by move: how much longer a request takes
	cv      float64            // of the rates of launches
	bursts  float64            // failures that come together, on average
	model   map[string]float64 // the model's own mistakes, by move
	launch  float64
	began   int
	sent    int
	took    time.Duration
}

func (s *server) of(name string, factors map[string]float64) float64 {
	f := 1.0
	for move := range strings.SplitSeq(name, " + ") {
		if m, ok := factors[move]; ok {
			f *= m
		}
	}
	return f
}

func (s *server) rate(name string) float64 { return min(s.base*s.of(name, s.factors), 0.6) }

func (s *server) own(name string) float64 {
	m := 0.0
	for move := range strings.SplitSeq(name, " + ") {
		m = max(m, s.model[move])
	}
	return m
}

func (s *server) play(t Trial) (Outcome, error) {
	if t.Launch {
		s.began++
		s.launch = 1
		if s.cv > 0 {
			s.launch = gamma(s.r, 1/(s.cv*s.cv)) * s.cv * s.cv
		}
	}
	out := Outcome{Judged: t.Requests}
	rate := min(s.rate(t.Name)*s.launch, 0.95)
	if t.Safe {
		rate = 0
	}
	for range t.Requests {
		if s.r.Float64() < rate/max(s.bursts, 1) {
			out.Failures += max(int(s.bursts), 1)
		} else if s.r.Float64() < s.own(t.Name) {
			out.Failures++
		}
	}
	out.Failures = min(out.Failures, out.Judged)
	out.Run = time.Duration(float64(t.Requests) * s.of(t.Name, s.slow) * float64(50*time.Millisecond))
	out.Took = out.Run + time.Second
	if t.Launch {
		out.Took += 20 * time.Second
	}
	s.sent += t.Requests
	s.took += out.Took
	return out, nil
}

// gamma draws from the gamma distribution of this shape and scale 1: G. Marsaglia
// and W. W. Tsang, ACM TOMS 26, 2000.
func gamma(r *rand.Rand, shape float64) float64 {
	if shape < 1 {
		return gamma(r, shape+1) * math.Pow(r.Float64(), 1/shape)
	}
	d := shape - 1.0/3
	c := 1 / math.Sqrt(9*d)
	for {
		x := r.NormFloat64()
		v := 1 + c*x
		if v <= 0 {
			continue
		}
		v = v * v * v
		if math.Log(r.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}

func base(t testing.TB, p workload.Plan, concurrency int) Shape {
	t.Helper()
	p, err := p.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return Shape{Workload: p, Concurrency: concurrency}
}

// draw draws a server: a few moves matter.
func draw(r *rand.Rand, cv, bursts float64) *server {
	s := &server{r: r, base: math.Pow(10, -4+2*r.Float64()), factors: map[string]float64{}, slow: map[string]float64{}, cv: cv, bursts: bursts}
	for _, m := range Moves() {
		switch r.IntN(6) {
		case 0:
			s.factors[m.Name] = math.Pow(10, 2*r.Float64())
		case 1:
			s.factors[m.Name] = r.Float64()
		}
		s.slow[m.Name] = 0.5 + 1.5*r.Float64()
	}
	return s
}

var searches = flag.Int("searches", 20, "synthetic searches of each kind")

// TestPicks: what is chosen fails nearly as often as the best single move does,
// however launches differ, and what is stated of it is true.
func TestPicks(t *testing.T) {
	for _, tt := range []struct {
		name       string
		cv, bursts float64
	}{{"alike", 0, 1}, {"launches differ", 0.5, 1}, {"launches differ much", 1, 1}, {"bursts", 0.5, 3}} {
		t.Run(tt.name, func(t *testing.T) {
			tellable, near, measured, rates, factors, raised, launches, requests := 0, 0, 0, 0, 0, 0, 0, 0
			for seed := range uint64(*searches) {
				s := draw(rand.New(rand.NewPCG(seed, 1)), tt.cv, tt.bursts)
				o := Options{Base: base(t, workload.Plan{Kind: "agent", Sessions: 16}, 16), Seed: seed, Play: s.play}
				got, err := Find(o)
				if err != nil {
					t.Fatal(err)
				}
				launches, requests = launches+got.Used.Launches, requests+got.Used.Requests
				perMinute := func(name string) float64 { return s.rate(name) / s.of(name, s.slow) }
				best, name := 0.0, DefaultBase
				for _, shape := range o.Shapes() {
					if perMinute(shape) > best {
						best, name = perMinute(shape), shape
					}
				}
				// What fails less than a few times in its share of the requests can't
				// be told from the others by anybody.
				share := searching * float64(got.Budget.Requests) / float64(len(o.Shapes()))
				if s.rate(name)*share >= 5*tt.bursts {
					tellable++
					if got.Best != nil && perMinute(got.Best.Name) >= best/3 {
						near++
					} else if testing.Verbose() {
						t.Logf("seed %d: chose %+v; %s fails %.3g", seed, got.Best, name, s.rate(name))
					}
				}
				if got.Best == nil {
					continue
				}
				measured++
				rate := s.rate(got.Best.Name)
				if got.Best.Rate.Low <= rate && rate <= got.Best.Rate.High {
					rates++
				}
				if got.Status == Raised {
					raised++
				}
				truth := rate / s.rate(DefaultBase)
				if got.Best.Name == DefaultBase || got.Factor.Low <= truth && (got.Factor.High == 0 || truth <= got.Factor.High) {
					factors++
				}
			}
			t.Logf("%d searches: %d of %d that could be told are near the best; %d measured, %d of their rates and %d of their factors covered, %d raised; %.1f launches, %d requests each",
				*searches, near, tellable, measured, rates, factors, raised, float64(launches)/float64(*searches), requests / *searches)
			for what, got := range map[string][2]int{"are near the best": {near, tellable}, "rates are covered": {rates, measured}, "factors are covered": {factors, measured}} {
				if float64(got[0]) < 0.95*float64(got[1])-1e-9 || got[1] < *searches/3 {
					t.Errorf("%d of %d %s", got[0], got[1], what)
				}
			}
		})
	}
}

// TestAnyServer: whatever happens, no more is used than the budget, the books
// are right, and what is measured was never used to choose.
func TestAnyServer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		s := draw(r, rapid.SampledFrom([]float64{0, 0.5, 1.5}).Draw(t, "cv"), 1)
		s.base = math.Pow(10, -5*rapid.Float64Range(0, 1).Draw(t, "rate"))
		plan, err := workload.Plan{Kind: rapid.SampledFrom(workload.Kinds()).Draw(t, "kind"), Rounds: rapid.IntRange(1, 4).Draw(t, "rounds")}.WithDefaults()
		if err != nil {
			t.Fatal(err)
		}
		o := Options{
			Base:   Shape{Workload: plan, Concurrency: rapid.IntRange(1, 40).Draw(t, "concurrency")},
			Budget: Budget{Launches: rapid.IntRange(MinLaunches, 40).Draw(t, "launches"), Requests: rapid.IntRange(1000, 40_000).Draw(t, "requests")},
			NoSafe: rapid.Bool().Draw(t, "no safe"), NoLaunch: rapid.IntRange(0, 3).Draw(t, "no launch") == 0, PerRequest: rapid.Bool().Draw(t, "per request"), Seed: rapid.Uint64().Draw(t, "search seed"),
		}
		if rapid.Bool().Draw(t, "wall") {
			o.Budget.Wall = time.Duration(rapid.IntRange(60, 3600).Draw(t, "seconds")) * time.Second
		}
		odd := rapid.IntRange(0, 3).Draw(t, "odd")
		measured := map[string]int{}
		launches := 0
		o.Play = func(trial Trial) (Outcome, error) {
			out, err := s.play(trial)
			if trial.Launch {
				launches++
			}
			switch {
			case odd > 0 && r.IntN(10) < odd && r.IntN(2) == 0:
				out.Void = "the client stood still"
			case odd > 1 && r.IntN(20) == 0:
				out.Poisoned = true
			case odd > 2 && !trial.Launch && r.IntN(20) == 0:
				out.Launched = true
				launches++
			}
			if trial.Phase == Measure && out.Void == "" {
				measured[trial.Name] += out.Judged
			}
			if trial.Launch && o.NoLaunch {
				t.Fatal("a launch of a server that runs")
			}
			if trial.Safe && o.NoSafe {
				t.Fatal("a check in a safe arm that there isn't")
			}
			return out, err
		}
		got, err := Find(o)
		if e, ok := errors.AsType[*BudgetError](err); ok {
			if s.sent > 0 || e.Least.Requests <= o.Budget.Requests {
				t.Fatalf("%v of %+v, after %d requests", err, o.Budget, s.sent)
			}
			t.Skip("the budget is too small")
		}
		if err != nil {
			t.Fatal(err)
		}
		if o.NoLaunch && odd < 3 && got.Best != nil && got.Best.Launches != 1 {
			t.Fatalf("one server counts as %d launches", got.Best.Launches)
		}
		if got.Used.Requests != s.sent || got.Used.Launches != launches || got.Used.Wall != s.took {
			t.Fatalf("used %+v; %d launches, %d requests, %s", got.Used, launches, s.sent, s.took)
		}
		// A server that dies is launched again, whatever the budget.
		if s.sent > o.Budget.Requests || launches > o.Budget.Launches && odd < 3 {
			t.Fatalf("%d launches, %d requests of %+v", launches, s.sent, o.Budget)
		}
		if got.Best != nil && got.Best.Requests != measured[got.Best.Name] {
			t.Fatalf("%s: stated of %d requests, %d were measured", got.Best.Name, got.Best.Requests, measured[got.Best.Name])
		}
		if got.Status == Raised && (got.Best == nil || got.Best.Name == DefaultBase || got.Factor.Low <= 1) {
			t.Fatalf("raised: %+v", got)
		}
		if got.Status == Nothing && !(got.Shows > 0) {
			t.Fatalf("nothing failed, and a rate above %g would have shown", got.Shows)
		}
	})
}

// TestModelsOwn: a shape that the model itself gets wrong isn't chosen.
func TestModelsOwn(t *testing.T) {
	for seed := range uint64(20) {
		s := &server{
			r: rand.New(rand.NewPCG(seed, 2)), base: 1e-3, factors: map[string]float64{"evict": 30, "waves": 3},
			model: map[string]float64{"echo": 0.2, "2x context": 0.05},
		}
		got, err := Find(Options{Base: base(t, workload.Plan{Kind: "agent"}, 8), Seed: seed, Play: s.play})
		if err != nil {
			t.Fatal(err)
		}
		if got.Best == nil || !strings.HasPrefix(got.Best.Name, "evict") || strings.Contains(got.Best.Name, "2x context") {
			t.Errorf("seed %d: %+v", seed, got.Best)
		}
	}
}

func TestFixed(t *testing.T) {
	s := draw(rand.New(rand.NewPCG(1, 1)), 0, 1)
	_, err := Find(Options{Base: base(t, workload.Plan{Kind: "agent"}, 8), Fixed: []string{"concurrency", "kind"}, Play: func(trial Trial) (Outcome, error) {
		if trial.Shape.Concurrency != 8 || trial.Shape.Workload.Kind != "agent" {
			t.Errorf("%s: %+v", trial.Name, trial.Shape)
		}
		return s.play(trial)
	}})
	if err != nil {
		t.Fatal(err)
	}
	down := errors.New("down")
	n := 0
	got, err := Find(Options{Base: base(t, workload.Plan{Kind: "agent"}, 8), Play: func(trial Trial) (Outcome, error) {
		if n++; n > 30 {
			return Outcome{}, down
		}
		return s.play(trial)
	}})
	if !errors.Is(err, down) || got.Status != Unfinished || len(got.Tried) == 0 {
		t.Errorf("%v, %+v", err, got)
	}
}

// TestMoves: every move makes a workload of any kind that can be played, or
// says that it can't.
func TestMoves(t *testing.T) {
	for _, kind := range workload.Kinds() {
		b := base(t, workload.Plan{Kind: kind}, 8)
		made := 0
		for _, m := range Moves() {
			s, ok := apply(m, b, nil)
			if !ok {
				continue
			}
			made++
			if s.turns() < 1 {
				t.Errorf("%s of %s has no turns", m.Name, kind)
			}
			for _, n := range Moves() {
				if again, ok := apply(n, s, nil); ok && fmt.Sprint(again.Settings()) == fmt.Sprint(s.Settings()) {
					t.Errorf("%s after %s changes nothing", n.Name, m.Name)
				}
			}
		}
		if made < 10 {
			t.Errorf("%s: %d moves", kind, made)
		}
	}
}

package search

import (
	"cmp"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strconv"

	"github.com/culprit-project/culprit/design"
)

// World is a synthetic server with a known cause, for simulations and tests: its
// factors are numbered, two levels each.
type World struct {
	Factors int
	// Causes are the sets of factors that fail when all of them are suspect;
	// an empty set fails always.
	Causes [][]int
	Rate   float64   // of failures in arms that fail
	Rates  []float64 // by cause, where they differ
	Base   float64   // of failures in clean arms

	CV        float64 // coefficient of variation of a launch's own rate
	Burst     float64 // mean number of failures in a row; 0 and 1 are one
	Poison    float64 // rate after a launch's first failure; 0 is no change
	Unnoticed bool    // nobody notices the poison
	HalfLife  float64 // of the rate, in cost
	Outage    [2]float64
	Vanishes  float64 // from this cost on there are no failures
	Period    float64 // the rate comes and goes, for this cost each
	Ripening  int     // requests of a launch before it can fail

	Invalid [][]int // sets that don't start; -f-1 is factor f being safe
	// Masks hides failures when the first factor is suspect and the second safe:
	// the world isn't monotone.
	Masks [][2]int
	// Modulators multiply the rate when they are safe.
	Modulators map[int]float64
	ClientSide []int
	LaunchCost float64 // 0 is 120

	// Levels gives the first factor that many levels in order, the safe one
	// first; it counts as suspect from level First to level Last (0 is the
	// highest), and the failing arm has level Failing (0 is the highest).
	Levels, First, Last, Failing int
}

// Space is the world's arms.
func (w *World) Space() design.Space {
	s := design.Space{}
	for i := range w.Factors {
		f := design.Factor{
			Name: factorName(i), ClientSide: slices.Contains(w.ClientSide, i),
			Levels: []design.Level{{Name: "off", Role: design.Safe}, {Name: "on", Role: design.Suspect}},
		}
		if i == 0 && w.Levels > 0 {
			f.Ordered = true
			f.Levels = make([]design.Level, w.Levels)
			for l := range f.Levels {
				f.Levels[l].Name = strconv.Itoa(l)
			}
			f.Levels[0].Role = design.Safe
			f.Levels[cmp.Or(w.Failing, w.Levels-1)].Role = design.Suspect
		}
		s.Factors = append(s.Factors, f)
	}
	return s
}

func factorName(i int) string { return fmt.Sprintf("f%02d", i) }

// Sets are the true causes as a finding states them.
func (w *World) Sets() []design.Arm {
	var out []design.Arm
	for _, c := range w.Causes {
		set := design.Arm{}
		for _, f := range c {
			set[factorName(f)] = "on"
			if f == 0 && w.Levels > 0 {
				set[factorName(f)] = strconv.Itoa(w.First)
			}
		}
		out = append(out, set)
	}
	return out
}

// on are the factors that are suspect in an arm.
func (w *World) on(a design.Arm) []bool {
	on := make([]bool, w.Factors)
	for i := range on {
		on[i] = a[factorName(i)] == "on"
	}
	if w.Levels > 0 {
		level, _ := strconv.Atoi(a[factorName(0)])
		on[0] = level >= w.First && level <= cmp.Or(w.Last, w.Levels-1)
	}
	return on
}

// Server is a world that runs.
type Server struct {
	world  *World
	random *rand.Rand

	Launches, Requests int
	Cost               float64 // requests, and launches in requests

	factor   float64 // of this launch, on the rate
	served   int     // by this launch
	poisoned bool
	burst    int // failures still to come
}

// Serve starts a world. The same seed and requests give the same answers.
func (w *World) Serve(seed uint64) *Server {
	return &Server{world: w, random: rand.New(rand.NewPCG(seed, 0x3b))}
}

// Run does what a proposal asks for.
func (s *Server) Run(p Proposal) Observation {
	on := s.world.on(p.Arm)
	if p.Launch && !s.Launch(on) {
		return Observation{Outcome: Invalid, LaunchCost: s.world.launchCost()}
	}
	o := Observation{Outcome: Ran}
	if p.Launch {
		o.LaunchCost = s.world.launchCost()
	}
	for range p.Requests {
		o.Requests++
		if s.Request(on) {
			o.Failures++
			if o.FirstFailure == 0 {
				o.FirstFailure = o.Requests
			}
		}
	}
	o.Poisoned = s.poisoned && !s.world.Unnoticed
	return o
}

func (w *World) launchCost() float64 {
	if w.LaunchCost == 0 {
		return 120
	}
	return w.LaunchCost
}

// Launch starts the server in an arm, and says whether it starts.
func (s *Server) Launch(on []bool) bool {
	w := s.world
	s.Launches++
	s.Cost += w.launchCost()
	s.served, s.poisoned, s.burst = 0, false, 0
	s.factor = 1
	for _, set := range w.Invalid {
		if !slices.ContainsFunc(set, func(f int) bool { return f >= 0 && !on[f] || f < 0 && on[-f-1] }) {
			return false
		}
	}
	if w.CV > 0 {
		// A gamma with mean 1 is near enough to the beta for small rates.
		shape := 1 / (w.CV * w.CV)
		s.factor = gamma(s.random, shape) / shape
	}
	return true
}

// Request asks the running server once, and says whether it failed.
func (s *Server) Request(on []bool) bool {
	s.Requests++
	s.Cost++
	s.served++
	failed := s.fails(on)
	if failed && s.world.Poison > 0 {
		s.poisoned = true
	}
	return failed
}

func (s *Server) fails(on []bool) bool {
	w := s.world
	if s.poisoned {
		return s.random.Float64() < w.Poison
	}
	if s.burst > 0 {
		s.burst--
		return true
	}
	p := w.Base
	for i, c := range w.Causes {
		if !slices.ContainsFunc(c, func(f int) bool { return !on[f] }) {
			r := w.Rate
			if i < len(w.Rates) {
				r = w.Rates[i]
			}
			p = max(p, s.rate(on, r))
		}
	}
	failed := s.random.Float64() < p
	if failed && w.Burst > 1 && p > w.Base {
		for s.random.Float64() > 1/w.Burst {
			s.burst++
		}
	}
	return failed
}

// rate is that of a failing arm now.
func (s *Server) rate(on []bool, r float64) float64 {
	w := s.world
	for _, m := range w.Masks {
		if on[m[0]] && !on[m[1]] {
			return 0
		}
	}
	switch {
	case s.served <= w.Ripening,
		w.Vanishes > 0 && s.Cost > w.Vanishes,
		w.Outage[1] > 0 && s.Cost > w.Outage[0] && s.Cost < w.Outage[1],
		w.Period > 0 && math.Mod(s.Cost/w.Period, 2) >= 1:
		return 0
	}
	for f, by := range w.Modulators {
		if !on[f] {
			r *= by
		}
	}
	if w.HalfLife > 0 {
		r *= math.Pow(0.5, s.Cost/w.HalfLife)
	}
	if w.Burst > 1 {
		r /= w.Burst
	}
	return min(r*s.factor, max(r, 0.95))
}

// gamma draws with scale 1 (G. Marsaglia and W. W. Tsang, ACM TOMS 26, 2000).
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
		if math.Log(1-r.Float64()) < x*x/2+d-d*v+d*math.Log(v) {
			return d * v
		}
	}
}

package search

import (
	"math/rand/v2"
	"slices"
)

// Forecast is what a hunt may take: what nine in ten of many simulated ones
// stayed between.
type Forecast struct {
	Rate     float64 // of failure, in the failing arm
	Launches [2]int
	Requests [2]int
}

// Foresee simulates hunts over so many factors, with causes of one to three
// levels drawn at random, for a failing arm that fails at a rate.
func Foresee(factors int, rate float64, o Options, hunts int) (Forecast, error) {
	random := rand.New(rand.NewPCG(o.Seed, 0xf04e))
	o.Budget = Budget{}
	var launches, requests []int
	for range hunts {
		w := World{Factors: factors, Rate: rate, Base: rate / 100, CV: 0.3, LaunchCost: o.LaunchCost}
		w.Causes = [][]int{random.Perm(factors)[:1+random.IntN(min(3, factors))]}
		s, err := New(w.Space(), o)
		if err != nil {
			return Forecast{}, err
		}
		server := w.Serve(random.Uint64())
		for {
			p, more := s.Next()
			if !more {
				break
			}
			if err := s.Observe(server.Run(p)); err != nil {
				return Forecast{}, err
			}
		}
		s.Close()
		launches, requests = append(launches, server.Launches), append(requests, server.Requests)
	}
	return Forecast{rate, middle(launches), middle(requests)}, nil
}

// middle holds nine tenths of some figures.
func middle(figures []int) [2]int {
	slices.Sort(figures)
	cut := len(figures) / 20
	return [2]int{figures[cut], figures[len(figures)-1-cut]}
}

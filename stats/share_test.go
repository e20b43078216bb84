package stats

import (
	"math"
	"math/rand/v2"
	"testing"
)

// TestAnytimeOdds: the truth is within at all times, though each launch moves it.
func TestAnytimeOdds(t *testing.T) {
	const sequences = 100
	for _, tt := range []struct {
		name            string
		odds, deviation float64
	}{{"even", 1, 0}, {"rare", 0.02, 0.25}, {"launches differ", 10, 0.5}} {
		t.Run(tt.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(1, 1))
			missed := 0
			for range sequences {
				var launches []Cluster
				out := false
				for n := range 8 {
					c := Cluster{Trials: 1 + r.IntN(30)}
					x := math.Log(tt.odds) + tt.deviation*r.NormFloat64()
					for range c.Trials {
						if r.Float64() < 1/(1+math.Exp(-x)) {
							c.Failures++
						}
					}
					launches = append(launches, c)
					if n%3 != 1 {
						continue
					}
					low, high := AnytimeOdds(launches, 0.95)
					out = out || tt.odds < low || tt.odds > high
				}
				if out {
					missed++
				}
			}
			t.Logf("missed in %d of %d", missed, sequences)
			if missed > sequences/20 {
				t.Errorf("missed in %d of %d", missed, sequences)
			}
		})
	}
	// It is of use: 37 of 37, on two launches, are more than odds of 5.
	if low, high := AnytimeOdds([]Cluster{{24, 24}, {13, 13}}, 0.95); low < 5 || !math.IsInf(high, 1) {
		t.Errorf("%g to %g", low, high)
	}
	if low, high := AnytimeOdds(nil, 0.95); low != 0 || !math.IsInf(high, 1) {
		t.Errorf("of nothing, %g to %g", low, high)
	}
}

package workload

import (
	"iter"
	"math/rand/v2"
	"time"
)

// Arrivals returns when the requests of an open loop are due, counted from
// its start: a Poisson process of ratePerSecond, which must be positive. It
// has no end. The same seed gives the same times on every machine.
func Arrivals(seed uint64, ratePerSecond float64) iter.Seq[time.Duration] {
	return func(yield func(time.Duration) bool) {
		r := newRand(seed, "arrivals", 0, "gaps")
		var at time.Duration
		for {
			// One rounding a step, and no sum of a product that some
			// machines would fuse.
			at += time.Duration(float64(exponential(r)*float64(time.Second)) / ratePerSecond)
			if at < 0 || !yield(at) { // the time has run over after 292 years
				return
			}
		}
	}
}

// exponential draws from the exponential distribution of mean 1 by comparing
// uniform numbers only, as J. von Neumann showed ("Various techniques used in
// connection with random digits", 1951): logarithms differ in their last bit
// from machine to machine.
//
// A run of falling numbers that begins with x has an odd length with
// probability exp(-x); after an even one the whole part grows by one.
func exponential(r *rand.Rand) float64 {
	for whole := 0.0; ; whole++ {
		first := r.Float64()
		last, odd := first, true
		for next := r.Float64(); next < last; next = r.Float64() {
			last, odd = next, !odd
		}
		if odd {
			return whole + first
		}
	}
}

package stats

import (
	"math"
	"slices"
)

// FisherExact tests two rates of independent trials: a failures in m trials
// against b in n, given the number of failures in all. greater is the chance of
// a or more; twoSided adds the tables of the other side that are no more likely
// than this one. (R. A. Fisher, Statistical Methods for Research Workers, 1934.)
func FisherExact(a, m, b, n int) (greater, twoSided float64) {
	failures := a + b
	all := logChoose(m+n, failures)
	chance := func(x int) float64 {
		return math.Exp(logChoose(m, x) + logChoose(n, failures-x) - all)
	}
	// Chances that are equal may differ in their last bits.
	limit := chance(a) * (1 + 1e-7)
	for x := max(0, failures-n); x <= min(m, failures); x++ {
		p := chance(x)
		if x >= a {
			greater += p
		}
		if p <= limit {
			twoSided += p
		}
	}
	return min(greater, 1), min(twoSided, 1)
}

func logChoose(n, k int) float64 {
	return logFactorial(n) - logFactorial(k) - logFactorial(n-k)
}

func logFactorial(n int) float64 {
	v, _ := math.Lgamma(float64(n) + 1)
	return v
}

// Holm adjusts the P of several tests so that rejecting those with an adjusted
// P of at most e errs anywhere with probability at most e, however the tests
// depend on each other (S. Holm, Scandinavian Journal of Statistics 6, 1979).
// The order stays.
func Holm(p []float64) []float64 {
	order := make([]int, len(p))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		switch {
		case p[a] < p[b]:
			return -1
		case p[a] > p[b]:
			return 1
		}
		return 0
	})
	adjusted := make([]float64, len(p))
	largest := 0.0
	for rank, i := range order {
		largest = max(largest, min(1, p[i]*float64(len(p)-rank)))
		adjusted[i] = largest
	}
	return adjusted
}

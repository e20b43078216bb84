package stats

import (
	"math"
	"math/rand/v2"
	"slices"
)

// Test is the outcome of a one-sided test of two rates.
type Test struct {
	P          float64 // chance of at least such a difference when there is none
	Difference float64 // of the rates
	Low, High  float64 // 95% interval of the difference
}

const (
	// With draws shuffles the smallest P is 5e-5: small enough to survive
	// Holm over dozens of classes at an error of 0.01, in about 10 ms.
	draws = 19_999
	// The shuffling stops when it is clear that there is nothing to see. 100
	// give P to 10%.
	enough = 100
)

// Excess says whether main's rate is higher than control's beyond chance. P is
// the larger of two, so it errs no more often than either:
//
// A permutation test shuffles whole clusters between the two sides: when there
// is no difference, a session may as well have been on the other. That is exact
// for any correlation within clusters and any number of them, and needs no
// estimate of the correlation, which can't be had from a control without
// failures. It compares the means of the clusters' own rates, and wants clusters
// of the same plan.
//
// Fisher's exact test takes the trials as independent. It doesn't mind that one
// side's clusters are larger throughout (a control cut short, say), where more
// clusters have a failure by that alone.
//
// With few clusters P can't be small: 3 of 80 sessions against 0 of 80 give
// 0.12. The shuffles come from a fixed seed and stop early when many reach the
// difference (J. Besag and P. Clifford, Biometrika 78, 1991), which keeps P
// valid.
//
// Difference is that of ClusterRate's rates. Its interval is built from theirs by
// R. G. Newcombe's method 10 (Statistics in Medicine 17, 1998), makes sense at
// rates of 0 too, and is wider than P suggests there. When one side has no
// trials, P is 1 and the difference unknown: NaN, between -1 and 1.
func Excess(main, control []Cluster) Test {
	m, c := ClusterRate(main, 0.95), ClusterRate(control, 0.95)
	if m.Trials == 0 || c.Trials == 0 {
		return Test{P: 1, Difference: math.NaN(), Low: -1, High: 1}
	}
	d := m.Rate - c.Rate
	independent, _ := FisherExact(m.Failures, m.Trials, c.Failures, c.Trials)
	return Test{
		P:          max(independent, permutation(rates(main), rates(control))),
		Difference: d,
		Low:        d - math.Hypot(m.Rate-m.Low, c.High-c.Rate),
		High:       d + math.Hypot(m.High-m.Rate, c.Rate-c.Low),
	}
}

// rates gives each cluster's own rate.
func rates(clusters []Cluster) []float64 {
	var rates []float64
	for _, c := range clusters {
		if c.Trials > 0 {
			rates = append(rates, float64(c.Failures)/float64(c.Trials))
		}
	}
	return rates
}

// permutation is the chance that the mean of main exceeds that of control by at
// least what it does, when the values are dealt to the two anew.
func permutation(main, control []float64) float64 {
	// The sum of one side decides the difference of means. Deal the smaller.
	values, dealt, sign := slices.Concat(main, control), len(main), 1.0
	if len(control) < len(main) {
		values, dealt, sign = slices.Concat(control, main), len(control), -1.0
	}
	score := func() float64 {
		sum := 0.0
		for _, v := range values[:dealt] {
			sum += v
		}
		return sign * sum
	}
	// Sums that are equal may differ in their last bits.
	seen := score() - 1e-9

	r := rand.New(rand.NewPCG(1, 2))
	reached := 0
	for n := 1; n <= draws; n++ {
		for i := range dealt {
			j := i + r.IntN(len(values)-i)
			values[i], values[j] = values[j], values[i]
		}
		if score() >= seen {
			reached++
		}
		if reached == enough {
			return float64(reached) / float64(n)
		}
	}
	return float64(reached+1) / (draws + 1)
}

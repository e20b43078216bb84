// Package stats holds the statistics of verdicts: rates with intervals when
// the trials of a session are correlated, the excess of one rate over another,
// and exact tests. Plain numbers in, plain numbers out: the same arguments
// give the same result, on every machine.
//
// Stability: may change.
package stats

import "math"

// Wilson is the score interval of a rate (E. B. Wilson, JASA 22, 1927) for
// independent trials. level is the coverage, such as 0.95. No trials give
// (0, 1).
func Wilson(failures, trials int, level float64) (low, high float64) {
	if trials == 0 {
		return 0, 1
	}
	return wilson(float64(failures)/float64(trials), float64(trials), normalQuantile(level))
}

// wilson takes the number of trials as a real number, since an effective
// sample size is one.
func wilson(rate, trials, z float64) (low, high float64) {
	zz := z * z / trials
	center := rate + zz/2
	half := math.Sqrt(zz*rate*(1-rate) + zz*zz/4)
	low, high = (center-half)/(1+zz), (center+half)/(1+zz)
	// Exact at the ends, whatever the rounding.
	if rate <= 0 {
		low = 0
	}
	if rate >= 1 {
		high = 1
	}
	return max(low, 0), min(high, 1)
}

// Cluster counts the trials that belong together: one session's requests.
type Cluster struct{ Failures, Trials int }

// Rate is a rate with its interval.
type Rate struct {
	Failures, Trials int
	Clusters         int // with at least one trial
	Rate             float64
	Low, High        float64
	// DesignEffect is how many times wider the variance is than that of as
	// many independent trials, at least 1.
	DesignEffect float64
}

// ClusterRate is the rate of failures over all trials with an interval that
// lets the trials of a cluster be correlated as they may: clusters are
// independent, trials aren't.
//
// The variance is that of the ratio estimator between clusters, with the
// small-sample factor k/(k-1) for k clusters; its quotient by the binomial
// variance is the design effect. The interval is Wilson's on trials/(design
// effect), with Student's t at k-1 degrees of freedom in place of the normal
// quantile since the variance is itself estimated. (Design effect: L. Kish,
// Survey Sampling, 1965; such intervals for small rates: E. L. Korn and
// B. I. Graubard, Survey Methodology 24, 1998.)
//
// An estimate from few failures is worth little, and from none it can't be had.
// So it is averaged with the largest design effect that there can be, where the
// trials of a cluster always fail together: the estimate weighs as much as there
// are clusters with a failure (or with a success, if those are fewer), the
// largest as much as one cluster. Without any failure, each cluster therefore
// counts as one trial: the widest interval that the data allow.
func ClusterRate(clusters []Cluster, level float64) Rate {
	var r Rate
	failing, passing := 0, 0 // clusters with a failure, with a success
	for _, c := range clusters {
		if c.Trials == 0 {
			continue
		}
		r.Clusters++
		r.Failures += c.Failures
		r.Trials += c.Trials
		if c.Failures > 0 {
			failing++
		}
		if c.Failures < c.Trials {
			passing++
		}
	}
	if r.Trials == 0 {
		return Rate{Rate: math.NaN(), High: 1, DesignEffect: 1}
	}
	k, n := float64(r.Clusters), float64(r.Trials)
	r.Rate = float64(r.Failures) / n
	largest := n / k
	weight := float64(min(failing, passing))
	if r.Clusters == 1 || weight == 0 {
		r.DesignEffect = largest
		r.Low, r.High = wilson(r.Rate, k, normalQuantile(level))
		return r
	}
	var squares float64
	for _, c := range clusters {
		d := float64(c.Failures) - r.Rate*float64(c.Trials)
		squares += d * d
	}
	variance := k / (k - 1) * squares / (n * n)
	estimate := max(1, variance/(r.Rate*(1-r.Rate)/n))
	r.DesignEffect = (weight*estimate + largest) / (weight + 1)
	r.Low, r.High = wilson(r.Rate, n/r.DesignEffect, studentQuantile(level, r.Clusters-1))
	return r
}

// normalQuantile is the z for which a standard normal is within ±z with
// probability level.
func normalQuantile(level float64) float64 { return math.Sqrt2 * math.Erfinv(level) }

// studentQuantile is the t for which Student's t is within ±t with probability
// level.
func studentQuantile(level float64, degrees int) float64 {
	// In theta = atan(t/sqrt(degrees)) the search has a bounded range.
	low, high := 0.0, math.Pi/2
	for range 60 {
		middle := (low + high) / 2
		if studentWithin(middle, degrees) < level {
			low = middle
		} else {
			high = middle
		}
	}
	return math.Tan(low) * math.Sqrt(float64(degrees))
}

// studentWithin is the probability that Student's t is within
// ±tan(theta)*sqrt(degrees): formulas 26.7.3 and 26.7.4 of M. Abramowitz and
// I. A. Stegun, Handbook of Mathematical Functions, 1964.
func studentWithin(theta float64, degrees int) float64 {
	sin, cos := math.Sincos(theta)
	if degrees%2 == 0 {
		sum, term := 0.0, 1.0
		for i := 2; i <= degrees; i += 2 {
			sum += term
			term *= float64(i-1) / float64(i) * cos * cos
		}
		return sin * sum
	}
	sum, term := 0.0, cos
	for i := 3; i <= degrees; i += 2 {
		sum += term
		term *= float64(i-1) / float64(i) * cos * cos
	}
	return 2 / math.Pi * (theta + sin*sum)
}

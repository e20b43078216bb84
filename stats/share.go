package stats

import (
	"math"
	"slices"
)

// AnytimeOdds holds the odds of a share that launches have in common, at all
// times at once with probability level: of the failures that two loads showed on
// one launch, say, those of the first against those of the second. What a launch
// does to both leaves the share as it is; what it does to one of them moves the
// log odds by a normal of standard deviation 0, 0.25 or 0.5, whichever fits. It
// is built as [AnytimeInterval] is. No trials give (0, +Inf).
func AnytimeOdds(launches []Cluster, level float64) (low, high float64) {
	const most, steps = 12.0, 241 // of log odds
	deviations, weights := []float64{0, 0.25, 0.5}, []float64{0.6, 0.25, 0.15}
	// Gauss and Hermite's five points of a standard normal (M. Abramowitz and
	// I. A. Stegun, Handbook of Mathematical Functions, 1964, table 25.10).
	points := []float64{-2.856970, -1.355626, 0, 1.355626, 2.856970}
	masses := []float64{0.011257, 0.222076, 0.533333, 0.222076, 0.011257}
	logs, all := make([]float64, steps), make([]float64, 0, steps*len(deviations))
	at := func(i int) float64 { return -most + 2*most*float64(i)/(steps-1) }
	for i := range logs {
		logs[i] = math.Inf(-1)
		for d, deviation := range deviations {
			sum := 0.0
			for _, c := range launches {
				var parts []float64
				for k, z := range points {
					x := at(i) + deviation*z
					// log p and log 1-p of log odds x
					parts = append(parts, math.Log(masses[k])-float64(c.Failures)*softplus(-x)-float64(c.Trials-c.Failures)*softplus(x))
					if deviation == 0 {
						parts[0] -= math.Log(masses[k])
						break
					}
				}
				sum += logSumExp(parts)
			}
			logs[i] = max(logs[i], sum)
			all = append(all, sum+math.Log(weights[d]/steps))
		}
	}
	limit := logSumExp(all) + math.Log(1-level)
	in := func(l float64) bool { return l > limit }
	first := slices.IndexFunc(logs, in)
	slices.Reverse(logs)
	last := steps - 1 - slices.IndexFunc(logs, in)
	low, high = 0, math.Inf(1)
	if first > 0 { // the neighbour is out
		low = math.Exp(at(first - 1))
	}
	if last < steps-1 {
		high = math.Exp(at(last + 1))
	}
	return low, high
}

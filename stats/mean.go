package stats

import "math"

// MeanInterval is the mean of samples and its interval by Student's
// distribution; with fewer than two samples the interval is everything.
func MeanInterval(samples []float64, level float64) (mean, low, high float64) {
	n := float64(len(samples))
	for _, x := range samples {
		mean += x / n
	}
	if len(samples) < 2 {
		return mean, math.Inf(-1), math.Inf(1)
	}
	sum := 0.0
	for _, x := range samples {
		sum += (x - mean) * (x - mean)
	}
	half := studentQuantile(level, len(samples)-1) * math.Sqrt(sum/(n-1)/n)
	return mean, mean - half, mean + half
}

package stats

import (
	"math"
	"slices"
)

// Median is the quantile at 0.5.
func Median(values []float64) float64 { return Quantiles(values, 0.5)[0] }

// Quantiles gives the quantiles at each of q, 0 to 1, interpolated between the
// two nearest values (type 7 of R. J. Hyndman and Y. Fan, The American
// Statistician 50, 1996). values stays as it is; without values they are NaN.
func Quantiles(values []float64, q ...float64) []float64 {
	sorted := slices.Sorted(slices.Values(values))
	out := make([]float64, len(q))
	for i, at := range q {
		if len(sorted) == 0 {
			out[i] = math.NaN()
			continue
		}
		rank := at * float64(len(sorted)-1)
		low := int(rank)
		high := min(low+1, len(sorted)-1)
		out[i] = sorted[low] + (rank-float64(low))*(sorted[high]-sorted[low])
	}
	return out
}

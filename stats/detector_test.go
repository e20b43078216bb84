package stats

import (
	"math"
	"math/rand/v2"
	"testing"
)

// runLength observes until the evidence exceeds threshold, at most limit times.
func runLength(d *Detector, rate, threshold float64, limit int, r *rand.Rand) int {
	for n := 1; n <= limit; n++ {
		d.Observe(r.Float64() < rate)
		if d.LogEvidence() >= threshold {
			return n
		}
	}
	return limit
}

// TestDetectorFalseAlarms measures the average run length to a false alarm,
// which the theory bounds from below by the threshold.
func TestDetectorFalseAlarms(t *testing.T) {
	const (
		limit     = 0.02
		threshold = 400.0
		runs      = 150
	)
	r := rand.New(rand.NewPCG(1, 2))
	total := 0
	for range runs {
		total += runLength(NewDetector(limit), limit, math.Log(threshold), 20*threshold, r)
	}
	if mean := float64(total) / runs; mean < threshold {
		t.Errorf("a false alarm each %.0f observations on average, want %g at least", mean, threshold)
	}
}

func TestDetectorDelay(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	threshold := math.Log(500_000)
	tests := []struct {
		name     string
		rate     float64
		at, most int
	}{
		{"at once", 0.18, 0, 40},
		{"after a healthy week", 0.18, 10_000, 40},
		{"small", 0.01, 0, 2500},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			const runs = 20
			total := 0
			for range runs {
				d := NewDetector(0.001)
				for range tt.at {
					d.Observe(false)
				}
				total += runLength(d, tt.rate, threshold, 100*tt.most, r)
			}
			if mean := total / runs; mean > tt.most {
				t.Errorf("found after %d observations on average, want %d at most", mean, tt.most)
			}
		})
	}
}

// TestDetectorSum checks the recursion against the sum that it stands for.
func TestDetectorSum(t *testing.T) {
	const limit = 0.1
	r := rand.New(rand.NewPCG(5, 6))
	d := NewDetector(limit)
	var seen []bool
	for range 40 {
		seen = append(seen, r.Float64() < 0.3)
		d.Observe(seen[len(seen)-1])
	}
	want := 0.0
	for _, s := range d.steps {
		for from := range seen {
			e := 0.0
			for _, failed := range seen[from:] {
				if failed {
					e += s.failed
				} else {
					e += s.sound
				}
			}
			want += math.Exp(e) / float64(len(d.steps))
		}
	}
	if got := math.Exp(d.LogEvidence()); math.Abs(got/want-1) > 1e-9 {
		t.Errorf("evidence %g, want %g", got, want)
	}
	if d.Observations() != len(seen) {
		t.Errorf("%d observations", d.Observations())
	}
}

package stats

import "math"

// Detector tells when a rate has risen, at a time that nobody knows, and may be
// looked at after each observation. It is an e-detector of Shiryaev-Roberts'
// form: the sum, over every time at which the rise may have begun, of the
// evidence for it since then; averaged over how large the rise may be.
//
// As long as each observation fails with probability limit at most, whatever
// came before, the evidence exceeds c after c observations or more on average
// (Shin, Ramdas, Rinaldo: "E-detectors: a nonparametric framework for
// sequential change detection", arXiv 2203.03532).
type Detector struct {
	steps []step
	sum   []float64 // logarithm, by alternative; -Inf at the start
	n     int
}

// step is what an observation is worth under one alternative, in nats.
type step struct{ failed, sound float64 }

const (
	// Rises from smallestRise times the limit to largestRate, evenly in
	// their logarithms: each is within a third of any rate between.
	smallestRise = 1.5
	largestRate  = 0.9
	rises        = 24
)

// NewDetector watches for a rate above limit, 0 < limit < 0.5.
func NewDetector(limit float64) *Detector {
	d := &Detector{}
	low, high := math.Log(smallestRise*limit), math.Log(largestRate)
	for i := range rises {
		rate := math.Exp(low + (high-low)*float64(i)/(rises-1))
		d.steps = append(d.steps, step{math.Log(rate / limit), math.Log((1 - rate) / (1 - limit))})
		d.sum = append(d.sum, math.Inf(-1))
	}
	return d
}

// Observe takes one observation.
func (d *Detector) Observe(failed bool) {
	d.n++
	for i, s := range d.steps {
		gain := s.sound
		if failed {
			gain = s.failed
		}
		d.sum[i] = softplus(d.sum[i]) + gain // log(1 + e^sum): a rise may begin here
	}
}

// Observations is how many there were.
func (d *Detector) Observations() int { return d.n }

// LogEvidence is the logarithm of the evidence that the rate has risen.
func (d *Detector) LogEvidence() float64 {
	most := math.Inf(-1)
	for _, s := range d.sum {
		most = max(most, s)
	}
	if math.IsInf(most, -1) {
		return most
	}
	total := 0.0
	for _, s := range d.sum {
		total += math.Exp(s - most)
	}
	return most + math.Log(total/float64(len(d.sum)))
}

// softplus is log(1+e^x).
func softplus(x float64) float64 {
	if x > 0 {
		return x + math.Log1p(math.Exp(-x))
	}
	return math.Log1p(math.Exp(x))
}

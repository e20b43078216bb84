package stats

import (
	"math"
	"slices"
)

// An e-process is evidence against a null hypothesis that may be looked at all
// the time: whatever the rule for stopping, the chance that it ever reaches
// 1/alpha when the null holds is at most alpha (J. Ville, 1939). Those here are
// ratios of likelihoods, the alternative's averaged over weights that were
// fixed in advance, the null's at its best (L. Wasserman, A. Ramdas and
// S. Balakrishnan, Universal Inference, PNAS 117, 2020). The launch is the
// unit: requests of one launch share its rate.

// Alternative is a rate with a weight, for the side of a threshold that may be
// true.
type Alternative struct{ Rate, Weight float64 }

// Threshold holds the evidence on both sides of a limit for the rate of one
// arm, from launches that came after the question was put.
//
// It is valid when the launches follow the model that Dispersion averages over.
type Threshold struct {
	below, above []point   // alternatives
	high, low    [][]point // nulls: rate at or above the limit, at or below; by rate, then dispersion
	launch       Cluster
}

type point struct {
	model LaunchModel
	log   float64 // weight and likelihood so far
}

// NewThreshold puts the question. limit is between 0 and 1; the alternatives
// below and above it centre the tests on the rates to be expected, and should
// be wide, since a wrong guess costs trials (never validity).
func NewThreshold(limit float64, below, above []Alternative, d Dispersion) *Threshold {
	t := &Threshold{}
	for _, a := range below {
		if a.Rate < limit {
			t.below = append(t.below, point{NewLaunchModel(a.Rate, 0), math.Log(a.Weight)})
		}
	}
	for _, a := range above {
		if a.Rate > limit {
			t.above = append(t.above, points(a.Rate, a.Weight, d)...)
		}
	}
	normalise(t.below)
	normalise(t.above)
	// Between the points of these grids the likelihood of a null rises by
	// less than a tenth of a nat, and only where nothing could be accepted.
	for p := limit; p < 0.95; p *= 1.15 {
		t.high = append(t.high, points(p, 1, d))
	}
	for p, i := limit, 0; i < 24; p, i = p/1.2, i+1 {
		t.low = append(t.low, points(p, 1, d))
	}
	return t
}

func points(rate, weight float64, d Dispersion) []point {
	out := make([]point, 0, len(d.CV))
	for i, cv := range d.CV {
		if d.Weight[i] > 0 {
			out = append(out, point{NewLaunchModel(rate, cv), math.Log(weight * d.Weight[i])})
		}
	}
	return out
}

func normalise(w []point) {
	total := logTotal(w)
	for i := range w {
		w[i].log -= total
	}
}

// Launch says that what follows comes from another launch.
func (t *Threshold) Launch() { t.launch = Cluster{} }

// Observe takes in what the current launch has shown since.
func (t *Threshold) Observe(more Cluster) {
	step := func(points []point) {
		for i := range points {
			points[i].log += points[i].model.LogStep(t.launch, more)
		}
	}
	step(t.below)
	step(t.above)
	for _, p := range t.high {
		step(p)
	}
	for _, p := range t.low {
		step(p)
	}
	t.launch.Failures += more.Failures
	t.launch.Trials += more.Trials
}

// Gain is by how much the evidence would grow, on the side that has no failures
// or else on the other, if the current launch or a new one showed that.
func (t *Threshold) Gain(more Cluster, launch bool) float64 {
	before := t.launch
	if launch {
		before = Cluster{}
	}
	alternatives, nulls, now := t.below, t.high, t.Below()
	if more.Failures > 0 {
		alternatives, nulls, now = t.above, t.low, t.Above()
	}
	logs := make([]float64, 0, len(alternatives))
	after := func(points []point) float64 {
		logs = logs[:0]
		for _, p := range points {
			logs = append(logs, p.log+p.model.LogStep(before, more))
		}
		return logSumExp(logs)
	}
	null := math.Inf(-1)
	for _, n := range nulls {
		null = max(null, after(n))
	}
	return after(alternatives) - null - now
}

// Below is the log of the evidence that the rate is below the limit.
func (t *Threshold) Below() float64 { return logTotal(t.below) - best(t.high) }

// Above is the log of the evidence that the rate is above the limit.
func (t *Threshold) Above() float64 { return logTotal(t.above) - best(t.low) }

func best(null [][]point) float64 {
	top := math.Inf(-1)
	for _, p := range null {
		top = max(top, logTotal(p))
	}
	return top
}

func logTotal(points []point) float64 {
	top := math.Inf(-1)
	for _, p := range points {
		top = max(top, p.log)
	}
	if math.IsInf(top, -1) || len(points) == 1 {
		return top
	}
	sum := 0.0
	for _, p := range points {
		sum += math.Exp(p.log - top)
	}
	return top + math.Log(sum)
}

// AnytimeInterval holds the rate of an arm at all times at once with
// probability level: it may be shown while launches come in. A rate is left out
// when its evidence against it has reached 1/(1-level), whichever of the
// dispersions holds. No trials give (0, 1).
func AnytimeInterval(launches []Cluster, d Dispersion, level float64) (low, high float64) {
	rates := intervalRates()
	logs := make([]float64, len(rates)) // the likelihood of a rate at its best dispersion
	all := make([]float64, 0, len(rates)*len(d.CV))
	for i, p := range rates {
		logs[i] = math.Inf(-1)
		for j, cv := range d.CV {
			l := logLikelihood(NewLaunchModel(p, cv), launches)
			logs[i] = max(logs[i], l)
			all = append(all, l+math.Log(d.Weight[j]/float64(len(rates))))
		}
	}
	limit := logSumExp(all) + math.Log(1-level)
	in := func(l float64) bool { return l > limit }
	first := slices.IndexFunc(logs, in)
	slices.Reverse(logs)
	last := len(logs) - 1 - slices.IndexFunc(logs, in)
	if first < 0 || last >= len(logs) { // cannot be, short of rounding
		return 0, 1
	}
	// The neighbours are out: the ends are between them and these.
	low, high = 0, 1
	if first > 0 {
		low = rates[first-1]
	}
	if last < len(rates)-1 {
		high = rates[last+1]
	}
	return low, high
}

// intervalRates are 0.00001 to 0.99999, evenly in log odds.
func intervalRates() []float64 {
	const n = 240
	rates := make([]float64, n)
	end := math.Log(1e5)
	for i := range rates {
		x := -end + 2*end*float64(i)/(n-1)
		rates[i] = 1 / (1 + math.Exp(-x))
	}
	return rates
}

func logLikelihood(m LaunchModel, launches []Cluster) float64 {
	sum := 0.0
	for _, c := range launches {
		sum += m.LogStep(Cluster{}, c)
	}
	return sum
}

// LogEvidenceAbove is the log of an e-process against the rate of an arm being
// limit or less: what its launches show, with rates above the limit averaged
// over their logs and the dispersion that suits the null best.
func LogEvidenceAbove(launches []Cluster, limit float64, d Dispersion) float64 {
	const n = 20
	alternatives := make([]float64, 0, n*len(d.CV))
	for i := range n {
		p := limit * math.Pow(0.9/limit, (float64(i)+0.5)/n)
		for j, cv := range d.CV {
			alternatives = append(alternatives, logLikelihood(NewLaunchModel(p, cv), launches)+math.Log(d.Weight[j]/n))
		}
	}
	null := math.Inf(-1)
	for p, i := limit, 0; i < 24; p, i = p/1.2, i+1 {
		for _, cv := range d.CV {
			null = max(null, logLikelihood(NewLaunchModel(p, cv), launches))
		}
	}
	return logSumExp(alternatives) - null
}

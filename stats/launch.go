package stats

import "math"

// Dispersion is what is believed of how much launches of one arm differ: the
// coefficient of variation of their own rates of failure, with weights that add
// up to 1.
type Dispersion struct{ CV, Weight []float64 }

// Independent says that all launches of an arm have the same rate.
func Independent() Dispersion { return Dispersion{CV: []float64{0}, Weight: []float64{1}} }

// Dispersed covers launches that are alike and launches of which some hardly
// fail at all.
func Dispersed() Dispersion {
	return Dispersion{CV: []float64{0, 0.5, 1, 1.5}, Weight: []float64{0.5, 0.25, 0.15, 0.1}}
}

// LaunchModel gives the chance of what a launch shows when the rate of an arm
// and the dispersion between its launches are known: a beta-binomial, in which
// the launch draws its own rate once. The intraclass correlation is
// cv² rate/(1-rate), at most 0.9; a cv of 0 is the binomial.
type LaunchModel struct {
	a, b          float64 // of the beta; 0 for the binomial
	logRate, logQ float64 // of the binomial
}

// NewLaunchModel takes a rate strictly between 0 and 1.
func NewLaunchModel(rate, cv float64) LaunchModel {
	if cv == 0 {
		return LaunchModel{logRate: math.Log(rate), logQ: math.Log1p(-rate)}
	}
	rho := min(0.9, cv*cv*rate/(1-rate))
	k := (1 - rho) / rho
	return LaunchModel{a: rate * k, b: (1 - rate) * k}
}

// LogStep is the log of the chance of one sequence with more's failures and
// trials, in a launch that has shown before.
func (l LaunchModel) LogStep(before, more Cluster) float64 {
	failures, clean := more.Failures, more.Trials-more.Failures
	if l.a == 0 {
		return float64(failures)*l.logRate + float64(clean)*l.logQ
	}
	a := l.a + float64(before.Failures)
	b := l.b + float64(before.Trials-before.Failures)
	if more.Trials > 48 {
		return logRising(a, failures) + logRising(b, clean) - logRising(a+b, more.Trials)
	}
	sum, product := 0.0, 1.0
	n := a + b
	for i := range failures {
		product *= (a + float64(i)) / n
		n++
		if product < 1e-250 {
			sum, product = sum+math.Log(product), 1
		}
	}
	for i := range clean {
		product *= (b + float64(i)) / n
		n++
	}
	return sum + math.Log(product)
}

// logRising is the log of x (x+1) ... (x+n-1).
func logRising(x float64, n int) float64 {
	high, _ := math.Lgamma(x + float64(n))
	low, _ := math.Lgamma(x)
	return high - low
}

// logSumExp is the log of the sum of exponentials.
func logSumExp(x []float64) float64 {
	top := math.Inf(-1)
	for _, v := range x {
		top = max(top, v)
	}
	if math.IsInf(top, -1) {
		return top
	}
	sum := 0.0
	for _, v := range x {
		sum += math.Exp(v - top)
	}
	return top + math.Log(sum)
}

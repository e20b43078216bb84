package stats

import (
	"math"
	"math/rand/v2"
	"testing"
)

// beta draws a rate of the given mean and coefficient of variation, as
// NewLaunchModel takes it.
func beta(r *rand.Rand, mean, cv float64) float64 {
	if cv == 0 {
		return mean
	}
	m := NewLaunchModel(mean, cv)
	a, b := gamma(r, m.a), gamma(r, m.b)
	return a / (a + b)
}

// gamma draws with scale 1: a sum of exponentials for the whole part of the
// shape, and J. H. Ahrens and U. Dieter's method for the rest.
func gamma(r *rand.Rand, shape float64) float64 {
	sum := 0.0
	for ; shape >= 1; shape-- {
		sum += r.ExpFloat64()
	}
	if shape <= 0 {
		return sum
	}
	for e := math.E; ; {
		p := (1 + shape/e) * r.Float64()
		if p <= 1 {
			if x := math.Pow(p, 1/shape); r.Float64() <= math.Exp(-x) {
				return sum + x
			}
		} else if x := -math.Log((1 + shape/e - p) / shape); r.Float64() <= math.Pow(x, shape-1) {
			return sum + x
		}
	}
}

func TestLaunchModelStepsAddUp(t *testing.T) {
	for _, cv := range []float64{0, 0.5, 1.5} {
		m := NewLaunchModel(0.1, cv)
		whole := m.LogStep(Cluster{}, Cluster{Failures: 9, Trials: 70})
		parts := m.LogStep(Cluster{}, Cluster{Failures: 2, Trials: 10}) +
			m.LogStep(Cluster{2, 10}, Cluster{Failures: 7, Trials: 60})
		if math.Abs(whole-parts) > 1e-9 {
			t.Errorf("cv %g: the whole is %v, its parts %v", cv, whole, parts)
		}
		// All numbers of failures together are certain.
		sum := 0.0
		const n = 30
		for y := range n + 1 {
			sum += math.Exp(logChoose(n, y) + m.LogStep(Cluster{}, Cluster{y, n}))
		}
		if math.Abs(sum-1) > 1e-9 {
			t.Errorf("cv %g: chances add up to %v", cv, sum)
		}
	}
}

func TestLaunchModelHasItsMeanAndDispersion(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	const mean, cv, n = 0.1, 0.5, 60_000
	var sum, squares float64
	for range n {
		p := beta(r, mean, cv)
		sum += p
		squares += p * p
	}
	m := sum / n
	if got := math.Sqrt(squares/n-m*m) / m; math.Abs(m-mean) > 0.002 || math.Abs(got-cv) > 0.02 {
		t.Errorf("drawn rates have mean %.4f and cv %.3f, want %g and %g", m, got, mean, cv)
	}
}

// run simulates launches of an arm, with looks after every few requests, until a
// test stops it.
func run(r *rand.Rand, rate, cv float64, launches, requests int, look func(launch int, c Cluster) (stop bool)) bool {
	for l := range launches {
		p := beta(r, rate, cv)
		for range requests / 8 {
			c := Cluster{Trials: 8}
			for range 8 {
				if r.Float64() < p {
					c.Failures++
				}
			}
			if look(l, c) {
				return true
			}
		}
	}
	return false
}

func alternatives() (below, above []Alternative) {
	for _, b := range []float64{0.0005, 0.002, 0.01} {
		below = append(below, Alternative{b, 1})
	}
	for _, a := range []float64{0.1, 0.2, 0.4} {
		above = append(above, Alternative{a, 1})
	}
	return below, above
}

// Whoever looks after each request and stops when it suits them errs with at
// most the error they asked for; the hardest null is the limit itself.
func TestThresholdIsValidAtAnyTime(t *testing.T) {
	const hunts, alpha = 500, 0.05
	enough := math.Log(1 / alpha)
	for _, tt := range []struct {
		name  string
		rate  float64
		cvs   []float64 // drawn from by Dispersed's weights when there are several
		d     Dispersion
		below bool // the side that is wrong to accept
	}{
		{"at the limit, below", 0.06, []float64{0}, Independent(), true},
		{"at the limit, above", 0.06, []float64{0}, Independent(), false},
		{"over the limit", 0.09, []float64{0}, Independent(), true},
		{"launches differ, below", 0.06, Dispersed().CV, Dispersed(), true},
		{"launches differ, above", 0.06, Dispersed().CV, Dispersed(), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(3, 4))
			wrong := 0
			for range hunts {
				low, high := alternatives()
				test := NewThreshold(0.06, low, high, tt.d)
				cv := tt.cvs[0]
				if u := r.Float64(); len(tt.cvs) > 1 {
					for i, w := range Dispersed().Weight {
						if u -= w; u < 0 {
							cv = tt.cvs[i]
							break
						}
					}
				}
				last := 0
				if run(r, tt.rate, cv, 6, 80, func(launch int, c Cluster) bool {
					if launch != last {
						test.Launch()
						last = launch
					}
					test.Observe(c)
					if tt.below {
						return test.Below() >= enough
					}
					return test.Above() >= enough
				}) {
					wrong++
				}
			}
			// Three standard errors above alpha.
			if limit := alpha + 3*math.Sqrt(alpha*(1-alpha)/hunts); float64(wrong)/hunts > limit {
				t.Errorf("%d of %d hunts were wrong, at an error of %g", wrong, hunts, alpha)
			}
			t.Logf("%d of %d hunts were wrong", wrong, hunts)
		})
	}
}

// The same evidence without the dispersion is what launches that differ fool:
// the test that the tests above can fail.
func TestThresholdNeedsTheDispersion(t *testing.T) {
	const hunts, alpha = 400, 0.05
	r := rand.New(rand.NewPCG(5, 6))
	wrong := 0
	for range hunts {
		low, high := alternatives()
		test := NewThreshold(0.06, low, high, Independent())
		if run(r, 0.09, 1.5, 6, 80, func(_ int, c Cluster) bool {
			test.Observe(c)
			return test.Below() >= math.Log(1/alpha)
		}) {
			wrong++
		}
	}
	if wrong < hunts/10 {
		t.Errorf("only %d of %d hunts were wrong though launches differ and that was left out", wrong, hunts)
	}
}

func TestThresholdDecides(t *testing.T) {
	for _, tt := range []struct {
		name  string
		rate  float64
		d     Dispersion
		most  int // launches
		below bool
	}{
		{"clean", 0.001, Independent(), 1, true},
		{"failing", 0.2, Independent(), 1, false},
		{"clean, launches may differ", 0.001, Dispersed(), 12, true},
		{"failing, launches may differ", 0.2, Dispersed(), 4, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := rand.New(rand.NewPCG(7, 8))
			right := 0
			for range 100 {
				low, high := alternatives()
				test := NewThreshold(0.06, low, high, tt.d)
				last := 0
				if run(r, tt.rate, 0, tt.most, 200, func(launch int, c Cluster) bool {
					if launch != last {
						test.Launch()
						last = launch
					}
					test.Observe(c)
					return test.Below() >= math.Log(200) || test.Above() >= math.Log(200)
				}) && (test.Below() > test.Above()) == tt.below {
					right++
				}
			}
			if right < 98 {
				t.Errorf("%d of 100 came out right", right)
			}
		})
	}
}

// An interval that is looked at after every batch misses the rate at any of
// these times in at most 5% of the runs.
func TestAnytimeInterval(t *testing.T) {
	const hunts = 80
	for _, cv := range []float64{0, 1} {
		r := rand.New(rand.NewPCG(9, 10))
		missed := 0
		for range hunts {
			const rate = 0.1
			var launches []Cluster
			if run(r, rate, cv, 4, 48, func(launch int, c Cluster) bool {
				if launch == len(launches) {
					launches = append(launches, Cluster{})
				}
				launches[launch].Failures += c.Failures
				launches[launch].Trials += c.Trials
				low, high := AnytimeInterval(launches, Dispersed(), 0.95)
				return rate < low || rate > high
			}) {
				missed++
			}
		}
		if missed > hunts/20 {
			t.Errorf("cv %g: missed in %d of %d runs", cv, missed, hunts)
		}
	}
}

func TestAnytimeIntervalNarrows(t *testing.T) {
	low, high := AnytimeInterval(nil, Dispersed(), 0.95)
	if low != 0 || high != 1 {
		t.Errorf("without trials it is (%g, %g)", low, high)
	}
	low, high = AnytimeInterval([]Cluster{{0, 640}}, Independent(), 0.95)
	if low != 0 || high > 0.02 {
		t.Errorf("0 of 640 gives (%g, %g)", low, high)
	}
	_, one := AnytimeInterval([]Cluster{{0, 640}}, Dispersed(), 0.95)
	_, four := AnytimeInterval([]Cluster{{0, 160}, {0, 160}, {0, 160}, {0, 160}}, Dispersed(), 0.95)
	if four >= one || one <= high {
		t.Errorf("0 of 640: up to %g in one launch, %g in four, %g if they are alike: many launches must tell more than one", one, four, high)
	}
}

func TestLogEvidenceAbove(t *testing.T) {
	const hunts = 300
	for _, cv := range []float64{0, 1.5} {
		r := rand.New(rand.NewPCG(11, 12))
		wrong := 0
		for range hunts {
			var launches []Cluster
			if run(r, 0.05, cv, 4, 40, func(launch int, c Cluster) bool {
				if launch == len(launches) {
					launches = append(launches, Cluster{})
				}
				launches[launch].Failures += c.Failures
				launches[launch].Trials += c.Trials
				return LogEvidenceAbove(launches, 0.05, Dispersed()) >= math.Log(20)
			}) {
				wrong++
			}
		}
		if wrong > hunts*9/100 {
			t.Errorf("cv %g: a rate at the limit was found above it in %d of %d runs", cv, wrong, hunts)
		}
	}
	if e := LogEvidenceAbove([]Cluster{{40, 200}, {35, 200}, {38, 200}, {41, 200}}, 0.05, Dispersed()); e < math.Log(20) {
		t.Errorf("154 of 800 in four launches against 5%%: log evidence is only %g", e)
	}
}

func TestBetting(t *testing.T) {
	const hunts, alpha = 2000, 0.05
	r := rand.New(rand.NewPCG(15, 16))
	for _, name := range []string{"all or nothing", "alike"} {
		wrong := 0
		for range hunts {
			b := NewBetting(0.1)
			for range 200 {
				share := 0.1
				if name == "all or nothing" {
					share = 0
					if r.Float64() < 0.1 {
						share = 1
					}
				}
				b.Observe(share)
				if b.LogEvidence() >= math.Log(1/alpha) {
					wrong++
					break
				}
			}
		}
		if float64(wrong)/hunts > alpha+3*math.Sqrt(alpha*(1-alpha)/hunts) {
			t.Errorf("%s: %d of %d runs were wrong, at an error of %g", name, wrong, hunts, alpha)
		}
	}
	b := NewBetting(0.05)
	n := 0
	for ; b.LogEvidence() < math.Log(200); n++ {
		b.Observe(0)
	}
	if n < 103 || n > 150 {
		t.Errorf("a limit of 5%% takes %d clean launches, want 103 or some more", n)
	}
}

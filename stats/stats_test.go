package stats

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"
)

func near(t testing.TB, what string, got, want, within float64) {
	t.Helper()
	if !(math.Abs(got-want) <= within) {
		t.Errorf("%s is %v, want %v", what, got, want)
	}
}

func TestWilson(t *testing.T) {
	// Newcombe 1998, Statistics in Medicine 17, 857-872, table I.
	for _, tc := range []struct {
		failures, trials int
		low, high        float64
	}{
		{81, 263, 0.2553, 0.3662},
		{15, 148, 0.0624, 0.1605},
		{0, 20, 0, 0.1611},
		{1, 29, 0.0061, 0.1718},
		{0, 0, 0, 1},
	} {
		low, high := Wilson(tc.failures, tc.trials, 0.95)
		near(t, fmt.Sprint("low of ", tc), low, tc.low, 5e-5)
		near(t, fmt.Sprint("high of ", tc), high, tc.high, 5e-5)
	}
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(1, 1e6).Draw(t, "trials")
		x := rapid.IntRange(0, n).Draw(t, "failures")
		level := rapid.Float64Range(0.5, 0.9999).Draw(t, "level")
		low, high := Wilson(x, n, level)
		rate := float64(x) / float64(n)
		if !(0 <= low && low <= rate && rate <= high && high <= 1) || low == high {
			t.Fatalf("%v is not in (%v, %v)", rate, low, high)
		}
		l, h := Wilson(n-x, n, level)
		if math.Abs(l-(1-high)) > 1e-12 || math.Abs(h-(1-low)) > 1e-12 {
			t.Fatalf("(%v, %v) is not the mirror image of (%v, %v)", l, h, low, high)
		}
		if l, h := Wilson(x, n, (1+level)/2); l > low || h < high {
			t.Fatalf("a higher level gives the narrower (%v, %v)", l, h)
		}
	})
}

func TestStudentQuantile(t *testing.T) {
	// Any table of Student's t.
	for _, tc := range []struct {
		level   float64
		degrees int
		want    float64
	}{
		{0.95, 1, 12.7062},
		{0.95, 2, 4.3027},
		{0.95, 3, 3.1824},
		{0.95, 7, 2.3646},
		{0.95, 10, 2.2281},
		{0.95, 79, 1.9905},
		{0.99, 5, 4.0321},
		{0.99, 30, 2.7500},
		{0.999, 4, 8.6103},
		{0.95, 100000, 1.9600},
	} {
		near(t, fmt.Sprint(tc), studentQuantile(tc.level, tc.degrees), tc.want, 6e-5)
	}
}

func repeat(k int, c Cluster) []Cluster { return slices.Repeat([]Cluster{c}, k) }

func TestClusterRate(t *testing.T) {
	wilson := func(failures, trials int) [2]float64 {
		low, high := Wilson(failures, trials, 0.95)
		return [2]float64{low, high}
	}
	for _, tc := range []struct {
		name     string
		clusters []Cluster
		want     Rate
	}{
		{"none", nil, Rate{Rate: math.NaN(), High: 1, DesignEffect: 1}},
		{"no trials", repeat(3, Cluster{}), Rate{Rate: math.NaN(), High: 1, DesignEffect: 1}},
		{"no failures count by cluster", append(repeat(80, Cluster{0, 4}), Cluster{}), Rate{
			Trials: 320, Clusters: 80, High: wilson(0, 80)[1], DesignEffect: 4,
		}},
		{"only failures", repeat(80, Cluster{4, 4}), Rate{
			Failures: 320, Trials: 320, Clusters: 80, Rate: 1, Low: wilson(80, 80)[0], High: 1, DesignEffect: 4,
		}},
		{"one cluster", []Cluster{{30, 100}}, Rate{
			Failures: 30, Trials: 100, Clusters: 1, Rate: 0.3, Low: 0.0207, High: 0.8966, DesignEffect: 100,
		}},
		// Less than binomial variance counts as binomial: (4*1 + 4)/5.
		{"evenly", repeat(4, Cluster{2, 4}), Rate{
			Failures: 8, Trials: 16, Clusters: 4, Rate: 0.5, Low: 0.1453, High: 0.8547, DesignEffect: 1.6,
		}},
		// By hand: squares = 2*(4-2)^2 + 2*(0-2)^2 = 16, variance = 4/3*16/256 =
		// 1/12, binomial 1/64, design effect 16/3, averaged with 4 as 2 to 1.
		{"all or nothing", []Cluster{{4, 4}, {4, 4}, {0, 4}, {0, 4}}, Rate{
			Failures: 8, Trials: 16, Clusters: 4, Rate: 0.5, Low: 0.0653, High: 0.9347, DesignEffect: (2*16.0/3 + 4) / 3,
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := ClusterRate(tc.clusters, 0.95)
			if diff := cmp.Diff(tc.want, got, cmpopts.EquateNaNs(), cmpopts.EquateApprox(0, 5e-5)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func genClusters() *rapid.Generator[[]Cluster] {
	cluster := rapid.Custom(func(t *rapid.T) Cluster {
		n := rapid.IntRange(0, 9).Draw(t, "trials")
		return Cluster{rapid.IntRange(0, n).Draw(t, "failures"), n}
	})
	return rapid.SliceOfN(cluster, 0, 20)
}

func TestClusterRateProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		clusters := genClusters().Draw(t, "clusters")
		r := ClusterRate(clusters, 0.95)
		if r.Trials == 0 {
			return
		}
		if !(0 <= r.Low && r.Low <= r.Rate && r.Rate <= r.High && r.High <= 1) || r.DesignEffect < 1 {
			t.Fatalf("%+v", r)
		}
		if low, high := Wilson(r.Failures, r.Trials, 0.95); r.Low > low+1e-12 || r.High < high-1e-12 {
			t.Fatalf("%+v is narrower than (%v, %v) of independent trials", r, low, high)
		}
		mirror := make([]Cluster, len(clusters))
		for i, c := range clusters {
			mirror[i] = Cluster{c.Trials - c.Failures, c.Trials}
		}
		m := ClusterRate(mirror, 0.95)
		if math.Abs(m.Low-(1-r.High)) > 1e-9 || math.Abs(m.DesignEffect-r.DesignEffect) > 1e-6 {
			t.Fatalf("%+v is not the mirror image of %+v", m, r)
		}
	})
}

// betaBinomial draws a cluster whose own rate is from a beta distribution with
// the given mean, so that two of its trials have the correlation icc: an urn,
// where each result makes its like more likely.
func betaBinomial(r *rand.Rand, trials int, rate, icc float64) Cluster {
	c := Cluster{Trials: trials}
	for i := range trials {
		p := (rate*(1-icc) + icc*float64(c.Failures)) / (1 - icc + icc*float64(i))
		if r.Float64() < p {
			c.Failures++
		}
	}
	return c
}

func draw(r *rand.Rand, clusters, trials int, rate, icc float64) []Cluster {
	out := make([]Cluster, clusters)
	for i := range out {
		out[i] = betaBinomial(r, trials, rate, icc)
	}
	return out
}

// A 95% interval holds the true rate at least 93 times of 100, also with few
// clusters. (With 20 clusters it drops to 91 where fewer than one in 100 fails.)
func TestCoverage(t *testing.T) {
	const runs = 1500
	r := rand.New(rand.NewPCG(3, 4))
	worst := 1.0
	for _, clusters := range []int{80, 8} {
		for _, rate := range []float64{0.01, 0.05, 0.2, 0.5, 0.9} {
			for _, icc := range []float64{0, 0.1, 0.3, 0.5} {
				covered := 0
				for range runs {
					if x := ClusterRate(draw(r, clusters, 4, rate, icc), 0.95); x.Low <= rate && rate <= x.High {
						covered++
					}
				}
				coverage := float64(covered) / runs
				worst = min(worst, coverage)
				if coverage < 0.93 {
					t.Errorf("%d clusters, rate %v, correlation %v: covered %.3f", clusters, rate, icc, coverage)
				}
			}
		}
	}
	t.Logf("worst coverage %.3f", worst)
}

// Where nothing differs, P is at most 0.05 in at most 5 of 100 runs: without
// failures in the control, with few clusters, and with sides that differ in
// size.
func TestExcessFalseAlarms(t *testing.T) {
	const runs = 400
	limit := 0.05 + 3*math.Sqrt(0.05*0.95/runs)
	r := rand.New(rand.NewPCG(5, 6))
	worst := 0.0
	for _, tc := range []struct {
		main, mainTrials, control, controlTrials int
		rate, icc                                float64
	}{
		{80, 4, 80, 4, 0.005, 0.3},
		{80, 4, 80, 4, 0.1, 0.5},
		{80, 4, 80, 4, 0.4, 0},
		{8, 4, 8, 4, 0.3, 0.5},
		{80, 4, 8, 4, 0.3, 0.3},
		{8, 4, 80, 4, 0.1, 0.3},
		{80, 4, 20, 1, 0.1, 0},
		{80, 4, 20, 1, 0.1, 0.3},
		{20, 1, 20, 4, 0.05, 0.3},
		{80, 1, 8, 4, 0.02, 0.8},
	} {
		alarms := 0
		for range runs {
			if Excess(draw(r, tc.main, tc.mainTrials, tc.rate, tc.icc), draw(r, tc.control, tc.controlTrials, tc.rate, tc.icc)).P <= 0.05 {
				alarms++
			}
		}
		rate := float64(alarms) / runs
		worst = max(worst, rate)
		if rate > limit {
			t.Errorf("%+v: %.3f false alarms", tc, rate)
		}
	}
	t.Logf("most false alarms %.3f", worst)
}

func TestExcess(t *testing.T) {
	for _, tc := range []struct {
		name          string
		main, control []Cluster
		p, within     float64
	}{
		{"no control", repeat(80, Cluster{1, 4}), nil, 1, 0},
		{"no main", nil, repeat(80, Cluster{1, 4}), 1, 0},
		{"nothing fails", repeat(80, Cluster{0, 4}), repeat(80, Cluster{0, 4}), 1, 0},
		{"everything fails", repeat(80, Cluster{4, 4}), repeat(80, Cluster{4, 4}), 1, 0},
		{"less", repeat(80, Cluster{0, 4}), repeat(80, Cluster{4, 4}), 1, 0},
		// 1/C(16,8), C(80,3)/C(160,3) and so on: the deals that put all failures
		// in main, within three standard errors of so many shuffles.
		{"3 sessions of 80", append(repeat(77, Cluster{0, 4}), repeat(3, Cluster{2, 4})...), repeat(80, Cluster{0, 4}), 82160.0 / 669920, 0.015},
		{"6 sessions of 80", append(repeat(74, Cluster{0, 4}), repeat(6, Cluster{2, 4})...), repeat(80, Cluster{0, 4}), 0.0141, 0.002},
		{"8 of 8 sessions", repeat(8, Cluster{2, 4}), repeat(8, Cluster{0, 4}), 1.0 / 12870, 24e-5},
		{"half of all", repeat(80, Cluster{2, 4}), repeat(80, Cluster{0, 4}), 5e-5, 1e-9},
		{"small control", repeat(40, Cluster{2, 4}), repeat(8, Cluster{0, 4}), 5e-5, 1e-9},
		{"small main", repeat(8, Cluster{2, 4}), repeat(40, Cluster{0, 4}), 5e-5, 1e-9},
		// 4 sessions with a failure against 0, but the control had a quarter of the chances.
		{"larger sessions", append(repeat(16, Cluster{0, 40}), repeat(4, Cluster{1, 40})...), repeat(20, Cluster{0, 1}), 0.91, 0.02},
	} {
		t.Run(tc.name, func(t *testing.T) {
			near(t, "P", Excess(tc.main, tc.control).P, tc.p, tc.within)
		})
	}
	got := Excess(repeat(10, Cluster{1, 4}), repeat(10, Cluster{0, 4}))
	near(t, "difference", got.Difference, 0.25, 1e-12)
	if !(0 < got.High && got.High <= 1 && -1 <= got.Low && got.Low < 0.25) {
		t.Errorf("interval (%v, %v)", got.Low, got.High)
	}
}

func TestExcessProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		main, control := genClusters().Draw(t, "main"), genClusters().Draw(t, "control")
		x := Excess(main, control)
		if !(0 < x.P && x.P <= 1) || !(-1 <= x.Low && x.Low <= x.High && x.High <= 1) {
			t.Fatalf("%+v", x)
		}
		if !math.IsNaN(x.Difference) && (x.Difference < x.Low || x.Difference > x.High) {
			t.Fatalf("%+v", x)
		}
		if x.Difference <= 0 && x.P < 0.4 {
			t.Fatalf("%+v of a rate that isn't higher", x)
		}
		if again := Excess(main, control); again != x && !math.IsNaN(x.Difference) {
			t.Fatalf("%+v and then %+v", x, again)
		}
	})
}

func TestFisherExact(t *testing.T) {
	for _, tc := range []struct {
		name              string
		a, m, b, n        int
		greater, twoSided float64
	}{
		// 17/70 and 34/70: Fisher's own table of the lady tasting tea.
		{"tea", 3, 4, 1, 4, 17.0 / 70, 34.0 / 70},
		{"all the tea", 4, 4, 0, 4, 1.0 / 70, 2.0 / 70},
		// Convictions of like-sex twins (Fisher 1934): 10 of 13 monozygotic, 2 of 17 dizygotic.
		{"twins", 10, 13, 2, 17, 0.0004652, 0.0005367},
		{"none", 0, 80, 0, 80, 1, 1},
		{"no trials", 0, 0, 3, 4, 1, 1},
		{"less", 0, 4, 4, 4, 1, 2.0 / 70},
	} {
		t.Run(tc.name, func(t *testing.T) {
			greater, twoSided := FisherExact(tc.a, tc.m, tc.b, tc.n)
			near(t, "greater", greater, tc.greater, 5e-8)
			near(t, "twoSided", twoSided, tc.twoSided, 5e-8)
		})
	}
	rapid.Check(t, func(t *rapid.T) {
		m, n := rapid.IntRange(0, 300).Draw(t, "m"), rapid.IntRange(0, 300).Draw(t, "n")
		a, b := rapid.IntRange(0, m).Draw(t, "a"), rapid.IntRange(0, n).Draw(t, "b")
		greater, twoSided := FisherExact(a, m, b, n)
		less, same := FisherExact(b, n, a, m)
		chance := math.Exp(logChoose(m, a) + logChoose(n, b) - logChoose(m+n, a+b))
		if math.Abs(greater+less-chance-1) > 1e-9 {
			t.Fatalf("%v or more, %v or less, %v exactly", greater, less, chance)
		}
		if math.Abs(twoSided-same) > 1e-9 || twoSided < min(greater, less)-1e-9 {
			t.Fatalf("two-sided %v and mirrored %v with %v and %v", twoSided, same, greater, less)
		}
	})
}

func TestHolm(t *testing.T) {
	for _, tc := range []struct {
		name    string
		p, want []float64
	}{
		{"none", nil, []float64{}},
		{"one", []float64{0.03}, []float64{0.03}},
		{"order stays", []float64{0.04, 0.01, 0.03, 0.005}, []float64{0.06, 0.03, 0.06, 0.02}},
		{"at most 1", []float64{0.9, 0.8}, []float64{1, 1}},
		{"equal", []float64{0.01, 0.01}, []float64{0.02, 0.02}},
	} {
		if diff := cmp.Diff(tc.want, Holm(tc.p), cmpopts.EquateApprox(0, 1e-12)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tc.name, diff)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		p := rapid.SliceOf(rapid.Float64Range(0, 1)).Draw(t, "p")
		before := slices.Clone(p)
		adjusted := Holm(p)
		if !slices.Equal(p, before) {
			t.Fatal("the argument has changed")
		}
		for i := range p {
			if adjusted[i] < p[i] || adjusted[i] > min(1, p[i]*float64(len(p))) {
				t.Fatalf("%v is adjusted to %v", p[i], adjusted[i])
			}
			for j := range p {
				if p[i] < p[j] && adjusted[i] > adjusted[j] {
					t.Fatalf("%v and %v change places: %v and %v", p[i], p[j], adjusted[i], adjusted[j])
				}
			}
		}
	})
}

func TestQuantiles(t *testing.T) {
	values := []float64{3, 1, 4, 1, 5, 9, 2, 6}
	// R: quantile(c(3,1,4,1,5,9,2,6), c(0,.1,.25,.5,.9,1))
	want := []float64{1, 1, 1.75, 3.5, 6.9, 9}
	if diff := cmp.Diff(want, Quantiles(values, 0, 0.1, 0.25, 0.5, 0.9, 1), cmpopts.EquateApprox(0, 1e-12)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if values[0] != 3 {
		t.Error("the argument has changed")
	}
	near(t, "median", Median([]float64{2, 1, 10}), 2, 0)
	if m := Median(nil); !math.IsNaN(m) {
		t.Errorf("the median of nothing is %v", m)
	}
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(rapid.Float64Range(-1e6, 1e6), 1, 50).Draw(t, "values")
		q := rapid.Float64Range(0, 1).Draw(t, "q")
		at := Quantiles(values, q)[0]
		below, above := 0, 0
		for _, v := range values {
			if v < at {
				below++
			}
			if v > at {
				above++
			}
		}
		n := float64(len(values) - 1)
		if float64(below) > q*n+1+1e-9 || float64(above) > (1-q)*n+1+1e-9 {
			t.Fatalf("%v of %v is %v: %d below, %d above", q, values, at, below, above)
		}
	})
}

// The longest that Excess takes: a clear difference stops no shuffling.
func BenchmarkExcess(b *testing.B) {
	main, control := repeat(80, Cluster{2, 4}), repeat(80, Cluster{0, 4})
	for b.Loop() {
		Excess(main, control)
	}
}

func TestMeanInterval(t *testing.T) {
	// qt(0.975, 3) = 3.182446 in R.
	mean, low, high := MeanInterval([]float64{1, 2, 3, 4}, 0.95)
	half := 3.182446 * math.Sqrt(5.0/3/4)
	if mean != 2.5 || math.Abs(low-(2.5-half)) > 1e-3 || math.Abs(high-(2.5+half)) > 1e-3 {
		t.Errorf("got %g, %g to %g", mean, low, high)
	}
	if _, low, high := MeanInterval([]float64{1}, 0.95); !math.IsInf(low, -1) || !math.IsInf(high, 1) {
		t.Errorf("one sample: %g to %g", low, high)
	}
}

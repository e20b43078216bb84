package stats

import (
	"math"
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"
)

// world makes pairs: rates that change with time, launches that differ,
// conversations that are spoiled.
type world struct {
	name          string
	a, b          float64
	drift         bool    // an outage in every period, on both
	cv            float64 // of the launches' own rates
	size          int     // pairs of a conversation
	d             Dispersion
	ratio         float64
	conversations int
	launch        int  // conversations of one; 0 is all
	stayed        bool // a failure is followed by more in its conversation
}

// conversation plays one, of a launch with such factors of its own.
func (w *world) conversation(r *rand.Rand, i int, launchA, launchB float64) []Pair {
	a, b := min(w.a*launchA, 0.95), min(w.b*launchB, 0.95)
	if w.drift {
		x := 1 + math.Sin(float64(i*w.size)/100)
		a, b = a*x, b*x
	}
	pairs := make([]Pair, w.size)
	var before Pair
	for i := range pairs {
		pairs[i] = Pair{r.Float64() < a || w.stayed && before.A, r.Float64() < b || w.stayed && before.B}
		before = pairs[i]
	}
	return pairs
}

// factor is how much more than usual a launch fails.
func (w *world) factor(r *rand.Rand) float64 {
	if w.cv == 0 {
		return 1
	}
	k := 1 / (w.cv * w.cv)
	return gamma(r, k) / k
}

// play plays conversations until there is enough, and returns how many.
func (w *world) play(r *rand.Rand, p *Paired, enough func() bool) int {
	launchA, launchB := 1.0, 1.0
	for i := range w.conversations {
		if w.launch > 0 && i%w.launch == 0 {
			p.Launch()
			launchA, launchB = w.factor(r), w.factor(r)
		}
		p.Conversation(w.conversation(r, i, launchA, launchB)...)
		if enough() {
			return i + 1
		}
	}
	return w.conversations
}

// Servers that are alike are told apart no more often than the error allows,
// whatever both do with time, with looks after every unit.
func TestPairedFalseAlarms(t *testing.T) {
	const alpha = 0.05
	for _, w := range []world{
		{name: "alike", a: 0.1, b: 0.1, size: 4, d: Independent(), conversations: 200},
		{name: "single requests", a: 0.1, b: 0.1, size: 1, d: Independent(), conversations: 600},
		{name: "drift", a: 0.1, b: 0.1, drift: true, size: 4, d: Independent(), conversations: 200},
		{name: "conversations are spoiled", a: 0.05, b: 0.05, size: 6, stayed: true, d: Independent(), conversations: 200},
		{name: "launches are alike", a: 0.2, b: 0.2, size: 4, launch: 20, d: SharesDispersed(), conversations: 200},
		{name: "launches differ", a: 0.2, b: 0.2, cv: 0.5, size: 4, launch: 20, stayed: true, d: SharesDispersed(), conversations: 300},
		{name: "launches differ much", a: 0.2, b: 0.2, cv: 1, size: 4, launch: 20, drift: true, d: SharesDispersed(), conversations: 300},
		{name: "half as often, where less than half is asked", a: 0.1, b: 0.05, drift: true, size: 4, ratio: 0.5, d: Independent(), conversations: 200},
	} {
		t.Run(w.name, func(t *testing.T) {
			t.Parallel()
			const runs = 400
			r := rand.New(rand.NewPCG(13, 14))
			better, worse := 0, 0
			for range runs {
				p := NewPaired(w.ratio, 0.01, w.d)
				b, l := math.Inf(-1), math.Inf(-1)
				w.play(r, p, func() bool {
					b, l = max(b, p.LogBetter()), max(l, p.LogWorse())
					return false
				})
				if b >= -math.Log(alpha) {
					better++
				}
				if l >= -math.Log(alpha) {
					worse++
				}
			}
			t.Logf("better in %d, worse in %d of %d", better, worse, runs)
			const most = runs * (alpha + 3*0.0109) // three standard errors
			if max(float64(better), float64(worse)) > most {
				t.Errorf("better in %d, worse in %d of %d runs, with an error of %g", better, worse, runs, alpha)
			}
		})
	}
}

// A difference that matters is hardly ever denied.
func TestPairedNoDifferenceFalseAlarms(t *testing.T) {
	const alpha, runs, most = 0.05, 400, 400 * (0.05 + 3*0.0109)
	r := rand.New(rand.NewPCG(15, 16))
	for _, w := range []world{
		{name: "clean and broken", a: 0.02, b: 0, size: 4, conversations: 1500},
		{name: "both broken, one more", a: 0.12, b: 0.10, size: 4, conversations: 1500},
	} {
		wrong := 0
		for range runs {
			p := NewPaired(1, 0.02, Independent())
			w.play(r, p, func() bool { return p.LogNoDifference() >= -math.Log(alpha) })
			if p.LogNoDifference() >= -math.Log(alpha) {
				wrong++
			}
		}
		t.Logf("%s: denied in %d of %d", w.name, wrong, runs)
		if float64(wrong) > most {
			t.Errorf("%s: a difference of 2%% is denied in %d of %d runs, with an error of %g", w.name, wrong, runs, alpha)
		}
	}
}

// It takes about as many pairs as it was said to.
func TestPairedPower(t *testing.T) {
	const alpha = 0.01
	for _, w := range []world{
		{name: "18%", a: 0.18, b: 0.001, size: 4, d: Independent(), conversations: 60},
		{name: "18%, drift", a: 0.18, b: 0.001, drift: true, size: 4, d: Independent(), conversations: 120},
		{name: "18%, launches", a: 0.18, b: 0.001, cv: 0.3, size: 4, launch: 20, d: SharesDispersed(), conversations: 240},
		{name: "2%", a: 0.02, b: 0.0001, size: 4, d: Independent(), conversations: 500},
	} {
		r := rand.New(rand.NewPCG(17, 18))
		const runs = 200
		pairs, missed := 0, 0
		for range runs {
			p := NewPaired(1, 0.01, w.d)
			pairs += w.size * w.play(r, p, func() bool { return p.LogBetter() >= -math.Log(alpha) })
			if p.LogBetter() < -math.Log(alpha) {
				missed++
			}
		}
		needed := PairsNeeded(w.a, 1, alpha, w.size, w.size*w.launch, w.d)
		t.Logf("%s: %d pairs on average, %d foretold; missed in %d of %d", w.name, pairs/runs, needed, missed, runs)
		if missed > runs/20 || pairs/runs > 2*needed || 2*pairs/runs < needed {
			t.Errorf("%s: %d pairs on average, %d foretold; missed in %d of %d", w.name, pairs/runs, needed, missed, runs)
		}
	}
	// Clean on both sides.
	p := NewPaired(1, 0.01, SharesDispersed())
	need := PairsWithout(0.01, alpha)
	for range need - 1 {
		p.Conversation(Pair{})
	}
	if p.LogNoDifference() >= -math.Log(alpha) {
		t.Errorf("%d pairs show that there is no difference, %d were foretold", need-1, need)
	}
	p.Conversation(Pair{})
	if p.LogNoDifference() < -math.Log(alpha) || need > 2000 {
		t.Errorf("after %d pairs the evidence is %.2f", need, p.LogNoDifference())
	}
}

// Exchanging the servers exchanges what is said of them.
func TestPairedSymmetry(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, q := NewPaired(0.5, 0.02, SharesDispersed()), NewPaired(0.5, 0.02, SharesDispersed())
		for range rapid.IntRange(0, 20).Draw(t, "conversations") {
			if rapid.Bool().Draw(t, "launch") {
				p.Launch()
				q.Launch()
			}
			var pairs, exchanged []Pair
			for range rapid.IntRange(0, 6).Draw(t, "pairs") {
				pair := Pair{rapid.Bool().Draw(t, "a"), rapid.Bool().Draw(t, "b")}
				pairs, exchanged = append(pairs, pair), append(exchanged, Pair{pair.B, pair.A})
			}
			p.Conversation(pairs...)
			q.Conversation(exchanged...)
		}
		if p.LogBetter() != q.LogWorse() || p.LogWorse() != q.LogBetter() || p.LogNoDifference() != q.LogNoDifference() {
			t.Errorf("better %g, worse %g, same %g; exchanged %g, %g, %g", p.LogBetter(), p.LogWorse(), p.LogNoDifference(), q.LogBetter(), q.LogWorse(), q.LogNoDifference())
		}
		low, high := p.OddsRatio(0.95)
		if low > high || low < 0 || math.IsNaN(high) {
			t.Errorf("the odds ratio is between %g and %g", low, high)
		}
	})
}

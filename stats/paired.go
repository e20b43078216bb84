package stats

import "math"

// Paired compares two servers, A and B, by pairs of equal requests that are
// sent to both at the same time. Everything it says may be looked at all the
// time: an e-process of ln(1/alpha) is a claim that is wrong with probability
// alpha at most, whenever one looks.
//
// Which of two servers fails more often is told by the pairs in which exactly
// one failed. Where B fails ratio times as often as A, and A at a rate of at most
// upper, B is the one that failed in a share of them of at least o/(1+o),
// o = ratio (1-upper)/(1-ratio upper); with a ratio of 1 it is one half, whatever
// the rates. So both rates may change with time as they like, as long as they do
// so together: an outage only makes it take longer. (Duet benchmarking: L. Bulej
// et al., arXiv 2001.05811.)
//
// A reply that went wrong may spoil the rest of its conversation, so of each
// conversation the first such pair alone counts for that. Launches of one server
// differ too: Dispersion says how much is believed of that.
type Paired struct {
	Counts        PairCounts
	better, worse *Threshold // of the share of the server that is to be shown to fail more
	difference    float64
	dispersion    Dispersion
	launches      []Cluster // conversations in which one alone was the first to fail, and in which that was B
}

// PairCounts counts pairs of requests by which of them failed.
type PairCounts struct {
	Both    int `json:"both"`
	OnlyA   int `json:"only_a"`
	OnlyB   int `json:"only_b"`
	Neither int `json:"neither"`
}

// Pairs is how many there are.
func (c PairCounts) Pairs() int { return c.Both + c.OnlyA + c.OnlyB + c.Neither }

// A and B are how many of its requests each server failed.
func (c PairCounts) A() int { return c.Both + c.OnlyA }

// B is A for the other server.
func (c PairCounts) B() int { return c.Both + c.OnlyB }

// failingRate bounds the rate of the server that fails more, for ratios other
// than 1.
const failingRate = 0.35

// NewPaired makes a comparison. Better is that B fails less than ratio times as
// often as A, worse the same with A and B exchanged; 0 is 1, which is less
// often by however little. difference is the difference of the rates that
// doesn't matter, above 0.
func NewPaired(ratio, difference float64, d Dispersion) *Paired {
	if ratio == 0 {
		ratio = 1
	}
	o := ratio * (1 - failingRate) / (1 - ratio*failingRate)
	// The share of the one that is to be shown to fail more.
	limit := 1 / (1 + o)
	var above []Alternative
	for _, rest := range []float64{0.002, 0.01, 0.03, 0.08, 0.2, 0.4, 0.6, 0.8} { // of 1-limit
		above = append(above, Alternative{1 - rest*(1-limit), 1})
	}
	return &Paired{better: newShare(limit, above, d), worse: newShare(limit, above, d), difference: difference, dispersion: d}
}

// newShare asks whether a share is above a limit. How much launches differ
// isn't averaged over where it isn't: the dispersion that suits that best counts.
func newShare(limit float64, above []Alternative, d Dispersion) *Threshold {
	t := NewThreshold(limit, nil, above, d)
	var low [][]point
	for _, null := range t.low {
		for _, p := range null {
			p.log = 0
			low = append(low, []point{p})
		}
	}
	t.high, t.low = nil, low
	return t
}

// SharesDispersed is what is believed of how much the share of the pairs in
// which one server alone failed, differs between launches: from not at all to
// launches that are nearly all of one kind.
func SharesDispersed() Dispersion {
	return Dispersion{CV: []float64{0, 0.3, 0.5, 0.7, 0.9}, Weight: []float64{0.4, 0.15, 0.15, 0.15, 0.15}}
}

// Pair says which of two equal requests failed.
type Pair struct{ A, B bool }

// Launch says that what follows comes from another launch of each server.
func (p *Paired) Launch() {
	p.better.Launch()
	p.worse.Launch()
	p.launches = append(p.launches, Cluster{})
}

// Conversation takes in a conversation's pairs, in their order.
func (p *Paired) Conversation(pairs ...Pair) {
	first := true
	for _, pair := range pairs {
		switch {
		case pair.A && pair.B:
			p.Counts.Both++
		case pair.A:
			p.Counts.OnlyA++
		case pair.B:
			p.Counts.OnlyB++
		default:
			p.Counts.Neither++
		}
		if first && pair.A != pair.B {
			first = false
			p.apart(pair)
		}
	}
}

// apart takes in a pair in which exactly one failed.
func (p *Paired) apart(pair Pair) {
	a, b := Cluster{Trials: 1}, Cluster{Trials: 1}
	if pair.A {
		a.Failures = 1
	} else {
		b.Failures = 1
	}
	p.better.Observe(a)
	p.worse.Observe(b)
	if len(p.launches) == 0 {
		p.launches = append(p.launches, Cluster{})
	}
	last := &p.launches[len(p.launches)-1]
	last.Trials++
	last.Failures += b.Failures
}

// LogBetter is the log of the evidence that B fails less often than A.
func (p *Paired) LogBetter() float64 { return p.better.Above() }

// LogWorse is the log of the evidence that B fails more often than A.
func (p *Paired) LogWorse() float64 { return p.worse.Above() }

// LogNoDifference is the log of the evidence that the two rates of failure
// don't differ by as much as the difference that matters: that neither is
// higher by so much all the time.
//
// It is a bet, pair by pair, against each side (I. Waudby-Smith and A. Ramdas,
// JRSS B 86, 2024). All pairs count one by one here: the claim is about the
// servers that ran, given what came before.
func (p *Paired) LogNoDifference() float64 {
	c := p.Counts
	return min(logBet(c.OnlyB, c.OnlyA, c.Both+c.Neither, p.difference), logBet(c.OnlyA, c.OnlyB, c.Both+c.Neither, p.difference))
}

// logBet is the log of the evidence against a mean of at least limit, of values
// that were so often 1, -1 and 0.
func logBet(up, down, level int, limit float64) float64 {
	var logs []float64
	whole := 1 / (1 - limit) // at which a 1 loses everything
	const bets = 10
	stake := 0.98 * whole
	for range bets {
		logs = append(logs, float64(up)*math.Log1p(stake*(limit-1))+float64(down)*math.Log1p(stake*(limit+1))+float64(level)*math.Log1p(stake*limit)-math.Log(bets))
		stake *= 0.6
	}
	return logSumExp(logs)
}

// OddsRatio holds the odds of B's failing in proportion to A's, at all times at
// once with probability level.
func (p *Paired) OddsRatio(level float64) (low, high float64) {
	low, high = AnytimeInterval(p.launches, p.dispersion, level)
	return low / (1 - low), high / (1 - high)
}

// PairsNeeded is how many pairs it takes to show with an error of alpha that B
// is better, when it never fails and A does so at a rate. Conversations have so
// many pairs, and launches so many; 0 is all.
func PairsNeeded(rate, ratio, alpha float64, conversation, launch int, d Dispersion) int {
	p := NewPaired(ratio, 0.5, d)
	fails := 1 - math.Pow(1-rate, float64(conversation))
	pairs, failed := 0, 0.0
	for p.LogBetter() < -math.Log(alpha) {
		if launch > 0 && pairs%launch < conversation {
			p.Launch()
		}
		pairs += conversation
		if failed += fails; failed >= 1 { // what is left over is carried
			p.Conversation(Pair{A: true})
			failed--
		}
	}
	return pairs
}

// PairsWithout is how many pairs without a failure it takes to show with an
// error of alpha that there is no difference of so much.
func PairsWithout(difference, alpha float64) int {
	low, high := 0, 1
	for logBet(0, 0, high, difference) < -math.Log(alpha) {
		high *= 2
	}
	for low+1 < high {
		if middle := (low + high) / 2; logBet(0, 0, middle, difference) < -math.Log(alpha) {
			low = middle
		} else {
			high = middle
		}
	}
	return high
}

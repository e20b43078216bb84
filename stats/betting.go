package stats

import "math"

// Betting is evidence that the mean of launches is below a limit, without any
// model of what happens inside a launch: each launch counts once, with the share
// of its requests that failed. (I. Waudby-Smith and A. Ramdas, Estimating means
// of bounded random variables by betting, JRSS B 86, 2024.)
//
// A launch without failures is worth at most ln 1/(1-limit): 103 launches at a
// limit of 0.05 and an error of 0.005. That is the price of assuming nothing.
type Betting struct {
	limit float64
	bets  []bet
}

type bet struct{ stake, log float64 }

// NewBetting takes a limit between 0 and 1.
func NewBetting(limit float64) *Betting {
	b := &Betting{limit: limit}
	const n = 8
	for i := range n {
		// Up to the whole stake, at which a launch that fails throughout
		// would lose everything.
		b.bets = append(b.bets, bet{float64(i+1) / n / (1 - limit), math.Log(1.0 / n)})
	}
	return b
}

// Observe takes in the share of failures of one launch, 0 to 1.
func (b *Betting) Observe(share float64) {
	for i := range b.bets {
		b.bets[i].log += math.Log(max(0, 1+b.bets[i].stake*(b.limit-share)))
	}
}

// LogEvidence is the log of the e-process against a mean at or above the limit.
func (b *Betting) LogEvidence() float64 {
	logs := make([]float64, len(b.bets))
	for i, bet := range b.bets {
		logs[i] = bet.log
	}
	return logSumExp(logs)
}

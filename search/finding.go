package search

import (
	"cmp"
	"slices"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/stats"
)

// Status is how a search stands.
type Status string

// What a search can come to.
const (
	Running       Status = "running"
	Found         Status = "found"
	NoneOfThese   Status = "none-of-these" // it fails with every factor safe
	NotReproduced Status = "not-reproduced"
	Undecided     Status = "undecided"
)

// Reason says why a search is undecided.
type Reason string

// Reasons to abstain.
const (
	Drift       Reason = "drift"        // what failed stopped failing
	Graded      Reason = "graded"       // levels change how often it fails, not whether
	Misfit      Reason = "misfit"       // no set of levels explains which arms fail
	NonMonotone Reason = "non-monotone" // a set fails, and more than it doesn't
	Unreachable Reason = "unreachable"  // arms that would decide can't be run
	OutOfBudget Reason = "budget"
)

// Finding is what a search has come to.
type Finding struct {
	Status Status `json:"status"`
	Reason Reason `json:"reason,omitempty"`
	Text   string `json:"text,omitempty"`
	// Causes are the minimal failing sets, each needed and enough for failures
	// at a rate above Limit; several are alternatives. In none-of-these the set
	// is empty.
	Causes []Cause `json:"causes,omitempty"`
	// Error bounds the probability that the causes are wrong.
	Error float64 `json:"error,omitempty"`
	// Limit is the rate that tells failing arms from clean ones.
	Limit float64 `json:"limit,omitempty"`
	// Unreached are arms that the certificate asks for and that don't start or
	// are forbidden; smaller ones stood in for those that were to be clean,
	// larger ones for those that were to fail.
	Unreached []design.Arm `json:"unreached,omitempty"`
	Levels    []LevelFound `json:"levels,omitempty"`

	Launches int     `json:"launches"`
	Requests int     `json:"requests"`
	Cost     float64 `json:"cost"` // in requests, launches included
}

// Cause is a set of levels that fails when everything else is safe, and doesn't
// without any one of them.
type Cause struct {
	Set     design.Arm `json:"set"`
	With    Evidence   `json:"with"`
	Without []Evidence `json:"without,omitempty"`
	// Skipped are, by factor, the levels between the set's and the clean one
	// below it, in order: they don't start, so it may begin at any of them.
	Skipped map[string][]string `json:"skipped,omitempty"`
}

// Evidence is what fresh launches showed of an arm.
type Evidence struct {
	Factor   string     `json:"factor,omitempty"` // the one that was taken away
	Arm      design.Arm `json:"arm"`
	Launches int        `json:"launches"`
	Requests int        `json:"requests"`
	Failures int        `json:"failures"`
	// Low and High hold the rate with 95% probability at all times at once.
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// LevelFound is what another level of an accused factor does, with everything
// else as in the failing arm.
type LevelFound struct {
	Factor string `json:"factor"`
	Level  string `json:"level"`
	// Fails is nil when it couldn't be decided.
	Fails    *bool    `json:"fails"`
	Evidence Evidence `json:"evidence"`
}

// Finding is what the search has come to, or how it stands.
func (s *Search) Finding() Finding {
	h := s.hunt
	f := h.finding
	f.Launches, f.Requests, f.Cost = h.launches, h.requests, h.cost+h.aside
	return f
}

// Belief is a set of levels and how likely it is thought to be the cause.
type Belief struct {
	Set         design.Arm `json:"set"`
	Probability float64    `json:"probability"`
}

// Progress is what is believed and what is seen, now. Probabilities are the
// search's own; the intervals are valid at any time.
type Progress struct {
	Leading []Belief           `json:"leading"`
	None    float64            `json:"none"`   // that no set explains what was seen
	Needed  map[string]float64 `json:"needed"` // by factor: that it is part of the cause
	Arms    []Evidence         `json:"arms"`
}

// Progress gives the likeliest causes, at most n, and all arms seen.
func (s *Search) Progress(n int) Progress {
	h := s.hunt
	p := Progress{Needed: map[string]float64{}}
	if b := h.belief; b != nil {
		if len(b.weights) != len(b.cells) { // an arm that is proposed but not seen yet has split some
			b.weigh()
		}
		order := make([]int, len(b.hypotheses))
		for i := range order {
			order[i] = i
			hyp := &b.hypotheses[i]
			for j := range hyp.n {
				p.Needed[h.ladders.space.Factors[hyp.factor[j]].Name] += b.chance(i)
			}
		}
		slices.SortStableFunc(order, func(x, y int) int { return cmp.Compare(b.chance(y), b.chance(x)) })
		for _, i := range order[:min(n, len(order))] {
			p.Leading = append(p.Leading, Belief{h.ladders.set(b.hypotheses[i].arm(len(b.region))), b.chance(i)})
		}
		p.None = b.none.chance
	}
	var arms []claimed
	index := map[string]int{}
	for _, m := range merged(h.all) {
		i, ok := index[m.arm.key()]
		if !ok {
			i = len(arms)
			index[m.arm.key()] = i
			arms = append(arms, claimed{arm: m.arm})
		}
		arms[i].launches = append(arms[i].launches, m.cluster)
	}
	for _, a := range arms {
		p.Arms = append(p.Arms, h.evidence(a))
	}
	return p
}

// describe names a set in words.
func describe(set design.Arm) string {
	if len(set) == 0 {
		return "nothing"
	}
	return set.String()
}

var _ = stats.Cluster{}

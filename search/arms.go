package search

import (
	"fmt"
	"slices"

	"github.com/culprit-project/culprit/design"
)

// An arm is a step on each factor's ladder: 0 is safe, the top is the failing
// arm's level. Seen from the failing arm every conjunction is monotone, also
// "only while this is off": an arm with more steps contains one with fewer.
//
// An arm also stands for a hypothesis or a region of arms: "fails when at least
// this", "all arms up to this".
type arm []uint16

func (a arm) key() string {
	b := make([]byte, 0, 2*len(a))
	for _, v := range a {
		b = append(b, byte(v>>8), byte(v))
	}
	return string(b)
}

// within reports whether each step of a is at most that of b.
func (a arm) within(b arm) bool {
	for i, v := range a {
		if v > b[i] {
			return false
		}
	}
	return true
}

// size is the number of factors that aren't safe.
func (a arm) size() int {
	n := 0
	for _, v := range a {
		if v > 0 {
			n++
		}
	}
	return n
}

// steps is the number of steps above the safe arm.
func (a arm) steps() int {
	n := 0
	for _, v := range a {
		n += int(v)
	}
	return n
}

func (a arm) at(factor int, step uint16) arm {
	b := slices.Clone(a)
	b[factor] = step
	return b
}

func (a arm) equal(b arm) bool { return slices.Equal(a, b) }

// ladders translate between a space's arms and steps.
type ladders struct {
	space  design.Space
	levels [][]int // by factor and step: which level; above the top come those that are only swept
	top    arm
}

func newLadders(space design.Space) (*ladders, error) {
	const most = 200
	if len(space.Factors) > most {
		return nil, fmt.Errorf("%d factors are more than the %d that can be searched", len(space.Factors), most)
	}
	l := &ladders{space: space}
	for _, f := range space.Factors {
		safe, failing := f.Safe(), f.Failing()
		steps := []int{safe, failing}
		if f.Ordered {
			steps = steps[:0]
			for i := safe; i != failing; {
				steps = append(steps, i)
				if failing > safe {
					i++
				} else {
					i--
				}
			}
			steps = append(steps, failing)
		}
		l.top = append(l.top, uint16(len(steps)-1))
		for i := range f.Levels {
			if !slices.Contains(steps, i) {
				steps = append(steps, i)
			}
		}
		l.levels = append(l.levels, steps)
	}
	return l, nil
}

// design is the arm in the words of the space.
func (l *ladders) design(a arm) design.Arm {
	out := design.Arm{}
	for i, f := range l.space.Factors {
		out[f.Name] = f.Levels[l.levels[i][a[i]]].Name
	}
	return out
}

// set names the levels that an arm has above the safe one.
func (l *ladders) set(a arm) design.Arm {
	out := design.Arm{}
	for i, f := range l.space.Factors {
		if a[i] > 0 {
			out[f.Name] = f.Levels[l.levels[i][a[i]]].Name
		}
	}
	return out
}

// sameServer reports whether only client-side factors differ.
func (l *ladders) sameServer(a, b arm) bool {
	for i, f := range l.space.Factors {
		if a[i] != b[i] && !f.ClientSide {
			return false
		}
	}
	return true
}

// requestCost is how many times longer a request takes than in the failing arm.
func (l *ladders) requestCost(a arm) float64 {
	cost := 1.0
	for i, f := range l.space.Factors {
		if c := f.Levels[l.levels[i][a[i]]].RequestCost; c > 0 {
			cost = max(cost, c)
		}
	}
	return cost
}

// validity learns which arms don't start. Each arm that was seen not to is
// explained by one of its levels or a pair of them that no started arm has had.
type validity struct {
	ladders *ladders
	started []arm
	failed  []arm
	skipped map[rung]bool
	lenient bool // about which levels are skipped
}

// rung is a step of a factor's ladder.
type rung struct {
	factor int
	step   uint16
}

func newValidity(l *ladders) *validity { return &validity{ladders: l} }

func (v *validity) start(a arm) {
	v.started = append(v.started, a)
	v.skip()
}

func (v *validity) fail(a arm) {
	v.failed = append(v.failed, a)
	v.skip()
}

// skip notes the levels on the way from the safe one to the failing arm's that
// keep an arm from starting, which differs in nothing else from one that starts,
// and with which none starts; or, leniently, with which none was seen to start
// and one not to. What begins to fail at such a level can't be told
// from what does at the next.
func (v *validity) skip() {
	if len(v.failed) == 0 {
		return
	}
	v.skipped = map[rung]bool{}
	for _, f := range v.failed {
		for i, step := range f {
			if step == 0 || step >= v.ladders.top[i] {
				continue
			}
			like := func(s arm) bool { return s[i] != step && s.at(i, step).equal(f) }
			with := func(s arm) bool { return s[i] == step }
			if (v.lenient || slices.ContainsFunc(v.started, like)) && !slices.ContainsFunc(v.started, with) {
				v.skipped[rung{i, step}] = true
			}
		}
	}
}

// skips reports whether an arm has a level that is skipped.
func (v *validity) skips(a arm) bool {
	for i, step := range a {
		if v.skipped[rung{i, step}] {
			return true
		}
	}
	return false
}

// below is the next step down that isn't skipped.
func (v *validity) below(factor int, step uint16) uint16 {
	for step--; v.skipped[rung{factor, step}]; {
		step--
	}
	return step
}

// chance is how likely the arm is to start.
func (v *validity) chance(a arm) float64 {
	if !v.allowed(a) {
		return 0
	}
	if len(v.failed) == 0 {
		return 1
	}
	for _, s := range v.started {
		if s.equal(a) {
			return 1
		}
	}
	p := 1.0
	for _, f := range v.failed {
		if f.equal(a) {
			return 0
		}
		p *= 1 - v.shared(f, a)
	}
	return p
}

func (v *validity) allowed(a arm) bool {
	return len(v.ladders.space.Forbidden) == 0 || v.ladders.space.Allowed(v.ladders.design(a))
}

// shared is how likely a fails for the reason that failed did: the share of the
// possible explanations that a has too. A single level is taken as likelier
// than a pair, as in the prior of causes.
func (v *validity) shared(failed, a arm) float64 {
	possible, common := 0.0, 0.0
	for i := range failed {
		for j := i; j < len(failed); j++ {
			if slices.ContainsFunc(v.started, func(s arm) bool { return s[i] == failed[i] && s[j] == failed[j] }) {
				continue
			}
			weight := 1.0
			if i == j {
				weight = float64(len(failed))
			}
			possible += weight
			if a[i] == failed[i] && a[j] == failed[j] {
				common += weight
			}
		}
	}
	if possible == 0 {
		return 0 // three levels or more: only this very arm is known
	}
	return common / possible
}

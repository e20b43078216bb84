package search

import (
	"math"
	"math/rand/v2"
	"slices"

	"github.com/culprit-project/culprit/stats"
)

// visitPlan is an arm to visit, and how long.
type visitPlan struct {
	arm      arm
	requests int
	fails    float64 // chance
	gain     float64 // nats for one request's worth of cost
	claim    bool    // test it as a part of the certificate
	fresh    bool    // in a new launch, though the running server would do
}

// running is the server as it is now.
type running struct {
	up     bool
	arm    arm // with the client-side levels of the last requests
	launch int
	spoilt bool // nearly all requests failed: another arm would find what they left behind, if they did
}

// serves reports whether the running server is what an arm needs.
func (r *running) serves(l *ladders, a arm) bool {
	return r.up && l.sameServer(a, r.arm) && (!r.spoilt || a.equal(r.arm))
}

// planner chooses what to visit next within a region.
type planner struct {
	p          *posterior
	ladders    *ladders
	validity   *validity
	running    running
	launchCost float64
	random     *rand.Rand
	// control is the smallest arm that is known to fail: the search is in what
	// it contains, where a single cause explains any number of them.
	control arm

	alive   []int     // hypotheses within control that have a chance
	chances []float64 // theirs
	needed  []float64 // by factor: the chance that it is part of the cause

	failing, clean []float64 // posteriors of the rates
	tables         []predictive
}

// predictive is what a visit of some size would show, by bin.
type predictive struct{ failing, clean []float64 }

const (
	// known is how sure it must be that an arm fails to search within it.
	known = 0.98
	// balance is the chance of failing that tells most, by the capacity of a
	// request at all rates of interest.
	balance = 0.5
	orders  = 16
	// unlikely is the chance to start below which an arm isn't tried.
	unlikely = 0.05
)

func newPlanner(h *hunt, p *posterior) *planner {
	l := &planner{p: p, ladders: h.ladders, validity: h.validity, running: h.running, launchCost: h.launchCost(), random: h.random}
	l.control = p.region
	odds := p.odds()
	for i := range p.visits {
		// By what it showed itself, and by what is believed.
		if a := p.visits[i].arm; a.steps() < l.control.steps() && odds[i] > 2 && p.failsAt(i) >= known {
			l.control = a
		}
	}
	l.needed = make([]float64, len(p.region))
	for i := range p.hypotheses {
		c := p.chance(i)
		if c < 1e-9 || !p.hypotheses[i].fails(l.control) {
			continue
		}
		l.alive = append(l.alive, i)
		l.chances = append(l.chances, c)
		h := &p.hypotheses[i]
		for j := range h.n {
			l.needed[h.factor[j]] += c
		}
	}
	l.failing, l.clean = p.rates()
	g := p.grid
	for i := range g.sizes {
		l.tables = append(l.tables, predictive{average(g.seen[i], l.failing), average(g.unseen[i], l.clean)})
	}
	return l
}

func average(table [][]float64, weight []float64) []float64 {
	out := make([]float64, len(table))
	for i, row := range table {
		for j, p := range row {
			out[i] += p * weight[j]
		}
	}
	return out
}

// information is that between "this arm fails", believed with chance w, and
// what a visit shows, in nats.
func (t predictive) information(w float64) float64 {
	sum := 0.0
	for i, f := range t.failing {
		c := t.clean[i]
		m := w*f + (1-w)*c
		if f > 0 {
			sum += w * f * math.Log(f/m)
		}
		if c > 0 {
			sum += (1 - w) * c * math.Log(c/m)
		}
	}
	return max(sum, 0)
}

// fails is the chance that an arm within control fails.
func (l *planner) fails(a arm) float64 {
	sum := 0.0
	for i, h := range l.alive {
		if l.p.hypotheses[h].fails(a) {
			sum += l.chances[i]
		}
	}
	return sum
}

// choose is the visit that tells most for its cost, of those that fail with at
// least the given chance; false when there is none.
func (l *planner) choose(atLeast float64) (visitPlan, bool) {
	var candidates []visitPlan
	seen := map[string]bool{}
	add := func(a arm) {
		key := a.key()
		if seen[key] {
			return
		}
		seen[key] = true
		if w := l.fails(a); w >= max(atLeast, 0.001) && w < 0.999 {
			candidates = append(candidates, visitPlan{arm: a, fails: w})
		}
	}
	balance := balance
	if atLeast > 0 {
		balance = (1 + atLeast) / 2
	}
	for i := range orders {
		l.descend(l.control, l.order(l.control, i, false), balance, add)
	}
	for f, step := range l.control {
		if step > 1 {
			add(l.control.at(f, l.split(l.control, f, balance)))
		}
	}
	if l.running.up && !l.running.spoilt {
		// What the running server can do needs no launch.
		if a := l.serverOf(l.running.arm); a != nil {
			for i := range orders / 4 {
				add(a)
				l.descend(a, l.order(a, i, true), balance, add)
			}
		}
	}
	for i := range l.p.visits {
		if a := l.p.visits[i].arm; a.within(l.control) {
			add(a)
		}
	}
	add(make(arm, len(l.control)))
	var best visitPlan
	for _, c := range candidates {
		free := l.running.serves(l.ladders, c.arm)
		if !free && best.gain >= l.most(c.fails)/l.launchCost {
			continue // can't be better
		}
		valid := l.validity.chance(c.arm)
		if valid < unlikely {
			continue
		}
		cost := l.launchCost
		each := l.ladders.requestCost(c.arm)
		fresh := false
		if v, ok := l.p.index[c.arm.key()]; ok && free && l.p.visits[v].shown[l.running.launch].Trials > 0 {
			// A launch that has shown much of this arm hasn't much to add;
			// another may have.
			gain, n := stay(l.p, v, l.running.launch, each)
			if gain > best.gain {
				best = visitPlan{arm: c.arm, requests: n, fails: c.fails, gain: gain}
			}
			fresh = true
		} else if free {
			cost = 0
		}
		for i, n := range l.p.grid.sizes {
			gain := valid * l.tables[i].information(c.fails) / (cost + float64(n)*each)
			if gain > best.gain {
				best = visitPlan{arm: c.arm, requests: n, fails: c.fails, gain: gain, fresh: fresh}
			}
		}
	}
	return best, best.arm != nil
}

// nearMiss is the member of a certificate that tells most for its cost: the
// region without one factor that is likely needed. When that is so, its cost is
// saved later. requests is what it takes,
// and penalty how much dearer each later claim gets when it fails.
func (l *planner) nearMiss(requests, penalty float64, proven func(arm) bool) visitPlan {
	var best visitPlan
	size := 0.0
	for _, c := range l.needed {
		size += c
	}
	for f, needed := range l.needed {
		if needed < 0.3 {
			continue
		}
		// The likeliest step at which the factor begins to matter.
		at := make([]float64, l.p.region[f]+1)
		for i, h := range l.alive {
			hyp := &l.p.hypotheses[h]
			for j := range hyp.n {
				if int(hyp.factor[j]) == f {
					at[hyp.step[j]] += l.chances[i]
				}
			}
		}
		step := uint16(0)
		for s := range at {
			if at[s] > at[step] {
				step = uint16(s)
			}
		}
		if step == 0 {
			continue
		}
		a := l.p.region.at(f, l.validity.below(f, step))
		w := l.fails(a)
		if w < 0.001 || w > 0.7 || proven(a) {
			continue
		}
		cost := l.launchCost + requests*l.ladders.requestCost(a)
		gain := l.validity.chance(a) * l.most(w) / ((1-at[step])*cost + w*penalty*(size+1)*requests)
		if gain > best.gain {
			best = visitPlan{arm: a, fails: w, gain: gain, claim: true}
		}
	}
	return best
}

// most bounds the information in an arm that fails with chance w, in nats.
func (l *planner) most(w float64) float64 { return -w*math.Log(w) - (1-w)*math.Log(1-w) }

// serverOf is the running server with all of control's client-side levels; nil
// if the server isn't within control.
func (l *planner) serverOf(a arm) arm {
	b := slices.Clone(a)
	for i, f := range l.ladders.space.Factors {
		if f.ClientSide {
			b[i] = l.control[i]
		}
	}
	if !b.within(l.control) {
		return nil
	}
	return b
}

// order is one in which to make the factors of an arm safe: at random, every
// other time with those that are hardly needed first.
func (l *planner) order(a arm, n int, clientOnly bool) []int {
	var factors []int
	for i, v := range a {
		if v > 0 && (!clientOnly || l.ladders.space.Factors[i].ClientSide) {
			factors = append(factors, i)
		}
	}
	key := make([]float64, len(a))
	for _, f := range factors {
		key[f] = l.random.Float64()
		if n%2 == 1 {
			key[f] += 2 * l.needed[f]
		}
	}
	slices.SortFunc(factors, func(x, y int) int {
		switch {
		case key[x] < key[y]:
			return -1
		case key[x] > key[y]:
			return 1
		}
		return x - y
	})
	return factors
}

// descend makes the factors of an arm safe one by one, and adds the arms on
// both sides of the balance.
func (l *planner) descend(from arm, order []int, balance float64, add func(arm)) {
	position := make([]int, len(from))
	for i := range position {
		position[i] = -1
	}
	for i, f := range order {
		position[f] = i
	}
	// lost[i] is the chance of the causes that step i rules out.
	lost := make([]float64, len(order))
	w := 0.0
	for i, h := range l.alive {
		hyp := &l.p.hypotheses[h]
		first := len(order)
		ok := true
		for j := range hyp.n {
			if from[hyp.factor[j]] < hyp.step[j] {
				ok = false
				break
			}
			if at := position[hyp.factor[j]]; at >= 0 {
				first = min(first, at)
			}
		}
		if !ok {
			continue
		}
		w += l.chances[i]
		if first < len(order) {
			lost[first] += l.chances[i]
		}
	}
	a := slices.Clone(from)
	for i, f := range order {
		if w-lost[i] > balance {
			a[f] = 0
			w -= lost[i]
			continue
		}
		if i > 0 {
			add(slices.Clone(a))
		}
		if a[f] > 1 {
			add(a.at(f, l.split(a, f, balance)))
		}
		add(a.at(f, 0))
		return
	}
	add(a)
}

// split is the step of one factor that comes nearest to the balance, of those
// that may start.
func (l *planner) split(a arm, factor int, balance float64) uint16 {
	at := make([]float64, a[factor]+1) // by step: the chance that failing begins there
	for i, h := range l.alive {
		hyp := &l.p.hypotheses[h]
		if !hyp.fails(a) {
			continue
		}
		step := uint16(0)
		for j := range hyp.n {
			if int(hyp.factor[j]) == factor {
				step = hyp.step[j]
			}
		}
		at[step] += l.chances[i]
	}
	sum := 0.0
	best, distance := uint16(0), math.Inf(1)
	for step, c := range at {
		sum += c
		if d := math.Abs(sum - balance); d < distance && l.validity.chance(a.at(factor, uint16(step))) >= unlikely {
			best, distance = uint16(step), d
		}
	}
	return best
}

// stay is the best gain of going on with an arm in its launch, given what that
// has shown, and with how many requests.
func stay(p *posterior, visit, launch int, each float64) (gain float64, requests int) {
	// If the arm fails, then at the rates that go with what it has shown.
	failing, _ := p.ratesIf(func(c *cell) bool { return c.fails[visit] })
	_, clean := p.ratesIf(func(c *cell) bool { return !c.fails[visit] })
	w, shown := p.failsAt(visit), p.visits[visit].shown[launch]
	g := p.grid
	for i, n := range g.sizes {
		var t predictive
		if len(g.dispersion.CV) == 1 {
			t = predictive{average(g.seen[i], failing), average(g.unseen[i], clean)}
		} else {
			if i%2 == 1 {
				continue
			}
			t = predictive{given(g.failing, failing, shown, n), average(coarse(g.unseen[i]), clean)}
		}
		if v := t.information(w) / (float64(n) * each); v > gain {
			gain, requests = v, n
		}
	}
	return gain, requests
}

// given is the chance of 0, 1, 2 and more failures in n more requests of a
// launch, averaged over models. The weights already know what was shown.
func given(models []stats.LaunchModel, weight []float64, shown stats.Cluster, n int) []float64 {
	out := make([]float64, 4)
	pairs := math.Log(float64(n) * float64(n-1) / 2)
	for i, m := range models {
		if weight[i] < 1e-4 {
			continue
		}
		zero := math.Exp(m.LogStep(shown, stats.Cluster{Failures: 0, Trials: n}))
		one := math.Exp(math.Log(float64(n)) + m.LogStep(shown, stats.Cluster{Failures: 1, Trials: n}))
		two := math.Exp(pairs + m.LogStep(shown, stats.Cluster{Failures: 2, Trials: n}))
		out[0] += weight[i] * zero
		out[1] += weight[i] * one
		out[2] += weight[i] * two
		out[3] += weight[i] * max(0, 1-zero-one-two)
	}
	return out
}

// coarse makes bins of 0, 1, 2 and more.
func coarse(table [][]float64) [][]float64 {
	out := slices.Clone(table[:4])
	out[3] = slices.Clone(table[3])
	for _, row := range table[4:] {
		for i, v := range row {
			out[3][i] += v
		}
	}
	return out
}

package search

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/culprit-project/culprit/stats"
)

const (
	// likely is how probable a set must be before its certificate is tried.
	// Costs are flat between 0.85 and 0.98.
	likely = 0.97
	// attempts bounds how often a search may start again.
	attempts = 6
)

// certificate is what is proven so far, by fresh launches.
type certificate struct {
	causes []arm
	clean  []claimed // regions without a cause, largest first
	fails  map[string]claimed
}

type claimed struct {
	arm      arm
	launches []stats.Cluster
	at       int // how much of the record there was
}

// certify finds all minimal failing sets and proves them. A region that was
// shown to fail holds a cause; when a cause is known, taking each of its members
// away gives regions that hold another cause or are clean. When all of these are
// clean and every cause fails alone, then in a monotone world there is no other
// (R. Reiter's hitting-set tree).
//
// Claims are tested on launches that come after they are made, each false one
// with a smaller error than the one before, so that all together err with at most
// Error whatever the search did.
func (h *hunt) certify() error {
	c := &h.proof
	c.fails = map[string]claimed{}
	queue := []arm{h.ladders.top}
	searches := 0
	for {
		for len(queue) > 0 {
			region := queue[0]
			queue = queue[1:]
			if c.covers(region) {
				continue
			}
			if i := slices.IndexFunc(c.causes, func(s arm) bool { return s.within(region) }); i >= 0 {
				queue = append(queue, h.without(region, c.causes[i])...)
				continue
			}
			if !region.equal(h.ladders.top) {
				if _, most := h.cleanRuns(); h.cleanRun >= most {
					forgot, err := h.control(h.belief.smallest(), false)
					if err != nil {
						return err
					}
					if forgot {
						queue = []arm{h.ladders.top}
						continue
					}
				}
				v, err := h.nearMiss(region, c.causes)
				if err != nil {
					return err
				}
				switch v.side {
				case below:
					if h.between(v.launches) {
						h.lower(h.lowerLimit(rate(v.launches)))
						queue = []arm{h.ladders.top}
						continue
					}
					c.clean = append(c.clean, v.claimed)
					continue
				case neither:
					limit := h.lowerLimit(rate(v.launches))
					if limit == 0 {
						return graded()
					}
					h.lower(limit)
					queue = []arm{h.ladders.top}
					continue
				case above:
					h.refuted++
					// Another cause, or a wrong one: that one fails first.
					held, err := h.allFail(c)
					if err != nil {
						return err
					}
					if held {
						held, err = h.shrink(c, region)
					}
					if err != nil {
						return err
					}
					if !held {
						queue = []arm{h.ladders.top}
						continue
					}
				}
			}
			if searches++; searches > attempts+2*len(c.causes) {
				return giveUp(Misfit, "%d searches didn't find causes that hold", searches-1)
			}
			found, err := h.narrow(region, likely)
			if err != nil {
				return err
			}
			if found.size() == 0 {
				differ, err := h.weakModel()
				if err != nil {
					return err
				}
				if differ {
					queue = []arm{h.ladders.top}
					continue
				}
			}
			if len(c.clean)+len(c.fails)+h.lowered == 0 {
				h.limit, h.base = h.limits(float64(found.size()))
			}
			c.causes = minimal(append(c.causes, found))
			queue = append(queue, h.without(region, found)...)
			if h.options.Steady && h.running.serves(h.ladders, found) {
				// Now it takes no launch. Who doubts that it goes on failing has it fail last.
				held, err := h.allFail(c)
				if err != nil {
					return err
				}
				if !held {
					queue = []arm{h.ladders.top}
				}
			}
		}
		// Each cause fails alone, and it still does: after the clean arms.
		held, err := h.allFail(c)
		if err != nil {
			return err
		}
		if held && h.cleanRun > 0 && !h.options.Steady {
			forgot, err := h.control(c.causes[0], true)
			if err != nil {
				return err
			}
			held = !forgot
		}
		if held && !h.options.Steady && h.suspicious(c.causes) {
			if err := h.again(c); err != nil {
				return err
			}
		}
		if held && c.causes[0].size() == 0 {
			differ, err := h.weakModel() // now more is known of everything safe
			if err != nil {
				return err
			}
			held = !differ
		}
		if held {
			break
		}
		queue = []arm{h.ladders.top}
	}
	if err := h.spot(c.causes); err != nil {
		return err
	}
	h.conclude(c.causes)
	for i := range h.finding.Causes {
		cause := &h.finding.Causes[i]
		s := c.causes[i]
		cause.With = h.evidence(c.fails[s.key()])
		for f := range s {
			if s[f] == 0 {
				continue
			}
			for step := h.validity.below(f, s[f]) + 1; step < s[f]; step++ {
				if cause.Skipped == nil {
					cause.Skipped = map[string][]string{}
				}
				factor := h.ladders.space.Factors[f]
				cause.Skipped[factor.Name] = append(cause.Skipped[factor.Name], factor.Levels[h.ladders.levels[f][step]].Name)
			}
			for _, r := range c.clean {
				if r.arm[f] < s[f] && s.at(f, r.arm[f]).within(r.arm) {
					e := h.evidence(r)
					e.Factor = h.ladders.space.Factors[f].Name
					cause.Without = append(cause.Without, e)
					break
				}
			}
		}
	}
	return h.sweep(c.causes)
}

// weakModel says whether the failing arm fails more often than everything safe,
// which fails too: a model that is often wrong by itself, with a fault on top.
// The search thinks such bases unlikely. Here they are as likely as others, and
// stay so if the arms differ; then nothing is proven any more, since the limit was
// for other bases.
func (h *hunt) weakModel() (differ bool, err error) {
	if h.weak {
		return false, nil
	}
	before := slices.Clone(h.grid.baseWeight)
	for i := range h.grid.baseWeight {
		h.grid.baseWeight[i] = 1 / float64(len(before))
	}
	if err := h.believe(h.ladders.top, h.size); err != nil {
		return false, err
	}
	safe, top := make(arm, len(h.ladders.top)), h.ladders.top
	failing, _ := h.belief.rates()
	requests := max(h.options.Batch, int(4/h.meanRate(failing)))
	enough := h.cost + patience*(h.launchCost()+float64(requests))
	for alike := h.belief.chance(0); alike <= 0.5 && !differ && h.cost < enough; alike = h.belief.chance(0) {
		a := safe
		if h.belief.shown(top).Trials < h.belief.shown(safe).Trials {
			a = top
		}
		_, err := h.measure(a, requests, false, Narrow, "everything safe and everything suspect: do they fail alike?")
		if errors.Is(err, errUnusable) {
			break
		}
		if err != nil {
			return false, err
		}
		differ = h.belief.chance(0) < 0.1
	}
	if h.weak = differ; differ {
		h.lowered, h.proof = 0, certificate{fails: map[string]claimed{}}
	} else {
		h.grid.baseWeight = before
	}
	return differ, h.believe(h.ladders.top, h.size)
}

// lower moves the limit. What was proven was about the limit before.
func (h *hunt) lower(limit float64) {
	h.limit = limit
	h.lowered++
	h.refuted++
	h.proof.clean, h.proof.fails = nil, map[string]claimed{}
}

func graded() error {
	return giveUp(Graded, "some arms fail at a rate in between: the levels change how often it fails, not whether")
}

// allFail tests each cause that wasn't, alone, and drops the first that doesn't
// fail.
func (h *hunt) allFail(c *certificate) (bool, error) {
	for _, s := range c.causes {
		if _, ok := c.fails[s.key()]; ok {
			continue
		}
		v, err := h.alone(s)
		if err == nil && v.side != above && h.clearlyAbove(v.launches) {
			// It fails, if less often than it seemed when the limit was set.
			limit, _ := h.limits(float64(s.size()))
			limit = min(limit, h.limit/2)
			if h.lowered == 2 || limit < 2*h.base {
				return false, graded()
			}
			h.lower(limit)
			return false, nil
		}
		if errors.Is(err, errUnusable) {
			if h.validity.skips(s) {
				c.causes = slices.DeleteFunc(c.causes, s.equal)
				return false, nil // it begins at the next level then
			}
			return false, giveUp(Unreachable, "%s alone can't be run", describe(h.ladders.set(s)))
		}
		if err != nil {
			return false, err
		}
		if v.side != above {
			h.refuted++
			if s.size() >= h.size {
				h.size = min(h.size+2, maxSize) // all of it is needed, and more
			}
			c.causes = slices.DeleteFunc(c.causes, s.equal)
			return false, nil
		}
		c.fails[s.key()] = v.claimed
	}
	return true, nil
}

// alone tests that a cause fails. When it can't be run with everything else
// safe, it is with as little more as can; that everything safe fails has no
// other proof.
func (h *hunt) alone(s arm) (decided, error) {
	v, err := h.claim(question{arm: s, want: above, phase: Confirm, why: h.whySet(s)})
	larger := slices.Clone(s)
	for errors.Is(err, errUnusable) && !h.validity.skips(s) && s.size() > 0 && !larger.equal(h.ladders.top) {
		best, chance := -1, -1.0
		for _, i := range h.random.Perm(len(larger)) {
			if larger[i] == h.ladders.top[i] {
				continue
			}
			if c := h.validity.chance(larger.at(i, h.ladders.top[i])); c > chance {
				best, chance = i, c
			}
		}
		larger[best] = h.ladders.top[best]
		if chance < unlikely {
			continue
		}
		v, err = h.claim(question{arm: slices.Clone(larger), want: above, phase: Confirm, why: h.whySet(s) + "; it doesn't run alone"})
		if err == nil && v.side == above {
			h.finding.Unreached = append(h.finding.Unreached, h.ladders.design(s))
		}
	}
	return v, err
}

// early plans a claim of the certificate that the search can use; its gain is 0
// when there is none.
func (h *hunt) early(plan *planner) visitPlan {
	if h.options.PosteriorOnly > 0 || !h.belief.region.equal(h.ladders.top) || len(h.proof.causes) > 0 {
		return visitPlan{}
	}
	if len(h.proof.clean) == 0 && h.lowered == 0 {
		if _, chance := h.belief.best(); chance < 0.05 {
			return visitPlan{} // nothing is settled yet
		}
		size := 0.0
		for _, c := range plan.needed {
			size += c
		}
		h.limit, h.base = h.limits(size)
	}
	alpha, next := h.alpha(h.refuted), h.alpha(h.refuted+1)
	return plan.nearMiss(-math.Log(alpha)/divergence(h.base, h.limit), math.Log(next)/math.Log(alpha)-1, h.proof.covers)
}

// earlyClaim tests it.
func (h *hunt) earlyClaim(plan visitPlan) error {
	v, err := h.claim(question{arm: plan.arm, want: below, phase: Confirm, why: h.whyNearMiss(plan.arm), early: true})
	if err != nil {
		return err
	}
	if v.side == below && !h.between(v.launches) {
		h.proof.clean = append(h.proof.clean, v.claimed)
	} else {
		h.refuted++
	}
	return nil
}

// alpha is the error allowed to a claim after some that didn't hold. The faster
// it falls, the more is left for the first; where requests are dear, few claims
// are made that may not hold. It is fixed when the first is made.
func (h *hunt) alpha(refuted int) float64 {
	if h.decay == 0 {
		h.decay = 0.4
		if -math.Log(h.options.Error)/divergence(h.base, h.limit) > 2*h.launchCost() {
			h.decay = 0.2
		}
	}
	return h.options.Error * (1 - h.decay) * math.Pow(h.decay, float64(refuted))
}

// proven says whether all members of a set are known to be needed: what is left
// to test is whether they are enough, and the certificate does that.
func (h *hunt) proven(s arm) bool {
	if h.options.PosteriorOnly > 0 || s.size() == 0 || !h.belief.region.equal(h.ladders.top) {
		return false
	}
	for i, v := range s {
		if v > 0 && !h.proof.covers(h.ladders.top.at(i, h.validity.below(i, v))) {
			return false
		}
	}
	return true
}

// covers reports whether a region is proven clean.
func (c *certificate) covers(region arm) bool {
	return slices.ContainsFunc(c.clean, func(r claimed) bool { return region.within(r.arm) })
}

// suspicious says whether a launch contradicts the causes, or the failing arm has
// stopped failing for a while: chance, or rates that change with time.
func (h *hunt) suspicious(causes []arm) bool {
	if h.drifts+h.doubts > 0 {
		return true
	}
	for _, s := range merged(h.all) {
		var odds float64 // that it contradicts the causes
		if slices.ContainsFunc(causes, func(c arm) bool { return c.within(s.arm) }) {
			odds = -h.odds(s.cluster)
		} else {
			// What was learned of the bases knows this launch already, and has made room for it.
			odds = h.oddsGiven(s.cluster, h.grid.baseWeight)
		}
		if odds > 4 {
			return true
		}
	}
	// A launch that fails throughout has no long stretches without.
	var stretch shown
	for _, s := range h.all {
		if s.launch != stretch.launch || !s.arm.equal(stretch.arm) || s.cluster.Failures > 0 {
			stretch = shown{arm: s.arm, launch: s.launch}
		}
		if s.cluster.Failures == 0 && slices.ContainsFunc(causes, func(c arm) bool { return c.within(s.arm) }) {
			stretch.cluster.Trials += s.cluster.Trials
			if h.odds(stretch.cluster) < -8 {
				return true
			}
		}
	}
	return false
}

// again repeats the certificate with a cause failing before and after each clean
// launch: what comes and goes doesn't do so in this order.
func (h *hunt) again(c *certificate) error {
	h.strict = true
	defer func() { h.strict = false }()
	fail := func(causes []arm) error {
		for _, s := range causes {
			if forgot, err := h.control(s, true); err != nil || forgot {
				return cmp.Or(err, giveUp(Drift, "what failed has stopped failing for a while: nothing can be proven"))
			}
		}
		return nil
	}
	for i := range c.clean {
		if err := fail(c.causes); err != nil {
			return err
		}
		v, err := h.claim(question{
			arm: c.clean[i].arm, want: below, phase: Confirm, why: h.whyNearMiss(c.clean[i].arm) + ", once more",
			between: func() error { return fail(c.causes[:1]) },
		})
		if errors.Is(err, errUnusable) {
			continue // it was stood in for
		}
		if err != nil {
			return err
		}
		if v.side != below {
			return giveUp(Drift, "the same arm was clean and then failed: %s", describe(h.ladders.set(v.arm)))
		}
		c.clean[i] = v.claimed
	}
	if len(c.clean) == 0 {
		return nil
	}
	return fail(c.causes[:1])
}

// shrink asks, when a region without some members of a cause fails, whether the
// rest of the cause fails alone: a member that was thought needed by chance is
// likelier than a second cause. It returns false when a cause got smaller.
func (h *hunt) shrink(c *certificate, region arm) (bool, error) {
	for i, s := range c.causes {
		rest := slices.Clone(s)
		lower := false // it begins at a level further down: the search within the region bisects to it
		for f := range rest {
			rest[f] = min(rest[f], region[f])
			lower = lower || rest[f] > 0 && rest[f] < s[f]
		}
		if lower || rest.size() == 0 || c.covers(rest) || slices.ContainsFunc(c.causes, rest.equal) || h.seenClean(rest, region) {
			continue
		}
		v, err := h.claim(question{arm: rest, want: above, phase: Confirm, why: h.whySet(rest)})
		if errors.Is(err, errUnusable) {
			continue
		}
		if err != nil {
			return false, err
		}
		if v.side == above {
			c.fails[rest.key()] = v.claimed
			c.causes[i] = rest
			c.causes = minimal(c.causes)
			return false, nil
		}
	}
	return true, nil
}

// seenClean says whether arms between two were clean for so long that chance is
// no explanation.
func (h *hunt) seenClean(from, to arm) bool {
	failing, _ := h.belief.rates()
	expected := 0.0
	for _, m := range merged(h.record) {
		if from.within(m.arm) && m.arm.within(to) && !m.arm.equal(to) {
			if m.cluster.Failures > 0 {
				continue
			}
			expected += h.meanRate(failing) * float64(m.cluster.Trials)
		}
	}
	return expected > 8
}

// without is a region with each member of a cause taken to the next step down
// that may run, in random order.
func (h *hunt) without(region, cause arm) []arm {
	var out []arm
	for i, v := range cause {
		if v > 0 {
			out = append(out, region.at(i, h.validity.below(i, v)))
		}
	}
	h.random.Shuffle(len(out), func(i, j int) { out[i], out[j] = out[j], out[i] })
	return out
}

// minimal drops sets that contain others.
func minimal(sets []arm) []arm {
	var out []arm
	for i, s := range sets {
		if !slices.ContainsFunc(sets, func(o arm) bool { return o.within(s) && !o.equal(s) }) &&
			!slices.ContainsFunc(sets[:i], s.equal) {
			out = append(out, s)
		}
	}
	return out
}

// limits gives the limit between failing and clean that makes both sides of the
// certificate of a cause of some size cheap together, and the base.
func (h *hunt) limits(size float64) (limit, base float64) {
	failing, clean := h.belief.rates()
	for i, w := range clean {
		base += w * math.Log(h.grid.bases[i])
	}
	base = math.Exp(base)
	n := len(h.grid.rates)
	byRate, byCV := make([]float64, n), make([]float64, len(h.grid.dispersion.CV))
	for i, w := range failing {
		byRate[i%n] += w
		byCV[i/n] += w
	}
	mean := h.meanRate(failing)
	each := 1.0 // cost of a request of the failing arm
	if h.poisoned {
		each += mean * h.launchCost()
	}
	best := math.Inf(1)
	limit = max(1.5*base, mean/8)
	// What fails half as often as the failing arm fails too: other arms of one
	// cause do, where settings change how much runs at once.
	for p := limit; p < mean/2; p *= 1.05 {
		cost := size * h.cleanCost(base, p, byCV)
		again := 5 * (cost + each*h.failingCost(mean, p, byCV)) // of a limit that is too high
		for i, w := range byRate {
			if r := h.grid.rates[i]; r <= p {
				cost += w * again
			} else {
				cost += w * min(again, each*h.failingCost(r, p, byCV))
			}
		}
		if cost < best {
			best, limit = cost, p
		}
	}
	return limit, base
}

// cleanCost is what a nat of evidence costs that an arm with the base is below
// a limit. Where launches differ, the requests of one tell less and less: it may
// be a good one, of a gamma distribution of rates.
func (h *hunt) cleanCost(base, limit float64, byCV []float64) float64 {
	cost := 0.0
	for i, cv := range h.grid.dispersion.CV {
		each := 1 / divergence(base, limit)
		if cv > 0 {
			launch := math.Inf(1)
			for m := 8.0; m < 4096; m *= 2 {
				launch = min(launch, (h.launchCost()+m)*cv*cv/math.Log1p(m*limit*cv*cv))
			}
			each = max(each, launch)
		}
		cost += byCV[i] * each
	}
	return cost
}

// failingCost is the same of an arm with some rate being above it: what a launch
// tells is bounded by how far gamma distributions of the two means are apart.
func (h *hunt) failingCost(rate, limit float64, byCV []float64) float64 {
	cost := 0.0
	for i, cv := range h.grid.dispersion.CV {
		apart := rate/limit - 1 - math.Log(rate/limit)
		cost += byCV[i] * (1/divergence(rate, limit) + h.launchCost()*cv*cv/apart)
	}
	return cost
}

func (h *hunt) meanRate(failing []float64) float64 {
	mean := 0.0
	for i, w := range failing {
		mean += w * h.grid.rates[i%len(h.grid.rates)]
	}
	return mean
}

// divergence is Kullback and Leibler's, of one rate from another, in nats.
func divergence(a, b float64) float64 {
	d := 0.0
	if a > 0 {
		d += a * math.Log(a/b)
	}
	if a < 1 {
		d += (1 - a) * math.Log((1-a)/(1-b))
	}
	return d
}

type side int

const (
	neither side = iota
	below
	above
)

type decided struct {
	claimed
	side side
}

// question asks on which side of the limit an arm is.
type question struct {
	arm   arm
	want  side
	phase Phase
	why   string
	early bool // give up when the search is sure that it isn't on that side
	// between is done before each launch but the first, where there is one.
	between func() error
}

// claim answers it with fresh launches.
func (h *hunt) claim(q question) (decided, error) {
	if before := h.strict; q.want == above {
		// That it fails vouches for what was clean before.
		h.strict = true
		defer func() { h.strict = before }()
	}
	a := q.arm
	enough := -math.Log(h.alpha(h.refuted))
	failing, clean := h.belief.rates()
	n := len(h.grid.rates)
	byRate, byCV := make([]float64, n), make([]float64, len(h.grid.dispersion.CV))
	for i, w := range failing {
		byRate[i%n] += w
		byCV[i/n] += w
	}
	// A tenth of each weight is spread evenly, lest the search be wrong.
	var low, high []stats.Alternative
	for i, w := range clean {
		low = append(low, stats.Alternative{Rate: h.grid.bases[i], Weight: 0.9*w + 0.1/float64(len(clean))})
	}
	for i, w := range byRate {
		high = append(high, stats.Alternative{Rate: h.grid.rates[i], Weight: 0.9*w + 0.1/float64(n)})
	}
	dispersion := stats.Dispersion{CV: h.grid.dispersion.CV, Weight: byCV}
	test := stats.NewThreshold(h.limit, low, high, dispersion)

	// What a clear outcome takes, in requests.
	expected := enough / divergence(h.base, h.limit)
	most := 6 * (max(expected, enough/divergence(2*h.limit, h.limit)) + 2*h.launchCost())
	if len(h.options.Dispersion.CV) > 1 {
		most *= 4
	}
	batch := max(h.options.Batch, int(expected/64))
	if q.want == above {
		batch = h.options.Batch
	}
	d := decided{claimed: claimed{arm: a}}
	cost, last, launch := 0.0, 0.0, 0
	fresh := len(h.options.Dispersion.CV) > 1 // else the running launch is as good as another, and what comes is new
	for {
		more, err := h.measure(a, batch, fresh, q.phase, q.why)
		if err != nil {
			return d, err
		}
		if h.running.launch != launch {
			launch = h.running.launch
			test.Launch()
			d.launches = append(d.launches, stats.Cluster{})
			cost += h.launchCost()
		}
		here := &d.launches[len(d.launches)-1]
		here.Failures += more.Failures
		here.Trials += more.Trials
		cost += float64(more.Trials)
		test.Observe(more)
		if q.early && h.belief.failsAt(h.belief.visit(a)) > 0.99 {
			d.side = above // not proven, but not worth more
			return d, nil
		}
		if q.want == above && q.phase == Confirm && a.within(h.belief.region) && h.belief.failsAt(h.belief.visit(a)) < 0.01 {
			d.side = below // likewise
			return d, nil
		}
		low, high := test.Below(), test.Above()
		switch {
		case low >= enough && (len(d.launches) > 1 || len(h.options.Dispersion.CV) == 1):
			// One clean launch may be a lucky one, whatever the others were like.
			d.side, d.at = below, len(h.record)
			return d, nil
		case high >= enough:
			d.side = above
			return d, nil
		case q.phase == Spot && h.clearlyAbove(d.launches):
			d.side = above // how often doesn't matter here
			return d, nil
		case cost > most || len(d.launches) > 40:
			return d, nil
		}
		evidence := max(low, high)
		gain := (evidence - last) / float64(more.Trials)
		last = evidence
		fresh = !h.running.up
		if len(h.options.Dispersion.CV) > 1 && !fresh {
			if low >= enough {
				fresh = true
			} else if low >= high {
				fresh = h.elsewhere(test, batch, h.ladders.requestCost(a))
			} else {
				// When the launch tells less for a request than all did on
				// average, go on elsewhere.
				fresh = float64(here.Trials) >= 2/h.limit && gain < evidence/cost
			}
		}
		if fresh && q.between != nil {
			if err := q.between(); err != nil {
				return d, err
			}
		}
	}
}

// elsewhere says whether a new launch is expected to tell more for its cost than
// going on in the running one, if the arm is clean.
func (h *hunt) elsewhere(test *stats.Threshold, batch int, each float64) bool {
	stay, move := 0.0, 0.0
	for range 4 {
		more := stats.Cluster{Trials: batch}
		cost := float64(batch) * each
		stay = max(stay, test.Gain(more, false)/cost)
		move = max(move, test.Gain(more, true)/(cost+h.launchCost()))
		batch *= 2
	}
	return move > stay
}

// nearMiss tests that a region is clean. When it can't be run, one below it that
// still has the rest of a cause will do for that cause.
func (h *hunt) nearMiss(region arm, causes []arm) (decided, error) {
	why := h.whyNearMiss(region)
	v, err := h.claim(question{arm: region, want: below, phase: Confirm, why: why})
	for i := range region {
		for errors.Is(err, errUnusable) && h.validity.skipped[rung{i, region[i]}] {
			region = region.at(i, h.validity.below(i, region[i]))
			v, err = h.claim(question{arm: region, want: below, phase: Confirm, why: why})
		}
	}
	if !errors.Is(err, errUnusable) {
		return v, err
	}
	kept := make([]bool, len(region))
	for _, s := range causes {
		for i, step := range s {
			kept[i] = kept[i] || step > 0
		}
	}
	smaller := slices.Clone(region)
	order := h.random.Perm(len(region))
	for range 2 * len(region) {
		best, chance := -1, h.validity.chance(smaller)
		for _, i := range order {
			if kept[i] || smaller[i] == 0 {
				continue
			}
			if c := h.validity.chance(smaller.at(i, 0)); c > chance || best < 0 && c == chance {
				best, chance = i, c
			}
		}
		if best < 0 {
			break
		}
		smaller[best] = 0
		if h.validity.chance(smaller) == 0 {
			continue
		}
		v, err := h.claim(question{arm: slices.Clone(smaller), want: below, phase: Confirm, why: why})
		if errors.Is(err, errUnusable) {
			continue
		}
		if err == nil && v.side == below {
			// Nothing between this arm and the region was run.
			h.finding.Unreached = append(h.finding.Unreached, h.ladders.design(region))
			v.arm = region
		}
		return v, err
	}
	return v, giveUp(Unreachable, "no arm without %s can be run: it can't be told from what it needs", list(h.off(region)))
}

// off names the factors that a region has below the failing arm.
func (h *hunt) off(region arm) []string {
	var out []string
	for i, f := range h.ladders.space.Factors {
		if region[i] < h.ladders.top[i] {
			out = append(out, f.Name)
		}
	}
	return out
}

func (h *hunt) whyNearMiss(region arm) string {
	return "all suspect but " + list(h.off(region)) + ": clean if it is needed"
}

func (h *hunt) whySet(s arm) string {
	if s.size() == 0 {
		return "everything safe: fails if the cause is none of these factors"
	}
	return "the suspected cause alone: fails if nothing else is needed"
}

// between says whether a rate is clearly above the base and the limit can be
// moved below it at a bearable cost.
func (h *hunt) between(launches []stats.Cluster) bool {
	return h.lowerLimit(rate(launches)) > 0 && h.clearlyAbove(launches)
}

// clearlyAbove says whether launches fail more often than clean ones.
func (h *hunt) clearlyAbove(launches []stats.Cluster) bool {
	return stats.LogEvidenceAbove(launches, 3*h.base, h.options.Dispersion) >= -math.Log(h.options.Error/10)
}

// lowerLimit is a limit below a rate, 0 when that would be too near the base.
func (h *hunt) lowerLimit(rate float64) float64 {
	limit := math.Sqrt(rate * h.base)
	if h.lowered == 2 || limit >= h.limit || divergence(h.base, limit) < divergence(h.base, h.limit)/10 {
		return 0
	}
	return limit
}

func rate(launches []stats.Cluster) float64 {
	var total stats.Cluster
	for _, c := range launches {
		total.Failures += c.Failures
		total.Trials += c.Trials
	}
	return (float64(total.Failures) + 0.5) / float64(total.Trials+1)
}

// spot checks that the levels outside the causes don't matter: each cause with
// a random half of the others, and with the other half, must fail.
func (h *hunt) spot(causes []arm) error {
	for range max(0, h.options.SpotChecks) {
		for _, s := range causes {
			halves := [2]arm{slices.Clone(s), slices.Clone(s)}
			for i, v := range h.ladders.top {
				halves[h.random.IntN(2)][i] = v
			}
			for _, a := range halves {
				if a.equal(s) || a.equal(h.ladders.top) || h.validity.chance(a) < 0.05 {
					continue
				}
				v, err := h.claim(question{
					arm: a, want: above, phase: Spot, why: "the cause with half of the others: fails if they don't matter",
				})
				if errors.Is(err, errUnusable) {
					continue
				}
				if err != nil {
					return err
				}
				if v.side == below {
					return giveUp(NonMonotone, "%s fails, but with more levels suspect (%s) it doesn't",
						describe(h.ladders.set(s)), describe(h.ladders.set(a)))
				}
			}
		}
	}
	return nil
}

// mostSwept is how many levels a factor may have to have them all tried.
const mostSwept = 8

// sweep tries the other levels of accused factors, everything else as in the
// failing arm: a dose may hurt in the middle of its range.
func (h *hunt) sweep(causes []arm) error {
	if len(causes) != 1 {
		return nil
	}
	cause := causes[0]
	for i, f := range h.ladders.space.Factors {
		if cause[i] == 0 || len(f.Levels) > mostSwept {
			continue
		}
		for step := range h.ladders.levels[i] {
			s := uint16(step)
			if s == cause[i] || s == cause[i]-1 || s == h.ladders.top[i] {
				continue // the certificate has these, and the failing arm
			}
			a := h.ladders.top.at(i, s)
			if h.validity.chance(a) == 0 {
				continue
			}
			name := f.Levels[h.ladders.levels[i][step]].Name
			v, err := h.claim(question{
				arm: a, want: below, phase: Sweep, why: fmt.Sprintf("%s=%s: does this level fail too?", f.Name, name),
			})
			if errors.Is(err, errUnusable) {
				continue
			}
			if _, budget := errors.AsType[*undecided](err); budget {
				return nil // the finding stands without
			}
			if err != nil {
				return err
			}
			found := LevelFound{Factor: f.Name, Level: name, Evidence: h.evidence(v.claimed)}
			if v.side != neither {
				fails := v.side == above
				found.Fails = &fails
			}
			h.finding.Levels = append(h.finding.Levels, found)
		}
	}
	return nil
}

func (h *hunt) evidence(c claimed) Evidence {
	e := Evidence{Arm: h.ladders.design(c.arm), Launches: len(c.launches)}
	for _, l := range c.launches {
		e.Requests += l.Trials
		e.Failures += l.Failures
	}
	e.Low, e.High = stats.AnytimeInterval(c.launches, h.options.Dispersion, 0.95)
	return e
}

// conclude states the causes.
func (h *hunt) conclude(causes []arm) {
	f := &h.finding
	f.Status, f.Error, f.Limit = Found, h.options.Error, h.limit
	if len(causes) == 1 && causes[0].size() == 0 {
		f.Status = NoneOfThese
		f.Text = "it fails with everything safe too"
	}
	for _, s := range causes {
		f.Causes = append(f.Causes, Cause{Set: h.ladders.set(s)})
	}
	if f.Status == Found {
		f.Text = fmt.Sprintf("needed for the failure: %s", describe(f.Causes[0].Set))
	}
}

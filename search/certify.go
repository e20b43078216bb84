package search

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/culprit-project/culprit/stats"
)

const (
	// likely is how probable a set must be before its certificate is tried.
	// Costs are flat between 0.85 and 0.98.
	likely = 0.9
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
}

// certify finds all minimal failing sets and proves them. A region that was
// shown to fail holds a cause; when a cause is known, taking each of its members
// away gives regions that hold another cause or are clean. When all of these are
// clean and every cause fails alone, then in a monotone world there is no other
// (R. Reiter's hitting-set tree).
//
// Claims are tested on launches that come after they are made, the m-th false
// one with an error of at most Error/2^m, so that all together err with at most
// Error whatever the search did.
func (h *hunt) certify() error {
	c := certificate{fails: map[string]claimed{}}
	queue := []arm{h.ladders.top}
	searches, lowered := 0, 0
	lower := func(rate float64) error {
		if lowered == 2 || rate <= 2*h.base {
			return giveUp(Graded, "some arms fail at a rate in between: the levels change how often it fails, not whether")
		}
		lowered++
		h.refuted++
		h.limit = math.Sqrt(rate * h.base)
		c.clean, c.fails = nil, map[string]claimed{}
		queue = []arm{h.ladders.top}
		return nil
	}
	for {
		for len(queue) > 0 {
			region := queue[0]
			queue = queue[1:]
			if slices.ContainsFunc(c.clean, func(r claimed) bool { return region.within(r.arm) }) {
				continue
			}
			if i := slices.IndexFunc(c.causes, func(s arm) bool { return s.within(region) }); i >= 0 {
				queue = append(queue, h.without(region, c.causes[i])...)
				continue
			}
			if !region.equal(h.ladders.top) {
				v, err := h.nearMiss(region, c.causes)
				if err != nil {
					return err
				}
				switch v.side {
				case below:
					if h.between(v.launches) {
						if err := lower(rate(v.launches)); err != nil {
							return err
						}
						continue
					}
					c.clean = append(c.clean, claimed{v.arm, v.launches})
					continue
				case neither:
					if err := lower(rate(v.launches)); err != nil {
						return err
					}
					continue
				case above:
					h.refuted++
				}
			}
			if searches++; searches > attempts+2*len(c.causes) {
				return giveUp(Misfit, "after %d searches the causes found don't explain which arms fail", searches-1)
			}
			found, err := h.narrow(region, likely)
			if err != nil {
				return err
			}
			if h.limit == 0 {
				h.choose(found.size())
			}
			c.causes = minimal(append(c.causes, found))
			queue = append(queue, h.without(region, found)...)
		}
		// Each cause fails alone, and it still does: after the clean arms.
		again := false
		for _, s := range c.causes {
			if _, ok := c.fails[s.key()]; ok {
				continue
			}
			v, err := h.claim(s, above, h.whySet(s))
			if errors.Is(err, errUnusable) {
				return giveUp(Unreachable, "%s alone can't be run", describe(h.ladders.set(s)))
			}
			if err != nil {
				return err
			}
			if v.side == above {
				c.fails[s.key()] = v.claimed
				continue
			}
			h.refuted++
			again = true
			c.causes = slices.DeleteFunc(c.causes, s.equal)
			break
		}
		if again {
			if searches >= attempts+2*len(c.causes) {
				return giveUp(Misfit, "what was found doesn't fail alone")
			}
			queue = []arm{h.ladders.top}
			continue
		}
		break
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

// without is a region with each member of a cause taken one step down, in
// random order.
func (h *hunt) without(region, cause arm) []arm {
	var out []arm
	for i, v := range cause {
		if v > 0 {
			out = append(out, region.at(i, v-1))
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

// choose sets the limit between failing and clean so that both sides of the
// certificate are cheap together.
func (h *hunt) choose(size int) {
	failing, clean := h.belief.rates()
	h.base = 0
	for i, w := range clean {
		h.base += w * h.grid.bases[i]
	}
	n := len(h.grid.rates)
	byRate := make([]float64, n)
	mean := 0.0
	for i, w := range failing {
		byRate[i%n] += w
		mean += w * h.grid.rates[i%n]
	}
	best := math.Inf(1)
	low := max(1.5*h.base, mean/8)
	for p := low; p < mean; p *= 1.05 {
		most := 50 / h.options.MinRate
		cost := float64(size) / divergence(h.base, p)
		for i, w := range byRate {
			r := h.grid.rates[i]
			if r <= p {
				cost += w * most
			} else {
				cost += w * min(most, 1/divergence(r, p))
			}
		}
		if cost < best {
			best, h.limit = cost, p
		}
	}
	if h.limit == 0 {
		h.limit = low
	}
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

// claim tests on fresh launches on which side of the limit an arm is.
func (h *hunt) claim(a arm, want side, why string) (decided, error) {
	alpha := h.options.Error / math.Pow(2, float64(h.refuted+1))
	enough := -math.Log(alpha)
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
	batch := max(h.options.Batch, int(expected/10))
	if want == above {
		batch = h.options.Batch
	}
	d := decided{claimed: claimed{arm: a}}
	cost, last := 0.0, 0.0
	fresh := true
	for {
		more, err := h.measure(a, batch, fresh, Confirm, why)
		if err != nil {
			return d, err
		}
		if fresh {
			test.Launch()
			d.launches = append(d.launches, stats.Cluster{})
			cost += h.launchCost()
		}
		here := &d.launches[len(d.launches)-1]
		here.Failures += more.Failures
		here.Trials += more.Trials
		cost += float64(more.Trials)
		test.Observe(more)
		evidence := max(test.Below(), test.Above())
		switch {
		case test.Below() >= enough:
			d.side = below
			return d, nil
		case test.Above() >= enough:
			d.side = above
			return d, nil
		case cost > 12*(expected+h.launchCost())+1000 || len(d.launches) > 40:
			return d, nil
		}
		// Go on elsewhere when the launch tells less for a request than all
		// of it did on average.
		gain := (evidence - last) / float64(more.Trials)
		last = evidence
		fresh = !h.running.up || len(h.options.Dispersion.CV) > 1 &&
			float64(here.Trials) >= 2/h.limit && gain < evidence/cost
	}
}

// nearMiss tests that a region is clean. When it can't be run, one below it that
// still has the rest of a cause will do for that cause.
func (h *hunt) nearMiss(region arm, causes []arm) (decided, error) {
	why := "all suspect but " + list(h.lowered(region)) + ": clean if it is needed"
	v, err := h.claim(region, below, why)
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
		v, err := h.claim(smaller, below, why)
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
	return v, giveUp(Unreachable, "no arm without %s can be run: it can't be told from what it needs", list(h.lowered(region)))
}

// lowered names the factors that a region has below the failing arm.
func (h *hunt) lowered(region arm) []string {
	var out []string
	for i, f := range h.ladders.space.Factors {
		if region[i] < h.ladders.top[i] {
			out = append(out, f.Name)
		}
	}
	return out
}

func (h *hunt) whySet(s arm) string {
	if s.size() == 0 {
		return "everything safe: fails if the cause is none of these factors"
	}
	return "only " + describe(h.ladders.set(s)) + ": fails if nothing else is needed"
}

// between says whether a rate below the limit is clearly above the base too.
func (h *hunt) between(launches []stats.Cluster) bool {
	if rate(launches) < 4*h.base {
		return false
	}
	return stats.LogEvidenceAbove(launches, 2*h.base, h.options.Dispersion) >= -math.Log(h.options.Error/2)
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
				v, err := h.claim(a, above, "the cause with half of the others: fails if they don't matter")
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

// sweep tries the other levels of accused factors, everything else as in the
// failing arm: a dose may hurt in the middle of its range.
func (h *hunt) sweep(causes []arm) error {
	if len(causes) != 1 {
		return nil
	}
	for i, f := range h.ladders.space.Factors {
		if causes[0][i] == 0 || len(f.Levels) < 3 {
			continue
		}
		for level := range f.Levels {
			if level == f.Failing() {
				continue
			}
			_ = level
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

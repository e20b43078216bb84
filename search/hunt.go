package search

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/stats"
)

// hunt is the procedure of a search, written as if it ran the arms itself:
// measure hands a proposal out and comes back with what was observed.
type hunt struct {
	ladders  *ladders
	options  Options
	grid     *grid
	random   *rand.Rand
	validity *validity

	yield       func(Proposal) bool
	asked       arm // the last proposal's
	observation Observation
	strict      bool // each run comes after what was observed before it

	running     running
	launches    int
	requests    int
	cost        float64 // in requests
	aside       float64 // and of what wasn't asked for
	launchTotal float64 // of those measured
	launchCount int
	voids       map[string]int // by arm
	wedged      map[string]int

	record   []shown       // in order, but for what was forgotten
	all      []shown       // in order
	cleanRun int           // launches since an arm last failed
	size     int           // of the largest sets looked for
	here     stats.Cluster // what the running launch has shown of its arm
	failing  []float64     // posterior of the rates when an arm last failed
	clean    []float64     // and of the bases
	lastFail int           // how much of record there was when an arm last failed
	dose     int           // requests that a launch may need before it can fail
	poisoned bool          // launches end with their first failure
	drifts   int           // how often the failing arm stopped failing
	doubts   int           // how often it didn't fail in two launches in a row
	belief   *posterior    // the current one
	skipped  int           // levels that it leaves out

	proof   certificate
	limit   float64 // the rate that tells failing from clean, in claims
	base    float64 // of clean arms, as the search learned it
	decay   float64 // of the error allowed to a claim, with each that didn't hold
	refuted int     // claims that didn't hold
	lowered int     // how often the limit was
	weak    bool    // the model is often wrong by itself
	finding Finding
}

type shown struct {
	arm     arm
	launch  int
	cluster stats.Cluster
	phase   Phase
}

// errClosed ends the procedure when the caller does.
var errClosed = errors.New("closed")

// errUnusable says that an arm can't be measured.
var errUnusable = errors.New("unusable")

// undecided ends a search without a cause, and says why.
type undecided struct {
	reason Reason
	text   string
}

func (u *undecided) Error() string { return u.text }

func giveUp(reason Reason, format string, args ...any) error {
	return &undecided{reason, fmt.Sprintf(format, args...)}
}

// procedure is an iterator over proposals.
func (h *hunt) procedure(yield func(Proposal) bool) {
	h.yield = yield
	h.voids, h.wedged = map[string]int{}, map[string]int{}
	err := h.run()
	if u, ok := errors.AsType[*undecided](err); ok {
		h.finding.Status, h.finding.Reason, h.finding.Text = Undecided, u.reason, u.text
	}
}

func (h *hunt) run() error {
	if err := h.reproduce(); err != nil || h.finding.Status != Running {
		return err
	}
	if h.options.PosteriorOnly > 0 {
		found, err := h.narrow(h.ladders.top, h.options.PosteriorOnly)
		if err != nil {
			return err
		}
		h.conclude([]arm{found})
		return nil
	}
	return h.certify()
}

// launchCost is how many requests take as long as a launch.
func (h *hunt) launchCost() float64 {
	// The caller's figure counts as one measurement.
	return (h.options.LaunchCost + h.launchTotal) / float64(1+h.launchCount)
}

// measure has n requests run in an arm, or as many as the caller likes.
func (h *hunt) measure(a arm, n int, fresh bool, phase Phase, why string) (stats.Cluster, error) {
	if !h.validity.allowed(a) {
		return stats.Cluster{}, errUnusable
	}
	for {
		launch := fresh || !h.running.serves(h.ladders, a)
		if err := h.afford(a, n, launch); err != nil {
			return stats.Cluster{}, err
		}
		h.asked = a
		p := Proposal{Arm: h.ladders.design(a), Requests: n, Launch: launch, After: h.strict || phase == Control, Phase: phase, Why: why}
		if !h.yield(p) {
			return stats.Cluster{}, errClosed
		}
		more, again, err := h.account(a, launch, phase)
		if !again {
			return more, err
		}
	}
}

// afford says whether the budget allows it.
func (h *hunt) afford(a arm, n int, launch bool) error {
	b := h.options.Budget
	launches, requests, cost := h.launches, h.requests+n, h.cost+h.aside+float64(n)*h.ladders.requestCost(a)
	if launch {
		launches++
		cost += h.launchCost()
	}
	switch {
	case b.Launches > 0 && launches > b.Launches:
		return giveUp(OutOfBudget, "the budget of %d launches is used up", b.Launches)
	case b.Requests > 0 && requests > b.Requests:
		return giveUp(OutOfBudget, "the budget of %d requests is used up", b.Requests)
	case b.Cost > 0 && cost > b.Cost:
		return giveUp(OutOfBudget, "the budget of time is used up")
	}
	return nil
}

// account books the observation of an arm; again says that it showed nothing.
func (h *hunt) account(a arm, launch bool, phase Phase) (more stats.Cluster, again bool, err error) {
	o := h.observation
	if launch || o.Launched {
		h.launches++
		if o.LaunchCost > 0 {
			h.launchTotal += o.LaunchCost
			h.launchCount++
			h.cost += o.LaunchCost
		} else {
			h.cost += h.launchCost()
		}
		h.running.launch = h.launches
	}
	key := a.key()
	switch o.Outcome {
	case Invalid:
		h.running.up = false
		h.validity.fail(slices.Clone(a))
		return more, false, errUnusable
	case Void, NotExercised:
		// What was answered belongs to no arm that is known.
		h.running.up = false
		h.voids[key]++
		if h.voids[key] < 3 {
			return more, true, nil
		}
		h.validity.fail(slices.Clone(a))
		return more, false, errUnusable
	case Ran, Wedged:
	}
	h.requests += o.Requests
	h.cost += float64(o.Requests) * h.ladders.requestCost(a)
	if launch || o.Launched || !a.equal(h.running.arm) {
		h.here = stats.Cluster{}
	}
	h.running.up, h.running.arm = true, slices.Clone(a)
	h.validity.start(slices.Clone(a))
	more = o.cluster()
	if o.Poisoned && o.Failures > 0 {
		h.poisoned, h.running.up = true, false
	}
	if o.Outcome == Wedged {
		h.running.up = false
		h.wedged[key]++
		if more.Trials == 0 {
			if h.wedged[key] < 3 {
				return more, true, nil
			}
			h.validity.fail(slices.Clone(a))
			return more, false, errUnusable
		}
	}
	h.record = append(h.record, shown{slices.Clone(a), h.running.launch, more, phase})
	h.all = append(h.all, h.record[len(h.record)-1])
	if h.belief != nil && a.within(h.belief.region) {
		h.belief.observe(a, h.running.launch, more)
	}
	if launch || o.Launched {
		h.cleanRun++
	}
	h.here.Failures += more.Failures
	h.here.Trials += more.Trials
	h.running.spoilt = 10*h.here.Failures > 9*h.here.Trials
	if more.Failures > 0 && h.fails() {
		h.lastFail, h.cleanRun = len(h.record), 0
		if h.belief != nil {
			h.failing, h.clean = h.belief.rates()
		}
	}
	return more, more.Trials == 0, nil
}

// reproduce runs the failing arm until it is clear that it fails, in several
// launches when launches may differ.
func (h *hunt) reproduce() error {
	const enough = 8
	top := h.ladders.top
	launches := 1
	if len(h.options.Dispersion.CV) > 1 {
		launches = 3
	}
	most := int(math.Ceil(10 / h.options.MinRate))
	var total stats.Cluster
	why := "the failing arm: how often does it fail?"
	for n := 1; ; n++ {
		var here stats.Cluster
		for {
			first := here.Trials == 0
			more, err := h.measure(top, h.options.Batch, first, Reproduce, why)
			if errors.Is(err, errUnusable) {
				return giveUp(Unreachable, "the failing arm can't be run")
			}
			if err != nil {
				return err
			}
			if more.Failures > 0 && here.Failures == 0 {
				h.dose = max(h.dose, here.Trials+cmpOr(h.observation.FirstFailure, more.Trials))
			}
			here.Failures += more.Failures
			here.Trials += more.Trials
			total.Failures += more.Failures
			total.Trials += more.Trials
			if !h.running.up || total.Failures*launches >= enough*min(n, launches) || here.Trials*launches >= most || total.Trials >= most {
				break
			}
		}
		done := total.Failures >= enough || total.Trials >= most || h.poisoned && total.Failures >= 4
		if n >= launches && done {
			break
		}
	}
	if rate := float64(total.Failures) / float64(total.Trials); total.Failures < 2 || rate < 0.75*h.options.MinRate {
		h.finding.Status = NotReproduced
		h.finding.Text = fmt.Sprintf("the failing arm failed %d of %d requests in %d launches", total.Failures, total.Trials, h.launches)
	}
	return nil
}

func cmpOr(a, b int) int {
	if a != 0 {
		return a
	}
	return b
}

// believe makes the posterior of a region from the record.
func (h *hunt) believe(region arm, size int) error {
	odds := make([]float64, len(region))
	for i, f := range h.ladders.space.Factors {
		odds[i] = 1
		if f.Odds > 0 {
			odds[i] = min(max(f.Odds, 0.2), 5)
		}
	}
	var p *posterior
	for ok := false; !ok; size-- {
		if size < 1 {
			return giveUp(Misfit, "there are too many combinations of levels to search")
		}
		p, ok = newPosterior(h.grid, region, odds, size, h.validity.skipped)
	}
	p.visit(region)
	for _, s := range merged(h.record) {
		if s.arm.within(region) {
			p.observe(s.arm, s.launch, s.cluster)
		}
	}
	h.belief, h.skipped = p, len(h.validity.skipped)
	if h.failing == nil {
		h.failing, h.clean = p.rates()
	}
	return nil
}

// fails says whether the running launch fails in its arm, by what it has shown:
// a failure may be one that clean arms have too.
func (h *hunt) fails() bool { return h.odds(h.here) > h.surely() }

// surely are log odds that one failure among clean requests doesn't give, unless
// failing arms are trusted to go on failing.
func (h *hunt) surely() float64 {
	if h.options.Steady {
		return 2
	}
	return 4.5
}

// odds are the log odds that a launch fails by what it has shown of an arm.
func (h *hunt) odds(c stats.Cluster) float64 { return h.oddsGiven(c, h.clean) }

// oddsGiven are those with some belief in the bases.
func (h *hunt) oddsGiven(c stats.Cluster, clean []float64) float64 {
	if h.failing == nil {
		return math.Inf(1) // the failing arm, before anything is known
	}
	chance := func(models []stats.LaunchModel, weights []float64) float64 {
		logs := make([]float64, len(models))
		for i, m := range models {
			logs[i] = m.LogStep(stats.Cluster{}, c)
		}
		return logMean(logs, weights)
	}
	return chance(h.grid.failing, h.failing) - chance(h.grid.clean, clean)
}

// merged has one entry for each arm of a launch.
func merged(record []shown) []shown {
	var out []shown
	index := map[string]int{}
	for _, s := range record {
		key := fmt.Sprint(s.launch, s.arm)
		i, ok := index[key]
		if !ok {
			index[key] = len(out)
			out = append(out, s)
			continue
		}
		out[i].cluster.Failures += s.cluster.Failures
		out[i].cluster.Trials += s.cluster.Trials
	}
	return out
}

// mostVisits bounds a search that doesn't converge; those that do need a few
// dozen where launches differ much.
const mostVisits = 150

// cleanRuns are how many clean launches in a row there may be until an arm that
// is likely to fail comes next, and until the failing arm comes again: no longer
// outage goes unseen.
func (h *hunt) cleanRuns() (hopeful, most int) {
	if h.options.Steady {
		return 3, 5
	}
	return 1, 2
}

// patience is how many launches' time to wait for a failure to come back.
const patience = 10

// narrow searches a region that fails for a set that is needed, until one is
// believed with the chance enough.
func (h *hunt) narrow(region arm, enough float64) (arm, error) {
	h.size = max(h.size, h.options.MaxSize)
	if err := h.believe(region, h.size); err != nil {
		return nil, err
	}
	// Farther from certainty than this, the end is never reached.
	leave := 0.2 * (1 - enough)
	const rechecks = 3
	again := rechecks
	for range mostVisits {
		if len(h.validity.skipped) != h.skipped {
			if err := h.believe(region, h.size); err != nil {
				return nil, err
			}
		}
		p := h.belief
		if p.none.chance > 0.5 {
			if again > 0 && p.misfit() > 0 {
				again--
				if err := h.recheck(); err != nil && !errors.Is(err, errUnusable) {
					return nil, err
				}
				continue
			}
			again = rechecks
			// Several causes look inexplicable from above. Within the smallest
			// arm that fails all others are clean, which one cause explains.
			if smaller := p.smallest(); !smaller.equal(region) {
				region = smaller
				if err := h.believe(region, h.size); err != nil {
					return nil, err
				}
				continue
			}
			if h.size+2 > min(maxSize, h.options.MaxSize+4) {
				return nil, giveUp(Misfit, "no set of up to %d levels explains which arms fail", h.size)
			}
			h.size += 2
			if err := h.believe(region, h.size); err != nil {
				return nil, err
			}
			continue
		}
		if best, chance := p.best(); chance >= enough || chance > 0.6 && h.proven(p.hypotheses[best].arm(len(region))) {
			return p.hypotheses[best].arm(len(region)), nil
		}
		plan := newPlanner(h, p)
		// After some clean launches an arm that should fail shows that the
		// failure is still there, and tells something; after more, one that must.
		atLeast := 0.0
		hopeful, mostClean := h.cleanRuns()
		if h.cleanRun >= hopeful {
			atLeast = 0.6
		}
		if h.cleanRun >= mostClean {
			if _, err := h.control(plan.control, false); err != nil {
				return nil, err
			}
			continue
		}
		next, ok := plan.choose(atLeast)
		if !ok && atLeast > 0 {
			next, ok = plan.choose(0)
		}
		if !ok {
			if !h.validity.lenient {
				h.validity.lenient = true
				h.validity.skip()
				continue
			}
			best, chance := p.best()
			if chance > 0.5 {
				return p.hypotheses[best].arm(len(region)), nil
			}
			return nil, giveUp(Unreachable, "no arm that runs can tell the remaining causes apart; the likeliest is %s, at %.0f%%",
				describe(h.ladders.set(p.hypotheses[best].arm(len(region)))), 100*chance)
		}
		if claim := h.early(plan); ok && claim.gain > next.gain && atLeast == 0 {
			if err := h.earlyClaim(claim); err != nil && !errors.Is(err, errUnusable) {
				return nil, err
			}
			continue
		}
		if err := h.visit(plan, next, enough, leave); err != nil && !errors.Is(err, errUnusable) {
			return nil, err
		}
	}
	return nil, giveUp(Misfit, "the search doesn't converge")
}

// visit runs an arm until its outcome is clear, or until going elsewhere would
// tell more for the cost.
func (h *hunt) visit(plan *planner, next visitPlan, enough, leave float64) error {
	p := h.belief
	why := plan.why(next)
	each := h.ladders.requestCost(next.arm)
	visit := p.visit(next.arm)
	var here stats.Cluster
	for {
		more, err := h.measure(next.arm, h.batch(next.requests), next.fresh && here.Trials == 0, Narrow, why)
		if err != nil {
			return err
		}
		here.Failures += more.Failures
		here.Trials += more.Trials
		w := p.failsAt(visit)
		if _, chance := p.best(); chance >= enough {
			return nil
		}
		if here.Failures == 0 && here.Trials < h.dose && w > leave {
			continue
		}
		if w < leave || w > 1-leave || !h.running.up {
			return nil
		}
		// Leave when going on tells less for its cost than the plan promised.
		if here.Trials >= 2*next.requests {
			if gain, _ := stay(p, visit, h.running.launch, each); gain < next.gain {
				return nil
			}
		}
	}
}

// recheck runs the arm again that agrees least with the likeliest hypothesis:
// what looks inexplicable is most often chance.
func (h *hunt) recheck() error {
	p := h.belief
	failing, _ := p.rates()
	expected := h.meanRate(failing)
	_, err := h.measure(p.visits[p.misfit()].arm, max(h.options.Batch, int(4/expected)), true, Narrow, "an arm that doesn't fit the rest: was it chance?")
	return err
}

// batch is how many requests to run before looking again.
func (h *hunt) batch(planned int) int { return max(h.options.Batch, planned/16) }

// control has an arm that failed fail again; sure says that its failures were
// proven. Clean arms since the last failure are forgotten when it doesn't, and
// forgot says so.
func (h *hunt) control(a arm, sure bool) (forgot bool, err error) {
	expected := h.meanRate(h.failing)
	// Log likelihoods by model, over the launches of this control.
	failing, clean := make([]float64, len(h.failing)), make([]float64, len(h.clean))
	kept := h.lastFail
	visit := h.belief.visit(a)
	var here stats.Cluster
	fresh := false
	quiet := 0 // launches without a failure
	start := h.cost
	for {
		more, err := h.measure(a, h.batch(int(1/expected)), fresh, Control, "an arm that failed, after several clean ones: does it still fail?")
		if errors.Is(err, errUnusable) {
			return forgot, giveUp(Drift, "the arm that failed can't be run any more")
		}
		if err != nil {
			return forgot, err
		}
		for i, m := range h.grid.failing {
			failing[i] += m.LogStep(here, more)
		}
		for i, m := range h.grid.clean {
			clean[i] += m.LogStep(here, more)
		}
		odds := logMean(failing, h.failing) - logMean(clean, h.clean)
		if odds > h.surely() || more.Failures > 0 && h.fails() {
			h.lastFail, h.cleanRun = len(h.record), 0
			if forgot {
				err = h.believe(h.belief.region, h.size)
			}
			return forgot, err
		}
		if !sure && h.belief.failsAt(visit) < 0.9 {
			return forgot, nil // it wasn't as sure as it seemed
		}
		here.Failures += more.Failures
		here.Trials += more.Trials
		// A launch may be one of those that fail less often.
		fresh = len(h.options.Dispersion.CV) > 1 && float64(here.Trials) > 4/expected && odds > -14 || !h.running.up
		if fresh {
			if quiet++; here.Failures > 0 {
				quiet = 0
			}
			if quiet == 2 && odds < -3 { // more than launches are known to differ
				h.doubts++
			}
			here = stats.Cluster{}
		}
		if odds < -7 && !forgot {
			forgot = true
			h.drifts++
			h.record = h.record[:kept]
			h.lastFail = len(h.record)
			h.proof.clean = slices.DeleteFunc(h.proof.clean, func(c claimed) bool { return c.at > kept })
		}
		waited := h.cost - start
		if !forgot && waited > 2*patience*max(h.launchCost(), 8/expected) {
			h.cleanRun = 0
			return false, nil // neither: it fails at a rate in between
		}
		// An outage may end.
		if odds < -14 && waited > patience*h.launchCost() || waited > 10*patience*max(h.launchCost(), 8/expected) || h.drifts > 3 {
			return forgot, giveUp(Drift, "what failed has stopped failing: %s", describe(h.ladders.set(a)))
		}
	}
}

// why tells a person what a visit would show.
func (l *planner) why(v visitPlan) string {
	if l.control.size() == 0 {
		return "everything safe: is the cause among these factors at all?"
	}
	verb := "splits"
	if v.fails > 0.3 && v.fails < 0.7 {
		verb = "halves"
	}
	return fmt.Sprintf("%s the causes: %.0f%% that it fails", verb, 100*v.fails)
}

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

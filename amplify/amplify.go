package amplify

import (
	"cmp"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/stats"
)

// Phase says what a trial is for.
type Phase string

// The phases.
const (
	Search  Phase = "search"  // which shape fails most
	Check   Phase = "check"   // in the safe arm: is it the model's own mistake?
	Measure Phase = "measure" // fresh runs of the one that was chosen, and of the case's own
)

// Trial is what is to be played next.
type Trial struct {
	Name     string `json:"name"` // of the shape: the moves that made it
	Shape    Shape  `json:"shape"`
	Sessions int    `json:"sessions"`
	Requests int    `json:"requests"` // that these have
	Phase    Phase  `json:"phase"`
	Safe     bool   `json:"safe,omitempty"` // in the safe arm, not in the failing one
	Launch   bool   `json:"launch"`         // on a fresh launch
}

// Outcome is what became of a trial.
type Outcome struct {
	Failures int           `json:"failures"`
	Judged   int           `json:"judged"` // requests whose reply could be judged
	Run      time.Duration `json:"run_ns"` // under load
	Took     time.Duration `json:"took_ns"`
	Launched bool          `json:"launched,omitempty"` // though the trial didn't ask for it: the server had ended
	Poisoned bool          `json:"poisoned,omitempty"` // the server must not be used again
	Void     string        `json:"void,omitempty"`     // why it doesn't count
}

// Budget is what a search may use.
type Budget struct {
	Launches int           `json:"launches"`
	Requests int           `json:"requests"`
	Wall     time.Duration `json:"wall_ns,omitempty"` // 0 is no limit
}

// Options says where the search begins and what it may use.
type Options struct {
	Base   Shape    // the case's own
	BaseOf string   // how Base is called; empty is DefaultBase
	Moves  []Move   // nil is Moves()
	Fixed  []string // settings that aren't varied
	Budget Budget   // of zero: DefaultBudget's
	Seed   uint64
	// PerRequest looks for the most failures per request, in place of per
	// minute of load.
	PerRequest bool
	// NoSafe says that there is no other arm to check in.
	NoSafe bool
	// NoLaunch says that the server runs already: nothing is launched.
	NoLaunch bool
	Play     func(Trial) (Outcome, error)
	// Decided hears what comes of each stage.
	Decided func(text string)
}

// DefaultBase is how the case's own load is called.
const DefaultBase = "the case's own"

// What the search goes by.
const (
	// Enough is a rate beyond which more is hardly worth anything: launches
	// are then what a hunt costs.
	Enough = 0.1
	// searching is the share of the budget for the search, of which the first
	// stage, over the single moves, may use firstStage; each later one may use
	// half of what is left. The rest is for measuring.
	searching, firstStage = 0.65, 0.40
	// As long as hardly anything fails, the search may use more: to measure what
	// was chosen at random is worth nothing.
	unseen = 0.8
	// A shape is dropped when it is this unlikely that it fails as often as the
	// leader, and the leader has failed often enough to be one.
	dropBelow, leaderFailures = 0.01, 6
	// settled is how many failures of the leader end a stage.
	settled = 40
	// contenders are the most combinations of a later stage.
	contenders = 8
	// The measuring wants at least so many launches and failures.
	measureLaunches, measureFailures = 4, 20
	// suspicious failures are worth a look at the safe arm.
	suspicious = 2
	// A shape of whose failures more than this are the model's own is given up:
	// a hunt under it would have to tell the two apart.
	ownShare = 0.2
	// A shape that is void so many times in a row is given up.
	hopeless = 2
	level    = 0.95
)

// DefaultBudget is what a search uses where nothing is said.
func DefaultBudget(base Shape) Budget {
	const passes = 100
	return Budget{Launches: 24, Requests: max(20_000, passes*max(base.Concurrency, 1)*base.turns())}
}

// MinLaunches is the least that a search can do anything with: two to search,
// one to check and two to measure.
const MinLaunches = 5

// tally is what is known of a shape.
type tally struct {
	name     string
	shape    Shape
	key      string // of its settings
	turns    int
	seen     []launched // in the failing arm, while searching
	fresh    []launched // in the failing arm, measured
	safe     stats.Cluster
	played   time.Duration
	judged   int // in that time
	void     int // in a row
	out      string
	fromMove int // index of the single move; -1
}

// launched is what a launch showed of a shape.
type launched struct {
	launch int
	stats.Cluster
}

// count is what one stage has seen of a shape.
type count struct {
	*tally
	failures, judged int
	run              time.Duration
}

type search struct {
	Options
	r        *rand.Rand
	tallies  []*tally
	used     Budget
	launches int
	stale    bool          // the next trial needs a launch
	safeNow  bool          // the safe arm is what runs
	noCheck  int           // trials of it that were void
	took     time.Duration // of all trials
	sent     int
}

// ErrSpent says that the budget is used up. From Play it ends the search, whose
// result is then what was found until then.
var ErrSpent = errors.New("the budget is used up")

// Find searches and measures. With an error of Play it returns what is known up
// to then.
func Find(o Options) (Result, error) {
	o.Budget = o.Budget.or(DefaultBudget(o.Base))
	o.BaseOf = cmp.Or(o.BaseOf, DefaultBase)
	if o.Moves == nil {
		o.Moves = Moves()
	}
	if o.Decided == nil {
		o.Decided = func(string) {}
	}
	s := &search{Options: o, r: rand.New(rand.NewPCG(o.Seed, 0)), stale: true}
	singles := s.singles()
	if least := leastFor(singles); o.Budget.Requests < least.Requests || !o.NoLaunch && o.Budget.Launches < least.Launches {
		return Result{}, &BudgetError{least}
	}
	best, err := s.find(singles)
	if errors.Is(err, ErrSpent) {
		err = nil
	}
	for err == nil && best != nil {
		if best.out == "" {
			err = s.measure(best)
		}
		if best.out == "" {
			break
		}
		best = s.next()
	}
	if errors.Is(err, ErrSpent) {
		err = nil
	}
	return s.result(best, err != nil), err
}

// next is what is left to be measured when the best was given up.
func (s *search) next() *tally {
	var best *tally
	for _, t := range s.tallies {
		if t.out == "" && s.score(t.counts()) > 0 && (best == nil || s.score(t.counts()) > s.score(best.counts())) {
			best = t
		}
	}
	return best
}

func (b Budget) or(d Budget) Budget {
	return Budget{cmp.Or(b.Launches, d.Launches), cmp.Or(b.Requests, d.Requests), cmp.Or(b.Wall, d.Wall)}
}

// add makes a shape known, once.
func (s *search) add(name string, shape Shape, move int) *tally {
	key := fmt.Sprint(shape.Settings())
	for _, t := range s.tallies {
		if t.key == key {
			return t
		}
	}
	t := &tally{name: name, shape: shape, key: key, turns: shape.turns(), fromMove: move}
	s.tallies = append(s.tallies, t)
	return t
}

// singles are the case's own shape and those that one move makes of it.
func (s *search) singles() []*tally {
	candidates := []*tally{s.add(s.BaseOf, s.Base, -1)}
	for i, m := range s.Moves {
		if shape, ok := apply(m, s.Base, s.Fixed); ok {
			if t := s.add(m.Name, shape, i); !slices.Contains(candidates, t) {
				candidates = append(candidates, t)
			}
		}
	}
	return candidates
}

// Shapes are the names of what is looked at first.
func (o Options) Shapes() []string {
	var names []string
	for _, t := range o.first() {
		names = append(names, t.name)
	}
	return names
}

// Least is the smallest budget that a search can do anything with: one look at
// each shape.
func (o Options) Least() Budget { return leastFor(o.first()) }

func leastFor(shapes []*tally) Budget {
	pass := 0
	for _, t := range shapes {
		pass += t.turns * t.sessions(1)
	}
	return Budget{Launches: MinLaunches, Requests: int(math.Ceil(float64(pass) / firstStage))}
}

func (o Options) first() []*tally {
	if o.Moves == nil {
		o.Moves = Moves()
	}
	o.BaseOf = cmp.Or(o.BaseOf, DefaultBase)
	return (&search{Options: o}).singles()
}

// BudgetError says that the budget is too small for one look at each shape.
type BudgetError struct{ Least Budget }

func (e *BudgetError) Error() string {
	return fmt.Sprintf("amplify: to look once at each load takes %d requests and %d launches at least", e.Least.Requests, e.Least.Launches)
}

// and joins the names of the moves that made a shape.
const and = " + "

// find looks at the single moves, then at what can be added to the best.
func (s *search) find(candidates []*tally) (*tally, error) {
	base := candidates[0]
	limit := firstStage
	best, err := s.stage(candidates, limit)
	for err == nil && best != nil && best != base && s.rate(best) < Enough {
		limit += (searching - limit) / 2
		next := []*tally{best}
		made := strings.Split(best.name, and)
		for i, m := range s.Moves {
			if slices.ContainsFunc(made, func(name string) bool { return name == m.Name || inverse(name, m.Name) }) {
				continue
			}
			shape, ok := apply(m, best.shape, s.Fixed)
			if !ok {
				continue
			}
			if t := s.add(best.name+and+m.Name, shape, i); t.out == "" && t != base && !slices.Contains(next, t) {
				next = append(next, t)
			}
		}
		if len(next) == 1 {
			break
		}
		was := best
		best, err = s.stage(s.promising(next), limit)
		if best = cmp.Or(best, was); best == was {
			break
		}
	}
	return best, err
}

// promising keeps the incumbent and the additions that did best by themselves.
func (s *search) promising(list []*tally) []*tally {
	value := func(t *tally) float64 {
		for _, single := range s.tallies {
			if single.fromMove == t.fromMove && single != t {
				if c := single.counts(); c.judged > 0 {
					return s.score(c)
				}
			}
		}
		return 0
	}
	rest := list[1:]
	slices.SortStableFunc(rest, func(a, b *tally) int { return cmp.Compare(value(b), value(a)) })
	return list[:min(len(list), 1+contenders)]
}

func (t *tally) counts() count {
	c := count{tally: t, run: t.played, judged: t.judged}
	for _, l := range slices.Concat(t.seen, t.fresh) {
		c.failures += l.Failures
	}
	return c
}

func (s *search) rate(t *tally) float64 {
	c := t.counts()
	return float64(c.failures) / float64(max(c.judged, 1))
}

// exposure is what a shape has cost: minutes of load, or requests.
func (s *search) exposure(c count) float64 {
	if s.PerRequest || c.run == 0 {
		return float64(c.judged)
	}
	return c.run.Minutes()
}

// score is failures by cost, without those that the safe arm shows too.
func (s *search) score(c count) float64 {
	failures := float64(c.failures)
	if c.safe.Trials > 0 {
		failures -= float64(c.judged) * float64(c.safe.Failures) / float64(c.safe.Trials)
	}
	if e := s.exposure(c); e > 0 {
		return max(failures, 0) / e
	}
	return 0
}

// sure is the score less a standard deviation, so that a few failures of a load
// that was played for a short time don't beat many of another.
func (s *search) sure(c count) float64 {
	e := s.exposure(c)
	if e == 0 {
		return 0
	}
	failures := s.score(c) * e
	return max(failures-math.Sqrt(failures), 0) / e
}

// stage finds which of some shapes fails most. It plays all that are left in
// turn, each pass on a fresh launch that all share, so that a launch that fails
// more or less than others does so for all, and each pass twice as long as the
// last; and drops what falls behind. It returns nil when nothing failed.
func (s *search) stage(shapes []*tally, limit float64) (*tally, error) {
	var alive []*count
	for _, t := range shapes {
		alive = append(alive, &count{tally: t})
	}
	const least = 64 // requests of a trial, unless that would take more than is allowed
	best := func() *count {
		if len(alive) == 0 {
			return nil
		}
		return slices.MaxFunc(alive, func(a, b *count) int {
			return cmp.Or(cmp.Compare(s.sure(*a), s.sure(*b)), cmp.Compare(s.score(*a), s.score(*b)))
		})
	}
	var err error
	for pass, batch := 1, least; err == nil; pass, batch = pass+1, 2*batch {
		if leader := best(); pass > 1 && leader.failures < leaderFailures && !s.affords(alive, batch, limit) {
			limit = max(limit, unseen)
		}
		for ; batch > 0 && !s.affords(alive, batch, limit); batch /= 2 {
		}
		if batch == 0 {
			break
		}
		err = s.pass(alive, batch, Search)
		if err == nil {
			err = s.check(alive, limit)
		}
		alive = slices.DeleteFunc(alive, func(c *count) bool { return c.out != "" })
		leader := best()
		if leader == nil {
			return nil, err
		}
		if pass == 1 || leader.failures < leaderFailures {
			continue
		}
		alive = slices.DeleteFunc(alive, func(c *count) bool { return c != leader && s.behind(*c, *leader) })
		if len(alive) == 1 || leader.failures >= settled {
			break
		}
	}
	leader := best()
	if leader == nil || s.score(*leader) == 0 {
		return nil, err
	}
	s.Decided(fmt.Sprintf("%s: %d of %d broken", leader.name, leader.failures, leader.judged))
	return leader.tally, err
}

// behind says that it is unlikely that a shape fails as often as the leader: by
// chance its share of the failures of the two would be that of the exposure.
func (s *search) behind(c, leader count) bool {
	e, all := s.exposure(c), s.exposure(c)+s.exposure(leader)
	if all == 0 {
		return false
	}
	failures := int(math.Round(s.score(c) * s.exposure(c)))
	return binomialTail(failures, failures+leader.failures, e/all) < dropBelow
}

// binomialTail is the chance of k or fewer of n.
func binomialTail(k, n int, p float64) float64 {
	if p >= 1 {
		return 1
	}
	sum := 0.0
	for i := range k + 1 {
		a, _ := math.Lgamma(float64(n) + 1)
		b, _ := math.Lgamma(float64(i) + 1)
		c, _ := math.Lgamma(float64(n-i) + 1)
		sum += math.Exp(a - b - c + float64(i)*math.Log(p) + float64(n-i)*math.Log1p(-p))
	}
	return sum
}

// requests is how many a trial of at least so many has.
func (s *search) requests(t *tally, batch int) int { return t.turns * t.sessions(batch) }

// sessions are at least as many as are open at once, else the load isn't what
// the shape says.
func (t *tally) sessions(batch int) int {
	return max((batch+t.turns-1)/t.turns, t.shape.Concurrency, 1)
}

// affords says whether a pass keeps within a share of the budget.
func (s *search) affords(list []*count, batch int, limit float64) bool {
	n := 0
	for _, c := range list {
		n += s.requests(c.tally, batch)
	}
	return s.within(n, 1, limit)
}

func (s *search) within(requests, launches int, limit float64) bool {
	ok := float64(s.used.Requests+requests) <= limit*float64(s.Budget.Requests)
	if !s.NoLaunch {
		ok = ok && float64(s.used.Launches+launches) <= limit*float64(s.Budget.Launches)+1e-9
	}
	if s.Budget.Wall > 0 {
		took := time.Duration(0)
		if s.sent > 0 {
			took = time.Duration(float64(s.took) / float64(s.sent) * float64(requests))
		}
		// A little less, since the guess may be wrong.
		ok = ok && float64(s.used.Wall+took) <= 0.9*limit*float64(s.Budget.Wall)
	}
	return ok
}

// pass plays each shape once in the failing arm, in an order that is drawn, on
// one launch that is fresh.
func (s *search) pass(list []*count, batch int, phase Phase) error {
	s.stale = true
	for _, i := range s.r.Perm(len(list)) {
		c := list[i]
		out, err := s.play(c.tally, batch, phase, false)
		if err != nil {
			return err
		}
		if out.Void == "" {
			c.failures += out.Failures
			c.judged += out.Judged
			c.run += out.Run
		}
	}
	return nil
}

// check plays in the safe arm what has failed and hasn't been played there for
// as long: what breaks there as often is the model's own.
func (s *search) check(list []*count, limit float64) error {
	fresh := true
	for _, c := range list {
		if s.NoSafe || c.failures < suspicious || c.out != "" || c.safe.Trials >= min(c.judged, checkRequests)/2 {
			continue
		}
		batch := min(c.judged, checkRequests)
		if !s.within(s.requests(c.tally, batch), 1, max(limit, searching)) {
			return nil
		}
		if fresh {
			s.stale, fresh = true, false
		}
		if err := s.checkOne(c.tally, batch); err != nil {
			return err
		}
	}
	if !fresh {
		s.stale = true
	}
	return nil
}

// checkRequests are as many as a check in the safe arm is worth.
const checkRequests = 400

func (s *search) checkOne(t *tally, batch int) error {
	out, err := s.play(t, batch, Check, true)
	switch {
	case err != nil:
		return err
	case out.Void != "":
		if s.noCheck++; s.noCheck >= hopeless {
			s.Decided("the safe arm can't be used to check: " + out.Void)
			s.NoSafe = true
		}
		return nil
	}
	t.safe.Failures += out.Failures
	t.safe.Trials += out.Judged
	if c := t.counts(); t.safe.Failures > 0 {
		greater, _ := stats.FisherExact(c.failures, c.judged, t.safe.Failures, t.safe.Trials)
		share := float64(t.safe.Failures) / float64(t.safe.Trials) / s.rate(t)
		if greater > 0.01 || t.safe.Failures > 1 && share > ownShare {
			t.out = fmt.Sprintf("the safe arm breaks too: %d of %d", t.safe.Failures, t.safe.Trials)
			s.Decided(t.name + ": " + t.out)
		}
	}
	return nil
}

// play plays one trial and keeps the books.
func (s *search) play(t *tally, batch int, phase Phase, safe bool) (Outcome, error) {
	sessions := t.sessions(batch)
	trial := Trial{Name: t.name, Shape: t.shape, Sessions: sessions, Requests: sessions * t.turns, Phase: phase, Safe: safe, Launch: !s.NoLaunch && (s.stale || safe != s.safeNow)}
	launches := 0
	if trial.Launch {
		launches = 1
	}
	if !s.within(trial.Requests, launches, 1) {
		return Outcome{}, ErrSpent
	}
	out, err := s.Play(trial)
	if err != nil {
		return out, err
	}
	if trial.Launch || out.Launched {
		s.launches++
		s.used.Launches++
	}
	s.used.Requests += trial.Requests
	s.used.Wall += out.Took
	s.took, s.sent = s.took+out.Took, s.sent+trial.Requests
	s.stale, s.safeNow = out.Poisoned, safe
	if out.Void != "" {
		if t.void++; t.void >= hopeless && !safe {
			t.out = out.Void
			s.Decided(t.name + ": " + t.out)
		}
		return out, nil
	}
	t.void = 0
	if safe {
		return out, nil
	}
	t.played, t.judged = t.played+out.Run, t.judged+out.Judged
	list := &t.seen
	if phase == Measure {
		list = &t.fresh
	}
	cluster := stats.Cluster{Failures: out.Failures, Trials: out.Judged}
	if n := len(*list); n > 0 && (*list)[n-1].launch == s.launches {
		(*list)[n-1].Failures += cluster.Failures
		(*list)[n-1].Trials += cluster.Trials
	} else {
		*list = append(*list, launched{s.launches, cluster})
	}
	return out, nil
}

// measure plays the shape that was chosen, and the case's own, on launches of
// their own.
func (s *search) measure(best *tally) error {
	base := s.tallies[0]
	chosen := &count{tally: best}
	list := []*count{chosen}
	if base != best && base.out == "" {
		list = append(list, &count{tally: base})
	}
	if !s.NoSafe && best.safe.Trials < checkRequests/2 && s.within(s.requests(best, checkRequests/2), 1+2, 1) {
		s.stale = true
		if err := s.checkOne(best, checkRequests/2); err != nil {
			return err
		}
		if s.stale = true; best.out != "" {
			return nil
		}
	}
	const perLaunch = 10 // failures
	batch := int(perLaunch / max(s.rate(best), 1e-6))
	// What is left is for the launches that it takes at least.
	left := (s.Budget.Requests - s.used.Requests) / (measureLaunches * len(list))
	batch = min(batch, left)
	for launches := 1; ; launches++ {
		for batch > 1 && !s.affords(list, batch, 1) {
			if batch /= 2; batch*4 < best.turns*max(best.shape.Concurrency, 1) {
				return ErrSpent
			}
		}
		if err := s.pass(list, batch, Measure); err != nil {
			return err
		}
		if launches >= measureLaunches {
			batch *= 2
		}
		if best.out != "" {
			return nil
		}
		if launches >= measureLaunches && chosen.failures >= measureFailures {
			if best == base || ratio(best.fresh, base.fresh).Low > 1 {
				return nil
			}
		}
	}
}

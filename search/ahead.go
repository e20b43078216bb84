package search

import (
	"fmt"
	"iter"
	"math"

	"github.com/culprit-project/culprit/design"
)

// Several servers at once: Ahead says what the search is likely to ask for, so
// that it can run before it is asked for. What was run stays sealed until the
// search asks for its arm, and is then observed like any other; so the search
// decides as if it had run by itself, and what it guarantees doesn't depend on
// how good the guesses are. What was guessed in vain is told to it by Add: it
// then knows more and has proven no more.
//
// Two rules are the caller's. Whether a sealed result is used must not depend on
// what is in it. And a result of a proposal with After must not have ended
// before the beginning of anything that was observed before: what shows that a
// failure is still there doesn't, if it is older than what it vouches for.

// event is what a search was told.
type event struct {
	observation Observation
	added       arm // nil: it was asked for
	launch      int
}

// Ahead gives what the search asks for from now on if everything goes as it
// expects, and what it expects: first what Next gives. It ends where the search
// would.
func (s *Search) Ahead() iter.Seq2[Proposal, Observation] {
	return func(yield func(Proposal, Observation) bool) {
		if _, running := s.Next(); !running {
			return
		}
		double, err := New(s.space, s.options)
		if err != nil {
			return // it was possible before
		}
		defer double.Close()
		for _, e := range s.events {
			if err := double.tell(e); err != nil {
				return
			}
		}
		for {
			p, running := double.Next()
			if !running {
				return
			}
			o := double.hunt.expected(p)
			if !yield(p, o) || double.Observe(o) != nil {
				return
			}
		}
	}
}

// expected is the likeliest outcome of a proposal.
func (h *hunt) expected(p Proposal) Observation {
	o := Observation{Outcome: Ran, Requests: p.Requests}
	if p.Launch {
		o.LaunchCost = h.launchCost()
	}
	var before int // requests of this launch, in this arm
	if !p.Launch && h.asked.equal(h.running.arm) {
		before = h.here.Trials
	}
	rate := h.base
	if h.expectFailing(h.asked) {
		rate = h.expectedRate()
	}
	count := func(n int) int { return int(math.Round(rate * float64(n))) }
	o.Failures = min(count(before+p.Requests)-count(before), p.Requests)
	if o.Failures > 0 {
		o.FirstFailure = max(1, p.Requests/(o.Failures+1))
		o.Poisoned = h.poisoned
	}
	return o
}

// expectFailing says whether an arm is likely to fail.
func (h *hunt) expectFailing(a arm) bool {
	if a.equal(h.ladders.top) {
		return true
	}
	for _, cause := range h.proof.causes {
		if cause.within(a) {
			return true
		}
	}
	if h.proof.covers(a) || h.belief == nil {
		return false
	}
	if !a.within(h.belief.region) {
		return h.belief.region.within(a)
	}
	fails := 0.0
	for i := range h.belief.hypotheses {
		if h.belief.hypotheses[i].fails(a) {
			fails += h.belief.chance(i)
		}
	}
	return fails > 0.5
}

// expectedRate is how often failing arms fail, as far as is known.
func (h *hunt) expectedRate() float64 {
	if h.failing != nil {
		return h.meanRate(h.failing)
	}
	// Before anything is known it is that of a fault that one would hunt.
	failures, requests := 0.5, 2.5
	for _, s := range h.all {
		failures += float64(s.cluster.Failures)
		requests += float64(s.cluster.Trials)
	}
	return failures / requests
}

// Launch numbers the launch of the last observation, for Add.
func (s *Search) Launch() int { return s.hunt.running.launch }

// Add takes in what an arm has shown that the search didn't ask for. launch is
// the number of the launch that showed it, 0 for one that the search knows
// nothing of; the number is returned.
func (s *Search) Add(a design.Arm, launch int, o Observation) (int, error) {
	steps, err := s.hunt.ladders.steps(a)
	if err != nil {
		return 0, fmt.Errorf("search: %w", err)
	}
	if launch < 0 || launch > s.hunt.launches {
		return 0, fmt.Errorf("search: launch %d isn't known", launch)
	}
	if err := o.validate(); err != nil {
		return 0, err
	}
	e := event{observation: o, added: steps, launch: launch}
	s.events = append(s.events, e)
	return s.hunt.add(e), nil
}

// tell repeats an event.
func (s *Search) tell(e event) error {
	if e.added == nil {
		return s.Observe(e.observation)
	}
	s.hunt.add(e)
	return nil
}

// add books what wasn't asked for: beside the procedure, which waits for its
// proposal to be observed.
func (h *hunt) add(e event) int {
	a, o, launch := e.added, e.observation, e.launch
	if launch == 0 {
		h.launches++
		launch = h.launches
		h.aside += h.launchCost()
	}
	h.requests += o.Requests
	h.aside += float64(o.Requests) * h.ladders.requestCost(a)
	if o.Outcome == Invalid {
		h.validity.fail(a)
		return launch
	}
	more := o.cluster()
	if o.Outcome == Void || more.Trials == 0 {
		return launch
	}
	h.validity.start(a)
	seen := shown{a, launch, more, Beside}
	h.record, h.all = append(h.record, seen), append(h.all, seen)
	if h.belief != nil && a.within(h.belief.region) {
		h.belief.observe(a, launch, more)
	}
	return launch
}

// steps is the arm of a design; what it doesn't name is an error.
func (l *ladders) steps(a design.Arm) (arm, error) {
	out := make(arm, len(l.levels))
	for i, f := range l.space.Factors {
		level := f.Level(a[f.Name])
		found := false
		for step, of := range l.levels[i] {
			if of == level && level >= 0 {
				out[i], found = uint16(step), true
			}
		}
		if !found {
			return nil, fmt.Errorf("factor %s has no level %q", f.Name, a[f.Name])
		}
	}
	return out, nil
}

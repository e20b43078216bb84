// Package search finds which levels of a failing arm are needed for the
// failure: arms in, finding out. It chooses the next arm by Bayesian search over
// sets of levels, starting from the failing arm, and rests its finding on a
// certificate of fresh launches (docs/search.md says what that guarantees). It
// starts nothing and has no clock: the caller runs what [Search.Next] asks for
// and tells [Search.Observe] what was seen. The same problem, options and
// observations give the same proposals, so a search is resumed by observing
// again, in order, what was observed before.
//
// Stability: may change.
package search

import (
	"cmp"
	"errors"
	"fmt"
	"iter"
	"math/rand/v2"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/stats"
)

// Options of a search. Zero values take the defaults in parentheses.
type Options struct {
	Seed uint64
	// Error bounds the probability of a wrong finding (0.01).
	Error float64
	// MinRate is the lowest rate of failure that is looked for (0.004). A
	// failing arm that fails less often is reported as not reproduced: raise
	// the rate first, the requests needed grow as its inverse.
	MinRate float64
	// Budget ends the search without a finding when it is used up.
	Budget Budget
	// LaunchCost is how many requests take as long as a launch, until launches
	// have been measured (120).
	LaunchCost float64
	// Batch is the smallest number of requests to ask for (8): as many as run
	// at once.
	Batch int
	// Dispersion is how much launches may differ (stats.Dispersed).
	Dispersion stats.Dispersion
	// MaxSize is the largest set that is looked for at first (4).
	MaxSize int
	// SpotChecks is how many pairs of arms test, in the end, that the other
	// levels don't matter (1; -1 is none).
	SpotChecks int
	// Steady says that failing arms go on failing: no more than a few controls
	// are spent on seeing that they stop for a while.
	Steady bool
	// PosteriorOnly stops without a certificate when a set is this probable:
	// cheaper, and no guarantee.
	PosteriorOnly float64
}

// Budget bounds what a search may use; 0 is no bound.
type Budget struct {
	Launches int     `json:"launches,omitempty"`
	Requests int     `json:"requests,omitempty"`
	Cost     float64 `json:"cost,omitempty"` // requests, and launches in requests
}

func (o Options) withDefaults() Options {
	o.Error = cmp.Or(o.Error, 0.01)
	o.MinRate = cmp.Or(o.MinRate, 0.004)
	o.LaunchCost = cmp.Or(o.LaunchCost, 120)
	o.Batch = cmp.Or(o.Batch, 8)
	o.MaxSize = cmp.Or(o.MaxSize, 4)
	o.SpotChecks = cmp.Or(o.SpotChecks, 1)
	if o.Dispersion.CV == nil {
		o.Dispersion = stats.Dispersed()
	}
	return o
}

func (o Options) validate() error {
	switch {
	case o.Error <= 0 || o.Error >= 0.5:
		return fmt.Errorf("error is %g, must be between 0 and 0.5", o.Error)
	case o.MinRate < 1e-6 || o.MinRate > 0.5:
		return fmt.Errorf("lowest rate is %g, must be between 0.000001 and 0.5", o.MinRate)
	case o.LaunchCost < 0 || o.Batch < 1:
		return fmt.Errorf("launch cost is %g and batch %d, must be positive", o.LaunchCost, o.Batch)
	case o.MaxSize < 1 || o.MaxSize > maxSize:
		return fmt.Errorf("largest set is %d, must be between 1 and %d", o.MaxSize, maxSize)
	case o.PosteriorOnly < 0 || o.PosteriorOnly >= 1:
		return fmt.Errorf("posterior is %g, must be between 0 and 1", o.PosteriorOnly)
	}
	return nil
}

// Phase says what a proposal is for.
type Phase string

// The phases of a search.
const (
	Reproduce Phase = "reproduce" // does the failing arm fail?
	Narrow    Phase = "narrow"    // which levels matter?
	Control   Phase = "control"   // does the failing arm still fail?
	Confirm   Phase = "confirm"   // the certificate, on fresh launches
	Spot      Phase = "spot"      // do the other levels really not matter?
	Sweep     Phase = "sweep"     // the other levels of an accused factor
	Beside    Phase = "beside"    // none: it ran ahead and wasn't asked for
)

// Proposal is what to run next.
type Proposal struct {
	Arm      design.Arm `json:"arm"`
	Requests int        `json:"requests"`
	// Launch asks for a new launch. Otherwise the running server has what the
	// arm needs, and only client-side factors may have changed.
	Launch bool `json:"launch"`
	// After asks for a run that doesn't end before anything that was observed
	// so far began. Who runs one after the other always does that.
	After bool   `json:"after,omitempty"`
	Phase Phase  `json:"phase"`
	Why   string `json:"why"`
}

// Outcome says how far a proposal came.
type Outcome string

// Outcomes. Only requests that were answered by the arm asked for are evidence.
const (
	Ran     Outcome = "ran"
	Wedged  Outcome = "wedged"  // ran, then stopped answering; what was answered counts
	Invalid Outcome = "invalid" // the server doesn't start in this arm
	Void    Outcome = "void"    // it wasn't what it claimed
	// NotExercised is an arm in which what it is about didn't happen.
	NotExercised Outcome = "not-exercised"
)

// Counts reports whether what was answered is evidence.
func (o Outcome) Counts() bool { return o == Ran || o == Wedged }

// Observation is what came of the last proposal.
type Observation struct {
	Outcome  Outcome `json:"outcome"`
	Requests int     `json:"requests"` // judged; may differ from what was asked for
	Failures int     `json:"failures"`
	// FirstFailure is which of the requests failed first, from 1; 0 is unknown.
	FirstFailure int `json:"first_failure,omitempty"`
	// Launched says that the server was launched anew though that wasn't asked.
	Launched bool `json:"launched,omitempty"`
	// Poisoned says that a server doesn't recover from a failure: what came
	// after the first in this launch isn't counted.
	Poisoned bool `json:"poisoned,omitempty"`
	// LaunchCost is how many requests took as long as the launch; 0 is unknown.
	LaunchCost float64 `json:"launch_cost,omitempty"`
}

// Search is one search. It is not safe for concurrent use.
type Search struct {
	space    design.Space
	options  Options
	events   []event
	hunt     *hunt
	next     func() (Proposal, bool)
	stop     func()
	proposal Proposal
	running  bool
}

// New starts a search. Close it when done.
func New(space design.Space, options Options) (*Search, error) {
	if err := space.Validate(); err != nil {
		return nil, fmt.Errorf("search: %w", err)
	}
	options = options.withDefaults()
	if err := options.validate(); err != nil {
		return nil, fmt.Errorf("search: %w", err)
	}
	ladders, err := newLadders(space)
	if err != nil {
		return nil, fmt.Errorf("search: %w", err)
	}
	h := &hunt{
		ladders: ladders,
		options: options,
		grid:    newGrid(options),
		random:  rand.New(rand.NewPCG(options.Seed, 0x5ea2c4)),
		limit:   0,
	}
	h.finding.Status = Running
	h.validity = newValidity(ladders)
	s := &Search{space: space, options: options, hunt: h}
	s.next, s.stop = iter.Pull(h.procedure)
	s.advance()
	return s, nil
}

func (s *Search) advance() { s.proposal, s.running = s.next() }

// Next is what to run now; false when there is a finding.
func (s *Search) Next() (Proposal, bool) { return s.proposal, s.running }

// Observe takes in what came of the proposal that Next gives, and makes the
// next one.
func (s *Search) Observe(o Observation) error {
	if !s.running {
		return errors.New("search: observed after the end")
	}
	if err := o.validate(); err != nil {
		return err
	}
	s.events = append(s.events, event{observation: o})
	s.hunt.observation = o
	s.advance()
	return nil
}

// cluster is what counts of it: what follows a failure that the server doesn't
// recover from tells nothing more of the arm.
func (o *Observation) cluster() stats.Cluster {
	if o.Poisoned && o.Failures > 0 && o.FirstFailure > 0 {
		return stats.Cluster{Failures: 1, Trials: o.FirstFailure}
	}
	return stats.Cluster{Failures: o.Failures, Trials: o.Requests}
}

func (o *Observation) validate() error {
	switch {
	case o.Requests < 0 || o.Failures < 0 || o.Failures > o.Requests:
		return fmt.Errorf("search: observed %d failures of %d requests", o.Failures, o.Requests)
	case o.FirstFailure < 0 || o.FirstFailure > o.Requests || o.FirstFailure > 0 && o.Failures == 0:
		return fmt.Errorf("search: observed the first failure at request %d, with %d failures of %d requests", o.FirstFailure, o.Failures, o.Requests)
	case o.LaunchCost < 0:
		return fmt.Errorf("search: observed a launch of %g requests", o.LaunchCost)
	}
	switch o.Outcome {
	case Ran, Wedged, Invalid, Void, NotExercised:
	default:
		return fmt.Errorf("search: observed an unknown outcome %q", o.Outcome)
	}
	return nil
}

// Close frees what the search holds. The finding stays.
func (s *Search) Close() { s.stop() }

package search

import (
	"fmt"
	"iter"
	"maps"
	"slices"
	"time"
)

// Crew has several servers run at once what one search asks for: it asks ahead,
// keeps what comes back sealed until the search asks for it, and tells the search
// of what was run in vain. It has no clock: times are since any moment. It is not
// safe for concurrent use.
type Crew struct {
	search   *Search
	size     int
	asked    int         // tickets
	launches []*launched // that the search may still be told of, in the order of asking
	current  *launched   // of the last observation
	known    map[int]int // the search's numbers of launches that it was told of, by ticket
	began    time.Duration

	ahead []foreseen // what is expected from now on, as far as it was needed
	more  func() (Proposal, Observation, bool)
	stop  func()
}

// Ticket is a run that a crew asks for.
type Ticket struct {
	Number   int      `json:"number"` // from 1, in the order of asking
	Launch   int      `json:"launch"` // the ticket that launches its server: its own, or an earlier one
	Proposal Proposal `json:"proposal"`
}

// Told is a run that the search was told of, in the order of telling.
type Told struct {
	Ticket
	// Proposal is what the search asked for.
	Proposal    Proposal
	Observation Observation
	Beside      bool // it asked for no such run
	Began       time.Duration
	Ended       time.Duration
}

// launched is a launch with the runs that the search wasn't told of.
type launched struct {
	ticket int
	lost   bool // the server is gone
	runs   []*run
}

type run struct {
	Ticket
	done         bool
	observation  Observation
	began, ended time.Duration
}

type foreseen struct {
	proposal Proposal
	outcome  Observation
}

// mostAhead bounds how far ahead is looked.
const mostAhead = 200

// NewCrew makes a crew of so many servers for a search that nothing was told.
func NewCrew(s *Search, size int) *Crew {
	return &Crew{search: s, size: max(size, 1), known: map[int]int{}}
}

// Resize changes how many servers there are. What runs goes on.
func (c *Crew) Resize(size int) { c.size = max(size, 1) }

// Close frees what the crew holds; the search stays.
func (c *Crew) Close() { c.forget() }

func (c *Crew) forget() {
	if c.stop != nil {
		c.stop()
	}
	c.ahead, c.more, c.stop = nil, nil, nil
}

// expected is the n-th proposal from now on, from 0.
func (c *Crew) expected(n int) (Proposal, bool) {
	if n == 0 {
		return c.search.Next() // no guess
	}
	if c.more == nil {
		c.more, c.stop = iter.Pull2(c.search.Ahead())
	}
	for len(c.ahead) <= n {
		if len(c.ahead) >= mostAhead {
			return Proposal{}, false
		}
		p, o, ok := c.more()
		if !ok {
			return Proposal{}, false
		}
		c.ahead = append(c.ahead, foreseen{p, o})
	}
	return c.ahead[n].proposal, true
}

// Ask says what is to be run now, beside what runs already, and which launches
// are needed no more, by their tickets: their servers may end.
func (c *Crew) Ask() (tickets []Ticket, release []int) {
	more := c.continued()
	for _, l := range c.launches {
		if !l.lost && !l.busy() && !more[l] {
			l.lost = true
			release = append(release, l.ticket)
		}
	}
	w := c.walk()
	for full := c.occupied() >= c.size; !full || w.n == 0 || c.idle() || c.unspoken(w, false); full = c.occupied() >= c.size {
		p, l, at, ok := w.next()
		if !ok {
			break
		}
		if l == nil {
			if full || !c.affords() {
				w.pass()
				continue
			}
			l = c.launch(c.asked + 1)
			l.lost = false
			w.current, w.taken[l] = l, 1
		}
		if at >= len(l.runs) && !l.busy() && l != &nowhere { // its server is there, or there is room for one
			c.asked++
			r := &run{Ticket: Ticket{c.asked, l.ticket, p}}
			l.runs = append(l.runs, r)
			w.spoken[r] = true
			tickets = append(tickets, r.Ticket)
		}
	}
	c.tidy()
	return tickets, release
}

// continued are the launches with a server that waits, and of which more is
// expected to be asked.
func (c *Crew) continued() map[*launched]bool {
	more := map[*launched]bool{}
	w := c.walk()
	open := func() bool {
		return slices.ContainsFunc(c.launches, func(l *launched) bool {
			// One that the search has seen goes on at once, or never.
			return !l.lost && !l.busy() && !more[l] && (l == w.current || c.known[l.ticket] == 0)
		})
	}
	for open() {
		_, l, at, ok := w.next()
		if !ok {
			break
		}
		if l == nil {
			w.pass()
		} else if at >= len(l.runs) {
			more[l] = true
		}
	}
	return more
}

// occupied counts the servers that run, or are asked to.
func (c *Crew) occupied() (n int) {
	for _, l := range c.launches {
		if !l.lost || l.busy() {
			n++
		}
	}
	return n
}

// idle says whether a server waits for more.
func (c *Crew) idle() bool {
	return slices.ContainsFunc(c.launches, func(l *launched) bool { return !l.lost && !l.busy() })
}

// walk follows what is expected, and what there is for it.
type walk struct {
	crew    *Crew
	n       int // proposals
	current *launched
	spoken  map[*run]bool
	taken   map[*launched]int // how many of its runs are spoken for
}

// nowhere is a launch that there isn't, with all that continues it.
var nowhere launched

func (c *Crew) walk() *walk {
	return &walk{crew: c, current: c.current, spoken: map[*run]bool{}, taken: map[*launched]int{}}
}

// next is the next proposal, and its place as in [Crew.place].
func (w *walk) next() (Proposal, *launched, int, bool) {
	p, ok := w.crew.expected(w.n)
	if !ok {
		return p, nil, 0, false
	}
	w.n++
	l, at := w.crew.place(p, w.current, w.taken)
	if l != nil {
		if at < len(l.runs) {
			w.spoken[l.runs[at]] = true
		}
		w.current, w.taken[l] = l, at+1
	}
	return p, l, at, true
}

// pass goes on though there is no such launch.
func (w *walk) pass() { w.current = &nowhere }

// place is where a run of a proposal is or would be: the launch, and which of its
// runs. No launch is a new one.
func (c *Crew) place(p Proposal, current *launched, taken map[*launched]int) (*launched, int) {
	if l := current; !p.Launch && l != nil {
		at := taken[l]
		for at < len(l.runs) && !c.serves(l.runs[at], p) {
			at++ // it is of another arm, or too old
		}
		if at < len(l.runs) || !l.lost {
			return l, at
		}
	}
	for _, l := range c.launches {
		if c.known[l.ticket] == 0 && taken[l] == 0 && len(l.runs) > 0 && c.serves(l.runs[0], p) {
			return l, 0
		}
	}
	return nil, 0
}

// serves says whether a run is one that a proposal asks for, whatever came out.
func (c *Crew) serves(r *run, p Proposal) bool {
	return maps.Equal(r.Proposal.Arm, p.Arm) && (!r.done || !p.After || r.ended >= c.began)
}

// busy says whether a run of it is under way.
func (l *launched) busy() bool { return len(l.runs) > 0 && !l.runs[len(l.runs)-1].done }

// unspoken says whether there are runs, or results, that aren't spoken for.
func (c *Crew) unspoken(w *walk, results bool) bool {
	for _, l := range c.launches {
		for _, r := range l.runs {
			if !w.spoken[r] && (r.done || !results) {
				return true
			}
		}
	}
	return false
}

// affords says whether one more launch is within the budget, if those that the
// search doesn't know of count too.
func (c *Crew) affords() bool {
	h := c.search.hunt
	unknown := 0
	for _, l := range c.launches {
		if c.known[l.ticket] == 0 {
			unknown++
		}
	}
	return unknown == 0 || h.options.Budget.Launches == 0 || h.launches+unknown < h.options.Budget.Launches
}

// Done takes in what came of a ticket. began must not be before its run began,
// and ended not after it ended.
func (c *Crew) Done(number int, o Observation, began, ended time.Duration) error {
	if err := o.validate(); err != nil {
		return err
	}
	for _, l := range c.launches {
		for _, r := range l.runs {
			if r.Number == number && !r.done {
				r.done, r.observation, r.began, r.ended = true, o, began, ended
				return nil
			}
		}
	}
	return fmt.Errorf("search: no run has the ticket %d", number)
}

// Lost says that the server of a launch is gone.
func (c *Crew) Lost(launch int) {
	for _, l := range c.launches {
		l.lost = l.lost || l.ticket == launch
	}
}

// Step tells the search of one more result, where there is one that it may have;
// false where it has to wait, or to ask. It is to be called until it says so.
func (c *Crew) Step() (Told, bool, error) {
	p, running := c.search.Next()
	if running {
		if l, at := c.place(p, c.current, nil); l != nil && at < len(l.runs) && l.runs[at].done {
			r := l.runs[at]
			t := Told{Ticket: r.Ticket, Proposal: p, Observation: r.observation, Began: r.began, Ended: r.ended}
			t.Observation.Launched = !p.Launch && l != c.current || r.observation.Launched
			if p.Launch {
				t.Observation.Launched = false
			}
			l.runs = slices.Delete(l.runs, at, at+1)
			return t, true, c.tell(t, l)
		}
	}
	if running && p.Phase != Narrow && p.Phase != Reproduce {
		// It may come to ask for what is there: a claim takes what is sealed alone.
		return Told{}, false, nil
	}
	if l, at := c.stray(); l != nil {
		r := l.runs[at]
		t := Told{Ticket: r.Ticket, Proposal: r.Proposal, Observation: r.observation, Beside: true, Began: r.began, Ended: r.ended}
		t.Proposal.Phase, t.Proposal.Launch, t.Proposal.After = Beside, r.Number == l.ticket, false
		l.runs = slices.Delete(l.runs, at, at+1)
		return t, true, c.tell(t, l)
	}
	return Told{}, false, nil
}

// stray is a result that the search isn't expected to ask for.
func (c *Crew) stray() (*launched, int) {
	w := c.walk()
	for c.unspoken(w, true) {
		_, l, _, ok := w.next()
		if !ok {
			break
		}
		if l == nil {
			w.pass()
		}
	}
	for _, l := range c.launches {
		for at, r := range l.runs {
			if r.done && !w.spoken[r] {
				return l, at
			}
		}
	}
	return nil, 0
}

// tell tells the search of a run of a launch.
func (c *Crew) tell(t Told, l *launched) (err error) {
	if !t.Beside && len(c.ahead) > 0 && c.ahead[0].outcome == t.Observation {
		c.ahead = c.ahead[1:] // all as foreseen
	} else {
		c.forget()
	}
	if t.Beside {
		known := c.known[l.ticket]
		if t.Observation.Launched {
			known = 0
		}
		c.known[l.ticket], err = c.search.Add(t.Proposal.Arm, known, t.Observation)
	} else if err = c.search.Observe(t.Observation); err == nil {
		c.known[l.ticket], c.current = c.search.Launch(), l
		c.began = max(c.began, t.Began)
	}
	c.tidy()
	return err
}

// tidy drops launches of which nothing more is to be told.
func (c *Crew) tidy() {
	c.launches = slices.DeleteFunc(c.launches, func(l *launched) bool { return len(l.runs) == 0 && l.lost && l != c.current })
}

// Repeat tells the search again what it was told before, when it is resumed.
func (c *Crew) Repeat(t Told) error {
	c.asked = max(c.asked, t.Number)
	return c.tell(t, c.launch(t.Launch))
}

// Resume says that a ticket was asked for before, and that the search wasn't
// told of it.
func (c *Crew) Resume(t Ticket) {
	l := c.launch(t.Launch)
	l.runs = append(l.runs, &run{Ticket: t})
	l.lost = false
	c.asked = max(c.asked, t.Number)
}

// launch is the one that a ticket makes or made.
func (c *Crew) launch(ticket int) *launched {
	for _, l := range c.launches {
		if l.ticket == ticket {
			return l
		}
	}
	l := &launched{ticket: ticket, lost: true}
	c.launches = append(c.launches, l)
	return l
}

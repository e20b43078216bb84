package search

import (
	"fmt"
	"math/rand/v2"
	"time"
)

// Bill is what a simulated hunt took. Time is in requests, as costs are: how long
// it was until the finding, with several servers side by side.
type Bill struct {
	Launches, Requests int
	Time               float64
	Told               []Told
}

// Hunt runs a search on so many servers of a world at once, to its end.
func (w *World) Hunt(o Options, servers int, seed uint64) (Finding, Bill, error) {
	s, err := New(w.Space(), o)
	if err != nil {
		return Finding{}, Bill{}, err
	}
	defer s.Close()
	c := NewCrew(s, servers)
	defer c.Close()
	f := fleet{world: w, random: w.Serve(seed).random, launches: map[int]*Server{}}
	var bill Bill
	for {
		for {
			told, more, err := c.Step()
			if err != nil {
				return Finding{}, bill, err
			}
			if !more {
				break
			}
			bill.Told = append(bill.Told, told)
		}
		if _, more := s.Next(); !more {
			break
		}
		tickets, release := c.Ask()
		for _, launch := range release {
			delete(f.launches, launch)
		}
		for _, t := range tickets {
			f.start(t)
		}
		if len(f.running) > servers {
			return Finding{}, bill, fmt.Errorf("%d servers run, and there are %d", len(f.running), servers)
		}
		if len(f.running) == 0 {
			return Finding{}, bill, fmt.Errorf("the hunt waits for nothing: %+v", c)
		}
		r := f.first()
		if !r.up {
			c.Lost(r.ticket.Launch)
		}
		if err := c.Done(r.ticket.Number, r.observation, units(r.began), units(r.ended)); err != nil {
			return Finding{}, bill, err
		}
	}
	bill.Launches, bill.Requests, bill.Time = f.bill.Launches, f.bill.Requests, f.now
	return s.Finding(), bill, nil
}

// units makes a time of a cost.
func units(cost float64) time.Duration { return time.Duration(cost * float64(time.Second)) }

// fleet are servers of one world, which age together.
type fleet struct {
	world    *World
	random   *rand.Rand // of all servers: one alone is then as [World.Serve] has it
	now      float64
	launches map[int]*Server // by ticket
	running  []fleetRun
	bill     Bill
}

type fleetRun struct {
	ticket       Ticket
	observation  Observation
	up           bool
	began, ended float64
}

// start begins a run. What comes of it is settled then, since nothing that happens
// meanwhile can change it.
func (f *fleet) start(t Ticket) {
	s := f.launches[t.Launch]
	p := t.Proposal
	anew := s == nil
	if anew {
		s = &Server{world: f.world, random: f.random}
		f.launches[t.Launch] = s
	}
	p.Launch = anew
	s.Cost = f.now
	launches, requests := s.Launches, s.Requests
	r := fleetRun{ticket: t, observation: s.Run(p), began: f.now, ended: s.Cost}
	if anew {
		r.observation.Launched = t.Number != t.Launch
		r.began = min(f.now+f.world.launchCost(), s.Cost)
	}
	f.bill.Launches += s.Launches - launches
	f.bill.Requests += s.Requests - requests
	if r.up = r.observation.Outcome == Ran; !r.up {
		delete(f.launches, t.Launch)
	}
	f.running = append(f.running, r)
}

// first is the run that ends first.
func (f *fleet) first() fleetRun {
	at := 0
	for i, r := range f.running {
		if r.ended < f.running[at].ended {
			at = i
		}
	}
	r := f.running[at]
	f.running = append(f.running[:at], f.running[at+1:]...)
	f.now = max(f.now, r.ended)
	return r
}

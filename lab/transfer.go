package lab

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/fault"
)

// Mode is a server's part in disaggregation.
type Mode string

// The modes. A prefill server computes prompts and sends their pages to a
// decode server. Either serves requests without a room all by itself.
const (
	NoDisaggregation Mode = ""
	Prefill          Mode = "prefill"
	Decode           Mode = "decode"
)

// Room is where a request's two halves meet.
type Room struct {
	Address string // of the prefill server's transfers; host:port
	Number  uint64 // no two transfers may have the same
}

// TransferConfig is about a server's transfers. Zero values take disagg's
// defaults.
type TransferConfig struct {
	Timeout   time.Duration // how long nothing may happen
	Heartbeat time.Duration
	Bandwidth int // bytes a second to one peer; 0 is no limit
}

// transfer is either end of one: a disagg.Sender or a disagg.Receiver.
type transfer interface {
	Poll() disagg.State
	Err() error
	Idle() bool
	Abort()
}

// transfers is a rank's part of disaggregation.
type transfers struct {
	senders   *disagg.Prefill
	receivers *disagg.Decode
	queue     []*sequence // wait for pages, by arrival
	open      []*sequence // have a transfer, by its beginning
	draining  []*sequence // ended, but the transfer may still be using their pages
}

func (r *rank) startTransfers() {
	c := disagg.Config{
		Cache: r.cache, Rank: r.index, Ranks: r.config.Ranks, Timeout: r.config.Transfer.Timeout, Heartbeat: r.config.Transfer.Heartbeat, Bandwidth: r.config.Transfer.Bandwidth,
		Wake: r.engine.ring, Logger: r.config.Logger, Faults: r.config.Faults, Env: r.env,
	}
	switch r.config.Mode {
	case Prefill:
		r.senders = disagg.NewPrefill(c)
	case Decode:
		r.receivers = disagg.NewDecode(c)
	case NoDisaggregation:
	}
}

// ServeTransfers lets decode servers connect to a prefill server, until the
// listener is closed.
func (e *Engine) ServeTransfers(l net.Listener) error {
	if e.senders == nil {
		return errors.New("lab: only a prefill server serves transfers")
	}
	ends := []*disagg.Prefill{e.senders}
	for _, o := range e.others {
		ends = append(ends, o.senders)
	}
	return disagg.Serve(l, ends...)
}

// meet begins a request that has a room.
func (r *rank) meet(s *sequence) {
	if r.senders == nil {
		r.queue = append(r.queue, s)
		return
	}
	s.PrefillOnly, s.MaxTokens = true, 1
	s.sender = r.senders.Open(s.request.Room.Number)
	s.transfer = s.sender
	r.open = append(r.open, s)
}

// part takes a request that has ended out of the transfers. Its pages are the
// transfer's until that is idle.
func (r *rank) part(s *sequence) {
	r.queue = slices.DeleteFunc(r.queue, func(o *sequence) bool { return o == s })
	r.open = slices.DeleteFunc(r.open, func(o *sequence) bool { return o == s })
	if s.transfer == nil {
		r.sched.Remove(&s.Request)
		return
	}
	s.transfer.Abort()
	if r.strikes(fault.EarlyRelease, r.sched.Running()) { // the bug: the other side doesn't know yet
		r.sched.Remove(&s.Request)
		return
	}
	r.sched.Keep(&s.Request)
	r.draining = append(r.draining, s)
}

// transferStep moves on what has changed since the last step; false if nothing
// has.
func (r *rank) transferStep() (moved bool) {
	moved = r.setAside()
	open, draining := slices.Clone(r.open), slices.Clone(r.draining)
	states := r.poll(open, draining)
	for i, s := range open {
		moved = r.follow(s, states[i]) || moved
	}
	for i, s := range draining {
		if states[len(open)+i] == disagg.Success {
			r.draining = slices.DeleteFunc(r.draining, func(o *sequence) bool { return o == s })
			r.sched.Remove(&s.Request)
			moved = true
		}
	}
	return moved
}

// setAside gives pages to those who wait for them, and asks for their contents.
func (r *rank) setAside() (moved bool) {
	for len(r.queue) > 0 && r.sched.Reserve(&r.queue[0].Request) {
		s := r.queue[0]
		r.queue = r.queue[1:]
		s.receiver = r.receivers.Open(s.request.Room.Address, s.request.Room.Number, s.Table())
		s.transfer = s.receiver
		r.open = append(r.open, s)
		moved = true
	}
	return moved
}

// poll asks where each open transfer stands, and whether each draining one is
// idle: Success if so, else Failed. The ranks agree on the least.
func (r *rank) poll(open, draining []*sequence) []disagg.State {
	states := make([]disagg.State, 0, len(open)+len(draining))
	for _, s := range open {
		states = append(states, s.transfer.Poll())
	}
	for _, s := range draining {
		if s.transfer.Idle() {
			states = append(states, disagg.Success)
		} else {
			states = append(states, disagg.Failed)
		}
	}
	if len(states) > 0 { // on all ranks alike
		r.agree(states)
	}
	r.engine.countPolls(states[:len(open)])
	return states
}

// follow does to a request what its transfer's state says.
func (r *rank) follow(s *sequence, state disagg.State) (moved bool) {
	switch {
	case state == disagg.Failed:
		err := s.transfer.Err()
		if err == nil {
			err = fmt.Errorf("the transfer of room %d failed on another rank", s.request.Room.Number)
		}
		r.end(s, Failed, fmt.Errorf("%w: %w", ErrInternal, err))
	case s.sender != nil && state == disagg.WaitingForInput && !s.met:
		s.met = true
		if err := r.sched.Add(&s.Request); err != nil {
			r.end(s, Failed, err)
		}
	case s.sender != nil && state == disagg.Success:
		r.end(s, s.reason, nil)
	case s.receiver != nil && state == disagg.Success:
		r.open = slices.DeleteFunc(r.open, func(o *sequence) bool { return o == s })
		first := s.receiver.First()
		s.receiver, s.transfer = nil, nil
		s.CachedTokens, s.HostTokens = first.Cached, first.Host
		token := Token{ID: first.Token, Logprob: first.Logprob}
		for _, l := range first.Top {
			token.Top = append(token.Top, Logprob(l))
		}
		if int(token.ID) >= r.config.Model.Vocab {
			r.end(s, Failed, fmt.Errorf("%w: the first token is %d, the vocabulary has %d", ErrInternal, token.ID, r.config.Model.Vocab))
			return true
		}
		r.sched.Start(&s.Request, token.ID)
		r.deliver(s, token)
	default:
		return false
	}
	return true
}

// sendPages sends the pages of a prompt that are whole, or with the first token
// all of them.
func (r *rank) sendPages(s *sequence, computed int, first *Token) {
	table := s.Table()
	if first == nil {
		whole := computed / r.config.PageSize
		s.sender.Send(table[s.sent:whole])
		s.sent = whole
		return
	}
	f := disagg.First{Token: first.ID, Logprob: first.Logprob, Cached: s.CachedTokens, Host: s.HostTokens}
	for _, l := range first.Top {
		f.Top = append(f.Top, disagg.Logprob(l))
	}
	all := table[:(computed+r.config.PageSize-1)/r.config.PageSize]
	s.sender.Finish(all[s.sent:], all, f)
	s.sent = len(all)
}

// stopTransfers waits until nothing uses the pages of others any more.
func (r *rank) stopTransfers() {
	if r.senders != nil {
		r.senders.Close()
	}
	if r.receivers != nil {
		r.receivers.Close()
	}
	for _, s := range r.draining {
		r.sched.Remove(&s.Request)
	}
	r.draining = nil
}

// transferStats counts this rank's transfers.
func (r *rank) transferStats() (s disagg.Stats) {
	if r.senders != nil {
		s.Add(r.senders.Stats())
	}
	if r.receivers != nil {
		s.Add(r.receivers.Stats())
	}
	return s
}

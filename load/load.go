// Package load plays a workload against an OpenAI-compatible server and writes
// the history of what happened. It never retries, follows no redirect, and
// records when the workload wanted each request sent beside when it was sent,
// so that a late client shows. Whatever a server does to a request is that
// request's outcome; the run goes on.
//
// It speaks HTTP/1.1 alone: then each request has a connection to itself, and
// hanging up touches no other.
//
// Stability: may change.
package load

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// What an Options field of zero means.
const (
	DefaultTimeout     = 10 * time.Minute
	DefaultGiveUpAfter = 30 * time.Second
	DefaultMaxInFlight = 10_000
	DefaultMaxRecovery = 3
)

// OtherSession is the session of an op that belongs to none: recovery and
// sentinel ops.
const OtherSession = -1

// Recorder takes what happens. A *history.Writer is one. It must not keep what
// it is given, and it is used by several goroutines.
type Recorder interface {
	Op(*history.Op) error
	Event(*history.Event) error
}

// Options says what is played, at what, and how. Only BaseURL, Workload,
// Sessions and History must be set.
type Options struct {
	BaseURL   string // with or without /v1
	APIKey    string
	Header    http.Header                // beside or instead of the usual ones
	Model     string                     // empty leaves it out
	ExtraBody map[string]json.RawMessage // members of each request, beside or instead of the usual ones
	NoStream  bool                       // ask for replies in one piece
	NoUsage   bool                       // don't ask streams for their usage
	Timeout   time.Duration              // of one op, from sending to its end

	Workload     workload.Workload
	FirstSession int
	Sessions     int           // how many
	Phase        history.Phase // empty is Main
	Alone        bool          // play the sessions' controls

	// Concurrency is how many sessions are played at once, one when it is 0.
	Concurrency int
	// Waves plays these in step: their next requests are sent together, when
	// the last of the ones before has come to its end. Not with RequestRate.
	Waves bool
	// RequestRate, unless it is 0, starts sessions at random times that don't
	// depend on the server (Poisson arrivals), so that about so many requests
	// come in a second when a session has TurnsPerSession of them. Then
	// Concurrency is the most ops in flight, DefaultMaxInFlight when it is 0.
	RequestRate     float64
	TurnsPerSession float64 // 1 when it is 0
	Seed            uint64  // of the arrivals

	// Shards, when more than 1, says that several processes play this load
	// together, each with the same options but for Shard, from 0: it plays the
	// sessions whose number leaves that when divided by Shards, with its share
	// of Concurrency. So all together play what one would.
	Shard, Shards int

	History Recorder
	Start   time.Time     // the history's time 0; now when it is zero
	NextID  *atomic.Int64 // the last op's number, shared by the phases of one history

	// Suspect looks at each op of a session as it ends; where it says true, the
	// turns of Recovery are sent, by themselves and one after another, at most
	// MaxRecovery times. nil means: where the op failed or timed out.
	Suspect     func(*history.Op, *openai.Reply) bool
	Recovery    []workload.Turn
	MaxRecovery int

	// HealthEvery asks for a health check that often; 0 for none. Beside each
	// third, Sentinel is sent, unless it has no messages.
	HealthEvery time.Duration
	Sentinel    openai.ChatRequest

	EventLimit  int           // bytes of one server-sent event, or of one body; 0 is openai.DefaultEventLimit
	GiveUpAfter time.Duration // how long every op may fail to reach the server
	Progress    func(Progress)
	Logger      *slog.Logger
	Dial        func(ctx context.Context, network, address string) (net.Conn, error) // nil is a net.Dialer
}

// Progress is where a phase stands.
type Progress struct {
	Phase        history.Phase
	Elapsed      time.Duration // since the phase began
	Sessions     int
	SessionsDone int
	InFlight     int    // requests of sessions that are open
	Ops          Counts // that ended
	Chunks       int64
}

// Counts counts ops by outcome, those of sessions alone.
type Counts struct{ OK, Failed, Cancelled, TimedOut int64 }

// Total is the number of ops.
func (c Counts) Total() int64 { return c.OK + c.Failed + c.Cancelled + c.TimedOut }

// Share is a shard's part of a number of sessions: the parts of all shards add
// up to it.
func Share(all, shard, shards int) int { return (all + shards - 1 - shard) / shards }

// Result is what became of a phase.
type Result struct {
	Progress
	// Stopped says why the phase ended before every session was played;
	// empty when they all were.
	Stopped string
}

// Run plays one phase and returns when all its ops are in the history. It
// returns an error when the options are wrong or the history can't be written.
// A phase that ctx or a dead server ended is no error: see Result.Stopped.
func Run(ctx context.Context, o Options) (Result, error) {
	p, err := newPlayer(ctx, o)
	if err != nil {
		return Result{}, err
	}
	defer p.stop(nil)
	p.event(&history.Event{At: p.now(), Kind: history.Started, Name: string(p.Phase)})

	var ticks, watch sync.WaitGroup
	played, over := make(chan struct{}), make(chan struct{})
	ticks.Go(func() { p.tick(over) })
	watch.Go(func() { p.watchHealth(played) })
	watch.Go(func() { p.sendRecovery(played) })
	switch {
	case o.RequestRate > 0:
		p.openLoop()
	case o.Waves:
		p.inWaves()
	default:
		p.closedLoop()
	}
	close(played)
	watch.Wait() // recovery and sentinels may still be on their way
	close(over)
	ticks.Wait()

	result := Result{Progress: p.progress()}
	if cause := context.Cause(p.ctx); cause != nil {
		result.Stopped = cause.Error()
	}
	p.event(&history.Event{At: p.now(), Kind: history.Ended, Name: string(p.Phase), Text: result.Stopped})
	if err := p.failure.Load(); err != nil {
		return result, *err
	}
	return result, nil
}

// player is a phase being played.
type player struct {
	Options
	target    target
	transport *http.Transport
	ctx       context.Context // of the phase
	stop      context.CancelCauseFunc
	failure   atomic.Pointer[error] // the first
	begun     time.Duration

	slots                           chan struct{} // of the open loop: one for each op in flight
	suspects                        chan struct{}
	inFlight, beside                atomic.Int64 // requests open, of sessions and others
	chunks                          atomic.Int64
	done                            atomic.Int64 // sessions
	ok, failed, cancelled, timedOut atomic.Int64

	reach reach
}

func newPlayer(ctx context.Context, o Options) (*player, error) {
	switch {
	case o.Workload == nil || o.History == nil:
		return nil, errors.New("play: no workload or no history is given")
	case o.Waves && o.RequestRate > 0:
		return nil, errors.New("play: requests come in waves or at a rate, not both")
	case o.Sessions < 0 || o.Concurrency < 0 || o.RequestRate < 0:
		return nil, fmt.Errorf("play: sessions %d, concurrency %d and request rate %g must not be negative", o.Sessions, o.Concurrency, o.RequestRate)
	}
	target, err := newTarget(&o)
	if err != nil {
		return nil, err
	}
	o.Phase = cmp.Or(o.Phase, history.Main)
	o.Timeout = cmp.Or(o.Timeout, DefaultTimeout)
	o.GiveUpAfter = cmp.Or(o.GiveUpAfter, DefaultGiveUpAfter)
	o.MaxRecovery = cmp.Or(o.MaxRecovery, DefaultMaxRecovery)
	o.EventLimit = cmp.Or(o.EventLimit, openai.DefaultEventLimit)
	o.TurnsPerSession = cmp.Or(o.TurnsPerSession, 1)
	o.Shards = cmp.Or(o.Shards, 1)
	if o.Concurrency == 0 {
		o.Concurrency = 1
		if o.RequestRate > 0 {
			o.Concurrency = DefaultMaxInFlight
		}
	}
	if o.Shard < 0 || o.Shard >= o.Shards || o.Shards > 1 && o.Concurrency < o.Shards {
		return nil, fmt.Errorf("play: shard %d of %d at concurrency %d: each shard must play a conversation at a time, and they are numbered from 0", o.Shard, o.Shards, o.Concurrency)
	}
	o.Concurrency = Share(o.Concurrency, o.Shard, o.Shards)
	if o.Start.IsZero() {
		o.Start = time.Now()
	}
	if o.NextID == nil {
		o.NextID = new(atomic.Int64)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if o.Suspect == nil {
		o.Suspect = func(op *history.Op, _ *openai.Reply) bool {
			return op.Outcome == history.Failed || op.Outcome == history.TimedOut
		}
	}
	p := &player{Options: o, target: target, transport: newTransport(&o), slots: make(chan struct{}, o.Concurrency), suspects: make(chan struct{}, 1)}
	p.ctx, p.stop = context.WithCancelCause(ctx)
	p.begun = p.now()
	p.reach.limit = o.GiveUpAfter
	return p, nil
}

func (p *player) now() time.Duration { return time.Since(p.Start) }

// closedLoop plays Concurrency sessions at a time.
func (p *player) closedLoop() {
	var workers sync.WaitGroup
	var next atomic.Int64
	for range min(p.Concurrency, Share(p.Sessions, p.Shard, p.Shards)) {
		workers.Go(func() {
			ready := p.now()
			for p.ctx.Err() == nil {
				i := (int(next.Add(1))-1)*p.Shards + p.Shard
				if i >= p.Sessions {
					return
				}
				ready = p.play(p.FirstSession+i, ready)
			}
		})
	}
	workers.Wait()
}

// openLoop starts sessions at times that are drawn beforehand.
func (p *player) openLoop() {
	var sessions sync.WaitGroup
	started := 0
	for at := range workload.Arrivals(p.Seed, p.RequestRate/p.TurnsPerSession) {
		planned := p.begun + at
		if started == p.Sessions || started%p.Shards == p.Shard && !p.sleepUntil(planned) {
			break
		}
		if number := p.FirstSession + started; started%p.Shards == p.Shard {
			sessions.Go(func() { p.play(number, planned) })
		}
		started++
	}
	sessions.Wait()
}

// inWaves plays Concurrency sessions at a time, in step.
func (p *player) inWaves() {
	ready := p.now()
	for first := 0; first < p.Sessions && p.ctx.Err() == nil; first += p.Concurrency {
		var group []*playing
		for i := range min(p.Concurrency, p.Sessions-first) {
			group = append(group, p.begin(p.FirstSession+first+i))
		}
		for len(group) > 0 {
			var wave sync.WaitGroup
			ends, over := make([]time.Duration, len(group)), make([]bool, len(group))
			for i, s := range group {
				wave.Go(func() { ends[i], over[i] = p.step(s, ready) })
			}
			wave.Wait()
			ready = max(ready, slices.Max(ends))
			left := group[:0]
			for i, s := range group {
				if !over[i] {
					left = append(left, s)
				}
			}
			group = left
		}
	}
}

// playing is a session at work.
type playing struct {
	session workload.Session
	number  int
	turn    int
	reply   *openai.Reply // to the turn before
}

func (p *player) begin(number int) *playing {
	return &playing{session: p.Workload.Session(number, p.Alone), number: number}
}

// play plays one session whose first request is due at ready, or its delay
// later. It returns when the next session may start.
func (p *player) play(number int, ready time.Duration) time.Duration {
	s := p.begin(number)
	for over := false; !over; {
		ready, over = p.step(s, ready)
	}
	return ready
}

// step sends a session's next request, if it has one and the phase goes on, and
// returns when another may be sent.
func (p *player) step(s *playing, ready time.Duration) (next time.Duration, over bool) {
	t, more := s.session.Next(s.reply)
	if !more {
		p.done.Add(1)
		return ready, true
	}
	sending := sending{phase: p.Phase, kind: p.Workload.Kind(), session: s.number, turn: s.turn, planned: ready + t.Delay, ended: p.counted}
	if t.At > 0 {
		sending.planned = p.begun + t.At
	}
	if !p.sleepUntil(sending.planned) || !p.slot() {
		return ready, true
	}
	var end time.Duration
	s.reply, end = p.send(sending, &t)
	s.turn++
	p.freeSlot()
	// A server that can't be reached isn't asked again at once.
	return end + p.reach.pause(), false
}

// slot waits until another op may be in flight.
func (p *player) slot() bool {
	if p.RequestRate == 0 {
		return p.ctx.Err() == nil
	}
	select {
	case p.slots <- struct{}{}:
		return true
	case <-p.ctx.Done():
		return false
	}
}

func (p *player) freeSlot() {
	if p.RequestRate != 0 {
		<-p.slots
	}
}

// sleepUntil says false when the phase ends first.
func (p *player) sleepUntil(at time.Duration) bool {
	d := at - p.now()
	if d <= 0 {
		return p.ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// counted is what follows the end of a session's op.
func (p *player) counted(op *history.Op, reply *openai.Reply) {
	switch op.Outcome {
	case history.OK:
		p.ok.Add(1)
	case history.Failed:
		p.failed.Add(1)
	case history.Cancelled:
		p.cancelled.Add(1)
	case history.TimedOut:
		p.timedOut.Add(1)
	}
	if reason := p.reach.ended(op, p.Timeout); reason != "" {
		p.stop(errors.New(reason))
	}
	if p.Suspect(op, reply) && len(p.Recovery) > 0 && p.ctx.Err() == nil {
		select {
		case p.suspects <- struct{}{}:
		default: // one is waiting already
		}
	}
}

// sendRecovery sends the recovery turns after each suspect op, those found
// meanwhile counted as one.
func (p *player) sendRecovery(played <-chan struct{}) {
	for range p.MaxRecovery {
		select {
		case <-p.suspects:
		case <-p.ctx.Done():
			return
		case <-played:
			select {
			case <-p.suspects: // the last op was one
			default:
				return
			}
		}
		for i := range p.Recovery {
			if !p.sleepUntil(p.now() + p.Recovery[i].Delay) {
				return
			}
			p.send(sending{phase: history.Recovery, kind: "recovery", session: OtherSession, turn: i, planned: p.now()}, &p.Recovery[i])
		}
	}
}

func (p *player) event(e *history.Event) {
	if err := p.History.Event(e); err != nil {
		p.fail(err)
	}
}

// fail ends the phase with an error of our own.
func (p *player) fail(err error) {
	p.failure.CompareAndSwap(nil, &err)
	p.stop(err)
}

func (p *player) progress() Progress {
	return Progress{
		Phase: p.Phase, Elapsed: p.now() - p.begun, Sessions: Share(p.Sessions, p.Shard, p.Shards), SessionsDone: int(p.done.Load()), InFlight: int(p.inFlight.Load()),
		Ops:    Counts{OK: p.ok.Load(), Failed: p.failed.Load(), Cancelled: p.cancelled.Load(), TimedOut: p.timedOut.Load()},
		Chunks: p.chunks.Load(),
	}
}

// reach watches whether the server can be reached at all.
type reach struct {
	limit time.Duration

	mu      sync.Mutex
	row     int           // ops in a row without any answer
	since   time.Duration // end of the first of them
	refused int           // of the row, those that failed rather than timed out
}

// maxPause is the longest that a session waits after an op that got no answer.
const maxPause = time.Second

// ended takes an op's end. It returns why to give up, if that is so: no op has
// had an answer for the limit, or, where they time out, for another timeout.
func (r *reach) ended(op *history.Op, timeout time.Duration) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	answered := op.Status != 0
	switch {
	case answered:
		r.row, r.refused = 0, 0
		return ""
	case op.Outcome == history.Cancelled:
		return ""
	}
	if r.row == 0 {
		r.since = op.LastByte
	}
	r.row++
	limit := max(r.limit, timeout)
	if op.Outcome == history.Failed {
		r.refused++
		limit = r.limit
	}
	if d := op.LastByte - r.since; d >= limit && r.row >= 3 {
		return fmt.Sprintf("no answer from the server to %d ops in a row, over %.1f s; the last: %s", r.row, d.Seconds(), op.Error)
	}
	return ""
}

// pause is how long to wait after an op that failed to reach the server:
// 50 ms, doubled with each one in a row.
func (r *reach) pause() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.refused == 0 {
		return 0
	}
	return min(50*time.Millisecond<<min(r.refused-1, 10), maxPause)
}

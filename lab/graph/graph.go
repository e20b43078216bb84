// Package graph records operations on streams, with events between them, and
// replays them: a small model of CUDA graphs and of the memory that they share.
// Its API may change.
//
// A stream runs its operations in the order they were recorded in. Two streams
// know nothing of each other, but for events: an operation recorded after
// Wait(s, e) on stream s starts when what e stands for is done. Streams are
// simulated: a seeded Scheduler decides which stream's next operation runs, one
// at a time. So a missing event is a real hazard with real wrong numbers, and
// yet one seed gives one run, and no two goroutines touch the same memory.
//
// The intermediate results of captured recordings live in one Arena. Two
// buffers of a recording may have the same memory if everything that uses the
// one is done, by streams and events, before anything uses the other.
// Recordings don't run at the same time, so each may use the whole arena.
package graph

import (
	"math/rand/v2"
	"slices"
)

// Stream is a queue of operations.
type Stream int

// The streams of a recording.
const (
	Main Stream = iota
	Alternate
	streams
)

// Event stands for all that was recorded on a stream before it.
type Event struct{ op int } // the last such operation, -1 if there is none

// Recorder takes down what a step does. The zero value is empty.
type Recorder struct {
	ops     []op
	buffers []*Buffer
	last    [streams]int   // the last operation of each stream, counted from 1
	waits   [streams][]int // what the next operation of each stream waits for
}

// op is a recorded operation.
type op struct {
	name   string
	stream Stream
	run    func()
	after  []int        // operations of other streams that must be done before
	clock  [streams]int // of each stream's operations, how many are done when this one is, at least
}

// Buffer is memory that operations pass results in.
type Buffer struct {
	// Data is set when the recording becomes a Program. Until something is
	// written it holds whatever was there before.
	Data []float32

	name     string
	size     int   // float32s
	offset   int   // in the arena
	uses     []int // operations
	released bool
	end      int // if released: how many operations had been recorded
}

// Buffer asks for memory of so many float32s.
func (r *Recorder) Buffer(name string, size int) *Buffer {
	b := &Buffer{name: name, size: size}
	r.buffers = append(r.buffers, b)
	return b
}

// Launch records an operation and the buffers that it reads or writes; what
// else it touches is the caller's to order.
func (r *Recorder) Launch(s Stream, name string, run func(), uses ...*Buffer) {
	i := len(r.ops)
	o := op{name: name, stream: s, run: run, after: r.waits[s]}
	r.waits[s] = nil
	if r.last[s] > 0 {
		o.clock = r.ops[r.last[s]-1].clock
	}
	for _, before := range o.after {
		for s, n := range r.ops[before].clock {
			o.clock[s] = max(o.clock[s], n)
		}
	}
	o.clock[s]++
	r.ops = append(r.ops, o)
	r.last[s] = i + 1
	for _, b := range uses {
		if !slices.Contains(b.uses, i) {
			b.uses = append(b.uses, i)
		}
	}
}

// Record returns an event for what is recorded on a stream so far.
func (r *Recorder) Record(s Stream) Event { return Event{r.last[s] - 1} }

// Wait makes all later operations of a stream wait for an event.
func (r *Recorder) Wait(s Stream, e Event) {
	if e.op >= 0 {
		r.waits[s] = append(r.waits[s], e.op)
	}
}

// Release gives a buffer's memory back at this point of the recorded order: for
// those who know that no stream still uses it. Nothing else gives memory back
// before all uses are known to be over.
func (r *Recorder) Release(b *Buffer) { b.released, b.end = true, len(r.ops) }

// before reports whether operation a is done before b starts, whatever the
// scheduler decides.
func (r *Recorder) before(a, b int) bool {
	s := r.ops[a].stream
	place := r.ops[a].clock[s] // a is the place-th of its stream
	return a != b && r.ops[b].clock[s] >= place
}

// Program is a recording whose buffers have memory. It may be replayed any
// number of times, by one goroutine at a time.
type Program struct {
	ops     []op
	streams [streams][]int // operations
	next    [streams]int   // of streams
	done    []bool
	heads   []int
	bytes   int
}

func (r *Recorder) program() *Program {
	p := &Program{ops: r.ops, done: make([]bool, len(r.ops))}
	for i, o := range r.ops {
		p.streams[o.stream] = append(p.streams[o.stream], i)
	}
	for _, b := range r.buffers {
		p.bytes += 4 * b.size
	}
	return p
}

// Eager gives each buffer memory of its own.
func (r *Recorder) Eager() *Program {
	for _, b := range r.used() {
		b.offset = 0
		b.Data = make([]float32, b.size)
	}
	return r.program()
}

// Bytes is what the buffers would take if each had memory of its own.
func (p *Program) Bytes() int { return p.bytes }

// Ops is the number of operations.
func (p *Program) Ops() int { return len(p.ops) }

// Replay runs each operation once, in an order that the scheduler draws.
func (p *Program) Replay(s *Scheduler) {
	clear(p.done)
	p.next = [streams]int{}
	for range p.ops {
		p.heads = p.heads[:0]
		for s, ops := range p.streams {
			if p.next[s] < len(ops) && p.ready(ops[p.next[s]]) {
				p.heads = append(p.heads, ops[p.next[s]])
			}
		}
		i := s.choose(p.heads)
		p.ops[i].run()
		p.done[i] = true
		p.next[p.ops[i].stream]++
	}
}

// ready reports whether all that an operation waits for is done. Of the
// operations that aren't done, the first recorded is always ready.
func (p *Program) ready(i int) bool {
	for _, before := range p.ops[i].after {
		if !p.done[before] {
			return false
		}
	}
	return true
}

// Scheduler decides which stream goes on. Its draws depend on the seed and on
// how many were made before. A nil Scheduler keeps the recorded order.
type Scheduler struct {
	jitter float64
	rng    *rand.Rand
}

// NewScheduler returns a scheduler that keeps the recorded order, but for a
// share of its decisions, jitter, from 0 to 1, in which all streams that can go
// on are equally likely.
func NewScheduler(seed uint64, jitter float64) *Scheduler {
	return &Scheduler{jitter, rand.New(rand.NewPCG(seed, 0))}
}

// choose returns one of the operations that can run.
func (s *Scheduler) choose(heads []int) int {
	if len(heads) == 1 || s == nil || s.rng.Float64() >= s.jitter {
		return slices.Min(heads)
	}
	return heads[s.rng.IntN(len(heads))]
}

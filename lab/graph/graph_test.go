package graph

import (
	"fmt"
	"hash/fnv"
	"math"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

// sample is a small random program: what it computes shows in what each
// operation read.
type sample struct {
	sizes []int
	ops   []sampleOp
}

type sampleOp struct {
	stream Stream
	reads  []int // buffers
	write  int
}

func draw(t *rapid.T) sample {
	var p sample
	var written []int
	for range rapid.IntRange(2, 9).Draw(t, "operations") {
		o := sampleOp{stream: Stream(rapid.IntRange(0, int(streams)-1).Draw(t, "stream"))}
		if len(written) > 0 {
			for range rapid.IntRange(0, 3).Draw(t, "reads") {
				// The buffers written last are the likeliest, so that others come to their end.
				last := min(3, len(written))
				o.reads = append(o.reads, written[len(written)-1-rapid.IntRange(0, last-1).Draw(t, "read")])
			}
		}
		if len(o.reads) > 0 && rapid.IntRange(0, 4).Draw(t, "in place") == 0 {
			o.write = o.reads[0]
		} else {
			o.write = len(p.sizes)
			p.sizes = append(p.sizes, rapid.SampledFrom([]int{8, 512, 600, 1000, 2000}).Draw(t, "size"))
			written = append(written, o.write)
		}
		p.ops = append(p.ops, o)
	}
	return p
}

// conflict says in which way j must come after i, if at all.
func (p sample) conflict(i, j int) string {
	a, b := p.ops[i], p.ops[j]
	switch {
	case slices.Contains(b.reads, a.write):
		return "read after write"
	case slices.Contains(a.reads, b.write):
		return "write after read"
	case a.write == b.write:
		return "write after write"
	}
	return ""
}

// record takes the program down with an event for every conflict but the
// dropped one. The log gets what each operation read.
func (p sample) record(log []uint64, dropped [2]int) *Recorder {
	r := &Recorder{}
	var buffers []*Buffer
	for i, size := range p.sizes {
		buffers = append(buffers, r.Buffer(fmt.Sprint(i), size))
	}
	var done []Event
	for j, o := range p.ops {
		for i := range j {
			if p.ops[i].stream != o.stream && p.conflict(i, j) != "" && dropped != [2]int{i, j} {
				r.Wait(o.stream, done[i])
			}
		}
		uses := []*Buffer{buffers[o.write]}
		for _, b := range o.reads {
			uses = append(uses, buffers[b])
		}
		r.Launch(o.stream, fmt.Sprint(j), func() {
			h := fnv.New64a()
			fmt.Fprint(h, j)
			for _, b := range o.reads {
				for _, v := range buffers[b].Data {
					n := math.Float32bits(v)
					h.Write([]byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)})
				}
			}
			log[j] = h.Sum64()
			for i := range buffers[o.write].Data {
				buffers[o.write].Data[i] = float32(log[j]>>(i%40)&0xffff) + float32(i)
			}
		}, uses...)
		done = append(done, r.Record(o.stream))
	}
	return r
}

var noDrop = [2]int{-1, -1}

// orders lists every order that the streams and events allow.
func (p *Program) orders() (all [][]int) {
	var extend func(order []int)
	extend = func(order []int) {
		if len(order) == len(p.ops) {
			all = append(all, slices.Clone(order))
			return
		}
		for s, ops := range p.streams {
			if n := p.next[s]; n < len(ops) && p.ready(ops[n]) {
				p.next[s]++
				p.done[ops[n]] = true
				extend(append(order, ops[n]))
				p.done[ops[n]] = false
				p.next[s]--
			}
		}
	}
	p.next = [streams]int{}
	clear(p.done)
	extend(nil)
	return all
}

// poison makes what was there before recognizable.
func (a *Arena) poison() {
	for i := range a.memory {
		a.memory[i] = -1
	}
}

// Whatever the order, a captured program with all its events computes what it
// computes eagerly.
func TestCapturedEqualsEager(t *testing.T) {
	programs, sharing, interleavings := 0, 0, 0
	rapid.Check(t, func(t *rapid.T) {
		p := draw(t)
		want := make([]uint64, len(p.ops))
		p.record(want, noDrop).Eager().Replay(nil)
		got := make([]uint64, len(p.ops))
		arena, captured := Capture(p.record(got, noDrop))
		programs++
		if arena.Bytes() < captured[0].Bytes() {
			sharing++
		}
		for _, order := range captured[0].orders() {
			arena.poison()
			clear(got)
			for _, i := range order {
				captured[0].ops[i].run()
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("order %v: eager, captured:\n%s", order, diff)
			}
			interleavings++
		}
		seed := rapid.Uint64().Draw(t, "seed")
		arena.poison()
		s := NewScheduler(seed, rapid.Float64Range(0, 1).Draw(t, "jitter"))
		for range 3 {
			clear(got)
			captured[0].Replay(s)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("eager, replayed:\n%s", diff)
			}
		}
	})
	t.Logf("%d programs, %d of them share memory; %d interleavings", programs, sharing, interleavings)
	if sharing < programs/10 || interleavings < 2*programs {
		t.Error("the programs exercise too little")
	}
}

// An event that is needed and missing gives wrong results in some orders, and
// right ones in others.
func TestMissingEvent(t *testing.T) {
	tried := 0
	rapid.Check(t, func(t *rapid.T) {
		p := draw(t)
		want := make([]uint64, len(p.ops))
		p.record(want, noDrop).Eager().Replay(nil)
		for j := range p.ops {
			for i := range j {
				kind := p.conflict(i, j)
				if kind == "" || kind == "write after write" || p.ops[i].stream == p.ops[j].stream {
					continue
				}
				got := make([]uint64, len(p.ops))
				r := p.record(got, [2]int{i, j})
				if r.before(i, j) {
					continue // other events order the two
				}
				tried++
				arena, captured := Capture(r)
				right, wrong := 0, 0
				for _, order := range captured[0].orders() {
					arena.poison()
					clear(got)
					for _, i := range order {
						captured[0].ops[i].run()
					}
					if slices.Equal(want, got) {
						right++
					} else {
						wrong++
					}
					if (slices.Index(order, i) < slices.Index(order, j)) != slices.Equal(want, got) {
						t.Fatalf("%s, %d before %d: wrong in an order that is right, or right in one that is wrong: %v", kind, i, j, order)
					}
				}
				if right == 0 || wrong == 0 {
					t.Fatalf("%s, %d before %d: %d orders are right, %d wrong", kind, i, j, right, wrong)
				}
			}
		}
	})
	if tried == 0 {
		t.Error("no event was needed")
	}
}

// aliased is the incident in small: the alternate stream passes a result from
// one operation to the next while the main one fills another buffer.
func aliased(release bool) (r *Recorder, query, other *Buffer, results func() [2]float32) {
	r = &Recorder{}
	input, query, other, output := r.Buffer("input", 600), r.Buffer("query", 1000), r.Buffer("other", 1000), r.Buffer("output", 600)
	fill := func(b *Buffer, v float32) func() {
		return func() {
			for i := range b.Data {
				b.Data[i] = v
			}
		}
	}
	r.Launch(Main, "input", fill(input, 1), input)
	r.Wait(Alternate, r.Record(Main))
	r.Launch(Alternate, "query", func() { fill(query, input.Data[0]+1)() }, input, query)
	var result [2]float32
	r.Launch(Alternate, "score", func() { result[0] = query.Data[0] }, query)
	if release {
		r.Release(query)
	}
	r.Launch(Main, "other", fill(other, 7), other)
	r.Wait(Main, r.Record(Alternate))
	r.Launch(Main, "output", func() { result[1] = other.Data[0]; fill(output, 8)() }, other, output)
	return r, query, other, func() [2]float32 { return result }
}

func TestRelease(t *testing.T) {
	for _, release := range []bool{false, true} {
		r, query, other, results := aliased(release)
		_, programs := Capture(r)
		if query.Shares(other) != release || other.Shares(query) != release {
			t.Errorf("released %v, shared %v", release, query.Shares(other))
		}
		seen := map[[2]float32]int{}
		s := NewScheduler(1, 1)
		for range 100 {
			programs[0].Replay(s)
			seen[results()]++
		}
		want := map[[2]float32]int{{2, 7}: 100}
		if release {
			// In order; the query overwritten before it is read; the other by the query.
			if len(seen) != 3 || seen[[2]float32{2, 7}] == 0 || seen[[2]float32{7, 7}] == 0 || seen[[2]float32{2, 2}] == 0 {
				t.Errorf("released: %v", seen)
			}
			continue
		}
		if diff := cmp.Diff(want, seen); diff != "" {
			t.Error(diff)
		}
	}
	r, _, _, results := aliased(true)
	eager := r.Eager()
	for seed := range uint64(20) {
		if eager.Replay(NewScheduler(seed, 1)); results() != [2]float32{2, 7} {
			t.Errorf("eager, seed %d: %v", seed, results())
		}
	}
	if _, q, o, _ := aliased(true); q.Shares(o) {
		t.Error("buffers without memory share some")
	}
}

func TestScheduler(t *testing.T) {
	var order []int
	r := &Recorder{}
	for i := range 20 {
		r.Launch(Stream(i%2), "", func() { order = append(order, i) })
	}
	p := r.Eager()
	replay := func(s *Scheduler) []int {
		order = nil
		p.Replay(s)
		return order
	}
	recorded := replay(nil)
	if !slices.IsSorted(recorded) || len(recorded) != 20 {
		t.Error(recorded)
	}
	if got := replay(NewScheduler(1, 0)); !slices.Equal(got, recorded) {
		t.Errorf("no jitter: %v", got)
	}
	one := NewScheduler(1, 1)
	first, second := replay(one), replay(one)
	if slices.Equal(first, second) || slices.IsSorted(first) {
		t.Errorf("twice: %v, %v", first, second)
	}
	again := NewScheduler(1, 1)
	if !slices.Equal(replay(again), first) || !slices.Equal(replay(again), second) {
		t.Error("one seed gives two orders")
	}
	if slices.Equal(replay(NewScheduler(2, 1)), first) {
		t.Error("two seeds give one order")
	}
	overtaken := 0
	rare := NewScheduler(3, 0.02)
	for range 100 {
		if !slices.Equal(replay(rare), recorded) {
			overtaken++
		}
	}
	if overtaken < 5 || overtaken > 40 {
		t.Errorf("with little jitter %d of 100 replays are out of order", overtaken)
	}
}

// A step's buffers are placed as a memory allocator would: small ones apart,
// large ones where others were.
func TestPlace(t *testing.T) {
	r := &Recorder{}
	small, first, second, third := r.Buffer("small", 512), r.Buffer("first", 1000), r.Buffer("second", 600), r.Buffer("third", 600)
	fourth, unused := r.Buffer("fourth", 400), r.Buffer("unused", 5000)
	r.Launch(Main, "a", func() {}, small, first, first)
	r.Launch(Main, "b", func() {}, first, second)
	r.Launch(Main, "c", func() {}, second, third)
	r.Launch(Main, "d", func() {}, third, fourth)
	arena, programs := Capture(r)
	got := map[string]int{}
	for _, b := range r.buffers {
		got[b.name] = b.offset
	}
	want := map[string]int{"small": 0, "fourth": 512, "first": 912, "second": 1920, "third": 912, "unused": 0}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if !first.Shares(third) || first.Shares(second) || second.Shares(third) || small.Shares(fourth) {
		t.Error("the wrong buffers share memory")
	}
	if unused.Data != nil || unused.Shares(first) {
		t.Error("a buffer that nobody uses has memory")
	}
	if arena.Bytes() != 4*(1920+608) || programs[0].Bytes() != 4*(512+1000+600+600+400+5000) || programs[0].Ops() != 4 {
		t.Errorf("%d bytes instead of %d, %d operations", arena.Bytes(), programs[0].Bytes(), programs[0].Ops())
	}
}

// The smallest gap that is large enough is taken.
func TestBestFit(t *testing.T) {
	r := &Recorder{}
	sizes := []int{2000, 600, 1200, 600, 1600, 600}
	var buffers []*Buffer
	for i, size := range sizes {
		b := r.Buffer(fmt.Sprint(i), size)
		buffers = append(buffers, b)
	}
	r.Launch(Main, "all", func() {}, buffers...)
	r.Launch(Main, "keep", func() {}, buffers[1], buffers[3], buffers[5])
	late := r.Buffer("late", 1100)
	r.Launch(Main, "late", func() {}, late, buffers[1], buffers[3], buffers[5])
	Capture(r)
	if late.offset != buffers[2].offset || late.Shares(buffers[0]) || late.Shares(buffers[4]) {
		t.Errorf("it is at %d, of %v", late.offset, buffers)
	}
}

func BenchmarkReplay(b *testing.B) {
	r := &Recorder{}
	for i := range 100 {
		s := Stream(i / 5 % 2)
		if i%10 == 0 {
			r.Wait(s, r.Record(1-s))
		}
		r.Launch(s, "", func() {})
	}
	p, s := r.Eager(), NewScheduler(1, 0.1)
	b.ReportAllocs()
	for b.Loop() {
		p.Replay(s)
	}
}

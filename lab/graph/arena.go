package graph

import (
	"cmp"
	"slices"
)

const (
	// smallFloats is the largest buffer that gets a place of its own: so little
	// isn't worth sharing. (CUDA's caching allocator in PyTorch keeps blocks of
	// up to 1 MiB apart from the others in the same way.)
	smallFloats = 512
	unit        = 16 // places are multiples of so many float32s, a cache line
)

// Arena is the memory that captured recordings share.
type Arena struct{ memory []float32 }

// Capture places the buffers of all recordings in one arena.
func Capture(recorders ...*Recorder) (*Arena, []*Program) {
	size := 0
	for _, r := range recorders {
		size = max(size, r.place())
	}
	a := &Arena{make([]float32, size)}
	var programs []*Program
	for _, r := range recorders {
		for _, b := range r.used() {
			b.Data = a.memory[b.offset:][:b.size:b.size]
		}
		programs = append(programs, r.program())
	}
	return a, programs
}

// Bytes is the arena's size.
func (a *Arena) Bytes() int { return 4 * len(a.memory) }

// place chooses the buffers' offsets, in the order of their first use, and
// returns the size of the arena that they need. A buffer goes into the smallest
// gap that it fits into, the lowest of equals, between buffers whose memory it
// may not have.
func (r *Recorder) place() (size int) {
	var large []*Buffer
	for _, b := range r.used() {
		if b.size > smallFloats {
			large = append(large, b)
			continue
		}
		b.offset = size
		size += roundUp(b.size)
	}
	start := size
	slices.SortStableFunc(large, func(a, b *Buffer) int { return cmp.Compare(a.uses[0], b.uses[0]) })
	for i, b := range large {
		var taken []*Buffer
		for _, other := range large[:i] {
			if !r.over(other, b) {
				taken = append(taken, other)
			}
		}
		slices.SortFunc(taken, func(a, b *Buffer) int { return cmp.Compare(a.offset, b.offset) })
		best, at := 0, start // at is where the gap at hand begins
		for _, other := range taken {
			if gap := other.offset - at; gap >= roundUp(b.size) && (best == 0 || gap < best) {
				best, b.offset = gap, at
			}
			at = max(at, other.offset+roundUp(other.size))
		}
		if best == 0 {
			b.offset = at
		}
		size = max(size, b.offset+roundUp(b.size))
	}
	return size
}

// used lists the buffers that some operation uses.
func (r *Recorder) used() []*Buffer {
	return slices.DeleteFunc(slices.Clone(r.buffers), func(b *Buffer) bool { return len(b.uses) == 0 })
}

// over reports whether b may have the memory of a, which was used before it.
func (r *Recorder) over(a, b *Buffer) bool {
	if a.released {
		return a.end <= b.uses[0]
	}
	for _, i := range a.uses {
		for _, j := range b.uses {
			if !r.before(i, j) {
				return false
			}
		}
	}
	return true
}

// Shares reports whether two buffers of a recording have memory in common.
func (b *Buffer) Shares(other *Buffer) bool {
	return b.Data != nil && other.Data != nil &&
		b.offset < other.offset+other.size && other.offset < b.offset+b.size
}

func roundUp(n int) int { return (n + unit - 1) / unit * unit }

package model

import "fmt"

// Tensor parallelism: the heads of the attention and the columns of the MLP are
// divided among ranks, each of which has all else, and a cache of its own. What
// a rank adds to x in output and in down is a part of a sum: AllReduce makes it
// whole.

// AllReduce sums x over all ranks, in the ranks' order. Every rank calls it
// once in a forward pass for each part of the pass, which is named by the
// layer, the half of the layer and the first row. It panics if the others don't
// come.
type AllReduce func(part ReducePart, x []float32)

// ReducePart names what is summed.
type ReducePart struct {
	Layer int
	Down  bool // of the MLP's output, else of the attention's
	Row   int
}

// Shard returns the part of the model that is computed by one of so many ranks,
// 1, 2 or 4. Its Scratch and its Decoder need an AllReduce.
func (m *Model) Shard(rank, ranks int) (*Model, error) {
	if ranks < 1 || Heads%ranks != 0 || rank < 0 || rank >= ranks {
		return nil, fmt.Errorf("rank %d of %d: %d heads can't be divided so", rank, ranks, Heads)
	}
	shard := *m
	shard.heads = Heads / ranks
	hidden := HiddenDim / ranks
	first := rank * shard.heads
	for i := range shard.layers {
		l := &shard.layers[i]
		l.query = l.query.rows(first*QueryDim, shard.heads*QueryDim)
		l.keyUp, l.valueUp = [Heads]matrix{}, [Heads]matrix{}
		copy(l.keyUp[:], m.layers[i].keyUp[first:first+shard.heads])
		copy(l.valueUp[:], m.layers[i].valueUp[first:first+shard.heads])
		l.output = l.output.columns(first*PlainDim, shard.heads*PlainDim)
		l.gate, l.up = l.gate.rows(rank*hidden, hidden), l.up.rows(rank*hidden, hidden)
		l.down = l.down.columns(rank*hidden, hidden)
	}
	return &shard, nil
}

// rows returns n outputs from one on, both whole panels.
func (w *matrix) rows(from, n int) matrix {
	return matrix{in: w.in, out: n, packed: w.packed[from*w.in : (from+n)*w.in]}
}

// columns returns what n inputs from one on add to all outputs.
func (w *matrix) columns(from, n int) matrix {
	c := matrix{in: n, out: w.out}
	for p := 0; p < len(w.packed); p += panel * w.in {
		c.packed = append(c.packed, w.packed[p+from*panel:p+(from+n)*panel]...)
	}
	return c
}

// reduce makes rows of what is added to x whole.
func (p *pass) reduce(l int, down bool, lo, hi int) {
	if p.s.AllReduce != nil {
		p.s.AllReduce(ReducePart{l, down, lo}, p.s.buffers[bufDelta][lo*Width:hi*Width])
	}
}

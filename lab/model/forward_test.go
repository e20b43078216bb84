package model

import (
	"bytes"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/lab/graph"
)

// newCache returns a cache of which every byte is set to what reads as numbers
// far off: whoever reads a slot that wasn't written gets other logits.
func newCache(pages, pageSize int, d IndexDType) *Cache {
	c := &Cache{PageSize: pageSize, IndexDType: d}
	for l := range Layers {
		c.Latent[l] = slices.Repeat([]float32{1e4}, pages*pageSize*RowDim)
		c.Index[l] = slices.Repeat([]byte{0x47}, pages*d.PageBytes(pageSize))
	}
	return c
}

// sequence is a prompt on its way through a cache.
type sequence struct {
	tokens []int32
	table  []int32
	done   int // tokens that are in the cache
	logits []float32
}

// rows returns the next n tokens as rows.
func (s *sequence) rows(n, pageSize, table int) []Row {
	at := func(p int) int32 {
		if p < 0 {
			return 0
		}
		return s.tokens[p]
	}
	var rows []Row
	for p := s.done; p < s.done+n; p++ {
		slot := int(s.table[p/pageSize])*pageSize + p%pageSize
		rows = append(rows, Row{Token: at(p), Prev1: at(p - 1), Prev2: at(p - 2), Position: int32(p), Slot: int32(slot), Table: int32(table)})
	}
	return rows
}

// alone returns the logits of all positions of one sequence, in one chunk.
func alone(tb testing.TB, m *Model, tokens []int32, d IndexDType, dense bool) []float32 {
	tb.Helper()
	s := &sequence{tokens: tokens}
	for p := range len(tokens)/64 + 1 {
		s.table = append(s.table, int32(p))
	}
	b := &Batch{Rows: s.rows(len(tokens), 64, 0), Tables: [][]int32{s.table}}
	for i := range tokens {
		b.Logits = append(b.Logits, int32(i))
	}
	scratch := m.NewScratch(len(tokens))
	scratch.Dense = dense
	logits, err := m.Forward(b, newCache(len(s.table), 64, d), scratch)
	if err != nil {
		tb.Fatal(err)
	}
	return logits
}

// The main test: a row's logits are the same bits however the work is cut up.
func TestSameBitsInAnyBatch(t *testing.T) {
	const vocab = 50
	m := testModel(t, vocab)
	rng := rand.New(rand.NewPCG(11, 12))
	var prompts [][]int32
	for _, n := range []int{1, 5, 64, 65, 130, 200} {
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = int32(rng.IntN(vocab))
		}
		prompts = append(prompts, tokens)
	}
	want := map[IndexDType][][]float32{}
	for _, d := range []IndexDType{FP8, BF16, F32} {
		for _, tokens := range prompts {
			want[d] = append(want[d], slices.Clone(alone(t, m, tokens, d, false)))
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		pageSize := rapid.SampledFrom([]int{16, 32, 48, 64, 128}).Draw(t, "page size")
		d := rapid.SampledFrom([]IndexDType{FP8, BF16, F32}).Draw(t, "dtype")
		workers := rapid.IntRange(0, 4).Draw(t, "workers")
		chunk := rapid.SampledFrom([]int{1, 7, 32, 100, 200}).Draw(t, "largest chunk")
		seed := rapid.Uint64().Draw(t, "seed")
		rng := rand.New(rand.NewPCG(seed, 0))

		pages := 4*(200/pageSize+1) + 10
		c, free := newCache(pages, pageSize, d), rng.Perm(pages-1)
		var live []*sequence
		which := map[*sequence]int{}
		for range rapid.IntRange(1, 4).Draw(t, "sequences") {
			i := rng.IntN(len(prompts))
			s := &sequence{tokens: prompts[i]}
			for range (len(s.tokens)-1)/pageSize + 1 {
				s.table = append(s.table, int32(free[0])+1)
				free = free[1:]
			}
			live, which[s] = append(live, s), i
		}
		scratch := m.NewScratch(4*chunk + 2)
		scratch.Workers = workers
		for len(live) > 0 {
			b := &Batch{}
			var owners []*sequence
			for _, s := range live {
				if rng.IntN(3) == 0 {
					continue
				}
				n := min(1+rng.IntN(chunk), len(s.tokens)-s.done)
				b.Rows = append(b.Rows, s.rows(n, pageSize, len(b.Tables))...)
				b.Tables = append(b.Tables, s.table)
				s.done += n
				for range n {
					owners = append(owners, s)
				}
			}
			for range rng.IntN(3) { // padding
				b.Rows = append(b.Rows, Row{Table: int32(len(b.Tables))})
				b.Tables = append(b.Tables, []int32{0})
			}
			for i := range owners {
				b.Logits = append(b.Logits, int32(i))
			}
			logits, err := m.Forward(b, c, scratch)
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range owners {
				s.logits = append(s.logits, logits[i*vocab:(i+1)*vocab]...)
			}
			live = slices.DeleteFunc(live, func(s *sequence) bool { return s.done == len(s.tokens) })
		}
		for s, i := range which {
			for j, v := range want[d][i] {
				if math.Float32bits(v) != math.Float32bits(s.logits[j]) {
					t.Fatalf("prompt %d, position %d: logit %d is %x, alone it is %x", i, j/vocab, j%vocab, s.logits[j], v)
				}
			}
		}
	})
}

// Without rounding of the index keys the first 64 rows don't depend on the
// indexer at all, nor with it.
func TestDenseAndSparseAgreeUpToTopK(t *testing.T) {
	const vocab = 50
	m := testModel(t, vocab)
	rng := rand.New(rand.NewPCG(13, 14))
	tokens := make([]int32, 100)
	for i := range tokens {
		tokens[i] = int32(rng.IntN(vocab))
	}
	dense := slices.Clone(alone(t, m, tokens, F32, true))
	for _, d := range []IndexDType{FP8, BF16, F32} {
		sparse := alone(t, m, tokens, d, false)
		sameBits(t, d.String(), sparse[:TopK*vocab], dense[:TopK*vocab])
		if slices.Equal(sparse[TopK*vocab:], dense[TopK*vocab:]) {
			t.Errorf("%v: sparse attention reads all of %d tokens", d, len(tokens))
		}
	}
}

// launches is the list of steps that a pass is made of.
type launches []launch

type launch struct {
	step
	layer int
}

func (o *launches) launch(_ graph.Stream, l int, steps ...step) {
	for _, s := range steps {
		*o = append(*o, launch{s, l})
	}
}
func (*launches) join(_, _ graph.Stream) {}
func (*launches) done(buffer)            {}

// live reports whether what a buffer holds before a launch is still read.
func (o launches) live(b buffer, at int) bool {
	for _, l := range o[at:] {
		if slices.Contains(l.reads, b) {
			return true
		}
		if slices.Contains(l.writes, b) {
			return false
		}
	}
	return false
}

// What a step declares is what it uses: it writes no other buffer, and a buffer
// that is no longer read, or is about to be written, may hold anything. So
// buffers may share memory by these declarations.
func TestStepsDeclareTheirBuffers(t *testing.T) {
	const vocab, rows = 50, TopK + 6
	m := testModel(t, vocab)
	rng := rand.New(rand.NewPCG(15, 16))
	s := &sequence{tokens: make([]int32, rows), table: []int32{0, 1}}
	for i := range s.tokens {
		s.tokens[i] = int32(rng.IntN(vocab))
	}
	batch := &Batch{Rows: s.rows(rows, 64, 0), Tables: [][]int32{s.table}}
	for i := range rows {
		batch.Logits = append(batch.Logits, int32(i))
	}
	nothing := slices.Repeat([]float32{float32(math.NaN())}, rows*slices.Max(width[:]))
	for _, test := range []struct {
		name  string
		dtype IndexDType
		list  func(o *launches)
	}{
		{"forward", FP8, func(o *launches) {
			o.launch(graph.Main, 0, stepEmbed)
			for l := range Layers {
				o.launch(graph.Main, l, projection...)
				o.launch(graph.Main, l, fusedStorage...)
				o.launch(graph.Main, l, attention...)
			}
			o.launch(graph.Main, 0, stepLogits)
		}},
		{"decode fp8", FP8, func(o *launches) { decode(o, FP8, DecodeOptions{}) }},
		{"decode bf16", BF16, func(o *launches) { decode(o, BF16, DecodeOptions{}) }},
		{"decode scatter", BF16, func(o *launches) { decode(o, BF16, DecodeOptions{Scatter: true}) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			want := slices.Clone(alone(t, m, s.tokens, test.dtype, false))
			var order launches
			test.list(&order)
			p := &pass{m: m, b: batch, c: newCache(2, 64, test.dtype), s: m.NewScratch(rows)}
			for i, l := range order {
				for b := range bufferCount {
					if order.live(b, i) {
						continue
					}
					copy(p.s.buffers[b], nothing)
					if b == bufSelected {
						clear(p.s.selected)
						clear(p.s.count)
					}
					if b == bufIndexPlace {
						clear(p.s.places)
					}
				}
				before := contents(p)
				l.run(p, l.layer, new(worker), 0, rows)
				after := contents(p)
				for b := range bufferCount {
					if declared, same := slices.Contains(l.writes, b), bytes.Equal(before[b], after[b]); declared == same {
						t.Errorf("layer %d, %s: buffer %d was written: %v, declared: %v", l.layer, l.name, b, !same, declared)
					}
				}
			}
			sameBits(t, "logits", p.s.logits, want)
		})
	}
}

// contents is a copy of all that steps pass to others.
func contents(p *pass) (all [bufferCount][]byte) {
	for b, values := range p.s.buffers {
		all[b] = bytesOf(values)
	}
	for l := range Layers {
		all[bufCache] = slices.Concat(all[bufCache], bytesOf(p.c.Latent[l]), p.c.Index[l])
	}
	all[bufSelected] = slices.Concat(bytesOf(p.s.selected), bytesOf(p.s.count))
	all[bufIndexPlace] = bytesOf(p.s.places)
	return all
}

// bytesOf copies values of four bytes: quicker than one by one.
func bytesOf[T float32 | int32](values []T) []byte {
	if len(values) == 0 {
		return nil
	}
	return bytes.Clone(unsafe.Slice((*byte)(unsafe.Pointer(&values[0])), 4*len(values)))
}

// A cache may hold anything when it is broken on purpose. The logits are then
// wrong or not numbers, but the pass ends, and ends alike each time.
func TestBrokenCache(t *testing.T) {
	const vocab, n = 50, 200
	m := testModel(t, vocab)
	rng := rand.New(rand.NewPCG(17, 18))
	s := &sequence{tokens: make([]int32, n), table: []int32{3, 1, 2, 0}}
	for i := range s.tokens {
		s.tokens[i] = int32(rng.IntN(vocab))
	}
	for _, d := range []IndexDType{FP8, BF16, F32} {
		for trial := range 8 {
			c, rng := newCache(4, 64, d), rand.New(rand.NewPCG(19, uint64(trial)))
			for l := range Layers {
				for i := range c.Index[l] {
					c.Index[l][i] = byte(rng.Uint32())
				}
				for i := range c.Latent[l] {
					if rng.IntN(100) == 0 {
						c.Latent[l][i] = math.Float32frombits(rng.Uint32())
					}
				}
			}
			s.done = n - 20 // the tokens before were never stored
			b := &Batch{Rows: s.rows(20, 64, 0), Tables: [][]int32{s.table}, Logits: []int32{0, 19}}
			var got [2][]float32
			for i := range got {
				copyOf := *c
				for l := range Layers {
					copyOf.Latent[l], copyOf.Index[l] = slices.Clone(c.Latent[l]), slices.Clone(c.Index[l])
				}
				scratch := m.NewScratch(20)
				scratch.Workers = 1 + i
				logits, err := m.Forward(b, &copyOf, scratch)
				if err != nil {
					t.Fatal(err)
				}
				got[i] = logits
			}
			sameBits(t, d.String(), got[0], got[1])
		}
	}
}

// A key that is lost or that belongs to another token changes the logits: the
// lab's faults have an effect.
func TestIndexKeysMatter(t *testing.T) {
	const vocab, n = 50, 300
	m := testModel(t, vocab)
	rng := rand.New(rand.NewPCG(21, 22))
	s := &sequence{tokens: make([]int32, n), table: []int32{0, 1, 2, 3, 4}}
	for i := range s.tokens {
		s.tokens[i] = int32(rng.IntN(vocab))
	}
	for _, d := range []IndexDType{FP8, BF16} {
		c, scratch := newCache(5, 64, d), m.NewScratch(n)
		s.done = 0
		if _, err := m.Forward(&Batch{Rows: s.rows(n-1, 64, 0), Tables: [][]int32{s.table}}, c, scratch); err != nil {
			t.Fatal(err)
		}
		s.done = n - 1
		last := func() []float32 {
			logits, err := m.Forward(&Batch{Rows: s.rows(1, 64, 0), Tables: [][]int32{s.table}, Logits: []int32{0}}, c, scratch)
			if err != nil {
				t.Fatal(err)
			}
			return slices.Clone(logits)
		}
		want := last()
		sameBits(t, "the same again", last(), want)
		clear(c.Index[2][d.PageBytes(64) : 2*d.PageBytes(64)])
		if slices.Equal(last(), want) {
			t.Errorf("%v: a page of zeros as index keys changes nothing", d)
		}
	}
}

func TestForwardErrors(t *testing.T) {
	m := testModel(t, 50)
	row := Row{Token: 1, Position: 70, Slot: 6}
	for _, test := range []struct {
		name, want string
		edit       func(b *Batch, c *Cache)
	}{
		{"token", "row 0: tokens 50, 0, 0", func(b *Batch, _ *Cache) { b.Rows[0].Token = 50 }},
		{"negative token", "row 0: tokens 1, -1, 0", func(b *Batch, _ *Cache) { b.Rows[0].Prev1 = -1 }},
		{"older token", "row 0: tokens 1, 0, 99", func(b *Batch, _ *Cache) { b.Rows[0].Prev2 = 99 }},
		{"position", "position 1024", func(b *Batch, _ *Cache) { b.Rows[0].Position = MaxContext }},
		{"negative position", "position -1", func(b *Batch, _ *Cache) { b.Rows[0].Position = -1 }},
		{"slot", "slot 128, the cache has 128", func(b *Batch, _ *Cache) { b.Rows[0].Slot = 128 }},
		{"negative slot", "slot -1", func(b *Batch, _ *Cache) { b.Rows[0].Slot = -1 }},
		{"table", "page table 1, the batch has 1", func(b *Batch, _ *Cache) { b.Rows[0].Table = 1 }},
		{"negative table", "page table -1", func(b *Batch, _ *Cache) { b.Rows[0].Table = -1 }},
		{"short table", "has 1 pages, position 70 needs 2", func(b *Batch, _ *Cache) { b.Tables[0] = b.Tables[0][:1] }},
		{"page", "entry 1 of its page table is page 2", func(b *Batch, _ *Cache) { b.Tables[0][1] = 2 }},
		{"negative page", "is page -1", func(b *Batch, _ *Cache) { b.Tables[0][0] = -1 }},
		{"logits", "logits of row 1, the batch has 1", func(b *Batch, _ *Cache) { b.Logits[0] = 1 }},
		{"too many rows", "3 rows and 1 logits, scratch has room for 2", func(b *Batch, _ *Cache) { b.Rows = append(b.Rows, row, row) }},
		{"too many logits", "1 rows and 3 logits", func(b *Batch, _ *Cache) { b.Logits = []int32{0, 0, 0} }},
		{"page size", "page size is 24", func(_ *Batch, c *Cache) { c.PageSize = 24 }},
		{"no page size", "page size is 0", func(_ *Batch, c *Cache) { c.PageSize = 0 }},
		{"dtype", "IndexDType(3)", func(_ *Batch, c *Cache) { c.IndexDType = 3 }},
		{"layer without memory", "the cache has 0", func(_ *Batch, c *Cache) { c.Index[2] = nil }},
	} {
		t.Run(test.name, func(t *testing.T) {
			b := &Batch{Rows: []Row{row}, Tables: [][]int32{{1, 0}}, Logits: []int32{0}}
			c, s := newCache(2, 64, FP8), m.NewScratch(2)
			if _, err := m.Forward(b, c, s); err != nil {
				t.Fatal(err)
			}
			untouched := newCache(2, 64, FP8)
			c.Latent = untouched.Latent
			before := slices.Clone(c.Latent[0])
			test.edit(b, c)
			if _, err := m.Forward(b, c, s); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want one with %q", err, test.want)
			}
			if !slices.Equal(c.Latent[0], before) {
				t.Error("the cache was written")
			}
		})
	}
	logits, err := m.Forward(&Batch{}, newCache(1, 64, FP8), m.NewScratch(1))
	if err != nil || len(logits) != 0 {
		t.Errorf("no rows: %v, %v", logits, err)
	}
}

// Forward's allocations don't grow with the batch.
func TestForwardAllocations(t *testing.T) {
	const vocab = 50
	m := testModel(t, vocab)
	c, s := newCache(3, 64, FP8), m.NewScratch(150)
	allocations := func(n int) float64 {
		q := &sequence{tokens: make([]int32, n), table: []int32{0, 1, 2}}
		b := &Batch{Rows: q.rows(n, 64, 0), Tables: [][]int32{q.table}, Logits: []int32{0}}
		return testing.AllocsPerRun(5, func() {
			if _, err := m.Forward(b, c, s); err != nil {
				t.Fatal(err)
			}
		})
	}
	if few, many := allocations(1), allocations(150); few != many || many > 40 {
		t.Errorf("%g allocations for 1 row, %g for 150; want the same, at most 40", few, many)
	}
}

// TestForwardWaits: entries that come just before their layer is waited for
// are there in time.
func TestForwardWaits(t *testing.T) {
	m, d := testModel(t, 50), BF16
	tokens := make([]int32, 100)
	for i := range tokens {
		tokens[i] = int32(i * 7 % 50)
	}
	run := func(c *Cache, s *sequence, n int) []float32 {
		b := &Batch{Rows: s.rows(n, 64, 0), Tables: [][]int32{s.table}, Logits: []int32{int32(n - 1)}}
		s.done += n
		logits, err := m.Forward(b, c, m.NewScratch(n))
		if err != nil {
			t.Fatal(err)
		}
		return slices.Clone(logits)
	}
	first := &sequence{tokens: tokens, table: []int32{0, 1}}
	full := newCache(2, 64, d)
	run(full, first, 64)
	want := run(full, first, 36)

	late := newCache(2, 64, d)
	var waited []int
	late.Wait = func(l int) {
		waited = append(waited, l)
		copy(late.Latent[l][:64*RowDim], full.Latent[l])
		copy(late.Index[l][:d.PageBytes(64)], full.Index[l])
	}
	got := run(late, &sequence{tokens: tokens, table: []int32{0, 1}, done: 64}, 36)
	if !slices.Equal(got, want) || !slices.Equal(waited, []int{0, 1, 2, 3}) {
		t.Errorf("equal logits: %t, waited for layers %v", slices.Equal(got, want), waited)
	}
}

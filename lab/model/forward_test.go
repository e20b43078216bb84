package model

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// newCache returns a cache of which every byte is set to what reads as numbers
// far off: whoever reads a slot that wasn't written gets other logits.
func newCache(pages, pageSize int, d IndexDType) *Cache {
	c := &Cache{PageSize: pageSize, IndexDType: d}
	for l := range Layers {
		c.Latent[l] = make([]float32, pages*pageSize*RowDim)
		for i := range c.Latent[l] {
			c.Latent[l][i] = 1e4
		}
		c.Index[l] = make([]byte, pages*d.PageBytes(pageSize))
		for i := range c.Index[l] {
			c.Index[l][i] = 0x47
		}
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
	for _, n := range []int{1, 5, 63, 64, 65, 130, 200, 333} {
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
		chunk := rapid.SampledFrom([]int{1, 7, 32, 100, 400}).Draw(t, "largest chunk")
		seed := rapid.Uint64().Draw(t, "seed")
		rng := rand.New(rand.NewPCG(seed, 0))

		pages := 6*(333/pageSize+1) + 10
		c, free := newCache(pages, pageSize, d), rng.Perm(pages-1)
		var live []*sequence
		which := map[*sequence]int{}
		for range rapid.IntRange(1, 6).Draw(t, "sequences") {
			i := rng.IntN(len(prompts))
			s := &sequence{tokens: prompts[i]}
			for range (len(s.tokens)-1)/pageSize + 1 {
				s.table = append(s.table, int32(free[0])+1)
				free = free[1:]
			}
			live, which[s] = append(live, s), i
		}
		scratch := m.NewScratch(6*chunk + 2)
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

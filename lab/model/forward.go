package model

import (
	"fmt"
	"math"
	"runtime/debug"
	"sync"
	"sync/atomic"
)

// pass is one forward pass.
type pass struct {
	m *Model
	b *Batch
	c *Cache
	s *Scratch
}

// step is one operation of the forward pass: it computes rows lo to hi of the
// buffers it writes from those it reads.
type step struct {
	name   string
	reads  []buffer
	writes []buffer
	run    func(p *pass, l int, w *worker, lo, hi int)
}

// The steps. All rows must be stored before a row attends, which may read the
// entries of others in the batch. Nothing else connects rows.
var (
	stepEmbed         = step{"embed", nil, []buffer{bufResidual}, (*pass).embed}
	stepAttentionNorm = step{"attention_norm", []buffer{bufResidual}, []buffer{bufNormed}, (*pass).attentionNorm}
	stepQuery         = step{"query", []buffer{bufNormed}, []buffer{bufQuery}, (*pass).query}
	stepLatent        = step{"latent", []buffer{bufNormed}, []buffer{bufLatent}, (*pass).latent}
	stepStoreLatent   = step{"store_latent", []buffer{bufLatent}, []buffer{bufCache}, (*pass).storeLatent}
	stepLatentQuery   = step{"latent_query", []buffer{bufQuery}, []buffer{bufLatentQuery}, (*pass).latentQuery}

	stepIndexKey    = step{"index_key", []buffer{bufNormed}, []buffer{bufIndexKey}, (*pass).indexKey}
	stepIndexQuery  = step{"index_query", []buffer{bufNormed}, []buffer{bufIndexQuery}, (*pass).indexQuery}
	stepIndexWeight = step{"index_weight", []buffer{bufNormed}, []buffer{bufIndexWeight}, (*pass).indexWeight}
	stepIndexScore  = step{"index_score", []buffer{bufIndexQuery, bufIndexWeight, bufCache}, []buffer{bufScore}, (*pass).indexScore}
	stepTopK        = step{"top_k", []buffer{bufScore}, []buffer{bufScore, bufSelected}, (*pass).topK}

	// bf16's reader in decode steps works on a staged query and staged keys.
	stepIndexStage       = step{"index_stage", []buffer{bufNormed}, []buffer{bufIndexStage}, (*pass).indexStage}
	stepIndexScoreStaged = step{"index_score_staged", []buffer{bufIndexStage, bufIndexWeight, bufCache}, []buffer{bufIndexStage, bufScore}, (*pass).indexScoreStaged}

	// Index keys are normed, rotated and stored by one step, or by three.
	stepStoreIndexFused   = step{"store_index_fused", []buffer{bufIndexKey}, []buffer{bufIndexKey, bufCache}, (*pass).storeIndexFused}
	stepIndexKeyNorm      = step{"index_key_norm", []buffer{bufIndexKey}, []buffer{bufIndexKey}, (*pass).indexKeyNorm}
	stepLocateIndex       = step{"locate_index", nil, []buffer{bufIndexPlace}, (*pass).locateIndex}
	stepStoreIndexScatter = step{"set_index_fused", []buffer{bufIndexKey, bufIndexPlace}, []buffer{bufCache}, (*pass).storeIndexScatter}

	stepAttend       = step{"attend", []buffer{bufLatentQuery, bufSelected, bufCache}, []buffer{bufAttended}, (*pass).attend}
	stepValue        = step{"value", []buffer{bufAttended}, []buffer{bufValue}, (*pass).value}
	stepOutput       = step{"output", []buffer{bufValue}, []buffer{bufDelta}, (*pass).output}
	stepAttentionAdd = step{"attention_add", []buffer{bufResidual, bufDelta}, []buffer{bufResidual}, (*pass).add}
	stepMlpNorm      = step{"mlp_norm", []buffer{bufResidual}, []buffer{bufNormed}, (*pass).mlpNorm}
	stepGate         = step{"gate", []buffer{bufNormed}, []buffer{bufGate}, (*pass).gate}
	stepUp           = step{"up", []buffer{bufNormed}, []buffer{bufUp}, (*pass).up}
	stepSilu         = step{"silu", []buffer{bufGate, bufUp}, []buffer{bufGate}, (*pass).silu}
	stepDown         = step{"down", []buffer{bufGate}, []buffer{bufDelta}, (*pass).down}
	stepMlpAdd       = step{"mlp_add", []buffer{bufResidual, bufDelta}, []buffer{bufResidual}, (*pass).add}
	stepLogits       = step{"logits", []buffer{bufResidual}, []buffer{bufNormed}, (*pass).logits}
)

// A layer's steps: before the entries are stored, storing them, after that.
var (
	projection     = []step{stepAttentionNorm, stepQuery, stepLatent, stepIndexQuery, stepIndexKey, stepIndexWeight}
	fusedStorage   = []step{stepStoreLatent, stepStoreIndexFused}
	scatterStorage = []step{stepStoreLatent, stepIndexKeyNorm, stepLocateIndex, stepStoreIndexScatter}
	attention      = []step{
		stepLatentQuery, stepIndexScore, stepTopK, stepAttend, stepValue, stepOutput, stepAttentionAdd,
		stepMlpNorm, stepGate, stepUp, stepSilu, stepDown, stepMlpAdd,
	}
)

// storage is how a layer's entries are stored.
func (p *pass) storage() []step {
	if p.scatters() {
		return scatterStorage
	}
	return fusedStorage
}

// scatters reports whether index keys go through the scatter store, which
// exists for bf16 only.
func (p *pass) scatters() bool { return p.s.Scatter && p.c.IndexDType == BF16 }

// Forward writes the cache entries of all rows, in every layer, and returns the
// logits of the rows named by b.Logits, in that order: [len(b.Logits), Vocab],
// row-major, valid until the next Forward with s. An error (a token, position,
// page or slot out of range, more rows than s has) comes before any write.
func (m *Model) Forward(b *Batch, c *Cache, s *Scratch) ([]float32, error) {
	p := &pass{m: m, b: b, c: c, s: s}
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("forward: %w", err)
	}
	s.start()
	rows := len(b.Rows)
	p.share(rows, func(w *worker, lo, hi int) {
		p.do([]step{stepEmbed}, 0, w, lo, hi)
		p.do(projection, 0, w, lo, hi)
	})
	for l := range Layers {
		if c.Wait != nil {
			c.Wait(l)
		}
		// One goroutine stores, for padding rows share slot 0.
		p.do(p.storage(), l, s.workers[0], 0, rows)
		p.share(rows, func(w *worker, lo, hi int) {
			p.do(attention, l, w, lo, hi)
			if l+1 < Layers {
				p.do(projection, l+1, w, lo, hi)
			}
		})
	}
	p.share(len(b.Logits), func(w *worker, lo, hi int) { p.logits(0, w, lo, hi) })
	return s.logits[:len(b.Logits)*m.Vocab], nil
}

// check returns an error for what would be read or written out of range.
func (p *pass) check() error {
	c, rows := p.c, p.b.Rows
	if c.PageSize <= 0 || c.PageSize%panel != 0 {
		return fmt.Errorf("the page size is %d, want a multiple of %d", c.PageSize, panel)
	}
	if c.IndexDType > F32 {
		return fmt.Errorf("unknown %v", c.IndexDType)
	}
	pages := math.MaxInt
	for l := range Layers {
		pages = min(pages, len(c.Latent[l])/(c.PageSize*RowDim), len(c.Index[l])/c.IndexDType.PageBytes(c.PageSize))
	}
	if len(rows) > p.s.rows || len(p.b.Logits) > p.s.rows {
		return fmt.Errorf("%d rows and %d logits, scratch has room for %d", len(rows), len(p.b.Logits), p.s.rows)
	}
	for i, r := range rows {
		switch {
		case !p.m.has(r.Token) || !p.m.has(r.Prev1) || !p.m.has(r.Prev2):
			return fmt.Errorf("row %d: tokens %d, %d, %d, the vocabulary has %d", i, r.Token, r.Prev1, r.Prev2, p.m.Vocab)
		case r.Position < 0 || r.Position >= MaxContext:
			return fmt.Errorf("row %d: position %d, the context has %d", i, r.Position, MaxContext)
		case r.Slot < 0 || int(r.Slot) >= pages*c.PageSize:
			return fmt.Errorf("row %d: slot %d, the cache has %d", i, r.Slot, pages*c.PageSize)
		case r.Table < 0 || int(r.Table) >= len(p.b.Tables):
			return fmt.Errorf("row %d: page table %d, the batch has %d", i, r.Table, len(p.b.Tables))
		}
	}
	for lo := 0; lo < len(rows); {
		end, last := p.sequence(lo, len(rows))
		table, need := p.b.Tables[rows[lo].Table], int(last)/c.PageSize+1
		if len(table) < need {
			return fmt.Errorf("row %d: its page table has %d pages, position %d needs %d", end-1, len(table), last, need)
		}
		for i, page := range table[:need] {
			if page < 0 || int(page) >= pages {
				return fmt.Errorf("row %d: entry %d of its page table is page %d, the cache has %d", lo, i, page, pages)
			}
		}
		lo = end
	}
	for _, r := range p.b.Logits {
		if r < 0 || int(r) >= len(rows) {
			return fmt.Errorf("logits of row %d, the batch has %d", r, len(rows))
		}
	}
	return nil
}

func (m *Model) has(token int32) bool { return token >= 0 && int(token) < m.Vocab }

// sequence returns the end, at most hi, of the rows from lo on that have one
// page table, and the last position among them.
func (p *pass) sequence(lo, hi int) (end int, last int32) {
	for end = lo; end < hi && p.b.Rows[end].Table == p.b.Rows[lo].Table; end++ {
		last = max(last, p.b.Rows[end].Position)
	}
	return end, last
}

// blockRows is how many rows go through the steps together: so many that a
// layer's weights are used often once they are near, so few that the rows'
// buffers stay near too.
const blockRows = 64

// share divides n rows into equal blocks and lets the workers take them.
func (p *pass) share(n int, do func(w *worker, lo, hi int)) {
	if n == 0 {
		return
	}
	workers := max(1, p.s.Workers)
	blocks := max(workers, (n+blockRows-1)/blockRows)
	size := (n + blocks - 1) / blocks
	// A panic is the caller's, whoever's it was, and comes when nobody works any more.
	var shared struct {
		next  atomic.Int64
		panic atomic.Pointer[string]
	}
	work := func(w *worker) {
		defer func() {
			if v := recover(); v != nil {
				what := fmt.Sprintf("%v\n%s", v, debug.Stack())
				shared.panic.CompareAndSwap(nil, &what)
				shared.next.Store(int64(n))
			}
		}()
		for {
			hi := int(shared.next.Add(int64(size)))
			if hi-size >= n {
				return
			}
			do(w, hi-size, min(hi, n))
		}
	}
	var others sync.WaitGroup
	for _, w := range p.s.workers[1:workers] {
		others.Go(func() { work(w) })
	}
	work(p.s.workers[0])
	others.Wait()
	if what := shared.panic.Load(); what != nil {
		panic(*what)
	}
}

func (p *pass) do(steps []step, l int, w *worker, lo, hi int) {
	for _, s := range steps {
		s.run(p, l, w, lo, hi)
	}
}

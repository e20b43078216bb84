package model

import (
	"math"
	"math/bits"
)

// The steps compute rows lo to hi of layer l. See the formulas at the top of
// model.go.

func (p *pass) embed(_ int, _ *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		row, x := p.b.Rows[r], p.s.of(bufResidual, r)
		copy(x, p.m.embedding(0, row.Token))
		add(x, p.m.embedding(1, row.Prev1))
		add(x, p.m.embedding(2, row.Prev2))
	}
}

func (m *Model) embedding(table int, token int32) []float32 {
	return m.embed[table][int(token)*Width:][:Width]
}

func (p *pass) attentionNorm(l int, _ *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		rmsNorm(p.s.of(bufNormed, r), p.s.of(bufResidual, r), p.m.layers[l].attentionNorm)
	}
}

func (p *pass) query(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufQuery, &p.m.layers[l].query, bufNormed, lo, hi)
}

func (p *pass) latent(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufLatent, &p.m.layers[l].kv, bufNormed, lo, hi)
	for r := lo; r < hi; r++ {
		row := p.s.of(bufLatent, r)
		rmsNorm(row[:LatentDim], row[:LatentDim], p.m.layers[l].kvNorm)
		p.m.rotate(row[LatentDim:], p.b.Rows[r].Position)
	}
}

func (p *pass) indexQuery(l int, _ *worker, lo, hi int) {
	p.indexQueryInto(bufIndexQuery, l, lo, hi)
}

// indexStage puts the query at the head of the row's stage.
func (p *pass) indexStage(l int, _ *worker, lo, hi int) {
	p.indexQueryInto(bufIndexStage, l, lo, hi)
}

func (p *pass) indexQueryInto(b buffer, l, lo, hi int) {
	p.s.multiply(b, &p.m.layers[l].indexQuery, bufNormed, lo, hi)
	for r := lo; r < hi; r++ {
		q := p.s.of(b, r)
		for h := range IndexHeads {
			p.m.rotate(q[h*IndexDim:], p.b.Rows[r].Position)
		}
	}
}

func (p *pass) indexKey(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufIndexKey, &p.m.layers[l].indexKey, bufNormed, lo, hi)
}

func (p *pass) indexKeyNorm(l int, _ *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		k := p.s.of(bufIndexKey, r)
		rmsNorm(k, k, p.m.layers[l].indexNorm)
		p.m.rotate(k, p.b.Rows[r].Position)
	}
}

func (p *pass) indexWeight(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufIndexWeight, &p.m.layers[l].indexWeight, bufNormed, lo, hi)
	for r := lo; r < hi; r++ {
		w := p.s.of(bufIndexWeight, r)[:IndexHeads]
		for h := range w {
			w[h] *= 1 / math.Sqrt2 / 4 // 1/sqrt(IndexDim)
		}
	}
}

func (p *pass) storeLatent(l int, _ *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		copy(p.c.Latent[l][int(p.b.Rows[r].Slot)*RowDim:], p.s.of(bufLatent, r))
	}
}

func (p *pass) storeIndexFused(l int, w *worker, lo, hi int) {
	p.indexKeyNorm(l, w, lo, hi)
	for r := lo; r < hi; r++ {
		p.storeIndex(l, int(p.b.Rows[r].Slot), p.s.of(bufIndexKey, r))
	}
	p.s.counts.FusedStores++
}

// locateIndex finds where each row's index key goes.
func (p *pass) locateIndex(_ int, _ *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		p.s.places[r] = p.b.Rows[r].Slot
	}
}

func (p *pass) storeIndexScatter(l int, _ *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		p.storeIndex(l, int(p.s.places[r]), p.s.of(bufIndexKey, r))
	}
	p.s.counts.ScatterStores++
}

func (p *pass) storeIndex(l, slot int, key []float32) {
	storeIndexKey(p.indexPage(l, slot/p.c.PageSize), p.c.IndexDType, p.c.PageSize, slot%p.c.PageSize, key)
}

func (p *pass) indexPage(l, page int) []byte {
	n := p.c.IndexDType.PageBytes(p.c.PageSize)
	return p.c.Index[l][page*n:][:n]
}

func (p *pass) latentQuery(l int, _ *worker, lo, hi int) {
	q, absorbed := p.s.buffers[bufQuery][lo*Heads*QueryDim:], p.s.buffers[bufLatentQuery][lo*headsRow:]
	for h := range p.m.heads {
		p.m.layers[l].keyUp[h].times(absorbed[h*RowDim:], headsRow, q[h*QueryDim:], Heads*QueryDim, hi-lo)
	}
	for r := lo; r < hi; r++ {
		for h := range p.m.heads {
			rotary := p.s.of(bufLatentQuery, r)[h*RowDim+LatentDim:][:RotaryDim]
			copy(rotary, p.s.of(bufQuery, r)[h*QueryDim+PlainDim:])
			p.m.rotate(rotary, p.b.Rows[r].Position)
		}
	}
}

// selects reports whether a row has more tokens than attention may read. Its
// own is always read, so the indexer chooses TopK-1 of the Position before it.
func (p *pass) selects(r int) bool {
	return !p.s.Dense && p.b.Rows[r].Position >= TopK
}

// indexScore unpacks each key once for all rows of its sequence.
func (p *pass) indexScore(l int, w *worker, lo, hi int) {
	p.countRead(lo)
	for lo < hi {
		end, last := p.sequence(lo, hi)
		table, size := p.b.Tables[p.b.Rows[lo].Table], p.c.PageSize
		for base, n := 0, 0; base < int(last); base += n {
			n = min(keyTokens, size-base%size, roundUp(int(last)-base, panel))
			page, unpacked := p.indexPage(l, int(table[base/size])), false
			for r := lo; r < end; r++ {
				before := min(n, roundUp(int(p.b.Rows[r].Position)-base, panel))
				if before <= 0 || !p.selects(r) {
					continue
				}
				if !unpacked {
					unpackIndexKeys(w.keys[:], w.scales[:], page, p.c.IndexDType, size, base%size, n)
					unpacked = true
				}
				indexScore(p.s.of(bufScore, r)[base:], p.s.of(bufIndexQuery, r), p.s.of(bufIndexWeight, r), w.keys[:], w.scales[:], before)
			}
		}
		lo = end
	}
}

// indexScoreStaged is indexScore for rows of different sequences: each row
// unpacks its keys into its own stage, behind the query.
func (p *pass) indexScoreStaged(l int, w *worker, lo, hi int) {
	p.countRead(lo)
	for r := lo; r < hi; r++ {
		if !p.selects(r) {
			continue
		}
		stage, before := p.s.of(bufIndexStage, r), int(p.b.Rows[r].Position)
		query, keys := stage[:IndexHeads*IndexDim], stage[IndexHeads*IndexDim:]
		table, size := p.b.Tables[p.b.Rows[r].Table], p.c.PageSize
		for base, n := 0, 0; base < before; base += n {
			n = min(stageTokens, size-base%size, roundUp(before-base, panel))
			unpackIndexKeys(keys, w.scales[:], p.indexPage(l, int(table[base/size])), p.c.IndexDType, size, base%size, n)
			indexScore(p.s.of(bufScore, r)[base:], query, p.s.of(bufIndexWeight, r), keys, w.scales[:], n)
		}
	}
}

// countRead counts a launch, which one of its blocks does.
func (p *pass) countRead(lo int) {
	if lo == 0 {
		p.s.counts.Reads[p.c.IndexDType]++
	}
}

// roundUp returns the next multiple of unit, 0 or less if n is.
func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }

func (p *pass) topK(_ int, w *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		selected, own := p.s.selected[r*MaxContext:(r+1)*MaxContext], p.b.Rows[r].Position
		n := int(own) + 1
		if p.selects(r) {
			n = selectTop(selected, w.mask[:], p.s.of(bufScore, r), int(own), TopK-1)
			selected[n] = own
			n++
		} else {
			for i := range n {
				selected[i] = int32(i)
			}
		}
		p.s.count[r] = int32(n)
		table, size := p.b.Tables[p.b.Rows[r].Table], int32(p.c.PageSize)
		for i, position := range selected[:n] {
			selected[i] = table[position/size]*size + position%size
		}
	}
}

func (p *pass) attend(l int, w *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		slots, latent := p.s.selected[r*MaxContext:][:p.s.count[r]], p.c.Latent[l]
		attendScores(w.probability[:], p.s.of(bufLatentQuery, r), latent, slots, attentionScale)
		softmax(w.probability[:], len(slots), &w.inverse)
		attendValues(p.s.of(bufAttended, r), w.probability[:], latent, slots, &w.inverse)
	}
}

var attentionScale = float32(1 / math.Sqrt(QueryDim))

func (p *pass) value(l int, _ *worker, lo, hi int) {
	const stride, valueStride = Heads * LatentDim, Heads * PlainDim
	attended, value := p.s.buffers[bufAttended][lo*stride:], p.s.buffers[bufValue][lo*valueStride:]
	for h := range p.m.heads {
		p.m.layers[l].valueUp[h].times(value[h*PlainDim:], valueStride, attended[h*LatentDim:], stride, hi-lo)
	}
}

func (p *pass) output(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufDelta, &p.m.layers[l].output, bufValue, lo, hi)
	p.reduce(l, false, lo, hi)
}

func (p *pass) add(_ int, _ *worker, lo, hi int) {
	add(p.s.buffers[bufResidual][lo*Width:hi*Width], p.s.buffers[bufDelta][lo*Width:hi*Width])
}

func (p *pass) mlpNorm(l int, _ *worker, lo, hi int) {
	for r := lo; r < hi; r++ {
		rmsNorm(p.s.of(bufNormed, r), p.s.of(bufResidual, r), p.m.layers[l].mlpNorm)
	}
}

func (p *pass) gate(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufGate, &p.m.layers[l].gate, bufNormed, lo, hi)
}

func (p *pass) up(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufUp, &p.m.layers[l].up, bufNormed, lo, hi)
}

func (p *pass) silu(_ int, _ *worker, lo, hi int) {
	siluMul(p.s.buffers[bufGate][lo*HiddenDim:hi*HiddenDim], p.s.buffers[bufUp][lo*HiddenDim:hi*HiddenDim])
}

func (p *pass) down(l int, _ *worker, lo, hi int) {
	p.s.multiply(bufDelta, &p.m.layers[l].down, bufGate, lo, hi)
	p.reduce(l, true, lo, hi)
}

// logits computes rows lo to hi of the logits, not of the batch.
func (p *pass) logits(_ int, _ *worker, lo, hi int) {
	for i := lo; i < hi; i++ {
		rmsNorm(p.s.of(bufNormed, i), p.s.of(bufResidual, int(p.b.Logits[i])), p.m.norm)
	}
	if parts := partsOf(len(p.b.Logits)); parts > 1 && p.s.Split != nil && p.s.Split() {
		// The fault batch-numerics.
		p.m.head.timesInParts(p.s.logits[lo*p.m.Vocab:], p.m.Vocab, p.s.buffers[bufNormed][lo*Width:], Width, hi-lo, parts)
		return
	}
	p.m.head.times(p.s.logits[lo*p.m.Vocab:], p.m.Vocab, p.s.buffers[bufNormed][lo*Width:], Width, hi-lo)
}

// rotate applies the rotary embedding to x[:RotaryDim].
func (m *Model) rotate(x []float32, position int32) {
	const half = RotaryDim / 2
	low, high := x[:half], x[half:RotaryDim]
	cos, sin := m.cos[int(position)*half:][:half], m.sin[int(position)*half:][:half]
	for j := range low {
		a, b := low[j], high[j]
		// The conversions forbid fusing, which would depend on the machine.
		low[j] = float32(a*cos[j]) - float32(b*sin[j])
		high[j] = float32(b*cos[j]) + float32(a*sin[j])
	}
}

// rotations returns the cosines and sines of every position, [MaxContext][RotaryDim/2].
func rotations() (cos, sin []float32) {
	const half = RotaryDim / 2
	for position := range MaxContext {
		for j := range half {
			angle := float64(position) * math.Pow(10000, -float64(j)/half)
			cos = append(cos, float32(math.Cos(angle)))
			sin = append(sin, float32(math.Sin(angle)))
		}
	}
	return cos, sin
}

// selectTop writes the positions of the k largest of the first n scores to dst,
// in rising order, the lower position first among equals. n is above k. No
// score may be other than a number; those from n up to a multiple of 8 are
// overwritten.
func selectTop(dst []int32, mask []byte, scores []float32, n, k int) int {
	scores = scores[:roundUp(n, 8)]
	for i := n; i < len(scores); i++ {
		scores[i] = float32(math.Inf(-1))
	}
	// Find the k-th largest score by halving the interval of all float32s: at
	// least k scores are at or above low, fewer than k at or above high.
	low, high := ordered(float32(math.Inf(-1))), ordered(float32(math.Inf(1)))+1
	above := 0 // scores at or above high
	for high-low > 1 {
		middle := low + (high-low)/2
		count := atLeast(mask, scores, unordered(middle))
		if count < k {
			high, above = middle, count
			continue
		}
		low = middle
		if count == k {
			break
		}
	}
	least := unordered(low)
	atLeast(mask, scores, least)
	equals := k - above // of those that equal least; more than there are if no choice is needed
	taken := 0
	for i, set := range mask[:len(scores)/8] {
		for ; set != 0; set &= set - 1 {
			position := 8*i + bits.TrailingZeros8(set)
			if position >= n {
				break
			}
			if scores[position] == least {
				if equals == 0 {
					continue
				}
				equals--
			}
			dst[taken] = int32(position)
			taken++
		}
	}
	return taken
}

// ordered maps float32s to integers in the same order.
func ordered(x float32) int64 {
	b := int32(math.Float32bits(x))
	return int64(b ^ b>>31&math.MaxInt32)
}

func unordered(n int64) float32 {
	b := int32(n)
	return math.Float32frombits(uint32(b ^ b>>31&math.MaxInt32))
}

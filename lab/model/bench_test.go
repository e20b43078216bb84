//go:build unix

package model

import (
	"math/rand/v2"
	"syscall"
	"testing"
	"time"

	"github.com/culprit-project/culprit/lab/fault"
)

// The size of the model that the project ships; its weights don't matter here.
const benchVocab = 430

// multiplyAdds is the number of float32 multiplications with an addition that a
// batch takes: matrix products, index scores and attention.
func multiplyAdds(b *Batch) float64 {
	n := len(b.Logits) * benchVocab * Width
	for _, r := range b.Rows {
		layer := Width*(Heads*QueryDim+RowDim+IndexHeads*IndexDim+IndexDim+IndexHeads) +
			2*Heads*PlainDim*LatentDim + Heads*PlainDim*Width + 3*Width*HiddenDim
		tokens := int(r.Position) + 1
		if tokens > TopK {
			layer += tokens * IndexHeads * IndexDim
		}
		n += Layers * (layer + min(tokens, TopK)*Heads*(RowDim+LatentDim))
	}
	return float64(n)
}

// processorTime is what this process has used of all cores. The benchmarks run
// on one goroutine and count it, so that other programs don't.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// peak measures this core's best float32 matrix product: the kernel over data
// that stays in the first caches. It returns multiply-adds a second.
func peak() float64 {
	const in, rows = 192, 24
	x, w, c := make([]float32, rows*in), make([]float32, in*panel), make([]float32, rows*panel)
	best := 0.0
	for range 20 {
		const times = 2000
		start := processorTime()
		for range times {
			matmulPanel(c, x, w, in, rows, panel, in)
		}
		best = max(best, times*in*rows*panel/(processorTime()-start).Seconds())
	}
	return best
}

func BenchmarkMatmulPeak(b *testing.B) {
	for b.Loop() {
		b.ReportMetric(2e-9*peak(), "GFLOP/s")
	}
}

// best runs the batches in a loop and takes the fastest round, which other
// programs disturb least. It adds the rows a second, and the arithmetic done as a
// share of what the processor could do at most.
func best(b *testing.B, m *Model, c *Cache, s *Scratch, batches ...*Batch) {
	b.Helper()
	fastest := time.Hour
	for b.Loop() {
		start := processorTime()
		for _, batch := range batches {
			if _, err := m.Forward(batch, c, s); err != nil {
				b.Fatal(err)
			}
		}
		fastest = min(fastest, processorTime()-start)
	}
	rows, arithmetic := 0, 0.0
	for _, batch := range batches {
		rows += len(batch.Rows)
		arithmetic += multiplyAdds(batch)
	}
	b.ReportMetric(float64(rows)/fastest.Seconds(), "tokens/s")
	b.ReportMetric(100*arithmetic/fastest.Seconds()/peak(), "%ofpeak")
}

// BenchmarkDecode80 is a step of 80 sequences of 400 to 900 tokens, logits
// included, on one core.
func BenchmarkDecode80(b *testing.B) {
	for _, d := range []IndexDType{FP8, BF16} {
		b.Run(d.String(), func(b *testing.B) {
			m := testModel(b, benchVocab)
			batch, c := decode80(d)
			best(b, m, c, m.NewScratch(len(batch.Rows)), batch)
		})
	}
}

func decode80(d IndexDType) (*Batch, *Cache) {
	rng := rand.New(rand.NewPCG(1, 1))
	const pageSize, batchSize = 64, 80
	batch := &Batch{}
	next := int32(1)
	for i := range batchSize {
		position := int32(400 + rng.IntN(500))
		var table []int32
		for range position/pageSize + 1 {
			table = append(table, next)
			next++
		}
		batch.Tables = append(batch.Tables, table)
		batch.Logits = append(batch.Logits, int32(i))
		batch.Rows = append(batch.Rows, Row{
			Token: int32(i), Position: position, Table: int32(i),
			Slot: table[position/pageSize]*pageSize + position%pageSize,
		})
	}
	c := newCache(int(next), pageSize, d)
	fill(c, rng)
	return batch, c
}

// BenchmarkDecoder80 is the same step by way of a Decoder. The ways take turns,
// so that they can be compared on a busy machine; their times are shares of
// Forward's.
func BenchmarkDecoder80(b *testing.B) {
	for _, d := range []IndexDType{FP8, BF16} {
		b.Run(d.String(), func(b *testing.B) {
			m := testModel(b, benchVocab)
			batch, c := decode80(d)
			scratch := m.NewScratch(len(batch.Rows))
			armed, err := fault.Parse([]string{"poison"}, 1)
			if err != nil {
				b.Fatal(err)
			}
			decoder := func(o DecodeOptions) func(*Batch) ([]float32, error) {
				o.Rows = len(batch.Rows)
				return m.NewDecoder(c, o).Step
			}
			ways := []struct {
				name string
				step func(*Batch) ([]float32, error)
			}{
				{"forward", func(batch *Batch) ([]float32, error) { return m.Forward(batch, c, scratch) }},
				{"eager", decoder(DecodeOptions{})},
				{"captured", decoder(DecodeOptions{Buckets: []int{80}})},
				{"jitter", decoder(DecodeOptions{Buckets: []int{80}, Jitter: 1})},
				{"fault", decoder(DecodeOptions{Buckets: []int{80}, Faults: armed})},
			}
			fastest := make([]time.Duration, len(ways))
			for b.Loop() {
				for i, way := range ways {
					start := processorTime()
					if _, err := way.step(batch); err != nil {
						b.Fatal(err)
					}
					if t := processorTime() - start; fastest[i] == 0 || t < fastest[i] {
						fastest[i] = t
					}
				}
			}
			b.ReportMetric(float64(fastest[0].Microseconds()), "us/forward")
			for i, way := range ways[1:] {
				b.ReportMetric(100*float64(fastest[i+1])/float64(fastest[0]), "%"+way.name)
			}
		})
	}
}

// fill writes random keys and latents.
func fill(c *Cache, rng *rand.Rand) {
	key := make([]float32, IndexDim)
	for l := range Layers {
		for i := range c.Latent[l] {
			c.Latent[l][i] = float32(rng.NormFloat64())
		}
		n := c.IndexDType.PageBytes(c.PageSize)
		for slot := range len(c.Latent[l]) / RowDim {
			for i := range key {
				key[i] = float32(rng.NormFloat64())
			}
			storeIndexKey(c.Index[l][slot/c.PageSize*n:][:n], c.IndexDType, c.PageSize, slot%c.PageSize, key)
		}
	}
}

// BenchmarkPrefill is a prompt of 700 tokens in chunks of 350, on one core.
func BenchmarkPrefill(b *testing.B) {
	for _, d := range []IndexDType{FP8, BF16} {
		b.Run(d.String(), func(b *testing.B) {
			m := testModel(b, benchVocab)
			rng := rand.New(rand.NewPCG(2, 2))
			s := &sequence{}
			for p := range 700 {
				s.tokens = append(s.tokens, int32(rng.IntN(benchVocab)))
				if p%64 == 0 {
					s.table = append(s.table, int32(p/64))
				}
			}
			c := newCache(len(s.table), 64, d)
			var chunks []*Batch
			for s.done < len(s.tokens) {
				chunks = append(chunks, &Batch{Rows: s.rows(350, 64, 0), Tables: [][]int32{s.table}})
				s.done += 350
			}
			best(b, m, c, m.NewScratch(350), chunks...)
		})
	}
}

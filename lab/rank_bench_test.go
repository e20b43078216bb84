package lab

import (
	"fmt"
	"testing"
)

// BenchmarkLoops runs 32 requests at once, in each loop and on one rank or two.
func BenchmarkLoops(b *testing.B) {
	for _, c := range []Config{{}, {NoOverlap: true}, {Ranks: 2}, {Ranks: 2, NoOverlap: true}} {
		b.Run(fmt.Sprintf("ranks=%d/overlap=%t", max(1, c.Ranks), !c.NoOverlap), func(b *testing.B) {
			e := testEngine(b, c)
			tokens := 0
			for b.Loop() {
				var streams []*Stream
				for i := range 32 {
					r := long("", 60, uint64(i))
					r.MaxTokens = 40
					s, err := e.Submit(b.Context(), r)
					if err != nil {
						b.Fatal(err)
					}
					streams = append(streams, s)
				}
				for e.Step() {
				}
				for _, s := range streams {
					tokens += len(read(s).Tokens)
				}
			}
			b.ReportMetric(float64(tokens)/b.Elapsed().Seconds(), "tokens/s")
		})
	}
}

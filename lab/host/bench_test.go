package host

import (
	"testing"

	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
)

// BenchmarkCopies moves 16 pages, of all kinds and layers, to the host and
// back, by either routine.
func BenchmarkCopies(b *testing.B) {
	for _, bb := range []struct {
		name   string
		tokens int // of the last page
	}{{"page_aligned", 64}, {"token_granular", 63}} {
		b.Run(bb.name, func(b *testing.B) {
			tier := New(newCache(17, 64, model.BF16), Config{Pages: 17})
			var device, host []int32
			for page := range int32(16) {
				c := kv.Copy{Device: 1 + page, Host: 16 - page, Tokens: 64}
				if page == 15 {
					c.Tokens = bb.tokens
				}
				from, to := tier.slots(c)
				device, host = append(device, from...), append(host, to...)
			}
			bytes := 0
			for _, p := range tier.pools {
				bytes += 2 * model.Layers * len(device) * p.pageBytes() / 64
			}
			b.SetBytes(int64(bytes))
			for b.Loop() {
				for _, p := range tier.pools {
					p.BackupFromDeviceAllLayer(device, host)
					for l := range model.Layers {
						p.LoadToDevicePerLayer(l, device, host)
					}
				}
			}
		})
	}
}

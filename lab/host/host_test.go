package host

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
)

// newCache is a device's memory, filled with what reads as numbers far off.
func newCache(pages, pageSize int, d model.IndexDType) *model.Cache {
	c := &model.Cache{PageSize: pageSize, IndexDType: d}
	for l := range model.Layers {
		c.Latent[l] = slices.Repeat([]float32{1e4}, pages*pageSize*model.RowDim)
		c.Index[l] = slices.Repeat([]byte{0x47}, pages*d.PageBytes(pageSize))
	}
	return c
}

// stamp fills a device's memory with numbers that all differ.
func stamp(c *model.Cache, n uint32) {
	for l := range model.Layers {
		for i := range c.Latent[l] {
			n++
			c.Latent[l][i] = float32(n % 1e6)
		}
		for i := range c.Index[l] {
			n = n*1664525 + 1013904223
			c.Index[l][i] = byte(n >> 24)
		}
	}
}

// tokenOf is all that a cache holds of a slot, by the formats that package
// model documents.
func tokenOf(c *model.Cache, slot int32) string {
	var t []byte
	size, s := c.PageSize, int(slot)
	key, scale := c.IndexDType.KeyBytes(), c.IndexDType.ScaleBytes()
	for l := range model.Layers {
		for _, x := range c.Latent[l][s*model.RowDim:][:model.RowDim] {
			t = binary.LittleEndian.AppendUint32(t, math.Float32bits(x))
		}
		page := c.Index[l][s/size*size*(key+scale):]
		t = append(t, page[s%size*key:][:key]...)
		t = append(t, page[size*key+s%size*scale:][:scale]...)
	}
	return string(t)
}

var dtypes = []model.IndexDType{model.FP8, model.BF16}

// TestCopiesAreFaithful: whatever goes to the host and back to other places is
// what it was, and nothing else changes.
func TestCopiesAreFaithful(t *testing.T) {
	const pages, hostPages = 6, 9
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.SampledFrom([]int{16, 32, 48}).Draw(t, "page size")
		device := newCache(pages, size, rapid.SampledFrom(dtypes).Draw(t, "dtype"))
		tier := New(device, Config{Pages: hostPages, Layout: rapid.SampledFrom([]Layout{PageFirst, LayerFirst}).Draw(t, "layout")})
		rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		stamp(device, rng.Uint32())

		// Slots of whole pages, or any slots.
		whole := rapid.Bool().Draw(t, "whole pages")
		draw := func(pages int, n int) []int32 {
			slots := make([]int32, 0, n*size)
			if whole {
				for _, p := range rng.Perm(pages - 1)[:n] {
					for i := range size {
						slots = append(slots, int32((p+1)*size+i))
					}
				}
				return slots
			}
			for _, s := range rng.Perm((pages - 1) * size)[:n*size-3] {
				slots = append(slots, int32(size+s))
			}
			return slots
		}
		n := rapid.IntRange(1, pages-2).Draw(t, "pages")
		from, host, to := draw(pages, n), draw(hostPages, n), draw(pages, n)
		var want []string
		for _, s := range from {
			want = append(want, tokenOf(device, s))
		}
		for _, p := range tier.pools {
			p.BackupFromDeviceAllLayer(from, host)
		}
		stamp(device, rng.Uint32())
		var before []string
		for s := range int32(pages * size) {
			before = append(before, tokenOf(device, s))
		}
		for i, s := range to {
			before[s] = want[i]
		}
		for l := range model.Layers {
			for _, p := range tier.pools {
				p.LoadToDevicePerLayer(l, to, host)
			}
		}
		for s := range int32(pages * size) {
			if before[s] != tokenOf(device, s) {
				t.Fatalf("slot %d isn't what it should be", s)
			}
		}
	})
}

// TestBranches: which routine copies is a matter of the slots, and is counted.
func TestBranches(t *testing.T) {
	slots := func(lo, hi int32) (s []int32) {
		for ; lo < hi; lo++ {
			s = append(s, lo)
		}
		return s
	}
	tests := []struct {
		name         string
		device, host []int32
		aligned      bool
	}{
		{"two pages", slots(16, 48), slots(32, 64), true},
		{"pages that don't stand together", slices.Concat(slots(48, 64), slots(16, 32)), slots(32, 64), true},
		{"a part", slots(16, 21), slots(32, 37), false},
		{"a page and a part", slots(16, 40), slots(32, 56), false},
		{"halves of two pages", slots(24, 40), slots(32, 48), false},
		{"halves of two host pages", slots(16, 32), slots(40, 56), false},
		{"not in order", slices.Concat(slots(17, 32), slots(16, 17)), slots(32, 48), false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tier := New(newCache(4, 16, model.FP8), Config{Pages: 5})
			p := tier.pools[1]
			p.BackupFromDeviceAllLayer(tt.device, tt.host)
			p.LoadToDevicePerLayer(2, tt.device, tt.host)
			branch := "token_granular"
			if tt.aligned {
				branch = "page_aligned"
			}
			n := uint64(len(tt.device))
			want := []Copies{
				{IndexK, "backup", branch, model.Layers, model.Layers * n},
				{IndexK, "load", branch, 1, n},
			}
			got := slices.DeleteFunc(tier.Copies(), func(c Copies) bool { return c.Calls == 0 })
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// loaded says which layers of a device page hold what the host's page does.
func loaded(device *model.Cache, page int, want float32) string {
	var b strings.Builder
	for l := range model.Layers {
		latent := device.Latent[l][page*device.PageSize*model.RowDim] == want
		index := device.Index[l][page*device.IndexDType.PageBytes(device.PageSize)] == byte(want)
		b.WriteString(map[[2]bool]string{{true, true}: "x", {true, false}: "l", {false, true}: "i", {false, false}: "."}[[2]bool{latent, index}])
	}
	return b.String()
}

// backedUp is a tier whose host page 1 holds 7s, and a device that holds 1s.
func backedUp(t *testing.T, c Config) (*Tier, *model.Cache) {
	t.Helper()
	device := newCache(4, 16, model.FP8)
	fill := func(n byte) {
		for l := range model.Layers {
			for i := range device.Latent[l] {
				device.Latent[l][i] = float32(n)
			}
			copy(device.Index[l], bytes.Repeat([]byte{n}, len(device.Index[l])))
		}
	}
	c.Pages = 3
	tier := New(device, c)
	fill(7)
	tier.Begin([]kv.Copy{{Device: 2, Host: 1, Tokens: 16}}, nil, &fault.Env{})
	tier.End()
	fill(1)
	return tier, device
}

// TestForwardWaitsLayerByLayer: the stream's pace decides what is there early,
// and a layer that was waited for is there.
func TestForwardWaitsLayerByLayer(t *testing.T) {
	tests := []struct {
		name string
		pace []int // copies done before each layer; each layer has two
		want []string
		wait Waits
	}{
		{"slow", []int{0, 0, 0, 0}, []string{"x...", "xx..", "xxx.", "xxxx"}, Waits{Loading: 4}},
		{"fast", []int{99, 0, 0, 0}, []string{"xxxx", "xxxx", "xxxx", "xxxx"}, Waits{Loaded: 4}},
		{"one pool ahead", []int{3, 0, 2, 1}, []string{"xl..", "xx..", "xxx.", "xxxx"}, Waits{Loaded: 2, Loading: 2}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tier, device := backedUp(t, Config{Pace: func(layer, copies int) int {
				if copies != 2 {
					t.Errorf("%d copies a layer, want 2", copies)
				}
				return tt.pace[layer]
			}})
			tier.Begin(nil, []kv.Copy{{Device: 3, Host: 1, Tokens: 16}}, &fault.Env{})
			var got []string
			for l := range model.Layers {
				device.Wait(l)
				got = append(got, loaded(device, 3, 7))
				if err := tier.Check(); err != nil {
					t.Error(err)
				}
			}
			tier.End()
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(tt.wait, tier.Waits()); diff != "" {
				t.Error(diff)
			}
			device.Wait(0)
			if tier.Waits().Idle != 1 {
				t.Errorf("%+v: want a wait for nothing", tier.Waits())
			}
		})
	}
}

// TestEndLoadsWhatNobodyWaitedFor: a step that failed leaves whole pages.
func TestEndLoadsWhatNobodyWaitedFor(t *testing.T) {
	tier, device := backedUp(t, Config{})
	tier.Begin(nil, []kv.Copy{{Device: 3, Host: 1, Tokens: 16}}, &fault.Env{})
	tier.End()
	if got := loaded(device, 3, 7); got != "xxxx" {
		t.Errorf("loaded %s, want all", got)
	}
}

// TestBackupsKeepTheirOrder: a host page that was given away and used again
// holds what came last.
func TestBackupsKeepTheirOrder(t *testing.T) {
	tier, device := backedUp(t, Config{})
	device.Latent[0][3*16*model.RowDim] = 5
	tier.Begin([]kv.Copy{{Device: 2, Host: 2, Tokens: 16}, {Device: 3, Host: 2, Tokens: 16}}, []kv.Copy{{Device: 1, Host: 2, Tokens: 16}}, &fault.Env{})
	tier.End()
	if got := device.Latent[0][16*model.RowDim]; got != 5 {
		t.Errorf("loaded %v, want 5", got)
	}
}

// TestCheckFails shows that each invariant can fail.
func TestCheckFails(t *testing.T) {
	begin := func(loads ...kv.Copy) func(*Tier) {
		return func(t *Tier) { t.Begin(nil, loads, &fault.Env{}) }
	}
	tests := []struct {
		name, want string
		spoil      func(*Tier)
	}{
		{"pool of another size", "for 2 pages of the 3", func(t *Tier) { t.pools[1].pages-- }},
		{"pool cut off", "pool latent has", func(t *Tier) { t.pools[0].host = t.pools[0].host[1:] }},
		{"load to the reserved page", "page 0 of 4", begin(kv.Copy{Device: 0, Host: 1, Tokens: 16})},
		{"load to nowhere", "page 4 of 4", begin(kv.Copy{Device: 4, Host: 1, Tokens: 16})},
		{"load from the reserved page", "host page 0 of 3", begin(kv.Copy{Device: 1, Host: 0, Tokens: 16})},
		{"load from nowhere", "host page 3 of 3", begin(kv.Copy{Device: 1, Host: 3, Tokens: 16})},
		{"two loads to a page", "twice", begin(kv.Copy{Device: 1, Host: 1, Tokens: 16}, kv.Copy{Device: 1, Host: 2, Tokens: 3})},
		{"too much done", "did 1 of 0", func(t *Tier) { t.done++ }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			tier, _ := backedUp(t, Config{})
			if err := tier.Check(); err != nil {
				t.Fatal(err)
			}
			tt.spoil(tier)
			if err := tier.Check(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Check = %v, want an error with %q", err, tt.want)
			}
		})
	}
}

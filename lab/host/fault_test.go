package host

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/lab/sched"
)

// returning is the number of the request whose prefix comes from the host, on
// a device that is too small to keep it. Nobody else's does.
const returning = 10

func evictedAndBack(pageSize int) [][]prompt {
	rng := rand.New(rand.NewPCG(8, 9))
	draw := func(n int) []int32 {
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = int32(rng.IntN(vocab))
		}
		return tokens
	}
	a, b, c := draw(150), draw(140), draw(145)
	cut := 150 / pageSize * pageSize // whole pages, and most of one
	again := slices.Concat(a[:cut-3], draw(25))
	return [][]prompt{{{1, a}}, {{2, b}}, {{3, c}}, {{returning, again}, {4, draw(100)}}}
}

// TestFaults: each fault changes what the request with the host's prefix gets,
// in the situation that it is about, and nothing else.
func TestFaults(t *testing.T) {
	slow := func(int, int) int { return 0 }
	fast := func(_, copies int) int { return model.Layers * copies }
	tests := []struct {
		name  string // the fault's
		which string // situation
		alter func(*setup)
		wrong bool
	}{
		{"stale-index-k", "host hit", func(*setup) {}, true},
		{"stale-index-k", "bf16", func(s *setup) { s.dtype = model.BF16 }, true},
		{"stale-index-k", "layer first, write back", func(s *setup) { s.layout, s.WritePolicy = LayerFirst, kv.WriteBack }, true},
		{"stale-index-k", "nothing was evicted", func(s *setup) { s.Pages *= 4 }, false},
		{"stale-index-k", "no host tier", func(s *setup) { s.HostPages = 0 }, false},

		{"host-stride", "bf16", func(s *setup) { s.dtype = model.BF16 }, true},
		{"host-stride", "bf16, layer first", func(s *setup) { s.dtype, s.layout = model.BF16, LayerFirst }, true},
		{"host-stride", "fp8", func(*setup) {}, false},
		{"host-stride", "bf16, nothing was evicted", func(s *setup) { s.dtype, s.Pages = model.BF16, s.Pages*4 }, false},

		{"token-granular-geometry", "part of a page", func(s *setup) { s.Parts = true }, true},
		{"token-granular-geometry", "part of a page, bf16", func(s *setup) { s.Parts, s.dtype = true, model.BF16 }, true},
		{"token-granular-geometry", "whole pages only", func(*setup) {}, false},

		{"missing-layer-wait", "slow loads", func(s *setup) { s.pace = slow }, true},
		{"missing-layer-wait", "loads as fast as the pass", func(*setup) {}, true},
		{"missing-layer-wait", "fast loads", func(s *setup) { s.pace = fast }, false},
		{"missing-layer-wait", "nothing was evicted", func(s *setup) { s.pace, s.Pages = slow, s.Pages*4 }, false},
	}
	type key struct {
		config sched.Config
		dtype  model.IndexDType
		layout Layout
	}
	right := map[key]outcome{} // without faults; the stream's pace makes no difference
	for _, tt := range tests {
		for _, size := range []int{16, 64} {
			if size == 64 && !tt.wrong {
				continue
			}
			t.Run(fmt.Sprint(tt.name, ", ", tt.which, ", ", size), func(t *testing.T) {
				faults, err := fault.Parse([]string{tt.name}, 1)
				if err != nil {
					t.Fatal(err)
				}
				s := setup{Config: sched.Config{Pages: 320/size + 1, PageSize: size, MaxRunning: 4, ChunkTokens: 64, HostPages: 1600/size + 1}}
				tt.alter(&s)
				rounds := evictedAndBack(size)
				off, known := right[key{s.Config, s.dtype, s.layout}]
				if !known {
					off = play(t, s, rounds...)
					right[key{s.Config, s.dtype, s.layout}] = off
				}
				s.faults = faults
				on := play(t, s, rounds...)

				hit := off.host[returning] > 0
				if small := s.Pages == 320/size+1 && s.HostPages > 0; hit != small {
					t.Fatalf("%d tokens came from the host", off.host[returning])
				}
				var wrong []uint64
				for _, id := range slices.Sorted(maps.Keys(off.logits)) {
					if !slices.Equal(on.logits[id], off.logits[id]) {
						wrong = append(wrong, id)
					}
				}
				var want []uint64
				if tt.wrong {
					want = []uint64{returning}
				}
				if diff := cmp.Diff(want, wrong); diff != "" {
					t.Errorf("other logits than without the fault: %s", diff)
				}
				if s.HostPages > 0 {
					parts := on.calls(IndexK, "load", "token_granular")
					if (parts > 0) != s.Parts {
						t.Errorf("%d token-granular loads of index keys", parts)
					}
				}
			})
		}
	}
}

// TestRate: a fault that strikes now and then leaves the other pages alone.
func TestRate(t *testing.T) {
	faults, err := fault.Parse([]string{"stale-index-k,rate=0.5"}, 3)
	if err != nil {
		t.Fatal(err)
	}
	tier, device := backedUp(t, Config{Faults: faults})
	got := map[string]int{}
	for range 200 {
		tier.Begin(nil, []kv.Copy{{Device: 3, Host: 1, Tokens: 16}}, &fault.Env{})
		tier.End()
		got[loaded(device, 3, 7)]++
		for l := range model.Layers {
			clear(device.Index[l])
		}
	}
	if len(got) != 2 || got["xxxx"] < 70 || got["llll"] < 70 {
		t.Errorf("pages by what was loaded: %v, want about half without index keys", got)
	}
}

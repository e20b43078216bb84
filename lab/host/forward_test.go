package host

import (
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/lab/sched"
)

const vocab = 60

var testModel = sync.OnceValue(func() *model.Model { return model.Random(1, vocab) })

// setup is a server in small: a scheduler, a model, and a host tier if the
// scheduler has host pages.
type setup struct {
	sched.Config
	dtype  model.IndexDType
	layout Layout
	seed   uint64
	pace   Pace
	faults *fault.Set
}

// prompt is what a request asks.
type prompt struct {
	id     uint64
	tokens []int32
}

// outcome is what a server did: the bits of every row of logits, as a hash for
// each token, and its counts.
type outcome struct {
	logits map[uint64][]uint64
	host   map[uint64]int // tokens that were loaded, by request
	stats  sched.Stats
	waits  Waits
	copies []Copies
}

// calls counts a routine's.
func (o outcome) calls(pool, direction, branch string) uint64 {
	i := slices.IndexFunc(o.copies, func(c Copies) bool {
		return c.Pool == pool && c.Direction == direction && c.Branch == branch
	})
	return o.copies[i].Calls
}

// play runs rounds of prompts, each when the one before has ended.
func play(tb fataler, s setup, rounds ...[]prompt) outcome {
	const maxTokens = 4
	m := testModel()
	cache := newCache(s.Pages, s.PageSize, s.dtype)
	scratch := m.NewScratch(max(s.ChunkTokens, s.MaxRunning))
	scheduler := sched.New(s.Config)
	var tier *Tier
	if s.HostPages > 0 {
		tier = New(cache, Config{Pages: s.HostPages, Layout: s.layout, Seed: s.seed, Pace: s.pace, Faults: s.faults})
	}
	o := outcome{logits: map[uint64][]uint64{}, host: map[uint64]int{}}
	step := func() bool {
		next := scheduler.Schedule()
		if next == nil {
			return false
		}
		var b model.Batch
		for i, item := range next.Items {
			r, size := item.Request, s.PageSize
			b.Tables = append(b.Tables, r.Table())
			for p := item.From; p < item.To; p++ {
				b.Rows = append(b.Rows, model.Row{
					Token: r.Token(p), Prev1: r.Token(p - 1), Prev2: r.Token(p - 2), Position: int32(p),
					Slot: r.Table()[p/size]*int32(size) + int32(p%size), Table: int32(i),
				})
			}
			if item.Samples() {
				b.Logits = append(b.Logits, int32(len(b.Rows)-1))
			}
		}
		if tier != nil {
			tier.Begin(next.Backups, next.Loads, &fault.Env{Batch: len(next.Items)})
			if err := tier.Check(); err != nil {
				tb.Fatal(err)
			}
		}
		logits, err := m.Forward(&b, cache, scratch)
		if err != nil {
			tb.Fatal(err)
		}
		if tier != nil {
			tier.End()
		}
		var sampled []int32
		for _, item := range next.Items {
			if !item.Samples() {
				continue
			}
			row := logits[len(sampled)*vocab:][:vocab]
			h := fnv.New64a()
			for _, x := range row {
				h.Write(binary.LittleEndian.AppendUint32(nil, math.Float32bits(x)))
			}
			o.logits[item.Request.ID] = append(o.logits[item.Request.ID], h.Sum64())
			sampled = append(sampled, int32(slices.Index(row, slices.Max(row))))
		}
		scheduler.Done(next, sampled)
		for _, item := range next.Items {
			if r := item.Request; len(r.Output) == r.MaxTokens {
				scheduler.Remove(r)
				o.host[r.ID] = r.HostTokens
			}
		}
		if err := scheduler.Check(); err != nil {
			tb.Fatal(err)
		}
		return true
	}
	for _, round := range rounds {
		for _, p := range round {
			if err := scheduler.Add(&sched.Request{ID: p.id, Prompt: p.tokens, MaxTokens: maxTokens}); err != nil {
				tb.Fatal(err)
			}
		}
		for step() {
		}
	}
	o.stats = scheduler.Stats()
	if tier != nil {
		o.waits, o.copies = tier.Waits(), tier.Copies()
	}
	return o
}

type fataler interface{ Fatal(args ...any) }

// prompts are sessions of two turns: the second is the first and more. Some
// begin alike. In the third round others come that begin like a session, and
// share a part of a page with it; each has a twin.
var prompts = sync.OnceValue(func() [][]prompt {
	rng := rand.New(rand.NewPCG(5, 6))
	draw := func(n int) []int32 {
		tokens := make([]int32, n)
		for i := range tokens {
			tokens[i] = int32(rng.IntN(vocab))
		}
		return tokens
	}
	common := draw(50)
	rounds := make([][]prompt, 3)
	for i := range 6 {
		first := slices.Concat(common[:i%2*50], draw(90+7*i))
		rounds[0] = append(rounds[0], prompt{uint64(i), first})
		rounds[1] = append(rounds[1], prompt{uint64(10 + i), slices.Concat(first, draw(10+3*i))})
		if i < 4 {
			other := slices.Concat(first[:73+5*i], draw(20))
			rounds[2] = append(rounds[2], prompt{uint64(20 + i), other}, prompt{uint64(30 + i), slices.Concat(other, draw(9))})
		}
	}
	return rounds
})

// alone is each prompt's logits from an empty cache, without any tier.
var alone = sync.OnceValue(func() map[model.IndexDType]map[uint64][]uint64 {
	all := map[model.IndexDType]map[uint64][]uint64{}
	for _, d := range dtypes {
		all[d] = map[uint64][]uint64{}
		for _, p := range slices.Concat(prompts()...) {
			o := play(panicker{}, setup{Config: sched.Config{Pages: 30, PageSize: 16, MaxRunning: 1, ChunkTokens: 256, NoRadix: true}, dtype: d}, []prompt{p})
			maps.Copy(all[d], o.logits)
		}
	}
	return all
})

type panicker struct{}

func (panicker) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

// small is a device that holds two or three sessions of the six.
func small(pageSize int) sched.Config {
	return sched.Config{Pages: 480/pageSize + 1, PageSize: pageSize, MaxRunning: 3, ChunkTokens: 64, HostPages: 1600/pageSize + 1}
}

// TestSameLogits: logits are the same bits with the tier on and off, in every
// layout, policy and type, and everything that could make a difference happens.
func TestSameLogits(t *testing.T) {
	for _, layout := range []Layout{PageFirst, LayerFirst} {
		for _, policy := range []kv.WritePolicy{kv.WriteThrough, kv.WriteBack} {
			for _, d := range dtypes {
				for _, size := range []int{16, 64} {
					t.Run(fmt.Sprint(layout, policy, d, size), func(t *testing.T) {
						s := setup{Config: small(size), dtype: d, layout: layout}
						s.WritePolicy, s.Parts = policy, true
						o := play(t, s, prompts()...)
						if diff := cmp.Diff(alone()[d], o.logits); diff != "" {
							t.Error(diff)
						}
						st := o.stats
						if st.Evicted == 0 || st.HostTokens == 0 || st.CachedTokens <= st.HostTokens || st.Loaded == 0 || st.BackedUp == 0 {
							t.Errorf("no pressure: %+v", st)
						}
						if o.waits.Loading == 0 || o.waits.Loaded == 0 || o.waits.Idle == 0 {
							t.Errorf("waits %+v, want each kind", o.waits)
						}
						for _, c := range o.copies {
							// Backups are whole pages.
							if want := c.Direction == "load" || c.Branch == "page_aligned"; (c.Calls > 0) != want {
								t.Errorf("%+v, want calls: %t", c, want)
							}
						}
					})
				}
			}
		}
	}
}

// TestSameLogitsAnyhow: the same for whatever else may vary.
func TestSameLogitsAnyhow(t *testing.T) {
	var total sched.Stats
	for seed := range uint64(8) {
		rng := rand.New(rand.NewPCG(seed, 0))
		size := 16 * (1 + rng.IntN(4))
		s := setup{
			Config: sched.Config{
				PageSize:     size,
				Pages:        (260+rng.IntN(300))/size + 1,
				HostPages:    (40+rng.IntN(1000))/size + 2,
				MaxRunning:   1 + rng.IntN(4),
				ChunkTokens:  20 + rng.IntN(180),
				RetractEvery: rng.IntN(4),
				WritePolicy:  kv.WritePolicy(rng.IntN(2)),
				Parts:        rng.IntN(2) == 0,
			},
			dtype:  dtypes[rng.IntN(2)],
			layout: Layout(rng.IntN(2)),
			seed:   seed,
		}
		o := play(t, s, prompts()...)
		if diff := cmp.Diff(alone()[s.dtype], o.logits); diff != "" {
			t.Errorf("%+v: %s", s, diff)
		}
		total.Loaded += o.stats.Loaded
		total.HostEvicted += o.stats.HostEvicted
		total.BackupsDropped += o.stats.BackupsDropped
		total.Retractions += o.stats.Retractions
	}
	if total.Loaded == 0 || total.HostEvicted == 0 || total.BackupsDropped == 0 || total.Retractions == 0 {
		t.Errorf("no pressure: %+v", total)
	}
}

// TestSameSeedSameRun: counts and all.
func TestSameSeedSameRun(t *testing.T) {
	s := setup{Config: small(16), seed: 7}
	s.Parts = true
	a, b := play(t, s, prompts()...), play(t, s, prompts()...)
	if diff := cmp.Diff(a, b, cmp.AllowUnexported(outcome{})); diff != "" {
		t.Error(diff)
	}
}

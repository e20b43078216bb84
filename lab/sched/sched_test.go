package sched

import (
	"fmt"
	"hash/fnv"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/lab/kv"
)

// memory stands for the cache: each slot holds a hash of the tokens up to its
// position, so that a wrong page shows as a wrong hash.
type memory struct{ device, host map[int32]uint64 }

func newMemory() memory { return memory{map[int32]uint64{}, map[int32]uint64{}} }

// move does what is to be copied between the tiers.
func (m memory) move(s *Scheduler, step *Step) {
	copyPage := func(to, from map[int32]uint64, toPage, fromPage int32, n int) {
		size := int32(s.config.PageSize)
		for i := range int32(n) {
			to[toPage*size+i] = from[fromPage*size+i]
		}
	}
	for _, c := range step.Backups {
		copyPage(m.host, m.device, c.Host, c.Device, c.Tokens)
	}
	for _, c := range step.Loads {
		copyPage(m.device, m.host, c.Device, c.Host, c.Tokens)
	}
}

func hash(r *Request, position int) uint64 {
	h := fnv.New64a()
	for p := range position + 1 {
		fmt.Fprint(h, r.Token(p), " ")
	}
	return h.Sum64()
}

// compute does what a forward pass does: reads everything before each item,
// writes the item's entries, and yields tokens that depend on what was read.
func (m memory) compute(t *rapid.T, s *Scheduler, step *Step, tables [][]int32) (sampled []int32) {
	m.move(s, step)
	pageSize := s.config.PageSize
	for i, item := range step.Items {
		r := item.Request
		slot := func(p int) int32 { return tables[i][p/pageSize]*int32(pageSize) + int32(p%pageSize) }
		for p := range item.From {
			if m.device[slot(p)] != hash(r, p) {
				t.Fatalf("request %d finds something else at position %d", r.ID, p)
			}
		}
		for p := item.From; p < item.To; p++ {
			m.device[slot(p)] = hash(r, p)
		}
		if item.Samples() {
			sampled = append(sampled, int32(hash(r, item.To-1)%5))
		}
	}
	return sampled
}

// flight is a step with its page tables, as they were when it was launched.
type flight struct {
	step   *Step
	tables [][]int32
}

// loop schedules and computes, each step at once or, with overlap, while the
// next one is already launched.
type loop struct {
	*Scheduler
	memory  memory
	overlap bool
	flying  []flight
	ended   func(*Request)
}

// step is false when there is nothing to do.
func (l *loop) step(t *rapid.T) bool {
	next := l.Schedule()
	if next != nil {
		if l.overlap {
			l.Launch(next)
		}
		f := flight{step: next}
		for _, item := range next.Items {
			f.tables = append(f.tables, slices.Clone(item.Request.Table()))
		}
		l.flying = append(l.flying, f)
		if err := l.Check(); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.flying) == 0 {
		return false
	}
	if l.overlap && next != nil && len(l.flying) == 1 {
		return true
	}
	step := l.flying[0].step
	sampled := l.memory.compute(t, l.Scheduler, step, l.flying[0].tables)
	l.flying = l.flying[1:]
	l.Done(step, sampled)
	for _, item := range step.Items {
		// A step late, a request has one token too many.
		if r := item.Request; len(r.Output) >= r.MaxTokens && r.Output[r.MaxTokens-1] != Pending && !r.leaving && len(r.table) > 0 {
			l.Remove(r)
			l.ended(r)
		}
	}
	return true
}

func drawConfig(t *rapid.T) Config {
	return Config{
		PageSize:     rapid.IntRange(1, 4).Draw(t, "page size"),
		Pages:        rapid.IntRange(16, 40).Draw(t, "pages"),
		MaxRunning:   rapid.IntRange(1, 6).Draw(t, "max running"),
		ChunkTokens:  rapid.IntRange(1, 12).Draw(t, "chunk"),
		NoRadix:      rapid.Bool().Draw(t, "no radix"),
		RetractEvery: rapid.IntRange(0, 4).Draw(t, "retract every"),
		DecodeSteps:  rapid.IntRange(0, 6).Draw(t, "decode steps"),
		HostPages:    rapid.SampledFrom([]int{0, 2, 10, 60}).Draw(t, "host pages"),
		WritePolicy:  rapid.SampledFrom([]kv.WritePolicy{kv.WriteThrough, kv.WriteBack}).Draw(t, "policy"),
		Parts:        rapid.Bool().Draw(t, "parts"),
	}
}

// TestRandomSchedules: whatever the configuration and the order of events,
// the books stay right, every read finds what it should, every request comes
// to its end, and nothing is left behind.
func TestRandomSchedules(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		c := drawConfig(t)
		var live []*Request
		s := &loop{Scheduler: New(c), memory: newMemory(), overlap: rapid.Bool().Draw(t, "overlap"), ended: func(r *Request) {
			live = slices.DeleteFunc(live, func(o *Request) bool { return o == r })
		}}
		var id uint64
		step := func(t *rapid.T) {
			if !s.step(t) && len(live) > 0 {
				t.Fatalf("%d requests wait for ever", len(live))
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"add": func(t *rapid.T) {
				id++
				r := &Request{ID: id, Prompt: rapid.SliceOfN(rapid.Int32Range(1, 2), 1, 10).Draw(t, "prompt"), MaxTokens: rapid.IntRange(1, 5).Draw(t, "max tokens")}
				if err := s.Add(r); err != nil {
					if len(r.Prompt)+r.MaxTokens <= s.Capacity() {
						t.Fatal(err)
					}
					return
				}
				live = append(live, r)
			},
			"step": step,
			"cancel": func(t *rapid.T) {
				if len(live) == 0 {
					t.Skip("nothing to cancel")
				}
				i := rapid.IntRange(0, len(live)-1).Draw(t, "which")
				s.Remove(live[i])
				live = slices.Delete(live, i, i+1)
			},
			"flush": func(*rapid.T) { s.Flush() },
			"fail": func(*rapid.T) { // a step whose forward pass fails ends its requests
				if len(s.flying) > 0 {
					t.Skip("a step is under way")
				}
				next := s.Schedule()
				if next == nil {
					return
				}
				s.Launch(next)
				s.memory.move(s.Scheduler, next)
				s.Fail(next)
				for _, item := range next.Items {
					s.Remove(item.Request)
					live = slices.DeleteFunc(live, func(o *Request) bool { return o == item.Request })
				}
			},
			"": func(t *rapid.T) {
				if err := s.Check(); err != nil {
					t.Fatal(err)
				}
				for _, f := range s.flying {
					for _, page := range slices.Concat(f.tables...) {
						if s.pages.Users(page) == 0 {
							t.Fatalf("page %d is free and a launched step uses it", page)
						}
					}
				}
			},
		})
		for range 2000 {
			if len(live) == 0 && len(s.flying) == 0 {
				break
			}
			step(t)
		}
		if len(live) > 0 {
			t.Fatalf("%d requests don't come to their end", len(live))
		}
		s.Flush()
		if s.FreePages() != c.Pages-1 || s.HostPages() != 0 {
			t.Fatalf("%d of %d pages are free at the end, %d are on the host", s.FreePages(), c.Pages-1, s.HostPages())
		}
	})
}

// TestEveryConfigurationGivesTheSameTokens plays one set of requests under two
// configurations.
func TestEveryConfigurationGivesTheSameTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prompts := rapid.SliceOfN(rapid.SliceOfN(rapid.Int32Range(1, 2), 1, 8), 1, 6).Draw(t, "prompts")
		play := func(c Config) [][]int32 {
			s := &loop{Scheduler: New(c), memory: newMemory(), overlap: rapid.Bool().Draw(t, "overlap"), ended: func(*Request) {}}
			var requests []*Request
			for i, p := range prompts {
				r := &Request{ID: uint64(i), Prompt: p, MaxTokens: 5}
				if err := s.Add(r); err != nil {
					t.Skip("the pool is too small")
				}
				requests = append(requests, r)
			}
			for n := 0; n < 5000 && s.step(t); n++ {
			}
			var out [][]int32
			for _, r := range requests {
				out = append(out, r.Output[:r.MaxTokens])
			}
			return out
		}
		a, b := play(drawConfig(t)), play(drawConfig(t))
		if diff := cmp.Diff(a, b); diff != "" {
			t.Fatal(diff)
		}
	})
}

// TestPressure shows that the things that the other tests are about happen.
func TestPressure(t *testing.T) {
	for _, policy := range []kv.WritePolicy{kv.WriteThrough, kv.WriteBack} {
		t.Run(policy.String(), func(t *testing.T) {
			s := New(Config{Pages: 12, PageSize: 2, MaxRunning: 8, ChunkTokens: 4, HostPages: 26, WritePolicy: policy, Parts: true})
			var live []*Request
			parts, next := 0, (*Step)(nil)
			for range 2 { // the same prompts again: the device has lost them by then
				for i := range 6 {
					r := &Request{ID: uint64(i), Prompt: []int32{1, 1, 1, 1, int32(i), 1, 2, 3}, MaxTokens: 8}
					if err := s.Add(r); err != nil {
						t.Fatal(err)
					}
					live = append(live, r)
				}
				for range 500 {
					if next = s.Schedule(); next == nil {
						break
					}
					for _, load := range next.Loads {
						if load.Tokens < 2 {
							parts++
						}
					}
					var sampled []int32
					for _, item := range next.Items {
						if item.Samples() {
							sampled = append(sampled, int32(item.Request.ID))
						}
					}
					s.Done(next, sampled)
					if err := s.Check(); err != nil {
						t.Fatal(err)
					}
					for _, item := range next.Items {
						if r := item.Request; len(r.Output) == r.MaxTokens {
							s.Remove(r)
						}
					}
				}
			}
			host := 0
			for _, r := range live {
				if len(r.Output) != r.MaxTokens {
					t.Errorf("request %d has %d tokens", r.ID, len(r.Output))
				}
				if r.HostTokens > r.CachedTokens {
					t.Errorf("request %d found %d tokens, %d of them on the host", r.ID, r.CachedTokens, r.HostTokens)
				}
				host += r.HostTokens
			}
			st := s.Stats()
			t.Logf("%+v, %d parts of pages", st, parts)
			if st.Retractions == 0 || st.Evicted == 0 || st.CachedTokens == 0 || st.Chunked == 0 ||
				st.HostTokens != uint64(host) || host == 0 || st.Loaded == 0 || st.BackedUp == 0 || st.HostEvicted == 0 || parts == 0 {
				t.Errorf("no pressure: %+v", st)
			}
		})
	}
}

package lab

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/model"
)

// ids are a reply's tokens: sums over ranks have other last bits.
func ids(r reply) (all []int32) {
	for _, t := range r.Tokens {
		all = append(all, t.ID)
	}
	return all
}

// sameBooks says whether the ranks scheduled alike.
func sameBooks(t *testing.T, e *Engine) {
	t.Helper()
	for _, o := range e.others {
		if err := o.Check(); err != nil {
			t.Error(err)
		}
		if err := leftovers(o); err != nil {
			t.Error(err)
		}
		if o.sched.Stats() != e.sched.Stats() {
			t.Errorf("the ranks scheduled differently: %+v and %+v", e.sched.Stats(), o.sched.Stats())
		}
	}
}

// same says whether the ranks' caches are alike, too.
func same(t *testing.T, e *Engine) {
	t.Helper()
	sameBooks(t, e)
	for _, o := range e.others {
		for l := range model.Layers {
			if !slices.Equal(e.cache.Latent[l], o.cache.Latent[l]) || !bytes.Equal(e.cache.Index[l], o.cache.Index[l]) {
				t.Errorf("the ranks' caches differ in layer %d", l)
			}
		}
	}
}

// TestRanksSameReplies: several ranks give the tokens that one gives.
func TestRanksSameReplies(t *testing.T) {
	all := requests(80)
	for _, c := range []Config{
		{Ranks: 2, PageSize: 16},
		{Ranks: 2, PageSize: 32, NoOverlap: true, MaxTokens: 600, ChunkTokens: 30, Workers: 2},
		{Ranks: 4, PageSize: 16, MaxTokens: 700, RetractEvery: 3, NoGraph: true},
	} {
		t.Run(fmt.Sprintf("%d ranks, no overlap %t, no graph %t", c.Ranks, c.NoOverlap, c.NoGraph), func(t *testing.T) {
			e := testEngine(t, c)
			var streams []*Stream
			for _, r := range all {
				s, err := e.Submit(t.Context(), r)
				if err != nil {
					t.Fatal(err)
				}
				streams = append(streams, s)
			}
			drain(t, e)
			for i, s := range streams {
				want, got := alone()[model.FP8][i], read(s)
				if diff := cmp.Diff(ids(want), ids(got)); diff != "" || got.Reason != want.Reason {
					t.Errorf("request %d: %s", i, diff)
				}
			}
			if err := leftovers(e); err != nil {
				t.Error(err)
			}
			same(t, e)
		})
	}
}

// TestRanksMassAbort: an abort of everything in the middle of steps leaves the
// ranks as they were to each other. With rank-local-gate they wait for each
// other for ever, if steps overlap.
func TestRanksMassAbort(t *testing.T) {
	for _, tt := range []struct{ fault, noOverlap, wedged bool }{
		{false, false, false}, {true, true, false}, {true, false, true},
	} {
		t.Run(fmt.Sprintf("fault %t, no overlap %t", tt.fault, tt.noOverlap), func(t *testing.T) {
			c := Config{Ranks: 2, PageSize: 16, NoOverlap: tt.noOverlap, CollectiveLimit: 2 * time.Second}
			if tt.fault {
				c.Faults = faults(t, "rank-local-gate")
			}
			e := testEngine(t, c)
			ctx, stop := context.WithCancel(context.Background())
			var engine sync.WaitGroup
			engine.Go(func() { e.Run(ctx) })
			var streams []*Stream
			for i := range 8 {
				r := long("", 30, uint64(i))
				r.MaxTokens = 200
				s, err := e.Submit(t.Context(), r)
				if err != nil {
					t.Fatal(err)
				}
				streams = append(streams, s)
			}
			<-streams[7].Tokens()
			if n := e.Abort("", true); n == 0 {
				t.Error("nothing was aborted")
			}
			start := time.Now()
			s, err := e.Submit(t.Context(), long("", 30, 99))
			if err == nil {
				got := read(s)
				if wedged := errors.Is(s.Ending().Err, ErrShutDown); wedged != tt.wedged {
					t.Errorf("the next request: %+v %v", got, s.Ending().Err)
				}
			} else {
				t.Error(err)
			}
			if waited := time.Since(start) >= c.CollectiveLimit; waited != tt.wedged {
				t.Errorf("the next request took %v", time.Since(start))
			}
			for _, s := range streams {
				read(s)
			}
			stop()
			engine.Wait()
			if !tt.wedged {
				if err := leftovers(e); err != nil {
					t.Error(err)
				}
				same(t, e)
			}
		})
	}
}

// TestCollectives: the sum has the order of the ranks, the least is everybody's,
// and who calls something else waits in vain.
func TestCollectives(t *testing.T) {
	g := newGroup(3, 50*time.Millisecond)
	x := [][]float32{{1e8, 1}, {-1e8, 1}, {1, 1}}
	states := [][]disagg.State{{4, 2}, {3, 3}, {4, 0}}
	var ranks sync.WaitGroup
	for r := range 3 {
		ranks.Go(func() {
			g.sum(r)(model.ReducePart{Layer: 1}, x[r])
			if err := g.min(states[r]); err != nil {
				t.Error(err)
			}
		})
	}
	ranks.Wait()
	for r := range 3 {
		if diff := cmp.Diff([]float32{1, 3}, x[r]); diff != "" {
			t.Error(diff)
		}
		if diff := cmp.Diff([]disagg.State{3, 0}, states[r]); diff != "" {
			t.Error(diff)
		}
	}
	if err := g.min(states[0]); err == nil {
		t.Error("a rank that is alone doesn't hang")
	}
}

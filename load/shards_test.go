package load_test

import (
	"cmp"
	"fmt"
	"slices"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/workload"
)

// sent is what was sent when, in the order of the plan.
func sent(m *memory) []string {
	ops := slices.Clone(m.ops)
	slices.SortFunc(ops, func(a, b history.Op) int {
		return cmp.Or(cmp.Compare(a.Session, b.Session), cmp.Compare(a.Turn, b.Turn))
	})
	var list []string
	for _, op := range ops {
		list = append(list, fmt.Sprintf("session %d turn %d at %v", op.Session, op.Turn, op.Planned))
	}
	return list
}

// The shards of an open loop send together what one process would send, each
// request at the same time.
func TestShardsOfOpenLoop(t *testing.T) {
	var whole []string
	for _, shards := range []int{1, 2, 3, 7} {
		together := &memory{}
		for shard := range shards {
			play(t, tokens(3, 10*time.Millisecond), func(t *testing.T, o load.Options) {
				s := &script{turns: []workload.Turn{{Request: hello}, {Request: hello, Delay: 70 * time.Millisecond}}}
				o.History, o.Workload, o.Sessions, o.RequestRate, o.Seed, o.Concurrency = together, s, 50, 10, 7, 1000
				o.Shard, o.Shards = shard, shards
				result := mustRun(t, o)
				if want := load.Share(50, shard, shards); result.Sessions != want || result.SessionsDone != want || result.Stopped != "" {
					t.Errorf("shard %d of %d: %+v", shard, shards, result)
				}
			})
		}
		if shards == 1 {
			whole = sent(together)
			continue
		}
		if d := gocmp.Diff(whole, sent(together)); d != "" {
			t.Errorf("%d shards together (-one process +shards):\n%s", shards, d)
		}
	}
}

// The shards of a closed loop play all sessions once, and never more at once
// than their shares of the concurrency.
func TestShardsOfClosedLoop(t *testing.T) {
	together, most := &memory{}, 0
	for shard := range 3 {
		play(t, tokens(3, 10*time.Millisecond), func(t *testing.T, o load.Options) {
			m := &memory{}
			o.History, o.Workload, o.Sessions, o.Concurrency = m, &script{turns: []workload.Turn{{Request: hello}, {Request: hello}}}, 20, 8
			o.Shard, o.Shards = shard, 3
			mustRun(t, o)
			inFlight := 0
			for _, op := range m.ops {
				inFlight = max(inFlight, op.InFlight)
			}
			most += inFlight
			together.ops = append(together.ops, m.ops...)
		})
	}
	sessions := map[int]int{}
	for _, op := range together.ops {
		sessions[op.Session]++
	}
	if len(together.ops) != 40 || len(sessions) != 20 || most != 8 {
		t.Errorf("%d ops of %d sessions, at most %d at once; want 40, 20 and 8", len(together.ops), len(sessions), most)
	}
}

func TestShares(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		all, shards := rapid.IntRange(0, 1000).Draw(r, "all"), rapid.IntRange(1, 50).Draw(r, "shards")
		sum := 0
		for shard := range shards {
			share := load.Share(all, shard, shards)
			numbers := 0
			for i := shard; i < all; i += shards {
				numbers++
			}
			if share != numbers {
				r.Fatalf("shard %d of %d has %d of %d, its numbers are %d", shard, shards, share, all, numbers)
			}
			sum += share
		}
		if sum != all {
			r.Fatalf("the shares of %d add up to %d", all, sum)
		}
	})
}

func TestWrongShards(t *testing.T) {
	for _, c := range []struct{ shard, shards, concurrency int }{{2, 2, 4}, {-1, 2, 4}, {0, 4, 3}} {
		_, err := load.Run(t.Context(), load.Options{
			BaseURL: "http://server", Workload: &script{}, History: &memory{}, Sessions: 8, Concurrency: c.concurrency, Shard: c.shard, Shards: c.shards,
		})
		if err == nil {
			t.Errorf("%+v is played", c)
		}
	}
}

package oracle

import (
	"strings"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
)

// shardTicks are a run of two shards on machines of 2 cores, 20 seconds long.
func shardTicks(j *judgement, change func(second, shard int, e *history.Event)) {
	j.event(&history.Event{Kind: history.Started, Name: "main"})
	for second := 1; second <= 20; second++ {
		at := time.Duration(second) * time.Second
		for shard, name := range []string{"0", "1"} {
			e := history.Event{At: at, Kind: history.ShardTick, Name: name, Values: map[string]float64{"in_flight": 4, "chunks": 9, "cpu": 0.5, "host_cpu": 0.5}}
			if change(second, shard, &e); e.Values != nil {
				j.event(&e)
			}
		}
		j.event(&history.Event{At: at, Kind: history.Tick, Values: map[string]float64{"in_flight": 8, "chunks": 18, "cpu": 1}})
	}
	j.event(&history.Event{At: 20 * time.Second, Kind: history.Ended, Name: "main"})
}

func twoShards(h history.Header) *judgement {
	h.Shards = []history.Shard{{Number: 0, Host: "a", Cores: 2}, {Number: 1, Host: "b", Cores: 2, WithinUS: 300}}
	h.Cores = 4
	return newJudgement(h, Registry)
}

// What one shard couldn't do doesn't hide behind the others.
func TestShardsKeepUp(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(second, shard int, e *history.Event)
		ran    string // empty when it holds
		keptUp string
	}{
		{"all well", func(int, int, *history.Event) {}, "", ""},
		{"one is late", func(second, shard int, e *history.Event) {
			if shard == 1 && second%4 == 0 {
				e.Values["late_ms"] = 400
			}
		}, "", "shard 1 on b: 5 of 20 ticks"},
		{"one machine is busy", func(_, shard int, e *history.Event) {
			if shard == 0 {
				e.Values["host_cpu"] = 1.9
			}
		}, "", "shard 0 on a: 0 of 20 ticks"},
		{"one slept", func(second, shard int, e *history.Event) {
			if shard == 1 && second > 5 && second < 12 {
				e.Values = nil
			}
		}, "shard 1 on b: its own clock ticked 14 times, with at most 7.0 s", ""},
	} {
		j := twoShards(history.Header{Sessions: 8, Concurrency: 8})
		shardTicks(j, c.change)
		if a := j.clientRan(); a.Holds != (c.ran == "") || !strings.HasPrefix(a.Found, c.ran) {
			t.Errorf("%s: ran: %+v", c.name, a)
		}
		if a := j.clientKeptUp(); a.Holds != (c.keptUp == "") || !strings.HasPrefix(a.Found, c.keptUp) {
			t.Errorf("%s: kept up: %+v", c.name, a)
		}
		if a, ok := j.beganTogether(); !ok || !a.Holds {
			t.Errorf("%s: began together: %+v", c.name, a)
		}
	}
}

// Each shard must reach its share: another's surplus is no substitute.
func TestShardsReachConcurrency(t *testing.T) {
	play := func(idle bool) Assumption {
		j := twoShards(history.Header{Sessions: 80, Concurrency: 40})
		id := int64(0)
		for session := range 80 {
			for turn := range 10 {
				from := time.Duration(turn) * time.Second
				if session >= 40 {
					from += 10 * time.Second
				}
				planned, end := from, from+time.Second
				if idle && session%10 == 1 {
					planned, end = from-700*time.Millisecond, from+300*time.Millisecond // one in ten of all, one in five of shard 1
				}
				id++
				j.op(&history.Op{ID: id, Phase: history.Main, Session: session, Turn: turn, Planned: planned, Sent: from, LastByte: end, Outcome: history.OK})
			}
		}
		a, _ := j.reachedConcurrency()
		return a
	}
	if a := play(false); !a.Holds {
		t.Errorf("reached: %+v", a)
	}
	if a := play(true); a.Holds || !strings.HasPrefix(a.Found, "shard 1: at least 18 of the 20 planned") {
		t.Errorf("one shard has a tenth less in flight: %+v", a)
	}
}

func TestShardsOnTime(t *testing.T) {
	j := twoShards(history.Header{Sessions: 1000, RequestRate: 10})
	for i := range 1000 {
		late := time.Duration(0)
		if i%126 == 1 {
			late = time.Second // 0.8% of all, 1.6% of shard 1
		}
		j.op(&history.Op{ID: int64(i + 1), Phase: history.Main, Session: i, Sent: late, LastByte: 2 * time.Second, Outcome: history.OK})
	}
	if a, ok := j.sentOnTime(); !ok || a.Holds || !strings.HasPrefix(a.Found, "shard 1 was the latest") {
		t.Errorf("got %+v", a)
	}
}

func TestShardsBeganApart(t *testing.T) {
	j := newJudgement(history.Header{Shards: []history.Shard{{}, {WithinUS: 1_900_000}}}, nil)
	if a, ok := j.beganTogether(); !ok || a.Holds || !strings.Contains(a.Found, "1.9 s") {
		t.Errorf("got %+v", a)
	}
}

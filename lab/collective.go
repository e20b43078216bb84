package lab

import (
	"fmt"
	"sync"
	"time"

	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/model"
)

// group connects tensor-parallel ranks. Every rank has to call the same
// collectives. One that the others don't call waits for them in vain: as in
// the real thing nothing tells a mistake from a slow peer but the time limit.
type group struct {
	size  int
	limit time.Duration

	mu       sync.Mutex
	meetings map[any]*meeting
}

// meeting is one collective that not all ranks have come to yet.
type meeting struct {
	parts [][]float32 // by rank
	least []disagg.State
	come  int
	done  chan struct{} // closed when all have come and the result is there
}

func newGroup(size int, limit time.Duration) *group {
	return &group{size: size, limit: limit, meetings: map[any]*meeting{}}
}

// meet joins a collective. contribute is called under the lock; the last to
// come finishes.
func (g *group) meet(name any, contribute, finish func(*meeting)) error {
	g.mu.Lock()
	m := g.meetings[name]
	if m == nil {
		m = &meeting{parts: make([][]float32, g.size), done: make(chan struct{})}
		g.meetings[name] = m
	}
	contribute(m)
	if m.come++; m.come == g.size {
		delete(g.meetings, name)
		finish(m)
		close(m.done)
	}
	g.mu.Unlock()
	select {
	case <-m.done:
		return nil
	default:
	}
	late := time.NewTimer(g.limit)
	defer late.Stop()
	select {
	case <-m.done:
		return nil
	case <-late.C:
		return fmt.Errorf("the other ranks didn't come to a collective within %v", g.limit)
	}
}

// sum is a model.AllReduce: it sums in the order of the ranks, and panics at
// the time limit.
func (g *group) sum(rank int) model.AllReduce {
	return func(part model.ReducePart, x []float32) {
		err := g.meet(part, func(m *meeting) { m.parts[rank] = x }, func(m *meeting) {
			for i := range m.parts[0] {
				var sum float32
				for _, p := range m.parts {
					sum += p[i]
				}
				for _, p := range m.parts {
					p[i] = sum
				}
			}
		})
		if err != nil {
			panic(err)
		}
	}
}

// minName tells this collective from the sums.
type minName struct{ count int }

// min makes states the least of all ranks', element by element.
func (g *group) min(states []disagg.State) error {
	var all *meeting
	err := g.meet(minName{len(states)}, func(m *meeting) {
		all = m
		if m.least == nil {
			m.least = append([]disagg.State{}, states...)
		}
		for i, s := range states {
			m.least[i] = min(m.least[i], s)
		}
	}, func(*meeting) {})
	if err == nil {
		copy(states, all.least)
	}
	return err
}

package lab

import (
	"maps"

	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/host"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/lab/sched"
)

// Stats counts what the engine did since its start, and says where it stands.
type Stats struct {
	sched.Stats
	GeneratedTokens  uint64
	Prefill, Decode  Histogram // of the steps' requests
	Ended            map[Reason]uint64
	Running, Waiting int
	Transfers        disagg.Stats
	Polls            map[disagg.State]uint64 // answers to the question where a transfer stands
	FreePages        int                     // that nobody uses
	CachedPages      int                     // of known prefixes, in use or not
	Pages            int                     // in all

	HostPages       int // in all
	HostCachedPages int // of known prefixes
	Waits           host.Waits
	Copies          []host.Copies // none where there is no host tier

	ExpressionErrors uint64 // faults whose expression failed, such as by a division by zero

	PrefillCounts model.Counts
	Decoder       model.DecodeStats
}

// Histogram counts steps by how many requests were in them: Counts[i] those
// with at most 1<<i, and not in the one before; the last, all others.
type Histogram struct {
	Counts [10]uint64
	Sum    uint64
}

func (h *Histogram) add(n int) {
	i := 0
	for i < len(h.Counts)-1 && n > 1<<i {
		i++
	}
	h.Counts[i]++
	h.Sum += uint64(n)
}

// Stats returns the counts as of the last step.
func (e *Engine) Stats() Stats {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := e.stats
	s.Ended, s.Polls = maps.Clone(s.Ended), maps.Clone(s.Polls)
	s.ExpressionErrors = e.expressionErrors.Load()
	return s
}

// publish makes the counts of the books visible to others, and tells them the
// news.
func (e *Engine) publish() {
	e.copyBooks()
	for _, tell := range e.news {
		tell()
	}
	e.news = e.news[:0]
}

func (e *Engine) copyBooks() {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := &e.stats
	s.Stats = e.sched.Stats()
	s.Running, s.Waiting = e.sched.Running(), e.sched.Waiting()
	s.FreePages, s.CachedPages = e.sched.FreePages(), e.sched.CachedPages()
	s.Pages = e.sched.Capacity() / e.config.PageSize
	s.HostPages, s.HostCachedPages = e.config.HostTokens/e.config.PageSize, e.sched.HostPages()
	s.Transfers = e.transferStats()
}

func (e *Engine) countPolls(states []disagg.State) {
	if len(states) == 0 {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stats.Polls == nil {
		e.stats.Polls = map[disagg.State]uint64{}
	}
	for _, s := range states {
		e.stats.Polls[s]++
	}
}

func (e *Engine) count(step *sched.Step) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if step.Prefill {
		e.stats.Prefill.add(len(step.Items))
	} else {
		e.stats.Decode.add(len(step.Items))
	}
}

// countHost takes the host tier's counts as of a step.
func (e *Engine) countHost(waits host.Waits, copies []host.Copies) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stats.Waits, e.stats.Copies = waits, copies // nobody writes to copies
}

// countForward takes the forward pass's counts as of a step.
func (e *Engine) countForward(prefill model.Counts, decode model.DecodeStats) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stats.PrefillCounts, e.stats.Decoder = prefill, decode // nobody writes to its map
}

func (e *Engine) countToken() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.stats.GeneratedTokens++
}

func (e *Engine) countEnd(reason Reason) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stats.Ended == nil {
		e.stats.Ended = map[Reason]uint64{}
	}
	e.stats.Ended[reason]++
}

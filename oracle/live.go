package oracle

import (
	"sync"

	"github.com/culprit-project/culprit/history"
)

// Live judges ops while a run goes on, for its progress and for what it does
// about failures. The verdict is [Judge]'s, from the history. It is safe for
// use by several goroutines.
type Live struct {
	mu             sync.Mutex
	judgement      *judgement
	trials, broken int
}

// NewLive begins a run's judging.
func NewLive(h history.Header) *Live { return &Live{judgement: newJudgement(h, Registry)} }

// Op judges one op and says whether it shows damage, as far as can be told
// now.
func (l *Live) Op(op *history.Op) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	rec := l.judgement.rec
	l.judgement.op(op)
	w := rec.row(op.ID)
	corrupt := rec.corruptClasses()
	if w.trials&corrupt != 0 {
		l.trials++
	}
	if w.violations&corrupt == 0 {
		return false
	}
	l.broken++
	return true
}

// Broken says how many ops showed damage so far, of how many that could have.
func (l *Live) Broken() (broken, trials int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.broken, l.trials
}

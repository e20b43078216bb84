package oracle

import (
	"sync"

	"github.com/culprit-project/culprit/history"
)

// Live judges ops while a run goes on, for its progress and for what it does
// about failures. The verdict is [Judge]'s, from the history. It is safe for
// use by several goroutines.
type Live struct {
	mu        sync.Mutex
	judgement *judgement
	counts    [2]Count // by arm
}

// Count is how many ops showed damage so far, of how many that could have.
type Count struct{ Broken, Judged int }

// NewLive begins a run's judging.
func NewLive(h history.Header) *Live { return &Live{judgement: newJudgement(h, Registry)} }

// Op judges one op and says whether it shows damage, as far as can be told
// now.
func (l *Live) Op(op *history.Op) bool {
	damaged, _ := l.Violations(op)
	return damaged
}

// Violations judges one op and names the classes of what it shows, numerics
// left out. damaged says that one of them means corruption.
func (l *Live) Violations(op *history.Op) (damaged bool, classes []Class) {
	l.mu.Lock()
	defer l.mu.Unlock()
	rec := l.judgement.rec
	l.judgement.op(op)
	w := rec.row(op.ID)
	corrupt := rec.corruptClasses()
	count := &l.counts[w.arm()]
	if w.trials&corrupt != 0 {
		count.Judged++
	}
	for i, t := range rec.classes {
		if w.violations&(1<<i) != 0 && t.rule.Means != Numerics {
			classes = append(classes, t.rule.Class)
		}
	}
	if w.violations&corrupt == 0 {
		return false, classes
	}
	count.Broken++
	return true, classes
}

// Counts says what was found so far, under load and in the control arm.
func (l *Live) Counts() (main, control Count) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.counts[mainArm], l.counts[controlArm]
}

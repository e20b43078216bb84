package workload

import (
	"fmt"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// What knobs of every kind are when the one that they belong to is set.
const (
	defaultFillerLines    = 96
	defaultCancelWithinMS = 40
	defaultCancelChunks   = 16
	// shortShare is the part of its lines that a session of short_every has.
	shortShare = 4
)

// shaped is a session of any kind under the knobs that every kind has: fillers
// between its turns, and turns that are sent twice, the first time to be hung
// up on.
type shaped struct {
	Session
	w     *workload
	index int
	tag   string
	// The kind's own next turn, while what comes before it is sent.
	held    *Turn
	turn    int // of the kind's own
	fillers int // left to be sent before it
	cancel  bool
}

func (w *workload) shape(i int, alone bool) Session {
	p := w.plan
	if p.ShortEvery > 0 && i%p.ShortEvery == p.ShortEvery-1 {
		short := *w
		for _, lines := range []*int{&short.plan.ContextLines, &short.plan.CopyLines} {
			if *lines > 0 {
				*lines = max(*lines/shortShare, 2)
			}
		}
		w = &short
	}
	s := w.kind.session(w, i, alone)
	if p.CancelEvery == 0 && (p.Fillers == 0 || w.kind.defaults.Fillers > 0) {
		return s
	}
	return &shaped{Session: s, w: w, index: i, tag: history.Canary(w.key, i, alone)}
}

func (s *shaped) Next(prev *openai.Reply) (Turn, bool) {
	if s.held == nil {
		t, ok := s.Session.Next(prev)
		if !ok {
			return t, false
		}
		s.held = &t
		p := s.w.plan
		if s.turn > 0 && s.w.kind.defaults.Fillers == 0 {
			s.fillers = p.Fillers
		}
		s.turn++
		// Sessions are out of step: not all of them hang up at once.
		s.cancel = p.CancelEvery > 0 && (s.index+s.turn)%p.CancelEvery == 0 && t.CancelAfter == 0 && t.CancelChunks == 0
	}
	switch {
	case s.fillers > 0:
		s.fillers--
		title := fmt.Sprintf("Filler %d before turn %d", s.fillers+1, s.turn)
		lockers := drawLockers(s.w.rng(s.index, title), s.w.plan.FillerLines)
		filler := s.w.prompt(s.tag, title, tellAll(lockers), lockers[0].ask(), history.Expect{})
		filler.Request.MaxTokens = 1
		return filler, true
	case s.cancel:
		s.cancel = false
		t := *s.held
		t.Expect = history.Expect{Canary: t.Expect.Canary} // nobody waits for the answer
		r := s.w.rng(s.index, fmt.Sprintf("cancel %d", s.turn))
		if (s.index+s.turn/s.w.plan.CancelEvery)%2 == 0 {
			t.CancelAfter = time.Duration(1+r.IntN(s.w.plan.CancelWithinMS*1000)) * time.Microsecond
		} else {
			t.CancelChunks = 1 + r.IntN(s.w.plan.CancelChunks)
		}
		return t, true
	}
	t := *s.held
	s.held = nil
	return t, true
}

// Turns is how many requests session i has when nothing ends it early.
func Turns(w Workload, i int) int {
	s := w.Session(i, false)
	n := 0
	for t, ok := s.Next(nil); ok; t, ok = s.Next(RightReply(t)) {
		n++
	}
	return n
}

package workload

import (
	"math/rand/v2"
	"strings"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

var recallDefaults = Plan{Sessions: 8, Rounds: 40, MaxTokens: 32, OnError: Repair}

// recallMax is the longest distance that recall asks for, in turns.
const recallMax = 30

// recall is a chat in which every turn tells the codes of two lockers and, but
// for the first, asks for one told k turns ago, k = 1..30. No locker is asked
// for twice: the first answer would stand nearer than the telling.
type recall struct {
	w        *workload
	tag      string
	lockers  []locker // two a turn
	asks     []int    // by turn: which locker
	messages []openai.Message
	round    int
	answer   string // to the last turn
}

func newRecall(w *workload, i int, alone bool) Session {
	tag := history.Canary(w.key, i, alone)
	return &recall{
		w: w, tag: tag, lockers: drawLockers(w.rng(i, "lockers"), 2*w.plan.Rounds),
		asks: drawAsks(w.rng(i, "asks"), w.plan.Rounds),
		messages: []openai.Message{{Role: "system", Content: openai.Text(
			"Your tag is " + tag + ". You keep the codes of lockers. When you are asked for a code, answer with that code alone.")}},
	}
}

// drawAsks draws which locker each turn asks for: one at a distance drawn from
// all that the turn allows, or the nearest to it that isn't asked for yet. The
// last turn draws first: only late turns allow long distances, and the early
// ones must not use up the old lockers. A turn's first locker is kept for the
// next turn, for when all other lockers are taken.
func drawAsks(r *rand.Rand, rounds int) []int {
	asks := make([]int, rounds)
	taken := make([]bool, rounds) // by turn: its second locker
	for turn := rounds - 1; turn > 0; turn-- {
		want := turn - 1 - r.IntN(min(turn, recallMax))
		best := -1
		for told := max(0, turn-recallMax); told < turn; told++ {
			if !taken[told] && (best < 0 || abs(told-want) < abs(best-want)) {
				best = told
			}
		}
		if best < 0 {
			asks[turn] = 2 * (turn - 1)
			continue
		}
		taken[best] = true
		asks[turn] = 2*best + 1
	}
	return asks
}

func abs(n int) int { return max(n, -n) }

func (s *recall) Next(prev *openai.Reply) (Turn, bool) {
	if s.round > s.w.plan.Rounds || s.round > 0 && !s.settle(prev) || s.round == s.w.plan.Rounds {
		s.round = s.w.plan.Rounds + 1 // over for good
		return Turn{}, false
	}
	expect := history.Expect{Canary: s.tag}
	text := tellAll(s.lockers[2*s.round : 2*s.round+2])
	s.answer = ""
	if s.round == 0 {
		text += "\nAnswer ok."
	} else {
		asked := s.asks[s.round]
		text += "\n" + s.lockers[asked].ask()
		s.answer = s.lockers[asked].code
		expect.Answer, expect.Distance = s.answer, s.round-asked/2
	}
	s.round++
	s.messages = append(s.messages, openai.Message{Role: "user", Content: openai.Text(text)})
	return s.w.turn(s.messages, expect), true
}

// settle puts the reply to the last turn, or the right one in its place, into
// the conversation. It says whether the session goes on.
func (s *recall) settle(prev *openai.Reply) bool {
	failed := prev == nil || prev.Err != nil
	wrong := failed || !strings.Contains(prev.Content, s.answer)
	if wrong && s.w.plan.OnError == Stop {
		return false
	}
	var text openai.Text
	switch {
	case wrong && (failed || s.w.plan.OnError == Repair):
		text = openai.Text(s.answer)
		if s.answer == "" {
			text = "ok"
		}
	default:
		text = kept(prev.Content)
	}
	s.messages = append(s.messages, openai.Message{Role: "assistant", Content: text})
	return true
}

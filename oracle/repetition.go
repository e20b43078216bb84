package oracle

import (
	"fmt"
	"hash/maphash"
	"strings"

	"github.com/culprit-project/culprit/history"
)

// Repetition is a reply that ends in a loop: the same phrase over and over.
const Repetition Class = "Repetition"

// Loop looks for loops at the end of a reply.
var Loop = Oracle{
	Name:    "repetition",
	Classes: []Class{Repetition},
	New:     func(history.Header) Observer { return &loopObserver{seed: maphash.MakeSeed()} },
}

type loopObserver struct {
	seed   maphash.Seed
	border []int32 // the prefix function of the tail, kept for the next op
	words  []uint64
	grams  map[[4]uint64]gram
}

func (o *loopObserver) Op(v *View, rec *Recorder) {
	texts := v.Texts()
	if len(texts) == 0 {
		return
	}
	rec.Trial(v.Op.ID, Repetition)
	for _, t := range texts {
		if period, times := o.loop(t.Text); times > 0 {
			unit := t.Text[len(t.Text)-period:]
			rec.Violation(Violation{
				Class: Repetition, Op: v.Op.ID,
				Want: "an end", Got: excerpt(unit, 0),
				Note:     fmt.Sprintf("the %s ends in the same %d bytes %d times", t.Where, period, times),
				Severity: float64(period * times),
			})
			return
		}
	}
	if v.Reply.FinishReason != "length" {
		return
	}
	for _, t := range texts {
		if share, phrase := o.phraseShare(t.Text); share > phraseShare {
			rec.Violation(Violation{
				Class: Repetition, Op: v.Op.ID,
				Want: "an end", Got: phrase,
				Note:     fmt.Sprintf("one phrase of four words is %.0f%% of the last words of the %s", 100*share, t.Where),
				Severity: share,
			})
			return
		}
	}
}

func (o *loopObserver) Event(*history.Event, *Recorder) {}
func (o *loopObserver) Finish(*Recorder)                {}

// loop returns the shortest period, in bytes, with which text ends loopTimes
// or more, and how often; times is 0 if there is none. The last repeat may be
// cut anywhere. Loops of rules and space only are the business of [Run].
func (o *loopObserver) loop(text string) (period, times int) {
	s := text[max(0, len(text)-loopTail):]
	if len(s) < loopBytes {
		return 0, 0
	}
	// The prefix function of the reversed tail (Knuth, Morris, Pratt 1977):
	// border[i] is the length of the longest proper border of its first i+1
	// bytes, so that these have the period i+1-border[i]. Linear time.
	n := len(s)
	if cap(o.border) < n {
		o.border = make([]int32, loopTail)
	}
	border := o.border[:n]
	border[0] = 0
	last := n - 1
	k := int32(0)
	for i := 1; i < n; i++ {
		c := s[last-i]
		for k > 0 && c != s[last-int(k)] {
			k = border[k-1]
		}
		if c == s[last-int(k)] {
			k++
		}
		border[i] = k
		length := i + 1
		p := length - int(k)
		if length < loopBytes || p > loopPeriod || length < loopTimes*p {
			continue
		}
		// The first hit has the shortest period; the loop may go on.
		period, times = p, length/p
		for length < n && s[last-length] == s[last-length+p] {
			length++
			times = length / p
		}
		if isRule(s[n-period:]) {
			return 0, 0
		}
		return period, times
	}
	return 0, 0
}

// phraseShare returns the share of the last words that the commonest phrase of
// four words covers, and that phrase. It finds loops that aren't exact, such
// as lists whose numbers go on.
func (o *loopObserver) phraseShare(text string) (share float64, phrase string) {
	o.words = o.words[:0]
	for word := range strings.FieldsSeq(text) {
		if isWord(word) {
			o.words = append(o.words, maphash.String(o.seed, word))
		}
	}
	words := o.words[max(0, len(o.words)-loopWords):]
	if len(words) < loopWords/4 {
		return 0, "" // too short for a share to mean anything
	}
	if o.grams == nil {
		o.grams = map[[4]uint64]gram{}
	}
	clear(o.grams)
	var top gram
	for i := 0; i+4 <= len(words); i++ {
		key := [4]uint64(words[i : i+4])
		g, known := o.grams[key]
		if known && i < g.next {
			continue // it overlaps the last one counted
		}
		g.count++
		g.next = i + 4
		o.grams[key] = g
		if g.count > top.count {
			top = g
		}
	}
	last := len(o.words) - len(words) + top.next
	skip := last - 4
	var found []string
	for word := range strings.FieldsSeq(text) {
		if !isWord(word) {
			continue
		}
		if skip--; skip < 0 {
			found = append(found, word)
		}
		if len(found) == 4 {
			break
		}
	}
	return float64(4*top.count) / float64(len(words)), strings.Join(found, " ")
}

// gram is how often a phrase came, and the first place after the last one.
type gram struct{ count, next int }

package oracle

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"math"
	"slices"

	"github.com/culprit-project/culprit/history"
)

// ForeignCanary is another session's secret in a reply.
const ForeignCanary Class = "ForeignCanary"

// Canary looks for every session's canary in every reply: control, main or
// recovery, at work, finished or not begun. The header alone tells them all.
// Traffic that was recorded, not made by us, has none; see foundObserver.
var Canary = Oracle{
	Name:    "canary",
	Classes: []Class{ForeignCanary},
	New:     newCanaryObserver,
}

// maxCanarySessions is as many as a workload has. Each takes some 100 bytes.
const maxCanarySessions = 1 << 20

type canaryObserver struct {
	owners []canaryOwner    // in the order of their canaries
	first  map[uint64]int32 // the first owner by the beginning of its canary, 5 bits a character
	prefix int              // characters of it
	seen   map[string]bool  // leaks of the op at hand
}

type canaryOwner struct {
	canary  [history.CanaryLength]byte
	session int32
	alone   bool
	beside  bool // of a plain request after a failure
}

func newCanaryObserver(h history.Header) Observer {
	if h.RunKey == "" {
		return newFoundObserver()
	}
	o := &canaryObserver{seen: map[string]bool{}, prefix: canaryPrefixOf(h.Sessions)}
	key, err := hex.DecodeString(h.RunKey)
	if err != nil || len(key) == 0 {
		return o
	}
	if h.Sessions > maxCanarySessions {
		panic(fmt.Sprintf("%d sessions, and canaries of at most %d can be looked for", h.Sessions, maxCanarySessions))
	}
	add := func(owner canaryOwner) {
		copy(owner.canary[:], history.Canary(key, int(owner.session), owner.alone))
		o.owners = append(o.owners, owner)
	}
	for session := range int32(h.Sessions) {
		add(canaryOwner{session: session})
		add(canaryOwner{session: session, alone: true})
	}
	for i := range int32(besideSessions) {
		add(canaryOwner{session: int32(h.Sessions) + i, alone: true, beside: true})
	}
	slices.SortFunc(o.owners, func(a, b canaryOwner) int { return bytes.Compare(a.canary[:], b.canary[:]) })
	o.first = make(map[uint64]int32, len(o.owners))
	for i, owner := range slices.Backward(o.owners) { // so that the first of those that begin alike stays
		var beginning uint64
		for _, c := range owner.canary[:o.prefix] {
			beginning = beginning<<5 | uint64(base32Digits[c]-1)
		}
		o.first[beginning] = int32(i)
	}
	return o
}

// canaryPrefixOf is how many characters of a canary are a leak in a run of so
// many sessions. Texts and canaries both grow with them, so chance matches grow
// with their square: a character more, 5 bits, for each factor of 5.7.
func canaryPrefixOf(sessions int) int {
	more := math.Ceil(2 * math.Log2(float64(max(sessions, 1))/canaryPrefixSessions) / 5)
	return min(canaryPrefix+max(0, int(more)), history.CanaryLength)
}

// base32Digits are the values of canaries' characters, plus 1; 0 for others.
var base32Digits = func() (digits [256]byte) {
	for i, c := range []byte("abcdefghijklmnopqrstuvwxyz234567") {
		digits[c] = byte(i + 1)
	}
	return digits
}()

// find calls f for each owner whose canary begins somewhere in a text, with
// where, and how much of the canary stands there.
func (o *canaryObserver) find(text string, f func(owner *canaryOwner, start, length int)) {
	var window uint64
	run, mask := 0, uint64(1)<<(5*o.prefix)-1
	for i := range len(text) {
		digit := base32Digits[text[i]]
		if digit == 0 {
			run = 0
			continue
		}
		window = (window<<5 | uint64(digit-1)) & mask
		if run++; run < o.prefix {
			continue
		}
		at, ok := o.first[window]
		if !ok {
			continue
		}
		start := i + 1 - o.prefix
		for ; int(at) < len(o.owners); at++ {
			owner := &o.owners[at]
			length := commonPrefix(owner.canary[:], text[start:])
			if length < o.prefix {
				break
			}
			f(owner, start, length)
		}
	}
}

func (o *canaryObserver) Op(v *View, rec *Recorder) {
	texts := v.Texts()
	if o.first == nil || len(texts) == 0 {
		return
	}
	rec.Trial(v.Op.ID, ForeignCanary)
	clear(o.seen)
	for _, t := range texts {
		o.find(t.Text, func(owner *canaryOwner, start, length int) {
			leaked := t.Text[start : start+length]
			if string(owner.canary[:]) == v.Op.Expect.Canary || o.seen[leaked] {
				return
			}
			o.seen[leaked] = true
			// What stands in the op's own request came back from there: a
			// leak of an earlier turn, counted then.
			if bytes.Contains(v.Op.Request, []byte(leaked)) {
				return
			}
			rec.Violation(Violation{
				Class: ForeignCanary, Op: v.Op.ID,
				Want:     fmt.Sprintf("at most its own canary, %s", v.Op.Expect.Canary),
				Got:      around(t.Text, start, start+length),
				Note:     fmt.Sprintf("%q in %s is %s", leaked, t.Where, owner.describe(length)),
				Severity: float64(length),
			})
		})
	}
}

func (o *canaryObserver) Event(*history.Event, *Recorder) {}

func (o *canaryObserver) Finish(*Recorder) {}

func (c *canaryOwner) describe(leaked int) string {
	whose := fmt.Sprintf("session %d", c.session)
	switch {
	case c.beside:
		whose = "a plain request after a failure"
	case c.alone:
		whose = "control " + whose
	}
	if leaked < len(c.canary) {
		return fmt.Sprintf("the start of the canary of %s, %s", whose, c.canary)
	}
	return "the canary of " + whose
}

func commonPrefix(a []byte, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

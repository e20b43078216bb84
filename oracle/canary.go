package oracle

import (
	"bytes"
	"encoding/hex"
	"fmt"

	"github.com/coregx/ahocorasick"

	"github.com/culprit-project/culprit/history"
)

// ForeignCanary is another session's secret in a reply.
const ForeignCanary Class = "ForeignCanary"

// Canary looks for every session's canary in every reply: control or main, at
// work, finished or not begun. The header alone tells them all.
var Canary = Oracle{
	Name:    "canary",
	Classes: []Class{ForeignCanary},
	New:     newCanaryObserver,
}

// maxCanarySessions bounds the automaton's memory, 3 KB a session.
const maxCanarySessions = 100_000

type canaryObserver struct {
	owners   []canaryOwner
	prefixes *ahocorasick.Automaton // pattern i is the start of owner i's canary
	buf      []byte
	seen     map[string]bool // leaks of the op at hand
}

type canaryOwner struct {
	canary  string
	session int
	alone   bool
}

func newCanaryObserver(h history.Header) Observer {
	o := &canaryObserver{seen: map[string]bool{}}
	key, err := hex.DecodeString(h.RunKey)
	if err != nil || len(key) == 0 {
		return o
	}
	if h.Sessions > maxCanarySessions {
		panic(fmt.Sprintf("%d sessions, and canaries of at most %d can be looked for", h.Sessions, maxCanarySessions))
	}
	b := ahocorasick.NewBuilder()
	for session := range h.Sessions {
		for _, alone := range []bool{false, true} {
			c := history.Canary(key, session, alone)
			o.owners = append(o.owners, canaryOwner{c, session, alone})
			b.AddPattern([]byte(c[:canaryPrefix]))
		}
	}
	if o.prefixes, err = b.Build(); err != nil {
		o.prefixes = nil // no sessions, no canaries
	}
	return o
}

func (o *canaryObserver) Op(v *View, rec *Recorder) {
	texts := v.Texts()
	if o.prefixes == nil || len(texts) == 0 {
		return
	}
	rec.Trial(v.Op.ID, ForeignCanary)
	clear(o.seen)
	for _, t := range texts {
		o.buf = append(o.buf[:0], t.Text...)
		for _, m := range o.prefixes.FindAllOverlapping(o.buf) {
			owner := o.owners[m.PatternID]
			leaked := owner.canary[:commonPrefix(owner.canary, o.buf[m.Start:])]
			if owner.canary == v.Op.Expect.Canary || o.seen[leaked] {
				continue
			}
			o.seen[leaked] = true
			// What stands in the op's own request came back from there: a
			// leak of an earlier turn, counted then.
			if bytes.Contains(v.Op.Request, []byte(leaked)) {
				continue
			}
			rec.Violation(Violation{
				Class: ForeignCanary, Op: v.Op.ID,
				Want:     fmt.Sprintf("at most its own canary, %s", v.Op.Expect.Canary),
				Got:      around(t.Text, m.Start, m.Start+len(leaked)),
				Note:     fmt.Sprintf("%q in %s is %s", leaked, t.Where, owner.describe(len(leaked))),
				Severity: float64(len(leaked)),
			})
		}
	}
}

func (o *canaryObserver) Event(*history.Event, *Recorder) {}

func (o *canaryObserver) Finish(*Recorder) {}

func (c canaryOwner) describe(leaked int) string {
	arm := ""
	if c.alone {
		arm = "control "
	}
	if leaked < len(c.canary) {
		return fmt.Sprintf("the start of the canary of %ssession %d, %s", arm, c.session, c.canary)
	}
	return fmt.Sprintf("the canary of %ssession %d", arm, c.session)
}

func commonPrefix(a string, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

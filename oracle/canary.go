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

// Canary looks for every session's canary in every reply: control, main or
// recovery, at work, finished or not begun. The header alone tells them all.
// Traffic that was recorded, not made by us, has none; see foundObserver.
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
	beside  bool // of a plain request after a failure
}

func newCanaryObserver(h history.Header) Observer {
	if h.RunKey == "" {
		return newFoundObserver()
	}
	o := &canaryObserver{seen: map[string]bool{}}
	key, err := hex.DecodeString(h.RunKey)
	if err != nil || len(key) == 0 {
		return o
	}
	if h.Sessions > maxCanarySessions {
		panic(fmt.Sprintf("%d sessions, and canaries of at most %d can be looked for", h.Sessions, maxCanarySessions))
	}
	b := ahocorasick.NewBuilder()
	add := func(owner canaryOwner) {
		owner.canary = history.Canary(key, owner.session, owner.alone)
		o.owners = append(o.owners, owner)
		b.AddPattern([]byte(owner.canary[:canaryPrefix]))
	}
	for session := range h.Sessions {
		add(canaryOwner{session: session})
		add(canaryOwner{session: session, alone: true})
	}
	for i := range besideSessions {
		add(canaryOwner{session: h.Sessions + i, alone: true, beside: true})
	}
	if o.prefixes, err = b.Build(); err != nil {
		o.prefixes = nil
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

func commonPrefix(a string, b []byte) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

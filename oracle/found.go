package oracle

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"time"

	"github.com/culprit-project/culprit/history"
)

// foundObserver looks for leaks in traffic that isn't ours, which has no
// planted canaries: it takes those that it finds. An identifier that one
// conversation alone sent (a key, a UUID, a tracking number) and that stands
// in another one's reply, though not in its request, can only have come
// through the server.
type foundObserver struct {
	seed       maphash.Seed
	young, old map[uint64]foundOwner // who sent an identifier, by its hash
	replied    map[uint64]foundReply // identifiers that a reply had and nobody had sent yet
	seen       map[string]bool       // of the op at hand
}

// foundOwner is the conversation that sent an identifier first, and when.
type foundOwner struct {
	session int
	sent    time.Duration
}

type foundReply struct {
	op      int64
	session int
	end     time.Duration
	text    string
}

const (
	// severalSessions owns what more than one conversation sent.
	severalSessions = -2
	// Shorter runs, and runs of few digits or letters, are words, dates and
	// version numbers, which a model knows by itself; longer ones are data.
	minIdentifier, maxIdentifier = 16, 128
	minOfEach                    = 4
	// maxFound identifiers are remembered at least, and twice as many at most.
	maxFound   = 500_000
	maxReplied = 100_000
)

func newFoundObserver() *foundObserver {
	return &foundObserver{
		seed: maphash.MakeSeed(), young: map[uint64]foundOwner{}, old: map[uint64]foundOwner{},
		replied: map[uint64]foundReply{}, seen: map[string]bool{},
	}
}

func (o *foundObserver) Op(v *View, rec *Recorder) {
	op := v.Op
	clear(o.seen)
	identifiers(op.Request, func(id []byte) {
		if o.seen[string(id)] {
			return
		}
		o.seen[string(id)] = true
		o.sent(maphash.Bytes(o.seed, id), op, rec)
	})
	texts := v.Texts()
	if len(texts) == 0 {
		return
	}
	rec.Trial(op.ID, ForeignCanary)
	for _, t := range texts {
		identifiers([]byte(t.Text), func(id []byte) {
			if o.seen[string(id)] || bytes.Contains(op.Request, id) {
				return
			}
			o.seen[string(id)] = true
			h := maphash.Bytes(o.seed, id)
			owner, ok := o.owner(h)
			switch {
			case !ok:
				if len(o.replied) < maxReplied {
					o.replied[h] = foundReply{op.ID, op.Session, op.LastByte, string(id)}
				}
			case owner.session != op.Session && owner.session != severalSessions && owner.sent < op.LastByte:
				rec.Violation(leaked(op.ID, string(id), owner.session))
			}
		})
	}
}

// sent notes that an op sent an identifier. A reply that had it before this
// was sent taught it to the sender; one that came meanwhile leaked it.
func (o *foundObserver) sent(h uint64, op *history.Op, rec *Recorder) {
	if r, ok := o.replied[h]; ok {
		delete(o.replied, h)
		if r.session != op.Session && op.Sent < r.end {
			rec.Violation(leaked(r.op, r.text, op.Session))
		}
	}
	owner, ok := o.owner(h)
	switch {
	case !ok:
		owner = foundOwner{op.Session, op.Sent}
	case owner.session != op.Session:
		owner.session = severalSessions
	}
	owner.sent = min(owner.sent, op.Sent)
	if o.young[h] = owner; len(o.young) >= maxFound {
		o.old, o.young = o.young, map[uint64]foundOwner{}
	}
}

func (o *foundObserver) owner(h uint64) (foundOwner, bool) {
	if owner, ok := o.young[h]; ok {
		return owner, true
	}
	owner, ok := o.old[h]
	return owner, ok
}

func leaked(op int64, id string, session int) Violation {
	return Violation{
		Class: ForeignCanary, Op: op,
		Want:     "no identifier that only another conversation sent",
		Got:      id,
		Note:     fmt.Sprintf("only conversation %d sent %q", session, clip(id, 40)),
		Severity: float64(len(id)),
	}
}

func (o *foundObserver) Event(*history.Event, *Recorder) {}

func (o *foundObserver) Finish(*Recorder) {}

// identifiers calls f with each run of letters, digits, - and _ that looks
// made up by a program. In JSON and in code a backslash escapes what follows.
func identifiers(text []byte, f func([]byte)) {
	start, letters, digits := 0, 0, 0
	end := func(at int) {
		if n := at - start; n >= minIdentifier && n <= maxIdentifier && letters >= minOfEach && digits >= minOfEach {
			f(text[start:at])
		}
		letters, digits = 0, 0
	}
	for i := 0; i < len(text); i++ {
		switch c := text[i]; {
		case c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z':
			letters++
			continue
		case c >= '0' && c <= '9':
			digits++
			continue
		case c == '-' || c == '_':
			continue
		case c == '\\':
			end(i)
			if i++; i < len(text) && text[i] == 'u' {
				i += 4
			}
		default:
			end(i)
		}
		start = i + 1
	}
	if start < len(text) {
		end(len(text))
	}
}

package oracle

import (
	"fmt"
	"hash/maphash"
	"time"

	"github.com/culprit-project/culprit/history"
)

// Poisoned is a server that doesn't recover: after a failure, plain requests
// fail too, and everything measured from then on depends on that failure.
const Poisoned Class = "Poisoned"

// Poison judges the plain requests of the recovery phase, and the end of the
// main one.
var Poison = Oracle{
	Name:    "poison",
	Classes: []Class{Poisoned},
	New: func(history.Header) Observer {
		return &poisonObserver{run: runObserver{seed: maphash.MakeSeed()}}
	},
}

type poisonObserver struct {
	run runObserver // finds garbled text
	bad int         // recovery requests in a row that went wrong

	// How the server answers when nothing is wrong: ops of the control arm
	// and those of the main phase before the first that went wrong.
	usual, usualGarbled int
	wentWrong           bool // an op of the main phase did

	main       bool          // there is a main phase
	lastGood   time.Duration // end of the last main op that was answered
	lastGoodOp int64         // 0 when none was
	dead       int           // main ops that failed, all sent after lastGood
	deadFrom   int64
	deadNote   string
}

func (o *poisonObserver) Op(v *View, rec *Recorder) {
	if v.Op.Outcome == history.Cancelled || refused(v) {
		return
	}
	switch v.Op.Phase {
	case history.Recovery:
		o.recovery(v, rec)
	case history.Main:
		o.main = true
		o.mainOp(v)
		o.wentWrong = o.wentWrong || failed(v) != "" || o.usual < usualOps && o.garbled(v) != ""
		if !o.wentWrong {
			o.usual++
		}
	case history.Control:
		if o.usual < usualOps && failed(v) == "" {
			o.usual++
			if o.garbled(v) != "" {
				o.usualGarbled++
			}
		}
	case history.Sentinel:
	}
}

func (o *poisonObserver) Event(*history.Event, *Recorder) {}

// recovery counts plain requests in a row that fail or are garbled.
func (o *poisonObserver) recovery(v *View, rec *Recorder) {
	rec.Trial(v.Op.ID, Poisoned)
	what := o.wrong(v)
	if what == "" {
		o.bad = 0
		return
	}
	o.bad++
	if o.bad < poisonedAfter {
		return
	}
	rec.Violation(Violation{
		Class: Poisoned, Op: v.Op.ID, Want: "an answer to a plain request", Got: v.Reply.Content,
		Note: fmt.Sprintf("%d plain requests in a row: %s", o.bad, what), Severity: float64(o.bad),
	})
}

// mainOp looks for the moment after which nothing works any more.
func (o *poisonObserver) mainOp(v *View) {
	how := failed(v)
	if how == "" {
		o.dead = 0
		o.lastGood, o.lastGoodOp = max(o.lastGood, v.Op.LastByte), v.Op.ID
		return
	}
	// Those in flight when it happened may fail together; what counts is
	// what was sent when the last good reply was already there.
	if o.lastGoodOp != 0 && v.Op.Sent >= o.lastGood {
		if o.dead == 0 {
			o.deadFrom, o.deadNote = v.Op.ID, how
		}
		o.dead++
	}
}

func (o *poisonObserver) Finish(rec *Recorder) {
	if !o.main {
		return
	}
	rec.Trial(0, Poisoned)
	if o.dead >= deadAfter {
		rec.Violation(Violation{
			Class: Poisoned, Want: "answers", Got: o.deadNote,
			Note:     fmt.Sprintf("all %d ops fail that were sent after op %d was answered, from op %d on", o.dead, o.lastGoodOp, o.deadFrom),
			Severity: float64(o.dead),
		})
	}
}

// refused says that the server found fault with the request itself: a wrong
// key, a model that it doesn't have, a prompt that is too long.
func refused(v *View) bool { return v.Op.Status >= 400 && v.Op.Status < 500 }

// failed says how an op failed; empty if it was answered.
func failed(v *View) string {
	switch {
	case v.Op.Outcome == history.TimedOut:
		return "timed out"
	case v.Op.Outcome == history.Failed:
		return v.Op.Error
	case v.Reply.Err != nil:
		return v.Reply.Err.Message
	default:
		return ""
	}
}

// wrong says how a plain request went wrong; empty if it didn't. What it says
// counts only where the server was seen to answer better: a weak model's replies
// are garbled alone too, and three of them in a row are nothing strange.
func (o *poisonObserver) wrong(v *View) string {
	if how := failed(v); how != "" {
		return how
	}
	if float64(o.usualGarbled+1) > garbledShare*float64(o.usual+2) {
		return ""
	}
	return o.garbled(v)
}

// garbled says what is wrong with a reply's text; empty if nothing is.
func (o *poisonObserver) garbled(v *View) string {
	if len(v.Texts()) == 0 {
		return "an empty reply"
	}
	var scripts scriptCount
	for _, t := range v.Texts() {
		scripts.add(t.Text)
		if f, bad := characterRun(t.Text); bad {
			return f.note()
		}
		if f, bad := o.run.words(t.Text); bad {
			return f.note()
		}
		if _, token := specialToken(t.Text); token != "" && !v.wasGiven(token) {
			return token + " in the " + t.Where
		}
	}
	if scripts.broken >= brokenRunes {
		return "text that isn't UTF-8"
	}
	if _, bad := scripts.salad(scriptSet{}); bad {
		if f, bad := scripts.salad(v.knownScripts()); bad {
			return f.String()
		}
	}
	return ""
}

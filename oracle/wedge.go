package oracle

import (
	"bytes"
	"fmt"
	"math/bits"
	"slices"
	"time"

	"github.com/culprit-project/culprit/history"
)

// Classes of a server that has stopped, in whole or for some requests. A
// server that is slow but goes on isn't one: each is measured against the
// run's own norm, a request that waits in a queue isn't stuck, and the time
// that the client itself was stalled doesn't count.
const (
	SlowFirstToken Class = "SlowFirstToken" // a request that waits while later ones are served, or nothing is
	Stalled        Class = "Stalled"        // no token for long in mid-reply
	NoTokens       Class = "NoTokens"       // requests are running and none gets a token
	HealthLies     Class = "HealthLies"     // a health check says 200 while a one-token generation fails
)

// Wedge looks for requests and servers that are stuck.
var Wedge = Oracle{
	Name:    "wedge",
	Classes: []Class{SlowFirstToken, Stalled, NoTokens, HealthLies},
	New:     func(history.Header) Observer { return &wedgeObserver{} },
}

// wedgeObserver keeps distributions, and those waits that are long by any
// norm; what is long for this run is known at its end.
type wedgeObserver struct {
	firstToken [promptClasses]durations // by the request's length
	between    durations                // gaps between chunks, over all streams

	waits []wait // for the first token
	gaps  []wait // between tokens
	quiet []span // ticks without a token while requests were running
	late  []span // the client itself was stalled
	now   quietRun

	// started holds, for each second of sending, the earliest first token
	// of the ops sent then; 0 when none came.
	started []time.Duration

	healthy   []time.Duration // when a health check said 200
	sentinels []failedSentinel
}

type span struct{ from, to time.Duration }

// wait is an op that waited: its prompt's class, and from when to when.
type wait struct {
	op          int64
	class       int
	span        span
	timedOut    bool // at the end of the span nothing came: we gave up
	afterTokens int  // chunks that had come before
}

type failedSentinel struct {
	op       int64
	span     span
	how      string
	timedOut bool
}

// quietRun is a row of ticks without a token.
type quietRun struct {
	span  span
	ticks int
}

const (
	promptClasses = 40
	// maxWaits, maxSpans and maxSeconds bound the memory: the first so many
	// are judged. 86,400 seconds are a day's run.
	maxWaits   = 1 << 14
	maxSpans   = 1 << 14
	maxSeconds = 86400
)

// promptClass groups prompts by length, each class twice as long as the one
// before.
func promptClass(requestBytes int) int { return min(bits.Len(uint(requestBytes)), promptClasses-1) }

func (o *wedgeObserver) Op(v *View, rec *Recorder) {
	op := v.Op
	if op.Phase == history.Sentinel {
		o.sentinel(v)
		return
	}
	if op.Outcome == history.Failed && len(op.Chunks) == 0 {
		return // refused or broken off, not stuck
	}
	class := promptClass(len(op.Request))
	first := firstToken(op)
	if op.Outcome != history.Cancelled || first >= 0 {
		rec.Trial(op.ID, SlowFirstToken)
	}
	if first < 0 {
		if op.Outcome != history.Failed {
			o.wait(&o.waits, wait{op.ID, class, span{op.Sent, op.LastByte}, op.Outcome == history.TimedOut, 0})
		}
		return
	}
	at := op.Chunks[first].At
	o.firstToken[class].add(at - op.Sent)
	o.wait(&o.waits, wait{op.ID, class, span{op.Sent, at}, false, 0})
	o.start(op.Sent, at)
	if !op.Stream {
		return
	}
	rec.Trial(op.ID, Stalled)
	longest := wait{op: op.ID, class: class}
	for i := first + 1; i < len(op.Chunks); i++ {
		gap := op.Chunks[i].At - op.Chunks[i-1].At
		o.between.add(gap)
		if gap > longest.span.to-longest.span.from {
			longest.span = span{op.Chunks[i-1].At, op.Chunks[i].At}
			longest.afterTokens = i - first
		}
	}
	if last := op.Chunks[len(op.Chunks)-1].At; op.LastByte-last > longest.span.to-longest.span.from {
		longest.span = span{last, op.LastByte}
		longest.afterTokens = len(op.Chunks) - first
		longest.timedOut = op.Outcome == history.TimedOut
	}
	o.wait(&o.gaps, longest)
}

// wait keeps a wait that may turn out to be too long.
func (o *wedgeObserver) wait(list *[]wait, w wait) {
	if (w.span.to-w.span.from >= slowFloor || w.timedOut) && len(*list) < maxWaits {
		*list = append(*list, w)
	}
}

func (o *wedgeObserver) start(sent, first time.Duration) {
	second := int(sent / time.Second)
	if second < 0 || second >= maxSeconds {
		return
	}
	for len(o.started) <= second {
		o.started = append(o.started, 0)
	}
	if o.started[second] == 0 || first < o.started[second] {
		o.started[second] = first
	}
}

func (o *wedgeObserver) Event(e *history.Event, rec *Recorder) {
	switch e.Kind {
	case history.Tick:
		o.tick(e, rec)
	case history.Health:
		if e.Values["status"] == 200 && len(o.healthy) < maxSpans {
			o.healthy = append(o.healthy, e.At)
		}
	default:
	}
}

// tick watches the whole run, second by second.
func (o *wedgeObserver) tick(e *history.Event, rec *Recorder) {
	late := time.Duration(e.Values["late_ms"] * float64(time.Millisecond))
	if late >= clientStall && len(o.late) < maxSpans {
		o.late = append(o.late, span{e.At - late, e.At})
	}
	if e.Values["in_flight"] > 0 {
		rec.Trial(0, NoTokens)
	}
	// A client that is stalled itself sees no tokens either.
	if late >= clientStall || e.Values["in_flight"] == 0 || e.Values["chunks"] > 0 {
		o.endQuiet()
		return
	}
	if o.now.ticks == 0 {
		o.now.span.from = e.At
	}
	o.now.ticks++
	o.now.span.to = e.At
}

func (o *wedgeObserver) endQuiet() {
	if q := o.now; q.ticks >= quietTicks && q.span.to-q.span.from >= quietFloor && len(o.quiet) < maxSpans {
		o.quiet = append(o.quiet, q.span)
	}
	o.now = quietRun{}
}

func (o *wedgeObserver) sentinel(v *View) {
	how := failed(v)
	if how == "" || refused(v) || v.Op.Outcome == history.Cancelled || len(o.sentinels) >= maxSpans {
		return
	}
	o.sentinels = append(o.sentinels, failedSentinel{v.Op.ID, span{v.Op.Sent, v.Op.LastByte}, how, v.Op.Outcome == history.TimedOut})
}

func (o *wedgeObserver) Finish(rec *Recorder) {
	o.endQuiet()
	quiet := o.quietTooLong(rec)
	for _, w := range o.waits {
		took := o.length(w.span)
		norm := o.norm(w.class)
		if !tooLong(took, norm, w.timedOut) {
			continue
		}
		var why string
		if by, overtaken := o.overtaken(w); overtaken {
			why = fmt.Sprintf("requests sent later were served up to %.1f s earlier", by.Seconds())
		} else if overlap(w.span, quiet) >= quietFloor {
			why = "no request got a token meanwhile"
		} else {
			continue // it waits its turn
		}
		rec.Violation(Violation{
			Class: SlowFirstToken, Op: w.op, Want: fmt.Sprintf("a first token after %.1f s, as is usual for such prompts", norm.Seconds()),
			Got: waited(took, w.timedOut), Note: why, Severity: took.Seconds(),
		})
	}
	usual := o.between.quantile(0.5)
	for _, w := range o.gaps {
		took := o.length(w.span)
		if !tooLong(took, usual, w.timedOut) {
			continue
		}
		rec.Violation(Violation{
			Class: Stalled, Op: w.op, Want: fmt.Sprintf("a token every %.0f ms", 1000*usual.Seconds()),
			Got: waited(took, w.timedOut), Note: fmt.Sprintf("after %d chunks", w.afterTokens), Severity: took.Seconds(),
		})
	}
	for _, s := range o.sentinels {
		rec.Trial(s.op, HealthLies)
		if s.timedOut && o.waitedItsTurn(s.span, quiet) {
			continue
		}
		for _, at := range o.healthy {
			if at >= s.span.from && at <= s.span.to+healthNear {
				rec.Violation(Violation{
					Class: HealthLies, Op: s.op, Want: "a health check that fails too", Got: s.how,
					Note:     fmt.Sprintf("health said 200 at %.1f s; this one-token generation ran from %.1f s to %.1f s", at.Seconds(), s.span.from.Seconds(), s.span.to.Seconds()),
					Severity: o.length(s.span).Seconds(),
				})
				break
			}
		}
	}
}

func waited(d time.Duration, timedOut bool) string {
	if timedOut {
		return fmt.Sprintf("nothing in %.1f s, then the client gave up", d.Seconds())
	}
	return fmt.Sprintf("%.1f s", d.Seconds())
}

// quietTooLong reports the times in which no request got a token, where they
// are longer than this server's prefills explain.
func (o *wedgeObserver) quietTooLong(rec *Recorder) []span {
	var slowest time.Duration
	for class := range o.firstToken {
		if d := &o.firstToken[class]; d.n >= normSamples {
			slowest = max(slowest, d.quantile(0.5))
		}
	}
	var found []span
	for _, s := range o.quiet {
		if s.to-s.from < quietTimes*slowest {
			continue
		}
		found = append(found, s)
		rec.Violation(Violation{
			Class: NoTokens, Want: "a token for some request", Got: fmt.Sprintf("none in %.0f s", (s.to - s.from).Seconds()),
			Note: fmt.Sprintf("from %.0f s to %.0f s requests were running", s.from.Seconds(), s.to.Seconds()), Severity: (s.to - s.from).Seconds(),
		})
	}
	return found
}

// norm is the usual wait for the first token of such a prompt. Where there
// are too few, those of the nearest shorter prompts stand in, then longer.
func (o *wedgeObserver) norm(class int) time.Duration {
	for c := class; c >= 0; c-- {
		if d := &o.firstToken[c]; d.n >= normSamples {
			return d.quantile(0.5)
		}
	}
	for c := class + 1; c < promptClasses; c++ {
		if d := &o.firstToken[c]; d.n >= normSamples {
			return d.quantile(0.5)
		}
	}
	return 0
}

// tooLong says whether a wait is out of proportion. The floor doesn't hold
// where the client gave up before it.
func tooLong(took, norm time.Duration, timedOut bool) bool {
	return took >= slowTimes*norm && (took >= slowFloor || timedOut)
}

// overtaken says by how much the requests sent after w began were served
// before w was, if that is most of its wait: then w isn't waiting in a queue.
func (o *wedgeObserver) overtaken(w wait) (by time.Duration, ok bool) {
	for second := int(w.span.from/time.Second) + 1; second < len(o.started) && second <= int(w.span.to/time.Second); second++ {
		if first := o.started[second]; first > 0 {
			by = max(by, w.span.to-first)
		}
	}
	return by, 2*by > w.span.to-w.span.from
}

// waitedItsTurn says that requests got their first tokens throughout a wait,
// and none that was sent later: the server moves, behind a long queue.
func (o *wedgeObserver) waitedItsTurn(s span, quiet []span) bool {
	_, overtaken := o.overtaken(wait{span: s})
	return !overtaken && overlap(s, quiet) < quietFloor &&
		slices.ContainsFunc(o.started, func(first time.Duration) bool { return s.from < first && first <= s.to })
}

// length is how long a span is without the time that the client was stalled.
func (o *wedgeObserver) length(s span) time.Duration {
	return s.to - s.from - overlap(s, o.late)
}

// overlap is how much of s is covered by spans, which don't overlap.
func overlap(s span, spans []span) time.Duration {
	var d time.Duration
	for _, other := range spans {
		d += max(0, min(s.to, other.to)-max(s.from, other.from))
	}
	return d
}

// firstToken returns the index of the first chunk that carries more than a
// role, -1 if there is none.
func firstToken(op *history.Op) int {
	for i := range op.Chunks {
		// Some servers send the role at once and the text when it is there.
		if !op.Stream || !bytes.Contains(op.Chunks[i].Data, []byte(`"role":`)) || len(chunkText(op.Chunks[i].Data)) > 0 {
			return i
		}
	}
	return -1
}

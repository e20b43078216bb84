package oracle

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
)

// Assumption is something that must hold before a run without violations may
// be called clean. Without it some evidence of violations may not stand either:
// see stands.
type Assumption struct {
	Name      string `json:"name"`
	Holds     bool   `json:"holds"`
	Found     string `json:"found"`               // with its numbers
	Hint      string `json:"hint,omitempty"`      // what to do where it doesn't hold
	Otherwise Status `json:"otherwise,omitempty"` // the verdict where it doesn't hold and nothing convicts
}

// The assumptions.
const (
	thatEnded    = "the run came to its end"
	thatAnswered = "requests were answered"
	thatJudged   = "there was something to judge"
	thatReached  = "the planned concurrency was reached"
	thatOnTime   = "requests were sent on time"
	thatRan      = "the client never stood still"
	thatKeptUp   = "the client kept up"
	thatTogether = "the shards began together"
	thatAlone    = "the control arm ran alone"
	thatCold     = "the control arm ran cold"
	thatHit      = "the cache was hit"
	thatPathsRan = "the paths that must run did"
)

// stands says which evidence that something is wrong stands where an
// assumption fails: this and all that is before it. That nothing is wrong never
// stands. docs/oracles.md has it as a table, with the reasons.
var stands = map[string]Evidence{
	thatEnded:    Times,
	thatAnswered: Times,
	thatJudged:   Times,
	thatReached:  Times,
	thatOnTime:   Times,
	thatRan:      Replies,
	thatKeptUp:   Connections,
	thatTogether: Connections,
	thatAlone:    Times,
	thatCold:     Times,
	thatHit:      Times,
	thatPathsRan: Times,
}

func (j *judgement) assumptions(truncated bool) []Assumption {
	out := []Assumption{j.cameToItsEnd(truncated), j.wereAnswered(), j.wereJudged()}
	if a, ok := j.reachedConcurrency(); ok {
		out = append(out, a)
	}
	if a, ok := j.sentOnTime(); ok {
		out = append(out, a)
	}
	out = append(out, j.clientRan(), j.clientKeptUp())
	if a, ok := j.beganTogether(); ok {
		out = append(out, a)
	}
	if a, ok := j.controlAlone(); ok {
		out = append(out, a)
	}
	if a, ok := j.controlCold(); ok {
		out = append(out, a)
	}
	if a, ok := j.cacheHit(); ok {
		out = append(out, a)
	}
	if a, ok := j.pathsRan(); ok {
		out = append(out, a)
	}
	for i := range out {
		if out[i].Holds {
			out[i].Hint, out[i].Otherwise = "", ""
		}
	}
	return out
}

func (j *judgement) cameToItsEnd(truncated bool) Assumption {
	main := j.phases.of(history.Main)
	a := Assumption{
		Name: thatEnded, Otherwise: Inconclusive,
		Found: fmt.Sprintf("%d ops of the main phase", main.Ops),
		Hint:  "let it run to its end",
	}
	switch {
	case truncated:
		a.Found += ", then the history ends in the middle of a record"
	case !main.ended:
		a.Found += ", then the history ends without the phase's end"
	case main.endedWhy != "":
		a.Found += "; it ended early: " + clip(main.endedWhy, 300)
	case main.Ops == 0:
		a.Found, a.Hint, a.Otherwise = "no op of the main phase was sent", "give it sessions to play", NotExercised
	default:
		a.Holds = true
	}
	return a
}

func (j *judgement) wereAnswered() Assumption {
	main := j.phases.of(history.Main)
	failed := main.Outcomes[history.Failed]
	refused, shed, broken := 0, main.HTTP[503], 0 // 503: busy, try again
	for status, n := range main.HTTP {
		switch {
		case status >= 500:
			broken += n
		case status >= 400:
			refused += n
		}
	}
	ops := float64(main.Ops)
	a := Assumption{
		Name: thatAnswered, Otherwise: Inconclusive,
		Holds: float64(failed) <= failedShare*ops && float64(broken-shed) <= brokenShare*ops,
		Found: fmt.Sprintf("%d of %d ops failed", failed, main.Ops),
	}
	if failed == 0 {
		return a
	}
	worst := slices.MaxFunc(append([]ErrorCount{{}}, main.Errors...), func(a, b ErrorCount) int { return cmp.Compare(a.Ops, b.Ops) })
	if worst.Ops > 0 {
		a.Found += fmt.Sprintf(", %d of them with “%s” (op %d)", worst.Ops, worst.Message, worst.Example)
	}
	switch {
	case refused >= broken && refused > 0:
		a.Hint = "the server refuses what it is asked: change the request (model, context length, tools), or the server's options"
	case broken > 0:
		a.Hint = "the server fails: look into its log"
	default:
		a.Hint = "the connection fails: is the server up, and is it the one at " + j.header.BaseURL + "?"
	}
	return a
}

func (j *judgement) wereJudged() Assumption {
	corrupt, judged := j.rec.corruptClasses(), 0
	for i := range j.rec.rows {
		if w := &j.rec.rows[i]; w.phase == history.Main && w.trials&corrupt != 0 {
			judged++
		}
	}
	return Assumption{
		Name: thatJudged, Otherwise: NotExercised,
		Holds: judged > 0,
		Found: fmt.Sprintf("%d of %d ops had a reply that an oracle could judge", judged, j.phases.of(history.Main).Ops),
		Hint:  "let some replies come to their end",
	}
}

// reachedConcurrency says for how much of the time as many requests were open
// as planned, over all and in each shard.
func (j *judgement) reachedConcurrency() (Assumption, bool) {
	sessions := map[int][]*row{}
	for i := range j.rec.rows {
		if w := &j.rec.rows[i]; w.phase == history.Main {
			sessions[w.session] = append(sessions[w.session], w)
		}
	}
	for _, ops := range sessions {
		slices.SortFunc(ops, func(a, b *row) int { return cmp.Compare(a.sent, b.sent) })
	}
	a, ok := reached(sessions, j.header.Concurrency, j.header.Sessions)
	for k, n := 0, len(j.header.Shards); k < n && ok && a.Holds; k++ {
		own := map[int][]*row{}
		for session, ops := range sessions {
			if session%n == k {
				own[session] = ops
			}
		}
		if s, ok := reached(own, share(j.header.Concurrency, k, n), share(j.header.Sessions, k, n)); ok && !s.Holds {
			s.Found = fmt.Sprintf("shard %d: %s", k, s.Found)
			return s, true
		}
	}
	return a, ok
}

// share is a shard's part of a number of sessions.
func share(all, shard, shards int) int { return (all + shards - 1 - shard) / shards }

// reached looks at some sessions, with the ops of each in the order of sending.
// A session that waits by plan counts as open; the time after which too few
// sessions are left doesn't count.
func reached(sessions map[int][]*row, planned, total int) (Assumption, bool) {
	if planned <= 1 {
		return Assumption{}, false
	}
	total = max(total, len(sessions))
	planned = min(planned, total)
	target := max(2, int(reachedLoad*float64(planned)))

	type step struct {
		at         time.Duration
		open, left int
	}
	var steps []step
	for _, ops := range sessions {
		var end time.Duration
		for i, w := range ops {
			if i > 0 && w.planned > end {
				steps = append(steps, step{at: end, open: 1}, step{at: w.planned, open: -1})
			}
			end = max(end, w.end)
			steps = append(steps, step{at: w.sent, open: 1}, step{at: w.end, open: -1})
		}
		steps = append(steps, step{at: end, left: -1})
	}
	slices.SortFunc(steps, func(a, b step) int { return cmp.Compare(a.at, b.at) })

	var all, reached time.Duration
	open, most := 0, 0
	for i, s := range steps {
		if i > 0 && total >= target {
			all += s.at - steps[i-1].at
			if open >= target {
				reached += s.at - steps[i-1].at
			}
		}
		open += s.open
		total += s.left
		most = max(most, open)
	}
	share := 0.0
	if all > 0 {
		share = float64(reached) / float64(all)
	}
	return Assumption{
		Name: thatReached, Otherwise: NotExercised,
		Holds: share >= reachedTime,
		Found: fmt.Sprintf("at least %d of the %d planned were in flight for %s of the time while sessions remained; at most %d", target, planned, percent(share), most),
		Hint:  "use more sessions or longer replies, or look for what holds requests back: the client, a proxy, a limit of the server",
	}, true
}

func (j *judgement) sentOnTime() (Assumption, bool) {
	late := &j.phases.of(history.Main).late
	if j.header.RequestRate <= 0 || late.n == 0 {
		return Assumption{}, false
	}
	who := ""
	if n := len(j.header.Shards); n > 1 { // one that is late may hide among those that aren't
		shards := make([]durations, n)
		for i := range j.rec.rows {
			if w := &j.rec.rows[i]; w.phase == history.Main && w.session >= 0 {
				shards[w.session%n].add(w.sent - w.planned)
			}
		}
		for k := range shards {
			if shards[k].quantile(0.99) > late.quantile(0.99) {
				late, who = &shards[k], fmt.Sprintf("shard %d was the latest: ", k)
			}
		}
	}
	p99 := late.quantile(0.99)
	return Assumption{
		Name: thatOnTime, Otherwise: Inconclusive,
		Holds: p99 <= lateLimit,
		Found: fmt.Sprintf("%s99%% were at most %s late, the worst %s", who, term.Duration(p99), term.Duration(late.max)),
		Hint:  "lower --request-rate, or give the client more cores",
	}, true
}

// beganTogether says that the shards' times may be compared.
func (j *judgement) beganTogether() (Assumption, bool) {
	if len(j.header.Shards) == 0 {
		return Assumption{}, false
	}
	var within time.Duration
	for _, s := range j.header.Shards {
		within = max(within, time.Duration(s.WithinUS)*time.Microsecond)
	}
	return Assumption{
		Name: thatTogether, Otherwise: Inconclusive,
		Holds: within <= togetherLimit,
		Found: fmt.Sprintf("%d shards began within %s of each other", len(j.header.Shards), term.Duration(within)),
		Hint:  "look at the network between the shards and the one who tells them to begin",
	}, true
}

// client is what the ticks say of the client, or one of its shards, in the main
// phase.
type client struct {
	who       string // in front of what is found
	shard     string // its number; empty for the whole
	inMain    bool
	ticks     int
	busy      int             // ticks that were
	lates     []time.Duration // of each tick
	worstLate time.Duration
	mostCPU   float64
	last      time.Duration // tick or start of the phase
	gap       time.Duration // the longest without a tick
	cores     int
}

func newClients(h history.Header) []client {
	clients := []client{{cores: h.Cores}}
	for _, s := range h.Shards {
		k := strconv.Itoa(s.Number)
		clients = append(clients, client{who: "shard " + k + " on " + clip(s.Host, 60) + ": ", shard: k, cores: s.Cores})
	}
	return clients
}

func (c *client) event(e *history.Event) {
	switch {
	case e.Kind == history.Started && history.Phase(e.Name) == history.Main:
		c.inMain, c.last = true, e.At
	case e.Kind == history.Ended && history.Phase(e.Name) == history.Main:
		c.gap = max(c.gap, e.At-c.last)
		c.inMain = false
	case c.inMain && (c.shard == "" && e.Kind == history.Tick || c.shard != "" && e.Kind == history.ShardTick && c.shard == e.Name):
		// Where shards share a machine, what all of them used of it counts.
		cpu := max(e.Values["cpu"], e.Values["host_cpu"])
		late := time.Duration(e.Values["late_ms"] * float64(time.Millisecond))
		c.ticks++
		c.gap = max(c.gap, e.At-c.last)
		c.last = e.At
		c.worstLate = max(c.worstLate, late)
		c.mostCPU = max(c.mostCPU, cpu)
		c.lates = append(c.lates, late)
		if c.cores > 0 && cpu >= busyShare*float64(c.cores) {
			c.busy++
		}
	}
}

// clientRan says that the client never stood still, nor any of its shards.
func (j *judgement) clientRan() Assumption {
	c := slices.MaxFunc(j.clients, func(a, b client) int { return cmp.Compare(max(a.gap, a.worstLate), max(b.gap, b.worstLate)) })
	return Assumption{
		Name: thatRan, Otherwise: Inconclusive,
		Holds: max(c.gap, c.worstLate) <= standstill,
		Found: fmt.Sprintf("%sits own clock ticked %d times, with at most %s between two", c.who, c.ticks, term.Duration(c.gap)),
		Hint:  "run again on a machine that isn't suspended and has a core to spare",
	}
}

// clientKeptUp says that it was the server that was loaded, not the client. The
// first that didn't keep up speaks for all, the whole before its shards.
func (j *judgement) clientKeptUp() Assumption {
	limit := j.lateLimit()
	for i := range j.clients {
		if a := j.clients[i].keptUp(limit); !a.Holds {
			return a
		}
	}
	return j.clients[0].keptUp(limit)
}

func (c *client) keptUp(limit time.Duration) Assumption {
	late := 0
	for _, l := range c.lates {
		if l > limit {
			late++
		}
	}
	return Assumption{
		Name: thatKeptUp, Otherwise: Inconclusive,
		// One hiccup is no saturation, however short the run.
		Holds: late <= max(1, int(lateTicks*float64(c.ticks))) && c.busy <= max(1, c.ticks/2),
		Found: fmt.Sprintf("%s%d of %d ticks came more than %s late (the worst %s); it used at most %.1f of %d cores",
			c.who, late, c.ticks, term.Duration(limit), term.Duration(c.worstLate), c.mostCPU, c.cores),
		Hint: "lower the load, or run the client on a machine of its own",
	}
}

// lateLimit is how late a tick of the client may come. In the closed loop a
// client that is late only sends its next requests later, so it may be late by
// a part of what a reply takes.
func (j *judgement) lateLimit() time.Duration {
	if j.header.RequestRate > 0 {
		return lateLimit
	}
	var took durations
	for i := range j.rec.rows {
		if w := &j.rec.rows[i]; w.phase == history.Main && w.outcome == history.OK {
			took.add(w.end - w.sent)
		}
	}
	return max(lateLimit, took.quantile(0.5)/lateParts)
}

// controlAlone says that the control arm was what it claims.
func (j *judgement) controlAlone() (Assumption, bool) {
	most, ops := 0, 0
	for i := range j.rec.rows {
		if w := &j.rec.rows[i]; w.phase == history.Control {
			ops++
			most = max(most, w.inFlight)
		}
	}
	return Assumption{
		Name: thatAlone, Otherwise: Inconclusive,
		// One more may be a sentinel beside it.
		Holds: most <= 2,
		Found: fmt.Sprintf("%d ops, at most %d in flight", ops, most),
		Hint:  "run the control at concurrency 1",
	}, ops > 0
}

// controlCold says that the control arm met no cache of an earlier run, where
// the server reports it. Its first request shows that: nothing of this run was
// sent before it, and a run with another key shares only the workload's own texts.
func (j *judgement) controlCold() (Assumption, bool) {
	for i := range j.rec.rows {
		w := &j.rec.rows[i]
		if w.phase != history.Control {
			continue
		}
		return Assumption{
			Name: thatCold, Otherwise: Inconclusive,
			Holds: w.cachedTokens == 0 || w.promptTokens-w.cachedTokens > coldTokens,
			Found: fmt.Sprintf("%d of the %d tokens of its first prompt were cached (op %d)", w.cachedTokens, w.promptTokens, w.id),
			Hint:  "the server was sent the same before: start it afresh, or give another --run-key",
		}, w.cachedTokens >= 0 && w.promptTokens > 0
	}
	return Assumption{}, false
}

// legs counts ops that were sent to be served from a cache.
type legs struct{ ops, reported, hits int }

func (l *legs) op(v *View) {
	if v.Op.Phase != history.Main || !v.Complete() || (v.Op.Expect.Leg != "device" && v.Op.Expect.Leg != "host") {
		return
	}
	l.ops++
	if u := v.Reply.Usage; u != nil && u.CachedTokens >= 0 {
		l.reported++
		if u.CachedTokens > 0 {
			l.hits++
		}
	}
}

// cacheHit says that replies that were to come from a cache did, where the
// server reports it.
func (j *judgement) cacheHit() (Assumption, bool) {
	l := &j.legs
	return Assumption{
		Name: thatHit, Otherwise: NotExercised,
		Holds: l.hits > 0,
		Found: fmt.Sprintf("%d of %d ops that repeat an earlier prompt had cached tokens", l.hits, l.reported),
		Hint:  strings.Join([]string{"turn the prefix cache on", "lengthen the prompt", "lessen what is sent between"}, ", or "),
	}, l.reported > 0
}

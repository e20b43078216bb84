package workload

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// The legs of a comparison: ops with equal Expect.Same sent the same prompt.
const (
	LegCold      = "cold"      // never sent before
	LegDevice    = "device"    // sent again at once: its pages should be on the device
	LegHost      = "host"      // sent again after the fillers: its pages should be in host memory
	LegCancelled = "cancelled" // hung up on
	LegRetry     = "retry"     // sent again after that, to its end
	LegAgain     = "again"     // and once more, undisturbed and not streamed
)

var (
	echoDefaults  = Plan{Sessions: 8, Rounds: 4, CopyLines: 40}
	burstDefaults = Plan{Sessions: 16, Rounds: 8, ContextLines: 64, MaxTokens: 32}
	evictDefaults = Plan{Sessions: 8, Rounds: 2, ContextLines: 48, Fillers: 6, FillerLines: 96, MaxTokens: 32}
	churnDefaults = Plan{Sessions: 8, Rounds: 6, ContextLines: 48, CopyLines: 8, CancelWithinMS: 40, CancelChunks: 16}
	mixedDefaults = Plan{Sessions: 8, Rounds: 8, ContextLines: 96, CopyLines: 8}
)

// same names a prompt of a session. It holds the tag because a control
// session's prompts differ by it.
func same(tag string, round int) string { return fmt.Sprintf("%s-%d", tag, round) }

// newEcho: each round is a fresh prompt with a list to be repeated exactly.
func newEcho(w *workload, i int, alone bool) Session {
	tag := history.Canary(w.key, i, alone)
	return &script{turns: w.plan.Rounds, turn: func(round int) Turn {
		lines := drawIdentifiers(w.rng(i, fmt.Sprintf("round %d", round)), w.plan.CopyLines)
		return w.prompt(tag, fmt.Sprintf("List %d", round+1), "", repeat(lines), history.Expect{Copy: lines})
	}}
}

// newBurst: in each round, a wave, all sessions send one long prefix and then
// a short tail of their own. Each wave's prefix is new and has one word more
// than the last one's, so that over the waves its end moves across the edge
// of a page, whatever the page's size.
func newBurst(w *workload, i int, alone bool) Session {
	tag := history.Canary(w.key, i, alone)
	return &script{turns: w.plan.Rounds, turn: func(wave int) Turn {
		// Negative numbers are no session's: the same for all, and the
		// controls don't warm the cache for the main phase.
		nonce := history.Canary(w.key, -1-wave, alone)
		lockers := drawLockers(w.rng(-1, fmt.Sprintf("wave %d", wave)), w.plan.ContextLines)
		asked := pick(w.rng(i, fmt.Sprintf("wave %d", wave)), lockers)
		prefix := "List " + nonce + ":\n" + tellAll(lockers) + "\nThe list ends here" + strings.Repeat(" now", wave)
		text := prefix + ".\nYour tag is " + tag + ". " + asked.ask()
		return w.turn([]openai.Message{{Role: "user", Content: openai.Text(text)}},
			history.Expect{Canary: tag, Answer: asked.code})
	}}
}

// newEvict: each round sends one prompt cold, again at once, and again after
// the fillers. Fillers are there to push its pages out of the device's pool;
// they make one token and have no right answer.
func newEvict(w *workload, i int, alone bool) Session {
	tag := history.Canary(w.key, i, alone)
	legs := w.plan.Fillers + 3
	return &script{turns: w.plan.Rounds * legs, turn: func(n int) Turn {
		round, leg := n/legs, n%legs
		if leg >= 2 && leg < legs-1 {
			title := fmt.Sprintf("Filler %d of list %d", leg-1, round+1)
			lockers := drawLockers(w.rng(i, title), w.plan.FillerLines)
			turn := w.prompt(tag, title, tellAll(lockers), lockers[0].ask(), history.Expect{})
			turn.Request.MaxTokens = 1
			return turn
		}
		r := w.rng(i, fmt.Sprintf("round %d", round))
		lockers := drawLockers(r, w.plan.ContextLines)
		asked := pick(r, lockers)
		name := map[int]string{0: LegCold, 1: LegDevice, legs - 1: LegHost}[leg]
		return w.prompt(tag, fmt.Sprintf("List %d", round+1), tellAll(lockers), asked.ask(),
			history.Expect{Answer: asked.code, Same: same(tag, round), Leg: name})
	}}
}

// newChurn: each round sends a prompt and hangs up, in mid-prefill or in
// mid-stream by turns, then sends the same twice to the end: streamed, and in
// one piece, so that the two forms of a reply can be compared.
func newChurn(w *workload, i int, alone bool) Session {
	tag := history.Canary(w.key, i, alone)
	legs := []string{LegCancelled, LegRetry, LegAgain}
	return &script{turns: w.plan.Rounds * len(legs), turn: func(n int) Turn {
		round, leg := n/len(legs), legs[n%len(legs)]
		r := w.rng(i, fmt.Sprintf("round %d", round))
		lockers := drawLockers(r, w.plan.ContextLines)
		lines := drawIdentifiers(r, w.plan.CopyLines)
		expect := history.Expect{Copy: lines, Same: same(tag, round), Leg: leg}
		if leg == LegCancelled {
			expect.Copy = nil // nobody waits for the answer
		}
		turn := w.prompt(tag, fmt.Sprintf("List %d", round+1), tellAll(lockers), repeat(lines), expect)
		turn.NoStream = leg == LegAgain
		switch {
		case leg != LegCancelled:
		case (i+round)%2 == 0:
			turn.CancelAfter = time.Duration(1+r.IntN(w.plan.CancelWithinMS*1000)) * time.Microsecond
		default:
			turn.CancelChunks = 1 + r.IntN(w.plan.CancelChunks)
		}
		return turn
	}}
}

// codeSchema is the JSON Schema of the objects that mixed asks for.
const codeSchema = `{"type":"object","properties":{"code":{"type":"string"}},"required":["code"],"additionalProperties":false}`

// newMixed: each round is one of five shapes, short or long, plain or under a
// schema, a short reply or a long one.
func newMixed(w *workload, i int, alone bool) Session {
	tag := history.Canary(w.key, i, alone)
	return &script{turns: w.plan.Rounds, turn: func(round int) Turn {
		r := w.rng(i, fmt.Sprintf("round %d", round))
		title := fmt.Sprintf("List %d", round+1)
		lines := 2
		shape := pick(r, []string{"short", "long", "short schema", "long schema", "copy"})
		if shape == "copy" {
			lines := drawIdentifiers(r, w.plan.CopyLines)
			return w.prompt(tag, title, "", repeat(lines), history.Expect{Copy: lines})
		}
		if shape == "long" || shape == "long schema" {
			lines = w.plan.ContextLines
		}
		lockers := drawLockers(r, lines)
		asked := pick(r, lockers)
		var turn Turn
		if shape == "short" || shape == "long" {
			turn = w.prompt(tag, title, tellAll(lockers), asked.ask(), history.Expect{Answer: asked.code})
		} else {
			turn = w.prompt(tag, title, tellAll(lockers), fmt.Sprintf(textWhich, asked.name)+textObject,
				history.Expect{Answer: asked.code, Schema: json.RawMessage(codeSchema)})
			turn.Request.ResponseFormat = json.RawMessage(
				`{"type":"json_schema","json_schema":{"name":"code","strict":true,"schema":` + codeSchema + `}}`)
		}
		// A code has 5 characters, an object of one 16.
		turn.Request.MaxTokens = max(w.plan.MaxTokens/(1+r.IntN(4)), min(32, w.plan.MaxTokens))
		return turn
	}}
}

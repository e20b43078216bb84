package oracle

import (
	"cmp"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// perfect plays a workload against a server that is always right, or, where
// damage isn't nil, against one that damages the reply that it is given.
type perfect struct {
	plan    workload.Plan
	control bool
	damage  func(session, turn int, reply *openai.Reply)
}

// judge plays all sessions round by round and judges them with all oracles.
func (p perfect) judge(t testing.TB) *Verdict {
	t.Helper()
	plan := p.plan
	plan.RunKey = hex.EncodeToString(testKey)
	w, err := workload.New(plan)
	if err != nil {
		t.Fatal(err)
	}
	j := newJudgement(history.Header{
		RunKey: plan.RunKey, Seed: plan.Seed, Sessions: plan.Sessions, Concurrency: plan.Sessions, Cores: 2, Model: "perfect",
	}, Registry)
	var id int64
	var now time.Duration
	play := func(phase history.Phase, first, sessions int) {
		j.event(&history.Event{At: now, Kind: history.Started, Name: string(phase)})
		open := map[int]workload.Session{}
		for i := range sessions {
			open[first+i] = w.Session(first+i, phase == history.Control)
		}
		last := map[int]*openai.Reply{}
		for turn := 0; len(open) > 0; turn++ {
			var ops []*history.Op
			for session := first; session < first+sessions; session++ {
				s, ok := open[session]
				if !ok {
					continue
				}
				next, ok := s.Next(last[session])
				if !ok {
					delete(open, session)
					continue
				}
				id++
				reply := workload.RightReply(next)
				if p.damage != nil && phase == history.Main {
					p.damage(session, turn, reply)
				}
				op, got := answer(next, reply, id%3 != 0, now)
				op.ID, op.Phase, op.Kind, op.Session, op.Turn, op.InFlight = id, phase, w.Kind(), session, turn, len(open)
				last[session] = got
				ops = append(ops, op)
			}
			slices.SortStableFunc(ops, func(a, b *history.Op) int { return cmp.Compare(a.LastByte, b.LastByte) })
			end := now + time.Second
			for _, op := range ops {
				j.op(op)
				end = max(end, op.LastByte)
			}
			for ; now < end; now += time.Second {
				j.event(&history.Event{At: now, Kind: history.Tick, Values: map[string]float64{"in_flight": float64(len(open)), "chunks": 100, "late_ms": 0.1, "cpu": 0.1}})
			}
			now = end
		}
		j.event(&history.Event{At: now, Kind: history.Ended, Name: string(phase)})
	}
	if p.control {
		for i := range plan.Sessions {
			play(history.Control, i, 1)
		}
	}
	play(history.Main, 0, plan.Sessions)
	j.finish()
	return j.verdict(false)
}

// answer makes the op of a turn: streamed in small pieces, or in one body. It
// also returns what the session is to hear.
func answer(turn workload.Turn, reply *openai.Reply, stream bool, now time.Duration) (*history.Op, *openai.Reply) {
	request := turn.Request
	request.Stream = stream
	body, _ := json.Marshal(request)
	op := &history.Op{
		Stream: stream, Planned: now, Sent: now, FirstByte: now + 50*time.Millisecond, Status: 200, Outcome: history.OK,
		Request: body, Expect: turn.Expect,
	}
	messages, _ := json.Marshal(request.Messages)
	prompt, completion := len(messages)/4, 1
	for range pieces(reply.Content) {
		completion++
	}
	for _, c := range reply.ToolCalls {
		for range pieces(c.Function.Arguments) {
			completion++
		}
	}
	if request.MaxTokens > 0 {
		completion = min(completion, request.MaxTokens)
	}
	usage := fmt.Sprintf(`{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}`, prompt, completion, prompt+completion, prompt/2)
	at := op.FirstByte
	add := func(format string, args ...any) {
		op.Chunks = append(op.Chunks, history.Chunk{At: at, Data: fmt.Appendf(nil, format, args...)})
		at += 10 * time.Millisecond
	}
	if stream {
		delta := func(delta map[string]any, finish string) {
			d, _ := json.Marshal(delta)
			add(`{"id":"x","object":"chat.completion.chunk","choices":[{"index":0,"delta":%s,"finish_reason":%s}]}`, d, finish)
		}
		delta(map[string]any{"role": "assistant", "content": ""}, "null")
		for piece := range pieces(reply.Content) {
			delta(map[string]any{"content": piece}, "null")
		}
		for i, c := range reply.ToolCalls {
			delta(map[string]any{"tool_calls": []any{map[string]any{"index": i, "id": c.ID, "type": "function", "function": map[string]any{"name": c.Function.Name, "arguments": ""}}}}, "null")
			for piece := range pieces(c.Function.Arguments) {
				delta(map[string]any{"tool_calls": []any{map[string]any{"index": i, "function": map[string]any{"arguments": piece}}}}, "null")
			}
		}
		delta(map[string]any{}, `"`+reply.FinishReason+`"`)
		add(`{"id":"x","object":"chat.completion.chunk","choices":[],"usage":%s}`, usage)
		add("[DONE]")
	} else {
		message := map[string]any{"role": "assistant", "content": reply.Content}
		if len(reply.ToolCalls) > 0 {
			message["tool_calls"] = reply.ToolCalls
		}
		m, _ := json.Marshal(message)
		add(`{"id":"x","object":"chat.completion","choices":[{"index":0,"message":%s,"finish_reason":"%s"}],"usage":%s}`, m, reply.FinishReason, usage)
	}
	op.LastByte = at
	if turn.CancelAfter > 0 || turn.CancelChunks > 0 {
		// Before any text: what it would have said isn't known here.
		op.Chunks, op.Outcome, op.Error = op.Chunks[:1], history.Cancelled, "cancelled as planned"
		if !stream {
			op.Chunks = nil
		}
		return op, nil
	}
	return op, reply
}

// pieces cuts a text into tokens of up to seven bytes.
func pieces(text string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for n := 1; text != ""; n = n%7 + 1 {
			cut := min(n, len(text))
			if !yield(text[:cut]) {
				return
			}
			text = text[cut:]
		}
	}
}

// TestPerfectServer counts the alarms of all oracles on every kind of
// workload, played by a server that is always right. There may be none.
func TestPerfectServer(t *testing.T) {
	ops, alarms, trials := 0, 0, map[Class]int{}
	for _, kind := range workload.Kinds() {
		plans := []workload.Plan{{Kind: kind}}
		if kind == "agent" {
			plans = append(plans, workload.Plan{Kind: kind, Tools: workload.Text})
		}
		for _, plan := range plans {
			plan.Seed, plan.Sessions = 3, 40
			name := strings.TrimSpace(kind + " " + plan.Tools)
			t.Run(name, func(t *testing.T) {
				v := perfect{plan: plan}.judge(t)
				if v.Status != Clean {
					t.Errorf("status %q: %s", v.Status, strings.Join(v.Reasons, "; "))
				}
				for _, c := range v.Classes {
					alarms += c.Main.Failures
					trials[c.Class] += c.Main.Trials
					if c.Main.Failures > 0 {
						t.Errorf("%s: %s, for instance %+v", c.Class, c.Main, c.Examples[0])
					}
				}
				for _, phase := range v.Phases {
					ops += phase.Ops
				}
			})
		}
	}
	t.Logf("%d alarms in %d ops", alarms, ops)
	t.Run("table", func(t *testing.T) {
		for _, r := range Classes {
			if r.FalseAlarm.On == rightReplies && (r.FalseAlarm.Alarms != 0 || r.FalseAlarm.Trials != trials[r.Class]) {
				t.Errorf("%s: thresholds.go says %d of %d; these are 0 of %d", r.Class, r.FalseAlarm.Alarms, r.FalseAlarm.Trials, trials[r.Class])
			}
		}
	})
}

// TestDamagedServer damages one reply in six, as in the incident that the
// project grew out of; the control arm is sound.
func TestDamagedServer(t *testing.T) {
	plan := workload.Plan{Kind: "agent", Seed: 3, Sessions: 80}
	salad := func(session, turn int, reply *openai.Reply) {
		if (session+turn)%6 == 0 && len(reply.ToolCalls) > 0 {
			reply.ToolCalls[0].Function.Arguments = `{"name": "<|DSML|` + strings.Repeat(" the", 3) + ` ｜invoke`
		}
	}
	v := perfect{plan: plan, damage: salad, control: true}.judge(t)
	if v.Status != Corrupt || v.Broken.Main.Rate < 0.1 || v.Broken.Control.Failures > 0 {
		t.Errorf("with a control: status %q, broken %+v: %s", v.Status, v.Broken, strings.Join(v.Reasons, "; "))
	}
	if v = (perfect{plan: plan, damage: salad}).judge(t); v.Status != Inconclusive {
		t.Errorf("without one: status %q: %s", v.Status, strings.Join(v.Reasons, "; "))
	}
	swap := func(session, turn int, reply *openai.Reply) {
		if session == 5 && turn == 2 {
			reply.Content += " " + history.Canary(testKey, 6, false)
		}
	}
	if v = (perfect{plan: plan, damage: swap}).judge(t); v.Status != Corrupt {
		t.Errorf("one foreign canary: status %q: %s", v.Status, strings.Join(v.Reasons, "; "))
	}
}

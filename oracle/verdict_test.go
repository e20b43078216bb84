package oracle

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
)

// told is an oracle that finds what an op's kind says: a class, or nothing.
// Every op is a trial of every class that the test names.
func told(classes ...Class) Oracle {
	all := make([]Class, len(Classes))
	for i, r := range Classes {
		all[i] = r.Class
	}
	return Oracle{Name: "told", Classes: all, New: func(history.Header) Observer { return toldObserver(classes) }}
}

type toldObserver []Class

func (o toldObserver) Op(v *View, rec *Recorder) {
	if v.Op.Phase == history.Main || v.Op.Phase == history.Control {
		rec.Trial(v.Op.ID, o...)
	}
	if c := Class(v.Op.Kind); c != "" {
		rec.Violation(Violation{Class: c, Op: v.Op.ID, Want: "want", Got: "got"})
	}
}

func (o toldObserver) Event(e *history.Event, rec *Recorder) {
	if e.Kind == history.Probe && e.Values == nil {
		rec.Trial(0, Class(e.Name))
		if e.Text != "" {
			rec.Violation(Violation{Class: Class(e.Name), Note: e.Text})
		}
	}
}

func (o toldObserver) Finish(*Recorder) {}

// play is a run of made-up ops: 80 sessions of 4 rounds, all at once, each op
// taking a second. bad says what an op is to be found: "" for nothing.
type play struct {
	header  func(*history.Header)
	control func(session, turn int) Class // nil: no control arm
	main    func(session, turn int) Class
	op      func(*history.Op)
	events  []history.Event
	ticks   func(*history.Event) bool // false drops the tick
	end     *history.Event            // nil: the usual one
	oracles []Oracle
	cut     bool
}

const (
	playSessions = 80
	playRounds   = 4
)

func (p play) judge() *Verdict {
	h := history.Header{Sessions: playSessions, Concurrency: playSessions, Cores: 2, Seed: 1, Model: "small"}
	if p.header != nil {
		p.header(&h)
	}
	j := newJudgement(h, p.oracles)
	id := int64(0)
	phase := func(phase history.Phase, start time.Duration, concurrent bool, of func(session, turn int) Class) time.Duration {
		end := start
		for turn := range playRounds {
			for session := range playSessions {
				id++
				sent := start + time.Duration(turn)*time.Second
				op := history.Op{
					ID: id, Phase: phase, Session: session, Turn: turn, InFlight: playSessions, Status: 200, Outcome: history.OK,
					Planned: sent, Sent: sent, FirstByte: sent + time.Second/2, LastByte: sent + time.Second,
					Kind: string(of(session, turn)), Request: json.RawMessage(`{"messages":[]}`),
				}
				if !concurrent {
					op.InFlight = 1
					op.Sent = start + time.Duration(session*playRounds+turn)*time.Second
					op.Planned, op.LastByte = op.Sent, op.Sent+time.Second
				}
				if p.op != nil {
					p.op(&op)
				}
				j.op(&op)
				end = max(end, op.LastByte)
			}
		}
		return end
	}
	start := time.Duration(0)
	if p.control != nil {
		start = phase(history.Control, 0, false, p.control)
	}
	j.event(&history.Event{At: start, Kind: history.Started, Name: string(history.Main)})
	end := phase(history.Main, start, true, p.main)
	for at := start; at < end; at += time.Second {
		tick := history.Event{At: at, Kind: history.Tick, Values: map[string]float64{"late_ms": 1, "cpu": 0.2, "in_flight": 80}}
		if p.ticks == nil || p.ticks(&tick) {
			j.event(&tick)
		}
	}
	for i := range p.events {
		j.event(&p.events[i])
	}
	last := p.end
	if last == nil {
		last = &history.Event{At: end, Kind: history.Ended, Name: string(history.Main)}
	}
	j.event(last)
	j.finish()
	return j.verdict(p.cut)
}

func nothing(int, int) Class { return "" }

// every returns a class for every nth op, spread over sessions.
func every(n int, c Class) func(session, turn int) Class {
	return func(session, turn int) Class {
		if (session*playRounds+turn)%n == 0 {
			return c
		}
		return ""
	}
}

func once(c Class) func(session, turn int) Class {
	return func(session, turn int) Class {
		if session == 17 && turn == 2 {
			return c
		}
		return ""
	}
}

func TestVerdict(t *testing.T) {
	all := []Oracle{told(WrongArgument, ForeignCanary, NoTokens, GreedyDiffers, BrokenStream)}
	panics := Oracle{Name: "panics", New: func(history.Header) Observer { return panicking{} }}
	foreign := Oracle{Name: "foreign", New: func(history.Header) Observer { return toldObserver{WrongArgument} }}
	tests := []struct {
		name   string
		play   play
		status Status
		reason string // a part of some reason
	}{
		{"clean", play{main: nothing}, Clean, "no sign of corruption in 320 ops; a rate above"},
		{"clean, with control", play{main: nothing, control: nothing}, Clean, "an excess above"},
		{"one canary convicts", play{main: once(ForeignCanary)}, Corrupt, "ForeignCanary: 1 of 320 ops"},
		{"one canary convicts beside a clean control", play{main: once(ForeignCanary), control: nothing}, Corrupt, "ForeignCanary: 1 of 320 ops"},
		{"a class of servers that the control shows alike", play{main: once(ForeignCanary), control: once(ForeignCanary)}, Clean, "base rate, alone and cold: 1 of 320 ops"},
		{"a class of servers that the control shows less", play{main: every(4, ForeignCanary), control: once(ForeignCanary)}, Corrupt, "also in the control arm: 1 of 320 ops"},
		{"within tolerance", play{main: once(BrokenStream)}, Clean, "wrong, within what is tolerated"},
		{"above tolerance", play{main: every(4, BrokenStream)}, Corrupt, "above the 0.5% that is tolerated"},
		{"a weak model without control", play{main: every(6, WrongArgument)}, Inconclusive, "run again with --control"},
		{"a weak model, alone and under load alike", play{main: every(6, WrongArgument), control: every(6, WrongArgument)}, Clean, "base rate, alone and cold: 54 of 320 ops"},
		{"worse under load", play{main: every(6, WrongArgument), control: every(100, WrongArgument)}, Corrupt, "also in the control arm: 4 of 320 ops"},
		{"the incident", play{main: every(6, WrongArgument), control: nothing}, Corrupt, "none of 320 in the control arm: an excess of 17%"},
		{"once more than alone", play{main: once(WrongArgument), control: nothing}, Clean, "an excess above"},
		{"wedged", play{main: once(NoTokens)}, Wedged, "NoTokens: 1 of 320 ops"},
		{"wedged by samples", play{main: nothing, events: []history.Event{
			{Kind: history.Probe, Name: "HealthLies"}, {Kind: history.Probe, Name: "HealthLies", Text: "health says yes"},
		}}, Wedged, "HealthLies: 1 of 2"},
		{"wedged and corrupt", play{main: func(s, turn int) Class { return once(NoTokens)(s, turn) + once(ForeignCanary)(s-1, turn) }}, Corrupt, "NoTokens: 1 of 320 ops"},
		{"a client that stood still can't tell", play{main: once(NoTokens), ticks: func(e *history.Event) bool {
			e.Values["late_ms"] = 9000
			return true
		}}, Inconclusive, "the client never stood still"},
		{"numerics", play{main: every(2, GreedyDiffers)}, Numerics, "GreedyDiffers: 160 of 320 ops"},
		{"numerics and corrupt", play{main: func(s, turn int) Class { return every(2, GreedyDiffers)(s, turn) + once(ForeignCanary)(s, turn+1) }}, Corrupt, "GreedyDiffers"},

		{"rate rises with the load", play{main: func(s, turn int) Class {
			if s >= 40 {
				return every(3, WrongArgument)(s, turn)
			}
			return ""
		}, op: func(op *history.Op) {
			if op.Session < 40 {
				op.InFlight = 10
			}
		}}, Corrupt, "rises with the load within the run"},
		{"later rounds are harder", play{main: func(_, turn int) Class {
			if turn >= 2 {
				return WrongArgument
			}
			return ""
		}, op: func(op *history.Op) {
			if op.Turn < 2 || op.Session == 0 {
				op.InFlight = 1
			}
		}}, Inconclusive, "run again with --control"},

		{"an oracle crashes", play{main: nothing, oracles: append(all[:1:1], panics)}, Inconclusive, `the oracle "panics" crashed (index out of reach)`},
		{"an oracle crashes, others convict", play{main: once(ForeignCanary), oracles: append(all[:1:1], panics)}, Inconclusive, "ForeignCanary: 1 of 320 ops"},
		{"an oracle reports what it didn't declare", play{main: nothing, oracles: append(all[:1:1], foreign)}, Inconclusive, "isn't declared"},

		{"a header that can't be", play{main: nothing, header: func(h *history.Header) { h.RunKey, h.Sessions = "00", 1<<40 }, oracles: []Oracle{all[0], Canary}}, Inconclusive, "can be looked for"},
		{"the history is cut", play{main: nothing, cut: true}, Inconclusive, "in the middle of a record"},
		{"corruption stands in a cut history", play{main: once(ForeignCanary), cut: true}, Corrupt, "in the middle of a record"},
		{"the phase has no end", play{main: nothing, end: &history.Event{Kind: history.Log}}, Inconclusive, "without the phase's end"},
		{"the phase ended early", play{main: nothing, end: &history.Event{Kind: history.Ended, Name: "main", Text: "interrupted"}}, Inconclusive, "it ended early: interrupted"},
		{"requests are refused", play{main: nothing, op: func(op *history.Op) {
			if op.Session%3 == 0 {
				op.Outcome, op.Status, op.Error = history.Failed, 400, "HTTP 400: no such model"
			}
		}}, Inconclusive, `108 of 320 ops failed, 108 of them with “HTTP 400: no such model” (op 1); the server refuses`},
		{"few requests, but with errors of the server", play{main: nothing, op: func(op *history.Op) {
			if op.Session%16 == 0 {
				op.Outcome, op.Status, op.Error = history.Failed, 500, "HTTP 500: CUDA error"
			}
		}}, Inconclusive, `20 of 320 ops failed, 20 of them with “HTTP 500: CUDA error” (op 1); the server fails`},
		{"few requests are shed", play{main: nothing, op: func(op *history.Op) {
			if op.Session%16 == 0 {
				op.Outcome, op.Status, op.Error = history.Failed, 503, "HTTP 503: busy"
			}
		}}, Clean, "no sign of corruption"},
		{"the server is gone", play{main: nothing, op: func(op *history.Op) {
			op.Outcome, op.Status, op.Error = history.Failed, 0, "connection refused"
		}}, Inconclusive, "is the server up"},
		{"the client was late", play{main: nothing, ticks: func(e *history.Event) bool {
			e.Values["late_ms"] = 400
			return true
		}}, Inconclusive, "4 of 4 ticks came more than 250 ms late"},
		{"the client was late, but by little of what a reply takes", play{main: nothing, op: func(op *history.Op) {
			if op.Phase == history.Main {
				op.Sent += 3 * time.Second * time.Duration(op.Turn)
				op.Planned, op.LastByte = op.Sent, op.Sent+4*time.Second
			}
		}, ticks: func(e *history.Event) bool {
			e.Values["late_ms"] = 900
			return true
		}}, Clean, "no sign of corruption"},
		{"open loop, long replies, the client was late", play{main: nothing, header: func(h *history.Header) { h.Concurrency, h.RequestRate = 0, 80 }, op: func(op *history.Op) {
			op.LastByte = op.Sent + 4*time.Second
		}, ticks: func(e *history.Event) bool {
			e.Values["late_ms"] = 900
			return true
		}}, Inconclusive, "ticks came more than 250 ms late"},
		{"the client was busy", play{main: nothing, ticks: func(e *history.Event) bool {
			e.Values["cpu"] = 1.9
			return true
		}}, Inconclusive, "at most 1.9 of 2 cores"},
		{"open loop, late", play{main: nothing, header: func(h *history.Header) { h.Concurrency, h.RequestRate = 0, 80 }, op: func(op *history.Op) {
			op.Planned -= time.Duration(op.Session) * 10 * time.Millisecond
		}}, Inconclusive, "requests were sent on time"},
		{"the concurrency was never reached", play{main: nothing, op: func(op *history.Op) {
			op.Sent += time.Duration(op.Session/8) * 10 * time.Second
			op.Planned, op.LastByte = op.Sent, op.Sent+time.Second
		}, ticks: func(e *history.Event) bool { return true }}, NotExercised, "the planned concurrency was reached"},
		{"sessions that wait by plan", play{main: nothing, op: func(op *history.Op) {
			op.LastByte = op.Sent + time.Second/10
			if op.Turn > 0 {
				op.Planned = op.Sent - time.Millisecond
			}
		}}, Clean, "no sign of corruption"},
		{"a control arm that wasn't alone", play{main: nothing, control: nothing, op: func(op *history.Op) { op.InFlight = 80 }}, Inconclusive, "the control arm ran alone"},
		{"a control arm that met an earlier run's cache", play{main: nothing, control: nothing, op: usage(259, 253)}, Inconclusive, "253 of the 259 tokens of its first prompt were cached (op 1)"},
		{"a control arm that met another run's texts", play{main: nothing, control: nothing, op: usage(259, 200)}, Clean, "no more corruption"},
		{"every request was cancelled", play{main: nothing, oracles: []Oracle{told()}}, NotExercised, "0 of 320 ops had a reply"},
		{"nothing was sent", play{main: nothing, op: func(op *history.Op) { op.Phase = history.Sentinel }}, NotExercised, "no op of the main phase was sent"},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			if test.play.oracles == nil {
				test.play.oracles = all
			}
			v := test.play.judge()
			if v.Status != test.status {
				t.Errorf("status %q, want %q; reasons:\n%s", v.Status, test.status, strings.Join(v.Reasons, "\n"))
			}
			if !slices.ContainsFunc(v.Reasons, func(r string) bool { return strings.Contains(r, test.reason) }) {
				t.Errorf("no reason says %q:\n%s", test.reason, strings.Join(v.Reasons, "\n"))
			}
			if _, err := json.Marshal(v); err != nil {
				t.Errorf("verdict.json: %v", err)
			}
		})
	}
}

// usage gives ops a reply that says what was cached.
func usage(prompt, cached int) func(*history.Op) {
	return func(op *history.Op) {
		op.Chunks = []history.Chunk{{Data: fmt.Appendf(nil, `{"choices":[],"usage":{"prompt_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`, prompt, cached)}}
	}
}

type panicking struct{}

func (panicking) Op(v *View, _ *Recorder) {
	if v.Op.Turn == 1 {
		panic("index out of reach")
	}
}
func (panicking) Event(*history.Event, *Recorder) {}
func (panicking) Finish(*Recorder)                {}

// TestVerdictNumbers follows the numbers of one run into the verdict.
func TestVerdictNumbers(t *testing.T) {
	v := play{main: every(6, WrongArgument), control: every(100, WrongArgument), oracles: []Oracle{told(WrongArgument)}}.judge()
	if len(v.Classes) != 1 {
		t.Fatalf("%d classes, want 1", len(v.Classes))
	}
	c := v.Classes[0]
	var ops []int64
	for session := range playSessions {
		for turn := range playRounds {
			if (session*playRounds+turn)%6 == 0 {
				ops = append(ops, int64(playSessions*playRounds+turn*playSessions+session+1))
			}
		}
	}
	slices.Sort(ops)
	if diff := cmp.Diff(ops, c.Ops); diff != "" {
		t.Errorf("ops (-want +got):\n%s", diff)
	}
	if len(c.ControlOps) != 4 || c.Control.Failures != 4 || c.Control.Trials != 320 || c.Main.Failures != len(ops) || c.Main.Trials != 320 {
		t.Errorf("main %+v, control %+v, control ops %v", c.Main, c.Control, c.ControlOps)
	}
	if math.Abs(c.Excess.Difference-50./320) > 1e-9 || c.Excess.Low >= c.Excess.Difference || c.Excess.High <= c.Excess.Difference {
		t.Errorf("excess %+v, want 50 of 320 within its interval", c.Excess)
	}
	if diff := cmp.Diff([]int64{321, 324, 327}, []int64{c.Examples[0].Op, c.Examples[1].Op, c.Examples[2].Op}); diff != "" {
		t.Errorf("examples (-want +got):\n%s", diff)
	}
	for _, b := range v.Breakdowns {
		failures, trials := 0, 0
		for _, bin := range b.Bins {
			failures += bin.Rate.Failures
			trials += bin.Rate.Trials
		}
		if failures != len(ops) || trials != 320 {
			t.Errorf("breakdown by %s: %d of %d, want %d of 320", b.By, failures, trials, len(ops))
		}
	}
	if got := v.Phases[1].Ops; got != 320 {
		t.Errorf("%d ops in the main phase, want 320", got)
	}
}

// TestManyClasses: what convicts a class that is looked at alone is no more
// than chance among twenty that are.
func TestManyClasses(t *testing.T) {
	var others []Class
	for _, r := range Classes {
		if r.Source == Model && r.Class != WrongArgument && len(others) < 19 {
			others = append(others, r.Class)
		}
	}
	of := func(worse int, crowd bool) func(session, turn int) Class {
		return func(session, turn int) Class {
			switch i := session*playRounds + turn; {
			case i%(playSessions*playRounds/worse) == 0:
				return WrongArgument
			case crowd && i%2 == 1:
				return others[i/2%len(others)]
			default:
				return ""
			}
		}
	}
	for _, test := range []struct {
		name   string
		crowd  bool
		status Status
	}{{"alone", false, Corrupt}, {"among twenty", true, Clean}} {
		t.Run(test.name, func(t *testing.T) {
			v := play{main: of(20, test.crowd), control: of(5, test.crowd), oracles: []Oracle{told(append(others, WrongArgument)...)}}.judge()
			i := slices.IndexFunc(v.Classes, func(c ClassResult) bool { return c.Class == WrongArgument })
			e := v.Classes[i].Excess
			t.Logf("%s: p = %.4f, adjusted %.4f", v.Classes[i].Main, e.P, e.PAdjusted)
			if e.P >= significance || v.Status != test.status {
				t.Errorf("p %v, status %q, want %q: %s", e.P, v.Status, test.status, strings.Join(v.Reasons, "; "))
			}
		})
	}
}

func TestBins(t *testing.T) {
	var got []string
	for _, n := range []int{-1, 0, 1, 2, 3, 4, 5, 8, 9, 1024, 1025} {
		b := octave(n)
		got = append(got, fmt.Sprintf("%d %s", b.order, b.label()))
	}
	want := []string{"0 0", "0 0", "1 1", "2 2", "3 3-4", "3 3-4", "4 5-8", "4 5-8", "5 9-16", "11 513-1024", "12 1025-2048"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("octaves (-want +got):\n%s", diff)
	}
}

func TestDurations(t *testing.T) {
	var d durations
	for i := range 1000 {
		d.add(time.Duration(i+1) * time.Millisecond)
	}
	for _, test := range []struct{ q, want float64 }{{0, 1}, {0.5, 501}, {0.9, 901}, {0.99, 991}, {1, 1000}} {
		if got := ms(d.quantile(test.q)); math.Abs(got-test.want) > 0.03*test.want {
			t.Errorf("quantile %v is %v ms, want %v within 3%%", test.q, got, test.want)
		}
	}
	for _, x := range []time.Duration{0, 1, 31, 32, 33, 63, 64, 65, 1000, 1e9, math.MaxInt64} {
		step := durationStep(x)
		if from := durationFrom(step); from > x || durationStep(from) != step {
			t.Errorf("%d is in step %d, which begins at %d", x, step, from)
		}
	}
	d.add(-time.Second) // a clock that went back
	d.add(math.MaxInt64)
	if d.quantile(1) != math.MaxInt64 {
		t.Errorf("the largest is %v", d.quantile(1))
	}
}

// TestClasses keeps the table whole: every class of every oracle has one row,
// with a reason, and no row is left over.
func TestClasses(t *testing.T) {
	if len(Classes) > maxClasses {
		t.Fatalf("%d classes, and a set holds %d", len(Classes), maxClasses)
	}
	reported := map[Class]bool{}
	for _, o := range Registry {
		for _, c := range o.Classes {
			reported[c] = true
		}
	}
	rows := map[Class]bool{}
	for _, r := range Classes {
		if rows[r.Class] {
			t.Errorf("%s has two rows", r.Class)
		}
		rows[r.Class] = true
		if !reported[r.Class] {
			t.Errorf("%s has a row, and no oracle reports it", r.Class)
		}
		if r.Why == "" || (r.Source == Model) != (r.MinExcess > 0) || (r.Means != Corrupt && r.Means != Wedged && r.Means != Numerics) {
			t.Errorf("%s: row %+v is incomplete", r.Class, r)
		}
	}
	for c := range reported {
		if !rows[c] {
			t.Errorf("%s has no row", c)
		}
	}
}

// TestDocs keeps the page about oracles in step with the table of classes.
func TestDocs(t *testing.T) {
	page, err := os.ReadFile("../docs/oracles.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range Classes {
		row := fmt.Sprintf("| `%s` | %s | ", r.Class, r.Source)
		if !strings.Contains(string(page), row) {
			t.Errorf("docs/oracles.md has no row that begins %q", row)
		}
	}
}

// phase judges made-up ops of one phase, of sessions of four rounds.
func (j *judgement) phase(phase history.Phase, sessions int, of func(session, turn int) Class) {
	for session := range sessions {
		for turn := range playRounds {
			j.op(&history.Op{
				ID: int64(len(j.rec.rows) + 1), Phase: phase, Session: session, Turn: turn, Status: 200, Outcome: history.OK,
				Kind: string(of(session, turn)), Request: json.RawMessage(`{}`),
			})
		}
	}
}

// TestSmallRun: twelve sessions are few for an interval, but one op in five
// against none is no chance.
func TestSmallRun(t *testing.T) {
	j := newJudgement(history.Header{Sessions: 12}, []Oracle{told(MarkupLeak)})
	j.phase(history.Control, 12, nothing)
	j.phase(history.Main, 12, every(5, MarkupLeak))
	j.finish()
	if v := j.verdict(false); v.Status != Corrupt {
		t.Errorf("status %s, want corrupt: %v", v.Status, v.Reasons)
	}
}

// TestBesideTheSessions: what is sent beside the sessions has no part in the
// comparison of their rates, and a leak there is a leak all the same.
func TestBesideTheSessions(t *testing.T) {
	judge := func(c Class) *Verdict {
		j := newJudgement(history.Header{Sessions: 20}, []Oracle{told(MarkupLeak, ForeignCanary)})
		j.phase(history.Control, 20, nothing)
		j.phase(history.Main, 20, nothing)
		j.phase(history.Recovery, 20, every(1, c))
		j.finish()
		return j.verdict(false)
	}
	v := judge(MarkupLeak)
	if v.Broken.Main.Trials != 80 || v.Broken.Main.Failures != 0 {
		t.Errorf("broken %s, want 0 of 80", v.Broken.Main)
	}
	if v := judge(ForeignCanary); v.Status != Corrupt {
		t.Errorf("status %s after a leak, want corrupt", v.Status)
	}
}

package oracle

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// served makes the view of a streamed op with a token at each time.
func served(id int64, sent time.Duration, tokens ...time.Duration) *View {
	op := &history.Op{ID: id, Phase: history.Main, Stream: true, Sent: sent, LastByte: tokens[len(tokens)-1], Status: 200, Outcome: history.OK, Request: []byte(`{"messages":[]}`)}
	for _, at := range tokens {
		op.Chunks = append(op.Chunks, history.Chunk{At: at, Data: []byte(`{"choices":[{"delta":{"content":"a"}}]}`)})
	}
	return &View{Op: op, Reply: &openai.Reply{Content: "a", FinishReason: "stop"}}
}

// gaveUp makes the view of an op that timed out without a token.
func gaveUp(id int64, phase history.Phase, sent, end time.Duration) *View {
	op := &history.Op{ID: id, Phase: phase, Stream: true, Sent: sent, LastByte: end, Outcome: history.TimedOut, Error: "timeout", Request: []byte(`{"messages":[]}`)}
	return &View{Op: op, Reply: &openai.Reply{}}
}

// silent lets an op time out at the end.
func silent(v *View, end time.Duration) *View {
	v.Op.LastByte, v.Op.Outcome, v.Op.Error = end, history.TimedOut, "timeout"
	return v
}

// ticks makes one tick a second in [from, to), without a token.
func ticks(from, to int, values map[string]float64) []history.Event {
	var out []history.Event
	for s := from; s < to; s++ {
		out = append(out, history.Event{At: time.Duration(s) * time.Second, Kind: history.Tick, Values: values})
	}
	return out
}

func TestWedge(t *testing.T) {
	const s = time.Second
	quiet := map[string]float64{"in_flight": 3, "late_ms": 1}
	usual := func(firstToken time.Duration) (views []*View) {
		for i := range int64(10) {
			sent := time.Duration(i) * s
			views = append(views, served(i+1, sent, sent+firstToken, sent+firstToken+s/10))
		}
		return views
	}
	type finding struct {
		Class Class
		Op    int64
		Note  string
	}
	tests := []struct {
		name   string
		views  []*View
		events []history.Event
		want   []finding
	}{
		{"quiet for 20 s while requests run", usual(s / 2), ticks(100, 120, quiet), []finding{
			{NoTokens, 0, "from 100 s to 119 s requests were running"},
		}},
		{"quiet, but nothing runs", usual(s / 2), ticks(100, 120, map[string]float64{"late_ms": 1}), nil},
		{"quiet for 9 s", usual(s / 2), ticks(100, 109, quiet), nil},
		{"quiet, but prefills usually take 15 s", usual(15 * s), ticks(100, 120, quiet), nil},
		{"quiet, but the client was stalled", usual(s / 2), ticks(100, 120, map[string]float64{"in_flight": 3, "late_ms": 5000}), nil},
		{"a token in the middle", usual(s / 2), append(append(ticks(100, 108, quiet), history.Event{At: 108 * s, Kind: history.Tick, Values: map[string]float64{"in_flight": 3, "chunks": 1}}), ticks(109, 117, quiet)...), nil},
		{"a timeout in an overload: those sent later are no better off", append(usual(s/2), gaveUp(20, history.Main, 100*s, 200*s), served(21, 101*s, 201*s), served(22, 102*s, 203*s)), nil, nil},
		{"a timeout that later ones overtook", append(usual(s/2), gaveUp(20, history.Main, 100*s, 200*s), served(21, 102*s, 103*s)), nil, []finding{
			{SlowFirstToken, 20, "requests sent later were served up to 97.0 s earlier"},
		}},
		{"a timeout of 20 s, overtaken", append(usual(s/2), gaveUp(20, history.Main, 100*s, 120*s), served(21, 102*s, 103*s)), nil, []finding{
			{SlowFirstToken, 20, "requests sent later were served up to 17.0 s earlier"},
		}},
		{"silence until we gave up after 20 s", append(usual(s/2), silent(served(20, 100*s, 101*s, 102*s), 122*s)), nil, []finding{
			{Stalled, 20, "after 2 chunks"},
		}},
		{"35 s where 4 s are usual", append(usual(4*s), served(20, 100*s, 135*s), served(21, 102*s, 106*s)), nil, nil},
		{"no tokens at all, ever", []*View{gaveUp(1, history.Main, 0, 60*s), gaveUp(2, history.Main, 0, 60*s)}, ticks(1, 60, quiet), []finding{
			{SlowFirstToken, 1, "no request got a token meanwhile"},
			{SlowFirstToken, 2, "no request got a token meanwhile"},
			{NoTokens, 0, "from 1 s to 59 s requests were running"},
		}},
		{"a health check that fails too", append(usual(s/2), gaveUp(20, history.Sentinel, 50*s, 80*s)), []history.Event{{At: 81 * s, Kind: history.Health, Values: map[string]float64{"status": 503}}}, nil},
		{"a health check long after", append(usual(s/2), gaveUp(20, history.Sentinel, 50*s, 80*s)), []history.Event{{At: 120 * s, Kind: history.Health, Values: map[string]float64{"status": 200}}}, nil},
		{"a health check that lies", append(usual(s/2), gaveUp(20, history.Sentinel, 50*s, 80*s)), []history.Event{{At: 60 * s, Kind: history.Health, Values: map[string]float64{"status": 200}}}, []finding{
			{HealthLies, 20, "health said 200 at 60.0 s; this one-token generation ran from 50.0 s to 80.0 s"},
		}},
		{"a one-token generation behind a long queue that moves", append(usual(s/2), served(19, 45*s, 60*s), gaveUp(20, history.Sentinel, 50*s, 80*s)), []history.Event{{At: 60 * s, Kind: history.Health, Values: map[string]float64{"status": 200}}}, nil},
		{"a one-token generation that is refused", append(usual(s/2), refusal(20, history.Sentinel, 50*s)), []history.Event{{At: 50 * s, Kind: history.Health, Values: map[string]float64{"status": 200}}}, nil},
		{"a slow server that goes on", []*View{served(1, 0, 5*s, 12*s, 20*s, 31*s), served(2, 31*s, 38*s, 50*s, 57*s)}, nil, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var got []finding
			for _, v := range observe(history.Header{}, tt.views, tt.events, Wedge) {
				got = append(got, finding{v.Class, v.Op, v.Note})
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// refusal is a request that the server finds fault with.
func refusal(id int64, phase history.Phase, at time.Duration) *View {
	return &View{
		Op:    &history.Op{ID: id, Phase: phase, Sent: at, LastByte: at + time.Millisecond, Status: 401, Outcome: history.Failed, Error: "HTTP 401"},
		Reply: &openai.Reply{Err: &openai.APIError{Message: "Incorrect API key provided"}},
	}
}

// TestRefusalsPoisonNothing: a wrong key is refused for ever.
func TestRefusalsPoisonNothing(t *testing.T) {
	var views []*View
	views = append(views, served(1, 0, time.Second))
	for i := range int64(2 * deadAfter) {
		views = append(views, refusal(i+2, history.Main, time.Minute), refusal(i+100, history.Recovery, time.Minute))
	}
	if got := observe(history.Header{}, views, nil, Poison); len(got) > 0 {
		t.Errorf("found %v", got)
	}
}

// TestRoleFirst: a role that is sent at once is no token.
func TestRoleFirst(t *testing.T) {
	v := served(1, 0, time.Second, 50*time.Second)
	v.Op.Chunks[0].Data = []byte(`{"choices":[{"delta":{"role":"assistant","content":""}}]}`)
	if got := firstToken(v.Op); got != 1 {
		t.Errorf("first token is chunk %d", got)
	}
	v.Op.Chunks[0].Data = []byte(`{"choices":[{"delta":{"role":"assistant","content":"Hi"}}]}`)
	if got := firstToken(v.Op); got != 0 {
		t.Errorf("first token is chunk %d", got)
	}
}

// TestDeadServer: from some time on, nothing is answered.
func TestDeadServer(t *testing.T) {
	const s = time.Second
	refused := func(id int64, sent time.Duration) *View {
		return &View{Op: &history.Op{ID: id, Phase: history.Main, Sent: sent, LastByte: sent + s, Outcome: history.Failed, Error: "connection refused"}, Reply: &openai.Reply{}}
	}
	var views []*View
	views = append(views, served(1, 0, s))
	for i := range int64(20) { // in flight together when it died
		views = append(views, refused(i+2, s/2))
	}
	if got := observe(history.Header{}, views, nil, Poison); len(got) != 0 {
		t.Errorf("what was in flight: %+v", got)
	}
	for i := range int64(deadAfter) {
		views = append(views, refused(i+30, time.Duration(i+2)*s))
	}
	got := observe(history.Header{}, views, nil, Poison)
	if len(got) != 1 || got[0].Class != Poisoned || got[0].Note != "all 10 ops fail that were sent after op 1 was answered, from op 30 on" {
		t.Errorf("%+v", got)
	}
	views = append(views, served(50, 20*s, 21*s))
	if got := observe(history.Header{}, views, nil, Poison); len(got) != 0 {
		t.Errorf("it came back: %+v", got)
	}
}

// TestWeakModelPoisonsNothing: a model that loops alone too loops in plain
// requests as well.
func TestWeakModelPoisonsNothing(t *testing.T) {
	said := func(id int64, phase history.Phase, text string) *View {
		return &View{Op: &history.Op{ID: id, Phase: phase, Outcome: history.OK, Status: 200}, Reply: &openai.Reply{Content: text}}
	}
	for _, test := range []struct {
		name  string
		alone []string
		found int
	}{
		{"well alone", []string{"a", "b", "c", "d", "e", "f", "g", "h"}, 1},
		{"too little to know", []string{"a", "b", "c"}, 0},
		{"garbled alone", []string{"a", "b", "c", "d", "e", "f", "g", strings.Repeat("!", 40)}, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			var views []*View
			for _, text := range test.alone {
				views = append(views, said(int64(len(views)+1), history.Control, text))
			}
			for range poisonedAfter {
				views = append(views, said(int64(len(views)+1), history.Recovery, strings.Repeat("!", 40)))
			}
			if got := observe(history.Header{}, views, nil, Poison); len(got) != test.found {
				t.Errorf("found %+v, want %d", got, test.found)
			}
		})
	}
}

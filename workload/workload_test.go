package workload

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"flag"
	"fmt"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// marshal writes all that a server would see of some turns, and all that is
// expected of it.
func marshal(t *testing.T, turns []Turn) string {
	t.Helper()
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	for _, turn := range turns {
		// Fields by name: a field that Turn gains is no change of bytes.
		err := e.Encode(map[string]any{
			"request": turn.Request, "expect": turn.Expect, "delay": turn.Delay,
			"cancel_after": turn.CancelAfter, "cancel_chunks": turn.CancelChunks, "no_stream": turn.NoStream,
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return b.String()
}

func golden(t *testing.T, turns []Turn) string {
	t.Helper()
	sum := sha256.Sum256([]byte(marshal(t, turns)))
	return hex.EncodeToString(sum[:])
}

var show = flag.Bool("show", false, "print the workloads of the golden test")

// TestGolden pins every byte of a plan of each kind, so that a plan means the
// same on every machine and tomorrow.
func TestGolden(t *testing.T) {
	const version = 1
	plan := Plan{Seed: 1, RunKey: "00112233445566778899aabbccddeeff", Sessions: 3}
	for _, test := range []struct {
		name string
		plan Plan
		want string
	}{
		{"agent", Plan{Kind: "agent"}, "50d687a8a73f982b4585fa1bd7ec40c6120ef2876524ca113bce3147ce07ab19"},
		{"agent text", Plan{Kind: "agent", Tools: Text, Rounds: 8, ContextLines: 600}, "ece39055fff10c4435cedf3541c6223a06420654e22878778de05c94390735d4"},
		{"recall", Plan{Kind: "recall"}, "ca097894a44aa33bee619884b2094450f4e127af7ce69a924a9e566cf85b7160"},
		{"echo", Plan{Kind: "echo"}, "bbd5f0b10ac9bc807b339ffe8db376fb76e486b777b1dfd5a4744012a37167cb"},
		{"burst", Plan{Kind: "burst"}, "4a0d7b63e8f3c4a5ccf08fd22e6ad6cdade006340982346d55d41155c8554460"},
		{"evict", Plan{Kind: "evict"}, "030de028f4f02cafdb758b9e4e78a3e24cfaa2cfafc3b6e69df3624e63d6b523"},
		{"churn", Plan{Kind: "churn"}, "62d20e337c3c97b56d3eda4a5bf5b0c2476430f58be52da2daba55d616e7800f"},
		{"mixed", Plan{Kind: "mixed"}, "98fb56d95b6a3a390eb94afdfe5e8d7454a76a44d54dda39a80905c0c678f160"},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.plan.Seed, test.plan.RunKey, test.plan.Sessions = plan.Seed, plan.RunKey, plan.Sessions
			w := mustNew(t, test.plan)
			var turns []Turn
			for i := range plan.Sessions {
				turns = append(turns, play(w.Session(i, false), RightReply)...)
				turns = append(turns, play(w.Session(i, true), RightReply)...)
			}
			if *show {
				fmt.Println(marshal(t, turns[:min(len(turns), 12)]))
			}
			if got := golden(t, turns); got != test.want || version != Version {
				t.Errorf("the bytes of kind %s at version %d are now %s.\n"+
					"If that is meant, bump the workload version (Version, %d now) and put the new sums here: "+
					"stored plans of the old version must not be replayed with other bytes.", test.name, version, got, Version)
			}
		})
	}
}

// TestSessionsAreIndependent: a session's bytes don't depend on which other
// sessions run, nor on when. It also shows the race detector a workload that
// is used from several goroutines.
func TestSessionsAreIndependent(t *testing.T) {
	for _, kind := range Kinds() {
		w := mustNew(t, Plan{Kind: kind, Sessions: 4, Rounds: 2})
		want := make([]string, 4)
		for i := range want {
			want[i] = golden(t, play(mustNew(t, Plan{Kind: kind, Sessions: 4, Rounds: 2}).Session(i, false), RightReply))
		}
		got := make([]string, 4)
		var wg sync.WaitGroup
		for i := range got {
			wg.Go(func() { got[i] = golden(t, play(w.Session(i, false), RightReply)) })
		}
		wg.Wait()
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s: %s", kind, diff)
		}
		if want[0] == want[1] {
			t.Errorf("%s: two sessions are the same", kind)
		}
	}
}

// satisfies says whether a reply is what a turn expects.
func satisfies(e history.Expect, reply *openai.Reply) bool {
	switch {
	case e.Copy != nil && reply.Content != strings.Join(e.Copy, "\n"):
		return false
	case e.Schema != nil:
		var object struct{ Code string }
		return json.Unmarshal([]byte(reply.Content), &object) == nil && object.Code == e.Answer
	default:
		return strings.Contains(reply.Content, e.Answer)
	}
}

// TestEveryKind: what holds for the requests of all kinds.
func TestEveryKind(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plan := Plan{
			Kind: rapid.SampledFrom(Kinds()).Draw(t, "kind"), Seed: rapid.Uint64().Draw(t, "seed"),
			Rounds: rapid.IntRange(1, 5).Draw(t, "rounds"), TopLogprobs: rapid.IntRange(0, 20).Draw(t, "logprobs"),
		}
		w := mustNew(t, plan)
		key := w.(*workload).key
		i, alone := rapid.IntRange(0, 7).Draw(t, "session"), rapid.Bool().Draw(t, "alone")
		s := w.Session(i, alone)
		turns := play(s, RightReply)
		for _, turn := range turns {
			e, r := turn.Expect, turn.Request
			if e.Canary != history.Canary(key, i, alone) || !strings.Contains(heard(turn), e.Canary) {
				t.Fatalf("canary %q of session %d in\n%s", e.Canary, i, heard(turn))
			}
			if r.Model != "" || r.Stream || *r.Temperature != 0 || r.Seed == nil || r.MaxTokens < 1 ||
				r.Logprobs != (plan.TopLogprobs > 0) || r.TopLogprobs != plan.TopLogprobs {
				t.Fatalf("request %+v", r)
			}
			if !satisfies(e, RightReply(turn)) {
				t.Fatalf("RightReply %q doesn't satisfy %+v", RightReply(turn).Content, e)
			}
			for _, value := range append(e.Copy, e.Answer) {
				if !strings.Contains(heard(turn), value) {
					t.Fatalf("%q was never told", value)
				}
			}
			if last := r.Messages[len(r.Messages)-1]; last.Role != "user" {
				t.Fatalf("the last message is %s's", last.Role)
			}
			if n := len(strings.Fields(strings.Join(e.Copy, " "))); r.MaxTokens < 8*n {
				t.Fatalf("%d tokens for %d lines", r.MaxTokens, n)
			}
		}
		for range 2 { // over is over
			if turn, ok := s.Next(RightReply(turns[0])); ok {
				t.Fatalf("a turn after the end: %+v", turn)
			}
		}
	})
}

// TestRecall: each answer was told exactly Distance turns ago, by one line,
// and every distance comes.
func TestRecall(t *testing.T) {
	for _, onError := range []string{Repair, Continue, Stop} {
		w := mustNew(t, Plan{Kind: "recall", Sessions: 20, OnError: onError})
		count := map[int]int{}
		for i := range 20 {
			turns := play(w.Session(i, false), func(turn Turn) *openai.Reply {
				if onError == Continue || i == 7 && len(turn.Request.Messages) > 20 {
					return &openai.Reply{Content: "I don't know."}
				}
				return RightReply(turn)
			})
			want := 40
			if onError == Stop && i == 7 {
				want = 11
			}
			if len(turns) != want {
				t.Fatalf("%s: session %d has %d turns, want %d", onError, i, len(turns), want)
			}
			for n, turn := range turns {
				messages := turn.Request.Messages
				if len(messages) != 2*n+2 {
					t.Fatalf("turn %d has %d messages", n, len(messages))
				}
				for k, m := range messages[1:] {
					if want := []string{"user", "assistant"}[k%2]; m.Role != want {
						t.Fatalf("message %d is %s's", k+1, m.Role)
					}
					if m.Role == "assistant" && onError == Repair && strings.Contains(string(m.Content), "know") {
						t.Fatalf("a wrong reply was kept: %q", m.Content)
					}
					if m.Role == "assistant" && onError == Continue && m.Content != "I don't know." {
						t.Fatalf("a wrong reply was replaced: %q", m.Content)
					}
				}
				if n == 0 {
					continue
				}
				d := turn.Expect.Distance
				count[d]++
				told := string(messages[1+2*(n-d)].Content)
				if !strings.Contains(told, " is "+turn.Expect.Answer+".") {
					t.Fatalf("turn %d: %q wasn't told %d turns ago, but %q", n, turn.Expect.Answer, d, told)
				}
				if strings.Count(heard(turn), turn.Expect.Answer) != 1 {
					t.Fatalf("turn %d: %q stands more than once in the conversation", n, turn.Expect.Answer)
				}
			}
		}
		for k := 1; k <= recallMax; k++ {
			if count[k] == 0 {
				t.Errorf("%s: nothing was asked from %d turns ago: %v", onError, k, count)
			}
		}
	}
}

// TestBurst: the sessions of a wave share a long prefix and differ in a short
// tail; waves and controls share nothing.
func TestBurst(t *testing.T) {
	w := mustNew(t, Plan{Kind: "burst"})
	common := func(a, b Turn) (shared, rest int) {
		x, y := string(a.Request.Messages[0].Content), string(b.Request.Messages[0].Content)
		for shared < min(len(x), len(y)) && x[shared] == y[shared] {
			shared++
		}
		return shared, len(x) - shared
	}
	one, two, control := play(w.Session(0, false), RightReply), play(w.Session(1, false), RightReply), play(w.Session(0, true), RightReply)
	for wave := range one {
		if shared, rest := common(one[wave], two[wave]); shared < 2000 || rest > 150 {
			t.Errorf("wave %d: %d bytes shared, %d not", wave, shared, rest)
		}
		if shared, _ := common(one[wave], control[wave]); shared > len("List abcd") {
			t.Errorf("wave %d shares %d bytes with its control", wave, shared)
		}
		if wave == 0 {
			continue
		}
		if shared, _ := common(one[wave], one[wave-1]); shared > len("List abcd") {
			t.Errorf("wave %d shares %d bytes with the last one", wave, shared)
		}
		text := string(one[wave].Request.Messages[0].Content)
		if n := strings.Count(text, " now"); n != wave {
			t.Errorf("wave %d is padded by %d words", wave, n)
		}
	}
}

// TestLegs: ops with one Same sent one prompt, whatever the kind, and no two
// prompts have the same Same.
func TestLegs(t *testing.T) {
	for kind, want := range map[string]string{"evict": "cold device - - - - - - host", "churn": "cancelled retry again"} {
		w := mustNew(t, Plan{Kind: kind})
		prompts, fillers := map[string]string{}, map[string]bool{}
		for i := range 4 {
			for _, alone := range []bool{false, true} {
				turns := play(w.Session(i, alone), func(Turn) *openai.Reply { return nil })
				n := len(strings.Fields(want))
				for at := 0; at < len(turns); at += n {
					var legs []string
					for _, turn := range turns[at : at+n] {
						e := turn.Expect
						if e.Leg == "" {
							legs = append(legs, "-")
							if diff := cmp.Diff(history.Expect{Canary: e.Canary}, e); diff != "" {
								t.Errorf("a filler expects something: %s", diff)
							}
							if filler := heard(turn); fillers[filler] {
								t.Errorf("a filler comes twice: %.80q", filler)
							} else {
								fillers[filler] = true
							}
							continue
						}
						legs = append(legs, e.Leg)
						if turn.NoStream != (e.Leg == LegAgain) {
							t.Errorf("leg %s: no stream is %t", e.Leg, turn.NoStream)
						}
						if e.Answer == "" && e.Copy == nil && e.Leg != LegCancelled {
							t.Errorf("%s has nothing to check", e.Leg)
						}
						prompt := fmt.Sprintf("%s %d", heard(turn), turn.Request.MaxTokens)
						if old, ok := prompts[e.Same]; ok && old != prompt {
							t.Errorf("%s %s is two prompts", kind, e.Same)
						}
						prompts[e.Same] = prompt
					}
					if got := strings.Join(legs, " "); got != want {
						t.Errorf("%s: legs %s, want %s", kind, got, want)
					}
				}
			}
		}
		distinct := map[string]bool{}
		for _, prompt := range prompts {
			distinct[prompt] = true
		}
		if len(distinct) != len(prompts) {
			t.Errorf("%s: %d prompts under %d names", kind, len(distinct), len(prompts))
		}
	}
}

// TestChurnCancels: both ways to hang up come, within their bounds and spread
// over them.
func TestChurnCancels(t *testing.T) {
	w := mustNew(t, Plan{Kind: "churn", Sessions: 50, CancelWithinMS: 20, CancelChunks: 5})
	after, chunks := map[time.Duration]int{}, map[int]int{}
	for i := range 50 {
		for _, turn := range play(w.Session(i, false), RightReply) {
			cancels := turn.CancelAfter != 0 || turn.CancelChunks != 0
			if cancels != (turn.Expect.Leg == LegCancelled) || turn.CancelAfter != 0 && turn.CancelChunks != 0 {
				t.Fatalf("leg %s: cancel after %v or %d chunks", turn.Expect.Leg, turn.CancelAfter, turn.CancelChunks)
			}
			if turn.CancelAfter < 0 || turn.CancelAfter > 20*time.Millisecond || turn.CancelChunks < 0 || turn.CancelChunks > 5 {
				t.Fatalf("cancel after %v or %d chunks", turn.CancelAfter, turn.CancelChunks)
			}
			if turn.CancelAfter > 0 {
				after[turn.CancelAfter/(5*time.Millisecond)]++
			}
			if turn.CancelChunks > 0 {
				chunks[turn.CancelChunks]++
			}
		}
	}
	if len(after) < 4 || len(chunks) != 5 {
		t.Errorf("cancels by 5 ms: %v, by chunks: %v", after, chunks)
	}
}

// TestMixed: all shapes come.
func TestMixed(t *testing.T) {
	w := mustNew(t, Plan{Kind: "mixed", Sessions: 20})
	count := map[string]int{}
	tokens := map[int]int{}
	for i := range 20 {
		for _, turn := range play(w.Session(i, false), RightReply) {
			e, r := turn.Expect, turn.Request
			length := "short"
			if len(r.Messages[0].Content) > 1000 {
				length = "long"
			}
			count[fmt.Sprintf("%s schema %t copy %t", length, e.Schema != nil, e.Copy != nil)]++
			tokens[r.MaxTokens]++
			var format struct {
				Type   string
				Schema struct{ Schema json.RawMessage } `json:"json_schema"`
			}
			if r.ResponseFormat == nil {
				if e.Schema != nil {
					t.Fatal("a schema is expected and not asked for")
				}
			} else if err := json.Unmarshal(r.ResponseFormat, &format); err != nil || format.Type != "json_schema" || string(format.Schema.Schema) != string(e.Schema) {
				t.Fatalf("response format %s: %v; expected %s", r.ResponseFormat, err, e.Schema)
			}
		}
	}
	if len(count) != 5 || len(tokens) < 3 {
		t.Errorf("shapes %v, max tokens %v", count, tokens)
	}
}

// TestArrivals: gaps have the mean and the spread of a Poisson process, and
// are the same for the same seed.
func TestArrivals(t *testing.T) {
	const n, rate = 200_000, 80.0
	var gaps []float64
	var last time.Duration
	for at := range Arrivals(5, rate) {
		if at < last {
			t.Fatal("time runs backwards")
		}
		gaps = append(gaps, (at-last).Seconds()*rate)
		last = at
		if len(gaps) == n {
			break
		}
	}
	var sum, squares, tail float64
	for _, gap := range gaps {
		sum += gap
		squares += gap * gap
		if gap > 3 {
			tail++
		}
	}
	mean := sum / n
	spread := math.Sqrt(squares/n - mean*mean)
	// Of 200,000 draws the mean has a standard error of 0.0022, the spread
	// one of 0.0032, and the tail (exp(-3) = 0.0498) one of 0.0005.
	if math.Abs(mean-1) > 0.01 || math.Abs(spread-1) > 0.015 || math.Abs(tail/n-math.Exp(-3)) > 0.0025 {
		t.Errorf("mean %.4f, spread %.4f, tail %.4f", mean, spread, tail/n)
	}
	var first []time.Duration
	for at := range Arrivals(1, 10) {
		if first = append(first, at); len(first) == 3 {
			break
		}
	}
	want := []time.Duration{382376082, 398195095, 521258366}
	if diff := cmp.Diff(want, first); diff != "" {
		t.Errorf("the arrivals of seed 1 changed; bump the workload version: %s", diff)
	}
}

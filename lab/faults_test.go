package lab

import (
	"fmt"
	"log/slog"
	"math"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/model"
)

// wave submits requests at once and returns their replies when all have ended.
// It doesn't look at the books, which some faults make wrong.
func wave(tb testing.TB, e *Engine, all []Request) []reply {
	tb.Helper()
	var streams []*Stream
	for _, r := range all {
		s, err := e.Submit(tb.Context(), r)
		if err != nil {
			tb.Fatal(err)
		}
		streams = append(streams, s)
	}
	for e.Step() {
	}
	var replies []reply
	for _, s := range streams {
		replies = append(replies, read(s))
	}
	return replies
}

// wrong counts the replies that aren't those of an engine without faults.
func wrong(got, want []reply) (n int) {
	for i := range got {
		if !cmp.Equal(got[i], want[i]) {
			n++
		}
	}
	return n
}

// TestFaultsOff: a fault that is compiled in, even one that is set and doesn't
// strike, changes no bit of any reply.
func TestFaultsOff(t *testing.T) {
	for _, entry := range fault.Catalogue() {
		for _, option := range []string{",rate=0", ",when=toggle.A && toggle.B && batch > 4"} {
			e := testEngine(t, Config{
				MaxTokens: 640, PageSize: 16, MaxRunning: 8, HostTokens: 4096, IndexDType: model.BF16, DecodeSteps: 5,
				Faults: faults(t, entry.Name+option), Toggle: []string{"A"},
			})
			if n := wrong(wave(t, e, requests(16)), alone()[model.BF16]); n > 0 {
				t.Errorf("%s%s: %d replies of 16 are wrong", entry.Name, option, n)
			}
			if err := leftovers(e); err != nil {
				t.Errorf("%s%s: %v", entry.Name, option, err)
			}
		}
	}
}

// TestFaultsStrike: what each of the engine's own faults does, and where it
// does nothing.
func TestFaultsStrike(t *testing.T) {
	small := Config{MaxTokens: 800, PageSize: 16, MaxRunning: 8}
	steps := func(n int) Config { return Config{DecodeSteps: n} }
	toggles := func(names ...string) Config {
		c := small
		c.Toggle = names
		return c
	}
	tests := []struct {
		name, spec string
		config     Config
		strikes    bool
	}{
		{"page-share", "page-share", small, true},
		{"page-share, the first wave", "page-share,when=requests > 1000", small, false},
		{"slow-decay", "slow-decay", small, true},
		{"slow-decay, later", "slow-decay,when=uptime > 100000", small, false},
		{"depth-five at 5", "depth-five", steps(5), true},
		{"depth-five at 4", "depth-five", steps(4), false},
		{"depth-five at 6", "depth-five", steps(6), false},
		{"depth-five at 1", "depth-five", steps(1), false},
		{"poison", "poison,when=requests > 50", Config{}, true},
		{"poison, never", "poison,when=cancels > 0", Config{}, false},
		{"first-token-swap", "first-token-swap", Config{}, true},
		{"first-token-swap without overlap", "first-token-swap", Config{NoOverlap: true}, false},
		{"a conjunction that holds", "slow-decay,when=toggle.A && toggle.B && batch > 4", toggles("A", "B"), true},
		{"a conjunction without one of its toggles", "slow-decay,when=toggle.A && toggle.B && batch > 4", toggles("B"), false},
		{"tier, of which there is none", `slow-decay,when=tier == "host"`, small, false},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			test.config.Faults = faults(t, test.spec)
			e := testEngine(t, test.config)
			n := 0
			for range 3 {
				n += wrong(wave(t, e, requests(40)), alone()[model.FP8])
			}
			t.Logf("%d replies of 120 are wrong", n)
			if (n > 0) != test.strikes {
				t.Errorf("%d replies of 120 are wrong, want some: %t", n, test.strikes)
			}
			if err := e.config.Faults.Err(); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestPoisonLasts: one event is enough, and from then on every token of every
// reply is the same.
func TestPoisonLasts(t *testing.T) {
	e := testEngine(t, Config{Faults: faults(t, "poison,when=requests == 41")})
	if n := wrong(wave(t, e, requests(40)), alone()[model.FP8]); n > 0 {
		t.Fatalf("%d replies are wrong before the event", n)
	}
	want := e.config.Tokenizer.Encode("!")[0]
	for i := range 3 {
		for j, r := range wave(t, e, requests(1+20*i)) {
			if slices.ContainsFunc(r.Tokens, func(t Token) bool { return t.ID != want }) {
				t.Fatalf("wave %d, reply %d: %v", i, j, r.Tokens)
			}
		}
	}
}

// TestSlowDecayIsSlow: the share of wrong replies grows.
func TestSlowDecayIsSlow(t *testing.T) {
	e := testEngine(t, Config{MaxTokens: 2048, PageSize: 16, MaxRunning: 8, NoRadix: true, Faults: faults(t, "slow-decay,rate=0.1")})
	var counts []int
	for range 8 {
		counts = append(counts, wrong(wave(t, e, requests(40)), alone()[model.FP8]))
	}
	t.Log(counts)
	if early, late := counts[0]+counts[1], counts[6]+counts[7]; early > 20 || late < 2*early || late < 40 {
		t.Errorf("%d replies of 80 are wrong at first, %d at last", early, late)
	}
}

// TestBatchNumericsIsRounding: the log-probabilities of what was chosen alone
// move in a batch by as much as rounding explains, and not at all where the
// fault is off.
func TestBatchNumericsIsRounding(t *testing.T) {
	for _, noGraph := range []bool{false, true} {
		t.Run(fmt.Sprint("eager ", noGraph), func(t *testing.T) {
			var all []Request
			var want []reply
			for i, r := range requests(80) {
				if r.Logprobs && r.Temperature == 0 {
					all, want = append(all, r), append(want, alone()[model.FP8][i])
				}
			}
			e := testEngine(t, Config{NoGraph: noGraph, Faults: faults(t, "batch-numerics,when=batch > 1")})
			moved, most := 0, 0.0
			for i, got := range wave(t, e, all) {
				for j, token := range got.Tokens {
					if j >= len(want[i].Tokens) || token.ID != want[i].Tokens[j].ID {
						break // another text from here on
					}
					if d := math.Abs(token.Logprob - want[i].Tokens[j].Logprob); d > 0 {
						moved++
						most = max(most, d)
					}
				}
			}
			t.Logf("%d log-probabilities moved, by at most %.4f nat", moved, most)
			if moved == 0 || most > 0.5 {
				t.Errorf("%d log-probabilities moved, by at most %.4f nat; want some, by less than 0.5", moved, most)
			}
			if n := wrong(wave(t, e, all[:1]), want); n > 0 {
				t.Error("a request that is alone got another reply")
			}
		})
	}
}

// BenchmarkWave80 is 80 requests at once, from the first token to the last: in
// processor time, of which other programs take none. armed has every fault set,
// and none strikes; the two take turns. What faults cost that aren't set is in
// fault.BenchmarkOn.
func BenchmarkWave80(b *testing.B) {
	var specs []string
	for _, e := range fault.Catalogue() {
		specs = append(specs, e.Name+",rate=0")
	}
	engines := []*Engine{
		testEngine(b, Config{MaxTokens: 16384, NoOverlap: true}),
		testEngine(b, Config{MaxTokens: 16384, NoOverlap: true, Faults: faults(b, specs...)}),
	}
	all := requests(80)
	fastest := make([]time.Duration, len(engines))
	for b.Loop() {
		for i, e := range engines {
			var before, after syscall.Rusage
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &before); err != nil {
				b.Fatal(err)
			}
			wave(b, e, all)
			if err := syscall.Getrusage(syscall.RUSAGE_SELF, &after); err != nil {
				b.Fatal(err)
			}
			took := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
			if fastest[i] == 0 || took < fastest[i] {
				fastest[i] = took
			}
		}
	}
	b.ReportMetric(float64(fastest[0].Microseconds()), "us/wave")
	b.ReportMetric(100*float64(fastest[1])/float64(fastest[0]), "%armed")
}

// TestExpressionErrors: an expression that fails is logged and counted, once.
func TestExpressionErrors(t *testing.T) {
	var log strings.Builder
	e := testEngine(t, Config{Faults: faults(t, "poison,when=requests % cancels == 0"), Logger: slog.New(slog.NewTextHandler(&log, nil))})
	all := requests(80)[:3]
	if got := wave(t, e, all); wrong(got, alone()[model.FP8]) > 0 {
		t.Error("a fault struck whose expression failed")
	}
	if n := e.Stats().ExpressionErrors; n != 1 {
		t.Errorf("%d errors are counted", n)
	}
	if text := log.String(); strings.Count(text, "an expression failed") != 1 || !strings.Contains(text, "fault poison: ") {
		t.Errorf("the log says %q", text)
	}
}

package lab

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/host"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testVocabulary = sync.OnceValues(func() (*model.Tokenizer, *model.Model) {
	t, err := model.NewTokenizer([]string{"ship", "berth", "Aurora", "carrier"})
	if err != nil {
		panic(err)
	}
	return t, model.Random(1, t.Size())
})

func testEngine(tb testing.TB, c Config) *Engine {
	tb.Helper()
	c.Tokenizer, c.Model = testVocabulary()
	if c.MaxTokens == 0 {
		c.MaxTokens = 4096
	}
	e, err := New(c)
	if err != nil {
		tb.Fatal(err)
	}
	return e
}

// drain steps until nothing is left to do, checking the books each time.
func drain(tb testing.TB, e *Engine) {
	tb.Helper()
	for e.Step() {
		if err := e.Check(); err != nil {
			tb.Fatal(err)
		}
	}
}

// leftovers says what a drained engine still holds.
func leftovers(e *Engine) error {
	e.sched.Flush()
	e.publish()
	s := e.Stats()
	if len(e.live) > 0 || s.Running+s.Waiting > 0 || s.FreePages != s.Pages || s.HostCachedPages > 0 {
		return fmt.Errorf("%d live, %d running, %d waiting, %d of %d pages free", len(e.live), s.Running, s.Waiting, s.FreePages, s.Pages)
	}
	return nil
}

// reply is everything that a client can see of a reply.
type reply struct {
	Tokens           []Token
	Reason           Reason
	Prompt, Finished int
}

func read(s *Stream) reply {
	var r reply
	for t := range s.Tokens() {
		r.Tokens = append(r.Tokens, t)
	}
	end := s.Ending()
	r.Reason, r.Prompt, r.Finished = end.Reason, end.Usage.Prompt, end.Usage.Completion
	return r
}

// requests are as different as requests can be; many share prefixes, none has
// a seed of the engine's.
func requests(n int) []Request {
	_, m := testVocabulary()
	rng := rand.New(rand.NewPCG(3, 4))
	prefix := make([]int32, 100)
	for i := range prefix {
		prefix[i] = int32(rng.IntN(m.Vocab))
	}
	var all []Request
	for i := range n {
		seed := uint64(i)
		r := Request{ID: fmt.Sprint(i), MaxTokens: 1 + rng.IntN(16), Seed: &seed, Logprobs: i%2 == 0, TopLogprobs: i % 4 * (1 - i%2)}
		r.Prompt = append(r.Prompt, prefix[:rng.IntN(len(prefix))]...)
		for range 1 + rng.IntN(30) {
			r.Prompt = append(r.Prompt, int32(rng.IntN(m.Vocab)))
		}
		if i%3 == 0 {
			r.Temperature, r.TopP = 1.5, 0.9
		}
		if i%5 == 0 {
			r.Stop = []string{"e", "ship"}
		}
		all = append(all, r)
	}
	return all
}

// alone are the replies to requests that are run one by one, each in an empty
// cache, without anything that could go wrong.
var alone = sync.OnceValue(func() map[model.IndexDType][]reply {
	replies := map[model.IndexDType][]reply{}
	for _, d := range []model.IndexDType{model.FP8, model.BF16} {
		for _, r := range requests(80) {
			e := testEngine(panicker{}, Config{MaxTokens: 512, NoRadix: true, IndexDType: d, ChunkTokens: 256, MaxRunning: 1, NoGraph: true})
			s, err := e.Submit(context.Background(), r)
			if err != nil {
				panic(err)
			}
			for e.Step() {
			}
			replies[d] = append(replies[d], read(s))
		}
	}
	return replies
})

// panicker is a testing.TB where there is none.
type panicker struct{ testing.TB }

func (panicker) Helper()           {}
func (panicker) Fatal(args ...any) { panic(fmt.Sprint(args...)) }

// TestSameReplies is the engine's main test: whatever the configuration and
// the order of events, each reply is the same bits, and the books are right
// after each step.
func TestSameReplies(t *testing.T) {
	all := requests(80)
	want := alone()
	var retractions, evicted, cached, chunked, loaded, hostEvicted, replays, eager uint64
	rapid.Check(t, func(t *rapid.T) {
		c := Config{
			PageSize:     rapid.SampledFrom([]int{16, 32, 48, 64, 128}).Draw(t, "page size"),
			MaxTokens:    rapid.IntRange(300, 700).Draw(t, "pool"),
			MaxRunning:   rapid.IntRange(1, 12).Draw(t, "max running"),
			ChunkTokens:  rapid.SampledFrom([]int{5, 20, 64, 200}).Draw(t, "chunk"),
			NoRadix:      rapid.Bool().Draw(t, "no radix"),
			IndexDType:   rapid.SampledFrom([]model.IndexDType{model.FP8, model.BF16}).Draw(t, "index"),
			RetractEvery: rapid.IntRange(0, 4).Draw(t, "retract every"),
			Workers:      rapid.IntRange(1, 3).Draw(t, "workers"),
			NoOverlap:    rapid.Bool().Draw(t, "no overlap"),
			DecodeSteps:  rapid.IntRange(0, 6).Draw(t, "decode steps"),

			NoGraph:       rapid.IntRange(0, 3).Draw(t, "graph") == 0,
			NoAltStream:   rapid.IntRange(0, 3).Draw(t, "streams") == 0,
			StreamJitter:  rapid.SampledFrom([]float64{0.1, 1}).Draw(t, "jitter"),
			IndexKScatter: rapid.Bool().Draw(t, "scatter"),
			Seed:          rapid.Uint64().Draw(t, "seed"),
		}
		if rapid.Bool().Draw(t, "few batches") { // larger ones are eager
			c.GraphBatches = []int{(c.MaxRunning + 1) / 2}
		}
		if !c.NoRadix {
			c.HostTokens = rapid.SampledFrom([]int{0, 128, 512, 4096}).Draw(t, "host tokens")
			c.HostLayout = rapid.SampledFrom([]host.Layout{host.PageFirst, host.LayerFirst}).Draw(t, "layout")
			c.WritePolicy = rapid.SampledFrom([]kv.WritePolicy{kv.WriteThrough, kv.WriteBack}).Draw(t, "write policy")
			c.HostParts = rapid.Bool().Draw(t, "parts")
		}
		e := testEngine(panicker{}, c)
		streams := map[int]*Stream{}
		cancelled := map[int]bool{}
		step := func(t *rapid.T) {
			e.Step()
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
		}
		actions := rapid.SliceOfN(rapid.SampledFrom([]string{"submit", "submit", "submit", "submit", "step", "step", "step", "step", "cancel", "flush"}), 5, 20).Draw(t, "actions")
		for _, action := range actions {
			i := rapid.IntRange(0, len(all)-1).Draw(t, "request")
			switch action {
			case "submit":
				if streams[i] != nil {
					continue
				}
				s, err := e.Submit(context.Background(), all[i])
				if err != nil {
					t.Fatal(err)
				}
				streams[i] = s
			case "cancel": // as the end of a context does, but at a time that is drawn
				e.post(func(*rank) {
					for _, s := range e.sequences() {
						if s.request.ID == fmt.Sprint(i) {
							cancelled[i] = true
							e.end(s, Cancelled, nil)
						}
					}
				})
			case "flush":
				e.post(func(*rank) { e.sched.Flush() })
			case "step":
				step(t)
			}
		}
		for n := 0; ; n++ {
			if n > 20_000 {
				t.Fatal("the requests don't come to their end")
			}
			step(t)
			if len(e.live) == 0 && e.flying == nil {
				break
			}
		}
		for i, s := range streams {
			got, want := read(s), want[c.IndexDType][i]
			if cancelled[i] {
				if n := len(got.Tokens); got.Reason != Cancelled || n > 0 && !cmp.Equal(got.Tokens, want.Tokens[:n]) {
					t.Fatalf("request %d was cancelled and isn't the beginning of its reply", i)
				}
				continue
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Fatalf("request %d: %s", i, diff)
			}
		}
		stats := e.Stats()
		retractions, evicted = retractions+stats.Retractions, evicted+stats.Evicted
		cached, chunked = cached+stats.CachedTokens, chunked+stats.Chunked
		for _, n := range stats.Decoder.Replays {
			replays += n
		}
		eager += stats.Decoder.Eager
		loaded, hostEvicted = loaded+stats.Loaded, hostEvicted+stats.HostEvicted
		if err := leftovers(e); err != nil {
			t.Fatal(err)
		}
	})
	t.Logf("%d retractions, %d pages evicted, %d tokens cached, %d prompts cut, %d pages loaded, %d evicted from the host, %d replays, %d eager steps",
		retractions, evicted, cached, chunked, loaded, hostEvicted, replays, eager)
	if !t.Failed() && (retractions == 0 || evicted == 0 || cached == 0 || chunked == 0 || replays == 0 || eager == 0) {
		t.Error("not everything that could make a difference happened")
	}
}

// TestBatchOf80 runs 80 requests at once, in a pool that holds them all and in
// one that doesn't.
func TestBatchOf80(t *testing.T) {
	for _, tokens := range []int{16384, 1500} {
		t.Run(fmt.Sprint(tokens), func(t *testing.T) {
			e := testEngine(t, Config{MaxTokens: tokens, PageSize: 16, Workers: 2})
			var streams []*Stream
			for _, r := range requests(80) {
				s, err := e.Submit(t.Context(), r)
				if err != nil {
					t.Fatal(err)
				}
				streams = append(streams, s)
			}
			drain(t, e)
			for i, s := range streams {
				if diff := cmp.Diff(alone()[model.FP8][i], read(s)); diff != "" {
					t.Fatalf("request %d: %s", i, diff)
				}
			}
			stats := e.Stats()
			if full := stats.Decode.Counts[7] > 0; full != (tokens > 1500) { // steps of 65 to 128
				t.Errorf("decode steps by size: %v", stats.Decode.Counts)
			}
			if err := leftovers(e); err != nil {
				t.Error(err)
			}
		})
	}
}

// TestHostTier asks everything twice, of a device that can't keep it, and
// counts: replies are the same, some prefixes come from the host, and what
// each request is told adds up.
func TestHostTier(t *testing.T) {
	for _, layout := range []host.Layout{host.PageFirst, host.LayerFirst} {
		for _, policy := range []kv.WritePolicy{kv.WriteThrough, kv.WriteBack} {
			for _, noOverlap := range []bool{false, true} {
				t.Run(fmt.Sprint(layout, policy, noOverlap), func(t *testing.T) {
					e := testEngine(t, Config{
						MaxTokens: 640, PageSize: 16, MaxRunning: 8, NoOverlap: noOverlap, IndexDType: model.BF16,
						HostTokens: 4096, HostLayout: layout, WritePolicy: policy, HostParts: true,
					})
					var device, fromHost uint64
					for range 2 {
						var streams []*Stream
						for _, r := range requests(30) {
							s, err := e.Submit(t.Context(), r)
							if err != nil {
								t.Fatal(err)
							}
							streams = append(streams, s)
						}
						drain(t, e)
						for i, s := range streams {
							if diff := cmp.Diff(alone()[model.BF16][i], read(s)); diff != "" {
								t.Fatalf("request %d: %s", i, diff)
							}
							usage := s.Ending().Usage
							device, fromHost = device+uint64(usage.Device), fromHost+uint64(usage.Host)
						}
					}
					stats := e.Stats()
					if stats.HostTokens == 0 || stats.HostTokens != fromHost || stats.CachedTokens != device+fromHost {
						t.Errorf("usage says %d tokens of the device and %d of the host, the counts %d in all and %d", device, fromHost, stats.CachedTokens, stats.HostTokens)
					}
					if stats.Loaded == 0 || stats.BackedUp == 0 || stats.Evicted == 0 || stats.HostCachedPages == 0 || stats.HostPages != 256 {
						t.Errorf("no pressure: %+v", stats)
					}
					if stats.Waits.Loading == 0 || stats.Waits.Idle == 0 {
						t.Errorf("waits: %+v", stats.Waits)
					}
					for _, c := range stats.Copies {
						if want := c.Direction == "load" || c.Branch == "page_aligned"; (c.Calls > 0) != want {
							t.Errorf("%+v, want calls: %t", c, want)
						}
					}
					if err := leftovers(e); err != nil {
						t.Error(err)
					}
				})
			}
		}
	}
}

// TestHostTierSurvivesFailures: the copies of a step that fails are made, for
// others count on them.
func TestHostTierSurvivesFailures(t *testing.T) {
	e := testEngine(t, Config{MaxTokens: 320, PageSize: 16, MaxRunning: 4, HostTokens: 4096, IndexDType: model.BF16})
	rng := rand.New(rand.NewPCG(1, 2)) // the forward pass's
	wait := e.cache.Wait
	e.cache.Wait = func(layer int) {
		if rng.IntN(100) == 0 {
			panic("out of order")
		}
		wait(layer)
	}
	failed := 0
	done := 0
	for range 10 {
		streams := map[int]*Stream{}
		for i, r := range requests(12) {
			s, err := e.Submit(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			streams[i] = s
		}
		for e.Step() {
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
		}
		for i, s := range streams {
			got := read(s)
			if got.Reason == Failed {
				failed++
				continue
			}
			done++
			if diff := cmp.Diff(alone()[model.BF16][i], got); diff != "" {
				t.Fatalf("request %d: %s", i, diff)
			}
		}
	}
	stats := e.Stats()
	t.Logf("%d done, %d failed, %d tokens from the host", done, failed, stats.HostTokens)
	if failed == 0 || done < 30 || stats.HostTokens == 0 {
		t.Errorf("%d done, %d failed, %+v", done, failed, stats)
	}
	if err := leftovers(e); err != nil {
		t.Error(err)
	}
}

// TestCancels: ten thousand requests whose clients go away at any time leave
// nothing behind.
func TestCancels(t *testing.T) {
	e := testEngine(t, Config{PageSize: 16, MaxTokens: 2048, MaxRunning: 64})
	ctx, stop := context.WithCancel(t.Context())
	var engine, clients sync.WaitGroup
	engine.Go(func() { e.Run(ctx) })
	const each, workers = 100, 100
	for c := range workers {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(c), 0))
			for range each {
				ctx, cancel := context.WithCancel(t.Context())
				prompt := make([]int32, 16, 20)
				for range 1 + rng.IntN(4) {
					prompt = append(prompt, int32(rng.IntN(200)))
				}
				s, err := e.Submit(ctx, Request{Prompt: prompt, MaxTokens: 1 + rng.IntN(100)})
				if err != nil {
					t.Error(err)
					cancel()
					return
				}
				for range rng.IntN(4) - 1 {
					<-s.Tokens()
				}
				cancel()
				for range s.Tokens() { // its end comes
				}
			}
		})
	}
	clients.Wait()
	stop()
	engine.Wait()
	ended := e.Stats().Ended
	t.Log(ended)
	if ended[Cancelled] < each*workers/2 || ended[Failed] > 0 {
		t.Errorf("%v", ended)
	}
	if err := e.Check(); err != nil {
		t.Error(err)
	}
	if err := leftovers(e); err != nil {
		t.Error(err)
	}
}

// TestFailedStep: what a forward pass can't do fails its requests, and the
// next ones are served.
func TestFailedStep(t *testing.T) {
	tests := []struct {
		name        string
		break_, fix func(*Engine)
	}{
		{"an error", func(e *Engine) { e.cache.PageSize = 15 }, func(e *Engine) { e.cache.PageSize = 64 }},
		{"a panic", func(e *Engine) { e.scratch = nil }, func(e *Engine) { e.scratch = e.config.Model.NewScratch(512) }},
	}
	for _, tt := range tests {
		for _, noOverlap := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, no overlap %t", tt.name, noOverlap), func(t *testing.T) {
				e := testEngine(t, Config{NoOverlap: noOverlap})
				submit := func() *Stream {
					s, err := e.Submit(t.Context(), Request{Prompt: []int32{model.Begin}, MaxTokens: 3})
					if err != nil {
						t.Fatal(err)
					}
					return s
				}
				first := submit()
				e.Step()
				e.land()
				tt.break_(e)
				second := submit()
				drain(t, e)
				for _, s := range []*Stream{first, second} {
					read(s)
					if end := s.Ending(); end.Reason != Failed || !errors.Is(end.Err, ErrInternal) {
						t.Errorf("%+v", end)
					}
				}
				tt.fix(e)
				third := submit()
				drain(t, e)
				if r := read(third); r.Finished == 0 {
					t.Errorf("%+v", r)
				}
				if err := leftovers(e); err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// TestOneStepLate: with overlap the first token is handed out while the second
// is computed, and a request that has ended keeps its pages until the step
// that was already on its way is done.
func TestOneStepLate(t *testing.T) {
	for _, noOverlap := range []bool{false, true} {
		e := testEngine(t, Config{NoOverlap: noOverlap, NoRadix: true, PageSize: 16})
		s, err := e.Submit(t.Context(), Request{ID: "a", Prompt: make([]int32, 40), MaxTokens: 9})
		if err != nil {
			t.Fatal(err)
		}
		var got []int
		for range 3 {
			e.Step()
			got = append(got, len(s.tokens))
		}
		want := []int{0, 1, 2}
		if noOverlap {
			want = []int{1, 2, 3}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("tokens after each step, no overlap %t: %s", noOverlap, diff)
		}
		e.post(func(r *rank) {
			r.end(r.sequences()[0], Aborted, nil)
			if got := e.sched.FreePages() < 256; got == noOverlap {
				t.Errorf("the pages are in use after the abort: %t", got)
			}
		})
		e.Step()
		if n := e.sched.FreePages(); n != 256 {
			t.Errorf("%d pages are free", n)
		}
		if r := read(s); r.Reason != Aborted || r.Finished != len(r.Tokens) {
			t.Errorf("%+v", r)
		}
	}
}

// TestFirstTokenSwap: the fault needs overlap and two requests in a step.
func TestFirstTokenSwap(t *testing.T) {
	all := requests(80)[:12]
	for _, noOverlap := range []bool{false, true} {
		for _, together := range []bool{false, true} {
			e := testEngine(t, Config{NoOverlap: noOverlap, Faults: faults(t, "first-token-swap")})
			var streams []*Stream
			for _, r := range all {
				s, err := e.Submit(t.Context(), r)
				if err != nil {
					t.Fatal(err)
				}
				streams = append(streams, s)
				if !together {
					drain(t, e)
				}
			}
			drain(t, e)
			wrong := 0
			for i, s := range streams {
				if !cmp.Equal(read(s), alone()[model.FP8][i]) {
					wrong++
				}
			}
			if (wrong > 0) != (together && !noOverlap) {
				t.Errorf("no overlap %t, together %t: %d wrong replies", noOverlap, together, wrong)
			}
		}
	}
}

func faults(tb testing.TB, specs ...string) *fault.Set {
	tb.Helper()
	s, err := fault.Parse(specs, 1)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// TestShutDown: the requests that are left fail, and new ones are refused.
func TestShutDown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		ctx, stop := context.WithCancel(t.Context())
		go e.Run(ctx)
		synctest.Wait() // it waits while there is nothing to do
		stream, err := e.Submit(t.Context(), Request{Prompt: []int32{model.Begin}})
		if err != nil {
			t.Fatal(err)
		}
		<-stream.Tokens()
		stop()
		read(stream)
		if end := stream.Ending(); end.Reason != Failed || !errors.Is(end.Err, ErrShutDown) {
			t.Errorf("%+v", end)
		}
		synctest.Wait()
		if _, err := e.Submit(t.Context(), Request{Prompt: []int32{model.Begin}}); !errors.Is(err, ErrShutDown) {
			t.Error(err)
		}
		if err := e.Flush(); !errors.Is(err, ErrShutDown) {
			t.Error(err)
		}
		if n := e.Abort("", true); n != 0 {
			t.Error(n)
		}
	})
}

func TestAbortAndFlush(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		e := testEngine(t, Config{})
		ctx, stop := context.WithCancel(t.Context())
		defer stop()
		streams := map[string]*Stream{}
		for _, id := range []string{"a", "b", "c", "c"} {
			s, err := e.Submit(t.Context(), Request{ID: id, Prompt: []int32{model.Begin}})
			if err != nil {
				t.Fatal(err)
			}
			streams[id] = s
		}
		go e.Run(ctx)
		if err := e.Flush(); err == nil || !strings.Contains(err.Error(), "4 requests") {
			t.Error(err)
		}
		if n := e.Abort("c", false); n != 2 {
			t.Errorf("%d aborted", n)
		}
		if r := read(streams["c"]); r.Reason != Aborted {
			t.Errorf("%+v", r)
		}
		if n := e.Abort("", true); n != 2 {
			t.Errorf("%d aborted", n)
		}
		if err := e.Flush(); err != nil {
			t.Error(err)
		}
		synctest.Wait()
		if s := e.Stats(); s.FreePages != s.Pages || s.Ended[Aborted] != 4 {
			t.Errorf("%+v", s)
		}
	})
}

func TestRefused(t *testing.T) {
	tests := []struct {
		name string
		r    Request
		want string
	}{
		{"empty", Request{}, "empty"},
		{"too long", Request{Prompt: make([]int32, 256)}, "the prompt has 256 tokens; the context of 256 has no room"},
		{"reply too long", Request{Prompt: make([]int32, 200), MaxTokens: 57}, "200 tokens and the reply may have 57, together 257; the context is 256"},
		{"negative", Request{Prompt: []int32{1}, MaxTokens: -1}, "negative"},
		{"token", Request{Prompt: []int32{1, 99999}}, "token 1 of the prompt is 99999"},
	}
	e := testEngine(t, Config{MaxTokens: 300}) // four pages of 64
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := e.Submit(t.Context(), tt.r); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v", err)
			}
		})
	}
	s, err := e.Submit(t.Context(), Request{Prompt: make([]int32, 200), MaxTokens: 56})
	if err != nil {
		t.Fatal(err)
	}
	drain(t, e)
	if r := read(s); r.Finished == 0 {
		t.Errorf("%+v", r)
	}
}

func TestConfig(t *testing.T) {
	tok, m := testVocabulary()
	tests := []struct {
		name string
		c    Config
		want string
	}{
		{"no model", Config{Tokenizer: tok}, "no model"},
		{"other vocabulary", Config{Tokenizer: tok, Model: model.Random(1, 7)}, "the weights are for 7"},
		{"page size", Config{Tokenizer: tok, Model: m, PageSize: 24}, "not a multiple of 16"},
		{"negative", Config{Tokenizer: tok, Model: m, MaxRunning: -1}, "max running requests is -1"},
		{"small pool", Config{Tokenizer: tok, Model: m, MaxTokens: 63}, "less than a page"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.c); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v", err)
			}
		})
	}
}

// TestCheckCanFail breaks each of the engine's own books.
func TestCheckCanFail(t *testing.T) {
	tests := []struct {
		name   string
		break_ func(*Engine, *sequence)
	}{
		{"a request that the scheduler forgot", func(e *Engine, s *sequence) { e.sched.Remove(&s.Request) }},
		{"a token that nobody made", func(_ *Engine, s *sequence) { s.Output = nil }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := testEngine(t, Config{})
			if _, err := e.Submit(t.Context(), Request{Prompt: []int32{model.Begin}}); err != nil {
				t.Fatal(err)
			}
			e.Step()
			if err := e.Check(); err != nil {
				t.Fatal(err)
			}
			tt.break_(e, e.sequences()[0])
			if e.Check() == nil {
				t.Error("Check is content")
			}
		})
	}
}

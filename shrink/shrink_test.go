package shrink

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// server fails an op with a probability that depends on the size.
func server(r *rand.Rand, rate func(Size) float64) func(context.Context, Size, bool) (Outcome, error) {
	return func(_ context.Context, s Size, _ bool) (Outcome, error) {
		out := Outcome{Ops: s.Requests()}
		if s.ContextLines > takes {
			out.Lost = out.Ops
			return out, nil
		}
		for range out.Ops {
			if r.Float64() < rate(s) {
				out.Failures++
			}
		}
		return out, nil
	}
}

// takes is how many lines the server takes in a prompt.
const takes = 50

var incident = Size{Sessions: 80, Concurrency: 80, Rounds: 4, ContextLines: 28, MaxTokens: 128}

func TestSearch(t *testing.T) {
	tests := []struct {
		name string
		rate func(Size) float64
		most int // requests that may be left
		want func(Size) bool
	}{
		{
			"needs 8 at once", func(s Size) float64 {
				if s.Concurrency >= 8 {
					return 0.18
				}
				return 0
			}, 32,
			func(s Size) bool { return s.Concurrency >= 8 },
		},
		{
			"needs long contexts", func(s Size) float64 {
				if s.ContextLines >= 20 {
					return 0.3
				}
				return 0
			}, 16,
			func(s Size) bool { return s.ContextLines >= 20 },
		},
		{
			// As a host tier's: something must have been pushed out, and come back.
			"needs a full cache", func(s Size) float64 {
				if s.Sessions*s.ContextLines >= 280 && s.Concurrency == s.Sessions && s.Rounds > 1 {
					return 0.3
				}
				return 0
			}, 16,
			func(s Size) bool { return s.Rounds == 2 && s.Sessions <= 8 && s.ContextLines <= takes },
		},
		{
			"needs an open loop's pace", func(s Size) float64 {
				if s.RequestRate >= 10 || s.RequestRate == 0 && s.Concurrency > 8 {
					return 1
				}
				return 0
			}, 1,
			func(s Size) bool { return s.RequestRate >= 10 && s.RequestRate < 14 && s.Concurrency == 0 },
		},
		{"always", func(Size) float64 { return 1 }, 1, func(s Size) bool { return s.MaxTokens < 64 && s.ContextLines <= 3 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			back := 0
			for seed := range uint64(20) {
				from := incident
				if strings.Contains(tt.name, "open loop") {
					from.Concurrency, from.RequestRate = 0, 40
				}
				got, err := Search(t.Context(), from, Options{Try: server(rand.New(rand.NewPCG(seed, 0)), tt.rate), Runs: 300, Measures: 100})
				if err != nil {
					t.Fatal(err)
				}
				if got.To.Requests() > tt.most || !tt.want(got.To) || got.Early {
					t.Errorf("seed %d: %s, %+v", seed, got.To, got)
				}
				if got.Size != got.To || got.Failing.Trials != 100 || got.Failing.Failures < 55 {
					t.Errorf("seed %d: %s fails in %d of %d runs", seed, got.To, got.Failing.Failures, got.Failing.Trials)
				}
				for _, m := range got.Smaller {
					if m.Failing.Failures >= 70 || m.Size.Requests() > got.To.Requests() {
						t.Errorf("seed %d: %s fails in %d of %d runs, and isn't taken", seed, m.Size, m.Failing.Failures, m.Failing.Trials)
					}
				}
				back += len(got.Smaller)
			}
			t.Logf("%d times the size before was taken", back)
		})
	}
}

// TestModelErrs: with longer contexts or shorter replies the model errs by
// itself, alone as under load. That isn't the failure that is kept.
func TestModelErrs(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 0))
		errs := func(s Size) float64 {
			if s.ContextLines > 28 || s.MaxTokens < 100 {
				return 0.5
			}
			return 0
		}
		got, err := Search(t.Context(), incident, Options{Try: func(ctx context.Context, s Size, alone bool) (Outcome, error) {
			out, err := server(r, func(s Size) float64 {
				if s.Sessions >= 20 {
					return 0.3
				}
				return errs(s)
			})(ctx, s, false)
			if alone {
				one, _ := server(r, errs)(ctx, s, false)
				out.Alone, out.AloneOps = one.Failures, one.Ops
			}
			return out, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		if got.To.Sessions < 20 || got.To.MaxTokens < 100 || got.Alone.Trials == 0 || got.Alone.Failures > 0 {
			t.Errorf("seed %d: %s, %+v", seed, got.To, got)
		}
	}
}

func TestNotReproduced(t *testing.T) {
	var e *NotReproducedError
	_, err := Search(t.Context(), incident, Options{Try: server(rand.New(rand.NewPCG(1, 1)), func(Size) float64 { return 0 })})
	if !errors.As(err, &e) || e.Runs != 2 {
		t.Errorf("error %v", err)
	}
	down := errors.New("down")
	if _, err := Search(t.Context(), incident, Options{Try: func(context.Context, Size, bool) (Outcome, error) { return Outcome{}, down }}); !errors.Is(err, down) {
		t.Errorf("error %v", err)
	}
}

// TestAnyServer: whatever the server does, the search ends, within its runs,
// with a size no larger than it began with, and counts what it sent.
func TestAnyServer(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		from := Size{
			Sessions: rapid.IntRange(1, 100).Draw(t, "sessions"), Rounds: rapid.IntRange(1, 6).Draw(t, "rounds"),
			ContextLines: rapid.SampledFrom([]int{0, 2, 3, 7, 28, 50}).Draw(t, "lines"), MaxTokens: rapid.IntRange(minTokens, 300).Draw(t, "tokens"),
		}
		from.Concurrency = rapid.IntRange(1, from.Sessions).Draw(t, "concurrency")
		r := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		rate := math.Pow(10, -3*rapid.Float64Range(0, 1).Draw(t, "rate"))
		runs, requests := 0, 0
		play := server(r, func(Size) float64 { return rate })
		refused := map[Size]bool{}
		decided := func(s Size, _, _ int, kept bool) { refused[s] = !kept }
		got, err := Search(context.Background(), from, Options{Runs: 40, Measures: 3, Decided: decided, Try: func(ctx context.Context, s Size, alone bool) (Outcome, error) {
			if s.Sessions > from.Sessions || s.Rounds > from.Rounds || s.ContextLines*s.Sessions > from.ContextLines*from.Sessions || s.MaxTokens > from.MaxTokens || s.Concurrency > s.Sessions || s.Requests() < 1 {
				t.Fatalf("tried %s, from %s", s, from)
			}
			if refused[s] {
				t.Fatalf("tried %s again", s)
			}
			out, err := play(ctx, s, alone)
			runs, requests = runs+1, requests+out.Ops
			return out, err
		}})
		var e *NotReproducedError
		if err != nil && !errors.As(err, &e) {
			t.Fatal(err)
		}
		if got.Runs != runs || got.Requests != requests || runs > 40+3*mostMeasured {
			t.Fatalf("%d runs, %d requests; said %+v", runs, requests, got)
		}
	})
}

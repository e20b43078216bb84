package watch

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// play makes a server of a given rate from a time on; until then it breaks
// nothing.
func play(rate float64, from time.Time, r *rand.Rand) func(context.Context, int) (Conversation, error) {
	return func(_ context.Context, number int) (Conversation, error) {
		time.Sleep(3 * time.Second)
		c := Conversation{Number: number, Ops: 2}
		if !time.Now().Before(from) && r.Float64() < rate {
			c.Damaged = 1
		}
		return c, nil
	}
}

// TestWeek watches for a week of fake time. The server breaks from its second
// day on.
func TestWeek(t *testing.T) {
	tests := []struct {
		name           string
		rate, baseline float64
		within         time.Duration // on average; 0: no alarm
	}{
		{"sound", 0, 0.001, 0},
		{"at its baseline", 0.001, 0.001, 0},
		{"18%", 0.18, 0.001, 30 * time.Minute},
		{"1%", 0.01, 0.001, 30 * time.Hour},
		{"0.1% above a low baseline", 0.001, 0.00005, 144 * time.Hour},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			const weeks = 8
			var delay time.Duration
			found := 0
			for seed := range uint64(weeks) {
				synctest.Test(t, func(t *testing.T) {
					ctx, cancel := context.WithTimeout(t.Context(), 7*24*time.Hour)
					defer cancel()
					from := time.Now().Add(24 * time.Hour)
					o := Options{Play: play(tt.rate, from, rand.New(rand.NewPCG(seed, 1))), Baseline: tt.baseline}
					o.Alarm = func(_ context.Context, a Alarm) {
						if a.Kind != Damage || a.At.Before(from) {
							t.Errorf("%s at %v", a.Kind, a.At.Sub(from))
						}
						found++
						delay += a.At.Sub(from)
						cancel()
					}
					if err := Run(ctx, o); err != nil {
						t.Error(err)
					}
				})
			}
			if tt.within == 0 {
				if found > 0 {
					t.Errorf("%d false alarms in %d weeks", found, weeks)
				}
				return
			}
			mean := time.Duration(math.Inf(1))
			if found > 0 {
				mean = delay / time.Duration(found)
			}
			t.Logf("found in %d of %d weeks, after %v on average", found, weeks, mean.Round(time.Minute))
			if found < weeks-1 || mean > tt.within {
				t.Errorf("found in %d of %d weeks after %v on average, want %v at most", found, weeks, mean, tt.within)
			}
		})
	}
}

// TestWedge stops answering, and goes on being silent.
func TestWedge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
		defer cancel()
		silent := time.Now().Add(30*time.Minute + time.Second)
		var alarms []time.Duration
		err := Run(ctx, Options{
			Quiet: 2 * time.Hour,
			Play: func(_ context.Context, number int) (Conversation, error) {
				c := Conversation{Number: number, Ops: 1}
				if time.Now().After(silent) {
					time.Sleep(60 * time.Second)
					c.Lost, c.LostWhy = 1, "gave up"
				}
				return c, nil
			},
			Alarm: func(_ context.Context, a Alarm) {
				if a.Kind != Wedge || !strings.Contains(a.Says, "2 conversations in a row got no reply; the last: gave up") {
					t.Errorf("alarm %+v", a)
				}
				alarms = append(alarms, a.At.Sub(silent))
			},
		})
		if err != nil || len(alarms) != 2 || alarms[0] > 4*time.Minute || alarms[1]-alarms[0] < 2*time.Hour {
			t.Errorf("alarms after %v, %v", alarms, err)
		}
	})
}

// TestStumbles loses every other conversation, which is no wedge.
func TestStumbles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Hour)
		defer cancel()
		err := Run(ctx, Options{
			Play: func(_ context.Context, number int) (Conversation, error) {
				return Conversation{Number: number, Ops: 1, Lost: number % 2}, nil
			},
			Alarm: func(_ context.Context, a Alarm) { t.Errorf("alarm %+v", a) },
		})
		if err != nil {
			t.Error(err)
		}
	})
}

func TestErrors(t *testing.T) {
	sound := func(context.Context, int) (Conversation, error) { return Conversation{}, nil }
	broken := errors.New("no disk")
	tests := []struct {
		name string
		o    Options
		want string
	}{
		{"nothing to play", Options{}, "nothing to play"},
		{"a baseline that can't be", Options{Play: sound, Baseline: 0.7}, "a baseline of 0.7"},
		{"negative", Options{Play: sound, Quiet: -1}, "must not be negative"},
		{"our own trouble", Options{Play: func(context.Context, int) (Conversation, error) { return Conversation{}, broken }}, "no disk"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if err := Run(t.Context(), tt.o); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want %q in it", err, tt.want)
			}
		})
	}
}

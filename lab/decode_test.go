package lab

import (
	"context"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/lab/model"
)

// broken runs some requests together and counts the replies that are wrong.
func broken(t *testing.T, c Config, n int) (wrong int, stats Stats) {
	t.Helper()
	e := testEngine(t, c)
	var streams []*Stream
	for _, r := range requests(80)[:n] {
		s, err := e.Submit(context.Background(), r)
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, s)
	}
	drain(t, e)
	want := alone()[c.IndexDType]
	for i, s := range streams {
		if !cmp.Equal(read(s), want[i]) {
			wrong++
		}
	}
	stats = e.Stats()
	if err := leftovers(e); err != nil {
		t.Fatal(err)
	}
	return wrong, stats
}

// The incident, reply by reply: captured, with the alternate stream, with bf16,
// and with more than one request.
func TestCaptureAlias(t *testing.T) {
	for _, test := range []struct {
		name  string
		edit  func(c *Config)
		wrong bool
	}{
		{"everything", func(*Config) {}, true},
		{"normal loop", func(c *Config) { c.NoOverlap = true }, true},
		{"host tier", func(c *Config) { c.HostTokens = 4096 }, true},
		{"two requests", func(c *Config) { c.MaxRunning = 2 }, true},
		{"off", func(c *Config) { c.Faults = nil }, false},
		{"eager", func(c *Config) { c.NoGraph = true }, false},
		{"fp8", func(c *Config) { c.IndexDType = model.FP8 }, false},
		{"one stream", func(c *Config) { c.NoAltStream = true }, false},
		{"one request", func(c *Config) { c.MaxRunning = 1 }, false},
		{"no such toggle", func(c *Config) { c.Faults = faults(t, "capture-alias,when=toggle.A"); c.Toggle = []string{"B"} }, false},
		{"conjunction", func(c *Config) {
			c.Faults = faults(t, `capture-alias,when=graph and alt_stream and index_k == "bf16" and toggle.A and batch > 1`)
			c.Toggle = []string{"A"}
		}, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := Config{IndexDType: model.BF16, MaxRunning: 24, StreamJitter: 0.3, Faults: faults(t, "capture-alias")}
			test.edit(&c)
			wrong, stats := broken(t, c, 40)
			if (wrong > 0) != test.wrong {
				t.Errorf("%d of 40 replies are wrong", wrong)
			}
			d := stats.Decoder
			if captured := len(d.Replays) > 0; captured == c.NoGraph || captured == (d.Eager > 0) || captured != (d.Captures > 0) {
				t.Errorf("%+v", d)
			}
			if d.Counts.Reads[c.IndexDType] == 0 || d.Counts.FusedStores == 0 || d.Counts.ScatterStores+stats.PrefillCounts.ScatterStores > 0 {
				t.Errorf("decode %+v, prefill %+v", d.Counts, stats.PrefillCounts)
			}
		})
	}
}

// The scatter store, captured, loses keys; by default it is never reached.
func TestScatterTemporaries(t *testing.T) {
	for _, test := range []struct {
		name  string
		edit  func(c *Config)
		wrong bool
	}{
		{"scatter", func(*Config) {}, true},
		{"fused", func(c *Config) { c.IndexKScatter = false }, false},
		{"eager", func(c *Config) { c.NoGraph = true }, false},
		{"fp8", func(c *Config) { c.IndexDType = model.FP8 }, false},
		{"off", func(c *Config) { c.Faults = nil }, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := Config{IndexDType: model.BF16, IndexKScatter: true, Faults: faults(t, "scatter-temporaries")}
			test.edit(&c)
			wrong, stats := broken(t, c, 40)
			if (wrong > 0) != test.wrong {
				t.Errorf("%d of 40 replies are wrong", wrong)
			}
			scatters := c.IndexKScatter && c.IndexDType == model.BF16
			for _, n := range []model.Counts{stats.Decoder.Counts, stats.PrefillCounts} {
				if (n.ScatterStores > 0) != scatters || (n.FusedStores > 0) == scatters {
					t.Errorf("%+v", n)
				}
			}
		})
	}
}

func TestGraphConfig(t *testing.T) {
	c, err := Config{MaxRunning: 20}.WithDefaults()
	if err != nil || !slices.Equal(c.GraphBatches, []int{1, 2, 4, 8, 12, 16, 20}) || c.StreamJitter != DefaultStreamJitter {
		t.Errorf("%+v, %v", c, err)
	}
	c, err = Config{MaxRunning: 20, NoGraph: true}.WithDefaults()
	if err != nil || len(c.GraphBatches) > 0 {
		t.Errorf("%+v, %v", c, err)
	}
	for _, c := range []Config{{GraphBatches: []int{0}}, {GraphBatches: []int{129}}, {StreamJitter: -1}, {StreamJitter: 1.5}} {
		if _, err := c.WithDefaults(); err == nil {
			t.Errorf("no error for %+v", c)
		}
	}
}

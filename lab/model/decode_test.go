package model

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/lab/fault"
)

const decodeVocab = 50

var decodeModel = sync.OnceValue(func() *Model { return Random(1, decodeVocab) })

// decoding is some sequences whose prompts are in the cache.
type decoding struct {
	m         *Model
	c         *Cache
	sequences []*sequence
}

// newDecoding prefills sequences of the given lengths; more tokens follow.
func newDecoding(tb testing.TB, d IndexDType, lengths ...int) *decoding {
	tb.Helper()
	const more = 20
	rng := rand.New(rand.NewPCG(31, uint64(len(lengths))))
	x := &decoding{m: decodeModel()}
	next := int32(1)
	for _, n := range lengths {
		s := &sequence{}
		for p := range n + more {
			s.tokens = append(s.tokens, int32(rng.IntN(decodeVocab)))
			if p%64 == 0 {
				s.table = append(s.table, next)
				next++
			}
		}
		x.sequences = append(x.sequences, s)
	}
	x.c = newCache(int(next), 64, d)
	for i, s := range x.sequences {
		b := &Batch{Rows: s.rows(lengths[i], 64, 0), Tables: [][]int32{s.table}}
		if _, err := x.m.Forward(b, x.c, x.m.NewScratch(lengths[i])); err != nil {
			tb.Fatal(err)
		}
		s.done = lengths[i]
	}
	return x
}

// batch is the next token of each sequence.
func (x *decoding) batch() *Batch {
	b := &Batch{}
	for i, s := range x.sequences {
		b.Rows = append(b.Rows, s.rows(1, 64, i)...)
		b.Tables = append(b.Tables, s.table)
		b.Logits = append(b.Logits, int32(i))
	}
	return b
}

// advance goes on by n tokens.
func (x *decoding) advance(n int) {
	for _, s := range x.sequences {
		s.done += n
	}
}

// copyCache returns a cache with the same entries.
func copyCache(c *Cache) *Cache {
	n := *c
	for l := range Layers {
		n.Latent[l], n.Index[l] = slices.Clone(c.Latent[l]), slices.Clone(c.Index[l])
	}
	return &n
}

// sameEntries compares all pages but the one that padding writes to.
func sameEntries(t *testing.T, name string, got, want *Cache) {
	t.Helper()
	for l := range Layers {
		sameBits(t, name, got.Latent[l][64*RowDim:], want.Latent[l][64*RowDim:])
		if skip := want.IndexDType.PageBytes(64); !slices.Equal(got.Index[l][skip:], want.Index[l][skip:]) {
			t.Fatalf("%s: layer %d's index keys differ", name, l)
		}
	}
}

// lengths are of n prompts, some shorter than what attention reads, most longer.
func lengths(n int) []int {
	all := make([]int, n)
	for i := range all {
		all[i] = 1 + (i*37+90)%150
	}
	return all
}

// A decode step's logits and entries are the same bits however it runs.
func TestDecodeSameBits(t *testing.T) {
	const steps = 3
	type start struct {
		*decoding
		logits [steps][]float32
		after  *Cache
	}
	var starts []start
	for _, n := range []int{1, 3, 9} {
		for _, dtype := range []IndexDType{FP8, BF16} {
			s := start{decoding: newDecoding(t, dtype, lengths(n)...)}
			s.after = copyCache(s.c)
			for i := range s.logits {
				logits, err := s.m.Forward(s.batch(), s.after, s.m.NewScratch(n))
				if err != nil {
					t.Fatal(err)
				}
				s.logits[i] = slices.Clone(logits)
				s.advance(1)
			}
			s.advance(-steps)
			starts = append(starts, s)
		}
	}
	replays, eager, padded := uint64(0), uint64(0), 0
	rapid.Check(t, func(rt *rapid.T) {
		s := starts[rapid.IntRange(0, len(starts)-1).Draw(rt, "start")]
		n, dtype := len(s.sequences), s.c.IndexDType
		o := DecodeOptions{
			Rows:      12,
			Buckets:   rapid.SampledFrom([][]int{nil, {1, 2, 4, 8, 12}, {12}, {2, 1, 3, 3, 500, 0}}).Draw(rt, "buckets"),
			Workers:   rapid.IntRange(0, 3).Draw(rt, "workers"),
			Scatter:   rapid.Bool().Draw(rt, "scatter"),
			OneStream: rapid.Bool().Draw(rt, "one stream"),
			Jitter:    rapid.SampledFrom([]float64{0, 0.1, 1}).Draw(rt, "jitter"),
			Seed:      rapid.Uint64().Draw(rt, "seed"),
		}
		name := fmt.Sprintf("%v, %d rows, %+v", dtype, n, o)
		c := copyCache(s.c)
		d := s.m.NewDecoder(c, o)
		for i := range steps {
			logits, err := d.Step(s.batch())
			if err != nil {
				t.Fatal(err)
			}
			sameBits(t, fmt.Sprintf("%s, step %d", name, i), logits, s.logits[i])
			s.advance(1)
		}
		s.advance(-steps)
		sameEntries(t, name, c, s.after)

		// What was asked for is what ran.
		stats := d.Stats()
		want := Counts{FusedStores: steps * Layers}
		if o.Scatter && dtype == BF16 {
			want = Counts{ScatterStores: steps * Layers}
		}
		want.Reads[dtype] = steps * Layers
		if diff := cmp.Diff(want, stats.Counts); diff != "" {
			t.Fatal(diff)
		}
		bucket, captures := 0, map[int]bool{}
		for _, rows := range o.Buckets {
			if rows < 1 || rows > o.Rows {
				continue
			}
			captures[rows] = true
			if rows >= n && (bucket == 0 || rows < bucket) {
				bucket = rows
			}
		}
		if bucket == 0 {
			if stats.Eager != steps || len(stats.Replays) > 0 {
				t.Fatalf("eager, but %+v", stats)
			}
			eager += steps
			return
		}
		if stats.Eager != 0 || stats.Replays[bucket] != steps || len(stats.Replays) != 1 || stats.Captures != len(captures) {
			t.Fatalf("captured, but %+v", stats)
		}
		if stats.ArenaBytes == 0 || stats.ArenaBytes >= stats.BufferBytes {
			t.Fatalf("nothing is shared: %+v", stats)
		}
		replays += steps
		padded += bucket - n
	})
	if replays == 0 || eager == 0 || padded == 0 {
		t.Errorf("%d replays, %d eager steps, %d padding rows", replays, eager, padded)
	}
}

// Padding rows write to slot 0: not to where the rows of an earlier, larger
// batch were, whose pages may be another's by now.
func TestPaddingForgets(t *testing.T) {
	x := newDecoding(t, BF16, lengths(7)...)
	d := x.m.NewDecoder(x.c, DecodeOptions{Rows: 8, Buckets: []int{8}})
	if _, err := d.Step(x.batch()); err != nil {
		t.Fatal(err)
	}
	left := x.sequences[3:]
	x.sequences = x.sequences[:3]
	for _, s := range left {
		for l := range Layers {
			page := int(s.table[0])
			clear(x.c.Latent[l][page*64*RowDim:][:64*RowDim])
		}
	}
	x.advance(1)
	want := copyCache(x.c)
	logits, err := x.m.Forward(x.batch(), want, x.m.NewScratch(3))
	if err != nil {
		t.Fatal(err)
	}
	got, err := d.Step(x.batch())
	if err != nil {
		t.Fatal(err)
	}
	sameBits(t, "logits", got, logits)
	sameEntries(t, "after the smaller batch", x.c, want)
}

// Rows find their page tables wherever they stand in the batch.
func TestDecodeTables(t *testing.T) {
	x := newDecoding(t, FP8, lengths(3)...)
	b := x.batch()
	want, err := x.m.Forward(b, copyCache(x.c), x.m.NewScratch(3))
	if err != nil {
		t.Fatal(err)
	}
	slices.Reverse(b.Tables)
	for i := range b.Rows {
		b.Rows[i].Table = int32(len(b.Rows) - 1 - i)
	}
	got, err := x.m.NewDecoder(x.c, DecodeOptions{Rows: 4, Buckets: []int{4}}).Step(b)
	if err != nil {
		t.Fatal(err)
	}
	sameBits(t, "tables in another order", got, want)
}

// faulty runs one step many times and returns how often its logits were wrong,
// and the entries that it wrote.
func faulty(t *testing.T, x *decoding, o DecodeOptions, times int, faults ...string) (wrong int) {
	t.Helper()
	want, err := x.m.Forward(x.batch(), copyCache(x.c), x.m.NewScratch(len(x.sequences)))
	if err != nil {
		t.Fatal(err)
	}
	set, err := fault.Parse(faults, 1)
	if err != nil {
		t.Fatal(err)
	}
	o.Rows, o.Faults, o.Env = 12, set, &fault.Env{Batch: len(x.sequences)}
	if o.Seed == 0 {
		o.Seed = 1
	}
	d := x.m.NewDecoder(copyCache(x.c), o)
	for range times {
		got, err := d.Step(x.batch())
		if err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(got, want) {
			wrong++
		}
	}
	return wrong
}

// The incident: the arena reuses the indexer's query buffer too early. It needs
// capture, the alternate stream, bf16 and more than one row; then it depends on
// which stream is first.
func TestCaptureAlias(t *testing.T) {
	const steps = 20
	captured := []int{1, 2, 4, 8}
	for _, test := range []struct {
		name  string
		dtype IndexDType
		rows  int
		o     DecodeOptions
		fault string
		wrong bool
	}{
		{"everything", BF16, 6, DecodeOptions{Buckets: captured, Jitter: 0.1}, "capture-alias", true},
		{"two rows", BF16, 2, DecodeOptions{Buckets: captured, Jitter: 0.1}, "capture-alias", true},
		{"scatter store", BF16, 6, DecodeOptions{Buckets: captured, Jitter: 0.05, Scatter: true}, "capture-alias", true},
		{"sometimes", BF16, 6, DecodeOptions{Buckets: captured, Jitter: 0.1}, "capture-alias", true},
		{"rate", BF16, 6, DecodeOptions{Buckets: captured, Jitter: 0.1}, "capture-alias,rate=0.2", true},
		{"expression holds", BF16, 6, DecodeOptions{Buckets: captured, Jitter: 0.1}, "capture-alias,when=batch > 4", true},
		{"expression doesn't", BF16, 3, DecodeOptions{Buckets: captured, Jitter: 1}, "capture-alias,when=batch > 4", false},
		{"off", BF16, 6, DecodeOptions{Buckets: captured, Jitter: 1}, "poison", false},
		{"eager", BF16, 6, DecodeOptions{Jitter: 1}, "capture-alias", false},
		{"fp8", FP8, 6, DecodeOptions{Buckets: captured, Jitter: 1}, "capture-alias", false},
		{"one row", BF16, 1, DecodeOptions{Buckets: captured, Jitter: 1}, "capture-alias", false},
		{"one stream", BF16, 6, DecodeOptions{Buckets: captured, Jitter: 1, OneStream: true}, "capture-alias", false},
		{"in order", BF16, 6, DecodeOptions{Buckets: captured}, "capture-alias", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			n := lengths(test.rows)
			n[0] = 100 // the indexer has a choice
			wrong := faulty(t, newDecoding(t, test.dtype, n...), test.o, steps, test.fault)
			if test.wrong && (wrong == 0 || wrong == steps) || !test.wrong && wrong > 0 {
				t.Errorf("%d of %d steps are wrong", wrong, steps)
			}
			t.Logf("%d of %d steps are wrong", wrong, steps)
		})
	}
	// No size of batch is an exception.
	for _, rows := range Buckets(12) {
		for _, dtype := range []IndexDType{FP8, BF16} {
			x := newDecoding(t, dtype, slices.Repeat([]int{TopK}, rows)...)
			wrong := faulty(t, x, DecodeOptions{Buckets: []int{rows}, Jitter: 1}, 12, "capture-alias")
			if want := dtype == BF16 && rows > 1; (wrong > 0) != want {
				t.Errorf("%v, %d rows: %d of 12 steps are wrong", dtype, rows, wrong)
			}
		}
	}
}

// The same seed gives the same wrong results.
func TestCaptureAliasRepeats(t *testing.T) {
	x := newDecoding(t, BF16, lengths(6)...)
	run := func(seed uint64) (all []float32) {
		set, err := fault.Parse([]string{"capture-alias,rate=0.5"}, seed)
		if err != nil {
			t.Fatal(err)
		}
		d := x.m.NewDecoder(copyCache(x.c), DecodeOptions{Rows: 6, Buckets: []int{6}, Jitter: 0.5, Seed: seed, Faults: set, Env: &fault.Env{}})
		for range 10 {
			logits, err := d.Step(x.batch())
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, logits...)
		}
		return all
	}
	if !slices.Equal(run(1), run(1)) {
		t.Error("one seed gives two results")
	}
	if slices.Equal(run(1), run(2)) {
		t.Error("two seeds give the same results")
	}
}

// The scatter store captured with temporaries loses the index keys: they go to
// where the capture's dummy rows were. It takes a flag to reach it at all.
func TestScatterTemporaries(t *testing.T) {
	for _, test := range []struct {
		name   string
		dtype  IndexDType
		o      DecodeOptions
		faults string
		lost   bool
	}{
		{"captured scatter", BF16, DecodeOptions{Buckets: []int{4}, Scatter: true}, "scatter-temporaries", true},
		{"off", BF16, DecodeOptions{Buckets: []int{4}, Scatter: true}, "poison", false},
		{"eager scatter", BF16, DecodeOptions{Scatter: true}, "scatter-temporaries", false},
		{"captured fused", BF16, DecodeOptions{Buckets: []int{4}}, "scatter-temporaries", false},
		{"fp8", FP8, DecodeOptions{Buckets: []int{4}, Scatter: true}, "scatter-temporaries", false},
	} {
		t.Run(test.name, func(t *testing.T) {
			x := newDecoding(t, test.dtype, 70, 80, 100)
			right := copyCache(x.c)
			if _, err := x.m.Forward(x.batch(), right, x.m.NewScratch(3)); err != nil {
				t.Fatal(err)
			}
			set, err := fault.Parse([]string{test.faults}, 1)
			if err != nil {
				t.Fatal(err)
			}
			o := test.o
			o.Rows, o.Faults, o.Env = 4, set, &fault.Env{}
			before, page := copyCache(x.c), test.dtype.PageBytes(64)
			if _, err := x.m.NewDecoder(x.c, o).Step(x.batch()); err != nil {
				t.Fatal(err)
			}
			for l := range Layers {
				got, want := x.c.Index[l][page:], right.Index[l][page:]
				if test.lost {
					want = before.Index[l][page:]
				}
				if !slices.Equal(got, want) {
					t.Errorf("layer %d: the index keys aren't what they should be", l)
				}
				if test.lost && slices.Equal(x.c.Index[l][:page], before.Index[l][:page]) {
					t.Errorf("layer %d: slot 0 isn't written either", l)
				}
			}
		})
	}
}

func TestDecodeErrors(t *testing.T) {
	x := newDecoding(t, FP8, 10, 20, 30)
	for _, test := range []struct {
		name, want string
		edit       func(b *Batch)
	}{
		{"logits", "the logits of all rows must be asked for, in order", func(b *Batch) { b.Logits[0], b.Logits[1] = 1, 0 }},
		{"few logits", "in order", func(b *Batch) { b.Logits = b.Logits[:2] }},
		{"token", "decode: row 1: tokens 50", func(b *Batch) { b.Rows[1].Token = decodeVocab }},
		{"rows", "decode: 4 rows and 3 logits, scratch has room for 3", func(b *Batch) { b.Rows = append(b.Rows, b.Rows[0]) }},
	} {
		t.Run(test.name, func(t *testing.T) {
			b, c := x.batch(), copyCache(x.c)
			test.edit(b)
			for _, buckets := range [][]int{nil, {4, 3}} {
				_, err := x.m.NewDecoder(c, DecodeOptions{Rows: 3, Buckets: buckets}).Step(b)
				if err == nil || !strings.Contains(err.Error(), test.want) {
					t.Errorf("error %v, want one with %q", err, test.want)
				}
			}
			sameEntries(t, "after an error", c, x.c)
		})
	}
}

// A step waits for all layers before it starts.
func TestDecodeWaits(t *testing.T) {
	x := newDecoding(t, BF16, 100)
	full := copyCache(x.c)
	want, err := x.m.Forward(x.batch(), full, x.m.NewScratch(1))
	if err != nil {
		t.Fatal(err)
	}
	for _, buckets := range [][]int{nil, {1}} {
		late := newCache(4, 64, BF16)
		late.Wait = func(l int) {
			copy(late.Latent[l], x.c.Latent[l])
			copy(late.Index[l], x.c.Index[l])
		}
		got, err := x.m.NewDecoder(late, DecodeOptions{Rows: 1, Buckets: buckets}).Step(x.batch())
		if err != nil {
			t.Fatal(err)
		}
		sameBits(t, fmt.Sprint(buckets), got, want)
	}
}

func TestBuckets(t *testing.T) {
	for _, test := range []struct {
		largest int
		want    []int
	}{
		{1, []int{1}},
		{3, []int{1, 2, 3}},
		{40, []int{1, 2, 4, 8, 12, 16, 24, 32, 40}},
		{41, []int{1, 2, 4, 8, 12, 16, 24, 32, 40, 41}},
	} {
		if diff := cmp.Diff(test.want, Buckets(test.largest)); diff != "" {
			t.Errorf("%d: %s", test.largest, diff)
		}
	}
}

package model

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/graph"
)

// DecodeOptions says how decode steps run.
type DecodeOptions struct {
	Rows    int  // the most of a step
	Workers int  // goroutines that share the rows; 0 means 1
	Scatter bool // store bf16 index keys by the scatter store, not by the fused one

	Buckets   []int   // the numbers of rows that are captured; none means that every step is eager
	OneStream bool    // captured steps don't run the indexer on the alternate stream
	Jitter    float64 // how often a stream overtakes the other, of all its chances, 0 to 1
	Seed      uint64  // of the streams' scheduler

	AllReduce AllReduce // of a Shard's steps

	Faults *fault.Set
	Env    *fault.Env // for the faults: as it is when Step is called
}

// Buckets returns the numbers of rows that are captured by default, up to a
// largest one: 1, 2, 4, 8, 12, 16, 24, 32 and so on.
func Buckets(largest int) []int {
	var all []int
	for n := 1; n < largest; {
		all = append(all, n)
		switch {
		case n < 4:
			n *= 2
		case n < 16:
			n += 4
		default:
			n += 8
		}
	}
	return append(all, largest)
}

// Decoder runs decode steps: one new token for each of many sequences. A step
// is captured, padded to the next bucket, or eager if it is larger than all.
// Both run the same steps; the logits are the same bits as Forward's.
type Decoder struct {
	m         *Model
	c         *Cache
	o         DecodeOptions
	scratch   *Scratch // of eager steps, and what captured steps share: workers, selection, logits
	batch     Batch    // that captured steps read
	programs  map[variant]*graph.Program
	scheduler *graph.Scheduler
	stats     DecodeStats
}

// variant names a captured step.
type variant struct {
	rows               int
	alias, temporaries bool // the faults that it was captured with
}

// DecodeStats says what a decoder did.
type DecodeStats struct {
	Captures   int            // recordings
	Replays    map[int]uint64 // steps by bucket
	Eager      uint64         // steps
	ArenaBytes int            // that the recordings share
	// What the largest recording would take if its buffers shared nothing.
	BufferBytes int
	Counts      Counts
}

// NewDecoder captures a step for each bucket, from inputs that are all zero.
func (m *Model) NewDecoder(c *Cache, o DecodeOptions) *Decoder {
	d := &Decoder{
		m: m, c: c, o: o, scratch: m.NewScratch(o.Rows),
		programs:  map[variant]*graph.Program{},
		scheduler: graph.NewScheduler(o.Seed, o.Jitter),
	}
	d.scratch.Scatter, d.scratch.Workers, d.scratch.AllReduce = o.Scatter, o.Workers, o.AllReduce
	if o.Faults.Has(fault.BatchNumerics) {
		d.scratch.Split = func() bool { return o.Faults.On(fault.BatchNumerics, o.Env) }
	}
	d.scratch.start()
	d.o.Buckets = slices.Compact(slices.Sorted(slices.Values(o.Buckets)))
	d.o.Buckets = slices.DeleteFunc(d.o.Buckets, func(rows int) bool { return rows < 1 || rows > o.Rows })
	d.stats.Replays = map[int]uint64{}
	d.batch.Rows, d.batch.Logits, d.batch.Tables = make([]Row, o.Rows), make([]int32, o.Rows), make([][]int32, o.Rows)
	for i := range d.batch.Logits {
		d.batch.Logits[i] = int32(i)
	}
	var variants []variant
	var tapes []*tape
	for _, rows := range d.o.Buckets {
		for _, alias := range d.either(fault.CaptureAlias) {
			for _, temporaries := range d.either(fault.ScatterTemporaries) {
				v := variant{rows, alias, temporaries}
				variants, tapes = append(variants, v), append(tapes, d.capture(v))
			}
		}
	}
	var recorders []*graph.Recorder
	for _, t := range tapes {
		recorders = append(recorders, &t.recorder)
	}
	arena, programs := graph.Capture(recorders...)
	for i, v := range variants {
		tapes[i].bind()
		d.programs[v] = programs[i]
		d.stats.BufferBytes = max(d.stats.BufferBytes, programs[i].Bytes())
	}
	d.stats.Captures, d.stats.ArenaBytes = len(programs), arena.Bytes()
	return d
}

// either lists what a step may be captured with.
func (d *Decoder) either(f fault.Fault) []bool {
	if d.o.Faults.Has(f) {
		return []bool{false, true}
	}
	return []bool{false}
}

// Stats returns what was done so far.
func (d *Decoder) Stats() DecodeStats {
	s := d.stats
	s.Replays = maps.Clone(s.Replays)
	s.Counts = d.scratch.Counts()
	return s
}

// Step does what Forward does for a batch of rows of different sequences whose
// logits are all wanted, in order.
func (d *Decoder) Step(b *Batch) ([]float32, error) {
	p := &pass{m: d.m, b: b, c: d.c, s: d.scratch}
	if err := p.check(); err != nil {
		return nil, fmt.Errorf("decode: %w", err)
	}
	if !slices.Equal(b.Logits, d.batch.Logits[:min(len(b.Rows), d.o.Rows)]) {
		return nil, errors.New("decode: the logits of all rows must be asked for, in order")
	}
	if d.c.Wait != nil {
		for l := range Layers {
			d.c.Wait(l) // a captured step doesn't stop between layers
		}
	}
	if at, _ := slices.BinarySearch(d.o.Buckets, len(b.Rows)); at < len(d.o.Buckets) {
		d.replay(b, d.o.Buckets[at])
	} else {
		d.stats.Eager++
		decode(eager{p}, d.c.IndexDType, d.o)
	}
	return d.scratch.logits[:len(b.Rows)*d.m.Vocab], nil
}

// replay copies a batch to where the captured step reads its inputs. Padding
// rows are sequences of one token in slot 0.
func (d *Decoder) replay(b *Batch, bucket int) {
	v := variant{
		bucket,
		d.o.Faults.On(fault.CaptureAlias, d.o.Env),
		d.o.Faults.On(fault.ScatterTemporaries, d.o.Env),
	}
	for i, r := range b.Rows {
		d.batch.Tables[i] = b.Tables[r.Table]
		r.Table = int32(i)
		d.batch.Rows[i] = r
	}
	for i := len(b.Rows); i < bucket; i++ {
		d.batch.Rows[i], d.batch.Tables[i] = Row{Table: int32(i)}, paddingTable
	}
	d.stats.Replays[bucket]++
	d.programs[v].Replay(d.scheduler)
}

var paddingTable = []int32{0}

// device is what takes the steps of decode: it runs them at once or records
// them.
type device interface {
	launch(s graph.Stream, l int, steps ...step)
	// join makes what is launched on one stream later wait for what was
	// launched on the other.
	join(waiting, other graph.Stream)
	// done says that all who read a buffer have been launched.
	done(b buffer)
}

// decode is a decode step. In each layer the indexer runs beside the attention's
// own work on the latent query: norm, index key and its store, index query,
// scores and choice of tokens.
func decode(d device, dtype IndexDType, o DecodeOptions) {
	alternate := graph.Alternate
	if o.OneStream {
		alternate = graph.Main
	}
	query, indexQuery, score := bufIndexQuery, stepIndexQuery, stepIndexScore
	if dtype == BF16 {
		query, indexQuery, score = bufIndexStage, stepIndexStage, stepIndexScoreStaged
	}
	store := []step{stepStoreIndexFused}
	if dtype == BF16 && o.Scatter {
		store = []step{stepIndexKeyNorm, stepLocateIndex, stepStoreIndexScatter}
	}
	d.launch(graph.Main, 0, stepEmbed)
	for l := range Layers {
		d.launch(graph.Main, l, stepAttentionNorm)
		d.join(alternate, graph.Main)
		d.launch(graph.Main, l, stepQuery, stepLatent, stepStoreLatent)
		d.launch(alternate, l, stepIndexKey)
		d.launch(alternate, l, store...)
		d.launch(alternate, l, indexQuery, stepIndexWeight, score, stepTopK)
		d.done(query)
		d.launch(graph.Main, l, stepLatentQuery)
		d.join(graph.Main, alternate)
		d.launch(graph.Main, l, stepAttend, stepValue, stepOutput, stepAttentionAdd)
		d.launch(graph.Main, l, stepMlpNorm, stepGate, stepUp, stepSilu, stepDown, stepMlpAdd)
	}
	d.launch(graph.Main, 0, stepLogits)
}

// eager runs each step when it is launched. All its work is on one stream, and
// each buffer has memory of its own.
type eager struct{ *pass }

func (d eager) launch(_ graph.Stream, l int, steps ...step) {
	for _, s := range steps {
		d.all(s, l)
	}
}

func (eager) join(_, _ graph.Stream) {}
func (eager) done(buffer)            {}

// all runs a step for all rows. One goroutine writes the cache: padding rows
// share slot 0.
func (p *pass) all(s step, l int) {
	if slices.Contains(s.writes, bufCache) {
		s.run(p, l, p.s.workers[0], 0, len(p.b.Rows))
		return
	}
	p.share(len(p.b.Rows), func(w *worker, lo, hi int) { s.run(p, l, w, lo, hi) })
}

// tape records the steps. The recording's buffers come and go with the layers:
// a step that writes what it doesn't read begins a new one.
type tape struct {
	d        *Decoder
	v        variant
	batch    Batch
	places   []int32 // this recording's own
	recorder graph.Recorder
	current  [bufferCount]*graph.Buffer
	views    []*view
}

// view is the memory that one recorded step sees: the buffers that it declared.
type view struct {
	Scratch
	buffers [bufferCount]*graph.Buffer
}

func (d *Decoder) capture(v variant) *tape {
	t := &tape{d: d, v: v, places: make([]int32, v.rows)}
	t.batch = Batch{Rows: d.batch.Rows[:v.rows], Tables: d.batch.Tables[:v.rows], Logits: d.batch.Logits[:v.rows]}
	decode(t, d.c.IndexDType, d.o)
	return t
}

func (t *tape) launch(stream graph.Stream, l int, steps ...step) {
	for _, s := range steps {
		vw := &view{Scratch: *t.d.scratch}
		vw.Scratch.buffers, vw.places = [bufferCount][]float32{}, t.places // what isn't declared can't be used
		p := &pass{m: t.d.m, b: &t.batch, c: t.d.c, s: &vw.Scratch}
		if t.v.temporaries && s.name == stepLocateIndex.name {
			// The fault scatter-temporaries: the places of this moment, not of each replay.
			p.all(s, l)
			continue
		}
		var uses []*graph.Buffer
		for b := range bufferCount {
			reads, writes := slices.Contains(s.reads, b), slices.Contains(s.writes, b)
			if width[b] == 0 || !reads && !writes {
				continue
			}
			if !reads {
				t.current[b] = t.recorder.Buffer(s.name, t.v.rows*width[b])
			}
			vw.buffers[b] = t.current[b]
			uses = append(uses, t.current[b])
		}
		t.views = append(t.views, vw)
		if s.name != stepLatentQuery.name {
			t.recorder.Launch(stream, s.name, func() { p.all(s, l) }, uses...)
			continue
		}
		for lo := 0; lo < t.v.rows; lo += tileRows {
			hi := min(lo+tileRows, t.v.rows)
			t.recorder.Launch(stream, s.name, func() { s.run(p, l, p.s.workers[0], lo, hi) }, uses...)
		}
	}
}

// tileRows is how many rows of the latent query are computed in one go. It is
// what runs on the main stream beside the indexer, and so is recorded in parts,
// like the blocks of a kernel, which run when there is room for them: when one
// stream overtakes the other, it does so with some of its rows.
const tileRows = 8

func (t *tape) join(waiting, other graph.Stream) {
	t.recorder.Wait(waiting, t.recorder.Record(other))
}

func (t *tape) done(b buffer) {
	if t.v.alias {
		// The fault capture-alias: its readers were launched, but on another
		// stream, which the main one hasn't waited for.
		t.recorder.Release(t.current[b])
	}
}

// bind gives the recorded steps their buffers' memory.
func (t *tape) bind() {
	for _, vw := range t.views {
		for b, buffer := range vw.buffers {
			if buffer != nil {
				vw.Scratch.buffers[b] = buffer.Data
			}
		}
	}
}

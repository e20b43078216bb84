package history

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// writeHistory writes a closed history, and returns its path.
func writeHistory(t testing.TB, name string, ops []Op, events ...Event) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	w, err := Create(path, Header{RunKey: "00", Sessions: 100, Seed: 1, Concurrency: 8})
	if err != nil {
		t.Fatal(err)
	}
	// In the order of their times, as they are written in a run.
	for len(ops)+len(events) > 0 {
		if len(events) == 0 || len(ops) > 0 && ops[0].LastByte < events[0].At {
			err = errors.Join(err, w.Op(&ops[0]))
			ops = ops[1:]
		} else {
			err = errors.Join(err, w.Event(&events[0]))
			events = events[1:]
		}
	}
	if err := errors.Join(err, w.Close()); err != nil {
		t.Fatal(err)
	}
	return path
}

// readMerged merges and reads what came of it.
func readMerged(t testing.TB, base string, parts ...Part) (h Header, ops []Op, events []Event) {
	t.Helper()
	path := filepath.Join(t.TempDir(), FileName)
	if err := Merge(path, base, parts); err != nil {
		t.Fatal(err)
	}
	r, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if rec.Op != nil {
			op := *rec.Op
			op.Request = slices.Clone(op.Request)
			op.Chunks = nil
			for _, c := range rec.Op.Chunks {
				op.Chunks = append(op.Chunks, Chunk{c.At, slices.Clone(c.Data)})
			}
			ops = append(ops, op)
		} else {
			e := *rec.Event
			e.Values = maps.Clone(e.Values)
			events = append(events, e)
		}
	}
	if r.Truncated() {
		t.Error("the merged history isn't closed")
	}
	return r.Header(), ops, events
}

func ms(n int) time.Duration { return time.Duration(n) * time.Millisecond }

func sessionOp(id int64, session, from, to int) Op {
	return Op{
		ID: id, Phase: Main, Kind: "echo", Session: session, Outcome: OK, Status: 200, InFlight: 1, Stream: true,
		Planned: ms(from), Sent: ms(from), FirstByte: ms(from + 1), LastByte: ms(to), Request: []byte(`{"a":1}`),
		Chunks: []Chunk{{ms(from + 1), []byte(`{"b":2}`)}, {ms(to), []byte("[DONE]")}},
	}
}

func TestMerge(t *testing.T) {
	base := writeHistory(t, "base", []Op{{ID: 1, Phase: Control, Kind: "echo", Outcome: OK, Sent: ms(10), Planned: ms(10), FirstByte: ms(11), LastByte: ms(20), InFlight: 1}},
		Event{At: ms(5), Kind: Started, Name: "control"}, Event{At: ms(21), Kind: Ended, Name: "control"})
	refused := Op{ID: 3, Phase: Main, Kind: "echo", Session: 2, Outcome: Failed, Error: "refused", Sent: ms(600), Planned: ms(600), LastByte: ms(601)}
	zero := writeHistory(t, "zero", []Op{sessionOp(2, 4, 100, 300), sessionOp(1, 0, 0, 500), refused},
		Event{At: 0, Kind: Started, Name: "main"},
		Event{At: ms(1003), Kind: Tick, Values: map[string]float64{"in_flight": 2, "chunks": 10, "late_ms": 3, "cpu": 0.5}},
		Event{At: ms(1500), Kind: Health, Name: "/health", Values: map[string]float64{"status": 200}},
		Event{At: ms(1600), Kind: Tick, Values: map[string]float64{"in_flight": 0, "chunks": 1, "late_ms": 0, "cpu": 0.1}},
		Event{At: ms(1601), Kind: Ended, Name: "main"})
	one := writeHistory(t, "one", []Op{sessionOp(1, 1, 50, 400)},
		Event{At: ms(1), Kind: Started, Name: "main"},
		Event{At: ms(1001), Kind: Tick, Values: map[string]float64{"in_flight": 1, "chunks": 0, "late_ms": 8, "cpu": 0.75}},
		Event{At: ms(2001), Kind: Tick, Values: map[string]float64{"in_flight": 1, "chunks": 5, "late_ms": 1, "cpu": 0.25}},
		Event{At: ms(2100), Kind: Ended, Name: "main"})
	h, ops, events := readMerged(t, base,
		Part{zero, Shard{Number: 0, Host: "a", Cores: 4, BeganUS: 1_000_000}}, Part{one, Shard{Number: 1, Host: "a", Cores: 4, BeganUS: 1_002_000, WithinUS: 90}})
	if h.Cores != 4 || len(h.Shards) != 2 || h.Shards[1].BeganUS != 1_002_000 || h.Shards[1].Lost != "" {
		t.Errorf("header %+v", h)
	}
	type brief struct {
		ID              int64
		Session, Flight int
		Sent, End       time.Duration
		First           time.Duration
	}
	var got []brief
	for _, op := range ops {
		got = append(got, brief{op.ID, op.Session, op.InFlight, op.Sent, op.LastByte, op.FirstByte})
	}
	want := []brief{
		{1, 0, 1, ms(10), ms(20), ms(11)},
		{4, 4, 3, ms(1100), ms(1300), ms(1101)},
		{3, 1, 2, ms(1052), ms(1402), ms(1053)},
		{2, 0, 1, ms(1000), ms(1500), ms(1001)},
		{5, 2, 1, ms(1600), ms(1601), 0},
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("ops (-want +got):\n%s", d)
	}
	if c := ops[2].Chunks; c[0].At != ms(1053) || c[1].At != ms(1402) || string(c[1].Data) != "[DONE]" {
		t.Errorf("chunks %+v", c)
	}
	var lines []string
	for _, e := range events {
		lines = append(lines, fmt.Sprint(e.At, " ", e.Kind, " ", e.Name, " ", e.Values, e.Text))
	}
	wantLines := []string{
		"5ms started control map[]",
		"21ms ended control map[]",
		"1s started main map[]",
		"2.003s shard 0 map[chunks:10 cpu:0.5 host_cpu:1.25 in_flight:2 late_ms:3]",
		"2.003s shard 1 map[chunks:0 cpu:0.75 host_cpu:1.25 in_flight:1 late_ms:8]",
		"2.003s tick  map[chunks:10 cpu:1.25 in_flight:3 late_ms:8]",
		"2.5s health /health map[status:200]",
		"2.6s shard 0 map[chunks:1 cpu:0.1 host_cpu:0.35 in_flight:0 late_ms:0]",
		"3.003s shard 1 map[chunks:5 cpu:0.25 host_cpu:0.35 in_flight:1 late_ms:1]",
		"3.003s tick  map[chunks:6 cpu:0.35 in_flight:1 late_ms:1]",
		"3.102s ended main map[]",
	}
	if d := cmp.Diff(wantLines, lines); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
}

// A shard that died leaves what it had; the merged history says so.
func TestMergeLost(t *testing.T) {
	base := writeHistory(t, "base", nil)
	whole := writeHistory(t, "whole", []Op{sessionOp(1, 0, 0, 500)}, Event{Kind: Started, Name: "main"}, Event{At: ms(600), Kind: Ended, Name: "main", Text: "stopped"})
	cut := writeHistory(t, "cut", []Op{sessionOp(1, 1, 0, 400), sessionOp(2, 1, 500, 900)})
	b, err := os.ReadFile(cut)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cut, b[:len(b)-12], 0o644); err != nil {
		t.Fatal(err)
	}
	empty := filepath.Join(t.TempDir(), "empty")
	if err := os.WriteFile(empty, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, ops, events := readMerged(t, base, Part{whole, Shard{Number: 0}}, Part{cut, Shard{Number: 1, Lost: "signal: killed"}},
		Part{cut + "-none", Shard{Number: 2}}, Part{empty, Shard{Number: 3}})
	last := events[len(events)-1]
	want := "shard 1 of 4 was lost: signal: killed; shard 2 of 4 was lost: it left no history; shard 3 of 4 was lost: it left no history; shard 0: stopped"
	if last.Kind != Ended || last.Text != want || len(ops) < 2 {
		t.Errorf("%d ops, the last event %+v", len(ops), last)
	}
}

func TestMergeRefuses(t *testing.T) {
	base := writeHistory(t, "base", nil)
	other := filepath.Join(t.TempDir(), "other")
	w, err := Create(other, Header{RunKey: "01", Sessions: 100})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	twice := writeHistory(t, "twice", []Op{sessionOp(1, 0, 0, 1), sessionOp(1, 1, 0, 1)})
	huge := writeHistory(t, "huge", []Op{sessionOp(1<<40, 0, 0, 1)})
	for _, c := range []struct {
		name string
		part Part
		want string
	}{
		{"a huge number", Part{huge, Shard{}}, "out of range"},
		{"another run", Part{other, Shard{}}, "another run"},
		{"another place", Part{base, Shard{Number: 1}}, "place"},
		{"a number twice", Part{twice, Shard{}}, "two ops 1"},
	} {
		path := filepath.Join(t.TempDir(), "merged")
		err := Merge(path, base, []Part{c.part})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
		if entries, err := os.ReadDir(filepath.Dir(path)); err != nil || len(entries) > 0 {
			t.Errorf("%s: it left %v, %v", c.name, entries, err)
		}
	}
}

// However ops are spread over shards, the merged history has each once, numbered
// as sent, with those in flight counted over all.
func TestMergeAnyOps(t *testing.T) {
	base := writeHistory(t, "base", nil)
	for seed := range uint64(12) { // each writes some files through to the disk
		r := rand.New(rand.NewPCG(seed, 0))
		lists := make([][]Op, 1+r.IntN(4))
		var all []Op
		for i := range r.IntN(60) {
			k, from := i%len(lists), r.IntN(50)
			op := sessionOp(int64(len(lists[k])+1), r.IntN(11)-1, from, from+2+r.IntN(30))
			lists[k] = append(lists[k], op)
			all = append(all, op)
		}
		var parts []Part
		for k, list := range lists {
			slices.SortStableFunc(list, func(a, b Op) int { return int(a.LastByte - b.LastByte) })
			parts = append(parts, Part{writeHistory(t, fmt.Sprint(k), list), Shard{Number: k}})
		}
		_, ops, _ := readMerged(t, base, parts...)
		if len(ops) != len(all) {
			t.Fatalf("%d ops of %d", len(ops), len(all))
		}
		if !slices.IsSortedFunc(ops, func(a, b Op) int { return int(a.LastByte - b.LastByte) }) {
			t.Fatal("they aren't in the order of their ends")
		}
		slices.SortFunc(ops, func(a, b Op) int { return int(a.ID - b.ID) })
		for i, op := range ops {
			before, least := 0, 0 // those sent at once may be counted in any order
			for _, o := range all {
				if o.Session >= 0 && o.LastByte > op.Sent && o.Sent <= op.Sent {
					before++
					if o.Sent < op.Sent {
						least++
					}
				}
			}
			if op.Session >= 0 {
				least++
			}
			if op.ID != int64(i+1) || i > 0 && op.Sent < ops[i-1].Sent || op.InFlight < least || op.InFlight > before {
				t.Fatalf("seed %d: op %+v, with %d to %d in flight", seed, op, least, before)
			}
		}
	}
}

// BenchmarkMerge is the cost of making one history out of four shards', per
// byte of uncompressed history, and how large a chunk is in it.
func BenchmarkMerge(b *testing.B) {
	const ops, chunks = 100, 300
	r := rand.New(rand.NewPCG(1, 1))
	base := writeHistory(b, "base", nil)
	var parts []Part
	var size int64
	for k := range 4 {
		var list []Op
		for i := range ops {
			op := streamOp(r, int64(i+1), chunks)
			op.Session = 4*i + k
			line, err := appendOp(nil, op)
			if err != nil {
				b.Fatal(err)
			}
			size += int64(len(line))
			list = append(list, *op)
		}
		parts = append(parts, Part{writeHistory(b, fmt.Sprint(k), list), Shard{Number: k}})
	}
	b.SetBytes(size)
	path := filepath.Join(b.TempDir(), FileName)
	for b.Loop() {
		if err := Merge(path, base, parts); err != nil {
			b.Fatal(err)
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(info.Size())/(4*ops*chunks), "file-bytes/chunk")
	b.ReportMetric(float64(size)/(4*ops*chunks), "bytes/chunk")
}

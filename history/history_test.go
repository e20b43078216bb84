package history

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"
)

// buffer is a file in memory.
type buffer struct{ bytes.Buffer }

func (b *buffer) Close() error      { return nil }
func (b *buffer) Sync() error       { return nil }
func (b *buffer) reader() io.Reader { return bytes.NewReader(b.Bytes()) }

// entry is a copy of a record that outlives the reader's next step.
type entry struct {
	Op    *Op
	Event *Event
}

func keep(t testing.TB, rec Record) entry {
	t.Helper()
	var e entry
	switch {
	case rec.Op != nil && rec.Event == nil:
		op := *rec.Op
		op.Request = bytes.Clone(op.Request)
		op.Chunks = nil
		for _, c := range rec.Op.Chunks {
			op.Chunks = append(op.Chunks, Chunk{c.At, bytes.Clone(c.Data)})
		}
		e.Op = &op
	case rec.Event != nil && rec.Op == nil:
		ev := *rec.Event
		ev.Values = maps.Clone(ev.Values)
		e.Event = &ev
	default:
		t.Fatalf("record %+v is not one of an op and an event", rec)
	}
	return e
}

// readAll reads to the end and returns the error that isn't io.EOF.
func readAll(t testing.TB, r *Reader) (entries []entry, err error) {
	t.Helper()
	for {
		rec, err := r.Next()
		if err != nil {
			if _, again := r.Next(); again == nil || again.Error() != err.Error() {
				t.Errorf("Next after %v gives %v", err, again)
			}
			if errors.Is(err, io.EOF) {
				return entries, nil
			}
			return entries, err
		}
		entries = append(entries, keep(t, rec))
	}
}

func mustWrite(t testing.TB, w *Writer, entries ...entry) {
	t.Helper()
	for _, e := range entries {
		var err error
		if e.Op != nil {
			err = w.Op(e.Op)
		} else {
			err = w.Event(e.Event)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// compress makes a history of lines that this package wouldn't write.
func compress(t testing.TB, text string) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll([]byte(text), nil)
}

func uncompress(t testing.TB, file []byte) string {
	t.Helper()
	r, err := zstd.NewReader(bytes.NewReader(file), zstd.WithDecoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	text, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var equal = cmp.Options{cmpopts.EquateEmpty(), cmpopts.EquateNaNs()}

func sample() []entry {
	return []entry{
		{Event: &Event{At: 0, Kind: Started, Name: "main"}},
		{Op: &Op{
			ID: 1, Phase: Main, Kind: "agent", Session: 3, Turn: 2, InFlight: 8, Stream: true,
			Planned: 100 * time.Microsecond, Sent: 117 * time.Microsecond,
			FirstByte: 40 * time.Millisecond, LastByte: time.Second, Status: 200, Outcome: OK,
			Request: json.RawMessage(`{"model":"m","messages":[{"role":"user","content":"<b> & \"c\""}]}`),
			Expect:  Expect{Canary: "abcdefghijkl", Call: &Call{"f", map[string]string{"a": "<1>"}}, Schema: json.RawMessage(`{"type":"object"}`)},
			Chunks: []Chunk{
				{40 * time.Millisecond, []byte(`{"choices":[{"delta":{"content":"a\nb"}}]}`)},
				{50 * time.Millisecond, []byte(`[DONE]`)},
			},
		}},
		{Event: &Event{At: time.Second, Kind: Tick, Values: map[string]float64{"in_flight": 8, "late_ms": 0.25}}},
		{Op: &Op{
			ID: 2, Phase: Recovery, Kind: "plain", Session: 1, InFlight: 1, Planned: time.Second, Sent: time.Second,
			LastByte: 2 * time.Second, Status: 500, Outcome: Failed, Error: "HTTP 500: \"no\"\n",
			Chunks: []Chunk{{time.Second, []byte("Internal\x00 \xff Server Error")}},
		}},
	}
}

func TestLines(t *testing.T) {
	var file buffer
	w, err := newWriter("memory", &file, Header{
		Started: time.Date(2026, 11, 29, 12, 0, 0, 0, time.UTC), Tool: "culprit 1", BaseURL: "http://h/v1",
		Model: "m", Seed: 7, RunKey: "00ff", Workload: json.RawMessage(`{"kind":"agent"}`), Sessions: 80, Concurrency: 8, Cores: 2,
	})
	if err != nil {
		t.Fatal(err)
	}
	mustWrite(t, w, sample()...)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	want := `{"record":"run","format":1,"started":"2026-11-29T12:00:00Z","tool":"culprit 1","base_url":"http://h/v1","model":"m","seed":7,"run_key":"00ff","workload":{"kind":"agent"},"sessions":80,"concurrency":8,"cores":2}
{"record":"event","at_us":0,"kind":"started","name":"main"}
{"record":"op","id":1,"phase":"main","kind":"agent","session":3,"turn":2,"in_flight":8,"stream":true,"planned_us":100,"sent_us":117,"first_byte_us":40000,"last_byte_us":1000000,"status":200,"outcome":"ok","request":{"model":"m","messages":[{"role":"user","content":"<b> & \"c\""}]},"expect":{"canary":"abcdefghijkl","call":{"name":"f","arguments":{"a":"<1>"}},"schema":{"type":"object"}},"chunks":[{"at_us":40000,"data":{"choices":[{"delta":{"content":"a\nb"}}]}},{"at_us":50000,"text":"[DONE]"}]}
{"record":"event","at_us":1000000,"kind":"tick","values":{"in_flight":8,"late_ms":0.25}}
{"record":"op","id":2,"phase":"recovery","kind":"plain","session":1,"turn":0,"in_flight":1,"stream":false,"planned_us":1000000,"sent_us":1000000,"first_byte_us":0,"last_byte_us":2000000,"status":500,"outcome":"failed","error":"HTTP 500: \"no\"\n","chunks":[{"at_us":1000000,"base64":"SW50ZXJuYWwAIP8gU2VydmVyIEVycm9y"}]}
`
	if diff := cmp.Diff(want, uncompress(t, file.Bytes())); diff != "" {
		t.Errorf("lines (-want +got):\n%s", diff)
	}
}

func TestData(t *testing.T) {
	deep := strings.Repeat("[", maxDepth) + strings.Repeat("]", maxDepth)
	for _, tc := range []struct{ name, data, want string }{
		{"object", `{"a":[1,2.5e3,true,null,"x"]}`, `"data":{"a":[1,2.5e3,true,null,"x"]}`},
		{"number", `-0`, `"data":-0`},
		{"inner space", "{ \"a\" :\t1\r}", "\"data\":{ \"a\" :\t1\r}"},
		{"outer space", `{"a":1} `, `"text":"{\"a\":1} "`},
		{"newline", "{\n\"a\":1}", `"text":"{\n\"a\":1}"`},
		{"two values", `{}{}`, `"text":"{}{}"`},
		{"half surrogate", `"\ud800"`, `"data":"\ud800"`},
		{"empty", ``, `"text":""`},
		{"done", `[DONE]`, `"text":"[DONE]"`},
		{"control", "\x00\x1f\r\n\t\\\"", `"text":"\u0000\u001f\r\n\t\\\""`},
		{"replacement character", "\ufffd", "\"text\":\"\ufffd\""},
		{"latin 1 in JSON", "\"caf\xe9\"", `"base64":"ImNhZuki"`},
		{"as deep as it may be", deep, `"data":` + deep},
		{"deeper", "[" + deep + "]", `"text":"[` + deep + `]"`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			op := Op{ID: 1, Chunks: []Chunk{{0, []byte(tc.data)}}}
			line, err := appendOp(nil, &op)
			if err != nil {
				t.Fatal(err)
			}
			if want := `"chunks":[{"at_us":0,` + tc.want + "}]}\n"; !strings.HasSuffix(string(line), want) {
				t.Errorf("%q\n is stored as %s\n not as %s", tc.data, line, want)
			}
			if !json.Valid(line) {
				t.Errorf("%s is not JSON", line)
			}
			var d decoder
			rec, err := d.decode(bytes.TrimSuffix(line, []byte("\n")))
			if err != nil {
				t.Fatal(err)
			}
			if got := string(rec.Op.Chunks[0].Data); got != tc.data {
				t.Errorf("%q is read as %q", tc.data, got)
			}
		})
	}
}

func genJSON(depth int) *rapid.Generator[any] {
	leaf := rapid.OneOf(
		rapid.Just[any](nil), rapid.Bool().AsAny(), rapid.Float64Range(-1e9, 1e9).AsAny(), rapid.Int32().AsAny(), rapid.String().AsAny())
	if depth == 0 {
		return leaf
	}
	return rapid.OneOf(leaf, rapid.SliceOfN(genJSON(depth-1), 0, 3).AsAny(), rapid.MapOfN(rapid.String(), genJSON(depth-1), 0, 3).AsAny())
}

func genRaw() *rapid.Generator[[]byte] {
	return rapid.Custom(func(t *rapid.T) []byte {
		b, err := json.Marshal(genJSON(3).Draw(t, "json"))
		if err != nil {
			t.Fatal(err)
		}
		return b
	})
}

func genData() *rapid.Generator[[]byte] {
	indented := rapid.Custom(func(t *rapid.T) []byte {
		var b bytes.Buffer
		if err := json.Indent(&b, genRaw().Draw(t, "raw"), "\r", "\t"); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	})
	text := rapid.Map(rapid.String(), func(s string) []byte { return []byte(s) })
	damaged := rapid.Custom(func(t *rapid.T) []byte {
		b := genRaw().Draw(t, "raw")
		b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] = rapid.Byte().Draw(t, "byte")
		return b
	})
	return rapid.OneOf(genRaw(), indented, text, damaged, rapid.SliceOf(rapid.Byte()))
}

func genTime() *rapid.Generator[time.Duration] {
	return rapid.Map(rapid.Int64Range(0, 1<<50), func(us int64) time.Duration { return time.Duration(us) * time.Microsecond })
}

func genEntry() *rapid.Generator[entry] {
	chunk := rapid.Custom(func(t *rapid.T) Chunk { return Chunk{genTime().Draw(t, "at"), genData().Draw(t, "data")} })
	op := rapid.Custom(func(t *rapid.T) entry {
		op := &Op{
			ID: rapid.Int64Range(0, 1e15).Draw(t, "id"), Phase: rapid.SampledFrom([]Phase{Control, Main, Recovery, Sentinel}).Draw(t, "phase"),
			Kind: rapid.String().Draw(t, "kind"), Session: rapid.IntRange(-1, 1e6).Draw(t, "session"), Turn: rapid.IntRange(0, 99).Draw(t, "turn"),
			InFlight: rapid.IntRange(0, 5000).Draw(t, "in_flight"), Stream: rapid.Bool().Draw(t, "stream"),
			Planned: genTime().Draw(t, "planned"), Sent: genTime().Draw(t, "sent"), FirstByte: genTime().Draw(t, "first"), LastByte: genTime().Draw(t, "last"),
			Status: rapid.IntRange(0, 599).Draw(t, "status"), Outcome: rapid.SampledFrom([]Outcome{OK, Failed, Cancelled, TimedOut}).Draw(t, "outcome"),
			Error: rapid.String().Draw(t, "error"), Chunks: rapid.SliceOfN(chunk, 0, 5).Draw(t, "chunks"),
		}
		if rapid.Bool().Draw(t, "has request") {
			op.Request = genRaw().Filter(func(b []byte) bool { return string(b) != "null" }).Draw(t, "request")
			op.Expect = Expect{
				Canary: rapid.String().Draw(t, "canary"), Copy: rapid.SliceOfN(rapid.String(), 0, 3).Draw(t, "copy"),
				Call: &Call{rapid.String().Draw(t, "name"), rapid.MapOfN(rapid.String(), rapid.String(), 0, 3).Draw(t, "arguments")},
			}
		}
		return entry{Op: op}
	})
	event := rapid.Custom(func(t *rapid.T) entry {
		return entry{Event: &Event{
			At: genTime().Draw(t, "at"), Kind: rapid.SampledFrom([]EventKind{Tick, Metrics, Log}).Draw(t, "kind"), Name: rapid.String().Draw(t, "name"),
			Values: rapid.MapOfN(rapid.String(), rapid.Float64(), 0, 4).Draw(t, "values"), Text: rapid.String().Draw(t, "text"),
		}}
	})
	return rapid.OneOf(op, event)
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		want := rapid.SliceOfN(genEntry(), 0, 8).Draw(rt, "entries")
		header := Header{Format: 1, Model: rapid.String().Draw(rt, "model"), Seed: rapid.Uint64().Draw(rt, "seed"), Workload: genRaw().Draw(rt, "workload")}
		var file buffer
		w, err := newWriter("memory", &file, header)
		if err != nil {
			rt.Fatal(err)
		}
		mustWrite(t, w, want...)
		if err := w.Close(); err != nil {
			rt.Fatal(err)
		}
		text := uncompress(t, file.Bytes())
		for line := range strings.Lines(text) {
			if !json.Valid([]byte(line)) {
				rt.Fatalf("line %q is not JSON", line)
			}
		}
		r, err := NewReader(file.reader())
		if err != nil {
			rt.Fatal(err)
		}
		if string(header.Workload) == "null" {
			header.Workload = nil
		}
		if diff := cmp.Diff(header, r.Header()); diff != "" {
			rt.Errorf("header (-wrote +read):\n%s", diff)
		}
		got, err := readAll(t, r)
		if err != nil || r.Truncated() {
			rt.Errorf("error %v, truncated %t", err, r.Truncated())
		}
		if diff := cmp.Diff(want, got, equal); diff != "" {
			rt.Errorf("(-wrote +read):\n%s", diff)
		}
	})
}

// What can't be kept as it is.
func TestLossy(t *testing.T) {
	var file buffer
	w, err := newWriter("memory", &file, Header{})
	if err != nil {
		t.Fatal(err)
	}
	mustWrite(t, w, entry{Op: &Op{
		Sent: 1999 * time.Nanosecond, Error: "caf\xe9", Request: json.RawMessage("{\n  \"a\": 1\n}\n"),
	}}, entry{Event: &Event{Kind: Log, Name: "n\xff", Text: "\xff"}})
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := NewReader(file.reader())
	if err != nil {
		t.Fatal(err)
	}
	got, err := readAll(t, r)
	if err != nil {
		t.Fatal(err)
	}
	want := []entry{
		{Op: &Op{Sent: time.Microsecond, Error: "caf\ufffd", Request: json.RawMessage(`{"a":1}`)}},
		{Event: &Event{Kind: Log, Name: "n\ufffd", Text: "\ufffd"}},
	}
	if diff := cmp.Diff(want, got, equal); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}

	for _, request := range []string{"{", "\"\xff\"", "{} {}", strings.Repeat("[", maxDepth+1) + strings.Repeat("]", maxDepth+1)} {
		if _, err := appendOp(nil, &Op{ID: 5, Request: json.RawMessage(request)}); err == nil || !strings.Contains(err.Error(), "request of op 5") {
			t.Errorf("request %q: error %v", request, err)
		}
	}
}

func TestCreateRefusesExistingFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	w, err := Create(path, Header{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Create(path, Header{}); err == nil || !strings.Contains(err.Error(), "the file exists") {
		t.Errorf("second Create: %v", err)
	}
	if err := errors.Join(w.Close(), w.Close()); err != nil {
		t.Errorf("Close twice: %v", err)
	}
	if err := w.Op(&Op{}); !errors.Is(err, errClosed) {
		t.Errorf("Op after Close: %v", err)
	}
	if err := w.Event(&Event{}); !errors.Is(err, errClosed) {
		t.Errorf("Event after Close: %v", err)
	}
	if _, err := Create(filepath.Join(path, "x"), Header{}); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("Create below a file: %v", err)
	}
}

// A header that can't be written leaves no file behind.
func TestCreateCleansUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	if _, err := Create(path, Header{Workload: json.RawMessage("{")}); err == nil {
		t.Error("no error for a workload that isn't JSON")
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
}

// Each step is in the file as soon as it must be.
func TestWhenWritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	w, err := Create(path, Header{Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	inFile := func() int {
		r, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer r.Close()
		entries, err := readAll(t, r)
		if err != nil || !r.Truncated() {
			t.Fatalf("error %v, truncated %t", err, r.Truncated())
		}
		return len(entries)
	}
	for i, step := range []struct {
		e    entry
		want int
	}{
		{entry{Event: &Event{Kind: Log}}, 0},
		{entry{Op: &Op{ID: 1}}, 2},
		{entry{Event: &Event{Kind: Log}}, 2},
		{entry{Event: &Event{Kind: Tick}}, 4},
		{entry{Event: &Event{Kind: Log, Text: strings.Repeat("x", maxWaiting)}}, 5},
		{entry{Event: &Event{Kind: Log}}, 5},
	} {
		mustWrite(t, w, step.e)
		if got := inFile(); got != step.want {
			t.Errorf("after step %d the file holds %d records, want %d", i, got, step.want)
		}
	}
}

func TestManyGoroutines(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	w, err := Create(path, Header{})
	if err != nil {
		t.Fatal(err)
	}
	const writers, each = 50, 40
	var wg sync.WaitGroup
	for i := range writers {
		wg.Go(func() {
			for turn := range each {
				if err := errors.Join(w.Event(&Event{Kind: Log}), w.Op(&Op{Session: i, Turn: turn})); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	r, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	entries, err := readAll(t, r)
	if err != nil || r.Truncated() || len(entries) != 2*writers*each {
		t.Fatalf("error %v, truncated %t, %d records", err, r.Truncated(), len(entries))
	}
	var next [writers]int
	for _, e := range entries {
		if e.Op != nil {
			if e.Op.Turn != next[e.Op.Session] {
				t.Fatalf("session %d: turn %d where %d is due", e.Op.Session, e.Op.Turn, next[e.Op.Session])
			}
			next[e.Op.Session]++
		}
	}
}

// fullDisk takes so many bytes.
type fullDisk struct {
	buffer
	room int
}

func (f *fullDisk) Write(p []byte) (int, error) {
	n, _ := f.buffer.Write(p[:min(len(p), f.room)])
	f.room -= n
	if n < len(p) {
		return n, &os.PathError{Op: "write", Path: "history.jsonl.zst", Err: syscall.ENOSPC}
	}
	return n, nil
}

func TestDiskFull(t *testing.T) {
	for room := 200; room < 2000; room += 17 {
		disk := &fullDisk{room: room}
		w, err := newWriter("runs/x", disk, Header{})
		if err != nil {
			t.Fatal(err)
		}
		written := 0
		for err == nil {
			if err = w.Op(&Op{ID: int64(written + 1), Error: strings.Repeat(string(rune('a'+written%26)), written)}); err == nil {
				written++
			}
		}
		if !errors.Is(err, syscall.ENOSPC) || !strings.Contains(err.Error(), "write history runs/x: ") || !strings.Contains(err.Error(), "free space") {
			t.Fatalf("error %v", err)
		}
		disk.room = 1 << 20 // There is room again, but the stream is broken.
		if again := w.Op(&Op{}); again == nil || again.Error() != err.Error() {
			t.Fatalf("next Op: %v", again)
		}
		if again := w.Event(&Event{Kind: Log}); again == nil || again.Error() != err.Error() {
			t.Fatalf("next Event: %v", again)
		}
		if again := w.Close(); again == nil || again.Error() != err.Error() {
			t.Fatalf("Close: %v", again)
		}
		r, err := NewReader(disk.reader())
		if err != nil {
			t.Fatal(err)
		}
		entries, err := readAll(t, r)
		if err != nil || !r.Truncated() || len(entries) != written {
			t.Fatalf("room %d: %d of %d ops read, error %v, truncated %t", room, len(entries), written, err, r.Truncated())
		}
	}
	if f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0); err == nil {
		if _, err := newWriter("runs/x", f, Header{}); !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("/dev/full: %v", err)
		}
	}
}

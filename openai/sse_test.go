package openai_test

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/openai"
)

func zero() time.Duration { return 0 }

// event is an event to compare: its data copied, its time left out.
type event struct{ Name, Data string }

func readAll(r *openai.Reader) ([]event, error) {
	var events []event
	for {
		e, err := r.Next()
		if err != nil {
			return events, err
		}
		events = append(events, event{e.Name, string(e.Data)})
	}
}

var streams = []struct {
	name, stream string
	want         []event
}{
	{"nothing", "", nil},
	{"plain", "data: a\n\ndata: b\n\n", []event{{"", "a"}, {"", "b"}}},
	{"CRLF", "data: a\r\n\r\ndata: b\r\n\r\n", []event{{"", "a"}, {"", "b"}}},
	{"CR", "data: a\r\rdata: b\r\r", []event{{"", "a"}, {"", "b"}}},
	{"mixed ends", "data: a\r\n\ndata: b\r\r\ndata: c\n\r\n\ndata: d\n\r", []event{{"", "a"}, {"", "b"}, {"", "c"}, {"", "d"}}},
	{"comments", ": ping\n\n:\ndata: a\n: in between\n\n", []event{{"", "a"}}},
	{"several data lines", "data: a\ndata:\ndata:  b\n\n", []event{{"", "a\n\n b"}}},
	{"no space", "data:a\n\n", []event{{"", "a"}}},
	{"colons in the data", "data: a: b\n\n", []event{{"", "a: b"}}},
	{"empty data", "data\n\ndata:\n\n", []event{{"", ""}, {"", ""}}},
	{"other fields", "id: 1\nretry: 5\ndatas: x\ndata: a\n\nid: 2\n\n", []event{{"", "a"}}},
	{"names", "event: error\ndata: a\n\nevent: error\n\ndata: b\n\n", []event{{"error", "a"}, {"", "b"}}},
	{"llama.cpp's error field", "data: a\n\nerror: {\"code\":500}\n\n", []event{{"", "a"}, {"error", `{"code":500}`}}},
	{"byte order mark", "\xef\xbb\xbfdata: a\n\n\xef\xbb\xbfdata: b\n\n", []event{{"", "a"}}},
	{"byte order mark alone", "\xef\xbb\xbfdata: a", []event{{"", "a"}}},
	{"not UTF-8", "data: \xff\xc3\x00\n\n", []event{{"", "\xff\xc3\x00"}}},
	{"no blank line at the end", "data: a\n\ndata: [DONE]\n", []event{{"", "a"}, {"", "[DONE]"}}},
	{"no line end at the end", "data: a\n\nevent: x\ndata: [DONE]", []event{{"", "a"}, {"x", "[DONE]"}}},
	{"not server-sent events", "<html>\n\n{\"a\": 1}\n", nil},
	{"large", "data: " + strings.Repeat("x", 100_000) + "\n\ndata: a\n\n", []event{{"", strings.Repeat("x", 100_000)}, {"", "a"}}},
}

func TestReader(t *testing.T) {
	for _, test := range streams {
		t.Run(test.name, func(t *testing.T) {
			for name, source := range map[string]io.Reader{
				"whole":           strings.NewReader(test.stream),
				"byte by byte":    iotest.OneByteReader(strings.NewReader(test.stream)),
				"halves":          iotest.HalfReader(strings.NewReader(test.stream)),
				"error with data": iotest.DataErrReader(strings.NewReader(test.stream)),
			} {
				got, err := readAll(openai.NewReader(source, zero, 0))
				if !errors.Is(err, io.EOF) {
					t.Errorf("%s: %v, want io.EOF", name, err)
				}
				if diff := cmp.Diff(test.want, got); diff != "" {
					t.Errorf("%s: events (-want +got):\n%s", name, diff)
				}
			}
		})
	}
}

// pieces reads at most one piece of the stream at a time.
type pieces struct {
	stream []byte
	cuts   func() int
}

func (p *pieces) Read(b []byte) (int, error) {
	if len(p.stream) == 0 {
		return 0, io.EOF
	}
	n := copy(b, p.stream[:min(p.cuts(), len(p.stream))])
	p.stream = p.stream[n:]
	return n, nil
}

// Every cut of every two streams into two reads gives the same events.
func TestReaderCutAnywhere(t *testing.T) {
	for _, test := range streams {
		if len(test.stream) > 1000 {
			continue
		}
		for cut := 1; cut < len(test.stream); cut++ {
			first := true
			source := &pieces{[]byte(test.stream), func() int {
				if first {
					first = false
					return cut
				}
				return len(test.stream)
			}}
			got, _ := readAll(openai.NewReader(source, zero, 0))
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Fatalf("%s, cut at %d: events (-want +got):\n%s", test.name, cut, diff)
			}
		}
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 300 {
		var stream bytes.Buffer
		var want []event
		for range 5 {
			test := streams[1+random.IntN(12)] // these end in a blank line
			stream.WriteString(test.stream)
			want = append(want, test.want...)
		}
		source := &pieces{stream.Bytes(), func() int { return 1 + random.IntN(30) }}
		got, _ := readAll(openai.NewReader(source, zero, 0))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Fatalf("%q: events (-want +got):\n%s", stream.String(), diff)
		}
	}
}

func TestReaderLimit(t *testing.T) {
	const limit = 10_000
	line := func(n int) string { return "data:" + strings.Repeat("x", n-5) + "\n" }
	for _, test := range []struct {
		name, stream string
		events       int
		tooLarge     bool
	}{
		{"at the limit", line(limit) + "\n", 1, false},
		{"over it", line(limit+1) + "\n", 0, true},
		{"at it in two lines", line(limit/2) + line(limit/2) + "\n", 1, false},
		{"over it in two lines", line(limit/2) + line(limit/2+1) + "\n", 0, true},
		{"small ones first", "data: a\n\ndata: b\n\n" + line(limit+1), 2, true},
		{"a line without end", strings.Repeat("x", 100*limit), 0, true},
		{"a comment without end", ":" + strings.Repeat("x", 100*limit), 0, true},
		{"many comments", strings.Repeat(": ping\n", limit), 0, false},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, size := range []int{1, 7, 4096, 1 << 20} {
				source := &pieces{[]byte(test.stream), func() int { return size }}
				r := openai.NewReader(source, zero, limit)
				events, err := readAll(r)
				if errors.Is(err, openai.ErrEventTooLarge) != test.tooLarge {
					t.Errorf("%d bytes a read: %v", size, err)
				}
				if len(events) != test.events {
					t.Errorf("%d bytes a read: %d events, want %d", size, len(events), test.events)
				}
				if read := len(test.stream) - len(source.stream); test.tooLarge && read > limit+limit/2 {
					t.Errorf("%d bytes a read: read %d bytes for a limit of %d", size, read, limit)
				}
				if _, again := r.Next(); !errors.Is(again, err) {
					t.Errorf("%d bytes a read: then %v, want %v again", size, again, err)
				}
			}
		})
	}
}

// A broken stream gives the events that were whole, then the error.
func TestReaderError(t *testing.T) {
	broken := errors.New("connection reset")
	for _, source := range []io.Reader{
		io.MultiReader(strings.NewReader("data: a\n\ndata: b\n\ndata: cut"), iotest.ErrReader(broken)),
		iotest.DataErrReader(io.MultiReader(strings.NewReader("data: a\n\ndata: b\n\ndata: cut"), iotest.ErrReader(broken))),
	} {
		r := openai.NewReader(source, zero, 0)
		got, err := readAll(r)
		if diff := cmp.Diff([]event{{"", "a"}, {"", "b"}}, got); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
		if !errors.Is(err, broken) {
			t.Errorf("error %v, want %v", err, broken)
		}
	}
	r := openai.NewReader(emptyReader{}, zero, 0)
	if _, err := r.Next(); !errors.Is(err, io.ErrNoProgress) {
		t.Errorf("a reader that returns nothing: %v, want %v", err, io.ErrNoProgress)
	}
}

type emptyReader struct{}

func (emptyReader) Read([]byte) (int, error) { return 0, nil }

// An event's time is that of the read that completed it.
func TestReaderTimes(t *testing.T) {
	reads := []string{"data: a\n\ndata: b\n\nda", "ta: c\n", "\ndata: d\n\n", "data: e"}
	var clock time.Duration
	source := readFunc(func(p []byte) (int, error) {
		if len(reads) == 0 {
			return 0, io.EOF
		}
		n := copy(p, reads[0])
		reads = reads[1:]
		return n, nil
	})
	r := openai.NewReader(source, func() time.Duration { clock++; return clock }, 0)
	want := map[string]time.Duration{"a": 1, "b": 1, "c": 3, "d": 3, "e": 5}
	for range want {
		e, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		if e.At != want[string(e.Data)] {
			t.Errorf("event %s at %d, want %d", e.Data, e.At, want[string(e.Data)])
		}
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

func TestReaderAllocatesNothing(t *testing.T) {
	source := readFunc(func(p []byte) (int, error) { return copy(p, "event: x\ndata: abc\ndata: def\n\n"), nil })
	r := openai.NewReader(source, zero, 0)
	if _, err := r.Next(); err != nil {
		t.Fatal(err)
	}
	if n := testing.AllocsPerRun(1000, func() { r.Next() }); n != 0 {
		t.Errorf("%v allocations per event", n)
	}
}

func TestWriter(t *testing.T) {
	var out bytes.Buffer
	flushes := 0
	w := openai.NewWriter(&out, func() error { flushes++; return nil })
	for _, err := range []error{w.Event([]byte(`{"a":1}`)), w.Comment("ping"), w.Event([]byte("b\nc")), w.Event(nil), w.Done()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	const want = "data: {\"a\":1}\n\n: ping\n\ndata: b\ndata: c\n\ndata: \n\ndata: [DONE]\n\n"
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Errorf("stream (-want +got):\n%s", diff)
	}
	if flushes != 5 {
		t.Errorf("%d flushes, want 5", flushes)
	}
	got, _ := readAll(openai.NewReader(&out, zero, 0))
	if diff := cmp.Diff([]event{{"", `{"a":1}`}, {"", "b\nc"}, {"", ""}, {"", "[DONE]"}}, got); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
}

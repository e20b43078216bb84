package history

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
)

const headerLine = `{"record":"run","format":1}` + "\n"

// sampleFile is a history in several zstd blocks.
func sampleFile(t testing.TB) []byte {
	t.Helper()
	var file buffer
	w, err := newWriter("memory", &file, Header{Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	mustWrite(t, w, sample()...)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return file.Bytes()
}

// A file that ends anywhere gives the whole records before that, and says so.
func TestTruncatedAnywhere(t *testing.T) {
	file, want := sampleFile(t), sample()
	last := 0
	for size := range len(file) {
		r, err := NewReader(bytes.NewReader(file[:size]))
		if err != nil {
			if last > 0 || !strings.Contains(err.Error(), "nothing was recorded") {
				t.Fatalf("%d of %d bytes: %v", size, len(file), err)
			}
			continue
		}
		got, err := readAll(t, r)
		if err != nil || !r.Truncated() {
			t.Fatalf("%d of %d bytes: error %v, truncated %t", size, len(file), err, r.Truncated())
		}
		if len(got) < last {
			t.Fatalf("%d of %d bytes: %d records, where fewer bytes gave %d", size, len(file), len(got), last)
		}
		last = len(got)
		if diff := cmp.Diff(want[:last], got, equal); diff != "" {
			t.Fatalf("%d of %d bytes (-want +got):\n%s", size, len(file), diff)
		}
	}
	if last != len(want) {
		t.Errorf("all but the last byte gives %d of %d records", last, len(want))
	}
}

// A line that was cut is no record, even in a frame that is whole.
func TestHalfLine(t *testing.T) {
	for _, tail := range []string{"{", `{"record":"op","id":2,"chunks":[]}`} {
		r, err := NewReader(bytes.NewReader(compress(t, headerLine+`{"record":"op","id":1}`+"\n"+tail)))
		if err != nil {
			t.Fatal(err)
		}
		got, err := readAll(t, r)
		if err != nil || !r.Truncated() || len(got) != 1 {
			t.Errorf("%s: %d records, error %v, truncated %t", tail, len(got), err, r.Truncated())
		}
	}
}

// Any wrong byte is noticed, or changes nothing.
func TestDamagedAnywhere(t *testing.T) {
	file, want := sampleFile(t), sample()
	silent := 0
	for i := range file {
		for _, flip := range []byte{1, 0x10, 0xff} {
			damaged := bytes.Clone(file)
			damaged[i] ^= flip
			r, err := NewReader(bytes.NewReader(damaged))
			if err != nil {
				continue
			}
			got, err := readAll(t, r)
			if err == nil && !r.Truncated() {
				silent++
				if diff := cmp.Diff(want, got, equal); diff != "" {
					t.Errorf("byte %d ^ %#x goes unnoticed (-want +got):\n%s", i, flip, diff)
				}
			}
		}
	}
	if silent > 6 { // The frame's header has bits that don't matter here.
		t.Errorf("%d of %d changes have no effect", silent, 3*len(file))
	}
}

// Damage in the middle isn't taken for the end of a killed writer's file.
func TestDamagedMiddle(t *testing.T) {
	var file buffer
	w, err := newWriter("memory", &file, Header{})
	if err != nil {
		t.Fatal(err)
	}
	var size [3]int // after each op
	var want []entry
	for i := range size {
		want = append(want, entry{Op: &Op{ID: int64(i), Request: streamOp(rand.New(rand.NewPCG(1, uint64(i))), 1, 0).Request}})
		mustWrite(t, w, want[i])
		size[i] = file.Len()
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	const blockHeader = 3
	for i := size[0] + blockHeader; i < size[1]; i++ {
		for _, flip := range []byte{1, 0x80} {
			damaged := bytes.Clone(file.Bytes())
			damaged[i] ^= flip
			r, err := NewReader(bytes.NewReader(damaged))
			if err != nil {
				t.Fatal(err)
			}
			got, err := readAll(t, r)
			if err == nil && !r.Truncated() && cmp.Equal(got, want, equal) {
				continue // a bit of the block that doesn't count
			}
			if err == nil || r.Truncated() || !strings.Contains(err.Error(), "read history: record ") || !strings.Contains(err.Error(), " uncompressed: ") {
				t.Fatalf("byte %d ^ %#x: %d records, truncated %t, error %v", i, flip, len(got), r.Truncated(), err)
			}
		}
	}
}

func TestOpenErrors(t *testing.T) {
	dir := t.TempDir()
	for _, tc := range []struct{ name, file, want string }{
		{"missing", "", "no such file"},
		{"empty", "-", "it ends before its first record: nothing was recorded"},
		{"text", `{"record":"run"}`, "not a zstd file"},
		{"other", string(compress(t, "hello\n")), "record 1, byte 0 uncompressed: not a header: invalid character"},
		{"no header", string(compress(t, `{"record":"op"}`+"\n")), `not a history: its first record must be {"record":"run"`},
		{"newer", string(compress(t, `{"record":"run","format":2,"started":17}`+"\n")), "format 2, and this program knows formats up to 1: read it with a newer culprit"},
		{"bad field", string(compress(t, `{"record":"run","format":1,"cores":"two"}`+"\n")), "not a header: json: cannot unmarshal string"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			path := filepath.Join(dir, tc.name)
			if tc.file != "" {
				if err := os.WriteFile(path, []byte(strings.TrimPrefix(tc.file, "-")), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			_, err := Open(path)
			if err == nil || !strings.Contains(err.Error(), tc.want) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want %s: ... %s", err, path, tc.want)
			}
		})
	}
}

func TestBrokenRecords(t *testing.T) {
	for _, tc := range []struct{ name, line, want string }{
		{"blank", ``, `no '{' where one is due`},
		{"word", `op`, `no '{' where one is due`},
		{"empty object", `{}`, `its first key must be "record"`},
		{"another key first", `{"id":1,"record":"op"}`, `its first key must be "record"`},
		{"kind not a string", `{"record":7}`, `not a string`},
		{"second header", headerLine[:len(headerLine)-1], `a second header: these are two histories in one file`},
		{"cut", `{"record":"op","id":1`, `not JSON`},
		{"trailing comma", `{"record":"op","id":1,}`, `not JSON`},
		{"no comma", `{"record":"op" "id":1}`, `not JSON`},
		{"trailing bracket", `{"record":"op","id":1}}`, `not JSON`},
		{"unknown kind", `{"record":"later","x":[}`, `"x": not JSON`},
		{"too deep", `{"record":"op","x":` + strings.Repeat("[", 500), `"x": not JSON`},
		{"text for id", `{"record":"op","id":"1"}`, `"id": not an integer`},
		{"fraction for id", `{"record":"op","id":1.0}`, `"id": not an integer`},
		{"huge id", `{"record":"op","id":1000000000000000000000}`, `"id": too large`},
		{"huge time", `{"record":"op","sent_us":99999999999999999}`, `"sent_us": too large`},
		{"number for bool", `{"record":"op","stream":1}`, `"stream": neither true nor false`},
		{"list for text", `{"record":"op","kind":[]}`, `"kind": not a string`},
		{"bad expectation", `{"record":"op","expect":{"copy":1}}`, `"expect": json: cannot unmarshal`},
		{"chunks not a list", `{"record":"op","chunks":{}}`, `"chunks": no '[' where one is due`},
		{"chunk not an object", `{"record":"op","chunks":[{},7]}`, `"chunks": chunk 1: no '{' where one is due`},
		{"bad base 64", `{"record":"op","chunks":[{"base64":"?"}]}`, `"chunks": chunk 0: "base64": illegal base64`},
		{"null for text", `{"record":"op","chunks":[{"text":null}]}`, `"chunks": chunk 0: "text": not a string`},
		{"bool for value", `{"record":"event","values":{"a":true}}`, `"values": "a": not a number`},
		{"text for value", `{"record":"event","values":{"a":"1"}}`, `"values": "a": not a number`},
	} {
		t.Run(tc.name, func(t *testing.T) {
			good := `{"record":"op","id":1}` + "\n"
			r, err := NewReader(bytes.NewReader(compress(t, headerLine+good+tc.line+"\n"+good)))
			if err != nil {
				t.Fatal(err)
			}
			got, err := readAll(t, r)
			where := fmt.Sprintf("read history: record 3, byte %d uncompressed: not a record: ", len(headerLine+good))
			if err == nil || !strings.HasPrefix(err.Error(), where) || !strings.Contains(err.Error(), tc.want) {
				t.Errorf("got  %v\nwant %s%s", err, where, tc.want)
			}
			if len(got) != 1 || r.Truncated() {
				t.Errorf("%d records before it, truncated %t", len(got), r.Truncated())
			}
		})
	}
}

// A later version may add fields and kinds of records; people and other
// programs write JSON in their own way.
func TestForeignLines(t *testing.T) {
	r, err := NewReader(bytes.NewReader(compress(t, `{"record":"run","format":1,"model":"m","later":{"a":[1]}}
{"record":"later","x":{"y":[null]}}
 { "record" : "op" , "later" : [ { } , [ ] ] , "id" : 5 , "error" : null , "kind" : "caf\u00e9\u0020\ud83d\ude00\ud800\udbff\udc00\udc00" , "chunks" : [ { "at_us" : -7 , "later" : 0 , "data" : { "a" : 1 } } , {"text":"\u0041\/\b\f\n\r\t"} ] }
{"record":"event","kind":"metrics","values":{"a\"\u0062":1e3,"n":"NaN","p":"+Inf","m":"-Inf"}}
`)))
	if err != nil {
		t.Fatal(err)
	}
	got, err := readAll(t, r)
	if err != nil {
		t.Fatal(err)
	}
	want := []entry{
		{Op: &Op{
			ID: 5, Kind: "café 😀\ufffd\U0010fc00\ufffd",
			Chunks: []Chunk{{-7 * time.Microsecond, []byte(`{ "a" : 1 }`)}, {0, []byte("A/\b\f\n\r\t")}},
		}},
		{Event: &Event{Kind: Metrics, Values: map[string]float64{"a\"b": 1000, "n": math.NaN(), "p": math.Inf(1), "m": math.Inf(-1)}}},
	}
	if diff := cmp.Diff(want, got, equal); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Nothing of a record shows in the next one.
func TestRecordsAreIndependent(t *testing.T) {
	full := sample()[1]
	full.Op.Error = "e"
	var file buffer
	w, err := newWriter("memory", &file, Header{})
	if err != nil {
		t.Fatal(err)
	}
	want := []entry{
		full,
		{Op: &Op{}},
		{Op: &Op{Chunks: []Chunk{{}}}},
		{Event: &Event{Kind: Tick, Name: "n", Text: "t", Values: map[string]float64{"a": 1}}},
		{Event: &Event{}},
	}
	mustWrite(t, w, want...)
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
	if diff := cmp.Diff(want, got, equal); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Appending to what a record points to doesn't reach into other fields.
func TestSlicesEndWhereTheyEnd(t *testing.T) {
	var d decoder
	rec, err := d.decode([]byte(`{"record":"op","request":{"a":1},"chunks":[{"data":{"b":2}},{"text":"\n\n\n"},{"base64":"AAAA"},{"data":3}]}`))
	if err != nil {
		t.Fatal(err)
	}
	long := strings.Repeat("x", 30)
	_ = append(rec.Op.Request, long...)
	for _, c := range rec.Op.Chunks {
		_ = append(c.Data, long...)
	}
	var got []string
	for _, c := range rec.Op.Chunks {
		got = append(got, string(c.Data))
	}
	if diff := cmp.Diff([]string{`{"b":2}`, "\n\n\n", "\x00\x00\x00", "3"}, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Lines longer than the buffer, shorter, and one past the limit.
func TestLongLines(t *testing.T) {
	var text strings.Builder
	text.WriteString(headerLine)
	var want []entry
	for i, size := range []int{10, readSize, 3 * readSize, 5, readSize / 2, readSize / 2, readSize/2 + 1, 8 * readSize, 1} {
		e := entry{Op: &Op{ID: int64(i), Error: strings.Repeat(string(rune('a'+i)), size)}}
		want = append(want, e)
		line, err := appendOp(nil, e.Op)
		if err != nil {
			t.Fatal(err)
		}
		text.Write(line)
	}
	before := text.Len()
	text.WriteString(strings.Repeat("x", 20*readSize))
	file := compress(t, text.String())
	for name, in := range map[string]io.Reader{
		"whole":      bytes.NewReader(file),
		"one byte":   iotest.OneByteReader(bytes.NewReader(file)),
		"early EOF":  iotest.DataErrReader(bytes.NewReader(file)),
		"half reads": iotest.HalfReader(bytes.NewReader(file)),
	} {
		r, err := NewReader(in)
		if err != nil {
			t.Fatal(err)
		}
		r.limit = 10 * readSize
		got, err := readAll(t, r)
		if diff := cmp.Diff(want, got, equal); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if s := fmt.Sprintf("record %d, byte %d uncompressed: a line of more than %d bytes", len(want)+2, before, r.limit); err == nil || !strings.Contains(err.Error(), s) {
			t.Errorf("%s: error %v\nwant ... %s", name, err, s)
		}
		if len(r.buf) > r.limit+readSize {
			t.Errorf("%s: a buffer of %d bytes with a limit of %d", name, len(r.buf), r.limit)
		}
	}
}

func TestInputFails(t *testing.T) {
	file := sampleFile(t)
	broken := errors.New("the cable is out")
	r, err := NewReader(io.MultiReader(bytes.NewReader(file[:len(file)/2]), iotest.ErrReader(broken)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := readAll(t, r); !errors.Is(err, broken) || r.Truncated() {
		t.Errorf("error %v, truncated %t", err, r.Truncated())
	}
}

func TestScanner(t *testing.T) {
	for _, s := range []string{
		`0`, `-0`, `-`, `01`, `1.`, `.5`, `1.5`, `1e`, `1e+`, `1e+5`, `1E-5`, `1.e5`, `+1`, `tru`, `true`, `truee`, `nul`, `null`, `false`,
		`"`, `""`, `"a`, `"\`, `"\"`, `"\x"`, `"\u00e"`, `"\u00eG"`, `"\u00Eg"`, `"\u00eF"`, "\"\x1f\"", "\"\x7f\"", "\"aaaaaaaa\x01aaaa\"", "\"aaaaaaaaa\xffa\"", "\"aaaa\x1faaaaaaaaaaaa\"", "\"\xff\x7f\x80 !#[]aaaa\"",
		`{`, `{}`, `{ }`, `{"a"}`, `{"a":}`, `{"a":1}`, `{"a":1,}`, `{,}`, `{"a":1 "b":2}`, `{a:1}`, `{"a":1,"b":[2,{"c":3}]}`,
		`[`, `[]`, `[ ]`, `[1,]`, `[,1]`, `[1 2]`, `[1,2]`, `]`, `}`, ``, ` `,
	} {
		want := -1
		if json.Valid([]byte(s)) {
			want = len(s)
		}
		got := valueEnd([]byte(s), 0, maxDepth)
		if (got == len(s)) != (want == len(s)) {
			t.Errorf("%q: value ends at %d, want %d", s, got, want)
		}
	}
}

package history

import (
	"bytes"
	"encoding/json"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// FuzzReader reads any bytes as a file.
func FuzzReader(f *testing.F) {
	f.Add(sampleFile(f))
	f.Add(compress(f, headerLine))
	f.Fuzz(func(t *testing.T, file []byte) {
		r, err := NewReader(bytes.NewReader(file))
		if err != nil {
			return
		}
		r.limit = 1 << 20
		readAll(t, r)
	})
}

// FuzzRecord reads any line as a record, and what it has read again.
func FuzzRecord(f *testing.F) {
	for line := range strings.Lines(uncompress(f, sampleFile(f))) {
		f.Add([]byte(strings.TrimSuffix(line, "\n")))
	}
	f.Add([]byte(`{"record":"event","values":{"a\"\u0062":1e3,"n":"NaN","p":"+Inf"}}`))
	f.Add([]byte(`{"record":"op","chunks":[{"text":"\ud83d\ude00\u0041\/"},{"data":null}],"expect":{"copy":["a"]}}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		if bytes.IndexByte(line, '\n') >= 0 {
			return
		}
		isJSON := json.Valid(line)
		var d decoder
		rec, err := d.decode(bytes.Clone(line))
		if err != nil {
			return
		}
		if !isJSON {
			t.Fatalf("%q is not JSON, and was read as a record", line)
		}
		if rec == (Record{}) {
			return
		}
		first := keep(t, rec)
		var again []byte
		if first.Op != nil {
			if again, err = appendOp(nil, first.Op); err != nil {
				return // a request that isn't UTF-8
			}
		} else {
			again = appendEvent(nil, first.Event)
		}
		rec, err = d.decode(bytes.TrimSuffix(bytes.Clone(again), []byte("\n")))
		if err != nil {
			t.Fatalf("%q was written as %q: %v", line, again, err)
		}
		second := keep(t, rec)
		// Text that isn't UTF-8 has been replaced once, data never.
		if first.Op != nil {
			for i, c := range first.Op.Chunks {
				if o := second.Op.Chunks[i]; o.At != c.At || !bytes.Equal(o.Data, c.Data) {
					t.Fatalf("chunk %d was %q and is %q", i, c.Data, o.Data)
				}
			}
		}
	})
}

// FuzzScanner agrees with encoding/json on what is one value.
func FuzzScanner(f *testing.F) {
	for _, s := range []string{`{"a":[1,-2.5e+3,"b\u00e9\\",true,null]}`, `[[],{},""]`, `"aaaaaaaaaaaaaaaa\n"`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		got := valueEnd(b, 0, 1<<20) == len(b) && len(b) > 0
		want := json.Valid(b) && !isSpace(b[0]) && !isSpace(b[len(b)-1])
		if got != want {
			t.Errorf("%q: %t, encoding/json says %t", b, got, want)
		}
	})
}

// FuzzData gives back exactly what came, and keeps the line whole.
func FuzzData(f *testing.F) {
	for _, s := range []string{`{"a":1}`, `[DONE]`, "\xff", "\"\xe9\"", "{\n}", "", " 1", `"\ud800"`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		line, err := appendOp(nil, &Op{Chunks: []Chunk{{0, data}, {1000, []byte("7")}}})
		if err != nil {
			t.Fatal(err)
		}
		if bytes.IndexByte(line, '\n') != len(line)-1 || !json.Valid(line) {
			t.Fatalf("%q is stored as %q", data, line)
		}
		var d decoder
		rec, err := d.decode(line[:len(line)-1])
		if err != nil {
			t.Fatal(err)
		}
		if c := rec.Op.Chunks; len(c) != 2 || !bytes.Equal(c[0].Data, data) || c[1].At != 1000 || string(c[1].Data) != "7" {
			t.Fatalf("%q is read as %q", data, c)
		}
	})
}

// A small file can hold an endless line: reading it stops at the limit.
func TestBomb(t *testing.T) {
	var file bytes.Buffer
	w, err := zstd.NewWriter(&file)
	if err != nil {
		t.Fatal(err)
	}
	w.Write([]byte(headerLine))
	zeros := make([]byte, 1<<20)
	for range 40 {
		w.Write(zeros)
	}
	w.Close()
	r, err := NewReader(&file)
	if err != nil {
		t.Fatal(err)
	}
	r.limit = 1 << 20
	if _, err := readAll(t, r); err == nil || !strings.Contains(err.Error(), "a line of more than 1048576 bytes") {
		t.Errorf("error %v", err)
	}
	if len(r.buf) > 1<<20+readSize {
		t.Errorf("a buffer of %d bytes", len(r.buf))
	}
}

package oracle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/klauspost/compress/zstd"

	"github.com/culprit-project/culprit/history"
)

// openHistory opens a history of testdata. These are plain JSON lines, to be
// read by people: a history as it is in a run directory, not compressed.
func openHistory(t testing.TB, name string) *history.Reader {
	t.Helper()
	lines, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return readHistory(t, lines)
}

func readHistory(t testing.TB, lines []byte) *history.Reader {
	t.Helper()
	e, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	r, err := history.NewReader(bytes.NewReader(e.EncodeAll(lines, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

// TestHistories judges each history of testdata by the oracle that its name
// begins with. A line says itself what its op is to be found: "is" names the
// class, none means that nothing is wrong; "why" is for readers.
func TestHistories(t *testing.T) {
	for _, oracle := range Registry {
		name := oracle.Name
		for _, kind := range []string{"good", "bad"} {
			file := name + "." + kind + ".jsonl"
			t.Run(file, func(t *testing.T) {
				want := labels(t, file)
				got := map[int64]Class{}
				for id := range want {
					got[id] = ""
				}
				j := judgementOf(t, openHistory(t, file), []Oracle{oracle})
				for i := range j.rec.rows {
					w := &j.rec.rows[i]
					for class := range Classes {
						if w.violations.has(class) {
							got[w.id] += Classes[class].Class
						}
					}
					// What is compared with earlier ops begins without a trial.
					compares := oracle.Name == Poison.Name || oracle.Name == Greedy.Name || oracle.Name == Path.Name
					if kind == "bad" && w.trials == 0 && !compares {
						t.Errorf("op %d was no trial", w.id)
					}
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("classes by op (-want +got):\n%s", diff)
				}
				for _, c := range j.crashes {
					t.Errorf("crash: %+v", c)
				}
			})
		}
	}
}

// labels reads what the lines say of themselves.
func labels(t *testing.T, file string) map[int64]Class {
	t.Helper()
	lines, err := os.ReadFile(filepath.Join("testdata", file))
	if err != nil {
		t.Fatal(err)
	}
	out := map[int64]Class{}
	for line := range strings.Lines(string(lines)) {
		var op struct {
			Record string
			ID     int64
			Is     Class
		}
		if err := json.Unmarshal([]byte(line), &op); err != nil {
			t.Fatalf("%s: %v", file, err)
		}
		if op.Record == "op" {
			out[op.ID] = op.Is
		}
	}
	if len(out) == 0 {
		t.Fatalf("%s has no op", file)
	}
	return out
}

// judgementOf runs the oracles over a history without making a verdict.
func judgementOf(t *testing.T, r *history.Reader, oracles []Oracle) *judgement {
	t.Helper()
	j := newJudgement(r.Header(), oracles)
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if record.Op != nil {
			j.op(record.Op)
		} else {
			j.event(record.Event)
		}
	}
	j.finish()
	return j
}

// TestNotes shows what reports say about a violation.
func TestNotes(t *testing.T) {
	tests := []struct {
		file  string
		class Class
		op    int64
		want  Example
	}{
		{"toolcall.bad.jsonl", WrongArgument, 23, Example{
			Want: `read_file {"path":"src/a.go"}`, Got: `read_file {"path": "src/b.go"}`,
			Note: `argument "path": "src/b.go" instead of "src/a.go"`,
		}},
		{"toolcall.bad.jsonl", SchemaMismatch, 20, Example{
			Want: `read_file {"path":"src/a.go"}`, Got: `read_file {"path": 7}`,
			Note: `at '/path': got number, want string`,
		}},
		{"canary.bad.jsonl", ForeignCanary, 1, Example{
			Want: "at most its own canary, " + history.Canary(testKey, 0, false),
			Got:  "My token is " + history.Canary(testKey, 1, false) + ".",
			Note: fmt.Sprintf("%q in content is the canary of session 1", history.Canary(testKey, 1, false)),
		}},
	}
	for _, test := range tests {
		t.Run(fmt.Sprint(test.class, test.op), func(t *testing.T) {
			j := judgementOf(t, openHistory(t, test.file), []Oracle{ToolCall, Canary})
			var got Example
			for _, e := range j.rec.classes[j.rec.byClass[test.class]].worst[mainArm] {
				if e.Op == test.op {
					got = Example{Want: e.Want, Got: e.Got, Note: e.Note}
				}
			}
			if diff := cmp.Diff(test.want, got, cmp.AllowUnexported(Example{})); diff != "" {
				t.Errorf("example (-want +got):\n%s", diff)
			}
		})
	}
}

// testKey is the run key of the histories in testdata.
var testKey = []byte{0x00, 0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88, 0x99, 0xaa, 0xbb, 0xcc, 0xdd, 0xee, 0xff}

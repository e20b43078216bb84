package probe

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestShippedPacks(t *testing.T) {
	packs := Shipped()
	if len(packs) != 2 {
		t.Fatalf("%d packs, want sglang and vllm", len(packs))
	}
	for _, p := range packs {
		if p.Control.Probe == "" || p.Target.Version == "" {
			t.Errorf("%s has no control, or no version", p.Name)
		}
		for _, q := range p.Probes {
			if len(q.SHA256) == 0 {
				t.Errorf("%s: %s has no hash", p.Name, q.ID)
			}
		}
	}
}

func TestParsePack(t *testing.T) {
	const good = "probe_pack: 1\nname: x\nprobes:\n  - id: a\n    file: m.py\n    function: f\n"
	for _, tt := range []struct{ name, text, want string }{
		{"good", good, ""},
		{"version", strings.Replace(good, "1", "2", 1), `pack p.yaml:1: probe_pack: version 2, want 1. Nothing was attached.`},
		{"unknown key", good + "    ancor: x\n", `pack p.yaml:7: YAML: unknown field "ancor". Nothing was attached.`},
		{"twice", good + "  - id: a\n    file: m.py\n    function: g\n", `pack p.yaml:7: id: "a" is there twice. Nothing was attached.`},
		{"no control", good + "control: {probe: z}\n", `pack p.yaml:1: control: no probe "z". Nothing was attached.`},
		{"path", strings.Replace(good, "m.py", "/m.py", 1), `pack p.yaml:4: file: "/m.py": want the end of a path, as package/module.py. Nothing was attached.`},
		{"hash", good + "    sha256: abc\n", `pack p.yaml:4: sha256: "abc": want 64 hexadecimal digits. Nothing was attached.`},
		{"expires", good + "expires: 25h\n", `pack p.yaml:1: expires: "25h": want a time such as 30m, at most 24h. Nothing was attached.`},
		{"no probes", "probe_pack: 1\nname: x\n", `pack p.yaml:1: probes: there are none. Nothing was attached.`},
		{"no YAML", "probe_pack: [", `pack p.yaml:1: YAML:`},
		{"empty", "", `pack p.yaml:1: probe_pack: version 0, want 1. Nothing was attached.`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := ParsePack("p.yaml", []byte(tt.text))
			if tt.want == "" {
				if err != nil || p.Probes[0].Function != "f" {
					t.Fatalf("got %+v, %v", p, err)
				}
				return
			}
			if err == nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("got  %v\nwant %s", err, tt.want)
			}
		})
	}
}

// What anybody may write doesn't become code in a server.
func TestOnlyOurs(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "p.yaml")
	if err := os.WriteFile(path, []byte("probe_pack: 1\nname: x\nprobes: [{id: a, file: m.py, function: f}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	p, err := ReadPack(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{path, dir} {
		if err := os.Chmod(name, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := ReadPack(path); err == nil || !strings.Contains(err.Error(), "may be written by everybody") {
		t.Errorf("pack: %v", err)
	}
	if _, err := NewDir(dir, p); err == nil || !strings.Contains(err.Error(), "may be written by everybody") {
		t.Errorf("directory: %v", err)
	}
}

func TestWriteHashes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "p.yaml")
	const text = "probe_pack: 1\nname: x # a comment\nprobes:\n  - id: a\n    file: m.py\n    function: f\n  - file: n.py\n    sha256: 1111111111111111111111111111111111111111111111111111111111111111\n    id: b\n    function: g\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	a, b := strings.Repeat("a", 64), strings.Repeat("b", 64)
	if err := WriteHashes(path, map[string]string{"m.py": a, "n.py": b}); err != nil {
		t.Fatal(err)
	}
	p, err := ReadPack(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]Hashes{{a}, {b}}, []Hashes{p.Probes[0].SHA256, p.Probes[1].SHA256}); diff != "" {
		t.Error(diff)
	}
	if got, _ := os.ReadFile(path); !strings.Contains(string(got), "# a comment") {
		t.Errorf("the comment is gone:\n%s", got)
	}
}

// counterFile is a sound file of two slots.
func counterFile() []byte {
	b := make([]byte, fileSize)
	copy(b, "CULPRIT1")
	little := binary.LittleEndian
	for i, v := range []uint32{1, headerSize, fileSize, flagGIL | flagLaunched} {
		little.PutUint32(b[8+4*i:], v)
	}
	set := func(i int, v uint64) { little.PutUint64(b[8*i:], v) }
	for i, v := range map[int]uint64{
		wordPID: 4711, wordStartTicks: 99, wordParent: 1, wordState: uint64(Armed), wordUsed: 2, 16: headerSize, 17: metaAt, 18: stringsAt,
		wordStringsUsed: 5, wordTestWant: 1270, wordTestGot: 1270, wordPicoseconds: 145_000, headerSize / 8: 7, headerSize/8 + 1: 3,
	} {
		set(i, v)
	}
	for i, k := range []kind{kindHit, kindLabel} {
		m := b[metaAt+metaSize*i:]
		m[2], m[3] = byte(k), 1
		little.PutUint32(m[8:], uint32(5*i))
	}
	copy(b[stringsAt:], `["x"]`)
	return b
}

func TestDecodeCounters(t *testing.T) {
	c, err := decodeCounters(counterFile())
	if err != nil {
		t.Fatal(err)
	}
	want := []slot{{0, kindHit, "", 7}, {0, kindLabel, `["x"]`, 3}}
	if diff := cmp.Diff(want, c.Slots, cmp.AllowUnexported(slot{})); diff != "" {
		t.Error(diff)
	}
	if c.PID != 4711 || c.State != Armed || c.NSPerHit != 145 || c.TestWant != c.TestGot {
		t.Errorf("got %+v", c)
	}
}

func TestDecodeDamaged(t *testing.T) {
	for _, tt := range []struct {
		name string
		at   int
		put  string
		want string
	}{
		{"magic", 0, "X", "no counter file"},
		{"layout", 8, "\x02", "layout 2"},
		{"slots", 8 * wordUsed, "\xff\xff", "damaged"},
		{"text", 8 * wordStringsUsed, "\xff\xff", "damaged"},
		{"text of a slot", metaAt + 4, "\xff\xff\xff\xff", "points outside"},
		{"slot that isn't there", metaAt + 3, "\x00", "points outside"},
		{"process", 8 * wordPID, "\x00\x00", "damaged"},
		{"killed in a change", 8 * wordGeneration, "\x01", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := counterFile()
			copy(b[tt.at:], tt.put)
			_, err := decodeCounters(b)
			if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// A file that is cut while it is mapped is an error, not the end of the reader.
func TestReadCutFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "1-1.ctr")
	if err := os.WriteFile(path, counterFile(), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	_, err = mapped(f, func(b []byte) (*counters, error) {
		if err := os.Truncate(path, 0); err != nil {
			t.Fatal(err)
		}
		return decodeCounters(b)
	})
	if err == nil || !strings.Contains(err.Error(), "it was cut") {
		t.Errorf("got %v", err)
	}
	if _, err := readCounters(path); err == nil || !strings.Contains(err.Error(), "has 0 bytes") {
		t.Errorf("got %v", err)
	}
}

func FuzzDecodeCounters(f *testing.F) {
	good := counterFile()
	f.Add(0, []byte{}, 0, []byte{})
	f.Add(8*wordUsed, []byte{0, 8}, metaAt, []byte{0, 0, 3, 1, 255, 255, 255, 255})
	f.Add(8*wordStringsUsed, []byte{1}, stringsAt, []byte(`["\u0000`))
	f.Fuzz(func(t *testing.T, at int, put []byte, at2 int, put2 []byte) {
		b := append([]byte{}, good...)
		for _, change := range []struct {
			at  int
			put []byte
		}{{at, put}, {at2, put2}} {
			copy(b[uint(change.at)%fileSize:], change.put)
		}
		c, err := decodeOnce(b)
		if err != nil {
			return
		}
		if len(c.Slots) > slotCount {
			t.Errorf("%d slots", len(c.Slots))
		}
		p := &Pack{Version: 1, Name: "x", Probes: []Probe{{ID: "a", File: "m.py", Function: "f", Labels: Labels{{"l", "x"}}}}}
		r := &Reading{Pack: p, At: time.Now()}
		r.Processes = []Process{r.process(filepath.Join(t.TempDir(), "none.ctr"), c)}
		Results(nil, r)
		Loads(r, &Reading{Pack: p, At: r.At.Add(time.Second), Processes: r.Processes})
	})
}

func TestResults(t *testing.T) {
	armed := func(id string, entered, hits uint64) Placed {
		return Placed{ID: id, State: "armed", Counts: Counts{Entered: entered, Hits: hits}}
	}
	refused := Placed{ID: "a", State: "refused", Code: "E_HASH", Message: "differs"}
	for _, tt := range []struct {
		name      string
		processes []Process
		want      Finding
		says      string
	}{
		{"hit", []Process{{PID: 1, SelfTest: true, Probes: []Placed{armed("a", 9, 5), armed("c", 0, 0)}}}, Live, "5 hits"},
		{"not taken", []Process{{PID: 1, SelfTest: true, Probes: []Placed{armed("a", 300, 0), armed("c", 0, 0)}}}, NotTaken, "entered 300 times, so at most 1% of calls"},
		{"not called", []Process{{PID: 1, SelfTest: true, Probes: []Placed{armed("a", 0, 0), armed("c", 0, 1)}}}, NotCalled, "in 1 of 1 processes, in which the control moved"},
		{"no control moved", []Process{{PID: 1, SelfTest: true, Probes: []Placed{armed("a", 0, 0), armed("c", 0, 0)}}}, NoEvidence, "zero, and nothing shows that this process was at work"},
		{"the control moved in another process", []Process{
			{PID: 1, SelfTest: true, Probes: []Placed{armed("a", 0, 0), armed("c", 0, 0)}},
			{PID: 2, SelfTest: true, Probes: []Placed{{ID: "a", State: "waiting"}, armed("c", 0, 9)}},
		}, NoEvidence, "zero, and nothing shows that this process was at work"},
		{"self-test failed", []Process{{PID: 1, Probes: []Placed{armed("a", 9, 5), armed("c", 0, 9)}}}, Invalid, "the probe doesn't work there: its self-test failed"},
		{"refused", []Process{{PID: 1, SelfTest: true, Probes: []Placed{refused, armed("c", 0, 9)}}}, Unplaced, "differs"},
		{"partial", []Process{
			{PID: 1, SelfTest: true, Probes: []Placed{refused, armed("c", 0, 9)}},
			{PID: 2, SelfTest: true, Probes: []Placed{armed("a", 0, 0), armed("c", 0, 9)}},
		}, NotCalled, "PARTIAL 1/2: in 1 of 2 processes, in which the control moved"},
		{"not imported", []Process{{PID: 1, SelfTest: true, Probes: []Placed{{ID: "a", State: "waiting"}, armed("c", 0, 9)}}}, NotImported, "no process that has the agent has imported the file"},
		{"captured", []Process{{PID: 1, SelfTest: true, Probes: []Placed{
			{ID: "a", State: "armed", Counts: Counts{Entered: 4, Hits: 4, Captured: 4}}, armed("c", 0, 9),
		}}}, CaptureOnly, "all 4 hits happened while a CUDA graph was being captured; replays do not run Python. Count graph_replays instead."},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &Pack{Name: "x", Control: Control{Probe: "c"}, Probes: []Probe{{ID: "a"}, {ID: "c"}}}
			got := Results(nil, &Reading{Pack: p, Processes: tt.processes})[0]
			if got.Finding != tt.want || got.Says != tt.says {
				t.Errorf("got %s (%s), want %s (%s)", got.Finding, got.Says, tt.want, tt.says)
			}
		})
	}
}

// A control that moved before the window says nothing of the window.
func TestResultsSince(t *testing.T) {
	p := &Pack{Name: "x", Control: Control{Probe: "c"}, Probes: []Probe{{ID: "a"}, {ID: "c"}}}
	reading := func(control uint64) *Reading {
		return &Reading{Pack: p, Processes: []Process{{PID: 1, SelfTest: true, Probes: []Placed{
			{ID: "a", State: "armed"}, {ID: "c", State: "armed", Counts: Counts{Hits: control}},
		}}}}
	}
	if got := Results(reading(5), reading(5))[0].Finding; got != NoEvidence {
		t.Errorf("got %s, want %s", got, NoEvidence)
	}
	if got := Results(reading(5), reading(6))[0].Finding; got != NotCalled {
		t.Errorf("got %s, want %s", got, NotCalled)
	}
}

func TestValues(t *testing.T) {
	p := &Pack{Name: "x", Control: Control{Probe: "c"}, Probes: []Probe{
		{ID: "a", As: "both", Expect: Must, Labels: Labels{{"l", "x"}}}, {ID: "b", As: "both", Expect: Never}, {ID: "c"}, {ID: "w", When: "y"},
	}}
	reading := func(control uint64, a, b Placed) *Reading {
		a.ID, a.State, b.ID, b.State = "a", "armed", "b", "armed"
		return &Reading{Pack: p, Processes: []Process{{PID: 1, SelfTest: true, Probes: []Placed{
			a, b, {ID: "c", State: "armed", Counts: Counts{Hits: control}}, {ID: "w", State: "armed", Counts: Counts{Hits: 9, Matches: 4}},
		}}}}
	}
	first := reading(1, Placed{Counts: Counts{Hits: 2}, Labels: map[string]int64{`l="1"`: 2}}, Placed{})
	for _, tt := range []struct {
		name  string
		after *Reading
		want  map[string]float64
	}{
		{"nothing moved", first, map[string]float64{"must:a": 0}},
		{
			"the control moved", reading(2, Placed{Counts: Counts{Hits: 2}, Labels: map[string]int64{`l="1"`: 2}}, Placed{}),
			map[string]float64{"must:a": 0, "never:b": 0, "a": 0, "b": 0, "both": 0, "c": 1, "w": 0},
		},
		{
			"all moved", reading(2, Placed{Counts: Counts{Hits: 5}, Labels: map[string]int64{`l="1"`: 5}}, Placed{Counts: Counts{Hits: 1}}),
			map[string]float64{"must:a": 3, "never:b": 1, "a": 3, "b": 1, "both": 4, `both{l="1"}`: 3, "c": 1, "w": 0},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, values(first, tt.after)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

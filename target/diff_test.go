package target

import (
	"encoding/json"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestFlags(t *testing.T) {
	tests := []struct {
		name, args, program string
		flags               map[string]string
	}{
		{"module", "python3 -m sglang.launch_server --port 1 --x --lora a=b c=d --y=2 -tp 4", "python3 -m sglang.launch_server", map[string]string{"--port": "1", "--x": "true", "--lora": "a=b c=d", "--y": "2", "-tp": "4"}},
		{"command and model", "vllm serve m/x --a -1 --b", "vllm serve m/x", map[string]string{"--a": "-1", "--b": "true"}},
		{"twice", "s --a 1 --a=2", "s", map[string]string{"--a": "1 2"}},
		{"nothing", "", "", map[string]string{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			program, flags := Flags(strings.Fields(tt.args))
			if diff := cmp.Diff(tt.flags, flags); diff != "" || strings.Join(program, " ") != tt.program {
				t.Errorf("program %q, %s", program, diff)
			}
		})
	}
}

func diffed() *Attestation {
	return &Attestation{
		Engine: "sglang", Version: "0.5",
		Processes: []ProcessFacts{
			{Name: "decode", Main: true, PID: 10, StartTicks: 5, Started: time.Unix(1, 0), Args: []string{"s", "--port", "1", "--page-size", "64"}, Env: map[string]string{"X": "1", "PWD": "/a"}},
			{Name: "decode", PID: 11, Parent: 10},
		},
		Endpoints:     []Endpoint{{Path: "/server_info", Body: json.RawMessage(`{"page_size":64,"list":[1,2],"internal_states":[{"last_gen_throughput":1.5,"kv":"fp8","page_size":64,"chunk":8}],"chunk":8,"launch_command":"--port 1","started":"a"}`)}},
		Files:         []File{{Process: "decode", Path: "/p", Size: 3, SHA256: strings.Repeat("a", 64)}},
		Packages:      []Package{{Process: "decode", Name: "sglang", Dir: "/d", SHA256: strings.Repeat("b", 64), Files: map[string]string{"x.py": "1", "y.py": "2"}}},
		Distributions: map[string]string{"torch": "2.8"},
		Libraries:     []File{{Process: "decode", Path: "/lib", Size: 9, MTime: 1}},
		Hosts:         []HostFacts{{Kernel: "k", GPUs: []GPU{{Index: "0", Name: "H", Driver: "570", UUID: "u"}}}},
	}
}

func TestDiff(t *testing.T) {
	b := diffed()
	b.Processes[0].Name, b.Processes[1].Name = "other", "other"
	b.Files[0].Process, b.Packages[0].Process, b.Libraries[0].Process = "other", "other", "other"
	if d := Diff(diffed(), b); len(d) != 0 {
		t.Errorf("a server's name alone makes a difference: %+v", d)
	}
	b.Processes[0].Args = []string{"s", "--port", "2", "--page-size", "32", "--new"}
	b.Processes[0].Env = map[string]string{"X": "2", "PWD": "/b", "Y": "1"}
	b.Processes[0].PID = 20
	b.Endpoints[0].Body = json.RawMessage(`{"page_size":32,"list":[1,3],"internal_states":[{"last_gen_throughput":2.5,"kv":"bf16","page_size":32,"chunk":4}],"chunk":8,"launch_command":"--port 2","started":"b"}`)
	b.Files[0].SHA256 = strings.Repeat("c", 64)
	b.Packages[0].Files["x.py"], b.Packages[0].SHA256 = "9", strings.Repeat("d", 64)
	b.Distributions["torch"] = "2.9"
	b.Libraries[0].MTime = 2
	b.Hosts[0].GPUs[0].Driver, b.Hosts[0].GPUs[0].UUID = "580", "v"
	var got []string
	for _, d := range Diff(diffed(), b) {
		got = append(got, d.Kind.String()+" "+d.Name+": "+d.A+" / "+d.B)
	}
	want := []string{
		"flag --new: (none) / true",
		"flag --page-size: 64 / 32",
		"setting server_info.internal_states[0].chunk: 8 / 4",
		"setting server_info.internal_states[0].kv: fp8 / bf16",
		"setting server_info.list: [1,2] / [1,3]",
		"setting server_info.page_size: 64 / 32",
		"env X: 1 / 2",
		"env Y: (none) / 1",
		"file /p: sha256 aaaaaaaaaaaa, 3 bytes / sha256 cccccccccccc, 3 bytes",
		"file sglang (source): sha256 bbbbbbbbbbbb, 2 files / sha256 dddddddddddd, 2 files",
		"file sglang/x.py: 1 / 9",
		"version torch: 2.8 / 2.9",
		"library /lib: 9 bytes of time 1, not hashed / 9 bytes of time 2, not hashed",
		"hardware driver: 570 / 580",
		"noise --port: 1 / 2",
		"noise GPU 0 id: u / v",
		"noise PWD: /a / /b",
		"noise process id: 10 / 20",
		"noise server_info.internal_states[0].last_gen_throughput: 1.5 / 2.5",
		"noise server_info.launch_command: --port 1 / --port 2",
		"noise server_info.started: a / b",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// What one side doesn't answer at all is one difference.
func TestDiffOfSilence(t *testing.T) {
	b := diffed()
	b.Endpoints = nil
	want := []Difference{{SettingDiff, "", "server_info", "9 settings", Absent}}
	if diff := cmp.Diff(want, Diff(diffed(), b)); diff != "" {
		t.Error(diff)
	}
}

func TestChanged(t *testing.T) {
	tests := []struct {
		name   string
		change func(*Attestation)
		want   []string
	}{
		{"nothing", func(*Attestation) {}, nil},
		{"it worked", func(a *Attestation) {
			a.Endpoints[0].Body = json.RawMessage(`{"page_size":64,"list":[1,2],"internal_states":[{"last_gen_throughput":9,"kv":"fp8","page_size":64,"chunk":8}],"chunk":8,"launch_command":"--port 1","started":"a"}`)
			a.Processes = a.Processes[:1]
			a.Libraries = append(a.Libraries, File{Process: "decode", Path: "/late"})
		}, nil},
		{"a library", func(a *Attestation) { a.Libraries[0].MTime++ }, []string{"/lib"}},
		{"another process", func(a *Attestation) { a.Processes[0].PID = 12 }, []string{"restarted"}},
		{"another with its process id", func(a *Attestation) { a.Processes[0].StartTicks++ }, []string{"restarted"}},
		{"it ended", func(a *Attestation) { a.Processes = nil }, []string{"restarted", "--page-size", "command", "X"}},
		{"it says that it started anew", func(a *Attestation) {
			a.Processes = diffed().Processes
			a.Endpoints[0].Body = json.RawMessage(`{"page_size":64,"list":[1,2],"internal_states":[{"last_gen_throughput":1.5,"kv":"fp8","page_size":64,"chunk":8}],"chunk":8,"launch_command":"--port 1","started":"b"}`)
		}, []string{"restarted"}},
		{"a setting", func(a *Attestation) {
			a.Endpoints[0].Body = json.RawMessage(`{"page_size":32,"list":[1,2],"internal_states":[{"last_gen_throughput":1.5,"kv":"fp8","page_size":64,"chunk":8}],"chunk":8,"launch_command":"--port 1","started":"a"}`)
		}, []string{"server_info.page_size"}},
		{"a file", func(a *Attestation) { a.Packages[0].Files["x.py"] = "7" }, []string{"sglang/x.py"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			after := diffed()
			tt.change(after)
			var got []string
			for _, d := range Changed(diffed(), after) {
				got = append(got, d.Name)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// The order of what was read makes no difference, and a difference is the same
// from both sides.
func TestDiffIsCanonical(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	b := diffed()
	b.Distributions["x"], b.Distributions["y"] = "1", "2"
	want := Diff(diffed(), b)
	for range 20 {
		r.Shuffle(len(b.Processes), func(i, j int) { b.Processes[i], b.Processes[j] = b.Processes[j], b.Processes[i] })
		if diff := cmp.Diff(want, Diff(diffed(), b)); diff != "" {
			t.Fatal(diff)
		}
	}
	for i, d := range Diff(b, diffed()) {
		if d.A != want[i].B || d.B != want[i].A {
			t.Errorf("%+v isn't %+v turned round", d, want[i])
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("7 (a) b) R 1 7 7 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 4711 1\n"), []byte(`{"a":[1,{"b":null}],"api_key":"x"}`))
	f.Add([]byte("A=1\x00B\x00=x\x00A=2"), []byte("7f0-7f1 r-xp 0 08:01 1   /usr/lib/libc.so.6\n"))
	f.Fuzz(func(t *testing.T, a, b []byte) {
		parseStat(string(a))
		parseEnv(a)
		parseMaps(b)
		parseGPUs(a)
		parseCPU(string(a))
		Flags(parseNul(a))
		once, err := redactJSON(b)
		if err != nil {
			return
		}
		twice, err := redactJSON(once)
		if err != nil || string(once) != string(twice) {
			t.Errorf("%s isn't canonical: %s, %v", once, twice, err)
		}
		d := &Attestation{Endpoints: []Endpoint{{Path: "/x", Body: once}}}
		if diffs := Diff(d, d); len(diffs) != 0 {
			t.Errorf("it differs from itself: %+v", diffs)
		}
	})
}

package probe

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

// pythons are the interpreters to test with: those of CULPRIT_PYTHONS, or the
// machine's own.
func pythons(t *testing.T) []string {
	t.Helper()
	if list := os.Getenv("CULPRIT_PYTHONS"); list != "" {
		return filepath.SplitList(list)
	}
	out, err := exec.Command("python3", "-c", "import sys; print(sys.version_info >= (3, 11))").Output()
	if err != nil {
		t.Skip("no python3 here")
	}
	if strings.TrimSpace(string(out)) != "True" {
		t.Skip("python3 is older than 3.11")
	}
	return []string{"python3"}
}

// each runs a test with every interpreter.
func each(t *testing.T, test func(t *testing.T, python string)) {
	for _, python := range pythons(t) {
		t.Run(filepath.Base(filepath.Dir(filepath.Dir(python))), func(t *testing.T) { test(t, python) })
	}
}

const packHead = "probe_pack: 1\nname: test\ncontrol: {probe: inner}\nprobes:\n"

// dirFor makes a probe directory of a pack.
func dirFor(t *testing.T, probes string) string {
	t.Helper()
	p, err := ParsePack("test.yaml", []byte(packHead+probes))
	if err != nil {
		t.Fatal(err)
	}
	dir, err := NewDir(t.TempDir(), p)
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// probed runs a script of testdata with probes and returns what it prints.
func probed(t *testing.T, python, dir, pythonPath string, args ...string) (string, error) {
	t.Helper()
	cmd := exec.Command(python, args...)
	cmd.Dir = "testdata"
	cmd.Env = append(cmd.Environ(), "PYTHONDONTWRITEBYTECODE=1")
	for name, value := range Environment(dir, pythonPath) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	var complaint strings.Builder
	cmd.Stderr = &complaint
	out, err := cmd.Output()
	if complaint.Len() > 0 {
		t.Logf("%s", complaint.String())
	}
	return string(out), err
}

func read(t *testing.T, dir string) *Reading {
	t.Helper()
	r, err := Read(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range r.Problems {
		t.Error(p)
	}
	for i := range r.Processes {
		for _, note := range r.Processes[i].Notes {
			t.Error(note)
		}
	}
	return r
}

const shapes = `
  - {id: inner, file: served.py, function: outer.<locals>.inner, anchor: return b}
  - {id: free, file: served.py, function: Pool.free, anchor: "if n is None:", when: "n % self.page_size != 0", labels: {parity: "n % 2", secret: "self.__secret"}}
  - {id: elif, file: served.py, function: Pool.free, anchor: "elif n % 3:"}
  - {id: super, file: served.py, function: Pool.size}
  - {id: property, file: served.py, function: Pool.pages}
  - {id: static, file: served.py, function: Pool.static}
  - {id: class, file: served.py, function: Pool.of}
  - {id: hidden, file: served.py, function: Pool.hidden}
  - {id: cached, file: served.py, function: Pool.cached}
  - {id: after, file: served.py, function: Pool.twice, anchor: "y = 1", context: {after: "return y"}}
  - {id: unbound, file: served.py, function: Pool.unbound, anchor: return n, when: "later > 0"}
  - {id: finally, file: served.py, function: Pool.last, anchor: self.seen = n}
  - {id: generator, file: served.py, function: generator, anchor: yield i}
  - {id: coroutine, file: served.py, function: coroutine}
  - {id: truthy, file: served.py, function: Pool.static, anchor: return n, when: "n % 3"}
  - {id: wrong_type, file: served.py, function: Pool.static, anchor: return n, labels: {x: "str"}}
`

// Every shape of function is counted exactly, and has its own code object back
// afterwards: the same object.
func TestShapes(t *testing.T) {
	each(t, func(t *testing.T, python string) {
		dir := dirFor(t, shapes)
		hidden := t.TempDir() // a sitecustomize that ours hides
		if err := os.WriteFile(filepath.Join(hidden, "sitecustomize.py"), []byte("import os\nos.environ['CHAINED'] = 'yes'\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := probed(t, python, dir, hidden, "shapes.py")
		if err != nil {
			t.Fatal(err)
		}
		r := read(t, dir)
		if len(r.Processes) != 1 || !r.Processes[0].SelfTest || r.Processes[0].State != "detached" {
			t.Fatalf("processes: %+v", r.Processes)
		}
		got := map[string]Counts{}
		for _, p := range r.Processes[0].Probes {
			if p.State == "refused" {
				t.Errorf("%s: %s %s", p.ID, p.Code, p.Message)
			}
			got[p.ID] = p.Counts
		}
		want := map[string]Counts{
			"inner": {Entered: 100, Hits: 100}, "free": {Entered: 101, Hits: 101, Matches: 99}, "elif": {Entered: 101, Hits: 50},
			"super": {Hits: 100}, "property": {Hits: 100}, "static": {Hits: 100}, "class": {Hits: 100}, "hidden": {Hits: 100}, "cached": {Hits: 100},
			"after": {Entered: 100, Hits: 99}, "unbound": {Entered: 100, Hits: 100, Matches: 49, Errors: 51}, "finally": {Entered: 100, Hits: 100},
			"generator": {Entered: 100, Hits: 300}, "coroutine": {Hits: 100}, "truthy": {Entered: 100, Hits: 100}, "wrong_type": {Entered: 100, Hits: 100, TypeErrors: 100},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
		labels := map[string]int64{`parity="0",secret="s"`: 48, `parity="1",secret="s"`: 51}
		if diff := cmp.Diff(labels, r.Processes[0].Probes[1].Labels); diff != "" {
			t.Error(diff)
		}
		var left struct {
			Line          int      `json:"line"`
			Restored      []bool   `json:"restored"`
			Path          []string `json:"path"`
			Finders       []string `json:"finders"`
			SiteCustomize string   `json:"sitecustomize"`
		}
		if err := json.Unmarshal([]byte(out), &left); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		for i, ok := range left.Restored {
			if !ok {
				t.Errorf("function %d has not its own code object", i)
			}
		}
		if left.Line != 36 || len(left.Path)+len(left.Finders) > 0 || left.SiteCustomize != "yes" {
			t.Errorf("left in the process: %+v", left)
		}
	})
}

// What can't be placed is refused in words, and the server goes on.
func TestRefusals(t *testing.T) {
	const probes = `
  - {id: inner, file: served.py, function: outer.<locals>.inner}
  - {id: none, file: served.py, function: Pool.free, anchor: "if n is Nona:"}
  - {id: many, file: served.py, function: Pool.twice, anchor: "if n:"}
  - {id: orelse, file: served.py, function: Pool.free, anchor: "else:"}
  - {id: hash, file: served.py, sha256: 1111111111111111111111111111111111111111111111111111111111111111, function: Pool.free}
  - {id: function, file: served.py, function: Pol.free}
  - {id: dead, file: served.py, function: dead, anchor: n = 2}
  - {id: name, file: served.py, function: Pool.free, when: "m > 0"}
  - {id: closure, file: served.py, function: outer.<locals>.inner, when: "other > 0"}
  - {id: item, file: served.py, function: Pool.free, when: "n.item() > 0"}
  - {id: lambda, file: served.py, function: Pool.free, when: "(lambda: n)()"}
  - {id: elsewhere, file: nowhere.py, function: f}
  - {id: free, file: served.py, function: Pool.free, anchor: "return x"}
`
	want := map[string]string{
		"none":     `anchor "if n is Nona:" matches no statement in Pool.free (served.py:25-37). Nearest: "if n is None:" line 27.`,
		"many":     `anchor "if n:" matches 2 statements in Pool.twice (lines 63, 66). Add context.before/after, or choose another line.`,
		"orelse":   `"else:" is not the first line of a statement; anchor the first line inside the branch.`,
		"hash":     `served.py differs from the source this probe was written against (deployed sha256 `,
		"function": `no function Pol.free in served.py; similar: Pool.free`,
		"dead":     `anchor "n = 2" of dead is optimised away by this interpreter (a constant condition, -O, or code after a return). 0 hits would mean nothing.`,
		"name":     `"m" is neither a local of Pool.free nor a global of the module.`,
		"closure":  `expression uses "other" of the enclosing function, which outer.<locals>.inner does not capture; the probe would change outer.<locals>.inner's closure.`,
		"item":     `.item() is not allowed in a probe: it waits for the GPU and changes the timing under study. Allowed: `,
		"lambda":   `a call() is not allowed in a probe. Allowed: `,
	}
	each(t, func(t *testing.T, python string) {
		dir := dirFor(t, probes)
		if _, err := probed(t, python, dir, "", "-c", "import served\nfor n in range(5): served.Pool().free(n)\nserved.outer()[0](1)"); err != nil {
			t.Fatal(err)
		}
		r := read(t, dir)
		for _, p := range r.Processes[0].Probes {
			if text, ok := want[p.ID]; ok != (p.State == "refused") || !strings.HasPrefix(p.Message, text) {
				t.Errorf("%s is %s\n%s %s, want\n%s", p.ID, p.State, p.Code, p.Message, text)
			}
		}
		if got := r.Processes[0].Probes[len(r.Pack.Probes)-1].Counts.Hits; got != 5 {
			t.Errorf("the sound probe beside them has %d hits, want 5", got)
		}
		results := Results(nil, r)
		if got := results[r.Pack.index("elsewhere")].Finding; got != NotImported {
			t.Errorf("elsewhere: %s", got)
		}
		// The same words outside the server.
		p, err := ParsePack("test.yaml", []byte(packHead+probes))
		if err != nil {
			t.Fatal(err)
		}
		lints, err := Python{Command: python}.Lint(t.Context(), p, "testdata", true)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lints {
			if text := want[l.ID]; l.ID != "elsewhere" && (!strings.HasPrefix(l.Message, text) || text == "" && l.Code != "") {
				t.Errorf("lint: %s: %s %s, want\n%s", l.ID, l.Code, l.Message, text)
			}
		}
	})
}

// Counts are exact under fork, spawn, a worker pool, threads and asyncio, and
// can be read after a crash.
func TestServer(t *testing.T) {
	const probes = `
  - {id: inner, file: served.py, function: outer.<locals>.inner, anchor: return b}
  - {id: free, file: served.py, function: Pool.free, anchor: "if n is None:", when: "n % 4 == 0", labels: {rest: "n % 3"}}
  - {id: coroutine, file: served.py, function: coroutine}
  - {id: never, file: served.py, function: Pool.free, anchor: raise ValueError(n)}
`
	const calls = 7*5000 + 4*1000 + 500 + 50
	each(t, func(t *testing.T, python string) {
		for _, how := range []string{"end", "abort"} {
			t.Run(how, func(t *testing.T) {
				t.Parallel()
				dir := dirFor(t, probes)
				_, err := probed(t, python, dir, "", "server.py", how)
				if (how == "abort") != (err != nil) {
					t.Fatalf("server: %v", err)
				}
				r := read(t, dir)
				got := map[string]uint64{}
				for _, result := range Results(nil, r) {
					got[result.ID] = result.Count()
					if result.ID == "never" && result.Finding != NotTaken {
						t.Errorf("never: %s", result.Finding)
					}
				}
				want := map[string]uint64{"inner": calls, "free": 7*1250 + 4*250 + 125 + 13, "coroutine": 1000, "never": 0}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("in %d processes: %s", len(r.Processes), diff)
				}
			})
		}
	})
}

// The main file isn't imported, and has probes all the same.
func TestMainFile(t *testing.T) {
	each(t, func(t *testing.T, python string) {
		dir := dirFor(t, "  - {id: inner, file: main.py, function: f}\n")
		script := filepath.Join(t.TempDir(), "main.py")
		text := "import time\ndef f(): pass\nuntil = time.time() + 20\nimport sys\nwhile f.__code__.co_consts == f.__code__.co_consts and not any(type(c).__name__ == 'Hold' for c in f.__code__.co_consts) and time.time() < until: time.sleep(.01)\nfor i in range(10): f()\n"
		if err := os.WriteFile(script, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := probed(t, python, dir, "", script); err != nil {
			t.Fatal(err)
		}
		if got := Results(nil, read(t, dir))[0]; got.Counts.Hits != 10 {
			t.Errorf("got %+v", got)
		}
	})
}

// running starts a script that goes on until its standard input ends, as a
// grandchild: see Attach.
func running(t *testing.T, python, script string, env ...string) (pid int) {
	t.Helper()
	cmd := exec.Command("sh", "-c", `"$0" -c "$1" & echo $!; wait`, python, script)
	cmd.Dir = "testdata"
	cmd.Env = append(append(cmd.Environ(), "PYTHONDONTWRITEBYTECODE=1"), env...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	d := json.NewDecoder(out)
	if err := d.Decode(&pid); err != nil {
		t.Fatal(err)
	}
	var ready string
	if err := d.Decode(&ready); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if p, err := os.FindProcess(pid); err == nil {
			p.Kill()
		}
		cmd.Wait()
	})
	return pid
}

const loop = `
import json, sys, threading, time, served
stop = threading.Event()
threading.Thread(target=served.forever, args=(stop,), daemon=True).start()
def calls():
    pool, (inner, _) = served.Pool(), served.outer()
    n = 0
    while True:
        pool.free(n); inner(n)
        n += 1
        time.sleep(0.0005)
for _ in range(2):
    threading.Thread(target=calls, daemon=True).start()
print('"ready"', flush=True)
`

func TestAttach(t *testing.T) {
	const probes = `
  - {id: inner, file: served.py, function: outer.<locals>.inner}
  - {id: free, file: served.py, function: Pool.free, anchor: "if n is None:", when: "n >= 0"}
  - {id: forever, file: served.py, function: forever, anchor: n += 1, reach: running}
`
	each(t, func(t *testing.T, python string) {
		for _, main := range []struct{ name, code string }{
			{"main thread in Python", "while True: time.sleep(0.001)"},
			{"main thread waits for a lock", "threading.Event().wait()"},
			{"all is hidden from the garbage collector", "import gc; gc.freeze(); threading.Event().wait()"},
		} {
			t.Run(main.name, func(t *testing.T) {
				pid := running(t, python, loop+main.code)
				dir := dirFor(t, probes)
				if err := Attach(t.Context(), dir, pid); err != nil {
					if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code == "E_PTRACE" {
						t.Skip(err)
					}
					t.Fatal(err)
				}
				first := read(t, dir)
				waitFor(t, func() bool { return Results(first, read(t, dir))[1].Counts.Matches > 50 })
				results := Results(first, read(t, dir))
				if results[0].Finding != Live || results[1].Finding != Live {
					t.Errorf("got %+v", results[:2])
				}
				monitored := !strings.Contains(read(t, dir).Processes[0].Python, "3.11")
				switch f := results[2]; {
				case monitored && f.Finding != Live:
					t.Errorf("a loop that runs already isn't counted: %+v", f)
				case !monitored && (f.Finding != NotCalled || !strings.Contains(strings.Join(f.Warnings, ""), "is running now in thread")):
					t.Errorf("a loop that can't be counted is said to be so: %+v", f)
				}
				for _, twice := range []string{dir, dirFor(t, probes)} {
					want := fmt.Sprintf("PID %d already has pack test (run %s). Detach it first.", pid, filepath.Base(dir))
					if err := Attach(t.Context(), twice, pid); err == nil || err.Error() != want {
						t.Errorf("a second attach: %v, want %s", err, want)
					}
				}
				if n, err := DetachAll(t.Context(), read(t, dir)); n != 1 || err != nil {
					t.Fatalf("detached from %d: %v", n, err)
				}
				before := read(t, dir)
				time.Sleep(20 * time.Millisecond)
				if moved := Results(before, read(t, dir)); moved[0].Counts.Hits+moved[1].Counts.Hits+moved[2].Counts.Hits > 0 {
					t.Errorf("it counts after it was detached: %+v", moved)
				}
				again := dirFor(t, probes)
				if err := Attach(t.Context(), again, pid); err != nil {
					t.Fatalf("attach again: %v", err)
				}
				first = read(t, again)
				waitFor(t, func() bool { return Results(first, read(t, again))[0].Counts.Hits > 10 })
			})
		}
	})
}

func waitFor(t *testing.T, done func() bool) {
	t.Helper()
	for until := time.Now().Add(20 * time.Second); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(until) {
			t.Fatal("it takes too long")
		}
	}
}

func TestAttachRefusals(t *testing.T) {
	dir := dirFor(t, "  - {id: inner, file: served.py, function: f}\n")
	if err := Attach(t.Context(), dir, 1<<22+1); err == nil || err.Error() != "there is no process 4194305" {
		t.Errorf("got %v", err)
	}
	if err := Attach(t.Context(), dir, os.Getpid()); err == nil || !strings.Contains(err.Error(), "is no Python process") {
		t.Errorf("got %v", err)
	}
}

// A child that native code forked, and one without the environment, are told.
func TestUncounted(t *testing.T) {
	const script = `
import ctypes, os, subprocess, sys, time
child = ctypes.CDLL(None).fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={})
print('"ready"', flush=True)
print(child, other.pid, flush=True)
time.sleep(60)
`
	each(t, func(t *testing.T, python string) {
		dir := dirFor(t, "  - {id: inner, file: served.py, function: f}\n")
		var env []string
		for name, value := range Environment(dir, "") {
			env = append(env, name+"="+value)
		}
		pid := running(t, python, script, env...)
		pids := childrenOf(pid)
		t.Cleanup(func() {
			for _, pid := range pids {
				if p, err := os.FindProcess(pid); err == nil {
					p.Kill()
				}
			}
		})
		if len(pids) != 2 {
			t.Fatalf("children %v", pids)
		}
		r := read(t, dir)
		shared := r.Shared()
		if len(shared) != 1 || !strings.Contains(shared[0], fmt.Sprintf("shares the counter file of PID %d (forked by native code)", pid)) {
			t.Errorf("got %q", shared)
		}
		var without []string
		waitFor(t, func() bool { // it may not have become Python yet
			without = r.WithoutAgent(append(pids, pid))
			return len(without) == 2
		})
		if !strings.HasSuffix(without[0], "Covered: 1 of 3 Python processes.") {
			t.Errorf("got %q", without)
		}
	})
}

func childrenOf(parent int) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		var pid, of int
		var state string
		if _, err := fmt.Sscan(string(b[bytes.LastIndexByte(b, ')')+1:]), &state, &of); err == nil && of == parent {
			fmt.Sscan(string(b), &pid)
			pids = append(pids, pid)
		}
	}
	return pids
}

func TestBranches(t *testing.T) {
	each(t, func(t *testing.T, python string) {
		y := Python{Command: python}
		p, branches, err := y.BranchPack(t.Context(), "testdata/served.py", "served.py", "Pool.free")
		if err != nil {
			t.Fatal(err)
		}
		dir, err := NewDir(t.TempDir(), p)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := probed(t, python, dir, "", "-c", "import served\nfor n in range(12): served.Pool().free(n)"); err != nil {
			t.Fatal(err)
		}
		got := map[string]uint64{}
		for i, r := range Results(nil, read(t, dir)) {
			if name := "calls"; i > 0 {
				got[branches[i-1].Text] = r.Counts.Hits
			} else {
				got[name] = r.Counts.Hits
			}
		}
		want := map[string]uint64{
			"calls": 12, "if n is None:": 0, "else of if n is None:": 12, "if n % 2:": 6, "elif n % 3:": 4, "else of elif n % 3:": 2,
			"if n < 0:": 0, "else of if n < 0:": 12,
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

func TestFind(t *testing.T) {
	each(t, func(t *testing.T, python string) {
		y := Python{Command: python}
		places, p, err := y.Find(t.Context(), "y = 1", "testdata")
		if err != nil {
			t.Fatal(err)
		}
		if len(places) != 2 || len(p.Probes) != 2 || places[0].Function != "Pool.twice" {
			t.Fatalf("got %+v", places)
		}
		lints, err := y.Lint(t.Context(), p, "testdata", true)
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range lints {
			if l.Code != "" || l.Line != places[i].Line {
				t.Errorf("place %d can't be found again: %+v", i, l)
			}
		}
	})
}

// Each probe of the shipped packs is placed in the real source of the version
// that it says, from PyPI: make probe-packs.
func TestPacksAgainstSource(t *testing.T) {
	root := os.Getenv("CULPRIT_SOURCES")
	if root == "" {
		t.Skip("make probe-packs runs it")
	}
	for _, p := range Shipped() {
		infos, err := filepath.Glob(filepath.Join(root, p.Target.Package+"*-"+p.Target.Version+".dist-info"))
		if err != nil || len(infos) != 1 {
			t.Fatalf("%s: %d distributions of version %s under %s", p.Name, len(infos), p.Target.Version, root)
		}
		lints, err := Python{}.Lint(t.Context(), p, root, true)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range lints {
			if l.Code != "" {
				t.Errorf("%s: %s: %s %s", p.Name, l.ID, l.Code, l.Message)
			}
		}
		t.Logf("%s: %d probes checked against %s", p.Name, len(lints), filepath.Base(infos[0]))
	}
}

// More label values than are kept are counted as such, and hits while a CUDA
// graph is captured apart: replays don't run Python.
func TestOverflowAndCapture(t *testing.T) {
	const probes = `
  - {id: inner, file: served.py, function: Pool.static, labels: {n: n}, max_labels: 3}
  - {id: captured, file: served.py, function: Pool.of, capture: split}
`
	const script = `
import sys, types
torch = types.ModuleType("torch")
torch.cuda = types.SimpleNamespace(is_initialized=lambda: True, is_current_stream_capturing=lambda: capturing)
sys.modules["torch"] = torch
import served
capturing = True
for n in range(10): served.Pool.static(n), served.Pool.of(n)
capturing = len(sys.argv) > 1
for n in range(10): served.Pool.of(n)
`
	each(t, func(t *testing.T, python string) {
		for _, tt := range []struct {
			args []string
			want Counts
			is   Finding
		}{{nil, Counts{Hits: 20, Captured: 10}, Live}, {[]string{"all"}, Counts{Hits: 20, Captured: 20}, CaptureOnly}} {
			dir := dirFor(t, probes)
			if _, err := probed(t, python, dir, "", append([]string{"-c", script}, tt.args...)...); err != nil {
				t.Fatal(err)
			}
			results := Results(nil, read(t, dir))
			if diff := cmp.Diff(Counts{Hits: 10, Overflow: 7}, results[0].Counts); diff != "" || results[0].Labels[`n="other"`] != 7 || len(results[0].Labels) != 4 {
				t.Errorf("%v: %s", results[0].Labels, diff)
			}
			if want := `label n had more than 3 values; 7 hits are in "other".`; !slices.Equal(results[0].Warnings, []string{want}) {
				t.Errorf("got %q", results[0].Warnings)
			}
			if diff := cmp.Diff(tt.want, results[1].Counts); diff != "" || results[1].Finding != tt.is {
				t.Errorf("%s: %s", results[1].Finding, diff)
			}
		}
	})
}

// Where there is no memory for the counters, there are no probes: a page that
// can't be had would kill the server.
func TestFullMemory(t *testing.T) {
	full := t.TempDir()
	if err := exec.Command("mount", "-t", "tmpfs", "-o", "size=128k", "none", full).Run(); err != nil {
		t.Skip("a small file system can't be mounted here: ", err)
	}
	t.Cleanup(func() { exec.Command("umount", full).Run() })
	each(t, func(t *testing.T, python string) {
		from := dirFor(t, "  - {id: inner, file: served.py, function: Pool.static}\n")
		dir := filepath.Join(full, "probes")
		if err := os.CopyFS(dir, os.DirFS(from)); err != nil {
			t.Fatal(err)
		}
		defer os.RemoveAll(dir)
		out, err := probed(t, python, dir, "", "-c", "import served; served.Pool.static(1); print('served')")
		if err != nil || out != "served\n" {
			t.Fatalf("the server: %v: %s", err, out)
		}
		r, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Processes) != 0 || len(r.Problems) != 1 || !strings.HasPrefix(r.Problems[0], "cannot reserve 64 KiB in "+dir) {
			t.Errorf("got %q", r.Problems)
		}
	})
}

// What costs more than the pack allows is taken out.
func TestBudget(t *testing.T) {
	each(t, func(t *testing.T, python string) {
		pid := running(t, python, loop+"while True: time.sleep(0.001)")
		p, err := ParsePack("test.yaml", []byte("probe_pack: 1\nname: x\nbudget: {max_hits_per_s: 1}\nprobes: [{id: free, file: served.py, function: Pool.free}]\n"))
		if err != nil {
			t.Fatal(err)
		}
		dir, err := NewDir(t.TempDir(), p)
		if err != nil {
			t.Fatal(err)
		}
		if err := Attach(t.Context(), dir, pid); err != nil {
			if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code == "E_PTRACE" {
				t.Skip(err)
			}
			t.Fatal(err)
		}
		w := Watcher{Dir: dir, Every: shortestPoll}
		if _, err := w.Run(t.Context(), func(*Reading, *Reading) {}); err != nil {
			t.Fatal(err)
		}
		if !regexp.MustCompile(fmt.Sprintf(`^disarmed after \d+\.\d s: in PID %d \d+ hits/s × .* budget 1%% and 1 hits/s\.$`, pid)).MatchString(w.Stopped) {
			t.Errorf("got %q", w.Stopped)
		}
		if state := read(t, dir).Processes[0].State; state != "detached" {
			t.Errorf("it is %s", state)
		}
	})
}

// An engine that counts wrongly in a process places nothing there.
func TestSelfTest(t *testing.T) {
	each(t, func(t *testing.T, python string) {
		dir := dirFor(t, "  - {id: inner, file: served.py, function: Pool.static}\n")
		broken := strings.Replace(string(agentSource), "for i in range(TEST_HITS):", "for i in range(611):", 1)
		if err := os.WriteFile(filepath.Join(dir, agentFile), []byte(broken), 0o600); err != nil {
			t.Fatal(err)
		}
		out, err := probed(t, python, dir, "", "-c", "import served; print(served.Pool.static(1), any(type(c).__name__ == 'Hold' for c in served.Pool.static.__code__.co_consts))")
		if err != nil || out != "1 False\n" {
			t.Errorf("the server: %v: %s", err, out)
		}
		r, err := Read(dir)
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Problems) != 1 || !strings.Contains(r.Problems[0], "counted 611 of 640 hits. The probe does not work in this process; counts are not shown.") {
			t.Errorf("got %q", r.Problems)
		}
		if r.Processes[0].SelfTest || r.Processes[0].State != "refused" {
			t.Errorf("got %+v", r.Processes[0])
		}
	})
}

// A probe whose expressions raise again and again is taken out of use, in the
// process where they do; a forked child counts anew.
func TestDisarmed(t *testing.T) {
	const probes = `
  - {id: inner, file: served.py, function: Pool.static}
  - {id: raises, file: served.py, function: Pool.of, when: "n.size > 0"}
`
	const script = `
import os, sys, served
class Sized: size = 1
good = int(sys.argv[1])
for n in range(150): served.Pool.of(n)
for n in range(good): served.Pool.static(n), served.Pool.of(Sized())
if os.fork() == 0:
    for n in range(50): served.Pool.static(n), served.Pool.of(n), served.Pool.of(Sized())
    os._exit(0)
os.wait()
`
	each(t, func(t *testing.T, python string) {
		dir := dirFor(t, probes)
		if _, err := probed(t, python, dir, "", "-c", script, "30"); err != nil {
			t.Fatal(err)
		}
		r := read(t, dir)
		if len(r.Processes) != 2 {
			t.Fatalf("%d processes", len(r.Processes))
		}
		parent := r.Processes[slices.IndexFunc(r.Processes, func(p Process) bool { return p.Mode == "launched" })]
		const message = "after 101 errors of its expressions (AttributeError: 'int' object has no attribute 'size') in 101 hits: what it counted is not shown."
		if p := parent.Probes[1]; p.State != "disarmed" || !strings.HasSuffix(p.Message, message) {
			t.Errorf("in the parent: %+v", p)
		}
		both := Results(nil, r)[1]
		if diff := cmp.Diff(Counts{Hits: 100, Matches: 50, Errors: 50}, both.Counts); diff != "" || both.Finding != Live || !strings.HasPrefix(both.Says, "PARTIAL 1/2: ") {
			t.Errorf("%+v: %s", both, diff)
		}
		if got := strings.Join(both.Warnings, "\n"); !strings.Contains(got, message) {
			t.Errorf("it isn't said that the parent isn't in there: %q", got)
		}
		r.Processes = []Process{parent}
		if alone := Results(nil, r)[1]; alone.Finding != Disarmed || alone.Evident() || !strings.HasSuffix(alone.Says, message) {
			t.Errorf("the parent alone: %+v", alone)
		}
	})
}

// What the interpreter never runs, or torch.compile reads, takes no probe: its
// zero would mean nothing, and with a probe in it the server would fail. These
// modules have the parts of triton, numba and torch that matter here; make
// probe-compilers tries the real ones.
func TestCompilers(t *testing.T) {
	const probes = `
  - {id: inner, file: compiled.py, function: plain}
  - {id: kernel, file: compiled.py, function: kernel, anchor: y = x}
  - {id: tuned, file: compiled.py, function: tuned, anchor: y = x}
  - {id: numba, file: compiled.py, function: add}
  - {id: decorated, file: compiled.py, function: decorated}
  - {id: disabled, file: compiled.py, function: disabled}
  - {id: helper, file: compiled.py, function: helper, anchor: y = x}
  - {id: framed, file: compiled.py, function: framed, labels: {x: x}}
  - {id: method, file: compiled.py, function: Model.forward}
`
	want := map[string]string{
		"kernel":    "E_JIT kernel is a Triton kernel: the interpreter never runs its body. 0 hits would mean nothing.",
		"tuned":     "E_JIT tuned is a Triton kernel: the interpreter never runs its body. 0 hits would mean nothing.",
		"numba":     "E_JIT add is compiled by numba: the interpreter never runs its body. 0 hits would mean nothing.",
		"decorated": "E_DYNAMO decorated is compiled by torch.compile; a probe would break or recompile its graph. Probe its caller, or start the server without torch.compile.",
		"helper":    "E_DYNAMO helper is compiled by torch.compile; a probe would break or recompile its graph. Probe its caller, or start the server without torch.compile.",
		"framed":    "E_DYNAMO framed is compiled by torch.compile; a probe would break or recompile its graph. Probe its caller, or start the server without torch.compile.",
		"method":    "E_DYNAMO Model.forward is compiled by torch.compile; a probe would break or recompile its graph. Probe its caller, or start the server without torch.compile.",
	}
	each(t, func(t *testing.T, python string) {
		dir := dirFor(t, probes)
		out, err := probed(t, python, dir, "compilers", "-c", "import compiled; compiled.main()")
		if err != nil {
			t.Fatal(err)
		}
		// The compiler saw the functions as they are, and the hooks are gone.
		if want := "sound sound sound\nTrue True\n"; out != want {
			t.Errorf("got %q, want %q", out, want)
		}
		r := read(t, dir)
		for _, p := range r.Processes[0].Probes {
			if got := strings.TrimSpace(p.Code + " " + p.Message); got != want[p.ID] {
				t.Errorf("%s is %s: %s\nwant %s", p.ID, p.State, got, want[p.ID])
			}
		}
		for _, result := range Results(nil, r) {
			if wantHits := map[string]uint64{"inner": 1, "disabled": 1}[result.ID]; result.Counts.Hits != wantHits {
				t.Errorf("%s: %d hits, want %d", result.ID, result.Counts.Hits, wantHits)
			}
		}
	})
}

// A process from which the probes were taken out is as it was before they came
// in, but for the agent's module.
func TestDetachLeavesNothing(t *testing.T) {
	const probes = `
  - {id: inner, file: served.py, function: outer.<locals>.inner, labels: {a: a}}
  - {id: free, file: served.py, function: Pool.free, anchor: "if n is None:", when: "n >= 0"}
  - {id: forever, file: served.py, function: forever, anchor: n += 1, reach: running}
`
	each(t, func(t *testing.T, python string) {
		changes := filepath.Join(t.TempDir(), "changes.json")
		pid := running(t, python, "import sys; sys.argv = ['detached.py', '"+changes+"']; exec(compile(open('detached.py').read(), 'detached.py', 'exec'))")
		dir := dirFor(t, probes)
		if err := Attach(t.Context(), dir, pid); err != nil {
			if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code == "E_PTRACE" {
				t.Skip(err)
			}
			t.Fatal(err)
		}
		first := read(t, dir)
		waitFor(t, func() bool { return Results(first, read(t, dir))[1].Counts.Matches > 50 })
		if n, err := DetachAll(t.Context(), read(t, dir)); n != 1 || err != nil {
			t.Fatalf("detached from %d: %v", n, err)
		}
		var got map[string][2]any
		waitFor(t, func() bool {
			b, err := os.ReadFile(changes)
			return err == nil && json.Unmarshal(b, &got) == nil
		})
		modules := got["modules"]
		delete(got, "modules")
		if len(got) > 0 {
			t.Errorf("changed (before, after): %v", got)
		}
		before, _ := modules[0].([]any)
		after, _ := modules[1].([]any)
		if diff := cmp.Diff(append(before, "_culprit_state"), after, cmpopts.SortSlices(func(a, b any) bool { return fmt.Sprint(a) < fmt.Sprint(b) })); diff != "" {
			t.Errorf("modules: %s", diff)
		}
	})
}

// The same with the real ones: make probe-compilers.
func TestRealCompilers(t *testing.T) {
	python := os.Getenv("CULPRIT_COMPILERS")
	if python == "" {
		t.Skip("make probe-compilers runs it")
	}
	const probes = `
  - {id: inner, file: realcompiled.py, function: plain}
  - {id: kernel, file: realcompiled.py, function: kernel, anchor: y = x}
  - {id: tuned, file: realcompiled.py, function: tuned, anchor: y = x}
  - {id: add, file: realcompiled.py, function: add}
  - {id: decorated, file: realcompiled.py, function: decorated}
  - {id: scripted, file: realcompiled.py, function: scripted}
  - {id: helper, file: realcompiled.py, function: helper, anchor: y = x * 2}
  - {id: framed, file: realcompiled.py, function: framed, labels: {n: x.dim()}}
  - {id: forward, file: realcompiled.py, function: Model.forward}
  - {id: method, file: realcompiled.py, function: Model.method, when: x.dim() > 0}
`
	dir := dirFor(t, probes)
	out, err := probed(t, python, dir, "", "-c", "import realcompiled; realcompiled.main()")
	if err != nil {
		t.Fatal(err)
	}
	// Three, and two of them twice: for the frame that was probed, and for the
	// function as it is.
	if out != "5 {}\n" {
		t.Errorf("graphs and breaks: %s", out)
	}
	want := map[string]string{
		"inner": "", "kernel": "E_JIT", "tuned": "E_JIT", "add": "E_JIT", "scripted": "E_JIT",
		"decorated": "E_DYNAMO", "helper": "E_DYNAMO", "framed": "E_DYNAMO", "forward": "E_DYNAMO", "method": "E_DYNAMO",
	}
	r := read(t, dir)
	for _, p := range r.Processes[0].Probes {
		if p.Code != want[p.ID] {
			t.Errorf("%s: %s %s, want %s", p.ID, p.Code, p.Message, want[p.ID])
		}
	}
	t.Logf("%s", r.Processes[0].Python)
}

// Root attaches to other users' processes, and to those in containers: with
// other numbers, another /dev/shm, and no sight of our files.
func TestAttachForeign(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root attaches to others' processes")
	}
	p, err := ParsePack("test.yaml", []byte(packHead+"  - {id: inner, file: foreign.py, function: f}\n"))
	if err != nil {
		t.Fatal(err)
	}
	code := t.TempDir()
	for d := code; d != os.TempDir() && d != "/"; d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	const text = "import time\ndef f(): time.sleep(0.001)\nprint('ready', flush=True)\nwhile True: f()\n"
	if err := os.WriteFile(filepath.Join(code, "foreign.py"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	each(t, func(t *testing.T, python string) {
		for _, tt := range []struct {
			name    string
			command []string
		}{
			{"another user", []string{"setpriv", "--reuid=65534", "--clear-groups", python, "foreign.py"}},
			{"a container", []string{"unshare", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-c", `mount -t tmpfs none /dev/shm && exec "$0" foreign.py`, python}},
		} {
			t.Run(tt.name, func(t *testing.T) {
				cmd := exec.Command(tt.command[0], tt.command[1:]...)
				cmd.Dir = code
				out, err := cmd.StdoutPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Skip(err)
				}
				t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
				if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "ready\n" {
					t.Skipf("%s: it doesn't start here: %v", tt.name, err)
				}
				pid := cmd.Process.Pid
				if children := childrenOf(pid); len(children) == 1 {
					pid = children[0]
					t.Cleanup(func() {
						if p, err := os.FindProcess(pid); err == nil {
							p.Kill()
						}
					})
				}
				dir, err := NewDirFor(pid, p)
				if err != nil {
					t.Fatal(err)
				}
				defer os.RemoveAll(dir)
				if err := Attach(t.Context(), dir, pid); err != nil {
					if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code == "E_PTRACE" {
						t.Skip(err)
					}
					t.Fatal(err)
				}
				waitFor(t, func() bool { return Results(nil, read(t, dir))[0].Counts.Hits > 10 })
				r := read(t, dir)
				if len(r.Processes) != 1 || r.Processes[0].PID != pid || !r.Processes[0].Alive {
					t.Errorf("got %+v, want PID %d, alive", r.Processes, pid)
				}
				if n, err := DetachAll(t.Context(), r); n != 1 || err != nil {
					t.Errorf("detached from %d: %v", n, err)
				}
				if tt.name == "another user" {
					return
				}
				hidden, err := NewDir("", p)
				if err != nil {
					t.Fatal(err)
				}
				defer os.RemoveAll(hidden)
				if refused, ok := errors.AsType[*RefusedError](Attach(t.Context(), hidden, pid)); !ok || refused.Code != "E_CONTAINER" {
					t.Errorf("a directory that it doesn't see: %v", refused)
				}
			})
		}
	})
}

// A server that sleeps in its event loop is woken by a connection that carries
// nothing.
func TestAttachIdle(t *testing.T) {
	const script = `
import asyncio, served
async def main():
    server = await asyncio.start_server(lambda r, w: w.close(), "127.0.0.1", 0)
    print('"ready"', flush=True)
    await asyncio.sleep(3600)
asyncio.run(main())
`
	each(t, func(t *testing.T, python string) {
		pid := running(t, python, script)
		dir := dirFor(t, "  - {id: inner, file: served.py, function: Pool.static}\n")
		if err := Attach(t.Context(), dir, pid); err != nil {
			if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code == "E_PTRACE" {
				t.Skip(err)
			}
			t.Fatal(err)
		}
		if n, err := DetachAll(t.Context(), read(t, dir)); n != 1 || err != nil {
			t.Errorf("detached from %d: %v", n, err)
		}
	})
}

// The main file of a process that has just been started hasn't come to its
// functions: they are waited for.
func TestAttachWhileStarting(t *testing.T) {
	const text = `import time
print('"ready"', flush=True)
while "_culprit_state" not in __import__("sys").modules: time.sleep(0.001)
time.sleep(0.1)
def f(): time.sleep(0.001)
while True: f()
`
	each(t, func(t *testing.T, python string) {
		file := filepath.Join(t.TempDir(), "starting.py")
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		pid := running(t, python, `import os, sys; os.execv(sys.executable, [sys.executable, "`+file+`"])`)
		dir := dirFor(t, "  - {id: inner, file: starting.py, function: f}\n")
		if err := Attach(t.Context(), dir, pid); err != nil {
			if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code == "E_PTRACE" {
				t.Skip(err)
			}
			t.Fatal(err)
		}
		waitFor(t, func() bool { return Results(nil, read(t, dir))[0].Counts.Hits > 10 })
	})
}

func TestTCPAddress(t *testing.T) {
	for text, want := range map[string]string{
		"0100007F:1F90":                         "127.0.0.1:8080",
		"00000000:1F90":                         "127.0.0.1:8080",
		"00000000000000000000000000000000:0050": "[::1]:80",
		"00000000000000000000000001000000:0050": "[::1]:80",
		"":                                      "",
		"01:zz":                                 "",
	} {
		if got := tcpAddress(text); got != want {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// An interpreter that is just starting is asked until it has started, and never
// comes to harm.
func TestAttachAtOnce(t *testing.T) {
	each(t, func(t *testing.T, python string) {
		for range 3 {
			cmd := exec.Command("sh", "-c", `"$0" -c "$1" & echo $!; wait`, python, "import asyncio, time, served\nwhile True: served.Pool.static(1); time.sleep(0.001)")
			cmd.Dir = "testdata"
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			var pid int
			if _, err := fmt.Fscan(out, &pid); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if p, err := os.FindProcess(pid); err == nil {
					p.Kill()
				}
				cmd.Wait()
			})
			AwaitPython(t.Context(), pid)
			dir := dirFor(t, "  - {id: inner, file: served.py, function: Pool.static}\n")
			if err := Attach(t.Context(), dir, pid); err != nil {
				if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code == "E_PTRACE" {
					t.Skip(err)
				}
				t.Fatal(err)
			}
			waitFor(t, func() bool { return Results(nil, read(t, dir))[0].Counts.Hits > 10 })
		}
	})
}

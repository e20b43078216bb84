package target

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

// testHost is what every Host does alike.
func testHost(t *testing.T, h Host) {
	dir := t.TempDir()
	name := filepath.Join(dir, "a file's \"name\" $HOME")
	content := "line\x00\xff\nno end of line"
	if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(name, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if b, err := h.ReadFile(ctx, name); err != nil || string(b) != content {
		t.Errorf("read %q, %v, want %q", b, err, content)
	}
	if b, err := h.ReadFile(ctx, "/proc/self/stat"); err != nil || len(b) == 0 {
		t.Errorf("a file of /proc: %q, %v", b, err)
	}
	if b, err := h.ReadFile(ctx, os.DevNull); err != nil || len(b) != 0 {
		t.Errorf("an empty file: %q, %v", b, err)
	}
	if _, err := h.ReadFile(ctx, name+"x"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that isn't there: %v, want fs.ErrNotExist", err)
	}
	if to, err := h.Readlink(ctx, filepath.Join(dir, "link")); err != nil || to != name {
		t.Errorf("link to %q, %v, want %q", to, err, name)
	}
	if _, err := h.Readlink(ctx, filepath.Join(dir, "nolink")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a link that isn't there: %v, want fs.ErrNotExist", err)
	}
	if b, err := h.Run(ctx, "printf", "%s|", "a b", "", "it's", "$x\n"); err != nil || string(b) != "a b||it's|$x\n|" {
		t.Errorf("arguments came as %q, %v", b, err)
	}
	if b, err := h.Run(ctx, "cat"); err != nil || len(b) != 0 {
		t.Errorf("a program's input isn't empty: %q, %v", b, err)
	}
	if b, err := h.Run(ctx, "sh", "-c", "echo some; echo 'a reason' >&2; exit 3"); err == nil || !strings.Contains(err.Error(), "a reason") || string(b) != "some\n" {
		t.Errorf("a program that fails: %q, %v, want its output and its reason", b, err)
	}
	if _, err := h.Run(ctx, "no-such-program"); !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, exec.ErrNotFound) {
		t.Errorf("a program that isn't there: %v", err)
	}
	short, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	if _, err := h.Run(short, "sleep", "60"); err == nil {
		t.Error("a program outlives its context")
	}
	if b, err := h.Run(ctx, "echo", "again"); err != nil || string(b) != "again\n" {
		t.Errorf("after that: %q, %v", b, err)
	}
}

func TestLocalHost(t *testing.T) { testHost(t, Local{}) }

// testAttest launches a server and attests it.
func testAttest(t *testing.T, l *Launcher, host string) {
	address, dir := freeAddress(t), t.TempDir()
	s, err := l.Launch(t.Context(), []Process{{
		Name: "decode", Command: []string{os.Args[0], "server", address, filepath.Join(dir, "pid"), "--api-key=verysecret3"}, Dir: dir, Host: host,
		Env: map[string]string{"SGLANG_X": "bf16", "HF_TOKEN": "verysecret1"},
	}}, Ready{URL: "http://" + address, Timeout: 20 * time.Second}, dir)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Stop()
	daemon := readPID(t, filepath.Join(dir, "pid"))
	if err := os.WriteFile(filepath.Join(dir, "patch.py"), []byte("x"), 0o644); err != nil {
		t.Fatal(err)
	}
	options := AttestOptions{
		Server: serve(t, "", map[string]string{"GET /v1/models": `{"data":[{"id":"m","owned_by":"sglang"}]}`, "GET /server_info": `{"b":1.0,"api_key":"verysecret2","a":"x"}`}),
		Trees:  trees(t, s), Files: []string{"patch.py", "/nowhere"},
	}
	a, err := Attest(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	text, err := json.Marshal(a)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(text), "verysecret") {
		t.Errorf("a secret is in the attestation: %s", text)
	}
	p := a.Processes[0]
	if !p.Main || p.Env["SGLANG_X"] != "bf16" || p.Env["HF_TOKEN"] != Redacted || p.Dir != dir || !slices.Contains(p.Args, "server") || p.Exe != mustReadlink(t, "/proc/self/exe") {
		t.Errorf("the main process is %+v", p)
	}
	if age := time.Since(p.Started); age < -5*time.Second || age > time.Minute {
		t.Errorf("it was started %s ago", age)
	}
	if !slices.ContainsFunc(a.Processes, func(p ProcessFacts) bool { return p.PID == daemon && !p.Main }) {
		t.Errorf("the daemon %d isn't among %+v", daemon, a.Processes)
	}
	if len(a.Files) != 1 || a.Files[0].SHA256 != "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881" || a.Files[0].Path != filepath.Join(dir, "patch.py") {
		t.Errorf("files are %+v", a.Files)
	}
	if !slices.ContainsFunc(a.Missing, func(m string) bool { return strings.Contains(m, "/nowhere") }) {
		t.Errorf("missing is %q", a.Missing)
	}
	if !slices.ContainsFunc(a.Libraries, func(f File) bool { return f.Path == p.Exe && len(f.SHA256) == 64 }) {
		t.Errorf("the executable isn't hashed: %+v", a.Libraries)
	}
	if got := string(a.Endpoints[0].Body); a.Endpoints[0].Path != "/server_info" || got != `{"a":"x","api_key":"[redacted]","b":1.0}` {
		t.Errorf("endpoint is %+v: %s", a.Endpoints[0], got)
	}
	again, err := Attest(t.Context(), AttestOptions{Server: options.Server, Trees: trees(t, s), Files: options.Files, Known: a})
	if err != nil {
		t.Fatal(err)
	}
	if changed := Changed(a, again); len(changed) != 0 {
		t.Errorf("an idle server changed: %+v", changed)
	}
	// Of the daemon's loop a short-lived program may be there at one time alone.
	both := func(of, other []File) []File {
		return slices.DeleteFunc(slices.Clone(of), func(f File) bool {
			return !slices.ContainsFunc(other, func(g File) bool { return g.Path == f.Path })
		})
	}
	if diff := cmp.Diff(both(a.Libraries, again.Libraries), both(again.Libraries, a.Libraries)); diff != "" {
		t.Errorf("what was hashed before is another: %s", diff)
	}
}

func trees(t *testing.T, s *Launched) []Tree {
	t.Helper()
	trees, err := s.Trees(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return trees
}

func mustReadlink(t *testing.T, path string) string {
	t.Helper()
	to, err := os.Readlink(path)
	if err != nil {
		t.Fatal(err)
	}
	return to
}

func TestAttest(t *testing.T) { testAttest(t, launcher(), "") }

// GPUs are asked for by one program, which may be there, fail, or not be there.
func TestGPUs(t *testing.T) {
	tests := []struct {
		name, script string
		want         []GPU
		missing      string
	}{
		{
			"two", "echo '0, NVIDIA H200, GPU-1, 570.86.15, 143771 MiB, 96.00.BC.00.01, Enabled, Disabled'; echo '1, NVIDIA H200, GPU-2, 570.86.15, 143771 MiB, 96.00.BC.00.01, Enabled, [N/A]'",
			[]GPU{
				{"0", "NVIDIA H200", "GPU-1", "570.86.15", "143771 MiB", "96.00.BC.00.01", "Enabled", "Disabled"},
				{"1", "NVIDIA H200", "GPU-2", "570.86.15", "143771 MiB", "96.00.BC.00.01", "Enabled", "[N/A]"},
			},
			"",
		},
		{"a driver that doesn't answer", "echo NVIDIA-SMI has failed because it couldn\\'t communicate with the NVIDIA driver. >&2; exit 9", nil, "couldn't communicate with the NVIDIA driver"},
		{"none", "", nil, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.script != "" {
				dir := t.TempDir()
				if err := os.WriteFile(filepath.Join(dir, "nvidia-smi"), []byte("#!/bin/sh\n"+tt.script+"\n"), 0o755); err != nil {
					t.Fatal(err)
				}
				t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
			}
			r := reader{Attestation: &Attestation{}, options: AttestOptions{Trees: []Tree{{}}}, machines: []Tree{{Host: Local{}}}}
			r.hosts(t.Context())
			if diff := cmp.Diff(tt.want, r.Hosts[0].GPUs); diff != "" {
				t.Error(diff)
			}
			if got := strings.Join(r.Missing, " "); !strings.Contains(got, tt.missing) || tt.missing == "" && got != "" {
				t.Errorf("missing is %q, want %q", got, tt.missing)
			}
		})
	}
}

func TestListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if pid, err := Listener(t.Context(), Local{}, port); pid != os.Getpid() || err != nil {
		t.Errorf("listener is %d, %v, want %d", pid, err, os.Getpid())
	}
	if ports, err := Ports(t.Context(), Local{}, os.Getpid()); err != nil || !slices.Contains(ports, port) {
		t.Errorf("ports are %v, %v, want %d among them", ports, err, port)
	}
	l.Close()
	if pid, err := Listener(t.Context(), Local{}, port); pid != 0 || err != nil {
		t.Errorf("nobody listens, but the listener is %d, %v", pid, err)
	}
}

func TestAttestNothing(t *testing.T) {
	_, err := Attest(t.Context(), AttestOptions{Server: &Server{BaseURL: "http://127.0.0.1:1", Client: http.DefaultClient}, Trees: []Tree{{Name: "x", PIDs: []int{1 << 30}}}})
	if err == nil || !strings.Contains(err.Error(), "refused") || !strings.Contains(err.Error(), "no such file") {
		t.Errorf("error %v, want both reasons", err)
	}
}

// writeTree writes files by path.
func writeTree(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, content := range files {
		at := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(at), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(at, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

func TestPackage(t *testing.T) {
	const commit = "0123456789abcdef0123456789abcdef01234567"
	base := map[string]string{
		"venv/bin/python3": "",
		"venv/lib/python3.12/site-packages/sgl/__init__.py":   "installed",
		"venv/lib/python3.12/site-packages/SGL-0.5.dist-info": "",
		"work/empty/sgl/README":                               "a directory by that name is no package while another is",
	}
	tests := []struct {
		name  string
		files map[string]string
		p     ProcessFacts // {} stands for the directory
		dir   string
		want  Package
	}{
		{"installed", nil, ProcessFacts{Dir: "{}/work/empty", Args: []string{"{}/venv/bin/python3", "-m", "sgl"}}, "venv/lib/python3.12/site-packages/sgl", Package{Version: "0.5"}},
		{
			"in the working directory",
			map[string]string{"work/sgl/__init__.py": ""},
			ProcessFacts{Dir: "{}/work", Args: []string{"{}/venv/bin/python3", "-m", "sgl"}},
			"work/sgl",
			Package{Version: "0.5"},
		},
		{
			"not in the working directory of a script",
			map[string]string{"work/sgl/__init__.py": ""},
			ProcessFacts{Dir: "{}/work", Args: []string{"{}/venv/bin/python3", "{}/x/main.py"}},
			"venv/lib/python3.12/site-packages/sgl",
			Package{Version: "0.5"},
		},
		{
			"PYTHONPATH",
			map[string]string{"pp/sgl/__init__.py": ""},
			ProcessFacts{Dir: "{}/work", Args: []string{"{}/venv/bin/python3", "-m", "sgl"}, Env: map[string]string{"PYTHONPATH": "{}/nope:../pp"}},
			"pp/sgl",
			Package{Version: "0.5"},
		},
		{
			"a development install by .pth, of a checkout",
			map[string]string{
				"src/python/sgl/__init__.py": "", "src/python/sgl/__pycache__/x.pyc": "no", "src/python/sgl/a b.py": "",
				"src/.git/HEAD": "ref: refs/heads/main\n", "src/.git/packed-refs": "# pack-refs\n" + commit + " refs/heads/main\n",
				"v2/lib/python3.12/site-packages/__editable__.sgl.pth": "{}/src/python", "v2/bin/python3": "",
			},
			ProcessFacts{Dir: "/", Args: []string{"{}/v2/bin/python3", "-m", "sgl"}},
			"src/python/sgl",
			Package{Commit: commit},
		},
		{
			"a development install by a finder, of a worktree",
			map[string]string{
				"src/sgl/__init__.py": "", "src/.git": "gitdir: ../main/.git/worktrees/w", "main/.git/worktrees/w/HEAD": "ref: refs/heads/fix",
				"main/.git/worktrees/w/commondir": "../..", "main/.git/refs/heads/fix": commit + "\n",
				"v2/lib/python3.12/site-packages/__editable___sgl_0_finder.py": "MAPPING: dict[str, str] = {'other': '/x', 'sgl': '{}/src/sgl'}", "v2/bin/python3": "",
			},
			ProcessFacts{Dir: "/", Args: []string{"{}/v2/bin/python3", "-m", "sgl"}},
			"src/sgl",
			Package{Commit: commit},
		},
		{
			"a detached head",
			map[string]string{"work/sgl/__init__.py": "", "work/.git/HEAD": commit},
			ProcessFacts{Dir: "{}/work", Args: []string{"{}/venv/bin/python3", "-m", "sgl"}},
			"work/sgl",
			Package{Version: "0.5", Commit: commit},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dir := t.TempDir()
			fill := func(s string) string { return strings.ReplaceAll(s, "{}", dir) }
			for _, files := range []map[string]string{base, tt.files} {
				filled := map[string]string{}
				for name, content := range files {
					filled[name] = fill(content)
				}
				writeTree(t, dir, filled)
			}
			p := tt.p
			p.Dir, p.Exe = fill(p.Dir), "/usr/bin/python3"
			for i := range p.Args {
				p.Args[i] = fill(p.Args[i])
			}
			for name, value := range p.Env {
				p.Env[name] = fill(value)
			}
			py, err := pythonOf(t.Context(), disk{host: Local{}}, &p, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := py.read(t.Context(), "sgl", time.Now().Add(-time.Hour).Unix())
			if err != nil {
				t.Fatal(err)
			}
			versions, err := py.distributions(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if got.Dir != filepath.Join(dir, tt.dir) || got.Commit != tt.want.Commit || versions["sgl"] != tt.want.Version {
				t.Errorf("found %s, commit %q, version %q, want %s, %q, %q", got.Dir, got.Commit, versions["sgl"], tt.dir, tt.want.Commit, tt.want.Version)
			}
			if _, hashed := got.Files["__init__.py"]; !hashed || len(got.SHA256) != 64 || !slices.Contains(got.Newer, "__init__.py") {
				t.Errorf("files %v, newer %v", got.Files, got.Newer)
			}
			if _, compiled := got.Files["__pycache__/x.pyc"]; compiled {
				t.Error("compiled Python is hashed")
			}
			before := got.SHA256
			writeTree(t, got.Dir, map[string]string{"__init__.py": "patched"})
			if got, err = py.read(t.Context(), "sgl", 0); err != nil || got.SHA256 == before {
				t.Errorf("a patch doesn't show: %v", err)
			}
			for _, wrong := range []string{"nope", "../x", "a;b", ""} {
				if _, err := py.read(t.Context(), wrong, 0); err == nil {
					t.Errorf("package %q is found", wrong)
				}
			}
		})
	}
}

// What can't be read as a whole is left out, and the rest is kept.
func TestFiles(t *testing.T) {
	dir := t.TempDir()
	writeTree(t, dir, map[string]string{"a": "1", "-b": "2", "c\nd": "3", "e": "4"})
	big := filepath.Join(dir, "big")
	if err := os.WriteFile(big, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(big, hashLimit+1); err != nil {
		t.Fatal(err)
	}
	d := disk{host: Local{}, known: map[string]File{}}
	paths := []string{dir + "/a", dir + "/-b", dir + "/none", dir + "/c\nd", big, dir + "/e"}
	got, err := d.files(t.Context(), paths)
	if err != nil {
		t.Fatal(err)
	}
	if got[dir+"/a"].SHA256 == "" || got[dir+"/-b"].SHA256 == "" || got[dir+"/e"].SHA256 == "" {
		t.Errorf("not all are hashed: %+v", got)
	}
	if f, ok := got[big]; !ok || f.SHA256 != "" || f.Size != hashLimit+1 {
		t.Errorf("the big file is %+v", f)
	}
	// What had no hash before is hashed now; what had one isn't again.
	for _, hash := range []string{"", "known"} {
		f := got[dir+"/a"]
		want := f.SHA256
		if hash != "" {
			want = hash
		}
		f.SHA256 = hash
		d.known[dir+"/a"] = f
		if again, err := d.files(t.Context(), paths[:1]); err != nil || again[dir+"/a"].SHA256 != want {
			t.Errorf("known by %q, its hash is %+v, %v", hash, again, err)
		}
	}
	if _, there := got[dir+"/none"]; there {
		t.Error("a file that isn't there is there")
	}
}

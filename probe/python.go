package probe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
)

// Python is an interpreter that tells about source files: the same rules, by
// the same code, as in the server.
type Python struct {
	Command string // empty is python3
}

// ask runs the agent outside any server, on one request.
func (y Python) ask(ctx context.Context, request, answer any) error {
	command := y.Command
	if command == "" {
		command = "python3"
	}
	in, err := json.Marshal(request)
	if err != nil {
		return err
	}
	// -I: neither the environment nor the working directory changes what it does.
	cmd := exec.CommandContext(ctx, command, "-I", "-X", "utf8", "-c", string(agentSource))
	var out, complaint bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = bytes.NewReader(in), &out, &complaint
	if err := cmd.Run(); err != nil {
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("ask Python: no %s here: source files are read by Python 3.11 or newer; name one with --python", command)
		}
		text := strings.TrimSpace(complaint.String())
		return fmt.Errorf("ask Python: %w: %s", err, text[strings.LastIndexByte(text, '\n')+1:])
	}
	var refused RefusedError
	if err := unmarshalRefusal(out.Bytes(), &refused); err != nil {
		return fmt.Errorf("ask Python: its answer: %w", err)
	}
	if refused.Code != "" {
		return &refused
	}
	if err := json.Unmarshal(out.Bytes(), answer); err != nil {
		return fmt.Errorf("ask Python: its answer: %w", err)
	}
	return nil
}

// unmarshalRefusal reads what the agent says where it refuses; an answer of
// another kind leaves it empty.
func unmarshalRefusal(b []byte, e *RefusedError) error {
	var answer struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	}
	err := json.Unmarshal(b, &answer)
	e.Code, e.Message = answer.Code, answer.Message
	return err
}

// Lint is what a source tree says to one probe.
type Lint struct {
	ID       string   `json:"id"`
	SHA256   string   `json:"sha256,omitempty"` // of the file as it is
	Line     int      `json:"line,omitempty"`
	Code     string   `json:"code,omitempty"` // why it would be refused
	Message  string   `json:"message,omitempty"`
	Warnings []string `json:"warnings,omitempty"`
}

// Lint places a pack's probes in the files under root, without any server. The
// hashes count only if checkHashes says so.
func (y Python) Lint(ctx context.Context, p *Pack, root string, checkHashes bool) ([]Lint, error) {
	if info, err := os.Stat(root); err != nil || !info.IsDir() {
		return nil, fmt.Errorf("lint: %s is no directory", root)
	}
	files := map[string]string{}
	probes := p.agentProbes()
	for i := range probes {
		file := probes[i].File
		if !checkHashes {
			probes[i].SHA256 = nil
		}
		for _, at := range []string{root, filepath.Dir(filepath.Clean(root))} { // the package's parent, or the package
			path := filepath.Join(at, file)
			if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && files[file] == "" {
				files[file] = path
			}
		}
	}
	var answer struct {
		Probes []Lint `json:"probes"`
	}
	if err := y.ask(ctx, map[string]any{"op": "lint", "root": root, "files": files, "probes": probes}, &answer); err != nil {
		return nil, err
	}
	// It answers file by file.
	slices.SortStableFunc(answer.Probes, func(a, b Lint) int { return p.index(a.ID) - p.index(b.ID) })
	if len(answer.Probes) != len(p.Probes) {
		return nil, fmt.Errorf("lint: %d answers for %d probes", len(answer.Probes), len(p.Probes))
	}
	return answer.Probes, nil
}

// Branch is one way through a function: the body or the else of an if, the
// rounds of a loop, a handler, a case.
type Branch struct {
	Number int    `json:"number"`
	Line   int    `json:"line"`
	Text   string `json:"text"`
}

// BranchPack makes a pack that counts every branch of a function, and its
// calls. file is the deployed file's path, suffix the end of it that names it.
func (y Python) BranchPack(ctx context.Context, file, suffix, function string) (*Pack, []Branch, error) {
	var answer struct {
		SHA256   string   `json:"sha256"`
		Line     int      `json:"line"`
		Branches []Branch `json:"branches"`
	}
	if err := y.ask(ctx, map[string]any{"op": "branches", "path": file, "function": function}, &answer); err != nil {
		return nil, nil, err
	}
	p := &Pack{Version: 1, Name: "branches", About: "every branch of " + function, Control: Control{Probe: "call"}}
	p.Probes = []Probe{{ID: "call", About: "calls", File: suffix, SHA256: Hashes{answer.SHA256}, Function: function}}
	for _, b := range answer.Branches[:min(len(answer.Branches), maxProbes-1)] {
		number := b.Number
		p.Probes = append(p.Probes, Probe{
			ID: fmt.Sprintf("branch_%d", number), About: b.Text, File: suffix, SHA256: Hashes{answer.SHA256}, Function: function, Branch: &number,
		})
	}
	return p, answer.Branches, nil
}

// Place is where a text is in a source tree.
type Place struct {
	Path     string `json:"path"`
	Line     int    `json:"line"`
	Text     string `json:"text"`
	SHA256   string `json:"sha256"`
	Function string `json:"function,omitempty"` // empty outside functions
	Anchor   string `json:"anchor,omitempty"`   // of the statement; empty in what never runs by itself
	Before   string `json:"before,omitempty"`   // where the anchor alone isn't unique
	After    string `json:"after,omitempty"`
}

// findLimit bounds what is looked at of a tree.
const findLimit = 200_000

// Find lists the places of a text in the Python files under root, and makes a
// pack that counts those that can be.
func (y Python) Find(ctx context.Context, text, root string) ([]Place, *Pack, error) {
	var paths []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil && path == root:
			return err
		case err != nil:
			return nil // a directory that we may not read hides nothing that we could show
		case d.Type().IsRegular() && strings.HasSuffix(path, ".py"):
			if paths = append(paths, path); len(paths) > findLimit {
				return fmt.Errorf("more than %d Python files under %s: name a package's directory", findLimit, root)
			}
		}
		return nil
	})
	if err != nil {
		return nil, nil, fmt.Errorf("find: %w", err)
	}
	var answer struct {
		Places []Place `json:"places"`
	}
	if err := y.ask(ctx, map[string]any{"op": "find", "text": text, "paths": paths}, &answer); err != nil {
		return nil, nil, err
	}
	p := &Pack{Version: 1, Name: "find", About: "where " + text + " is"}
	for i, place := range answer.Places {
		if place.Anchor == "" || len(p.Probes) == maxProbes {
			continue
		}
		suffix, err := filepath.Rel(root, place.Path)
		if err != nil {
			return nil, nil, fmt.Errorf("find: %w", err)
		}
		if base := filepath.Base(root); isPackage(root) {
			suffix = filepath.Join(base, suffix)
		}
		p.Probes = append(p.Probes, Probe{
			ID: fmt.Sprintf("place_%d", i+1), About: place.Text, File: filepath.ToSlash(suffix), SHA256: Hashes{place.SHA256},
			Function: place.Function, Anchor: place.Anchor, Context: Context{place.Before, place.After},
		})
	}
	return answer.Places, p, nil
}

func isPackage(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "__init__.py"))
	return err == nil
}

// Cost is what a hit adds to a call, by the way it is told.
type Cost struct {
	Python string    `json:"python"`
	CallNS float64   `json:"call_ns"` // of the call without it
	Ways   []CostWay `json:"ways"`
}

// CostWay is one way to say that a line ran.
type CostWay struct {
	Way      string  `json:"way"`
	BestNS   float64 `json:"best_ns"`
	MedianNS float64 `json:"median_ns"`
}

// Cost measures it, in this interpreter on this machine.
func (y Python) Cost(ctx context.Context) (Cost, error) {
	var c Cost
	err := y.ask(ctx, map[string]any{"op": "cost"}, &c)
	return c, err
}

// SearchPath is where an interpreter looks for modules.
func (y Python) SearchPath(ctx context.Context, pythonPath string) ([]string, error) {
	command := y.Command
	if command == "" {
		command = "python3"
	}
	cmd := exec.CommandContext(ctx, command, "-c", "import sys, json; json.dump([p for p in sys.path[1:] if p], sys.stdout)")
	cmd.Env = append(cmd.Environ(), "PYTHONPATH="+pythonPath)
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("ask %s where its modules are: %w", command, err)
	}
	paths := []string{"."}
	if err := json.Unmarshal(out, &paths); err != nil {
		return nil, fmt.Errorf("ask %s where its modules are: %w", command, err)
	}
	return append([]string{"."}, paths...), nil
}

// SearchPath is where the interpreter of a running process looks for modules,
// with the process's own environment and directory.
func SearchPath(ctx context.Context, pid int) ([]string, error) {
	proc := fmt.Sprintf("/proc/%d", pid)
	env, err := os.ReadFile(proc + "/environ")
	if err != nil {
		return nil, fmt.Errorf("where PID %d has its modules: %w", pid, err)
	}
	command, err := os.ReadFile(proc + "/cmdline")
	if err != nil {
		return nil, fmt.Errorf("where PID %d has its modules: %w", pid, err)
	}
	args := strings.Split(string(command), "\x00")
	exe, err := os.Readlink(proc + "/exe")
	if err != nil {
		return nil, fmt.Errorf("where PID %d has its modules: %w", pid, err)
	}
	dir, err := os.Readlink(proc + "/cwd")
	if err != nil {
		return nil, fmt.Errorf("where PID %d has its modules: %w", pid, err)
	}
	// By the name that it was called by, a venv's interpreter knows its venv.
	if filepath.IsAbs(args[0]) {
		exe = args[0]
	}
	cmd := exec.CommandContext(ctx, exe, "-c", "import sys, json; json.dump([p for p in sys.path[1:] if p], sys.stdout)")
	cmd.Env, cmd.Dir = strings.Split(strings.TrimRight(string(env), "\x00"), "\x00"), dir
	cmd.Env = append(cmd.Env, DirVariable+"=")
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("where PID %d has its modules: %w", pid, err)
	}
	var paths []string
	if err := json.Unmarshal(out, &paths); err != nil {
		return nil, fmt.Errorf("where PID %d has its modules: %w", pid, err)
	}
	first := []string{dir}
	if len(args) > 1 && strings.HasSuffix(args[1], ".py") {
		first = append(first, filepath.Join(dir, filepath.Dir(args[1])))
		if filepath.IsAbs(args[1]) {
			first[1] = filepath.Dir(args[1])
		}
	}
	return append(first, paths...), nil
}

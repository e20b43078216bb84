package target

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// File is a file as it is on a disk. One over hashLimit has no SHA256: its
// size and time alone tell it from another.
type File struct {
	Process string `json:"process,omitempty"` // that it was looked up for
	Path    string `json:"path"`
	Size    int64  `json:"size"`
	MTime   int64  `json:"mtime"` // seconds since 1970
	SHA256  string `json:"sha256,omitempty"`
}

const (
	hashLimit = 64 << 20 // bytes
	batch     = 200      // files to a command
)

// disk is the files of one process's world.
type disk struct {
	host  Host
	root  string          // of the process; stands before each path
	known map[string]File // hashed before, by path: not hashed again when size and time are the same
}

// files looks files up and hashes them. What isn't there isn't in the answer.
func (d *disk) files(ctx context.Context, paths []string) (map[string]File, error) {
	found := map[string]File{}
	for some := range slices.Chunk(paths, batch) {
		if err := d.batch(ctx, some, found); err != nil {
			return nil, err
		}
	}
	return found, nil
}

func (d *disk) batch(ctx context.Context, paths []string, found map[string]File) error {
	command := []string{"stat", "-L", "-c", "%s %Y %n", "--"}
	for _, p := range paths {
		command = append(command, d.root+p)
	}
	out, err := d.host.Run(ctx, command...) // fails when one file is missing
	if err != nil && len(out) == 0 && ctx.Err() != nil {
		return err
	}
	d.parseStats(out, found)
	command = []string{"sha256sum", "--"}
	for _, p := range paths {
		f, ok := found[p]
		switch old := d.known[p]; {
		case !ok || f.Size > hashLimit:
		case old.SHA256 != "" && old.Size == f.Size && old.MTime == f.MTime:
			f.SHA256 = old.SHA256
			found[p] = f
		default:
			command = append(command, d.root+p)
		}
	}
	if len(command) == 2 {
		return nil
	}
	out, err = d.host.Run(ctx, command...) // fails when one file can't be read
	if err != nil && len(out) == 0 && ctx.Err() != nil {
		return err
	}
	d.parseSums(out, found)
	return nil
}

// parseStats reads lines of "SIZE MTIME PATH".
func (d *disk) parseStats(out []byte, into map[string]File) {
	for line := range strings.Lines(string(out)) {
		fields := strings.SplitN(strings.TrimSuffix(line, "\n"), " ", 3)
		if len(fields) != 3 || !strings.HasPrefix(fields[2], d.root) {
			continue
		}
		size, err1 := strconv.ParseInt(fields[0], 10, 64)
		mtime, err2 := strconv.ParseInt(fields[1], 10, 64)
		if err1 != nil || err2 != nil {
			continue
		}
		p := strings.TrimPrefix(fields[2], d.root)
		into[p] = File{Path: p, Size: size, MTime: mtime}
	}
}

// parseSums reads lines of "SHA256  PATH".
func (d *disk) parseSums(out []byte, into map[string]File) {
	for line := range strings.Lines(string(out)) {
		sum, p, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "  ")
		if !ok || len(sum) != hex.EncodedLen(sha256.Size) {
			continue
		}
		p = strings.TrimPrefix(p, d.root)
		if f, ok := into[p]; ok {
			f.SHA256 = sum
			into[p] = f
		}
	}
}

// Package is the source of a Python package that a process runs.
type Package struct {
	Process string `json:"process,omitempty"`
	Name    string `json:"name"`
	Dir     string `json:"dir"`
	Version string `json:"version,omitempty"` // of the distribution, where one is installed
	Commit  string `json:"commit,omitempty"`  // that is checked out, where it is a checkout
	SHA256  string `json:"sha256"`            // of its files' names and hashes, sorted by name
	// Files has the first 16 digits of each file's SHA-256 by its name in
	// Dir: all files but compiled Python.
	Files map[string]string `json:"files"`
	// Newer are files that were written after the process started: what runs
	// may be older than what is hashed here.
	Newer []string `json:"newer,omitempty"`
}

var packageName = regexp.MustCompile(`^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$`)

// siteDirs lists the directories that Python installs to, of prefixes.
const siteDirs = `root=$1; shift
for p; do
  for d in "$root$p"/lib/python3*/site-packages "$root$p"/lib/python3*/dist-packages "$root$p"/local/lib/python3*/dist-packages; do
    [ -d "$d" ] && printf '%s\n' "${d#"$root"}"
  done
done
:`

// findPackage lists where a package is, in the order of the path: packages
// proper, then what development installs point to, then directories that have
// the name and no __init__.py.
const findPackage = `root=$1 pkg=$2; shift 2
name=${pkg##*/}
for d; do
  [ -f "$root$d/$pkg/__init__.py" ] && printf '%s\n' "$d/$pkg"
  for f in "$root$d"/*.pth; do
    [ -f "$f" ] || continue
    while IFS= read -r l || [ -n "$l" ]; do
      case $l in /*) [ -f "$root$l/$pkg/__init__.py" ] && printf '%s\n' "${l%/}/$pkg" ;; esac
    done <"$f"
  done
  for f in "$root$d"/__editable__*finder.py; do
    [ -f "$f" ] && sed -n "s|.*'$name': *'\([^']*\)'.*|\1|p" "$f"
  done
done
for d; do [ -d "$root$d/$pkg" ] && printf '%s\n' "$d/$pkg"; done
:`

// python is the world of a process that runs Python.
type python struct {
	disk
	path  []string // as sys.path may be
	sites []string // those of path that distributions are installed in
}

// pythonOf guesses a process's sys.path from what it was started with and from
// the libraries it has mapped. What the program itself changes isn't seen.
func pythonOf(ctx context.Context, d disk, p *ProcessFacts, libraries []string) (*python, error) {
	py := &python{disk: d}
	for _, arg := range p.Args[min(1, len(p.Args)):] {
		if arg == "-m" || arg == "-c" {
			py.path = append(py.path, p.Dir)
			break
		}
		if !strings.HasPrefix(arg, "-") {
			py.path = append(py.path, path.Dir(within("", p.Dir, arg)))
			break
		}
	}
	for dir := range strings.SplitSeq(p.Env["PYTHONPATH"], ":") {
		if dir != "" {
			py.path = append(py.path, within("", p.Dir, dir))
		}
	}
	for _, lib := range libraries {
		for _, mark := range []string{"/site-packages/", "/dist-packages/"} {
			if i := strings.Index(lib, mark); i >= 0 {
				py.sites = append(py.sites, lib[:i+len(mark)-1])
			}
		}
	}
	command := []string{"sh", "-c", siteDirs, "sh", d.root}
	if venv := p.Env["VIRTUAL_ENV"]; venv != "" {
		command = append(command, venv)
	}
	for _, arg := range p.Args[:min(2, len(p.Args))] { // the interpreter, and a script beside it
		if path.IsAbs(arg) {
			command = append(command, path.Dir(path.Dir(arg)))
		}
	}
	command = append(command, path.Dir(path.Dir(p.Exe)))
	if home := p.Env["HOME"]; home != "" {
		command = append(command, home+"/.local")
	}
	out, err := d.host.Run(ctx, command...)
	if err != nil {
		return nil, fmt.Errorf("look for Python's packages: %w", err)
	}
	py.sites = unique(append(py.sites, splitLines(out)...))
	py.path = unique(append(py.path, py.sites...))
	return py, nil
}

func splitLines(b []byte) []string {
	return slices.DeleteFunc(strings.Split(string(b), "\n"), func(line string) bool { return line == "" })
}

// unique keeps the first of equal values.
func unique(values []string) []string {
	seen := map[string]bool{}
	return slices.DeleteFunc(values, func(v string) bool {
		twice := seen[v]
		seen[v] = true
		return twice
	})
}

// read hashes a package. started is when the process was, in seconds since
// 1970.
func (py *python) read(ctx context.Context, name string, started int64) (Package, error) {
	if !packageName.MatchString(name) {
		return Package{}, fmt.Errorf("package %q: that is no Python package's name", name)
	}
	command := slices.Concat([]string{"sh", "-c", findPackage, "sh", py.root, strings.ReplaceAll(name, ".", "/")}, py.path)
	out, err := py.host.Run(ctx, command...)
	if err != nil {
		return Package{}, fmt.Errorf("package %s: %w", name, err)
	}
	dir, _, _ := strings.Cut(string(out), "\n")
	if dir == "" {
		return Package{}, fmt.Errorf("package %s: not found in %s", name, strings.Join(py.path, ", "))
	}
	p := Package{Name: name, Dir: dir, Files: map[string]string{}, Commit: py.commit(ctx, dir)}
	out, err = py.host.Run(ctx, "find", py.root+dir+"/", "-type", "f", "!", "-path", "*/__pycache__/*", "!", "-name", "*.pyc", "!", "-path", "*/.git/*")
	if err != nil && len(out) == 0 {
		return Package{}, fmt.Errorf("package %s: %w", name, err)
	}
	var paths []string
	for _, line := range splitLines(out) {
		paths = append(paths, strings.TrimPrefix(line, py.root))
	}
	files, err := py.files(ctx, paths)
	if err != nil {
		return Package{}, fmt.Errorf("package %s: %w", name, err)
	}
	for at, f := range files {
		short := strings.TrimPrefix(at, dir+"/")
		p.Files[short] = fmt.Sprintf("%d bytes of %d", f.Size, f.MTime)
		if f.SHA256 != "" {
			p.Files[short] = f.SHA256[:16]
		}
		if f.MTime > started {
			p.Newer = append(p.Newer, short)
		}
	}
	slices.Sort(p.Newer)
	p.SHA256 = sumOf(p.Files)
	return p, nil
}

func sumOf(files map[string]string) string {
	names := make([]string, 0, len(files))
	for name := range files {
		names = append(names, name)
	}
	slices.Sort(names)
	h := sha256.New()
	for _, name := range names {
		fmt.Fprintf(h, "%s\x00%s\n", name, files[name])
	}
	return hex.EncodeToString(h.Sum(nil))
}

// commit is the commit that a directory is a checkout of, or that a directory
// above it is. It reads git's files itself: git, run in somebody else's
// checkout, would run what its configuration says.
func (py *python) commit(ctx context.Context, dir string) string {
	for at := dir; at != "/" && at != "."; at = path.Dir(at) {
		git := py.root + at + "/.git"
		if b, err := py.host.ReadFile(ctx, git); err == nil { // of a worktree
			to, ok := strings.CutPrefix(strings.TrimSpace(string(b)), "gitdir: ")
			if !ok {
				return ""
			}
			git = within(py.root, at, to)
		}
		head, err := py.host.ReadFile(ctx, git+"/HEAD")
		if err != nil {
			continue
		}
		text := strings.TrimSpace(string(head))
		ref, symbolic := strings.CutPrefix(text, "ref: ")
		if !symbolic {
			return text
		}
		common := git
		if b, err := py.host.ReadFile(ctx, git+"/commondir"); err == nil {
			common = path.Join(git, strings.TrimSpace(string(b)))
		}
		if b, err := py.host.ReadFile(ctx, common+"/"+ref); err == nil {
			return strings.TrimSpace(string(b))
		}
		packed, err := py.host.ReadFile(ctx, common+"/packed-refs")
		if err != nil {
			return ""
		}
		for line := range bytes.Lines(packed) {
			if commit, name, ok := strings.Cut(strings.TrimSpace(string(line)), " "); ok && name == ref {
				return commit
			}
		}
		return ""
	}
	return ""
}

// distributions lists what is installed for Python, by name as pip writes it.
func (py *python) distributions(ctx context.Context) (map[string]string, error) {
	versions := map[string]string{}
	for _, site := range slices.Backward(py.sites) { // what comes first on the path counts
		out, err := py.host.Run(ctx, "ls", py.root+site)
		if err != nil {
			return nil, errors.Join(fmt.Errorf("list Python's distributions in %s", site), err)
		}
		for _, line := range splitLines(out) {
			stem, ok := strings.CutSuffix(line, ".dist-info")
			if i := strings.LastIndexByte(stem, '-'); ok && i > 0 {
				versions[normalName(stem[:i])] = stem[i+1:]
			}
		}
	}
	return versions, nil
}

// normalName is a distribution's name as PEP 503 compares it.
func normalName(name string) string {
	return strings.ToLower(regexp.MustCompile(`[-_.]+`).ReplaceAllString(name, "-"))
}

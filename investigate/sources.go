package investigate

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/target"
)

// Sources is the source that is deployed, by name: packages as they were
// attested, and directories that a person named. It is read and never written.
type Sources struct {
	roots    map[string]*os.Root
	attested map[string]map[string]string // by package: the beginning of each file's SHA-256, as the live server has it
}

// OpenSources opens directories by the last part of their path, and the packages
// of an attestation whose directories are on this machine. a may be nil.
func OpenSources(dirs []string, a *target.Attestation) (*Sources, error) {
	s := &Sources{roots: map[string]*os.Root{}, attested: map[string]map[string]string{}}
	for _, dir := range dirs {
		whole, err := filepath.Abs(dir)
		if err != nil {
			return nil, err
		}
		root, err := os.OpenRoot(whole)
		if err != nil {
			return nil, fmt.Errorf("open source: %w", err)
		}
		name := filepath.Base(whole)
		if s.roots[name] != nil {
			return nil, fmt.Errorf("open source %s: another directory is called %s too", dir, name)
		}
		s.roots[name] = root
	}
	if a == nil {
		return s, nil
	}
	for _, p := range a.Packages {
		if s.roots[p.Name] != nil {
			continue
		}
		root, err := os.OpenRoot(p.Dir)
		if err != nil {
			continue // on another machine
		}
		s.roots[p.Name], s.attested[p.Name] = root, p.Files
	}
	return s, nil
}

// Close closes the directories.
func (s *Sources) Close() error {
	var errs []error
	for _, r := range s.roots {
		errs = append(errs, r.Close())
	}
	return errors.Join(errs...)
}

// Names lists the sources.
func (s *Sources) Names() []string { return slices.Sorted(maps.Keys(s.roots)) }

// fileLimit is the largest file that is read as source.
const fileLimit = 4 << 20

// read is a file's text and its SHA-256.
func (s *Sources) read(name string) (text []byte, sum string, err error) {
	source, rest, _ := strings.Cut(path.Clean(filepath.ToSlash(name)), "/")
	root := s.roots[source]
	if root == nil {
		return nil, "", fmt.Errorf("there is no source %q; there are: %s", source, strings.Join(s.Names(), ", "))
	}
	f, err := root.Open(filepath.FromSlash(rest))
	if err != nil {
		return nil, "", fmt.Errorf("there is no file %s", name)
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, "", fmt.Errorf("%s is no file", name)
	}
	text, err = io.ReadAll(io.LimitReader(f, fileLimit+1))
	if err != nil {
		return nil, "", fmt.Errorf("read %s: %w", name, err)
	}
	if len(text) > fileLimit {
		return nil, "", fmt.Errorf("%s has more than %d bytes", name, fileLimit)
	}
	hash := sha256.Sum256(text)
	sum = hex.EncodeToString(hash[:])
	if files, ok := s.attested[source]; ok {
		switch live := files[rest]; {
		case live == "":
			return text, sum, fmt.Errorf("%s isn't part of what was attested of the live server", name)
		case !strings.HasPrefix(sum, live):
			return text, sum, fmt.Errorf("%s isn't the file that runs: it was changed since the live server was attested", name)
		}
	}
	return text, sum, nil
}

// Check says why a place isn't in the deployed source; empty when it is.
func (s *Sources) Check(p Place) string {
	if s == nil || len(s.roots) == 0 {
		return "no source was given, so it can't be checked"
	}
	text, sum, err := s.read(p.File)
	if err != nil {
		return err.Error()
	}
	if p.SHA256 != "" && (len(p.SHA256) < 8 || !strings.HasPrefix(sum, strings.ToLower(p.SHA256))) {
		return fmt.Sprintf("%s has another hash: %.16s", p.File, sum)
	}
	lines := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	if p.Line < 1 || p.Line > len(lines) {
		return fmt.Sprintf("%s has %d lines, and no line %d", p.File, len(lines), p.Line)
	}
	want := squeeze(p.Text)
	if want == "" || strings.Contains(squeeze(lines[p.Line-1]), want) {
		return ""
	}
	// Line numbers are often a little off; the text is what counts.
	for i, line := range lines {
		if strings.Contains(squeeze(line), want) && abs(i+1-p.Line) <= 3 {
			return ""
		}
	}
	return fmt.Sprintf("line %d of %s is another: %.80q", p.Line, p.File, strings.TrimSpace(lines[p.Line-1]))
}

func squeeze(s string) string { return strings.Join(strings.Fields(s), " ") }

func abs(n int) int { return max(n, -n) }

// Limits of what one call reads, so that a model's window isn't flooded.
const (
	mostMatches   = 60
	mostLines     = 400
	mostLineBytes = 300
	mostSearched  = 256 << 20
)

// Search finds lines that match a regular expression.
func (s *Sources) Search(pattern, under string) (string, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return "", fmt.Errorf("search: %w", err)
	}
	var b strings.Builder
	matches, searched := 0, 0
	for _, name := range s.Names() {
		err := fs.WalkDir(s.roots[name].FS(), ".", func(file string, d fs.DirEntry, err error) error {
			whole := name + "/" + file
			switch {
			case err != nil || matches >= mostMatches || searched > mostSearched:
				return nil //nolint:nilerr // what can't be read isn't searched
			case d.IsDir() && (d.Name() == ".git" || d.Name() == "__pycache__" || d.Name() == "node_modules"):
				return fs.SkipDir
			case d.IsDir() || !d.Type().IsRegular() || !strings.HasPrefix(whole, under):
				return nil
			}
			text, _, err := s.read(whole)
			if err != nil || bytes.IndexByte(text[:min(len(text), 1024)], 0) >= 0 {
				return nil //nolint:nilerr // what isn't the deployed source isn't searched
			}
			searched += len(text)
			for i, line := range strings.Split(string(text), "\n") {
				if matches < mostMatches && re.MatchString(line) {
					matches++
					fmt.Fprintf(&b, "%s:%d: %s\n", whole, i+1, clip(line))
				}
			}
			return nil
		})
		if err != nil {
			return "", err
		}
	}
	switch {
	case matches == 0:
		return "no line matches", nil
	case matches >= mostMatches:
		fmt.Fprintf(&b, "only the first %d matches\n", mostMatches)
	}
	return b.String(), nil
}

// Lines gives a part of a file, with the file's hash.
func (s *Sources) Lines(file string, from, to int) (string, error) {
	text, sum, err := s.read(file)
	if err != nil {
		return "", err
	}
	lines := strings.Split(string(text), "\n")
	from = max(from, 1)
	if to < from {
		to = from + mostLines - 1
	}
	to = min(to, from+mostLines-1, len(lines))
	var b strings.Builder
	fmt.Fprintf(&b, "%s, sha256 %.16s, %d lines\n", file, sum, len(lines))
	for i := from; i <= to; i++ {
		fmt.Fprintf(&b, "%d: %s\n", i, clip(lines[i-1]))
	}
	return b.String(), nil
}

func clip(line string) string {
	line = strings.ToValidUTF8(strings.TrimRight(line, "\r"), "\uFFFD")
	if len(line) > mostLineBytes {
		return strings.ToValidUTF8(line[:mostLineBytes], "") + " ..."
	}
	return line
}

// Package probe counts which code paths of a live Python server run, how often
// and with which labels, without touching its files.
//
// A [Pack] says where the counters go: a file, a function, and an anchor, the
// text of one statement. The agent (agent/agent.py, in the server's process)
// compiles the deployed file with the counters in it and swaps code objects;
// the counts are in a mapped file for each process, which this package reads
// while the server runs and after it crashed. docs/probes.md says how to use
// it and has the layout of that file.
//
// A zero is only believed where a control moved in the same process and the
// same time: [Result] says so in words.
//
// Stability: may change.
package probe

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"
)

// Pack is a set of probes and how far their counts may be believed. It is read
// from YAML.
type Pack struct {
	Version int     `yaml:"probe_pack" json:"-"`
	Name    string  `yaml:"name"       json:"name"`
	About   string  `yaml:"about"      json:"about,omitempty"`
	Target  Target  `yaml:"target"     json:"target"`
	Expires string  `yaml:"expires"    json:"expires,omitempty"` // a time such as 30m; whoever watches detaches then
	Budget  Budget  `yaml:"budget"     json:"budget"`
	Control Control `yaml:"control"    json:"control"`
	Probes  []Probe `yaml:"probes"     json:"probes"`
}

// Target is what the pack was written against. The hashes of its probes decide;
// this is for people.
type Target struct {
	Package string `yaml:"package" json:"package,omitempty"`
	Version string `yaml:"version" json:"version,omitempty"`
	Python  string `yaml:"python"  json:"python,omitempty"`
}

// Budget is what the probes may cost before whoever watches takes them out.
// Where a pack says nothing, it is [defaultBudget].
type Budget struct {
	CorePercent float64 `yaml:"core_percent"   json:"core_percent,omitempty"`
	MaxHitsPerS float64 `yaml:"max_hits_per_s" json:"max_hits_per_s,omitempty"`
}

// Control is the probe that must move in a process, or zeros there say nothing.
type Control struct {
	Probe string  `yaml:"probe"     json:"probe,omitempty"`
	PerS  float64 `yaml:"min_per_s" json:"min_per_s,omitempty"`
}

// Probe is one place in the code with its counters.
type Probe struct {
	ID        string  `yaml:"id"         json:"id"`
	About     string  `yaml:"about"      json:"about,omitempty"`
	As        string  `yaml:"as"         json:"as,omitempty"` // a name that it shares with other places of the same event
	File      string  `yaml:"file"       json:"file"`         // the end of its path
	SHA256    Hashes  `yaml:"sha256"     json:"sha256,omitempty"`
	Function  string  `yaml:"function"   json:"function"` // its __qualname__
	Anchor    string  `yaml:"anchor"     json:"anchor,omitempty"`
	Context   Context `yaml:"context"    json:"-"`
	When      string  `yaml:"when"       json:"when,omitempty"`
	Labels    Labels  `yaml:"labels"     json:"labels,omitempty"`
	MaxLabels int     `yaml:"max_labels" json:"max_labels,omitempty"`
	Reach     string  `yaml:"reach"      json:"reach,omitempty"`   // calls or running
	Capture   string  `yaml:"capture"    json:"capture,omitempty"` // split or ignore
	Control   string  `yaml:"control"    json:"control,omitempty"` // in place of the pack's
	Expect    string  `yaml:"expect"     json:"expect,omitempty"`  // must: a run in which it didn't run is no evidence; never: it must not run
	Branch    *int    `yaml:"branch"     json:"branch,omitempty"`  // in place of an anchor: see Branches
}

// What a pack may expect of a probe in a run.
const (
	Must  = "must"
	Never = "never"
)

// Expect sets what is expected of probes, by id or by the name that several
// share.
func (p *Pack) Expect(name, what string) error {
	found := false
	for i := range p.Probes {
		if q := &p.Probes[i]; q.ID == name || q.As == name {
			q.Expect, found = what, true
		}
	}
	if !found {
		return fmt.Errorf("pack %s has no probe %q", p.Name, name)
	}
	return nil
}

// Merge makes one pack of several: a process has one. Each probe keeps the
// control of its pack.
func Merge(packs ...*Pack) (*Pack, error) {
	if len(packs) == 1 {
		return packs[0], nil
	}
	all := &Pack{Version: 1}
	for _, p := range packs {
		all.Name = strings.TrimPrefix(all.Name+"+"+p.Name, "+")
		for _, q := range p.Probes {
			if all.index(q.ID) >= 0 {
				return nil, fmt.Errorf("packs %s: probe %q is in two of them", all.Name, q.ID)
			}
			if q.Control == "" {
				q.Control = p.Control.Probe
			}
			all.Probes = append(all.Probes, q)
		}
	}
	if _, key, what := all.check(); what != "" {
		return nil, packError(all.Name, 1, key, what)
	}
	return all, nil
}

// Context tells twins of an anchor apart by the statement before or after.
type Context struct {
	Before string `yaml:"before"`
	After  string `yaml:"after"`
}

// Hashes are the SHA-256 of the files that a probe may go into; none is any.
type Hashes []string

// UnmarshalYAML takes one or a list.
func (h *Hashes) UnmarshalYAML(unmarshal func(any) error) error {
	var one string
	if unmarshal(&one) == nil {
		*h = Hashes{one}
		return nil
	}
	return unmarshal((*[]string)(h))
}

// Label is an expression whose values split a count.
type Label struct{ Name, Expression string }

// Labels are in the order of the file.
type Labels []Label

// UnmarshalYAML reads a mapping from names to expressions.
func (l *Labels) UnmarshalYAML(unmarshal func(any) error) error {
	var m yaml.MapSlice
	if err := unmarshal(&m); err != nil {
		return err
	}
	*l = nil
	for _, item := range m {
		*l = append(*l, Label{fmt.Sprint(item.Key), fmt.Sprint(item.Value)})
	}
	return nil
}

// MarshalJSON writes an object in the order of the file.
func (l Labels) MarshalJSON() ([]byte, error) {
	b := []byte{'{'}
	for i, label := range l {
		name, err := json.Marshal(label.Name)
		if err != nil {
			return nil, err
		}
		value, err := json.Marshal(label.Expression)
		if err != nil {
			return nil, err
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = append(append(append(b, name...), ':'), value...)
	}
	return append(b, '}'), nil
}

// UnmarshalJSON reads it back.
func (l *Labels) UnmarshalJSON(b []byte) error {
	d := json.NewDecoder(bytes.NewReader(b))
	if _, err := d.Token(); err != nil {
		return err
	}
	*l = nil
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return err
		}
		var expression string
		if err := d.Decode(&expression); err != nil {
			return err
		}
		*l = append(*l, Label{fmt.Sprint(name), expression})
	}
	return nil
}

//go:embed packs/*.yaml
var shipped embed.FS

// Shipped lists the packs that come with the program.
func Shipped() []*Pack {
	var packs []*Pack
	files, err := fs.Glob(shipped, "packs/*.yaml")
	if err != nil {
		panic(err) // the pattern is a constant
	}
	for _, file := range files {
		text, err := shipped.ReadFile(file)
		if err != nil {
			panic(err) // it is in the program
		}
		p, err := ParsePack(path.Base(file), text)
		if err != nil {
			panic(err) // a test reads them all
		}
		packs = append(packs, p)
	}
	return packs
}

// ReadPack reads a pack's file, or takes one that comes with the program by its
// name.
func ReadPack(nameOrPath string) (*Pack, error) {
	text, err := os.ReadFile(nameOrPath)
	if err == nil {
		if err := onlyOurs(nameOrPath); err != nil {
			return nil, packError(nameOrPath, 1, "file", err.Error())
		}
		return ParsePack(nameOrPath, text)
	}
	var names []string
	for _, p := range Shipped() {
		if p.Name == nameOrPath {
			return p, nil
		}
		names = append(names, p.Name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("pack %s: there is no such file, and no pack of that name comes with culprit (there are %s)", nameOrPath, strings.Join(names, ", "))
	}
	return nil, fmt.Errorf("read pack: %w", err)
}

const packLimit = 1 << 20

// onlyOurs refuses what somebody else may write: it becomes code in the server.
func onlyOurs(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	const others = 0o002
	if info.Mode().Perm()&others != 0 {
		return fmt.Errorf("%s may be written by everybody (mode %s), and becomes code in the server: chmod o-w", path, info.Mode().Perm())
	}
	us := os.Geteuid()
	if owner, known := ownerOf(info); known && us != 0 && owner != 0 && owner != us {
		return fmt.Errorf("%s belongs to user %d, and becomes code in the server: only a file of your own or root's is taken", path, owner)
	}
	return nil
}

// ParsePack reads a pack strictly. An error has the code E_PACK, the file, the
// line and what is wrong there.
func ParsePack(file string, text []byte) (*Pack, error) {
	if len(text) > packLimit {
		return nil, packError(file, 1, "pack", fmt.Sprintf("is longer than %d bytes", packLimit))
	}
	var p Pack
	d := yaml.NewDecoder(bytes.NewReader(text), yaml.Strict())
	if err := d.Decode(&p); err != nil && !errors.Is(err, io.EOF) {
		line, what := yamlError(err)
		return nil, packError(file, line, "YAML", what)
	}
	where := lines(text)
	if at, key, what := p.check(); what != "" {
		return nil, packError(file, where(at), key, what)
	}
	return &p, nil
}

// RefusedError is a probe or a pack that isn't placed, by its code of
// docs/probes.md.
type RefusedError struct {
	Code    string
	Message string
}

func (e *RefusedError) Error() string { return e.Message }

func packError(file string, line int, key, what string) error {
	return &RefusedError{"E_PACK", fmt.Sprintf("pack %s:%d: %s: %s. Nothing was attached.", file, line, key, strings.TrimSuffix(what, "."))}
}

// yamlError is a decoder's error in one line.
func yamlError(err error) (line int, what string) {
	line = 1
	if e, ok := errors.AsType[yaml.Error](err); ok {
		if t := e.GetToken(); t != nil && t.Position != nil {
			line = t.Position.Line
		}
		return line, e.GetMessage()
	}
	what, _, _ = strings.Cut(err.Error(), "\n")
	return line, what
}

// lines says at which line a probe begins; -1 is the pack.
func lines(text []byte) func(probe int) int {
	var at []int
	if file, err := parser.ParseBytes(text, 0); err == nil {
		for _, doc := range file.Docs {
			if m, ok := doc.Body.(*ast.MappingNode); ok {
				for _, v := range m.Values {
					if s, ok := v.Value.(*ast.SequenceNode); ok && v.Key.String() == "probes" {
						for _, n := range s.Values {
							at = append(at, lineOf(n.GetToken()))
						}
					}
				}
			}
		}
	}
	return func(probe int) int {
		if probe < 0 || probe >= len(at) {
			return 1
		}
		return at[probe]
	}
}

func lineOf(t *token.Token) int {
	if t == nil || t.Position == nil {
		return 1
	}
	return t.Position.Line
}

var (
	probeID = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]{0,63}$`)
	hexSum  = regexp.MustCompile(`^[0-9a-f]{64}$`)
)

// The most that a pack may hold: the counter file has 2048 slots.
const (
	maxProbes        = 400
	maxLabels        = 256
	maxExpires       = 24 * time.Hour
	defaultMaxLabels = 32
)

// check names what is wrong: with which probe (-1 is the pack), which key.
func (p *Pack) check() (at int, key, what string) {
	switch expires, err := p.expires(); {
	case p.Version != 1:
		return -1, "probe_pack", fmt.Sprintf("version %d, want 1", p.Version)
	case p.Name == "":
		return -1, "name", "there is none"
	case len(p.Probes) == 0:
		return -1, "probes", "there are none"
	case p.Budget.CorePercent < 0 || p.Budget.MaxHitsPerS < 0:
		return -1, "budget", "it is negative"
	case len(p.Probes) > maxProbes:
		return -1, "probes", fmt.Sprintf("%d of them, at most %d", len(p.Probes), maxProbes)
	case err != nil || expires < 0 || expires > maxExpires:
		return -1, "expires", fmt.Sprintf("%q: want a time such as 30m, at most 24h", p.Expires)
	}
	ids := map[string]bool{}
	for _, q := range p.Probes {
		ids[q.ID] = true
	}
	if c := p.Control.Probe; c != "" && !ids[c] {
		return -1, "control", fmt.Sprintf("no probe %q", c)
	}
	seen := map[string]bool{}
	for i, q := range p.Probes {
		if key, what := q.check(ids); what != "" {
			return i, key, what
		}
		if seen[q.ID] {
			return i, "id", fmt.Sprintf("%q is there twice", q.ID)
		}
		seen[q.ID] = true
	}
	return 0, "", ""
}

func (q *Probe) check(ids map[string]bool) (key, what string) {
	switch {
	case !probeID.MatchString(q.ID):
		return "id", fmt.Sprintf("%q: want letters, digits and _", q.ID)
	case q.As != "" && (!probeID.MatchString(q.As) || ids[q.As]):
		return "as", fmt.Sprintf("%q: want letters, digits and _, and no probe's id", q.As)
	case q.File == "" || !strings.HasSuffix(q.File, ".py") || strings.HasPrefix(q.File, "/") || path.Clean(q.File) != q.File:
		return "file", fmt.Sprintf("%q: want the end of a path, as package/module.py", q.File)
	case q.Function == "":
		return "function", "there is none"
	case q.MaxLabels < 0 || q.MaxLabels > maxLabels:
		return "max_labels", fmt.Sprintf("%d: at most %d", q.MaxLabels, maxLabels)
	case !slices.Contains([]string{"", "calls", "running"}, q.Reach):
		return "reach", fmt.Sprintf("%q: want calls or running", q.Reach)
	case !slices.Contains([]string{"", "split", "ignore"}, q.Capture):
		return "capture", fmt.Sprintf("%q: want split or ignore", q.Capture)
	case q.Anchor == "" && q.Context != Context{}:
		return "context", "there is no anchor that it could be of"
	case !slices.Contains([]string{"", Must, Never}, q.Expect):
		return "expect", fmt.Sprintf("%q: want must or never", q.Expect)
	case q.Branch != nil && (q.Anchor != "" || *q.Branch < 0):
		return "branch", "want a number, and no anchor beside it"
	case q.Control != "" && !ids[q.Control]:
		return "control", fmt.Sprintf("no probe %q", q.Control)
	}
	for _, sum := range q.SHA256 {
		if !hexSum.MatchString(sum) {
			return "sha256", fmt.Sprintf("%q: want 64 hexadecimal digits", sum)
		}
	}
	for _, l := range q.Labels {
		if !probeID.MatchString(l.Name) {
			return "labels", fmt.Sprintf("%q: want letters, digits and _", l.Name)
		}
	}
	return "", ""
}

// defaultBudget is a hundredth of a core in each process.
var defaultBudget = Budget{CorePercent: 1, MaxHitsPerS: 200_000}

func (p *Pack) budget() Budget {
	return Budget{cmp.Or(p.Budget.CorePercent, defaultBudget.CorePercent), cmp.Or(p.Budget.MaxHitsPerS, defaultBudget.MaxHitsPerS)}
}

func (p *Pack) expires() (time.Duration, error) {
	if p.Expires == "" {
		return 30 * time.Minute, nil
	}
	return time.ParseDuration(p.Expires)
}

// index is a probe's place by its ID; -1 for none.
func (p *Pack) index(id string) int {
	return slices.IndexFunc(p.Probes, func(q Probe) bool { return q.ID == id })
}

// controlOf is the probe that must move for a zero of this one to be believed;
// -1 for none.
func (p *Pack) controlOf(i int) int {
	if id := p.Probes[i].Control; id != "" {
		return p.index(id)
	}
	return p.index(p.Control.Probe)
}

// agentProbe is a probe as the agent reads it.
type agentProbe struct {
	Probe
	Before string `json:"before,omitempty"`
	After  string `json:"after,omitempty"`
}

func (p *Pack) agentProbes() []agentProbe {
	probes := make([]agentProbe, len(p.Probes))
	for i, q := range p.Probes {
		if q.MaxLabels == 0 {
			q.MaxLabels = defaultMaxLabels
		}
		probes[i] = agentProbe{q, q.Context.Before, q.Context.After}
	}
	return probes
}

// encode is pack.json: what the agent reads, and what a reading of the counts
// needs. sha256 is that of the same JSON without it.
func (p *Pack) encode() ([]byte, error) {
	type plain Pack // without the probes as they are
	content := struct {
		*plain
		Probes []agentProbe `json:"probes"`
		SHA256 string       `json:"sha256,omitempty"`
	}{plain: (*plain)(p), Probes: p.agentProbes()}
	b, err := json.Marshal(content)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b)
	content.SHA256 = hex.EncodeToString(sum[:])
	return json.MarshalIndent(content, "", " ")
}

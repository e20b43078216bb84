package experiment

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/goccy/go-yaml/ast"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/internal/nearest"
	"github.com/culprit-project/culprit/probe"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// CaseFile is the file of a case's directory that says what it is.
const CaseFile = "case.yaml"

// Case is one investigation: a server that can be launched in many arms, what
// is asked of it, and what the search may cost. docs/case.md is the format of
// its file.
type Case struct {
	Path     string // of the file
	Space    design.Space
	BaseURL  string
	Model    string                    // empty is the server's first
	Files    []string                  // to be attested
	Packages []string                  // to be attested; nil is the engine's own
	Logs     map[string]*regexp.Regexp // lines to be counted, by name
	Require  []*target.Requirement
	Probes   *probe.Pack // put into every launch; nil for none
	Budget   Budget
	Error    float64       // the highest probability of a wrong finding
	Grace    time.Duration // that a server has to end by itself; 0 is the launcher's
	SSH      []string      // the command that reaches hosts; empty is the launcher's

	// Notes are for readers, by factor; not every factor has one.
	Notes map[string]FactorNote

	document  []byte // the file
	processes []processSpec
	needs     []template // labels that a worker must have
	ready     target.Ready
	levels    map[string]map[string]level // by factor and level
	claims    map[string]*target.Claim    // by factor
	knobs     map[string]any              // of the workload
	load      map[string]any
}

// Budget is what a hunt may use; 0 is no limit.
type Budget struct {
	Wall     time.Duration
	Launches int
	Requests int
}

// DefaultError is the error probability of a case that states none.
const DefaultError = 0.01

// level is a level's value, for templates and as a setting.
type level struct {
	value
	setting any
}

// processSpec is a process with its factors still in it.
type processSpec struct {
	name, host, url string
	command         []template
	start, stop     []template
	follow          []template
	dir             template
	env             map[string]template
}

var (
	factorName  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]*$`)
	processName = regexp.MustCompile(`^[A-Za-z0-9_][A-Za-z0-9_.-]*$`)
)

// loadSettings are the settings of the load that may be factors, beside the
// workload's knobs; settings that can't be are in caseSettings.
var loadSettings = []string{"concurrency", "request_rate", "waves", "stream", "timeout", "extra_body"}

// ReadCase reads a case: its file, or the directory that the file is in.
func ReadCase(path string) (*Case, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, CaseFile)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read case: %w", err)
	}
	return ParseCaseOf(path, b, 0)
}

// ParseCase reads a case's file. It names every mistake with its line.
func ParseCase(path string, text []byte) (*Case, error) {
	d, root, err := openDocument(path, text)
	if err != nil {
		return nil, err
	}
	c := &Case{
		Path: path, Error: DefaultError, document: text, Notes: map[string]FactorNote{}, Logs: map[string]*regexp.Regexp{}, levels: map[string]map[string]level{},
		claims: map[string]*target.Claim{}, knobs: map[string]any{}, load: map[string]any{},
	}
	r := &caseReader{document: d, Case: c, at: map[string]ast.Node{}}
	r.read(root)
	if err := d.err(); err != nil {
		return nil, err
	}
	return c, nil
}

// caseReader fills a case in.
type caseReader struct {
	*document
	*Case
	at map[string]ast.Node // where each factor is
}

func (r *caseReader) read(root ast.Node) {
	var forbid []ast.Node
	var targetAt ast.Node
	r.keys(root, "case", map[string]func(ast.Node){
		"target":   func(n ast.Node) { targetAt = n; r.target(n) },
		"factors":  r.factors,
		"workload": func(n ast.Node) { r.settings(n, "workload", r.knobs, knobNames()) },
		"load":     func(n ast.Node) { r.settings(n, "load", r.load, append([]string{"control_sessions"}, loadSettings...)) },
		"forbid":   func(n ast.Node) { forbid = r.items(n) },
		"require": func(n ast.Node) {
			for _, item := range r.items(n) {
				q, err := target.CompileRequirement(r.text(item, "require"))
				if err != nil {
					r.fail(item, "require: %w", err)
					continue
				}
				r.Require = append(r.Require, q)
			}
		},
		"probes": r.probes,
		"budget": func(n ast.Node) {
			r.keys(n, "budget", map[string]func(ast.Node){
				"wall":     func(n ast.Node) { r.Budget.Wall = r.duration(n, "budget: wall") },
				"launches": func(n ast.Node) { r.Budget.Launches = r.integer(n, "budget: launches") },
				"requests": func(n ast.Node) { r.Budget.Requests = r.integer(n, "budget: requests") },
			})
		},
		"error": func(n ast.Node) {
			if r.Error = r.number(n, "error"); !(r.Error > 0 && r.Error < 0.5) {
				r.fail(n, "error: want a probability between 0 and 0.5")
			}
		},
	})
	if targetAt == nil {
		r.fail(root, "target: there is none")
	}
	if len(r.errs) > 0 {
		return // what follows would only repeat it
	}
	if r.forbid(forbid); len(r.errs) > 0 {
		return
	}
	if err := r.Space.Validate(); err != nil {
		r.fail(r.at[""], "%w", err)
		return
	}
	r.used()
	r.probed()
	if len(r.errs) == 0 {
		r.renderAll()
	}
}

// probes reads which packs are put into the launched processes, and what is
// expected of their probes.
func (r *caseReader) probes(n ast.Node) {
	var packs []*probe.Pack
	expect := map[string][]string{}
	r.keys(n, "probes", map[string]func(ast.Node){
		"packs": func(n ast.Node) {
			for _, name := range r.texts(n, "probes: packs") {
				path := name
				if strings.ContainsAny(name, "/.") && !filepath.IsAbs(name) {
					path = filepath.Join(filepath.Dir(r.Path), name)
				}
				p, err := probe.ReadPack(path)
				if err != nil {
					r.fail(n, "probes: %w", err)
					continue
				}
				packs = append(packs, p)
			}
		},
		probe.Must:  func(n ast.Node) { expect[probe.Must] = r.texts(n, "probes: must") },
		probe.Never: func(n ast.Node) { expect[probe.Never] = r.texts(n, "probes: never") },
	})
	if len(packs) == 0 {
		r.fail(n, "probes: packs: there are none")
		return
	}
	all, err := probe.Merge(packs...)
	if err != nil {
		r.fail(n, "probes: %w", err)
		return
	}
	for what, names := range expect {
		for _, name := range names {
			if err := all.Expect(name, what); err != nil {
				r.fail(n, "probes: %s: %w", what, err)
			}
		}
	}
	r.Probes = all
}

// probed makes sure that the probes have a process to go into.
func (r *caseReader) probed() {
	if r.Probes == nil {
		return
	}
	if len(r.processes) == 0 {
		r.fail(nil, "probes: the case launches no process; put them into the server with culprit probe attach, and give culprit run its --probes")
	}
	for _, p := range r.processes {
		if p.host != "" {
			r.fail(nil, "probes: process %s runs on %s: probes go into processes of this machine alone", p.name, p.host)
		}
	}
}

func (r *caseReader) target(n ast.Node) {
	at := map[string]ast.Node{}
	r.keys(n, "target", map[string]func(ast.Node){
		"processes": func(n ast.Node) {
			for _, item := range r.items(n) {
				r.process(item)
			}
		},
		"base_url": func(n ast.Node) {
			base, err := target.ParseBaseURL(r.text(n, "base_url"))
			if err != nil {
				r.fail(n, "target: %w", err)
			}
			r.BaseURL, at["base_url"] = base, n
		},
		"model": func(n ast.Node) { r.Model = r.text(n, "model") },
		"ready": func(n ast.Node) { at["ready"] = n },
		"logs": func(n ast.Node) {
			for _, e := range r.entries(n, "logs") {
				if !factorName.MatchString(e.key) {
					r.fail(e.at, "logs: name %q: want letters, digits and _", e.key)
				}
				r.Logs[e.key] = r.pattern(e.value, "logs: "+e.key)
			}
		},
		"attest": func(n ast.Node) {
			r.keys(n, "attest", map[string]func(ast.Node){
				"files":    func(n ast.Node) { r.Files = r.texts(n, "attest: files") },
				"packages": func(n ast.Node) { r.Packages = append([]string{}, r.texts(n, "attest: packages")...) },
			})
		},
		"needs": func(n ast.Node) {
			for _, need := range r.texts(n, "needs") {
				r.needs = append(r.needs, r.template(n, need))
			}
		},
		"grace": func(n ast.Node) { r.Grace = r.duration(n, "grace") },
		"ssh": func(n ast.Node) {
			if r.SSH = r.texts(n, "ssh"); !r.isList(n) {
				r.SSH = r.words(n)
			}
		},
	})
	if at["base_url"] == nil {
		r.fail(n, "target: base_url: there is none")
	}
	r.ready.URL = r.BaseURL + "/health"
	if at["ready"] != nil {
		r.keys(at["ready"], "ready", map[string]func(ast.Node){
			"url":     func(n ast.Node) { r.ready.URL = r.readyURL(n) },
			"log":     func(n ast.Node) { r.ready.Log = r.pattern(n, "ready: log") },
			"timeout": func(n ast.Node) { r.ready.Timeout = r.duration(n, "ready: timeout") },
		})
	}
}

// readyURL is a path at the base URL, another URL, or none.
func (r *caseReader) readyURL(n ast.Node) string {
	if isNull(r.plain(n)) {
		return ""
	}
	text := r.text(n, "ready: url")
	switch {
	case strings.HasPrefix(text, "/"):
		return r.BaseURL + text
	case strings.HasPrefix(text, "http://"), strings.HasPrefix(text, "https://"):
		return text
	}
	r.fail(n, "ready: url %q: want a path such as /health, or http://...", text)
	return ""
}

func (r *caseReader) pattern(n ast.Node, what string) *regexp.Regexp {
	pattern, err := regexp.Compile("(?m)" + r.text(n, what))
	if err != nil {
		r.fail(n, "%s: %w", what, err)
	}
	return pattern
}

func (r *caseReader) words(n ast.Node) []string {
	words, err := splitWords(r.text(n, "command"))
	if err != nil {
		r.fail(n, "%w", err)
	}
	return words
}

func (r *caseReader) process(n ast.Node) {
	p := processSpec{env: map[string]template{}}
	command := func(into *[]template) func(ast.Node) {
		return func(n ast.Node) {
			words := []string{}
			if r.isList(n) {
				words = r.texts(n, "command")
			} else {
				words = append(words, r.words(n)...)
			}
			for _, w := range words {
				*into = append(*into, r.template(n, w))
			}
		}
	}
	r.keys(n, "process", map[string]func(ast.Node){
		"name":    func(n ast.Node) { p.name = r.text(n, "name") },
		"host":    func(n ast.Node) { p.host = r.text(n, "host") },
		"url":     func(n ast.Node) { p.url = r.text(n, "url") },
		"dir":     func(n ast.Node) { p.dir = r.template(n, r.text(n, "dir")) },
		"command": command(&p.command),
		"start":   command(&p.start),
		"stop":    command(&p.stop),
		"follow":  command(&p.follow),
		"env": func(n ast.Node) {
			for _, e := range r.entries(n, "env") {
				if e.key == "" || strings.ContainsAny(e.key, "=\x00") {
					r.fail(e.at, "env: %q is no name of a variable", e.key)
				}
				text := ""
				if !isNull(r.plain(e.value)) {
					text = r.text(e.value, "env: "+e.key)
				}
				p.env[e.key] = r.template(e.value, text)
			}
		},
	})
	switch {
	case p.name == "" && len(r.processes) == 0:
		p.name = "server"
	case !processName.MatchString(p.name):
		r.fail(n, "process name %q: want letters, digits, . and -, since a log file has it", p.name)
	}
	if slices.ContainsFunc(r.processes, func(q processSpec) bool { return q.name == p.name }) {
		r.fail(n, "process name %q is there twice", p.name)
	}
	if strings.HasPrefix(p.host, "-") {
		r.fail(n, "process %s: host %q would be an option of ssh", p.name, p.host)
	}
	switch {
	case len(p.command) == 0 && len(p.start) == 0:
		r.fail(n, "process %s: no command, and no start", p.name)
	case len(p.command) > 0 && len(p.start)+len(p.stop)+len(p.follow) > 0:
		r.fail(n, "process %s: has a command and start, stop or follow: a command is ended by signals", p.name)
	}
	r.processes = append(r.processes, p)
}

func (r *caseReader) template(at ast.Node, text string) template {
	t, err := parseTemplate(text)
	if err != nil {
		r.fail(at, "%w", err)
	}
	return t
}

func (r *caseReader) factors(n ast.Node) {
	r.at[""] = n
	for _, e := range r.entries(n, "factors") {
		if !factorName.MatchString(e.key) {
			r.fail(e.at, "factor %q: want a name of letters, digits, _ and -", e.key)
			continue
		}
		if e.key == workerName {
			r.fail(e.at, "factor %s: {{%s}} is the number of the worker on its machine; give the factor another name", e.key, e.key)
			continue
		}
		r.at[e.key] = e.at
		r.factor(e.key, e.value)
	}
}

func (r *caseReader) factor(name string, n ast.Node) {
	f := design.Factor{Name: name}
	levels := map[string]level{}
	add := func(at ast.Node, levelName string, role design.Role, of ast.Node) *design.Level {
		if i := f.Level(levelName); i >= 0 {
			if role == "" || f.Levels[i].Role != "" {
				r.fail(at, "factor %s: level %q is there twice", name, levelName)
			}
			f.Levels[i].Role = role
			return &f.Levels[i]
		}
		f.Levels = append(f.Levels, design.Level{Name: levelName, Role: role})
		levels[levelName] = r.level(of, name)
		return &f.Levels[len(f.Levels)-1]
	}
	var suspect, safe, more, commits ast.Node
	var note FactorNote
	ordered := (*bool)(nil)
	r.keys(n, "factor "+name, map[string]func(ast.Node){
		"suspect": func(n ast.Node) { suspect = n },
		"safe":    func(n ast.Node) { safe = n },
		"levels":  func(n ast.Node) { more = n },
		"commits": func(n ast.Node) { commits = n },
		"ordered": func(n ast.Node) { b := r.flag(n, "ordered"); ordered = &b },
		"odds":    func(n ast.Node) { f.Odds = r.number(n, "odds") },
		"note":    func(n ast.Node) { note.Note = r.text(n, "factor "+name+": note") },
		"cost":    func(n ast.Node) { note.Cost = r.number(n, "cost") },
		"attest": func(n ast.Node) {
			f.Attest = r.text(n, "attest")
			claim, err := target.CompileClaim(f.Attest)
			if err != nil {
				r.fail(n, "factor %s: attest: %w", name, err)
			}
			r.claims[name] = claim
		},
	})
	if note != (FactorNote{}) {
		r.Notes[name] = note
	}
	if commits != nil {
		if suspect != nil || safe != nil || more != nil || ordered != nil {
			r.fail(commits, "factor %s: commits are all its levels, in order: take suspect, safe, levels and ordered out", name)
			return
		}
		items := r.items(commits)
		if len(items) < 2 {
			r.fail(commits, "factor %s: wants two commits or more, the good one first and the bad one last", name)
			return
		}
		for i, item := range items {
			text, _ := scalarText(r.plain(item))
			if text == "" {
				r.fail(item, "factor %s: commits: want a commit's name", name)
				continue
			}
			add(item, text, map[int]design.Role{0: design.Safe, len(items) - 1: design.Suspect}[i], item)
		}
		f.Ordered = true
		r.levels[name] = levels
		r.Space.Factors = append(r.Space.Factors, f)
		return
	}
	if suspect == nil || safe == nil {
		r.fail(r.at[name], "factor %s: wants a suspect level, as it is where things fail, and a safe one", name)
		return
	}
	r.moreLevels(name, more, add)
	// Safe first: a factor of two levels is then in order.
	add(safe, r.levelName(safe, design.Safe, levels), design.Safe, safe)
	add(suspect, r.levelName(suspect, design.Suspect, levels), design.Suspect, suspect)
	f.Ordered = inOrder(f.Levels)
	if ordered != nil {
		f.Ordered = *ordered
	} else if f.Ordered {
		slices.SortStableFunc(f.Levels, func(a, b design.Level) int { return cmp.Compare(asNumber(a.Name), asNumber(b.Name)) })
	}
	r.levels[name] = levels
	r.Space.Factors = append(r.Space.Factors, f)
}

// moreLevels reads the levels beside suspect and safe, or with them: a list of
// values, or of name, value and request_cost, or a mapping from name to value.
func (r *caseReader) moreLevels(factor string, n ast.Node, add func(ast.Node, string, design.Role, ast.Node) *design.Level) {
	if n == nil {
		return
	}
	if !r.isList(n) {
		for _, e := range r.entries(n, "factor "+factor+": levels") {
			add(e.at, e.key, "", e.value)
		}
		return
	}
	for _, item := range r.items(n) {
		if text, ok := scalarText(r.plain(item)); ok {
			add(item, text, "", item)
			continue
		}
		var name string
		var of ast.Node
		cost := 0.0
		r.keys(item, "factor "+factor+": level", map[string]func(ast.Node){
			"name":         func(n ast.Node) { name = r.text(n, "name") },
			"value":        func(n ast.Node) { of = n },
			"request_cost": func(n ast.Node) { cost = r.number(n, "request_cost") },
		})
		if name == "" {
			if name, _ = scalarText(r.plain(of)); name == "" {
				r.fail(item, "factor %s: a level that isn't a plain value wants a name", factor)
				continue
			}
		}
		add(item, name, "", of).RequestCost = cost
	}
}

// levelName is a level's text, or its role where it isn't one text.
func (r *caseReader) levelName(n ast.Node, role design.Role, known map[string]level) string {
	text, ok := scalarText(r.plain(n))
	if _, named := known[text]; ok && (named || text != "") {
		return text
	}
	return string(role)
}

func (r *caseReader) level(n ast.Node, factor string) level {
	l := level{setting: r.any(n)}
	switch v := r.plain(n).(type) {
	case nil, *ast.NullNode:
		l.none = true
	case *ast.SequenceNode:
		l.list, l.text = true, r.texts(v, "factor "+factor+": level")
	case *ast.MappingNode, *ast.MappingValueNode:
		l.none = true // a setting of the load alone
	default:
		l.text = []string{r.text(v, "factor "+factor+": level")}
	}
	return l
}

// inOrder reports whether levels are three numbers or more, which have an order.
func inOrder(levels []design.Level) bool {
	return len(levels) > 2 && !slices.ContainsFunc(levels, func(l design.Level) bool { _, err := strconv.ParseFloat(l.Name, 64); return err != nil })
}

func asNumber(text string) float64 {
	f, _ := strconv.ParseFloat(text, 64)
	return f
}

func (r *caseReader) forbid(items []ast.Node) {
	for _, item := range items {
		arm := design.Arm{}
		for _, e := range r.entries(item, "forbid") {
			i := slices.IndexFunc(r.Space.Factors, func(f design.Factor) bool { return f.Name == e.key })
			if i < 0 {
				r.fail(e.at, "forbid: no factor %q; nearest: %q", e.key, nearest.Name(e.key, slices.Sorted(maps.Keys(r.levels))))
				continue
			}
			f, text := r.Space.Factors[i], r.text(e.value, "forbid: "+e.key)
			switch {
			case f.Level(text) >= 0:
			case text == string(design.Suspect) && f.Failing() >= 0:
				text = f.Levels[f.Failing()].Name
			case text == string(design.Safe) && f.Safe() >= 0:
				text = f.Levels[f.Safe()].Name
			default:
				r.fail(e.value, "forbid: factor %s has no level %q; nearest: %q", e.key, text, nearest.Name(text, slices.Sorted(maps.Keys(r.levels[e.key]))))
			}
			arm[e.key] = text
		}
		r.Space.Forbidden = append(r.Space.Forbidden, arm)
	}
}

func (r *caseReader) settings(n ast.Node, what string, into map[string]any, known []string) {
	for _, e := range r.entries(n, what) {
		if !slices.Contains(known, e.key) {
			r.fail(e.at, "%s: unknown key %q; nearest known key: %q", what, e.key, nearest.Name(e.key, slices.Sorted(slices.Values(known))))
			continue
		}
		into[e.key] = r.any(e.value)
	}
}

// knobNames are the workload's keys that a case may set.
func knobNames() []string {
	var names []string
	for f := range reflect.TypeFor[workload.Plan]().Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "version" {
			names = append(names, name)
		}
	}
	return names
}

// templates lists every template of the processes.
func (c *Case) templates() []template {
	var all []template
	for _, p := range c.processes {
		all = slices.Concat(all, p.command, p.start, p.stop, p.follow, []template{p.dir}, slices.Collect(maps.Values(p.env)))
	}
	return slices.Concat(all, c.needs)
}

// used makes sure that every factor does something, and that every template
// has a factor.
func (r *caseReader) used() {
	inTemplates := map[string]bool{}
	names := slices.Collect(maps.Keys(r.levels))
	for _, t := range r.templates() {
		for _, name := range t.factors() {
			if inTemplates[name] = true; r.levels[name] == nil {
				r.fail(nil, "target: {{%s}}: no factor has that name; nearest: %q", name, nearest.Name(name, slices.Sorted(slices.Values(names))))
			}
		}
	}
	settings := append(knobNames(), loadSettings...)
	for i := range r.Space.Factors {
		f := &r.Space.Factors[i]
		if inTemplates[f.Name] {
			continue
		}
		if !slices.Contains(settings, f.Name) {
			r.fail(r.at[f.Name], "factor %s: does nothing: no command or env has {{%s}}, and it is no setting of the load; nearest: %q", f.Name, f.Name, nearest.Name(f.Name, slices.Sorted(slices.Values(settings))))
			continue
		}
		f.ClientSide = true
		if f.Attest != "" {
			r.fail(r.at[f.Name], "factor %s: is the client's own, so there is nothing to attest", f.Name)
		}
	}
}

// renderAll makes sure that every level can be rendered.
func (r *caseReader) renderAll() {
	failing := r.Space.Failing()
	if _, err := r.Render(failing); err != nil {
		r.fail(nil, "the failing arm (%s): %w", failing, err)
		return
	}
	for _, f := range r.Space.Factors {
		for _, l := range f.Levels {
			arm := maps.Clone(failing)
			arm[f.Name] = l.Name
			if _, err := r.Render(arm); err != nil {
				r.fail(r.at[f.Name], "factor %s, level %q: %w", f.Name, l.Name, err)
			}
		}
	}
}

// Rendered is an arm as it is launched and loaded.
type Rendered struct {
	Arm       design.Arm
	Processes []target.Process // none: the server is there already
	Ready     target.Ready
	Needs     []string // labels that a worker must have to launch it
	Plan      Plan     // without the tool and the server, and without the model where the case has none
	// Launch is equal for arms that one launch serves: those that differ in
	// nothing but the client's settings.
	Launch string
}

// Render makes an arm concrete. An arm of the space that the case was read with
// can be rendered, but combinations of settings that the workload refuses.
func (c *Case) Render(arm design.Arm) (*Rendered, error) {
	values := map[string]value{}
	knobs, load := maps.Clone(c.knobs), maps.Clone(c.load)
	for _, f := range c.Space.Factors {
		l, ok := c.levels[f.Name][arm[f.Name]]
		if !ok {
			return nil, fmt.Errorf("render %s: factor %s has no level %q", arm, f.Name, arm[f.Name])
		}
		values[f.Name] = l.value
		switch {
		case !f.ClientSide:
		case slices.Contains(loadSettings, f.Name):
			load[f.Name] = l.setting
		default:
			knobs[f.Name] = l.setting
		}
	}
	r := &Rendered{Arm: maps.Clone(arm), Ready: c.ready}
	for i := range c.processes {
		p, err := c.processes[i].render(values)
		if err != nil {
			return nil, fmt.Errorf("process %s: %w", c.processes[i].name, err)
		}
		r.Processes = append(r.Processes, p)
	}
	needs, err := arguments(c.needs, values)
	if err != nil {
		return nil, fmt.Errorf("needs: %w", err)
	}
	r.Needs = needs
	b, err := json.Marshal(r.Processes)
	if err != nil {
		return nil, err
	}
	sum := sha256.Sum256(b)
	r.Launch = hex.EncodeToString(sum[:8])
	r.Plan, err = c.plan(knobs, load)
	return r, err
}

func (p *processSpec) render(values map[string]value) (target.Process, error) {
	out := target.Process{Name: p.name, Host: p.host, URL: p.url, Env: map[string]string{}}
	var parts [4][]string
	for i, command := range [][]template{p.command, p.start, p.stop, p.follow} {
		var err error
		if parts[i], err = arguments(command, values); err != nil {
			return out, err
		}
	}
	out.Command = parts[0]
	if len(p.start) > 0 {
		out.Command = target.Detached(parts[1], parts[2], parts[3])
	}
	if len(parts[0])+len(parts[1]) == 0 {
		return out, errors.New("its command is empty at this level")
	}
	var err error
	if out.Dir, _, err = p.dir.one(values); err != nil {
		return out, fmt.Errorf("dir: %w", err)
	}
	for _, name := range slices.Sorted(maps.Keys(p.env)) {
		t := p.env[name]
		text, ok, err := t.one(values)
		if err != nil {
			return out, fmt.Errorf("env %s: %w", name, err)
		}
		if !ok {
			out.Unset = append(out.Unset, name)
			continue
		}
		out.Env[name] = text
	}
	return out, nil
}

// plan makes the plan of a run. The workload's settings go through its JSON
// form, so that a knob is known by one name everywhere.
func (c *Case) plan(knobs, load map[string]any) (Plan, error) {
	p := Plan{BaseURL: c.BaseURL, Model: c.Model}
	b, err := json.Marshal(knobs)
	if err != nil {
		return p, err
	}
	w := workload.Plan{Kind: defaultKind, Seed: 1, Sessions: defaultSessions}
	if err := json.Unmarshal(b, &w); err != nil {
		return p, typeError("workload", err)
	}
	if p.Workload, err = w.WithDefaults(); err != nil {
		return p, err
	}
	var s struct {
		Concurrency int                        `json:"concurrency"`
		RequestRate float64                    `json:"request_rate"`
		Waves       bool                       `json:"waves"`
		Control     int                        `json:"control_sessions"`
		Stream      *bool                      `json:"stream"`
		Timeout     string                     `json:"timeout"`
		ExtraBody   map[string]json.RawMessage `json:"extra_body"`
	}
	if b, err = json.Marshal(load); err != nil {
		return p, err
	}
	if err := json.Unmarshal(b, &s); err != nil {
		return p, typeError("load", err)
	}
	p.Concurrency, p.RequestRate, p.Waves, p.Control, p.ExtraBody = s.Concurrency, s.RequestRate, s.Waves, s.Control, s.ExtraBody
	p.NoStream = s.Stream != nil && !*s.Stream
	if s.Timeout != "" {
		timeout, err := time.ParseDuration(s.Timeout)
		if err != nil || timeout <= 0 {
			return p, fmt.Errorf("load: timeout %q: want a time such as 90s or 10m", s.Timeout)
		}
		p.TimeoutMS = timeout.Milliseconds()
	}
	switch {
	case s.RequestRate < 0 || s.Concurrency < 0 || s.Control < 0:
		return p, errors.New("load: concurrency, request_rate and control_sessions must not be negative")
	case s.RequestRate > 0 && s.Waves:
		return p, errors.New("load: requests come in waves or at a request_rate, not both")
	case s.RequestRate == 0 && s.Concurrency == 0:
		p.Concurrency = p.Workload.Sessions
	case s.Concurrency > p.Workload.Sessions:
		return p, fmt.Errorf("load: concurrency %d can't be reached with %d sessions: each conversation has one request open at a time", s.Concurrency, p.Workload.Sessions)
	}
	p.Control = min(p.Control, p.Workload.Sessions)
	return p, nil
}

// typeError says it without Go's types.
func typeError(what string, err error) error {
	if wrong, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		return fmt.Errorf("%s: %s is a %s, which it can't be", what, wrong.Field, wrong.Value)
	}
	return fmt.Errorf("%s: %w", what, err)
}

// The workload of a case that names none; the sessions are the incident's number.
const (
	defaultKind     = "agent"
	defaultSessions = 80
)

// Attest says whether a live server is what an arm says it is: a sentence for
// each factor whose attest expression doesn't hold or can't be told. None means
// that it is.
func (c *Case) Attest(a *target.Attestation, arm design.Arm) []string {
	var wrong []string
	for _, u := range c.unmet(a, arm) {
		wrong = append(wrong, fmt.Sprintf("factor %s: %s", u.Factor, u.Why))
	}
	return wrong
}

// Unmet is a factor whose level the live server doesn't have, or can't be told
// to have.
type Unmet struct {
	Factor string `json:"factor"`
	Level  string `json:"level"`
	Why    string `json:"why"`
}

func (c *Case) unmet(a *target.Attestation, arm design.Arm) []Unmet {
	var wrong []Unmet
	for _, f := range c.Space.Factors {
		claim := c.claims[f.Name]
		i := f.Level(arm[f.Name])
		if claim == nil || i < 0 {
			continue
		}
		ok, why, err := claim.Holds(a, f.Levels[i])
		switch {
		case err != nil:
			wrong = append(wrong, Unmet{f.Name, arm[f.Name], err.Error()})
		case !ok:
			wrong = append(wrong, Unmet{f.Name, arm[f.Name], why})
		}
	}
	return wrong
}

// LevelOf says which of a factor's levels a live server has, by the factor's
// attest expression; empty where it has none, or where several fit or none.
func (c *Case) LevelOf(a *target.Attestation, factor string) string {
	claim := c.claims[factor]
	if claim == nil {
		return ""
	}
	found := ""
	for _, f := range c.Space.Factors {
		if f.Name != factor {
			continue
		}
		for _, l := range f.Levels {
			if ok, _, err := claim.Holds(a, l); err != nil || !ok {
				continue
			}
			if found != "" {
				return ""
			}
			found = l.Name
		}
	}
	return found
}

// Override puts settings of the workload and of the load, by their names in a
// case, in the place of the case's own. Another kind of workload takes none of
// the knobs of the old one.
func (c *Case) Override(settings map[string]any) error {
	if len(settings) == 0 {
		return nil
	}
	if kind, ok := settings["kind"]; ok && kind != cmp.Or[any](c.knobs["kind"], defaultKind) {
		for _, name := range knobNames() {
			if name != "seed" && name != "run_key" && name != "sessions" && name != "kind" {
				delete(c.knobs, name)
			}
		}
	}
	for name, value := range settings {
		if level, ok := c.Space.Failing()[name]; ok && slices.ContainsFunc(c.Space.Factors, func(f design.Factor) bool { return f.ClientSide && f.Name == name }) {
			if level == fmt.Sprint(value) {
				continue // as it is where it fails
			}
			return fmt.Errorf("%s is a factor of %s, so it can't be set", name, c.Path)
		}
		if slices.Contains(loadSettings, name) {
			c.load[name] = value
		} else {
			c.knobs[name] = value
		}
	}
	if _, err := c.Render(c.Space.Failing()); err != nil {
		return err
	}
	document, err := withBlocks(c.document, map[string]any{"workload": c.knobs, "load": c.load})
	if err != nil {
		return fmt.Errorf("%s: %w", c.Path, err)
	}
	c.document = document
	return nil
}

// ReadyWithin sets how long servers have to become ready; 0 changes nothing.
func (c *Case) ReadyWithin(d time.Duration) { c.ready.Timeout = cmp.Or(d, c.ready.Timeout) }

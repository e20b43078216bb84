package probe

import (
	"cmp"
	_ "embed" // the agent
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

//go:embed agent/agent.py
var agentSource []byte

//go:embed agent/sitecustomize.py
var siteSource []byte

// DirVariable names the probe directory for Python processes.
const DirVariable = "CULPRIT_PROBE_DIR"

// Files of a probe directory, beside a PID-TICKS.ctr and .json for each
// process. Only siteDir is on Python's path, so that nothing hides a module.
const (
	packFile  = "pack.json"
	agentFile = "agent.py"
	siteDir   = "python"
	siteFile  = "sitecustomize.py"
	// closedFile says that the directory's probes are to be placed no more.
	closedFile = "closed"
)

// NewDir makes a probe directory for a pack. An empty dir is a new one in
// memory (/dev/shm), where a write never waits for a disk.
func NewDir(dir string, p *Pack) (string, error) {
	if dir == "" {
		parent := fmt.Sprintf("/dev/shm/culprit-%d", os.Getuid())
		if _, err := os.Stat("/dev/shm"); err != nil {
			parent = filepath.Join(os.TempDir(), filepath.Base(parent))
		}
		if err := os.MkdirAll(parent, 0o700); err != nil {
			return "", fmt.Errorf("make probe directory: %w", err)
		}
		var err error
		if dir, err = os.MkdirTemp(parent, p.Name+"-*"); err != nil {
			return "", fmt.Errorf("make probe directory: %w", err)
		}
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", fmt.Errorf("make probe directory: %w", err)
	}
	if err := os.MkdirAll(filepath.Join(dir, siteDir), 0o700); err != nil {
		return "", fmt.Errorf("make probe directory: %w", err)
	}
	if err := onlyOurs(dir); err != nil {
		return "", fmt.Errorf("make probe directory: %w", err)
	}
	if _, err := os.Stat(filepath.Join(dir, packFile)); err == nil {
		return "", fmt.Errorf("make probe directory: %s holds a pack and its counts already: choose another", dir)
	}
	pack, err := p.encode()
	if err != nil {
		return "", fmt.Errorf("make probe directory: %w", err)
	}
	// The pack comes last: where it is, the rest is.
	for _, f := range []struct {
		name string
		text []byte
	}{{agentFile, agentSource}, {filepath.Join(siteDir, siteFile), siteSource}, {packFile, pack}} {
		if err := os.WriteFile(filepath.Join(dir, f.name), f.text, 0o600); err != nil {
			return "", fmt.Errorf("make probe directory: %w", err)
		}
	}
	return dir, nil
}

// Environment is what a Python server is started with to have its probes in
// from the beginning. pythonPath is the PYTHONPATH that it would have without.
func Environment(dir, pythonPath string) map[string]string {
	site := filepath.Join(dir, siteDir)
	if pythonPath != "" {
		site += string(filepath.ListSeparator) + pythonPath
	}
	return map[string]string{"PYTHONPATH": site, DirVariable: dir}
}

// Reading is what a probe directory says at one moment.
type Reading struct {
	Dir       string    `json:"dir"`
	At        time.Time `json:"at"`
	Pack      *Pack     `json:"pack"`
	Processes []Process `json:"processes"`          // by the time they were armed
	Problems  []string  `json:"problems,omitempty"` // files that can't be read, agents that didn't start
}

// Process is one process's counts.
type Process struct {
	PID        int      `json:"pid"`
	Parent     int      `json:"parent"`
	StartTicks uint64   `json:"start_ticks"`
	Alive      bool     `json:"alive"`
	State      string   `json:"state"`
	Mode       string   `json:"mode,omitempty"` // launched, attached or forked
	Python     string   `json:"python,omitempty"`
	SelfTest   bool     `json:"self_test"` // the engine counted rightly in this process
	NSPerHit   float64  `json:"ns_per_hit"`
	Probes     []Placed `json:"probes"` // in the order of the pack
	Notes      []string `json:"notes,omitempty"`

	armedAt time.Duration
	name    string // of its files
}

// Placed is one probe in one process.
type Placed struct {
	ID        string           `json:"id"`
	State     string           `json:"state"`          // waiting, armed, refused or detached
	Code      string           `json:"code,omitempty"` // of docs/probes.md
	Message   string           `json:"message,omitempty"`
	File      string           `json:"file,omitempty"`
	SHA256    string           `json:"sha256,omitempty"`
	Line      int              `json:"line,omitempty"`
	Functions int              `json:"functions,omitempty"`
	StallUS   int64            `json:"stall_us,omitempty"` // processor time that placing its file's probes took
	Counts    Counts           `json:"counts"`
	Labels    map[string]int64 `json:"labels,omitempty"`

	matching bool              // it has a condition
	entering bool              // it counts the function's calls
	raised   string            // what an expression raised first
	noLabel  map[string]uint64 // label values that are none: by "NAME was a TYPE"
}

// maxErrors of a probe's expressions in one process, and the agent there takes
// it out of use: agent.py has the number too.
const maxErrors = 100

// disarmed reports whether that has happened.
func (p *Placed) disarmed() bool { return p.Counts.Errors > maxErrors }

// Counts are a probe's counters.
type Counts struct {
	Entered    uint64 `json:"entered"` // calls of the function; 0 where they aren't counted
	Hits       uint64 `json:"hits"`
	Matches    uint64 `json:"matches"`              // hits for which the condition is True
	Errors     uint64 `json:"errors,omitempty"`     // expressions that raised
	Overflow   uint64 `json:"overflow,omitempty"`   // hits with more label values than are kept
	TypeErrors uint64 `json:"type_error,omitempty"` // labels that are no str, int, bool or None
	Captured   uint64 `json:"captured,omitempty"`   // hits while a CUDA graph was captured
}

func (c Counts) minus(d Counts) Counts {
	return Counts{
		rise(d.Entered, c.Entered), rise(d.Hits, c.Hits), rise(d.Matches, c.Matches), rise(d.Errors, c.Errors),
		rise(d.Overflow, c.Overflow), rise(d.TypeErrors, c.TypeErrors), rise(d.Captured, c.Captured),
	}
}

// rise is by how much a counter rose; one that fell began anew, when the probes
// were attached once more.
func rise[N uint64 | int64](from, to N) N {
	if to < from {
		return to
	}
	return to - from
}

// fileLimit bounds the small files of a probe directory, and processLimit how
// many processes are read: a foe may fill it.
const (
	fileLimit    = 4 << 20
	processLimit = 4096
)

// Read reads all counters of a probe directory. A file that can't be read is a
// problem of the reading, not an error.
func Read(dir string) (*Reading, error) {
	p, err := readPackFile(dir)
	if err != nil {
		return nil, fmt.Errorf("read probes: %w", err)
	}
	r := &Reading{Dir: dir, At: time.Now(), Pack: p}
	files, err := filepath.Glob(filepath.Join(dir, "*.ctr"))
	if err != nil {
		return nil, fmt.Errorf("read probes: %w", err)
	}
	if len(files) > processLimit {
		r.Problems = append(r.Problems, fmt.Sprintf("%d counter files: only %d are read", len(files), processLimit))
		files = files[:processLimit]
	}
	for _, file := range files {
		c, err := readCounters(file)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			continue
		case err != nil:
			r.Problems = append(r.Problems, err.Error())
			continue
		}
		r.Processes = append(r.Processes, r.process(file, c))
	}
	slices.SortStableFunc(r.Processes, func(a, b Process) int {
		return cmp.Or(cmp.Compare(a.armedAt, b.armedAt), cmp.Compare(a.PID, b.PID))
	})
	r.refusedAgents(dir)
	return r, nil
}

// StallMS is the longest time that placing the probes took of a process's
// interpreter, in milliseconds.
func (r *Reading) StallMS() float64 {
	longest := int64(0)
	for i := range r.Processes {
		byFile := map[string]int64{} // a file's probes are placed together
		for _, p := range r.Processes[i].Probes {
			byFile[p.File] = max(byFile[p.File], p.StallUS)
		}
		all := int64(0)
		for _, us := range byFile {
			all += us
		}
		longest = max(longest, all)
	}
	return float64(longest) / 1000
}

func readPackFile(dir string) (*Pack, error) {
	b, err := readSmall(filepath.Join(dir, packFile))
	if err != nil {
		return nil, fmt.Errorf("%w; is %s a probe directory?", err, dir)
	}
	var p Pack
	if err := json.Unmarshal(b, &p); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, packFile), err)
	}
	p.Version = 1
	if _, key, what := p.check(); what != "" {
		return nil, packError(filepath.Join(dir, packFile), 1, key, what)
	}
	return &p, nil
}

func readSmall(path string) ([]byte, error) {
	info, err := os.Stat(path)
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular() || info.Size() > fileLimit:
		return nil, fmt.Errorf("%s: is no plain file of at most %d bytes", path, fileLimit)
	}
	return os.ReadFile(path)
}

// agentReport is what an agent writes beside its counters.
type agentReport struct {
	Python string   `json:"python"`
	Mode   string   `json:"mode"`
	Probes []Placed `json:"probes"`
	Errors []string `json:"errors"`
}

// process puts a process's counters and its agent's words together. The
// counters alone are enough: after a crash there may be nothing else.
func (r *Reading) process(file string, c *counters) Process {
	pid := outerPID(c.PID, c.StartTicks, c.Namespace)
	p := Process{
		PID: pid, name: strings.TrimSuffix(filepath.Base(file), ".ctr"), Parent: c.Parent, StartTicks: c.StartTicks, State: c.State.String(), armedAt: c.ArmedAt,
		Alive:    startTicks(pid) == c.StartTicks,
		SelfTest: c.TestWant > 0 && c.TestWant == c.TestGot,
		NSPerHit: c.NSPerHit,
		Probes:   make([]Placed, len(r.Pack.Probes)),
	}
	var report agentReport
	b, err := readSmall(strings.TrimSuffix(file, ".ctr") + ".json")
	if err == nil {
		err = json.Unmarshal(b, &report)
	}
	if err != nil {
		p.Notes = append(p.Notes, "the agent left no account of its probes: "+err.Error())
	}
	p.Python, p.Mode = report.Python, report.Mode
	p.Notes = append(p.Notes, report.Errors...)
	if c.AgentErrors > 0 {
		p.Notes = append(p.Notes, fmt.Sprintf("the agent had %d errors of its own", c.AgentErrors))
	}
	for i := range p.Probes {
		p.Probes[i] = Placed{ID: r.Pack.Probes[i].ID, State: "unknown", matching: r.Pack.Probes[i].When != ""}
	}
	for _, placed := range report.Probes {
		if i := r.Pack.index(placed.ID); i >= 0 {
			placed.matching, placed.Counts, placed.Labels = p.Probes[i].matching, Counts{}, nil
			p.Probes[i] = placed
		}
	}
	for _, s := range c.Slots {
		if s.probe >= len(p.Probes) {
			continue // the self-test's, or damage
		}
		placed := &p.Probes[s.probe]
		if placed.State == "unknown" {
			placed.State = "armed" // it has slots
		}
		switch q := &placed.Counts; s.kind {
		case kindEntry:
			q.Entered, placed.entering = q.Entered+s.count, true
		case kindHit:
			q.Hits += s.count
		case kindMatch:
			q.Matches += s.count
		case kindError:
			q.Errors += s.count
			placed.raised = cmp.Or(placed.raised, s.text)
		case kindOverflow:
			q.Overflow += s.count
		case kindTypeError:
			q.TypeErrors += s.count
			if what := r.Pack.Probes[s.probe].noLabel(s.text); what != "" && s.count > 0 {
				if placed.noLabel == nil {
					placed.noLabel = map[string]uint64{}
				}
				placed.noLabel[what] += s.count
			}
		case kindCapture:
			q.Captured += s.count
		case kindLabel:
			if placed.Labels == nil {
				placed.Labels = map[string]int64{}
			}
			placed.Labels[r.Pack.Probes[s.probe].labelText(s.text)] += int64(min(s.count, 1<<62))
		default:
		}
	}
	for i := range p.Probes {
		// The agent's account may be older than its counters.
		q := &p.Probes[i]
		if q.State == "waiting" && q.Counts.Hits+q.Counts.Entered > 0 {
			q.State, q.Code, q.Message = "armed", "", ""
		}
		if q.Counts.Overflow > 0 && q.Labels != nil {
			q.Labels[r.Pack.Probes[i].otherText()] += int64(min(q.Counts.Overflow, 1<<62))
		}
		if q.disarmed() && q.State != "refused" {
			q.State, q.Code = "disarmed", "E_EXPR_RAISES"
			q.Message = fmt.Sprintf("disarmed in PID %d after %d errors of its expressions (%s) in %d hits: what it counted is not shown.",
				p.PID, q.Counts.Errors, cmp.Or(q.raised, "of an unknown kind"), q.Counts.Hits)
		}
	}
	return p
}

// labelText writes label values as metrics have them: pool="MHA",page=64.
func (q *Probe) labelText(values string) string {
	var list []json.RawMessage
	if json.Unmarshal([]byte(values), &list) != nil || len(list) != len(q.Labels) {
		return strconv.Quote(values)
	}
	parts := make([]string, len(list))
	for i, v := range list {
		text := string(v)
		var s string
		if json.Unmarshal(v, &s) == nil && text != "null" {
			text = s
		}
		parts[i] = q.Labels[i].Name + "=" + strconv.Quote(text)
	}
	return strings.Join(parts, ",")
}

// otherText is the label of hits with more values than are kept.
func (q *Probe) otherText() string {
	parts := make([]string, len(q.Labels))
	for i, l := range q.Labels {
		parts[i] = l.Name + `="other"`
	}
	return strings.Join(parts, ",")
}

// noLabel says what a value was that can't be a label.
func (q *Probe) noLabel(text string) string {
	var place int
	var kind string
	if json.Unmarshal([]byte(text), &[]any{&place, &kind}) != nil || place < 0 || place >= len(q.Labels) || kind == "" {
		return ""
	}
	return q.Labels[place].Name + " was a " + kind
}

// refusedAgents adds what agents left that couldn't start.
func (r *Reading) refusedAgents(dir string) {
	files, _ := filepath.Glob(filepath.Join(dir, "*.refused.json")) // the pattern is sound
	for _, file := range files[:min(len(files), processLimit)] {
		var e struct {
			Message string `json:"message"`
		}
		b, err := readSmall(file)
		if err == nil {
			err = json.Unmarshal(b, &e)
		}
		if err != nil {
			e.Message = err.Error()
		}
		r.Problems = append(r.Problems, e.Message)
	}
}

// startTicks is when a process was started, as /proc has it; 0 for one that
// isn't there or has ended.
func startTicks(pid int) uint64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	text := string(b)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	const state, started = 0, 19 // fields 3 and 22 of proc(5)
	if len(fields) <= started || fields[state] == "Z" || fields[state] == "X" {
		return 0
	}
	ticks, err := strconv.ParseUint(fields[started], 10, 64)
	if err != nil {
		return 0
	}
	return ticks
}

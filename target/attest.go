package target

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"path"
	"slices"
	"strings"
	"time"
)

// AttestationFormat is the version of the form that [Attestation] has as JSON.
const AttestationFormat = 1

// Attestation is what a live server is really running, read back from it. It
// holds no secret: values are redacted by name and by shape before they are
// kept. Equal servers have equal attestations but for times, process ids and
// the like.
type Attestation struct {
	Format    int            `json:"format"`
	Taken     time.Time      `json:"taken"`
	BaseURL   string         `json:"base_url,omitempty"`
	Engine    string         `json:"engine,omitempty"`
	Version   string         `json:"version,omitempty"`
	Models    []string       `json:"models,omitempty"`
	Processes []ProcessFacts `json:"processes,omitempty"` // parents first
	Endpoints []Endpoint     `json:"endpoints,omitempty"`
	Files     []File         `json:"files,omitempty"` // that were asked for
	Packages  []Package      `json:"packages,omitempty"`
	// Distributions has the versions of what is installed for Python.
	Distributions map[string]string `json:"distributions,omitempty"`
	Libraries     []File            `json:"libraries,omitempty"` // mapped to execute code from, the executables among them
	Hosts         []HostFacts       `json:"hosts,omitempty"`
	// Missing says what couldn't be read, and why.
	Missing []string `json:"missing,omitempty"`
}

// ProcessFacts is a process that lives.
type ProcessFacts struct {
	Name       string    `json:"name"` // of the server's process that it is or was started by
	Host       string    `json:"host,omitempty"`
	PID        int       `json:"pid"`
	Parent     int       `json:"parent"`
	Main       bool      `json:"main,omitempty"` // not started by another of these
	Started    time.Time `json:"started"`
	StartTicks int64     `json:"start_ticks"` // since boot, in 1/100 s: with PID, no other process has it
	Args       []string  `json:"args"`
	Exe        string    `json:"exe"`
	Dir        string    `json:"dir"`
	// Env is the environment that the process was started with; of a process
	// that isn't Main, what differs from its parent's. A program that changes
	// its own environment doesn't show here.
	Env   map[string]string `json:"env,omitempty"`
	Unset []string          `json:"unset,omitempty"` // what its parent has and it hasn't
}

// Endpoint is what the server says of itself at a path.
type Endpoint struct {
	Process string          `json:"process,omitempty"` // whose own URL it is; empty for the base URL
	Path    string          `json:"path"`
	Body    json.RawMessage `json:"body"`
}

// HostFacts is a machine.
type HostFacts struct {
	Name   string `json:"name,omitempty"` // as the case has it; empty for this one
	Kernel string `json:"kernel,omitempty"`
	CPU    string `json:"cpu,omitempty"`
	GPUs   []GPU  `json:"gpus,omitempty"`
}

// GPU is one as nvidia-smi lists it.
type GPU struct {
	Index  string `json:"index"`
	Name   string `json:"name"`
	UUID   string `json:"uuid"`
	Driver string `json:"driver"`
	Memory string `json:"memory"`
	VBIOS  string `json:"vbios,omitempty"`
	ECC    string `json:"ecc,omitempty"`
	MIG    string `json:"mig,omitempty"`
}

// Tree is one process of a server, with what it started.
type Tree struct {
	Name     string
	Host     Host   // nil is this machine
	HostName string // as the case has it
	PIDs     []int
	URL      string // its own, beside the server's; empty for none
}

// AttestOptions says what to read. Everything may be left out.
type AttestOptions struct {
	Server   *Server
	Trees    []Tree
	Files    []string // absolute, or in the first process's working directory
	Packages []string // nil takes the engine's own, from the command line
	// Missing is what the caller couldn't find, to stand beside what can't be
	// read.
	Missing []string
	// Known is an earlier attestation: files that have the size and time that
	// they had then aren't hashed again.
	Known *Attestation
}

// endpointTimeout bounds the wait for one answer about the server.
const endpointTimeout = 20 * time.Second

// ErrNothing says that neither a process nor an answer could be read: the
// server is gone.
var ErrNothing = errors.New("nothing could be read")

// Attest reads what is really running. It fails only when ctx ends or with
// [ErrNothing]; what else is missing is in the attestation.
func Attest(ctx context.Context, o AttestOptions) (*Attestation, error) {
	a := &Attestation{Format: AttestationFormat, Taken: time.Now().UTC().Truncate(time.Second)}
	for _, m := range o.Missing {
		a.miss("%s", m)
	}
	a.askServer(ctx, o)
	r := reader{Attestation: a, options: o}
	for _, t := range o.Trees {
		if t.Host == nil {
			t.Host = Local{}
		}
		r.tree(ctx, t)
	}
	r.hosts(ctx)
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("attest: %w", context.Cause(ctx))
	}
	if len(a.Processes) == 0 && len(a.Endpoints) == 0 {
		return nil, fmt.Errorf("attest: %w: %s", ErrNothing, strings.Join(a.Missing, "; "))
	}
	return a, nil
}

func (a *Attestation) miss(format string, args ...any) {
	a.Missing = append(a.Missing, Redact(fmt.Sprintf(format, args...)))
}

// askServer asks the paths that engines answer at. Those that aren't the
// engine's answer 404, which is nothing to report.
func (a *Attestation) askServer(ctx context.Context, o AttestOptions) {
	if o.Server != nil {
		a.BaseURL = Redact(o.Server.BaseURL)
		id, err := o.Server.Identify(ctx)
		if err != nil {
			a.miss("%v", err)
		}
		a.Engine, a.Version, a.Models = id.Engine, id.Version, id.Models
		a.endpoints(ctx, "", o.Server)
	}
	for _, t := range o.Trees {
		if t.URL == "" {
			continue
		}
		s := &Server{BaseURL: t.URL, Client: http.DefaultClient}
		if o.Server != nil {
			s.Header, s.Client = o.Server.Header, o.Server.Client
		}
		a.endpoints(ctx, t.Name, s)
	}
}

func (a *Attestation) endpoints(ctx context.Context, process string, s *Server) {
	got := map[string]bool{}
	for _, p := range []string{"/server_info", "/get_server_info", "/model_info", "/get_model_info", "/props", "/version", "/v1/models"} {
		if newer := strings.Replace(p, "/get_", "/", 1); newer != p && got[newer] {
			continue // the name that it had before
		}
		body, err := s.ask(ctx, p)
		status, answered := errors.AsType[*statusError](err)
		switch {
		case err == nil:
		case !answered:
			a.miss("%s: %v", p, err)
			return
		case status.code == http.StatusNotFound || status.code == http.StatusMethodNotAllowed:
			continue
		default:
			a.miss("%v", err)
			continue
		}
		got[p] = true
		a.Endpoints = append(a.Endpoints, Endpoint{process, strings.Replace(p, "/get_", "/", 1), body})
	}
}

func (s *Server) ask(ctx context.Context, p string) (json.RawMessage, error) {
	ctx, cancel := context.WithTimeout(ctx, endpointTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.BaseURL+p, http.NoBody)
	if err != nil {
		return nil, err
	}
	body, _, err := s.do(req)
	if err != nil {
		return nil, err
	}
	value, err := redactJSON(body)
	if err != nil { // a page for every path, say
		return nil, &statusError{http.MethodGet, p, "with something that isn't JSON", http.StatusOK, body}
	}
	return value, nil
}

// reader fills an attestation in.
type reader struct {
	*Attestation
	options  AttestOptions
	machines []Tree // one of each host
}

func (r *reader) tree(ctx context.Context, t Tree) {
	if !slices.ContainsFunc(r.machines, func(m Tree) bool { return m.HostName == t.HostName }) {
		r.machines = append(r.machines, t)
	}
	boot, err := bootTime(ctx, t.Host)
	if err != nil {
		r.miss("%s: when the machine was booted: %v", t.Name, err)
	}
	var family []ProcessFacts
	plain := map[int]map[string]string{} // environments with their secrets, by PID
	var mapped []string
	for _, pid := range t.PIDs {
		p, env, libraries, err := r.readProcess(ctx, t, pid, boot)
		if err != nil {
			r.miss("%s: process %d: %v", t.Name, pid, err)
			continue
		}
		family, plain[pid] = append(family, p), env
		mapped = append(mapped, libraries...)
	}
	if len(family) == 0 {
		r.miss("%s: none of its processes could be read", t.Name)
		return
	}
	for i := range family {
		p := &family[i]
		parent, ours := plain[p.Parent]
		p.Main = !ours
		for name, value := range plain[p.PID] {
			if old, inherited := parent[name]; !inherited || old != value {
				if p.Env == nil {
					p.Env = map[string]string{}
				}
				p.Env[name] = redactText(name, value)
			}
		}
		for name := range parent {
			if _, has := plain[p.PID][name]; !has {
				p.Unset = append(p.Unset, name)
			}
		}
		slices.Sort(p.Unset)
	}
	slices.SortStableFunc(family, func(p, q ProcessFacts) int { return cmp.Compare(p.StartTicks, q.StartTicks) })
	slices.SortStableFunc(family, func(p, q ProcessFacts) int { return -compareBool(p.Main, q.Main) })
	r.Processes = append(r.Processes, family...)
	r.disk(ctx, t, family[0], unique(append(executables(family), mapped...)))
}

func compareBool(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	}
	return -1
}

func executables(family []ProcessFacts) []string {
	var paths []string
	for _, p := range family {
		if p.Exe != "" {
			paths = append(paths, p.Exe)
		}
	}
	return paths
}

// readProcess reads a process of which at least /proc/PID/stat can be read. env
// has its secrets still.
func (r *reader) readProcess(ctx context.Context, t Tree, pid int, boot int64) (p ProcessFacts, env map[string]string, libraries []string, err error) {
	proc := fmt.Sprintf("/proc/%d/", pid)
	line, err := t.Host.ReadFile(ctx, proc+"stat")
	if err != nil {
		return p, nil, nil, err
	}
	s, ok := parseStat(string(line))
	if !ok {
		return p, nil, nil, fmt.Errorf("%sstat holds %.60q", proc, line)
	}
	const ticksPerSecond = 100 // USER_HZ, the same on every Linux
	p = ProcessFacts{
		Name: t.Name, Host: t.HostName, PID: pid, Parent: s.parent, StartTicks: s.startTicks,
		Started: time.Unix(boot+s.startTicks/ticksPerSecond, 0).UTC(),
	}
	read := func(name string) []byte {
		b, err := t.Host.ReadFile(ctx, proc+name)
		if err != nil {
			r.miss("%s: process %d: %v", t.Name, pid, err)
		}
		return b
	}
	link := func(name string) string {
		to, err := t.Host.Readlink(ctx, proc+name)
		if err != nil {
			r.miss("%s: process %d: %v", t.Name, pid, err)
		}
		return to
	}
	env = parseEnv(read("environ"))
	p.Args = redactArgs(parseNul(read("cmdline")))
	p.Exe, p.Dir = link("exe"), link("cwd")
	return p, env, parseMaps(read("maps")), nil
}

// disk reads the files that a process of the server works with.
func (r *reader) disk(ctx context.Context, t Tree, p ProcessFacts, mapped []string) {
	d := disk{host: t.Host, root: rootOf(ctx, t.Host, p.PID), known: map[string]File{}}
	if r.options.Known != nil {
		for _, f := range slices.Concat(r.options.Known.Files, r.options.Known.Libraries) {
			if f.Process == p.Name {
				d.known[f.Path] = f
			}
		}
	}
	add := func(to *[]File, paths []string, wanted bool) {
		files, err := d.files(ctx, paths)
		if err != nil {
			r.miss("%s: hash files: %v", p.Name, err)
			return
		}
		for _, at := range paths {
			f, ok := files[at]
			switch {
			case ok:
				f.Process = p.Name
				*to = append(*to, f)
			case wanted:
				r.miss("%s: %s isn't there, or can't be read", p.Name, at)
			default: // deleted since it was mapped
				r.miss("%s: %s is mapped but can't be found", p.Name, at)
			}
		}
	}
	slices.Sort(mapped)
	add(&r.Libraries, mapped, false)
	var wanted []string
	for _, f := range r.options.Files {
		wanted = append(wanted, within("", p.Dir, f))
	}
	add(&r.Files, wanted, true)
	names := r.options.Packages
	if names == nil {
		names = enginePackages(p.Args)
	}
	if len(names) == 0 {
		return
	}
	py, err := pythonOf(ctx, d, &p, mapped)
	if err != nil {
		r.miss("%s: %v", p.Name, err)
		return
	}
	for _, name := range names {
		pkg, err := py.read(ctx, name, p.Started.Unix())
		if err != nil {
			r.miss("%s: %v", p.Name, err)
			continue
		}
		r.Packages = append(r.Packages, pkg)
		r.Packages[len(r.Packages)-1].Process = p.Name
	}
	versions, err := py.distributions(ctx)
	if err != nil {
		r.miss("%s: %v", p.Name, err)
	}
	if r.Distributions == nil {
		r.Distributions = map[string]string{}
	}
	maps.Copy(r.Distributions, versions)
	for i := range r.Packages {
		if own := &r.Packages[i]; own.Version == "" {
			own.Version = versions[normalName(own.Name)]
		}
	}
}

// enginePackages are the packages whose source matters most, by the command
// line that runs them.
func enginePackages(args []string) []string {
	for i, arg := range args {
		for _, name := range []string{"sglang", "vllm", "tensorrt_llm", "lmdeploy", "dynamo"} {
			module := i > 0 && args[i-1] == "-m" && (arg == name || strings.HasPrefix(arg, name+"."))
			if module || path.Base(arg) == name && i < 2 {
				return []string{name}
			}
		}
	}
	return nil
}

// gpuQuery is what nvidia-smi is asked for, in GPU's order.
const gpuQuery = "--query-gpu=index,name,uuid,driver_version,memory.total,vbios_version,ecc.mode.current,mig.mode.current"

func (r *reader) hosts(ctx context.Context) {
	if len(r.options.Trees) == 0 {
		return
	}
	for _, m := range r.machines {
		facts := HostFacts{Name: m.HostName}
		if out, err := m.Host.Run(ctx, "uname", "-srm"); err == nil {
			facts.Kernel = strings.TrimSpace(string(out))
		}
		if b, err := m.Host.ReadFile(ctx, "/proc/cpuinfo"); err == nil {
			facts.CPU = parseCPU(string(b))
		}
		out, err := m.Host.Run(ctx, "sh", "-c", "command -v nvidia-smi >/dev/null || exit 0; nvidia-smi "+gpuQuery+" --format=csv,noheader")
		if err != nil {
			r.miss("%s: ask for the GPUs: %v", cmp.Or(m.HostName, "this machine"), err)
		}
		facts.GPUs = parseGPUs(out)
		r.Hosts = append(r.Hosts, facts)
	}
}

func parseCPU(info string) string {
	model, cores := "", 0
	for line := range strings.Lines(info) {
		name, value, _ := strings.Cut(line, ":")
		switch strings.TrimSpace(name) {
		case "processor":
			cores++
		case "model name":
			model = strings.TrimSpace(value)
		}
	}
	return fmt.Sprintf("%d x %s", cores, cmp.Or(model, "unknown"))
}

func parseGPUs(out []byte) []GPU {
	var gpus []GPU
	for _, line := range splitLines(out) {
		f := strings.Split(line, ", ")
		if len(f) != 8 {
			continue
		}
		gpus = append(gpus, GPU{Index: f[0], Name: f[1], UUID: f[2], Driver: f[3], Memory: f[4], VBIOS: f[5], ECC: f[6], MIG: f[7]})
	}
	return gpus
}

// decodeJSON keeps numbers as they are written.
func decodeJSON(b []byte) (any, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	var value any
	if err := d.Decode(&value); err != nil {
		return nil, err
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("more than one JSON value")
	}
	return value, nil
}

func encodeJSON(value any) (json.RawMessage, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(value)
	return bytes.TrimSpace(b.Bytes()), err
}

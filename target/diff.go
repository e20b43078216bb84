package target

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
)

// Kind says what a difference is in, the most telling first.
type Kind int

// The kinds of differences.
const (
	FlagDiff     Kind = iota // the command line
	SettingDiff              // what the server says of itself
	EnvDiff                  // the environment
	FileDiff                 // files that were asked for, and packages' source
	VersionDiff              // engine, model, distributions
	LibraryDiff              // executables and libraries
	HardwareDiff             // machine, driver, GPUs
	NoiseDiff                // ports, process ids, times, what counts as it runs
)

var kindNames = []string{"flag", "setting", "env", "file", "version", "library", "hardware", "noise"}

func (k Kind) String() string { return kindNames[k] }

// MarshalText gives the kind's name.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Difference is one thing that two attestations don't have alike.
type Difference struct {
	Kind    Kind   `json:"kind"`
	Process string `json:"process,omitempty"`
	Name    string `json:"name"` // of the flag, variable, file, ...
	A       string `json:"a"`
	B       string `json:"b"`
}

// Absent is the value that a difference has where there is none.
const Absent = "(none)"

// Diff says what two servers don't have alike, most telling first. Processes
// are compared by name; when each side has one of them, whatever its name.
func Diff(a, b *Attestation) []Difference {
	left, right := factsOf(a), factsOf(b)
	if one(left.processes) && one(right.processes) {
		left.rename("")
		right.rename("")
	}
	silence(left, right)
	silence(right, left)
	var diffs []Difference
	for key := range left.values {
		if l, r := left.values[key], right.get(key); l != r {
			diffs = append(diffs, Difference{key.kind, key.process, key.name, l, r})
		}
	}
	for key, r := range right.values {
		if _, both := left.values[key]; !both {
			diffs = append(diffs, Difference{key.kind, key.process, key.name, Absent, r})
		}
	}
	diffs = slices.DeleteFunc(diffs, func(d Difference) bool {
		key := factKey{d.Kind, d.Process, ofRank.ReplaceAllString(d.Name, "$1")}
		return key.name != d.Name && left.get(key) == d.A && right.get(key) == d.B
	})
	slices.SortFunc(diffs, func(x, y Difference) int {
		return cmp.Or(cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.Process, y.Process), cmp.Compare(x.Name, y.Name))
	})
	return diffs
}

// ofRank is a setting that SGLang says once more for each of its ranks.
var ofRank = regexp.MustCompile(`^(server_info\.)internal_states\[[0-9]+\]\.`)

// Changed says what changed on a server between two attestations, if anything
// did that makes a run between them void: it restarted, or what it runs is
// another. It compares what doesn't change as a server works: libraries are
// loaded when they are first needed.
func Changed(before, after *Attestation) []Difference {
	changed := slices.DeleteFunc(Diff(before, after), func(d Difference) bool {
		return d.Kind == NoiseDiff || d.Kind == LibraryDiff && (d.A == Absent || d.B == Absent)
	})
	return append(restarts(before, after), changed...)
}

// restarts compares the main processes: those that they start may come and go.
func restarts(before, after *Attestation) []Difference {
	var diffs []Difference
	list := func(a *Attestation) map[string]string {
		by := map[string]string{}
		for _, p := range a.Processes {
			if p.Main {
				by[p.Name] = strings.TrimPrefix(by[p.Name]+fmt.Sprintf(", process %d of %s", p.PID, p.Started.Format("15:04:05.00")), ", ")
				by[p.Name] += fmt.Sprintf(" (tick %d)", p.StartTicks)
			}
		}
		return by
	}
	l, r := list(before), list(after)
	for _, name := range slices.Sorted(maps.Keys(l)) {
		if l[name] != r[name] {
			diffs = append(diffs, Difference{FlagDiff, name, "restarted", l[name], cmp.Or(r[name], Absent)})
		}
	}
	said, now := factsOf(before), factsOf(after)
	for _, mark := range startMarks {
		key := factKey{NoiseDiff, "", mark}
		if x, y := said.get(key), now.get(key); x != y {
			diffs = append(diffs, Difference{FlagDiff, "", "restarted", mark + " " + x, mark + " " + y})
		}
	}
	return diffs
}

// startMarks are what servers choose or note once, when they start.
var startMarks = []string{"server_info.started", "server_info.startup_time", "server_info.random_seed", "props.media_marker"}

type factKey struct {
	kind          Kind
	process, name string
}

// facts are an attestation as names and values.
type facts struct {
	processes map[string]bool
	values    map[factKey]string
	endpoints map[factKey]int // how many settings each has; the name ends with a point
}

func one(m map[string]bool) bool { return len(m) == 1 }

func (f *facts) set(kind Kind, process, name, value string) {
	f.values[factKey{kind, process, name}] = value
}

func (f *facts) get(key factKey) string {
	if v, ok := f.values[key]; ok {
		return v
	}
	return Absent
}

// silence puts one fact in the place of what an endpoint says that the other
// side doesn't answer at.
func silence(f, other *facts) {
	for e, count := range f.endpoints {
		if _, both := other.endpoints[e]; both {
			continue
		}
		maps.DeleteFunc(f.values, func(key factKey, _ string) bool {
			return key.process == e.process && strings.HasPrefix(key.name, e.name) && (key.kind == SettingDiff || key.kind == NoiseDiff)
		})
		f.set(SettingDiff, e.process, strings.TrimRight(e.name, "."), fmt.Sprintf("%d settings", count))
	}
}

// rename gives all processes one name.
func (f *facts) rename(name string) {
	for key, value := range f.values {
		if f.processes[key.process] {
			delete(f.values, key)
			key.process = name
			f.values[key] = value
		}
	}
	for key, count := range f.endpoints {
		if f.processes[key.process] {
			delete(f.endpoints, key)
			key.process = name
			f.endpoints[key] = count
		}
	}
}

func factsOf(a *Attestation) *facts {
	f := &facts{map[string]bool{}, map[factKey]string{}, map[factKey]int{}}
	for _, p := range a.Processes {
		f.processes[p.Name] = true
	}
	for name := range f.processes {
		f.processesNamed(name, a.Processes)
	}
	for _, e := range a.Endpoints {
		f.endpoint(e)
	}
	for _, file := range a.Files {
		f.set(FileDiff, file.Process, file.Path, file.describe())
	}
	for _, p := range a.Packages {
		f.packageFiles(p)
	}
	if a.Engine != "" {
		f.set(VersionDiff, "", "engine", strings.TrimSpace(a.Engine+" "+a.Version))
	}
	f.set(VersionDiff, "", "models", strings.Join(a.Models, ", "))
	for name, version := range a.Distributions {
		f.set(VersionDiff, "", name, version)
	}
	for _, l := range a.Libraries {
		f.set(LibraryDiff, l.Process, l.Path, l.describe())
	}
	for _, h := range a.Hosts {
		f.host(h)
	}
	if a.BaseURL != "" {
		f.set(NoiseDiff, "", "base URL", a.BaseURL)
	}
	return f
}

func (f File) describe() string {
	if f.SHA256 != "" {
		return fmt.Sprintf("sha256 %s, %d bytes", f.SHA256[:min(12, len(f.SHA256))], f.Size)
	}
	return fmt.Sprintf("%d bytes of time %d, not hashed", f.Size, f.MTime)
}

// processesNamed gives the facts of one process of the server and of those it
// started: of these, how many there are and what differs in their
// environments, since they take turns to come and go.
func (f *facts) processesNamed(name string, all []ProcessFacts) {
	children := 0
	for _, p := range all {
		switch {
		case p.Name != name:
		case p.Main:
			program, flags := Flags(p.Args)
			f.set(FlagDiff, name, "command", strings.Join(program, " "))
			for flag, value := range flags {
				f.set(flagKind(flag), name, flag, value)
			}
			for variable, value := range p.Env {
				f.set(envKind(variable), name, variable, value)
			}
			f.set(NoiseDiff, name, "process id", fmt.Sprint(p.PID))
			f.set(NoiseDiff, name, "started", p.Started.Format("2006-01-02T15:04:05Z"))
			f.set(NoiseDiff, name, "working directory", p.Dir)
		default:
			children++
		}
	}
	f.set(NoiseDiff, name, "processes started by it", fmt.Sprint(children))
}

// Flags takes a command line apart: what runs, and its flags by name. A flag's
// value is what follows "=" or the arguments up to the next flag, "true" where
// there are none; of a flag that is there twice, all values.
func Flags(args []string) (program []string, flags map[string]string) {
	flags = map[string]string{}
	at := ""
	var values []string
	flush := func() {
		if at == "" {
			return
		}
		value := "true"
		if len(values) > 0 {
			value = strings.Join(values, " ")
		}
		if old, twice := flags[at]; twice {
			value = old + " " + value
		}
		flags[at], values = value, nil
	}
	for i, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		switch {
		case at == "" && i > 0 && (args[i-1] == "-m" || arg == "-m"):
			program = append(program, arg) // python3 -m MODULE is what runs
		case !strings.HasPrefix(arg, "-") || len(arg) == 1 || negativeNumber(arg):
			if at == "" {
				program = append(program, arg)
			} else {
				values = append(values, arg)
			}
		default:
			flush()
			at = name
			if joined {
				values = append(values, value)
			}
		}
	}
	flush()
	return program, flags
}

func negativeNumber(arg string) bool {
	return strings.Trim(arg, "-0123456789.") == "" && strings.ContainsAny(arg, "0123456789")
}

// noisyFlags and noisyVariables differ between servers that are alike.
var (
	noisyFlags = []string{
		"--port", "--host", "--nccl-port", "--dist-init-addr", "--disaggregation-bootstrap-port", "--log-file", "--served-model-name", "--addr-file", "--prefill", "--decode", "--master-port",
	}
	noisyVariables = []string{
		"PWD", "OLDPWD", "SHLVL", "_", "TERM", "COLORTERM", "TMUX", "TMUX_PANE", "STY", "LS_COLORS", "HOSTNAME", "LINES", "COLUMNS", "WINDOWID", "DISPLAY", "MAIL", "LOGNAME", "PS1",
		"INVOCATION_ID", "JOURNAL_STREAM", "TMPDIR", "DBUS_SESSION_BUS_ADDRESS", "MASTER_PORT", LaunchVariable,
	}
	noisyPrefixes = []string{"SSH_", "XDG_", "LESS", "VSCODE_", "KUBERNETES_", "SLURM_JOB", "SLURM_STEP", "GNOME_", "ITERM_", "TERM_"}
)

func flagKind(name string) Kind {
	if slices.Contains(noisyFlags, name) {
		return NoiseDiff
	}
	return FlagDiff
}

func envKind(name string) Kind {
	if slices.Contains(noisyVariables, name) || slices.ContainsFunc(noisyPrefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
		return NoiseDiff
	}
	return EnvDiff
}

// noisyKeys of what servers say of themselves change as they work, or differ
// between servers that are alike.
var noisyKeys = []string{
	"port", "host", "launch_command", "nccl_port", "dist_init_addr", "disaggregation_bootstrap_port", "random_seed", "created", "permission", "startup_time", "uptime", "uptime_s",
	"last_gen_throughput", "memory_usage", "avg_spec_accept_length", "step_time_dict", "status", "kv_events", "is_sleeping", "started", "now", "id_start",
	"load", "num_running_reqs", "num_queue_reqs", "requests", "counters", "stats", "log_file", "pid", "process_id",
	"id_task", "is_processing", "media_marker", "next_token", "prompt", "n_past", "n_decoded", "n_remain",
}

// endpoint flattens what the server says to paths such as
// "server_info.speculative.steps".
func (f *facts) endpoint(e Endpoint) {
	var value any
	if err := json.Unmarshal(e.Body, &value); err != nil {
		return // an attestation of ours holds only JSON
	}
	name, before := strings.ReplaceAll(strings.Trim(e.Path, "/"), "/", "."), len(f.values)
	f.flatten(e.Process, name, value, false)
	f.endpoints[factKey{SettingDiff, e.Process, name + "."}] = len(f.values) - before
}

func (f *facts) flatten(process, name string, value any, noisy bool) {
	switch v := value.(type) {
	case map[string]any:
		for key, member := range v {
			f.flatten(process, name+"."+key, member, noisy || slices.Contains(noisyKeys, key))
		}
		return
	case []any:
		if plainList(v) {
			break
		}
		for i, member := range v {
			f.flatten(process, fmt.Sprintf("%s[%d]", name, i), member, noisy)
		}
		return
	}
	kind := SettingDiff
	if noisy {
		kind = NoiseDiff
	}
	b, err := encodeJSON(value)
	if err != nil {
		return
	}
	f.set(kind, process, name, strings.Trim(string(b), `"`))
}

func plainList(values []any) bool {
	return !slices.ContainsFunc(values, func(v any) bool {
		switch v.(type) {
		case map[string]any, []any:
			return true
		}
		return false
	})
}

func (f *facts) packageFiles(p Package) {
	f.set(FileDiff, p.Process, p.Name+" (source)", fmt.Sprintf("sha256 %s, %d files", p.SHA256[:min(12, len(p.SHA256))], len(p.Files)))
	f.set(FileDiff, p.Process, p.Name+" (commit)", cmp.Or(p.Commit, Absent))
	f.set(FileDiff, p.Process, p.Name+" (directory)", p.Dir)
	for name, sum := range p.Files {
		f.set(FileDiff, p.Process, path.Join(p.Name, name), sum)
	}
	for _, name := range p.Newer {
		f.set(FileDiff, p.Process, path.Join(p.Name, name)+" (written after the start)", "true")
	}
}

func (f *facts) host(h HostFacts) {
	f.set(HardwareDiff, h.Name, "kernel", h.Kernel)
	f.set(HardwareDiff, h.Name, "CPU", h.CPU)
	var models, drivers []string
	for _, g := range h.GPUs {
		models = append(models, g.Name)
		drivers = append(drivers, g.Driver)
		f.set(HardwareDiff, h.Name, "GPU "+g.Index, fmt.Sprintf("%s, %s, VBIOS %s, ECC %s, MIG %s", g.Name, g.Memory, g.VBIOS, g.ECC, g.MIG))
		f.set(NoiseDiff, h.Name, "GPU "+g.Index+" id", g.UUID)
	}
	f.set(HardwareDiff, h.Name, "GPUs", fmt.Sprintf("%d: %s", len(models), strings.Join(unique(models), ", ")))
	f.set(HardwareDiff, h.Name, "driver", strings.Join(unique(drivers), ", "))
}

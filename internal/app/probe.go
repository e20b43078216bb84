package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/probe"
	"github.com/culprit-project/culprit/stats"
	"github.com/culprit-project/culprit/target"
)

// ProbePacks lists the packs that come with the program.
func ProbePacks(out Output) error {
	packs := probe.Shipped()
	if out.Screen == nil {
		return writeJSON(out.JSON, packs)
	}
	rows := [][]string{{"pack", "probes", "written against", "about"}}
	for _, p := range packs {
		rows = append(rows, []string{p.Name, fmt.Sprint(len(p.Probes)), p.Target.Package + " " + p.Target.Version, term.Clip(p.About, 40)})
	}
	out.Screen.Printf("%s", out.Screen.Table("lrll", rows))
	return nil
}

// ProbeLintOptions say where a pack's source is.
type ProbeLintOptions struct {
	Pack, Source, Python string
	WriteHash            bool // into the pack's file
}

// ProbeLint places a pack's probes in a source tree, without any server.
func ProbeLint(ctx context.Context, o ProbeLintOptions, out Output) error {
	p, err := probe.ReadPack(o.Pack)
	if err != nil {
		return &UsageError{err}
	}
	lints, err := probe.Python{Command: o.Python}.Lint(ctx, p, o.Source, !o.WriteHash)
	if err != nil {
		return &UsageError{err}
	}
	if out.Screen == nil {
		if err := writeJSON(out.JSON, lints); err != nil {
			return err
		}
	}
	wrong := 0
	sums := map[string]string{}
	for i, l := range lints {
		if sums[p.Probes[i].File] = l.SHA256; l.Code != "" {
			wrong++
		}
		if s := out.Screen; s != nil {
			showLint(s, p.Probes[i].File, l)
		}
	}
	if wrong > 0 {
		return &NoVerdictError{fmt.Errorf("lint: %d of %d probes of %s would be refused in %s", wrong, len(lints), p.Name, o.Source)}
	}
	if o.WriteHash {
		if err := probe.WriteHashes(o.Pack, sums); err != nil {
			return &UsageError{err}
		}
	}
	return nil
}

func showLint(s *term.Screen, file string, l probe.Lint) {
	if l.Code != "" {
		s.Printf("%s %s\n", s.Paint("refused", term.Red), term.Safe(l.ID))
		for _, line := range term.Wrap(l.Code+": "+term.Safe(l.Message), s.Columns()-4) {
			s.Printf("    %s\n", line)
		}
		return
	}
	s.Printf("%s      %s  %s\n", s.Paint("ok", term.Green), term.Safe(l.ID), s.Paint(term.Safe(fmt.Sprintf("%s:%d", file, l.Line)), term.Faint))
	for _, w := range l.Warnings {
		s.Printf("    %s\n", term.Safe(w))
	}
}

// ProbeDir makes a probe directory for a pack, to be used with environment
// variables alone.
func ProbeDir(pack, dir string) (string, error) {
	p, err := probe.ReadPack(pack)
	if err != nil {
		return "", &UsageError{err}
	}
	return probe.NewDir(dir, p)
}

// ProbeRunOptions say what to start with probes in it.
type ProbeRunOptions struct {
	Pack, Dir  string
	Command    []string
	PythonPath string // of our own environment
	Stdin      *os.File
	Stdout     *os.File
	Stderr     *os.File
}

// ProbeRun starts a command with probes and shows the counts when it has
// ended. It returns the command's exit code.
func ProbeRun(ctx context.Context, o ProbeRunOptions, out Output) (int, error) {
	p, err := probe.ReadPack(o.Pack)
	if err != nil {
		return 0, &UsageError{err}
	}
	return probeRun(ctx, p, o, out, func(r *probe.Reading) error { return showReading(nil, r, out) })
}

func probeRun(ctx context.Context, p *probe.Pack, o ProbeRunOptions, out Output, show func(*probe.Reading) error) (int, error) {
	dir, err := probe.NewDir(o.Dir, p)
	if err != nil {
		return 0, &UsageError{err}
	}
	out.Progress.Printf("probes: %s; watch them with: culprit probe watch %s\n", dir, dir)
	cmd := exec.CommandContext(ctx, o.Command[0], o.Command[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = o.Stdin, o.Stdout, o.Stderr
	cmd.Env = cmd.Environ()
	for name, value := range probe.Environment(dir, o.PythonPath) {
		cmd.Env = append(cmd.Env, name+"="+value)
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = target.DefaultGrace
	err = cmd.Run()
	failed, exited := errors.AsType[*exec.ExitError](err)
	if err != nil && !exited && ctx.Err() == nil {
		return 0, usage("run %s: %w", o.Command[0], err)
	}
	r, readErr := probe.Read(dir)
	if readErr != nil {
		return 0, readErr
	}
	if err := show(r); err != nil {
		return 0, err
	}
	switch {
	case !exited:
		return 0, nil
	case failed.ExitCode() < 0:
		out.Progress.Printf("the command was ended by a signal: %s; its last counts are kept in %s\n", failed, dir)
		return 128 + int(failed.Sys().(syscall.WaitStatus).Signal()), nil
	default:
		return failed.ExitCode(), nil
	}
}

// ProbeRead shows a probe directory's counts, of a server that runs or one that
// has ended.
func ProbeRead(dir string, out Output) error {
	r, err := probe.Read(dir)
	if err != nil {
		return &UsageError{err}
	}
	var pids []int
	for i := range r.Processes {
		if r.Processes[i].Alive {
			pids = append(pids, target.Descendants(r.Processes[i].PID)...)
		}
	}
	slices.Sort(pids)
	r.Problems = append(r.Problems, append(r.Shared(), r.WithoutAgent(slices.Compact(pids))...)...)
	return showReading(nil, r, out)
}

// ProbeWatchOptions say how long to look.
type ProbeWatchOptions struct {
	Dir   string
	For   time.Duration // 0 is until interrupted, or until no process is left
	Every time.Duration
}

// ProbeWatch shows what moves, and detaches the probes when they cost more than
// the pack's budget or have been in longer than it allows.
func ProbeWatch(ctx context.Context, o ProbeWatchOptions, out Output) error {
	first, err := probe.Read(o.Dir)
	if err != nil {
		return &UsageError{err}
	}
	w := probe.Watcher{Dir: o.Dir, Every: o.Every}
	if o.For > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, o.For)
		defer cancel()
	}
	last, err := w.Run(ctx, func(before, after *probe.Reading) {
		out.Progress.Progress(movement(before, after))
	})
	if err != nil {
		return err
	}
	for _, gone := range w.Ended {
		out.Progress.Printf("%s\n", term.Safe(gone))
	}
	if w.Stopped != "" {
		out.Progress.Printf("%s\n", term.Safe(w.Stopped))
	}
	return showReading(first, last, out)
}

// movement is a line of what counts a second.
func movement(before, after *probe.Reading) string {
	seconds := after.At.Sub(before.At).Seconds()
	var parts []string
	for _, r := range probe.Results(before, after) {
		if n := r.Count(); n > 0 && seconds > 0 {
			parts = append(parts, fmt.Sprintf("%s %.4g/s", r.ID, float64(n)/seconds))
		}
	}
	cost := 0.0
	for _, l := range probe.Loads(before, after) {
		cost = max(cost, l.CorePercent)
	}
	if len(parts) == 0 {
		return "nothing moved"
	}
	return term.Safe(strings.Join(parts, ", ")) + fmt.Sprintf("; at most %.2g%% of a core", cost)
}

// ProbeAttach puts a pack into a running process, and into what it started if
// tree says so. It returns the probe directory.
func ProbeAttach(ctx context.Context, pid int, pack, dir string, tree bool, out Output) (string, error) {
	p, err := probe.ReadPack(pack)
	if err != nil {
		return "", &UsageError{err}
	}
	return attach(ctx, pid, p, dir, tree, out)
}

func attach(ctx context.Context, pid int, p *probe.Pack, dir string, tree bool, out Output) (string, error) {
	var err error
	if dir == "" {
		dir, err = probe.NewDirFor(pid, p)
	} else {
		dir, err = probe.NewDir(dir, p)
	}
	if refused, ok := errors.AsType[*probe.RefusedError](err); ok {
		return "", &NoVerdictError{fmt.Errorf("attach to %d: %w", pid, refused)}
	}
	if err != nil {
		return "", &UsageError{err}
	}
	out.Progress.Printf("probes: %s. Once they are out again, what stays in a process until it ends: the module _culprit_state, and a fork hook that does nothing.\n", dir)
	probe.AwaitPython(ctx, pid)
	pids := []int{pid}
	if tree {
		pids = append(pids, slices.DeleteFunc(target.Descendants(pid), probe.IsResourceTracker)...)
	}
	// At once: one that sleeps takes its time to answer.
	answers := make([]error, len(pids))
	var all sync.WaitGroup
	for i, pid := range pids {
		all.Go(func() { answers[i] = probe.Attach(ctx, dir, pid) })
	}
	all.Wait()
	attached := 0
	var refusals, others []error
	for _, err := range answers {
		refused, ok := errors.AsType[*probe.RefusedError](err)
		switch {
		case err == nil:
			attached++
		case ok && refused.Code == "E_NOT_PYTHON": // a shell, a compiler: it can't run the code either
			others = append(others, refused)
		case ok:
			refusals = append(refusals, refused)
		default:
			return "", err
		}
	}
	if attached+len(refusals) == 0 {
		refusals = others
	}
	for _, r := range refusals {
		out.Progress.Printf("%s\n", term.Safe(r.Error()))
	}
	if attached == 0 {
		return "", &NoVerdictError{fmt.Errorf("attach to %d: no process took the probes", pid)}
	}
	stalled, refused := 0.0, 0
	if r, err := probe.Read(dir); err == nil {
		stalled = r.StallMS()
		refused = len(slices.DeleteFunc(probe.Results(nil, r), func(r probe.Result) bool { return r.Finding != probe.Unplaced }))
	}
	out.Progress.Printf("attached to %d of %d Python processes; placing the probes held Python there for %.0f ms at most; %d of %d probes were refused (culprit probe read says why)\n",
		attached, attached+len(refusals), stalled, refused, len(p.Probes))
	return dir, nil
}

// ProbeDetach takes the probes of a directory out of every process.
func ProbeDetach(ctx context.Context, dir string, out Output) error {
	r, err := probe.Read(dir)
	if err != nil {
		return &UsageError{err}
	}
	n, err := probe.DetachAll(ctx, r)
	if err != nil {
		return &NoVerdictError{err}
	}
	out.Progress.Printf("detached from %d of %d; every function has its original code object. Left until exit: the module _culprit_state.\n", n, n)
	return nil
}

// ProbeFunctionOptions say which function, and in which process or command.
type ProbeFunctionOptions struct {
	Function string // MODULE:FUNCTION
	Source   string // directory of the source; empty is where the process has it
	PID      int
	For      time.Duration
	Python   string
	Run      ProbeRunOptions
}

// ProbeBranches counts every branch of a function: in a process that runs, in a
// command, or, with neither, it lists them.
func ProbeBranches(ctx context.Context, o ProbeFunctionOptions, out Output) (int, error) {
	module, function, ok := strings.Cut(o.Function, ":")
	if !ok || module == "" || function == "" {
		return 0, usage("branches %q: want MODULE:FUNCTION, as sglang.srt.mem_cache.allocator:PagedTokenToKVPoolAllocator.free", o.Function)
	}
	python := probe.Python{Command: o.Python}
	file, suffix, err := moduleFile(ctx, python, module, o)
	if err != nil {
		return 0, err
	}
	p, branches, err := python.BranchPack(ctx, file, suffix, function)
	if err != nil {
		return 0, &UsageError{err}
	}
	show := func(r *probe.Reading) error { return showBranches(r, nil, branches, o, out) }
	switch {
	case o.PID != 0:
		r, before, err := attachFor(ctx, o, p, out)
		if err != nil {
			return 0, err
		}
		return 0, showBranches(r, before, branches, o, out)
	case len(o.Run.Command) > 0:
		return probeRun(ctx, p, o.Run, out, show)
	default:
		return 0, showBranches(nil, nil, branches, o, out)
	}
}

// attachFor attaches for a while, detaches, and returns the readings at the
// end and the beginning.
func attachFor(ctx context.Context, o ProbeFunctionOptions, p *probe.Pack, out Output) (after, before *probe.Reading, err error) {
	dir, err := attach(ctx, o.PID, p, o.Run.Dir, true, out)
	if err != nil {
		return nil, nil, err
	}
	if before, err = probe.Read(dir); err != nil {
		return nil, nil, err
	}
	wait, cancel := context.WithTimeout(ctx, o.For)
	defer cancel()
	<-wait.Done()
	if after, err = probe.Read(dir); err != nil {
		return nil, nil, err
	}
	// An interrupt ends the wait, and the process is left as it was all the same.
	ctx, cancel = context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
	defer cancel()
	if _, err := probe.DetachAll(ctx, after); err != nil {
		return nil, nil, &NoVerdictError{err}
	}
	return after, before, nil
}

// moduleFile finds a module's file: under the source directory, or where the
// process's own interpreter finds it.
func moduleFile(ctx context.Context, python probe.Python, module string, o ProbeFunctionOptions) (file, suffix string, err error) {
	parts := strings.Split(module, ".")
	asFile := filepath.Join(parts...) + ".py"
	asPackage := filepath.Join(append(parts, "__init__.py")...)
	var roots []string
	switch {
	case o.Source != "":
		roots = []string{o.Source, filepath.Dir(filepath.Clean(o.Source))}
	case o.PID != 0:
		roots, err = probe.SearchPath(ctx, o.PID)
	default:
		roots, err = python.SearchPath(ctx, o.Run.PythonPath)
	}
	if err != nil {
		return "", "", &UsageError{err}
	}
	for _, root := range roots {
		for _, suffix := range []string{asFile, asPackage} {
			if info, err := os.Stat(filepath.Join(root, suffix)); err == nil && info.Mode().IsRegular() {
				return filepath.Join(root, suffix), filepath.ToSlash(suffix), nil
			}
		}
	}
	return "", "", usage("find module %s: not under %s; name its directory with --source", module, strings.Join(roots, ", "))
}

func showBranches(after, before *probe.Reading, branches []probe.Branch, o ProbeFunctionOptions, out Output) error {
	if after == nil {
		if out.Screen == nil {
			return writeJSON(out.JSON, branches)
		}
		rows := [][]string{{"line", "branch"}}
		for _, b := range branches {
			rows = append(rows, []string{fmt.Sprint(b.Line), term.Safe(b.Text)})
		}
		out.Screen.Printf("%s", out.Screen.Table("rl", clipLast(rows, out.Screen.Columns())))
		return nil
	}
	results := probe.Results(before, after)
	if out.Screen == nil {
		return writeJSON(out.JSON, struct {
			Branches []probe.Branch `json:"branches"`
			Results  []probe.Result `json:"results"`
		}{branches, results})
	}
	s := out.Screen
	calls := results[0]
	s.Printf("%s: %s\n", term.Safe(o.Function), term.Safe(string(calls.Finding)+", "+calls.Says))
	rows := [][]string{{"line", "count", "branch"}}
	for i, b := range branches[:min(len(branches), len(results)-1)] {
		r := results[i+1]
		count := fmt.Sprint(r.Counts.Hits)
		if r.Finding != probe.Live && calls.Counts.Hits == 0 || r.Finding == probe.Unplaced {
			count = "?"
		}
		rows = append(rows, []string{fmt.Sprint(b.Line), count, term.Safe(b.Text)})
	}
	s.Printf("%s", s.Table("rrl", clipLast(rows, s.Columns())))
	return nil
}

// clipLast cuts the last column to what is left of a line.
func clipLast(rows [][]string, columns int) [][]string {
	used := 2
	for i := range len(rows[0]) - 1 {
		widest := 0
		for _, row := range rows {
			widest = max(widest, len(row[i]))
		}
		used += widest + 2
	}
	for _, row := range rows {
		row[len(row)-1] = term.Clip(row[len(row)-1], columns-used)
	}
	return rows
}

// ProbeFind shows where a text is in the deployed source, with the hash of
// what is there and, in a process, whether each place was reached.
func ProbeFind(ctx context.Context, text string, o ProbeFunctionOptions, out Output) (int, error) {
	if o.Source == "" {
		return 0, usage("find: which source? Name a package's directory with --source")
	}
	places, p, err := probe.Python{Command: o.Python}.Find(ctx, text, o.Source)
	if err != nil {
		return 0, &UsageError{err}
	}
	show := func(after, before *probe.Reading) error { return showPlaces(places, p, after, before, out) }
	switch {
	case len(p.Probes) == 0, o.PID == 0 && len(o.Run.Command) == 0:
		return 0, show(nil, nil)
	case o.PID != 0:
		after, before, err := attachFor(ctx, o, p, out)
		if err != nil {
			return 0, err
		}
		return 0, show(after, before)
	default:
		return probeRun(ctx, p, o.Run, out, func(r *probe.Reading) error { return show(r, nil) })
	}
}

func showPlaces(places []probe.Place, p *probe.Pack, after, before *probe.Reading, out Output) error {
	var results []probe.Result
	if after != nil {
		results = probe.Results(before, after)
	}
	of := func(i int) *probe.Result {
		id := fmt.Sprintf("place_%d", i+1)
		if j := slices.IndexFunc(results, func(r probe.Result) bool { return r.ID == id }); j >= 0 {
			return &results[j]
		}
		return nil
	}
	if out.Screen == nil {
		type place struct {
			probe.Place
			Result *probe.Result `json:"result,omitempty"`
		}
		list := make([]place, len(places))
		for i := range places {
			list[i] = place{places[i], of(i)}
		}
		return writeJSON(out.JSON, list)
	}
	s := out.Screen
	for i, at := range places {
		s.Printf("%s:%d  %s\n", term.Safe(at.Path), at.Line, s.Paint("sha256 "+at.SHA256[:12], term.Faint))
		where := at.Function
		switch {
		case where == "":
			where = "outside functions: runs once, at import"
		case at.Anchor == "":
			where += ": its head, a docstring or a comment"
		}
		s.Printf("    %s\n    %s\n", term.Clip(term.Safe(at.Text), s.Columns()-4), term.Safe(where))
		if r := of(i); r != nil {
			s.Printf("    %s: %s\n", s.Paint(string(r.Finding), term.Bold), term.Safe(r.Says))
		}
	}
	s.Printf("%d places, %d of them can be counted\n", len(places), len(p.Probes))
	return nil
}

// showReading shows what moved between two readings of a probe directory.
func showReading(before, after *probe.Reading, out Output) error {
	results := probe.Results(before, after)
	if out.Screen == nil {
		return writeJSON(out.JSON, struct {
			*probe.Reading
			Results []probe.Result `json:"results"`
		}{after, results})
	}
	s := out.Screen
	alive, cost := 0, 0.0
	for i := range after.Processes {
		if after.Processes[i].Alive {
			alive++
		}
		cost = max(cost, after.Processes[i].NSPerHit)
	}
	s.Printf("%s: processes with the agent: %d, running: %d; a hit with a condition takes %.0f ns\n\n", term.Safe(after.Pack.Name), len(after.Processes), alive, cost)
	rows := [][]string{{"probe", "finding", "count", "hits", "entered"}}
	for _, r := range results {
		row := []string{term.Safe(r.ID), string(r.Finding), "", "", ""}
		if r.Evident() {
			row[2], row[3], row[4] = fmt.Sprint(r.Count()), fmt.Sprint(r.Counts.Hits), fmt.Sprint(r.Counts.Entered)
			if r.Counts.Entered == 0 && r.Counts.Hits > 0 {
				row[4] = "-" // without an anchor, calls are the hits
			}
		}
		rows = append(rows, row)
	}
	s.Printf("%s\n", s.Table("llrrr", rows))
	for _, r := range results {
		showResult(s, &r)
	}
	for _, problem := range after.Problems {
		s.Printf("%s %s\n", s.Paint("!", term.Yellow), term.Safe(problem))
	}
	for i := range after.Processes {
		for _, note := range after.Processes[i].Notes {
			s.Printf("%s PID %d: %s\n", s.Paint("!", term.Yellow), after.Processes[i].PID, term.Safe(note))
		}
	}
	return nil
}

const labelRows = 12 // of a probe's label values are shown

func showResult(s *term.Screen, r *probe.Result) {
	indent := func(text string) {
		for _, line := range term.Wrap(term.Safe(text), s.Columns()-6) {
			s.Printf("      %s\n", line)
		}
	}
	s.Printf("  %s: %s\n", s.Paint(term.Safe(r.ID), term.Bold), string(r.Finding))
	indent(r.Says)
	labels := slices.SortedFunc(maps.Keys(r.Labels), func(a, b string) int {
		if d := r.Labels[b] - r.Labels[a]; d != 0 {
			return int(min(max(d, -1), 1))
		}
		return strings.Compare(a, b)
	})
	for i, label := range labels {
		if i == labelRows {
			indent(fmt.Sprintf("and %d more", len(labels)-i))
			break
		}
		s.Printf("      %10d  %s\n", r.Labels[label], term.Clip(term.Safe(label), s.Columns()-18))
	}
	for _, w := range r.Warnings {
		indent("! " + w)
	}
}

// ProbeCost measures what a hit costs, in each of some interpreters.
func ProbeCost(ctx context.Context, pythons []string, out Output) error {
	if len(pythons) == 0 {
		pythons = []string{"python3"}
	}
	var costs []probe.Cost
	for _, python := range pythons {
		c, err := probe.Python{Command: python}.Cost(ctx)
		if err != nil {
			return &UsageError{err}
		}
		costs = append(costs, c)
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, costs)
	}
	head, align := []string{"ns a hit, best / median"}, "l"
	for _, c := range costs {
		head, align = append(head, c.Python), align+"r"
	}
	rows := [][]string{head}
	for i, w := range costs[0].Ways {
		row := []string{w.Way}
		for _, c := range costs {
			row = append(row, fmt.Sprintf("%.0f / %.0f", c.Ways[i].BestNS, c.Ways[i].MedianNS))
		}
		rows = append(rows, row)
	}
	out.Screen.Printf("%s", out.Screen.Table(align, rows))
	return nil
}

// recordProbes puts the counts of probe directories into a run's history.
func recordProbes(dirs []string, logger *slog.Logger) func(context.Context, time.Time, func(*history.Event) error) {
	if len(dirs) == 0 {
		return nil
	}
	return func(ctx context.Context, start time.Time, emit func(*history.Event) error) {
		err := (&probe.Recorder{Dirs: dirs, Start: start, Emit: emit}).Run(ctx)
		if err != nil && logger != nil {
			logger.Warn("read probes", slog.Any("error", err))
		}
	}
}

// ProbeEffectOptions say what the cost of probes is measured on.
type ProbeEffectOptions struct {
	Pack    string
	PID     int // of the server
	Pairs   int
	Command []string // the workload
}

// Effect is what a workload took with probes in the server and without.
type Effect struct {
	With    EffectSide `json:"with"`
	Without EffectSide `json:"without"`
	// Wall is the change of the time that the workload takes, and CPU of the
	// processor time that the server takes for it, which other work on the
	// machine disturbs less.
	Wall Change `json:"wall"`
	CPU  Change `json:"cpu"`
	// Rate is the change of the share of broken replies, in points of 1; nil
	// where the workload shows no verdict.
	Rate        *Change `json:"rate,omitempty"`
	Hits        uint64  `json:"hits"`
	CorePercent float64 `json:"core_percent"` // of the process in which counting took most
}

// EffectSide is what the blocks of one side came to.
type EffectSide struct {
	WallS  []float64 `json:"wall_s"` // by block
	CPUS   []float64 `json:"cpu_s"`
	Failed int       `json:"failed"` // blocks in which the command exited with 1: the server is broken
	Broken int       `json:"broken"` // replies, where the workload shows a verdict
	Judged int       `json:"judged"`
}

// Change is a mean over pairs with its 95% interval.
type Change struct {
	Mean float64 `json:"mean"`
	Low  float64 `json:"low"`
	High float64 `json:"high"`
}

// ratios are the change of a quantity as a share of what it is without.
func ratios(with, without []float64) Change {
	var logs []float64
	for i := range with {
		if with[i] > 0 && without[i] > 0 {
			logs = append(logs, math.Log(with[i]/without[i]))
		}
	}
	mean, low, high := stats.MeanInterval(logs, 0.95)
	return Change{math.Expm1(mean), math.Expm1(low), math.Expm1(high)}
}

// block is one run of the workload.
type block struct {
	wallS, cpuS            float64
	failed, broken, judged int
}

// ProbeEffect runs a workload in blocks, with the probes in a running server
// and without, each pair in the opposite order of the last, so that a drift
// isn't taken for their effect.
func ProbeEffect(ctx context.Context, o ProbeEffectOptions, out Output) error {
	p, err := probe.ReadPack(o.Pack)
	if err != nil {
		return &UsageError{err}
	}
	if len(o.Command) == 0 || o.PID == 0 || o.Pairs < 2 {
		return usage("cost: want --pid of the server, the workload's command after --, and at least 2 pairs")
	}
	var e Effect
	var rates []float64
	for pair := range o.Pairs {
		var blocks [2]block
		for i := range 2 {
			with := (pair+i)%2 == 1
			side := map[bool]*EffectSide{true: &e.With, false: &e.Without}[with]
			out.Progress.Progress(fmt.Sprintf("pair %d of %d, %s probes", pair+1, o.Pairs, map[bool]string{true: "with", false: "without"}[with]))
			b, err := effectBlock(ctx, o, p, with, &e, out)
			if err != nil {
				return err
			}
			side.WallS, side.CPUS = append(side.WallS, b.wallS), append(side.CPUS, b.cpuS)
			side.Failed, side.Broken, side.Judged = side.Failed+b.failed, side.Broken+b.broken, side.Judged+b.judged
			blocks[map[bool]int{true: 1, false: 0}[with]] = b
		}
		if blocks[0].judged > 0 && blocks[1].judged > 0 {
			rates = append(rates, float64(blocks[1].broken)/float64(blocks[1].judged)-float64(blocks[0].broken)/float64(blocks[0].judged))
		}
	}
	e.Wall, e.CPU = ratios(e.With.WallS, e.Without.WallS), ratios(e.With.CPUS, e.Without.CPUS)
	if len(rates) == o.Pairs {
		mean, low, high := stats.MeanInterval(rates, 0.95)
		e.Rate = &Change{mean, low, high}
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, e)
	}
	showEffect(out.Screen, p.Name, &e)
	return nil
}

func showEffect(s *term.Screen, pack string, e *Effect) {
	share := func(what string, c Change) {
		s.Printf("  %s: %+.1f%% (95%%: %+.1f%% to %+.1f%%) with the probes in\n", what, 100*c.Mean, 100*c.Low, 100*c.High)
	}
	s.Printf("%d blocks with %s, %d without, in turns\n", len(e.With.WallS), term.Safe(pack), len(e.Without.WallS))
	share("the workload's time", e.Wall)
	if slices.Max(e.Without.CPUS) > 0 {
		share("the server's processor time", e.CPU)
	}
	if r := e.Rate; r != nil {
		s.Printf("  broken replies: %d of %d with, %d of %d without\n", e.With.Broken, e.With.Judged, e.Without.Broken, e.Without.Judged)
		s.Printf("  observer effect on the rate: %+.1f points (%+.1f to %+.1f); more than %.1f is excluded\n",
			100*r.Mean, 100*r.Low, 100*r.High, 100*max(math.Abs(r.Low), math.Abs(r.High)))
	}
	s.Printf("  blocks that failed: %d of %d with, %d of %d without\n", e.With.Failed, len(e.With.WallS), e.Without.Failed, len(e.Without.WallS))
	s.Printf("  %d hits; counting took at most %.2g%% of a core of a process\n", e.Hits, e.CorePercent)
}

// effectBlock runs the workload once.
func effectBlock(ctx context.Context, o ProbeEffectOptions, p *probe.Pack, with bool, e *Effect, out Output) (b block, err error) {
	var before *probe.Reading
	if with {
		if len(e.With.WallS) > 0 {
			out.Progress = term.NewScreen(io.Discard) // what the first attach said
		}
		dir, err := attach(ctx, o.PID, p, "", true, out)
		if err != nil {
			return b, err
		}
		defer func() { err = errors.Join(err, probe.Remove(dir)) }()
		if before, err = probe.Read(dir); err != nil {
			return b, err
		}
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, o.Command[0], o.Command[1:]...)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	began, used := time.Now(), serverCPU(o.PID)
	err = cmd.Run()
	b.wallS, b.cpuS = time.Since(began).Seconds(), serverCPU(o.PID)-used
	exit, exited := errors.AsType[*exec.ExitError](err)
	switch {
	case err == nil:
	case exited && exit.ExitCode() == 1:
		b.failed = 1
	case exited && exit.ExitCode() == 125: // it couldn't tell, and took its time all the same
	default:
		return b, &NoVerdictError{fmt.Errorf("cost: the workload failed: %w: %s", err, lastLine(append(stdout.Bytes(), stderr.Bytes()...)))}
	}
	var v oracle.Verdict // of culprit run --format json
	if json.Unmarshal(stdout.Bytes(), &v) == nil {
		b.broken, b.judged = v.Broken.Main.Failures, v.Broken.Main.Trials
	}
	if with {
		after, err := probe.Read(before.Dir)
		if err != nil {
			return b, err
		}
		for _, r := range probe.Results(before, after) {
			e.Hits += r.Counts.Hits
		}
		for _, l := range probe.Loads(before, after) {
			e.CorePercent = max(e.CorePercent, l.CorePercent)
		}
		if _, err := probe.DetachAll(ctx, after); err != nil {
			return b, &NoVerdictError{err}
		}
	}
	return b, nil
}

// serverCPU is the processor time in seconds that a process and those that it
// started have used, as far as /proc tells.
func serverCPU(pid int) float64 {
	const ticksPerS = 100 // USER_HZ, on every Linux that Go runs on
	sum := 0.0
	for _, p := range append([]int{pid}, target.Descendants(pid)...) {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
		if err != nil {
			continue
		}
		fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
		const user, system = 11, 12 // fields 14 and 15 of proc(5)
		for _, i := range []int{user, system} {
			if i < len(fields) {
				n, _ := strconv.ParseFloat(string(fields[i]), 64)
				sum += n / ticksPerS
			}
		}
	}
	return sum
}

func lastLine(b []byte) string {
	text := strings.TrimSpace(string(b))
	return text[strings.LastIndexByte(text, '\n')+1:]
}

package experiment

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/probe"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/stats"
	"github.com/culprit-project/culprit/target"
)

// The files of a hunt: its directory has one run directory a trial under
// RunsDir, and in each of them what the search made of it.
const (
	RunsDir     = "runs"
	TrialFile   = "trial.json"
	AttestFile  = "attest.json"
	FindingFile = "finding.json"
	// PreflightFile says which settings don't take effect.
	PreflightFile = "preflight.json"
)

// HuntOptions is what a hunt takes.
type HuntOptions struct {
	Dir      string // the case's; made when it isn't there
	Case     *Case
	Tool     string // name and version of the program
	Search   search.Options
	Launcher *target.Launcher
	Header   http.Header
	Crew     Crew               // runs the trials elsewhere, several at once; nil runs one after the other here
	Resume   bool               // go on from the trials that are in Dir
	Odds     map[string]float64 // by factor, on top of the case's: what is known of them beforehand
	// Preflight hears which settings take no effect, before the first trial.
	Preflight func([]Unmet)
	// Unready hears that the server doesn't start with everything safe, so that
	// only the trials show which settings take no effect.
	Unready  func(*target.LaunchError)
	Step     func(Step)            // before and after each trial
	Load     func(Progress)        // within one
	UnderWay func([]search.Ticket) // with a crew: what runs now
	Logger   *slog.Logger
}

// Step is a trial that begins, or that came to its end.
type Step struct {
	Number   int
	Trial    Trial
	Ended    bool
	Verdict  *oracle.Verdict // nil when there is none
	Resumed  bool            // it was there already
	Progress search.Progress // after it
}

// Trial is what was asked for, what came of it, and why it doesn't count where
// it doesn't. It is trial.json.
type Trial struct {
	Dir         string              `json:"dir"`
	Space       string              `json:"space"` // fingerprint
	Proposal    search.Proposal     `json:"proposal"`
	Observation *search.Observation `json:"observation"`
	Note        string              `json:"note,omitempty"`
	LaunchMS    int64               `json:"launch_ms,omitempty"`
	RunMS       int64               `json:"run_ms,omitempty"`
	TokensPerS  float64             `json:"tokens_per_s,omitempty"` // under load
	// Wedge says that what counts as a failure is that the server stops
	// answering: it did so in the first trial, and nothing that it wrote was wrong.
	Wedge bool `json:"wedge,omitempty"`
	Ran   *Ran `json:"ran,omitempty"` // by a crew
}

// Launches says whether it launched its server. Trials of several launches may
// lie between those of one: Launch tells them apart.
func (t *Trial) Launches() bool { return t.Proposal.Launch || t.Observation.Launched }

// believed is how many leading causes a step shows.
const believed = 5

// Result is what a hunt has come to. It is finding.json.
type Result struct {
	search.Finding
	// Untested are factors whose safe level never took effect, so that nothing
	// can be said of them: they stayed as in the failing arm.
	Untested []Unmet   `json:"untested,omitempty"`
	Wedge    bool      `json:"wedge,omitempty"` // see [Trial]
	Contrast *Contrast `json:"contrast,omitempty"`
	WaysOut  []WayOut  `json:"ways_out,omitempty"` // the cheapest first
}

// Hunt finds the culprit. It returns when the search has come to a finding,
// or with ctx's error; the trials up to then are on disk, and Resume goes on
// with them.
func Hunt(ctx context.Context, o HuntOptions) (Result, error) {
	h := &hunt{HuntOptions: o, space: o.Case.Space.WithOdds(o.Odds)}
	if err := os.MkdirAll(filepath.Join(o.Dir, RunsDir), 0o755); err != nil {
		return Result{}, fmt.Errorf("make case directory: %w", err)
	}
	done, err := h.done()
	if err != nil {
		return Result{}, err
	}
	if err := h.keepCase(); err != nil {
		return Result{}, err
	}
	defer h.stop()
	untested, err := h.preflight(ctx)
	if err != nil {
		return Result{}, err
	}
	if o.Preflight != nil {
		o.Preflight(untested)
	}
	s, err := search.New(h.space, o.Search)
	if err != nil {
		return Result{}, err
	}
	defer s.Close()
	run := h.alone
	if o.Crew != nil {
		run = h.together
	}
	trials, err := run(ctx, s, done)
	if err != nil {
		return Result{}, err
	}
	result := Result{Finding: s.Finding(), Untested: untested, Wedge: h.wedge}
	dispersion := o.Search.Dispersion
	if dispersion.CV == nil {
		dispersion = stats.Dispersed()
	}
	result.conclude(o.Case, h.space, dispersion, trials)
	return result, WriteJSON(filepath.Join(o.Dir, FindingFile), result)
}

// alone runs one trial after the other, here.
func (h *hunt) alone(ctx context.Context, s *search.Search, done []Trial) ([]Trial, error) {
	var trials []Trial
	for number := 1; ; number++ {
		proposal, more := s.Next()
		if !more {
			break
		}
		step := Step{Number: number, Resumed: number <= len(done)}
		var err error
		if step.Resumed {
			step.Trial = done[number-1]
			h.wedge = step.Trial.Wedge
			if !sameProposal(step.Trial.Proposal, proposal) {
				return nil, h.otherSearch(number, step.Trial.Proposal, proposal)
			}
		} else {
			step.Trial = Trial{Dir: trialDir(number, proposal), Space: h.Case.Space.Fingerprint(), Proposal: proposal}
			h.show(step)
			if step.Verdict, err = h.trial(ctx, number, &step.Trial); err != nil {
				return nil, err
			}
		}
		if err := s.Observe(*step.Trial.Observation); err != nil {
			return nil, fmt.Errorf("trial %d: %w", number, err)
		}
		step.Ended, step.Progress = true, s.Progress(believed)
		if err := WriteJSON(filepath.Join(h.Dir, step.Trial.Dir, BeliefFile), step.Progress); err != nil {
			return nil, err
		}
		trials = append(trials, step.Trial)
		h.show(step)
	}
	return trials, nil
}

func trialDir(number int, p search.Proposal) string {
	return filepath.Join(RunsDir, fmt.Sprintf("%04d-%s", number, p.Arm.Hash()))
}

func (h *hunt) otherSearch(number int, ran, asked search.Proposal) error {
	return fmt.Errorf("resume %s: trial %d ran %s, and this search asks for %s: it was made with other options or by another version; start anew in another directory", h.Dir, number, ran.Arm, asked.Arm)
}

// keepCase writes the case into a directory that isn't its own, so that what is
// there can be read by itself.
func (h *hunt) keepCase() error {
	path := filepath.Join(h.Dir, CaseFile)
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.WriteFile(path, h.Case.document, 0o644); err != nil {
		return fmt.Errorf("write case: %w", err)
	}
	return nil
}

// preflight launches the arm in which everything is safe, and looks whether
// each setting took effect. One that didn't can't be varied: trials of it would
// all be void, so it stays as in the failing arm.
func (h *hunt) preflight(ctx context.Context) ([]Unmet, error) {
	path := filepath.Join(h.Dir, PreflightFile)
	var unmet []Unmet
	b, err := os.ReadFile(path)
	switch {
	case err == nil && h.Resume:
		if err := json.Unmarshal(b, &unmet); err != nil {
			return nil, fmt.Errorf("resume: read %s: %w", path, err)
		}
		if err := h.readBase(); err != nil {
			return nil, err
		}
	case err == nil || errors.Is(err, fs.ErrNotExist):
		if h.Crew != nil {
			unmet, err = h.lookAtSafeElsewhere(ctx)
		} else if unmet, err = h.lookAtSafe(ctx); err == nil {
			err = WriteJSON(path, unmet)
		}
		if err != nil {
			return nil, err
		}
	default:
		return nil, fmt.Errorf("read case: %w", err)
	}
	h.fixed = design.Arm{}
	for _, u := range unmet {
		h.fixed[u.Factor] = h.space.Failing()[u.Factor]
	}
	h.space.Factors = slices.DeleteFunc(slices.Clone(h.space.Factors), func(f design.Factor) bool { return h.fixed[f.Name] != "" })
	var forbidden []design.Arm
	for _, arm := range h.space.Forbidden {
		left := maps.Clone(arm)
		possible := true
		for factor, level := range h.fixed {
			possible = possible && (arm[factor] == "" || arm[factor] == level)
			delete(left, factor)
		}
		if possible && len(left) > 0 {
			forbidden = append(forbidden, left)
		}
	}
	h.space.Forbidden = forbidden
	return unmet, nil
}

// lookAtSafe attests the safe arm. Where there is none, or it doesn't start,
// the trials will show what takes no effect, at a higher price.
func (h *hunt) lookAtSafe(ctx context.Context) ([]Unmet, error) {
	safe := h.space.Safe()
	if !h.space.Allowed(safe) {
		return nil, nil
	}
	arm, err := h.Case.Render(safe)
	if err != nil || len(arm.Processes) == 0 {
		return nil, err
	}
	if err := h.launch(ctx, arm, filepath.Join(h.Dir, logsDir, "preflight")); err != nil {
		failed, ofArm := h.ofArm(ctx, err)
		if !ofArm {
			return nil, err
		}
		if h.Unready != nil {
			h.Unready(failed)
		}
		return nil, nil
	}
	server := &target.Server{BaseURL: arm.Plan.BaseURL, Header: h.Header, Client: http.DefaultClient}
	a, err := h.attest(ctx, server)
	if err != nil {
		return nil, err
	}
	if arm.Plan.Control > 0 {
		if err := h.learnBase(ctx, arm, server); err != nil {
			return nil, err
		}
	}
	return h.Case.unmet(a, safe), nil
}

// complete adds the levels that aren't varied.
func (h *hunt) complete(a design.Arm) design.Arm {
	whole := maps.Clone(a)
	maps.Copy(whole, h.fixed)
	return whole
}

// hunt is one in progress.
type hunt struct {
	HuntOptions
	space  design.Space // what is varied
	fixed  design.Arm   // what isn't, since it takes no effect
	server *target.Launched
	probes string              // the probe directory of the running server
	before *target.Attestation // of the running server
	ops    func(oracle.OpResult)
	base   *Base // nil: all that is broken counts
	wedge  bool  // that the server stops answering is what counts
	// elsewhere says that what this machine's fault is isn't the arm's: another
	// machine may carry the order out.
	elsewhere bool
}

// ofArm reports whether a launch failed for the arm's sake.
func (h *hunt) ofArm(ctx context.Context, err error) (*target.LaunchError, bool) {
	failed, ok := errors.AsType[*target.LaunchError](err)
	return failed, ok && ctx.Err() == nil && (!h.elsewhere || !target.OfMachine(err))
}

func (h *hunt) show(s Step) {
	if h.Step != nil {
		h.Step(s)
	}
}

func sameProposal(a, b search.Proposal) bool {
	return a.Arm.Hash() == b.Arm.Hash() && a.Requests == b.Requests && a.Launch == b.Launch && a.Phase == b.Phase
}

// done reads the trials that came to their end.
func (h *hunt) done() ([]Trial, error) {
	return finished(h.Dir, h.Resume, h.Case.Space.Fingerprint(), func(t *Trial) string { return t.Space })
}

// finished reads the trials in a directory that came to their end. One that
// didn't is moved out of the way, to be run again.
func finished[T any](dir string, resume bool, space string, of func(*T) string) ([]T, error) {
	runs := filepath.Join(dir, RunsDir)
	entries, err := os.ReadDir(runs)
	if err != nil {
		return nil, fmt.Errorf("read case: %w", err)
	}
	var trials []T
	for _, e := range entries {
		if !e.IsDir() || filepath.Ext(e.Name()) == ".partial" {
			continue
		}
		if !resume {
			return nil, fmt.Errorf("%s holds trials already; go on with --resume, or choose another directory with --output", dir)
		}
		run := filepath.Join(runs, e.Name())
		b, err := os.ReadFile(filepath.Join(run, TrialFile))
		if errors.Is(err, fs.ErrNotExist) {
			if err := os.Rename(run, fmt.Sprintf("%s.%d.partial", run, time.Now().UnixMilli())); err != nil {
				return nil, fmt.Errorf("resume: %w", err)
			}
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("resume: %w", err)
		}
		var t T
		if err := json.Unmarshal(b, &t); err != nil {
			return nil, fmt.Errorf("resume: read %s: %w", filepath.Join(run, TrialFile), err)
		}
		if of(&t) != space {
			return nil, fmt.Errorf("resume %s: its trials are of other factors than the case has now; choose another directory with --output", dir)
		}
		trials = append(trials, t)
	}
	return trials, nil
}

// trial runs one proposal and writes what came of it.
func (h *hunt) trial(ctx context.Context, number int, t *Trial) (*oracle.Verdict, error) {
	dir := filepath.Join(h.Dir, t.Dir)
	arm, err := h.Case.Render(h.complete(t.Proposal.Arm))
	if err != nil {
		return nil, err
	}
	o := &search.Observation{Outcome: search.Ran}
	t.Observation = o
	if t.Proposal.Launch || h.server == nil && len(arm.Processes) > 0 {
		o.Launched = !t.Proposal.Launch
		started := time.Now()
		err := h.launch(ctx, arm, filepath.Join(dir, logsDir))
		t.LaunchMS = time.Since(started).Milliseconds()
		if failed, ok := h.ofArm(ctx, err); ok {
			o.Outcome, t.Note = search.Invalid, failed.Error()
			return nil, WriteJSON(filepath.Join(dir, TrialFile), t)
		}
		if err != nil {
			return nil, err
		}
	}
	v, err := h.run(ctx, number, dir, arm, t)
	if err != nil {
		return nil, err
	}
	return v, WriteJSON(filepath.Join(dir, TrialFile), t)
}

func (h *hunt) launch(ctx context.Context, arm *Rendered, logs string) error {
	h.stop()
	if len(arm.Processes) == 0 {
		return nil
	}
	launcher := *h.Launcher
	launcher.Grace = cmp.Or(h.Case.Grace, launcher.Grace)
	if len(h.Case.SSH) > 0 {
		launcher.SSH = h.Case.SSH
	}
	processes, err := h.placeProbes(arm.Processes)
	if err != nil {
		return err
	}
	server, err := launcher.Launch(ctx, processes, arm.Ready, logs)
	if err != nil {
		h.removeProbes()
		return err
	}
	h.server = server
	return nil
}

// placeProbes makes the processes start with the case's probes in them. Only
// Python reads the variables, so other programs run as ever.
func (h *hunt) placeProbes(processes []target.Process) ([]target.Process, error) {
	if h.Case.Probes == nil {
		return processes, nil
	}
	dir, err := probe.NewDir("", h.Case.Probes)
	if err != nil {
		return nil, err
	}
	h.probes = dir
	processes = slices.Clone(processes)
	for i := range processes {
		p := &processes[i]
		path, own := p.Env["PYTHONPATH"]
		if !own && !slices.Contains(p.Unset, "PYTHONPATH") {
			path = inherited("PYTHONPATH")
		}
		env := probe.Environment(dir, path) // set after Unset is taken out
		for name, value := range p.Env {
			if _, ours := env[name]; !ours {
				env[name] = value
			}
		}
		p.Env = env
	}
	return processes, nil
}

// inherited is a variable of the environment that processes are launched with.
func inherited(name string) string {
	for _, entry := range slices.Backward(new(exec.Cmd).Environ()) {
		if value, ok := strings.CutPrefix(entry, name+"="); ok {
			return value
		}
	}
	return ""
}

func (h *hunt) removeProbes() {
	if h.probes == "" {
		return
	}
	if err := probe.Remove(h.probes); err != nil && h.Logger != nil {
		h.Logger.Error("remove probes", slog.Any("error", err))
	}
	h.probes = ""
}

func (h *hunt) stop() {
	if h.server == nil {
		return
	}
	if err := h.server.Stop(); err != nil && h.Logger != nil {
		h.Logger.Error("stop server", slog.Any("error", err))
	}
	h.server, h.before = nil, nil
	h.removeProbes()
}

// run attests, drives, judges, and attests again. The trial doesn't count when
// the server wasn't what the arm says, changed meanwhile, or wasn't exercised
// as the case requires.
func (h *hunt) run(ctx context.Context, number int, dir string, arm *Rendered, t *Trial) (*oracle.Verdict, error) {
	server := &target.Server{BaseURL: arm.Plan.BaseURL, Header: h.Header, Client: http.DefaultClient}
	if err := os.MkdirAll(filepath.Join(dir, logsDir), 0o755); err != nil {
		return nil, fmt.Errorf("make run directory: %w", err)
	}
	before, err := h.attest(ctx, server)
	if h.died(err) {
		t.Observation.Outcome, t.Note = search.Void, fmt.Sprintf("the server ended before the run: %v", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if unmet := h.Case.Attest(before, h.complete(t.Proposal.Arm)); len(unmet) > 0 {
		t.Observation.Outcome, t.Note = search.Void, strings.Join(unmet, "\n")
		return nil, WriteJSON(filepath.Join(dir, AttestFile), before)
	}
	plan, err := h.plan(ctx, number, arm, server, t.Proposal.Requests)
	if err != nil && h.server != nil && ctx.Err() == nil {
		h.stop()
		t.Observation.Outcome, t.Note = search.Void, fmt.Sprintf("the server stopped answering before the run: %v", err)
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var movement target.Movement
	started := time.Now()
	first, judged := 0, 0 // which of the judged failed first
	ops := func(r oracle.OpResult) {
		if h.ops != nil {
			h.ops(r)
		}
		if r.Judged {
			judged++
		}
		if r.Failed && first == 0 {
			first = judged
		}
	}
	v, err := Run(ctx, Options{Dir: dir, Plan: plan, Header: h.Header, Progress: h.Load, Logger: h.Logger, Watch: h.watch(server, &movement), Ops: ops})
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	t.RunMS = time.Since(started).Milliseconds()
	after, err := h.attest(ctx, server)
	died := h.died(err)
	if err != nil && !died {
		return nil, err
	}
	if err := WriteJSON(filepath.Join(dir, AttestFile), before); err != nil {
		return nil, err
	}
	t.Note, t.TokensPerS = observe(v, h.base.failures(v), t.Observation), tokensPerS(v)
	if o := t.Observation; o.Failures > 0 && o.Failures == v.Broken.Main.Failures {
		o.FirstFailure = min(first, o.Requests) // every failed op counts
	}
	// One that died isn't there to be stuck: it is launched again.
	if h.wedge = h.wedge || number == 1 && stopped(v) && t.Observation.Failures == 0 && !died; h.wedge {
		t.Wedge = true
		stuck(v, t.Observation)
	}
	if t.LaunchMS > 0 && t.Observation.Requests > 0 && t.RunMS > 0 {
		t.Observation.LaunchCost = float64(t.LaunchMS) * float64(t.Observation.Requests) / float64(t.RunMS)
	}
	switch {
	case t.Observation.Outcome != search.Ran:
	case died:
		t.Observation.Outcome, t.Note = search.Void, fmt.Sprintf("the server ended during the run: %v", err)
	default:
		if outcome, note := h.uncounted(before, after, &movement); outcome != "" {
			t.Observation.Outcome, t.Note = outcome, note
		}
	}
	return v, nil
}

// died reports whether an attestation found nothing of a server that the hunt
// launched. What is left of it is stopped, so that the next trial launches anew.
func (h *hunt) died(err error) bool {
	if h.server == nil || !errors.Is(err, target.ErrNothing) {
		return false
	}
	h.stop()
	return true
}

// plan completes an arm's plan: as many sessions as the proposal asks for, of
// their own for each trial, so that they are fresh evidence and find a cold
// cache.
func (h *hunt) plan(ctx context.Context, number int, arm *Rendered, server *target.Server, requests int) (Plan, error) {
	p := arm.Plan
	p.Tool, p.Control = h.Tool, 0 // the control is played once, in the safe arm
	p.Workload.Sessions = max((requests+p.Workload.Rounds-1)/p.Workload.Rounds, p.Concurrency)
	p.Workload.Seed += uint64(number)
	p.Workload.RunKey = ""
	var err error
	if p.Workload, err = p.Workload.WithDefaults(); err != nil {
		return p, err
	}
	id, err := server.Identify(ctx)
	if err != nil {
		return p, err
	}
	if p.Model == "" && len(id.Models) > 0 {
		p.Model = id.Models[0]
	}
	p.Server = id.String()
	return p, nil
}

func (h *hunt) attest(ctx context.Context, server *target.Server) (*target.Attestation, error) {
	o := target.AttestOptions{Server: server, Files: h.Case.Files, Packages: h.Case.Packages, Known: h.before}
	if h.server != nil {
		trees, err := h.server.Trees(ctx)
		if err != nil {
			return nil, err
		}
		o.Trees = trees
	}
	a, err := target.Attest(ctx, o)
	if err != nil {
		return nil, err
	}
	h.before = a
	return a, nil
}

// watch puts the server's metrics and the lines of its logs that the case asks
// for into the history, and into what requirements are about.
func (h *hunt) watch(server *target.Server, movement *target.Movement) func(context.Context, time.Time, func(*history.Event) error) {
	return func(ctx context.Context, start time.Time, emit func(*history.Event) error) {
		var mu sync.Mutex
		both := func(e *history.Event) error {
			mu.Lock()
			defer mu.Unlock()
			movement.Add(e)
			return emit(e)
		}
		var all sync.WaitGroup
		watch := func(what string, run func(context.Context) error) {
			all.Go(func() {
				if err := run(ctx); err != nil && h.Logger != nil {
					h.Logger.Warn(what, slog.Any("error", err))
				}
			})
		}
		watch("scrape metrics", (&target.Scraper{Server: server, Start: start, Emit: both}).Run)
		if h.server != nil && len(h.Case.Logs) > 0 {
			watch("follow logs", (&target.Follower{Files: h.server.Logs(), Patterns: h.Case.Logs, Start: start, Emit: both}).Run)
		}
		if h.probes != "" {
			watch("read probes", (&probe.Recorder{Dirs: []string{h.probes}, Start: start, Emit: both}).Run)
		}
		all.Wait()
	}
}

// uncounted says why a run that came to its end is no evidence all the same.
func (h *hunt) uncounted(before, after *target.Attestation, movement *target.Movement) (search.Outcome, string) {
	if changed := target.Changed(before, after); len(changed) > 0 {
		d := changed[0]
		return search.Void, fmt.Sprintf("the server changed during the run: %s %s was %s and is %s", d.Kind, d.Name, d.A, d.B)
	}
	for _, r := range h.Case.Require {
		ok, why, err := r.Met(movement)
		switch {
		case err != nil:
			return search.NotExercised, err.Error()
		case !ok:
			return search.NotExercised, why
		}
	}
	return "", ""
}

// tokensPerS is what the server wrote under load.
func tokensPerS(v *oracle.Verdict) float64 {
	for _, p := range v.Phases {
		if took := (p.ToMS - p.FromMS) / 1000; p.Phase == history.Main && took > 0 {
			return float64(p.CompletionTokens) / took
		}
	}
	return 0
}

// stopped reports whether the server answered nobody any more, rather than
// some late.
func stopped(v *oracle.Verdict) bool {
	return slices.ContainsFunc(v.Classes, func(c oracle.ClassResult) bool {
		return c.Convicts && slices.Contains([]oracle.Class{oracle.NoTokens, oracle.HealthLies, oracle.Poisoned}, c.Class)
	})
}

// stuck makes an observation of the server alone: it answered so many requests,
// and then it stopped, or it didn't. It stays so until it is launched again.
func stuck(v *oracle.Verdict, o *search.Observation) {
	answered := 0
	for _, p := range v.Phases {
		if p.Phase == history.Main {
			answered = p.Outcomes[history.OK] + p.Outcomes[history.Cancelled]
		}
	}
	o.Requests, o.Failures, o.FirstFailure, o.Poisoned = answered, 0, 0, false
	if o.Outcome == search.Wedged && !stopped(v) {
		o.Outcome = search.Ran
	}
	if o.Outcome == search.Wedged {
		o.Requests++ // the one that it stopped in
		o.Failures, o.FirstFailure, o.Poisoned = 1, o.Requests, true
	}
}

// observe takes from a verdict what the search counts, and says why where it
// doesn't count. Whether a rate is a weak model's or a fault's is what the
// comparison of arms tells, so no control is needed here.
func observe(v *oracle.Verdict, failures int, o *search.Observation) (note string) {
	o.Requests, o.Failures = v.Broken.Main.Trials, failures
	convicts := func(of func(*oracle.ClassResult) bool) bool {
		return slices.ContainsFunc(v.Classes, func(c oracle.ClassResult) bool { return c.Convicts && of(&c) })
	}
	o.Poisoned = convicts(func(c *oracle.ClassResult) bool { return c.Class == oracle.Poisoned })
	if convicts(func(c *oracle.ClassResult) bool { return c.Means == oracle.Wedged }) {
		o.Outcome = search.Wedged
		return ""
	}
	if len(v.Crashes) > 0 {
		o.Outcome = search.Void
		return "the oracle " + v.Crashes[0].Oracle + " crashed"
	}
	for _, a := range v.Assumptions {
		if !a.Holds && o.Failures == 0 { // that something broke needs no assumption
			o.Outcome = search.Void
			if a.Otherwise == oracle.NotExercised {
				o.Outcome = search.NotExercised
			}
			return a.Name + ": " + a.Found
		}
	}
	if o.Requests == 0 {
		o.Outcome = search.Void
		return "no reply could be judged"
	}
	return ""
}

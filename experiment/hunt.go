package experiment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// The files of a hunt: its directory has one run directory a trial under
// RunsDir, and in each of them what the search made of it.
const (
	RunsDir     = "runs"
	TrialFile   = "trial.json"
	AttestFile  = "attest.json"
	FindingFile = "finding.json"
)

// Subject is what a hunt is about: the arms that there are, and how each is
// launched and driven.
type Subject interface {
	Space() design.Space
	Setup(arm design.Arm) (Setup, error)
}

// Setup is how one arm is launched and driven.
type Setup struct {
	Processes []target.Process // none: the server runs already, and only client-side factors vary
	Ready     target.Ready
	Plan      Plan // the hunt chooses the workload's sessions and seed
	Claims    []LevelClaim
	Files     []string // to be hashed
}

// LevelClaim is what must be true of the live server in an arm.
type LevelClaim struct {
	Factor string
	Level  design.Level
	Claim  *target.Claim
}

// HuntOptions is what a hunt takes.
type HuntOptions struct {
	Dir      string // the case's; made when it isn't there
	Subject  Subject
	Search   search.Options
	Launcher *target.Launcher
	Header   http.Header
	Resume   bool           // go on from the trials that are in Dir
	Step     func(Step)     // before and after each trial
	Load     func(Progress) // within one
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
}

// believed is how many leading causes a step shows.
const believed = 5

// Hunt finds the culprit. It returns when the search has come to a finding,
// or with ctx's error; the trials up to then are on disk, and Resume goes on
// with them.
func Hunt(ctx context.Context, o HuntOptions) (search.Finding, error) {
	h := &hunt{HuntOptions: o, space: o.Subject.Space()}
	if err := os.MkdirAll(filepath.Join(o.Dir, RunsDir), 0o755); err != nil {
		return search.Finding{}, fmt.Errorf("make case directory: %w", err)
	}
	s, err := search.New(h.space, o.Search)
	if err != nil {
		return search.Finding{}, err
	}
	defer s.Close()
	done, err := h.done()
	if err != nil {
		return search.Finding{}, err
	}
	defer h.stop()
	for number := 1; ; number++ {
		proposal, more := s.Next()
		if !more {
			break
		}
		step := Step{Number: number, Resumed: number <= len(done)}
		if step.Resumed {
			step.Trial = done[number-1]
			if !sameProposal(step.Trial.Proposal, proposal) {
				return search.Finding{}, fmt.Errorf("resume %s: trial %d ran %s, and this search asks for %s: it was made with other options or by another version; start anew in another directory", o.Dir, number, step.Trial.Proposal.Arm, proposal.Arm)
			}
		} else {
			step.Trial = Trial{Dir: filepath.Join(RunsDir, fmt.Sprintf("%04d-%s", number, proposal.Arm.Hash())), Space: h.space.Fingerprint(), Proposal: proposal}
			h.show(step)
			if step.Verdict, err = h.trial(ctx, number, &step.Trial); err != nil {
				return search.Finding{}, err
			}
		}
		if err := s.Observe(*step.Trial.Observation); err != nil {
			return search.Finding{}, fmt.Errorf("trial %d: %w", number, err)
		}
		step.Ended, step.Progress = true, s.Progress(believed)
		h.show(step)
	}
	finding := s.Finding()
	return finding, WriteJSON(filepath.Join(o.Dir, FindingFile), finding)
}

// hunt is one in progress.
type hunt struct {
	HuntOptions
	space  design.Space
	server *target.Launched
	before *target.Attestation // of the running server
}

func (h *hunt) show(s Step) {
	if h.Step != nil {
		h.Step(s)
	}
}

func sameProposal(a, b search.Proposal) bool {
	return a.Arm.Hash() == b.Arm.Hash() && a.Requests == b.Requests && a.Launch == b.Launch && a.Phase == b.Phase
}

// done reads the trials that came to their end. One that didn't is moved out
// of the way, to be run again.
func (h *hunt) done() ([]Trial, error) {
	runs := filepath.Join(h.Dir, RunsDir)
	entries, err := os.ReadDir(runs)
	if err != nil {
		return nil, fmt.Errorf("read case: %w", err)
	}
	var trials []Trial
	for _, e := range entries {
		if !e.IsDir() || filepath.Ext(e.Name()) == ".partial" {
			continue
		}
		if !h.Resume {
			return nil, fmt.Errorf("%s holds trials already; go on with --resume, or hunt in another directory", h.Dir)
		}
		dir := filepath.Join(runs, e.Name())
		b, err := os.ReadFile(filepath.Join(dir, TrialFile))
		if errors.Is(err, fs.ErrNotExist) {
			if err := os.Rename(dir, fmt.Sprintf("%s.%d.partial", dir, time.Now().UnixMilli())); err != nil {
				return nil, fmt.Errorf("resume: %w", err)
			}
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("resume: %w", err)
		}
		var t Trial
		if err := json.Unmarshal(b, &t); err != nil {
			return nil, fmt.Errorf("resume: read %s: %w", filepath.Join(dir, TrialFile), err)
		}
		if t.Space != h.space.Fingerprint() {
			return nil, fmt.Errorf("resume %s: its trials are of other factors than the case has now; hunt in another directory", h.Dir)
		}
		trials = append(trials, t)
	}
	return trials, nil
}

// trial runs one proposal and writes what came of it.
func (h *hunt) trial(ctx context.Context, number int, t *Trial) (*oracle.Verdict, error) {
	dir := filepath.Join(h.Dir, t.Dir)
	setup, err := h.Subject.Setup(t.Proposal.Arm)
	if err != nil {
		return nil, err
	}
	o := &search.Observation{Outcome: search.Ran}
	t.Observation = o
	if t.Proposal.Launch || h.server == nil && len(setup.Processes) > 0 {
		o.Launched = !t.Proposal.Launch
		started := time.Now()
		err := h.launch(ctx, setup, filepath.Join(dir, logsDir))
		t.LaunchMS = time.Since(started).Milliseconds()
		if failed, ok := errors.AsType[*target.LaunchError](err); ok && ctx.Err() == nil {
			o.Outcome, t.Note = search.Invalid, failed.Error()
			return nil, WriteJSON(filepath.Join(dir, TrialFile), t)
		}
		if err != nil {
			return nil, err
		}
	}
	v, err := h.run(ctx, number, dir, setup, t)
	if err != nil {
		return nil, err
	}
	return v, WriteJSON(filepath.Join(dir, TrialFile), t)
}

func (h *hunt) launch(ctx context.Context, s Setup, logs string) error {
	h.stop()
	if len(s.Processes) == 0 {
		return nil
	}
	server, err := h.Launcher.Launch(ctx, s.Processes, s.Ready, logs)
	if err != nil {
		return err
	}
	h.server = server
	return nil
}

func (h *hunt) stop() {
	if h.server == nil {
		return
	}
	if err := h.server.Stop(); err != nil && h.Logger != nil {
		h.Logger.Error("stop server", slog.Any("error", err))
	}
	h.server, h.before = nil, nil
}

// run attests, drives, judges, and attests again.
func (h *hunt) run(ctx context.Context, number int, dir string, s Setup, t *Trial) (*oracle.Verdict, error) {
	client := &target.Server{BaseURL: s.Plan.BaseURL, Header: h.Header, Client: http.DefaultClient}
	before, err := h.attest(ctx, client, s)
	if err != nil {
		return nil, err
	}
	void := func(note string) (*oracle.Verdict, error) {
		t.Observation.Outcome, t.Note = search.Void, note
		return nil, nil
	}
	if note := unmet(before, s.Claims); note != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return nil, err
		}
		if err := WriteJSON(filepath.Join(dir, AttestFile), before); err != nil {
			return nil, err
		}
		return void(note)
	}
	plan := s.Plan
	rounds := plan.Workload.Rounds
	plan.Workload.Sessions = max((t.Proposal.Requests+rounds-1)/rounds, plan.Concurrency)
	// Each trial has sessions of its own: fresh evidence, and a cold cache.
	plan.Workload.Seed += uint64(number)
	plan.Workload.RunKey = ""
	if plan.Workload, err = plan.Workload.WithDefaults(); err != nil {
		return nil, err
	}
	if plan.Model == "" {
		id, err := client.Identify(ctx)
		if err != nil {
			return void(err.Error())
		}
		if len(id.Models) > 0 {
			plan.Model = id.Models[0]
		}
		plan.Server = id.String()
	}
	started := time.Now()
	v, err := Run(ctx, Options{Dir: dir, Plan: plan, Header: h.Header, Progress: h.Load, Logger: h.Logger})
	if err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	took := time.Since(started)
	t.RunMS = took.Milliseconds()
	after, err := h.attest(ctx, client, s)
	if err != nil {
		return nil, err
	}
	if err := WriteJSON(filepath.Join(dir, AttestFile), before); err != nil {
		return nil, err
	}
	observe(v, t.Observation)
	if t.LaunchMS > 0 && t.Observation.Requests > 0 && took > 0 {
		t.Observation.LaunchCost = float64(t.LaunchMS) / (float64(t.RunMS) / float64(t.Observation.Requests))
	}
	if t.Observation.Outcome == search.Void {
		t.Note = fmt.Sprint(v.Reasons)
	}
	if changed := target.Changed(before, after); len(changed) > 0 && t.Observation.Outcome == search.Ran {
		_, err := void(fmt.Sprintf("the server changed during the run: %v", changed))
		return v, err
	}
	return v, nil
}

func (h *hunt) attest(ctx context.Context, client *target.Server, s Setup) (*target.Attestation, error) {
	o := target.AttestOptions{Server: client, Files: s.Files, Known: h.before}
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

// unmet says which claims the live server doesn't meet; empty when it meets
// them all. One that can't be told isn't met: an arm counts only if it was
// what it claimed.
func unmet(a *target.Attestation, claims []LevelClaim) string {
	for _, c := range claims {
		ok, why, err := c.Claim.Holds(a, c.Level)
		switch {
		case err != nil:
			return fmt.Sprintf("%s=%s can't be attested: %v", c.Factor, c.Level.Name, err)
		case !ok:
			return fmt.Sprintf("%s=%s isn't what runs: %s", c.Factor, c.Level.Name, why)
		}
	}
	return ""
}

// observe takes from a verdict what the search counts. Whether a rate is a
// weak model's or a fault's is what the arms' comparison tells, so no control
// is needed here.
func observe(v *oracle.Verdict, o *search.Observation) {
	o.Requests, o.Failures = v.Broken.Main.Trials, v.Broken.Main.Failures
	wedged := slices.ContainsFunc(v.Classes, func(c oracle.ClassResult) bool { return c.Convicts && c.Means == oracle.Wedged })
	o.Poisoned = slices.ContainsFunc(v.Classes, func(c oracle.ClassResult) bool { return c.Convicts && c.Class == oracle.Poisoned })
	holds := !slices.ContainsFunc(v.Assumptions, func(a oracle.Assumption) bool { return !a.Holds })
	switch {
	case wedged:
		o.Outcome = search.Wedged
	case len(v.Crashes) > 0, !holds && o.Failures == 0, o.Requests == 0:
		o.Outcome = search.Void
	}
}

package experiment

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/amplify"
	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// AmplifyFile is what a search for the load that fails most came to.
const AmplifyFile = "amplify.json"

// ErrWall is the cause of a context that ends because the budget's time is used
// up: what was found until then is the result.
var ErrWall = errors.New("the budget's time is used up")

// AmplifyOptions is what the search for the load that fails most takes.
type AmplifyOptions struct {
	Dir      string // made when it isn't there
	Case     *Case
	Tool     string          // name and version of the program
	Search   amplify.Options // but for what the case says, and Play
	Launcher *target.Launcher
	Header   http.Header
	Resume   bool // go on from the trials that are in Dir
	Step     func(AmplifyStep)
	Load     func(Progress)
	Logger   *slog.Logger
}

// AmplifyStep is a trial that begins, or that came to its end.
type AmplifyStep struct {
	Number  int
	Trial   LoadTrial
	Ended   bool
	Resumed bool // it was there already
}

// LoadTrial is a trial of a load, and what came of it. It is trial.json of its
// run directory.
type LoadTrial struct {
	Dir      string           `json:"dir"`
	Space    string           `json:"space"` // fingerprint
	Trial    amplify.Trial    `json:"trial"`
	Outcome  *amplify.Outcome `json:"outcome"`
	LaunchMS int64            `json:"launch_ms,omitempty"`
}

// AmplifySearch is what the search takes from a case.
func (c *Case) AmplifySearch() (amplify.Options, error) {
	arm, err := c.Render(c.Space.Failing())
	if err != nil {
		return amplify.Options{}, err
	}
	p := arm.Plan
	o := amplify.Options{
		Base:     amplify.Shape{Workload: p.Workload, Concurrency: p.Concurrency, RequestRate: p.RequestRate, Waves: p.Waves},
		NoSafe:   !c.Space.Allowed(c.Space.Safe()),
		NoLaunch: len(arm.Processes) == 0,
		Seed:     p.Workload.Seed,
	}
	for _, f := range c.Space.Factors {
		if f.ClientSide {
			o.Fixed = append(o.Fixed, f.Name)
		}
	}
	return o, nil
}

// withLoad is the case under another load. Its factors keep their levels.
func (c *Case) withLoad(s amplify.Shape, sessions int) *Case {
	out := *c
	out.knobs, out.load = map[string]any{"sessions": sessions}, maps.Clone(c.load)
	for _, name := range []string{"seed", "run_key"} {
		if value, ok := c.knobs[name]; ok {
			out.knobs[name] = value
		}
	}
	shaped := []string{"concurrency", "request_rate", "waves"}
	for _, name := range shaped {
		delete(out.load, name)
	}
	for name, value := range s.Settings() {
		if slices.Contains(shaped, name) {
			out.load[name] = value
		} else {
			out.knobs[name] = value
		}
	}
	return &out
}

// Amplify finds the load under which the failing arm of a case fails most. With
// an error it returns what is known up to then; the trials are on disk, and
// Resume goes on with them.
func Amplify(ctx context.Context, o AmplifyOptions) (amplify.Result, error) {
	a := &amplifier{AmplifyOptions: o, hunt: &hunt{HuntOptions: HuntOptions{
		Dir: o.Dir, Case: o.Case, Tool: o.Tool, Launcher: o.Launcher, Header: o.Header, Load: o.Load, Logger: o.Logger,
	}, space: o.Case.Space, fixed: design.Arm{}}}
	if err := os.MkdirAll(filepath.Join(o.Dir, RunsDir), 0o755); err != nil {
		return amplify.Result{}, fmt.Errorf("make directory: %w", err)
	}
	var err error
	a.trials, err = finished(o.Dir, o.Resume, o.Case.Space.Fingerprint(), func(t *LoadTrial) string { return t.Space })
	if err != nil {
		return amplify.Result{}, err
	}
	defer a.hunt.stop()
	find := o.Search
	find.Play = func(t amplify.Trial) (amplify.Outcome, error) { return a.play(ctx, t) }
	r, err := amplify.Find(find)
	if err != nil && ctx.Err() == nil { // what an earlier start has written stays
		return r, err
	}
	return r, errors.Join(err, WriteJSON(filepath.Join(o.Dir, AmplifyFile), r))
}

// amplifier is a search in progress. It launches and judges as a hunt does.
type amplifier struct {
	AmplifyOptions
	hunt   *hunt
	trials []LoadTrial // of an earlier start
	number int
}

func (a *amplifier) show(s AmplifyStep) {
	if a.Step != nil {
		a.Step(s)
	}
}

func (a *amplifier) play(ctx context.Context, t amplify.Trial) (amplify.Outcome, error) {
	a.number++
	step := AmplifyStep{Number: a.number, Trial: LoadTrial{
		Dir: filepath.Join(RunsDir, fmt.Sprintf("%04d-%s", a.number, t.Phase)), Space: a.Case.Space.Fingerprint(), Trial: t,
	}}
	if a.number <= len(a.trials) {
		old := a.trials[a.number-1]
		if !reflect.DeepEqual(old.Trial, t) {
			return amplify.Outcome{}, fmt.Errorf("resume %s: trial %d played %s, and this search asks for %s: it was made with other options or by another version; choose another directory", a.Dir, a.number, old.Trial.Name, t.Name)
		}
		step.Trial, step.Ended, step.Resumed = old, true, true
		a.show(step)
		return *old.Outcome, nil
	}
	a.show(step)
	started := time.Now()
	out, err := a.trial(ctx, t, &step.Trial)
	if err != nil {
		if errors.Is(context.Cause(ctx), ErrWall) {
			err = amplify.ErrSpent
		}
		return out, err
	}
	out.Took = time.Since(started)
	step.Trial.Outcome, step.Ended = &out, true
	if err := WriteJSON(filepath.Join(a.Dir, step.Trial.Dir, TrialFile), step.Trial); err != nil {
		return out, err
	}
	a.show(step)
	return out, nil
}

// trial launches if need be, plays and judges.
func (a *amplifier) trial(ctx context.Context, t amplify.Trial, record *LoadTrial) (out amplify.Outcome, err error) {
	dir := filepath.Join(a.Dir, record.Dir)
	arm := a.Case.Space.Failing()
	if t.Safe {
		arm = a.Case.Space.Safe()
	}
	rendered, err := a.Case.withLoad(t.Shape, t.Sessions).Render(arm)
	if err != nil {
		return out, err
	}
	if t.Launch || a.hunt.server == nil && len(rendered.Processes) > 0 {
		out.Launched = !t.Launch
		started := time.Now()
		err := a.hunt.launch(ctx, rendered, filepath.Join(dir, logsDir))
		record.LaunchMS = time.Since(started).Milliseconds()
		if failed, ok := errors.AsType[*target.LaunchError](err); ok && ctx.Err() == nil && t.Safe {
			out.Void = failed.Error()
			return out, nil
		}
		if err != nil {
			return out, err
		}
		if !t.Safe {
			server := &target.Server{BaseURL: rendered.Plan.BaseURL, Header: a.Header, Client: http.DefaultClient}
			if found, err := a.hunt.attest(ctx, server); err == nil {
				if unmet := a.Case.Attest(found, arm); len(unmet) > 0 {
					return out, fmt.Errorf("the failing arm isn't what runs: %s", strings.Join(unmet, "; "))
				}
			}
		}
	}
	h := Trial{
		Dir: record.Dir, Observation: &search.Observation{Outcome: search.Ran},
		Proposal: search.Proposal{Arm: arm, Requests: t.Sessions * rendered.Plan.Workload.Rounds},
	}
	if _, err := a.hunt.run(ctx, a.number, dir, rendered, &h); err != nil {
		return out, err
	}
	o := h.Observation
	out.Failures, out.Judged, out.Poisoned = o.Failures, o.Requests, o.Poisoned
	out.Run = time.Duration(h.RunMS) * time.Millisecond
	switch o.Outcome {
	case search.Ran:
	case search.Wedged: // however little came back, it failed
		out.Failures, out.Poisoned = max(out.Failures, 1), true
		out.Judged = max(out.Judged, out.Failures)
	default:
		out.Void = h.Note
	}
	return out, nil
}

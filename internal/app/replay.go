package app

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/replay"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// ReplayOptions is what replay is asked for.
type ReplayOptions struct {
	Server
	Source        string
	Only          string
	Speed         float64
	Concurrency   int // of a trace without times
	TokensPerLine int // of a trace without texts
	Seed          uint64
	Timeout       time.Duration
	Output        string
	Tool          string
}

const (
	// replayConcurrency is how many conversations of a trace without times
	// are played at once.
	replayConcurrency = 16
	fidelityFile      = "fidelity.json"
)

// Replay sends recorded traffic again, judges it, and says how true it was.
func Replay(ctx context.Context, o ReplayOptions, out Output) (oracle.Status, error) {
	if o.BaseURL == "" {
		return "", usage("which server? Give --base-url http://HOST:PORT, or set OPENAI_BASE_URL")
	}
	base, err := target.ParseBaseURL(o.BaseURL)
	if err != nil {
		return "", &UsageError{err}
	}
	trace, err := replay.Read(o.Source)
	if err == nil {
		err = trace.Only(o.Only)
	}
	if err != nil {
		return "", &UsageError{err}
	}
	// Of a run of our own the plan says what the canaries follow from.
	var w workload.Plan
	if json.Unmarshal(trace.Header.Workload, &w) != nil || w.RunKey == "" {
		w = workload.Plan{Kind: recorded}
	}
	if trace.Shape() {
		w = workload.Plan{Kind: "agent", Seed: cmp.Or(o.Seed, 1)}
	}
	rows, err := trace.Workload(replay.Options{Speed: o.Speed, Plan: w, TokensPerLine: o.TokensPerLine})
	if err != nil {
		return "", &UsageError{err}
	}
	if trace.Shape() {
		w.Sessions = rows.Sessions()
		if w, err = w.WithDefaults(); err != nil {
			return "", &UsageError{err}
		}
	}
	plan := experiment.Plan{
		Tool: o.Tool, BaseURL: base, Model: o.Model, Workload: w, TimeoutMS: o.Timeout.Milliseconds(),
		Replay: &experiment.Replay{
			Source: o.Source, Format: trace.Format, Only: o.Only, Speed: cmp.Or(o.Speed, 1),
			Requests: len(trace.Requests), Rows: rows.Sessions(), Timed: trace.Timed, HasModel: trace.HasModel(),
		},
	}
	if !trace.Timed {
		plan.Concurrency = min(cmp.Or(o.Concurrency, replayConcurrency), rows.Sessions())
	}
	dir := cmp.Or(o.Output, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-replay"))
	status, err := carryOut(ctx, o.Server, plan, rows, nil, dir, out)
	if err != nil {
		return "", err
	}
	r, err := history.Open(filepath.Join(dir, experiment.HistoryFile))
	if err != nil {
		return "", err
	}
	defer r.Close()
	f, err := trace.Fidelity(r)
	if err != nil {
		return "", err
	}
	if err := experiment.WriteJSON(filepath.Join(dir, fidelityFile), f); err != nil {
		return "", err
	}
	if out.Screen != nil {
		showFidelity(out.Screen, trace, f)
	}
	return status, nil
}

func showFidelity(s *term.Screen, t *replay.Trace, f replay.Fidelity) {
	s.Printf("\nHow true to the recording\n  requests     %d of %d sent", f.Sent, f.Requests)
	if t.Left > 0 {
		s.Printf("; %d of the recording were left out", t.Left)
	}
	s.Printf("\n")
	if f.Timed {
		s.Printf("  late         %.0f ms (median), %.0f ms (99%%), %.0f ms (most)\n", f.LateMS[0], f.LateMS[1], f.LateMS[2])
	} else {
		s.Printf("  times        the recording has none\n")
	}
	then := ""
	if f.Peak > 0 {
		then = fmt.Sprintf("; recorded: %.1f, %d", f.Mean, f.Peak)
	}
	s.Printf("  concurrency  %.1f on average, %d at most%s\n", f.MeanNow, f.PeakNow, then)
	if f.HungUp+f.HungUpNow > 0 {
		s.Printf("  hung up      %d; recorded: %d\n", f.HungUpNow, f.HungUp)
	}
}

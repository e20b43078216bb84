// Package experiment takes one run from its plan to its verdict, in a
// directory: plan.json, history.jsonl.zst and verdict.json, each written once.
// Killed at any moment, what was answered is in the history, and [Judge] makes
// the verdict from it.
//
// Stability: may change.
package experiment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// The files of a run directory.
const (
	PlanFile    = "plan.json"
	HistoryFile = history.FileName
	VerdictFile = "verdict.json"
	logsDir     = "logs" // of the server's processes, where we launched it
)

// Plan is everything that decides what a run sends. It holds no secret: of the
// headers only the names.
type Plan struct {
	Tool        string                     `json:"tool"`
	BaseURL     string                     `json:"base_url"`
	Model       string                     `json:"model"`
	Server      string                     `json:"server,omitempty"`
	Workload    workload.Plan              `json:"workload"`
	Concurrency int                        `json:"concurrency,omitempty"`
	RequestRate float64                    `json:"request_rate,omitempty"`
	Waves       bool                       `json:"waves,omitempty"`            // conversations in step
	Control     int                        `json:"control_sessions,omitempty"` // played alone and cold first
	TimeoutMS   int64                      `json:"timeout_ms,omitempty"`
	NoStream    bool                       `json:"no_stream,omitempty"`
	ExtraBody   map[string]json.RawMessage `json:"extra_body,omitempty"`
	HeaderNames []string                   `json:"header_names,omitempty"`
	Shards      int                        `json:"shards,omitempty"` // how many processes play the main phase together; 0 is this one alone
	Replay      *Replay                    `json:"replay,omitempty"` // what is played instead of the workload, which is then the one it came from
}

// Replay says which traffic is sent again.
type Replay struct {
	Source   string  `json:"source"` // the file
	Format   string  `json:"format"`
	Only     string  `json:"only,omitempty"`
	Speed    float64 `json:"speed"`
	Requests int     `json:"requests"`
	Rows     int     `json:"rows"`                // of requests that follow one another
	Timed    bool    `json:"timed"`               // at the times at which they were sent then
	HasModel bool    `json:"has_model,omitempty"` // the requests name their model
}

// Options is a plan and what it takes to carry it out.
type Options struct {
	Dir      string // made by Run; must not exist
	Plan     Plan
	Header   http.Header       // with secrets; never written
	Workload workload.Workload // of Plan.Replay; nil makes the plan's
	Progress func(Progress)
	// Watch, if there is one, puts what else happens into the history, until
	// its context ends. start is the history's time 0.
	Watch func(ctx context.Context, start time.Time, emit func(*history.Event) error)
	// Shards starts those of the plan. nil plays a plan's shards as one.
	Shards Shards
	// ShardSilence is how long a shard, which says something each second, may
	// say nothing until it is given up; 0 is 20 seconds.
	ShardSilence time.Duration
	Ops          func(oracle.OpResult) // is told of what became of each op, once it was judged; nil for nobody
	Logger       *slog.Logger
}

// Progress is where a run stands, with the damage that showed so far.
type Progress struct {
	load.Progress
	Main, Control oracle.Count
}

// Add adds what another load beside it came to in the main phase.
func (p *Progress) Add(other Progress) {
	p.Sessions += other.Sessions
	p.SessionsDone += other.SessionsDone
	p.InFlight += other.InFlight
	p.Chunks += other.Chunks
	p.Ops.OK += other.Ops.OK
	p.Ops.Failed += other.Ops.Failed
	p.Ops.Cancelled += other.Ops.Cancelled
	p.Ops.TimedOut += other.Ops.TimedOut
	p.Main.Broken += other.Main.Broken
	p.Main.Judged += other.Main.Judged
}

const (
	healthEvery     = 5 * time.Second
	recoveryTurns   = 3 // plain requests after a failure: the poison oracle wants three in a row
	flushTimeout    = 10 * time.Second
	noteCold        = "cold: the prefix cache was emptied through "
	noteWarm        = "warm: no way to empty this server's prefix cache is known; a control session still shares only the part that all sessions share"
	sentinelMessage = "ping"
)

// Run carries out a plan. ctx ends the load early; the history up to then is
// judged, and the verdict says that it was cut short.
func Run(ctx context.Context, o Options) (*oracle.Verdict, error) {
	if err := makeDir(o.Dir); err != nil {
		return nil, err
	}
	if err := WriteJSON(filepath.Join(o.Dir, PlanFile), o.Plan); err != nil {
		return nil, err
	}
	if err := record(ctx, o); err != nil {
		return nil, err
	}
	v, err := judge(o.Dir, o.Ops)
	if err == nil && o.sharded() {
		err = os.RemoveAll(filepath.Dir(shardsBase(o.Dir))) // the history has it all
	}
	return v, err
}

// makeDir makes a run directory. One that holds nothing but the logs of the
// server that was just launched for the run is fine.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make run directory: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("make run directory: %w", err)
	}
	for _, e := range entries {
		if e.Name() != logsDir {
			return fmt.Errorf("make run directory: %s exists; choose another with --output, or judge it with culprit check %s", dir, dir)
		}
	}
	return nil
}

// record plays the plan and writes the history.
func record(ctx context.Context, o Options) (err error) {
	w := o.Workload
	if w == nil {
		if w, err = workload.New(o.Plan.Workload); err != nil {
			return err
		}
	}
	header, err := o.Plan.header(time.Now())
	if err != nil {
		return err
	}
	path := filepath.Join(o.Dir, HistoryFile)
	if o.sharded() {
		path = shardsBase(o.Dir)
		if err := os.Mkdir(filepath.Dir(path), 0o755); err != nil {
			return fmt.Errorf("make run directory: %w", err)
		}
	}
	writer, err := history.Create(path, header)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, writer.Close()) }()

	if o.Watch != nil {
		watchContext, end := context.WithCancel(ctx)
		var watch sync.WaitGroup
		watch.Go(func() { o.Watch(watchContext, header.Started, writer.Event) })
		defer watch.Wait()
		defer end()
	}

	var shards *conductor
	if o.sharded() {
		shards, err = startShards(ctx, &o, header, func(number int) string { return shardHistory(o.Dir, number) })
		if err != nil {
			return err
		}
		defer shards.close()
	}
	live := oracle.NewLive(header)
	progress := func(p load.Progress) {
		if o.Progress != nil {
			main, control := live.Counts()
			o.Progress(Progress{p, main, control})
		}
	}
	main := mainPhase(&o.Plan, w, live)
	main.Header, main.History, main.Start, main.NextID = o.Header, writer, header.Started, new(atomic.Int64)
	main.Progress, main.Logger = progress, o.Logger

	if o.Plan.Control > 0 {
		server := target.Server{BaseURL: o.Plan.BaseURL, Header: o.Header, Client: http.DefaultClient}
		flush := func() error {
			ctx, cancel := context.WithTimeout(ctx, flushTimeout)
			defer cancel()
			note := noteWarm
			if by := server.FlushCache(ctx); by != "" {
				note = noteCold + by
			}
			return writer.Event(&history.Event{At: time.Since(header.Started), Kind: history.Log, Name: "cache", Text: note})
		}
		if err := flush(); err != nil {
			return err
		}
		control := main
		control.Phase, control.Alone, control.Concurrency, control.Sessions = history.Control, true, 1, o.Plan.Control
		control.RequestRate, control.Waves, control.HealthEvery, control.Recovery = 0, false, 0, nil
		result, err := load.Run(ctx, control)
		if err != nil || result.Stopped != "" {
			return err
		}
		if err := flush(); err != nil {
			return err
		}
	}

	if shards == nil {
		_, err = load.Run(ctx, main)
		return err
	}
	return shards.play(ctx, header.Started, func(p Progress) {
		if o.Progress != nil {
			_, p.Control = live.Counts()
			o.Progress(p)
		}
	}, func(list []history.Shard) error { return WriteJSON(shardsFile(o.Dir), list) })
}

// recovery takes the first turns of sessions that the run doesn't play: plain
// requests, but ones that the model is able to answer.
func recovery(w workload.Workload, sessions int) []workload.Turn {
	var turns []workload.Turn
	for i := range recoveryTurns {
		if t, ok := w.Session(sessions+i, true).Next(nil); ok {
			t.CancelAfter, t.CancelChunks = 0, 0
			turns = append(turns, t)
		}
	}
	return turns
}

func (p *Plan) header(now time.Time) (history.Header, error) {
	w, err := json.Marshal(p.Workload)
	if err != nil {
		return history.Header{}, err
	}
	return history.Header{
		Format: history.Format, Started: now, Tool: p.Tool, BaseURL: p.BaseURL, Model: p.Model, Server: p.Server,
		Seed: p.Workload.Seed, RunKey: p.Workload.RunKey, Workload: w, Sessions: p.Workload.Sessions,
		Concurrency: p.Concurrency, RequestRate: p.RequestRate, Cores: runtime.GOMAXPROCS(0),
	}, nil
}

// Judge judges a run directory's history by today's oracles and writes the
// verdict into it, in place of an older one.
func Judge(dir string) (*oracle.Verdict, error) { return judge(dir, nil) }

func judge(dir string, ops func(oracle.OpResult)) (*oracle.Verdict, error) {
	if err := mergeShards(dir); err != nil {
		return nil, err
	}
	r, err := history.Open(filepath.Join(dir, HistoryFile))
	if err != nil {
		return nil, err
	}
	defer r.Close()
	v, err := oracle.Judge(r, oracle.Options{Ops: ops})
	if err != nil {
		return nil, err
	}
	return v, WriteJSON(filepath.Join(dir, VerdictFile), v)
}

// ReadPlan reads a run directory's plan.
func ReadPlan(dir string) (Plan, error) {
	var p Plan
	path := filepath.Join(dir, PlanFile)
	b, err := os.ReadFile(path)
	if err != nil {
		return p, fmt.Errorf("read plan: %w", err)
	}
	if err := json.Unmarshal(b, &p); err != nil {
		return p, fmt.Errorf("read plan %s: %w", path, err)
	}
	return p, nil
}

// WriteJSON writes a file whole or not at all.
func WriteJSON(path string, value any) error {
	b, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	temp, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(temp.Name()) //nolint:errcheck // it was renamed, or the error is reported
	_, err = temp.Write(append(b, '\n'))
	err = errors.Join(err, temp.Chmod(0o644), temp.Sync(), temp.Close())
	if err == nil {
		err = os.Rename(temp.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// Package app has one function for each command. All wiring of the packages is
// here; arguments, environment, exit codes and standard output stay in cmd.
package app

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/textproto"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// UsageError is a mistake in what was asked for.
type UsageError struct{ err error }

func (e *UsageError) Error() string { return e.err.Error() }
func (e *UsageError) Unwrap() error { return e.err }

// Usage makes one.
func Usage(format string, args ...any) error { return usage(format, args...) }

func usage(format string, args ...any) error { return &UsageError{fmt.Errorf(format, args...)} }

// NoVerdictError says why a run couldn't come to a verdict though nothing is
// wrong with what was asked for: the server can't be reached, say.
type NoVerdictError struct{ err error }

func (e *NoVerdictError) Error() string { return e.err.Error() }
func (e *NoVerdictError) Unwrap() error { return e.err }

// Output is where a command writes.
type Output struct {
	Screen   *term.Screen // for people; nil for JSON
	JSON     io.Writer
	Progress *term.Screen
	Logger   *slog.Logger // nil discards
}

// Server says which server and how to reach it.
type Server struct {
	BaseURL string
	Model   string            // empty is the first that the server lists
	APIKey  string            // secret
	Header  map[string]string // values are secret
	Probes  []string          // its probe directories
}

// headers are what each request carries.
func (s *Server) headers() http.Header {
	h := http.Header{}
	if s.APIKey != "" {
		h.Set("Authorization", "Bearer "+s.APIKey)
	}
	for name, value := range s.Header {
		h.Set(name, value)
	}
	return h
}

// RunOptions is what run is asked for. Zero values take defaults.
type RunOptions struct {
	Server
	Kind                           string
	Sessions, Rounds, ContextLines int
	MaxTokens                      int
	Tools, OnError                 string
	TopLogprobs                    int
	Seed                           uint64
	RunKey                         string         // hex, of the canaries; empty is the seed's own
	Knobs                          map[string]int // more of the workload's, by name
	Concurrency                    int
	RequestRate                    float64
	Waves                          bool
	Control                        bool
	ControlSessions                int
	Timeout                        time.Duration
	NoStream                       bool
	Shards                         int               // processes that play the load together; 0 is this one alone
	StartShards                    experiment.Shards // starts them, unless NATS names a cluster whose workers play them
	NATS                           NATS
	Needs                          []string // labels of those workers
	ExtraBody                      string   // a JSON object
	Output                         string
	DryRun                         bool
	Tool                           string // name and version of the program
}

// FreshKey makes a run key that no run had.
func FreshKey() string {
	key := make([]byte, 16)
	rand.Read(key) // it never returns an error
	return hex.EncodeToString(key)
}

// DefaultSessions is the incident's number: enough that a fault of one op in a
// hundred shows, and that a server's batches fill.
const DefaultSessions = 80

// Defaults says what zero values become, by the names that help texts use.
func Defaults() map[string]string {
	return map[string]string{
		"sessions": fmt.Sprint(DefaultSessions),
		"kinds":    strings.Join(workload.Kinds(), ", "),
		"timeout":  strings.TrimSuffix(load.DefaultTimeout.String(), "0s"),
	}
}

// Run drives a workload at a server, judges it and shows the report.
func Run(ctx context.Context, o RunOptions, out Output) (oracle.Status, error) {
	plan, err := o.plan()
	if err != nil {
		return "", err
	}
	if o.DryRun {
		return oracle.Clean, dryRun(plan, out)
	}
	if !o.NATS.named() {
		return carryOut(ctx, o.Server, plan, nil, o.StartShards, o.Output, out)
	}
	if plan.Shards < 2 {
		return "", usage("--nats: workers there play shards; give --shards N, at most as many as there are workers")
	}
	shards, end, err := o.NATS.shards(ctx, o.Needs, out)
	if err != nil {
		return "", err
	}
	status, err := carryOut(ctx, o.Server, plan, nil, shards, o.Output, out)
	return status, errors.Join(err, end())
}

// carryOut asks a server what it is, plays a plan at it and shows the report.
// w is played instead of the plan's workload unless it is nil.
func carryOut(ctx context.Context, s Server, plan experiment.Plan, w workload.Workload, shards experiment.Shards, dir string, out Output) (oracle.Status, error) {
	server := target.Server{BaseURL: plan.BaseURL, Header: s.headers(), Client: http.DefaultClient}
	id, err := server.Identify(ctx)
	if err != nil {
		return "", &NoVerdictError{fmt.Errorf("%w\nIs the server up and ready? Is the port right? Does it want an --api-key?", err)}
	}
	switch {
	case plan.Model != "" || plan.Replay != nil && plan.Replay.HasModel:
	case len(id.Models) == 0:
		return "", usage("%s lists no models; name one with --model", plan.BaseURL)
	default:
		plan.Model = id.Models[0]
	}
	if id.Engine != "" {
		plan.Server = id.String()
	}
	dir = cmp.Or(dir, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-"+plan.Workload.Kind))
	out.Progress.Printf("%s\n%s, model %s\n%s\n", term.Safe(plan.BaseURL), term.Safe(id.String()), term.Safe(cmp.Or(plan.Model, "as recorded")), describe(plan))
	v, err := experiment.Run(ctx, experiment.Options{
		Dir: dir, Plan: plan, Header: s.headers(), Workload: w, Progress: progress(out.Progress), Logger: out.Logger,
		Watch: recordProbes(s.Probes, out.Logger), Shards: shards,
	})
	if err != nil {
		return "", err
	}
	if err := writeRunPage(dir, plan, v, plan.Tool); err != nil {
		return "", err
	}
	return show(dir, plan, v, out)
}

// plan completes what was asked for, or says what is wrong with it.
func (o *RunOptions) plan() (experiment.Plan, error) {
	var p experiment.Plan
	if o.BaseURL == "" {
		return p, usage("which server? Give --base-url http://HOST:PORT, or set OPENAI_BASE_URL")
	}
	base, err := target.ParseBaseURL(o.BaseURL)
	if err != nil {
		return p, &UsageError{err}
	}
	for name := range o.Header {
		if textproto.TrimString(name) != name || name == "" || strings.ContainsAny(name, " :\r\n\t") {
			return p, usage("header %q: want NAME=VALUE", name)
		}
	}
	w, err := o.workload()
	if err != nil {
		return p, &UsageError{err}
	}
	p = experiment.Plan{
		Tool: o.Tool, BaseURL: base, Model: o.Model, Workload: w,
		Concurrency: o.Concurrency, RequestRate: o.RequestRate, Waves: o.Waves, TimeoutMS: o.Timeout.Milliseconds(),
		NoStream: o.NoStream, HeaderNames: slices.Sorted(maps.Keys(o.Header)),
	}
	switch {
	case o.RequestRate < 0 || o.Concurrency < 0 || o.Timeout < 0 || o.ControlSessions < 0:
		return p, usage("--request-rate, --concurrency, --timeout and --control-sessions must not be negative")
	case o.RequestRate > 0 && o.Waves:
		return p, usage("--waves and --request-rate don't go together")
	case o.RequestRate == 0 && o.Concurrency == 0:
		p.Concurrency = w.Sessions
	case o.Concurrency > w.Sessions:
		return p, usage("--concurrency %d can't be reached with --sessions %d: each conversation has one request open at a time", o.Concurrency, w.Sessions)
	}
	switch {
	case o.Shards < 0 || o.Shards > w.Sessions || o.RequestRate == 0 && o.Shards > p.Concurrency:
		return p, usage("--shards %d of %d conversations, %d at once: each shard must have one to play", o.Shards, w.Sessions, p.Concurrency)
	case o.Shards > 1:
		p.Shards = o.Shards
	}
	if o.Control {
		p.Control = min(cmp.Or(o.ControlSessions, w.Sessions), w.Sessions)
	}
	if o.ExtraBody != "" {
		if err := json.Unmarshal([]byte(o.ExtraBody), &p.ExtraBody); err != nil {
			return p, usage("--extra-body: want a JSON object: %w", err)
		}
	}
	return p, nil
}

// workload turns the knobs into a complete workload plan. They go through its
// JSON form, so that a knob is known by one name everywhere.
func (o *RunOptions) workload() (workload.Plan, error) {
	p := workload.Plan{
		Kind: cmp.Or(o.Kind, "agent"), Seed: cmp.Or(o.Seed, 1), RunKey: o.RunKey, Sessions: cmp.Or(o.Sessions, DefaultSessions), Rounds: o.Rounds,
		ContextLines: o.ContextLines, MaxTokens: o.MaxTokens, Tools: o.Tools, OnError: o.OnError, TopLogprobs: o.TopLogprobs,
	}
	if len(o.Knobs) > 0 {
		knobs, err := json.Marshal(o.Knobs)
		if err != nil {
			return p, err
		}
		if err := json.Unmarshal(knobs, &p); err != nil {
			return p, fmt.Errorf("--set: %w", err)
		}
	}
	return p.WithDefaults()
}

// describe says in one line what a plan sends.
func describe(p experiment.Plan) string {
	w := p.Workload
	if r := p.Replay; r != nil {
		text := fmt.Sprintf("%d requests of %s (%s), in %d rows", r.Requests, term.Safe(r.Source), r.Format, r.Rows)
		if r.Timed {
			text += fmt.Sprintf(", at %g times their speed", r.Speed)
		}
		return text
	}
	if w.Kind == recorded {
		return "recorded traffic"
	}
	text := fmt.Sprintf("%s: %d sessions x %d rounds", w.Kind, w.Sessions, w.Rounds)
	if w.ContextLines > 0 {
		text += fmt.Sprintf(", %d lines of context", w.ContextLines)
	}
	if p.Control > 0 {
		which := "all"
		if p.Control < w.Sessions {
			which = fmt.Sprint(p.Control)
		}
		text += fmt.Sprintf(", %s of them alone and cold first", which)
	}
	if p.Shards > 1 {
		text += fmt.Sprintf(", in %d shards", p.Shards)
	}
	return text
}

func dryRun(p experiment.Plan, out Output) error {
	w, err := workload.New(p.Workload)
	if err != nil {
		return err
	}
	turn, ok := w.Session(0, false).Next(nil)
	if !ok {
		return errors.New("dry run: the workload's first session has no turn")
	}
	turn.Request.Model = p.Model
	first, err := json.MarshalIndent(turn.Request, "", "  ")
	if err != nil {
		return err
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, map[string]any{"plan": p, "first_request": json.RawMessage(first)})
	}
	out.Screen.Printf("Nothing is sent. The plan:\n  %s\n  to %s\n\nThe first request:\n%s\n", describe(p), p.BaseURL, first)
	return nil
}

// progress shows a run's progress: each second in place, or a line each ten.
func progress(s *term.Screen) func(experiment.Progress) {
	var last time.Duration
	var phase history.Phase
	return func(p experiment.Progress) {
		const quiet = 10 * time.Second
		if !s.Live && p.Phase == phase && p.Elapsed-last < quiet {
			return
		}
		last, phase = p.Elapsed, p.Phase
		s.Progress(progressText(p))
	}
}

func progressText(p experiment.Progress) string {
	text := fmt.Sprintf("%-7s  %4.0f s  %d of %d sessions, %d in flight", p.Phase, p.Elapsed.Seconds(), p.SessionsDone, p.Sessions, p.InFlight)
	if lost := p.Ops.Failed + p.Ops.TimedOut; lost > 0 {
		text += fmt.Sprintf(", %d lost", lost)
	}
	now, alone := p.Main, p.Control
	if p.Phase == history.Control {
		now, alone = p.Control, oracle.Count{}
	}
	if now.Judged > 0 {
		text += fmt.Sprintf(", %d of %d replies wrong", now.Broken, now.Judged)
	}
	if alone.Judged > 0 {
		text += fmt.Sprintf(", alone %.0f%%", 100*float64(alone.Broken)/float64(alone.Judged))
	}
	return text
}

// Check judges a run directory again.
func Check(dir string, out Output) (oracle.Status, error) {
	plan, err := experiment.ReadPlan(dir)
	if err != nil {
		return "", usage("%w\nIs %s a run directory?", err, dir)
	}
	v, err := experiment.Judge(dir)
	if err != nil {
		return "", &NoVerdictError{err}
	}
	return show(dir, plan, v, out)
}

// ShowOp writes everything about one op as JSON.
func ShowOp(dir string, id int64, w io.Writer) error {
	r, err := history.Open(filepath.Join(dir, experiment.HistoryFile))
	if err != nil {
		return usage("%w\nIs %s a run directory?", err, dir)
	}
	defer r.Close()
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			return usage("%s has no op %d", dir, id)
		}
		if err != nil {
			return err
		}
		if record.Op != nil && record.Op.ID == id {
			return writeJSON(w, record.Op)
		}
	}
}

func show(dir string, plan experiment.Plan, v *oracle.Verdict, out Output) (oracle.Status, error) {
	if out.Screen == nil {
		return v.Status, writeJSON(out.JSON, struct {
			Dir string `json:"dir"`
			*oracle.Verdict
		}{dir, v})
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return "", err
	}
	var files []string
	for _, e := range entries {
		files = append(files, e.Name())
	}
	report.Terminal(out.Screen, v, report.Run{Dir: dir, Workload: describe(plan), Files: files})
	return v.Status, nil
}

func writeJSON(w io.Writer, value any) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	return e.Encode(value)
}

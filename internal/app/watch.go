package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/watch"
	"github.com/culprit-project/culprit/workload"
)

// WatchOptions is what watch is asked for.
type WatchOptions struct {
	Server
	Every                time.Duration
	Baseline             float64
	FalseAlarms          float64 // a month
	Rounds, ContextLines int
	Tools                string
	Timeout              time.Duration // of one reply
	Listen               string        // of metrics and health; empty for none
	PID                  int           // of the server, where it runs here; 0: not known
	Logs                 []string      // files of the server
	OnAlarm              string        // a shell's command
	KeepDays             int
	Output               string
	Tool                 string
}

const (
	watchTimeout  = time.Minute
	evidenceLimit = 30 * time.Second // of each piece of evidence
	logTail       = 1 << 20
	// watchSessions bounds what one run directory holds: canaries of as many
	// conversations are looked for.
	watchSessions = 10_000
)

// Watch keeps an eye on a server, until ctx ends.
func Watch(ctx context.Context, o WatchOptions, out Output) error {
	if o.BaseURL == "" {
		return usage("which server? Give --base-url http://HOST:PORT, or set OPENAI_BASE_URL")
	}
	base, err := target.ParseBaseURL(o.BaseURL)
	if err != nil {
		return &UsageError{err}
	}
	server := target.Server{BaseURL: base, Header: o.headers(), Client: http.DefaultClient}
	id, err := server.Identify(ctx)
	if err != nil {
		return &NoVerdictError{fmt.Errorf("%w\nA watch begins with a server that answers", err)}
	}
	model := o.Model
	if model == "" {
		if len(id.Models) == 0 {
			return usage("%s lists no models; name one with --model", base)
		}
		model = id.Models[0]
	}
	p := &watchPlayer{
		WatchOptions: o, base: base, model: model, server: id.String(),
		dir: cmp.Or(o.Output, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-watch")),
	}
	p.Timeout = cmp.Or(p.Timeout, watchTimeout)
	defer p.shut() //nolint:errcheck // each op was written when it ended
	m := newWatchMetrics(model, id.Engine)
	if o.Listen != "" {
		listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.Listen)
		if err != nil {
			return usage("watch: can't listen on %s: %w; choose another address with --listen", o.Listen, err)
		}
		s := &http.Server{Handler: m.handler(3*cmp.Or(o.Every, watch.DefaultEvery) + p.Timeout), ReadHeaderTimeout: time.Minute}
		defer s.Close()      //nolint:errcheck // nothing is lost with it
		go s.Serve(listener) //nolint:errcheck // it ends when it is closed
		out.Progress.Printf("metrics and health at http://%s/metrics and /health\n", listener.Addr())
	}
	out.Progress.Printf("%s, %s, model %s: a conversation each %s, recorded in %s\n", term.Safe(base), term.Safe(id.String()), term.Safe(model), cmp.Or(o.Every, watch.DefaultEvery), term.Safe(p.dir))
	var played, broken, lost int
	return watch.Run(ctx, watch.Options{
		Play: p.play, Every: o.Every, Baseline: o.Baseline, FalseAlarms: o.FalseAlarms, Logger: out.Logger,
		Seen: func(c watch.Conversation, evidence float64) {
			m.seen(c, evidence)
			played++
			switch {
			case c.Unanswered():
				lost++
			case c.Broken():
				broken++
			}
			if out.Progress.Live || c.Broken() || c.Unanswered() || played%60 == 1 {
				out.Progress.Progress(fmt.Sprintf("%s  %d conversations, %d broken, %d without a reply; %.0f%% of the evidence for an alarm",
					time.Now().Format(time.TimeOnly), played, broken, lost, 100*evidence))
			}
		},
		Alarm: func(ctx context.Context, a watch.Alarm) {
			m.alarms.WithLabelValues(a.Kind).Inc()
			dir := p.gather(ctx, a, out.Logger)
			out.Progress.Printf("ALARM (%s) %s\n  evidence in %s\n", a.Kind, term.Safe(a.Says), term.Safe(dir))
			if o.OnAlarm != "" {
				if err := runCommand(ctx, o.OnAlarm, dir, a); err != nil {
					out.Progress.Printf("  the alarm's command failed: %s\n", term.Safe(err.Error()))
				}
			}
		},
	})
}

// watchPlayer plays conversations into a run directory for each day.
type watchPlayer struct {
	WatchOptions
	base, model, server string
	dir                 string

	day      string // the run directory's name
	first    int    // number of the day's first conversation
	started  time.Time
	workload workload.Workload
	writer   *history.Writer
	live     *oracle.Live
	ids      *atomic.Int64
}

// today begins a run directory, with a key of its own, for each day.
func (p *watchPlayer) today(number int) error {
	name := time.Now().UTC().Format("2006-01-02")
	if p.writer != nil && name == p.day && number-p.first < watchSessions {
		return nil
	}
	if err := p.shut(); err != nil {
		return err
	}
	seed, err := strconv.ParseUint(time.Now().UTC().Format("20060102"), 10, 64)
	if err != nil {
		return err
	}
	plan, err := workload.Plan{
		Kind: "agent", Seed: seed, RunKey: FreshKey(), Sessions: watchSessions,
		Rounds: cmp.Or(p.Rounds, 2), ContextLines: cmp.Or(p.ContextLines, 12), Tools: p.Tools,
	}.WithDefaults()
	if err != nil {
		return &UsageError{err}
	}
	if p.workload, err = workload.New(plan); err != nil {
		return err
	}
	dir := filepath.Join(p.dir, name)
	for n := 2; ; n++ { // a watch that was begun again has the day already
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			break
		}
		dir = filepath.Join(p.dir, fmt.Sprintf("%s-%d", name, n))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	runPlan := experiment.Plan{Tool: p.Tool, BaseURL: p.base, Model: p.model, Server: p.server, Workload: plan, Concurrency: 1, TimeoutMS: p.Timeout.Milliseconds()}
	if err := experiment.WriteJSON(filepath.Join(dir, experiment.PlanFile), runPlan); err != nil {
		return err
	}
	header := history.Header{
		Started: time.Now(), Tool: p.Tool, BaseURL: p.base, Model: p.model, Server: p.server, Seed: seed, RunKey: plan.RunKey,
		Workload: []byte(`{"kind":"agent"}`), Sessions: plan.Sessions, Concurrency: 1, Cores: runtime.GOMAXPROCS(0),
	}
	if p.writer, err = history.Create(filepath.Join(dir, experiment.HistoryFile), header); err != nil {
		return err
	}
	p.day, p.first, p.started, p.live, p.ids = name, number, header.Started, oracle.NewLive(header), new(atomic.Int64)
	return p.prune()
}

func (p *watchPlayer) shut() error {
	if p.writer == nil {
		return nil
	}
	err := p.writer.Close()
	p.writer = nil
	return err
}

// prune removes days that are too old; alarms stay.
func (p *watchPlayer) prune() error {
	if p.KeepDays <= 0 {
		return nil
	}
	days, err := filepath.Glob(filepath.Join(p.dir, "[0-9][0-9][0-9][0-9]-[0-9][0-9]-[0-9][0-9]*"))
	if err != nil || len(days) <= p.KeepDays {
		return err
	}
	slices.Sort(days)
	for _, d := range days[:len(days)-p.KeepDays] {
		err = errors.Join(err, os.RemoveAll(d))
	}
	return err
}

// recorder shows a conversation's ops to the oracles on their way into the
// history.
type recorder struct {
	*watchPlayer
	c *watch.Conversation
}

func (r recorder) Event(e *history.Event) error { return r.writer.Event(e) }

func (r recorder) Op(op *history.Op) error {
	damaged, classes := r.live.Violations(op)
	r.c.Ops++
	if damaged {
		r.c.Damaged++
	}
	for _, class := range classes {
		r.c.Classes = append(r.c.Classes, string(class))
	}
	if op.Outcome != history.OK {
		r.c.Lost++
		r.c.LostWhy = op.Error
	} else {
		r.c.TotalMS = append(r.c.TotalMS, milliseconds(op.LastByte-op.Sent))
	}
	if op.FirstByte > 0 {
		r.c.FirstMS = append(r.c.FirstMS, milliseconds(op.FirstByte-op.Sent))
	}
	for i := 1; i < len(op.Chunks); i++ {
		r.c.ChunkMS = append(r.c.ChunkMS, milliseconds(op.Chunks[i].At-op.Chunks[i-1].At))
	}
	return r.writer.Op(op)
}

func milliseconds(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

func (p *watchPlayer) play(ctx context.Context, number int) (watch.Conversation, error) {
	c := watch.Conversation{Number: number}
	if err := p.today(number); err != nil {
		return c, err
	}
	_, err := load.Run(ctx, load.Options{
		BaseURL: p.base, Header: p.headers(), Model: p.model, Timeout: p.Timeout,
		Workload: p.workload, FirstSession: number - p.first, Sessions: 1, Concurrency: 1,
		History: recorder{p, &c}, Start: p.started, NextID: p.ids,
		Suspect: func(op *history.Op, reply *openai.Reply) bool {
			if op.Outcome == history.OK && reply != nil && reply.Content+reply.Reasoning == "" && len(reply.ToolCalls) == 0 {
				c.Lost, c.LostWhy = c.Lost+1, "the reply ended without a token"
			}
			return false // a canary sends no more because of it
		},
	})
	c.Record = p.writer.Path()
	return c, err
}

// gather writes down what would be lost with a restart: first what may vanish
// soonest. What can't be had is said, and costs the rest nothing.
func (p *watchPlayer) gather(ctx context.Context, a watch.Alarm, logger *slog.Logger) string {
	dir := filepath.Join(p.dir, "alarms", a.At.UTC().Format("2006-01-02T15-04-05")+"-"+a.Kind)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Sprintf("nowhere: %v", err)
	}
	missing := map[string]string{}
	piece := func(name string, get func(ctx context.Context, w io.Writer) error) {
		ctx, cancel := context.WithTimeout(ctx, evidenceLimit)
		defer cancel()
		f, err := os.Create(filepath.Join(dir, name))
		if err == nil {
			err = errors.Join(get(ctx, f), f.Close())
		}
		if err != nil {
			missing[name] = target.Redact(err.Error())
		}
	}
	if p.PID > 0 {
		piece("stacks.txt", func(ctx context.Context, w io.Writer) error { return stacks(ctx, p.PID, w) })
	}
	piece("metrics.txt", func(ctx context.Context, w io.Writer) error { return p.get(ctx, "/metrics", w) })
	piece("health.txt", func(ctx context.Context, w io.Writer) error { return p.get(ctx, "/health", w) })
	for i, path := range p.Logs {
		piece(fmt.Sprintf("log-%d-%s", i+1, filepath.Base(path)), func(_ context.Context, w io.Writer) error {
			text, err := target.Tail(path, logTail)
			if err != nil {
				return err
			}
			_, err = io.WriteString(w, target.Redact(string(text)))
			return err
		})
	}
	piece("attest.json", func(ctx context.Context, w io.Writer) error {
		what := p.base
		if p.PID > 0 {
			what = strconv.Itoa(p.PID)
		}
		o := AttestOptions{Server: p.Server, What: what}
		found, _, err := o.attest(ctx, what)
		if err != nil {
			return err
		}
		return writeJSON(w, found)
	})
	if err := experiment.WriteJSON(filepath.Join(dir, "alarm.json"), struct {
		watch.Alarm
		Missing map[string]string `json:"missing,omitempty"`
	}{a, missing}); err != nil && logger != nil {
		logger.Error("the alarm can't be written", slog.Any("error", err))
	}
	return dir
}

func (p *watchPlayer) get(ctx context.Context, path string, w io.Writer) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, p.base+path, nil)
	if err != nil {
		return err
	}
	r.Header = p.headers()
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	fmt.Fprintf(w, "# %s %s: %s\n", r.Method, path, resp.Status)
	_, err = io.Copy(w, io.LimitReader(resp.Body, 8<<20))
	return err
}

// stacks asks py-spy, where there is one, for the stacks of the server's Python
// processes, and the kernel for what each process waits for.
func stacks(ctx context.Context, pid int, w io.Writer) error {
	var failed error
	for _, pid := range append([]int{pid}, target.Descendants(pid)...) {
		wait, err := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", pid))
		fmt.Fprintf(w, "== process %d, waiting in %s\n", pid, cmp.Or(string(wait), "nothing"))
		failed = errors.Join(failed, err)
		spy, err := exec.LookPath("py-spy")
		if err != nil {
			failed = errors.New("py-spy isn't installed: no Python stacks")
			continue
		}
		c := exec.CommandContext(ctx, spy, "dump", "--pid", strconv.Itoa(pid))
		c.Stdout, c.Stderr = w, w
		failed = errors.Join(failed, c.Run())
	}
	return failed
}

func runCommand(ctx context.Context, command, dir string, a watch.Alarm) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Minute)
	defer cancel()
	c := exec.CommandContext(ctx, "sh", "-c", command)
	c.Env = append(c.Environ(), "CULPRIT_ALARM_DIR="+dir, "CULPRIT_ALARM_KIND="+a.Kind, "CULPRIT_ALARM_SAYS="+a.Says)
	said, err := c.CombinedOutput()
	if err != nil {
		return fmt.Errorf("%w: %s", err, said[:min(len(said), 1000)])
	}
	return nil
}

// watchMetrics are what Prometheus reads.
type watchMetrics struct {
	registry      *prometheus.Registry
	conversations *prometheus.CounterVec
	violations    *prometheus.CounterVec
	alarms        *prometheus.CounterVec
	evidence      prometheus.Gauge
	duration      prometheus.Histogram
	first         prometheus.Histogram
	chunk         prometheus.Histogram
	lastReply     atomic.Int64 // Unix time in nanoseconds
}

func newWatchMetrics(model, engine string) *watchMetrics {
	// The names and buckets of OpenTelemetry's conventions for generative AI,
	// where they have one.
	buckets := []float64{0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92}
	labels := prometheus.Labels{"gen_ai_operation_name": "chat", "gen_ai_provider_name": cmp.Or(engine, "openai"), "gen_ai_request_model": model}
	m := &watchMetrics{
		registry:      prometheus.NewRegistry(),
		conversations: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "culprit_watch_conversations_total", Help: "Conversations played, by result: sound, broken, lost."}, []string{"result"}),
		violations:    prometheus.NewCounterVec(prometheus.CounterOpts{Name: "culprit_watch_violations_total", Help: "Violations found, by class."}, []string{"class"}),
		alarms:        prometheus.NewCounterVec(prometheus.CounterOpts{Name: "culprit_watch_alarms_total", Help: "Alarms raised, by kind: damage, wedge."}, []string{"kind"}),
		evidence:      prometheus.NewGauge(prometheus.GaugeOpts{Name: "culprit_watch_evidence_ratio", Help: "Evidence that the rate rose, as a share of what an alarm takes."}),
		duration:      prometheus.NewHistogram(prometheus.HistogramOpts{Name: "gen_ai_client_operation_duration_seconds", Help: "From sending a request to the end of its reply.", ConstLabels: labels, Buckets: buckets}),
		first:         prometheus.NewHistogram(prometheus.HistogramOpts{Name: "gen_ai_client_operation_time_to_first_chunk_seconds", Help: "From sending a request to the first chunk of its reply.", ConstLabels: labels, Buckets: buckets}),
		chunk:         prometheus.NewHistogram(prometheus.HistogramOpts{Name: "gen_ai_client_operation_time_per_output_chunk_seconds", Help: "From each chunk of a reply to the next.", ConstLabels: labels, Buckets: buckets}),
	}
	m.registry.MustRegister(m.conversations, m.violations, m.alarms, m.evidence, m.duration, m.first, m.chunk)
	for _, result := range []string{"sound", "broken", "lost"} {
		m.conversations.WithLabelValues(result)
	}
	for _, kind := range []string{watch.Damage, watch.Wedge} {
		m.alarms.WithLabelValues(kind)
	}
	m.lastReply.Store(time.Now().UnixNano())
	return m
}

func (m *watchMetrics) seen(c watch.Conversation, evidence float64) {
	result := "sound"
	switch {
	case c.Unanswered():
		result = "lost"
	case c.Broken():
		result = "broken"
	}
	m.conversations.WithLabelValues(result).Inc()
	for _, class := range c.Classes {
		m.violations.WithLabelValues(class).Inc()
	}
	m.evidence.Set(evidence)
	for _, ms := range c.TotalMS {
		m.duration.Observe(ms / 1000)
	}
	for _, ms := range c.FirstMS {
		m.first.Observe(ms / 1000)
	}
	for _, ms := range c.ChunkMS {
		m.chunk.Observe(ms / 1000)
	}
	if !c.Unanswered() {
		m.lastReply.Store(time.Now().UnixNano())
	}
}

// handler serves metrics, and health that means that replies come.
func (m *watchMetrics) handler(patience time.Duration) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("/metrics", promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("/health", func(w http.ResponseWriter, _ *http.Request) {
		since := time.Since(time.Unix(0, m.lastReply.Load())).Round(time.Second)
		if since > patience {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		fmt.Fprintf(w, "last reply %s ago\n", since)
	})
	return mux
}

package app

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/worker"
)

// NATS says which cluster holds the queues, if not one within this program.
type NATS struct {
	queue.Access
	Context  string        // of the nats command line tool
	Replicas int           // of what the queues hold
	MaxBytes int64         // of runs that weren't fetched yet; 0 is no limit
	Silence  time.Duration // after which a worker's trial goes to another; 0 is the queue's default
}

// connect connects to the cluster.
func (n *NATS) connect(ctx context.Context, name string, logger *slog.Logger) (*queue.Conn, error) {
	access := n.Access
	if n.Context != "" {
		c, err := queue.ReadContext(n.Context)
		if err != nil {
			return nil, &UsageError{err}
		}
		access = c
		access.URL = cmp.Or(n.URL, c.URL)
	}
	conn, err := queue.Connect(ctx, access, name, logger)
	if err != nil {
		return nil, &NoVerdictError{err}
	}
	return conn, nil
}

// Workers says who runs a hunt's trials. The zero value is nobody else.
type Workers struct {
	Count int  // at once; with a cluster, 0 is as many as there are
	NATS  NATS // without a URL and a context the workers are within this program
}

// named says that a cluster is.
func (n *NATS) named() bool { return n.URL != "" || n.Context != "" }

func (w *Workers) elsewhere() bool { return w.NATS.named() }

func (w *Workers) none() bool { return w.Count == 0 && !w.elsewhere() }

// check says why a case can't be hunted by these workers.
func (w *Workers) check(c *experiment.Case, hypotheses bool) error {
	switch {
	case w.none():
		return nil
	case w.Count < 0:
		return usage("--workers %d: want how many trials to run at once", w.Count)
	case hypotheses:
		return usage("--workers is for the search; what hypotheses ask for runs one after the other")
	case !c.Launches():
		return usage("--workers: the case launches no process, so several workers would load the same server; give it target: processes")
	case !w.elsewhere() && w.Count > 1 && !c.ByWorker():
		return usage("--workers %d: the servers of this machine's workers would be in each other's way. Write {{worker}}, a worker's number from 0, where they must differ: in base_url, the port, CUDA_VISIBLE_DEVICES", w.Count)
	}
	return nil
}

const (
	// queueFile names the queue of a hunt, which is resumed with the same.
	queueFile = "queue.json"
	// queueDir is what the server within this program keeps.
	queueDir = "queue"
	// workDir has the run directories of workers within this program.
	workDir = "work"
)

// start gives the hunt a crew. end is to be called when it is over.
func (w *Workers) start(ctx context.Context, hunt *experiment.HuntOptions, out Output) (end func(finished bool) error, err error) {
	if w.none() {
		return func(bool) error { return nil }, nil
	}
	var cleanup []func()
	closeAll := func() {
		for i := range cleanup {
			cleanup[len(cleanup)-1-i]()
		}
		cleanup = nil
	}
	defer func() {
		if err != nil {
			closeAll()
		}
	}()
	say := sayer(out.Progress)
	name, before, err := queueName(hunt.Dir, hunt.Resume)
	if err != nil {
		return nil, err
	}
	var server *queue.Server
	var conn *queue.Conn
	if w.elsewhere() {
		conn, err = w.NATS.connect(ctx, "culprit hunt", slog.New(sayHandler{say}))
	} else if server, err = queue.Serve(queue.ServerOptions{Dir: filepath.Join(hunt.Dir, queueDir), Logger: hunt.Logger}); err == nil {
		cleanup = append(cleanup, server.Close)
		conn, err = server.Connect(ctx, "culprit hunt", hunt.Logger)
	}
	if err != nil {
		return nil, err
	}
	cleanup = append(cleanup, conn.Close)
	if before != "" {
		if old, err := conn.Join(ctx, before); err == nil {
			if err := old.Delete(ctx); err != nil {
				return nil, err
			}
		}
	}
	if server != nil {
		// A worker within this program is silent only if the program was killed.
		const silence = 5 * time.Second
		w.NATS.Silence = silence
	}
	q, err := conn.Make(ctx, name, queue.Options{Replicas: w.NATS.Replicas, AckWait: w.NATS.Silence, MaxBytes: w.NATS.MaxBytes})
	if err != nil {
		return nil, err
	}
	crew, err := worker.NewCrew(ctx, conn, q, worker.CrewOptions{Most: w.Count, Here: server != nil, Say: say})
	if err != nil {
		return nil, err
	}
	cleanup = append(cleanup, crew.Close)
	say("Trials go to queue %s.", name)
	hunt.Crew = crew
	hunt.UnderWay = underWay(out.Progress, hunt.Case)
	if server != nil {
		cleanup = append(cleanup, w.within(ctx, server, name, hunt, say))
	}
	return func(finished bool) error {
		defer closeAll()
		if !finished {
			return nil
		}
		// Nobody needs it any more, and workers end what they still run.
		if err := q.Delete(context.WithoutCancel(ctx)); err != nil {
			return err
		}
		closeAll()
		return errors.Join(os.RemoveAll(filepath.Join(hunt.Dir, queueDir)), os.RemoveAll(filepath.Join(hunt.Dir, workDir)), os.Remove(filepath.Join(hunt.Dir, queueFile)))
	}, nil
}

// within starts the workers of this program; stop ends them.
func (w *Workers) within(ctx context.Context, server *queue.Server, name string, hunt *experiment.HuntOptions, say func(string, ...any)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var all sync.WaitGroup
	for slot := range w.Count {
		all.Go(func() {
			conn, err := server.Connect(ctx, fmt.Sprintf("worker %d", slot), hunt.Logger)
			if err == nil {
				defer conn.Close()
				err = worker.Run(ctx, conn, worker.Options{
					Name: fmt.Sprintf("worker-%d", slot), Slot: slot, Queue: name, Dir: filepath.Join(hunt.Dir, workDir, fmt.Sprint(slot)),
					Launcher: hunt.Launcher, Header: hunt.Header, Tool: hunt.Tool, Logger: hunt.Logger,
					Say: func(format string, args ...any) {
						hunt.Logger.Info(fmt.Sprintf(format, args...), slog.Int("worker", slot))
					},
				})
			}
			if err != nil && ctx.Err() == nil {
				say("worker %d: %s", slot, err)
			}
		})
	}
	return func() {
		cancel()
		all.Wait()
	}
}

// queueName names the queue of a hunt: a new one, or the one that it began with.
// before is one that was begun with and isn't gone on with.
func queueName(dir string, resume bool) (name, before string, err error) {
	path := filepath.Join(dir, queueFile)
	var kept struct {
		Queue string `json:"queue"`
	}
	b, err := os.ReadFile(path)
	if err == nil {
		err = json.Unmarshal(b, &kept)
	}
	switch {
	case err == nil && resume:
		return kept.Queue, "", nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return "", "", fmt.Errorf("read %s: %w", path, err)
	}
	before = kept.Queue
	kept.Queue = "hunt-" + strings.ToLower(rand.Text()[:10])
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", "", fmt.Errorf("make case directory: %w", err)
	}
	return kept.Queue, before, experiment.WriteJSON(path, kept)
}

// sayer prints lines, one at a time.
func sayer(s *term.Screen) func(format string, args ...any) {
	var mu sync.Mutex
	return func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		s.Printf("%s\n", term.Safe(fmt.Sprintf(format, args...)))
	}
}

// sayHandler prints what a connection logs.
type sayHandler struct {
	say func(format string, args ...any)
}

// Enabled implements slog.Handler.
func (sayHandler) Enabled(_ context.Context, l slog.Level) bool { return l >= slog.LevelInfo }

// Handle implements slog.Handler.
func (h sayHandler) Handle(_ context.Context, r slog.Record) error {
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += ", " + a.Key + ": " + a.Value.String(); return true })
	h.say("%s", text)
	return nil
}

// WithAttrs implements slog.Handler.
func (h sayHandler) WithAttrs([]slog.Attr) slog.Handler { return h }

// WithGroup implements slog.Handler.
func (h sayHandler) WithGroup(string) slog.Handler { return h }

// underWay shows what runs now.
func underWay(s *term.Screen, c *experiment.Case) func([]search.Ticket) {
	return func(all []search.Ticket) {
		if !s.Live {
			return
		}
		var arms []string
		for _, t := range all {
			arms = append(arms, armText(c.Space, t.Proposal.Arm))
		}
		s.Progress(fmt.Sprintf("%d under way: %s", len(all), strings.Join(arms, "; ")))
	}
}

// armText names what an arm has that the failing arm hasn't.
func armText(space design.Space, a design.Arm) string {
	failing := space.Failing()
	var changed []string
	for _, f := range space.Factors {
		if level := a[f.Name]; level != "" && level != failing[f.Name] {
			changed = append(changed, f.Name+"="+level)
		}
	}
	if len(changed) == 0 {
		return "the failing arm"
	}
	return strings.Join(changed, " ")
}

// WorkerOptions is what worker is asked for.
type WorkerOptions struct {
	Server   // header and key alone
	NATS     NATS
	Name     string
	Labels   []string
	Slot     int
	Dir      string
	Idle     time.Duration // it ends after so long without work; 0 never
	Launcher *target.Launcher
	Tool     string
}

// Work carries out the trials of hunts that run elsewhere, until ctx ends or there
// is no more work.
func Work(ctx context.Context, o WorkerOptions, out Output) error {
	for _, label := range o.Labels {
		if key, value, ok := strings.Cut(label, "="); !ok || key == "" || value == "" || strings.ContainsAny(label, "\n") || key == "worker" || label[0] == '!' {
			return usage("--label %q: want key=value, such as gpu=8", label)
		}
	}
	if o.Idle < 0 {
		return usage("--idle %s: want for how long to wait for work", o.Idle)
	}
	say := sayer(out.Progress)
	conn, err := o.NATS.connect(ctx, "culprit worker", slog.New(sayHandler{say}))
	if err != nil {
		return err
	}
	defer conn.Close()
	labels := "no labels"
	if len(o.Labels) > 0 {
		labels = strings.Join(o.Labels, " ")
	}
	say("Waits for trials at %s, with %s.", conn.ConnectedUrlRedacted(), labels)
	if err := worker.Run(ctx, conn, worker.Options{
		Name: o.Name, Labels: o.Labels, Slot: o.Slot, Dir: o.Dir, Idle: o.Idle, Launcher: o.Launcher, Header: o.headers(), Tool: o.Tool,
		Say: say, Logger: out.Logger,
	}); err != nil {
		return &NoVerdictError{fmt.Errorf("worker: %w", err)}
	}
	return nil
}

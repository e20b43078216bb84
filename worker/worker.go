// Package worker carries out the trials of hunts, and plays shards of runs, that
// run elsewhere. A [Worker] takes orders off queues, launches, loads and judges as
// a hunt by itself does, and hands the run directory back; a [Crew] is the hunt's
// side of it, [Shards] a run's. A trial counts once, whatever dies: an order stays
// on the queue until its result is kept, a result is taken once by its number, and
// a run directory stays with its worker until it is uploaded.
//
// Stability: may change.
package worker

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

const (
	// mostTaken is how many workers may die on one order.
	mostTaken = 4
	// mostTrouble is on how many orders in a row of one case a worker's machine
	// may fail until it takes no more of them, and how often an order is tried by
	// the only worker that there is.
	mostTrouble = 3
	// holdTime is how long a server waits for its next order when nobody says
	// that it needn't: longer than a hunt takes to think.
	holdTime = 2 * time.Minute
	again    = 2 * time.Second // until something that failed is tried again

	presenceEvery   = 2 * time.Second
	presenceSubject = "culprit.worker."
	releaseSubject  = "culprit.release."

	resultFile = "result.json" // of a run directory that wasn't handed over yet
)

// Options is what a worker takes.
type Options struct {
	Name     string        // that no other has; empty makes one
	Labels   []string      // key=value
	Slot     int           // its number on its machine, which {{worker}} in a case is
	Dir      string        // where run directories stay until they are uploaded
	Queue    string        // takes orders of this one alone; empty is of all
	Idle     time.Duration // ends after so long without work; 0 never does
	Launcher *target.Launcher
	Header   http.Header
	Tool     string
	Say      func(format string, args ...any) // what a person wants to know; nil is nothing
	Logger   *slog.Logger
}

// presence is what a worker says of itself.
type presence struct {
	Name   string   `json:"name"`
	Labels []string `json:"labels"`
	Queue  string   `json:"queue,omitempty"` // takes of this one alone
	// Holds says that a server runs which waits for more orders.
	Holds  string `json:"holds,omitempty"` // of which queue
	Launch int    `json:"launch,omitempty"`
	// Left are the queues whose orders its machine failed on, each with why.
	Left map[string]string `json:"left,omitempty"`
}

// result is what a worker hands over.
type result struct {
	Number int               `json:"number"`
	Worker string            `json:"worker"`
	Tool   string            `json:"tool"`
	Up     bool              `json:"up"`
	Files  string            `json:"files,omitempty"` // in the store
	Trial  *experiment.Trial `json:"trial,omitempty"`
	Error  string            `json:"error,omitempty"`
	// Failed says that the machine failed, and those before it: nothing came of
	// the order, but may elsewhere. The last one is this worker's.
	Failed []experiment.Failure `json:"failed,omitempty"`
}

// finished is a run that wasn't handed over yet, in its directory.
type finished struct {
	Queue string `json:"queue"`
	Task  string `json:"task"`
	result
}

// worker is one that works.
type worker struct {
	Options
	conn   *queue.Conn
	queues map[string]*queue.Queue
	shun   map[string]time.Time // queues whose orders it can't carry out, until when
	listed time.Time

	trouble map[string][]int                  // by queue: the orders in a row that this machine failed on
	left    atomic.Pointer[map[string]string] // by queue: why it takes no more orders of it; never changed in place

	bench    *experiment.Bench
	of       string   // the queue of the bench
	released chan int // launches
	holds    atomic.Pointer[presence]

	worked  time.Time // last
	refused string    // said last
}

// Run works until ctx ends, which gives back what it has, or there was no work
// for as long as the options say; that is an error if the worker couldn't have
// taken any. That it has no connection for a while doesn't end it.
func Run(ctx context.Context, conn *queue.Conn, o Options) error {
	if o.Name == "" {
		host, _ := os.Hostname()
		o.Name = fmt.Sprintf("%s-%s", cmp.Or(host, "worker"), strings.ToLower(rand.Text()[:6]))
	}
	if o.Say == nil {
		o.Say = func(string, ...any) {}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(o.Dir, 0o755); err != nil {
		return fmt.Errorf("start worker: %w", err)
	}
	w := &worker{Options: o, conn: conn, queues: map[string]*queue.Queue{}, shun: map[string]time.Time{}, trouble: map[string][]int{}, released: make(chan int, 16)}
	w.left.Store(&map[string]string{})
	w.Labels = append(slices.Clone(o.Labels), queue.Only(o.Name))
	release, err := conn.Subscribe(releaseSubject+o.Name, func(m *nats.Msg) {
		var launch int
		if _, err := fmt.Sscan(string(m.Data), &launch); err == nil {
			select {
			case w.released <- launch:
			default: // it ends by itself
			}
		}
	})
	if err != nil {
		return fmt.Errorf("start worker: %w", err)
	}
	defer release.Unsubscribe() //nolint:errcheck // the connection ends too
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go w.present(ctx)
	defer w.stop()
	removeShards(w.Dir, w.Say)
	w.handOverOld(ctx)
	said := ""
	w.worked = time.Now()
	for ctx.Err() == nil {
		err := w.one(ctx)
		if over, why := w.idle(err); over {
			return why
		}
		if err == nil {
			said = ""
		} else if ctx.Err() == nil {
			if err.Error() != said {
				said = err.Error()
				w.Say("%s; trying again", err)
			}
			wait(ctx, again)
		}
	}
	return nil
}

// idle says whether the worker was without work for long enough to end, and why it
// couldn't have had any, if it couldn't. A server that waits for its next order is work.
func (w *worker) idle(err error) (over bool, why error) {
	if w.bench != nil {
		if _, up := w.bench.Up(); up {
			return false, nil
		}
	}
	if w.Idle <= 0 || time.Since(w.worked) < w.Idle {
		return false, nil
	}
	for name, reason := range *w.left.Load() {
		err = cmp.Or(err, fmt.Errorf("it takes no more trials of %s, since its machine failed: %s", name, reason))
	}
	if err != nil {
		return true, fmt.Errorf("no work for %s: %w", w.Idle, err)
	}
	w.Say("ends: there was no work for %s", w.Idle)
	return true, nil
}

// present says every now and then that the worker is there.
func (w *worker) present(ctx context.Context) {
	for ctx.Err() == nil {
		p := presence{Name: w.Name, Labels: w.Labels, Queue: w.Queue, Left: *w.left.Load()}
		if h := w.holds.Load(); h != nil {
			p.Holds, p.Launch = h.Holds, h.Launch
		}
		if b, err := json.Marshal(p); err == nil {
			_ = w.conn.Publish(presenceSubject+w.Name, b)
		}
		wait(ctx, presenceEvery)
	}
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// one takes an order, if there is one, and carries it out.
func (w *worker) one(ctx context.Context) error {
	if err := w.list(ctx); err != nil {
		return err
	}
	q, task, err := w.take(ctx)
	if err != nil || task == nil {
		return err
	}
	if isShard(task) {
		w.Say("plays %s of %s", task.ID, q.Name)
		defer func() { w.worked = time.Now() }()
		return playShard(ctx, w.conn, q, task, shardOptions{worker: w.Name, dir: filepath.Join(w.Dir, q.Name+"-"+task.ID), header: w.Header, logger: w.Logger})
	}
	var o experiment.Order
	if err := json.Unmarshal(task.Body, &o); err != nil {
		w.Say("order %s can't be read, is the hunt another version of culprit? %s", task.ID, err)
		w.shun[q.Name] = time.Now().Add(time.Minute)
		return task.GiveBack()
	}
	if missing := w.missing(o); missing != "" {
		if missing != w.refused {
			w.refused = missing
			w.Say("%s wants the header %s, which this worker wasn't given: set OPENAI_API_KEY here, or give --header", q.Name, missing)
		}
		w.shun[q.Name] = time.Now().Add(time.Minute)
		return task.GiveBack()
	}
	return w.carryOut(ctx, q, task, o)
}

// list finds the queues that there are.
func (w *worker) list(ctx context.Context) error {
	if time.Since(w.listed) < again && len(w.queues) > 0 {
		return nil
	}
	names := []string{w.Queue}
	if w.Queue == "" {
		var err error
		if names, err = w.conn.Queues(ctx); err != nil {
			return err
		}
	}
	w.listed = time.Now()
	for name := range w.queues {
		if !slices.Contains(names, name) {
			w.gone(name)
		}
	}
	for _, name := range names {
		if w.queues[name] != nil {
			continue
		}
		q, err := w.conn.Join(ctx, name)
		if errors.Is(err, queue.ErrNoQueue) {
			continue // it is being made, or deleted
		}
		if err != nil {
			return err
		}
		w.queues[name] = q
	}
	if len(w.queues) == 0 {
		wait(ctx, again/4)
	}
	return nil
}

// gone forgets a queue.
func (w *worker) gone(name string) {
	delete(w.queues, name)
	delete(w.trouble, name)
	left := maps.Clone(*w.left.Load())
	delete(left, name)
	w.left.Store(&left)
	if w.of == name {
		w.stop()
	}
}

func (w *worker) stop() {
	if w.bench != nil {
		w.bench.Stop()
		w.bench = nil
	}
}

// take waits a while for an order. While a server runs that may be asked for
// more, it waits for that alone.
func (w *worker) take(ctx context.Context) (*queue.Queue, *queue.Task, error) {
	if w.bench != nil {
		if launch, up := w.bench.Up(); up {
			return w.hold(ctx, launch)
		}
	}
	for _, q := range w.queues {
		if time.Now().Before(w.shun[q.Name]) || (*w.left.Load())[q.Name] != "" {
			wait(ctx, again/4)
			continue
		}
		short, cancel := context.WithTimeout(ctx, time.Second)
		task, err := q.Take(short, w.Labels)
		cancel()
		if errors.Is(err, queue.ErrNoQueue) {
			w.gone(q.Name)
			return nil, nil, nil
		}
		if task != nil || err != nil && !errors.Is(err, context.DeadlineExceeded) {
			return q, task, err
		}
	}
	return nil, nil, nil
}

// hold waits for more orders for the running server, until nobody wants it.
func (w *worker) hold(ctx context.Context, launch int) (*queue.Queue, *queue.Task, error) {
	q := w.queues[w.of]
	if q == nil {
		w.stop()
		return nil, nil, nil
	}
	w.holds.Store(&presence{Holds: q.Name, Launch: launch})
	defer w.holds.Store(nil)
	ctx, cancel := context.WithTimeout(ctx, holdTime)
	defer cancel()
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case l := <-w.released:
				if l == launch {
					cancel()
				}
			}
		}
	}()
	task, err := q.Take(ctx, w.Labels, queue.Only(w.Name))
	if errors.Is(err, queue.ErrNoQueue) {
		w.gone(q.Name)
		return nil, nil, nil
	}
	if task == nil && ctx.Err() != nil {
		w.bench.Stop()
		return nil, nil, nil
	}
	return q, task, err
}

// missing is a header that an order wants and the worker wasn't given.
func (w *worker) missing(o experiment.Order) string {
	for _, name := range o.Headers {
		if w.Header.Get(name) == "" {
			return name
		}
	}
	return ""
}

// carryOut runs an order and hands the result over.
func (w *worker) carryOut(ctx context.Context, q *queue.Queue, task *queue.Task, o experiment.Order) error {
	held, letGo := context.WithCancel(context.WithoutCancel(ctx))
	defer letGo()
	go task.Hold(held)
	defer func() { w.worked = time.Now() }()

	r := finished{q.Name, task.ID, result{Number: o.Number, Worker: w.Name, Tool: w.Tool}}
	dir := filepath.Join(w.Dir, q.Name+"-"+task.ID)
	if task.Taken > mostTaken {
		r.Error = fmt.Sprintf("%d workers died on it", task.Taken-1)
		if o.Number > 0 {
			r.Error = ""
			r.Trial = &experiment.Trial{
				Note:        fmt.Sprintf("%d workers died on it", task.Taken-1),
				Observation: &search.Observation{Outcome: search.Void},
			}
		}
	} else if err := w.run(ctx, q, o, dir, &r.result); err != nil {
		letGo()
		os.RemoveAll(dir) //nolint:errcheck // nothing came of it
		if ctx.Err() != nil {
			return task.GiveBack()
		}
		return errors.Join(err, task.GiveBack())
	}
	w.account(q, &r.result)
	return w.handOver(ctx, q, task, dir, r)
}

// account books whether the machine failed, and has the worker leave a queue
// where it keeps failing.
func (w *worker) account(q *queue.Queue, r *result) {
	if len(r.Failed) == 0 {
		delete(w.trouble, q.Name)
		return
	}
	why := r.Failed[len(r.Failed)-1].Why
	w.Say("this machine can't run %d of %s: %s", r.Number, q.Name, why)
	if t := w.trouble[q.Name]; !slices.Contains(t, r.Number) {
		w.trouble[q.Name] = append(t, r.Number)
	}
	if len(w.trouble[q.Name]) < mostTrouble {
		return
	}
	left := maps.Clone(*w.left.Load())
	left[q.Name] = why
	w.left.Store(&left)
	w.Say("takes no more trials of %s, since its machine failed on %d in a row: mend it, and start the worker again", q.Name, mostTrouble)
}

// run carries it out. An error that another worker may not have is returned; one
// that every worker has is the result.
func (w *worker) run(ctx context.Context, q *queue.Queue, o experiment.Order, dir string, r *result) error {
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	if w.bench == nil || w.of != q.Name {
		w.stop()
		bench, err := experiment.NewBench(experiment.HuntOptions{Launcher: w.Launcher, Header: w.Header, Logger: w.Logger}, o, w.Slot)
		if err != nil {
			r.Error = err.Error()
			return nil
		}
		w.bench, w.of = bench, q.Name
	}
	switch {
	case o.Number == 0:
		w.Say("launches the safe arm of %s", q.Name)
	case o.Against != nil:
		w.Say("runs %s of %s: %s against %s", fmt.Sprint(o.Number), q.Name, o.Arm, o.Against.Arm)
	default:
		w.Say("runs %s of %s: %s", fmt.Sprint(o.Number), q.Name, o.Arm)
	}
	trial, err := w.bench.Run(ctx, o, dir)
	if err != nil && ctx.Err() == nil {
		w.stop()
		if target.OfMachine(err) {
			r.Failed = append(slices.Clone(o.Failed), experiment.Failure{Worker: w.Name, Why: brief(err)})
		} else {
			r.Error = err.Error()
		}
		return nil
	}
	if err != nil {
		return err
	}
	r.Trial, r.Files = trial, fmt.Sprintf("%04d.%s", o.Number, rand.Text()[:10])
	_, r.Up = w.bench.Up()
	return nil
}

// brief is an error without the log that stays on this machine.
func brief(err error) string {
	if failed, ok := errors.AsType[*target.LaunchError](err); ok {
		return failed.Brief()
	}
	return err.Error()
}

// handOver uploads a run, and tries again until that has worked or nobody wants
// it any more. task is nil for one of an earlier start.
func (w *worker) handOver(ctx context.Context, q *queue.Queue, task *queue.Task, dir string, r finished) error {
	if r.Files != "" {
		if err := experiment.WriteJSON(filepath.Join(dir, resultFile), r); err != nil {
			return err
		}
	}
	body, err := json.Marshal(r.result)
	if err != nil {
		return err
	}
	said := ""
	for uploaded := r.Files == ""; ; wait(ctx, again) {
		var doubled bool
		err := ctx.Err()
		if err != nil {
			return nil // it stays for the next start
		}
		if !uploaded {
			err = q.Upload(ctx, r.Files, dir)
			uploaded = err == nil
		}
		if err == nil && task != nil {
			doubled, err = task.Finish(ctx, body)
		} else if err == nil {
			doubled, err = q.Deliver(ctx, r.Task, body)
		}
		switch {
		case err == nil && doubled:
			w.Say("run %d of %s was another worker's already", r.Number, q.Name)
			if err := q.Remove(ctx, r.Files); err != nil {
				w.Logger.Warn("remove a run that another worker had", slog.Any("error", err))
			}
			return os.RemoveAll(dir)
		case err == nil:
			return os.RemoveAll(dir)
		case errors.Is(err, queue.ErrNoQueue):
			w.Say("%s is over; its run %d isn't wanted any more", q.Name, r.Number)
			w.gone(q.Name)
			return os.RemoveAll(dir)
		case said != err.Error() && ctx.Err() == nil:
			said = err.Error()
			w.Say("run %d of %s waits in %s: %s", r.Number, q.Name, dir, err)
		}
	}
}

// ownDir are directories of runs, lest others be taken for them.
var ownDir = regexp.MustCompile(`^hunt-[a-z0-9]+-\d{4,}(-\d+)?$`)

// handOverOld hands over what an earlier start finished and couldn't.
func (w *worker) handOverOld(ctx context.Context) {
	dirs, _ := filepath.Glob(filepath.Join(w.Dir, "*"))
	for _, dir := range dirs {
		path := filepath.Join(dir, resultFile)
		if !ownDir.MatchString(filepath.Base(dir)) {
			continue
		}
		if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
			if err := os.RemoveAll(dir); err != nil { // a run that wasn't finished
				w.Say("%s", err)
			}
			continue
		}
		var r finished
		b, err := os.ReadFile(path)
		if err == nil {
			err = json.Unmarshal(b, &r)
		}
		if err != nil {
			w.Say("%s can't be read: %s", path, err)
			continue
		}
		r.Up = false // its server ended with the worker
		q, err := w.conn.Join(ctx, r.Queue)
		if errors.Is(err, queue.ErrNoQueue) {
			os.RemoveAll(filepath.Dir(path)) //nolint:errcheck // nobody wants it
			continue
		}
		if err == nil {
			w.Say("run %d of %s is from an earlier start", r.Number, r.Queue)
			err = w.handOver(ctx, q, nil, filepath.Dir(path), r)
		}
		if err != nil {
			w.Say("%s: %s", filepath.Dir(path), err)
		}
	}
}

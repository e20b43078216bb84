package worker

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/queue"
)

// A shard is a task of a queue that its run made for it alone. What run and
// shard tell each other while it plays needn't be kept and goes over two
// subjects of plain NATS; its history comes back as the task's result.
const (
	shardTask    = "shard-" // and its number: a task's name, and that of its files
	shardSubject = "culprit.shard."

	aliveEvery = 2 * time.Second
	// shardSilence is how long a run may say nothing until its shards stop.
	shardSilence = 20 * time.Second
	// historyWithin bounds how long a shard's history may be on its way; its
	// worker says all the while that it is there.
	historyWithin = time.Hour
)

// shardWords is what goes over the subjects.
type shardWords struct {
	Hello   string                   `json:"hello,omitempty"` // the worker that took the task
	Alive   bool                     `json:"alive,omitempty"` // who speaks is
	Message *experiment.ShardMessage `json:"message,omitempty"`
}

// shardResult is a task's result.
type shardResult struct {
	Error string `json:"error,omitempty"` // why the history isn't in the store
}

// Shards has workers play a run's shards, each of them one. Secrets don't pass
// through NATS: workers have their own.
type Shards struct {
	conn  *queue.Conn
	q     *queue.Queue
	needs []string
	stop  context.CancelFunc
	done  sync.WaitGroup

	mu      sync.Mutex
	results map[string]chan *queue.Result
}

// NewShards uses a queue that was made for one run. needs are the labels that
// a worker must have. Close deletes the queue.
func NewShards(ctx context.Context, conn *queue.Conn, q *queue.Queue, needs []string) *Shards {
	s := &Shards{conn: conn, q: q, needs: needs, results: map[string]chan *queue.Result{}}
	ctx, s.stop = context.WithCancel(ctx)
	s.done.Go(func() {
		for {
			r, err := q.Result(ctx)
			if err != nil {
				return // those who wait for a result do so for a while only
			}
			select {
			case s.result(r.ID) <- r:
			default: // it came again
			}
		}
	})
	return s
}

func (s *Shards) result(task string) chan *queue.Result {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.results[task] == nil {
		s.results[task] = make(chan *queue.Result, 1)
	}
	return s.results[task]
}

// Close deletes the queue.
func (s *Shards) Close() error {
	s.stop()
	s.done.Wait()
	ctx, cancel := context.WithTimeout(context.Background(), shardSilence)
	defer cancel()
	return s.q.Delete(ctx)
}

// Start asks for a worker; what is sent to the shard waits until there is one.
func (s *Shards) Start(ctx context.Context, number int, path string) (experiment.ShardLink, func() error, error) {
	task := fmt.Sprint(shardTask, number)
	l, err := newShardLink(s.conn, s.q.Name, task, "run", "worker")
	if err != nil {
		return nil, nil, err
	}
	if err := s.q.Put(ctx, task, s.needs, []byte("{}")); err != nil {
		return nil, nil, errors.Join(err, l.close())
	}
	run := &runLink{shardLink: l}
	alive, end := context.WithCancel(context.WithoutCancel(ctx))
	s.done.Go(func() { l.live(alive) })
	return run, func() error {
		defer end()
		defer l.close() //nolint:errcheck // nothing more is received
		if !run.hasEnded() {
			return l.say(shardWords{Message: &experiment.ShardMessage{Stop: "the run doesn't want it any more"}})
		}
		return s.fetch(run, task, path)
	}, nil
}

// fetch waits for a shard's history and puts it at path.
func (s *Shards) fetch(l *runLink, task, path string) error {
	ctx, cancel := context.WithTimeout(context.Background(), historyWithin)
	defer cancel()
	var result shardResult
	look := time.NewTicker(time.Second)
	defer look.Stop()
	for waiting := true; waiting; {
		select {
		case r := <-s.result(task):
			if err := json.Unmarshal(r.Body, &result); err != nil {
				return fmt.Errorf("its result can't be read: %w", err)
			}
			defer r.Kept(ctx) //nolint:errcheck // the queue is deleted soon
			waiting = false
		case <-look.C:
			if silent := l.silent(); silent > shardSilence {
				return fmt.Errorf("its worker said nothing for %.0f s while its history was on its way", silent.Seconds())
			}
		}
	}
	if result.Error != "" {
		return errors.New(result.Error)
	}
	dir := path + ".part"
	if err := s.q.Download(ctx, task, dir); err != nil {
		return err
	}
	err := os.Rename(filepath.Join(dir, filepath.Base(shardPath("", task))), path)
	return errors.Join(err, os.RemoveAll(dir), s.q.Remove(ctx, task))
}

func shardPath(dir, task string) string { return filepath.Join(dir, task+".jsonl.zst") }

// shardLink is what both ends of a link have.
type shardLink struct {
	conn *queue.Conn
	to   string
	sub  *nats.Subscription
	in   chan *nats.Msg
	once sync.Once
	over chan struct{}
}

func newShardLink(conn *queue.Conn, queueName, task, from, to string) (*shardLink, error) {
	l := &shardLink{
		conn: conn, to: shardSubject + queueName + "." + task + "." + to,
		in: make(chan *nats.Msg, 256), over: make(chan struct{}),
	}
	var err error
	l.sub, err = conn.ChanSubscribe(shardSubject+queueName+"."+task+"."+from, l.in)
	if err == nil {
		err = conn.Flush()
	}
	if err != nil {
		return nil, fmt.Errorf("listen to shard: %w", err)
	}
	return l, nil
}

func (l *shardLink) say(w shardWords) error {
	b, err := json.Marshal(w)
	if err != nil {
		return err
	}
	if err := l.conn.Publish(l.to, b); err != nil {
		return fmt.Errorf("talk to shard: %w", err)
	}
	return nil
}

// live says every now and then that this end is there.
func (l *shardLink) live(ctx context.Context) {
	for ctx.Err() == nil {
		_ = l.say(shardWords{Alive: true}) // without a connection for long, the other end gives up
		wait(ctx, aliveEvery)
	}
}

// hear waits for the next words; silence is how long, unless it is 0.
func (l *shardLink) hear(silence time.Duration) (w shardWords, err error) {
	var late <-chan time.Time
	if silence > 0 {
		t := time.NewTimer(silence)
		defer t.Stop()
		late = t.C
	}
	select {
	case m := <-l.in:
		if err := json.Unmarshal(m.Data, &w); err != nil {
			return w, fmt.Errorf("listen to shard: %w", err)
		}
		return w, nil
	case <-late:
		return w, fmt.Errorf("the run said nothing for %v", silence)
	case <-l.over:
		return w, io.EOF
	}
}

func (l *shardLink) close() (err error) {
	l.once.Do(func() {
		close(l.over)
		err = l.sub.Unsubscribe()
	})
	return err
}

// runLink is the run's end.
type runLink struct {
	*shardLink
	mu      sync.Mutex
	hello   string                     // its worker
	waiting []*experiment.ShardMessage // for one
	ended   bool
	last    time.Time // when it said something
}

func (l *runLink) silent() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Since(l.last)
}

func (l *runLink) hasEnded() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.ended
}

// Send implements experiment.ShardLink. A plan goes without its secrets.
func (l *runLink) Send(m *experiment.ShardMessage) error {
	if m.Play != nil {
		play := *m.Play
		play.Header, play.Path = nil, ""
		m = &experiment.ShardMessage{Play: &play}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hello == "" {
		l.waiting = append(l.waiting, m)
		return nil
	}
	return l.say(shardWords{Message: m})
}

// Receive implements experiment.ShardLink.
func (l *runLink) Receive() (*experiment.ShardMessage, error) {
	for {
		w, err := l.hear(0)
		if err != nil {
			return nil, err
		}
		l.mu.Lock()
		l.last = time.Now()
		l.mu.Unlock()
		if w.Hello != "" {
			if err := l.greet(w.Hello); err != nil {
				return nil, err
			}
		}
		if m := w.Message; m != nil {
			l.mu.Lock()
			l.ended = l.ended || m.Ended != nil
			l.mu.Unlock()
			return m, nil
		}
	}
}

// greet takes the worker that says hello. A second one says it when the first
// has died.
func (l *runLink) greet(worker string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.hello != "" {
		return fmt.Errorf("worker %s died", l.hello)
	}
	l.hello = worker
	for _, m := range l.waiting {
		if err := l.say(shardWords{Message: m}); err != nil {
			return err
		}
	}
	l.waiting = nil
	return nil
}

// workerLink is the worker's end.
type workerLink struct {
	*shardLink
	silence time.Duration // until the run is gone
}

// Send implements experiment.ShardLink.
func (l workerLink) Send(m *experiment.ShardMessage) error { return l.say(shardWords{Message: m}) }

// Receive implements experiment.ShardLink.
func (l workerLink) Receive() (*experiment.ShardMessage, error) {
	for {
		w, err := l.hear(l.silence)
		if err != nil || w.Message != nil {
			return w.Message, err
		}
	}
}

// isShard says that a task is one.
func isShard(t *queue.Task) bool { return strings.HasPrefix(t.ID, shardTask) }

// shardOptions is what a worker gives to a shard.
type shardOptions struct {
	worker string
	dir    string // made, and gone in the end
	header http.Header
	logger *slog.Logger
	// silence is how long the run may say nothing; 0 is shardSilence.
	silence time.Duration
}

// playShard plays the shard of a task, which belongs to a run that is waiting.
func playShard(ctx context.Context, conn *queue.Conn, q *queue.Queue, task *queue.Task, o shardOptions) error {
	held, letGo := context.WithCancel(context.WithoutCancel(ctx))
	defer letGo()
	go task.Hold(held)

	if err := os.MkdirAll(o.dir, 0o755); err != nil {
		return errors.Join(fmt.Errorf("play shard: %w", err), task.GiveBack())
	}
	defer os.RemoveAll(o.dir) //nolint:errcheck // its content is handed over, or nobody wants it
	l, err := newShardLink(conn, q.Name, task.ID, "worker", "run")
	if err != nil {
		return errors.Join(err, task.GiveBack())
	}
	defer l.close() //nolint:errcheck // nothing more is received
	if err := l.say(shardWords{Hello: o.worker}); err != nil {
		return errors.Join(err, task.GiveBack())
	}
	go l.live(held)
	link := &watchedLink{ShardLink: workerLink{l, cmp.Or(o.silence, shardSilence)}}
	err = experiment.PlayShard(ctx, link, experiment.ShardOptions{Header: o.header, Path: shardPath(o.dir, task.ID), Logger: o.logger})
	if link.gone() {
		// Whoever made the queue is gone, and nobody else needs it.
		return errors.Join(err, q.Delete(context.WithoutCancel(ctx)))
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), historyWithin) // also of a worker that was told to end
	defer cancel()
	var result shardResult
	if err == nil {
		err = q.Upload(ctx, task.ID, o.dir)
	}
	if err != nil {
		result.Error = err.Error()
	}
	body, err := json.Marshal(result)
	if err == nil {
		_, err = task.Finish(ctx, body)
	}
	if errors.Is(err, queue.ErrNoQueue) {
		return nil // the run is over
	}
	return err
}

// removeShards removes what a worker that was killed has left of shards in its
// directory: their runs are over, and judged without it.
func removeShards(dir string, say func(format string, args ...any)) {
	left, _ := filepath.Glob(filepath.Join(dir, "*-"+shardTask+"*")) // the pattern is right
	for _, path := range left {
		say("removes %s, which is of an earlier start", path)
		os.RemoveAll(path) //nolint:errcheck // it only takes space
	}
}

// watchedLink notes that the run is gone.
type watchedLink struct {
	experiment.ShardLink
	mu   sync.Mutex
	lost bool
}

// Receive implements experiment.ShardLink.
func (l *watchedLink) Receive() (*experiment.ShardMessage, error) {
	m, err := l.ShardLink.Receive()
	if err != nil && !errors.Is(err, io.EOF) {
		l.mu.Lock()
		l.lost = true
		l.mu.Unlock()
	}
	return m, err
}

func (l *watchedLink) gone() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lost
}

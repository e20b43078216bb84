package queue

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// A queue is two streams and an object store, named by its name: tasks, which
// a worker takes off; results, which whoever made the queue takes off; files.
const (
	prefix  = "culprit-"
	tasks   = "-tasks"
	results = "-results"

	taskSubjects   = "culprit.task."
	resultSubjects = "culprit.result."
)

var queueName = regexp.MustCompile(`^[A-Za-z0-9_-]{1,64}$`)

// Options is how a queue is made. Zero values take what is in parentheses.
type Options struct {
	// AckWait is how long a worker may be silent until its task goes to
	// another (30 s).
	AckWait  time.Duration
	Replicas int   // of everything, by servers of the cluster (1)
	MaxBytes int64 // that its files may take (no limit)
}

// sameTask is how long a task's or a result's second coming is noticed. A server
// that starts again knows the names of what it still holds.
const sameTask = 24 * time.Hour

const defaultAckWait = 30 * time.Second

// Queue is one of a connection's.
type Queue struct {
	Name string

	conn    *Conn
	tasks   jetstream.Stream
	results jetstream.Stream
	files   jetstream.ObjectStore
	taken   jetstream.Consumer // results
	parts   map[string]part    // seen by the last sweep, by subject

	mu        sync.Mutex
	consumers map[string]jetstream.Consumer // of tasks, by name
	needs     map[string][]string           // theirs
	places    map[string]uint64             // in the stream, of tasks that were put
	listed    time.Time
	ackWait   time.Duration
}

// Make makes a queue, or goes on with the one of that name.
func (c *Conn) Make(ctx context.Context, name string, o Options) (*Queue, error) {
	if !queueName.MatchString(name) {
		return nil, fmt.Errorf("make queue: name %q: want letters, digits, - and _", name)
	}
	o.AckWait, o.Replicas = cmp.Or(o.AckWait, defaultAckWait), max(o.Replicas, 1)
	q := &Queue{Name: name, conn: c, ackWait: o.AckWait}
	if err := patiently(ctx, nil, func(ctx context.Context) error { return q.make(ctx, o) }); err != nil {
		return nil, fmt.Errorf("make queue %s: %w", name, noSpace(err))
	}
	return q, nil
}

func (q *Queue) make(ctx context.Context, o Options) (err error) {
	name, c := q.Name, q.conn
	stream := func(suffix, subjects string) (jetstream.Stream, error) {
		return c.stream.CreateOrUpdateStream(ctx, jetstream.StreamConfig{
			Name: prefix + name + suffix, Subjects: []string{subjects + name + ".>"}, Retention: jetstream.WorkQueuePolicy,
			Duplicates: sameTask, Replicas: o.Replicas, Metadata: map[string]string{"ack_wait": o.AckWait.String()},
		})
	}
	if q.tasks, err = stream(tasks, taskSubjects); err != nil {
		return err
	}
	if q.results, err = stream(results, resultSubjects); err != nil {
		return err
	}
	if q.files, err = c.stream.CreateOrUpdateObjectStore(ctx, jetstream.ObjectStoreConfig{Bucket: prefix + name, MaxBytes: o.MaxBytes, Replicas: o.Replicas}); err != nil {
		return err
	}
	q.taken, err = q.results.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
		Durable: "maker", AckPolicy: jetstream.AckExplicitPolicy, AckWait: o.AckWait, MaxAckPending: -1,
	})
	return err
}

// Queues lists the queues that there are.
func (c *Conn) Queues(ctx context.Context) ([]string, error) {
	list := c.stream.StreamNames(ctx, jetstream.WithStreamListSubject(taskSubjects+">"))
	var names []string
	for stream := range list.Name() {
		if name, ok := strings.CutPrefix(stream, prefix); ok && strings.HasSuffix(name, tasks) {
			names = append(names, strings.TrimSuffix(name, tasks))
		}
	}
	if err := list.Err(); err != nil {
		return nil, fmt.Errorf("list queues: %w", err)
	}
	slices.Sort(names)
	return names, nil
}

// ErrNoQueue says that there is no queue of that name, or none any more.
var ErrNoQueue = errors.New("there is no such queue")

// Join opens a queue that somebody made.
func (c *Conn) Join(ctx context.Context, name string) (*Queue, error) {
	q := &Queue{Name: name, conn: c}
	var err error
	if q.tasks, err = c.stream.Stream(ctx, prefix+name+tasks); err == nil {
		if q.results, err = c.stream.Stream(ctx, prefix+name+results); err == nil {
			q.files, err = c.stream.ObjectStore(ctx, prefix+name)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("join queue %s: %w", name, gone(err)) // no stream: not made, or its end
	}
	if q.ackWait, err = time.ParseDuration(q.tasks.CachedInfo().Config.Metadata["ack_wait"]); err != nil || q.ackWait <= 0 {
		q.ackWait = defaultAckWait
	}
	return q, nil
}

func gone(err error) error {
	if errors.Is(err, jetstream.ErrStreamNotFound) || errors.Is(err, jetstream.ErrBucketNotFound) || errors.Is(err, jetstream.ErrConsumerNotFound) {
		return ErrNoQueue
	}
	return err
}

// Delete removes the queue with everything in it.
func (q *Queue) Delete(ctx context.Context) error {
	var errs []error
	for _, suffix := range []string{tasks, results} {
		if err := gone(q.conn.stream.DeleteStream(ctx, prefix+q.Name+suffix)); err != nil && !errors.Is(err, ErrNoQueue) {
			errs = append(errs, err)
		}
	}
	if err := gone(q.conn.stream.DeleteObjectStore(ctx, prefix+q.Name)); err != nil && !errors.Is(err, ErrNoQueue) {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("delete queue %s: %w", q.Name, err)
	}
	return nil
}

// Only is the label that one worker alone has.
func Only(worker string) string { return "worker=" + worker }

// Not is a need that every worker but one meets.
func Not(worker string) string { return not + Only(worker) }

const not = "!"

// Meets reports whether a worker with such labels meets all needs.
func Meets(labels, needs []string) bool {
	return !slices.ContainsFunc(needs, func(need string) bool {
		label, negated := strings.CutPrefix(need, not)
		return slices.Contains(labels, label) == negated
	})
}

// consumerName names what workers with such needs take from. JetStream wants
// the subjects of a work queue's consumers apart, so needs are part of the subject.
func consumerName(needs []string) string {
	sum := sha256.Sum256([]byte(strings.Join(needs, "\n")))
	return hex.EncodeToString(sum[:8])
}

// Put adds a task, once for each id, unless it is finished and the cluster was
// stopped since. needs are the labels that a worker must have to take it.
func (q *Queue) Put(ctx context.Context, id string, needs []string, body []byte) error {
	needs = slices.Compact(slices.Sorted(slices.Values(needs)))
	name := consumerName(needs)
	if err := q.address(ctx, name, needs); err != nil {
		return fmt.Errorf("put task %s: %w", id, noSpace(gone(err)))
	}
	subject := taskSubjects + q.Name + "." + name + "." + token(id)
	ack, err := q.conn.stream.Publish(ctx, subject, body, jetstream.WithMsgID(id))
	if err != nil {
		return fmt.Errorf("put task %s: %w", id, noSpace(gone(err)))
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.places == nil {
		q.places = map[string]uint64{}
	}
	q.places[id] = ack.Sequence
	return nil
}

// Withdraw takes back a task that was put. Who has taken it may still finish it.
func (q *Queue) Withdraw(ctx context.Context, id string) error {
	q.mu.Lock()
	place := q.places[id]
	q.mu.Unlock()
	if err := q.remove(ctx, place); err != nil {
		return fmt.Errorf("withdraw task %s: %w", id, err)
	}
	return nil
}

// remove deletes a task, where it is still there.
func (q *Queue) remove(ctx context.Context, place uint64) error {
	if place == 0 {
		return nil
	}
	err := q.tasks.DeleteMsg(ctx, place)
	if errors.Is(err, jetstream.ErrMsgDeleteUnsuccessful) || errors.Is(err, jetstream.ErrMsgNotFound) {
		return nil
	}
	return gone(err)
}

// address makes the consumer that tasks with such needs are taken from.
func (q *Queue) address(ctx context.Context, name string, needs []string) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.consumers[name] != nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout) // one that gets lost isn't waited for longer
	defer cancel()
	c, err := q.tasks.CreateOrUpdateConsumer(ctx, jetstream.ConsumerConfig{
		Durable: name, AckPolicy: jetstream.AckExplicitPolicy, AckWait: q.ackWait, MaxAckPending: -1,
		FilterSubject: taskSubjects + q.Name + "." + name + ".>", Metadata: map[string]string{"needs": strings.Join(needs, "\n")},
	})
	if err != nil {
		return err
	}
	if q.consumers == nil {
		q.consumers, q.needs = map[string]jetstream.Consumer{}, map[string][]string{}
	}
	q.consumers[name], q.needs[name] = c, needs
	return nil
}

// token makes a part of a subject.
func token(text string) string {
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r == '.' || r == '*' || r == '>' || r > '~' {
			return '_'
		}
		return r
	}, text)
}

// Task is with this worker until it is finished, given back, or the worker has
// been silent for too long.
type Task struct {
	ID      string
	Body    []byte
	Taken   int      // how often it was, this time included
	Needs   []string // labels
	Waiting time.Duration

	queue *Queue
	msg   jetstream.Msg
	seq   uint64
}

const (
	relist   = 5 * time.Second        // new needs are seen so late
	pollOne  = 200 * time.Millisecond // where there are tasks of several needs
	pollOnly = 5 * time.Second
)

// Take waits for a task whose needs are among the labels, and that has all of
// must among its needs. It comes back with ctx's error, or with ErrNoQueue.
func (q *Queue) Take(ctx context.Context, labels []string, must ...string) (*Task, error) {
	for {
		if len(must) > 0 {
			if err := q.address(ctx, consumerName(must), must); err != nil {
				return nil, fmt.Errorf("take from queue %s: %w", q.Name, gone(err))
			}
		}
		names, err := q.fitting(ctx, labels, must)
		if err != nil {
			return nil, err
		}
		wait := pollOnly
		if len(names) > 1 {
			wait = pollOne
		}
		if len(names) == 0 {
			if err := sleep(ctx, pollOne); err != nil {
				return nil, err
			}
			q.mu.Lock()
			q.listed = time.Time{}
			q.mu.Unlock()
		}
		for _, name := range names {
			t, err := q.fetch(ctx, name, wait)
			if t != nil || err != nil {
				return t, err
			}
		}
		if err := ctx.Err(); err != nil {
			return nil, err
		}
	}
}

// fitting are the consumers that labels may take from.
func (q *Queue) fitting(ctx context.Context, labels, must []string) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	q.mu.Lock()
	defer q.mu.Unlock()
	if time.Since(q.listed) > relist {
		list := q.tasks.ListConsumers(ctx)
		q.consumers, q.needs = map[string]jetstream.Consumer{}, map[string][]string{}
		for info := range list.Info() {
			q.needs[info.Name] = nil
			if text := info.Config.Metadata["needs"]; text != "" {
				q.needs[info.Name] = strings.Split(text, "\n")
			}
		}
		if err := gone(list.Err()); err != nil {
			return nil, fmt.Errorf("take from queue %s: %w", q.Name, err)
		}
		q.listed = time.Now()
	}
	var names []string
	for name, needs := range q.needs {
		if !Meets(labels, needs) || slices.ContainsFunc(must, func(need string) bool { return !slices.Contains(needs, need) }) {
			continue
		}
		if q.consumers[name] == nil {
			c, err := q.tasks.Consumer(ctx, name)
			if errors.Is(gone(err), ErrNoQueue) {
				continue // since it was listed
			}
			if err != nil {
				return nil, fmt.Errorf("take from queue %s: %w", q.Name, err)
			}
			q.consumers[name] = c
		}
		names = append(names, name)
	}
	// What asks for most comes first: nobody else may be able to take it.
	slices.SortFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(len(q.needs[b]), len(q.needs[a])), cmp.Compare(a, b))
	})
	return names, nil
}

func (q *Queue) fetch(ctx context.Context, name string, wait time.Duration) (*Task, error) {
	q.mu.Lock()
	consumer, needs := q.consumers[name], q.needs[name]
	q.mu.Unlock()
	if consumer == nil {
		return nil, nil
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	batch, err := consumer.Fetch(1, jetstream.FetchContext(ctx))
	if err != nil {
		return nil, waited(ctx, q.Name, err)
	}
	msg, ok := <-batch.Messages()
	if !ok {
		return nil, waited(ctx, q.Name, batch.Error())
	}
	meta, err := msg.Metadata()
	if err != nil {
		return nil, fmt.Errorf("take from queue %s: %w", q.Name, err)
	}
	return &Task{
		ID: msg.Headers().Get(nats.MsgIdHdr), Body: msg.Data(), Taken: int(meta.NumDelivered), Needs: needs,
		Waiting: time.Since(meta.Timestamp), queue: q, msg: msg, seq: meta.Sequence.Stream,
	}, nil
}

// waited is an error of a wait that didn't only come to its end. What goes by
// itself, such as a server that is elsewhere now, is none: the next wait shows.
func waited(ctx context.Context, name string, err error) error {
	switch {
	case err == nil, ctx.Err() != nil, past(ctx), errors.Is(err, nats.ErrTimeout), errors.Is(err, context.DeadlineExceeded):
		return nil
	case errors.Is(err, jetstream.ErrConsumerDeleted), errors.Is(err, jetstream.ErrConsumerLeadershipChanged), errors.Is(err, jetstream.ErrNoHeartbeat),
		errors.Is(err, nats.ErrNoResponders), errors.Is(err, jetstream.ErrServerShutdown), errors.Is(err, nats.ErrDisconnected), errors.Is(err, nats.ErrConnectionReconnecting):
		_ = sleep(ctx, pollOne)
		return nil
	}
	return fmt.Errorf("take from queue %s: %w", name, gone(err))
}

// past says that ctx's time is up, which its own clock may not have noticed yet.
func past(ctx context.Context) bool {
	deadline, ok := ctx.Deadline()
	return ok && !time.Now().Before(deadline)
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// Hold keeps the task with this worker until ctx ends.
func (t *Task) Hold(ctx context.Context) {
	for sleep(ctx, t.queue.ackWait/4) == nil {
		_ = t.msg.InProgress() // without a connection the task goes elsewhere, and its result counts once all the same
	}
}

// Finish keeps the task's result, and then takes the task off the queue; it may
// be tried again. again says that another result is there.
func (t *Task) Finish(ctx context.Context, body []byte) (again bool, err error) {
	if again, err = t.queue.deliver(ctx, t.ID, t.seq, body); err != nil {
		return false, err
	}
	_ = t.msg.DoubleAck(ctx) // else whoever takes the result takes the task off
	return again, nil
}

// Deliver keeps the result of a task that isn't with this worker any more.
func (q *Queue) Deliver(ctx context.Context, id string, body []byte) (again bool, err error) {
	return q.deliver(ctx, id, 0, body)
}

func (q *Queue) deliver(ctx context.Context, id string, place uint64, body []byte) (again bool, err error) {
	subject := resultSubjects + q.Name + "." + token(id)
	ack, err := q.conn.stream.PublishMsg(ctx, &nats.Msg{
		Subject: subject, Data: body, Header: nats.Header{taskHeader: {fmt.Sprint(place)}},
	}, jetstream.WithMsgID(id))
	if err != nil {
		return false, fmt.Errorf("finish task %s: %w", id, noSpace(gone(err)))
	}
	if !ack.Duplicate {
		return false, nil
	}
	// It may be this very one, whose acknowledgement got lost; one that was taken
	// already too.
	kept, err := q.results.GetLastMsgForSubject(ctx, subject)
	if errors.Is(err, jetstream.ErrMsgNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("finish task %s: %w", id, gone(err))
	}
	return !bytes.Equal(kept.Data, body), nil
}

// taskHeader says of a result where in the stream its task is.
const taskHeader = "Culprit-Task"

// GiveBack lets another worker take it, now.
func (t *Task) GiveBack() error { return t.msg.Nak() }

// Result is what a worker made of a task.
type Result struct {
	ID   string
	Body []byte

	queue *Queue
	msg   jetstream.Msg
}

// Result waits for the next result. It comes again until it is kept.
func (q *Queue) Result(ctx context.Context) (*Result, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		r, err := q.result(ctx)
		if r != nil || err != nil {
			return r, err
		}
	}
}

func (q *Queue) result(ctx context.Context) (*Result, error) {
	ctx, cancel := context.WithTimeout(ctx, pollOnly)
	defer cancel()
	batch, err := q.taken.Fetch(1, jetstream.FetchContext(ctx))
	if err != nil {
		return nil, waited(ctx, q.Name, err)
	}
	msg, ok := <-batch.Messages()
	if !ok {
		return nil, waited(ctx, q.Name, batch.Error())
	}
	return &Result{ID: msg.Headers().Get(nats.MsgIdHdr), Body: msg.Data(), queue: q, msg: msg}, nil
}

// Kept says that the result is safe with who took it. Its task, which a worker
// that died may have left on the queue, goes.
func (r *Result) Kept(ctx context.Context) error {
	var place uint64
	if _, err := fmt.Sscan(r.msg.Headers().Get(taskHeader), &place); err == nil {
		if err := r.queue.remove(ctx, place); err != nil {
			return fmt.Errorf("take result %s: %w", r.ID, err)
		}
	}
	if err := r.msg.DoubleAck(ctx); err != nil {
		return fmt.Errorf("take result %s: %w", r.ID, err)
	}
	return nil
}

// Signal says something that needn't be kept to whoever listens now.
func (q *Queue) Signal(subject, text string) error { return q.conn.Publish(subject, []byte(text)) }

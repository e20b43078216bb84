package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/search"
)

// table is a queue with a crew on it.
type table struct {
	*testing.T
	server *queue.Server
	conn   *queue.Conn
	queue  *queue.Queue
	crew   *Crew
	said   lines
}

type lines struct {
	mu  sync.Mutex
	all []string
}

func (l *lines) say(format string, args ...any) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all = append(l.all, fmt.Sprintf(format, args...))
}

func (l *lines) has(text string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.all, func(s string) bool { return strings.Contains(s, text) })
}

func newTable(t *testing.T) *table {
	t.Helper()
	b := &table{T: t}
	var err error
	if b.server, err = queue.Serve(queue.ServerOptions{Dir: t.TempDir()}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.server.Close)
	if b.conn, err = b.server.Connect(t.Context(), "test", nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.conn.Close)
	if b.queue, err = b.conn.Make(t.Context(), "hunt-1", queue.Options{AckWait: time.Second}); err != nil {
		t.Fatal(err)
	}
	if b.crew, err = NewCrew(t.Context(), b.conn, b.queue, CrewOptions{Say: b.said.say}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.crew.Close)
	return b
}

// serverless is a case that can't be launched: a worker says so.
const serverless = `
target:
  processes: [{command: [/nowhere/server]}]
  base_url: http://127.0.0.1:1
factors:
  a: {suspect: 1, safe: 0}
  concurrency: {suspect: 8, safe: 1}
workload: {sessions: 8}
`

func orderOf(number, launch int) experiment.Order {
	return experiment.Order{Number: number, Launch: launch, Arm: design.Arm{"a": "1"}, Path: "case.yaml", Case: serverless}
}

func (b *table) ask(o experiment.Order) {
	b.Helper()
	if err := b.crew.Ask(b.Context(), o); err != nil {
		b.Fatal(err)
	}
}

func (b *table) next() *experiment.Delivery {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), 10*time.Second)
	defer cancel()
	d, err := b.crew.Next(ctx)
	if err != nil {
		b.Fatalf("no delivery: %v; it said %q", err, b.said.all)
	}
	return d
}

// take takes an order as a worker of that name.
func (b *table) take(name string) (*queue.Task, experiment.Order) {
	b.Helper()
	q, err := b.conn.Join(b.Context(), "hunt-1")
	if err != nil {
		b.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(b.Context(), 8*time.Second)
	defer cancel()
	task, err := q.Take(ctx, []string{queue.Only(name)})
	if err != nil {
		b.Fatalf("nothing to take: %v; the crew said %q", err, b.said.all)
	}
	var o experiment.Order
	if err := json.Unmarshal(task.Body, &o); err != nil {
		b.Fatal(err)
	}
	return task, o
}

func (b *table) finish(task *queue.Task, r result) {
	b.Helper()
	body, err := json.Marshal(r)
	if err != nil {
		b.Fatal(err)
	}
	if _, err := task.Finish(b.Context(), body); err != nil {
		b.Fatal(err)
	}
}

func ran(number int, worker string) result {
	return result{Number: number, Worker: worker, Up: true, Trial: &experiment.Trial{Observation: &search.Observation{Outcome: search.Ran, Requests: 8}}}
}

// More of a launch goes to the worker that has its server, and to another when
// that one is gone.
func TestDeadHolder(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	b.crew.silence = 3 * time.Second
	b.ask(orderOf(1, 1))
	task, _ := b.take("w1")
	b.finish(task, ran(1, "w1"))
	d := b.next()
	if d.Number != 1 || d.Worker != "w1" {
		t.Fatalf("delivered %+v", d)
	}
	if err := d.Kept(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.ask(orderOf(2, 1))
	q, err := b.conn.Join(t.Context(), "hunt-1")
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if task, err := q.Take(short, []string{queue.Only("w2")}); task != nil || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("w2 got %+v, %v", task, err)
	}
	delivered := make(chan *experiment.Delivery)
	go func() { delivered <- b.next() }()
	task, o := b.take("w2")
	if o.Number != 2 {
		t.Fatalf("w2 took %+v", o)
	}
	b.finish(task, ran(2, "w2"))
	if d := <-delivered; d.Number != 2 || d.Worker != "w2" {
		t.Errorf("delivered %+v", d)
	}
	if !b.said.has("w1 is gone") {
		t.Errorf("nobody hears that w1 is gone: %q", b.said.all)
	}
}

func TestUnreadableResult(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	b.ask(orderOf(1, 1))
	b.ask(orderOf(2, 2))
	b.ask(orderOf(3, 3))
	first, _ := b.take("w1")
	if _, err := first.Finish(t.Context(), []byte("{")); err != nil {
		t.Fatal(err)
	}
	second, o := b.take("w1")
	b.finish(second, result{Number: o.Number, Worker: "w1"})
	if d := b.next(); d.Number != 2 || d.Error == "" {
		t.Errorf("a result without an observation is %+v", d)
	}
	if !b.said.has("can't be read") {
		t.Errorf("it said %q", b.said.all)
	}
}

// work runs a worker until the test ends, or stop.
func (b *table) work(o Options) (stop func(), said *lines) {
	b.Helper()
	said = new(lines)
	o.Say = said.say
	if o.Dir == "" {
		o.Dir = b.TempDir()
	}
	ctx, cancel := context.WithCancel(b.Context())
	done := make(chan struct{})
	conn, err := b.server.Connect(ctx, o.Name, nil)
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		defer close(done)
		defer conn.Close()
		if err := Run(ctx, conn, o); err != nil {
			b.Errorf("worker: %v", err)
		}
	}()
	stop = func() { cancel(); <-done }
	b.Cleanup(stop)
	return stop, said
}

func TestManyDiedOnIt(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	b.ask(orderOf(1, 1))
	for range mostTaken {
		task, _ := b.take("w1")
		if err := task.GiveBack(); err != nil {
			t.Fatal(err)
		}
	}
	b.work(Options{Name: "w2"})
	d := b.next()
	if d.Trial == nil || d.Trial.Observation.Outcome != search.Void || !strings.Contains(d.Trial.Note, "died on it") {
		t.Errorf("delivered %+v", d)
	}
}

// A case that no worker can read ends the hunt, in words.
func TestBadCase(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	o := orderOf(1, 1)
	o.Case = "nonsense: 1"
	b.ask(o)
	b.work(Options{Name: "w1"})
	if d := b.next(); !strings.Contains(d.Error, "nonsense") {
		t.Errorf("delivered %+v", d)
	}
}

// A worker that wasn't given what an order wants leaves it to another.
func TestMissingHeader(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	o := orderOf(1, 1)
	o.Case, o.Headers = "nonsense: 1", []string{"Authorization"}
	b.ask(o)
	_, said := b.work(Options{Name: "w1"})
	for deadline := time.Now().Add(5 * time.Second); !said.has("Authorization"); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("it said %q", said.all)
		}
	}
	b.work(Options{Name: "w2", Header: http.Header{"Authorization": {"Bearer secret"}}})
	if d := b.next(); d.Worker != "w2" {
		t.Errorf("delivered %+v", d)
	}
}

// What a worker couldn't hand over before it was killed it does when it starts
// again.
func TestHandOverOld(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	b.ask(orderOf(1, 1))
	task, _ := b.take("w1") // and dies
	work := t.TempDir()
	dir := filepath.Join(work, "hunt-1-"+task.ID)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "plan.json"), []byte("{}"), 0o644); err != nil {
		t.Fatal(err)
	}
	f := finished{"hunt-1", task.ID, ran(1, "w1")}
	f.Files = "0001.x"
	if err := experiment.WriteJSON(filepath.Join(dir, resultFile), f); err != nil {
		t.Fatal(err)
	}
	b.work(Options{Name: "w1", Dir: work})
	d := b.next()
	if d.Up {
		t.Error("its server survived it")
	}
	to := filepath.Join(t.TempDir(), "run")
	if err := d.Files(t.Context(), to); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(to, "plan.json")); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(filepath.Join(to, resultFile)); err == nil {
		t.Error("the hunt got the worker's own file")
	}
	if err := d.Kept(t.Context()); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if _, err := os.Stat(dir); err != nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the worker keeps what was handed over")
		}
	}
}

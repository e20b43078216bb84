package queue

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go/jetstream"
)

const ackWait = 400 * time.Millisecond

// newQueue makes a queue on a server of its own.
func newQueue(t testing.TB, o Options) (*Queue, *Conn) {
	t.Helper()
	conn := newConn(t, t.TempDir())
	q, err := conn.Make(t.Context(), "hunt-1", o)
	if err != nil {
		t.Fatal(err)
	}
	return q, conn
}

func newConn(t testing.TB, dir string) *Conn {
	t.Helper()
	s, err := Serve(ServerOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	conn, err := s.Connect(t.Context(), "test", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(conn.Close)
	return conn
}

// worker is another connection's view of the queue.
func worker(t testing.TB, c *Conn) *Queue {
	t.Helper()
	q, err := c.Join(t.Context(), "hunt-1")
	if err != nil {
		t.Fatal(err)
	}
	return q
}

func put(t testing.TB, q *Queue, id string, needs ...string) {
	t.Helper()
	if err := q.Put(t.Context(), id, needs, []byte("body of "+id)); err != nil {
		t.Fatal(err)
	}
}

// take takes a task, or returns nil when there is none for a while.
func take(t testing.TB, q *Queue, labels []string, must ...string) *Task {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond)
	defer cancel()
	task, err := q.Take(ctx, labels, must...)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	return task
}

func finish(t testing.TB, task *Task, result string) bool {
	t.Helper()
	again, err := task.Finish(t.Context(), []byte(result))
	if err != nil {
		t.Fatal(err)
	}
	return again
}

func nextResult(t testing.TB, q *Queue) *Result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 1200*time.Millisecond)
	defer cancel()
	r, err := q.Result(ctx)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	return r
}

func TestTaskToResult(t *testing.T) {
	t.Parallel()
	maker, conn := newQueue(t, Options{AckWait: ackWait})
	w := worker(t, conn)
	put(t, maker, "a")
	put(t, maker, "a") // once, whoever asks twice
	task := take(t, w, nil)
	if task == nil || task.ID != "a" || string(task.Body) != "body of a" || task.Taken != 1 {
		t.Fatalf("took %+v", task)
	}
	if more := take(t, worker(t, conn), nil); more != nil && more.Taken == 1 {
		t.Fatalf("another worker took %+v too", more)
	}
	finish(t, task, "result")
	r := nextResult(t, maker)
	if r == nil || r.ID != "a" || string(r.Body) != "result" {
		t.Fatalf("got result %+v", r)
	}
	if err := r.Kept(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := nextResult(t, maker); r != nil {
		t.Fatalf("a kept result comes again: %+v", r)
	}
	put(t, maker, "a")
	if task := take(t, w, nil); task != nil {
		t.Fatalf("a task that has a result is there again: %+v", task)
	}
}

// A worker that dies says nothing; one that is slow says that it lives.
func TestSilentWorker(t *testing.T) {
	t.Parallel()
	maker, conn := newQueue(t, Options{AckWait: ackWait})
	dead, slow, other := worker(t, conn), worker(t, conn), worker(t, conn)
	put(t, maker, "a")
	first := take(t, dead, nil)
	second := take(t, slow, nil)
	if second == nil || second.ID != first.ID || second.Taken != 2 {
		t.Fatalf("after the first worker's silence: %+v", second)
	}
	ctx, stop := context.WithCancel(t.Context())
	go second.Hold(ctx)
	if third := take(t, other, nil); third != nil {
		t.Fatalf("a task that is held was taken again: %+v", third)
	}
	stop()
	if finish(t, second, "second") {
		t.Error("the first result was there before")
	}
	// The first wasn't dead after all.
	if !finish(t, first, "first") {
		t.Error("a second result passes for the first")
	}
	if finish(t, second, "second") {
		t.Error("a result whose acknowledgement got lost passes for another's")
	}
	r := nextResult(t, maker)
	if string(r.Body) != "second" {
		t.Errorf("the result is %q", r.Body)
	}
	if err := r.Kept(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := nextResult(t, maker); r != nil {
		t.Errorf("there are two results: %+v", r)
	}
}

// A worker that dies after its result and before the acknowledgement leaves a
// task that goes when the result is kept.
func TestResultWithoutAck(t *testing.T) {
	t.Parallel()
	maker, conn := newQueue(t, Options{AckWait: ackWait})
	put(t, maker, "a")
	task := take(t, worker(t, conn), nil)
	lost, cancel := context.WithCancel(t.Context())
	task.msg = neverAcked{task.msg}
	if _, err := task.Finish(lost, []byte("result")); err != nil {
		t.Fatal(err)
	}
	cancel()
	if err := nextResult(t, maker).Kept(t.Context()); err != nil {
		t.Fatal(err)
	}
	if again := take(t, worker(t, conn), nil); again != nil {
		t.Fatalf("its task is still there: %+v", again)
	}
}

func TestGiveBack(t *testing.T) {
	t.Parallel()
	maker, conn := newQueue(t, Options{}) // half a minute until it would come by itself
	w := worker(t, conn)
	put(t, maker, "a")
	if err := take(t, w, nil).GiveBack(); err != nil {
		t.Fatal(err)
	}
	if task := take(t, w, nil); task == nil {
		t.Fatal("it doesn't come again")
	}
}

func TestLabels(t *testing.T) {
	tests := []struct {
		name         string
		needs        []string
		labels, must []string
		taken        bool
	}{
		{"no needs", nil, nil, nil, true},
		{"no needs, a worker with labels", nil, []string{"gpu=8"}, nil, true},
		{"needs that are there", []string{"gpu=8"}, []string{"gpu=8", "rack=2"}, nil, true},
		{"needs that aren't", []string{"gpu=8"}, []string{"gpu=1"}, nil, false},
		{"one of two", []string{"gpu=8", "rack=1"}, []string{"gpu=8"}, nil, false},
		{"one's own", []string{Only("w1")}, []string{Only("w1")}, []string{Only("w1")}, true},
		{"another's own", []string{Only("w1")}, []string{Only("w2")}, nil, false},
		{"nothing but one's own", nil, []string{Only("w1")}, []string{Only("w1")}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			maker, conn := newQueue(t, Options{AckWait: ackWait})
			put(t, maker, "a", tt.needs...)
			if got := take(t, worker(t, conn), tt.labels, tt.must...) != nil; got != tt.taken {
				t.Errorf("taken: %v, want %v", got, tt.taken)
			}
		})
	}
}

// What was put, finished and uploaded is there when the server starts again.
func TestRestart(t *testing.T) {
	t.Parallel()
	dir, from := t.TempDir(), fill(t)
	s, err := Serve(ServerOptions{Dir: dir})
	if err != nil {
		t.Fatal(err)
	}
	conn, err := s.Connect(t.Context(), "test", nil)
	if err != nil {
		t.Fatal(err)
	}
	maker, err := conn.Make(t.Context(), "hunt-1", Options{AckWait: ackWait})
	if err != nil {
		t.Fatal(err)
	}
	put(t, maker, "a")
	put(t, maker, "b")
	finish(t, take(t, worker(t, conn), nil), "result")
	if err := maker.Upload(t.Context(), "a.1", from); err != nil {
		t.Fatal(err)
	}
	conn.Close()
	s.Close()

	conn = newConn(t, dir)
	if maker, err = conn.Make(t.Context(), "hunt-1", Options{AckWait: ackWait}); err != nil {
		t.Fatal(err)
	}
	if names, err := conn.Queues(t.Context()); err != nil || !cmp.Equal(names, []string{"hunt-1"}) {
		t.Errorf("queues %v, %v", names, err)
	}
	put(t, maker, "b") // as one does who doesn't know how far it came
	if r := nextResult(t, maker); r == nil || r.ID != "a" {
		t.Errorf("result %+v", r)
	}
	if task := take(t, worker(t, conn), nil); task == nil || task.ID != "b" {
		t.Errorf("task %+v", task)
	}
	if task := take(t, worker(t, conn), nil); task != nil && task.Taken == 1 {
		t.Errorf("task %+v is there twice", task)
	}
	to := filepath.Join(t.TempDir(), "to")
	if err := maker.Download(t.Context(), "a.1", to); err != nil {
		t.Fatal(err)
	}
	same(t, from, to)
}

func fill(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"plan.json": "{}", "logs/decode.log": strings.Repeat("line\n", 100_000), "empty": ""} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func same(t testing.TB, a, b string) {
	t.Helper()
	read := func(dir string) map[string]string {
		all := map[string]string{}
		for name := range map[string]bool{"plan.json": true, "logs/decode.log": true, "empty": true} {
			b, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Error(err)
			}
			all[name] = string(b)
		}
		return all
	}
	if diff := cmp.Diff(read(a), read(b)); diff != "" {
		t.Errorf("files differ: %s", diff)
	}
}

func TestFullStore(t *testing.T) {
	t.Parallel()
	maker, _ := newQueue(t, Options{MaxBytes: 400_000})
	dir := t.TempDir()
	noise := make([]byte, 250_000)
	for i := range noise {
		noise[i] = byte(i * i >> 7 * 31)
	}
	for i := range 8 { // that compression can't help
		for j := range noise {
			noise[j] ^= byte((i + 1) * (j ^ j>>5) * 2654435761 >> 13)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), noise, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	err := maker.Upload(t.Context(), "big", dir)
	if _, full := errors.AsType[*NoSpaceError](err); !full {
		t.Fatalf("the error is %v", err)
	}
	small := fill(t)
	if err := maker.Upload(t.Context(), "small", small); err != nil {
		t.Fatalf("what didn't fit has left something behind: %v", err)
	}
	if err := maker.Download(t.Context(), "big", filepath.Join(t.TempDir(), "big")); !errors.Is(err, ErrNoFiles) {
		t.Errorf("half of it is there: %v", err)
	}
	if err := maker.Remove(t.Context(), "small"); err != nil {
		t.Error(err)
	}
	if err := maker.Remove(t.Context(), "small"); err != nil {
		t.Errorf("removed twice: %v", err)
	}
}

func TestDelete(t *testing.T) {
	t.Parallel()
	maker, conn := newQueue(t, Options{})
	w := worker(t, conn)
	if err := maker.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Take(t.Context(), nil); !errors.Is(err, ErrNoQueue) {
		t.Errorf("take: %v", err)
	}
	if _, err := conn.Join(t.Context(), "hunt-1"); !errors.Is(err, ErrNoQueue) {
		t.Errorf("join: %v", err)
	}
	if err := maker.Delete(t.Context()); err != nil {
		t.Errorf("deleted twice: %v", err)
	}
}

// What nobody wants goes, and so does half an upload of a worker that died.
func TestSweep(t *testing.T) {
	t.Parallel()
	maker, conn := newQueue(t, Options{AckWait: 10 * time.Millisecond})
	for _, name := range []string{"wanted", "unwanted"} {
		if err := maker.Upload(t.Context(), name, fill(t)); err != nil {
			t.Fatal(err)
		}
	}
	half := "$O.culprit-hunt-1.C.half"
	if _, err := conn.stream.Publish(t.Context(), half, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	sweep := func() uint64 {
		t.Helper()
		if err := maker.Sweep(t.Context(), func(name string) bool { return name == "wanted" }); err != nil {
			t.Fatal(err)
		}
		stream, err := conn.stream.Stream(t.Context(), "OBJ_culprit-hunt-1")
		if err != nil {
			t.Fatal(err)
		}
		info, err := stream.Info(t.Context(), jetstream.WithSubjectFilter(half))
		if err != nil {
			t.Fatal(err)
		}
		return info.State.Subjects[half]
	}
	if sweep() != 1 {
		t.Error("an upload that may go on is gone")
	}
	if err := maker.Download(t.Context(), "unwanted", filepath.Join(t.TempDir(), "to")); !errors.Is(err, ErrNoFiles) {
		t.Errorf("what nobody wants is still there: %v", err)
	}
	to := filepath.Join(t.TempDir(), "to")
	if err := maker.Download(t.Context(), "wanted", to); err != nil {
		t.Error(err)
	}
	for deadline := time.Now().Add(5 * time.Second); sweep() != 0; {
		if time.Now().After(deadline) {
			t.Fatal("half an upload stays")
		}
	}
}

// The store takes the name of an upload whose only part it refused.
func TestFullStoreOfOnePart(t *testing.T) {
	t.Parallel()
	maker, _ := newQueue(t, Options{MaxBytes: 60_000})
	dir := t.TempDir()
	noise := make([]byte, 100_000) // less than a part
	random := rand.New(rand.NewPCG(1, 2))
	for i := range noise {
		noise[i] = byte(random.Uint32())
	}
	if err := os.WriteFile(filepath.Join(dir, "noise"), noise, 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	for range 20 { // which comes first is chance
		err := maker.Upload(ctx, "big", dir)
		if _, full := errors.AsType[*NoSpaceError](err); !full {
			t.Fatalf("the error is %v", err)
		}
		if err := maker.Download(ctx, "big", filepath.Join(t.TempDir(), "big")); !errors.Is(err, ErrNoFiles) {
			t.Fatalf("its name is there: %v", err)
		}
	}
}

func TestMeets(t *testing.T) {
	t.Parallel()
	labels := []string{"gpu=8", Only("w1")}
	tests := []struct {
		name  string
		needs []string
		want  bool
	}{
		{"nothing", nil, true},
		{"what it has", []string{"gpu=8"}, true},
		{"what it hasn't", []string{"gpu=8", "zone=x"}, false},
		{"itself", []string{Only("w1")}, true},
		{"another", []string{Only("w2")}, false},
		{"anybody but itself", []string{"gpu=8", Not("w1")}, false},
		{"anybody but another", []string{"gpu=8", Not("w2")}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := Meets(labels, tt.needs); got != tt.want {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

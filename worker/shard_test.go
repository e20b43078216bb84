package worker

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/workload"
)

const shardKey = "00112233445566778899aabbccddeeff"

func shardedPlan(t *testing.T, url string, shards, rounds int) experiment.Plan {
	t.Helper()
	w, err := workload.Plan{Kind: "agent", Seed: 3, RunKey: shardKey, Sessions: 9, Rounds: rounds, ContextLines: 8, OnError: workload.Repair}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	return experiment.Plan{BaseURL: url, Model: "m", Workload: w, Concurrency: 9, Shards: shards}
}

var ownTag = regexp.MustCompile(`Your tag is ([a-z0-9]{12})`)

// leaky is a server that tells session 4 the canary of session 8, wants a key,
// and counts requests.
func leaky(t *testing.T) *httptest.Server {
	t.Helper()
	key, err := hex.DecodeString(shardKey)
	if err != nil {
		t.Fatal(err)
	}
	four, eight := history.Canary(key, 4, false), history.Canary(key, 8, false)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer 0123456789abcdef" {
			http.Error(w, "no key", http.StatusUnauthorized)
			return
		}
		body, _ := io.ReadAll(r.Body)
		time.Sleep(5 * time.Millisecond)
		text := "All is well with your parcel."
		if m := ownTag.FindSubmatch(body); m != nil && string(m[1]) == four {
			text = "It is " + eight
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":%q},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n", text)
	}))
	t.Cleanup(s.Close)
	return s
}

var keyHeader = http.Header{"Authorization": {"Bearer 0123456789abcdef"}}

// shardQueue is a queue with workers that take one shard each. die, unless it is
// nil, is called once the worker with that number plays, with what ends it.
func shardQueue(t *testing.T, workers int, header http.Header, die func(worker int, disconnect func())) *Shards {
	t.Helper()
	server, err := queue.Serve(queue.ServerOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	connect := func() *queue.Conn {
		conn, err := server.Connect(t.Context(), "test", nil)
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	conn := connect()
	q, err := conn.Make(t.Context(), "load-1", queue.Options{AckWait: time.Second})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			own := connect()
			defer own.Close()
			q, err := own.Join(ctx, "load-1")
			if err != nil {
				t.Error(err)
				return
			}
			task, err := q.Take(ctx, []string{"gpu=0"})
			if err != nil {
				return
			}
			if !isShard(task) {
				t.Errorf("task %s is no shard", task.ID)
			}
			if die != nil {
				die(i, own.Close)
			}
			if err := playShard(ctx, own, q, task, shardOptions{worker: fmt.Sprint("worker-", i), dir: filepath.Join(t.TempDir(), task.ID), header: header, silence: 4 * time.Second}); err != nil && die == nil && !strings.Contains(err.Error(), "the run said nothing") {
				t.Errorf("worker %d: %v", i, err)
			}
		})
	}
	s := NewShards(t.Context(), conn, q, []string{"gpu=0"})
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
		stop()
		all.Wait()
		conn.Close()
		server.Close()
	})
	return s
}

// Three workers play a run together: all sessions, once, and a leak from one
// worker's session to another's is seen.
func TestShards(t *testing.T) {
	server := leaky(t)
	dir := filepath.Join(t.TempDir(), "run")
	v, err := experiment.Run(t.Context(), experiment.Options{
		Dir: dir, Plan: shardedPlan(t, server.URL, 3, 2), Shards: shardQueue(t, 3, keyHeader, nil), Header: keyHeader,
	})
	if err != nil {
		t.Fatal(err)
	}
	if v.Status != oracle.Corrupt || !strings.Contains(strings.Join(v.Reasons, "\n"), "ForeignCanary: 2 of ") {
		t.Errorf("%s: %s", v.Status, v.Reasons)
	}
	if a := v.Assumptions[0]; !a.Holds {
		t.Errorf("%+v", a)
	}
	r, err := history.Open(filepath.Join(dir, history.FileName))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if h := r.Header(); len(h.Shards) != 3 || h.Shards[2].WithinUS <= 0 || h.Shards[2].WithinUS > 5e6 {
		t.Errorf("header %+v", h)
	}
	sessions := map[int]int{}
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if rec.Op != nil && rec.Op.Phase == history.Main {
			sessions[rec.Op.Session]++
		}
	}
	for i := range 9 {
		if sessions[i] != 2 {
			t.Errorf("session %d has %d ops, want 2", i, sessions[i])
		}
	}
}

// Secrets don't pass through NATS, so a worker without them says so.
func TestShardWithoutKey(t *testing.T) {
	server := leaky(t)
	_, err := experiment.Run(t.Context(), experiment.Options{
		Dir: filepath.Join(t.TempDir(), "run"), Plan: shardedPlan(t, server.URL, 2, 2), Shards: shardQueue(t, 2, nil, nil), Header: keyHeader,
	})
	if err == nil || !strings.Contains(err.Error(), "wants the request header Authorization") || strings.Contains(err.Error(), "0123456789") {
		t.Errorf("got %v", err)
	}
}

// A run that is interrupted stops its shards, wherever they are, and has what
// they recorded.
func TestShardsStop(t *testing.T) {
	server := leaky(t)
	ctx, stop := context.WithCancel(t.Context())
	dir := filepath.Join(t.TempDir(), "run")
	v, err := experiment.Run(ctx, experiment.Options{
		Dir: dir, Plan: shardedPlan(t, server.URL, 2, 5000), Shards: shardQueue(t, 2, keyHeader, nil), Header: keyHeader,
		Progress: func(p experiment.Progress) { stop() },
	})
	if err != nil {
		t.Fatal(err)
	}
	if a := v.Assumptions[0]; !strings.Contains(a.Found, "it ended early: shard") || v.Phases[0].Ops == 0 {
		t.Errorf("%+v", a)
	}
	if _, err := os.Stat(filepath.Join(dir, "shards")); !os.IsNotExist(err) {
		t.Errorf("left: %v", err)
	}
}

// A worker that dies while it plays is lost to the run, which ends and says so.
func TestShardWorkerDies(t *testing.T) {
	server := leaky(t)
	v, err := experiment.Run(t.Context(), experiment.Options{
		Dir: filepath.Join(t.TempDir(), "run"), Plan: shardedPlan(t, server.URL, 2, 5000), Header: keyHeader, ShardSilence: 3 * time.Second,
		Shards: shardQueue(t, 2, keyHeader, func(worker int, disconnect func()) {
			if worker == 1 {
				time.AfterFunc(1500*time.Millisecond, disconnect)
			}
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	if a := v.Assumptions[0]; !strings.Contains(a.Found, "of 2 was lost: it said nothing for") || v.Phases[0].Ops == 0 || v.Status != oracle.Corrupt && v.Status != oracle.Inconclusive {
		t.Errorf("%s: %+v", v.Status, a)
	}
}

// A shard whose run is gone stops, and takes what the run has left with it.
func TestShardRunGone(t *testing.T) {
	server, err := queue.Serve(queue.ServerOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	conn, err := server.Connect(t.Context(), "test", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	q, err := conn.Make(t.Context(), "load-2", queue.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := q.Put(t.Context(), shardTask+"0", nil, []byte("{}")); err != nil {
		t.Fatal(err)
	}
	task, err := q.Take(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "shard")
	err = playShard(t.Context(), conn, q, task, shardOptions{worker: "w", dir: dir, silence: 300 * time.Millisecond})
	if err == nil || !strings.Contains(err.Error(), "the run said nothing for 300ms") {
		t.Errorf("got %v", err)
	}
	if _, err := conn.Join(t.Context(), "load-2"); !errors.Is(err, queue.ErrNoQueue) {
		t.Errorf("its queue is left: %v", err)
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("its folder is left: %v", err)
	}
}

func TestRemoveShards(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"load-abc-shard-3", "hunt-abc-0007"} {
		if err := os.MkdirAll(filepath.Join(dir, name, "logs"), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	removeShards(dir, t.Logf)
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 || left[0].Name() != "hunt-abc-0007" {
		t.Errorf("left: %v, %v", left, err)
	}
}

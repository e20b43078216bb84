package experiment_test

import (
	"cmp"
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
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/workload"
)

const runKey = "00112233445566778899aabbccddeeff"

func shardPlan(url string, shards int) experiment.Plan {
	w, err := workload.Plan{Kind: "agent", Seed: 3, RunKey: runKey, Sessions: 12, Rounds: 2, ContextLines: 8, OnError: workload.Repair}.WithDefaults()
	if err != nil {
		panic(err)
	}
	return experiment.Plan{BaseURL: url, Model: "m", Workload: w, Concurrency: 12, Shards: shards}
}

var tag = regexp.MustCompile(`Your tag is ([a-z0-9]{12})`)

// serve answers each request by what reply says to its session; "" is a plain
// answer.
func serve(t *testing.T, reply func(session int) string) *httptest.Server {
	t.Helper()
	key, err := hex.DecodeString(runKey)
	if err != nil {
		t.Fatal(err)
	}
	sessions := map[string]int{}
	for i := range 12 {
		sessions[history.Canary(key, i, false)] = i
	}
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		text := "All is well with your parcel."
		if m := tag.FindSubmatch(body); m != nil {
			if session, ok := sessions[string(m[1])]; ok {
				text = cmp.Or(reply(session), text)
			}
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":%q},\"finish_reason\":\"stop\"}]}\n\ndata: [DONE]\n\n", text)
	}))
	t.Cleanup(s.Close)
	return s
}

// together plays shards in this process, over pipes.
type together struct {
	t    *testing.T
	lose map[int]func(path string) // what becomes of a shard's history that is lost once it is playing
}

func (g *together) Start(ctx context.Context, number int, path string) (experiment.ShardLink, func() error, error) {
	downR, downW := io.Pipe()
	upR, upW := io.Pipe()
	over := make(chan error, 1)
	go func() {
		over <- experiment.PlayShard(context.WithoutCancel(ctx), experiment.StreamLink(downR, upW), experiment.ShardOptions{})
		upW.Close()
	}()
	link := experiment.StreamLink(upR, downW)
	lost := g.lose[number]
	if lost != nil {
		link = &dyingLink{link, func() { downW.Close(); upR.CloseWithError(io.ErrUnexpectedEOF) }}
	}
	return link, func() error {
		downW.Close()
		go io.Copy(io.Discard, upR)
		err := <-over
		if lost != nil {
			lost(path)
			return errors.New("signal: killed")
		}
		return err
	}, nil
}

// dyingLink is gone soon after its shard has begun.
type dyingLink struct {
	experiment.ShardLink
	die func()
}

func (l *dyingLink) Send(m *experiment.ShardMessage) error {
	if m.Begin {
		time.AfterFunc(50*time.Millisecond, l.die)
	}
	return l.ShardLink.Send(m)
}

// what a history's main phase sent.
func sent(t *testing.T, dir string) (requests []string, h history.Header) {
	t.Helper()
	r, err := history.Open(filepath.Join(dir, experiment.HistoryFile))
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			slices.Sort(requests)
			return requests, r.Header()
		}
		if err != nil {
			t.Fatal(err)
		}
		if op := rec.Op; op != nil && op.Phase == history.Main {
			requests = append(requests, fmt.Sprintf("%d.%d %s", op.Session, op.Turn, op.Request))
		}
	}
}

// A run in shards sends what one alone would, and is judged as a whole.
func TestShards(t *testing.T) {
	server := serve(t, func(int) string { return "" })
	var alone []string
	for _, shards := range []int{0, 3} {
		dir := filepath.Join(t.TempDir(), "run")
		last := experiment.Progress{}
		v, err := experiment.Run(t.Context(), experiment.Options{
			Dir: dir, Plan: shardPlan(server.URL, shards), Shards: &together{t: t}, Progress: func(p experiment.Progress) { last = p },
		})
		if err != nil {
			t.Fatal(err)
		}
		requests, h := sent(t, dir)
		if last.Sessions != 12 || last.SessionsDone != 12 || last.Ops.OK != int64(len(requests)) || last.Main.Judged == 0 {
			t.Errorf("%d shards: the last progress is %+v", shards, last)
		}
		for _, a := range v.Assumptions {
			if !a.Holds && a.Name == "the run came to its end" {
				t.Errorf("%d shards: %+v", shards, a)
			}
		}
		if shards == 0 {
			alone = requests
			continue
		}
		if d := gocmp.Diff(alone, requests); d != "" || len(alone) == 0 {
			t.Errorf("what is sent (-alone +in shards):\n%s", d)
		}
		if len(h.Shards) != 3 || h.Shards[2].Cores == 0 || h.Shards[2].Lost != "" {
			t.Errorf("header %+v", h)
		}
		if _, err := os.Stat(filepath.Join(dir, "shards")); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the shards' histories are left: %v", err)
		}
	}
}

// Session 3, in shard 1, is sent the canaries of sessions that other shards
// play, and session 4 that of one that its own does.
func TestLeakAcrossShards(t *testing.T) {
	key, err := hex.DecodeString(runKey)
	if err != nil {
		t.Fatal(err)
	}
	leaks := map[int]int{3: 8, 4: 10, 5: 5} // its own is no leak
	server := serve(t, func(session int) string {
		if owner, ok := leaks[session]; ok {
			return "Your parcel is " + history.Canary(key, owner, false) + "."
		}
		return ""
	})
	dir := filepath.Join(t.TempDir(), "run")
	v, err := experiment.Run(t.Context(), experiment.Options{Dir: dir, Plan: shardPlan(server.URL, 2), Shards: &together{t: t}})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(v.Classes, func(c oracle.ClassResult) bool { return c.Class == oracle.ForeignCanary })
	if v.Status != oracle.Corrupt || i < 0 || v.Classes[i].Main.Failures != 4 {
		t.Fatalf("%s: %+v", v.Status, v.Classes)
	}
	for _, e := range v.Classes[i].Examples {
		if want := fmt.Sprintf("is the canary of session %d", leaks[e.Session]); !strings.Contains(e.Note, want) {
			t.Errorf("session %d: %s, want %q", e.Session, e.Note, want)
		}
	}
}

// A shard that dies ends the run, which says so; what it had is judged.
func TestShardLost(t *testing.T) {
	server := serve(t, func(session int) string {
		if session%3 == 1 {
			time.Sleep(20 * time.Millisecond)
		}
		return ""
	})
	plan := shardPlan(server.URL, 3)
	plan.Workload.Rounds = 200
	for _, c := range []struct {
		name string
		lose func(path string)
	}{
		{"whole history", func(string) {}},
		{"cut history", func(path string) {
			info, err := os.Stat(path)
			if err == nil {
				err = os.Truncate(path, info.Size()-9)
			}
			if err != nil {
				t.Error(err)
			}
		}},
		{"no history", func(path string) {
			if err := os.Remove(path); err != nil {
				t.Error(err)
			}
		}},
	} {
		dir := filepath.Join(t.TempDir(), "run")
		v, err := experiment.Run(t.Context(), experiment.Options{Dir: dir, Plan: plan, Shards: &together{t, map[int]func(string){1: c.lose}}})
		if err != nil {
			t.Errorf("%s: %v", c.name, err)
			continue
		}
		if v.Status != oracle.Inconclusive && v.Status != oracle.Corrupt || !strings.Contains(v.Assumptions[0].Found, "shard 1 of 3 was lost: signal: killed") {
			t.Errorf("%s: %s, %+v", c.name, v.Status, v.Assumptions[0])
		}
		if !strings.Contains(v.Assumptions[0].Found, "another shard was lost") {
			t.Errorf("%s: the others went on: %+v", c.name, v.Assumptions[0])
		}
	}
}

// A run that is interrupted stops its shards and judges what there is.
func TestShardsStopped(t *testing.T) {
	server := serve(t, func(int) string { return "" })
	plan := shardPlan(server.URL, 2)
	plan.Workload.Rounds = 500
	ctx, stop := context.WithCancel(t.Context())
	dir := filepath.Join(t.TempDir(), "run")
	v, err := experiment.Run(ctx, experiment.Options{
		Dir: dir, Plan: plan, Shards: &together{t: t}, Progress: func(p experiment.Progress) { stop() },
	})
	if err != nil {
		t.Fatal(err)
	}
	if a := v.Assumptions[0]; !regexp.MustCompile("it ended early: shard [01]: context canceled$").MatchString(a.Found) {
		t.Errorf("%s: %+v", v.Status, a)
	}
}

// What a shard can't do is said at once.
func TestShardRefuses(t *testing.T) {
	server := serve(t, func(int) string { return "" })
	for _, c := range []struct {
		name   string
		change func(*experiment.Plan)
		want   string
	}{
		{"header", func(p *experiment.Plan) { p.HeaderNames = []string{"X-Secret"} }, "wants the request header X-Secret"},
		{"version", func(p *experiment.Plan) { p.Workload.Version = 99 }, "version 99"},
	} {
		plan := shardPlan(server.URL, 2)
		c.change(&plan)
		_, err := experiment.Run(t.Context(), experiment.Options{Dir: filepath.Join(t.TempDir(), "run"), Plan: plan, Shards: &together{t: t}})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
}

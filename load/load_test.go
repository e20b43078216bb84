package load_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// memory is a history in memory.
type memory struct {
	mu     sync.Mutex
	ops    []history.Op
	events []history.Event
	err    error // what Op returns
}

func (m *memory) Op(op *history.Op) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	c := *op
	c.Chunks = nil
	for _, k := range op.Chunks { // the op isn't ours to keep
		c.Chunks = append(c.Chunks, history.Chunk{At: k.At, Data: slices.Clone(k.Data)})
	}
	m.ops = append(m.ops, c)
	return m.err
}

func (m *memory) Event(e *history.Event) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.events = append(m.events, *e)
	return nil
}

func (m *memory) inPhase(phase history.Phase) (ops []history.Op) {
	for _, op := range m.ops {
		if op.Phase == phase {
			ops = append(ops, op)
		}
	}
	return ops
}

func (m *memory) ofKind(kind history.EventKind) (events []history.Event) {
	for _, e := range m.events {
		if e.Kind == kind {
			events = append(events, e)
		}
	}
	return events
}

// script is a workload whose sessions all play the same turns, and that keeps
// the replies they were shown.
type script struct {
	turns []workload.Turn

	mu      sync.Mutex
	replies []*openai.Reply
}

func (s *script) Kind() string { return "script" }

func (s *script) Session(int, bool) workload.Session { return &scriptSession{script: s} }

type scriptSession struct {
	script *script
	next   int
}

func (s *scriptSession) Next(prev *openai.Reply) (workload.Turn, bool) {
	if s.next > 0 {
		s.script.mu.Lock()
		s.script.replies = append(s.script.replies, prev)
		s.script.mu.Unlock()
	}
	if s.next == len(s.script.turns) {
		return workload.Turn{}, false
	}
	s.next++
	return s.script.turns[s.next-1], true
}

var hello = openai.ChatRequest{Messages: []openai.Message{{Role: "user", Content: "hello"}}}

// play runs f's server and the load in fake time, over pipes.
func play(t *testing.T, handler http.HandlerFunc, f func(t *testing.T, o load.Options)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
		server := &http.Server{Handler: handler}
		go server.Serve(l)
		f(t, load.Options{BaseURL: "http://server", Dial: l.dial, Start: time.Now()})
		server.Close()
	})
}

type pipeListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func (l *pipeListener) dial(ctx context.Context, _, _ string) (net.Conn, error) {
	c, s := net.Pipe()
	select {
	case l.conns <- s:
		return c, nil
	case <-l.done:
		return nil, errors.New("connection refused")
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (l *pipeListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *pipeListener) Close() error   { l.once.Do(func() { close(l.done) }); return nil }
func (l *pipeListener) Addr() net.Addr { return &net.UnixAddr{Name: "pipe"} }

// tokens answers with n tokens, one each step.
func tokens(n int, step time.Duration) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		events := openai.NewWriter(w, http.NewResponseController(w).Flush)
		for i := range n {
			select {
			case <-time.After(step):
			case <-r.Context().Done():
				return
			}
			events.Event(fmt.Appendf(nil, `{"choices":[{"index":0,"delta":{"content":"%d "}}]}`, i))
		}
		events.Event([]byte(`{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`))
		events.Done()
	}
}

func silent(_ http.ResponseWriter, r *http.Request) {
	io.Copy(io.Discard, r.Body)
	<-r.Context().Done()
}

func mustRun(t *testing.T, o load.Options) load.Result {
	t.Helper()
	result, err := load.Run(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return result
}

// An hour of arrivals at one a second: every request is sent when it was
// planned, every latency is the server's to the nanosecond, every second has
// its tick.
func TestOpenLoopHour(t *testing.T) {
	play(t, tokens(10, 30*time.Millisecond), func(t *testing.T, o load.Options) {
		m := &memory{}
		o.History, o.Workload, o.Sessions, o.RequestRate, o.Seed = m, &script{turns: []workload.Turn{{Request: hello}}}, 3600, 1, 7
		result := mustRun(t, o)
		if result.Ops.OK != 3600 || result.SessionsDone != 3600 || result.Stopped != "" {
			t.Errorf("result %+v", result)
		}
		var last time.Duration
		ids := map[int64]bool{}
		for _, op := range m.ops {
			if op.Sent != op.Planned {
				t.Fatalf("op %d was sent at %v, planned at %v", op.ID, op.Sent, op.Planned)
			}
			if op.LastByte-op.Sent != 300*time.Millisecond || op.FirstByte-op.Sent != 30*time.Millisecond || len(op.Chunks) != 12 {
				t.Fatalf("op %d: first byte after %v, last after %v, %d chunks", op.ID, op.FirstByte-op.Sent, op.LastByte-op.Sent, len(op.Chunks))
			}
			for i, c := range op.Chunks[:10] {
				if c.At-op.Sent != time.Duration(i+1)*30*time.Millisecond {
					t.Fatalf("op %d: chunk %d after %v", op.ID, i, c.At-op.Sent)
				}
			}
			ids[op.ID] = true
			last = max(last, op.Planned)
		}
		if len(ids) != 3600 {
			t.Errorf("%d different ids", len(ids))
		}
		// The sum of 3,600 exponential gaps of 1 s: a standard deviation of 60 s.
		if math.Abs(last.Seconds()-3600) > 300 {
			t.Errorf("the last request was planned at %v, want about an hour", last)
		}
		ticks := m.ofKind(history.Tick)
		if n := len(ticks); n < int(result.Elapsed/time.Second) || n > int(result.Elapsed/time.Second)+1 {
			t.Errorf("%d ticks in %v", n, result.Elapsed)
		}
		chunks := 0.0
		for _, e := range ticks {
			chunks += e.Values["chunks"]
			if e.Values["late_ms"] != 0 {
				t.Fatalf("late %v ms at %v", e.Values["late_ms"], e.At)
			}
		}
		if chunks != 12*3600 || result.Chunks != 12*3600 {
			t.Errorf("ticks count %v chunks, the result %d, want %d", chunks, result.Chunks, 12*3600)
		}
	})
}

// The plan doesn't move when the server is too slow for it.
func TestOpenLoopLateness(t *testing.T) {
	plans := map[int][]time.Duration{}
	for _, most := range []int{1, 1000} {
		play(t, tokens(1, time.Second), func(t *testing.T, o load.Options) {
			m := &memory{}
			o.History, o.Workload, o.Sessions, o.RequestRate, o.Concurrency = m, &script{turns: []workload.Turn{{Request: hello}}}, 50, 10, most
			mustRun(t, o)
			slices.SortFunc(m.ops, func(a, b history.Op) int { return int(a.ID - b.ID) })
			for i, op := range m.ops {
				plans[most] = append(plans[most], op.Planned)
				if want := m.ops[0].Sent + time.Duration(i)*time.Second; most == 1 && op.Sent != want {
					t.Errorf("op %d was sent at %v, want %v", op.ID, op.Sent, want)
				}
				if most > 1 && op.Sent != op.Planned {
					t.Errorf("op %d was sent %v late", op.ID, op.Sent-op.Planned)
				}
				if op.InFlight > most {
					t.Errorf("op %d: %d in flight", op.ID, op.InFlight)
				}
			}
		})
	}
	if diff := cmp.Diff(plans[1000], plans[1]); diff != "" {
		t.Errorf("planned times (-free +held up):\n%s", diff)
	}
}

// A closed loop keeps its concurrency; a turn is due its delay after the
// reply before it.
func TestClosedLoop(t *testing.T) {
	var now, most atomic.Int64
	serve := tokens(3, 10*time.Millisecond)
	handler := func(w http.ResponseWriter, r *http.Request) {
		most.Store(max(most.Load(), now.Add(1)))
		defer now.Add(-1)
		serve(w, r)
	}
	play(t, handler, func(t *testing.T, o load.Options) {
		m, s := &memory{}, &script{turns: []workload.Turn{{Request: hello}, {Request: hello, Delay: 70 * time.Millisecond}}}
		o.History, o.Workload, o.Sessions, o.FirstSession, o.Concurrency, o.Phase = m, s, 10, 100, 4, history.Control
		result := mustRun(t, o)
		if result.Ops.OK != 20 || most.Load() != 4 {
			t.Errorf("%d ops, at most %d at once; want 20 and 4", result.Ops.OK, most.Load())
		}
		// Three rounds of 30 ms, 70 ms and 30 ms.
		if result.Elapsed != 3*130*time.Millisecond {
			t.Errorf("it took %v", result.Elapsed)
		}
		ends := map[int]time.Duration{}
		for _, op := range m.ops {
			if op.Session < 100 || op.Session > 109 || op.Phase != history.Control || op.Kind != "script" {
				t.Errorf("op %d: session %d, phase %s, kind %s", op.ID, op.Session, op.Phase, op.Kind)
			}
			if op.Turn == 1 && op.Planned != ends[op.Session]+70*time.Millisecond || op.Sent != op.Planned {
				t.Errorf("op %d: the session was ready at %v, planned %v, sent %v", op.ID, ends[op.Session], op.Planned, op.Sent)
			}
			ends[op.Session] = op.LastByte
		}
		for _, r := range s.replies {
			if r == nil || r.Content != "0 1 2 " || r.FinishReason != "stop" || !r.Done {
				t.Errorf("reply %+v", r)
			}
		}
		if diff := cmp.Diff([]history.EventKind{history.Started, history.Tick, history.Ended}, kinds(m.events)); diff != "" {
			t.Errorf("events (-want +got):\n%s", diff)
		}
	})
}

// In waves, the next requests of all sessions are sent together, when the
// slowest of the ones before has ended, and are planned for then.
func TestWaves(t *testing.T) {
	var served atomic.Int64
	handler := func(w http.ResponseWriter, r *http.Request) { // the first of a wave takes 10 ms, the third 30
		tokens(int(served.Add(1)-1)%3+1, 10*time.Millisecond)(w, r)
	}
	play(t, handler, func(t *testing.T, o load.Options) {
		m, s := &memory{}, &script{turns: []workload.Turn{{Request: hello}, {Request: hello}}}
		o.History, o.Workload, o.Sessions, o.Concurrency, o.Waves = m, s, 7, 3, true
		result := mustRun(t, o)
		if result.Ops.OK != 14 || result.SessionsDone != 7 {
			t.Errorf("%d ops of %d sessions", result.Ops.OK, result.SessionsDone)
		}
		waves := map[time.Duration]int{}
		for _, op := range m.ops {
			waves[op.Sent]++
			if op.Planned != op.Sent {
				t.Errorf("op %d: planned %v, sent %v", op.ID, op.Planned, op.Sent)
			}
		}
		ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
		// The last session is a group by itself.
		if diff := cmp.Diff(map[time.Duration]int{0: 3, ms(30): 3, ms(60): 3, ms(90): 3, ms(120): 1, ms(130): 1}, waves); diff != "" {
			t.Errorf("requests by when they were sent: %s", diff)
		}
	})
	if _, err := load.Run(t.Context(), load.Options{BaseURL: "http://server", History: &memory{}, Workload: &script{}, Waves: true, RequestRate: 1}); err == nil {
		t.Error("waves at a rate are no error")
	}
}

func kinds(events []history.Event) (kinds []history.EventKind) {
	for _, e := range events {
		kinds = append(kinds, e.Kind)
	}
	return kinds
}

func TestCancels(t *testing.T) {
	var hungUp atomic.Int64
	serve := tokens(100, 10*time.Millisecond)
	handler := func(w http.ResponseWriter, r *http.Request) {
		serve(w, r)
		if r.Context().Err() != nil {
			hungUp.Add(1)
		}
	}
	play(t, handler, func(t *testing.T, o load.Options) {
		m, s := &memory{}, &script{turns: []workload.Turn{
			{Request: hello, CancelAfter: 5 * time.Millisecond},
			{Request: hello, CancelAfter: 55 * time.Millisecond},
			{Request: hello, CancelChunks: 7},
			{Request: hello, CancelAfter: time.Hour, CancelChunks: 1000},
		}}
		o.History, o.Workload, o.Sessions = m, s, 1
		mustRun(t, o)
		for i, want := range []struct {
			outcome history.Outcome
			took    time.Duration
			chunks  int
		}{
			{history.Cancelled, 5 * time.Millisecond, 0},
			{history.Cancelled, 55 * time.Millisecond, 5},
			{history.Cancelled, 70 * time.Millisecond, 7},
			{history.OK, time.Second, 102},
		} {
			op := m.ops[i]
			if op.Outcome != want.outcome || op.LastByte-op.Sent != want.took || len(op.Chunks) != want.chunks {
				t.Errorf("op %d: %s (%s) after %v and %d chunks, want %+v", op.ID, op.Outcome, op.Error, op.LastByte-op.Sent, len(op.Chunks), want)
			}
			if (s.replies[i] == nil) != (want.outcome != history.OK) {
				t.Errorf("op %d: the session was shown %v", op.ID, s.replies[i])
			}
		}
		synctest.Wait()
		if hungUp.Load() != 3 {
			t.Errorf("the server saw %d connections closed, want 3", hungUp.Load())
		}
	})
}

func TestTimeout(t *testing.T) {
	play(t, silent, func(t *testing.T, o load.Options) {
		m := &memory{}
		o.History, o.Workload, o.Sessions, o.Concurrency, o.Timeout = m, &script{turns: []workload.Turn{{Request: hello}}}, 2, 2, 90*time.Second
		result := mustRun(t, o)
		for _, op := range m.ops {
			if op.Outcome != history.TimedOut || op.LastByte-op.Sent != 90*time.Second || op.Error != "gave up after 0 chunks: the reply didn't end within 90 s" {
				t.Errorf("%s after %v: %s", op.Outcome, op.LastByte-op.Sent, op.Error)
			}
		}
		if result.Ops.TimedOut != 2 || result.Stopped != "" {
			t.Errorf("result %+v", result)
		}
	})
}

// A server that never answers anybody ends the phase after another timeout.
func TestGiveUpOnTimeouts(t *testing.T) {
	play(t, silent, func(t *testing.T, o load.Options) {
		m := &memory{}
		o.History, o.Workload, o.Sessions, o.Concurrency, o.Timeout = m, &script{turns: []workload.Turn{{Request: hello}}}, 1000, 10, time.Minute
		result := mustRun(t, o)
		if !strings.Contains(result.Stopped, "no answer") || result.Elapsed != 2*time.Minute {
			t.Errorf("after %v: %q", result.Elapsed, result.Stopped)
		}
		if last := m.events[len(m.events)-1]; last.Kind != history.Ended || last.Text != result.Stopped {
			t.Errorf("last event %+v", last)
		}
	})
}

// A server that is gone is asked ever less often, then given up.
func TestGiveUpOnRefusals(t *testing.T) {
	play(t, silent, func(t *testing.T, o load.Options) {
		m := &memory{}
		dials := 0
		o.Dial = func(context.Context, string, string) (net.Conn, error) {
			dials++
			return nil, errors.New("connection refused")
		}
		o.History, o.Workload, o.Sessions, o.Concurrency = m, &script{turns: []workload.Turn{{Request: hello}, {Request: hello}}}, 1000, 1
		result := mustRun(t, o)
		if !strings.Contains(result.Stopped, "connection refused") || result.Elapsed < load.DefaultGiveUpAfter || result.Elapsed > load.DefaultGiveUpAfter+2*time.Second {
			t.Errorf("after %v: %q", result.Elapsed, result.Stopped)
		}
		if dials > 60 || dials < 10 || len(m.ops) != dials {
			t.Errorf("%d dials, %d ops", dials, len(m.ops))
		}
		if m.ops[0].Error != "no response: connection refused" || m.ops[0].Outcome != history.Failed {
			t.Errorf("op: %s %s", m.ops[0].Outcome, m.ops[0].Error)
		}
	})
}

// A server that comes back in time is not given up.
func TestComesBack(t *testing.T) {
	play(t, tokens(1, time.Millisecond), func(t *testing.T, o load.Options) {
		m := &memory{}
		dial := o.Dial
		o.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
			if time.Since(o.Start)/(20*time.Second)%2 == 0 {
				return nil, errors.New("connection refused")
			}
			return dial(ctx, network, address)
		}
		o.History, o.Workload, o.Sessions = m, &script{turns: []workload.Turn{{Request: hello, Delay: 3 * time.Second}}}, 30
		if result := mustRun(t, o); result.Stopped != "" || result.Ops.OK == 0 || result.Ops.Failed == 0 || result.Ops.Total() != 30 {
			t.Errorf("result %+v", result)
		}
	})
}

// Ctrl-C: what is in flight is recorded with what came so far.
func TestContextEnds(t *testing.T) {
	for _, rate := range []float64{0, 5} {
		play(t, tokens(100, 100*time.Millisecond), func(t *testing.T, o load.Options) {
			m := &memory{}
			o.History, o.Workload, o.Sessions, o.Concurrency, o.RequestRate = m, &script{turns: []workload.Turn{{Request: hello}, {Request: hello}}}, 50, 5, rate
			ctx, cancel := context.WithTimeout(t.Context(), 2550*time.Millisecond)
			defer cancel()
			result, err := load.Run(ctx, o)
			if err != nil || result.Elapsed != 2550*time.Millisecond || !strings.Contains(result.Stopped, "deadline exceeded") {
				t.Errorf("%+v, %v", result, err)
			}
			if n := len(m.ops); n == 0 || n > 5 {
				t.Errorf("%d ops", n)
			}
			for _, op := range m.ops {
				if op.Outcome != history.Cancelled || op.LastByte != 2550*time.Millisecond || op.Error != fmt.Sprintf("the run ended after %d chunks: context deadline exceeded", len(op.Chunks)) {
					t.Errorf("op %d: %s at %v: %s", op.ID, op.Outcome, op.LastByte, op.Error)
				}
				if want := int((op.LastByte - op.Sent) / (100 * time.Millisecond)); len(op.Chunks) != want {
					t.Errorf("op %d: %d chunks, want %d", op.ID, len(op.Chunks), want)
				}
			}
		})
	}
}

// A history that can't be written ends the run with its error.
func TestHistoryFails(t *testing.T) {
	play(t, tokens(1, time.Millisecond), func(t *testing.T, o load.Options) {
		full := errors.New("no space left on device")
		o.History, o.Workload, o.Sessions = &memory{err: full}, &script{turns: []workload.Turn{{Request: hello}}}, 1000
		if result, err := load.Run(t.Context(), o); !errors.Is(err, full) || result.Ops.Total() != 1 {
			t.Errorf("%+v, %v", result, err)
		}
	})
}

func TestWatch(t *testing.T) {
	for _, test := range []struct {
		name, path   string
		health       int           // status of /health
		after        time.Duration // the server no longer generates then, its health goes on
		wantStatuses []float64
	}{
		{"health", "/health", http.StatusOK, time.Hour, []float64{200, 200, 200, 200, 200, 200, 200}},
		{"no health", "/v1/models", http.StatusNotFound, time.Hour, []float64{404, 200, 200, 200, 200, 200, 200, 200}},
		{"unhealthy", "/health", http.StatusServiceUnavailable, time.Hour, []float64{503, 503, 503, 503, 503, 503, 503}},
		{"wedged", "/health", http.StatusOK, 10 * time.Second, []float64{200, 200, 200, 200, 200, 200, 200}},
	} {
		t.Run(test.name, func(t *testing.T) {
			var began time.Time
			serve := tokens(1, 100*time.Millisecond)
			handler := func(w http.ResponseWriter, r *http.Request) {
				time.Sleep(3 * time.Millisecond)
				switch {
				case r.URL.Path == "/health":
					w.WriteHeader(test.health)
				case r.URL.Path == "/v1/models":
					io.WriteString(w, `{"data":[]}`)
				case time.Since(began) > test.after:
					silent(w, r)
				default:
					serve(w, r)
				}
			}
			play(t, handler, func(t *testing.T, o load.Options) {
				began = time.Now()
				m := &memory{}
				o.History, o.Workload, o.Sessions = m, &script{turns: []workload.Turn{{Request: hello}, {Request: hello, Delay: 32 * time.Second}}}, 1
				o.HealthEvery, o.Sentinel, o.Timeout = 5*time.Second, hello, time.Minute
				mustRun(t, o)
				var statuses []float64
				for _, e := range m.ofKind(history.Health) {
					statuses = append(statuses, e.Values["status"])
					if e.Values["latency_ms"] != 3 {
						t.Errorf("%s took %v ms", e.Name, e.Values["latency_ms"])
					}
				}
				if len(statuses) > len(test.wantStatuses) {
					statuses = statuses[:len(test.wantStatuses)] // a wedged run takes longer
				}
				if diff := cmp.Diff(test.wantStatuses, statuses); diff != "" {
					t.Errorf("statuses (-want +got):\n%s", diff)
				}
				if e := m.ofKind(history.Health); e[len(e)-1].Name != test.path {
					t.Errorf("the last check was of %s", e[len(e)-1].Name)
				}
				sentinels := m.inPhase(history.Sentinel)
				if len(sentinels) < 2 {
					t.Fatalf("%d sentinels", len(sentinels))
				}
				for _, op := range sentinels {
					want := history.OK
					if op.Sent > test.after {
						want = history.TimedOut
					}
					if op.Outcome != want || op.Session != load.OtherSession || op.Kind != "sentinel" {
						t.Errorf("sentinel at %v: %s of session %d, want %s", op.Sent, op.Outcome, op.Session, want)
					}
				}
			})
		})
	}
}

// After a suspect op a few plain requests are sent by themselves, while the
// others go on.
func TestRecovery(t *testing.T) {
	serve := tokens(1, 100*time.Millisecond)
	var n atomic.Int64
	handler := func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if !strings.Contains(string(body), "plain") && n.Add(1)%4 == 0 {
			http.Error(w, "out of memory", http.StatusInternalServerError)
			return
		}
		serve(w, r)
	}
	plain := openai.ChatRequest{Messages: []openai.Message{{Role: "user", Content: "plain"}}}
	play(t, handler, func(t *testing.T, o load.Options) {
		m := &memory{}
		o.History, o.Workload, o.Sessions, o.Concurrency = m, &script{turns: []workload.Turn{{Request: hello}}}, 100, 10
		o.Recovery, o.MaxRecovery = []workload.Turn{{Request: plain}, {Request: plain, Delay: 50 * time.Millisecond}}, 2
		result := mustRun(t, o)
		if result.Ops.Total() != 100 || result.Ops.Failed != 25 {
			t.Errorf("result %+v", result)
		}
		recovery := m.inPhase(history.Recovery)
		if len(recovery) != 4 {
			t.Fatalf("%d recovery ops, want 2 times 2", len(recovery))
		}
		for i, op := range recovery {
			if op.Outcome != history.OK || op.Session != load.OtherSession || op.Turn != i%2 {
				t.Errorf("recovery op %d: %s (%s), session %d, turn %d", op.ID, op.Outcome, op.Error, op.Session, op.Turn)
			}
			if i > 0 && op.Sent < recovery[i-1].LastByte {
				t.Errorf("recovery op %d was sent before the end of the one before", op.ID)
			}
		}
		for _, op := range m.inPhase(history.Main) {
			if op.Outcome == history.Failed && (op.Error != "HTTP 500: out of memory" || op.Status != 500) {
				t.Errorf("op %d: %d, %s", op.ID, op.Status, op.Error)
			}
		}
	})
}

// The last op of a phase may be the suspect one.
func TestRecoveryAfterTheLastOp(t *testing.T) {
	play(t, tokens(1, time.Millisecond), func(t *testing.T, o load.Options) {
		m := &memory{}
		o.History, o.Workload, o.Sessions = m, &script{turns: []workload.Turn{{Request: hello}}}, 1
		o.Suspect = func(_ *history.Op, r *openai.Reply) bool { return r.Content == "0 " }
		o.Recovery = []workload.Turn{{Request: hello}}
		mustRun(t, o)
		if n := len(m.inPhase(history.Recovery)); n != 1 {
			t.Errorf("%d recovery ops, want 1", n)
		}
	})
}

// The client's clock ticks to the end of the phase, so that it doesn't look as
// if it had stood still.
func TestTicksDuringRecovery(t *testing.T) {
	play(t, tokens(1, 10*time.Second), func(t *testing.T, o load.Options) {
		m := &memory{}
		o.History, o.Workload, o.Sessions = m, &script{turns: []workload.Turn{{Request: hello}}}, 1
		o.Suspect = func(*history.Op, *openai.Reply) bool { return true }
		o.Recovery = []workload.Turn{{Request: hello}}
		mustRun(t, o)
		if n := len(m.ofKind(history.Tick)); n != 20 {
			t.Errorf("%d ticks in 20 s", n)
		}
	})
}

// The suspect op may be the last one and end while recovery turns for an
// earlier one are on their way.
func TestRecoveryTwice(t *testing.T) {
	for range 10 {
		serve := tokens(10, 10*time.Millisecond)
		var n atomic.Int64
		handler := func(w http.ResponseWriter, r *http.Request) {
			if n.Add(1) == 1 {
				http.Error(w, "no", http.StatusInternalServerError)
				return
			}
			serve(w, r)
		}
		play(t, handler, func(t *testing.T, o load.Options) {
			m := &memory{}
			o.History, o.Workload, o.Sessions = m, &script{turns: []workload.Turn{{Request: hello}, {Request: hello, CancelAfter: 50 * time.Millisecond}}}, 1
			o.Suspect = func(*history.Op, *openai.Reply) bool { return true }
			o.Recovery = []workload.Turn{{Request: hello}}
			mustRun(t, o)
			if n := len(m.inPhase(history.Recovery)); n != 2 {
				t.Errorf("%d recovery ops, want 2", n)
			}
		})
	}
}

// slowTicks keeps the client busy at each tick.
type slowTicks struct{ memory }

func (s *slowTicks) Event(e *history.Event) error {
	if e.Kind == history.Tick {
		time.Sleep(120 * time.Millisecond)
	}
	return s.memory.Event(e)
}

// A client that is stalled says so.
func TestLateTicks(t *testing.T) {
	play(t, tokens(1, 4500*time.Millisecond), func(t *testing.T, o load.Options) {
		m := &slowTicks{}
		o.History, o.Workload, o.Sessions = m, &script{turns: []workload.Turn{{Request: hello}}}, 1
		mustRun(t, o)
		var late []float64
		for _, e := range m.ofKind(history.Tick) {
			late = append(late, e.Values["late_ms"])
		}
		// The timer after a tick fires as much too late as the tick was busy.
		if diff := cmp.Diff([]float64{0, 120, 120, 120, 120}, late); diff != "" {
			t.Errorf("late_ms (-want +got):\n%s", diff)
		}
	})
}

func TestProgress(t *testing.T) {
	play(t, tokens(10, 100*time.Millisecond), func(t *testing.T, o load.Options) {
		var seen []load.Progress
		o.History, o.Workload, o.Sessions, o.Concurrency = &memory{}, &script{turns: []workload.Turn{{Request: hello}}}, 5, 2
		o.Progress = func(p load.Progress) { seen = append(seen, p) }
		o.Start = o.Start.Add(-time.Minute) // an earlier phase took a minute
		result := mustRun(t, o)
		if len(seen) < 3 || len(seen) > 4 {
			t.Fatalf("%d reports in %v", len(seen), result.Elapsed)
		}
		last := seen[len(seen)-1] // after the last op
		last.Elapsed = result.Elapsed
		if diff := cmp.Diff(result.Progress, last); diff != "" {
			t.Errorf("last report (-result +report):\n%s", diff)
		}
		if result.Elapsed != 3*time.Second || result.SessionsDone != 5 || result.Chunks != 60 {
			t.Errorf("result %+v", result)
		}
	})
}

package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/queue/natstest"
	"github.com/culprit-project/culprit/workload"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"culprit":    main,
		"fakeserver": fakeServer,
		"natsserver": natsServer,
		"securenats": secureNATS,
		"natsnode":   natsNode,
	})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata",
		RequireExplicitExec: true,
		Setup:               setExamples,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"waitfile":  waitFile,
			"cutfile":   cutFile,
			"waitops":   waitOps,
			"freeport":  setFreePort,
			"expand":    expand,
			"freeports": setFreePorts,
			"killshard": killShard,
			"fetch":     fetch,
		},
	})
}

// setExamples has EXAMPLES name the examples' directory.
func setExamples(e *testscript.Env) error {
	examples, err := filepath.Abs("../../examples")
	e.Setenv("EXAMPLES", examples)
	return err
}

// waitFile waits until a file exists, and puts its text into a variable:
// waitfile PATTERN VARIABLE.
func waitFile(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: waitfile FILE VARIABLE")
	}
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		matches, err := filepath.Glob(ts.MkAbs(args[0]))
		ts.Check(err)
		if len(matches) == 0 {
			continue
		}
		if b, err := os.ReadFile(matches[0]); err == nil && len(b) > 0 {
			ts.Setenv(args[1], string(b))
			return
		}
	}
	ts.Fatalf("%s did not appear", args[0])
}

// setFreePort puts a port that nobody listens on into a variable.
func setFreePort(ts *testscript.TestScript, _ bool, args []string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	ts.Check(err)
	ts.Setenv(args[0], fmt.Sprint(l.Addr().(*net.TCPAddr).Port))
	ts.Check(l.Close())
}

// fetch waits until a URL is served, and writes what it says to a file: fetch
// URL FILE.
func fetch(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: fetch URL FILE")
	}
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		response, err := http.Get(args[0])
		if err != nil {
			continue
		}
		b, err := io.ReadAll(response.Body)
		ts.Check(errors.Join(err, response.Body.Close()))
		ts.Check(os.WriteFile(ts.MkAbs(args[1]), b, 0o644))
		return
	}
	ts.Fatalf("%s isn't served", args[0])
}

// setFreePorts puts the beginning of ten ports that nobody listens on into a
// variable: with one more digit it is a port.
func setFreePorts(ts *testscript.TestScript, _ bool, args []string) {
	for range 100 {
		start := 1100 + rand.IntN(2000) // below the ports that systems give out
		free := true
		for digit := range 10 {
			l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d%d", start, digit))
			if err != nil {
				free = false
				break
			}
			ts.Check(l.Close())
		}
		if free {
			ts.Setenv(args[0], fmt.Sprint(start))
			return
		}
	}
	ts.Fatalf("there are no free ports")
}

// expand replaces $VARIABLES in a file.
func expand(ts *testscript.TestScript, _ bool, args []string) {
	ts.Check(os.WriteFile(ts.MkAbs(args[0]), []byte(os.Expand(ts.ReadFile(args[0]), ts.Getenv)), 0o644))
}

// waitOps waits until a history that is being written holds so many ops:
// waitops FILE N.
func waitOps(ts *testscript.TestScript, neg bool, args []string) {
	var want int
	if _, err := fmt.Sscan(args[1], &want); neg || err != nil {
		ts.Fatalf("usage: waitops FILE N")
	}
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if countOps(ts.MkAbs(args[0])) >= want {
			return
		}
	}
	ts.Fatalf("%s doesn't come to hold %d ops", args[0], want)
}

func countOps(path string) (ops int) {
	r, err := history.Open(path)
	if err != nil {
		return 0
	}
	defer r.Close()
	for {
		record, err := r.Next()
		if err != nil {
			return ops
		}
		if record.Op != nil {
			ops++
		}
	}
}

// cutFile cuts some bytes off a file's end, as a crash does: cutfile FILE N.
func cutFile(ts *testscript.TestScript, neg bool, args []string) {
	var n int64
	if _, err := fmt.Sscan(args[1], &n); neg || err != nil {
		ts.Fatalf("usage: cutfile FILE N")
	}
	path := ts.MkAbs(args[0])
	info, err := os.Stat(path)
	ts.Check(err)
	ts.Check(os.Truncate(path, info.Size()-n))
}

// killShard kills one of the shards that work in the script's directory with
// SIGKILL, or waits until there is none: killshard, ! killshard.
func killShard(ts *testscript.TestScript, neg bool, _ []string) {
	for deadline := time.Now().Add(20 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		paths, err := filepath.Glob("/proc/[0-9]*/cwd")
		ts.Check(err)
		found := false
		for _, path := range paths {
			dir, err := os.Readlink(path)
			command, err2 := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
			if err != nil || err2 != nil || dir != ts.Getenv("WORK") || !bytes.HasSuffix(command, []byte("\x00shard\x00")) {
				continue
			}
			found = true
			if !neg {
				pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
				ts.Check(err)
				p, err := os.FindProcess(pid)
				ts.Check(err)
				ts.Check(p.Kill())
				return
			}
		}
		if neg && !found {
			return
		}
	}
	ts.Fatalf("waited in vain")
}

func untilInterrupted() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	<-ctx.Done()
}

// natsServer is a NATS server with JetStream: natsserver DIR ADDRFILE.
func natsServer() {
	s, err := queue.Serve(queue.ServerOptions{Dir: os.Args[1], Listen: "127.0.0.1:0", Token: os.Getenv("NATS_TOKEN")})
	if err == nil {
		err = os.WriteFile(os.Args[2], []byte(s.URL()), 0o644)
	}
	if err != nil {
		panic(err)
	}
	untilInterrupted()
	s.Close()
}

// secureNATS is one that wants credentials and a client's certificate. What its
// clients need is in DIR, and the secrets of it, a line each: securenats DIR
// ADDRFILE SECRETS.
func secureNATS() {
	s, err := natstest.Start(os.Args[1])
	if err == nil {
		err = errors.Join(os.WriteFile(os.Args[3], []byte(strings.Join(s.Secrets, "\n")), 0o600), os.WriteFile(os.Args[2], []byte(s.URL), 0o644))
	}
	if err != nil {
		panic(err)
	}
	untilInterrupted()
	s.Close()
}

// fakeServer is a server that knows the right answers, since it plays the same
// sessions itself, and gets some wrong on purpose.
func fakeServer() {
	var f fake
	var plan workload.Plan
	flag.StringVar(&plan.Kind, "kind", "agent", "")
	flag.IntVar(&plan.Sessions, "sessions", 8, "")
	flag.IntVar(&plan.Rounds, "rounds", 0, "")
	flag.IntVar(&plan.ContextLines, "context-lines", 0, "")
	flag.StringVar(&f.fault, "fault", "", "")
	flag.Int64Var(&f.every, "every", 4, "the fault hits each so many requests")
	flag.Int64Var(&f.weak, "weak", 0, "each so many replies has a wrong argument, whatever the settings and the load")
	flag.Int64Var(&f.above, "above", 0, "the fault hits a thirtieth as often while no more requests than that are open")
	flag.BoolVar(&f.always, "always", false, "also when a request is alone")
	// Long beside what a busy client takes between two requests: else too few are open at once.
	flag.DurationVar(&f.delay, "delay", 60*time.Millisecond, "before each reply")
	addrFile := flag.String("addr-file", "addr", "")
	listen := flag.String("listen", "127.0.0.1:0", "")
	flag.Func("set", "neutral settings; a fault then needs a=on and b=on", func(name string) error { f.set = append(f.set, name); return nil })
	flag.CommandLine.Parse(os.Args[1:])
	f.plan = plan
	if f.set != nil && (!slices.Contains(f.set, "a=on") || !slices.Contains(f.set, "b=on")) {
		f.fault = ""
	}

	l, err := net.Listen("tcp", *listen)
	if err != nil {
		panic(err)
	}
	if err := os.WriteFile(*addrFile, []byte("http://"+l.Addr().String()), 0o644); err != nil {
		panic(err)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	s := &http.Server{Handler: &f}
	go s.Serve(l)
	<-ctx.Done()
}

// wrongValue is what a weak model gets wrong.
var wrongValue = regexp.MustCompile(`:\s*"[^"]*"`)

type fake struct {
	fault   string
	every   int64
	weak    int64
	above   int64
	always  bool
	delay   time.Duration
	running atomic.Int64
	served  atomic.Int64
	set     []string
	plan    workload.Plan

	mu      sync.Mutex
	answers map[int64]map[[32]byte]*openai.Reply // by the request's seed
	canary  string                               // of the first request
}

// ownTag finds a session's canary in its requests. A run's key isn't known
// here, so prompts and answers are known with anyTag in its place.
var ownTag = regexp.MustCompile(`Your tag is ([a-z0-9]{12})`)

const anyTag = "............"

// messageKey names a request's prompt, and returns its canary.
func messageKey(r *openai.ChatRequest) (key [32]byte, tag string) {
	b, err := json.Marshal(r.Messages)
	if err != nil {
		panic(err)
	}
	if m := ownTag.FindSubmatch(b); m != nil {
		tag = string(m[1])
		b = bytes.ReplaceAll(b, m[1], []byte(anyTag))
	}
	return sha256.Sum256(b), tag
}

// withTag returns a reply with one text in the place of another.
func withTag(reply *openai.Reply, from, to string) *openai.Reply {
	if from == "" || to == "" {
		return reply
	}
	r := *reply
	r.Content = strings.ReplaceAll(r.Content, from, to)
	r.ToolCalls = slices.Clone(r.ToolCalls)
	for i := range r.ToolCalls {
		f := &r.ToolCalls[i].Function
		f.Arguments = strings.ReplaceAll(f.Arguments, from, to)
	}
	return &r
}

// answer is the right reply to a request; nil when it is of no session.
func (f *fake) answer(r *openai.ChatRequest) *openai.Reply {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.Seed == nil {
		return nil
	}
	if f.answers[*r.Seed] == nil {
		f.learn(*r.Seed)
	}
	key, tag := messageKey(r)
	if f.canary == "" {
		f.canary = tag
	}
	reply := f.answers[*r.Seed][key]
	if reply == nil {
		return nil
	}
	return withTag(reply, anyTag, tag)
}

// learn plays every session of a seed and keeps the right answer to each
// prompt.
func (f *fake) learn(seed int64) {
	p := f.plan
	p.Seed = uint64(seed)
	w, err := workload.New(p)
	if err != nil {
		panic(err)
	}
	if f.answers == nil {
		f.answers = map[int64]map[[32]byte]*openai.Reply{}
	}
	answers := map[[32]byte]*openai.Reply{}
	for i := range p.Sessions + 8 {
		for _, alone := range []bool{false, true} {
			s := w.Session(i, alone)
			var reply *openai.Reply
			for {
				turn, ok := s.Next(reply)
				if !ok {
					break
				}
				reply = workload.RightReply(turn)
				key, tag := messageKey(&turn.Request)
				answers[key] = withTag(reply, tag, anyTag)
			}
		}
	}
	f.answers[seed] = answers
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/v1/models":
		fmt.Fprint(w, `{"object":"list","data":[{"id":"fake-model","owned_by":"fake"}]}`)
	case "/health":
	case "/v1/chat/completions":
		f.chat(w, r)
	default:
		http.NotFound(w, r)
	}
}

func (f *fake) chat(w http.ResponseWriter, r *http.Request) {
	running := f.running.Add(1)
	defer f.running.Add(-1)
	if r.Header.Get("Authorization") == "Bearer wrong" {
		http.Error(w, `{"error":{"message":"Incorrect API key provided","type":"invalid_request_error"}}`, http.StatusUnauthorized)
		return
	}
	var req openai.ChatRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	answer := openai.Reply{Content: "pong", FinishReason: "stop"}
	if known := f.answer(&req); known != nil {
		answer = *known
	}
	time.Sleep(f.delay) // a batch forms
	n := f.served.Add(1)
	if f.weak > 0 && n%f.weak == 0 && len(answer.ToolCalls) > 0 {
		calls := slices.Clone(answer.ToolCalls)
		calls[0].Function.Arguments = wrongValue.ReplaceAllString(calls[0].Function.Arguments, `:"wrong"`)
		answer.ToolCalls = calls
	}
	every := f.every
	if running <= f.above {
		every *= 30
	}
	if f.fault != "" && n%every == 0 && (running > 1 || f.always) {
		switch f.fault {
		case "salad":
			answer = openai.Reply{Content: `<invoke ship " , carrier " V V V` + "\x1b[2J", FinishReason: "stop"}
		case "leak":
			answer = openai.Reply{Content: "Your tag is " + f.canary, FinishReason: "stop"}
		case "silent":
			answer = openai.Reply{FinishReason: "stop"}
		case "die":
			os.Exit(3)
		case "error":
			http.Error(w, `{"error":{"message":"CUDA error: an illegal memory access was encountered","type":"server_error"}}`, http.StatusInternalServerError)
			return
		}
	}
	f.stream(w, &answer)
}

func (f *fake) stream(w http.ResponseWriter, a *openai.Reply) {
	w.Header().Set("Content-Type", "text/event-stream")
	send := func(delta map[string]any, finish any) {
		b, err := json.Marshal(map[string]any{
			"id": "x", "object": "chat.completion.chunk", "model": "fake-model",
			"choices": []any{map[string]any{"index": 0, "delta": delta, "finish_reason": finish}},
		})
		if err != nil {
			panic(err)
		}
		fmt.Fprintf(w, "data: %s\n\n", b)
		w.(http.Flusher).Flush()
	}
	send(map[string]any{"role": "assistant", "content": ""}, nil)
	for piece := range strings.SplitAfterSeq(a.Content, " ") {
		send(map[string]any{"content": piece}, nil)
	}
	for i, c := range a.ToolCalls {
		send(map[string]any{"tool_calls": []any{map[string]any{"index": i, "id": c.ID, "type": "function", "function": map[string]any{"name": c.Function.Name, "arguments": c.Function.Arguments}}}}, nil)
	}
	send(map[string]any{}, a.FinishReason)
	fmt.Fprint(w, "data: [DONE]\n\n")
}

func TestExitCodes(t *testing.T) {
	tests := []struct {
		name string
		args []string
		want int
	}{
		{"no command", nil, exitUsage},
		{"unknown command", []string{"rum"}, exitUsage},
		{"no server", []string{"run"}, exitUsage},
		{"help", []string{"--help"}, exitClean},
		{"a page of 24 tokens", []string{"lab", "serve", "--page-size", "24"}, exitUsage},
		{"the example of amplify", []string{"amplify", "--dry-run", "../../examples/amplify"}, exitClean},
		{"nothing listens", []string{"run", "--base-url", "http://127.0.0.1:1"}, exitInconclusive},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			t.Setenv("OPENAI_BASE_URL", "")
			if got := run(tt.args); got != tt.want {
				t.Errorf("exit code %d, want %d", got, tt.want)
			}
		})
	}
}

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// startLab serves until the test's end and returns the URL.
func startLab(tb testing.TB, flags labServe) string {
	tb.Helper()
	flags.Host, flags.AddrFile = "127.0.0.1", filepath.Join(tb.TempDir(), "addr")
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- flags.Run(ctx, &streams{out: io.Discard, err: tb.Output()}) }()
	tb.Cleanup(func() {
		stop()
		if err := <-done; err != nil {
			tb.Error(err)
		}
	})
	for range 2000 {
		if b, err := os.ReadFile(flags.AddrFile); err == nil && len(b) > 0 {
			return string(b)
		}
		select {
		case err := <-done:
			done <- nil
			tb.Fatalf("the lab doesn't start: %v", err)
		case <-time.After(5 * time.Millisecond):
		}
	}
	tb.Fatal("the lab doesn't start in 10 seconds")
	return ""
}

func TestServePortTaken(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	address := l.Addr().(*net.TCPAddr)
	c := labServe{Host: "127.0.0.1", Port: address.Port}
	err = c.Run(t.Context(), &streams{out: io.Discard, err: t.Output()})
	want := fmt.Sprintf("listen on %s: another process does already; stop it, or give another --port (0 picks a free one)", address)
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

// TestServeDrains: a server that is told to stop lets streams come to their
// end and takes no new connections.
func TestServeDrains(t *testing.T) {
	url, process := labProcess(t, "--load-format", "dummy")
	var streams []io.ReadCloser
	for i := range 8 {
		body := fmt.Sprintf(`{"messages":[{"role":"user","content":"hi %d"}],"temperature":0,"max_tokens":300,"stream":true}`, i)
		resp, err := http.Post(url+"/v1/chat/completions", "application/json", strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		streams = append(streams, resp.Body) // it has begun
	}
	if err := process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	chunks := 0
	for _, s := range streams {
		b, err := io.ReadAll(s)
		chunks += strings.Count(string(b), "data: ")
		finished := strings.Contains(string(b), `"finish_reason":"stop"`) || strings.Contains(string(b), `"finish_reason":"length"`)
		if err != nil || !finished || !strings.HasSuffix(string(b), "data: [DONE]\n\n") {
			t.Errorf("%v %s", err, b)
		}
	}
	t.Logf("%d chunks", chunks)
	if resp, err := http.Get(url + "/health"); err == nil {
		resp.Body.Close()
		t.Error("it takes another connection")
	}
}

// TestOpenAIPython runs testdata/openai/client.py with the Python that
// CULPRIT_OPENAI_PYTHON names and that has the package openai: see the
// Makefile.
func TestOpenAIPython(t *testing.T) {
	python := os.Getenv("CULPRIT_OPENAI_PYTHON")
	if python == "" {
		t.Skip("run by make test-openai-python")
	}
	w, err := workload.New(workload.Plan{Kind: "agent", Seed: 9001, ContextLines: 8})
	if err != nil {
		t.Fatal(err)
	}
	type toolCase struct {
		Request openai.ChatRequest    `json:"request"`
		Right   []openai.FunctionCall `json:"right"`
	}
	var cases []toolCase
	for i := range 4 {
		session := w.Session(i, false)
		var reply *openai.Reply
		for {
			turn, ok := session.Next(reply)
			if !ok {
				break
			}
			reply = workload.RightReply(turn)
			c := toolCase{Request: turn.Request, Right: []openai.FunctionCall{}}
			for _, call := range reply.ToolCalls {
				c.Right = append(c.Right, call.Function)
			}
			cases = append(cases, c)
		}
	}
	file := filepath.Join(t.TempDir(), "cases.json")
	b, err := json.Marshal(cases)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, b, 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.CommandContext(t.Context(), python, "testdata/openai/client.py", startLab(t, labServe{ServedModelName: "lab"}), file).CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
}

package main

import (
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// labProcess serves in a process of its own, so that its memory can be told
// from the client's.
func labProcess(tb testing.TB, flags ...string) (url string, process *os.Process) {
	tb.Helper()
	self, err := os.Executable()
	if err != nil {
		tb.Fatal(err)
	}
	file := filepath.Join(tb.TempDir(), "addr")
	cmd := exec.Command(self)
	cmd.Args = append([]string{"culprit", "lab", "serve", "--port", "0", "--addr-file", file}, flags...) // see TestMain
	cmd.Stderr = tb.Output()
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			tb.Error(err)
		}
	})
	for range 2000 {
		if b, err := os.ReadFile(file); err == nil && len(b) > 0 {
			return string(b), cmd.Process
		}
		time.Sleep(5 * time.Millisecond)
	}
	tb.Fatal("the lab doesn't start in 10 seconds")
	return "", nil
}

// peakMemory is the most that a process had resident, in bytes.
func peakMemory(tb testing.TB, p *os.Process) float64 {
	tb.Helper()
	b, err := os.ReadFile("/proc/" + strconv.Itoa(p.Pid) + "/status")
	if err != nil {
		return 0 // not Linux
	}
	_, after, _ := strings.Cut(string(b), "VmHWM:")
	kilobytes, err := strconv.Atoi(strings.Fields(after)[0])
	if err != nil {
		tb.Fatal(err)
	}
	return float64(kilobytes) * 1024
}

// tally counts what comes back. Ops may come from several goroutines.
type tally struct {
	sync.Mutex
	tokens, cached, prompt, calls, right int
	errors                               []string
}

func (t *tally) Op(o *history.Op) error {
	t.Lock()
	defer t.Unlock()
	var a openai.Assembler
	for _, c := range o.Chunks {
		a.Add(c.Data)
	}
	r := a.Reply()
	if u := r.Usage; u != nil {
		t.tokens, t.prompt, t.cached = t.tokens+u.CompletionTokens, t.prompt+u.PromptTokens, t.cached+u.CachedTokens
	}
	if o.Outcome != history.OK {
		t.errors = append(t.errors, o.Error)
	}
	if o.Expect.Call == nil {
		return nil
	}
	t.calls++
	if len(r.ToolCalls) == 1 {
		var arguments map[string]string
		f := r.ToolCalls[0].Function
		if json.Unmarshal([]byte(f.Arguments), &arguments) == nil && f.Name == o.Expect.Call.Name && maps.Equal(arguments, o.Expect.Call.Arguments) {
			t.right++
		}
	}
	return nil
}

func (*tally) Event(*history.Event) error { return nil }

// BenchmarkAgent320 plays 80 sessions of 4 rounds at once, 24 lines of facts
// each, against a lab that begins with an empty cache.
func BenchmarkAgent320(b *testing.B) {
	w, err := workload.New(workload.Plan{Kind: "agent", Seed: 1, Sessions: 80, Rounds: 4, ContextLines: 24})
	if err != nil {
		b.Fatal(err)
	}
	url, process := labProcess(b)
	server := target.Server{BaseURL: url, Client: http.DefaultClient}
	tokens, last := 0, &tally{}
	for b.Loop() {
		if server.FlushCache(b.Context()) == "" {
			b.Fatal("the cache wasn't flushed")
		}
		t := tally{}
		result, err := load.Run(b.Context(), load.Options{BaseURL: url, Workload: w, Sessions: 80, Concurrency: 80, History: &t})
		if err != nil || result.Ops.OK != 320 {
			b.Fatalf("%+v %v %.3q", result, err, t.errors)
		}
		tokens, last = tokens+t.tokens, &t
	}
	b.ReportMetric(float64(tokens)/b.Elapsed().Seconds(), "tokens/s")
	b.ReportMetric(float64(last.right)/float64(last.calls), "right-calls/call")
	b.ReportMetric(float64(last.cached)/float64(last.prompt), "cached/prompt")
	b.ReportMetric(peakMemory(b, process)/1e6, "server-MB")
}

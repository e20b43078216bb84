package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// startProcess runs "culprit lab" in a process of its own until the test's end.
// kill ends it at once.
func startProcess(t *testing.T, args ...string) (url string, kill func()) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "addr")
	cmd := exec.Command(self)
	cmd.Args = append(append([]string{"culprit", "lab"}, args...), "--port", "0", "--addr-file", file) // see TestMain
	cmd.Stderr = t.Output()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	killed := false
	kill = func() {
		killed = true
		cmd.Process.Kill()
		cmd.Wait()
	}
	t.Cleanup(func() {
		if killed {
			return
		}
		cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("%v: %v", args, err)
		}
	})
	for range 4000 {
		if b, err := os.ReadFile(file); err == nil && len(b) > 0 {
			return string(b), kill
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("%v: it doesn't start", args)
	return "", nil
}

// ask sends a greedy completion and returns the text, or why there is none.
func ask(url string, i, words, maxTokens int, stream bool) (string, error) {
	prompt := strings.Repeat(fmt.Sprintf("ship %d ", i), words)
	body := fmt.Sprintf(`{"prompt":%q,"temperature":0,"max_tokens":%d,"stream":%t}`, prompt, maxTokens, stream)
	resp, err := http.Post(url+"/v1/completions", "application/json", strings.NewReader(body))
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		return "", fmt.Errorf("%d %s %w", resp.StatusCode, b, err)
	}
	if stream {
		if !strings.HasSuffix(string(b), "data: [DONE]\n\n") || strings.Contains(string(b), `"error"`) {
			return "", fmt.Errorf("it broke off: %s", b[max(0, len(b)-200):])
		}
		return "", nil
	}
	var reply struct{ Choices []struct{ Text string } }
	if err := json.Unmarshal(b, &reply); err != nil || len(reply.Choices) != 1 {
		return "", fmt.Errorf("%s", b)
	}
	return reply.Choices[0].Text, nil
}

// usedPages asks a server how many pages are in use, when all prefixes are
// forgotten.
func usedPages(t *testing.T, url string) string {
	t.Helper()
	for range 400 {
		resp, err := http.Post(url+"/flush_cache", "", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp, err = http.Get(url + "/metrics"); err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		_, rest, _ := strings.Cut(string(b), `culprit_lab_pages{state="used"} `)
		if used, _, _ := strings.Cut(rest, "\n"); used == "0" {
			return used
		}
		time.Sleep(10 * time.Millisecond)
	}
	return "some"
}

func TestRouter(t *testing.T) {
	flags := []string{"--load-format", "dummy", "--random-seed", "1"}
	single, _ := startProcess(t, append([]string{"serve"}, flags...)...)
	slow := append(flags, "--disaggregation-bandwidth", "4", "--disaggregation-timeout", "5s")
	prefill, killPrefill := startProcess(t, append([]string{"serve", "--disaggregation-mode", "prefill"}, slow...)...)
	decode, killDecode := startProcess(t, append([]string{"serve", "--disaggregation-mode", "decode"}, slow...)...)
	router, _ := startProcess(t, "router", "--prefill", prefill, "--decode", decode)

	want := make([]string, 12)
	for i := range want {
		var err error
		if want[i], err = ask(single, i, 3+i, 20, false); err != nil {
			t.Fatal(err)
		}
	}
	var clients sync.WaitGroup
	for i := range want {
		clients.Go(func() {
			if got, err := ask(router, i, 3+i, 20, false); err != nil || got != want[i] {
				t.Errorf("request %d: %q, want %q: %v", i, got, want[i], err)
			}
			if _, err := ask(router, i, 3+i, 20, true); err != nil {
				t.Errorf("request %d, streamed: %v", i, err)
			}
		})
	}
	clients.Wait()
	for _, path := range []string{"/health", "/health_generate", "/v1/models", "/server_info", "/metrics"} {
		resp, err := http.Get(router + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			t.Errorf("%s: %d", path, resp.StatusCode)
		}
	}
	if _, err := ask(router, 1, 5000, 20, false); err == nil || !strings.Contains(err.Error(), "400") {
		t.Errorf("too long a prompt: %v", err)
	}

	// The prefill server dies while it sends: what was decoding goes on, the
	// rest fails soon, and the decode server has all its pages.
	var ended sync.Mutex
	failed, right := 0, 0
	during := func(kill func()) time.Duration {
		failed, right = 0, 0
		for i := range 16 {
			clients.Go(func() {
				_, err := ask(router, i, 100, 100, i%2 == 0)
				ended.Lock()
				defer ended.Unlock()
				if err != nil {
					failed++
				} else {
					right++
				}
			})
		}
		time.Sleep(500 * time.Millisecond)
		kill()
		start := time.Now()
		clients.Wait()
		return time.Since(start)
	}
	took := during(killPrefill)
	t.Logf("the prefill server was killed: %d failed, %d came, after %v", failed, right, took)
	if failed == 0 || took > 20*time.Second {
		t.Error("they should have failed soon")
	}
	if used := usedPages(t, decode); used != "0" {
		t.Errorf("%s pages are in use", used)
	}

	prefill2, _ := startProcess(t, append([]string{"serve", "--disaggregation-mode", "prefill"}, slow...)...)
	router, _ = startProcess(t, "router", "--prefill", prefill2, "--decode", decode)
	if got, err := ask(router, 0, 3, 20, false); err != nil || got != want[0] {
		t.Errorf("with a new prefill server: %q, %v", got, err)
	}
	took = during(killDecode)
	t.Logf("the decode server was killed: %d failed, %d came, after %v", failed, right, took)
	if failed == 0 || took > 20*time.Second {
		t.Error("they should have failed soon")
	}
	if used := usedPages(t, prefill2); used != "0" {
		t.Errorf("%s pages are in use", used)
	}
}

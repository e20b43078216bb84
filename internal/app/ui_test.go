package app

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/search"
)

const liveCase = `
target:
  processes: [{command: [server, "{{graph}}", "--dtype={{dtype}}"]}]
  base_url: http://127.0.0.1:1
factors:
  graph: {suspect: [], safe: [--no-graph]}
  dtype: {suspect: bf16, safe: fp8}
workload: {kind: agent, sessions: 8}
`

// liveHunt is a hunt that has begun, with its page served.
func liveHunt(t *testing.T) *livePage {
	t.Helper()
	dir := t.TempDir()
	path, err := WriteCase(dir, liveCase)
	if err != nil {
		t.Fatal(err)
	}
	c, err := experiment.ReadCase(path)
	if err != nil {
		t.Fatal(err)
	}
	b, err := newBook(t.Context(), c, dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { b.Close() })
	p, err := serveLive(t.Context(), "127.0.0.1:0", c, dir, "culprit", b)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// writeTrial adds a trial to a hunt, as the hunt would.
func writeTrial(t *testing.T, dir string, n int, why string) {
	t.Helper()
	arm := design.Arm{"graph": "suspect", "dtype": "bf16"}
	trial := experiment.Trial{
		Dir: fmt.Sprintf("runs/%04d-%s", n, arm.Hash()), Proposal: search.Proposal{Arm: arm, Launch: true, Phase: search.Reproduce, Why: why},
		Observation: &search.Observation{Outcome: search.Ran, Requests: 160},
	}
	path := filepath.Join(dir, trial.Dir)
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := experiment.WriteJSON(filepath.Join(path, experiment.TrialFile), trial); err != nil {
		t.Fatal(err)
	}
}

func get(t *testing.T, url, host string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	b, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response.StatusCode, string(b)
}

// nextEvent reads events up to one of that name, and returns its text.
func nextEvent(t *testing.T, lines *bufio.Scanner, name string) (text string) {
	t.Helper()
	for lines.Scan() {
		if lines.Text() != "event: "+name {
			continue
		}
		lines.Scan()
		if err := json.Unmarshal([]byte(strings.TrimPrefix(lines.Text(), "data: ")), &text); err != nil {
			t.Fatal(err)
		}
		return text
	}
	t.Fatalf("no event %q: %v", name, lines.Err())
	return ""
}

func TestLivePage(t *testing.T) {
	p := liveHunt(t)
	if code, page := get(t, p.URL, ""); code != http.StatusOK || !strings.Contains(page, "HUNTING") || !strings.Contains(page, "<script>") || !strings.Contains(page, `connect-src &#39;self&#39;`) {
		t.Errorf("the page: %d, %d bytes", code, len(page))
	}
	writeTrial(t, p.dir, 1, "does it fail at all")
	for _, tt := range []struct {
		name, path, host string
		want             int
	}{
		{"by a name from elsewhere", "", "evil.example:80", http.StatusForbidden},
		{"by the name of this machine", "", "localhost:1", http.StatusOK},
		{"a file of the hunt", "case.yaml", "", http.StatusOK},
		{"a file elsewhere", "..%2f..%2fetc/passwd", "", http.StatusNotFound},
		{"a file that isn't there", "x", "", http.StatusNotFound},
	} {
		if code, _ := get(t, p.URL+tt.path, tt.host); code != tt.want {
			t.Errorf("%s: %d, want %d", tt.name, code, tt.want)
		}
	}

	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.URL+"events", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 4<<20)
	nextEvent(t, lines, "page")
	p.Now("Trial 2: <everything>.\nSecond line.")
	for nextEvent(t, lines, "now") != "Trial 2: <everything>.\nSecond line." {
	}
	p.Refresh()
	for !strings.Contains(nextEvent(t, lines, "page"), "does it fail at all") {
	}
	if err := experiment.WriteJSON(filepath.Join(p.dir, experiment.FindingFile), experiment.Result{Finding: search.Finding{Status: search.NotReproduced, Text: "clean"}}); err != nil {
		t.Fatal(err)
	}
	closed := make(chan struct{})
	go func() {
		defer close(closed)
		p.Close("The hunt has ended.")
	}()
	if page := nextEvent(t, lines, "page"); !strings.Contains(page, "NOT REPRODUCED") {
		t.Errorf("the last page isn't of the end")
	}
	if got := nextEvent(t, lines, "end"); got != "The hunt has ended." {
		t.Errorf("the end is %q", got)
	}
	<-closed
	if _, err := http.Get(p.URL); err == nil { //nolint:bodyclose // there is none
		t.Error("it is still served")
	}
}

// A reader that takes nothing doesn't keep a hunt from ending.
func TestLivePageWithStuckReader(t *testing.T) {
	p := liveHunt(t)
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, p.URL+"events", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	p.Close("ended")
}

func TestLivePageAddress(t *testing.T) {
	p := liveHunt(t)
	defer p.Close("")
	_, err := Hunt(t.Context(), HuntOptions{Case: p.dir, UI: strings.TrimSuffix(strings.TrimPrefix(p.URL, "http://"), "/"), Launches: 1}, Output{Progress: term.NewScreen(io.Discard)})
	if err == nil || !strings.Contains(err.Error(), "--ui: ") || !strings.Contains(err.Error(), "address already in use") {
		t.Errorf("an address that is taken: %v", err)
	}
	var none *livePage
	none.Refresh()
	none.Now("")
	none.Close("")
}

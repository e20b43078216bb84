package target

import (
	"context"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
)

func TestParseMetrics(t *testing.T) {
	tests := []struct {
		name, text string
		want       map[string]float64
		err        string
	}{
		{"all of it", `# HELP sglang:x_total Things.
# TYPE sglang:x_total counter
sglang:x_total{model="a\"}b",rank="0"} 3.0
sglang:x_total{rank="1",model="a"} 4e2 1395066363000

free 7
nan NaN
inf{} +Inf
empty{} 1
ex_total{a="b",} 2 # {trace="x"} 1
`, map[string]float64{`sglang:x_total{model="a\"}b",rank="0"}`: 3, `sglang:x_total{model="a",rank="1"}`: 400, "free": 7, "empty": 1, `ex_total{a="b"}`: 2}, ""},
		{"nothing", "", map[string]float64{}, ""},
		{"a page", "<html>\n<p>hello</p>", nil, "line 1"},
		{"no value", "x\n", nil, "no name and value"},
		{"no number", "x y", nil, "no number"},
		{"label without end", `x{a="b 1`, nil, "doesn't end"},
		{"labels without end", `x{a="b"`, nil, "NAME="},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseMetrics([]byte(tt.text))
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want one with %q", err, tt.err)
				}
				return
			}
			if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
				t.Errorf("%v %s", err, diff)
			}
		})
	}
}

func TestRealMetrics(t *testing.T) {
	for engine, want := range map[string]string{"vllm": "vllm:request_success_total{", "llama": "llamacpp:requests_processing"} {
		b, err := os.ReadFile("../openai/testdata/transcripts/" + engine + "-metrics.http")
		if err != nil {
			t.Fatal(err)
		}
		_, body, _ := strings.Cut(strings.ReplaceAll(string(b), "\r\n", "\n"), "\n\n")
		values, err := ParseMetrics([]byte(body))
		if err != nil {
			t.Errorf("%s: %v", engine, err)
		}
		found := false
		for series := range values {
			found = found || strings.HasPrefix(series, want)
		}
		if !found {
			t.Errorf("%s: none of %d series is %s", engine, len(values), want)
		}
	}
}

func FuzzParseMetrics(f *testing.F) {
	f.Add([]byte("a{b=\"c\\\"\",d=\"\"} 1 2\n# x\nb 2"))
	f.Fuzz(func(t *testing.T, b []byte) {
		values, err := ParseMetrics(b)
		if err != nil {
			return
		}
		var m Movement
		m.Add(&history.Event{Kind: history.Metrics, Values: values})
		for name := range m.Values() {
			if name != identifier(name) {
				t.Errorf("%q is no name", name)
			}
		}
	})
}

// answerer is a server that has one answer after another.
type answerer []string

func (a *answerer) RoundTrip(*http.Request) (*http.Response, error) {
	text := (*a)[0]
	if len(*a) > 1 {
		*a = (*a)[1:]
	}
	if text == "down" {
		return nil, errors.New("connection refused")
	}
	status := http.StatusOK
	if text == "404" {
		status = http.StatusNotFound
	}
	return &http.Response{StatusCode: status, Status: http.StatusText(status), Body: io.NopCloser(strings.NewReader(text))}, nil
}

func TestScraper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := answerer{
			"x_total 1\ny 1\nx_bucket{le=\"1\"} 3", "x_total 1\ny 1", "x_total 3\ny 1", "down", "down", "x_total 3\ny 9", "x_total 3\ny 9",
			"x_total 4\ny 9", // when ctx has ended
		}
		ctx, cancel := context.WithTimeout(t.Context(), 6500*time.Millisecond)
		defer cancel()
		var got []history.Event
		s := Scraper{
			Server: &Server{BaseURL: "http://x", Client: &http.Client{Transport: &answers}}, Start: time.Now(),
			Emit: func(e *history.Event) error { got = append(got, *e); return nil },
		}
		if err := s.Run(ctx); err != nil {
			t.Fatal(err)
		}
		want := []history.Event{
			{Kind: history.Metrics, Name: "/metrics", Values: map[string]float64{"x_total": 1, "y": 1}},
			{Kind: history.Metrics, Name: "/metrics", At: 2 * time.Second, Values: map[string]float64{"x_total": 3}},
			{Kind: history.Metrics, Name: "/metrics", At: 3 * time.Second, Text: "connection refused"},
			{Kind: history.Metrics, Name: "/metrics", At: 5 * time.Second, Values: map[string]float64{"y": 9}},
			{Kind: history.Metrics, Name: "/metrics", At: 6500 * time.Millisecond, Values: map[string]float64{"x_total": 4}},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

func TestScraperOfNoMetrics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		answers := answerer{"404"}
		n := 0
		s := Scraper{
			Server: &Server{BaseURL: "http://x", Client: &http.Client{Transport: &answers}},
			Emit:   func(*history.Event) error { n++; return nil },
		}
		if err := s.Run(t.Context()); err != nil || n != 1 {
			t.Errorf("%d events, %v, want one and its end", n, err)
		}
	})
}

func TestRequirements(t *testing.T) {
	var m Movement
	for _, values := range []map[string]float64{
		{`sglang:replays_total{rank="0"}`: 100, `sglang:replays_total{rank="1"}`: 50, "sglang:running": 3, "vllm:twin_total": 1, "other:twin_total": 1, "culprit_lab_hits_total": 0, `q{a="1"}`: 2, `q{a="2"}`: 5},
		{`sglang:replays_total{rank="0"}`: 110, "sglang:running": 80, "culprit_lab_hits_total": 4, `q{a="1"}`: 4},
		{`sglang:replays_total{rank="1"}`: 7, "sglang:running": 2, `q{a="2"}`: 0}, // it began anew
	} {
		m.Add(&history.Event{Kind: history.Metrics, Values: values})
	}
	m.Add(&history.Event{Kind: history.Log, Name: "wedge", Values: map[string]float64{linesKey: 2}})
	m.Add(&history.Event{Kind: history.Log, Name: "wedge", Values: map[string]float64{linesKey: 3}})
	tests := []struct {
		name, text string
		met        bool
		why        string
	}{
		{"counter", "replays == 17", true, ""},
		{"full name", "sglang_replays_total > 0", true, ""},
		{"the lab's", "hits == 4", true, ""},
		{"gauge's highest", "running == 80", true, ""},
		{"gauge over labels", "q == 9", true, ""},
		{"not met", "replays > 100", false, "`replays > 100` doesn't hold: replays is 17"},
		{"logs", "logs.wedge == 5", true, ""},
		{"logs without a line", "logs.none == 0", true, ""},
		{"logs not met", "logs.wedge < 1", false, "logs.wedge is 5"},
		{"two of a name", "twin > 0", false, `no metric "twin"`},
		{"unknown", "replay > 0", false, `nearest: "replays"`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r, err := CompileRequirement(tt.text)
			if err != nil {
				t.Fatal(err)
			}
			ok, why, err := r.Met(&m)
			if err != nil {
				why = err.Error()
			}
			if ok != tt.met || !strings.Contains(why, tt.why) {
				t.Errorf("met %v (%s), want %v with %q", ok, why, tt.met, tt.why)
			}
		})
	}
	r, err := CompileRequirement("x > 0")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Met(&Movement{}); err == nil || !strings.Contains(err.Error(), "no metrics") {
		t.Errorf("without metrics: %v", err)
	}
	if _, err := CompileRequirement("x >"); err == nil {
		t.Error("half an expression is taken")
	}
}

func TestFollower(t *testing.T) {
	dir := t.TempDir()
	a, b := filepath.Join(dir, "a.log"), filepath.Join(dir, "b.log")
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 5500*time.Millisecond)
		defer cancel()
		write := func(path, text string) {
			f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
			if err == nil {
				_, err = f.WriteString(text)
				f.Close()
			}
			if err != nil {
				t.Error(err)
			}
		}
		write(a, "error of an earlier run\n")
		go func() {
			time.Sleep(100 * time.Millisecond)
			write(a, "waiting for input: timeout key=sk-abcdefghijklmnopqrst\nfine\nwaiting for inp")
			time.Sleep(1400 * time.Millisecond)
			write(a, "ut: timeout\n")
			write(b, strings.Repeat("x", 2*lineLimit)+"\nerror 1\nerror 2\n")
			time.Sleep(time.Second)
			if err := os.Truncate(a, 0); err != nil {
				t.Error(err)
			}
			write(a, "error 3\n")
			time.Sleep(2900 * time.Millisecond)
			write(b, "error at the end")
		}()
		var got []history.Event
		f := Follower{
			Files: []string{a, b}, Start: time.Now(),
			Patterns: map[string]*regexp.Regexp{"wedge": regexp.MustCompile("input.*timeout"), "error": regexp.MustCompile("error")},
			Emit:     func(e *history.Event) error { got = append(got, *e); return nil },
		}
		if err := f.Run(ctx); err != nil {
			t.Fatal(err)
		}
		lines := func(n float64) map[string]float64 { return map[string]float64{"lines": n} }
		want := []history.Event{
			{Kind: history.Log, At: time.Second, Name: "wedge", Text: "waiting for input: timeout key=[redacted]", Values: lines(1)},
			{Kind: history.Log, At: 2 * time.Second, Name: "error", Text: "error 1", Values: lines(2)},
			{Kind: history.Log, At: 2 * time.Second, Name: "wedge", Text: "waiting for input: timeout", Values: lines(1)},
			{Kind: history.Log, At: 3 * time.Second, Name: "error", Text: "error 3", Values: lines(1)},
			{Kind: history.Log, At: 5500 * time.Millisecond, Name: "error", Text: "error at the end", Values: lines(1)},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

// A probe's count reads like the lab's counter of that name.
func TestRequireProbes(t *testing.T) {
	var m Movement
	m.Add(&history.Event{Kind: history.Probe, Values: map[string]float64{"index_k_stores": 0, "must:index_k_stores": 0}})
	m.Add(&history.Event{Kind: history.Probe, Values: map[string]float64{"index_k_stores": 7, `index_k_stores{store="fused"}`: 7}})
	for text, want := range map[string]bool{"index_k_stores == 7": true, "index_k_stores > 7": false} {
		r, err := CompileRequirement(text)
		if err != nil {
			t.Fatal(err)
		}
		if ok, why, err := r.Met(&m); ok != want || err != nil {
			t.Errorf("%s: %t %s %v", text, ok, why, err)
		}
	}
	r, err := CompileRequirement("copies == 0")
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Met(&m); err == nil {
		t.Error("a count that isn't evidence is taken for zero")
	}
}

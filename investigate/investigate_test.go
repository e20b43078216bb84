package investigate

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/target"
)

// scriptVariable tells this test's executable that it is an investigator, and of
// which kind.
const scriptVariable = "CULPRIT_INVESTIGATE_TEST_SCRIPT"

const goodAnswer = `I looked at everything.
{"claims": [{"name": "race", "statement": "it is a race", "predictions": ["rate(graph=safe) < 0.05"],
  "places": [{"file": "engine/a.py", "line": 2, "text": "reuse(buffer)"}, {"file": "engine/gone.py", "line": 1}]}]}
Thank you.`

func TestMain(m *testing.M) {
	switch os.Getenv(scriptVariable) {
	case "":
		os.Exit(m.Run())
	case "good":
		fmt.Println(goodAnswer)
	case "crash":
		fmt.Println(`{"claims": [{"statement": "half of it`)
		panic("boom")
	case "garbage":
		fmt.Println("I have no idea.\x1b[2J")
	case "flood":
		for range 3 {
			fmt.Println(strings.Repeat("x", answerLimit))
		}
	case "hang":
		fmt.Println(`{"claims": [{"statement": "said before the end"}]}`)
		time.Sleep(time.Hour)
	case "nothing":
	case "where":
		dir, _ := os.Getwd()
		entries, _ := os.ReadDir(".")
		fmt.Printf(`{"claims": [{"statement": "in %s, %d files, %d bytes of secret"}]}`, filepath.Base(dir), len(entries), len(os.Getenv("SECRET")))
	}
	os.Exit(0)
}

func script(kind string) Investigator {
	return &Command{Called: kind, Args: []string{os.Args[0]}, Env: []string{scriptVariable + "=" + kind}}
}

type panics struct{}

func (panics) Name() string                                        { return "panics" }
func (panics) Investigate(context.Context, string) ([]byte, error) { panic("inside") }

func source(t *testing.T) (dir string) {
	t.Helper()
	dir = filepath.Join(t.TempDir(), "engine")
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{"a.py": "def f():\n    reuse(buffer)\n    return 1\n", "sub/b.py": "x = 1\n", "c.bin": "reuse\x00"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func sources(t *testing.T, dirs []string, a *target.Attestation) *Sources {
	t.Helper()
	s, err := OpenSources(dirs, a)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

// Whatever the others do, each one's claims are there.
func TestOneCostsTheOthersNothing(t *testing.T) {
	t.Setenv("SECRET", "it is")
	kinds := []string{"good", "crash", "garbage", "flood", "nothing", "where"}
	var all []Investigator
	for _, k := range kinds {
		all = append(all, script(k))
	}
	all = append(all, panics{}, &Command{Called: "missing", Args: []string{filepath.Join(t.TempDir(), "nobody")}})
	results := Run(t.Context(), all, "look", Options{Timeout: time.Minute, Sources: sources(t, []string{source(t)}, nil)})
	by := map[string]Result{}
	for _, r := range results {
		by[r.Investigator] = r
	}
	want := []Claim{{Name: "race", Statement: "it is a race", Predictions: []string{"rate(graph=safe) < 0.05"}, Places: []Place{
		{File: "engine/a.py", Line: 2, Text: "reuse(buffer)"}, {File: "engine/gone.py", Line: 1, Wrong: "there is no file engine/gone.py"},
	}}}
	if d := cmp.Diff(want, by["good"].Claims); d != "" || by["good"].Error != "" {
		t.Errorf("good: %s (-want +got):\n%s", by["good"].Error, d)
	}
	for name, text := range map[string]string{
		"crash": "exit status 2", "garbage": `no JSON object with "claims"`, "flood": "wrote more than",
		"nothing": "answered nothing", "panics": "it crashed: inside", "missing": "nobody",
	} {
		if r := by[name]; !strings.Contains(r.Error, text) {
			t.Errorf("%s: %q, want %q", name, r.Error, text)
		}
	}
	if c := by["where"].Claims; len(c) != 1 || !strings.Contains(c[0].Statement, `in culprit-investigator-`) || !strings.Contains(c[0].Statement, "0 files, 0 bytes") {
		t.Errorf("where: %+v, want an empty directory", c)
	}
}

// One that doesn't end is ended, with all that it started; what it had said
// counts.
func TestTimeout(t *testing.T) {
	r := Run(t.Context(), []Investigator{script("hang")}, "look", Options{Timeout: 3 * time.Second})[0]
	if !strings.Contains(r.Error, "took more than 3s") || len(r.Claims) != 1 || r.Claims[0].Statement != "said before the end" {
		t.Errorf("%q, %+v; want what it had said", r.Error, r.Claims)
	}
}

func TestReadClaims(t *testing.T) {
	flood := `{"claims": [` + strings.Repeat(`{"statement": "x"},`, 100) + `{"statement": "x"}]}`
	for _, tt := range []struct {
		name, answer string
		want         int // claims; -1 is an error
	}{
		{"alone", `{"claims": [{"statement": "a"}]}`, 1},
		{"in text", "so:\n{\"claims\": [{\"statement\": \"a\"}, {\"statement\": \"b\"}]}\nthat's it", 2},
		{"in a line", `so: {"claims": [{"statement": "a"}]} that's it`, 1},
		{"fenced", "```json\n{\n  \"claims\": [\n{\"statement\": \"a\"}\n]}\n```", 1},
		{"the last counts", "{\"claims\": [{\"statement\": \"a\"}]}\n{\"claims\": []}", 0},
		{"without a statement", `{"claims": [{"name": "x"}, {"statement": "a"}]}`, 1},
		{"flood", flood, mostClaims},
		{"another object", `{"answer": 1}`, -1},
		{"cut", `{"claims": [{"statement": "a"}`, -1},
		{"wrong types", `{"claims": "none"}`, -1},
		{"empty", " \n", -1},
	} {
		claims, err := ReadClaims([]byte(tt.answer))
		if got := len(claims); err != nil && tt.want >= 0 || err == nil && got != tt.want {
			t.Errorf("%s: %d claims, %v; want %d", tt.name, got, err, tt.want)
		}
	}
}

func FuzzReadClaims(f *testing.F) {
	f.Add([]byte(goodAnswer))
	f.Add([]byte("{\n{\n{\"claims\":"))
	f.Fuzz(func(t *testing.T, answer []byte) {
		if claims, err := ReadClaims(answer); err == nil && len(claims) > mostClaims {
			t.Errorf("%d claims", len(claims))
		}
	})
}

func TestCheck(t *testing.T) {
	dir := source(t)
	s := sources(t, []string{dir}, nil)
	_, sum, err := s.read("engine/a.py")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/passwd", filepath.Join(dir, "link.py")); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		place Place
		wrong string
	}{
		{"right", Place{File: "engine/a.py", Line: 2, Text: "reuse(buffer)", SHA256: sum[:16]}, ""},
		{"a little off", Place{File: "engine/a.py", Line: 1, Text: "return 1"}, ""},
		{"no text", Place{File: "engine/sub/b.py", Line: 1}, ""},
		{"no file", Place{File: "engine/x.py", Line: 1}, "no file"},
		{"no source", Place{File: "other/a.py", Line: 1}, `no source "other"; there are: engine`},
		{"a directory", Place{File: "engine/sub", Line: 1}, "is no file"},
		{"no line", Place{File: "engine/a.py", Line: 99}, "no line 99"},
		{"line 0", Place{File: "engine/a.py"}, "no line 0"},
		{"another text", Place{File: "engine/a.py", Line: 2, Text: "free(buffer)"}, `line 2 of engine/a.py is another: "reuse(buffer)"`},
		{"another hash", Place{File: "engine/a.py", Line: 2, SHA256: "0123456789abcdef"}, "another hash"},
		{"a hash of three digits", Place{File: "engine/a.py", Line: 2, SHA256: sum[:3]}, "another hash"},
		{"outside", Place{File: "engine/../../etc/passwd", Line: 1}, "no source"},
		{"by a link", Place{File: "engine/link.py", Line: 1}, "no file"},
	} {
		got := s.Check(tt.place)
		if tt.wrong == "" && got != "" || !strings.Contains(got, tt.wrong) {
			t.Errorf("%s: %q, want %q", tt.name, got, tt.wrong)
		}
	}
	if got := (*Sources)(nil).Check(Place{}); got == "" {
		t.Error("without sources a place was found right")
	}
}

// The file on disk must be the one that was attested.
func TestCheckAttested(t *testing.T) {
	dir := source(t)
	plain := sources(t, []string{dir}, nil)
	_, sum, err := plain.read("engine/a.py")
	if err != nil {
		t.Fatal(err)
	}
	a := &target.Attestation{Packages: []target.Package{{Name: "pkg", Dir: dir, Files: map[string]string{"a.py": sum[:16], "sub/b.py": "0000000000000000"}}}}
	s := sources(t, nil, a)
	for _, tt := range []struct{ file, wrong string }{
		{"pkg/a.py", ""}, {"pkg/sub/b.py", "isn't the file that runs"}, {"pkg/c.bin", "isn't part of what was attested"},
	} {
		got := s.Check(Place{File: tt.file, Line: 1})
		if tt.wrong == "" && got != "" || !strings.Contains(got, tt.wrong) {
			t.Errorf("%s: %q, want %q", tt.file, got, tt.wrong)
		}
	}
}

// transcript is what a model was asked.
type transcript struct {
	mu   sync.Mutex
	list []string
}

func (t *transcript) add(text string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.list = append(t.list, text)
}

func (t *transcript) all() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return slices.Clone(t.list)
}

// modelServer plays a model: it is told what to do in each call.
func modelServer(t *testing.T, steps []string, seen *transcript) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var request struct {
			Messages []struct {
				Role    string
				Content string
			}
			Tools []any
		}
		if err := json.NewDecoder(r.Body).Decode(&request); err != nil {
			t.Error(err)
		}
		last := request.Messages[len(request.Messages)-1]
		seen.add(fmt.Sprintf("%s %d tools: %s", last.Role, len(request.Tools), last.Content))
		step := steps[min(len(seen.all()), len(steps))-1]
		switch {
		case step == "500":
			w.WriteHeader(http.StatusInternalServerError)
			fmt.Fprint(w, "out of order")
		case step == "hang":
			<-r.Context().Done()
		case strings.HasPrefix(step, "call "):
			fmt.Fprintf(w, `{"choices":[{"message":{"tool_calls":[{"id":"c","type":"function","function":{"name":"search","arguments":%q}}]},"finish_reason":"tool_calls"}],"usage":{"prompt_tokens":100,"completion_tokens":10}}`, step[5:])
		default:
			b, err := json.Marshal(step)
			if err != nil {
				t.Error(err)
			}
			fmt.Fprintf(w, `{"choices":[{"message":{"content":%s},"finish_reason":"stop"}]}`, b)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestModel(t *testing.T) {
	s := sources(t, []string{source(t)}, nil)
	tools := []Tool{{Name: "search", Parameters: `{"type":"object"}`, Do: func(arguments json.RawMessage) (string, error) {
		var in struct{ Pattern string }
		if err := json.Unmarshal(arguments, &in); err != nil {
			return "", err
		}
		return s.Search(in.Pattern, "")
	}}}
	for _, tt := range []struct {
		name  string
		steps []string
		calls int
		want  int // claims
		err   string
		seen  string
	}{
		{"reads, then answers", []string{`call {"pattern": "reuse"}`, goodAnswer}, 0, 1, "", "tool 1 tools: engine/a.py:2:     reuse(buffer)"},
		{"wrong arguments are told", []string{`call {"pattern": `, goodAnswer}, 0, 1, "", "tool 1 tools: error: "},
		{"wrong pattern is told", []string{`call {"pattern": "("}`, goodAnswer}, 0, 1, "", "tool 1 tools: error: search: "},
		{"is made to answer", []string{`call {"pattern": "x"}`, `call {"pattern": "x"}`, goodAnswer}, 3, 1, "", "user 0 tools: Your budget is nearly used up"},
		{"never answers", []string{`call {"pattern": "x"}`}, 3, 0, "answered nothing", ""},
		{"fails", []string{"500"}, 0, 0, "500 Internal Server Error", ""},
		{"hangs", []string{"hang"}, 0, 0, "took more than", ""},
		{"talks", []string{"It is the weather."}, 0, 0, "no JSON object", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var seen transcript
			m := &Model{Called: "m", BaseURL: modelServer(t, tt.steps, &seen), Tools: tools, Calls: tt.calls}
			r := Run(t.Context(), []Investigator{m}, "look", Options{Timeout: 2 * time.Second, Sources: s})[0]
			if len(r.Claims) != tt.want || tt.err == "" && r.Error != "" || !strings.Contains(r.Error, tt.err) {
				t.Errorf("%d claims, %q; want %d, %q", len(r.Claims), r.Error, tt.want, tt.err)
			}
			if all := strings.Join(seen.all(), "\n"); !strings.Contains(all, tt.seen) {
				t.Errorf("it was asked:\n%s\nwant %s", all, tt.seen)
			}
		})
	}
}

func TestModelTokens(t *testing.T) {
	var seen transcript
	m := &Model{Called: "m", BaseURL: modelServer(t, []string{`call {"pattern": "x"}`}, &seen), Tokens: 300}
	r := Run(t.Context(), []Investigator{m}, "look", Options{Timeout: 10 * time.Second})[0]
	if len(seen.all()) > 4 || r.Error == "" {
		t.Errorf("a budget of 300 tokens, 110 a call: asked %d times, %q", len(seen.all()), r.Error)
	}
}

func TestLinesAndSearch(t *testing.T) {
	s := sources(t, []string{source(t)}, nil)
	got, err := s.Lines("engine/a.py", 2, 2)
	if err != nil || !strings.Contains(got, "2:     reuse(buffer)\n") || !strings.Contains(got, "sha256 ") || strings.Contains(got, "return") {
		t.Errorf("lines: %q, %v", got, err)
	}
	if got, err := s.Search("reuse|x = 1", "engine/sub"); err != nil || got != "engine/sub/b.py:1: x = 1\n" {
		t.Errorf("search below a directory: %q, %v", got, err)
	}
	if got, err := s.Search("nowhere", ""); err != nil || got != "no line matches" {
		t.Errorf("search for nothing: %q, %v", got, err)
	}
}

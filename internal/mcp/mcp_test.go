package mcp

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

const caseText = `
target:
  processes: [{command: [server, "{{graph}}"]}]
  base_url: http://127.0.0.1:1
factors:
  graph: {suspect: captured, safe: eager}
`

func makeRoot(t *testing.T) string {
	t.Helper()
	root := t.TempDir()
	for name, text := range map[string]string{
		"case/case.yaml": caseText, "case/hypotheses/a.yaml": "- {name: race, statement: it is a race, predictions: [rate(graph=eager) < 0.05]}",
		"runs/a/plan.json": "{}", "runs/a/verdict.json": `{"status": "corrupt"}`, "runs/b/plan.json": "{}",
	} {
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// connect is a client of the SDK's own.
func connect(t *testing.T, o Options, over func(*mcp.Server) mcp.Transport) *mcp.ClientSession {
	t.Helper()
	s, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	transport := over(s)
	client, err := mcp.NewClient(&mcp.Implementation{Name: "test"}, nil).Connect(t.Context(), transport, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { client.Close() })
	return client
}

func inMemory(t *testing.T) func(*mcp.Server) mcp.Transport {
	return func(s *mcp.Server) mcp.Transport {
		ours, theirs := mcp.NewInMemoryTransports()
		if _, err := s.Connect(t.Context(), ours, nil); err != nil {
			t.Fatal(err)
		}
		return theirs
	}
}

func call(t *testing.T, c *mcp.ClientSession, name string, args map[string]any) (text string, links []string, failed bool) {
	t.Helper()
	r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: name, Arguments: args})
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	for _, content := range r.Content {
		switch v := content.(type) {
		case *mcp.TextContent:
			text += v.Text
		case *mcp.ResourceLink:
			links = append(links, v.URI)
		}
	}
	return text, links, r.IsError
}

func names(t *testing.T, c *mcp.ClientSession) (list []string) {
	t.Helper()
	for tool, err := range c.Tools(t.Context(), nil) {
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, tool.Name)
		if acts := slices.Contains([]string{"add_hypothesis", "bundle", "hunt", "run"}, tool.Name); tool.Annotations == nil || tool.Annotations.ReadOnlyHint == acts {
			t.Errorf("%s: annotations are %+v", tool.Name, tool.Annotations)
		}
	}
	slices.Sort(list)
	return list
}

func TestReadOnlyUnlessAllowed(t *testing.T) {
	root := makeRoot(t)
	reads := []string{"attest", "list_hypotheses", "list_runs", "next_experiment", "read_probes", "show_hunt", "show_hypothesis", "show_op", "show_run"}
	if got := names(t, connect(t, Options{Root: root}, inMemory(t))); !slices.Equal(got, reads) {
		t.Errorf("tools are %v, want %v", got, reads)
	}
	all := slices.Sorted(slices.Values(append(slices.Clone(reads), "add_hypothesis", "bundle", "hunt", "run")))
	if got := names(t, connect(t, Options{Root: root, AllowRuns: true}, inMemory(t))); !slices.Equal(got, all) {
		t.Errorf("with runs allowed tools are %v, want %v", got, all)
	}
	c := connect(t, Options{Root: root}, inMemory(t))
	if r, err := c.CallTool(t.Context(), &mcp.CallToolParams{Name: "hunt", Arguments: map[string]any{"case": "case"}}); err == nil && !r.IsError {
		t.Error("a hunt was started though runs aren't allowed")
	}
}

func TestTools(t *testing.T) {
	root := makeRoot(t)
	c := connect(t, Options{Root: root, AllowRuns: true}, inMemory(t))
	type args = map[string]any
	for _, tt := range []struct {
		name, tool string
		args       args
		failed     bool
		want, link string
	}{
		{"runs", "list_runs", args{"dir": "."}, false, "run   runs/a  corrupt\nrun   runs/b  not judged\n", ""},
		{"hypotheses", "list_hypotheses", args{"case": "case"}, false, "open       race", "/case/ledger.db"},
		{"next", "next_experiment", args{"case": "case"}, false, "NEXT  everything safe", ""},
		{"show", "show_hypothesis", args{"case": "case", "name": "race"}, false, "OPEN  race", ""},
		{"no such hypothesis", "show_hypothesis", args{"case": "case", "name": "rase"}, true, `nearest: "race"`, ""},
		{"add", "add_hypothesis", args{"case": "case", "name": "b", "statement": "s", "predictions": []string{"rate() > 0.1"}}, false, "OPEN  b", ""},
		{"add wrongly", "add_hypothesis", args{"case": "case", "name": "c", "statement": "s", "predictions": []string{"rate(grap=eager) > 0.1"}}, true, `nearest: "graph"`, ""},
		{"no finding", "show_hunt", args{"case": "case"}, true, "has no finding yet", ""},
		{"no run", "show_run", args{"dir": "case"}, true, "a run directory?", ""},
		{"outside", "show_run", args{"dir": "../x"}, true, "is outside of", ""},
		{"outside by a whole path", "attest", args{"what": "/etc/passwd"}, true, "is outside of", ""},
		{"outside by a link", "list_runs", args{"dir": "link"}, true, "escapes", ""},
		{"outside by a link to what isn't there", "bundle", args{"what": "runs/a", "output": "link/new"}, true, "escapes", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if err := os.Symlink(t.TempDir(), filepath.Join(root, "link")); err == nil {
				t.Cleanup(func() { os.Remove(filepath.Join(root, "link")) })
			}
			text, links, failed := call(t, c, tt.tool, tt.args)
			if failed != tt.failed || !strings.Contains(text, tt.want) {
				t.Errorf("failed %t: %s\nwant %t: %s", failed, text, tt.failed, tt.want)
			}
			if tt.link != "" && !slices.ContainsFunc(links, func(l string) bool { return strings.HasPrefix(l, "file://") && strings.HasSuffix(l, tt.link) }) {
				t.Errorf("links are %v, want %s", links, tt.link)
			}
		})
	}
}

func TestAnswersAreShort(t *testing.T) {
	var a answer
	a.text.WriteString(strings.Repeat("é", answerBytes))
	got := a.result().Content[0].(*mcp.TextContent).Text
	if len(got) > answerBytes+100 || !strings.HasSuffix(got, " bytes more") || strings.Contains(got, "\uFFFD") {
		t.Errorf("an answer of %d bytes: ...%s", len(got), got[len(got)-40:])
	}
}

func TestHTTP(t *testing.T) {
	var server *httptest.Server
	c := connect(t, Options{Root: makeRoot(t)}, func(s *mcp.Server) mcp.Transport {
		server = httptest.NewServer(Handler(s))
		return &mcp.StreamableClientTransport{Endpoint: server.URL}
	})
	defer server.Close()
	defer c.Close() // before the server, which waits for it
	if text, _, failed := call(t, c, "list_runs", map[string]any{"dir": "runs"}); failed || !strings.Contains(text, "runs/a  corrupt") {
		t.Errorf("over HTTP: %s", text)
	}
	for name, change := range map[string]func(*http.Request){
		"another name":   func(r *http.Request) { r.Host = "evil.example" },
		"another origin": func(r *http.Request) { r.Header.Set("Origin", "http://evil.example") },
	} {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, server.URL, strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"tools/list"}`))
		if err != nil {
			t.Fatal(err)
		}
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Accept", "application/json, text/event-stream")
		change(r)
		got, err := http.DefaultClient.Do(r)
		if err != nil {
			t.Fatal(err)
		}
		got.Body.Close()
		if got.StatusCode != http.StatusForbidden {
			t.Errorf("a request by %s: %s, want it refused", name, got.Status)
		}
	}
}

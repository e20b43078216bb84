package target

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseBaseURL(t *testing.T) {
	tests := []struct{ name, in, want, err string }{
		{"plain", "http://127.0.0.1:30000", "http://127.0.0.1:30000", ""},
		{"with v1", "http://127.0.0.1:30000/v1", "http://127.0.0.1:30000", ""},
		{"with v1 and slash", "https://host/v1/", "https://host", ""},
		{"behind a path", "https://host/team/v1", "https://host/team", ""},
		{"no scheme", "127.0.0.1:8000", "http://127.0.0.1:8000", ""},
		{"a password", "http://me:secret@host", "", "take the user and password out"},
		{"another scheme", "ftp://host", "", "want http://HOST:PORT"},
		{"empty", "", "", "want http://HOST:PORT"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ParseBaseURL(tt.in)
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) || strings.Contains(err.Error(), "secret") {
					t.Fatalf("error %v, want one with %q and no secret", err, tt.err)
				}
				return
			}
			if err != nil || got != tt.want {
				t.Errorf("got %q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

// serve answers the given paths and nothing else.
func serve(t *testing.T, server string, answers map[string]string) *Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, ok := answers[r.Method+" "+r.URL.Path]
		if !ok {
			http.NotFound(w, r)
			return
		}
		w.Header().Set("Server", server)
		w.Write([]byte(body))
	}))
	t.Cleanup(s.Close)
	return &Server{BaseURL: s.URL, Client: s.Client()}
}

func TestIdentify(t *testing.T) {
	tests := []struct {
		name, server string
		answers      map[string]string
		want         Identity
		err          string
	}{
		{
			"vllm", "uvicorn",
			map[string]string{"GET /v1/models": `{"data":[{"id":"m","owned_by":"vllm"}]}`, "GET /version": `{"version":"0.26.1"}`},
			Identity{Models: []string{"m"}, Engine: "vllm", Version: "0.26.1"},
			"",
		},
		{
			"llama.cpp", "llama.cpp",
			map[string]string{"GET /v1/models": `{"data":[{"id":"g","owned_by":"llamacpp"}]}`, "GET /props": `{"build_info":"b9000-abc"}`},
			Identity{Models: []string{"g"}, Engine: "llama.cpp", Version: "b9000-abc"},
			"",
		},
		{
			"sglang", "uvicorn",
			map[string]string{"GET /v1/models": `{"data":[{"id":"m","owned_by":"sglang"}]}`, "GET /server_info": `{"version":"0.5.23"}`},
			Identity{Models: []string{"m"}, Engine: "sglang", Version: "0.5.23"},
			"",
		},
		{
			"sglang before 0.5.6", "uvicorn",
			map[string]string{"GET /v1/models": `{"data":[{"id":"m","owned_by":"sglang"}]}`, "GET /get_server_info": `{"version":"0.5.5"}`},
			Identity{Models: []string{"m"}, Engine: "sglang", Version: "0.5.5"},
			"",
		},
		{
			"unknown", "nginx",
			map[string]string{"GET /v1/models": `{"data":[{"id":"a"},{"id":"b"}]}`},
			Identity{Models: []string{"a", "b"}},
			"",
		},
		{"not this API", "nginx", map[string]string{"GET /v1/models": `<html>hello</html>`}, Identity{}, "isn't what an OpenAI-compatible server says"},
		{"no such path", "nginx", nil, Identity{}, "404"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := serve(t, tt.server, tt.answers).Identify(t.Context())
			if tt.err != "" {
				if err == nil || !strings.Contains(err.Error(), tt.err) {
					t.Fatalf("error %v, want one with %q", err, tt.err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestWorkers(t *testing.T) {
	const said = `{"workers":[{"id":"e","url":"http://127.0.0.1:30125","worker_type":"regular"},{"url":"http://10.0.0.2:1/"},{"url":"grpc://a:1"},{"url":"http://127.0.0.1:30125"}],"total":4}`
	for _, tt := range []struct {
		name    string
		answers map[string]string
		want    []string
	}{
		{"router", map[string]string{"GET /workers": said}, []string{"http://127.0.0.1:30125", "http://10.0.0.2:1"}},
		{"another's", map[string]string{"GET /workers": `["x"]`}, nil},
		{"no router", nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, serve(t, "", tt.answers).Workers(t.Context())); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestFlushCache(t *testing.T) {
	for _, path := range []string{"/flush_cache", "/reset_prefix_cache", ""} {
		if got := serve(t, "", map[string]string{"POST " + path: "ok"}).FlushCache(t.Context()); got != path {
			t.Errorf("FlushCache = %q, want %q", got, path)
		}
	}
}

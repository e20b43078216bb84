package app

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/target"
)

// sshTo is the command that reaches a host, and the host: a stand-in that runs
// here what it is asked to run elsewhere, or that of "make test-ssh".
func sshTo(t *testing.T) (command []string, host string) {
	t.Helper()
	if line := strings.Fields(os.Getenv("CULPRIT_TEST_SSH")); len(line) > 1 {
		return line[:len(line)-1], line[len(line)-1]
	}
	script := filepath.Join(t.TempDir(), "ssh")
	if err := os.WriteFile(script, []byte("while [ \"$1\" != -- ]; do shift; done\nshift 2\nexec sh -c \"$*\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return []string{"sh", script}, "elsewhere"
}

// The processes of a case that run on another machine are read there.
func TestSSHAttestCase(t *testing.T) {
	command, host := sshTo(t)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/v1/models" {
			fmt.Fprint(w, `{"data":[{"id":"m","owned_by":"vllm"}]}`)
			return
		}
		http.NotFound(w, r)
	}))
	defer server.Close()
	_, port, _ := strings.Cut(strings.TrimPrefix(server.URL, "http://"), ":")
	ssh, err := json.Marshal(command)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct{ name, processes, missing string }{
		{"the only one", "- {name: decode, host: HOST, command: [vllm, '{{x}}']}", ""},
		{"by its URL", "- {name: decode, host: HOST, url: URL, command: [vllm, '{{x}}']}\n    - {name: router, host: HOST, command: [proxy]}", "router: nothing says where it listens"},
		{"by its port", "- {name: decode, host: HOST, command: [vllm, '{{x}}', --port, PORT]}\n    - {name: prefill, host: HOST, command: [vllm, --port, 1]}", "prefill: no process that we may look at listens at http://127.0.0.1:1 on HOST"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			replace := strings.NewReplacer("HOST", host, "URL", server.URL, "PORT", port)
			text := fmt.Sprintf("target:\n  processes:\n    %s\n  base_url: %s\n  ssh: %s\nfactors: {x: {suspect: a, safe: b}}\n", replace.Replace(tt.processes), server.URL, ssh)
			c, err := experiment.ParseCase("case.yaml", []byte(text))
			if err != nil {
				t.Fatal(err)
			}
			a, err := new(AttestOptions).ofCase(t.Context(), c)
			if err != nil {
				t.Fatal(err)
			}
			var found *target.ProcessFacts
			for i, p := range a.Processes {
				if p.Name == "decode" && p.Main {
					found = &a.Processes[i]
				}
			}
			if found == nil || found.PID != os.Getpid() || found.Host != host || len(found.Args) == 0 || len(a.Hosts) == 0 || a.Hosts[0].Name != host {
				t.Errorf("the processes are %+v on %+v, missing %q", a.Processes, a.Hosts, a.Missing)
			}
			// The stand-in's own processes come and go below the server, which is this test.
			a.Missing = slices.DeleteFunc(a.Missing, func(m string) bool { return strings.Contains(m, ": process ") })
			if missing := strings.Join(a.Missing, "; "); !strings.Contains(missing, replace.Replace(tt.missing)) || tt.missing == "" && missing != "" {
				t.Errorf("missing is %q, want %q", missing, tt.missing)
			}
		})
	}
}

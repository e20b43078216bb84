package experiment

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/probe"
	"github.com/culprit-project/culprit/target"
)

const incident = `# the incident
target:
  processes:
    - name: prefill
      command: python3 -m sglang.launch_server --port 30001 --disaggregation-mode prefill
    - name: decode
      command: [python3, -m, sglang.launch_server, --port, 30002, "{{hicache}}", "{{graph}}", "--steps={{steps}}", '\{{x}}']
      env: {SGLANG_X: "{{index_k}}", SGLANG_Y: "{{stream_flag}}", PLAIN: 1.10}
      host: gpu-17
      url: http://gpu-17:30002
  base_url: http://127.0.0.1:30000/v1
  ready: {url: /health_generate, timeout: 10m}
  logs: {wedge: "WaitingForInput.*timeout"}
  attest: {files: [patch.py], packages: [sglang]}
factors:
  index_k: {suspect: bf16, safe: fp8, attest: 'env.SGLANG_X == level'}
  graph:   {suspect: [], safe: [--disable-cuda-graph, --x], attest: 'argv contains "--disable-cuda-graph" == (level == "safe")'}
  hicache: {suspect: --enable-hierarchical-cache, safe: null}
  steps: {suspect: 5, safe: 3, levels: [1, 2, 3, 4, 5], odds: 2}
  stream_flag: {suspect: null, safe: "0"}
  concurrency: {suspect: 80, safe: 1, levels: [{value: 1, request_cost: 8}, 8]}
  stream: {suspect: true, safe: false}
  max_tokens: {suspect: 2500, safe: 100}
workload: {kind: agent, sessions: 80, rounds: 4, context_lines: 300, seed: 1}
load: {timeout: 2m, control_sessions: 8, extra_body: {chat_template_kwargs: {thinking: false}}}
forbid:
  - {graph: safe, steps: 5}
require: ["graph_replays > 0"]
budget: {wall: 4h, launches: 40}
error: 0.02
`

func TestCase(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, CaseFile), []byte(incident), 0o644); err != nil {
		t.Fatal(err)
	}
	c, err := ReadCase(dir)
	if err != nil {
		t.Fatal(err)
	}
	space := design.Space{
		Factors: []design.Factor{
			{Name: "index_k", Levels: []design.Level{{Name: "fp8", Role: "safe"}, {Name: "bf16", Role: "suspect"}}, Attest: "env.SGLANG_X == level"},
			{Name: "graph", Levels: []design.Level{{Name: "safe", Role: "safe"}, {Name: "suspect", Role: "suspect"}}, Attest: `argv contains "--disable-cuda-graph" == (level == "safe")`},
			{Name: "hicache", Levels: []design.Level{{Name: "safe", Role: "safe"}, {Name: "--enable-hierarchical-cache", Role: "suspect"}}},
			{Name: "steps", Levels: []design.Level{{Name: "1"}, {Name: "2"}, {Name: "3", Role: "safe"}, {Name: "4"}, {Name: "5", Role: "suspect"}}, Ordered: true, Odds: 2},
			{Name: "stream_flag", Levels: []design.Level{{Name: "0", Role: "safe"}, {Name: "suspect", Role: "suspect"}}},
			{Name: "concurrency", Levels: []design.Level{{Name: "1", Role: "safe", RequestCost: 8}, {Name: "8"}, {Name: "80", Role: "suspect"}}, Ordered: true, ClientSide: true},
			{Name: "stream", Levels: []design.Level{{Name: "false", Role: "safe"}, {Name: "true", Role: "suspect"}}, ClientSide: true},
			{Name: "max_tokens", Levels: []design.Level{{Name: "100", Role: "safe"}, {Name: "2500", Role: "suspect"}}, ClientSide: true},
		},
		Forbidden: []design.Arm{{"graph": "safe", "steps": "5"}},
	}
	if diff := cmp.Diff(space, c.Space); diff != "" {
		t.Error(diff)
	}
	if c.Budget != (Budget{Wall: 4 * time.Hour, Launches: 40}) || c.Error != 0.02 || !c.Logs["wedge"].MatchString("a WaitingForInput timeout") ||
		!cmp.Equal(c.Files, []string{"patch.py"}) || !cmp.Equal(c.Packages, []string{"sglang"}) || c.Require[0].String() != "graph_replays > 0" {
		t.Errorf("case is %+v", c)
	}

	failing, err := c.Render(c.Space.Failing())
	if err != nil {
		t.Fatal(err)
	}
	want := []target.Process{
		{Name: "prefill", Command: strings.Fields("python3 -m sglang.launch_server --port 30001 --disaggregation-mode prefill"), Env: map[string]string{}},
		{
			Name: "decode", Host: "gpu-17", URL: "http://gpu-17:30002",
			Command: []string{"python3", "-m", "sglang.launch_server", "--port", "30002", "--enable-hierarchical-cache", "--steps=5", "{{x}}"},
			Env:     map[string]string{"SGLANG_X": "bf16", "PLAIN": "1.10"}, Unset: []string{"SGLANG_Y"},
		},
	}
	if diff := cmp.Diff(want, failing.Processes); diff != "" {
		t.Error(diff)
	}
	if failing.Ready.URL != "http://127.0.0.1:30000/health_generate" || failing.Ready.Timeout != 10*time.Minute {
		t.Errorf("ready is %+v", failing.Ready)
	}
	p := failing.Plan
	if p.BaseURL != "http://127.0.0.1:30000" || p.Concurrency != 80 || p.NoStream || p.TimeoutMS != 120_000 || p.Control != 8 || p.Workload.MaxTokens != 2500 ||
		p.Workload.ContextLines != 300 || string(p.ExtraBody["chat_template_kwargs"]) != `{"thinking":false}` {
		t.Errorf("plan is %+v", p)
	}

	safe, err := c.Render(c.Space.Safe())
	if err != nil {
		t.Fatal(err)
	}
	want[1].Command = []string{"python3", "-m", "sglang.launch_server", "--port", "30002", "--disable-cuda-graph", "--x", "--steps=3", "{{x}}"}
	want[1].Env, want[1].Unset = map[string]string{"SGLANG_X": "fp8", "SGLANG_Y": "0", "PLAIN": "1.10"}, nil
	if diff := cmp.Diff(want, safe.Processes); diff != "" {
		t.Error(diff)
	}
	if q := safe.Plan; q.Concurrency != 1 || !q.NoStream || q.Workload.MaxTokens != 100 || safe.Launch == failing.Launch {
		t.Errorf("the safe arm's plan is %+v", q)
	}
	alone := c.Space.Failing()
	alone["concurrency"], alone["stream"] = "1", "false"
	if same, err := c.Render(alone); err != nil || same.Launch != failing.Launch {
		t.Errorf("client's settings need a launch: %v", err)
	}
	if _, err := c.Render(design.Arm{"index_k": "fp8"}); err == nil {
		t.Error("half an arm is rendered")
	}
}

// The example in the documents works.
func TestDocumentedCase(t *testing.T) {
	b, err := os.ReadFile("../docs/case.md")
	if err != nil {
		t.Fatal(err)
	}
	_, text, _ := strings.Cut(string(b), "```yaml\n")
	text, _, _ = strings.Cut(text, "```")
	c, err := ParseCase("case.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if len(c.Space.Factors) != 5 {
		t.Errorf("it has %d factors", len(c.Space.Factors))
	}
}

func TestCaseAttest(t *testing.T) {
	c, err := ParseCase("case.yaml", []byte(incident))
	if err != nil {
		t.Fatal(err)
	}
	live := &target.Attestation{Processes: []target.ProcessFacts{{Name: "decode", Main: true, Args: []string{"x", "--disable-cuda-graph"}, Env: map[string]string{"SGLANG_X": "bf16"}}}}
	got := c.Attest(live, c.Space.Failing())
	if len(got) != 1 || !strings.Contains(got[0], "factor graph") || !strings.Contains(got[0], "argv is x --disable-cuda-graph") {
		t.Errorf("wrong is %q", got)
	}
	arm := c.Space.Failing()
	arm["graph"] = "safe"
	if got := c.Attest(live, arm); got != nil {
		t.Errorf("wrong is %q", got)
	}
	if got := c.LevelOf(live, "graph") + " " + c.LevelOf(live, "index_k") + " " + c.LevelOf(live, "steps"); got != "safe bf16 " {
		t.Errorf("levels %q", got)
	}
}

// What is short works: a server that runs already, a single command.
func TestSmallCases(t *testing.T) {
	const factor = "\nfactors: {concurrency: {suspect: 8, safe: 1}}\n"
	tests := []struct {
		name, text string
		check      func(t *testing.T, c *Case, r *Rendered)
	}{
		{"a server that is there", "target: {base_url: 'h:1'}" + factor, func(t *testing.T, c *Case, r *Rendered) {
			if len(r.Processes) != 0 || r.Plan.Workload.Kind != "agent" || r.Ready.URL != "http://h:1/health" || c.Error != DefaultError || c.Packages != nil {
				t.Errorf("%+v", r)
			}
		}},
		{"one process without a name", "target: {base_url: 'h:1', processes: {command: 'x \"a b\" c\\ d'}}" + factor, func(t *testing.T, _ *Case, r *Rendered) {
			if r.Processes[0].Name != "server" || !cmp.Equal(r.Processes[0].Command, []string{"x", "a b", "c d"}) {
				t.Errorf("%+v", r.Processes)
			}
		}},
		{"start and stop", "target: {base_url: 'h:1', processes: [{name: d, start: docker run -d x, stop: [docker, rm, -f, x], follow: docker logs -f x}]}" + factor, func(t *testing.T, _ *Case, r *Rendered) {
			if diff := cmp.Diff(target.Detached(strings.Fields("docker run -d x"), strings.Fields("docker rm -f x"), strings.Fields("docker logs -f x")), r.Processes[0].Command); diff != "" {
				t.Error(diff)
			}
		}},
		{"anchors", "target: {base_url: 'h:1', processes: [{name: a, env: &e {A: 1}, command: x}, {name: b, env: *e, command: y}]}" + factor, func(t *testing.T, _ *Case, r *Rendered) {
			if r.Processes[1].Env["A"] != "1" {
				t.Errorf("%+v", r.Processes)
			}
		}},
		{"named levels", "target: {base_url: 'h:1', processes: {command: ['{{g}}', s]}}\nfactors: {g: {suspect: none, safe: all, levels: {none: [], part: [-p], all: [-a, -b]}}}", func(t *testing.T, c *Case, r *Rendered) {
			if diff := cmp.Diff([]design.Level{{Name: "none", Role: "suspect"}, {Name: "part"}, {Name: "all", Role: "safe"}}, c.Space.Factors[0].Levels); diff != "" {
				t.Error(diff)
			}
			if all, err := c.Render(design.Arm{"g": "all"}); err != nil || !cmp.Equal(all.Processes[0].Command, []string{"-a", "-b", "s"}) {
				t.Errorf("%+v, %v", all, err)
			}
		}},
		{"the workload's kind", "target: {base_url: 'h:1'}\nfactors: {kind: {suspect: churn, safe: agent}}", func(t *testing.T, _ *Case, r *Rendered) {
			if r.Plan.Workload.Kind != "churn" {
				t.Errorf("%+v", r.Plan)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := ParseCase("case.yaml", []byte(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			r, err := c.Render(c.Space.Failing())
			if err != nil {
				t.Fatal(err)
			}
			tt.check(t, c, r)
		})
	}
}

func TestCommits(t *testing.T) {
	const text = `
target:
  processes: [{name: a, command: [sh, serve.sh, "{{engine}}"]}]
  base_url: http://h:1
factors:
  engine: {commits: [v1.2, 12e4567, 0012345, "1234567"], odds: 2, attest: 'commits.engine == level'}
`
	c, err := ParseCase("case.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	f := c.Space.Factors[0]
	want := design.Factor{
		Name: "engine", Ordered: true, Odds: 2, Attest: f.Attest,
		Levels: []design.Level{{Name: "v1.2", Role: design.Safe}, {Name: "12e4567"}, {Name: "0012345"}, {Name: "1234567", Role: design.Suspect}},
	}
	if diff := cmp.Diff(want, f); diff != "" {
		t.Error(diff)
	}
	r, err := c.Render(design.Arm{"engine": "12e4567"})
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"sh", "serve.sh", "12e4567"}, r.Processes[0].Command); diff != "" {
		t.Error(diff)
	}
}

func TestCaseMistakes(t *testing.T) {
	tests := []struct{ name, old, replacement, want string }{
		{"unknown key", "\nfactors:", "\nfators:", `case.yaml:15: case: unknown key "fators"; nearest known key: "factors"`},
		{"unknown key inside", "ready: {url:", "ready: {urll:", `case.yaml:12: ready: unknown key "urll"; nearest known key: "url"`},
		{"unknown key of a process", "      host: gpu-17", "      hots: gpu-17", `case.yaml:9: process: unknown key "hots"; nearest known key: "host"`},
		{"unknown knob", "context_lines: 300", "context_line: 300", `case.yaml:24: workload: unknown key "context_line"; nearest known key: "context_lines"`},
		{"unknown name in attest", "env.SGLANG_X == level", "envs.SGLANG_X == level", "case.yaml:16: factor index_k: attest: expression `envs.SGLANG_X == level`: unknown name \"envs\"; nearest known name: \"env\""},
		{"unknown factor in a template", "--steps={{steps}}", "--steps={{step}}", `{{step}}: no factor has that name; nearest: "steps"`},
		{"a factor that does nothing", `"{{graph}}", `, "", "case.yaml:17: factor graph: does nothing"},
		{"a list in the middle", "--steps={{steps}}", "--steps={{steps}}{{graph}}", "can't stand inside a text"},
		{"nothing in the middle", "--steps={{steps}}", "--steps={{steps}}{{hicache}}", `case.yaml:18: factor hicache, level "safe": process decode: {{hicache}}: a list, or nothing`},
		{"broken template", "--steps={{steps}}", "--steps={{steps", "want {{FACTOR}}"},
		{"no safe level", "suspect: bf16, safe: fp8", "suspect: bf16", "case.yaml:16: factor index_k: wants a suspect level"},
		{"equal levels", "suspect: bf16, safe: fp8", "suspect: fp8, safe: fp8", "case.yaml:16: factor index_k: level \"fp8\" is there twice"},
		{"level twice", "levels: [1, 2, 3, 4, 5]", "levels: [1, 1, 3, 4, 5]", `case.yaml:19: factor steps: level "1" is there twice`},
		{"factor twice", "  stream: {", "  steps: {", `mapping key "steps" already defined`},
		{"forbidden factor", "{graph: safe, steps: 5}", "{grape: safe}", `case.yaml:27: forbid: no factor "grape"; nearest: "graph"`},
		{"forbidden level", "{graph: safe, steps: 5}", "{steps: 9}", `case.yaml:27: forbid: factor steps has no level "9"`},
		{"failing arm forbidden", "{graph: safe, steps: 5}", "{graph: suspect}", "the failing arm"},
		{"concurrency too high", "sessions: 80", "sessions: 40", "concurrency 80 can't be reached with 40 sessions"},
		{"a level the workload refuses", "suspect: 2500, safe: 100", "suspect: 2500, safe: lots", `case.yaml:23: factor max_tokens, level "lots": workload: max_tokens is a string, which it can't be`},
		{"a setting of another type", "suspect: 80, safe: 1,", "suspect: lots, safe: 1,", "concurrency is a string, which it can't be"},
		{"client's factor with attest", "max_tokens: {", "max_tokens: {attest: 'version == \"1\"', ", "nothing to attest"},
		{"bad pattern", "WaitingForInput.*timeout", "(", "case.yaml:13: logs: wedge: error parsing regexp"},
		{"bad duration", "wall: 4h", "wall: 4 hours", "case.yaml:29: budget: wall: want a time"},
		{"bad error", "error: 0.02", "error: 2", "case.yaml:30: error: want a probability"},
		{"bad requirement", "graph_replays > 0", "graph_replays >", "case.yaml:28: require: expression"},
		{"base URL with a password", "http://127.0.0.1:30000/v1", "http://a:b@h", "take the user and password out"},
		{"no base URL", "  base_url: http://127.0.0.1:30000/v1\n", "", "base_url: there is none"},
		{"process twice", "name: decode", "name: prefill", `process name "prefill" is there twice`},
		{"process name is a path", "name: decode", "name: ../x", "since a log file has it"},
		{"host is an option", "host: gpu-17", "host: -oProxyCommand=x", "would be an option of ssh"},
		{"no command", "      command: python3 -m sglang.launch_server --port 30001 --disaggregation-mode prefill\n", "", "process prefill: no command"},
		{"open quote", "--disaggregation-mode prefill", "--x 'prefill", "a quote ' doesn't end"},
		{"two documents", "\nfactors:", "\n---\nfactors:", "holds 2 YAML documents"},
		{"not YAML", "target:", "target: [", "case.yaml: "},
		{"not a mapping", "factors:\n", "factors: 3\nx:\n", `case.yaml:15: factors: want lines of "key: value"`},
		{"commits and levels", "steps:", "steps: {commits: [a, b], safe: a}\n  stepz:", "factor steps: commits are all its levels"},
		{"one commit", "steps:", "steps: {commits: [a]}\n  stepz:", "factor steps: wants two commits or more"},
		{"a commit that is a list", "steps:", "steps: {commits: [a, [b]]}\n  stepz:", "factor steps: commits: want a commit's name"},
		{"ready elsewhere", "/health_generate", "health_generate", "want a path such as /health"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if !strings.Contains(incident, tt.old) {
				t.Fatalf("%q isn't in the case", tt.old)
			}
			_, err := ParseCase("case.yaml", []byte(strings.Replace(incident, tt.old, tt.replacement, 1)))
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v\nwant one with %s", err, tt.want)
			}
		})
	}
	for _, empty := range []string{"", "# nothing", "---\n", "3", "target: {base_url: 'h:1'}"} {
		if _, err := ParseCase("case.yaml", []byte(empty)); err == nil {
			t.Errorf("%q is taken for a case", empty)
		}
	}
	if _, err := ReadCase(filepath.Join(t.TempDir(), "none")); err == nil || !strings.Contains(err.Error(), "read case") {
		t.Errorf("error %v", err)
	}
}

// Every mistake is told, not only the first.
func TestAllMistakesAtOnce(t *testing.T) {
	text := strings.Replace(strings.Replace(incident, "wall: 4h", "wal: 4h", 1), "odds: 2", "od: 2", 1)
	_, err := ParseCase("case.yaml", []byte(text))
	if err == nil || strings.Count(err.Error(), "unknown key") != 2 || strings.Index(err.Error(), `"od"`) > strings.Index(err.Error(), `"wal"`) {
		t.Errorf("error %v", err)
	}
}

func TestSplitWords(t *testing.T) {
	tests := []struct {
		line string
		want []string
	}{
		{`a  b`, []string{"a", "b"}},
		{`a 'b "c' "d 'e"`, []string{"a", `b "c`, "d 'e"}},
		{`a\ b "\"x\" \y" '\'`, []string{"a b", `"x" \y`, `\`}},
		{`--x='{"a": 1}' ''`, []string{`--x={"a": 1}`, ""}},
		{"a \\\n b", []string{"a", "b"}},
		{"", nil},
	}
	for _, tt := range tests {
		got, err := splitWords(tt.line)
		if diff := cmp.Diff(tt.want, got); diff != "" || err != nil {
			t.Errorf("%q: %v %s", tt.line, err, diff)
		}
	}
}

// Whatever is read can be rendered in the failing and in the safe arm unless
// it says why not, and its space can be stored.
func FuzzCase(f *testing.F) {
	f.Add([]byte(incident))
	f.Add([]byte("target: {base_url: 'h:1'}\nfactors: &a {concurrency: {suspect: 8, safe: 1, levels: *a}}"))
	f.Fuzz(func(t *testing.T, text []byte) {
		c, err := ParseCase("case.yaml", text)
		if err != nil {
			return
		}
		if _, err := c.Render(c.Space.Failing()); err != nil {
			t.Errorf("the failing arm: %v", err)
		}
		if _, err := c.Render(c.Space.Safe()); err != nil && !strings.Contains(err.Error(), ":") {
			t.Errorf("the safe arm: %v", err)
		}
		if err := c.Space.Validate(); err != nil {
			t.Error(err)
		}
		if _, err := json.Marshal(c.Space); err != nil {
			t.Error(err)
		}
	})
}

func TestCaseProbes(t *testing.T) {
	dir := t.TempDir()
	pack := "probe_pack: 1\nname: mine\nprobes:\n  - {id: a, as: both, file: m.py, function: f}\n  - {id: b, as: both, file: m.py, function: g}\n"
	if err := os.WriteFile(filepath.Join(dir, "mine.yaml"), []byte(pack), 0o600); err != nil {
		t.Fatal(err)
	}
	head := "target: {base_url: http://127.0.0.1:1, processes: [{command: [server, \"{{x}}\"]}]}\nfactors: {x: {suspect: a, safe: b}}\n"
	for _, tt := range []struct{ name, text, want string }{
		{"two packs", head + "probes: {packs: [mine.yaml, vllm], must: [b], never: [scheduler_steps]}\n", ""},
		{"a name for several", head + "probes: {packs: [mine.yaml], must: [both]}\n", ""},
		{"no pack", head + "probes: {must: [b]}\n", "probes: packs: there are none"},
		{"no file", head + "probes: {packs: [nowhere.yaml]}\n", "there is no such file"},
		{"no probe", head + "probes: {packs: [mine.yaml], must: [c]}\n", `probes: must: pack mine has no probe "c"`},
		{"no process", "target: {base_url: http://127.0.0.1:1}\nfactors: {concurrency: {suspect: 8, safe: 1}}\nprobes: {packs: [mine.yaml]}\n", "the case launches no process"},
		{"elsewhere", strings.Replace(head, "command", "host: gpu-1, command", 1) + "probes: {packs: [mine.yaml]}\n", "runs on gpu-1"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c, err := ParseCase(filepath.Join(dir, CaseFile), []byte(tt.text))
			if tt.want == "" {
				if err != nil || c.Probes == nil {
					t.Fatalf("got %v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want %q", err, tt.want)
			}
		})
	}
}

// The processes get the probes beside what they have already.
func TestPlaceProbes(t *testing.T) {
	h := &hunt{HuntOptions: HuntOptions{Case: &Case{Probes: &probe.Pack{Version: 1, Name: "x", Probes: []probe.Probe{{ID: "a", File: "m.py", Function: "f"}}}}}}
	processes, err := h.placeProbes([]target.Process{{Name: "s", Env: map[string]string{"PYTHONPATH": "/own", "A": "1"}}})
	if err != nil {
		t.Fatal(err)
	}
	dir := h.probes
	want := map[string]string{"A": "1", "PYTHONPATH": filepath.Join(dir, "python") + ":/own", probe.DirVariable: dir}
	if diff := cmp.Diff(want, processes[0].Env); diff != "" {
		t.Error(diff)
	}
	h.removeProbes()
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("%s is left: %v", dir, err)
	}
}

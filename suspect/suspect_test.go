package suspect_test

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/suspect"
	"github.com/culprit-project/culprit/target"
)

var update = flag.Bool("update", false, "write the golden cases anew")

// process is one of a recorded server.
type process struct {
	name, command, dir, url string
	env                     map[string]string
	container               bool
}

// server builds what attesting a server gives. Words of a command are split at
// "|" where there is one, so that they can hold spaces.
func server(engine, version string, endpoints map[string]string, processes ...process) suspect.Server {
	s := suspect.Server{BaseURL: "http://127.0.0.1:30000", Live: &target.Attestation{Engine: engine, Version: version, Models: []string{"Qwen3-MoE"}}}
	for _, p := range processes {
		words := strings.Fields(p.command)
		if strings.Contains(p.command, "|") {
			words = strings.Split(p.command, "|")
		}
		s.Live.Processes = append(s.Live.Processes, target.ProcessFacts{Name: p.name, Main: true, Args: words, Dir: p.dir, Env: p.env})
		s.Processes = append(s.Processes, suspect.Process{Name: p.name, URL: p.url, Container: p.container})
	}
	for path, body := range endpoints {
		at := ""
		if name, rest, ok := strings.Cut(path, ":"); ok {
			at, path = name, rest
		}
		s.Live.Endpoints = append(s.Live.Endpoints, target.Endpoint{Process: at, Path: path, Body: json.RawMessage(body)})
	}
	return s
}

const sglangInfo = `{"disable_radix_cache":false,"disable_cuda_graph":false,"disable_overlap_schedule":false,"enable_hierarchical_cache":true,
	"speculative_algorithm":"EAGLE","tp_size":4,"disable_custom_all_reduce":false,"disable_shared_experts_fusion":true,"disaggregation_mode":"null",
	"max_running_requests":48,"context_length":163840,"internal_states":[{"x":1}]}`

// sglangCPU is SGLang 0.5.23 with Gemma 3 270M on a processor, as
// examples/sglang-cpu runs it, with part of what it said.
func sglangCPU(info string, flags string) suspect.Server {
	body, err := os.ReadFile(filepath.Join("testdata", info))
	if err != nil {
		panic(err)
	}
	s := server("sglang", "0.5.23", map[string]string{
		"/server_info": string(body),
		"/model_info":  `{"model_path":"models/gemma-3-270m-hf","load_format":"auto","disaggregation_mode":"null","model_type":"gemma3_text","architectures":["Gemma3ForCausalLM"]}`,
		"/v1/models":   `{"object":"list","data":[{"id":"models/gemma-3-270m-hf","object":"model","created":1795996090,"owned_by":"sglang","root":"models/gemma-3-270m-hf","parent":null,"max_model_len":32768}]}`,
	}, process{
		name: "server", env: map[string]string{"HF_HUB_OFFLINE": "1", "SGLANG_USE_CPU_ENGINE": "1"},
		command: ".venv/bin/python -m sglang.launch_server --model-path models/gemma-3-270m-hf --host 127.0.0.1 --port 30000 --device cpu --attention-backend torch_native --max-total-tokens 65536 --chat-template ../gemma/chat.jinja " + flags,
	})
	s.Live.Hosts = []target.HostFacts{{Kernel: "Linux"}}
	return s
}

var servers = map[string]func() suspect.Server{
	"sglang": func() suspect.Server {
		return server("sglang", "0.5.9", map[string]string{"/server_info": sglangInfo, "/v1/models": `{"data":[{"id":"m","max_model_len":163840}]}`}, process{
			name: "server", dir: "/srv", env: map[string]string{"SGLANG_ENABLE_SPEC_V2": "1", "HF_TOKEN": target.Redacted, "PATH": "/opt/venv/bin:/bin", "HOME": "/root", "NCCL_DEBUG": "INFO"},
			command: `python3 -m sglang.launch_server --model-path deepseek-ai/DeepSeek-V3 --tp-size 4 --host 0.0.0.0 --port 30000 --enable-hierarchical-cache --hicache-ratio 2 --hicache-io-backend kernel --speculative-algorithm EAGLE --speculative-num-steps=3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --kv-cache-dtype fp8_e5m2 --attention-backend=flashmla --api-key ` + target.Redacted + ` --some-new-flag 7 --mem-fraction-static 0.8 --tool-call-parser deepseekv3`,
		})
	},
	"sglang-cpu": func() suspect.Server { // a real one's answers
		return sglangCPU("sglang-cpu.json", "--sleep-on-idle")
	},
	"sglang-router": func() suspect.Server { // it hides its command line
		s := sglangCPU("sglang-cpu.json", "--sleep-on-idle")
		s.Processes[0].URL = "http://127.0.0.1:30125"
		s.Live.Processes = append(s.Live.Processes, target.ProcessFacts{Name: "router", Main: true, Args: []string{"sglang::router"}})
		s.Processes = append(s.Processes, suspect.Process{Name: "router"})
		for i := range s.Live.Endpoints {
			s.Live.Endpoints[i].Process = "server"
		}
		return s
	},
	"sglang-pd": func() suspect.Server {
		prefill := strings.Replace(sglangInfo, `"null"`, `"prefill"`, 1)
		decode := strings.Replace(strings.Replace(sglangInfo, `"null"`, `"decode"`, 1), `"disable_overlap_schedule":false`, `"disable_overlap_schedule":true`, 1)
		return server("sglang", "0.5.9", map[string]string{"prefill:/server_info": prefill, "decode:/server_info": decode},
			process{name: "prefill", url: "http://127.0.0.1:30100", command: "python -m sglang.launch_server --model-path m --disaggregation-mode prefill --disaggregation-transfer-backend nixl --port 30100 --attention-backend fa3"},
			process{name: "decode", url: "http://127.0.0.1:30200", command: "python -m sglang.launch_server --model-path m --disaggregation-mode decode --disaggregation-transfer-backend nixl --port 30200 --attention-backend flashinfer --disable-overlap-schedule --speculative-algorithm EAGLE --enable-hierarchical-cache"},
			process{name: "router", command: "python -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30100 8998 --decode http://127.0.0.1:30200 --port 30000"})
	},
	"vllm": func() suspect.Server {
		return server("vllm", "0.11.2", map[string]string{"/version": `{"version":"0.11.2"}`, "/v1/models": `{"data":[{"id":"Qwen3-MoE","max_model_len":4096}]}`}, process{
			name: "server", dir: "/srv", env: map[string]string{"VLLM_USE_FLASHINFER_SAMPLER": "1", "VLLM_USE_DEEP_GEMM": "0"}, container: true,
			command: `/venv/bin/python3|/venv/bin/vllm|serve|Qwen/Qwen3-30B-A3B|-tp|2|--enable_prefix_caching|--async-scheduling|--speculative-config|{"method":"eagle3","num_speculative_tokens":3,"x":{"y":{}}}|--max-num-seqs|16|--kv-cache-dtype=fp8|--no-enable-chunked-prefill|--enforce-eager|--template|{{ messages }}|--port|30000`,
		})
	},
	"llama.cpp": func() suspect.Server {
		return server("llama.cpp", "b6692-xyz", map[string]string{"/props": `{"total_slots":8,"default_generation_settings":{"n_ctx":1024}}`}, process{
			name: "server", command: "/opt/llama-server -m models/gemma.gguf --port 30000 -np 8 -fa on -ctk q8_0 --cache-reuse 256 --no-webui",
		})
	},
	"wrapped": func() suspect.Server { // an engine behind a program of somebody's own
		return server("llama.cpp", "b6692-xyz", map[string]string{"/props": `{"total_slots":8}`}, process{name: "server", command: "python server.py --model m.gguf --port 0"})
	},
	"unknown": func() suspect.Server {
		return server("", "", nil, process{name: "server", command: "/opt/serve --port 30000 --fast true"})
	},
	"elsewhere": func() suspect.Server { // its processes can't be seen
		return server("vllm", "0.11.2", map[string]string{"/version": `{"version":"0.11.2"}`})
	},
	"unreadable": func() suspect.Server {
		s := server("vllm", "0.11.2", map[string]string{"/version": `{"version":"0.11.2"}`}, process{name: "server"})
		s.Live.Processes = nil
		return s
	},
	"hostile": func() suspect.Server {
		return server("vl\nlm: {", "\x1b[2J", nil, process{name: "server", dir: "/a b/{{x}}", command: "vllm|serve|# not a comment\n|--port|1e3|--a|: {]|--b=\x00\xff|--kv-cache-dtype|'\"\n|off|~"})
	},
}

// Each recorded server gives the case that is beside it, which can be read, and
// whose failing arm is the live server by its own expressions.
func TestMake(t *testing.T) {
	for name, recorded := range servers {
		t.Run(name, func(t *testing.T) {
			s := recorded()
			c := suspect.Make(s, suspect.Options{Table: suspect.Builtin(), Environment: map[string]string{"PATH": "/bin"}})
			golden := filepath.Join("testdata", name+".yaml")
			if *update {
				if err := os.WriteFile(golden, []byte(c.Text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), c.Text); diff != "" {
				t.Errorf("the case differs (-want +got; -update writes it anew):\n%s", diff)
			}
			read, err := experiment.ParseCase(golden, []byte(c.Text))
			if err != nil {
				t.Fatalf("the case can't be read: %v", err)
			}
			if wrong := read.Attest(s.Live, read.Space.Failing()); len(wrong) > 0 {
				t.Errorf("the live server isn't the failing arm: %q", wrong)
			}
			arm, err := read.Render(read.Space.Failing())
			if err != nil {
				t.Fatal(err)
			}
			for i, p := range arm.Processes {
				if !sameWords(p.Command, s.Live.Processes[i].Args) {
					t.Errorf("process %s would run\n%q, and runs\n%q", p.Name, p.Command, s.Live.Processes[i].Args)
				}
			}
		})
	}
}

// What a server says when it was started with the safe levels is what the case
// of the failing one expects of them.
func TestSafeArm(t *testing.T) {
	live := servers["sglang-cpu"]()
	c := suspect.Make(live, suspect.Options{Table: suspect.Builtin()})
	read, err := experiment.ParseCase("case.yaml", []byte(c.Text))
	if err != nil {
		t.Fatal(err)
	}
	safe := sglangCPU("sglang-cpu-safe.json", "--disable-radix-cache --disable-overlap-schedule --grammar-backend llguidance --chunked-prefill-size -1")
	if wrong := read.Attest(safe.Live, read.Space.Safe()); len(wrong) > 0 {
		t.Errorf("it isn't the safe arm: %q", wrong)
	}
	if wrong := read.Attest(live.Live, read.Space.Safe()); len(wrong) != 5 {
		t.Errorf("the live server passes for the safe arm but for %q", wrong)
	}
	again := suspect.Make(safe, suspect.Options{Table: suspect.Builtin()})
	if len(again.Factors) > 0 {
		t.Errorf("of the safe server, these are suspects: %v", again.Factors)
	}
}

// sameWords compares command lines but for their order, secrets, free ports
// and what YAML can't hold.
func sameWords(a, b []string) bool {
	count := map[string]int{}
	for _, w := range a {
		count[w]++
	}
	for _, w := range b {
		count[strings.ToValidUTF8(w, "\ufffd")]--
	}
	for _, free := range []string{"--api-key", target.Redacted, "0", "30000"} {
		delete(count, free)
	}
	for _, n := range count {
		if n != 0 {
			return false
		}
	}
	return true
}

func TestAdd(t *testing.T) {
	more, err := suspect.Parse("mine.yaml", []byte(`suspects:
  - {name: fast, engine: any, value: [--fast], safe: "false", odds: 100, why: ours}
  - {name: kv_dtype, engine: vllm, value: [--kv-cache-dtype], safe: bf16}
environment: [MINE_]
engines: {vllm: {ready: /ready}}
`))
	if err != nil {
		t.Fatal(err)
	}
	table := suspect.Builtin()
	table.Add(more)
	c := suspect.Make(server("vllm", "0.11", nil, process{name: "server", command: "vllm serve m --fast true --kv-cache-dtype auto", env: map[string]string{"MINE_X": "1"}}), suspect.Options{Table: table, Concurrency: 7})
	for _, want := range []string{
		`fast: {suspect: "true", safe: "false", odds: 5, attest: 'flag("--fast") == level'}`, "kv_dtype: {suspect: auto, safe: bf16", "MINE_X: 1", "url: /ready", "concurrency: {suspect: 7,",
	} {
		if !strings.Contains(c.Text, want) {
			t.Errorf("the case lacks %q:\n%s", want, c.Text)
		}
	}
}

func TestParse(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"unknown key", "suspects: [{name: a, engine: x, on: [--a], saef: b}]", "saef"},
		{"no kind", "suspects: [{name: a, engine: x}]", "one of on, off, value and env"},
		{"two kinds", "suspects: [{name: a, engine: x, on: [--a], env: B}]", "has 2"},
		{"no engine", "suspects: [{name: a, on: [--a]}]", "engine: which?"},
		{"no safe value", "suspects: [{name: a, engine: x, value: [--a]}]", "known to be good"},
		{"expression", "suspects: [{name: a, engine: x, on: [--a], when: servre_info.x}]", `"server_info"`},
		{"name", "suspects: [{name: A-b, engine: x, on: [--a]}]", "small letters"},
		{"pattern", "engines: {x: {logs: {a: '('}}}", "missing closing"},
		{"not YAML", "[", "mine.yaml"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := suspect.Parse("mine.yaml", []byte(tt.text)); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error is %v, want %q", err, tt.want)
			}
		})
	}
}

// Each version of SGLang is given the flags that it has.
func TestSGLangVersions(t *testing.T) {
	decode := "--disable-decode-cuda-graph"
	for _, tt := range []struct{ version, flags, graph, prefill string }{
		{"0.5.9", "", "--disable-cuda-graph", ""},
		{"0.5.9", "--enable-piecewise-cuda-graph", "--disable-cuda-graph", "-"},
		{"0.5.12", "", "--disable-cuda-graph", "--disable-piecewise-cuda-graph"},
		{"0.5.14", "", decode, "--disable-prefill-cuda-graph"},
		{"0.5.23", "", decode, "--disable-prefill-cuda-graph"},
		{"0.5.23", "--disable-prefill-cuda-graph", decode, ""},
		{"0.5.23", "--cuda-graph-backend-prefill disabled --cuda-graph-backend-decode full", decode, ""},
		{"0.5.23", "--disable-cuda-graph", "", ""},
	} {
		t.Run(tt.version+" "+tt.flags, func(t *testing.T) {
			c := suspect.Make(server("sglang", tt.version, nil, process{name: "server", command: "python -m sglang.launch_server --model-path m " + tt.flags}), suspect.Options{Table: suspect.Builtin()})
			got := map[string]string{}
			for _, f := range c.Factors {
				got[f.Name] = f.Safe
			}
			if got["cuda_graph"] != tt.graph || got["piecewise_graph"] != tt.prefill {
				t.Errorf("decode %q, prefill %q, want %q, %q", got["cuda_graph"], got["piecewise_graph"], tt.graph, tt.prefill)
			}
		})
	}
}

// A router doesn't say its version; the servers behind it do.
func TestVersionBehindRouter(t *testing.T) {
	s := server("", "", map[string]string{"decode:/server_info": `{"version":"0.5.9"}`}, process{name: "decode", command: "python -m sglang.launch_server --model-path m"}, process{name: "router", command: "sglang::router"})
	c := suspect.Make(s, suspect.Options{Table: suspect.Builtin()})
	if !strings.Contains(c.Text, "cuda_graph: {suspect: [], safe: [--disable-cuda-graph]") {
		t.Errorf("it isn't the flag of 0.5.9:\n%s", c.Text)
	}
}

func TestVersions(t *testing.T) {
	table, err := suspect.Parse("x", []byte(`suspects:
  - {name: old, engine: e, on: [--x], before: "0.12"}
  - {name: new, engine: e, on: [--x], since: 0.5.6}
`))
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct{ version, want string }{
		{"", "old new"}, {"0.5.5", "old"}, {"0.5.6.post1", "old new"}, {"0.11.9", "old new"}, {"0.12", "new"}, {"0.12.0rc1+cu128", "new"}, {"1", "new"}, {"0.5", "old"}, {"unknown", "old new"},
	}
	for _, tt := range tests {
		t.Run(tt.version, func(t *testing.T) {
			c := suspect.Make(server("e", tt.version, nil, process{name: "server", command: "prog --x"}), suspect.Options{Table: table})
			var got []string
			for _, want := range []string{"old", "new"} {
				if strings.Contains(c.Text, "  "+want+": {") {
					got = append(got, want)
				}
			}
			// Both are about one flag, which only the first that applies takes.
			if first, _, _ := strings.Cut(tt.want, " "); len(got) != 1 || got[0] != first {
				t.Errorf("suspects are %v, want %s", got, first)
			}
		})
	}
}

func FuzzMake(f *testing.F) {
	f.Add("vllm|serve|m|--kv-cache-dtype|fp8", "VLLM_X=1", "0.11")
	f.Add("python3|-m|sglang.launch_server|--speculative-algorithm|--enable-hierarchical-cache|=|-", "SGLANG_ENABLE_SPEC_V2=1", "")
	f.Add("llama-server|-fa|-np|2|{{x}}|\\{{", "GGML_X={{y", "b1")
	table := suspect.Builtin()
	f.Fuzz(func(t *testing.T, command, variable, version string) {
		name, value, _ := strings.Cut(variable, "=")
		if strings.ContainsRune(name, 0) {
			t.Skip()
		}
		s := server("", version, nil, process{name: "server", command: command, env: map[string]string{name: value}})
		if len(s.Live.Processes[0].Args) == 0 {
			t.Skip()
		}
		c := suspect.Make(s, suspect.Options{Table: table})
		if _, err := experiment.ParseCase("case.yaml", []byte(c.Text)); err != nil {
			t.Errorf("the case can't be read: %v\n%s", err, c.Text)
		}
	})
}

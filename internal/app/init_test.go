package app

import (
	"slices"
	"strings"
	"testing"
)

func TestUpstream(t *testing.T) {
	tests := []struct{ name, command, want string }{
		{"sglang", "python -m sglang_router.launch_router --pd-disaggregation --prefill http://127.0.0.1:30100 8998 --decode http://127.0.0.1:30200 --port 30000", "http://127.0.0.1:30100 http://127.0.0.1:30200"},
		{"sglang, workers", "python -m sglang_router.launch_router --worker-urls http://a:1234 http://b:1235 --prometheus-port 29000", "http://a:1234 http://b:1235"},
		{"vllm, hosts and ports", "python toy_proxy_server.py --port 8192 --prefiller-hosts localhost --prefiller-ports 8100 --decoder-ports 8200 8201", "localhost:8100 127.0.0.1:8200 127.0.0.1:8201"},
		{"joined", "router --prefill=10.0.0.1:8100 --decode=[::1]:8200", "10.0.0.1:8100 [::1]:8200"},
		{"not a router's", "vllm serve m --otlp-traces-endpoint http://localhost:4317", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := strings.Join(upstream(strings.Fields(tt.command)), " "); got != tt.want {
				t.Errorf("upstream is %q, want %q", got, tt.want)
			}
		})
	}
}

func TestName(t *testing.T) {
	tests := []struct{ name, commands, want string }{
		{"one", "vllm serve m", "server"},
		{"prefill, decode, router", "router --x|sglang --disaggregation-mode decode|sglang --disaggregation_mode=prefill|sglang --disaggregation-mode=decode", "prefill decode decode2 router"},
		{"vllm's connectors", `proxy|vllm serve --kv-transfer-config {"kv_role":"kv_consumer"}|vllm serve --kv-transfer-config {"kv_role":"kv_producer"}`, "prefill decode router"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var parts []part
			for command := range strings.SplitSeq(tt.commands, "|") {
				args := strings.Fields(command)
				parts = append(parts, part{args: args, url: command, routes: slices.Contains([]string{"router", "proxy"}, args[0])})
			}
			base := parts[0].url
			name(parts)
			var names []string
			for _, p := range parts {
				names = append(names, p.Name)
				if own := p.url != base; own != (p.URL != "") {
					t.Errorf("process %s has the URL %q", p.Name, p.URL)
				}
			}
			if got := strings.Join(names, " "); got != tt.want {
				t.Errorf("names are %q, want %q", got, tt.want)
			}
		})
	}
}

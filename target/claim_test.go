package target

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/culprit-project/culprit/design"
)

func attested() *Attestation {
	return &Attestation{
		Processes: []ProcessFacts{
			{Name: "prefill", Main: true, Args: []string{"python3", "-m", "sglang.launch_server", "--port", "1"}, Env: map[string]string{"SGLANG_X": "bf16", "ROLE": "p"}},
			{Name: "decode", Main: true, Args: []string{"python3", "-m", "sglang.launch_server", "--page-size=64", "--disable-x"}, Env: map[string]string{"SGLANG_X": "bf16", "ROLE": "d", "HF_TOKEN": Redacted}},
			{Name: "decode", Args: []string{"worker"}, Env: map[string]string{"SGLANG_X": "fp8"}},
		},
		Endpoints: []Endpoint{
			{Path: "/server_info", Body: json.RawMessage(`{"disable_cuda_graph":false,"page_size":64,"ratio":0.5,"speculative":{"steps":5},"dtype":"bf16"}`)},
			{Process: "decode", Path: "/server_info", Body: json.RawMessage(`{"page_size":32}`)},
		},
		Version: "0.5.3", Engine: "sglang",
		Packages: []Package{{Name: "sglang", SHA256: "ab", Commit: "cd"}},
	}
}

func TestClaims(t *testing.T) {
	suspect, safe := design.Level{Name: "bf16", Role: design.Suspect}, design.Level{Name: "fp8", Role: design.Safe}
	number := design.Level{Name: "64", Role: design.Suspect}
	tests := []struct {
		name, text string
		level      design.Level
		holds      bool
		why        string // in why or the error
	}{
		{"variable", "env.SGLANG_X == level", suspect, true, ""},
		{"variable, other level", "env.SGLANG_X == level", safe, false, `env.SGLANG_X is "bf16"`},
		{"by role", `server_info.disable_cuda_graph == (level == "safe")`, suspect, true, ""},
		{"by role, other level", `server_info.disable_cuda_graph == (level == "safe")`, safe, false, "`server_info.disable_cuda_graph == (level == \"safe\")` doesn't hold for level \"fp8\": server_info.disable_cuda_graph is false"},
		{"number is text of the level", "server_info.page_size == level", number, true, ""},
		{"number", "server_info.page_size == 64 and server_info.ratio < 0.6", suspect, true, ""},
		{"nested", "server_info.speculative.steps == 5", suspect, true, ""},
		{"unlike", "env.SGLANG_X != level", safe, true, ""},
		{"argument", `argv contains "--disable-x"`, suspect, true, ""},
		{"argument, only a part of one", `argv contains "--disable"`, suspect, false, "argv is python3"},
		{"arguments, joined", `argv contains "--page-size 64"`, suspect, true, ""},
		{"negated", `not (argv contains "--enable-y")`, suspect, true, ""},
		{"flag", `flag("--page-size") == level`, number, true, ""},
		{"flag without a value", `flag("--disable-x") == true`, number, true, ""},
		{"flag that isn't there", `flag("--no") == nil`, number, true, ""},
		{"flag, otherwise", `flag("--page-size") == level`, suspect, false, `flag("--page-size") is "64"`},
		{"one process", `processes.decode.server_info.page_size == 32 and processes.prefill.env.ROLE == "p" and processes.decode.argv contains "--disable-x"`, suspect, true, ""},
		{"unset", "env.SGLANG_Y == level", suspect, false, "env.SGLANG_Y isn't set (SGLANG_X is)"},
		{"unset on purpose", "env.SGLANG_Z9 == nil", suspect, true, ""},
		{"commit and version", `commits.sglang == "cd" and version startsWith "0.5"`, suspect, true, ""},
		{"processes differ", `env.ROLE == "p"`, suspect, false, "processes.decode.env.ROLE"},
		{"a secret", `env.HF_TOKEN == "x"`, suspect, false, "may be a secret"},
		{"not answered", "props.x == 1", suspect, false, "doesn't answer at /props"},
		{"not a truth value", "server_info.page_size", suspect, false, "bool"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := CompileClaim(tt.text)
			if err != nil {
				t.Fatal(err)
			}
			ok, why, err := c.Holds(attested(), tt.level)
			if err != nil {
				why = err.Error()
			}
			if ok != tt.holds || !strings.Contains(why, tt.why) || tt.holds && why != "" {
				t.Errorf("holds %v (%s), want %v with %q", ok, why, tt.holds, tt.why)
			}
		})
	}
}

func TestAnswered(t *testing.T) {
	a := attested()
	a.Endpoints[0].Body = json.RawMessage(`{"speculative_algorithm":null,"graph":{"decode":{"backend":"full"}}}`)
	for _, tt := range []struct {
		text string
		want bool
	}{
		{"server_info.speculative_algorithm == nil", true}, // it says so
		{"server_info.speculation == nil", false},
		{`server_info.graph.decode.backend == "full"`, true},
		{`server_info.graph.prefill.backend == "full"`, false},
		{"server_info.speculative_algorithm.x == nil", false},
		{"processes.decode.server_info.page_size == 32", true},
		{"processes.prefill.server_info.page_size == 32", false},
		{"props.x == nil", false},
		{`env.SGLANG_Y == nil and flag("--x") == nil`, true}, // the server isn't asked
	} {
		c, err := CompileClaim(tt.text)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Answered(a); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.text, got, tt.want)
		}
	}
}

func TestClaimErrors(t *testing.T) {
	tests := []struct{ name, text, want string }{
		{"unknown name", "serverinfo.x == 1", `unknown name "serverinfo"; nearest known name: "server_info"`},
		{"unknown function", `flags("--x")`, `nearest known name: "flag"`},
		{"syntax", "env.X ==", "unexpected token EOF"},
		{"not a truth value", `"text"`, "bool"},
		{"empty", "", "unexpected token EOF"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := CompileClaim(tt.text); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func FuzzClaim(f *testing.F) {
	f.Add(`env.SGLANG_X == level and argv contains "x" or flag("--y")`)
	f.Add(`processes.a?.b[level] in [1, 2] ? true : any(models, {# == level})`)
	f.Fuzz(func(t *testing.T, text string) {
		c, err := CompileClaim(text)
		if err != nil {
			return
		}
		ok, why, err := c.Holds(attested(), design.Level{Name: "x", Role: design.Safe})
		if ok && (why != "" || err != nil) {
			t.Errorf("holds, but %q, %v", why, err)
		}
	})
}

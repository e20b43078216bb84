package experiment

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestSweepCase(t *testing.T) {
	tests := []struct {
		name, command, params string
		want                  []string // each arm's name and command
	}{
		{
			"list", "vllm serve 'm x' --port 8000",
			`[{"max_num_seqs": 32, "max_num_batched_tokens": 1024}, {"max_num_seqs": 64, "max_num_batched_tokens": 1024}]`,
			[]string{
				"max_num_seqs=32-max_num_batched_tokens=1024: vllm|serve|m x|--port|8000|--max-num-seqs|32|--max-num-batched-tokens|1024",
				"max_num_seqs=64-max_num_batched_tokens=1024: vllm|serve|m x|--port|8000|--max-num-seqs|64|--max-num-batched-tokens|1024",
			},
		},
		{
			"by name, switches, settings inside and JSON", "vllm serve m",
			`{"bad": {"enable_prefix_caching": true, "compilation_config.use_cudagraph": true, "speculative_config": {"a": 1}}, "good": {"enable-prefix-caching": false, "compilation_config.use_cudagraph": false}}`,
			[]string{
				`bad: vllm|serve|m|--enable-prefix-caching|--compilation-config.use_cudagraph=true|--speculative-config|{"a":1}`,
				`good: vllm|serve|m|--no-enable-prefix-caching|--compilation-config.use_cudagraph=false`,
			},
		},
		{
			"values in the command are replaced", "vllm serve m --block_size 16 --enforce-eager --seed 1",
			`[{"_benchmark_name": "a", "block_size": 32, "dtype": "bfloat16"}, {"_benchmark_name": "b", "enforce_eager": false, "dtype": "half"}]`,
			[]string{
				"a: vllm|serve|m|--block-size|32|--enforce-eager|--seed|1|--dtype|bfloat16",
				"b: vllm|serve|m|--block_size|16|--no-enforce-eager|--seed|1|--dtype|half",
			},
		},
		{
			"a switch in the place of a value", "s --x 1 --y", `[{"x": true}, {"x": 5}, {}]`,
			[]string{"x=true: s|--x|1|--y", "x=5: s|--x|5|--y", "arm 3: s|--x|1|--y"},
		},
		{
			"values that look alike, and braces that are plain", "vllm serve m --x '{{y}}'",
			`[{"a": 1}, {"a": null}, {"_benchmark_name": "x", "a": "None"}, {"_benchmark_name": "y", "a": true}, {"_benchmark_name": "z", "a": "true"}, {"_benchmark_name": "w"}]`,
			[]string{
				"a=1: vllm|serve|m|--x|{{y}}|--a|1", "a=None: vllm|serve|m|--x|{{y}}|--a|None", "x: vllm|serve|m|--x|{{y}}|--a|None", "y: vllm|serve|m|--x|{{y}}|--a",
				"z: vllm|serve|m|--x|{{y}}|--a|true", "w: vllm|serve|m|--x|{{y}}",
			},
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, arms, err := SweepCase(tt.command, []byte(tt.params), "h:1/v1")
			if err != nil {
				t.Fatal(err)
			}
			if err := c.Override(map[string]any{"sessions": 12, "concurrency": 3}); err != nil {
				t.Fatal(err)
			}
			c.ReadyWithin(90 * time.Second)
			written, err := c.WriteSweep(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, a := range arms {
				again, err := written.Render(a.Arm)
				if err != nil {
					t.Fatal(err)
				}
				r, err := c.Render(a.Arm)
				if diff := cmp.Diff(r, again); err == nil && diff != "" {
					t.Errorf("as it was written, arm %s is another:\n%s", a.Name, diff)
				}
				if err != nil {
					t.Fatal(err)
				}
				got = append(got, a.Name+": "+strings.Join(r.Processes[0].Command, "|"))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
			if failing := c.Space.Failing(); failing.String() != arms[0].Arm.String() {
				t.Errorf("the failing arm is %s, want the first, %s", failing, arms[0].Arm)
			}
		})
	}
}

func TestSweepMistakes(t *testing.T) {
	tests := []struct{ name, command, params, want string }{
		{"no command", "", `[{"a":1},{"a":2}]`, "empty"},
		{"open quote", "vllm 'x", `[{"a":1},{"a":2}]`, "doesn't end"},
		{"not JSON", "x", `a: 1`, "want a JSON list"},
		{"not objects", "x", `[1, 2]`, "arm 1"},
		{"one arm", "x", `[{"a":1}]`, "two or more"},
		{"equal names", "x", `[{"_benchmark_name":"n","a":1},{"_benchmark_name":"n","a":2}]`, `"n" is there twice`},
		{"equal arms", "x", `[{"a":1},{"a":1}]`, "is there twice"},
		{"nothing differs", "x", `{"m":{"a":1},"n":{"a":1}}`, "there are none"},
		{"a list", "x", `[{"a":[1]},{"a":2}]`, "which no flag takes"},
		{"key twice", "x", `[{"a_b":1,"a-b":2},{"a":2}]`, "is there twice"},
		{"half a file", "x", `{"m":{"a":1}`, "want a JSON list"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if _, _, err := SweepCase(tt.command, []byte(tt.params), "h:1"); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

// Each arm that is read can be rendered.
func FuzzSweep(f *testing.F) {
	f.Add("vllm serve m --x 1", []byte(`{"a":{"x":1,"y":true},"b":{"x":false,"z.q":null}}`))
	f.Fuzz(func(t *testing.T, command string, params []byte) {
		c, arms, err := SweepCase(command, params, "h:1")
		if err != nil {
			return
		}
		for _, a := range arms {
			if _, err := c.Render(a.Arm); err != nil {
				t.Errorf("arm %s: %v", a.Name, err)
			}
		}
	})
}

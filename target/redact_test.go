package target

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestSecretName(t *testing.T) {
	for _, name := range []string{
		"OPENAI_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "clientSecret", "apiKey", "--api-key", "--admin-api-key",
		"--ssl-keyfile-password", "PGPASSWORD_PASSWORD", "http.cookie", "WANDB_API_KEY", "DB_PASS", "GH_PAT",
	} {
		if !secretName(name) {
			t.Errorf("%s isn't taken for a secret", name)
		}
	}
	for _, name := range []string{
		"", "--max-total-tokens", "eos_token", "bos_token", "--tokenizer-path", "--speculative-num-draft-tokens", "PWD", "--kv-cache-dtype", "cache_key",
		"TOKENIZERS_PARALLELISM", "index_k", "max_total_num_tokens", "--tool-call-parser", "KEYBOARD", "--ssl-keyfile", "eos_token_id",
	} {
		if secretName(name) {
			t.Errorf("%s is taken for a secret", name)
		}
	}
}

// The shapes are made up; none of these is or was a key.
func TestRedact(t *testing.T) {
	jwt := "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlLW9mLXNvcnRz"
	tests := []struct{ name, in, want string }{
		{"plain", "/usr/lib/python3.12/site-packages/sglang", "/usr/lib/python3.12/site-packages/sglang"},
		{"OpenAI's", "use sk-proj-abcdefghijklmnop1234 now", "use [redacted] now"},
		{"Hugging Face's", "hf_abcdefghijklmnopqrst", "[redacted]"},
		{"GitHub's", "ghp_abcdefghijklmnopqrst0123", "[redacted]"},
		{"JWT", "t=" + jwt + ";", "t=[redacted];"},
		{"AWS id", "AKIAABCDEFGHIJKLMNOP", "[redacted]"},
		{"NKey's seed", "seed SU" + strings.Repeat("AB2C", 14) + " of a user", "seed [redacted] of a user"},
		{"NKey itself", "U" + strings.Repeat("AB2C", 13) + "ABC", "U" + strings.Repeat("AB2C", 13) + "ABC"},
		{"bearer", "Authorization: Bearer abc.def-ghi", "Authorization: Bearer [redacted]"},
		{"URL's password", "redis://me:hunter2@cache:6379/0", "redis://[redacted]@cache:6379/0"},
		{"URL's query", "http://h/x?a=1&access_token=abcdefgh12", "http://h/x?a=1&access_token=[redacted]"},
		{"in words", `api_key="abcdefgh"`, `api_key="[redacted]"`},
		{"base64", "x qT7vR2mXw9Lz4KpN8sYb3HcJ6fGd1VaE5uQoW0iZtU= y", "x [redacted] y"},
		{"base64 with signs", "qT7vR2mXw9/z4KpN8sYb3H+J6fGd1VaE5uQoW0iZtU", "[redacted]"},
		{"private key", "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\nx", "[redacted]\nx"},
		{"half a private key", "-----BEGIN PRIVATE KEY-----\nabc", "[redacted]"},
		{"model's name", "Qwen3-Coder-480B-A35B-Instruct-FP8-Block-Quantized-v2", "Qwen3-Coder-480B-A35B-Instruct-FP8-Block-Quantized-v2"},
		{"snapshot", "hub/models--Qwen--Qwen3/snapshots/0123456789abcdef0123456789abcdef01234567", "hub/models--Qwen--Qwen3/snapshots/0123456789abcdef0123456789abcdef01234567"},
		{"digest", strings.Repeat("0a1b2c3d", 8), strings.Repeat("0a1b2c3d", 8)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := Redact(tt.in); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

func TestRedactArgs(t *testing.T) {
	in := []string{
		"python3", "-m", "sglang.launch_server", "--api-key", "hunter22=", "again", "--port", "30000", "--admin-api-key=abc4",
		"--max-total-tokens", "123456", "HF_TOKEN=abcd", `--speculative-config={"b": {"api_key": "zzzz"}, "a": 5}`, "--enable-auth", "--x",
	}
	want := []string{
		"python3", "-m", "sglang.launch_server", "--api-key", Redacted, Redacted, "--port", "30000", "--admin-api-key=" + Redacted,
		"--max-total-tokens", "123456", "HF_TOKEN=" + Redacted, `--speculative-config={"a":5,"b":{"api_key":"[redacted]"}}`, "--enable-auth", "--x",
	}
	if diff := cmp.Diff(want, redactArgs(in)); diff != "" {
		t.Error(diff)
	}
}

// What real servers say of themselves holds no secret, and nothing is taken for
// one.
func TestRealServersHaveNoSecrets(t *testing.T) {
	var paths []string
	for _, of := range []string{"props", "version", "models"} {
		some, err := filepath.Glob("../openai/testdata/transcripts/*-" + of + ".http")
		if err != nil {
			t.Fatal(err)
		}
		paths = append(paths, some...)
	}
	looked := 0
	for _, path := range paths {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			clean, err := redactJSON([]byte(line))
			if err != nil {
				continue
			}
			if looked++; strings.Contains(string(clean), Redacted) {
				t.Errorf("%s: %.2000s", path, clean)
			}
		}
	}
	if looked < 6 {
		t.Errorf("only %d answers in JSON in the transcripts", looked)
	}
}

// Nothing that is redacted once shows in a second look, and nothing panics.
func FuzzRedact(f *testing.F) {
	f.Add("--api-key hunter22 sk-abcdefghijklmnopqrst", `{"password": "x"}`)
	f.Fuzz(func(t *testing.T, a, b string) {
		once := redactArgs([]string{a, b})
		if len(once) != 2 {
			t.Fatal("arguments were lost")
		}
		const key = "sk-abcdefghijklmnopqrst"
		if got := Redact(a + " " + key + " " + b); strings.Contains(got, key) {
			t.Errorf("%q holds the key", got)
		}
		if got := redactArgs([]string{"--token", "hunter22!" + a}); slices.ContainsFunc(got, func(s string) bool { return strings.Contains(s, "hunter22") }) {
			t.Errorf("%q holds the token", got)
		}
	})
}

package oracle

import (
	"fmt"
	"hash/maphash"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// FuzzText shows any text to the text detectors: none panics or loops, what
// they quote is from the text, and a text that was given is never held
// against a reply that repeats it.
func FuzzText(f *testing.F) {
	for _, s := range []string{
		"", "plain", "!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!", strings.Repeat("\x80", 100), strings.Repeat("ab ", 200), "<|im_end|>", "<｜", "<s><s></s>",
		"天 très กำลัง привет", strings.Repeat("。", 30), "\xff\xfe\xfd\xfc", "[INST", "<unused", "<0x", strings.Repeat("1. one\n", 50),
	} {
		f.Add(s)
	}
	loop := loopObserver{seed: maphash.MakeSeed()}
	f.Fuzz(func(t *testing.T, s string) {
		if at, token := specialToken(s); token != "" && !strings.HasPrefix(s[at:], token) {
			t.Errorf("token %q isn't at %d", token, at)
		}
		if r, bad := characterRun(s); bad && !strings.Contains(s, strings.Repeat(r.token, r.count)) {
			t.Errorf("no run %+v", r)
		}
		if period, times := loop.loop(s); times > 0 {
			unit := s[len(s)-period:]
			if times < loopTimes || !strings.HasSuffix(s, strings.Repeat(unit, times)) {
				t.Errorf("period %d, %d times, of %q", period, times, s)
			}
		} else if times := naiveLoop(s); times > 0 {
			t.Errorf("a loop is overlooked: %d times in %q", times, s)
		}
		if n := asciiPrefix(s); n > len(s) || strings.IndexFunc(s[:n], func(r rune) bool { return r >= utf8.RuneSelf }) >= 0 {
			t.Errorf("asciiPrefix %d of %q", n, s)
		}
		v := &View{
			Op:      &history.Op{ID: 1, Outcome: history.OK, Stream: true, Chunks: []history.Chunk{{Data: []byte(s)}}},
			Reply:   &openai.Reply{Content: s, FinishReason: "length"},
			decoded: true, request: &openai.ChatRequest{Messages: []openai.Message{{Role: "user", Content: openai.Text(s)}}},
		}
		for _, v := range judgeOne(v, Script, Special) {
			t.Errorf("the prompt says the same, and yet: %+v", v)
		}
		judgeOne(v, Run, Loop, Empty, Integrity, Greedy)
		if _, bad := echoDamage(strings.Split(s+"x", "\n"), s+"x", false); bad && !strings.Contains(s, "```") {
			for line := range strings.SplitSeq(s, "\n") {
				if bare(line) == "" {
					return // an empty line isn't copied
				}
			}
			t.Errorf("a faithful copy of %q is damaged", s)
		}
	})
}

// naiveLoop looks for loops the slow way.
func naiveLoop(s string) int {
	for period := 1; period <= loopPeriod && period*loopTimes <= len(s); period++ {
		unit := s[len(s)-period:]
		times := max(loopTimes, (loopBytes+period-1)/period+1)
		if !isRule(unit) && strings.HasSuffix(s, strings.Repeat(unit, times)) {
			return times
		}
	}
	return 0
}

// TestScripts: the table agrees with Unicode's own, letter by letter.
func TestScripts(t *testing.T) {
	if n := len(scripts().names); n > maxScripts {
		t.Fatalf("%d scripts, room for %d", n, maxScripts)
	}
	for _, r := range "aé7 €" {
		if id := scriptOf(r); id != common {
			t.Errorf("%q is %s", r, scripts().names[id])
		}
	}
	for r := rune(0x80); r <= unicode.MaxRune; r++ {
		name := scripts().names[scriptOf(r)]
		switch {
		case name == "common", name == "Han":
			continue
		case !unicode.Is(unicode.Scripts[name], r):
			t.Fatalf("%U is said to be %s", r, name)
		}
	}
	for _, name := range []string{"Greek", "Cyrillic", "Thai", "Devanagari", "Hangul"} {
		for _, r := range unicode.Scripts[name].R16 {
			if got := scripts().names[scriptOf(rune(r.Hi))]; got != name {
				t.Errorf("%U is %s, not %s", r.Hi, got, name)
			}
		}
	}
}

// TestChunkText reads deltas as servers write them.
func TestChunkText(t *testing.T) {
	tests := []struct{ name, data, want string }{
		{"vLLM", `{"id":"x","choices":[{"index":0,"delta":{"content":" par\"cel"},"logprobs":null}]}`, ` par\"cel`},
		{"spaces", `{"choices": [{"delta": {"role": "assistant", "content": "a"}}]}`, "a"},
		{"null, then arguments", `{"choices":[{"delta":{"content":null,"tool_calls":[{"function":{"arguments":"{}"}}]}}]}`, "{}"},
		{"log-probabilities first", `{"choices":[{"logprobs":{"content":[{"token":"x"}]},"delta":{"content":"a"}}]}`, "a"},
		{"reasoning", `{"choices":[{"delta":{"reasoning_content":"hm"}}]}`, "hm"},
		{"empty", `{"choices":[{"delta":{"content":""}}]}`, ""},
		{"cut", `{"choices":[{"delta":{"content":"abc\`, ""},
		{"usage", `{"choices":[],"usage":{"prompt_tokens":1}}`, ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := string(chunkText([]byte(tt.data))); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// TestRawMembers reads members of a request that isn't decoded.
func TestRawMembers(t *testing.T) {
	tests := []struct {
		name, request string
		maxTokens     int
		greedy        bool
	}{
		{"ours", `{"messages":[],"max_tokens":128,"temperature":0,"stream":true}`, 128, true},
		{"spaces", `{"max_tokens": 7, "temperature": 0.0 }`, 7, true},
		{"last", `{"temperature":0,"max_tokens":9}`, 9, true},
		{"warm", `{"temperature":0.7}`, 0, false},
		{"very cold isn't zero", `{"temperature":0.01}`, 0, false},
		{"none", `{"messages":[]}`, 0, false},
		{"in a string", `{"messages":[{"content":"{\"max_tokens\":5,\"temperature\":0}"}]}`, 0, false},
		{"a tool's parameter", `{"max_tokens":5,"tools":[{"properties":{"max_tokens":{"type":"integer"}}}]}`, 5, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := &View{Op: &history.Op{Request: []byte(tt.request)}}
			if got := v.maxTokens(); got != tt.maxTokens {
				t.Errorf("max_tokens %d, want %d", got, tt.maxTokens)
			}
			if got := temperatureZero([]byte(tt.request)); got != tt.greedy {
				t.Errorf("greedy %t, want %t", got, tt.greedy)
			}
		})
	}
}

// TestWithoutStream: how a reply is sent doesn't make another prompt.
func TestWithoutStream(t *testing.T) {
	want := `{"messages":[],"temperature":0`
	for _, s := range []string{
		want + `}`, want + `,"stream":true}`, want + `,"stream":true,"stream_options":{"include_usage":true}}`, want + `,"stream":false}`,
	} {
		if got := string(withoutStream([]byte(s))); got != want {
			t.Errorf("%s: got %s", s, got)
		}
	}
	other := `{"messages":[],"temperature":0,"stream":true,"seed":5}`
	if got := string(withoutStream([]byte(other))); got == want {
		t.Errorf("%s lost its seed", other)
	}
}

// TestEchoNote: the place of the damage is told, as people count.
func TestEchoNote(t *testing.T) {
	want := []string{"kavo-3871", "pelu-0042", "dorf-9917"}
	tests := []struct {
		name, text string
		cut        bool
		want       string // empty: no damage
	}{
		{"right", "kavo-3871\npelu-0042\ndorf-9917", false, ""},
		{"cut in the second", "kavo-3871\npelu-", true, ""},
		{"cut, and wrong", "kavo-3871\npeku-", true, "EchoSubstituted: line 2 of 3, character 3"},
		{"substituted", "kavo-3871\npelu-0042\ndorf-9817", false, "EchoSubstituted: line 3 of 3, character 7"},
		{"doubled character", "kavo-3871\npeelu-0042\ndorf-9917", false, "EchoDoubled: line 2 of 3, character 3"},
		{"dropped line", "kavo-3871\ndorf-9917", false, "EchoDropped: line 2 of 3"},
		{"first token", "Kavo-3871\npelu-0042\ndorf-9917", false, "EchoFirstToken: line 1 of 3, character 1"},
		{"talk before", "Of course. Here they are:\nkavo-3871\npelu-0042\ndorf-9917", false, ""},
		{"talk before, then damage", "Sure:\nkavo-3871\npelu-42\ndorf-9917", false, "EchoDropped: line 2 of 3, character 6"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if d, bad := echoDamage(want, tt.text, tt.cut); bad {
				got = fmt.Sprintf("%s: %s", d.class, d.note(len(want)))
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestReferencesAreBounded: the oldest references go, and what is left is
// within the bound.
func TestReferencesAreBounded(t *testing.T) {
	o := Greedy.New(history.Header{}).(*greedyObserver)
	big := strings.Repeat("x", 1<<20)
	for i := range uint64(100) {
		o.keep(i, &reference{text: big})
	}
	if o.bytes > maxReferenceBytes || len(o.references) != maxReferenceBytes>>20 || len(o.references) != len(o.order) {
		t.Errorf("%d references, %d in order, %d bytes", len(o.references), len(o.order), o.bytes)
	}
	if o.references[99] == nil || o.references[0] != nil {
		t.Error("not the oldest went")
	}
}

package lab

import (
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestText(t *testing.T) {
	tok, _ := testVocabulary()
	tests := []struct {
		name   string
		tokens []int32
		stop   []string
		want   []string // shown after each token, then by flush
	}{
		{"a space between words", tok.Encode("ship berth"), nil, []string{"ship", " berth", ""}},
		{"a rune of three bytes", tok.Encode("｜"), nil, []string{"", "", "｜", ""}},
		{"half a rune", tok.Encode("a\xe2\x82"), nil, []string{"a", "", "", "\uFFFD\uFFFD"}},
		{"a byte that is no rune", tok.Encode("\xff!"), nil, []string{"\uFFFD", "!", ""}},
		{"a stop string", tok.Encode("a.b.c"), []string{".c"}, []string{"a", "", ".b", "", ""}},
		{"a stop string that doesn't come", tok.Encode("x.."), []string{"..."}, []string{"x", "", "", ".."}},
		{"within a token", tok.Encode("ship"), []string{"hi"}, []string{"s"}},
		{"the earlier of two", tok.Encode("ship"), []string{"p", "hip"}, []string{"s"}},
		{"no tokens", nil, []string{"x"}, []string{""}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			text := text{tokenizer: tok, stop: tt.stop}
			var got []string
			stopped := false
			for _, id := range tt.tokens {
				var shown string
				shown, stopped = text.push(id)
				if got = append(got, shown); stopped {
					break
				}
			}
			if rest := text.flush(); !stopped {
				got = append(got, rest)
			} else if rest != "" {
				t.Errorf("%q is left after the stop", rest)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestTextIsWhole: what is shown piece by piece is the whole text, up to the
// first stop string.
func TestTextIsWhole(t *testing.T) {
	tok, _ := testVocabulary()
	rapid.Check(t, func(t *rapid.T) {
		tokens := rapid.SliceOfN(rapid.Int32Range(0, int32(tok.Size()-1)), 0, 30).Draw(t, "tokens")
		if rapid.Bool().Draw(t, "text") {
			tokens = tok.Encode(rapid.StringOf(rapid.RuneFrom([]rune("ab .｜é"))).Draw(t, "string"))
		}
		stop := rapid.SliceOfN(rapid.StringOfN(rapid.RuneFrom([]rune("ab .｜é")), 1, 3, -1), 0, 3).Draw(t, "stop")
		whole := string([]rune(tok.Decode(tokens)))
		text := text{tokenizer: tok, stop: stop}
		var shown strings.Builder
		stopped := false
		for _, id := range tokens {
			var s string
			s, stopped = text.push(id)
			if !utf8.ValidString(s) {
				t.Fatalf("%q is cut within a rune", s)
			}
			if shown.WriteString(s); stopped {
				break
			}
		}
		shown.WriteString(text.flush())
		got := shown.String()
		for _, s := range stop {
			if strings.Contains(got, s) {
				t.Fatalf("%q has the stop string %q in it", got, s)
			}
		}
		rest, isPrefix := strings.CutPrefix(whole, got)
		stops := false
		for _, s := range stop {
			stops = stops || strings.HasPrefix(rest, s)
		}
		if !isPrefix || stopped != stops || !stopped && rest != "" {
			t.Fatalf("%q of %q, stopped %t", got, whole, stopped)
		}
	})
}

func TestSample(t *testing.T) {
	nan := float32(math.NaN())
	tests := []struct {
		name              string
		logits            []float32
		temperature, topP float64
		want              map[int32]bool // that may come
	}{
		{"the largest", []float32{0, 3, 1}, 0, 0, map[int32]bool{1: true}},
		{"the lowest id of equals", []float32{0, 3, 3}, 0, 1, map[int32]bool{1: true}},
		{"all", []float32{1, 1, 1}, 1, 1, map[int32]bool{0: true, 1: true, 2: true}},
		{"the likeliest few", []float32{0, 5, 5, -9}, 1, 0.9, map[int32]bool{1: true, 2: true}},
		{"the likeliest", []float32{0, 5, 5, -9}, 1, 0.3, map[int32]bool{1: true}},
		{"hot", []float32{0, 1}, 2, 1, map[int32]bool{0: true, 1: true}},
		{"cold", []float32{0, 9}, 0.01, 1, map[int32]bool{1: true}},
		{"no numbers, greedy", []float32{nan, nan}, 0, 1, map[int32]bool{0: true}},
		{"no numbers", []float32{nan, nan, nan}, 1, 0.5, map[int32]bool{0: true, 1: true, 2: true}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := map[int32]bool{}
			for seed := range uint64(200) {
				got[sample(tt.logits, tt.temperature, tt.topP, seed, 0)] = true
			}
			for id := range got {
				if !tt.want[id] {
					t.Errorf("%d came", id)
				}
			}
			if len(got) < len(tt.want) && tt.logits[0] == tt.logits[0] {
				t.Errorf("only %v came", got)
			}
		})
	}
}

func TestSampleFrequencies(t *testing.T) {
	logits := []float32{float32(math.Log(1)), float32(math.Log(2)), float32(math.Log(7))}
	const n = 20_000
	var count [3]float64
	for i := range uint64(n) {
		count[sample(logits, 1, 1, i%7, i)]++
	}
	for id, want := range []float64{0.1, 0.2, 0.7} {
		if got := count[id] / n; math.Abs(got-want) > 0.015 { // more than 4 standard deviations
			t.Errorf("token %d came in %.3f of the draws, want %.1f", id, got, want)
		}
	}
}

func TestLogprobs(t *testing.T) {
	logits := []float32{1, 3, 2, 3}
	own, top := logprobs(logits, 2, 3)
	sum := 0.0
	for id := range logits {
		p, _ := logprobs(logits, int32(id), 0)
		sum += math.Exp(p)
	}
	if math.Abs(sum-1) > 1e-12 {
		t.Errorf("the probabilities' sum is %v", sum)
	}
	if len(top) != 3 || top[0].ID != 1 || top[1].ID != 3 || top[2] != (Logprob{2, own}) {
		t.Errorf("%v %v", own, top)
	}
}

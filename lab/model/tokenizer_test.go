package model

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var testWords = []string{"berth", "ship", "cargo", "name", "Aurora", "assign_berth", "tool_calls", "string", "true", "DSML", "is"}

func testTokenizer(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := NewTokenizer(testWords)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestEncode(t *testing.T) {
	tok := testTokenizer(t)
	word := func(w string) Token {
		id, ok := tok.Word(w)
		if !ok {
			t.Fatalf("%q is not a word", w)
		}
		return id
	}
	letters := func(s string) []Token {
		var ids []Token
		for i := range len(s) {
			ids = append(ids, Byte(s[i]))
		}
		return ids
	}
	for _, c := range []struct {
		name, text string
		want       []Token
	}{
		{"the space between two words is implied", "ship berth", []Token{word("ship"), word("berth")}},
		{"two spaces are not", "ship  berth", []Token{word("ship"), Byte(' '), Byte(' '), word("berth")}},
		{"nor is a space before a code", "ship q7", slices.Concat([]Token{word("ship"), Byte(' ')}, letters("q7"))},
		{"nor one at the end", "ship ", []Token{word("ship"), Byte(' ')}},
		{"nor one at the start", " ship", []Token{Byte(' '), word("ship")}},
		{"nor one before markup", "ship " + closeCalls, []Token{word("ship"), Byte(' '), firstMarkup + 1}},
		{"a longer run is no word", "ships", letters("ships")},
		{"a code has no word inside", "x2is7", letters("x2is7")},
		{"a hyphen ends a word", "ship-q", []Token{word("ship"), Byte('-'), Byte('q')}},
		{"markup is one token a piece", openInvoke + "ship" + endName, []Token{firstMarkup + 2, word("ship"), firstMarkup + 6}},
		{"control tokens are spelled", "<｜User｜>", letters("<｜User｜>")},
		{"invalid UTF-8", "\xff\xe2\x82", letters("\xff\xe2\x82")},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := tok.Encode(c.text)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("Encode(%q), -want +got:\n%s", c.text, diff)
			}
			if text := tok.Decode(got); text != c.text {
				t.Errorf("Decode(Encode(%q)) = %q", c.text, text)
			}
		})
	}
}

func TestNewTokenizerRejects(t *testing.T) {
	for _, words := range [][]string{{""}, {"a"}, {"two words"}, {"caf\u00e9"}, {"ship", "ship"}} {
		if _, err := NewTokenizer(words); err == nil {
			t.Errorf("NewTokenizer(%q) gave no error", words)
		}
	}
}

// FuzzTokenizer checks that any text comes back, and that what comes back
// encodes to the same tokens.
func FuzzTokenizer(f *testing.F) {
	for _, s := range []string{
		"", " ", "ship berth", "ship  berth ", "ships", "a\xffb", "｜DSML｜", openCalls + "ship ship" + endStringName + "\n" + endName,
		"<｜DSML｜DSML", "</｜DSML｜tool_calls>ship " + openCalls + " ship", "\" string=\"true\">", "is2 is", "_ship",
	} {
		f.Add(s)
	}
	tok := testTokenizer(f)
	f.Fuzz(func(t *testing.T, s string) {
		ids := tok.Encode(s)
		if got := tok.Decode(ids); got != s {
			t.Fatalf("Decode(Encode(%q)) = %q, tokens %v", s, got, ids)
		}
		for _, id := range ids {
			if id < firstByte || int(id) >= tok.Size() {
				t.Fatalf("Encode(%q) gave token %d", s, id)
			}
		}
	})
}

// FuzzDecode checks that tokens of any kind decode, and that the text that
// they decode to is stable.
func FuzzDecode(f *testing.F) {
	f.Add([]byte{1, 2, 3, 4})
	tok := testTokenizer(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		ids := make([]Token, 0, len(b)/2)
		for i := 0; i+1 < len(b); i += 2 {
			ids = append(ids, Token(int16(b[i])<<8|int16(b[i+1])))
		}
		text := tok.Decode(ids)
		if again := tok.Decode(tok.Encode(text)); again != text {
			t.Fatalf("tokens %v are %q, then %q", ids, text, again)
		}
	})
}

package model

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var testEntries = []string{
	"berth", "ship", "cargo", "name", "Aurora", "assign_berth", "tool_calls", "string", "true", "DSML", "is",
	": ", ", ", ", code", `{"`, `":"`, `"}`, `{"ship":"`, "->is",
}

func testTokenizer(t testing.TB) *Tokenizer {
	t.Helper()
	tok, err := NewTokenizer(testEntries)
	if err != nil {
		t.Fatal(err)
	}
	return tok
}

func TestEncode(t *testing.T) {
	tok := testTokenizer(t)
	// entries returns the tokens of texts: entries, markup, or spelled.
	tokens := func(texts ...string) (ids []Token) {
		for _, s := range texts {
			if id, ok := tok.Entry(s); ok {
				ids = append(ids, id)
			} else if at := slices.Index(markup[:], s); at >= 0 {
				ids = append(ids, firstMarkup+Token(at))
			} else {
				for i := range len(s) {
					ids = append(ids, Byte(s[i]))
				}
			}
		}
		return ids
	}
	for _, c := range []struct {
		name, text string
		want       []string
	}{
		{"the space between two words is implied", "ship berth", []string{"ship", "berth"}},
		{"also before a code and after it", "ship q7 berth", []string{"ship", "q7", "berth"}},
		{"but not between two codes", "q7 x2", []string{"q7", " ", "x2"}},
		{"two spaces are not implied", "ship  berth", []string{"ship", "  ", "berth"}},
		{"nor is a space at the end", "ship ", []string{"ship", " "}},
		{"nor one at the start", " ship", []string{" ", "ship"}},
		{"nor one before markup", "ship " + closeCalls, []string{"ship", " ", closeCalls}},
		{"nor one before a sign", "ship -", []string{"ship", " -"}},
		{"a longer run is no word", "ships", []string{"s", "hips"}},
		{"a code has no word inside", "x2is7", []string{"x2is7"}},
		{"a hyphen ends a word", "ship-q", []string{"ship", "-q"}},
		{"the longest entry is taken", "ship, code k7, ship", []string{"ship", ", code", "k7", ", ", "ship"}},
		{"but not one that cuts a run", "ship, codes->isn", []string{"ship", ", ", "codes->isn"}},
		{"markup is one token a piece", openInvoke + "ship" + endName, []string{openInvoke, "ship", endName}},
		{"control tokens are spelled", "<｜User｜>", []string{"<｜User｜>"}},
		{"invalid UTF-8", "\xff\xe2\x82", []string{"\xff\xe2\x82"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := tok.Encode(c.text)
			if diff := cmp.Diff(tokens(c.want...), got); diff != "" {
				t.Errorf("Encode(%q), -want +got:\n%s", c.text, diff)
			}
			if text := tok.Decode(got); text != c.text {
				t.Errorf("Decode(Encode(%q)) = %q", c.text, text)
			}
		})
	}
}

func TestNewTokenizerRejects(t *testing.T) {
	for _, entries := range [][]string{{""}, {"a"}, {"two words"}, {" ship"}, {"ship", "ship"}, {closeCalls}} {
		if _, err := NewTokenizer(entries); err == nil {
			t.Errorf("NewTokenizer(%q) gave no error", entries)
		}
	}
}

// FuzzTokenizer checks that any text comes back, and that what comes back
// encodes to the same tokens.
func FuzzTokenizer(f *testing.F) {
	for _, s := range []string{
		"", " ", "ship berth", "ship  berth ", "ships", "a\xffb", "｜DSML｜", openCalls + "ship ship" + endStringName + "\n" + endName,
		"<｜DSML｜DSML", "</｜DSML｜tool_calls>ship " + openCalls + " ship", "\" string=\"true\">", "is2 is", "_ship",
		`{"ok":true,"ship":"q"}`, "ship : ship , {\"", "q7 ship q7, code q7 q7", "->is ->is2",
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

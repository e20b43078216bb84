package lab

import (
	"strings"
	"unicode/utf8"

	"github.com/culprit-project/culprit/lab/model"
)

// text turns a reply's tokens into text that may be shown: valid UTF-8, a byte
// that isn't becoming U+FFFD, and no stop string.
type text struct {
	tokenizer *model.Tokenizer
	previous  int32
	stop      []string

	raw  []byte // the beginning of a rune
	held string // valid text that may become a stop string
}

// push takes the next token. It returns the text that can't change any more;
// stopped says that a stop string came, before which the text ends.
func (t *text) push(id int32) (shown string, stopped bool) {
	t.raw = t.tokenizer.AppendText(t.raw, t.previous, id)
	t.previous = id
	n := 0
	for n < len(t.raw) && utf8.FullRune(t.raw[n:]) {
		_, size := utf8.DecodeRune(t.raw[n:])
		n += size
	}
	t.held += valid(t.raw[:n])
	t.raw = append(t.raw[:0], t.raw[n:]...)

	at := len(t.held)
	for _, s := range t.stop {
		if i := strings.Index(t.held, s); i >= 0 && i < at {
			at, stopped = i, true
		}
	}
	if stopped {
		shown, t.held = t.held[:at], ""
		t.raw = t.raw[:0]
		return shown, true
	}
	for _, s := range t.stop {
		at = min(at, len(t.held)-overlap(t.held, s))
	}
	shown, t.held = t.held[:at], t.held[at:]
	return shown, false
}

// flush returns what was held back: nothing follows.
func (t *text) flush() string {
	rest := t.held + valid(t.raw)
	t.held, t.raw = "", t.raw[:0]
	return rest
}

// overlap is the length of the longest end of text that s begins with, s
// itself excepted.
func overlap(text, s string) int {
	for n := min(len(text), len(s)-1); n > 0; n-- {
		if strings.HasSuffix(text, s[:n]) {
			return n
		}
	}
	return 0
}

// valid makes each byte that isn't UTF-8 a U+FFFD.
func valid(b []byte) string {
	if utf8.Valid(b) {
		return string(b)
	}
	return string([]rune(string(b)))
}

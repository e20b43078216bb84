package oracle

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/culprit-project/culprit/history"
)

// ConstantRun is one character or token over and over: what a sampler gives
// when the logits are NaN or all equal (token 0, often "!"), or when the same
// state is read at every step.
const ConstantRun Class = "ConstantRun"

// Run looks for constant runs.
var Run = Oracle{
	Name:    "run",
	Classes: []Class{ConstantRun},
	New:     func(history.Header) Observer { return &runObserver{seed: maphash.MakeSeed()} },
}

type runObserver struct {
	seed   maphash.Seed
	window tokenWindow
}

func (o *runObserver) Op(v *View, rec *Recorder) {
	texts := v.Texts()
	if len(texts) == 0 {
		return
	}
	rec.Trial(v.Op.ID, ConstantRun)
	f, bad := o.find(v, texts)
	if !bad {
		return
	}
	for s := range v.given() {
		if strings.Contains(s, strings.Repeat(f.token, 8)) {
			return // it was asked to write such a run, or read one
		}
	}
	rec.Violation(Violation{
		Class: ConstantRun, Op: v.Op.ID,
		Want: "text", Got: excerpt(strings.Repeat(f.token, min(f.count, 40)), 0),
		Note:     f.note(),
		Severity: float64(f.count),
	})
}

func (o *runObserver) Event(*history.Event, *Recorder) {}
func (o *runObserver) Finish(*Recorder)                {}

func (o *runObserver) find(v *View, texts []Text) (runFinding, bool) {
	for _, t := range texts {
		if f, bad := characterRun(t.Text); bad {
			return f, true
		}
		// A stream's chunks may hold several tokens, and not the same ones
		// each time, so words are looked at even where there are chunks.
		if f, bad := o.words(t.Text); bad {
			return f, true
		}
	}
	if !v.Op.Stream {
		return runFinding{}, false
	}
	o.window.reset()
	for i := range v.Op.Chunks {
		token := chunkText(v.Op.Chunks[i].Data)
		if len(token) == 0 {
			continue
		}
		if n, bad := o.window.add(maphash.Bytes(o.seed, token)); bad && !isRule(token) && !isDigits(token) {
			return runFinding{string(token), n, o.window.run < runTokens}, true
		}
	}
	return runFinding{}, false
}

func (o *runObserver) words(text string) (runFinding, bool) {
	o.window.reset()
	for word := range strings.FieldsSeq(text) {
		if n, bad := o.window.add(maphash.String(o.seed, word)); bad && isWord(word) {
			return runFinding{word + " ", n, o.window.run < runTokens}, true
		}
	}
	return runFinding{}, false
}

// runFinding is what is repeated and how often: in a row, or within a window.
type runFinding struct {
	token    string
	count    int
	inWindow bool
}

func (f runFinding) note() string {
	if f.inWindow {
		return fmt.Sprintf("%q is %d of %d tokens", f.token, f.count, runWindow)
	}
	return fmt.Sprintf("%q %d times in a row", f.token, f.count)
}

// characterRun finds a run of one character that is too long for its kind.
func characterRun(s string) (runFinding, bool) {
	// A run of runTokens characters (or more bytes) covers two places in a
	// row of those looked at, and the byte after the first.
	const step = runTokens / 2
	i := 0
	for ; i+step < len(s); i += step {
		c := s[i]
		if c != s[i+step] || c != s[i+1] && c < utf8.RuneSelf {
			continue
		}
		start, size := i, 1
		if c >= utf8.RuneSelf {
			for start > max(0, i-utf8.UTFMax+1) && !utf8.RuneStart(s[start]) {
				start--
			}
			_, size = utf8.DecodeRuneInString(s[start:])
		}
		token := s[start : start+size]
		lo, hi := start, start+size
		for strings.HasSuffix(s[:lo], token) {
			lo -= size
		}
		for strings.HasPrefix(s[hi:], token) {
			hi += size
		}
		n := (hi - lo) / size
		if n >= longestRun(token) {
			return runFinding{token, n, false}, true
		}
		i = max(i, hi-step) // the run is dealt with
	}
	return runFinding{}, false
}

// longestRun is how often a character may come in a row: at most so often,
// less one.
func longestRun(character string) int {
	switch c := character[0]; {
	case isRule(character):
		return ruleRun
	case c >= '0' && c <= '9', c >= 'a' && c <= 'z', c >= 'A' && c <= 'Z':
		return letterRun
	default:
		return runTokens
	}
}

// isRule says whether s is only space and what people draw lines, tables and
// leaders with: those may be long.
func isRule[T string | []byte](s T) bool {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case c <= ' ', strings.IndexByte("-=_*#~.|+:/\\^<>", c) >= 0:
		case c == 0xC2 && i+1 < len(s) && s[i+1] == 0xA0: // no-break space
			i++
		case c == 0xE2 && i+2 < len(s) && (s[i+1] == 0x80 || s[i+1] == 0x94 || s[i+1] == 0x95 || s[i+1] == 0x96):
			i += 2 // U+2000-203F and U+2500-25BF: spaces, dashes, boxes, blocks
		default:
			return false
		}
	}
	return true
}

func isDigits(s []byte) bool {
	for _, c := range s {
		if c != ' ' && (c < '0' || c > '9') {
			return false
		}
	}
	return true
}

// isWord says whether a word is more than a number, a sign or a cell of a
// table: rows of 0x00 and of ticks are data, not damage.
func isWord(word string) bool {
	if c := word[0]; c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' {
		return true
	} else if c >= '0' && c <= '9' {
		return false
	}
	return strings.IndexFunc(word, unicode.IsLetter) >= 0
}

// tokenWindow counts tokens, by their hashes, in a row and in the last
// runWindow.
type tokenWindow struct {
	hashes [runWindow]uint64
	// buckets counts the window by the hashes' low byte: no token can be
	// more often there than its bucket says.
	buckets [256]uint8
	n       int
	last    uint64
	run     int // how often the last one came in a row
}

func (w *tokenWindow) reset() {
	if w.n > 0 {
		*w = tokenWindow{}
	}
}

// add takes the next token. bad says that it comes too often, n how often.
func (w *tokenWindow) add(h uint64) (n int, bad bool) {
	if w.n > 0 && h == w.last {
		w.run++
	} else {
		w.run, w.last = 1, h
	}
	slot := &w.hashes[w.n%runWindow]
	if w.n >= runWindow {
		w.buckets[byte(*slot)]--
	}
	*slot = h
	w.n++
	w.buckets[byte(h)]++
	if w.run >= runTokens {
		return w.run, true
	}
	if w.buckets[byte(h)] <= windowShare*runWindow/100 {
		return 0, false
	}
	for _, other := range w.hashes {
		if other == h {
			n++
		}
	}
	return n, n > windowShare*runWindow/100
}

// chunkText returns the text of a streamed delta as it stands in the JSON,
// escapes and all, without decoding it; empty if there is none.
func chunkText(data []byte) []byte {
	for _, key := range deltaKeys {
		rest := data
		for {
			at := bytes.Index(rest, key)
			if at < 0 {
				break
			}
			rest = bytes.TrimLeft(rest[at+len(key):], " ")
			if len(rest) == 0 || rest[0] != '"' {
				continue // null, or the log-probabilities' list
			}
			rest = rest[1:]
			if end := endOfString(rest); end > 0 {
				return rest[:end]
			}
		}
	}
	return nil
}

// deltaKeys are the members that carry text, the likeliest first.
var deltaKeys = [][]byte{
	[]byte(`"content":`), []byte(`"arguments":`), []byte(`"reasoning_content":`), []byte(`"reasoning":`),
}

// endOfString returns where a JSON string's closing quote is; -1 if nowhere.
func endOfString(b []byte) int {
	for i := 0; i < len(b); i++ {
		switch b[i] {
		case '\\':
			i++
		case '"':
			return i
		}
	}
	return -1
}

package model

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Token is a token's number. It is below Tokenizer.Size.
type Token = int32

// The control tokens. They come from the chat template alone: no text encodes
// to one, so that what a user writes can't open another role.
const (
	Padding   Token = iota // stands for "no token" before a sequence's start
	Begin                  // opens every prompt
	End                    // ends an assistant's turn
	ToolsRole              // opens the list of tools
	SystemRole
	UserRole
	AssistantRole
	ToolRole
	firstByte // the 256 single bytes follow
)

const firstMarkup = firstByte + 256

// controlText is what a control token looks like when it is decoded. It is
// for people: encoding it gives bytes.
var controlText = [...]string{
	"<｜pad｜>", "<｜begin｜>", "<｜end｜>", "<｜Tools｜>", "<｜System｜>", "<｜User｜>", "<｜Assistant｜>", "<｜Tool｜>",
}

// The pieces of DSML, one token each.
const (
	openCalls      = "<｜DSML｜tool_calls>\n"
	closeCalls     = "</｜DSML｜tool_calls>"
	openInvoke     = `<｜DSML｜invoke name="`
	closeInvoke    = "</｜DSML｜invoke>\n"
	openParameter  = `<｜DSML｜parameter name="`
	closeParameter = "</｜DSML｜parameter>\n"
	endName        = "\">\n"
	endStringName  = `" string="true">`
	endJSONName    = `" string="false">`
)

var markup = [...]string{
	openCalls, closeCalls, openInvoke, closeInvoke, openParameter, closeParameter, endName, endStringName, endJSONName,
}

const firstEntry = firstMarkup + Token(len(markup))

// Tokenizer turns text into tokens and back.
//
// The vocabulary is the control tokens, the 256 bytes, the pieces of DSML and
// a list of entries. An entry is a word (a run of ASCII letters, digits and
// underscores) or begins with a sign (", code"). It is taken only where it
// doesn't cut a run in two, and what has no entry is spelled in bytes: so a
// made-up code never has a word inside.
//
// One space between two runs is left out if at least one of them is an
// entry's, and decoding puts it back: it stands exactly where two tokens
// would else make one run, which no two tokens but bytes do. So decoding
// gives back any bytes, and the text that a token adds depends on no token
// but the one before it.
//
// A Tokenizer is safe for use by several goroutines.
type Tokenizer struct {
	text  []string // by token
	word  map[string]Token
	signs [256][]Token // other entries and markup, by their first byte, the longest first
}

// NewTokenizer makes a tokenizer with a list of entries, whose order gives
// their numbers. An entry that is double, shorter than two bytes (its byte
// would be another token for the same text), begins with a space, or begins
// with a word and goes on is an error.
func NewTokenizer(entries []string) (*Tokenizer, error) {
	t := &Tokenizer{word: make(map[string]Token, len(entries))}
	t.text = append(t.text, controlText[:]...)
	for b := range 256 {
		t.text = append(t.text, string([]byte{byte(b)}))
	}
	seen := map[string]bool{}
	for _, e := range slices.Concat(markup[:], entries) {
		n := wordLength(e)
		switch {
		case len(e) < 2:
			return nil, fmt.Errorf("vocabulary: the entry %q is shorter than two bytes", e)
		case seen[e]:
			return nil, fmt.Errorf("vocabulary: the entry %q is there twice", e)
		case e[0] == ' ' || n > 0 && n < len(e):
			return nil, fmt.Errorf("vocabulary: the entry %q is neither a word nor begins with a sign", e)
		}
		seen[e] = true
		id := Token(len(t.text))
		t.text = append(t.text, e)
		if n > 0 {
			t.word[e] = id
		} else {
			t.signs[e[0]] = append(t.signs[e[0]], id)
		}
	}
	for _, ids := range t.signs {
		slices.SortStableFunc(ids, func(a, b Token) int { return len(t.text[b]) - len(t.text[a]) })
	}
	return t, nil
}

// ParseVocabulary reads a vocabulary file: a JSON list of the entries.
func ParseVocabulary(file []byte) (*Tokenizer, error) {
	var entries []string
	if err := json.Unmarshal(file, &entries); err != nil {
		return nil, fmt.Errorf("vocabulary: not a JSON list of texts: %w", err)
	}
	return NewTokenizer(entries)
}

// Size is the number of tokens.
func (t *Tokenizer) Size() int { return len(t.text) }

// Entry returns an entry's token, false when the vocabulary doesn't have it.
func (t *Tokenizer) Entry(text string) (Token, bool) {
	at := slices.Index(t.text[firstEntry:], text)
	return firstEntry + Token(at), at >= 0
}

// Byte returns the token of a single byte.
func Byte(b byte) Token { return firstByte + Token(b) }

// Encode returns the tokens of a text. DSML in it becomes DSML's tokens,
// control tokens never come out.
func (t *Tokenizer) Encode(text string) []Token { return t.AppendEncode(nil, text) }

// AppendEncode appends the tokens of a text. What dst ends with must not end
// with a letter, digit or underscore: a control token or DSML, say.
func (t *Tokenizer) AppendEncode(dst []Token, text string) []Token {
	previous := Padding
	for i := 0; i < len(text); {
		id, n := t.at(text[i:])
		if id == Byte(' ') {
			if next, _ := t.at(text[i+1:]); t.spaceBetween(previous, next) {
				i++
				continue
			}
		}
		if isByte(id) {
			for _, c := range []byte(text[i : i+n]) {
				id = Byte(c)
				dst = append(dst, id)
			}
		} else {
			dst = append(dst, id)
		}
		previous = id
		i += n
	}
	return dst
}

// at returns what text begins with and its length: an entry's token, or the
// first byte's for a run or a sign that is spelled. The length is 0 at the end.
func (t *Tokenizer) at(text string) (id Token, length int) {
	if text == "" {
		return Padding, 0
	}
	if n := wordLength(text); n > 0 {
		if id, ok := t.word[text[:n]]; ok {
			return id, n
		}
		return Byte(text[0]), n
	}
	for _, id := range t.signs[text[0]] {
		e := t.text[id]
		cuts := IsWordByte(e[len(e)-1]) && len(e) < len(text) && IsWordByte(text[len(e)])
		if strings.HasPrefix(text, e) && !cuts {
			return id, len(e)
		}
	}
	return Byte(text[0]), 1
}

// spaceBetween says whether a space is implied between two tokens.
func (t *Tokenizer) spaceBetween(a, b Token) bool {
	left, right := t.text[a], t.text[b]
	return IsWordByte(left[len(left)-1]) && IsWordByte(right[0]) && (!isByte(a) || !isByte(b))
}

func isByte(id Token) bool { return firstByte <= id && id < firstMarkup }

// Decode returns the text of tokens. Decode(Encode(s)) is s, whatever its
// bytes are.
func (t *Tokenizer) Decode(tokens []Token) string {
	var dst []byte
	previous := Padding
	for _, id := range tokens {
		dst = t.AppendText(dst, previous, id)
		previous = id
	}
	return string(dst)
}

// AppendText appends the text that a token adds after the token previous
// (Padding when there is none). It may end within a rune of several bytes. A
// token outside the vocabulary adds U+FFFD.
func (t *Tokenizer) AppendText(dst []byte, previous, id Token) []byte {
	if !t.has(id) {
		return append(dst, "\uFFFD"...)
	}
	if t.has(previous) && t.spaceBetween(previous, id) {
		dst = append(dst, ' ')
	}
	return append(dst, t.text[id]...)
}

func (t *Tokenizer) has(id Token) bool { return uint32(id) < uint32(len(t.text)) }

// wordLength is the length of the run of word bytes that text begins with.
func wordLength(text string) int {
	for i := range len(text) {
		if !IsWordByte(text[i]) {
			return i
		}
	}
	return len(text)
}

// IsWordByte says whether c is an ASCII letter, digit or underscore.
func IsWordByte(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_'
}

package model

import (
	"errors"
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

// The pieces of DSML, one token each. The order gives their numbers.
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

const firstWord = firstMarkup + Token(len(markup))

// Tokenizer turns text into tokens and back.
//
// The vocabulary is the control tokens, the 256 bytes, the pieces of DSML and
// a list of words. A word is a longest run of ASCII letters, digits and
// underscores; a run that isn't in the list is spelled in bytes, as is
// everything else, so that a made-up code never has a word inside. One space
// between two words of the list is left out, and decoding puts it back: it
// stands exactly where two word tokens meet, because two longest runs can't
// touch. So decoding gives back any bytes, and the text of a token depends on
// no token but the one before it.
//
// A Tokenizer is safe for use by several goroutines.
type Tokenizer struct {
	text []string // by token
	word map[string]Token
}

// NewTokenizer makes a tokenizer with the words of the list, whose order
// gives their numbers. A word that is empty, double, a single letter (its
// byte would be another token for the same text) or not made of letters,
// digits and underscores is an error.
func NewTokenizer(words []string) (*Tokenizer, error) {
	t := &Tokenizer{word: make(map[string]Token, len(words))}
	t.text = append(t.text, controlText[:]...)
	for b := range 256 {
		t.text = append(t.text, string([]byte{byte(b)}))
	}
	t.text = append(t.text, markup[:]...)
	for _, w := range words {
		if len(w) < 2 || wordLength(w) != len(w) {
			return nil, fmt.Errorf("vocabulary: %q is not a word of two or more letters, digits and underscores", w)
		}
		if _, ok := t.word[w]; ok {
			return nil, fmt.Errorf("vocabulary: the word %q is there twice", w)
		}
		t.word[w] = Token(len(t.text))
		t.text = append(t.text, w)
	}
	return t, nil
}

// ParseVocabulary reads a vocabulary file: one word a line.
func ParseVocabulary(file string) (*Tokenizer, error) {
	if file == "" {
		return nil, errors.New("vocabulary: the file is empty")
	}
	return NewTokenizer(strings.Split(strings.TrimSuffix(file, "\n"), "\n"))
}

// Size is the number of tokens.
func (t *Tokenizer) Size() int { return len(t.text) }

// Words returns the word tokens' text, in the order of their numbers.
func (t *Tokenizer) Words() []string { return slices.Clone(t.text[firstWord:]) }

// Word returns the token of a word, false when the list doesn't have it.
func (t *Tokenizer) Word(w string) (Token, bool) {
	id, ok := t.word[w]
	return id, ok
}

// Byte returns the token of a single byte.
func Byte(b byte) Token { return firstByte + Token(b) }

// Encode returns the tokens of a text. Pieces of DSML in it become their
// tokens, control tokens never come out.
func (t *Tokenizer) Encode(text string) []Token { return t.AppendEncode(nil, text) }

// AppendEncode appends the tokens of a text, which begins after anything but
// a word: at a sequence's start, after a control token or a piece of DSML.
func (t *Tokenizer) AppendEncode(dst []Token, text string) []Token {
	afterWord, space := false, false // space: a single space after a word waits for what follows
	for text != "" {
		if id, n := markupAt(text); n > 0 {
			if space {
				dst = append(dst, Byte(' '))
			}
			dst, text = append(dst, id), text[n:]
			afterWord, space = false, false
			continue
		}
		n := wordLength(text)
		if id, ok := t.word[text[:n]]; ok {
			dst, text = append(dst, id), text[n:]
			afterWord, space = true, false
			continue
		}
		if space {
			dst = append(dst, Byte(' '))
		}
		space = n == 0 && afterWord && text[0] == ' '
		afterWord = false
		if space {
			text = text[1:]
			continue
		}
		n = max(n, 1)
		for i := range n {
			dst = append(dst, Byte(text[i]))
		}
		text = text[n:]
	}
	if space {
		dst = append(dst, Byte(' '))
	}
	return dst
}

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
	if uint32(id) >= uint32(len(t.text)) {
		return append(dst, "\uFFFD"...)
	}
	if previous >= firstWord && id >= firstWord {
		dst = append(dst, ' ')
	}
	return append(dst, t.text[id]...)
}

// wordLength is the length of the run of letters, digits and underscores that
// text begins with.
func wordLength(text string) int {
	for i := range len(text) {
		c := text[i]
		if c != '_' && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') {
			return i
		}
	}
	return len(text)
}

// markupAt returns the piece of DSML that text begins with and its length, 0
// when there is none. No piece begins with another.
func markupAt(text string) (Token, int) {
	if text[0] != '<' && text[0] != '"' {
		return 0, 0
	}
	for i, m := range markup {
		if strings.HasPrefix(text, m) {
			return firstMarkup + Token(i), len(m)
		}
	}
	return 0, 0
}

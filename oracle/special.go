package oracle

import (
	"strings"
	"unicode"

	"github.com/culprit-project/culprit/history"
)

// SpecialToken is a model's own control token in text that a user or a
// program reads.
const SpecialToken Class = "SpecialToken"

// Special looks for special tokens in every visible text.
var Special = Oracle{
	Name:    "special",
	Classes: []Class{SpecialToken},
	New:     func(history.Header) Observer { return &specialObserver{} },
}

type specialObserver struct{}

func (o *specialObserver) Op(v *View, rec *Recorder) {
	texts := v.Texts()
	if len(texts) == 0 {
		return
	}
	rec.Trial(v.Op.ID, SpecialToken)
	for _, t := range texts {
		text := t.Text
		if t.Where == "content" {
			text = afterThinking(text)
		}
		at, token := specialToken(text)
		if token == "" || v.wasGiven(token) {
			continue
		}
		rec.Violation(Violation{
			Class: SpecialToken, Op: v.Op.ID,
			Want: "text", Got: excerpt(text, at),
			Note:     token + " in the " + t.Where,
			Severity: 1,
		})
		return
	}
}

func (o *specialObserver) Event(*history.Event, *Recorder) {}
func (o *specialObserver) Finish(*Recorder)                {}

// wasGiven says whether s stands in anything that the model was given.
func (v *View) wasGiven(s string) bool {
	for text := range v.given() {
		if strings.Contains(text, s) {
			return true
		}
	}
	return false
}

// afterThinking cuts off a leading <think>...</think>: a server that isn't
// told to part reasoning from content sends it so, and that is no damage.
func afterThinking(content string) string {
	rest, ok := strings.CutPrefix(strings.TrimLeft(content, " \n"), "<think>")
	if !ok {
		return content
	}
	if _, after, closed := strings.Cut(rest, "</think>"); closed {
		return after
	}
	return "" // cut while thinking
}

// specialToken returns the first special token of s and where it is; "" if
// there is none.
func specialToken(s string) (at int, token string) {
	// They all begin with < or [.
	for i := 0; i < len(s); {
		next := strings.IndexByte(s[i:], '<')
		end := len(s)
		if next >= 0 {
			end = i + next
		}
		if at, token := bracketToken(s[i:end]); token != "" {
			return i + at, token
		}
		if next < 0 {
			return 0, ""
		}
		if token := angleToken(s[end:], s[:end]); token != "" {
			return end, token
		}
		i = end + 1
	}
	return 0, ""
}

// bracketTokens and angleTokens are the added tokens of common models that
// don't have the form <|...|>. Left out are those that ordinary text holds:
// BERT's [CLS] and [MASK].
var (
	bracketTokens = []string{
		"[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
		"[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[gMASK]",
	}
	angleTokens = []string{
		"<bos>", "<eos>", "<pad>", "<unk>", "<think>", "</think>", "<start_of_turn>", "<end_of_turn>",
		"<start_of_image>", "<end_of_image>", "<image_soft_token>", "<end_of_utterance>", "<[PAD]>", "<[BOS]>", "<[EOS]>",
	}
)

func bracketToken(s string) (at int, token string) {
	for i := 0; ; {
		next := strings.IndexByte(s[i:], '[')
		if next < 0 {
			return 0, ""
		}
		i += next
		for _, token := range bracketTokens {
			if strings.HasPrefix(s[i:], token) {
				return i, token
			}
		}
		i++
	}
}

// angleToken returns the special token that s, which begins with <, begins
// with; before is what stands before it.
func angleToken(s, before string) string {
	if len(s) < 3 {
		return ""
	}
	switch s[1] {
	case '|':
		return barred(s, "<|", "|>")
	case "｜"[0]:
		return barred(s, "<｜", "｜>")
	case '0': // a byte that should have become part of a character: <0xE2>
		if len(s) >= 6 && s[2] == 'x' && isHex(s[3]) && isHex(s[4]) && s[5] == '>' {
			return s[:6]
		}
	case 'u':
		if rest, ok := strings.CutPrefix(s, "<unused"); ok {
			digits := 0
			for digits < len(rest) && rest[digits] >= '0' && rest[digits] <= '9' {
				digits++
			}
			if digits > 0 && strings.HasPrefix(rest[digits:], ">") {
				return s[:len("<unused")+digits+1]
			}
		}
	case 's', '/':
		if token := sentenceToken(s, before); token != "" {
			return token
		}
	}
	if before != "" && strings.IndexByte("Pg?k", before[len(before)-1]) >= 0 {
		return "" // a group of a regular expression: (?P<unk>
	}
	for _, token := range angleTokens {
		if strings.HasPrefix(s, token) {
			return token
		}
	}
	return ""
}

// barred returns the token in bars that s begins with: a name without spaces
// between them, at most 64 bytes.
func barred(s, opening, closing string) string {
	rest, ok := strings.CutPrefix(s, opening)
	if !ok {
		return ""
	}
	end := strings.Index(rest[:min(len(rest), 64+len(closing))], closing)
	if end <= 0 || strings.ContainsAny(rest[:end], " \t\n<>|") || strings.IndexFunc(rest[:end], unicode.IsLetter) < 0 {
		return ""
	}
	return s[:len(opening)+end+len(closing)]
}

// sentenceToken returns <s> where only a special token stands, at the start
// or after another, and </s> where it can't be the end of HTML's
// strikethrough: with no <s> before it on its line.
func sentenceToken(s, before string) string {
	if strings.HasPrefix(s, "</s>") {
		line := before[strings.LastIndexByte(before, '\n')+1:]
		if strings.Contains(line, "<s>") {
			return ""
		}
		return "</s>"
	}
	if strings.HasPrefix(s, "<s>") && (strings.TrimSpace(before) == "" || strings.HasSuffix(before, "</s>")) {
		line, _, _ := strings.Cut(s, "\n")
		if strings.Contains(line, "</s>") {
			return ""
		}
		return "<s>"
	}
	return ""
}

func isHex(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F'
}

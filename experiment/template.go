package experiment

import (
	"errors"
	"fmt"
	"strings"
)

// value is what a level puts in the place of {{its factor}}.
type value struct {
	none bool     // nothing: the argument or the variable isn't there
	list bool     // several arguments, or none
	text []string // one, unless it is a list
}

// template is a text with {{factors}} in it. \{{ stands for two plain braces.
type template struct {
	parts []part
}

type part struct {
	text   string
	factor string // its name instead of text
}

func parseTemplate(text string) (template, error) {
	var t template
	var plain strings.Builder
	flush := func() {
		if plain.Len() > 0 {
			t.parts = append(t.parts, part{text: plain.String()})
			plain.Reset()
		}
	}
	for text != "" {
		at := strings.Index(text, "{{")
		switch {
		case at < 0:
			plain.WriteString(text)
			text = ""
		case at > 0 && text[at-1] == '\\':
			plain.WriteString(text[:at-1] + "{{")
			text = text[at+2:]
		default:
			plain.WriteString(text[:at])
			name, rest, ok := strings.Cut(text[at+2:], "}}")
			if name = strings.TrimSpace(name); !ok || !factorName.MatchString(name) {
				return t, fmt.Errorf(`%q: want {{FACTOR}}; write \{{ for plain braces`, text)
			}
			flush()
			t.parts = append(t.parts, part{factor: name})
			text = rest
		}
	}
	flush()
	return t, nil
}

// factors lists the names in a template.
func (t *template) factors() []string {
	var names []string
	for _, p := range t.parts {
		if p.factor != "" {
			names = append(names, p.factor)
		}
	}
	return names
}

// whole is the factor whose value is the whole text, if it is one.
func (t *template) whole() (string, bool) {
	if len(t.parts) == 1 && t.parts[0].factor != "" {
		return t.parts[0].factor, true
	}
	return "", false
}

var errNotOneText = errors.New("a list, or nothing, can't stand inside a text: make the argument {{FACTOR}} alone")

// one renders a text. ok is false when it is nothing.
func (t *template) one(values map[string]value) (text string, ok bool, err error) {
	if name, whole := t.whole(); whole && values[name].none {
		return "", false, nil
	}
	var b strings.Builder
	for _, p := range t.parts {
		if p.factor == "" {
			b.WriteString(p.text)
			continue
		}
		v := values[p.factor]
		if v.none || v.list {
			return "", false, fmt.Errorf("{{%s}}: %w", p.factor, errNotOneText)
		}
		b.WriteString(v.text[0])
	}
	return b.String(), true, nil
}

// arguments renders a command: a level that is a list becomes as many
// arguments.
func arguments(command []template, values map[string]value) ([]string, error) {
	var args []string
	for _, t := range command {
		if name, whole := t.whole(); whole {
			args = append(args, values[name].text...)
			continue
		}
		text, _, err := t.one(values)
		if err != nil {
			return nil, err
		}
		args = append(args, text)
	}
	return args, nil
}

// splitWords splits a command line as a shell does, with quotes and
// backslashes and nothing else of a shell.
func splitWords(line string) ([]string, error) {
	var words []string
	var word strings.Builder
	inWord, quote := false, byte(0)
	for i := 0; i < len(line); i++ {
		c := line[i]
		switch {
		case quote == 0 && (c == ' ' || c == '\t' || c == '\n'):
			if inWord {
				words = append(words, word.String())
				word.Reset()
			}
			inWord = false
		case quote == 0 && (c == '\'' || c == '"'):
			quote, inWord = c, true
		case c == quote:
			quote = 0
		case c == '\\' && quote != '\'' && i+1 < len(line) && (quote == 0 || strings.IndexByte("\\\"$`\n", line[i+1]) >= 0):
			i++
			if line[i] != '\n' {
				word.WriteByte(line[i])
				inWord = true
			}
		default:
			word.WriteByte(c)
			inWord = true
		}
	}
	if quote != 0 {
		return nil, fmt.Errorf("command %q: a quote %c doesn't end", line, quote)
	}
	if inWord {
		words = append(words, word.String())
	}
	return words, nil
}

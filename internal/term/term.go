// Package term is everything that is printed for people: styles, tables,
// progress. Nothing else prints. The rules of the output:
//
//   - it reads well at 80 columns, without colour, and in a log file
//   - text that a model or a server wrote goes through [Safe]
//   - numbers stand right, words left; a percentage has the digits it has earned
package term

import (
	"fmt"
	"io"
	"regexp"
	"strings"
	"sync"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/mattn/go-runewidth"
)

// Screen writes for people. It is safe for use by several goroutines.
type Screen struct {
	Width int  // in columns; 0 means 80
	Color bool // whether escape sequences may be written
	Live  bool // whether a progress line may be rewritten in place

	mu       sync.Mutex
	w        io.Writer
	progress bool // a progress line is on the screen
}

// NewScreen returns a plain screen of 80 columns.
func NewScreen(w io.Writer) *Screen { return &Screen{w: w, Width: 80} }

// Columns is the width to lay out for, between 40 and 120.
func (s *Screen) Columns() int {
	if s.Width == 0 {
		return 80
	}
	return min(max(s.Width, 40), 120)
}

// Printf writes text, below or in the place of a progress line.
func (s *Screen) Printf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clear()
	fmt.Fprintf(s.w, format, args...)
}

// Progress shows a line of progress. On a live screen it replaces the last
// one; elsewhere it is a line of its own, so callers send it less often.
func (s *Screen) Progress(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.Live {
		fmt.Fprintln(s.w, line)
		return
	}
	s.clear()
	fmt.Fprint(s.w, Clip(line, s.Columns()-1))
	s.progress = true
}

func (s *Screen) clear() {
	if s.progress {
		fmt.Fprint(s.w, "\r\x1b[K")
		s.progress = false
	}
}

// Style is a way to set off text.
type Style string

// The styles in use. Colour never carries meaning alone.
const (
	Bold   Style = "1"
	Faint  Style = "2"
	Red    Style = "31"
	Green  Style = "32"
	Yellow Style = "33"
	Cyan   Style = "36"
)

// Paint sets text off where colour is allowed.
func (s *Screen) Paint(text string, styles ...Style) string {
	if !s.Color || text == "" {
		return text
	}
	codes := make([]string, len(styles))
	for i, st := range styles {
		codes[i] = string(st)
	}
	return "\x1b[" + strings.Join(codes, ";") + "m" + text + "\x1b[0m"
}

// Safe makes text that somebody else wrote fit to print on one line: control
// characters, escape sequences, direction overrides and invalid UTF-8 become
// visible escapes.
func Safe(text string) string {
	var b strings.Builder
	for i := 0; i < len(text); {
		r, size := utf8.DecodeRuneInString(text[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, text[i])
		case r == '\n':
			b.WriteString(`\n`)
		case r == '\t':
			b.WriteString(`\t`)
		case r == '\r':
			b.WriteString(`\r`)
		case r != ' ' && !unicode.IsGraphic(r) || unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r) || unicode.Is(unicode.Bidi_Control, r):
			if r < 0x100 {
				fmt.Fprintf(&b, `\x%02x`, r)
			} else {
				fmt.Fprintf(&b, `\u%04x`, r)
			}
		default:
			b.WriteRune(r)
		}
		i += size
	}
	return b.String()
}

// Duration shows about three digits: 5.4 ms, 1.5 s, 120 s, 12.5 min, 3.2 h.
func Duration(d time.Duration) string {
	switch s := d.Seconds(); {
	case d < 10*time.Millisecond:
		return fmt.Sprintf("%.1f ms", 1000*s)
	case d < time.Second:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 100*time.Second:
		return fmt.Sprintf("%.1f s", s)
	case d < 10*time.Minute:
		return fmt.Sprintf("%.0f s", s)
	case d < 100*time.Minute:
		return fmt.Sprintf("%.1f min", s/60)
	default:
		return fmt.Sprintf("%.1f h", s/3600)
	}
}

// Clip cuts text to a number of columns, with an ellipsis where it was cut.
func Clip(text string, columns int) string {
	return runewidth.Truncate(text, max(columns, 1), "…")
}

// Wrap breaks text at spaces into lines of at most so many columns; a longer
// word is broken, after a comma if there is one in its latter half.
func Wrap(text string, columns int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		for runewidth.StringWidth(word) > columns {
			room := columns
			if line != "" {
				lines, line = append(lines, line), ""
			}
			head := runewidth.Truncate(word, room, "")
			if i := strings.LastIndexByte(head, ',') + 1; i > len(head)/2 {
				head = head[:i] // JSON without spaces
			}
			if head == "" { // a single character that is wider than the room
				break
			}
			lines, word = append(lines, head), word[len(head):]
		}
		switch {
		case line == "":
			line = word
		case runewidth.StringWidth(line)+1+runewidth.StringWidth(word) <= columns:
			line += " " + word
		default:
			lines, line = append(lines, line), word
		}
	}
	if line != "" {
		lines = append(lines, line)
	}
	return lines
}

// escapes are what [Screen.Paint] adds.
var escapes = regexp.MustCompile("\x1b\\[[0-9;]*m")

// columns is the width of painted text.
func columns(text string) int { return runewidth.StringWidth(escapes.ReplaceAllString(text, "")) }

// Table lays rows out in columns. The first row is the head. align has one
// letter a column: l or r.
func (s *Screen) Table(align string, rows [][]string) string {
	if len(rows) == 0 {
		return ""
	}
	widths := make([]int, len(align))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], columns(cell))
		}
	}
	var b strings.Builder
	for r, row := range rows {
		var line strings.Builder
		line.WriteString(" ")
		for i, cell := range row {
			pad := strings.Repeat(" ", widths[i]-columns(cell))
			if align[i] == 'r' {
				line.WriteString(" " + pad + cell)
			} else {
				line.WriteString(" " + cell + pad)
			}
			if i < len(row)-1 {
				line.WriteString(" ")
			}
		}
		text := strings.TrimRight(line.String(), " ")
		if r == 0 {
			text = s.Paint(text, Faint)
		}
		b.WriteString(text + "\n")
	}
	return b.String()
}

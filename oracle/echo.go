package oracle

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/culprit-project/culprit/history"
)

// Classes of damage to a text that was to be copied. An op gets at most one:
// its first damage.
const (
	EchoFirstToken  Class = "EchoFirstToken"  // the very start of the reply is wrong
	EchoDoubled     Class = "EchoDoubled"     // something stands there twice
	EchoDropped     Class = "EchoDropped"     // something is missing
	EchoSubstituted Class = "EchoSubstituted" // something else stands in its place
)

var echoClasses = []Class{EchoFirstToken, EchoDoubled, EchoDropped, EchoSubstituted}

// Echo judges ops that were to repeat given lines.
var Echo = Oracle{
	Name:    "echo",
	Classes: echoClasses,
	New:     func(history.Header) Observer { return &echoObserver{} },
}

type echoObserver struct{}

func (o *echoObserver) Op(v *View, rec *Recorder) {
	if len(v.Op.Expect.Copy) == 0 || !v.Complete() {
		return
	}
	rec.Trial(v.Op.ID, echoClasses...)
	d, bad := echoDamage(v.Op.Expect.Copy, v.Reply.Content, v.Reply.FinishReason == "length")
	if !bad {
		return
	}
	rec.Violation(Violation{
		Class: d.class, Op: v.Op.ID, Want: d.want, Got: d.got,
		Note: d.note(len(v.Op.Expect.Copy)),
		// The more was copied rightly before, the less it is the model.
		Severity: float64(d.line) / float64(len(v.Op.Expect.Copy)),
	})
}

func (o *echoObserver) Event(*history.Event, *Recorder) {}
func (o *echoObserver) Finish(*Recorder)                {}

// damage is the first place where a copy differs from its original.
type damage struct {
	class     Class
	line      int // from 0, of the original
	char      int // from 0, in that line; -1 when it is the line as a whole
	want, got string
}

func (d damage) note(lines int) string {
	note := fmt.Sprintf("line %d of %d", d.line+1, lines)
	if d.char >= 0 {
		note += fmt.Sprintf(", character %d", d.char+1)
	}
	return note
}

// echoDamage compares the lines of text with those to be copied, in order.
// It looks past what weak models put around a copy: bullets, numbers, quotes,
// code fences, empty lines, a sentence before and after. cut says that the
// reply ran into its token limit, so that its last line may be a part and
// later ones may be missing.
func echoDamage(want []string, text string, cut bool) (damage, bool) {
	got := copiedLines(text)
	if len(got) == 0 {
		if cut {
			return damage{}, false
		}
		return damage{EchoDropped, 0, -1, want[0], ""}, true
	}
	got = got[preface(want, got):]
	for i, line := range want {
		wanted := bare(line)
		if i >= len(got) {
			if cut {
				return damage{}, false
			}
			return damage{EchoDropped, i, -1, wanted, ""}, true
		}
		found := got[i]
		if found == wanted {
			continue
		}
		if cut && i == len(got)-1 && strings.HasPrefix(wanted, found) {
			return damage{}, false
		}
		return lineDamage(want, got, i), true
	}
	if len(got) > len(want) && got[len(want)] == bare(want[len(want)-1]) {
		last := len(want) - 1
		return damage{EchoDoubled, last, -1, "", got[len(want)]}, true
	}
	return damage{}, false
}

// lineDamage says what happened where got first differs from want, at i.
func lineDamage(want, got []string, i int) damage {
	wanted, found := bare(want[i]), got[i]
	switch {
	case i > 0 && found == bare(want[i-1]):
		return damage{EchoDoubled, i - 1, -1, wanted, found}
	case i+1 < len(want) && found == bare(want[i+1]):
		class := EchoDropped
		if i == 0 {
			class = EchoFirstToken
		}
		return damage{class, i, -1, wanted, found}
	}
	prefix := samePrefix(wanted, found)
	suffix := sameSuffix(wanted[prefix:], found[prefix:])
	d := damage{EchoSubstituted, i, utf8.RuneCountInString(wanted[:prefix]), wanted, found}
	missing, extra := wanted[prefix:len(wanted)-suffix], found[prefix:len(found)-suffix]
	switch {
	case i == 0 && prefix == 0:
		d.class = EchoFirstToken
	case missing == "" && isRepeat(found, prefix, extra):
		d.class = EchoDoubled
	case extra == "":
		d.class = EchoDropped
	}
	return d
}

// isRepeat says whether extra, which stands at place at of s, repeats what
// stands before or after it.
func isRepeat(s string, at int, extra string) bool {
	return strings.HasSuffix(s[:at], extra) || strings.HasPrefix(s[at+len(extra):], extra)
}

// preface returns how many of got's first lines are talk before the copy: the
// lines before the first that is, or looks like, one of the first two to be
// copied. If there is none, none is.
func preface(want, got []string) int {
	const most = 3
	for n := range min(len(got), most+1) {
		for _, line := range want[:min(2, len(want))] {
			if alike(bare(line), got[n]) {
				return n
			}
		}
	}
	return 0
}

// alike says whether two lines share half of the longer one, at their ends.
func alike(a, b string) bool {
	prefix := samePrefix(a, b)
	suffix := sameSuffix(a[prefix:], b[prefix:])
	return 2*(prefix+suffix) >= max(len(a), len(b))
}

func samePrefix(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[i] != b[i] {
			n = i
			break
		}
	}
	for n > 0 && n < len(a) && !utf8.RuneStart(a[n]) {
		n--
	}
	return n
}

func sameSuffix(a, b string) int {
	n := min(len(a), len(b))
	for i := range n {
		if a[len(a)-1-i] != b[len(b)-1-i] {
			n = i
			break
		}
	}
	for n > 0 && !utf8.RuneStart(a[len(a)-n]) {
		n--
	}
	return n
}

// copiedLines returns the lines of text without dress; empty lines and code
// fences are left out.
func copiedLines(text string) []string {
	lines := make([]string, 0, 1+strings.Count(text, "\n"))
	for line := range strings.Lines(text) {
		if strings.HasPrefix(strings.TrimSpace(line), "```") {
			continue
		}
		if line = bare(line); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

// bare strips a line of the dress that weak models give it: space, a bullet
// or a number in front, and quotes, backticks or stars around it. It is used
// on both sides, so that nothing that was to be copied is lost.
func bare(line string) string {
	line = strings.TrimSpace(line)
	for _, bullet := range []string{"- ", "* ", "• ", "> "} {
		if rest, ok := strings.CutPrefix(line, bullet); ok {
			line = rest
			break
		}
	}
	digits := 0
	for digits < len(line) && line[digits] >= '0' && line[digits] <= '9' {
		digits++
	}
	if digits > 0 && digits <= 4 && digits+1 < len(line) && (line[digits] == '.' || line[digits] == ')' || line[digits] == ':') && line[digits+1] == ' ' {
		line = line[digits+2:]
	}
	line = strings.TrimSpace(line)
	line = strings.TrimRight(line, ",;")
	return strings.Trim(line, "`'\"*")
}

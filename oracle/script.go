package oracle

import (
	"fmt"
	"slices"
	"sync"
	"unicode"
	"unicode/utf8"

	"github.com/culprit-project/culprit/history"
)

// Classes of text that no reader of the prompt would expect.
const (
	// MixedScripts is writing in scripts that neither the prompt nor the
	// expected answer uses: the look of "token salad".
	MixedScripts Class = "MixedScripts"
	// BrokenText is bytes that aren't UTF-8, or U+FFFD in their place.
	BrokenText Class = "BrokenText"
)

// Script looks at which scripts a reply is written in.
var Script = Oracle{
	Name:    "script",
	Classes: []Class{MixedScripts, BrokenText},
	New:     func(history.Header) Observer { return &scriptObserver{} },
}

type scriptObserver struct{}

func (o *scriptObserver) Op(v *View, rec *Recorder) {
	texts := v.Texts()
	if len(texts) == 0 {
		return
	}
	rec.Trial(v.Op.ID, MixedScripts, BrokenText)
	var in scriptCount
	ascii := true
	for _, t := range texts {
		ascii = in.add(t.Text) && ascii
	}
	if ascii {
		return
	}
	if _, bad := in.salad(scriptSet{}); bad {
		// Only now is the prompt worth decoding.
		if s, bad := in.salad(v.knownScripts()); bad {
			rec.Violation(Violation{
				Class: MixedScripts, Op: v.Op.ID,
				Want: "scripts of the prompt", Got: s.excerpt,
				Note:     s.String(),
				Severity: float64(s.letters),
			})
		}
	}
	if in.broken >= brokenRunes {
		for s := range v.given() {
			if broken, _ := countBroken(s); broken > 0 {
				return
			}
		}
		rec.Violation(Violation{
			Class: BrokenText, Op: v.Op.ID,
			Want: "valid UTF-8", Got: in.brokenExcerpt,
			Note:     fmt.Sprintf("%d characters are U+FFFD or not UTF-8", in.broken),
			Severity: float64(in.broken),
		})
	}
}

func (o *scriptObserver) Event(*history.Event, *Recorder) {}
func (o *scriptObserver) Finish(*Recorder)                {}

// knownScripts are the scripts of everything that the model was given.
func (v *View) knownScripts() scriptSet {
	var known scriptSet
	for s := range v.given() {
		known.add(s)
	}
	return known
}

// scriptCount counts the letters of a text by script.
type scriptCount struct {
	letters       [maxScripts]uint32
	example       [maxScripts]string // around the first letter of that script
	broken        int                // U+FFFD and bytes that aren't UTF-8, but for a cut end
	brokenExcerpt string
}

// add counts text and says whether it is plain ASCII (and so counts nothing).
func (c *scriptCount) add(text string) (ascii bool) {
	start := asciiPrefix(text)
	if start == len(text) {
		return true
	}
	for i, r := range text[start:] {
		if r < utf8.RuneSelf {
			continue
		}
		id := scriptOf(r)
		if c.letters[id] == 0 {
			c.example[id] = excerpt(text, start+i)
		}
		c.letters[id]++
	}
	broken, at := countBroken(text)
	if broken > 0 && c.broken == 0 {
		c.brokenExcerpt = excerpt(text, at)
	}
	c.broken += broken
	return false
}

// salad says whether the scripts that aren't known make a text suspicious.
func (c *scriptCount) salad(known scriptSet) (f scriptFinding, bad bool) {
	for id := range c.letters {
		n := int(c.letters[id])
		if n == 0 || scriptID(id) == common || known.has(scriptID(id)) {
			continue
		}
		f.scripts++
		if n > f.letters {
			f.letters, f.most, f.excerpt = n, scriptID(id), c.example[id]
		}
		f.total += n
	}
	return f, f.letters >= strangeLetters || f.scripts >= strangeScripts
}

// scriptFinding describes letters of unexpected scripts.
type scriptFinding struct {
	scripts int      // how many unexpected scripts
	most    scriptID // the one with the most letters
	letters int      // of that one
	total   int      // of all of them
	excerpt string
}

func (f scriptFinding) String() string {
	return fmt.Sprintf("%d letters in %d scripts that the prompt doesn't use, %d of them %s",
		f.total, f.scripts, f.letters, scripts().names[f.most])
}

// countBroken counts U+FFFD and bytes that aren't UTF-8, and gives the place
// of the first. Those at the very end don't count: a reply may be cut in the
// middle of a character.
func countBroken(s string) (n, first int) {
	trailing := 0
	for i, r := range s {
		if r != utf8.RuneError {
			n += trailing
			trailing = 0
			continue
		}
		if n+trailing == 0 {
			first = i
		}
		trailing++
	}
	// A character has at most three bytes to be cut off; more is damage.
	if trailing > 3 {
		n += trailing
	}
	return n, first
}

// scriptID is a script's place in the table. Scripts that are written
// together are one: the Japanese and Chinese ones, and all of Latin, digits,
// signs and marks ("common").
type scriptID uint8

const common scriptID = 0

const maxScripts = 256

type scriptSet [maxScripts / 64]uint64

func (s *scriptSet) has(id scriptID) bool { return s[id/64]&(1<<(id%64)) != 0 }

// add puts the scripts of text into the set.
func (s *scriptSet) add(text string) {
	for _, r := range text[asciiPrefix(text):] {
		if r >= utf8.RuneSelf {
			id := scriptOf(r)
			s[id/64] |= 1 << (id % 64)
		}
	}
}

type scriptRange struct {
	lo, hi rune
	id     scriptID
}

type scriptTable struct {
	ranges []scriptRange // sorted, disjoint
	names  []string
}

// scripts is Unicode's table, turned from one table per script into one that
// a binary search answers in a few steps.
var scripts = sync.OnceValue(func() *scriptTable {
	t := &scriptTable{names: []string{"common"}}
	ids := map[string]scriptID{"Common": common, "Inherited": common, "Latin": common}
	for _, together := range [][]string{{"Han", "Hiragana", "Katakana", "Bopomofo"}} {
		for _, name := range together {
			ids[name] = scriptID(len(t.names))
		}
		t.names = append(t.names, together[0])
	}
	names := make([]string, 0, len(unicode.Scripts))
	for name := range unicode.Scripts {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		id, ok := ids[name]
		if !ok {
			id = scriptID(len(t.names))
			t.names = append(t.names, name)
		}
		if id == common {
			continue
		}
		for _, r := range unicode.Scripts[name].R16 {
			t.addRange(rune(r.Lo), rune(r.Hi), rune(r.Stride), id)
		}
		for _, r := range unicode.Scripts[name].R32 {
			t.addRange(rune(r.Lo), rune(r.Hi), rune(r.Stride), id)
		}
	}
	slices.SortFunc(t.ranges, func(a, b scriptRange) int { return int(a.lo - b.lo) })
	return t
})

func (t *scriptTable) addRange(lo, hi, stride rune, id scriptID) {
	if stride == 1 {
		t.ranges = append(t.ranges, scriptRange{lo, hi, id})
		return
	}
	for r := lo; r <= hi; r += stride {
		t.ranges = append(t.ranges, scriptRange{r, r, id})
	}
}

func scriptOf(r rune) scriptID {
	ranges := scripts().ranges
	i, found := slices.BinarySearchFunc(ranges, r, func(x scriptRange, r rune) int {
		switch {
		case x.hi < r:
			return -1
		case x.lo > r:
			return 1
		default:
			return 0
		}
	})
	if !found {
		return common
	}
	return ranges[i].id
}

// asciiPrefix returns the length of the longest prefix of s that is ASCII, or
// up to seven less.
func asciiPrefix(s string) int {
	i := 0
	for ; i+8 <= len(s); i += 8 {
		b := s[i : i+8]
		word := uint64(b[0]) | uint64(b[1])<<8 | uint64(b[2])<<16 | uint64(b[3])<<24 |
			uint64(b[4])<<32 | uint64(b[5])<<40 | uint64(b[6])<<48 | uint64(b[7])<<56
		if word&0x8080808080808080 != 0 {
			return i
		}
	}
	for j := i; j < len(s); j++ {
		if s[j] >= utf8.RuneSelf {
			return i
		}
	}
	return len(s)
}

// excerpt returns the text around position at, cut at characters.
func excerpt(s string, at int) string {
	const before, after = 20, 60
	lo, hi := max(at-before, 0), min(at+after, len(s))
	for lo > 0 && !utf8.RuneStart(s[lo]) {
		lo--
	}
	for hi < len(s) && !utf8.RuneStart(s[hi]) {
		hi++
	}
	return s[lo:hi]
}

package workload

import (
	"fmt"
	"math/rand/v2"
	"strings"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// script is a session whose requests don't depend on the replies.
type script struct {
	turns int
	turn  func(i int) Turn
	next  int
}

func (s *script) Next(*openai.Reply) (Turn, bool) {
	if s.next == s.turns {
		return Turn{}, false
	}
	s.next++
	return s.turn(s.next - 1), true
}

// prompt makes a turn of a system message and a user message. Tag and title
// head the prompt, so that it shares no cache page with another.
func (w *workload) prompt(tag, title, body, ask string, expect history.Expect) Turn {
	expect.Canary = tag
	system := fmt.Sprintf("Your tag is %s. %s.", tag, title)
	if body != "" {
		system += "\n" + body
	}
	return w.turn([]openai.Message{
		{Role: "system", Content: openai.Text(system)}, {Role: "user", Content: openai.Text(ask)},
	}, expect)
}

// locker is a fact of all kinds but agent: a name and a code.
type locker struct{ name, code string }

const (
	textLocker = "The code of locker %s is %s."
	textWhich  = "What is the code of locker %s?"
	textAlone  = " Answer with the code alone."
	textObject = ` Answer with a JSON object and nothing else: {"code":"CODE"}`
	textRepeat = "Repeat these %d lines exactly, one a line, and nothing else:\n%s"
)

func (l locker) tell() string { return fmt.Sprintf(textLocker, l.name, l.code) }
func (l locker) ask() string  { return fmt.Sprintf(textWhich, l.name) + textAlone }

func drawLockers(r *rand.Rand, n int) []locker {
	lockers := make([]locker, n)
	seen := map[string]bool{}
	for i, name := range drawNames(r, n) {
		lockers[i] = locker{name, drawCode(r, 4+r.IntN(2), seen)}
	}
	return lockers
}

// tellAll returns the lines that tell some lockers' codes.
func tellAll(lockers []locker) string {
	lines := make([]string, len(lockers))
	for i, l := range lockers {
		lines[i] = l.tell()
	}
	return strings.Join(lines, "\n")
}

// drawIdentifiers draws distinct made-up identifiers, such as mara-k7f2.
func drawIdentifiers(r *rand.Rand, n int) []string {
	identifiers := make([]string, n)
	seen := map[string]bool{}
	for i, name := range drawNames(r, n) {
		identifiers[i] = name + "-" + drawCode(r, 4, seen)
	}
	return identifiers
}

func repeat(lines []string) string {
	return fmt.Sprintf(textRepeat, len(lines), strings.Join(lines, "\n"))
}

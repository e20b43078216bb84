package oracle

import (
	"slices"
	"strings"

	"github.com/culprit-project/culprit/history"
)

// logs counts the lines of the server's logs that the case asks for. They
// judge nothing.
type logs struct{ counts []LogCount }

func (l *logs) event(e *history.Event) {
	const lines = "lines" // as whoever follows logs writes it
	n, counted := e.Values[lines]
	if e.Kind != history.Log || !counted {
		return
	}
	at, found := slices.BinarySearchFunc(l.counts, e.Name, func(c LogCount, name string) int { return strings.Compare(c.Name, name) })
	if !found {
		l.counts = slices.Insert(l.counts, at, LogCount{Name: e.Name, First: clip(e.Text, maxExampleBytes), AtMS: e.At.Milliseconds()})
	}
	l.counts[at].Lines += int(n)
}

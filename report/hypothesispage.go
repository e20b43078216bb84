package report

import (
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strings"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/ledger"
)

// hypothesisPage is a hypothesis with its predictions and their evidence.
type hypothesisPage struct {
	Name, Statement, Written string
	Verdict                  verdictPage
	Predictions              []predictionPage
}

type predictionPage struct {
	Text, Why, Number, Error string
	Before                   bool
	Verdict                  verdictPage
	Tally                    string // how much evidence there is
	Evidence                 []judgementRow
}

type judgementRow struct {
	Source, Href, Number, Error, Why string
	Before                           bool
	Verdict                          verdictPage
}

// verdictPage is a verdict in a word and a sign, so that it doesn't take colours
// to tell.
type verdictPage struct{ Word, Sign, Class string }

func newVerdictPage(v ledger.Verdict) verdictPage {
	switch v {
	case ledger.Supported:
		return verdictPage{"supported", "✓", "clean"}
	case ledger.Refuted:
		return verdictPage{"refuted", "✗", "fails"}
	case ledger.Rejected:
		return verdictPage{"rejected", "⊘", "warn"}
	case ledger.Undecided:
	}
	return verdictPage{verdictWord(v), "?", "warn"}
}

// newHypothesisPages shows where a case's hypotheses stand, on a page in dir.
func newHypothesisPages(s *Standing, dir string) []hypothesisPage {
	var pages []hypothesisPage
	for _, h := range s.Hypotheses {
		p := hypothesisPage{
			Name: visible(h.Name), Statement: visible(h.Statement), Verdict: newVerdictPage(h.Verdict),
			Written: fmt.Sprintf("Written %s, %s.", h.Written.Format("2006-01-02 15:04"), visible(h.Source)),
		}
		for _, sp := range h.Predictions {
			p.Predictions = append(p.Predictions, newPredictionPage(sp, s.Dir, dir))
		}
		pages = append(pages, p)
	}
	return pages
}

func newPredictionPage(sp Prediction, from, dir string) predictionPage {
	p := predictionPage{Text: visible(sp.Text), Why: stopped(because(&Prediction{Verdict: sp.Verdict, Error: sp.Error, Why: sp.Why})), Before: sp.Before, Verdict: newVerdictPage(sp.Verdict)}
	p.Number, p.Error = numbers(sp.Number, sp.Error)
	rejected := 0
	for _, j := range sp.Evidence {
		row := judgementRow{Source: visible(j.Source), Href: evidenceLink(j, from, dir), Why: visible(j.Why), Before: j.Before, Verdict: newVerdictPage(j.Verdict)}
		row.Number, row.Error = numbers(j.Number, j.Error)
		if j.Verdict == ledger.Rejected {
			rejected++
			row.Number, row.Error = "", ""
		}
		p.Evidence = append(p.Evidence, row)
	}
	if n := len(sp.Evidence); n > 0 {
		p.Tally = counted(n, "piece of evidence", "pieces of evidence")
		if rejected > 0 {
			p.Tally += fmt.Sprintf(", %s rejected", count(rejected))
		}
	}
	return p
}

func numbers(number *float64, wrong float64) (value, bound string) {
	if number != nil {
		value = fmt.Sprintf("%.3g", *number)
	}
	if wrong > 0 && wrong < 1 {
		bound = errorBound(wrong)
	}
	return value, bound
}

// evidenceLink leads from a page in dir to what a judgement rests on; empty
// where that isn't beside it. from is where sources are named from.
func evidenceLink(j Judgement, from, dir string) string {
	if path.IsAbs(j.Source) {
		return ""
	}
	at := filepath.Join(from, filepath.FromSlash(j.Source))
	if j.Kind == "run" {
		for _, name := range []string{PageFile, experiment.VerdictFile, experiment.TrialFile} {
			if _, err := os.Stat(filepath.Join(at, name)); err == nil {
				at = filepath.Join(at, name)
				break
			}
		}
	}
	to, err := filepath.Rel(dir, at)
	if err != nil {
		return ""
	}
	return filepath.ToSlash(to)
}

// mostNamed is how many hypotheses of a kind a sentence names.
const mostNamed = 6

// standingSentence says where a case's hypotheses stand.
func standingSentence(s *Standing) string {
	var open, supported, refuted []string
	for _, h := range s.Hypotheses {
		switch h.Verdict {
		case ledger.Supported:
			supported = append(supported, h.Name)
		case ledger.Refuted:
			refuted = append(refuted, h.Name)
		case ledger.Undecided, ledger.Rejected:
			open = append(open, h.Name)
		}
	}
	var parts []string
	for _, group := range []struct {
		names []string
		verb  string
	}{{supported, "supported"}, {refuted, "refuted"}, {open, "open"}} {
		if len(group.names) > 0 {
			names, more := group.names, ""
			if len(names) > mostNamed {
				names, more = names[:mostNamed], fmt.Sprintf(" and %d others", len(names)-mostNamed)
			}
			parts = append(parts, fmt.Sprintf("%s%s %s %s", strings.Join(names, ", "), more, plural(len(group.names), "is", "are"), group.verb))
		}
	}
	return term.Safe(fmt.Sprintf("Of %s on %s: %s.", counted(len(s.Hypotheses), "hypothesis", "hypotheses"), counted(s.Evidence, "piece of evidence", "pieces of evidence"), strings.Join(parts, "; ")))
}

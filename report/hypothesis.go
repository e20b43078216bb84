package report

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/internal/nearest"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/ledger"
)

// Standing is where the hypotheses of a case stand.
type Standing struct {
	Case       string       `json:"case"`
	Dir        string       `json:"-"`        // where sources of evidence are named from
	Evidence   int          `json:"evidence"` // pieces of it
	Hypotheses []Hypothesis `json:"hypotheses"`
}

// Hypothesis is one with its verdict: refuted when one of its predictions is,
// supported when all are.
type Hypothesis struct {
	Name        string         `json:"name"`
	Statement   string         `json:"statement"`
	Source      string         `json:"source"`
	Written     time.Time      `json:"written"`
	Verdict     ledger.Verdict `json:"verdict"`
	Predictions []Prediction   `json:"predictions"`
}

// Prediction is one with its verdict, and what that rests on.
type Prediction struct {
	Text    string         `json:"text"`
	Verdict ledger.Verdict `json:"verdict"`
	Number  *float64       `json:"number"`
	Error   float64        `json:"error"`
	Why     string         `json:"why"`
	// Before says that the evidence was there before the hypothesis was written,
	// which may have been written to fit it.
	Before   bool        `json:"before,omitempty"`
	Evidence []Judgement `json:"evidence,omitempty"`
}

// Judgement is what one piece of evidence made of a prediction, with all before
// it.
type Judgement struct {
	Source  string         `json:"source"`
	Kind    string         `json:"kind"`
	Verdict ledger.Verdict `json:"verdict"`
	Number  *float64       `json:"number"`
	Error   float64        `json:"error"`
	Why     string         `json:"why"`
	Before  bool           `json:"before,omitempty"`
}

// Settle sets a hypothesis' verdict from its predictions'.
func (h *Hypothesis) Settle() {
	h.Verdict = ledger.Supported
	for _, p := range h.Predictions {
		switch {
		case p.Verdict == ledger.Refuted:
			h.Verdict = ledger.Refuted
		case p.Verdict != ledger.Supported && h.Verdict == ledger.Supported:
			h.Verdict = ledger.Undecided
		}
	}
}

// Find is the hypothesis of that name.
func (s *Standing) Find(name string) (Hypothesis, error) {
	var names []string
	for _, h := range s.Hypotheses {
		if h.Name == name {
			return h, nil
		}
		names = append(names, h.Name)
	}
	if len(names) == 0 {
		return Hypothesis{}, fmt.Errorf("%s has no hypotheses yet: culprit hypothesis add", s.Case)
	}
	return Hypothesis{}, fmt.Errorf("no hypothesis %q; nearest: %q", name, nearest.Name(name, names))
}

// decisive is the prediction that a hypothesis' verdict comes from.
func (h *Hypothesis) decisive() *Prediction {
	for i := range h.Predictions {
		if h.Predictions[i].Verdict == h.Verdict {
			return &h.Predictions[i]
		}
	}
	return &h.Predictions[0]
}

func verdictStyle(v ledger.Verdict) term.Style {
	switch v {
	case ledger.Supported:
		return term.Green
	case ledger.Refuted:
		return term.Red
	default:
		return term.Yellow
	}
}

func verdictWord(v ledger.Verdict) string {
	if v == ledger.Undecided {
		return "open"
	}
	return string(v)
}

// Hypotheses lists all with what decides each.
func Hypotheses(s *term.Screen, all Standing) {
	if len(all.Hypotheses) == 0 {
		paragraph(s, "", "", fmt.Sprintf("%s has no hypotheses yet. Write one with culprit hypothesis add, or in %s/*.yaml.", all.Case, hypothesis.Dir))
		return
	}
	s.Printf("%d %s, %d %s of evidence\n", len(all.Hypotheses), plural(len(all.Hypotheses), "hypothesis", "hypotheses"), all.Evidence, plural(all.Evidence, "piece", "pieces"))
	for _, h := range all.Hypotheses {
		s.Printf("\n%s  %s\n", s.Paint(fmt.Sprintf("%-9s", verdictWord(h.Verdict)), term.Bold, verdictStyle(h.Verdict)), s.Paint(term.Safe(h.Name), term.Bold))
		paragraph(s, "           ", "           ", term.Safe(h.Statement))
		p := h.decisive()
		paragraph(s, "           ", "             ", s.Paint(term.Safe(p.Text)+": "+because(p), term.Faint))
	}
}

func plural(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

// errorBound bounds the chance of an error; smaller than one in ten thousand is
// of no use to anybody.
func errorBound(x float64) string { return percent(max(x, 1e-4)) }

// because says what a prediction's verdict rests on.
func because(p *Prediction) string {
	text := term.Safe(p.Why)
	switch {
	case p.Verdict == ledger.Undecided:
	case p.Error > 0:
		text += fmt.Sprintf("; wrong with probability under %s", errorBound(p.Error))
	}
	if p.Before {
		text += "; seen before this was written"
	}
	return text
}

// ShowHypothesis shows one with its predictions and all evidence.
func ShowHypothesis(s *term.Screen, h Hypothesis) {
	s.Printf("%s  %s\n", s.Paint(strings.ToUpper(verdictWord(h.Verdict)), term.Bold, verdictStyle(h.Verdict)), s.Paint(term.Safe(h.Name), term.Bold))
	paragraph(s, "", "", term.Safe(h.Statement))
	s.Printf("%s\n", s.Paint(fmt.Sprintf("written %s, %s", h.Written.Format("2006-01-02 15:04"), term.Safe(h.Source)), term.Faint))
	for _, p := range h.Predictions {
		s.Printf("\n  %s  %s\n", s.Paint(fmt.Sprintf("%-9s", verdictWord(p.Verdict)), verdictStyle(p.Verdict)), term.Safe(p.Text))
		paragraph(s, "             ", "             ", because(&p))
		for _, j := range p.Evidence {
			text := term.Safe(j.Source) + ": " + verdictWord(j.Verdict)
			if j.Verdict == ledger.Rejected {
				text = term.Safe(j.Source) + ": " + term.Safe(j.Why)
			} else if j.Error < 1 && j.Error > 0 {
				text += fmt.Sprintf(", error %s", errorBound(j.Error))
			}
			paragraph(s, "             ", "               ", s.Paint(text, term.Faint))
		}
	}
}

// Judged shows what one piece of evidence made of the predictions.
func Judged(s *term.Screen, all Standing, source string) {
	s.Printf("%s\n", term.Safe(source))
	bears := false
	for _, h := range all.Hypotheses {
		for _, p := range h.Predictions {
			for _, j := range p.Evidence {
				if j.Source != source {
					continue
				}
				bears = true
				s.Printf("  %s  %s: %s\n", s.Paint(fmt.Sprintf("%-9s", verdictWord(j.Verdict)), verdictStyle(j.Verdict)), term.Safe(h.Name), term.Safe(p.Text))
				paragraph(s, "             ", "             ", term.Safe(j.Why))
			}
		}
	}
	if !bears {
		s.Printf("  bears on no prediction\n")
	}
}

// shownExperiments is how many are worth a reader's time.
const shownExperiments = 3

// Next shows the experiments that would tell most, the best with what its
// outcomes would mean.
func Next(s *term.Screen, space design.Space, all Standing, list []hypothesis.Experiment, at string) {
	if len(list) == 0 {
		open := slices.ContainsFunc(all.Hypotheses, func(h Hypothesis) bool { return h.Verdict == ledger.Undecided })
		text := "Every hypothesis is settled."
		if open {
			text = "No experiment would tell the open hypotheses apart: what they predict is judged by a hunt's finding, or can't be run."
		}
		paragraph(s, "", "", text)
		return
	}
	for i, e := range list[:min(shownExperiments, len(list))] {
		if i > 0 {
			s.Printf("\n")
			paragraph(s, "or    ", "      ", experimentText(s, space, e))
			continue
		}
		paragraph(s, s.Paint("NEXT", term.Bold)+"  ", "      ", experimentText(s, space, e))
		for _, pair := range e.Settles {
			paragraph(s, "      ", "        ", fmt.Sprintf("decides between %s and %s", term.Safe(pair[0]), term.Safe(pair[1])))
		}
		tree(s, space, e, "  ")
	}
	s.Printf("\n")
	s.Printf("run it:\n  culprit hunt --hypotheses %s\n", quoted(at))
}

func experimentText(s *term.Screen, space design.Space, e hypothesis.Experiment) string {
	var arms []string
	for _, a := range e.Arms {
		arms = append(arms, arm(space, a))
	}
	cost := fmt.Sprintf("%d %s of %d requests", e.Launches*len(e.Arms), plural(e.Launches*len(e.Arms), "launch", "launches"), e.Requests)
	return fmt.Sprintf("%s; %s, to tell %.2g bits", strings.Join(arms, "; and "), cost, e.Bits)
}

// tree draws what an experiment's outcomes would mean, and what would come
// after them. Several questions are each shown alone: their outcomes together
// would be too many.
func tree(s *term.Screen, space design.Space, e hypothesis.Experiment, indent string) {
	if len(e.Asks) == 1 {
		for i, o := range e.Outcomes {
			branch, below := ends(i, len(e.Outcomes))
			paragraph(s, indent+branch, indent+below+"  ", term.Safe(o.Text)+s.Paint(meaning(o.Refutes), term.Bold))
			if o.Then != nil {
				paragraph(s, indent+below+"then  ", indent+below+"      ", experimentText(s, space, *o.Then))
				tree(s, space, *o.Then, indent+below)
			}
		}
		return
	}
	for i, ask := range e.Asks {
		branch, below := ends(i, len(e.Asks)+1)
		paragraph(s, indent+branch, indent+below+"  ", term.Safe(ask.Question))
		for _, a := range ask.Answers {
			paragraph(s, indent+below, indent+below+"  ", term.Safe(a.Text)+s.Paint(meaning(a.Refutes), term.Bold))
		}
	}
	i := slices.IndexFunc(e.Outcomes, func(o hypothesis.Outcome) bool { return o.Then != nil })
	if i < 0 {
		s.Printf("%s└─ that would be all\n", indent)
		return
	}
	paragraph(s, indent+"└─ ", indent+"   ", "then, most likely: "+experimentText(s, space, *e.Outcomes[i].Then))
	tree(s, space, *e.Outcomes[i].Then, indent+"   ")
}

func ends(i, n int) (branch, below string) {
	if i == n-1 {
		return "└─ ", "   "
	}
	return "├─ ", "│  "
}

func meaning(refutes []string) string {
	if len(refutes) == 0 {
		return ": refutes none"
	}
	return ": refutes " + term.Safe(strings.Join(refutes, ", "))
}

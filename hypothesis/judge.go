package hypothesis

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/ledger"
	"github.com/culprit-project/culprit/stats"
	"github.com/culprit-project/culprit/target"
)

// Observation is a piece of evidence: what was observed, and of what.
type Observation struct {
	// Arm is what was launched on purpose; nil where the server was just there.
	Arm design.Arm `json:"arm,omitempty"`
	// Live is what was read back from the server and the client's own plan, as
	// far as it could be told.
	Live design.Arm `json:"live,omitempty"`
	// Launch is equal for observations of one launch: they aren't independent.
	Launch string `json:"launch,omitempty"`
	// Void says why it doesn't count.
	Void     string         `json:"void,omitempty"`
	Requests int            `json:"requests,omitempty"`
	Failures int            `json:"failures,omitempty"`
	Counts   Counts         `json:"counts,omitempty"`
	Finding  *FindingResult `json:"finding,omitempty"`

	// Attestation is nil where there is none, and in the ledger where a run's
	// directory has it.
	Attestation *target.Attestation `json:"attestation,omitempty"`
	// Attest reads it there; nil where there is none.
	Attest func() (*target.Attestation, error) `json:"-"`
}

// FindingResult is what a hunt came to.
type FindingResult struct {
	Causes []design.Arm `json:"causes"`
	Error  float64      `json:"error"`
}

// Error is the chance of a wrong verdict that a judgement of one prediction
// may have.
const Error = 0.05

// Judge judges a prediction by the last of the observations, together with those
// before it. bears is false when that one says nothing about the prediction: it
// was launched as another arm, say. The judgement's Prediction, Evidence and
// Judged are the caller's to fill.
func (p *Prediction) Judge(s design.Space, all []Observation) (j ledger.Judgement, bears bool) {
	last := all[len(all)-1]
	if p.left.kind == needed {
		return p.byFinding(last)
	}
	fit, why := p.left.fits(s, last)
	if p.right != nil {
		other, otherWhy := p.right.fits(s, last)
		fit, why = max(fit, other), cmp.Or(why, otherWhy)
	}
	switch {
	case fit == elsewhere, !p.speaks(last):
		return j, false
	case fit == mismatch:
		return rejected(why), true
	case last.Void != "":
		return rejected(last.Void), true
	}
	switch p.left.kind {
	case attest:
		return p.byAttestation(last)
	case rate:
		return p.byRate(s, all), true
	default:
		return p.byCount(last), true
	}
}

func rejected(why string) ledger.Judgement {
	return ledger.Judgement{Verdict: ledger.Rejected, Error: 1, Text: "doesn't count: " + why}
}

// speaks reports whether an observation has what the prediction needs.
func (p *Prediction) speaks(o Observation) bool {
	switch p.left.kind {
	case attest:
		return o.Attestation != nil || o.Attest != nil || o.Void != ""
	case rate:
		return o.Requests > 0 || o.Void != ""
	default:
		return o.Counts != nil || o.Void != ""
	}
}

// fit says whether an observation is of what a term is about.
type fit int

const (
	elsewhere fit = iota // it was launched as something else, openly
	mismatch             // it is said to be of this, or of nothing in particular, and wasn't
	fits
)

func (t *term) fits(s design.Space, o Observation) (fit, string) {
	want := t.want(s)
	if o.Arm != nil {
		for _, f := range s.Factors {
			if level, ok := want[f.Name]; ok && o.Arm[f.Name] != level && (t.kind != attest || !f.ClientSide) {
				return elsewhere, ""
			}
		}
		return fits, ""
	}
	var wrong []string
	for _, f := range s.Factors {
		level, ok := want[f.Name]
		if !ok || t.kind == attest && f.ClientSide {
			continue
		}
		_, named := t.arm[f.Name]
		switch live, known := o.Live[f.Name]; {
		case known && live != level:
			wrong = append(wrong, fmt.Sprintf("%s was %s in the live server, and the prediction is about %s", f.Name, live, level))
		case !known && (named || f.Attest != ""):
			wrong = append(wrong, fmt.Sprintf("whether %s was %s can't be told", f.Name, level))
		}
	}
	if len(wrong) > 0 {
		return mismatch, strings.Join(wrong, "; ")
	}
	return fits, ""
}

// byAttestation reads a live setting.
func (p *Prediction) byAttestation(o Observation) (j ledger.Judgement, bears bool) {
	a := o.Attestation
	if a == nil {
		var err error
		if a, err = o.Attest(); err != nil {
			return ledger.Judgement{Verdict: ledger.Undecided, Error: 1, Text: "can't be told: " + err.Error()}, true
		}
		if a == nil {
			return j, false
		}
	}
	ok, why, err := p.claim.Holds(a, design.Level{})
	if err != nil {
		return ledger.Judgement{Verdict: ledger.Undecided, Error: 1, Text: "can't be told: " + err.Error()}, true
	}
	j = ledger.Judgement{Verdict: ledger.Refuted, Text: why}
	if ok {
		j.Text = "the live server has it"
	}
	if ok != p.negated {
		j.Verdict = ledger.Supported
	}
	return j, true
}

// byFinding asks whether the factors are in every cause that the hunt found.
func (p *Prediction) byFinding(o Observation) (j ledger.Judgement, bears bool) {
	if o.Finding == nil {
		return j, false
	}
	in := 0
	var causes []string
	for _, c := range o.Finding.Causes {
		causes = append(causes, c.String())
		if !slices.ContainsFunc(p.left.factors, func(f string) bool { return c[f] == "" }) {
			in++
		}
	}
	j = ledger.Judgement{Error: o.Finding.Error, Verdict: ledger.Undecided, Text: "the finding is " + strings.Join(causes, ", or ")}
	switch {
	case in == len(causes):
		j.Verdict = ledger.Supported
	case in == 0:
		j.Verdict = ledger.Refuted
	}
	if p.negated {
		j.Verdict = opposite(j.Verdict)
	}
	return j, true
}

func opposite(v ledger.Verdict) ledger.Verdict {
	switch v {
	case ledger.Supported:
		return ledger.Refuted
	case ledger.Refuted:
		return ledger.Supported
	default:
		return v
	}
}

// byCount judges by a counter. That a path isn't taken says nothing unless the
// failure happened meanwhile.
func (p *Prediction) byCount(o Observation) ledger.Judgement {
	j := ledger.Judgement{Verdict: ledger.Undecided, Error: 1}
	count, err := p.left.count(o.Counts)
	if err != nil {
		j.Text = "can't be told: " + err.Error()
		return j
	}
	bound, against := p.number, ""
	if p.right != nil {
		other, err := p.right.count(o.Counts)
		if err != nil {
			j.Text = "can't be told: " + err.Error()
			return j
		}
		bound, against = p.number*other, fmt.Sprintf(" against %g", other)
	}
	j.Number = &count
	failed := fmt.Sprintf("%d of %d replies broken", o.Failures, o.Requests)
	if o.Failures == 0 {
		j.Text = fmt.Sprintf("%g%s, but %s: without the failure a count says nothing of its cause", count, against, failed)
		return j
	}
	j.Error, j.Text = 0, fmt.Sprintf("%g%s, with %s in the same run", count, against, failed)
	j.Verdict = ledger.Refuted
	if compare(count, p.op, bound) {
		j.Verdict = ledger.Supported
	}
	return j
}

func compare(a float64, op string, b float64) bool {
	switch op {
	case "<":
		return a < b
	case "<=":
		return a <= b
	case ">":
		return a > b
	case ">=":
		return a >= b
	case "==":
		return a == b
	default:
		return a != b
	}
}

// byRate judges by all launches that fit.
func (p *Prediction) byRate(s design.Space, all []Observation) ledger.Judgement {
	left := launches(s, p.left, all)
	j := ledger.Judgement{Verdict: ledger.Undecided}
	if len(left) > 0 {
		number := share(left)
		j.Number = &number
	}
	var below, above float64 // logs of the evidence
	if p.right == nil {
		below, above = sides(left, p.number)
		j.Text = tell(left)
	} else {
		right := launches(s, p.right, all)
		below, above = compared(left, right, p.number)
		j.Text = tell(left) + " against " + tell(right)
	}
	if p.op == ">" {
		below, above = above, below
	}
	// below is the evidence for the prediction now.
	j.Error = min(1, math.Exp(-max(below, above)))
	if j.Error <= Error {
		j.Verdict = ledger.Supported
		if above > below {
			j.Verdict = ledger.Refuted
		}
	}
	return j
}

// launches pools what fits a term by launch, in the order of coming.
func launches(s design.Space, t *term, all []Observation) []stats.Cluster {
	var list []stats.Cluster
	index := map[string]int{}
	for _, o := range all {
		if fit, _ := t.fits(s, o); fit != fits || o.Void != "" || o.Requests == 0 {
			continue
		}
		i, ok := index[o.Launch]
		if !ok || o.Launch == "" {
			i = len(list)
			index[o.Launch] = i
			list = append(list, stats.Cluster{})
		}
		list[i].Failures += o.Failures
		list[i].Trials += o.Requests
	}
	return list
}

func share(list []stats.Cluster) float64 {
	sum := total(list)
	if sum.Trials == 0 {
		return 0
	}
	return float64(sum.Failures) / float64(sum.Trials)
}

func total(list []stats.Cluster) (sum stats.Cluster) {
	for _, c := range list {
		sum.Failures += c.Failures
		sum.Trials += c.Trials
	}
	return sum
}

func tell(list []stats.Cluster) string {
	sum := total(list)
	if sum.Trials == 0 {
		return "an arm that wasn't run yet"
	}
	word := "launches"
	if len(list) == 1 {
		word = "launch"
	}
	return fmt.Sprintf("%d of %d broken (%s) in %d %s", sum.Failures, sum.Trials, percent(share(list)), len(list), word)
}

// sides are the logs of the evidence, valid at any time, that the rate of
// launches is below and above a limit.
func sides(list []stats.Cluster, limit float64) (below, above float64) {
	var low, high []stats.Alternative
	for _, k := range []float64{0.003, 0.03, 0.1, 0.3, 0.6} {
		low = append(low, stats.Alternative{Rate: k * limit, Weight: 1})
	}
	for _, k := range []float64{1.6, 3, 6, 12, 24, 50} {
		// As odds, so that it stays below 1.
		odds := k * limit / (1 - limit)
		high = append(high, stats.Alternative{Rate: odds / (1 + odds), Weight: 1})
	}
	t := stats.NewThreshold(limit, low, high, stats.Dispersed())
	for _, c := range list {
		t.Launch()
		t.Observe(c)
	}
	return t.Below(), t.Above()
}

// compared are the logs of the evidence that one rate is below factor times
// another, and above. If it isn't below, then for any limit one of "this is
// below it" and "the other is above limit/factor" is false: the lesser of the
// evidence for the two is evidence, and so is its mean over some limits.
func compared(left, right []stats.Cluster, factor float64) (below, above float64) {
	const steps = 12
	var lows, highs []float64
	for i := range steps {
		limit := 0.002 * math.Pow(0.5/0.002, float64(i)/(steps-1))
		other := limit / factor
		if other >= 0.95 || other < 1e-4 {
			continue
		}
		leftBelow, leftAbove := sides(left, limit)
		rightBelow, rightAbove := sides(right, other)
		lows = append(lows, min(leftBelow, rightAbove))
		highs = append(highs, min(leftAbove, rightBelow))
	}
	return logMean(lows), logMean(highs)
}

func logMean(logs []float64) float64 {
	if len(logs) == 0 {
		return math.Inf(-1)
	}
	top := slices.Max(logs)
	sum := 0.0
	for _, l := range logs {
		sum += math.Exp(l - top)
	}
	return top + math.Log(sum/float64(len(logs)))
}

// Odds is how much likelier than others each factor is to be needed, by what the
// hypotheses' settled predictions showed of turning it alone to safe. It is the
// search's prior: it can cost or save requests, and can't make a finding wrong.
func Odds(s design.Space, settled map[*Prediction]ledger.Verdict) map[string]float64 {
	odds := map[string]float64{}
	for p, verdict := range settled {
		if p.left.kind != rate || p.right != nil || p.left.base != failing || len(p.left.arm) != 1 || verdict != ledger.Supported && verdict != ledger.Refuted {
			continue
		}
		for name, level := range maps.All(p.left.arm) {
			f := s.Factors[slices.IndexFunc(s.Factors, func(f design.Factor) bool { return f.Name == name })]
			if level != f.Levels[f.Safe()].Name {
				continue
			}
			if (p.op == "<") == (verdict == ledger.Supported) {
				odds[name] = moreLikely
			} else {
				odds[name] = 1 / float64(moreLikely)
			}
		}
	}
	return odds
}

const moreLikely = 4

package hypothesis

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/design"
)

// Candidate is a hypothesis that isn't settled, with the predictions that
// aren't.
type Candidate struct {
	Name        string
	Predictions []*Prediction
}

// Options of [Next]. Zero values take the defaults in parentheses.
type Options struct {
	LaunchCost float64 // how many requests take as long as a launch (120)
	Batch      int     // the fewest requests of a launch (80)
	// Disputed are pairs of names: what separates them comes first.
	Disputed [][2]string
}

// Experiment is something to run, and what its outcomes would mean.
type Experiment struct {
	Arms     []design.Arm `json:"arms"`
	Asks     []Ask        `json:"asks"`
	Requests int          `json:"requests"`
	Launches int          `json:"launches"`
	Cost     float64      `json:"cost"` // in requests, launches included
	Bits     float64      `json:"bits"` // that it is expected to tell
	Settles  [][2]string  `json:"settles,omitempty"`
	Outcomes []Outcome    `json:"outcomes"`
}

// Ask is one thing that an experiment measures.
type Ask struct {
	Question string   `json:"question"`
	Answers  []Answer `json:"answers"`
}

// Answer is one thing that may come of it.
type Answer struct {
	Text    string   `json:"text"`
	Refutes []string `json:"refutes,omitempty"`
}

// Outcome is what all that an experiment measures may show together.
type Outcome struct {
	Text        string   `json:"text"`
	Probability float64  `json:"probability"`
	Refutes     []string `json:"refutes,omitempty"`
	Left        []string `json:"left,omitempty"` // hypotheses that it agrees with
	// Then is the best experiment after it; nil when it would tell nothing more.
	Then *Experiment `json:"then,omitempty"`
}

const (
	// trust is how often what a right hypothesis predicts comes true: it may be
	// right and its author wrong about what follows.
	trust = 0.95
	// depth of the tree of experiments.
	depth = 2
	// fewBits tell nothing worth a launch.
	fewBits = 0.02
	// shownOutcome is the least probable outcome that is planned for.
	shownOutcome = 0.01
	// joint is how many outcomes of an experiment are told apart.
	joint = 256
	// cleanLaunches show that an arm is clean, where launches differ.
	cleanLaunches = 5
)

// Next ranks the experiments that would tell open hypotheses apart, those first
// that tell most for their cost. There is always the possibility that none is
// right.
func Next(s design.Space, open []Candidate, o Options) []Experiment {
	o.LaunchCost, o.Batch = cmp.Or(o.LaunchCost, 120), cmp.Or(o.Batch, 80)
	b := board{space: s, options: o, open: open, weights: make([]float64, len(open)+1)}
	for i := range b.weights {
		b.weights[i] = 1 / float64(len(b.weights))
	}
	b.ask()
	return b.rank(depth)
}

// board is a state of belief: weights are the hypotheses', the last one that
// none of them is right.
type board struct {
	space     design.Space
	options   Options
	open      []Candidate
	questions []question
	weights   []float64
}

// question is something that can be measured, cut into the cells that
// predictions tell apart.
type question struct {
	key      string
	arms     []design.Arm
	launches int
	requests int // of a launch
	cells    []string
	predicts map[int][]bool // by hypothesis: which cells it allows; silent ones aren't there
}

// ask makes the questions of all predictions.
func (b *board) ask() {
	byKey := map[string][]*Prediction{}
	for _, h := range b.open {
		for _, p := range h.Predictions {
			if key := p.key(); key != "" {
				byKey[key] = append(byKey[key], p)
			}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(byKey)) {
		q := question{key: key, predicts: map[int][]bool{}, launches: 1, requests: b.options.Batch}
		possible := true
		for _, t := range []*term{byKey[key][0].left, byKey[key][0].right} {
			if t == nil {
				continue
			}
			arm := b.space.Failing()
			maps.Copy(arm, t.want(b.space))
			possible = possible && b.space.Allowed(arm)
			q.arms = append(q.arms, arm)
		}
		if !possible {
			continue
		}
		holds := q.cut(byKey[key])
		for i, h := range b.open {
			for _, p := range h.Predictions {
				if p.key() != key {
					continue
				}
				if q.predicts[i] == nil {
					q.predicts[i] = slices.Repeat([]bool{true}, len(q.cells))
				}
				for c := range q.cells {
					q.predicts[i][c] = q.predicts[i][c] && holds(p, c)
				}
			}
		}
		if byKey[key][0].left.kind == rate {
			q.launches = cleanLaunches
			if p := byKey[key][0]; p.right == nil {
				q.requests = max(q.requests, int(math.Ceil(3/p.number/cleanLaunches)))
			}
		}
		b.questions = append(b.questions, q)
	}
}

// key is equal for predictions that one measurement judges; empty for those
// that no single experiment does.
func (p *Prediction) key() string {
	switch {
	case p.left.kind == needed:
		return ""
	case p.left.kind == attest && p.value == "":
		return "attest(" + p.claim.String() + ")"
	case p.right != nil:
		return p.left.String() + " against " + p.right.String()
	default:
		return p.left.String()
	}
}

// cut makes a question's cells, and returns whether a prediction holds in one.
func (q *question) cut(of []*Prediction) (holds func(*Prediction, int) bool) {
	if of[0].left.kind == attest {
		return q.cutAttested(of)
	}
	var cuts []float64
	for _, p := range of {
		cuts = append(cuts, p.number)
	}
	slices.Sort(cuts)
	cuts = slices.Compact(cuts)
	var inside []float64 // a value of each cell
	discrete := of[0].left.kind != rate && of[0].right == nil
	show := func(v float64) string {
		if of[0].left.kind == rate && of[0].right == nil {
			return percent(v)
		}
		if of[0].right != nil {
			return fmt.Sprintf("%g times it", v)
		}
		return fmt.Sprintf("%g", v)
	}
	add := func(v float64, text string) { inside, q.cells = append(inside, v), append(q.cells, text) }
	for i, c := range cuts {
		if i == 0 && c > 0 {
			add(c/2, "below "+show(c))
		}
		if discrete {
			add(c, show(c))
		}
		if i+1 < len(cuts) {
			add((c+cuts[i+1])/2, show(c)+" to "+show(cuts[i+1]))
		} else {
			add(c+math.Max(c/2, 1e-9), "above "+show(c))
		}
	}
	return func(p *Prediction, cell int) bool { return compare(inside[cell], p.op, p.number) }
}

func (q *question) cutAttested(of []*Prediction) func(*Prediction, int) bool {
	if of[0].value == "" {
		q.cells = []string{"so", "not so"}
		return func(p *Prediction, cell int) bool { return (cell == 0) != p.negated }
	}
	for _, p := range of {
		if !slices.Contains(q.cells, p.value) {
			q.cells = append(q.cells, p.value)
		}
	}
	q.cells = append(q.cells, "something else")
	return func(p *Prediction, cell int) bool {
		switch p.op {
		case "==":
			return q.cells[cell] == p.value
		case "!=":
			return q.cells[cell] != p.value
		}
		return true // an order of settings isn't planned with
	}
}

// chance of a cell, to a hypothesis; the last one is silent on everything.
func (q *question) chance(hypothesis, cell int) float64 {
	allowed := q.predicts[hypothesis]
	n := 0
	for _, a := range allowed {
		if a {
			n++
		}
	}
	switch {
	case n == 0 || n == len(q.cells):
		return 1 / float64(len(q.cells))
	case allowed[cell]:
		return trust / float64(n)
	default:
		return (1 - trust) / float64(len(q.cells)-n)
	}
}

// rank makes the experiments, the best first.
func (b *board) rank(depth int) []Experiment {
	var list []Experiment
	seen := map[string]bool{}
	for _, q := range b.questions {
		key := armsKey(q.arms)
		if seen[key] {
			continue
		}
		seen[key] = true
		if e := b.experiment(q.arms, depth); e.Bits >= fewBits {
			list = append(list, e)
		}
	}
	slices.SortStableFunc(list, func(x, y Experiment) int {
		return cmp.Or(cmp.Compare(b.disputes(y), b.disputes(x)), cmp.Compare(y.Bits/y.Cost, x.Bits/x.Cost))
	})
	return list
}

func (b *board) disputes(e Experiment) (n int) {
	for _, pair := range b.options.Disputed {
		if slices.Contains(e.Settles, pair) || slices.Contains(e.Settles, [2]string{pair[1], pair[0]}) {
			n = 1
		}
	}
	return n
}

func armsKey(arms []design.Arm) string {
	var keys []string
	for _, a := range arms {
		keys = append(keys, a.String())
	}
	slices.Sort(keys)
	return strings.Join(slices.Compact(keys), "\n")
}

// experiment runs some arms: every question about no others is answered.
func (b *board) experiment(arms []design.Arm, depth int) Experiment {
	e := Experiment{}
	for _, a := range arms {
		if !slices.ContainsFunc(e.Arms, func(o design.Arm) bool { return maps.Equal(o, a) }) {
			e.Arms = append(e.Arms, a)
		}
	}
	var asked []question
	outcomes := 1
	for _, q := range b.questions {
		answered := !slices.ContainsFunc(q.arms, func(a design.Arm) bool {
			return !slices.ContainsFunc(e.Arms, func(o design.Arm) bool { return maps.Equal(o, a) })
		})
		if !answered || outcomes*len(q.cells) > joint {
			continue
		}
		outcomes *= len(q.cells)
		asked = append(asked, q)
		e.Asks = append(e.Asks, b.describe(q))
		e.Launches, e.Requests = max(e.Launches, q.launches), max(e.Requests, q.requests)
	}
	for _, a := range e.Arms {
		e.Cost += float64(e.Launches) * (b.options.LaunchCost + float64(e.Requests)*b.slowness(a))
	}
	e.Settles = b.settles(asked)
	before := entropy(b.weights)
	merged := map[string]int{}
	for o := range outcomes {
		weights := slices.Clone(b.weights)
		var texts []string
		against := map[int]bool{}
		rest := o
		for _, q := range asked {
			cell := rest % len(q.cells)
			rest /= len(q.cells)
			texts = append(texts, q.key+": "+q.cells[cell])
			for i := range weights {
				weights[i] *= q.chance(i, cell)
				if allowed := q.predicts[i]; allowed != nil && !allowed[cell] {
					against[i] = true
				}
			}
		}
		probability := 0.0
		for _, w := range weights {
			probability += w
		}
		if probability <= 0 {
			continue
		}
		for i := range weights {
			weights[i] /= probability
		}
		e.Bits += probability * (before - entropy(weights))
		b.outcome(&e, merged, Outcome{Text: strings.Join(texts, ", "), Probability: probability}, against, weights, asked, depth)
	}
	e.Outcomes = slices.DeleteFunc(e.Outcomes, func(o Outcome) bool { return o.Probability < shownOutcome })
	slices.SortStableFunc(e.Outcomes, func(x, y Outcome) int { return cmp.Compare(y.Probability, x.Probability) })
	return e
}

// describe says what a question's answers would refute.
func (b *board) describe(q question) Ask {
	ask := Ask{Question: q.key}
	for c, text := range q.cells {
		a := Answer{Text: text}
		for i, h := range b.open {
			if allowed := q.predicts[i]; allowed != nil && !allowed[c] {
				a.Refutes = append(a.Refutes, h.Name)
			}
		}
		ask.Answers = append(ask.Answers, a)
	}
	return ask
}

// outcome adds one to an experiment; those that leave the same hypotheses are
// one.
func (b *board) outcome(e *Experiment, merged map[string]int, o Outcome, against map[int]bool, weights []float64, asked []question, depth int) {
	for i, h := range b.open {
		if against[i] {
			o.Refutes = append(o.Refutes, h.Name)
		} else {
			o.Left = append(o.Left, h.Name)
		}
	}
	key := strings.Join(o.Left, "\n")
	if i, ok := merged[key]; ok {
		if old := &e.Outcomes[i]; o.Probability > old.Probability {
			old.Text, old.Probability = o.Text, old.Probability+o.Probability
		} else {
			old.Probability += o.Probability
		}
		return
	}
	merged[key] = len(e.Outcomes)
	if depth > 1 && len(o.Left) > 1 && o.Probability >= shownOutcome {
		then := b.after(against, asked)
		if list := then.rank(depth - 1); len(list) > 0 {
			o.Then = &list[0]
		}
	}
	e.Outcomes = append(e.Outcomes, o)
}

// after is what is still open when some hypotheses are refuted and some
// questions answered.
func (b *board) after(refuted map[int]bool, asked []question) *board {
	next := &board{space: b.space, options: b.options}
	for i, h := range b.open {
		if refuted[i] {
			continue
		}
		h.Predictions = slices.DeleteFunc(slices.Clone(h.Predictions), func(p *Prediction) bool {
			return slices.ContainsFunc(asked, func(q question) bool { return q.key == p.key() })
		})
		next.open = append(next.open, h)
	}
	next.weights = make([]float64, len(next.open)+1)
	for i := range next.weights {
		next.weights[i] = 1 / float64(len(next.weights))
	}
	next.ask()
	return next
}

// settles lists the pairs that can't both be right about what is asked.
func (b *board) settles(asked []question) (pairs [][2]string) {
	for i := range b.open {
		for j := range i {
			if slices.ContainsFunc(asked, func(q question) bool { return q.opposed(i, j) }) {
				pairs = append(pairs, [2]string{b.open[j].Name, b.open[i].Name})
			}
		}
	}
	return pairs
}

// opposed reports whether no answer suits both.
func (q *question) opposed(i, j int) bool {
	a, b := q.predicts[i], q.predicts[j]
	if a == nil || b == nil {
		return false
	}
	for c := range q.cells {
		if a[c] && b[c] {
			return false
		}
	}
	return true
}

// Contradictions lists the pairs of hypotheses whose predictions can't both come
// true.
func Contradictions(s design.Space, all []Candidate) [][2]string {
	b := board{space: s, open: all, options: Options{Batch: 1}}
	b.ask()
	return b.settles(b.questions)
}

// slowness is how much longer a request takes in an arm.
func (b *board) slowness(a design.Arm) float64 {
	cost := 1.0
	for _, f := range b.space.Factors {
		if i := f.Level(a[f.Name]); i >= 0 {
			cost *= cmp.Or(f.Levels[i].RequestCost, 1)
		}
	}
	return cost
}

func entropy(weights []float64) (bits float64) {
	for _, w := range weights {
		if w > 0 {
			bits -= w * math.Log2(w)
		}
	}
	return bits
}

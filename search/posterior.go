package search

import (
	"math"
	"slices"

	"github.com/culprit-project/culprit/stats"
)

const (
	// maxSize bounds the sets that are ever considered.
	maxSize = 8
	// maxHypotheses keeps a posterior within a few megabytes.
	maxHypotheses = 100_000
)

// priorBySize is how many levels a failure needs, 0 being "with everything
// safe": NIST's counts for failures of seven kinds of systems, moved towards
// larger sets since simple bugs don't survive to be hunted.
var priorBySize = [maxSize + 1]float64{0.10, 0.34, 0.31, 0.17, 0.08, 0.04, 0.03, 0.02, 0.01}

// priorNone is the chance that no set of levels explains which arms fail.
const priorNone = 0.02

// grid are the rates over which everything is averaged: r of arms that fail, c
// of how much their launches differ, b of arms that don't. An array over rates
// of failure is indexed by dispersion, then rate.
type grid struct {
	rates, bases []float64
	dispersion   stats.Dispersion
	failing      []stats.LaunchModel // by dispersion, then rate
	clean        []stats.LaunchModel // by base
	weight       []float64           // prior, by dispersion, then rate
	baseWeight   []float64
	bound        []int // by rate: how many of the bases are low enough for it

	sizes  []int         // of visits to plan
	seen   [][][]float64 // by size, bin of failures, dispersion and rate: its chance
	unseen [][][]float64 // by size, bin, base
}

// bins are where the number of failures in a visit is cut when visits are
// planned: the first number of each bin.
var bins = []int{0, 1, 2, 3, 4, 5, 6, 8, 11, 16, 23}

func newGrid(o Options) *grid {
	g := &grid{dispersion: o.Dispersion}
	g.rates = append(logSpaced(o.MinRate, 0.8, 1.46), 0.9, 0.97)
	low := min(1e-4, o.MinRate/40)
	g.bases = append(logSpaced(low, 0.01, 2.5), 0.025, 0.06, 0.15)
	for _, b := range g.bases {
		w := 1.0
		if b > soundBase {
			w = 0.005 // a model that is wrong that often by itself makes a poor case
		}
		g.baseWeight = append(g.baseWeight, w)
		g.clean = append(g.clean, stats.NewLaunchModel(b, 0))
	}
	scale(g.baseWeight)
	for _, r := range g.rates {
		n := 0
		for n < len(g.bases) && r >= leastRatio(g.bases[n])*g.bases[n] {
			n++
		}
		g.bound = append(g.bound, n)
	}
	for i, cv := range g.dispersion.CV {
		for _, r := range g.rates {
			g.failing = append(g.failing, stats.NewLaunchModel(r, cv))
			g.weight = append(g.weight, g.dispersion.Weight[i]/float64(len(g.rates)))
		}
	}
	for n := 8; n <= 2048; n *= 2 {
		g.sizes = append(g.sizes, n)
		g.seen = append(g.seen, binned(g.failing, n))
		g.unseen = append(g.unseen, binned(g.clean, n))
	}
	return g
}

// soundBase is more than a clean arm of a model that is seldom wrong by itself
// fails: a little above the grid's 0.01, which rounding moves.
const soundBase = 0.011

// leastRatio is how many times as often an arm that fails does so than a clean
// one, at least. Only a weak model's own mistakes come nearer than 3.
func leastRatio(base float64) float64 {
	if base > soundBase {
		return 2
	}
	return 3
}

// logSpaced covers low to high with about the given ratio between neighbours.
func logSpaced(low, high, ratio float64) []float64 {
	n := int(math.Ceil(math.Log(high/low)/math.Log(ratio))) + 1
	out := make([]float64, n)
	for i := range out {
		out[i] = low * math.Pow(high/low, float64(i)/float64(n-1))
	}
	return out
}

// binned gives the chance of each bin of failures in n requests, by model.
func binned(models []stats.LaunchModel, n int) [][]float64 {
	out := make([][]float64, len(bins))
	for i := range out {
		out[i] = make([]float64, len(models))
	}
	for j, m := range models {
		rest := 1.0
		choose := 0.0 // log of n over y
		bin := 0
		for y := 0; y < bins[len(bins)-1] && y <= n; y++ {
			if y >= bins[bin+1] {
				bin++
			}
			p := math.Exp(choose + m.LogStep(stats.Cluster{}, stats.Cluster{Failures: y, Trials: n}))
			out[bin][j] += p
			rest -= p
			choose += math.Log(float64(n-y) / float64(y+1))
		}
		out[len(bins)-1][j] = max(rest, 0)
	}
	return out
}

func scale(w []float64) {
	total := 0.0
	for _, v := range w {
		total += v
	}
	for i := range w {
		w[i] /= total
	}
}

// hypothesis says: an arm fails when it has at least these steps.
type hypothesis struct {
	n      uint8
	factor [maxSize]uint8
	step   [maxSize]uint16
}

func (h *hypothesis) fails(a arm) bool {
	for i := range h.n {
		if a[h.factor[i]] < h.step[i] {
			return false
		}
	}
	return true
}

func (h *hypothesis) arm(factors int) arm {
	a := make(arm, factors)
	for i := range h.n {
		a[h.factor[i]] = h.step[i]
	}
	return a
}

// posterior is what is believed of the hypotheses within a region that fails.
//
// Hypotheses that say the same of every arm visited so far have the same
// likelihood and share a cell. Given a cell, what failing and clean arms showed
// is independent, so a cell holds one likelihood over rates of failure and one
// over bases.
type posterior struct {
	grid       *grid
	region     arm
	hypotheses []hypothesis
	prior      []float64
	cell       []int32 // by hypothesis
	cells      []cell
	visits     []visited
	index      map[string]int // visits by arm

	none    noneCell
	weights []float64 // posterior by cell, given that some set explains what is seen
}

type visited struct {
	arm   arm
	shown map[int]stats.Cluster // by launch
}

type cell struct {
	fails           []bool    // by visit
	failing, clean  []float64 // likelihoods, up to a factor of exp(log)
	log             float64
	prior, topPrior float64
	top             int // the hypothesis of the highest prior
}

// noneCell is the hypothesis that each arm fails or not as if by the toss of a
// coin, but for the region itself, which fails. Tables are by rate of failure
// (with dispersion), then base.
type noneCell struct {
	visits  []noneVisit
	current int       // visit
	others  []float64 // log likelihood of all visits but the current one
	weights []float64 // of the grid, times the likelihood of the others, up to exp(top)
	top     float64
	offset  float64 // what the cells' likelihoods were divided by
	chance  float64
}

type noneVisit struct {
	region         bool
	failing, clean []float64
}

// newPosterior returns the prior; false when there are too many hypotheses. odds
// are by factor; skipped are steps that are no cause's.
func newPosterior(g *grid, region arm, odds []float64, size int, skipped map[rung]bool) (*posterior, bool) {
	p := &posterior{grid: g, region: region, index: map[string]int{}}
	var factors []int
	for i, v := range region {
		if v > 0 {
			factors = append(factors, i)
		}
	}
	size = min(size, len(factors))
	if count(region, factors, size) > maxHypotheses {
		return nil, false
	}
	steps := make([][]uint16, len(region))
	for _, f := range factors {
		for s := uint16(1); s <= region[f]; s++ {
			if !skipped[rung{f, s}] || s == region[f] {
				steps[f] = append(steps[f], s)
			}
		}
	}
	// symmetric[t] is the sum over all sets of t factors of the product of
	// their odds.
	symmetric := make([]float64, size+1)
	symmetric[0] = 1
	for _, f := range factors {
		for t := size; t > 0; t-- {
			symmetric[t] += symmetric[t-1] * odds[f]
		}
	}
	sizes := priorBySize
	if len(factors) == 1 {
		sizes[0] = priorNone // of one list, say of commits, the first is known to be good
	}
	total := 0.0
	for t := range size + 1 {
		total += sizes[t]
	}
	var extend func(h hypothesis, from int, weight float64)
	extend = func(h hypothesis, from int, weight float64) {
		p.hypotheses = append(p.hypotheses, h)
		p.prior = append(p.prior, (1-priorNone)*sizes[h.n]/total*weight/symmetric[h.n])
		if int(h.n) == size {
			return
		}
		for i := from; i < len(factors); i++ {
			f := factors[i]
			for _, s := range steps[f] {
				longer := h
				longer.factor[h.n], longer.step[h.n] = uint8(f), s
				longer.n++
				extend(longer, i+1, weight*odds[f]/float64(len(steps[f])))
			}
		}
	}
	extend(hypothesis{}, 0, 1)
	p.cell = make([]int32, len(p.hypotheses))
	one := cell{failing: ones(len(g.failing)), clean: ones(len(g.clean))}
	for i, prior := range p.prior {
		one.take(i, prior)
	}
	p.cells = []cell{one}
	p.none.others = make([]float64, len(g.failing)*len(g.clean))
	p.none.weights = make([]float64, len(p.none.others))
	p.none.current = -1
	p.weigh()
	return p, true
}

// count is the number of hypotheses.
func count(region arm, factors []int, size int) int {
	symmetric := make([]int, size+1)
	symmetric[0] = 1
	for _, f := range factors {
		for t := size; t > 0; t-- {
			symmetric[t] = min(symmetric[t]+symmetric[t-1]*int(region[f]), 2*maxHypotheses)
		}
	}
	n := 0
	for _, s := range symmetric {
		n += s
	}
	return n
}

func ones(n int) []float64 {
	out := make([]float64, n)
	for i := range out {
		out[i] = 1
	}
	return out
}

func (c *cell) take(h int, prior float64) {
	c.prior += prior
	if prior > c.topPrior {
		c.top, c.topPrior = h, prior
	}
}

// visit gives the number of an arm, and splits the cells by what they say of it.
func (p *posterior) visit(a arm) int {
	key := a.key()
	if i, ok := p.index[key]; ok {
		return i
	}
	i := len(p.visits)
	p.index[key] = i
	p.visits = append(p.visits, visited{arm: slices.Clone(a), shown: map[int]stats.Cluster{}})
	p.none.visits = append(p.none.visits, noneVisit{
		region: a.equal(p.region), failing: make([]float64, len(p.grid.failing)), clean: make([]float64, len(p.grid.clean)),
	})

	old := p.cells
	type halves struct{ clean, fails int32 }
	to := make([]halves, len(old))
	for c := range to {
		to[c] = halves{-1, -1}
	}
	p.cells = make([]cell, 0, len(old)+len(old)/2+1)
	for h := range p.hypotheses {
		from := p.cell[h]
		fails := p.hypotheses[h].fails(a)
		half := &to[from].clean
		if fails {
			half = &to[from].fails
		}
		if *half < 0 {
			*half = int32(len(p.cells))
			c := &old[from]
			p.cells = append(p.cells, cell{
				fails: append(slices.Clone(c.fails), fails), log: c.log,
				failing: slices.Clone(c.failing), clean: slices.Clone(c.clean),
			})
		}
		p.cell[h] = *half
		p.cells[*half].take(h, p.prior[h])
	}
	p.weigh()
	return i
}

// observe takes in what a launch has shown of an arm.
func (p *posterior) observe(a arm, launch int, more stats.Cluster) {
	if more.Trials == 0 {
		return
	}
	v := p.visit(a)
	before := p.visits[v].shown[launch]
	p.visits[v].shown[launch] = stats.Cluster{Failures: before.Failures + more.Failures, Trials: before.Trials + more.Trials}

	g := p.grid
	failing, clean := make([]float64, len(g.failing)), make([]float64, len(g.clean))
	top := math.Inf(-1)
	for i, m := range g.failing {
		failing[i] = m.LogStep(before, more)
		top = max(top, failing[i])
	}
	for i, m := range g.clean {
		clean[i] = m.LogStep(before, more)
		top = max(top, clean[i])
	}
	p.none.observe(g, v, failing, clean, top)
	for i := range failing {
		failing[i] = math.Exp(failing[i] - top)
	}
	for i := range clean {
		clean[i] = math.Exp(clean[i] - top)
	}
	for i := range p.cells {
		c := &p.cells[i]
		if c.fails[v] {
			multiply(c.failing, failing)
		} else {
			multiply(c.clean, clean)
		}
	}
	p.weigh()
}

func multiply(a, by []float64) {
	by = by[:len(a)]
	for i := range a {
		a[i] *= by[i]
	}
}

// normalize makes the largest of them 1, and returns the log of what it was.
func normalize(likelihoods []float64) float64 {
	top := slices.Max(likelihoods)
	for i := range likelihoods {
		likelihoods[i] /= top
	}
	return math.Log(top)
}

// likelihood is that of a cell, averaged over the grid, up to exp(log).
func (c *cell) likelihood(g *grid) float64 {
	var below [24]float64 // sums over the lowest bases
	sums := below[:1]
	for i, l := range c.clean {
		sums = append(sums, sums[i]+l*g.baseWeight[i])
	}
	total := 0.0
	n := len(g.rates)
	for i := 0; i < len(c.failing); i += n {
		for j, bound := range g.bound {
			total += c.failing[i+j] * g.weight[i+j] * sums[bound]
		}
	}
	return total
}

// weigh brings the cells' posterior up to date.
func (p *posterior) weigh() {
	p.weights = slices.Grow(p.weights[:0], len(p.cells))[:len(p.cells)]
	top := math.Inf(-1)
	for i := range p.cells {
		c := &p.cells[i]
		l := c.likelihood(p.grid)
		if l > 0 && l < 1e-60 { // far from underflow still
			c.log += normalize(c.failing) + normalize(c.clean)
			l = c.likelihood(p.grid)
		}
		p.weights[i] = l * c.prior
		if l > 0 { // else it is far beyond what could come back
			top = max(top, c.log)
		}
	}
	total := 0.0
	for i := range p.weights {
		if at := p.cells[i].log; at != top {
			p.weights[i] *= math.Exp(at - top)
		}
		total += p.weights[i]
	}
	for i := range p.weights {
		p.weights[i] /= total
	}
	none := p.none.logLikelihood(p.grid) + math.Log(priorNone)
	p.none.chance = 1 / (1 + total*math.Exp(top-none))
}

// observe takes in the log likelihoods of what a visit has shown, if it fails
// and if it is clean.
func (n *noneCell) observe(g *grid, visit int, failing, clean []float64, offset float64) {
	if n.current != visit {
		if n.current >= 0 {
			n.visits[n.current].addTo(n.others, 1)
		}
		n.current = visit
		n.visits[visit].addTo(n.others, -1)
		n.top = slices.Max(n.others)
		for i, w := range g.weight {
			for j := range g.bound[i%len(g.rates)] {
				at := i*len(g.clean) + j
				n.weights[at] = w * g.baseWeight[j] * math.Exp(n.others[at]-n.top)
			}
		}
	}
	v := &n.visits[visit]
	for i, l := range failing {
		v.failing[i] += l
	}
	for i, l := range clean {
		v.clean[i] += l
	}
	n.offset += offset
}

// addTo adds the visit's log likelihoods, sign times, to a table.
func (v *noneVisit) addTo(table []float64, sign float64) {
	if v.region {
		for i, f := range v.failing {
			for j := range v.clean {
				table[i*len(v.clean)+j] += sign * f
			}
		}
		return
	}
	failing, clean, top := v.likelihoods()
	for i, f := range failing {
		for j, c := range clean {
			// Halving would make the least of numbers 0.
			l := top + math.Log(f+c) - math.Ln2
			if f+c == 0 { // both far below the best
				a, b := v.failing[i], v.clean[j]
				l = max(a, b) + math.Log1p(math.Exp(-math.Abs(a-b))) - math.Ln2
			}
			table[i*len(clean)+j] += sign * l
		}
	}
}

// likelihoods are up to a factor of exp(top).
func (v *noneVisit) likelihoods() (failing, clean []float64, top float64) {
	top = max(slices.Max(v.failing), slices.Max(v.clean))
	failing, clean = make([]float64, len(v.failing)), make([]float64, len(v.clean))
	for i, l := range v.failing {
		failing[i] = math.Exp(l - top)
	}
	for i, l := range v.clean {
		clean[i] = math.Exp(l - top)
	}
	return failing, clean, top
}

// logLikelihood is averaged over the grid, and relative to the cells'.
func (n *noneCell) logLikelihood(g *grid) float64 {
	if n.current < 0 {
		return 0
	}
	v := &n.visits[n.current]
	failing, clean, top := v.likelihoods()
	if v.region {
		clear(clean)
	} else {
		top -= math.Ln2
	}
	sum := 0.0
	for i, f := range failing {
		for j := range g.bound[i%len(g.rates)] {
			sum += n.weights[i*len(clean)+j] * (f + clean[j])
		}
	}
	return math.Log(sum) + top + n.top - n.offset
}

// best is the likeliest hypothesis and its probability.
func (p *posterior) best() (int, float64) {
	best, top := 0, -1.0
	for i, w := range p.weights {
		if q := w * p.cells[i].topPrior / p.cells[i].prior; q > top {
			best, top = p.cells[i].top, q
		}
	}
	return best, top
}

// failsAt is the chance that the arm of a visit fails.
func (p *posterior) failsAt(visit int) float64 {
	sum := 0.0
	for i, w := range p.weights {
		if p.cells[i].fails[visit] {
			sum += w
		}
	}
	return sum
}

// shown is what all launches of an arm have shown.
func (p *posterior) shown(a arm) (all stats.Cluster) {
	for _, c := range p.visits[p.visit(a)].shown {
		all.Failures += c.Failures
		all.Trials += c.Trials
	}
	return all
}

// chance is the probability of a hypothesis.
func (p *posterior) chance(h int) float64 {
	c := p.cell[h]
	return p.weights[c] * p.prior[h] / p.cells[c].prior
}

// rates are the posteriors of the rate of failure, with its dispersion, and of
// the base.
func (p *posterior) rates() (failing, clean []float64) {
	return p.ratesIf(func(*cell) bool { return true })
}

// ratesIf are those given that the hypothesis is in one of some cells.
func (p *posterior) ratesIf(in func(*cell) bool) (failing, clean []float64) {
	g := p.grid
	failing, clean = make([]float64, len(g.failing)), make([]float64, len(g.clean))
	n := len(g.rates)
	for k := range p.cells {
		c := &p.cells[k]
		if p.weights[k] < 1e-9 || !in(c) {
			continue
		}
		scale := p.weights[k] / c.likelihood(g)
		for i, l := range c.failing {
			l *= g.weight[i] * scale
			for j := range g.bound[i%n] {
				both := l * c.clean[j] * g.baseWeight[j]
				failing[i] += both
				clean[j] += both
			}
		}
	}
	scaleOr(failing, g.weight)
	scaleOr(clean, g.baseWeight)
	return failing, clean
}

// scaleOr makes w add up to 1, or takes the prior if it adds up to nothing.
func scaleOr(w, prior []float64) {
	total := 0.0
	for _, v := range w {
		total += v
	}
	if total == 0 {
		copy(w, prior)
		return
	}
	for i := range w {
		w[i] /= total
	}
}

// odds are the log odds that the arm of each visit fails, by what it showed
// alone.
func (p *posterior) odds() []float64 {
	failing, clean := p.rates()
	out := make([]float64, len(p.visits))
	for i, v := range p.none.visits {
		out[i] = logMean(v.failing, failing) - logMean(v.clean, clean)
	}
	return out
}

// misfit is the visit that agrees least with the likeliest hypothesis; 0, which
// is the region, when all agree.
func (p *posterior) misfit() int {
	best, _ := p.best()
	worst, at := 0.0, 0
	for i, odds := range p.odds() {
		if p.hypotheses[best].fails(p.visits[i].arm) {
			odds = -odds
		}
		if odds > worst {
			worst, at = odds, i
		}
	}
	return at
}

// smallest is the smallest arm that fails by what it showed alone.
func (p *posterior) smallest() arm {
	smallest := p.region
	for i, odds := range p.odds() {
		if a := p.visits[i].arm; odds > 4 && a.steps() < smallest.steps() {
			smallest = a
		}
	}
	return smallest
}

// logMean is the log of the weighted mean of exponentials.
func logMean(logs, weight []float64) float64 {
	top := slices.Max(logs)
	sum := 0.0
	for i, l := range logs {
		sum += weight[i] * math.Exp(l-top)
	}
	return math.Log(sum) + top
}

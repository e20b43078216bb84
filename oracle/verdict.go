package oracle

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/stats"
)

// Verdict is what a run's history says, with the numbers that it says it by.
// It is the content of verdict.json.
type Verdict struct {
	Status      Status        `json:"status"`
	Reasons     []string      `json:"reasons"` // sentences, the weightiest first
	Oracles     int           `json:"oracles_version"`
	Setup       Setup         `json:"run"`
	Assumptions []Assumption  `json:"assumptions"`
	Crashes     []Crash       `json:"crashes,omitempty"`
	Truncated   bool          `json:"truncated,omitempty"` // the history ends in the middle of a record
	Phases      []PhaseResult `json:"phases"`
	// Broken counts ops with at least one violation that means corruption.
	Broken     ClassResult   `json:"broken"`
	Classes    []ClassResult `json:"classes"` // those that were tried, in the order of the table
	Breakdowns []Breakdown   `json:"breakdowns"`
	Logs       []LogCount    `json:"logs,omitempty"` // what of the server's logs the case has counted
	// Probes are counts of code paths; CorePercent is the highest share of a
	// core that counting took in any process.
	Probes      []ProbeResult `json:"probes,omitempty"`
	CorePercent float64       `json:"core_percent,omitempty"`
}

// LogCount is how many lines of the server's logs matched one of the case's
// patterns.
type LogCount struct {
	Name  string `json:"name"`
	Lines int    `json:"lines"`
	First string `json:"first"` // of the lines
	AtMS  int64  `json:"at_ms"` // when that came, since the run began
}

// Setup is what the history says of the run.
type Setup struct {
	Tool        string    `json:"tool"`
	Started     time.Time `json:"started"`
	BaseURL     string    `json:"base_url"`
	Model       string    `json:"model"`
	Server      string    `json:"server,omitempty"`
	Seed        uint64    `json:"seed"`
	Sessions    int       `json:"sessions"`
	Concurrency int       `json:"concurrency,omitempty"`
	RequestRate float64   `json:"request_rate,omitempty"`
}

// ClassResult is what was found of one class.
type ClassResult struct {
	Class   Class   `json:"class"`
	Means   Status  `json:"means"`
	Source  Source  `json:"source"`
	Main    Rate    `json:"main"`
	Control *Rate   `json:"control,omitempty"` // nil when no control op was a trial
	Excess  *Excess `json:"excess,omitempty"`  // of main over control; nil where the class convicts by itself
	Load    *Load   `json:"load,omitempty"`    // where there is no control: does the rate rise with the load?
	// Convicts says that this class alone decides for what it means.
	Convicts bool   `json:"convicts"`
	Says     string `json:"says,omitempty"` // why it does, or doesn't though it fired
	// NeedsControl says that the class fired, and that only a control arm
	// can tell whether the server did it.
	NeedsControl    bool      `json:"needs_control,omitempty"`
	Ops             []int64   `json:"ops,omitempty"` // every violating op
	ControlOps      []int64   `json:"control_ops,omitempty"`
	Examples        []Example `json:"examples,omitempty"`
	ControlExamples []Example `json:"control_examples,omitempty"`
	FalseAlarm      *Measured `json:"false_alarm,omitempty"` // nil when it hasn't been measured
	WeakModel       *Measured `json:"weak_model,omitempty"`  // a weak model's own mistakes; nil as above

	rule Rule
}

// Rate is a share of ops with its interval, sessions taken as clusters.
type Rate struct {
	Failures int     `json:"failures"`
	Trials   int     `json:"trials"`
	Rate     float64 `json:"rate"`
	Low      float64 `json:"low"`
	High     float64 `json:"high"`
}

// Excess is the main arm's rate less the control's.
type Excess struct {
	Difference float64 `json:"difference"`
	Low        float64 `json:"low"`
	High       float64 `json:"high"`
	P          float64 `json:"p"`          // of so large an excess by chance
	PAdjusted  float64 `json:"p_adjusted"` // for all classes together (Holm)
}

// Load compares ops that were sent while few requests were open with those sent
// while many were, round by round: later rounds are harder, whatever the load.
type Load struct {
	Split      int     `json:"split"` // few: at most so many in flight
	Few        Rate    `json:"few"`
	Many       Rate    `json:"many"`
	Difference float64 `json:"difference"` // within rounds, many less few
	P          float64 `json:"p"`
	PAdjusted  float64 `json:"p_adjusted"`
}

// Broken is the class of ops with any violation that means corruption. It has
// a place beside the others in the comparison with the control, since a fault
// often spreads its damage thinly over many classes.
const Broken Class = "Broken"

var brokenRule = Rule{Class: Broken, Means: Corrupt, Source: Model, MinExcess: smallestExcess}

// verdict comes after the last record.
func (j *judgement) verdict(truncated bool) *Verdict {
	slices.SortFunc(j.rec.rows, func(a, b row) int { return cmp.Compare(a.id, b.id) })
	h := j.header
	v := &Verdict{
		Oracles: Version,
		Setup: Setup{
			Tool: h.Tool, Started: h.Started, BaseURL: h.BaseURL, Model: h.Model, Server: h.Server,
			Seed: h.Seed, Sessions: h.Sessions, Concurrency: h.Concurrency, RequestRate: h.RequestRate,
		},
		Assumptions: j.assumptions(truncated),
		Crashes:     j.crashes,
		Truncated:   truncated,
		Phases:      j.phases.results(),
		Breakdowns:  j.rec.breakdowns(),
		Logs:        j.logs.counts,
	}
	v.Broken, v.Classes = j.rec.results()
	v.Probes, v.CorePercent = j.probes(), j.counts.cost
	v.decide()
	return v
}

// results are the ops with any damage, and each class that was tried.
func (r *Recorder) results() (broken ClassResult, classes []ClassResult) {
	corrupt := r.corruptClasses()
	broken = r.result(brokenRule, nil, func(w *row) (trial, failed bool) {
		return w.trials&corrupt != 0, w.violations&corrupt != 0
	})
	for class, t := range r.classes {
		// A sample is a cluster of its own.
		samples := make([]stats.Cluster, max(t.samples, t.failing))
		for i := range samples {
			samples[i].Trials = 1
			if i < t.failing {
				samples[i].Failures = 1
			}
		}
		c := r.result(t.rule, samples, func(w *row) (trial, failed bool) {
			return w.trials.has(class), w.violations.has(class)
		})
		if c.Main.Trials == 0 && c.Control == nil {
			continue
		}
		c.Examples, c.ControlExamples = t.worst[mainArm], t.worst[controlArm]
		classes = append(classes, c)
	}
	adjust(append([]*ClassResult{&broken}, pointers(classes)...))
	broken.judge()
	for i := range classes {
		classes[i].judge()
	}
	return broken, classes
}

func pointers(classes []ClassResult) []*ClassResult {
	out := make([]*ClassResult, len(classes))
	for i := range classes {
		out[i] = &classes[i]
	}
	return out
}

// result counts one class over the rows.
func (r *Recorder) result(rule Rule, samples []stats.Cluster, of func(*row) (trial, failed bool)) ClassResult {
	c := ClassResult{Class: rule.Class, Means: rule.Means, Source: rule.Source, rule: rule}
	if rule.FalseAlarm != (Measured{}) {
		c.FalseAlarm = &rule.FalseAlarm
	}
	if rule.WeakModel != (Measured{}) {
		c.WeakModel = &rule.WeakModel
	}
	var sessions [2]bySession
	for i := range r.rows {
		w := &r.rows[i]
		trial, failed := of(w)
		if !trial || rule.Source == Model && w.beside() {
			continue
		}
		sessions[w.arm()].add(w.session, failed)
		switch {
		case failed && w.arm() == controlArm:
			c.ControlOps = append(c.ControlOps, w.id)
		case failed:
			c.Ops = append(c.Ops, w.id)
		}
	}
	main := append(sessions[mainArm].all, samples...)
	c.Main = rateOf(main)
	control := sessions[controlArm].all
	switch {
	case len(control) > 0:
		rate := rateOf(control)
		c.Control = &rate
		if c.compared() {
			t := stats.Excess(main, control)
			c.Excess = &Excess{Difference: t.Difference, Low: t.Low, High: t.High, P: t.P, PAdjusted: 1}
		}
	case c.Main.Failures > 0 && rule.Source == Model:
		c.Load = r.load(of)
	}
	return c
}

// bySession counts trials with sessions as clusters: a session's turns share
// its content and its cache, so they aren't independent.
type bySession struct {
	index map[int]int
	all   []stats.Cluster
}

func (b *bySession) add(session int, failed bool) {
	i, ok := b.index[session]
	if !ok {
		if b.index == nil {
			b.index = map[int]int{}
		}
		i = len(b.all)
		b.index[session] = i
		b.all = append(b.all, stats.Cluster{})
	}
	b.all[i].Trials++
	if failed {
		b.all[i].Failures++
	}
}

func rateOf(clusters []stats.Cluster) Rate {
	if len(clusters) == 0 {
		return Rate{High: 1}
	}
	r := stats.ClusterRate(clusters, level)
	return Rate{Failures: r.Failures, Trials: r.Trials, Rate: r.Rate, Low: r.Low, High: r.High}
}

// load is the Mantel-Haenszel comparison of ops sent under more than half of
// the highest load with the rest, rounds as strata, one-sided; nil where no
// round has both. (Agresti, Categorical Data Analysis, section 6.3.2.)
func (r *Recorder) load(of func(*row) (trial, failed bool)) *Load {
	l := Load{PAdjusted: 1}
	for i := range r.rows {
		if r.rows[i].phase == history.Main {
			l.Split = max(l.Split, r.rows[i].inFlight/2)
		}
	}
	var sessions [2]bySession
	type cell struct{ trials, failures float64 }
	rounds := map[int]*[2]cell{}
	for i := range r.rows {
		w := &r.rows[i]
		trial, failed := of(w)
		if !trial || w.phase != history.Main {
			continue
		}
		many := 0
		if w.inFlight > l.Split {
			many = 1
		}
		sessions[many].add(w.session, failed)
		if rounds[w.turn] == nil {
			rounds[w.turn] = &[2]cell{}
		}
		c := &rounds[w.turn][many]
		c.trials++
		if failed {
			c.failures++
		}
	}
	var excess, variance, difference, weight float64
	for _, turn := range slices.Sorted(maps.Keys(rounds)) {
		few, many := rounds[turn][0], rounds[turn][1]
		n := few.trials + many.trials
		if few.trials == 0 || many.trials == 0 {
			continue
		}
		failures := few.failures + many.failures
		excess += many.failures - many.trials*failures/n
		variance += few.trials * many.trials * failures * (n - failures) / (n * n * (n - 1))
		weight += few.trials * many.trials / n
		difference += few.trials * many.trials / n * (many.failures/many.trials - few.failures/few.trials)
	}
	if variance == 0 {
		return nil
	}
	l.Few, l.Many = rateOf(sessions[0].all), rateOf(sessions[1].all)
	l.Difference = difference / weight
	z := max(excess-0.5, 0) / math.Sqrt(variance)
	l.P = math.Erfc(z/math.Sqrt2) / 2
	return &l
}

// adjust shares the error that a run may make among all comparisons that
// could convict. One without a failure in either arm couldn't, whatever the
// server does, so it takes no share.
func adjust(classes []*ClassResult) {
	var p []float64
	var adjusted []*float64
	for _, c := range classes {
		switch {
		case c.compared() && c.Main.Failures+c.Control.Failures > 0:
			p, adjusted = append(p, c.Excess.P), append(adjusted, &c.Excess.PAdjusted)
		case c.Load != nil:
			p, adjusted = append(p, c.Load.P), append(adjusted, &c.Load.PAdjusted)
		}
	}
	for i, a := range stats.Holm(p) {
		*adjusted[i] = a
	}
}

// compared says that the class convicts only as excess over the control arm:
// models do it too, or it happened alone and cold as well.
func (c *ClassResult) compared() bool {
	return c.Control != nil && c.Main.Trials > 0 && (c.Source == Model || c.Control.Failures > 0)
}

// judge says what the class means for the verdict, by its rule.
func (c *ClassResult) judge() {
	if c.Main.Failures == 0 {
		return
	}
	found := fmt.Sprintf("%s: %s", c.name(), c.Main)
	switch {
	case c.compared():
		c.Convicts = c.Excess.PAdjusted < significance && c.Excess.Difference >= c.rule.MinExcess
		found += fmt.Sprintf("; also in the control arm: %s", c.Control)
		if c.Control.Failures == 0 {
			found = fmt.Sprintf("%s: %s; none of %d in the control arm", c.name(), c.Main, c.Control.Trials)
		}
		if c.Convicts {
			c.Says = fmt.Sprintf("%s: an excess of %s (95%%: %s to %s), p = %.2g", found, percent(c.Excess.Difference), percent(c.Excess.Low), percent(c.Excess.High), c.Excess.PAdjusted)
		} else {
			c.Says = fmt.Sprintf("%s: not more than chance and a smallest effect of %s allow for, p = %.2g", found, percent(c.rule.MinExcess), c.Excess.PAdjusted)
		}
	case c.Source == Server:
		c.Convicts = c.rule.Tolerance == 0 || c.Main.Low > c.rule.Tolerance
		switch {
		case c.rule.Tolerance == 0:
			c.Says = fmt.Sprintf("%s; %s", found, c.rule.Why)
		case c.Convicts:
			c.Says = fmt.Sprintf("%s, above the %s that is tolerated: %s", found, percent(c.rule.Tolerance), c.rule.Why)
		default:
			c.Says = fmt.Sprintf("%s, not surely above the %s that is tolerated: %s", found, percent(c.rule.Tolerance), c.rule.Why)
		}
	case c.Load != nil && c.Load.PAdjusted < loadSignificance && c.Load.Difference >= loadExcess:
		c.Convicts = true
		c.Says = fmt.Sprintf("%s, and the rate rises with the load within the run: %s with at most %d in flight, %s above (same rounds compared), p = %.2g",
			found, percent(c.Load.Few.Rate), c.Load.Split, percent(c.Load.Many.Rate), c.Load.PAdjusted)
	default:
		c.NeedsControl = c.rule.Tolerance == 0 || c.Main.Low > c.rule.Tolerance
		c.Says = found
	}
}

// name is how sentences call the class.
func (c *ClassResult) name() string {
	if c.Class == Broken {
		return "wrong in any way"
	}
	return string(c.Class)
}

// decide makes the verdict. Evidence that something wrong happened needs no
// assumption about the load; that nothing did needs all of them.
func (v *Verdict) decide() {
	convicts := map[Status][]string{}
	var needControl, unsure []string
	for _, c := range append([]*ClassResult{&v.Broken}, pointers(v.Classes)...) {
		switch {
		case c.Convicts && v.fallen(c.rule.Rests) != "":
			c.Convicts = false
			c.Says += fmt.Sprintf("; it doesn't count, since it isn't so that %s", v.fallen(c.rule.Rests))
			unsure = append(unsure, c.Says)
		case c.Convicts:
			convicts[c.Means] = append(convicts[c.Means], c.Says)
		case c.NeedsControl && c.Class != Broken:
			needControl = append(needControl, c.Says)
		}
	}
	for _, c := range v.Crashes {
		v.Reasons = append(v.Reasons, fmt.Sprintf("the oracle %q crashed (%s): a bug in culprit, not in the server; please report it", c.Oracle, c.Panic))
	}
	v.Reasons = append(v.Reasons, convicts[Corrupt]...)
	v.Reasons = append(v.Reasons, convicts[Wedged]...)
	otherwise := Clean
	for _, a := range v.Assumptions {
		if !a.Holds {
			v.Reasons = append(v.Reasons, fmt.Sprintf("%s: %s; %s", a.Name, a.Found, a.Hint))
			if otherwise != Inconclusive {
				otherwise = a.Otherwise
			}
		}
	}
	v.Reasons = append(v.Reasons, unsure...)
	if len(needControl) > 0 {
		v.Reasons = append(v.Reasons, needControl...)
		v.Reasons = append(v.Reasons, "no control arm: a weak model does this too; run again with --control")
	}
	v.Reasons = append(v.Reasons, convicts[Numerics]...)

	switch {
	case len(v.Crashes) > 0:
		v.Status = Inconclusive
	case len(convicts[Corrupt]) > 0:
		v.Status = Corrupt
	case len(convicts[Wedged]) > 0:
		v.Status = Wedged
	case otherwise != Clean:
		v.Status = otherwise
	case len(needControl) > 0:
		v.Status = Inconclusive
	case len(convicts[Numerics]) > 0:
		v.Status = Numerics
	default:
		v.Status = Clean
	}
	if v.Status == Clean || v.Status == Numerics {
		v.Reasons = append(v.Reasons, v.shown()...)
	}
	if v.Broken.Control != nil {
		v.Reasons = append(v.Reasons, fmt.Sprintf("base rate, alone and cold: %s", v.Broken.Control))
	}
}

// shown says how much a clean run shows.
func (v *Verdict) shown() []string {
	if v.Broken.Excess != nil {
		return []string{fmt.Sprintf("no more corruption under load than alone: %s wrong; an excess above %s would have shown (95%%)", v.Broken.Main, percent(max(v.Broken.Excess.High, 0)))}
	}
	if v.Broken.Main.Failures > 0 {
		return []string{fmt.Sprintf("%s wrong, within what is tolerated", v.Broken.Main)}
	}
	return []string{fmt.Sprintf("no sign of corruption in %d ops; a rate above %s would have shown (95%%)", v.Broken.Main.Trials, percent(v.Broken.Main.High))}
}

// fallen returns the assumption whose failure takes this evidence away, if
// there is one.
func (v *Verdict) fallen(e Evidence) string {
	for _, a := range v.Assumptions {
		if !a.Holds && e > stands[a.Name] {
			return a.Name
		}
	}
	return ""
}

// String is "3 of 320 ops (0.94%, 95%: 0.2% to 2.7%)".
func (r Rate) String() string {
	return fmt.Sprintf("%d of %d ops (%s, 95%%: %s to %s)", r.Failures, r.Trials, percent(r.Rate), percent(r.Low), percent(r.High))
}

// percent shows a share with two digits that count.
func percent(x float64) string {
	p := 100 * x
	switch {
	case p == 0 || math.Abs(p) >= 10:
		return strconv.FormatFloat(p, 'f', 0, 64) + "%"
	case math.Abs(p) >= 1:
		return strconv.FormatFloat(p, 'f', 1, 64) + "%"
	default:
		return strconv.FormatFloat(p, 'g', 2, 64) + "%"
	}
}

package oracle

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/stats"
)

// ForbiddenPath is code that ran though a pack of probes says that it never
// must.
const ForbiddenPath Class = "ForbiddenPath"

// Path judges the counts of probes that must stay at zero.
var Path = Oracle{
	Name:    "path",
	Classes: []Class{ForbiddenPath},
	New:     func(history.Header) Observer { return &pathObserver{most: map[string]float64{}} },
}

// Names of an event's values that are about a pack's expectations, before the
// probe's own name.
const (
	neverKey = "never:"
	mustKey  = "must:"
)

type pathObserver struct {
	most map[string]float64 // by probe
}

func (o *pathObserver) Op(*View, *Recorder) {}

func (o *pathObserver) Event(e *history.Event, _ *Recorder) {
	if e.Kind != history.Probe {
		return
	}
	for key, n := range e.Values {
		if name, ok := strings.CutPrefix(key, neverKey); ok {
			o.most[name] = max(o.most[name], n)
		}
	}
}

func (o *pathObserver) Finish(rec *Recorder) {
	for _, name := range slices.Sorted(maps.Keys(o.most)) {
		rec.Trial(0, ForbiddenPath)
		if n := o.most[name]; n > 0 {
			rec.Violation(Violation{
				Class: ForbiddenPath, Want: name + " never runs", Got: fmt.Sprintf("it ran %g times", n),
				Note: "counted by a probe in the server's process", Severity: n,
			})
		}
	}
}

// counts are what probes counted over a run, by name.
type counts struct {
	names  map[string]*count
	points int
	must   map[string]float64
	cost   float64 // highest share of a core that counting took, in percent
	events bool
}

type count struct {
	values []sample // where it changed
	total  float64
}

type sample struct {
	at    time.Duration
	value float64
}

// The most that is kept of counts: a hostile history may have any number.
const (
	maxCounts  = 512
	maxSamples = 1 << 18
	// samplingSlack is how late a reader sees a count.
	samplingSlack = 300 * time.Millisecond
)

func (c *counts) event(e *history.Event) {
	if e.Kind != history.Probe {
		return
	}
	if c.names == nil {
		c.names, c.must = map[string]*count{}, map[string]float64{}
	}
	c.events = true
	for key, n := range e.Values {
		if name, ok := strings.CutPrefix(key, mustKey); ok {
			c.must[name] = max(c.must[name], n)
			continue
		}
		if key == "core_percent" {
			c.cost = max(c.cost, n)
			continue
		}
		if strings.HasPrefix(key, neverKey) {
			continue
		}
		of := c.names[key]
		if of == nil {
			if len(c.names) == maxCounts {
				continue
			}
			of = &count{}
			c.names[key] = of
		}
		of.total = max(of.total, n)
		if c.points < maxSamples {
			c.points++
			of.values = append(of.values, sample{e.At, n})
		}
	}
}

// moved says whether a count rose while an op was under way.
func (c *count) moved(from, to time.Duration) bool {
	return c.until(to+samplingSlack) > c.until(from)
}

// until is the count at a time.
func (c *count) until(at time.Duration) float64 {
	i, _ := slices.BinarySearchFunc(c.values, at, func(s sample, at time.Duration) int {
		if s.at <= at {
			return -1
		}
		return 1
	})
	if i == 0 {
		return 0
	}
	return c.values[i-1].value
}

// ProbeResult is what a run says about one count of a probe.
type ProbeResult struct {
	Name  string  `json:"name"`
	Count float64 `json:"count"` // over the run
	// With are broken ops among those during which it rose, Without among the
	// others of the main phase. Requests overlap, so a rise is of all that
	// were open.
	With    Rate    `json:"with"`
	Without Rate    `json:"without"`
	Excess  *Excess `json:"excess,omitempty"` // nil where one side has no ops, or nothing broke
}

// Associated says that ops during which the count rose broke more often, beyond
// chance. It doesn't say why.
func (p *ProbeResult) Associated() bool { return p.Excess != nil && p.Excess.PAdjusted < 1-level }

// probes compares ops during which each count rose with the others.
func (j *judgement) probes() []ProbeResult {
	corrupt := j.rec.corruptClasses()
	var results []ProbeResult
	for _, name := range slices.Sorted(maps.Keys(j.counts.names)) {
		c := j.counts.names[name]
		var with, without bySession
		for i := range j.rec.rows {
			w := &j.rec.rows[i]
			if w.phase != history.Main || w.trials&corrupt == 0 {
				continue
			}
			side := &without
			if c.moved(w.sent, w.end) {
				side = &with
			}
			side.add(w.session, w.violations&corrupt != 0)
		}
		r := ProbeResult{Name: name, Count: c.total, With: rateOf(with.all), Without: rateOf(without.all)}
		if r.With.Trials > 0 && r.Without.Trials > 0 && r.With.Failures+r.Without.Failures > 0 {
			t := stats.Excess(with.all, without.all)
			r.Excess = &Excess{Difference: t.Difference, Low: t.Low, High: t.High, P: t.P, PAdjusted: 1}
		}
		results = append(results, r)
	}
	var p []float64
	for i := range results {
		if e := results[i].Excess; e != nil {
			p = append(p, e.P)
		}
	}
	adjusted := stats.Holm(p)
	for i := range results {
		if e := results[i].Excess; e != nil {
			e.PAdjusted, adjusted = adjusted[0], adjusted[1:]
		}
	}
	slices.SortStableFunc(results, func(a, b ProbeResult) int {
		return cmp.Compare(a.padjusted(), b.padjusted())
	})
	return results
}

func (p *ProbeResult) padjusted() float64 {
	if p.Excess == nil {
		return 2
	}
	return p.Excess.PAdjusted
}

// pathsRan says that the code paths ran that the pack says must.
func (j *judgement) pathsRan() (Assumption, bool) {
	if len(j.counts.must) == 0 {
		return Assumption{}, false
	}
	a := Assumption{Name: thatPathsRan, Otherwise: NotExercised, Holds: true, Hint: "send what takes that path; culprit probe read shows whether the probe is in"}
	for _, name := range slices.Sorted(maps.Keys(j.counts.must)) {
		if a.Found != "" {
			a.Found += ", "
		}
		a.Found += fmt.Sprintf("%s ran %g times", name, j.counts.must[name])
		a.Holds = a.Holds && j.counts.must[name] > 0
	}
	return a, true
}

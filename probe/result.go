package probe

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Finding says in one word what the counts of a probe mean.
type Finding string

// The findings, from the strongest problem to the best news.
const (
	Invalid     Finding = "INVALID"          // the self-test failed: the counts are not shown
	Unplaced    Finding = "REFUSED"          // no process took the probe
	Disarmed    Finding = "DISARMED"         // its expressions raised again and again: its counts end there
	NotImported Finding = "NOT IMPORTED"     // no process has the file
	NoEvidence  Finding = "NO EVIDENCE"      // zero, and no control moved that would make it count
	NotCalled   Finding = "NOT CALLED"       // the function never ran, though the control did
	NotTaken    Finding = "BRANCH NOT TAKEN" // the function ran, this statement didn't
	CaptureOnly Finding = "CAPTURE ONLY"     // every hit while a CUDA graph was captured: replays don't run Python
	Live        Finding = "LIVE"
)

// Result is what a window of time says about one probe, over all processes.
type Result struct {
	ID        string           `json:"id"`
	About     string           `json:"about,omitempty"`
	As        string           `json:"as,omitempty"`
	Expect    string           `json:"expect,omitempty"`
	Finding   Finding          `json:"finding"`
	Says      string           `json:"says"`
	Armed     int              `json:"armed"`     // processes whose counts are in here
	Processes int              `json:"processes"` // that have the probe's file
	Witnessed int              `json:"witnessed"` // armed ones in which the control moved
	Counts    Counts           `json:"counts"`
	Labels    map[string]int64 `json:"labels,omitempty"`
	Warnings  []string         `json:"warnings,omitempty"`

	matching bool
	noLabel  map[string]uint64
}

// Count is what the probe is about: matches where it has a condition, else
// hits.
func (r *Result) Count() uint64 {
	if r.matching {
		return r.Counts.Matches
	}
	return r.Counts.Hits
}

// Evident reports whether the count, zero or not, is evidence.
func (r *Result) Evident() bool {
	switch r.Finding {
	case NotCalled, NotTaken, CaptureOnly, Live:
		return true
	default:
		return false
	}
}

// Results judges each probe by what moved between two readings of one
// directory. A nil before is the beginning of everything.
func Results(before, after *Reading) []Result {
	results := make([]Result, len(after.Pack.Probes))
	old := map[string]*Process{}
	if before != nil {
		for i := range before.Processes {
			p := &before.Processes[i]
			old[p.key()] = p
		}
	}
	for i := range results {
		results[i] = after.result(i, old)
	}
	return results
}

func (p *Process) key() string { return fmt.Sprintf("%d-%d", p.PID, p.StartTicks) }

// moved is what a probe counted in a process since an older reading.
func (p *Process) moved(i int, old map[string]*Process) Counts {
	if o := old[p.key()]; o != nil && i < len(o.Probes) {
		return p.Probes[i].Counts.minus(o.Probes[i].Counts)
	}
	return p.Probes[i].Counts
}

func (r *Reading) result(i int, old map[string]*Process) Result {
	q := &r.Pack.Probes[i]
	out := Result{ID: q.ID, About: q.About, As: q.As, Expect: q.Expect, matching: q.When != ""}
	control := r.Pack.controlOf(i)
	refusals, warned, untested, disarmed := map[string]bool{}, map[string]bool{}, 0, 0
	var zero struct{ entered, called int } // armed processes without a hit: where the function ran, where only the control did
	for j := range r.Processes {
		p := &r.Processes[j]
		placed := &p.Probes[i]
		switch placed.State {
		case "waiting":
			continue
		case "refused":
			out.Processes++
			refusals[placed.Message] = true
			continue
		case "disarmed":
			out.Processes++
			disarmed++
			refusals[placed.Message] = true
			continue
		}
		out.Processes++
		if !p.SelfTest {
			untested++
			continue
		}
		out.Armed++
		c := p.moved(i, old)
		out.add(c)
		witnessed := control >= 0 && control != i && p.SelfTest && p.Probes[control].State != "refused" && p.moved(control, old).Hits > 0
		if witnessed {
			out.Witnessed++
		}
		switch {
		case c.Hits > 0:
		case c.Entered > 0:
			zero.entered++
		case witnessed:
			zero.called++
		}
		for label, n := range placed.Labels {
			if o := old[p.key()]; o != nil && i < len(o.Probes) {
				n = rise(o.Probes[i].Labels[label], n)
			}
			if n != 0 {
				if out.Labels == nil {
					out.Labels = map[string]int64{}
				}
				out.Labels[label] += n
			}
		}
		for what, n := range placed.noLabel {
			if out.noLabel == nil {
				out.noLabel = map[string]uint64{}
			}
			out.noLabel[what] += n
		}
		if placed.Message != "" && placed.State == "armed" && !warned[placed.Code] && (placed.Code != "E_RUNNING" || c.Hits+c.Entered == 0) {
			warned[placed.Code] = true
			out.warn(placed.Message)
		}
	}
	out.judge(zero.entered, zero.called, untested, refusals)
	if out.Finding == Unplaced && disarmed > 0 {
		out.Finding = Disarmed
	}
	if out.Armed > 0 {
		for _, message := range slices.Sorted(maps.Keys(refusals)) {
			out.warn(message)
		}
	}
	out.warnAboutCounts(q)
	if control < 0 && out.Finding == NoEvidence {
		out.Says += "; the pack names no control"
	}
	return out
}

func (r *Result) add(c Counts) {
	r.Counts.Entered += c.Entered
	r.Counts.Hits += c.Hits
	r.Counts.Matches += c.Matches
	r.Counts.Errors += c.Errors
	r.Counts.Overflow += c.Overflow
	r.Counts.TypeErrors += c.TypeErrors
	r.Counts.Captured += c.Captured
}

func (r *Result) judge(entered, called, untested int, refusals map[string]bool) {
	c := r.Counts
	switch {
	case r.Armed == 0 && untested > 0:
		r.Finding, r.Says = Invalid, "the probe doesn't work there: its self-test failed"
	case r.Armed == 0 && len(refusals) > 0:
		r.Finding = Unplaced
		r.Says = strings.Join(slices.Sorted(maps.Keys(refusals)), " ")
	case r.Armed == 0:
		r.Finding, r.Says = NotImported, "no process that has the agent has imported the file"
	case c.Hits > 0 && c.Captured >= c.Hits:
		r.Finding = CaptureOnly
		r.Says = fmt.Sprintf("all %d hits happened while a CUDA graph was being captured; replays do not run Python. Count graph_replays instead.", c.Hits)
	case c.Hits > 0 && r.matching:
		r.Finding, r.Says = Live, fmt.Sprintf("the condition held in %d of %d hits", c.Matches, c.Hits)
	case c.Hits > 0:
		r.Finding, r.Says = Live, fmt.Sprintf("%d hits", c.Hits)
	case entered > 0:
		// At most 3/n, at 95%: the rule of three.
		r.Finding, r.Says = NotTaken, fmt.Sprintf("entered %d times, so at most %.2g%% of calls", c.Entered, min(100, 300/float64(c.Entered)))
	case called > 0:
		r.Finding, r.Says = NotCalled, fmt.Sprintf("in %d of %d processes, in which the control moved", called, r.Processes)
	default:
		r.Finding, r.Says = NoEvidence, "zero, and nothing shows that this process was at work"
	}
	if r.Evident() && r.Armed < r.Processes {
		r.Says = fmt.Sprintf("PARTIAL %d/%d: %s", r.Armed, r.Processes, r.Says)
	}
}

func (r *Result) warnAboutCounts(q *Probe) {
	if n := r.Counts.Errors; n > 0 {
		r.warn(fmt.Sprintf("%d times an expression raised: those hits have no match and no labels", n))
	}
	names := make([]string, len(q.Labels))
	for i, l := range q.Labels {
		names[i] = l.Name
	}
	if n := r.Counts.Overflow; n > 0 {
		r.warn(fmt.Sprintf(`label %s had more than %d values; %d hits are in "other".`, strings.Join(names, ","), cmp.Or(q.MaxLabels, defaultMaxLabels), n))
	}
	for _, what := range slices.Sorted(maps.Keys(r.noLabel)) {
		r.warn(fmt.Sprintf("label %s %d times: such hits have no label. Use str()/numel().", what, r.noLabel[what]))
	}
}

func (r *Result) warn(text string) {
	if slices.Contains(r.Warnings, text) {
		return
	}
	r.Warnings = append(r.Warnings, text)
}

// Load is what the counters cost a process between two readings.
type Load struct {
	PID         int     `json:"pid"`
	HitsPerS    float64 `json:"hits_per_s"`
	NSPerHit    float64 `json:"ns_per_hit"`
	CorePercent float64 `json:"core_percent"`
}

// Loads are the processes' loads. A hit counts with what the self-test's hit,
// which has a condition, took in that process.
func Loads(before, after *Reading) []Load {
	span := after.At.Sub(before.At)
	if span <= 0 {
		return nil
	}
	old := map[string]*Process{}
	for i := range before.Processes {
		old[before.Processes[i].key()] = &before.Processes[i]
	}
	var loads []Load
	for j := range after.Processes {
		p := &after.Processes[j]
		if !p.Alive {
			continue
		}
		l := Load{PID: p.PID, NSPerHit: p.NSPerHit}
		for i := range p.Probes {
			c := p.moved(i, old)
			l.HitsPerS += float64(c.Hits+c.Entered) / span.Seconds()
		}
		l.CorePercent = l.HitsPerS * l.NSPerHit / float64(time.Second) * 100
		loads = append(loads, l)
	}
	return loads
}

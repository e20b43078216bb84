package amplify

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/culprit-project/culprit/stats"
)

// Status is what a search came to.
type Status string

// The statuses.
const (
	Raised     Status = "raised"     // a shape fails more often than the case's own
	NotRaised  Status = "not-raised" // it fails, and no shape was shown to fail more often
	Nothing    Status = "nothing"    // nothing failed
	Unfinished Status = "unfinished"
)

// Result is what a search found, and what it rests on. It is amplify.json.
type Result struct {
	Status Status `json:"status"`
	// Best is the shape that was chosen; nil when nothing failed.
	Best *Row `json:"best,omitempty"`
	Base Row  `json:"base"` // the case's own load
	// Factor is by how much the rate of Best is higher, of failures per
	// request, measured on launches that both share; PerMinute is the same of
	// failures per minute, as measured.
	Factor    Range   `json:"factor"`
	PerMinute float64 `json:"per_minute_factor,omitempty"`
	Tried     []Row   `json:"tried"` // while searching, the best first
	// Shows is the rate above which any of the shapes would have shown a
	// failure, if launches are alike; ShowsDispersed is the same if some of them
	// may hardly fail at all. Where nothing failed.
	Shows          float64 `json:"shows,omitempty"`
	ShowsDispersed float64 `json:"shows_dispersed,omitempty"`
	Used           Budget  `json:"used"`
	Budget         Budget  `json:"budget"`
}

// Range is an estimate with its interval at 95%.
type Range struct {
	Value float64 `json:"value"`
	Low   float64 `json:"low"`
	High  float64 `json:"high"` // 0 where it has no bound
}

// Row is a shape and what was seen of it.
type Row struct {
	Name      string         `json:"name"`
	Shape     Shape          `json:"shape"`
	Launches  int            `json:"launches"`
	Requests  int            `json:"requests"` // that were judged
	Failures  int            `json:"failures"`
	Rate      Range          `json:"rate"`
	Run       time.Duration  `json:"run_ns"`
	PerMinute float64        `json:"per_minute"`     // failures, under load
	Safe      *stats.Cluster `json:"safe,omitempty"` // in the safe arm
	Out       string         `json:"out,omitempty"`  // why it was given up
}

func (s *search) result(best *tally, unfinished bool) Result {
	base := s.tallies[0]
	r := Result{Used: s.used, Budget: s.Budget}
	// The case's own wasn't chosen for what it showed: all of it counts, but
	// where it is the best of all.
	r.Base = base.row(slices.Concat(base.seen, base.fresh))
	failed, alive := false, false
	for _, t := range s.tallies {
		if len(t.seen) == 0 && t.out == "" {
			continue
		}
		row := t.row(t.seen)
		failed = failed || row.Failures > 0 && t.out == ""
		if row.Out == "" && row.Requests > 0 {
			alive = true
			_, high := stats.AnytimeInterval(clustersOf(t.seen), stats.Independent(), level)
			r.Shows, r.ShowsDispersed = max(r.Shows, high), max(r.ShowsDispersed, row.Rate.High)
		}
		r.Tried = append(r.Tried, row)
	}
	value := func(row Row) float64 {
		if row.Out != "" {
			return -1
		}
		if s.PerRequest {
			return row.Rate.Value
		}
		return row.PerMinute
	}
	slices.SortStableFunc(r.Tried, func(a, b Row) int { return cmp.Compare(value(b), value(a)) })
	switch {
	case best != nil && best.out == "" && len(best.fresh) > 0:
		row := best.row(best.fresh)
		r.Best, r.Status = &row, NotRaised
		if best == base {
			r.Base = row
			break
		}
		r.Factor = ratio(best.fresh, base.fresh)
		if r.Base.PerMinute > 0 {
			r.PerMinute = row.PerMinute / r.Base.PerMinute
		}
		if r.Factor.Low > 1 {
			r.Status = Raised
		}
	case !alive || best != nil && best.out == "":
		r.Status = Unfinished
	case !failed:
		r.Status = Nothing
	default:
		r.Status = NotRaised
	}
	if r.Status != Nothing {
		r.Shows, r.ShowsDispersed = 0, 0
	}
	if unfinished {
		r.Status = Unfinished
	}
	return r
}

func (t *tally) row(launches []launched) Row {
	r := Row{Name: t.name, Shape: t.shape, Launches: len(launches), Out: t.out}
	for _, l := range launches {
		r.Requests += l.Trials
		r.Failures += l.Failures
	}
	if r.Rate.High = 1; r.Requests > 0 {
		r.Rate.Value = float64(r.Failures) / float64(r.Requests)
		r.Rate.Low, r.Rate.High = stats.AnytimeInterval(clustersOf(launches), stats.Dispersed(), level)
	}
	if t.judged > 0 {
		r.Run = time.Duration(float64(t.played) * float64(r.Requests) / float64(t.judged))
	}
	if r.Run > 0 {
		r.PerMinute = float64(r.Failures) / r.Run.Minutes()
	}
	if t.safe.Trials > 0 {
		safe := t.safe
		r.Safe = &safe
	}
	return r
}

func clustersOf(launches []launched) []stats.Cluster {
	var clusters []stats.Cluster
	for _, l := range launches {
		clusters = append(clusters, l.Cluster)
	}
	return clusters
}

// ratio is by how much a's rate is higher than b's. It takes the launches that
// played both: one that fails more than others does so for both, so that of the
// failures of a launch a's share says it all. (Of Poisson counts that is exact,
// given their sum; rates near 1 vary less, and the interval is then too wide.)
func ratio(a, b []launched) Range {
	var shares []stats.Cluster
	var failuresA, failuresB, trialsA, trialsB float64
	for _, l := range a {
		at := slices.IndexFunc(b, func(m launched) bool { return m.launch == l.launch })
		if at < 0 {
			continue
		}
		m := b[at]
		failuresA, trialsA = failuresA+float64(l.Failures), trialsA+float64(l.Trials)
		failuresB, trialsB = failuresB+float64(m.Failures), trialsB+float64(m.Trials)
		if l.Failures+m.Failures > 0 {
			shares = append(shares, stats.Cluster{Failures: l.Failures, Trials: l.Failures + m.Failures})
		}
	}
	if len(shares) == 0 {
		return Range{}
	}
	low, high := stats.AnytimeOdds(shares, level)
	r := Range{Low: low * trialsB / trialsA}
	if failuresB > 0 {
		r.Value = failuresA / failuresB * trialsB / trialsA
	}
	if !math.IsInf(high, 1) {
		r.High = high * trialsB / trialsA
	}
	return r
}

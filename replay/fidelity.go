package replay

import (
	"errors"
	"io"
	"slices"
	"time"

	"github.com/culprit-project/culprit/history"
)

// Fidelity says how true a replay was to what was recorded.
type Fidelity struct {
	Requests int `json:"requests"` // of the trace
	Sent     int `json:"sent"`

	Timed  bool       `json:"timed"`
	LateMS [3]float64 `json:"late_ms"` // behind the recorded times: median, 99%, most

	HungUp    int     `json:"hung_up"` // as recorded
	HungUpNow int     `json:"hung_up_now"`
	Peak      int     `json:"peak_concurrency"` // as recorded; 0 when that isn't known
	PeakNow   int     `json:"peak_concurrency_now"`
	Mean      float64 `json:"mean_concurrency"`
	MeanNow   float64 `json:"mean_concurrency_now"`
}

// Fidelity compares a trace with the history of its replay.
func (t *Trace) Fidelity(r *history.Reader) (Fidelity, error) {
	f := Fidelity{Requests: len(t.Requests), Timed: t.Timed}
	for _, q := range t.Requests {
		if q.HungUp {
			f.HungUp++
		}
	}
	f.Peak, f.Mean = t.Concurrency()
	var late []time.Duration
	var spans [][2]time.Duration
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return f, err
		}
		if op := rec.Op; op != nil && op.Phase == history.Main {
			f.Sent++
			late = append(late, max(0, op.Sent-op.Planned))
			spans = append(spans, [2]time.Duration{op.Sent, op.LastByte})
			if op.Outcome == history.Cancelled {
				f.HungUpNow++
			}
		}
	}
	f.PeakNow, f.MeanNow = concurrency(spans)
	if slices.Sort(late); len(late) > 0 {
		for i, q := range []float64{0.5, 0.99, 1} {
			f.LateMS[i] = float64(late[int(q*float64(len(late)-1))].Microseconds()) / 1000
		}
	}
	return f, nil
}

package oracle

import (
	"fmt"
	"math/bits"
	"strconv"

	"github.com/culprit-project/culprit/history"
)

// Breakdown is the broken rate of the main phase along one dimension.
type Breakdown struct {
	By   string `json:"by"`
	Bins []Bin  `json:"bins"` // in the dimension's order; empty ones are left out
}

// Bin is one stretch of a dimension.
type Bin struct {
	Label string `json:"label"`
	Rate  Rate   `json:"rate"`
}

// indexBins is into how many parts the main phase is cut, by order of sending.
const indexBins = 10

// breakdowns wants the rows in the order of sending.
func (r *Recorder) breakdowns() []Breakdown {
	corrupt := r.corruptClasses()
	var rows []*row
	for i := range r.rows {
		if w := &r.rows[i]; w.phase == history.Main && w.trials&corrupt != 0 {
			rows = append(rows, w)
		}
	}
	tokens := true
	for _, w := range rows {
		tokens = tokens && w.promptTokens > 0
	}
	prompt, promptOf := "request bytes", func(_ int, w *row) (int, string) { return octave(w.requestBytes) }
	if tokens {
		prompt, promptOf = "prompt tokens", func(_ int, w *row) (int, string) { return octave(w.promptTokens) }
	}
	dimensions := []struct {
		by string
		of func(i int, w *row) (order int, label string) // order is negative for an op that isn't in it
	}{
		{"round", func(_ int, w *row) (int, string) { return few(w.turn) }},
		{"requests in flight", func(_ int, w *row) (int, string) { return octave(w.inFlight) }},
		{"request index", func(i int, _ *row) (int, string) {
			bin := i * indexBins / len(rows)
			from, to := (bin*len(rows)+indexBins-1)/indexBins, ((bin+1)*len(rows)+indexBins-1)/indexBins
			return bin, fromTo(from+1, to)
		}},
		{prompt, promptOf},
		{"cached share of prompt", func(_ int, w *row) (int, string) { return cachedShare(w) }},
		{"recall distance", func(_ int, w *row) (int, string) {
			if w.distance < 0 {
				return -1, ""
			}
			return few(w.distance)
		}},
	}
	out := make([]Breakdown, 0, len(dimensions))
	for _, d := range dimensions {
		bins := map[int]*bySession{}
		labels := map[int]string{}
		top := -1
		for i, w := range rows {
			order, label := d.of(i, w)
			if order < 0 {
				continue
			}
			if bins[order] == nil {
				bins[order] = &bySession{}
				labels[order] = label
			}
			bins[order].add(w.session, w.violations&corrupt != 0)
			top = max(top, order)
		}
		b := Breakdown{By: d.by}
		for order := range top + 1 {
			if bin := bins[order]; bin != nil {
				b.Bins = append(b.Bins, Bin{Label: labels[order], Rate: rateOf(bin.all)})
			}
		}
		if b.Bins != nil {
			out = append(out, b)
		}
	}
	return out
}

// few keeps small numbers as they are and puts the rest into octaves.
func few(n int) (order int, label string) {
	if n <= 16 {
		return max(n, 0), strconv.Itoa(n)
	}
	order, label = octave(n)
	return 16 + order, label
}

// octave puts n between two powers of two: 1, 2, 3-4, 5-8, 9-16, ...
func octave(n int) (order int, label string) {
	if n <= 1 {
		return 0, strconv.Itoa(max(n, 0))
	}
	order = bits.Len(uint(n - 1))
	return order, fromTo(1<<(order-1)+1, 1<<order)
}

func fromTo(from, to int) string {
	if from == to {
		return strconv.Itoa(from)
	}
	return fmt.Sprintf("%d-%d", from, to)
}

func cachedShare(w *row) (order int, label string) {
	if w.cachedTokens < 0 || w.promptTokens <= 0 {
		return 0, "not reported"
	}
	switch share := float64(w.cachedTokens) / float64(w.promptTokens); {
	case share <= 0:
		return 1, "0%"
	case share <= 0.25:
		return 2, "to 25%"
	case share <= 0.50:
		return 3, "to 50%"
	case share <= 0.75:
		return 4, "to 75%"
	case share <= 1:
		return 5, "to 100%"
	default:
		return 6, "over 100%"
	}
}

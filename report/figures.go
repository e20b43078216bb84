package report

import (
	"fmt"
	"math"
	"strings"

	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
)

// rates is a table of rates with their intervals, all drawn to one scale.
type rates struct {
	Of   string // what a row is
	Top  string // the scale's end
	Foot string
	// Launched says that the rows have launches.
	Launched bool
	Rows     []rateRow
}

type rateRow struct {
	Name, Note                     string
	Trials                         []int // by number
	Launches, Broken, Rate, Bounds string
	Whisker                        whisker

	rate, low, high float64
	failures        int
}

// whisker is a point with its interval, in a box of 200 by 16.
type whisker struct {
	Class, Label string
	At, Low      float64
	High         float64
	Open         bool // nothing failed
}

const whiskerWidth = 200

func evidenceRow(name string, e search.Evidence) rateRow {
	row := rateRow{Name: name, Launches: fmt.Sprint(e.Launches)}
	row.set(e.Failures, e.Requests, brokenShare(e), e.Low, e.High)
	return row
}

func oracleRow(name string, r oracle.Rate) rateRow {
	row := rateRow{Name: name}
	row.set(r.Failures, r.Trials, r.Rate, r.Low, r.High)
	return row
}

func (row *rateRow) set(failures, trials int, rate, low, high float64) {
	row.failures, row.rate, row.low, row.high = failures, rate, low, high
	row.Broken, row.Rate, row.Bounds = fmt.Sprintf("%s/%s", count(failures), count(trials)), percent(rate), bounds(low, high)
}

// newRates draws the rows to the scale that the highest of them needs.
func newRates(of string, rows []rateRow) *rates {
	top := 0.0
	for _, r := range rows {
		top = max(top, r.high)
	}
	for _, nice := range []float64{0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1} {
		if top <= nice {
			top = nice
			break
		}
	}
	at := func(x float64) float64 { return round(5 + (whiskerWidth-10)*min(max(x/top, 0), 1)) }
	for i := range rows {
		r := &rows[i]
		r.Whisker = whisker{Class: "clean", Label: fmt.Sprintf("%s, 95%% %s", r.Rate, r.Bounds), At: at(r.rate), Low: at(r.low), High: at(r.high), Open: r.failures == 0}
		if r.failures > 0 {
			r.Whisker.Class = "fails"
		}
	}
	return &rates{Of: of, Top: short(top), Rows: rows, Launched: len(rows) > 0 && rows[0].Launches != ""}
}

func round(x float64) float64 { return math.Round(10*x) / 10 }

// steps are probabilities trial by trial, a row of bars each.
type steps struct {
	From, To int
	Rows     []stepRow
}

type stepRow struct {
	Name, Label, End string
	Width            int
	Bars             []stepBar
}

type stepBar struct {
	X, Y, H float64
	Title   string
}

const stepWidth = 10

func (s *steps) add(name string, first int, values []float64) {
	row := stepRow{Name: name, Width: stepWidth * len(values)}
	for i, v := range values {
		if v > 0.001 {
			row.Bars = append(row.Bars, stepBar{float64(i * stepWidth), round(100 - 100*v), round(100 * v), fmt.Sprintf("trial %d: %s", first+i, short(v))})
		}
	}
	if n := len(values); n > 0 {
		row.End = short(values[n-1])
		row.Label = fmt.Sprintf("%s: from %s to %s", name, short(values[0]), row.End)
	}
	s.Rows = append(s.Rows, row)
}

// opList names ops, the first few.
func opList(ops []int64) string {
	const most = 40
	var parts []string
	for _, id := range ops[:min(len(ops), most)] {
		parts = append(parts, fmt.Sprint(id))
	}
	text := strings.Join(parts, ", ")
	if len(ops) > most {
		text += fmt.Sprintf(", and %d more in verdict.json", len(ops)-most)
	}
	return text
}

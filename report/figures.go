package report

import (
	"fmt"
	"strings"

	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
)

// rates is a table of rates with their intervals, all drawn to one scale.
type rates struct {
	Of    string // what a row is
	Scale chart
	Foot  string
	// Launched says that the rows have launches.
	Launched bool
	Rows     []rateRow
}

type rateRow struct {
	Name, Note                     string
	Trials                         []trialLink
	Launches, Broken, Rate, Bounds string
	Ops                            *opLinks // behind Broken
	Whisker                        chart

	rate, low, high float64
	failures        int
}

// trialLink leads to a trial.
type trialLink struct {
	N    int
	Href string
}

func evidenceRow(name string, e search.Evidence) rateRow {
	row := rateRow{Name: name, Launches: fmt.Sprint(e.Launches)}
	row.set(e.Failures, e.Requests, brokenShare(e), e.Low, e.High)
	return row
}

func oracleRow(name string, r oracle.Rate, ops []int64, shown map[int64]bool) rateRow {
	row := rateRow{Name: visible(name)}
	row.set(r.Failures, r.Trials, r.Rate, r.Low, r.High)
	row.Ops = linksTo(row.Broken, ops, shown)
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
	for i := range rows {
		rows[i].Whisker = newWhisker(&rows[i], top)
	}
	return &rates{Of: of, Scale: newScale(top), Rows: rows, Launched: len(rows) > 0 && rows[0].Launches != ""}
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

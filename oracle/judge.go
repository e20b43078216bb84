package oracle

import "github.com/culprit-project/culprit/history"

// Options of a judgement. The zero value is the usual one.
type Options struct {
	Oracles []Oracle // nil is Registry
}

// Verdict is what a run's history says.
type Verdict struct {
	Status  Status   `json:"status"`
	Reasons []string `json:"reasons"` // sentences
}

// Judge streams a history once and judges it.
func Judge(r *history.Reader, opts Options) (*Verdict, error) { panic("stub") }

package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/search"
)

// priorFile has the odds that a hunt began with: it is resumed with the same.
const priorFile = "prior.json"

// prior is what the settled hypotheses say of the factors, for a hunt that
// begins, or what they said when it began.
func (b *book) prior(ctx context.Context, resume bool) (odds map[string]float64, err error) {
	path := filepath.Join(b.base, priorFile)
	if resume {
		text, err := os.ReadFile(path)
		if errors.Is(err, fs.ErrNotExist) {
			return nil, nil
		}
		if err == nil {
			err = json.Unmarshal(text, &odds)
		}
		if err != nil {
			return nil, fmt.Errorf("resume: read %s: %w", path, err)
		}
		return odds, nil
	}
	if err := b.sync(ctx); err != nil {
		return nil, err
	}
	s, err := b.standing(ctx)
	if err != nil {
		return nil, err
	}
	if odds = b.odds(s); len(odds) == 0 {
		return nil, nil
	}
	if err := os.MkdirAll(b.base, 0o755); err != nil {
		return nil, fmt.Errorf("make case directory: %w", err)
	}
	return odds, experiment.WriteJSON(path, odds)
}

// mostLaunches is how often one question is put to an arm: a rate that lies at
// the limit of a prediction is never decided.
const mostLaunches = 12

// mostVoid is how often an arm may turn out not to be what it claims.
const mostVoid = 2

// void counts the trials of each arm that don't count.
func (b *book) void() (map[string]int, error) {
	trials, err := b.trials()
	counts := map[string]int{}
	for _, t := range trials {
		if t.Void != "" {
			counts[t.Arm.String()]++
		}
	}
	return counts, err
}

// huntHypotheses runs the experiments that tell the hypotheses apart, one launch
// after another, until all are settled or nothing more can be told.
func huntHypotheses(ctx context.Context, o HuntOptions, hunt experiment.HuntOptions, h *huntScreen) (search.Status, error) {
	if err := h.book.sync(ctx); err != nil {
		return "", err
	}
	budget := cmp.Or(o.Launches, h.subject.Budget.Launches)
	ran, launches := map[string]int{}, 0
	next := func() (arm design.Arm, requests int, why string, more bool, err error) {
		s, err := h.book.standing(ctx)
		if err != nil || budget > 0 && launches >= budget {
			return nil, 0, "", false, err
		}
		list, err := h.book.next(ctx, s)
		if err != nil {
			return nil, 0, "", false, err
		}
		void, err := h.book.void()
		if err != nil {
			return nil, 0, "", false, err
		}
		for _, e := range list {
			if slices.ContainsFunc(e.Arms, func(a design.Arm) bool { return void[a.String()] >= mostVoid }) {
				continue
			}
			// The arm of the experiment that has had the fewest launches.
			for _, a := range e.Arms {
				if n := ran[a.String()]; n < mostLaunches && (arm == nil || n < ran[arm.String()]) {
					arm = a
				}
			}
			if arm != nil {
				ran[arm.String()]++
				launches++
				return arm, e.Requests, "asks " + e.Asks[0].Question, true, nil
			}
		}
		return nil, 0, "", false, nil
	}
	err := experiment.RunArms(ctx, hunt, next)
	switch {
	case ctx.Err() != nil:
		return "", &NoVerdictError{fmt.Errorf("hunt: %w\nNothing is lost: go on with the same command", context.Cause(ctx))}
	case err != nil:
		return "", &NoVerdictError{err}
	}
	s, err := h.book.standing(ctx)
	if err != nil {
		return "", err
	}
	record, err := experiment.ReadHunt(hunt.Dir)
	if err != nil {
		return "", err
	}
	if err := writeHuntPage(record, &s, o.Tool); err != nil {
		return "", err
	}
	if h.out.Screen == nil {
		return settled(s), writeJSON(h.out.JSON, s)
	}
	h.out.Screen.Printf("\n")
	report.Hypotheses(h.out.Screen, s)
	h.out.Screen.Printf("\npage: %s\n", filepath.Join(hunt.Dir, report.PageFile))
	return settled(s), nil
}

// settled is what a hunt for hypotheses came to.
func settled(s report.Standing) search.Status {
	for _, h := range s.Hypotheses {
		if h.Verdict == "undecided" {
			return search.Undecided
		}
	}
	return search.Found
}

package oracle

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// lines shows a breakdown: each bin's label and counts.
func (r *Recorder) lines(by string) (lines []string) {
	for _, b := range r.breakdowns() {
		if b.By != by {
			continue
		}
		for _, bin := range b.Bins {
			lines = append(lines, fmt.Sprintf("%s: %d/%d", bin.Label, bin.Rate.Failures, bin.Rate.Trials))
		}
	}
	return lines
}

func TestBreakdowns(t *testing.T) {
	tests := []struct {
		name string
		ops  int
		row  func(i int, w *row)
		want map[string][]string
	}{
		{
			"rounds count from 1", 8, func(i int, w *row) { w.turn = i % 2 },
			map[string][]string{"round": {"1: 4/4", "2: 0/4"}, "leg": nil},
		},
		{
			"legs in the order of a session, instead of rounds", 12, func(i int, w *row) {
				w.turn, w.leg = i%6, []string{"cold", "device", ""}[i%3]
			},
			map[string][]string{"leg": {"cold: 2/4", "device: 2/4", "filler: 2/4"}, "round": nil},
		},
		{
			"few ops go with the next", 100, func(i int, w *row) { w.inFlight = min(i+1, 40) },
			map[string][]string{"requests in flight": {"1-8: 4/8", "9-16: 4/8", "17-32: 8/16", "33-64: 34/68"}},
		},
		{
			"few at the end stay", 100, func(i int, w *row) { w.inFlight = 1 + i/98 },
			map[string][]string{"requests in flight": {"1: 49/98", "2: 1/2"}},
		},
		{
			"parts of the run", 20, func(int, *row) {},
			map[string][]string{ByIndex: {"1-2: 1/2", "3-4: 1/2", "5-6: 1/2", "7-8: 1/2", "9-10: 1/2", "11-12: 1/2", "13-14: 1/2", "15-16: 1/2", "17-18: 1/2", "19-20: 1/2"}},
		},
		{
			"cached share", 6, func(i int, w *row) { w.promptTokens, w.cachedTokens = 100, []int{-1, 0, 20, 50, 60, 100}[i] },
			map[string][]string{"cached share of prompt": {"not reported: 1/1", "none: 0/1", "up to 25%: 1/1", "25 to 50%: 0/1", "50 to 75%: 1/1", "75 to 100%: 0/1"}},
		},
		{
			"cache tier: the slowest that a prompt came from", 6, func(i int, w *row) {
				w.tier = tierOf(&[]openai.Usage{
					{CachedTokens: -1},
					{},
					{CachedTokens: 9, ByTier: &openai.CachedByTier{Device: 9}},
					{CachedTokens: 9, ByTier: &openai.CachedByTier{Device: 1, Host: 8}},
					{CachedTokens: 9, ByTier: &openai.CachedByTier{Device: 1, Host: 1, Storage: 7}},
					{CachedTokens: 9},
				}[i])
			},
			map[string][]string{"cache tier": {"not reported: 1/1", "miss: 0/1", "hit: 0/1", "device: 1/1", "host: 0/1", "storage: 1/1"}},
		},
		{
			"no cache tier where the server names none", 6, func(i int, w *row) { w.tier = tierOf(&openai.Usage{CachedTokens: i - 1}) },
			map[string][]string{"cache tier": nil},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			rec := newRecorder()
			wrong := classSet(1) << rec.byClass[WrongArgument]
			for i := range test.ops {
				w := row{id: int64(i + 1), phase: history.Main, session: i, trials: wrong}
				if i%2 == 0 {
					w.violations = wrong
				}
				test.row(i, &w)
				rec.rows = append(rec.rows, w)
			}
			for by, want := range test.want {
				if diff := cmp.Diff(want, rec.lines(by)); diff != "" {
					t.Errorf("by %s (-want +got):\n%s", by, diff)
				}
			}
		})
	}
}

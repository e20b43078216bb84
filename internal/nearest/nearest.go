// Package nearest finds the name that somebody may have meant.
//
// Stability: internal.
package nearest

import (
	"slices"

	"github.com/agext/levenshtein"
)

// Name is the candidate that takes the fewest edits, the first of several;
// empty of none.
func Name(name string, candidates []string) string {
	if len(candidates) == 0 {
		return ""
	}
	return slices.MinFunc(candidates, func(a, b string) int {
		return levenshtein.Distance(a, name, nil) - levenshtein.Distance(b, name, nil)
	})
}

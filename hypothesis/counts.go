package hypothesis

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/nearest"
)

// Counts is what a run's counters did, by series: a name and its labels. The
// increase of what only grows, else the highest value.
type Counts map[string]float64

// CountsOf takes the counts out of a run's events.
func CountsOf(next func() (*history.Event, error)) (Counts, error) {
	counts, last := Counts{}, map[string]float64{}
	for {
		e, err := next()
		if err != nil || e == nil {
			return counts, err
		}
		switch e.Kind {
		case history.Metrics:
			for series, value := range e.Values {
				counts.sample(last, series, value)
			}
		case history.Probe:
			for series, value := range e.Values { // since the run began
				counts[probePrefix+series] = value
			}
		case history.Log:
			if n, ok := e.Values["lines"]; ok {
				counts[logPrefix+e.Name] += n
			}
		default:
		}
	}
}

// What isn't a metric has a name that no metric can have.
const (
	probePrefix = "probe!"
	logPrefix   = "logs!"
)

func (c Counts) sample(last map[string]float64, series string, value float64) {
	old, seen := last[series]
	last[series] = value
	name, _, _ := strings.Cut(series, "{")
	switch {
	case !grows(name):
		if high, there := c[series]; !there || value > high {
			c[series] = value
		}
	case !seen: // the run begins here
		c[series] += 0
	case value >= old:
		c[series] += value - old
	default: // it began anew
		c[series] += value
	}
}

func grows(name string) bool {
	return strings.HasSuffix(name, "_total") || strings.HasSuffix(name, "_count") || strings.HasSuffix(name, "_sum")
}

// count is the sum over the series that a term means. It can't be told where
// nothing has that name, or where the run never had a label with that value, in
// any series: a misspelt name must not look like a path that is never taken.
//
// What one server counts by itself, probes count in another: a metric is the
// probe of that name where the run has no such metric.
func (t *term) count(c Counts) (float64, error) {
	if t.kind == logs {
		return c[logPrefix+t.name], nil // no line matched
	}
	kinds := []kind{metric, probe}
	if t.kind == probe {
		kinds = []kind{probe}
	}
	var names []string
	values := map[string][]string{}
	for series := range c {
		name, of, _ := strings.Cut(series, "{")
		names = append(names, strings.TrimPrefix(name, probePrefix))
		for label, value := range parseLabels(of) {
			values[label] = append(values[label], value)
		}
	}
	i := slices.IndexFunc(kinds, func(k kind) bool {
		return slices.ContainsFunc(slices.Collect(maps.Keys(c)), func(series string) bool { return t.means(k, series) })
	})
	if i < 0 {
		if len(c) == 0 {
			return 0, errors.New("the server showed no metrics")
		}
		return 0, fmt.Errorf("the run has no %s %q; nearest: %q", t.kind, t.name, nearest.Name(t.name, slices.Sorted(slices.Values(names))))
	}
	for label, value := range t.labels {
		switch {
		case values[label] == nil:
			return 0, fmt.Errorf("nothing in the run has a label %q; nearest: %q", label, nearest.Name(label, slices.Sorted(maps.Keys(values))))
		case !slices.Contains(values[label], value):
			return 0, fmt.Errorf("nothing in the run has %s=%s; nearest: %q", label, value, nearest.Name(value, slices.Sorted(slices.Values(values[label]))))
		}
	}
	sum := 0.0
	for series, value := range c {
		_, of, labelled := strings.Cut(series, "{")
		// A probe has all its hits in a series without labels, and again by label.
		match := t.means(kinds[i], series) && (kinds[i] != probe || labelled == (len(t.labels) > 0))
		own := parseLabels(of)
		for label, value := range t.labels {
			match = match && own[label] == value
		}
		if match {
			sum += value
		}
	}
	return sum, nil
}

// means says whether a term, taken as of a kind, speaks of a series. Metrics may
// be called without the engine's prefix and without _total.
func (t *term) means(k kind, series string) bool {
	name, _, _ := strings.Cut(series, "{")
	if k == probe {
		return name == probePrefix+t.name
	}
	short := strings.TrimPrefix(name[strings.IndexByte(name, ':')+1:], "culprit_lab_")
	wanted := strings.TrimSuffix(t.name, "_total")
	for _, n := range []string{name, strings.ReplaceAll(name, ":", "_"), short} {
		if n == t.name || strings.TrimSuffix(n, "_total") == wanted {
			return true
		}
	}
	return false
}

// parseLabels reads a="b",c=4}; the writers are our own.
func parseLabels(text string) map[string]string {
	labels := map[string]string{}
	for text != "" && text != "}" {
		name, rest, ok := strings.Cut(text, "=")
		if !ok {
			break
		}
		name = strings.TrimLeft(name, ",")
		if !strings.HasPrefix(rest, `"`) {
			end := strings.IndexAny(rest, ",}")
			if end < 0 {
				break
			}
			labels[name], text = rest[:end], rest[end:]
			continue
		}
		var value strings.Builder
		i := 1
		for ; i < len(rest) && rest[i] != '"'; i++ {
			if rest[i] == '\\' && i+1 < len(rest) {
				i++
			}
			value.WriteByte(rest[i])
		}
		labels[name] = value.String()
		text = rest[min(i+1, len(rest)):]
	}
	return labels
}

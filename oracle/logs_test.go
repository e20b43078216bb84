package oracle

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
)

func TestLogCounts(t *testing.T) {
	var l logs
	event := func(at time.Duration, name, text string, values map[string]float64) {
		l.event(&history.Event{At: at, Kind: history.Log, Name: name, Text: text, Values: values})
	}
	event(time.Second, "wedge", "WaitingForInput timeout", map[string]float64{"lines": 3})
	event(0, "cache", "cold", nil) // a note of our own
	event(2*time.Second, "oom", "CUDA out of memory", map[string]float64{"lines": 1})
	event(3*time.Second, "wedge", "again", map[string]float64{"lines": 2})
	l.event(&history.Event{Kind: history.Metrics, Name: "lines", Values: map[string]float64{"lines": 9}})
	want := []LogCount{{"oom", 1, "CUDA out of memory", 2000}, {"wedge", 5, "WaitingForInput timeout", 1000}}
	if diff := cmp.Diff(want, l.counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
}

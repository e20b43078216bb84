package app

import (
	"fmt"
	"runtime"
	"testing"
)

// Every hunt has its own seed, so how many run at once changes nothing.
func TestSimulationsDontDependOnCores(t *testing.T) {
	var row simulation
	for _, s := range simulations("combinations") {
		if s.name == "10 factors, 2 needed, rate 0.18" {
			row = s
		}
	}
	o := SimulateOptions{Hunts: 12, Seed: 7}
	var got [2]string
	for i, cores := range []int{1, 4} {
		before := runtime.GOMAXPROCS(cores)
		got[i] = fmt.Sprint(row.row(o))
		runtime.GOMAXPROCS(before)
	}
	if got[0] != got[1] {
		t.Errorf("on one core %s\non four     %s", got[0], got[1])
	}
}

// Where nothing is at fault nothing is accused, and where something is it is
// found; culprit simulate has the many.
func TestSimulatedHunts(t *testing.T) {
	for _, table := range []string{"null", "order"} {
		for _, s := range simulations(table) {
			got := s.many(SimulateOptions{Hunts: 2, Seed: 3}, hunter(s.options, s.null))
			if got.hunts != 2 || got.wrong > 0 {
				t.Errorf("%s: %s: %d hunts, %d wrong", table, s.name, got.hunts, got.wrong)
			}
		}
	}
}

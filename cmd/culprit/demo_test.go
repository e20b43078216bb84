package main

import (
	"testing"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/lab/fault"
)

// TestDemoCases: each fault of the catalogue can be hunted, in a case that is
// sound and has eight factors or more.
func TestDemoCases(t *testing.T) {
	known := map[string]bool{}
	for _, e := range fault.Catalogue() {
		known[e.Name] = true
		if _, err := faultOf(e.Name); err != nil {
			t.Error(err)
		}
	}
	for _, f := range demoFaults {
		t.Run(f.name, func(t *testing.T) {
			if !known[f.name] {
				t.Errorf("the lab has no such fault")
			}
			text := demoText(&f, "/path/to a/culprit", "/a place/of it", demoPorts{4711, 4712, 4713, 4714, 4715})
			c, err := experiment.ParseCase("case.yaml", []byte(text))
			if err != nil {
				t.Fatalf("%v\n%s", err, text)
			}
			if len(c.Space.Factors) < 8 {
				t.Errorf("has %d factors", len(c.Space.Factors))
			}
		})
	}
	if _, err := faultOf("nothing"); err == nil {
		t.Error("a fault that isn't there has a case")
	}
}

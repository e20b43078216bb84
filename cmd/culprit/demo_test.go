package main

import (
	"testing"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/lab/fault"
)

// TestDemoCases: each fault of the demo is one of the catalogue, and its case
// is sound and has eight factors or more.
func TestDemoCases(t *testing.T) {
	known := map[string]bool{}
	for _, e := range fault.Catalogue() {
		known[e.Name] = true
	}
	for _, f := range demoFaults {
		t.Run(f.name, func(t *testing.T) {
			if !known[f.name] {
				t.Errorf("the lab has no such fault")
			}
			text := demoText(&f, "/path/to a/culprit", [3]int{4711, 4712, 4713})
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

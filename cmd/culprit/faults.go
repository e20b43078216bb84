package main

import (
	"fmt"
	"strings"

	screen "github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/lab/fault"
)

// labFaults is the command "culprit lab faults".
type labFaults struct {
	Name string `arg:"" optional:"" help:"Explain this one."`
}

// Validate is called when the arguments are parsed.
func (c *labFaults) Validate() error {
	if c.Name == "" {
		return nil
	}
	_, err := fault.ByName(c.Name)
	return err
}

// Run lists the faults, or explains one.
func (c *labFaults) Run(s *streams) error {
	if c.Name != "" {
		return explainFault(s, c.Name)
	}
	fmt.Fprintln(s.out, "The lab's deliberate bugs, for \"culprit lab serve --fault NAME[,rate=R][,when=EXPR][,per-launch]\":")
	for _, e := range fault.Catalogue() {
		fmt.Fprintf(s.out, "  %-24s %s\n", e.Name, e.Summary)
	}
	fmt.Fprint(s.out, `
rate=R      it strikes in this share of the cases where it could (default: 1)
per-launch  the rate is drawn at each start, evenly between 0 and R
when=EXPR   it strikes only if this holds, for example: when=batch > 1 and index_k == "bf16" and toggle.A

EXPR may ask about:
`)
	for _, v := range fault.Variables() {
		help := v.Help
		if len(v.Values) > 0 {
			help += ": " + strings.Join(v.Values, ", ")
		}
		fmt.Fprintf(s.out, "  %-14s %s\n", v.Name, help)
	}
	_, err := fmt.Fprintln(s.out, "\n\"culprit lab faults NAME\" explains one.")
	return err
}

func explainFault(s *streams, name string) error {
	f, err := fault.ByName(name)
	if err != nil {
		return err
	}
	e := fault.Catalogue()[f]
	_, err = fmt.Fprintf(s.out, "%s: %s.\n\n%s\n\nSeen in: %s.\n", e.Name, e.Summary, strings.Join(screen.Wrap(e.Explanation, 100), "\n"), e.From)
	return err
}

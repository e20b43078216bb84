package main

import (
	"github.com/culprit-project/culprit/internal/app"
)

type bundleCommand struct {
	What     string `arg:"" type:"path" help:"A run directory, or a case that was hunted."`
	Trials   string `type:"path" placeholder:"DIR" help:"Of a case: where the hunt's trials are (default: the case's directory)."`
	Workload string `type:"existingfile" placeholder:"FILE" help:"A file for run -c: repro.py plays that in place of the run's requests (default: what culprit shrink made of the run, where it did)."`
	Output   string `short:"o" type:"path" placeholder:"DIR" help:"Directory to create (default: the name of what is bundled, with -bundle)."`
	formatFlag
}

func (c *bundleCommand) Run(s *streams) error {
	return app.Bundle(app.BundleOptions{What: c.What, Trials: c.Trials, Output: c.Output, Workload: c.Workload, Read: readWorkload, Tool: version()}, c.output(s))
}

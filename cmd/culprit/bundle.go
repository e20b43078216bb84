package main

import (
	"github.com/culprit-project/culprit/internal/app"
)

type bundleCommand struct {
	What   string `arg:"" type:"path" help:"A run directory, or a case that was hunted."`
	Trials string `type:"path" placeholder:"DIR" help:"Of a case: where the hunt's trials are (default: the case's directory)."`
	Output string `short:"o" type:"path" placeholder:"DIR" help:"Directory to create (default: the name of what is bundled, with -bundle)."`
	formatFlag
}

func (c *bundleCommand) Run(s *streams) error {
	return app.Bundle(app.BundleOptions{What: c.What, Trials: c.Trials, Output: c.Output, Tool: version()}, c.output(s))
}

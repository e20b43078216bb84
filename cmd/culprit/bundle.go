package main

import (
	"os"

	"github.com/culprit-project/culprit/internal/app"
)

type bundleCommand struct {
	What   string `arg:"" type:"path" help:"A run directory, or a case that was hunted."`
	Trials string `type:"path" placeholder:"DIR" help:"Of a case: where the hunt's trials are (default: the case's directory)."`
	Output string `short:"o" type:"path" placeholder:"DIR" help:"Directory to create (default: the name of what is bundled, with -bundle)."`
	Format string `enum:"text,json" default:"text" help:"text or json, on standard output."`
}

func (c *bundleCommand) Run(s *streams) error {
	out := app.Output{JSON: s.out, Progress: s.progress}
	if c.Format != "json" {
		out.Screen = newScreen(os.Stdout)
	}
	return app.Bundle(app.BundleOptions{What: c.What, Trials: c.Trials, Output: c.Output, Tool: version()}, out)
}

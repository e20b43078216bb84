package main

import (
	"context"

	"github.com/culprit-project/culprit/internal/app"
)

type shrinkCommand struct {
	serverFlags
	RunDir string `arg:"" name:"run" type:"existingdir" help:"A run directory that failed."`
	Runs   int    `default:"100" placeholder:"N" help:"At most so many runs, before the last size is measured (default: ${default})."`
	Output string `short:"o" placeholder:"DIR" help:"Directory to create (default: the run's name, with -shrink)."`
	formatFlag
}

func (c *shrinkCommand) Run(ctx context.Context, s *streams) error {
	return app.Shrink(ctx, app.ShrinkOptions{Server: c.server(), Run: c.RunDir, Runs: c.Runs, Output: c.Output, Tool: version()},
		c.output(s))
}

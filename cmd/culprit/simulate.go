package main

import (
	"context"
	"os"

	"github.com/culprit-project/culprit/internal/app"
)

type simulateCommand struct {
	Hunts int    `placeholder:"N" help:"Hunts in each row (default: 1000)."`
	Seed  uint64 `placeholder:"N" help:"The same seed gives the same figures (default: 1)."`
	Table string `placeholder:"NAME" help:"combinations, launches, assumptions, order, null, several with commas, or all (default)."`
	Row   string `placeholder:"TEXT" help:"Only the rows whose names begin so."`

	Workers int `placeholder:"N" help:"Hunt with so many servers at once too."`
}

func (c *simulateCommand) Run(ctx context.Context, s *streams) error {
	return app.Simulate(ctx, app.SimulateOptions{Hunts: c.Hunts, Seed: c.Seed, Table: c.Table, Row: c.Row, Workers: c.Workers},
		app.Output{Screen: newScreen(os.Stdout), JSON: s.out, Progress: s.progress})
}

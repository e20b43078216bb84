package main

import (
	"context"
	"time"

	"github.com/culprit-project/culprit/internal/app"
)

type replayCommand struct {
	serverFlags
	Source        string        `arg:"" type:"path" name:"history" help:"A run directory, a history, or traffic in another format; docs/replay.md lists them."`
	Only          string        `placeholder:"LIST" help:"Only these ops, and sN for conversation N: 3,17-40,s12."`
	Speed         float64       `default:"1" placeholder:"X" help:"2 sends everything twice as fast (default: ${default})."`
	Concurrency   int           `aliases:"max-concurrency" placeholder:"N" help:"Conversations at once, where the recording has no times (default: 16)."`
	TokensPerLine int           `placeholder:"N" help:"Tokens that a line of context is about, where the recording has lengths and no texts (default: 20)."`
	Seed          uint64        `placeholder:"N" help:"Of the texts, where the recording has none (default: 1)."`
	Timeout       time.Duration `placeholder:"D" help:"Longest wait for one reply (default: ${timeout})."`
	Output        string        `short:"o" placeholder:"DIR" help:"Run directory to create (default: runs/TIME-replay)."`
	formatFlag
}

func (c *replayCommand) Run(ctx context.Context, s *streams) error {
	status, err := app.Replay(ctx, app.ReplayOptions{
		Server: c.server(), Source: c.Source, Only: c.Only, Speed: c.Speed, Concurrency: c.Concurrency,
		TokensPerLine: c.TokensPerLine, Seed: c.Seed, Timeout: c.Timeout, Output: c.Output, Tool: version(),
	}, c.output(s))
	if err != nil {
		return err
	}
	return judged(status)
}

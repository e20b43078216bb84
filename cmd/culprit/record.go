package main

import (
	"context"

	"github.com/culprit-project/culprit/internal/app"
)

type recordCommand struct {
	Listen    string  `default:"127.0.0.1:9000" placeholder:"ADDR" help:"Where clients connect (default: ${default})."`
	Upstream  string  `required:"" placeholder:"URL" help:"The server that requests are passed on to, with or without /v1."`
	Sample    float64 `default:"1" placeholder:"SHARE" help:"Share of the conversations that is recorded, each whole or not at all (default: all)."`
	Synthetic bool    `help:"Replace what users and the model write by text of the same structure. Secrets are taken out in any case."`
	MemoryMB  int64   `default:"256" placeholder:"MB" help:"Traffic that may wait for the disk; what comes beyond it is passed on and not recorded (default: ${default})."`
	SegmentMB int64   `default:"256" placeholder:"MB" help:"Size of a history after which the next one begins (default: ${default})."`
	TotalMB   int64   `default:"4096" placeholder:"MB" help:"Size of all histories; the oldest go first (default: ${default})."`
	Output    string  `short:"o" placeholder:"DIR" help:"Directory to create (default: runs/TIME-record)."`
	formatFlag
}

func (c *recordCommand) Run(ctx context.Context, s *streams) error {
	return app.Record(ctx, app.RecordOptions{
		Listen: c.Listen, Upstream: c.Upstream, Output: c.Output, Sample: c.Sample, Synthetic: c.Synthetic,
		MemoryMB: c.MemoryMB, SegmentMB: c.SegmentMB, TotalMB: c.TotalMB, Tool: version(),
	}, c.output(s))
}

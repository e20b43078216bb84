package main

import (
	"context"
	"os"

	"github.com/culprit-project/culprit/internal/app"
)

type reportCommand struct {
	Dir    string `arg:"" type:"existingdir" help:"A run's directory, or a hunt's."`
	Format string `enum:"html,text,json" default:"html" help:"html writes the page; text and json go to standard output (default: ${default})."`
	Output string `short:"o" type:"path" placeholder:"FILE" help:"Where the page goes (default: report.html in DIR, where its links lead somewhere)."`
}

func (c *reportCommand) Run(ctx context.Context, s *streams) error {
	out := newScreen(os.Stdout)
	if c.Format == "json" {
		out = nil
	}
	return app.Report(ctx, app.ReportOptions{Dir: c.Dir, Page: c.Format == "html", Output: c.Output, Tool: version()},
		app.Output{Screen: out, JSON: s.out, Progress: s.progress})
}

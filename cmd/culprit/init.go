package main

import (
	"context"
	"os"

	"github.com/culprit-project/culprit/internal/app"
)

type initCommand struct {
	What        []string          `arg:"" name:"pid|url" help:"The live server: a process id, or where it answers. More of its processes may follow; those behind a router on this machine are found."`
	Host        string            `placeholder:"HOST" help:"The machine that its processes run on, reached by your own ssh (default: this one)."`
	Suspects    []string          `type:"existingfile" placeholder:"FILE" sep:"none" help:"More suspects: docs/suspects.md. Repeatable."`
	Concurrency int               `placeholder:"N" help:"Requests at once in the failing arm (default: twice what the server serves at once, at most 80)."`
	Output      string            `short:"o" type:"path" default:"case.yaml" placeholder:"FILE" help:"The case to write, or a directory for it; - prints it (default: ${default})."`
	Force       bool              `help:"Write over a case that is there."`
	APIKey      string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as a bearer token; never written to a file."`
	Header      map[string]string `placeholder:"NAME=VALUE" mapsep:"none" help:"One more request header; its value is never written to a file. Repeatable."`
}

func (c *initCommand) Run(ctx context.Context, s *streams) error {
	return app.Init(ctx, app.InitOptions{
		Server: app.Server{APIKey: c.APIKey, Header: c.Header},
		What:   c.What, Host: c.Host, Suspects: c.Suspects, Concurrency: c.Concurrency, Output: c.Output, Force: c.Force, Environment: os.Environ(),
	}, app.Output{Screen: newScreen(os.Stdout), JSON: s.out, Progress: s.progress})
}

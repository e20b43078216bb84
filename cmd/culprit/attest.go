package main

import (
	"context"

	"github.com/culprit-project/culprit/internal/app"
)

type attestCommand struct {
	What    string            `arg:"" help:"A process id, a URL, a case, or a stored attestation."`
	Against string            `placeholder:"WHAT" help:"Compare with another; what differs, the most telling first."`
	File    []string          `placeholder:"PATH" help:"Hash this file too. Repeatable."`
	Package []string          `placeholder:"NAME" help:"Hash the source of this Python package (default: the engine's own). Repeatable."`
	APIKey  string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as a bearer token; never written to a file."`
	Header  map[string]string `placeholder:"NAME=VALUE" mapsep:"none" help:"One more request header; its value is never written to a file. Repeatable."`
	Output  string            `short:"o" type:"path" placeholder:"FILE" help:"Write the attestation to this file, as JSON."`
	formatFlag
}

func (c *attestCommand) Run(ctx context.Context, s *streams) error {
	return app.Attest(ctx, app.AttestOptions{
		Server: app.Server{APIKey: c.APIKey, Header: c.Header},
		What:   c.What, Against: c.Against, Files: c.File, Packages: c.Package, Output: c.Output,
	}, c.output(s))
}

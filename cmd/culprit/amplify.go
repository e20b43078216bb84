package main

import (
	"context"
	"time"

	"github.com/culprit-project/culprit/amplify"
	"github.com/culprit-project/culprit/internal/app"
)

type amplifyCommand struct {
	Case     string            `arg:"" type:"path" help:"A case.yaml, or the directory that it is in."`
	Dir      string            `short:"o" name:"output" type:"path" placeholder:"DIR" help:"Where the trials go (default: amplify in the case's directory)."`
	Resume   bool              `help:"Go on where an earlier start stopped; no finished trial is repeated."`
	Launches int               `placeholder:"N" help:"At most so many launches (default: the case's budget, or 24)."`
	Requests int               `placeholder:"N" help:"At most so many requests (default: the case's budget, or 20,000)."`
	Wall     time.Duration     `placeholder:"D" help:"At most that long (default: the case's budget)."`
	By       string            `enum:"minute,request" default:"minute" help:"Look for the most failures in a minute of load, or in a request (default: ${default})."`
	Only     []string          `placeholder:"LOAD" help:"Try these alone, by the names that --dry-run lists: --only=\"waves,2x concurrency\". Repeatable."`
	Seed     uint64            `placeholder:"N" help:"Of the order in which loads are tried (default: the workload's)."`
	APIKey   string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as a bearer token; never written to a file."`
	Header   map[string]string `placeholder:"NAME=VALUE" mapsep:"none" help:"One more request header. Repeatable."`
	formatFlag
	DryRun bool `help:"Say what is tried and what it may cost, and launch nothing."`
}

func (c *amplifyCommand) Run(ctx context.Context, s *streams) error {
	launcher, err := launcher()
	if err != nil {
		return err
	}
	status, err := app.Amplify(ctx, app.AmplifyOptions{
		Server: app.Server{APIKey: c.APIKey, Header: c.Header}, Case: c.Case, Dir: c.Dir, Resume: c.Resume, DryRun: c.DryRun, By: c.By, Only: c.Only, Seed: c.Seed,
		Budget:   amplify.Budget{Launches: c.Launches, Requests: c.Requests, Wall: c.Wall},
		Launcher: launcher, Tool: version(),
	}, c.output(s))
	if err != nil || status == amplify.Raised || status == amplify.NotRaised { // there is a load to hunt under
		return err
	}
	return undecidedError(status)
}

package main

import (
	"context"
	"time"

	"github.com/alecthomas/kong"

	"github.com/culprit-project/culprit/internal/app"
	"github.com/culprit-project/culprit/search"
)

type huntCommand struct {
	Case       string            `arg:"" optional:"" type:"path" help:"A case.yaml, or the directory that it is in; none with --serve-cmd."`
	Dir        string            `short:"o" name:"output" type:"path" placeholder:"DIR" help:"Where the trials go (default: the case's directory)."`
	Resume     bool              `help:"Go on where an earlier hunt stopped; no finished trial is repeated."`
	Hypotheses bool              `help:"Run what tells the case's hypotheses apart, in place of the search."`
	Seed       uint64            `placeholder:"N" help:"Of the search (default: the workload's)."`
	MinRate    float64           `placeholder:"R" help:"Lowest rate of failure that is looked for (default: 0.004)."`
	Wall       time.Duration     `placeholder:"D" help:"Stop after that long (default: the case's budget)."`
	Launches   int               `placeholder:"N" help:"At most so many launches (default: the case's budget)."`
	Requests   int               `placeholder:"N" help:"At most so many requests (default: the case's budget)."`
	Workers    int               `placeholder:"N" help:"Run N trials at once: on this machine, or by the workers at --nats (default there: as many as there are)."`
	NATS       string            `name:"nats" placeholder:"URL" help:"The NATS cluster at which culprit worker waits."`
	APIKey     string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as a bearer token; never written to a file."`
	Header     map[string]string `placeholder:"NAME=VALUE" mapsep:"none" help:"One more request header. Repeatable."`
	formatFlag
	UI     uiFlag `name:"ui" placeholder:"ADDR" help:"Serve the page while the hunt runs, at a free port of 127.0.0.1; --ui=ADDR serves it elsewhere."`
	DryRun bool   `help:"Say what is varied and what it may cost, and launch nothing."`

	natsFlags
	queueFlags
	sweepFlags
	BaseURL string `name:"base-url" placeholder:"URL" help:"Where servers of --serve-cmd answer (default: http://127.0.0.1:8000)."`

	// In place of a case's own, in another directory then.
	configFlag
	trafficFlags
}

func (c *huntCommand) Run(ctx context.Context, s *streams) error {
	launcher, err := launcher()
	if err != nil {
		return err
	}
	status, err := app.Hunt(ctx, app.HuntOptions{
		Server: app.Server{APIKey: c.APIKey, Header: c.Header},
		Case:   c.Case, Dir: c.Dir, Seed: c.Seed, MinRate: c.MinRate, Wall: c.Wall, Launches: c.Launches, Requests: c.Requests,
		Resume: c.Resume, Hypotheses: c.Hypotheses, DryRun: c.DryRun, UI: string(c.UI), Workers: app.Workers{Count: c.Workers, NATS: c.hunters(c.NATS, &c.natsFlags)},
		Launcher: launcher, Tool: version(),
		Sweep: c.sweep(c.BaseURL),
		Load:  c.options(),
	}, c.output(s))
	if err != nil {
		return err
	}
	return hunted(status)
}

// uiFlag is an address, which needn't be given.
type uiFlag string

// IsBool says that the flag needs no value.
func (*uiFlag) IsBool() bool { return true }

// Decode takes what kong has of the flag: true, or what follows "=".
func (f *uiFlag) Decode(ctx *kong.DecodeContext) error {
	*f = "127.0.0.1:0"
	if t := ctx.Scan.Peek(); t.Type == kong.FlagValueToken {
		if text, ok := ctx.Scan.Pop().Value.(string); ok {
			*f = uiFlag(text)
		}
	}
	return nil
}

// hunted turns what a hunt came to into a command's result: a finding is
// success, whatever it is; no finding is inconclusive.
func hunted(status search.Status) error {
	switch status {
	case search.Found, search.NoneOfThese:
		return nil
	case search.NotReproduced, search.Undecided, search.Running:
	}
	return undecidedError(status)
}

// undecidedError is a hunt without a finding; everything to be said about it
// has been printed.
type undecidedError search.Status

func (e undecidedError) Error() string { return string(e) }

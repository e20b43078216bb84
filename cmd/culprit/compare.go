package main

import (
	"context"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/app"
)

// sweepFlags are those of "vllm bench sweep serve" that say how servers are
// started.
type sweepFlags struct {
	ServeCmd           string  `placeholder:"COMMAND" help:"The server's command line, as for vllm bench sweep."`
	ServeParams        string  `type:"existingfile" placeholder:"FILE" help:"JSON, as for vllm bench sweep: a list of objects, or an object of objects by name; each is an arm of --serve-cmd."`
	ServerReadyTimeout float64 `placeholder:"SECONDS" help:"How long a server of --serve-cmd may take to start (default: 600)."`
}

func (f *sweepFlags) sweep(base string) app.Sweep {
	return app.Sweep{Command: f.ServeCmd, Params: f.ServeParams, BaseURL: base, Ready: time.Duration(f.ServerReadyTimeout * float64(time.Second))}
}

type compareCommand struct {
	A string `arg:"" optional:"" help:"A URL; a case, which is its failing arm; an arm of one, as in CASE:graph=safe or CASE:safe; or the name of an arm of --serve-params."`
	B string `arg:"" optional:"" help:"What is compared with it."`

	Model   string            `placeholder:"NAME" help:"Model to ask for (default: the first of /v1/models)."`
	BaseURL string            `name:"base-url" placeholder:"URL" help:"Where servers of --serve-cmd answer (default: http://127.0.0.1:8000)."`
	APIKey  string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as a bearer token; never written to a file."`
	Header  map[string]string `placeholder:"NAME=VALUE" mapsep:"none" help:"One more request header; its value is never written to a file. Repeatable."`
	sweepFlags

	Ratio      float64       `default:"1" placeholder:"X" help:"Better means failing less than X times as often (default: ${default}, less often by however little)."`
	Difference float64       `default:"0.01" placeholder:"X" help:"Rates that differ by less don't matter (default: ${default})."`
	Error      float64       `default:"0.01" placeholder:"P" help:"Highest probability of a wrong answer (default: ${default})."`
	Pairs      int           `placeholder:"N" help:"Give up after so many pairs of requests (default: never)."`
	Wall       time.Duration `placeholder:"D" help:"Give up after that long (default: never)."`
	Interleave bool          `help:"One server at a time, in an order that is drawn: where only one fits. Arms that answer at one port always are."`

	Workers int    `placeholder:"N" help:"Play N blocks of a case's arms at once: on this machine, or by the workers at --nats (default there: as many as there are)."`
	NATS    string `name:"nats" placeholder:"URL" help:"The NATS cluster at which culprit worker waits."`
	natsFlags
	queueFlags

	Resume bool `help:"Go on where an earlier comparison in --output stopped; no finished block is repeated."`

	loadFlags
	Output string `short:"o" placeholder:"DIR" help:"Directory to create (default: runs/TIME-compare)."`
	formatFlag
	DryRun bool `help:"Say what is compared and how many pairs it takes, and send nothing."`
}

func (c *compareCommand) Run(ctx context.Context, s *streams) error {
	launcher, err := launcher()
	if err != nil {
		return err
	}
	o := app.CompareOptions{
		RunOptions: c.options(), A: c.A, B: c.B, Sweep: c.sweep(c.BaseURL),
		Ratio: c.Ratio, Difference: c.Difference, Error: c.Error, Pairs: c.Pairs, Wall: c.Wall, Interleave: c.Interleave, Resume: c.Resume, Launcher: launcher,
		Workers: app.Workers{Count: c.Workers, NATS: c.hunters(c.NATS, &c.natsFlags)},
	}
	o.Server = app.Server{Model: c.Model, APIKey: c.APIKey, Header: c.Header}
	o.Output, o.DryRun, o.Tool = c.Output, c.DryRun, version()
	ordering, err := app.Compare(ctx, o, c.output(s))
	if err != nil {
		return err
	}
	switch ordering {
	case experiment.Better, experiment.NoDifference:
		return nil
	case experiment.Worse:
		return worseError{}
	case experiment.Unordered:
	}
	return undecidedError(ordering)
}

// worseError is a comparison's finding that B fails more often; everything to
// be said about it has been printed.
type worseError struct{}

func (worseError) Error() string { return string(experiment.Worse) }

package main

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"time"

	"github.com/culprit-project/culprit/internal/app"
)

// serverFlags say which server and how to reach it.
type serverFlags struct {
	BaseURL string            `name:"base-url" aliases:"url" env:"OPENAI_BASE_URL" placeholder:"URL" help:"The server, with or without /v1."`
	Model   string            `placeholder:"NAME" help:"Model to ask for (default: the first of /v1/models)."`
	APIKey  string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent as a bearer token; never written to a file."`
	Header  map[string]string `placeholder:"NAME=VALUE" mapsep:"none" help:"One more request header; its value is never written to a file. Repeatable."`
	Probes  []string          `type:"existingdir" placeholder:"DIR" help:"Record the counts of this probe directory of the server (culprit probe run or attach). Repeatable."`
}

// loadFlags say what is sent, and how.
type loadFlags struct {
	trafficFlags
	Seed uint64 `placeholder:"N" help:"Of what is asked: the same seed and run key send the same bytes (default: 1)."`
}

// options are what the flags ask for.
func (c *loadFlags) options() app.RunOptions {
	o := c.trafficFlags.options()
	o.Seed = c.Seed
	return o
}

// trafficFlags are these but for the seed, which is another one in a hunt.
type trafficFlags struct {
	Kind         string         `name:"workload" placeholder:"KIND" help:"What to send: ${kinds} (default: agent)."`
	Sessions     int            `placeholder:"N" help:"Conversations to play (default: ${sessions})."`
	Rounds       int            `placeholder:"N" help:"Rounds of each conversation (default: the workload's)."`
	ContextLines int            `placeholder:"N" help:"Lines of facts in each system prompt (default: the workload's)."`
	MaxTokens    int            `placeholder:"N" help:"Longest reply asked for (default: the workload's)."`
	Tools        string         `placeholder:"STYLE" help:"native: the tools field; text: JSON in the text, for models without tools (default: native)."`
	OnError      string         `placeholder:"WHAT" help:"After a wrong reply: repair (the right one takes its place), continue or stop (default: repair)."`
	Logprobs     int            `placeholder:"N" help:"Ask for the N most likely tokens, to tell numerics from corruption."`
	Set          map[string]int `placeholder:"KNOB=N" help:"Another knob of the workload; docs/workloads.md lists them. Repeatable."`

	Concurrency int           `aliases:"max-concurrency" placeholder:"N" help:"Conversations at once (default: all of them)."`
	RequestRate float64       `placeholder:"R" help:"Open loop instead: requests per second, whatever the server does."`
	Waves       bool          `help:"The conversations in step: their next requests go out together, once the last ones have all ended."`
	Timeout     time.Duration `placeholder:"D" help:"Longest wait for one reply (default: ${timeout})."`
	NoStream    bool          `help:"Ask for whole replies instead of streams."`
	ExtraBody   string        `placeholder:"JSON" help:"Object merged into each request's body."`
}

// options are what the flags ask for.
func (c *trafficFlags) options() app.RunOptions {
	return app.RunOptions{
		Kind: c.Kind, Sessions: c.Sessions, Rounds: c.Rounds, ContextLines: c.ContextLines, MaxTokens: c.MaxTokens, Tools: c.Tools, OnError: c.OnError,
		TopLogprobs: c.Logprobs, Knobs: c.Set,
		Concurrency: c.Concurrency, RequestRate: c.RequestRate, Waves: c.Waves, Timeout: c.Timeout, NoStream: c.NoStream, ExtraBody: c.ExtraBody,
	}
}

type runCommand struct {
	serverFlags
	Lab    bool     `help:"Start the lab, the small LLM server in this program, and drive that: nothing else is needed."`
	LabArg []string `name:"lab-arg" placeholder:"ARG" sep:"none" help:"One more argument for culprit lab serve, as in --lab-arg=--index-k-dtype=bf16. Repeatable."`
	configFlag
	loadFlags
	RunKey          string `placeholder:"HEX" help:"Of the sessions' tags. Each run has its own, so that it meets no cache of an earlier one (default: random; plan.json has it)."`
	Control         bool   `help:"Play the same conversations alone and cold first: a weak model's own mistakes become a base rate."`
	ControlSessions int    `placeholder:"N" help:"Only the first N conversations in the control (default: all)."`

	Shards int      `placeholder:"N" help:"Play the load in N processes, when one has too few cores or ports: of this machine, or workers at --nats (docs/scale.md)."`
	NATS   string   `name:"nats" placeholder:"URL" help:"The NATS cluster whose workers play the shards."`
	Need   []string `placeholder:"KEY=VALUE" sep:"none" help:"Label that those workers must have. Repeatable."`

	Output string `short:"o" placeholder:"DIR" help:"Run directory to create (default: runs/TIME-WORKLOAD)."`
	formatFlag
	DryRun bool `help:"Show what would be sent, and send nothing."`

	natsFlags
}

func (c *runCommand) Run(ctx context.Context, s *streams) error {
	server := c.server()
	if c.Lab {
		c.fitLab()
		server = app.Server{BaseURL: "http://127.0.0.1"} // for a dry run: the lab picks a port
	}
	if c.Lab && !c.DryRun {
		stop, err := c.startLab(ctx, &server)
		if err != nil {
			return err
		}
		defer stop()
	}
	o := c.options()
	o.Server, o.Control, o.ControlSessions = server, c.Control || c.ControlSessions > 0, c.ControlSessions
	o.RunKey, o.Output, o.DryRun, o.Tool = cmp.Or(c.RunKey, app.FreshKey()), c.Output, c.DryRun, version()
	if c.NATS != "" {
		o.NATS, o.Needs = c.nats(c.NATS), c.Need
	}
	if c.Shards > 0 {
		self, err := os.Executable()
		if err != nil {
			return err
		}
		o.Shards, o.StartShards = c.Shards, &app.ShardProcesses{Command: []string{self, "shard"}}
	}
	status, err := app.Run(ctx, o, c.output(s))
	if err != nil {
		return err
	}
	return judged(status)
}

// fitLab makes smaller by default what doesn't fit into the lab's context, or
// comes so near to its end that the model makes mistakes of its own.
func (c *runCommand) fitLab() {
	knob := func(name string, value int) {
		if c.Set[name] == 0 {
			if c.Set == nil {
				c.Set = map[string]int{}
			}
			c.Set[name] = value
		}
	}
	switch c.Kind {
	case "recall":
		c.Rounds = cmp.Or(c.Rounds, 12)
	case "echo":
		knob("copy_lines", 24)
	case "burst", "churn", "mixed":
		c.ContextLines = cmp.Or(c.ContextLines, 32)
	case "evict":
		knob("filler_lines", 48)
	}
}

// startLab starts the lab and makes it the server. Its log goes to a folder
// that is gone after the run, unless the lab couldn't start.
func (c *runCommand) startLab(ctx context.Context, server *app.Server) (stop func(), err error) {
	launcher, err := launcher()
	if err != nil {
		return nil, err
	}
	logs, err := os.MkdirTemp("", "culprit-lab-")
	if err != nil {
		return nil, err
	}
	self := launcher.Supervisor[0]
	url, stopLab, err := app.StartLab(ctx, app.LabOptions{
		Launcher: launcher, Command: append([]string{self, "lab", "serve"}, c.LabArg...), LogDir: logs,
	})
	if err != nil {
		return nil, err
	}
	*server = app.Server{BaseURL: url}
	return func() {
		if err := stopLab(); err == nil {
			os.RemoveAll(logs) //nolint:errcheck // a folder of the system's temporary ones
		}
	}, nil
}

func (f *serverFlags) server() app.Server {
	return app.Server{BaseURL: f.BaseURL, Model: f.Model, APIKey: f.APIKey, Header: f.Header, Probes: f.Probes}
}

type checkCommand struct {
	Dir string `arg:"" name:"run" type:"existingdir" help:"A run directory."`
	Op  int64  `placeholder:"N" help:"Print everything about one op, as JSON, instead."`
	formatFlag
}

func (c *checkCommand) Run(s *streams) error {
	if c.Op != 0 {
		return app.ShowOp(c.Dir, c.Op, s.out)
	}
	status, err := app.Check(c.Dir, c.output(s))
	if err != nil {
		return fmt.Errorf("check %s: %w", c.Dir, err)
	}
	return judged(status)
}

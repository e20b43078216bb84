package main

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/culprit-project/culprit/internal/app"
	"github.com/culprit-project/culprit/probe"
)

type probeCommand struct {
	Packs    probePacksCommand    `cmd:"" help:"List the packs of probes that come with culprit."`
	Lint     probeLintCommand     `cmd:"" help:"Place a pack's probes in a source tree, without any server."`
	Run      probeRunCommand      `cmd:"" help:"Start a command with probes in it; the counts when it has ended."`
	Env      probeEnvCommand      `cmd:"" help:"Print environment variables that start any Python server with probes in it."`
	Attach   probeAttachCommand   `cmd:"" help:"Put probes into a running process."`
	Detach   probeDetachCommand   `cmd:"" help:"Take them out again."`
	Read     probeReadCommand     `cmd:"" help:"Show the counts, of a server that runs or one that has ended."`
	Watch    probeWatchCommand    `cmd:"" help:"Show what moves; detach what costs too much."`
	Branches probeBranchesCommand `cmd:"" help:"Count every branch of a function."`
	Find     probeFindCommand     `cmd:"" help:"Where a text is in the deployed source, its hash, and whether it was reached."`
	Cost     probeCostCommand     `cmd:"" help:"Measure what a hit costs, against logging."`
}

type probePacksCommand struct{ formatFlag }

func (c *probePacksCommand) Run(s *streams) error { return app.ProbePacks(c.output(s)) }

type probeLintCommand struct {
	formatFlag
	Pack      string `arg:"" help:"A pack's file, or the name of one that comes with culprit."`
	Source    string `required:"" type:"existingdir" placeholder:"DIR" help:"Where the package is: site-packages, or the package's directory."`
	Python    string `placeholder:"PYTHON" help:"Interpreter that reads the source (default: python3)."`
	WriteHash bool   `help:"Write the hashes of the files as they are into the pack."`
}

func (c *probeLintCommand) Run(ctx context.Context, s *streams) error {
	return app.ProbeLint(ctx, app.ProbeLintOptions{Pack: c.Pack, Source: c.Source, Python: c.Python, WriteHash: c.WriteHash}, c.output(s))
}

// exitError is the exit code of a command that was run for its own sake.
type exitError int

func (e exitError) Error() string { return fmt.Sprintf("exit code %d", int(e)) }

func exited(code int, err error) error {
	if err == nil && code != 0 {
		return exitError(code)
	}
	return err
}

type probeRunCommand struct {
	formatFlag
	Pack    string   `required:"" placeholder:"PACK" help:"A pack's file, or the name of one that comes with culprit."`
	Dir     string   `type:"path" placeholder:"DIR" help:"Probe directory to make (default: one in /dev/shm)."`
	Command []string `arg:"" passthrough:"" help:"The command, after --."`
}

func (c *probeRunCommand) Run(ctx context.Context, s *streams) error {
	return exited(app.ProbeRun(ctx, runOptions(c.Pack, c.Dir, c.Command), c.output(s)))
}

func runOptions(pack, dir string, command []string) app.ProbeRunOptions {
	if len(command) > 0 && command[0] == "--" {
		command = command[1:]
	}
	return app.ProbeRunOptions{
		Pack: pack, Dir: dir, Command: command, PythonPath: os.Getenv("PYTHONPATH"), Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr,
	}
}

type probeEnvCommand struct {
	Pack string `arg:"" help:"A pack's file, or the name of one that comes with culprit."`
	Dir  string `type:"path" placeholder:"DIR" help:"Probe directory to make (default: one in /dev/shm)."`
}

func (c *probeEnvCommand) Run(s *streams) error {
	dir, err := app.ProbeDir(c.Pack, c.Dir)
	if err != nil {
		return err
	}
	for _, name := range []string{"PYTHONPATH", probe.DirVariable} {
		value := probe.Environment(dir, os.Getenv("PYTHONPATH"))[name]
		if _, err := fmt.Fprintf(s.out, "export %s='%s'\n", name, strings.ReplaceAll(value, "'", `'\''`)); err != nil {
			return err
		}
	}
	return nil
}

type probeAttachCommand struct {
	PID  int    `arg:"" name:"pid" help:"The process."`
	Pack string `arg:"" help:"A pack's file, or the name of one that comes with culprit."`
	Tree bool   `negatable:"" default:"true" help:"Also the processes that it started (default)."`
	Dir  string `type:"path" placeholder:"DIR" help:"Probe directory to make (default: one in /dev/shm)."`
}

func (c *probeAttachCommand) Run(ctx context.Context, s *streams) error {
	dir, err := app.ProbeAttach(ctx, c.PID, c.Pack, c.Dir, c.Tree, app.Output{Progress: s.progress})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(s.out, dir)
	return err
}

type probeDetachCommand struct {
	Dir string `arg:"" type:"existingdir" help:"The probe directory that attach, run or env named."`
}

func (c *probeDetachCommand) Run(ctx context.Context, s *streams) error {
	return app.ProbeDetach(ctx, c.Dir, app.Output{Progress: s.progress})
}

type probeReadCommand struct {
	formatFlag
	Dir string `arg:"" type:"existingdir" help:"The probe directory that attach, run or env named."`
}

func (c *probeReadCommand) Run(s *streams) error { return app.ProbeRead(c.Dir, c.output(s)) }

type probeWatchCommand struct {
	formatFlag
	Dir   string        `arg:"" type:"existingdir" help:"The probe directory that attach, run or env named."`
	For   time.Duration `placeholder:"D" help:"How long (default: until interrupted, or no process is left)."`
	Every time.Duration `default:"1s" help:"How often to look: at most ten times a second."`
}

func (c *probeWatchCommand) Run(ctx context.Context, s *streams) error {
	return app.ProbeWatch(ctx, app.ProbeWatchOptions{Dir: c.Dir, For: c.For, Every: c.Every}, c.output(s))
}

// whereFlags say in which source and which process.
type whereFlags struct {
	formatFlag
	Source  string        `type:"existingdir" placeholder:"DIR" help:"Where the source is (default: where the process's Python finds modules)."`
	PID     int           `name:"pid" placeholder:"PID" help:"Count in this running process and those that it started."`
	For     time.Duration `default:"10s" help:"How long to count in a running process."`
	Python  string        `placeholder:"PYTHON" help:"Interpreter that reads the source (default: python3)."`
	Dir     string        `type:"path" placeholder:"DIR" help:"Probe directory to make (default: one in /dev/shm)."`
	Command []string      `arg:"" optional:"" passthrough:"" help:"Count in this command, after --."`
}

func (f *whereFlags) options(function string) app.ProbeFunctionOptions {
	return app.ProbeFunctionOptions{
		Function: function, Source: f.Source, PID: f.PID, For: f.For, Python: f.Python, Run: runOptions("", f.Dir, f.Command),
	}
}

type probeBranchesCommand struct {
	Function string `arg:"" name:"module:function" help:"As vllm.v1.core.sched.scheduler:Scheduler.schedule."`
	whereFlags
}

func (c *probeBranchesCommand) Run(ctx context.Context, s *streams) error {
	return exited(app.ProbeBranches(ctx, c.options(c.Function), c.output(s)))
}

type probeFindCommand struct {
	Text string `arg:"" help:"Part of a line."`
	whereFlags
}

func (c *probeFindCommand) Run(ctx context.Context, s *streams) error {
	return exited(app.ProbeFind(ctx, c.Text, c.options(""), c.output(s)))
}

type probeCostCommand struct {
	formatFlag
	Python  []string `placeholder:"PYTHON" help:"What a hit costs in this interpreter (default: python3). Repeatable."`
	Pack    string   `placeholder:"PACK" help:"What this pack costs a server instead: --pid, and a workload after --."`
	PID     int      `name:"pid" placeholder:"PID" help:"The server; the probes go in and out of it in turns."`
	Pairs   int      `default:"8" help:"Pairs of blocks: with the probes, and without."`
	Command []string `arg:"" optional:"" passthrough:"" help:"The workload, after --: its time is compared, and how often it exits with 1."`
}

func (c *probeCostCommand) Run(ctx context.Context, s *streams) error {
	if c.Pack == "" {
		return app.ProbeCost(ctx, c.Python, c.output(s))
	}
	return app.ProbeEffect(ctx, app.ProbeEffectOptions{
		Pack: c.Pack, PID: c.PID, Pairs: c.Pairs, Command: runOptions("", "", c.Command).Command,
	}, c.output(s))
}

// Command culprit finds which setting, patch or code path makes an LLM
// inference server give wrong answers under load.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/alecthomas/kong"
	_ "golang.org/x/crypto/x509roots/fallback" // where the system has no certificate authorities, as in an image with nothing but this
	"golang.org/x/term"

	"github.com/culprit-project/culprit/internal/app"
	screen "github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
)

// Exit codes. They work under "git bisect run", where 125 skips a commit.
const (
	exitClean        = 0
	exitBroken       = 1
	exitInconclusive = 125
	exitUsage        = 254
	exitInternal     = 255
)

type commands struct {
	Run       runCommand       `cmd:"" help:"Drive a workload at a server, judge it, write a run directory."`
	Check     checkCommand     `cmd:"" help:"Judge a stored run again."`
	Attest    attestCommand    `cmd:"" help:"Say what is really running; --against says what differs from another."`
	Init      initCommand      `cmd:"" help:"Write a case.yaml from a live server: its suspects, their safe levels, their odds."`
	Hunt      huntCommand      `cmd:"" help:"Find the culprit of a case: the smallest set of settings that is needed for the failure."`
	Probe     probeCommand     `cmd:"" help:"Count which code paths of a live Python server run, how often, with which labels."`
	Compare   compareCommand   `cmd:"" help:"Two servers or arms side by side, in pairs of requests: is the fix a fix?"`
	Report    reportCommand    `cmd:"" help:"Write the page of a run or a hunt, to read and to send: report.html."`
	Demo      demoCommand      `cmd:"" help:"The incident, end to end, on the lab: reproduce it, hunt, name the culprit."`
	Record    recordCommand    `cmd:"" help:"Pass real traffic on to a server, and record and judge it."`
	Replay    replayCommand    `cmd:"" help:"Send recorded traffic again: the same bytes at the same times."`
	Amplify   amplifyCommand   `cmd:"" help:"Find the load under which a case fails most often, and write it as a file for hunt and run."`
	Shrink    shrinkCommand    `cmd:"" help:"Find the smallest workload that still fails as a run did."`
	Watch     watchCommand     `cmd:"" help:"A canary for production: self-checking conversations for ever, and an alarm that can be trusted."`
	Deploy    deployCommand    `cmd:"" help:"What starts workers on other machines: Kubernetes, Slurm. Prints it, and applies nothing unless told to."`
	Worker    workerCommand    `cmd:"" help:"Carry out the trials of hunts that run elsewhere."`
	Lab       labCommand       `cmd:"" help:"The reference server."`
	Supervise superviseCommand `cmd:"" hidden:""`
	Shard     shardCommand     `cmd:"" hidden:""`
	Simulate  simulateCommand  `cmd:"" hidden:"" help:"Hunt on synthetic servers, thousands of times, and print what it took."`
	Version   versionCommand   `cmd:"" help:"Print the version."`

	ledgerCommands `embed:""`
}

const description = `culprit finds which setting, patch or code path makes an LLM inference server give wrong answers under load.

Exit codes: 0 clean (or only numerics), 1 corrupt or wedged, 125 inconclusive, not exercised or void, 254 usage, 255 internal error. They work under "git bisect run".`

// streams are the process's own, so that only this package knows them.
type streams struct {
	out, err io.Writer
	progress *screen.Screen // on standard error
}

// formatFlag is text or json.
type formatFlag struct {
	Format string `enum:"text,json" default:"text" help:"text or json, on standard output."`
}

func (f *formatFlag) output(s *streams) app.Output {
	out := app.Output{JSON: s.out, Progress: s.progress}
	if f.Format != "json" {
		out.Screen = newScreen(os.Stdout)
	}
	return out
}

func main() { os.Exit(run(os.Args[1:])) }

// run parses the arguments and runs one command; it returns the exit code.
func run(args []string) (code int) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	go func() {
		<-ctx.Done()
		stop() // a second interrupt ends the process at once
	}()
	s := &streams{out: os.Stdout, err: os.Stderr, progress: newScreen(os.Stderr)}

	var c commands
	parser, err := kong.New(&c,
		kong.Name("culprit"), kong.Description(description), kong.UsageOnError(),
		kong.ConfigureHelp(kong.HelpOptions{Compact: true, WrapUpperBound: 100}),
		kong.Writers(os.Stdout, os.Stderr),
		kong.Exit(func(int) { panic(exitClean) }), // after --help
		kong.Vars(app.Defaults()), kong.Vars(labDefaults()),
		kong.BindTo(ctx, (*context.Context)(nil)), kong.Bind(s),
	)
	if err != nil {
		return fail(s, exitInternal, err)
	}
	defer func() {
		switch p := recover().(type) {
		case nil:
		case int:
			code = p
		default:
			panic(p)
		}
	}()
	k, err := parser.Parse(args)
	if err != nil {
		fail(s, exitUsage, err)
		fmt.Fprintln(s.err, `Run "culprit --help" or "culprit COMMAND --help".`)
		return exitUsage
	}
	err = k.Run()
	if err == nil {
		return exitClean
	}
	if status, ok := errors.AsType[verdictError](err); ok {
		return exitCode(oracle.Status(status))
	}
	if code, ok := errors.AsType[exitError](err); ok {
		return int(code)
	}
	if _, ok := errors.AsType[worseError](err); ok {
		return exitBroken
	}
	if _, ok := errors.AsType[undecidedError](err); ok {
		return exitInconclusive
	}
	if _, ok := errors.AsType[*app.UsageError](err); ok {
		return fail(s, exitUsage, err)
	}
	if _, ok := errors.AsType[*app.NoVerdictError](err); ok {
		return fail(s, exitInconclusive, err)
	}
	return fail(s, exitInternal, err)
}

func fail(s *streams, code int, err error) int {
	for i, line := range strings.Split(err.Error(), "\n") {
		if i == 0 {
			line = "culprit: " + line
		}
		s.progress.Printf("%s\n", screen.Safe(line))
	}
	return code
}

// verdictError carries a verdict that isn't clean to the exit code; everything
// to be said about it has been printed.
type verdictError oracle.Status

func (e verdictError) Error() string { return string(e) }

// judged turns a verdict into a command's result.
func judged(status oracle.Status) error {
	if exitCode(status) == exitClean {
		return nil
	}
	return verdictError(status)
}

func exitCode(status oracle.Status) int {
	switch status {
	case oracle.Clean, oracle.Numerics:
		return exitClean
	case oracle.Corrupt, oracle.Wedged:
		return exitBroken
	case oracle.Inconclusive, oracle.NotExercised, oracle.Void:
		return exitInconclusive
	}
	return exitInternal
}

// newScreen lays out for a file's terminal, if it is one.
func newScreen(f *os.File) *screen.Screen {
	s := screen.NewScreen(f)
	if fd := int(f.Fd()); term.IsTerminal(fd) {
		dumb := os.Getenv("TERM") == "dumb"
		s.Live = !dumb
		s.Color = !dumb && os.Getenv("NO_COLOR") == ""
		if columns, _, err := term.GetSize(fd); err == nil {
			s.Width = columns
		}
	}
	return s
}

type versionCommand struct{}

func (versionCommand) Run(s *streams) error {
	_, err := fmt.Fprintln(s.out, version())
	return err
}

// version is the module's, or the commit it was built from.
func version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "culprit (unknown build)"
	}
	v := info.Main.Version
	for _, setting := range info.Settings {
		if setting.Key == "vcs.revision" && (v == "" || v == "(devel)") {
			v = setting.Value[:min(12, len(setting.Value))]
		}
	}
	if v == "" || v == "(devel)" {
		v = "(development)"
	}
	return "culprit " + v
}

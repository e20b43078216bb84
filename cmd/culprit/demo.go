package main

import (
	"cmp"
	"context"
	_ "embed"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/internal/app"
)

// demoCase is a case like any other: the lab is launched as a user's server
// would be.
//
//go:embed demo.yaml
var demoCase string

type demoCommand struct {
	Fault string `default:"capture-alias" placeholder:"NAME" help:"Which of the lab's faults to hunt; \"culprit lab faults\" explains them (default: ${default})."`
	Dir   string `short:"o" name:"output" type:"path" placeholder:"DIR" help:"Directory to create (default: runs/TIME-demo)."`
	Seed  uint64 `default:"1" placeholder:"N" help:"Of the search (default: ${default})."`
}

func (c *demoCommand) Run(ctx context.Context, s *streams) error {
	launcher, err := launcher()
	if err != nil {
		return err
	}
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	if c.Dir == "" {
		c.Dir = filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-demo")
	}
	text, err := demoText(c.Fault, launcher.Supervisor[0], port)
	if err != nil {
		return err
	}
	path, err := app.WriteCase(c.Dir, text)
	if err != nil {
		return err
	}
	status, err := app.Hunt(ctx, app.HuntOptions{Case: path, Seed: c.Seed, Launcher: launcher, Tool: version()},
		app.Output{Screen: newScreen(os.Stdout), JSON: s.out, Progress: s.progress})
	if err != nil {
		return err
	}
	return hunted(status)
}

// demoFault is what it takes for a fault to show in the demo's case, and which
// settings it hangs on beside those of the case.
type demoFault struct {
	name        string
	when        string // added to --fault: what keeps it from showing alone
	args        []string
	maxTotal    int    // tokens of the cache where it fails
	factor      string // one more, as a line of the case
	workload    string
	concurrency int
}

const (
	agentRound  = "kind: agent, rounds: 1, context_lines: 12"
	agentRounds = "kind: agent, rounds: 4, sessions: 40"
	tier        = "--hicache-ratio=8"
)

// demoFaults are those that one server's settings bring about. The others take
// several servers or ranks, a slow link or clients that hang up.
var demoFaults = []demoFault{
	{name: "capture-alias", workload: agentRound},
	{name: "stale-index-k", when: "batch > 1", args: []string{tier}, maxTotal: 4096, workload: agentRounds, concurrency: 40},
	{name: "host-stride", when: "batch > 1", args: []string{tier}, maxTotal: 4096, workload: agentRounds, concurrency: 40},
	{name: "scatter-temporaries", when: "batch > 1", workload: agentRound, factor: `store: {suspect: [--index-k-store=scatter], safe: [--index-k-store=fused]}`},
	{name: "missing-layer-wait", when: "batch > 1", args: []string{tier}, maxTotal: 8192, concurrency: 32, workload: "kind: evict, sessions: 32, rounds: 2, fillers: 1, filler_lines: 40, context_lines: 24"},
	{name: "page-share", when: "batch > 1", maxTotal: 16384, workload: agentRounds, concurrency: 40},
	{name: "first-token-swap", workload: "kind: recall, sessions: 24, rounds: 6", concurrency: 24, factor: `overlap: {suspect: [], safe: [--disable-overlap-schedule]}`},
	{name: "depth-five", when: "batch > 1", workload: "kind: agent, sessions: 24, rounds: 1, context_lines: 12", concurrency: 24, factor: `steps: {suspect: [--num-continuous-decode-steps=5], safe: [--num-continuous-decode-steps=1]}`},
	{name: "slow-decay", when: "requests > 100", workload: agentRounds, maxTotal: 16384, concurrency: 40},
}

// demoText is the case in which a fault is hunted.
func demoText(name, self string, port int) (string, error) {
	i := slices.IndexFunc(demoFaults, func(f demoFault) bool { return f.name == name })
	if i < 0 {
		var names []string
		for _, f := range demoFaults {
			names = append(names, f.name)
		}
		return "", app.Usage("demo: no fault %q here; there are %s (culprit lab faults lists those that take more than one server's settings too)", name, strings.Join(names, ", "))
	}
	f := demoFaults[i]
	spec := f.name
	if f.when != "" {
		spec += ",when=" + f.when
	}
	args, more := slices.Clone(f.args), ""
	if f.factor != "" {
		factor, _, _ := strings.Cut(f.factor, ":")
		args, more = append(args, `"{{`+factor+`}}"`), f.factor
	}
	return strings.NewReplacer(
		"SELF", strconv.Quote(self), "PORT", strconv.Itoa(port), "FAULT", spec, "ARGS", strings.Join(args, ", "), "MORE", more,
		"MAX_TOTAL", strconv.Itoa(cmp.Or(f.maxTotal, 65536)), "WORKLOAD", f.workload, "CONCURRENCY", strconv.Itoa(cmp.Or(f.concurrency, 80)),
	).Replace(demoCase), nil
}

func freePort(ctx context.Context) (int, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

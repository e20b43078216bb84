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
	UI    uiFlag `name:"ui" placeholder:"ADDR" help:"Serve the page while the hunt runs, at a free port of 127.0.0.1; --ui=ADDR serves it elsewhere."`
	Seed  uint64 `default:"1" placeholder:"N" help:"Of the search (default: ${default})."`
}

func (c *demoCommand) Run(ctx context.Context, s *streams) error {
	launcher, err := launcher()
	if err != nil {
		return err
	}
	fault, err := faultOf(c.Fault)
	if err != nil {
		return err
	}
	var ports demoPorts
	for i := range ports {
		if ports[i], err = freePort(ctx); err != nil {
			return err
		}
	}
	if c.Dir == "" {
		c.Dir = filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-demo")
	}
	dir, err := filepath.Abs(c.Dir) // the case may be resumed from anywhere
	if err != nil {
		return err
	}
	path, err := app.WriteCase(c.Dir, demoText(fault, launcher.Supervisor[0], dir, ports))
	if err != nil {
		return err
	}
	status, err := app.Hunt(ctx, app.HuntOptions{Case: path, Seed: c.Seed, MinRate: fault.minRate, UI: string(c.UI), Launcher: launcher, Tool: version(), Made: true},
		app.Output{Screen: newScreen(os.Stdout), JSON: s.out, Progress: s.progress})
	if err != nil {
		return err
	}
	return hunted(status)
}

// demoPair is a case of several processes; demoBeside has traffic of its own
// beside the workload.
var (
	//go:embed demo-pair.yaml
	demoPair string
	//go:embed demo-beside.yaml
	demoBeside string
)

// demoPorts are free ones, for as many servers as a case has.
type demoPorts [5]int

// demoFault is what it takes for a fault to show in a case, and which settings
// it hangs on beside those of the case.
type demoFault struct {
	name     string
	text     string   // of the case (demoCase)
	when     string   // added to --fault: what keeps it from showing alone
	args     []string // whatever the arm
	tokens   int      // of the cache where it fails (65536)
	roomy    int      // of the safe level (32768)
	factors  []string // more of them, as lines of the case; {{name}} of those of the server become arguments
	workload string
	load     string
	minRate  float64
}

const tier = "--hicache-ratio=8"

// demoFaults are those of the catalogue, each with settings that bring it about.
var demoFaults = []demoFault{
	{name: "capture-alias", workload: "kind: agent, rounds: 1, context_lines: 12", load: "concurrency: 80"},
	{
		name: "stale-index-k", when: "batch > 1", args: []string{tier}, tokens: 2560,
		workload: "kind: agent, rounds: 4, sessions: 24", load: "concurrency: 24",
	},
	{
		name: "host-stride", when: "batch > 1", args: []string{tier}, tokens: 2560,
		workload: "kind: agent, rounds: 4, sessions: 24", load: "concurrency: 24",
	},
	{
		// With prompts this long the large pool overflows too, so that only the tier's settings matter.
		name: "token-granular-geometry", when: "batch > 1", args: []string{tier}, tokens: 8192, roomy: 16384,
		factors:  []string{`partial: {note: parts of host pages, suspect: [--hicache-partial-pages], safe: []}`},
		workload: "kind: evict, sessions: 24, rounds: 2, fillers: 1, filler_lines: 72, context_lines: 48", load: "concurrency: 24",
	},
	{
		name: "scatter-temporaries", when: "batch > 1",
		factors:  []string{`store: {suspect: [--index-k-store=scatter], safe: [--index-k-store=fused]}`},
		workload: "kind: agent, rounds: 1, context_lines: 12", load: "concurrency: 80",
	},
	{
		name: "missing-layer-wait", when: "batch > 1", args: []string{tier}, tokens: 8192,
		workload: "kind: evict, sessions: 32, rounds: 2, fillers: 1, filler_lines: 40, context_lines: 24", load: "concurrency: 32",
	},
	{
		name: "rank-local-gate", workload: "kind: churn, sessions: 4, rounds: 8", load: "concurrency: 1, timeout: 1s",
		factors: []string{
			`ranks: {note: two ranks, suspect: [--tp-size=2], safe: []}`,
			`overlap: {note: the overlap loop, suspect: [], safe: [--disable-overlap-schedule]}`,
		},
	},
	{
		name: "early-success", text: demoPair, when: "batch > 1",
		factors:  []string{`concurrency: {suspect: 16, safe: 1}`},
		workload: "kind: agent, sessions: 16, rounds: 3",
	},
	{
		// Roomy, a page that is freed isn't another's before its late rows have come.
		name: "early-release", text: demoBeside, tokens: 5120, roomy: 16384,
		workload: "kind: echo, sessions: 16, rounds: 8, copy_lines: 16", load: "concurrency: 16",
	},
	{
		// In the smaller pool the freed page is soon another's; in one that is never full it stays what it was.
		name: "page-share", when: "batch > 1", args: []string{tier}, tokens: 8192, roomy: 16384,
		workload: "kind: agent, rounds: 4, sessions: 40", load: "concurrency: 40",
	},
	{
		name: "parser-drop", when: "batch > 1 and toggle.hold",
		factors:  []string{`hold: {suspect: [--toggle=hold], safe: []}`, `concurrency: {suspect: 40, safe: 1}`},
		workload: "kind: agent, rounds: 2, sessions: 40, max_tokens: 24", load: "control_sessions: 40",
	},
	{
		name:     "first-token-swap",
		factors:  []string{`overlap: {suspect: [], safe: [--disable-overlap-schedule]}`},
		workload: "kind: recall, sessions: 24, rounds: 6", load: "concurrency: 24",
	},
	{
		name: "poison", when: "batch > 4 and requests > 20 and toggle.fused",
		factors:  []string{`fused: {suspect: [--toggle=fused], safe: []}`, `concurrency: {suspect: 24, safe: 2}`},
		workload: "kind: agent, rounds: 2, sessions: 24, context_lines: 12",
	},
	{
		name: "slow-decay", when: "requests > 60", tokens: 16384,
		workload: "kind: agent, rounds: 4, sessions: 32", load: "concurrency: 32",
	},
	{
		name: "depth-five", when: "batch > 1",
		factors:  []string{`steps: {suspect: 5, safe: 1, levels: [1, 2, 4, 5, 6, 8], attest: 'server_info.num_continuous_decode_steps == int(level)'}`},
		args:     []string{"--num-continuous-decode-steps", `"{{steps}}"`},
		workload: "kind: agent, sessions: 24, rounds: 1, context_lines: 12", load: "concurrency: 24",
	},
	{
		name: "batch-numerics", args: []string{"--load-format=dummy"}, minRate: 0.02,
		workload: "kind: churn, sessions: 16, rounds: 3, copy_lines: 4, context_lines: 4", load: "concurrency: 16, control_sessions: 16",
	},
}

// demoText is the case in which a fault is hunted.
// self is this program, and dir what its traffic may write to.
func demoText(f *demoFault, self, dir string, ports demoPorts) string {
	spec := f.name
	if f.when != "" {
		spec += ",when=" + f.when
	}
	args := slices.Clone(f.args)
	for _, line := range f.factors {
		factor, _, _ := strings.Cut(line, ":")
		if template := `"{{` + factor + `}}"`; factor != "concurrency" && !slices.Contains(args, template) {
			args = append(args, template)
		}
	}
	return strings.NewReplacer(
		"SELF", strconv.Quote(self), "DIR", strconv.Quote(dir),
		"PORT", strconv.Itoa(ports[0]), "PREFILL", strconv.Itoa(ports[1]), "DECODE", strconv.Itoa(ports[2]), "SLOW", strconv.Itoa(ports[3]), "BESIDE", strconv.Itoa(ports[4]),
		"FAULT", spec, "ARGS", strings.Join(args, ", "), "MORE", strings.Join(f.factors, "\n  "),
		"TOKENS", strconv.Itoa(cmp.Or(f.tokens, 65536)), "ROOMY", strconv.Itoa(cmp.Or(f.roomy, 32768)), "WORKLOAD", f.workload, "LOAD", f.load,
	).Replace(cmp.Or(f.text, demoCase))
}

// faultOf finds a fault of the demo.
func faultOf(name string) (*demoFault, error) {
	var names []string
	for i := range demoFaults {
		if demoFaults[i].name == name {
			return &demoFaults[i], nil
		}
		names = append(names, demoFaults[i].name)
	}
	return nil, app.Usage("demo: no fault %q; there are %s (culprit lab faults explains them)", name, strings.Join(names, ", "))
}

func freePort(ctx context.Context) (int, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

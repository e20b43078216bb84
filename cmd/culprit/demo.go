package main

import (
	"context"
	_ "embed"
	"net"
	"os"
	"path/filepath"
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
	Fault string `default:"capture-alias" placeholder:"NAME" help:"Which of the lab's faults to hunt; \"culprit lab faults\" lists them."`
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
	text := strings.NewReplacer("SELF", launcher.Supervisor[0], "PORT", strconv.Itoa(port), "FAULT", c.Fault).Replace(demoCase)
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

func freePort(ctx context.Context) (int, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	return l.Addr().(*net.TCPAddr).Port, l.Close()
}

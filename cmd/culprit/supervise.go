package main

import (
	"fmt"
	"os"
	"time"

	"github.com/culprit-project/culprit/target"
)

// superviseCommand stands between culprit and a server that it launched: see
// target.Supervise. Its standard input is the hold.
type superviseCommand struct {
	Grace   time.Duration `default:"15s"`
	Command []string      `arg:"" passthrough:""`
}

func (c *superviseCommand) Run() error {
	code, err := target.Supervise(c.Command, os.Stdin, c.Grace)
	if err != nil {
		// As a shell does for a program that can't be started.
		const noProgram = 127
		fmt.Fprintln(os.Stderr, "culprit:", err)
		code = noProgram
	}
	os.Exit(code)
	return nil
}

// launcher starts servers under this program's own supervision.
func launcher() (*target.Launcher, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	const grace = 5 * time.Second // more than the lab drains
	return &target.Launcher{Supervisor: []string{self, "supervise", "--grace", grace.String()}, Grace: grace}, nil
}

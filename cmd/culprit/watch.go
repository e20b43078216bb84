package main

import (
	"context"
	"time"

	"github.com/culprit-project/culprit/internal/app"
)

type watchCommand struct {
	serverFlags
	Every        time.Duration `default:"1m" placeholder:"D" help:"From one conversation to the next (default: ${default})."`
	Baseline     float64       `default:"0.001" placeholder:"SHARE" help:"Share of the conversations that break on a sound server, at most (default: ${default})."`
	FalseAlarms  float64       `default:"0.0833" placeholder:"N" help:"False alarms of damage a month, on average at most (default: one in a year)."`
	Rounds       int           `placeholder:"N" help:"Rounds of a conversation (default: 2)."`
	ContextLines int           `placeholder:"N" help:"Lines of facts in each system prompt (default: 12)."`
	Tools        string        `placeholder:"STYLE" help:"native: the tools field; text: JSON in the text (default: native)."`
	Timeout      time.Duration `placeholder:"D" help:"Longest wait for one reply (default: 1m)."`
	Listen       string        `placeholder:"ADDR" help:"Serve /metrics (Prometheus) and /health there."`
	PID          int           `name:"pid" placeholder:"PID" help:"The server's process, where it runs here: an alarm then takes its stacks (py-spy) and what it really runs."`
	Log          []string      `placeholder:"FILE" help:"A log of the server; an alarm takes its end. Repeatable."`
	OnAlarm      string        `placeholder:"COMMAND" help:"Run by sh on an alarm, after the evidence was taken; CULPRIT_ALARM_DIR, _KIND and _SAYS tell it what."`
	KeepDays     int           `default:"30" placeholder:"N" help:"Days whose records are kept (default: ${default})."`
	Output       string        `short:"o" placeholder:"DIR" help:"Directory to create or go on with (default: runs/TIME-watch)."`
}

func (c *watchCommand) Run(ctx context.Context, s *streams) error {
	return app.Watch(ctx, app.WatchOptions{
		Server: c.server(), Every: c.Every, Baseline: c.Baseline, FalseAlarms: c.FalseAlarms, Rounds: c.Rounds, ContextLines: c.ContextLines,
		Tools: c.Tools, Timeout: c.Timeout, Listen: c.Listen, PID: c.PID, Logs: c.Log, OnAlarm: c.OnAlarm, KeepDays: c.KeepDays,
		Output: c.Output, Tool: version(),
	}, app.Output{Progress: s.progress})
}

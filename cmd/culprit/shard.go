package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/culprit-project/culprit/internal/app"
)

// shardCommand plays one shard of a run, which started it and talks to it on
// its standard input and output.
type shardCommand struct{}

func (shardCommand) Run(ctx context.Context) error {
	// A run that is gone doesn't end a shard before its history is closed.
	signal.Ignore(syscall.SIGPIPE)
	// An interrupt of the terminal is for the run, which tells its shards.
	return app.PlayShard(context.WithoutCancel(ctx), os.Stdin, os.Stdout)
}

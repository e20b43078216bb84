package app

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"log/slog"
	"os/exec"
	"strings"
	"sync"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/worker"
)

// ShardProcesses plays shards in processes of this machine. Command is this
// program, asked for PlayShard on its standard input and output.
type ShardProcesses struct{ Command []string }

// Start starts one. A shard whose run is gone ends by itself, since its
// standard input does.
func (p *ShardProcesses) Start(ctx context.Context, _ int, _ string) (link experiment.ShardLink, end func() error, err error) {
	cmd := exec.CommandContext(context.WithoutCancel(ctx), p.Command[0], p.Command[1:]...)
	said := &tail{limit: 2000}
	cmd.Stderr = said
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, nil, err
	}
	end = func() error {
		in.Close()
		// One that has ended exits at once; any other stops, now that its
		// input is at its end, or is stopped.
		kill := time.AfterFunc(shardGrace, func() { cmd.Process.Kill() }) //nolint:errcheck // it has ended just now
		defer kill.Stop()
		err := cmd.Wait()
		if text := strings.TrimSpace(said.String()); err != nil && text != "" {
			err = fmt.Errorf("%w: %s", err, text)
		}
		return err
	}
	return experiment.StreamLink(out, in), end, nil
}

// shards makes a queue for one run's shards. end deletes it.
func (n *NATS) shards(ctx context.Context, needs []string, out Output) (s experiment.Shards, end func() error, err error) {
	conn, err := n.connect(ctx, "culprit run", slog.New(sayHandler{sayer(out.Progress)}))
	if err != nil {
		return nil, nil, err
	}
	q, err := conn.Make(ctx, "load-"+strings.ToLower(rand.Text()[:10]), queue.Options{Replicas: n.Replicas})
	if err != nil {
		conn.Close()
		return nil, nil, err
	}
	shards := worker.NewShards(ctx, conn, q, needs)
	return shards, func() error {
		defer conn.Close()
		return shards.Close()
	}, nil
}

// PlayShard plays the shard that a run asks for on in.
func PlayShard(ctx context.Context, in io.Reader, out io.Writer) error {
	return experiment.PlayShard(ctx, experiment.StreamLink(in, out), experiment.ShardOptions{})
}

// tail keeps the end of what is written to it.
type tail struct {
	mu    sync.Mutex
	limit int
	b     bytes.Buffer
}

func (t *tail) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b.Write(b)
	if over := t.b.Len() - t.limit; over > 0 {
		t.b.Next(over)
	}
	return len(b), nil
}

func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.b.String()
}

// shardGrace is how long a shard may take to close its history.
const shardGrace = 5 * time.Second

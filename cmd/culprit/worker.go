package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/culprit-project/culprit/internal/app"
	"github.com/culprit-project/culprit/queue"
)

// natsFlags say how a NATS cluster is reached, as NATS's own tool does.
type natsFlags struct {
	Creds   string `name:"nats-creds" env:"NATS_CREDS" type:"path" placeholder:"FILE" help:"Credentials for NATS: a JWT and its key."`
	NKey    string `name:"nats-nkey" env:"NATS_NKEY" type:"path" placeholder:"FILE" help:"NKey seed for NATS."`
	User    string `name:"nats-user" env:"NATS_USER" placeholder:"NAME" help:"User for NATS; the password is in NATS_PASSWORD."`
	CA      string `name:"nats-ca" env:"NATS_CA" type:"path" placeholder:"FILE" help:"Certificates that NATS's is checked by."`
	Cert    string `name:"nats-cert" env:"NATS_CERT" type:"path" placeholder:"FILE" help:"Certificate of this client for NATS."`
	Key     string `name:"nats-key" env:"NATS_KEY" type:"path" placeholder:"FILE" help:"Its key."`
	Context string `name:"nats-context" env:"NATS_CONTEXT" placeholder:"NAME" help:"Context of the nats command line tool, in place of these."`
}

// queueFlags say how a hunt's queue is kept.
type queueFlags struct {
	Replicas int           `name:"nats-replicas" placeholder:"N" help:"How many servers of the cluster keep each trial (default: 1; with 3 one may die)."`
	MaxBytes int64         `name:"nats-max-bytes" placeholder:"N" help:"Bytes that runs may take there until the hunt has fetched them (default: what the account has)."`
	Silence  time.Duration `hidden:"" help:"After so long a silence a worker's trial goes to another."`
}

// hunters are at a cluster only where the hunt is told so: the environment alone
// doesn't send it there.
func (f *queueFlags) hunters(url string, how *natsFlags) app.NATS {
	if url == "" {
		return app.NATS{}
	}
	n := how.nats(url)
	n.Replicas, n.MaxBytes, n.Silence = f.Replicas, f.MaxBytes, f.Silence
	return n
}

func (f *natsFlags) nats(url string) app.NATS {
	n := app.NATS{Access: queue.Access{
		URL: url, User: f.User, Password: os.Getenv("NATS_PASSWORD"), Token: os.Getenv("NATS_TOKEN"),
		Creds: f.Creds, NKey: f.NKey, CA: f.CA, Cert: f.Cert, Key: f.Key,
	}}
	n.Context = f.Context
	return n
}

type workerCommand struct {
	NATS   string            `name:"nats" env:"NATS_URL" placeholder:"URL" help:"The cluster that the hunts use: nats://host:4222, several with commas."`
	Name   string            `placeholder:"NAME" help:"That no other worker has (default: the machine's, and more)."`
	Label  []string          `placeholder:"KEY=VALUE" sep:"none" help:"What it has, such as gpu=8: it takes trials that need no other. Repeatable."`
	Slot   int               `placeholder:"N" help:"Its number on its machine, which {{worker}} in a case stands for (default: 0)."`
	Dir    string            `name:"dir" type:"path" placeholder:"DIR" help:"Where runs stay until they are handed over (default: in the user's cache)."`
	Idle   time.Duration     `placeholder:"D" help:"End with exit code 0 after so long without work, so that a job of workers completes (default: never)."`
	APIKey string            `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"Sent to the servers as a bearer token; hunts don't pass theirs on."`
	Header map[string]string `placeholder:"NAME=VALUE" mapsep:"none" help:"One more request header. Repeatable."`

	natsFlags
}

func (c *workerCommand) Run(ctx context.Context, s *streams) error {
	launcher, err := launcher()
	if err != nil {
		return err
	}
	if c.NATS == "" && c.Context == "" {
		return app.Usage("--nats: which cluster? Give its URL, such as nats://host:4222, or --nats-context")
	}
	if c.Dir == "" {
		cache, err := os.UserCacheDir()
		if err != nil {
			return err
		}
		c.Dir = filepath.Join(cache, "culprit", fmt.Sprintf("worker-%d%s", c.Slot, c.Name))
	}
	return app.Work(ctx, app.WorkerOptions{
		Server: app.Server{APIKey: c.APIKey, Header: c.Header}, NATS: c.nats(c.NATS), Name: c.Name, Labels: c.Label, Slot: c.Slot,
		Dir: c.Dir, Idle: c.Idle, Launcher: launcher, Tool: version(),
	}, app.Output{Progress: s.progress})
}

package main

import (
	"context"
	"time"

	"github.com/culprit-project/culprit/deploy"
	"github.com/culprit-project/culprit/internal/app"
)

type deployCommand struct {
	Kubernetes deployKubernetesCommand `cmd:"" help:"Print an Indexed Job of workers, or with --jobset a JobSet; --apply has kubectl apply it."`
	Slurm      deploySlurmCommand      `cmd:"" help:"Print an array job of workers for sbatch; --apply submits it."`
}

// deployFlags are what all workers have.
type deployFlags struct {
	NATS    string            `name:"nats" env:"NATS_URL" required:"" placeholder:"URL" help:"NATS, as the workers reach it; several with commas. Without a password: name a secret instead."`
	Workers int               `placeholder:"N" help:"How many (default: 4)."`
	Label   map[string]string `placeholder:"NAME=VALUE" help:"Label of the workers: an arm that needs others isn't taken. Repeatable."`
	GPUs    int               `name:"gpus" placeholder:"N" help:"GPUs of each worker, where it starts servers (default: none)."`
	Name    string            `placeholder:"NAME" help:"Name of the job, and of each worker with its number (default: culprit-worker)."`
	Grace   time.Duration     `placeholder:"D" help:"How long a worker that must end has to hand its work back (default: 2m)."`
	Idle    time.Duration     `default:"30m" placeholder:"D" help:"A worker without work for so long ends, so that the job completes; 0 never (default: 30m)."`
	Apply   bool              `help:"Apply it, instead of printing it."`
}

func (f *deployFlags) options() deploy.Options {
	return deploy.Options{Name: f.Name, Workers: f.Workers, NATS: f.NATS, Labels: f.Label, GPUs: f.GPUs, Grace: f.Grace, Idle: f.Idle}
}

type deployKubernetesCommand struct {
	deployFlags
	Image     string `required:"" placeholder:"IMAGE" help:"Image with culprit on its PATH, and the server where workers start one (make image builds one with culprit alone)."`
	Namespace string `short:"n" placeholder:"NAME" help:"Namespace (default: kubectl's)."`
	JobSet    bool   `name:"jobset" help:"A JobSet instead of a Job."`
	Queue     string `placeholder:"NAME" help:"Kueue's local queue, which decides when it starts."`

	CPU             string            `name:"cpu" placeholder:"QUANTITY" help:"CPU to request for each worker (default: 2)."`
	Memory          string            `placeholder:"QUANTITY" help:"Memory of each worker, request and limit (default: 4Gi)."`
	Disk            string            `placeholder:"QUANTITY" help:"Disk for each worker's histories (default: 20Gi)."`
	NodeSelector    map[string]string `placeholder:"NAME=VALUE" help:"Only on nodes with this label. Repeatable."`
	ServerLabel     map[string]string `placeholder:"NAME=VALUE" help:"Label of the server's pods: workers stay off their nodes. Repeatable."`
	ServerNamespace string            `placeholder:"NAME" help:"Namespace of the server's pods (default: the workers')."`

	CredsSecret  string `placeholder:"SECRET[/KEY]" help:"Secret with NATS credentials (default key: nats.creds)."`
	CASecret     string `name:"ca-secret" placeholder:"SECRET[/KEY]" help:"Secret with the certificate authorities of NATS (default key: ca.crt)."`
	CertSecret   string `placeholder:"SECRET" help:"Secret of type kubernetes.io/tls with the workers' certificate for NATS and its key."`
	APIKeySecret string `name:"api-key-secret" placeholder:"SECRET[/KEY]" help:"Secret with the API key of the tested server (default key: api-key)."`
}

func (c *deployKubernetesCommand) Run(ctx context.Context, s *streams) error {
	o := deploy.KubernetesOptions{
		Options: c.options(), Image: c.Image, Namespace: c.Namespace, JobSet: c.JobSet, Queue: c.Queue,
		CPU: c.CPU, Memory: c.Memory, Disk: c.Disk, NodeSelector: c.NodeSelector, ServerLabels: c.ServerLabel, ServerNamespace: c.ServerNamespace,
		CertificateSecret: c.CertSecret,
	}
	for _, secret := range []struct {
		flag, text, key string
		to              *deploy.SecretKey
	}{
		{"--creds-secret", c.CredsSecret, "nats.creds", &o.CredentialsSecret},
		{"--ca-secret", c.CASecret, "ca.crt", &o.CASecret},
		{"--api-key-secret", c.APIKeySecret, "api-key", &o.APIKeySecret},
	} {
		var err error
		if *secret.to, err = deploy.ParseSecretKey(secret.text, secret.key); err != nil {
			return app.Usage("%s: %w", secret.flag, err)
		}
	}
	return app.DeployKubernetes(ctx, o, c.Apply, s.out, app.Output{Progress: s.progress})
}

type deploySlurmCommand struct {
	deployFlags
	Binary    string        `placeholder:"PATH" help:"culprit on the nodes (default: the one on PATH)."`
	Partition string        `short:"p" placeholder:"NAME" help:"Partition (default: the cluster's)."`
	Account   string        `short:"A" placeholder:"NAME" help:"Account (default: yours)."`
	CPUs      int           `name:"cpus" placeholder:"N" help:"CPUs of each worker (default: 2)."`
	Memory    string        `placeholder:"SIZE" help:"Memory of each worker (default: 4G)."`
	Time      time.Duration `placeholder:"D" help:"The longest that a worker runs (default: 4h)."`

	CredsFile  string `placeholder:"PATH" help:"NATS credentials, a file on the nodes."`
	CAFile     string `name:"ca-file" placeholder:"PATH" help:"Certificate authorities of NATS, a file on the nodes."`
	CertFile   string `placeholder:"PATH" help:"The workers' certificate for NATS, a file on the nodes."`
	KeyFile    string `placeholder:"PATH" help:"Its key, a file on the nodes."`
	APIKeyFile string `name:"api-key-file" placeholder:"PATH" help:"API key of the tested server, a file on the nodes."`
}

func (c *deploySlurmCommand) Run(ctx context.Context, s *streams) error {
	o := deploy.SlurmOptions{
		Options: c.options(), Binary: c.Binary, Partition: c.Partition, Account: c.Account, CPUs: c.CPUs, Memory: c.Memory, Time: c.Time,
		CredentialsFile: c.CredsFile, CAFile: c.CAFile, CertificateFile: c.CertFile, KeyFile: c.KeyFile, APIKeyFile: c.APIKeyFile,
	}
	return app.DeploySlurm(ctx, o, c.Apply, s.out, app.Output{Progress: s.progress})
}

// Package deploy writes what starts workers on other machines: an Indexed Job
// or a JobSet for Kubernetes, an array job for Slurm. Options in, text out: it
// starts nothing and reads nothing. Secrets are named, never held.
//
// Stability: may change.
package deploy

import (
	"cmp"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"text/template"
	"time"
	"unicode"
)

// Defaults of Options.
const (
	DefaultName    = "culprit-worker"
	DefaultWorkers = 4
	DefaultCPU     = "2"
	DefaultMemory  = "4Gi"
	DefaultDisk    = "20Gi"
	DefaultGrace   = 2 * time.Minute
	DefaultTime    = 4 * time.Hour
)

// Options is what both kinds of machines are asked for. NATS must be set; every
// other field has a default.
type Options struct {
	Name    string // of the job, and of each worker with its number behind it
	Workers int
	NATS    string            // URL; without a password or token
	Labels  map[string]string // of the workers: an arm that needs others isn't taken
	GPUs    int               // of each worker
	// Grace is how long a worker that is told to end has to stop the server
	// that it started and to hand its trial back.
	Grace time.Duration
	// Idle is after how long without work a worker ends, so that the job is over;
	// 0 is never.
	Idle time.Duration
}

// KubernetesOptions is a Job. Image must be set.
type KubernetesOptions struct {
	Options
	Image     string
	Namespace string // empty leaves it to kubectl
	JobSet    bool
	Queue     string // of Kueue, which then decides when the job starts

	CPU, Memory, Disk string // requested, as Kubernetes writes quantities
	NodeSelector      map[string]string
	// ServerLabels are the labels of the server's pods. Workers stay off the
	// nodes that have one, so that the load takes nothing from the server.
	ServerLabels    map[string]string
	ServerNamespace string // of those pods; empty is the workers' own

	CredentialsSecret SecretKey // NATS credentials file
	CASecret          SecretKey // certificate authorities of NATS, PEM
	// CertificateSecret has the workers' certificate for NATS and its key, as
	// Secrets of type kubernetes.io/tls do.
	CertificateSecret string
	APIKeySecret      SecretKey // of the server that is tested
}

// SlurmOptions is an array job. Files are on the nodes.
type SlurmOptions struct {
	Options
	Binary    string // culprit on the nodes; empty finds it on PATH
	Partition string
	Account   string
	CPUs      int
	Memory    string        // as Slurm writes it
	Time      time.Duration // the longest that a worker runs

	CredentialsFile string // NATS credentials
	CAFile          string // certificate authorities of NATS, PEM
	CertificateFile string // the workers' certificate for NATS, PEM, with KeyFile
	KeyFile         string
	APIKeyFile      string // of the server that is tested
}

// SecretKey names one entry of a Kubernetes Secret; empty is none.
type SecretKey struct{ Secret, Key string }

// ParseSecretKey reads SECRET or SECRET/KEY.
func ParseSecretKey(text, defaultKey string) (SecretKey, error) {
	if text == "" {
		return SecretKey{}, nil
	}
	secret, key, _ := strings.Cut(text, "/")
	s := SecretKey{secret, cmp.Or(key, defaultKey)}
	if !dnsSubdomain.MatchString(s.Secret) || len(s.Secret) > 253 || !secretKey.MatchString(s.Key) {
		return s, fmt.Errorf("%q doesn't name a key of a Secret: want SECRET or SECRET/KEY", text)
	}
	return s, nil
}

var (
	//go:embed kubernetes.yaml.tmpl
	kubernetesText string
	//go:embed slurm.sh.tmpl
	slurmText string

	// A JSON string is a YAML string too, whatever is in it.
	kubernetesTemplate = template.Must(template.New("kubernetes").Funcs(template.FuncMap{"q": quoteYAML, "map": yamlMap}).Parse(kubernetesText))
	slurmTemplate      = template.Must(template.New("slurm").Funcs(template.FuncMap{"q": quoteShell}).Parse(slurmText))
)

var (
	dnsLabel     = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?$`)
	dnsSubdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)
	secretKey    = regexp.MustCompile(`^[-._a-zA-Z0-9]{1,253}$`)
	labelKey     = regexp.MustCompile(`^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$`)
	labelValue   = regexp.MustCompile(`^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$`)
	quantity     = regexp.MustCompile(`^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$`)
	// What stands in a directive of sbatch can't be quoted.
	slurmWord   = regexp.MustCompile(`^[-A-Za-z0-9_.,+]+$`)
	slurmMemory = regexp.MustCompile(`^[0-9]+[KMGT]?$`)
)

// maxName leaves room for what Job and JobSet put behind a name in the names
// of pods, which have at most 63 characters.
const maxName = 40

// complete sets the defaults of what both share, or says what is wrong.
func (o *Options) complete() error {
	o.Name = cmp.Or(o.Name, DefaultName)
	o.Workers = cmp.Or(o.Workers, DefaultWorkers)
	o.Grace = cmp.Or(o.Grace, DefaultGrace)
	switch {
	case !dnsLabel.MatchString(o.Name) || len(o.Name) > maxName:
		return fmt.Errorf("name %q: want at most %d lower-case letters, digits and -", o.Name, maxName)
	case o.Workers < 1 || o.Workers > 10_000:
		return fmt.Errorf("%d workers: want 1 to 10,000", o.Workers)
	case o.GPUs < 0 || o.Idle < 0 || o.Grace < time.Second:
		return errors.New("GPUs and the time without work must not be negative, the grace period at least a second")
	case o.NATS == "":
		return errors.New("no NATS URL is given: workers take their work from there")
	}
	for server := range strings.SplitSeq(o.NATS, ",") {
		u, err := url.Parse(strings.TrimSpace(server))
		if err != nil || u.Host == "" {
			return errors.New("the NATS URL isn't of the form nats://HOST:PORT, or several with commas between")
		}
		if u.User != nil {
			return fmt.Errorf("the NATS URL of %s has a password or token in it, and what is printed here must hold none: put credentials where the workers read them", u.Host)
		}
		if host := u.Hostname(); host == "localhost" || host == "127.0.0.1" || host == "::1" {
			return fmt.Errorf("%s is each worker's own machine: give an address of NATS that the workers reach", u.Host)
		}
	}
	for key, value := range o.Labels {
		if key == "" || key == "worker" || strings.ContainsAny(key+value, "=, \t\r\n") {
			return fmt.Errorf("worker label %q: want NAME=VALUE without spaces and commas, and another name than worker", key+"="+value)
		}
	}
	return nil
}

// Kubernetes returns a Job, or a JobSet of one, as YAML.
func Kubernetes(o KubernetesOptions) (string, error) {
	if err := o.complete(); err != nil {
		return "", fmt.Errorf("deploy to Kubernetes: %w", err)
	}
	var b strings.Builder
	if err := kubernetesTemplate.Execute(&b, &o); err != nil {
		return "", fmt.Errorf("deploy to Kubernetes: %w", err)
	}
	text := b.String()
	if o.JobSet {
		text = jobSet(&o, text)
	}
	return text, nil
}

func (o *KubernetesOptions) complete() error {
	if err := o.Options.complete(); err != nil {
		return err
	}
	o.CPU, o.Memory, o.Disk = cmp.Or(o.CPU, DefaultCPU), cmp.Or(o.Memory, DefaultMemory), cmp.Or(o.Disk, DefaultDisk)
	if o.Image == "" || strings.ContainsAny(o.Image, " \t\r\n") {
		return fmt.Errorf("image %q: name the image that the workers run; it must have culprit on its PATH, and the server where workers start one", o.Image)
	}
	if c := o.CertificateSecret; c != "" && (!dnsSubdomain.MatchString(c) || len(c) > 253) {
		return fmt.Errorf("%q is no name of a Secret", c)
	}
	for _, q := range []string{o.CPU, o.Memory, o.Disk} {
		if !quantity.MatchString(q) {
			return fmt.Errorf("%q isn't a quantity as Kubernetes writes it: 500m, 2, 4Gi", q)
		}
	}
	for _, n := range []string{o.Namespace, o.ServerNamespace, o.Queue} {
		if n != "" && (!dnsLabel.MatchString(n) || len(n) > 63) {
			return fmt.Errorf("%q is no name of a namespace or queue", n)
		}
	}
	for _, labels := range []map[string]string{o.NodeSelector, o.ServerLabels} {
		for key, value := range labels {
			if !labelKey.MatchString(key) || !labelValue.MatchString(value) {
				return fmt.Errorf("%q is no label of Kubernetes", key+"="+value)
			}
		}
	}
	return nil
}

// Args are the worker's arguments.
func (o *KubernetesOptions) Args() []string {
	args := o.args()
	for i := range args {
		args[i] = strings.ReplaceAll(args[i], "$(", "$$(") // Kubernetes replaces $(NAME)
	}
	args = append(args, "--dir=/work", "--name="+o.Name+"-$(JOB_COMPLETION_INDEX)")
	if o.CredentialsSecret.Secret != "" {
		args = append(args, "--nats-creds=/run/secrets/nats/"+o.CredentialsSecret.Key)
	}
	if o.CASecret.Secret != "" {
		args = append(args, "--nats-ca=/run/secrets/nats-ca/"+o.CASecret.Key)
	}
	if o.CertificateSecret != "" {
		args = append(args, "--nats-cert=/run/secrets/nats-tls/tls.crt", "--nats-key=/run/secrets/nats-tls/tls.key")
	}
	return args
}

// GraceSeconds is the grace period.
func (o *Options) GraceSeconds() int { return int(math.Ceil(o.Grace.Seconds())) }

func (o *Options) args() []string {
	args := []string{"worker", "--nats=" + o.NATS}
	if o.Idle > 0 {
		args = append(args, "--idle="+o.Idle.String())
	}
	for _, key := range slices.Sorted(maps.Keys(o.Labels)) {
		args = append(args, "--label="+key+"="+o.Labels[key])
	}
	return args
}

// jobSet puts a Job's specification into a JobSet of one job.
func jobSet(o *KubernetesOptions, job string) string {
	header, spec, _ := strings.Cut(job, "\nspec:\n")
	header = strings.Replace(header, "apiVersion: batch/v1\nkind: Job\n", "apiVersion: jobset.x-k8s.io/v1alpha2\nkind: JobSet\n", 1)
	var b strings.Builder
	b.WriteString(header)
	b.WriteString("\nspec:\n")
	if o.Queue != "" {
		b.WriteString("  suspend: true # until Kueue lets it start\n")
		spec = strings.Replace(spec, suspended, "", 1)
	}
	// The JobSet as a whole isn't made anew: its Job replaces workers one by one.
	b.WriteString("  # Its Job replaces workers one by one; starting all of them again would lose the others' trials.\n" +
		"  failurePolicy: {maxRestarts: 0}\n  replicatedJobs:\n    - name: w\n      replicas: 1\n      template:\n        spec:\n")
	for line := range strings.Lines(spec) {
		if line != "\n" {
			b.WriteString("        ")
		}
		b.WriteString(line)
	}
	return b.String()
}

// suspended is the line of the Job that moves up into the JobSet.
const suspended = "  suspend: true # until Kueue lets it start\n"

// Slurm returns a script for sbatch.
func Slurm(o SlurmOptions) (string, error) {
	if err := o.complete(); err != nil {
		return "", fmt.Errorf("deploy to Slurm: %w", err)
	}
	var b strings.Builder
	if err := slurmTemplate.Execute(&b, &o); err != nil {
		return "", fmt.Errorf("deploy to Slurm: %w", err)
	}
	return b.String(), nil
}

func (o *SlurmOptions) complete() error {
	if err := o.Options.complete(); err != nil {
		return err
	}
	o.Binary = cmp.Or(o.Binary, "culprit")
	o.CPUs = cmp.Or(o.CPUs, 2)
	o.Memory = cmp.Or(o.Memory, "4G")
	o.Time = cmp.Or(o.Time, DefaultTime)
	switch {
	case o.CPUs < 1 || o.Time < 2*o.Grace:
		return fmt.Errorf("%d CPUs for %v: want at least one, and twice the grace period of %v", o.CPUs, o.Time, o.Grace)
	case (o.CertificateFile == "") != (o.KeyFile == ""):
		return errors.New("a certificate for NATS and its key go together")
	case !slurmMemory.MatchString(o.Memory):
		return fmt.Errorf("%q isn't a size as Slurm writes it: 4G, 500M", o.Memory)
	}
	for _, word := range []string{o.Partition, o.Account} {
		if word != "" && !slurmWord.MatchString(word) {
			return fmt.Errorf("%q is no name of a partition or account", word)
		}
	}
	for _, path := range []string{o.Binary, o.CredentialsFile, o.CAFile, o.CertificateFile, o.KeyFile, o.APIKeyFile} {
		relative := !strings.HasPrefix(path, "/") && (path != o.Binary || strings.Contains(path, "/"))
		if path != "" && (relative || strings.ContainsAny(path, "\x00\r\n")) {
			return fmt.Errorf("%q: want a whole path, as it is on the nodes", path)
		}
	}
	return nil
}

// Args are the worker's arguments but for its name, which the script makes.
func (o *SlurmOptions) Args() []string {
	args := o.args()
	if o.CredentialsFile != "" {
		args = append(args, "--nats-creds="+o.CredentialsFile)
	}
	if o.CAFile != "" {
		args = append(args, "--nats-ca="+o.CAFile)
	}
	if o.CertificateFile != "" {
		args = append(args, "--nats-cert="+o.CertificateFile, "--nats-key="+o.KeyFile)
	}
	return args
}

// Last is the number of the last worker.
func (o *SlurmOptions) Last() int { return o.Workers - 1 }

// Clock is the time limit as sbatch writes it.
func (o *SlurmOptions) Clock() string {
	s := int(math.Ceil(o.Time.Seconds()))
	return fmt.Sprintf("%d-%02d:%02d:%02d", s/86400, s/3600%24, s/60%60, s%60)
}

// quoteYAML writes a string as JSON has it. YAML forbids some characters that
// JSON allows, and none of them is meant.
func quoteYAML(value any) (string, error) {
	if s, ok := value.(string); ok && strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return "", fmt.Errorf("%q holds a character that can't be printed", s)
	}
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(value)
	return strings.TrimSpace(b.String()), err
}

// yamlMap writes a map in one line, its keys in order.
func yamlMap(m map[string]string) (string, error) { return quoteYAML(m) }

func quoteShell(s string) string { return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'" }

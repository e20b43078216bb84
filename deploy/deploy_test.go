package deploy

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	batch "k8s.io/api/batch/v1"
	core "k8s.io/api/core/v1"
	"pgregory.net/rapid"
	jobset "sigs.k8s.io/jobset/api/jobset/v1alpha2"
	"sigs.k8s.io/yaml"
)

// whole asks for everything at once.
func whole() KubernetesOptions {
	return KubernetesOptions{
		Options: Options{
			Name: "load", Workers: 8, NATS: "tls://nats-0.nats:4222,tls://nats-1.nats:4222",
			Labels: map[string]string{"gpu": "8", "zone": "$(HOME)"}, GPUs: 2, Grace: 90 * time.Second, Idle: 10 * time.Minute,
		},
		Image: "registry.example/culprit:1", Namespace: "bench", Queue: "batch",
		CPU: "500m", Memory: "8Gi", Disk: "50Gi", NodeSelector: map[string]string{"pool": "cpu"},
		ServerLabels: map[string]string{"app": "vllm"}, ServerNamespace: "serving",
		CredentialsSecret: SecretKey{"nats", "nats.creds"}, CASecret: SecretKey{"nats-tls", "ca.crt"}, APIKeySecret: SecretKey{"openai", "api-key"},
		CertificateSecret: "worker-tls",
	}
}

func decode[T any](t *testing.T, text string, err error) T {
	t.Helper()
	var v T
	if err != nil {
		t.Fatal(err)
	}
	if err := yaml.UnmarshalStrict([]byte(text), &v); err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	return v
}

func job(t *testing.T, o KubernetesOptions) batch.Job {
	t.Helper()
	text, err := Kubernetes(o)
	return decode[batch.Job](t, text, err)
}

func TestJob(t *testing.T) {
	j := job(t, whole())
	if j.Kind != "Job" || j.APIVersion != "batch/v1" || j.Name != "load" || j.Namespace != "bench" || !*j.Spec.Suspend || j.Labels["kueue.x-k8s.io/queue-name"] != "batch" {
		t.Errorf("got %+v, suspend %v", j.ObjectMeta, j.Spec.Suspend)
	}
	s := j.Spec
	if *s.CompletionMode != batch.IndexedCompletion || *s.Completions != 8 || *s.Parallelism != 8 || *s.BackoffLimitPerIndex != 3 || *s.MaxFailedIndexes != 8 || *s.PodReplacementPolicy != batch.Failed {
		t.Errorf("got %+v", s)
	}
	rules := s.PodFailurePolicy.Rules
	if rules[0].Action != batch.PodFailurePolicyActionIgnore || rules[0].OnPodConditions[0].Type != core.DisruptionTarget || rules[0].OnPodConditions[0].Status != core.ConditionTrue {
		t.Errorf("a drained node counts as a failure: %+v", rules[0])
	}
	if rules[1].Action != batch.PodFailurePolicyActionFailJob || *rules[1].OnExitCodes.ContainerName != s.Template.Spec.Containers[0].Name || rules[1].OnExitCodes.Values[0] != 254 {
		t.Errorf("a usage error is tried again: %+v", rules[1])
	}
	p := s.Template.Spec
	if p.RestartPolicy != core.RestartPolicyNever || *p.TerminationGracePeriodSeconds != 90 || *p.AutomountServiceAccountToken || p.NodeSelector["pool"] != "cpu" {
		t.Errorf("got %+v", p)
	}
	// The selectors of both anti-affinities, the server's and the workers' own.
	away := p.Affinity.PodAntiAffinity
	if term := away.RequiredDuringSchedulingIgnoredDuringExecution[0]; term.TopologyKey != core.LabelHostname || term.LabelSelector.MatchLabels["app"] != "vllm" || term.Namespaces[0] != "serving" {
		t.Errorf("away from the server: %+v", term)
	}
	for key, value := range away.PreferredDuringSchedulingIgnoredDuringExecution[0].PodAffinityTerm.LabelSelector.MatchLabels {
		if s.Template.Labels[key] != value {
			t.Errorf("workers keep apart by a label that they don't have: %s=%s", key, value)
		}
	}
}

func TestContainer(t *testing.T) {
	p := job(t, whole()).Spec.Template.Spec
	c := p.Containers[0]
	want := []string{
		"worker", "--nats=tls://nats-0.nats:4222,tls://nats-1.nats:4222", "--idle=10m0s", "--label=gpu=8", "--label=zone=$$(HOME)",
		"--dir=/work", "--name=load-$(JOB_COMPLETION_INDEX)", "--nats-creds=/run/secrets/nats/nats.creds", "--nats-ca=/run/secrets/nats-ca/ca.crt",
		"--nats-cert=/run/secrets/nats-tls/tls.crt", "--nats-key=/run/secrets/nats-tls/tls.key",
	}
	if d := cmp.Diff(want, c.Args); d != "" || c.Image != "registry.example/culprit:1" {
		t.Errorf("image %s, arguments (-want +got):\n%s", c.Image, d)
	}
	if c.Resources.Requests.Cpu().MilliValue() != 500 || c.Resources.Requests.Memory().Value() != 8<<30 || c.Resources.Requests.StorageEphemeral().Value() != 50<<30 {
		t.Errorf("requests %v", c.Resources.Requests)
	}
	gpus := c.Resources.Limits["nvidia.com/gpu"]
	if _, limited := c.Resources.Limits[core.ResourceCPU]; limited || gpus.Value() != 2 || c.Resources.Limits.Memory().Value() != 8<<30 {
		t.Errorf("limits %v", c.Resources.Limits)
	}
	if !*p.SecurityContext.RunAsNonRoot || *c.SecurityContext.AllowPrivilegeEscalation || !*c.SecurityContext.ReadOnlyRootFilesystem || c.SecurityContext.Capabilities.Drop[0] != "ALL" {
		t.Errorf("security: %+v, %+v", p.SecurityContext, c.SecurityContext)
	}
	// Each mounted path is a volume's, and each path of an argument is mounted.
	for _, m := range c.VolumeMounts {
		at := slices.IndexFunc(p.Volumes, func(v core.Volume) bool { return v.Name == m.Name })
		if at < 0 {
			t.Errorf("%s is mounted and isn't there", m.Name)
			continue
		}
		s := p.Volumes[at].Secret
		if s == nil {
			continue
		}
		for _, item := range s.Items {
			if !slices.ContainsFunc(c.Args, func(a string) bool { return strings.HasSuffix(a, "="+m.MountPath+"/"+item.Path) }) {
				t.Errorf("%s of %s is mounted and not used", item.Path, m.MountPath)
			}
		}
	}
	i := slices.IndexFunc(c.Env, func(e core.EnvVar) bool { return e.Name == "OPENAI_API_KEY" })
	if i < 0 || c.Env[i].Value != "" || c.Env[i].ValueFrom.SecretKeyRef.Name != "openai" || c.Env[i].ValueFrom.SecretKeyRef.Key != "api-key" {
		t.Errorf("the API key isn't taken from its Secret: %+v", c.Env)
	}
}

func TestJobSet(t *testing.T) {
	o := whole()
	want := job(t, o)
	o.JobSet = true
	text, err := Kubernetes(o)
	got := decode[jobset.JobSet](t, text, err)
	if got.APIVersion != jobset.GroupVersion.String() || got.Kind != "JobSet" || !*got.Spec.Suspend || *got.Spec.ReplicatedJobs[0].Template.Spec.Completions != 8 {
		t.Errorf("got\n%s", text)
	}
	want.Spec.Suspend = nil // the JobSet's matter
	if d := cmp.Diff(want.Spec, got.Spec.ReplicatedJobs[0].Template.Spec); d != "" || cmp.Diff(want.Labels, got.Labels) != "" {
		t.Errorf("its job is another than without a JobSet (-want +got):\n%s", d)
	}
}

func TestLeast(t *testing.T) {
	j := job(t, KubernetesOptions{Options: Options{NATS: "nats://nats:4222"}, Image: "culprit"})
	p := j.Spec.Template.Spec
	if *j.Spec.Completions != DefaultWorkers || j.Spec.Suspend != nil || j.Namespace != "" || len(p.Volumes) != 1 || len(p.Containers[0].Env) != 2 ||
		p.Affinity.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution != nil {
		t.Errorf("got %+v", j)
	}
}

// Whatever is asked for, what comes out is a job as Kubernetes has it, with the
// values as they were given, or an error.
func TestAnyOptions(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		text := rapid.OneOf(rapid.String(), rapid.StringMatching(`[a-z0-9.:"'{}#\\$()\-]{0,12}`))
		o := KubernetesOptions{
			Options: Options{Name: text.Draw(r, "name"), NATS: "nats://" + text.Draw(r, "nats"), Labels: map[string]string{text.Draw(r, "key"): text.Draw(r, "value")}},
			Image:   text.Draw(r, "image"), Namespace: text.Draw(r, "namespace"), JobSet: rapid.Bool().Draw(r, "jobset"), CPU: text.Draw(r, "cpu"),
			ServerLabels: map[string]string{text.Draw(r, "server key"): text.Draw(r, "server value")},
		}
		if rapid.Bool().Draw(r, "sound") {
			o.Name, o.NATS, o.Labels, o.Namespace, o.CPU, o.ServerLabels = "", "nats://n:1", nil, "", "", nil
			if rapid.Bool().Draw(r, "any label") {
				o.Labels = map[string]string{"a": text.Draw(r, "label")}
			}
		}
		out, err := Kubernetes(o)
		if err != nil {
			return
		}
		var j batch.Job
		if o.JobSet {
			var s jobset.JobSet
			if err := yaml.UnmarshalStrict([]byte(out), &s); err != nil {
				r.Fatalf("%v\n%s", err, out)
			}
			j.Spec = s.Spec.ReplicatedJobs[0].Template.Spec
		} else if err := yaml.UnmarshalStrict([]byte(out), &j); err != nil {
			r.Fatalf("%v\n%s", err, out)
		}
		c := j.Spec.Template.Spec.Containers[0]
		if want := strings.ToValidUTF8(o.Image, "\uFFFD"); c.Image != want && o.Image == want {
			r.Fatalf("image %q came out as %q", o.Image, c.Image)
		}
	})
}

func TestMistakes(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*KubernetesOptions)
		want   string
	}{
		{"no NATS", func(o *KubernetesOptions) { o.NATS = "" }, "no NATS URL"},
		{"password", func(o *KubernetesOptions) { o.NATS = "nats://a:1,nats://me:hunter2@nats:4222" }, "nats:4222 has a password"},
		{"token", func(o *KubernetesOptions) { o.NATS = "nats://s3cr3t@nats:4222" }, "password or token"},
		{"own machine", func(o *KubernetesOptions) { o.NATS = "nats://127.0.0.1:4222" }, "own machine"},
		{"no image", func(o *KubernetesOptions) { o.Image = "" }, "name the image"},
		{"name", func(o *KubernetesOptions) { o.Name = "Load" }, "lower-case"},
		{"quantity", func(o *KubernetesOptions) { o.Memory = "4GB" }, "4Gi"},
		{"label", func(o *KubernetesOptions) { o.Labels = map[string]string{"gpu": "8 a"} }, "without spaces"},
		{"server label", func(o *KubernetesOptions) { o.ServerLabels = map[string]string{"app": "a b"} }, "no label"},
		{"workers", func(o *KubernetesOptions) { o.Workers = -1 }, "want 1 to"},
		{"grace", func(o *KubernetesOptions) { o.Grace = -1 }, "at least a second"},
		{"certificate", func(o *KubernetesOptions) { o.CertificateSecret = "My Secret" }, "no name of a Secret"},
		{"idle", func(o *KubernetesOptions) { o.Idle = -1 }, "time without work"},
	} {
		o := whole()
		c.change(&o)
		text, err := Kubernetes(o)
		if err == nil || !strings.Contains(err.Error(), c.want) || text != "" {
			t.Errorf("%s: got %q, %v; want an error with %q", c.name, text, err, c.want)
		}
		if err != nil && (strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "s3cr3t")) {
			t.Errorf("%s: the error tells the secret: %v", c.name, err)
		}
	}
	for _, text := range []string{"Upper", "a/b/c", "/key", "a b"} {
		if s, err := ParseSecretKey(text, "key"); err == nil {
			t.Errorf("%q: got %+v", text, s)
		}
	}
	if s, err := ParseSecretKey("nats/user.creds", "key"); err != nil || s != (SecretKey{"nats", "user.creds"}) {
		t.Errorf("got %+v, %v", s, err)
	}
}

func wholeSlurm() SlurmOptions {
	return SlurmOptions{
		Options: Options{Name: "load", Workers: 8, NATS: "nats://head:4222", Labels: map[string]string{"it's": `"$(id)"`}, GPUs: 1, Grace: 100 * time.Second, Idle: 90 * time.Second},
		Binary:  "/opt/it's here/culprit", Partition: "gpu", Account: "me", Memory: "8G", Time: 26 * time.Hour,
		CredentialsFile: "/home/me/nats.creds", CertificateFile: "/home/me/nats.pem", KeyFile: "/home/me/nats key.pem", APIKeyFile: "/home/me/api key",
	}
}

func TestSlurm(t *testing.T) {
	text, err := Slurm(wholeSlurm())
	if err != nil {
		t.Fatal(err)
	}
	directives, body, _ := strings.Cut(text, "set -euo pipefail")
	if strings.Contains(body, "#SBATCH") {
		t.Error("sbatch reads no directive after the first command")
	}
	for _, want := range []string{
		"--array=0-7\n", "--cpus-per-task=2\n", "--mem=8G\n", "--gpus-per-node=1\n", "--partition=gpu\n", "--account=me\n",
		"--time=1-02:00:00\n", "--signal=TERM@100\n", "--requeue\n", "--export=NONE\n",
	} {
		if !strings.Contains(directives, want) {
			t.Errorf("no %q in\n%s", want, directives)
		}
	}
	check := func(name string, args ...string) {
		path, err := exec.LookPath(name)
		if err != nil {
			t.Logf("no %s here", name)
			return
		}
		c := exec.Command(path, args...)
		c.Stdin = strings.NewReader(text)
		if out, err := c.CombinedOutput(); err != nil {
			t.Errorf("%s: %v\n%s\n%s", name, err, out, text)
		}
	}
	check("bash", "-n")
	check("shellcheck", "-S", "warning", "-s", "bash", "-") // below that it wonders at the label's $(id)
}

// The script is run, with a srun that shows what it was given.
func TestSlurmScript(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Skip(err)
	}
	dir := t.TempDir()
	key := filepath.Join(dir, "it's the key")
	write := func(path, text string, mode os.FileMode) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
	}
	write(key, "sk-1234\n", 0o600)
	write(filepath.Join(dir, "srun"), "#!"+bash+"\nprintf '%s\\n' \"$@\" \"key=$OPENAI_API_KEY\" \"export=$SLURM_EXPORT_ENV\" \"in=$PWD\"\n", 0o755)
	o := wholeSlurm()
	o.APIKeyFile = key
	text, err := Slurm(o)
	if err != nil || strings.Contains(text, "sk-1234") {
		t.Fatal(text, err)
	}
	c := exec.Command(bash)
	c.Stdin = strings.NewReader(text)
	c.Env = []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "SLURM_ARRAY_TASK_ID=3", "TMPDIR=" + dir}
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	got := strings.Split(strings.TrimSpace(string(out)), "\n")
	last := len(got) - 1
	want := []string{
		"--kill-on-bad-exit=1", "/opt/it's here/culprit", "worker", "--nats=nats://head:4222", "--idle=1m30s", `--label=it's="$(id)"`,
		"--nats-creds=/home/me/nats.creds", "--nats-cert=/home/me/nats.pem", "--nats-key=/home/me/nats key.pem", "--dir=" + strings.TrimPrefix(got[last], "in="), "--name=load-3", "key=sk-1234", "export=ALL",
	}
	if d := cmp.Diff(want, got[:last]); d != "" || !strings.HasPrefix(got[last], "in="+dir+"/culprit-") {
		t.Errorf("got %s (-want +got):\n%s", got[last], d)
	}
	if _, err := os.Stat(strings.TrimPrefix(got[last], "in=")); !os.IsNotExist(err) {
		t.Errorf("its folder is left: %v", err)
	}
}

func TestSlurmMistakes(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(*SlurmOptions)
		want   string
	}{
		{"partition", func(o *SlurmOptions) { o.Partition = "a b" }, "partition"},
		{"injection", func(o *SlurmOptions) { o.Account = "a\n#SBATCH --uid=0" }, "account"},
		{"half a certificate", func(o *SlurmOptions) { o.KeyFile = "" }, "go together"},
		{"relative", func(o *SlurmOptions) { o.APIKeyFile = "key" }, "whole path"},
		{"relative binary", func(o *SlurmOptions) { o.Binary = "./culprit" }, "whole path"},
		{"too short", func(o *SlurmOptions) { o.Time = time.Minute }, "grace"},
		{"memory", func(o *SlurmOptions) { o.Memory = "4Gi" }, "4G"},
	} {
		o := wholeSlurm()
		c.change(&o)
		if text, err := Slurm(o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %q, %v; want an error with %q", c.name, text, err, c.want)
		}
	}
}

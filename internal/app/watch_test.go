package app

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/grafana/grafana-foundation-sdk/go/cog/plugins"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	apps "k8s.io/api/apps/v1"
	"sigs.k8s.io/yaml"

	"github.com/culprit-project/culprit/watch"
)

const watchExamples = "../../examples/watch"

func readExample(t *testing.T, name string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(watchExamples, name))
	if err != nil {
		t.Fatal(err)
	}
	return text
}

// TestExamplesNameMetrics: the dashboard and the rules ask for nothing that a
// watch doesn't export, and the dashboard shows all that it does.
func TestExamplesNameMetrics(t *testing.T) {
	m := newWatchMetrics("m", "vllm")
	m.seen(watch.Conversation{Ops: 1, Damaged: 1, Classes: []string{"WrongArgument"}, FirstMS: []float64{1}, ChunkMS: []float64{1}, TotalMS: []float64{2}}, 0.5)
	families, err := m.registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	labels := map[string][]string{} // of each series
	for _, f := range families {
		var names []string
		for _, l := range f.GetMetric()[0].GetLabel() {
			names = append(names, l.GetName())
		}
		if f.GetMetric()[0].GetHistogram() != nil {
			labels[f.GetName()+"_bucket"] = append(names, "le")
			continue
		}
		labels[f.GetName()] = names
	}
	shown := map[string]bool{}
	for _, expr := range slices.Concat(dashboardQueries(t), rules(t)) {
		metrics := regexp.MustCompile(`\b(culprit|gen_ai)_\w+`).FindAllString(expr, -1)
		for _, name := range metrics {
			if _, ok := labels[name]; !ok {
				t.Errorf("%s: a watch doesn't export %s", expr, name)
			}
			shown[name] = true
			for _, by := range regexp.MustCompile(`by \((\w+)\)|\{(\w+)=`).FindAllStringSubmatch(expr, -1) {
				if label := by[1] + by[2]; !slices.Contains(labels[name], label) {
					t.Errorf("%s: %s has no label %s", expr, name, label)
				}
			}
		}
		if len(metrics) == 0 {
			t.Errorf("%s asks for no metric", expr)
		}
	}
	for name := range labels {
		if !shown[name] {
			t.Errorf("nothing shows %s", name)
		}
	}
}

func rules(t *testing.T) (exprs []string) {
	t.Helper()
	var file struct {
		Groups []struct {
			Name  string `json:"name"`
			Rules []struct {
				Alert       string            `json:"alert"`
				Expr        string            `json:"expr"`
				For         string            `json:"for"`
				Labels      map[string]string `json:"labels"`
				Annotations map[string]string `json:"annotations"`
			} `json:"rules"`
		} `json:"groups"`
	}
	if err := yaml.UnmarshalStrict(readExample(t, "alerts.yaml"), &file); err != nil {
		t.Fatal(err)
	}
	for _, g := range file.Groups {
		for _, r := range g.Rules {
			exprs = append(exprs, r.Expr)
		}
	}
	return exprs
}

// TestExampleDashboard reads it by Grafana's own schema, in which an unknown
// member is an error.
func TestExampleDashboard(t *testing.T) {
	plugins.RegisterDefaultPlugins()
	var d dashboard.Dashboard //nolint:staticcheck // the newer schema is of a resource that older Grafanas can't import
	// Where there is no mistake, this version returns an empty list of them as
	// an error.
	if err := d.UnmarshalJSONStrict(readExample(t, "grafana.json")); err != nil && err.Error() != "" {
		t.Error(err)
	}
	dashboardQueries(t)
}

// dashboardQueries are what the panels ask for, read by Grafana's schema, too.
func dashboardQueries(t *testing.T) (exprs []string) {
	t.Helper()
	var d struct {
		Panels []struct {
			Targets []json.RawMessage `json:"targets"`
		} `json:"panels"`
	}
	if err := json.Unmarshal(readExample(t, "grafana.json"), &d); err != nil {
		t.Fatal(err)
	}
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			var q prometheus.Dataquery
			if err := q.UnmarshalJSONStrict(target); err != nil && err.Error() != "" {
				t.Error(err)
			}
			exprs = append(exprs, q.Expr)
		}
	}
	return exprs
}

func TestExampleManifest(t *testing.T) {
	var d apps.Deployment
	if err := yaml.UnmarshalStrict(readExample(t, "kubernetes.yaml"), &d); err != nil {
		t.Fatal(err)
	}
	pod := d.Spec.Template
	for name, value := range d.Spec.Selector.MatchLabels {
		if pod.Labels[name] != value {
			t.Errorf("the Deployment looks for %s=%s, its pods have %q", name, value, pod.Labels[name])
		}
	}
	var volumes []string
	for _, v := range pod.Spec.Volumes {
		volumes = append(volumes, v.Name)
	}
	c := pod.Spec.Containers[0]
	for _, m := range c.VolumeMounts {
		if !slices.Contains(volumes, m.Name) {
			t.Errorf("no volume %s", m.Name)
		}
		if output := c.Args[slices.Index(c.Args, "--output")+1]; !strings.HasPrefix(output, m.MountPath+"/") {
			t.Errorf("writes to %s, which isn't below %s", output, m.MountPath)
		}
	}
	port := pod.Annotations["prometheus.io/port"]
	if listen := c.Args[slices.Index(c.Args, "--listen")+1]; !strings.HasSuffix(listen, ":"+port) {
		t.Errorf("listens on %s, is scraped on port %s", listen, port)
	}
}

// tool skips where a tool isn't installed, unless it must be.
func tool(t *testing.T, name, debian string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	switch {
	case err == nil:
	case os.Getenv("CULPRIT_EXAMPLES") != "":
		t.Fatalf("%s is needed (Debian: %s): %v", name, debian, err)
	default:
		t.Skipf("no %s (Debian: %s)", name, debian)
	}
	return path
}

// TestExampleRules runs the rules' own tests: examples/watch/alerts_test.yaml.
func TestExampleRules(t *testing.T) {
	said, err := exec.Command(tool(t, "promtool", "prometheus"), "test", "rules", filepath.Join(watchExamples, "alerts_test.yaml")).CombinedOutput()
	if err != nil {
		t.Errorf("%v\n%s", err, said)
	}
}

// TestExampleUnit lets systemd read the unit, whose program needn't be installed.
func TestExampleUnit(t *testing.T) {
	analyze := tool(t, "systemd-analyze", "systemd")
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	unit := strings.ReplaceAll(string(readExample(t, "culprit-watch.service")), "/usr/local/bin/culprit", self)
	path := filepath.Join(t.TempDir(), "culprit-watch.service")
	if err := os.WriteFile(path, []byte(unit), 0o644); err != nil {
		t.Fatal(err)
	}
	// It exits with 0 for a setting that it doesn't know, but says so.
	said, err := exec.Command(analyze, "verify", path).CombinedOutput()
	if err != nil || strings.Contains(string(said), "culprit-watch") {
		t.Errorf("%v\n%s", err, said)
	}
}

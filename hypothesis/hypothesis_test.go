package hypothesis

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/ledger"
	"github.com/culprit-project/culprit/target"
)

func two(name, suspect, safe string) design.Factor {
	return design.Factor{Name: name, Levels: []design.Level{{Name: safe, Role: design.Safe}, {Name: suspect, Role: design.Suspect}}}
}

func subject() Subject {
	graph, concurrency := two("graph", "captured", "eager"), two("concurrency", "80", "1")
	graph.Attest = "server_info.disable_cuda_graph == (level == \"safe\")"
	concurrency.ClientSide = true
	return Subject{
		Space:     design.Space{Factors: []design.Factor{two("index_k", "bf16", "fp8"), graph, concurrency}},
		Processes: []string{"prefill", "decode"},
		Logs:      []string{"wedge"},
		Probes:    []string{"host.token_granular"},
	}
}

func parsed(t testing.TB, text string) *Prediction {
	t.Helper()
	p, err := Parse(text, subject())
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestParse(t *testing.T) {
	for _, text := range []string{
		"rate(graph=eager) < 0.01",
		"rate(graph=safe, others=safe) >= 1e-2",
		"0.01 > rate()",
		"rate(graph=eager) < rate() / 3",
		"rate(index_k=fp8) < 0.5 * rate(index_k=bf16)",
		"probe(host.token_granular, pool=index_k) > 0",
		`metric("sglang:x_total", graph=eager) == 0`,
		"logs(wedge) > 0",
		`attest(decode, env.SGLANG_X) == "1"`,
		`attest(decode, env.SGLANG_X == "1" and server_info.tp_size > 1)`,
		`not attest(argv contains "--disable-cuda-graph")`,
		"needed(graph, index_k)",
		"not needed(concurrency)",
	} {
		if _, err := Parse(text, subject()); err != nil {
			t.Errorf("%v", err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"rate(grph=eager) < 0.01", `unknown factor "grph"; nearest: "graph"`},
		{"rate(graph=eagre) < 0.01", `factor graph: unknown level "eagre"; nearest: "eager"`},
		{"probe(host.token_granula) > 0", `unknown probe "host.token_granula"; nearest: "host.token_granular"`},
		{"logs(wdge) > 0", `unknown log pattern "wdge"; nearest: "wedge"`},
		{"attest(decod, env.X) == 1", `unknown process "decod"; nearest: "decode"`},
		{"attest(decode, environ.X) == 1", `unknown name "environ"`},
		{"rte(graph=eager) < 1", `no rte(...); nearest: "rate"`},
		{"needed(grap)", `unknown factor "grap"; nearest: "graph"`},
		{"rate() == 0", "compared by < or >"},
		{"rate() > 18", "isn't between 0 and 1"},
		{"rate() < 0.00001", "takes more than 30000 requests"},
		{"rate() > 0.1 and rate() < 0.2", "one prediction for each"},
		{"rate()", "compared with something"},
		{"0.1 < 0.2", "says nothing of the server"},
		{"rate(graph=) < 0.1", "wants a value"},
		{"rate(others=none) < 0.1", "want failing, safe or any"},
		{"rate() < probe(host.token_granular)", "can't be compared"},
		{"not rate() < 0.1", "want a number or one of"},
		{"", "unexpected token"},
		{"rate( < 0.1", "unexpected token"},
	} {
		if _, err := Parse(tt.text, subject()); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.want)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add("rate(graph=eager) < rate() / 3")
	f.Add(`attest(decode, env.X) == "1"`)
	f.Add(`probe(host.token_granular, pool="a b") > 0`)
	f.Add("a=b=(,)=")
	s := subject()
	f.Fuzz(func(t *testing.T, text string) {
		p, err := Parse(text, s)
		if err != nil {
			return
		}
		o := Observation{Arm: s.Space.Failing(), Requests: 100, Failures: 20, Counts: Counts{"a": 1}, Attestation: &target.Attestation{}}
		p.Judge(s.Space, []Observation{o})
		Next(s.Space, []Candidate{{"a", []*Prediction{p}}}, Options{})
	})
}

// run is an observation of the failing arm with some levels changed.
func run(launch string, requests, failures int, levels ...string) Observation {
	arm := subject().Space.Failing()
	for _, l := range levels {
		name, level, _ := strings.Cut(l, "=")
		arm[name] = level
	}
	return Observation{Arm: arm, Launch: launch, Requests: requests, Failures: failures}
}

func repeat(n int, o Observation) (all []Observation) {
	for i := range n {
		o.Launch = fmt.Sprint(o.Arm.Hash(), i)
		all = append(all, o)
	}
	return all
}

func info(t *testing.T, text string) *target.Attestation {
	t.Helper()
	return &target.Attestation{Endpoints: []target.Endpoint{{Path: "/server_info", Body: []byte(text)}}}
}

func TestJudge(t *testing.T) {
	counted := run("a", 320, 57)
	counted.Counts = Counts{
		`culprit_lab_copies_total{branch="pages",pool="index_k"}`: 12, `culprit_lab_copies_total{branch="token_granular",pool="latent"}`: 5,
		"probe!host.token_granular": 5, `probe!host.token_granular{pool="latent",page=64}`: 5, "logs!wedge": 3,
	}
	quiet := counted
	quiet.Failures = 0
	void := run("a", 0, 0, "graph=eager")
	void.Void = "factor graph: server_info.disable_cuda_graph is false"
	eagerLive := Observation{Live: design.Arm{"graph": "eager", "concurrency": "80"}, Requests: 320}
	capturedLive := Observation{Live: design.Arm{"graph": "captured", "concurrency": "80"}, Requests: 320, Failures: 57}
	unknownLive := Observation{Live: design.Arm{"concurrency": "80"}, Requests: 320}
	attested := Observation{Live: design.Arm{"graph": "captured"}, Attestation: info(t, `{"index_k_store": "fused"}`)}
	trap := Observation{Live: design.Arm{"graph": "eager"}, Attestation: info(t, `{"index_k_store": "scatter"}`)}
	finding := Observation{Finding: &FindingResult{Causes: []design.Arm{{"graph": "captured", "index_k": "bf16"}}, Error: 0.01}}
	for _, tt := range []struct {
		name, prediction string
		all              []Observation
		want             ledger.Verdict // empty: doesn't bear on it
		text             string
	}{
		{"clean arm", "rate(graph=eager) < 0.05", repeat(5, run("", 320, 0, "graph=eager")), ledger.Supported, "0 of 1600 broken (0%) in 5 launches"},
		{"failing arm", "rate(graph=eager) < 0.05", repeat(3, run("", 320, 57, "graph=eager")), ledger.Refuted, "171 of 960"},
		{"one launch says little of clean", "rate(graph=eager) < 0.05", repeat(1, run("", 320, 0, "graph=eager")), ledger.Undecided, ""},
		{"other direction", "rate(graph=eager) > 0.05", repeat(5, run("", 320, 0, "graph=eager")), ledger.Refuted, ""},
		{"one launch in parts is one launch", "rate(graph=eager) < 0.05", slices.Repeat([]Observation{run("x", 320, 0, "graph=eager")}, 8), ledger.Undecided, "in 1 launch"},
		{"another arm", "rate(graph=eager) < 0.05", repeat(4, run("", 320, 0)), "", ""},
		{"another factor differs", "rate(graph=eager) < 0.05", repeat(4, run("", 320, 0, "graph=eager", "index_k=fp8")), "", ""},
		{"any others", "rate(graph=eager, others=any) < 0.05", repeat(5, run("", 320, 0, "graph=eager", "index_k=fp8")), ledger.Supported, ""},
		{"void", "rate(graph=eager) < 0.05", []Observation{void}, ledger.Rejected, "disable_cuda_graph is false"},
		{"comparison", "rate(graph=eager) < rate() / 3", append(repeat(5, run("", 320, 57)), repeat(5, run("", 320, 0, "graph=eager"))...), ledger.Supported, "against 285 of 1600"},
		{"comparison, one arm alone", "rate(graph=eager) < rate() / 3", repeat(5, run("", 320, 57)), ledger.Undecided, "an arm that wasn't run yet against 285 of 1600"},
		{"comparison of equals", "rate(graph=eager) < rate() / 3", append(repeat(6, run("", 320, 57)), repeat(6, run("", 320, 60, "graph=eager"))...), ledger.Refuted, ""},

		{"live mismatch", "rate() > 0.05", []Observation{eagerLive}, ledger.Rejected, "graph was eager in the live server, and the prediction is about captured"},
		{"live match counts, and one launch isn't enough", "rate() > 0.05", []Observation{capturedLive}, ledger.Undecided, ""},
		{"live unknown", "rate() > 0.05", []Observation{unknownLive}, ledger.Rejected, "whether graph was captured can't be told"},

		{"count", "metric(copies, branch=pages, pool=index_k) > 0", []Observation{counted}, ledger.Supported, "12, with 57 of 320"},
		{"never hit", "metric(copies, branch=token_granular, pool=index_k) > 0", []Observation{counted}, ledger.Refuted, "0, with 57"},
		{"never hit, but nothing failed", "metric(copies, branch=token_granular, pool=index_k) > 0", []Observation{quiet}, ledger.Undecided, "without the failure"},
		{"misspelt label", "metric(copies, branch=token_granular, pool=index_kk) > 0", []Observation{counted}, ledger.Undecided, `nothing in the run has pool=index_kk; nearest: "index_k"`},
		{"misspelt metric", "metric(copeis) > 0", []Observation{counted}, ledger.Undecided, `no metric "copeis"; nearest`},
		{"probe", "probe(host.token_granular, pool=index_k) > 0", []Observation{counted}, ledger.Refuted, ""},
		{"probe, all hits", "probe(host.token_granular) == 5", []Observation{counted}, ledger.Supported, ""},
		{"probe by a number", "probe(host.token_granular, page=64) == 5", []Observation{counted}, ledger.Supported, ""},
		{"no such probe", "probe(host.token_granular, poool=index_k) > 0", []Observation{counted}, ledger.Undecided, `no`},
		{"probe against another", "probe(host.token_granular, pool=index_k) < probe(host.token_granular, pool=latent)", []Observation{counted}, ledger.Supported, ""},
		{"logs", "logs(wedge) > 2", []Observation{counted}, ledger.Supported, ""},

		{"dead code", `attest(server_info.index_k_store) == "scatter"`, []Observation{attested}, ledger.Refuted, "fused"},
		{"live setting", `attest(server_info.index_k_store) == "fused"`, []Observation{attested}, ledger.Supported, ""},
		{"not", `not attest(server_info.index_k_store == "scatter")`, []Observation{attested}, ledger.Supported, ""},
		{"the timing trap", `attest(server_info.index_k_store) == "scatter"`, []Observation{trap}, ledger.Rejected, "graph was eager"},
		{"asked of that arm", `attest(server_info.index_k_store, graph=eager) == "scatter"`, []Observation{trap}, ledger.Supported, ""},

		{"finding", "needed(graph, index_k)", []Observation{finding}, ledger.Supported, ""},
		{"finding without", "needed(concurrency)", []Observation{finding}, ledger.Refuted, ""},
		{"not needed", "not needed(concurrency)", []Observation{finding}, ledger.Supported, ""},
		{"no finding", "needed(graph)", []Observation{counted}, "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			j, bears := parsed(t, tt.prediction).Judge(subject().Space, tt.all)
			if !bears {
				j.Verdict = ""
			}
			if j.Verdict != tt.want || !strings.Contains(j.Text, tt.text) {
				t.Errorf("%s: %s, %q, error %g; want %s, %q", tt.prediction, j.Verdict, j.Text, j.Error, tt.want, tt.text)
			}
			if (j.Verdict == ledger.Supported || j.Verdict == ledger.Refuted) && j.Error > Error {
				t.Errorf("error is %g", j.Error)
			}
		})
	}
}

// Looking after each launch, a true prediction is refuted in at most a share of
// Error of all worlds, and so is a comparison.
func TestErrorHolds(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	space := subject().Space
	for _, tt := range []struct {
		prediction  string
		left, right float64 // rates
		worlds      int
	}{
		{"rate(graph=eager) < 0.05", 0.05, 0, 80},
		{"rate(graph=eager) > 0.05", 0.05, 0, 80},
		{"rate(graph=eager) < rate() / 3", 0.06, 0.18, 25},
		{"rate(graph=eager) > rate() / 3", 0.06, 0.18, 25},
	} {
		p := parsed(t, tt.prediction)
		wrong := 0
		for range tt.worlds {
			var all []Observation
			for i := range 8 {
				for _, arm := range []struct {
					rate  float64
					level string
				}{{tt.left, "graph=eager"}, {tt.right, "graph=captured"}} {
					o := run(string(rune('a'+2*i))+arm.level, 160, 0, arm.level)
					// Launches differ: half of them fail 1.6 times as often, half 0.4 times.
					rate := arm.rate * []float64{0.4, 1.6}[random.IntN(2)]
					for range o.Requests {
						if random.Float64() < rate {
							o.Failures++
						}
					}
					all = append(all, o)
				}
				if j, _ := p.Judge(space, all); j.Verdict == ledger.Refuted {
					wrong++
					break
				}
			}
		}
		if share := float64(wrong) / float64(tt.worlds); share > Error {
			t.Errorf("%s: refuted in %.3f of the worlds in which it is just so", tt.prediction, share)
		}
	}
}

func candidates(t *testing.T, of map[string][]string) (list []Candidate) {
	for _, name := range slices.Sorted(func(yield func(string) bool) {
		for name := range of {
			if !yield(name) {
				return
			}
		}
	}) {
		c := Candidate{Name: name}
		for _, text := range of[name] {
			c.Predictions = append(c.Predictions, parsed(t, text))
		}
		list = append(list, c)
	}
	return list
}

func TestNext(t *testing.T) {
	open := candidates(t, map[string][]string{
		"race":   {"rate(graph=eager) < 0.05", "rate(index_k=fp8) < 0.05"},
		"stride": {"rate(graph=eager) > 0.05", "rate(index_k=fp8) < 0.05"},
	})
	list := Next(subject().Space, open, Options{})
	if len(list) == 0 {
		t.Fatal("no experiment")
	}
	best := list[0]
	if got := best.Arms[0]["graph"]; got != "eager" || len(best.Arms) != 1 {
		t.Errorf("best is %v, want eager: it tells the two apart", best.Arms)
	}
	if d := cmp.Diff([][2]string{{"race", "stride"}}, best.Settles); d != "" {
		t.Errorf("settles (-want +got):\n%s", d)
	}
	for _, o := range best.Outcomes {
		want := []string{"race"}
		if strings.Contains(o.Text, "below") {
			want = []string{"stride"}
		}
		if !slices.Equal(o.Refutes, want) {
			t.Errorf("%s refutes %v, want %v", o.Text, o.Refutes, want)
		}
	}
	if d := cmp.Diff([][2]string{{"race", "stride"}}, Contradictions(subject().Space, open)); d != "" {
		t.Errorf("contradictions (-want +got):\n%s", d)
	}
}

// What investigators disagree about comes first, though another experiment is
// cheaper.
func TestNextDisputed(t *testing.T) {
	open := candidates(t, map[string][]string{
		"a": {"rate(graph=eager) < 0.01"},
		"b": {"rate(graph=eager) > 0.01"},
		"c": {`attest(decode, env.X) == "1"`, "probe(host.token_granular) > 0"},
		"d": {`attest(decode, env.X) == "2"`, "probe(host.token_granular) == 0"},
	})
	first := func(o Options) string { return Next(subject().Space, open, o)[0].Asks[0].Question }
	if got := first(Options{}); !strings.HasPrefix(got, "attest") {
		t.Errorf("undisputed: %s comes first, want the cheap one", got)
	}
	if got := first(Options{Disputed: [][2]string{{"b", "a"}}}); got != "rate(graph=eager)" {
		t.Errorf("disputed: %s comes first, want rate(graph=eager)", got)
	}
}

func TestNextForbidden(t *testing.T) {
	space := subject().Space
	space.Forbidden = []design.Arm{{"graph": "eager", "index_k": "bf16"}}
	list := Next(space, candidates(t, map[string][]string{"a": {"rate(graph=eager) < 0.05"}}), Options{})
	if len(list) != 0 {
		t.Errorf("%v can't be run", list[0].Arms)
	}
}

func TestCountsOf(t *testing.T) {
	events := []*history.Event{
		{Kind: history.Metrics, Values: map[string]float64{`x_total{a="1"}`: 5, "running": 3}},
		{Kind: history.Probe, Name: "pack", Values: map[string]float64{"p": 7, `p{pool="a"}`: 7}},
		{Kind: history.Metrics, Values: map[string]float64{`x_total{a="1"}`: 9, "running": 2}},
		{Kind: history.Metrics, Values: map[string]float64{`x_total{a="1"}`: 1}}, // began anew
		{Kind: history.Probe, Name: "pack", Values: map[string]float64{"p": 9, `p{pool="a"}`: 9}},
		{Kind: history.Log, Name: "wedge", Values: map[string]float64{"lines": 2}},
		{Kind: history.Log, Name: "cache", Text: "cold"},
	}
	got, err := CountsOf(func() (*history.Event, error) {
		if len(events) == 0 {
			return nil, nil
		}
		e := events[0]
		events = events[1:]
		return e, nil
	})
	if err != nil {
		t.Fatal(err)
	}
	want := Counts{`x_total{a="1"}`: 5, "running": 3, "probe!p": 9, `probe!p{pool="a"}`: 9, "logs!wedge": 2}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("counts (-want +got):\n%s", d)
	}
}

func TestOdds(t *testing.T) {
	settled := map[*Prediction]ledger.Verdict{
		parsed(t, "rate(graph=eager) < 0.05"):                 ledger.Supported,
		parsed(t, "rate(index_k=fp8) < 0.05"):                 ledger.Refuted,
		parsed(t, "rate(concurrency=1) < 0.05"):               ledger.Undecided,
		parsed(t, "rate(concurrency=1, graph=eager) < 0.05"):  ledger.Supported,
		parsed(t, "rate(concurrency=1, others=safe) < 0.05"):  ledger.Supported,
		parsed(t, "probe(host.token_granular, pool=x) > 0.5"): ledger.Supported,
	}
	want := map[string]float64{"graph": moreLikely, "index_k": 1. / moreLikely}
	if d := cmp.Diff(want, Odds(subject().Space, settled)); d != "" {
		t.Errorf("odds (-want +got):\n%s", d)
	}
}

func TestReadFiles(t *testing.T) {
	dir := t.TempDir()
	write := func(text string) {
		t.Helper()
		if err := os.MkdirAll(filepath.Join(dir, Dir), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, Dir, "a.yaml"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if list, _, err := ReadFiles(dir); err != nil || len(list) != 0 {
		t.Errorf("no files: %v, %v", list, err)
	}
	write("- name: a\n  statement: b\n  predictions: [rate() > 0.1]\n")
	list, sources, err := ReadFiles(dir)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff([]Written{{"a", "b", []string{"rate() > 0.1"}}}, list); d != "" || sources[0] != "hypotheses/a.yaml" {
		t.Errorf("%s, %v", d, sources)
	}
	for _, tt := range []struct{ text, want string }{
		{"- name: a\n  sentence: b\n", "sentence"},
		{"- name: a\n- name: a\n", "is in"},
		{"name: a", "want a list"},
	} {
		write(tt.text)
		if _, _, err := ReadFiles(dir); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%q: %v, want %q", tt.text, err, tt.want)
		}
	}
	for _, w := range []Written{{"A b", "x", []string{"rate() > 0.1"}}, {"a", " ", []string{"rate() > 0.1"}}, {"a", "x", nil}, {"a", "x", []string{"rate() > 0.1", "nonsense"}}} {
		if _, err := w.Check(subject()); err == nil {
			t.Errorf("%+v passed", w)
		}
	}
}

// What one server counts by itself, probes count in another: a prediction reads
// the same on both.
func TestProbeForMetric(t *testing.T) {
	lab := Counts{`culprit_lab_copies_total{branch="token",pool="a"}`: 3, `culprit_lab_copies_total{branch="page",pool="a"}`: 4}
	probed := Counts{"probe!copies": 7, `probe!copies{branch="token",pool="a"}`: 3, `probe!copies{branch="page",pool="a"}`: 4}
	both := Counts{"copies_total": 1, "probe!copies": 2}
	s := subject()
	s.Probes = []string{"copies"}
	for _, tt := range []struct {
		text   string
		counts Counts
		want   float64
	}{
		{"metric(copies) > 0", lab, 7},
		{"metric(copies) > 0", probed, 7},
		{"metric(copies, branch=token) > 0", lab, 3},
		{"metric(copies, branch=token) > 0", probed, 3},
		{"probe(copies, branch=token) > 0", probed, 3},
		{"probe(copies) > 0", both, 2},
		{"metric(copies) > 0", both, 1},
	} {
		p, err := Parse(tt.text, s)
		if err != nil {
			t.Fatal(err)
		}
		got, err := p.left.count(tt.counts)
		if err != nil || got != tt.want {
			t.Errorf("%s on %v: %g, %v, want %g", tt.text, tt.counts, got, err, tt.want)
		}
	}
	p, err := Parse("probe(copies) > 0", s)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := p.left.count(lab); err == nil || !strings.Contains(err.Error(), `the run has no probe "copies"; nearest: "culprit_lab_copies_total"`) {
		t.Errorf("got %v", err)
	}
}

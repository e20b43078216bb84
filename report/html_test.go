package report

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/ledger"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// hostile is what a model or a server could write to take a page over, in any
// of the contexts that a page has. ran is what it would leave behind.
var hostile = []string{
	`</pre></code></details></style></title></svg><script>document.title='ran';window.ran=1</script>`,
	`"><img src=x onerror="window.ran=1"><svg onload=window.ran=1>`,
	`javascript:window.ran=1`,
	`' onmouseover='window.ran=1' x='`,
	`<iframe srcdoc="<script>parent.ran=1</script>"></iframe><base href=//evil.example>`,
	`{{.}} <!-- --> <![CDATA[ ]]> & &lt;script&gt; {{template "run"}}`,
	"\x00\x1b[31m\u202egnp.exe \u2066\ufeff \xff\xfe",
	`@import url(//evil.example/x.css); body{display:none} expression(window.ran=1)`,
	`<meta http-equiv=refresh content="0;url=//evil.example"><link rel=stylesheet href=//evil.example>`,
}

// hostileHunt is a hunt's directory in which every text that somebody else
// wrote is hostile.
func hostileHunt(t *testing.T) *experiment.Record {
	r := found(t)
	r.Dir = t.TempDir()
	all := strings.Join(hostile, " ")
	r.Untested[0].Why = all
	r.Trials[0].Note, r.Trials[1].Note = all, all
	r.Trials[0].Proposal.Why = all
	r.Trials[1].Proposal.Arm = design.Arm{"graph": "safe", "dtype": "bf16", "cache": "--cache"}
	r.Case.Notes["graph"] = experiment.FactorNote{Note: all}
	r.Beliefs = []*search.Progress{{
		Leading: []search.Belief{{Set: design.Arm{"graph": "suspect", "dtype": "bf16"}, Probability: 0.9}}, None: 0.02,
		Needed: map[string]float64{"graph": 0.9, "dtype": 0.9, "cache": 0.1}, Arms: []search.Evidence{r.Result.Causes[0].With},
	}, nil}
	r.Result.Levels = []search.LevelFound{{Factor: "dtype", Level: all, Evidence: search.Evidence{Requests: 9, High: 1}}}
	v := hostileVerdict()
	for i, trial := range r.Trials {
		dir := filepath.Join(r.Dir, trial.Dir)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		a := target.Attestation{Endpoints: []target.Endpoint{{Path: "/server_info"}}, Processes: []target.ProcessFacts{{Name: "server", Main: true, Args: []string{"server", "--x", hostile[i]}, Env: map[string]string{"X": hostile[i+1]}}}}
		for name, value := range map[string]any{experiment.VerdictFile: v, experiment.AttestFile: a} {
			if err := experiment.WriteJSON(filepath.Join(dir, name), value); err != nil {
				t.Fatal(err)
			}
		}
		writeHistory(t, filepath.Join(dir, experiment.HistoryFile))
	}
	return r
}

func hostileVerdict() *oracle.Verdict {
	v := &oracle.Verdict{
		Status: oracle.Corrupt, Reasons: hostile,
		Setup:       oracle.Setup{Server: hostile[0], Model: hostile[1], BaseURL: hostile[2], Concurrency: 8},
		Assumptions: []oracle.Assumption{{Name: "the load", Found: hostile[0]}},
		Broken:      oracle.ClassResult{Main: oracle.Rate{Failures: 2, Trials: 3, Rate: 2. / 3, Low: 0.1, High: 0.9}, Ops: []int64{1, 2}},
		Breakdowns:  []oracle.Breakdown{{By: "round", Bins: []oracle.Bin{{Label: hostile[0], Ops: []int64{1, 2, 77}}, {Label: hostile[3]}}}},
		Probes:      []oracle.ProbeResult{{Name: hostile[1], Count: 12, With: oracle.Rate{Failures: 2, Trials: 3}}},
		Phases:      []oracle.PhaseResult{{Phase: history.Main, Ops: 3, ToMS: 1000, CompletionTokens: 30}},
	}
	for i, text := range hostile {
		v.Classes = append(v.Classes, oracle.ClassResult{
			Class: oracle.Class("Class" + string(rune('A'+i))), Means: oracle.Corrupt, Convicts: true, Main: v.Broken.Main,
			Examples: []oracle.Example{{Op: int64(i + 1), Phase: history.Main, Want: text, Got: hostile[(i+1)%len(hostile)], Note: text}},
		})
	}
	v.Classes[0].FalseAlarm = &oracle.Measured{Alarms: 1, Trials: 320, On: "right replies"}
	return v
}

// hostileStanding has a hypothesis of each verdict and evidence of each kind.
func hostileStanding(dir string) *Standing {
	third := 1. / 3
	s := &Standing{Dir: dir, Evidence: 4}
	for i, verdict := range []ledger.Verdict{ledger.Supported, ledger.Refuted, ledger.Undecided} {
		s.Hypotheses = append(s.Hypotheses, Hypothesis{
			Name: hostile[i], Statement: hostile[i+1], Source: hostile[i+2], Verdict: verdict,
			Predictions: []Prediction{{
				Text: hostile[i+3], Verdict: verdict, Number: &third, Error: 0.026, Why: hostile[i+4], Before: true,
				Evidence: []Judgement{
					{Source: "runs/0001", Kind: "run", Verdict: verdict, Number: &third, Error: 0.026, Why: hostile[i]},
					{Source: "live.json", Kind: "attestation", Verdict: ledger.Rejected, Error: 1, Why: "a was off in the live server " + hostile[i], Before: true},
					{Source: "/abroad/" + hostile[i], Kind: "run", Verdict: ledger.Undecided, Error: 1},
					{Source: hostile[2], Kind: "attestation", Verdict: ledger.Undecided, Error: 1},
				},
			}},
		})
	}
	return s
}

func writeHistory(t *testing.T, path string) {
	w, err := history.Create(path, history.Header{Format: history.Format, Tool: hostile[0], Model: hostile[1]})
	if err != nil {
		t.Fatal(err)
	}
	for i := range int64(3) {
		op := history.Op{ID: i + 1, Phase: history.Main, Kind: "agent", Session: int(i), Sent: time.Duration(i) * time.Second, LastByte: time.Duration(i+1) * time.Second, Outcome: history.OK, Error: hostile[i]}
		request, err := json.Marshal(map[string]any{"messages": []any{map[string]string{"role": hostile[3], "content": hostile[i]}}})
		if err != nil {
			t.Fatal(err)
		}
		chunk, err := json.Marshal(map[string]any{"choices": []any{map[string]any{"message": map[string]string{"content": hostile[i+1]}}}})
		if err != nil {
			t.Fatal(err)
		}
		op.Request, op.Chunks = request, []history.Chunk{{Data: chunk}}
		if err := w.Op(&op); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
}

// hostilePages are the pages of a hostile hunt and run.
func hostilePages(t *testing.T) map[string]string {
	r := hostileHunt(t)
	again := []Command{{hostile[0], "server " + strings.Join(hostile, " ")}}
	var hunt, run strings.Builder
	if err := HuntPage(&hunt, r, PageOptions{Tool: "culprit", Made: time.Unix(0, 0), Again: again, Hypotheses: hostileStanding(r.Dir)}); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(r.Dir, r.Trials[0].Dir)
	if err := RunPage(&run, hostileVerdict(), Run{Dir: dir, Workload: hostile[0]}, "culprit", time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	return map[string]string{"hunt": hunt.String(), "run": run.String()}
}

var (
	tags     = regexp.MustCompile(`<([a-zA-Z][a-zA-Z0-9]*)`)
	handlers = regexp.MustCompile(`<[^>]*\s(on[a-z]+|style|src|srcdoc)\s*=`)
	links    = regexp.MustCompile(`(?:href|xlink:href)="([^"]*)"`)
)

// TestPagesHoldNothingForeign reads the pages' text; make test-page opens them
// in a browser.
func TestPagesHoldNothingForeign(t *testing.T) {
	known := strings.Fields(`html head meta link title style body a header p h1 h2 h3 h4 nav main section table thead tbody tr th td small code pre
		div span svg path text ul li details summary strong article mark del dl dt dd footer br`)
	allowed := map[string]bool{}
	for _, name := range known {
		allowed[name] = true
	}
	for name, page := range hostilePages(t) {
		for _, m := range tags.FindAllStringSubmatch(page, -1) {
			if !allowed[m[1]] {
				t.Errorf("%s: has a <%s>", name, m[1])
			}
		}
		if m := handlers.FindString(page); m != "" {
			t.Errorf("%s: has an attribute that could run or fetch something: %s", name, m)
		}
		for _, m := range links.FindAllStringSubmatch(page, -1) {
			if to := m[1]; !strings.HasPrefix(to, "#") && !strings.HasPrefix(to, "runs/") && to != "data:," && to != "live.json" {
				t.Errorf("%s: links to %s", name, to)
			}
		}
		if strings.ContainsAny(page, "\x00\x1b\u202e\u2066") {
			t.Errorf("%s: has control characters", name)
		}
		for _, want := range []string{"Content-Security-Policy", "default-src 'none'", "class=\"timeline\"", "<mark>", "--op 1"} {
			if !strings.Contains(strings.ReplaceAll(page, "&#39;", "'"), want) {
				t.Errorf("%s: lacks %s", name, want)
			}
		}
		if len(page) > 2<<20 {
			t.Errorf("%s: has %d bytes", name, len(page))
		}
	}
}

func TestHuntPageShowsItAll(t *testing.T) {
	page := hostilePages(t)["hunt"]
	for _, want := range []string{
		"CULPRIT", "are needed together", "Confirmed both ways", "these alone, all else safe", "without it", "Way out", "91% of the failing arm",
		"Is the setting needed?", `<a href="#trial1" tabindex="-1"><path class="fill bar"`, "<td class=\"n\">90%</td>",
		"✓ supported", "✗ refuted", "? open", "⊘ rejected", "a was off in the live server", "Seen before this was written.", "4 pieces of evidence, 1 rejected", `href="runs/0001/verdict.json">runs/0001</a>`,
		`<a href="#op1" tabindex="-1"><path class="fill broken"`, `<div id="op1">`, "came back", "3 of them, in the order of sending", "dtype &#43; graph: from 90% to 90%", "What differed between the servers", "Not counted", "Code paths in this run", `<td class="n">2/3</td>`, "Found where nothing was wrong: ClassA 1/320 on right replies.", `id="trial1"`, `href="runs/0001/verdict.json"`, `ops <a href="#op1">1</a> <a href="#op2">2</a> and 1 more in verdict.json`, `Broken ops: <a href="#op1">1</a> <a href="#op2">2</a>`,
	} {
		if !strings.Contains(page, want) {
			t.Errorf("lacks %q", want)
		}
	}
}

// What hypotheses asked for makes a page too, where no search ran.
func TestHypothesesPage(t *testing.T) {
	r := hostileHunt(t)
	r.Asked, r.Trials, r.Beliefs = r.Trials[:1], nil, nil
	r.Result = &experiment.Result{Finding: search.Finding{Status: search.Running}}
	var page strings.Builder
	if err := HuntPage(&page, r, PageOptions{Hypotheses: hostileStanding(r.Dir)}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{">HYPOTHESES<", "Of 3 hypotheses on 4 pieces of evidence: ", "Arms that hypotheses asked for", "30/160", "The trial with the most broken replies: 1", `<div id="op1">`} {
		if !strings.Contains(page.String(), want) {
			t.Errorf("lacks %q", want)
		}
	}
	if strings.Contains(page.String(), `id="trials"`) {
		t.Error("has a list of no trials")
	}
}

// A hunt that kept no beliefs has no table of arms, and no empty one either.
func TestHuntPageWithoutBeliefs(t *testing.T) {
	r := hostileHunt(t)
	for _, beliefs := range [][]*search.Progress{r.Beliefs, nil} {
		r.Beliefs = beliefs
		var page strings.Builder
		if err := HuntPage(&page, r, PageOptions{}); err != nil {
			t.Fatal(err)
		}
		for _, part := range []string{`<section id="arms">`, `href="#arms"`} {
			if has := strings.Contains(page.String(), part); has != (beliefs != nil) {
				t.Errorf("with %d beliefs: %s is there: %v", len(beliefs), part, has)
			}
		}
	}
}

func TestMarked(t *testing.T) {
	for _, tt := range []struct{ name, want, got, left, right string }{
		{"one letter", `dock":"3v"`, `dock":"38"`, `dock":"3[v]"`, `dock":"3[8]"`},
		{"the same", "abc", "abc", "abc", "abc"},
		{"nothing came", "abc", "", "[abc]", ""},
		{"whole characters", "né", "nè", "n[é]", "n[è]"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			left, right := marked(tt.want, tt.got)
			show := func(pieces []piece) (text string) {
				for _, p := range pieces {
					if p.Marked {
						text += "[" + p.Text + "]"
					} else {
						text += p.Text
					}
				}
				return text
			}
			if show(left) != tt.left || show(right) != tt.right {
				t.Errorf("%s | %s, want %s | %s", show(left), show(right), tt.left, tt.right)
			}
		})
	}
}

func TestSameOrder(t *testing.T) {
	for _, tt := range []struct{ name, want, got, ordered string }{
		{"the same arguments otherwise", `move {"dock":"30","parcel":"x"}`, `move {"parcel":"x","dock":"39"}`, `move {"parcel":"x","dock":"30"}`},
		{"one is missing", `move {"a":"1","b":"2","c":"3"}`, `move {"c":"3"}`, `move {"c":"3","a":"1","b":"2"}`},
		{"cut short", `move {"a":"1","b":"2"}`, `move {"b":"2","a`, `move {"b":"2","a":"1"}`},
		{"no call", "a text", `move {"c":"3"}`, "a text"},
		{"no reply", `move {"b":"1","a":"2"}`, "", `move {"b":"1","a":"2"}`},
		{"no object", `{not one}`, `{"b":"2"}`, `{not one}`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := sameOrder(tt.want, tt.got); got != tt.ordered {
				t.Errorf("%s, want %s", got, tt.ordered)
			}
		})
	}
}

// A page stays small enough to be mailed, however much broke, and says what it
// leaves out. The text of recorded traffic isn't in it.
func TestRunPageIsBounded(t *testing.T) {
	for _, kind := range []string{"agent", "recorded"} {
		t.Run(kind, func(t *testing.T) {
			dir := t.TempDir()
			w, err := history.Create(filepath.Join(dir, experiment.HistoryFile), history.Header{Format: history.Format})
			if err != nil {
				t.Fatal(err)
			}
			v := hostileVerdict()
			v.Broken.Ops = nil
			request := fmt.Appendf(nil, `{"messages":[{"role":"user","content":"%s"},{"role":"user","content":"the last of user's words"}]}`, strings.Repeat(`\"<`, 10_000))
			const ops = 8_400
			for i := range int64(ops) {
				op := history.Op{ID: i + 1, Phase: history.Main, Kind: kind, Session: int(i), Sent: time.Duration(i) * time.Millisecond, LastByte: time.Duration(i+50) * time.Millisecond, Outcome: history.OK}
				if i%2 == 0 {
					v.Broken.Ops = append(v.Broken.Ops, op.ID)
				}
				if i < 60 {
					op.Request = request
				}
				if err := w.Op(&op); err != nil {
					t.Fatal(err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			for range 6 {
				b := oracle.Breakdown{By: "round"}
				for range 40 {
					b.Bins = append(b.Bins, oracle.Bin{Label: "x", Rate: v.Broken.Main, Ops: v.Broken.Ops})
				}
				v.Breakdowns = append(v.Breakdowns, b)
			}
			var page strings.Builder
			if err := RunPage(&page, v, Run{Dir: dir}, "culprit", time.Unix(0, 0)); err != nil {
				t.Fatal(err)
			}
			if page.Len() > 1_500_000 {
				t.Errorf("the page has %d bytes", page.Len())
			}
			for _, want := range []string{"3800 more broken ones are in the run", "sound requests more are left out", "and 4188 more in verdict.json", "culprit check --op 1 "} {
				if !strings.Contains(page.String(), want) {
					t.Errorf("lacks %q", want)
				}
			}
			if has := strings.Contains(page.String(), "the last of user"); has != (kind == "agent") {
				t.Errorf("the text of %s traffic is there: %v", kind, has)
			}
		})
	}
}

func TestWholeTicks(t *testing.T) {
	for _, tt := range []struct {
		first, last int
		want        string
	}{
		{3, 5, "3 4 5"}, {1, 12, "1 2 3 4 5 6 7 8 9 10 11 12"}, {3, 18, "3 4 6 8 10 12 14 16 18"}, {2, 120, "2 10 20 30 40 50 60 70 80 90 100 110 120"}, {7, 7, "7"},
	} {
		var labels []string
		for _, tick := range (wholeTicks{tt.first, tt.last}).Ticks(0, 0) {
			labels = append(labels, tick.Label)
		}
		if got := strings.Join(labels, " "); got != tt.want {
			t.Errorf("%d to %d: %s, want %s", tt.first, tt.last, got, tt.want)
		}
	}
}

package app

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/investigate"
	"github.com/culprit-project/culprit/ledger"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/target"
)

// InvestigateOptions is what investigate is asked for.
type InvestigateOptions struct {
	HypothesisOptions
	Commands map[string]string // by the investigator's name: a program with its arguments
	Models   map[string]string // by the investigator's name: MODEL@URL
	APIKey   string            // secret; for the models
	Env      []string          // of the programs
	Sources  []string          // directories of source, beside the attested packages
	Timeout  time.Duration     // of each
	Calls    int               // of a model
	Tokens   int               // of a model
	DryRun   bool              // print the brief
}

const investigateTimeout = 20 * time.Minute

// Investigate asks investigators about a case, checks what they rest on, and
// enters their claims: those with predictions become hypotheses.
func Investigate(ctx context.Context, o InvestigateOptions, out Output) error {
	b, err := openBook(ctx, o.HypothesisOptions)
	if err != nil {
		return err
	}
	defer b.Close() //nolint:errcheck // what was written is committed
	s, err := b.standing(ctx)
	if err != nil {
		return err
	}
	attested, err := b.latestAttestation(ctx)
	if err != nil {
		return err
	}
	sources, err := investigate.OpenSources(o.Sources, attested)
	if err != nil {
		return &UsageError{err}
	}
	defer sources.Close() //nolint:errcheck // it was only read
	brief, err := b.brief(s, sources)
	if err != nil {
		return err
	}
	if o.DryRun {
		_, err := fmt.Fprint(out.JSON, brief)
		return err
	}
	all, err := o.investigators(b, s, sources, attested)
	if err != nil {
		return err
	}
	timeout := o.Timeout
	if timeout <= 0 {
		timeout = investigateTimeout
	}
	out.Progress.Printf("%d investigators, at most %s each\n", len(all), strings.TrimSuffix(timeout.String(), "0s"))
	results := investigate.Run(ctx, all, brief, investigate.Options{Timeout: timeout, Sources: sources})
	if err := context.Cause(ctx); err != nil {
		return &NoVerdictError{fmt.Errorf("investigate: %w", err)}
	}
	shown, err := b.enterClaims(ctx, results)
	if err != nil {
		return err
	}
	if err := b.judge(ctx); err != nil {
		return err
	}
	if s, err = b.standing(ctx); err != nil {
		return err
	}
	disputed, err := b.disputed(ctx)
	if err != nil {
		return err
	}
	next, err := b.next(ctx, s)
	if err != nil {
		return err
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, map[string]any{"investigators": shown, "contradictions": slices.Concat([][2]string{}, disputed), "next": slices.Concat([]hypothesis.Experiment{}, next)})
	}
	report.Investigated(out.Screen, shown, disputed)
	if len(next) > 0 {
		out.Screen.Printf("\n")
		report.Next(out.Screen, b.subject.Space, s, next, o.Case)
	}
	return nil
}

// investigators makes them.
func (o *InvestigateOptions) investigators(b *book, s report.Standing, sources *investigate.Sources, attested *target.Attestation) ([]investigate.Investigator, error) {
	var all []investigate.Investigator
	for _, name := range slices.Sorted(maps.Keys(o.Commands)) {
		args := strings.Fields(o.Commands[name])
		if len(args) == 0 {
			return nil, usage("investigator %s: its command is empty", name)
		}
		all = append(all, &investigate.Command{Called: name, Args: args, Env: o.Env})
	}
	for _, name := range slices.Sorted(maps.Keys(o.Models)) {
		model, url, ok := strings.Cut(o.Models[name], "@")
		base, err := target.ParseBaseURL(url)
		if !ok || err != nil {
			return nil, usage("investigator %s: want NAME=MODEL@URL, got %q", name, o.Models[name])
		}
		server := Server{APIKey: o.APIKey}
		all = append(all, &investigate.Model{
			Called: name, Model: model, BaseURL: base, Header: server.headers(), Calls: o.Calls, Tokens: o.Tokens,
			Tools: readingTools(b, s, sources, attested),
		})
	}
	if len(all) == 0 {
		return nil, usage("who is to investigate? Give --command NAME='PROGRAM ARGS' or --model NAME=MODEL@URL, once for each")
	}
	return all, nil
}

// latestAttestation is the newest of the case's evidence; nil where there is
// none.
func (b *book) latestAttestation(ctx context.Context) (*target.Attestation, error) {
	evidence, err := b.ledger.Evidence(ctx)
	if err != nil {
		return nil, err
	}
	for _, e := range slices.Backward(evidence) {
		var o hypothesis.Observation
		if err := json.Unmarshal(e.Content, &o); err == nil && o.Attestation != nil {
			return o.Attestation, nil
		}
		if a, err := b.attestation(e); err != nil || a != nil {
			return a, err
		}
	}
	return nil, nil
}

// brief is what investigators are told. It has no secrets: attestations have
// none.
func (b *book) brief(s report.Standing, sources *investigate.Sources) (string, error) {
	space := b.subject.Space
	var w strings.Builder
	fmt.Fprintf(&w, "A server for language models gives wrong answers under load. Say what may be the cause, from its source and from what was observed.\n"+
		"You are one of several who look into it independently. You can't change anything.\n\nFactors, as the server fails, and the safe level of each:\n")
	for _, f := range space.Factors {
		var levels []string
		for _, l := range f.Levels {
			levels = append(levels, l.Name)
		}
		fmt.Fprintf(&w, "- %s: fails with %s, safe %s (levels: %s)\n", f.Name, f.Levels[f.Failing()].Name, f.Levels[f.Safe()].Name, strings.Join(levels, ", "))
	}
	trials, err := b.trials()
	if err != nil {
		return "", err
	}
	if len(trials) > 0 {
		fmt.Fprintf(&w, "\nWhat was run:\n%s", trialLines(trials))
	}
	if len(s.Hypotheses) > 0 {
		fmt.Fprintf(&w, "\nHypotheses so far. What is refuted stays refuted:\n")
		for _, h := range s.Hypotheses {
			fmt.Fprintf(&w, "- %s, %s: %s\n", h.Name, h.Verdict, h.Statement)
		}
	}
	fmt.Fprintf(&w, "\nProcesses: %s. Log patterns: %s.\nSource: %s.\n", list(b.subject.Subject().Processes), list(b.subject.Subject().Logs), list(sources.Names()))
	fmt.Fprint(&w, `
Answer with one JSON object at the end, beginning on its own line:
{"claims": [{"name": "a-few-words", "statement": "what is wrong, in a sentence",
  "places": [{"file": "SOURCE/path.py", "line": 12, "text": "that line", "sha256": "the file's, as shown"}],
  "predictions": ["rate(FACTOR=LEVEL) < 0.05"]}]}

Predictions are what would be seen if the claim is right, and not if it is wrong. Their language:
  rate(FACTOR=LEVEL) < 0.05              share of broken replies, all else as it fails; or others=safe
  rate(FACTOR=LEVEL) < rate() / 3        against the failing arm
  metric(NAME, LABEL=VALUE) > 0          what a metric did in a failing run; so probe(NAME), logs(NAME)
  attest(PROCESS, env.NAME) == "1"       a live setting; also server_info.NAME, argv contains "--x"
  needed(FACTOR)                         the factor is part of what the hunt will find
Show that a path is live before you build on it. Each place must be in the source that runs; it is checked.
`)
	return w.String(), nil
}

func list(names []string) string {
	if len(names) == 0 {
		return "none"
	}
	return strings.Join(names, ", ")
}

func (b *book) trials() ([]experiment.Evidence, error) {
	runs, err := b.subject.Trials(b.base, experiment.RunsDir)
	if err != nil {
		return nil, err
	}
	asked, err := b.subject.Trials(b.base, experiment.ExperimentsDir)
	return append(runs, asked...), err
}

// trialLines tells trials, pooled by arm.
func trialLines(trials []experiment.Evidence) string {
	type arm struct{ launches, requests, failures, void int }
	arms := map[string]*arm{}
	var order []string
	for _, t := range trials {
		key := t.Arm.String()
		if arms[key] == nil {
			arms[key] = &arm{}
			order = append(order, key)
		}
		if t.Void != "" {
			arms[key].void++
			continue
		}
		arms[key].launches++
		arms[key].requests += t.Requests
		arms[key].failures += t.Failures
	}
	var w strings.Builder
	for _, key := range order {
		a := arms[key]
		fmt.Fprintf(&w, "- %s: %d of %d broken in %d runs", key, a.failures, a.requests, a.launches)
		if a.void > 0 {
			fmt.Fprintf(&w, ", %d void", a.void)
		}
		w.WriteString("\n")
	}
	return w.String()
}

// readingTools are what models may read.
func readingTools(b *book, s report.Standing, sources *investigate.Sources, attested *target.Attestation) []investigate.Tool {
	const none = `{"type":"object","properties":{}}`
	return []investigate.Tool{
		{
			Name: "search_source", Description: "Lines of the deployed source that match a regular expression (RE2).",
			Parameters: `{"type":"object","properties":{"pattern":{"type":"string"},"under":{"type":"string","description":"only files whose name begins so"}},"required":["pattern"]}`,
			Do: func(arguments json.RawMessage) (string, error) {
				var in struct{ Pattern, Under string }
				if err := json.Unmarshal(arguments, &in); err != nil {
					return "", err
				}
				return sources.Search(in.Pattern, in.Under)
			},
		},
		{
			Name: "read_source", Description: "Lines of a file of the deployed source, with its hash.",
			Parameters: `{"type":"object","properties":{"file":{"type":"string"},"from":{"type":"integer"},"to":{"type":"integer"}},"required":["file"]}`,
			Do: func(arguments json.RawMessage) (string, error) {
				var in struct {
					File     string
					From, To int
				}
				if err := json.Unmarshal(arguments, &in); err != nil {
					return "", err
				}
				return sources.Lines(in.File, in.From, in.To)
			},
		},
		{
			Name: "read_attestation", Description: "What the live server was really running, as read back from it: arguments, environment, what it says of itself.", Parameters: none,
			Do: func(json.RawMessage) (string, error) {
				if attested == nil {
					return "", errors.New("the live server hasn't been attested")
				}
				short := *attested
				short.Packages, short.Libraries, short.Distributions = nil, nil, nil
				text, err := json.MarshalIndent(short, "", " ")
				return string(text), err
			},
		},
		{
			Name: "read_runs", Description: "What was run, arm by arm, with what broke.", Parameters: none,
			Do: func(json.RawMessage) (string, error) {
				trials, err := b.trials()
				if err != nil || len(trials) == 0 {
					return "nothing was run yet", err
				}
				return trialLines(trials), nil
			},
		},
		{
			Name: "read_counts", Description: "Metrics, probe hits and log counts of the last run of the failing arm.",
			Parameters: `{"type":"object","properties":{"pattern":{"type":"string","description":"a regular expression that names match"}}}`,
			Do: func(arguments json.RawMessage) (string, error) {
				var in struct{ Pattern string }
				if err := json.Unmarshal(arguments, &in); err != nil {
					return "", err
				}
				return b.countLines(in.Pattern)
			},
		},
		{
			Name: "read_hypotheses", Description: "Where every hypothesis stands, with what decides it.", Parameters: none,
			Do: func(json.RawMessage) (string, error) {
				text, err := json.MarshalIndent(s.Hypotheses, "", " ")
				return string(text), err
			},
		},
	}
}

// countLines tells the counts of the last run of the failing arm.
func (b *book) countLines(pattern string) (string, error) {
	re, err := regexp.Compile(pattern)
	if err != nil {
		return "", err
	}
	trials, err := b.trials()
	if err != nil {
		return "", err
	}
	failing := b.subject.Space.Failing().String()
	for _, t := range slices.Backward(trials) {
		if t.Void != "" || t.Arm.String() != failing {
			continue
		}
		if err := t.ReadCounts(); err != nil {
			return "", err
		}
		var w strings.Builder
		fmt.Fprintf(&w, "%s: %d of %d broken\n", t.Source, t.Failures, t.Requests)
		for _, name := range slices.Sorted(maps.Keys(t.Counts)) {
			if re.MatchString(name) {
				fmt.Fprintf(&w, "%s %g\n", name, t.Counts[name])
			}
		}
		return w.String(), nil
	}
	return "the failing arm wasn't run yet", nil
}

var notName = regexp.MustCompile(`[^a-z0-9]+`)

// enterClaims enters what investigators said. A claim becomes a hypothesis when
// all it rests on is in the deployed source and it predicts something.
func (b *book) enterClaims(ctx context.Context, results []investigate.Result) ([]report.Investigator, error) {
	var shown []report.Investigator
	for _, r := range results {
		who := report.Investigator{Name: r.Investigator, Error: r.Error, Took: r.Took}
		for _, c := range r.Claims {
			rc := report.Claim{Statement: c.Statement}
			misplaced := false
			for _, p := range c.Places {
				rc.Places = append(rc.Places, report.Place{At: fmt.Sprintf("%s:%d", p.File, p.Line), Wrong: p.Wrong})
				misplaced = misplaced || p.Wrong != ""
			}
			name := hypothesisName(r.Investigator, c)
			w := hypothesis.Written{Name: name, Statement: c.Statement, Predictions: c.Predictions}
			claim := ledger.Claim{Investigator: r.Investigator, Statement: c.Statement, Made: b.now}
			if _, err := w.Check(b.subject.Subject()); err != nil {
				rc.Not = err.Error()
			} else if misplaced {
				rc.Not = "it rests on source that isn't deployed"
			} else if id, err := b.addClaimed(ctx, w, r.Investigator); err != nil {
				rc.Not = err.Error()
			} else {
				rc.Hypothesis, claim.Hypothesis = name, id
			}
			var err error
			if claim.Content, err = json.Marshal(c); err != nil {
				return nil, err
			}
			if _, err := b.ledger.AddClaim(ctx, claim); err != nil {
				return nil, err
			}
			who.Claims = append(who.Claims, rc)
		}
		shown = append(shown, who)
	}
	return shown, nil
}

// hypothesisName names a claim's hypothesis after who made it.
func hypothesisName(who string, c investigate.Claim) string {
	from := c.Name
	if from == "" {
		from = c.Statement
	}
	name := strings.Trim(notName.ReplaceAllString(strings.ToLower(who+"-"+from), "-"), "-")
	return strings.Trim(name[:min(len(name), 60)], "-")
}

func (b *book) addClaimed(ctx context.Context, w hypothesis.Written, who string) (int64, error) {
	if _, err := b.add(ctx, w, "investigator "+who); err != nil {
		return 0, err
	}
	all, err := b.ledger.Hypotheses(ctx)
	if err != nil {
		return 0, err
	}
	i := slices.IndexFunc(all, func(h ledger.Hypothesis) bool { return h.Name == w.Name })
	if i < 0 {
		return 0, fmt.Errorf("hypothesis %s was added and isn't in %s", w.Name, filepath.Join(b.dir(), ledger.File))
	}
	return all[i].ID, nil
}

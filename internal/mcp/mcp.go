// Package mcp offers the program's functions to agents as tools of the Model
// Context Protocol. Answers are as short as what people see, with links to the
// files behind them. Without Options.AllowRuns nothing is started and nothing
// is sent to a server under test. docs/mcp.md lists the tools.
//
// Stability: may change.
package mcp

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/culprit-project/culprit/hypothesis"
	"github.com/culprit-project/culprit/internal/app"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/target"
)

// Options of a server.
type Options struct {
	// Root is the directory that tools see; paths are relative to it, and none
	// leads out of it.
	Root      string
	AllowRuns bool // offer the tools that start servers, send load and write files
	Launcher  *target.Launcher
	APIKey    string // secret; for servers under test
	Version   string
}

// answerBytes is the most that an answer has of text.
const answerBytes = 6000

// New makes a server with its tools.
func New(o Options) (*mcp.Server, error) {
	dir, err := filepath.Abs(o.Root)
	if err != nil {
		return nil, fmt.Errorf("mcp: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fmt.Errorf("mcp: %w", err)
	}
	s := mcp.NewServer(&mcp.Implementation{Name: "culprit", Version: o.Version}, &mcp.ServerOptions{
		Instructions: "culprit finds which setting makes an LLM server give wrong answers under load. A case is a directory with case.yaml; " +
			"its hunt's trials are run directories. Evidence counts only with the configuration it was taken under, so attest before you conclude. " +
			"Write what you believe as a hypothesis with predictions that can be refuted, and let next_experiment say what to run.",
	})
	t := &tools{Options: o, root: root}
	t.look(s)
	if o.AllowRuns {
		t.act(s)
	}
	return s, nil
}

// Handler serves over HTTP. Requests that come by another name than a loopback
// one, or from a page of another origin, are refused.
func Handler(s *mcp.Server) http.Handler {
	h := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return s }, nil)
	return http.NewCrossOriginProtection().Handler(h)
}

type tools struct {
	Options
	root *os.Root
}

type (
	dirIn struct {
		Dir string `json:"dir" jsonschema:"a run directory"`
	}
	probesIn struct {
		Dir string `json:"dir" jsonschema:"a directory that culprit probe made"`
	}
	opIn struct {
		Dir string `json:"dir" jsonschema:"a run directory"`
		Op  int64  `json:"op" jsonschema:"the op's number"`
	}
	caseIn struct {
		Case string `json:"case" jsonschema:"a directory with case.yaml"`
	}
	nameIn struct {
		Case string `json:"case" jsonschema:"a directory with case.yaml"`
		Name string `json:"name" jsonschema:"of the hypothesis"`
	}
	attestIn struct {
		What    string `json:"what" jsonschema:"a case, a run directory, or an attestation's file"`
		Against string `json:"against,omitempty" jsonschema:"another, to see what differs"`
	}
	addIn struct {
		Case        string   `json:"case" jsonschema:"a directory with case.yaml"`
		Name        string   `json:"name" jsonschema:"a few words such as stale-index-k"`
		Statement   string   `json:"statement" jsonschema:"what is believed, in a sentence"`
		Predictions []string `json:"predictions" jsonschema:"what will be seen if it is so, such as rate(graph=safe) < 0.05"`
	}
	runIn struct {
		BaseURL     string `json:"base_url" jsonschema:"of an OpenAI-compatible server"`
		Model       string `json:"model,omitempty"`
		Kind        string `json:"workload,omitempty" jsonschema:"agent, recall, echo, burst, evict, churn or mixed"`
		Sessions    int    `json:"sessions,omitempty"`
		Rounds      int    `json:"rounds,omitempty"`
		Concurrency int    `json:"concurrency,omitempty"`
		Control     bool   `json:"control,omitempty" jsonschema:"play the sessions alone first, too"`
		Output      string `json:"output" jsonschema:"the run directory to create"`
	}
	huntIn struct {
		Case       string `json:"case" jsonschema:"a directory with case.yaml"`
		Hypotheses bool   `json:"hypotheses,omitempty" jsonschema:"run what tells the hypotheses apart, in place of the search"`
		Launches   int    `json:"launches,omitempty" jsonschema:"at most so many"`
		Resume     bool   `json:"resume,omitempty"`
	}
	bundleIn struct {
		What   string `json:"what" jsonschema:"a run directory or a case"`
		Output string `json:"output" jsonschema:"the directory to create"`
	}
)

// look adds the tools that only look. What has been run is entered into the
// case's ledger when they look at it; they change nothing else.
func (t *tools) look(s *mcp.Server) {
	add(s, true, "list_runs", "Runs and cases below a directory, with the verdicts of runs.", func(_ context.Context, in dirIn, out *answer) error {
		return t.list(in.Dir, out)
	})
	add(s, true, "show_run", "A run's verdict: rates, what broke, examples wanted and got.", func(_ context.Context, in dirIn, out *answer) error {
		dir, err := t.path(in.Dir)
		if err != nil {
			return err
		}
		out.link(dir, "verdict.json", "plan.json", "attest.json", "history.jsonl.zst")
		_, err = app.ShowRun(dir, out.output())
		return err
	})
	add(s, true, "show_op", "One request of a run with everything that came back, as JSON.", func(_ context.Context, in opIn, out *answer) error {
		dir, err := t.path(in.Dir)
		if err != nil {
			return err
		}
		return app.ShowOp(dir, in.Op, &out.text)
	})
	add(s, true, "show_hunt", "What a case's hunt has come to, and what that rests on.", func(_ context.Context, in caseIn, out *answer) error {
		dir, err := t.path(in.Case)
		if err != nil {
			return err
		}
		out.link(dir, "case.yaml", "finding.json")
		return app.ShowHunt(app.HypothesisOptions{Case: dir}, out.output())
	})
	add(s, true, "list_hypotheses", "Where every hypothesis of a case stands, and what decides it.", func(ctx context.Context, in caseIn, out *answer) error {
		dir, err := t.path(in.Case)
		if err != nil {
			return err
		}
		out.link(dir, "ledger.db")
		return app.ListHypotheses(ctx, app.HypothesisOptions{Case: dir}, out.output())
	})
	add(s, true, "show_hypothesis", "One hypothesis with its predictions and all evidence for and against them.", func(ctx context.Context, in nameIn, out *answer) error {
		dir, err := t.path(in.Case)
		if err != nil {
			return err
		}
		return app.ShowHypothesis(ctx, app.HypothesisOptions{Case: dir}, in.Name, out.output())
	})
	add(s, true, "next_experiment", "The experiment that would tell the open hypotheses apart best for its cost, and what its outcomes would mean.", func(ctx context.Context, in caseIn, out *answer) error {
		dir, err := t.path(in.Case)
		if err != nil {
			return err
		}
		return app.NextExperiment(ctx, app.HypothesisOptions{Case: dir}, out.output())
	})
	add(s, true, "attest", "What a case's live server is really running, or a run's was; with against, what differs.", func(ctx context.Context, in attestIn, out *answer) error {
		o := app.AttestOptions{Server: app.Server{APIKey: t.APIKey}}
		var err error
		if o.What, err = t.path(in.What); err != nil {
			return err
		}
		if in.Against != "" {
			if o.Against, err = t.path(in.Against); err != nil {
				return err
			}
		}
		return app.Attest(ctx, o, out.output())
	})
	add(s, true, "read_probes", "Which code paths of a live Python server ran, how often, with which labels. A zero is only one where the probe's control moved.", func(_ context.Context, in probesIn, out *answer) error {
		dir, err := t.path(in.Dir)
		if err != nil {
			return err
		}
		return app.ProbeRead(dir, out.output())
	})
}

// act adds the tools that start servers, send load and write files.
func (t *tools) act(s *mcp.Server) {
	add(s, false, "add_hypothesis", "Write a hypothesis down with its predictions; what is known judges it at once.", func(ctx context.Context, in addIn, out *answer) error {
		dir, err := t.path(in.Case)
		if err != nil {
			return err
		}
		w := hypothesis.Written{Name: in.Name, Statement: in.Statement, Predictions: in.Predictions}
		return app.AddHypothesis(ctx, app.HypothesisOptions{Case: dir}, w, "an agent", out.output())
	})
	add(s, false, "run", "Drive a workload at a server and judge every reply. Takes as long as the server does.", func(ctx context.Context, in runIn, out *answer) error {
		dir, err := t.path(in.Output)
		if err != nil {
			return err
		}
		out.link(dir, "verdict.json")
		_, err = app.Run(ctx, app.RunOptions{
			Server: app.Server{BaseURL: in.BaseURL, Model: in.Model, APIKey: t.APIKey},
			Kind:   in.Kind, Sessions: in.Sessions, Rounds: in.Rounds, Concurrency: in.Concurrency, Control: in.Control,
			Output: dir, Tool: t.Version,
		}, out.output())
		return err
	})
	add(s, false, "hunt", "Find which settings of a case are needed for its failure. Launches servers; takes minutes to hours.", func(ctx context.Context, in huntIn, out *answer) error {
		dir, err := t.path(in.Case)
		if err != nil {
			return err
		}
		out.link(dir, "finding.json", "ledger.db")
		_, err = app.Hunt(ctx, app.HuntOptions{
			Server: app.Server{APIKey: t.APIKey}, Case: dir, Hypotheses: in.Hypotheses, Launches: in.Launches, Resume: in.Resume,
			Launcher: t.Launcher, Tool: t.Version,
		}, out.output())
		return err
	})
	add(s, false, "bundle", "Gather what a server's maintainers ask for into a directory.", func(_ context.Context, in bundleIn, out *answer) error {
		what, err := t.path(in.What)
		if err != nil {
			return err
		}
		dir, err := t.path(in.Output)
		if err != nil {
			return err
		}
		out.link(dir, "README.md", "repro.py")
		return app.Bundle(app.BundleOptions{What: what, Output: dir, Tool: t.Version}, out.output())
	})
}

// path makes a tool's path absolute. It may not lead out of the root, by a link
// neither.
func (t *tools) path(name string) (string, error) {
	if filepath.IsAbs(name) {
		if relative, err := filepath.Rel(t.root.Name(), name); err == nil {
			name = relative
		}
	}
	name = filepath.Clean(name)
	if !filepath.IsLocal(name) {
		return "", fmt.Errorf("%s: is outside of %s, which this server was started for", name, t.root.Name())
	}
	// The root refuses links that lead out of it; what isn't there yet is held
	// to where it will be made.
	for at := name; ; at = filepath.Dir(at) {
		_, err := t.root.Stat(at)
		if err == nil {
			return filepath.Join(t.root.Name(), name), nil
		}
		if !errors.Is(err, fs.ErrNotExist) || at == "." {
			return "", fmt.Errorf("%s: %w", name, err)
		}
	}
}

// mostListed is how many runs and cases a listing has.
const mostListed = 100

func (t *tools) list(dir string, out *answer) error {
	dir, err := t.path(dir)
	if err != nil {
		return err
	}
	n := 0
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || n >= mostListed {
			return nil //nolint:nilerr // what can't be read isn't listed
		}
		name, err := filepath.Rel(t.root.Name(), filepath.Dir(path))
		if err != nil {
			return err
		}
		switch d.Name() {
		case "case.yaml":
			fmt.Fprintf(&out.text, "case  %s\n", term.Safe(name))
		case "plan.json":
			fmt.Fprintf(&out.text, "run   %s  %s\n", term.Safe(name), app.RunStatus(filepath.Dir(path)))
		default:
			return nil
		}
		n++
		return nil
	})
	if n == 0 {
		fmt.Fprintln(&out.text, "no runs and no cases")
	} else if n >= mostListed {
		fmt.Fprintf(&out.text, "only the first %d\n", mostListed)
	}
	return err
}

// answer collects what a tool says.
type answer struct {
	text  bytes.Buffer
	files []string
}

func (a *answer) output() app.Output {
	screen := term.NewScreen(&a.text)
	screen.Width = 100
	return app.Output{Screen: screen, JSON: &a.text, Progress: term.NewScreen(discard{})}
}

type discard struct{}

func (discard) Write(b []byte) (int, error) { return len(b), nil }

// link offers files of a directory, as far as they are there in the end.
func (a *answer) link(dir string, names ...string) {
	for _, name := range names {
		a.files = append(a.files, filepath.Join(dir, name))
	}
}

func (a *answer) result() *mcp.CallToolResult {
	text := strings.ToValidUTF8(a.text.String(), "\uFFFD")
	if len(text) > answerBytes {
		cut := answerBytes
		for !utf8.RuneStart(text[cut]) {
			cut--
		}
		text = text[:cut] + fmt.Sprintf("\n... and %d bytes more", len(text)-cut)
	}
	r := &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: text}}}
	for _, path := range a.files {
		if _, err := os.Stat(path); err == nil {
			link := url.URL{Scheme: "file", Path: filepath.ToSlash(path)}
			r.Content = append(r.Content, &mcp.ResourceLink{URI: link.String(), Name: filepath.Base(path)})
		}
	}
	return r
}

// add makes a function a tool. Its error is the tool's answer, after what it
// said so far.
func add[In any](s *mcp.Server, readOnly bool, name, description string, do func(context.Context, In, *answer) error) {
	no := false
	tool := &mcp.Tool{Name: name, Description: description, Annotations: &mcp.ToolAnnotations{ReadOnlyHint: readOnly, DestructiveHint: &no}}
	mcp.AddTool(s, tool, func(ctx context.Context, _ *mcp.CallToolRequest, in In) (*mcp.CallToolResult, any, error) {
		var a answer
		err := do(ctx, in, &a)
		if err != nil {
			fmt.Fprintf(&a.text, "%s\n", err)
		}
		r := a.result()
		r.IsError = err != nil
		return r, nil, nil
	})
}

// Package bundle gathers what a server's maintainers ask for into a directory:
// the verdict in words, a repro that needs nothing, what was sent and came back,
// what was running in each arm, and the logs around the first failures. Secrets
// are taken out, and so is the text of users. docs/bundle.md is its contents.
//
// Stability: may change.
package bundle

import (
	"bytes"
	"compress/zlib"
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

//go:embed repro.py
var reproTemplate string

// The files of a bundle.
const (
	ReadmeFile = "README.md"
	ReproFile  = "repro.py"
	configDir  = "config"
	logsDir    = "logs"
)

// Arm is a trial whose configuration goes into the bundle.
type Arm struct {
	Name string
	Arm  design.Arm
	Dir  string
}

// Options is what a bundle is made of.
type Options struct {
	Dir     string // made; must not exist
	Run     string // the run directory that shows the failure
	Arms    []Arm  // of a hunt; none for a single run
	Finding *experiment.Result
	// Workload, if there is one, is what repro.py plays in place of the run's
	// requests: a smaller one that fails too.
	Workload *Workload
	Tool     string
}

// Workload is one that repro.py plays, and what it was seen to do.
type Workload struct {
	Plan experiment.Plan
	// Failures of Trials replies broke when it was measured; 0 of 0 says that
	// nobody measured it.
	Failures, Trials int
}

// requests is how many a play of it sends, about.
func (w *Workload) requests() int { return w.Plan.Workload.Sessions * w.Plan.Workload.Rounds }

// A small workload fails only in some of its plays, so repro.py has several,
// of other seeds; of a large one fewer.
const (
	mostPlays    = 10
	mostRequests = 1000
)

// Made says what a bundle has.
type Made struct {
	Dir   string   `json:"dir"`
	Files []string `json:"files"`
	// NoRepro says why there is no repro.py.
	NoRepro string `json:"no_repro,omitempty"`
	Masked  bool   `json:"masked"` // users' text was replaced
}

// Write makes a bundle.
func Write(o Options) (Made, error) {
	b := &bundle{Options: o, made: Made{Dir: o.Dir}, ended: map[int64]time.Duration{}}
	if _, err := os.Stat(o.Dir); err == nil {
		return b.made, fmt.Errorf("make bundle: %s exists; choose another with --output", o.Dir)
	}
	if err := b.read(); err != nil {
		return b.made, err
	}
	for _, write := range []func() error{b.history, b.repro, b.configs, b.logs, b.verdict, b.readme} {
		if err := write(); err != nil {
			return b.made, fmt.Errorf("make bundle: %w", err)
		}
	}
	slices.Sort(b.made.Files)
	return b.made, nil
}

type bundle struct {
	Options
	plan   experiment.Plan
	judged oracle.Verdict
	header history.Header
	ops    []*history.Op // of the main phase; none where they are users'
	ended  map[int64]time.Duration
	made   Made
}

func (b *bundle) read() (err error) {
	if b.plan, err = experiment.ReadPlan(b.Run); err != nil {
		return fmt.Errorf("%w\nIs %s a run directory?", err, b.Run)
	}
	text, err := os.ReadFile(filepath.Join(b.Run, experiment.VerdictFile))
	if err != nil {
		return fmt.Errorf("%w\nHas it been judged? culprit check %s", err, b.Run)
	}
	if err := json.Unmarshal(text, &b.judged); err != nil {
		return fmt.Errorf("read verdict of %s: %w", b.Run, err)
	}
	// What the program makes up itself is nobody's. Anything else may be users'.
	b.made.Masked = !slices.Contains(workload.Kinds(), b.plan.Workload.Kind)
	return nil
}

// write puts a file into the bundle.
func (b *bundle) write(name string, content []byte, mode fs.FileMode) error {
	path := filepath.Join(b.Dir, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	b.made.Files = append(b.made.Files, name)
	return os.WriteFile(path, content, mode)
}

func (b *bundle) writeJSON(name string, value any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", "  ")
	e.SetEscapeHTML(false)
	if err := e.Encode(value); err != nil {
		return err
	}
	return b.write(name, text.Bytes(), 0o644)
}

// history copies the run's, with secrets and users' text taken out.
func (b *bundle) history() (err error) {
	r, err := history.Open(filepath.Join(b.Run, experiment.HistoryFile))
	if err != nil {
		return err
	}
	defer r.Close()
	b.header = r.Header()
	if err := os.MkdirAll(b.Dir, 0o755); err != nil {
		return err
	}
	w, err := history.Create(filepath.Join(b.Dir, experiment.HistoryFile), b.header)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	b.made.Files = append(b.made.Files, experiment.HistoryFile)
	secret := secretSettings(b.plan.ExtraBody)
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		switch {
		case record.Op != nil:
			op := *record.Op
			b.ended[op.ID] = op.LastByte
			op.Error, op.Request = target.Redact(op.Error), withoutSecrets(op.Request, secret)
			if b.made.Masked {
				mask(&op)
			} else if op.Phase == history.Main {
				kept := op // the reader uses its memory again
				kept.Request, kept.Chunks = slices.Clone(op.Request), nil
				b.ops = append(b.ops, &kept)
			}
			err = w.Op(&op)
		case record.Event != nil:
			e := *record.Event
			e.Text = target.Redact(e.Text)
			err = w.Event(&e)
		}
		if err != nil {
			return err
		}
	}
}

// turn is a request of a repro.
type turn struct {
	Op      int64           `json:"op"`
	Request json.RawMessage `json:"request"`
	Expect  history.Expect  `json:"expect"`
}

// requests are the conversations that the run sent.
func (b *bundle) requests() [][]turn {
	sessions := map[int][]turn{}
	for _, op := range b.ops {
		if op.Outcome == history.Cancelled {
			continue // when it is cancelled matters, and the repro doesn't know
		}
		sessions[op.Session] = append(sessions[op.Session], turn{op.ID, op.Request, op.Expect})
	}
	var all [][]turn
	for _, i := range slices.Sorted(maps.Keys(sessions)) {
		all = append(all, sessions[i])
	}
	return all
}

// play is what a workload sends to a server that answers all of it right. Its
// requests are numbered from number on.
func play(p experiment.Plan, number *int64) ([][]turn, error) {
	w, err := workload.New(p.Workload)
	if err != nil {
		return nil, err
	}
	o := load.Options{Model: p.Model, NoStream: p.NoStream, ExtraBody: maps.Clone(p.ExtraBody)}
	for _, name := range secretSettings(p.ExtraBody) {
		delete(o.ExtraBody, name)
	}
	var all [][]turn
	for i := range p.Workload.Sessions {
		var turns []turn
		s := w.Session(i, false)
		for t, ok := s.Next(nil); ok; {
			*number++
			if t.CancelAfter > 0 || t.CancelChunks > 0 {
				t, ok = s.Next(nil)
				continue
			}
			body, err := o.Body(&t)
			if err != nil {
				return nil, err
			}
			turns = append(turns, turn{*number, body, t.Expect})
			t, ok = s.Next(workload.RightReply(t))
		}
		all = append(all, turns)
	}
	return all, nil
}

// plays are what repro.py plays, one after the other, or why there is nothing.
func (b *bundle) plays() (plays [][][]turn, none string, err error) {
	switch {
	case b.Workload != nil:
		p, number := b.Workload.Plan, int64(0)
		for range min(mostPlays, max(1, mostRequests/b.Workload.requests())) {
			conversations, err := play(p, &number)
			if err != nil {
				return nil, "", err
			}
			plays = append(plays, conversations)
			p.Workload.Seed++
			p.Workload.RunKey = "" // the seed's own
		}
		return plays, "", nil
	case b.made.Masked:
		return nil, "the run replays users' requests, whose text isn't in the bundle", nil
	}
	conversations := b.requests()
	if len(conversations) == 0 {
		return nil, "the run has no requests under load", nil
	}
	return [][][]turn{conversations}, "", nil
}

// repro writes requests as a program that sends them: those of the run, or
// those of the smaller workload.
func (b *bundle) repro() error {
	plays, none, err := b.plays()
	if err != nil || none != "" {
		b.made.NoRepro = none
		return err
	}
	text, err := json.Marshal(plays)
	if err != nil {
		return err
	}
	var packed bytes.Buffer
	z, err := zlib.NewWriterLevel(&packed, zlib.BestCompression)
	if err != nil {
		return err
	}
	if _, err := z.Write(text); err != nil {
		return err
	}
	if err := z.Close(); err != nil {
		return err
	}
	sum := sha256.Sum256(text)
	plan, seen, seenWhen, what := b.plan, b.judged.Broken.Main, "in the run that failed", reproRun
	if w := b.Workload; w != nil {
		plan, seenWhen, what = w.Plan, "when it was shrunk", reproWorkload
		seen.Failures, seen.Trials = w.Failures, w.Trials
	}
	model, err := json.Marshal(plan.Model)
	if err != nil {
		return err
	}
	timeout := load.DefaultTimeout.Seconds()
	if plan.TimeoutMS > 0 {
		timeout = float64(plan.TimeoutMS) / 1000
	}
	concurrency := plan.Concurrency
	if concurrency == 0 {
		concurrency = len(plays[0]) // an open loop: as many as there can be
	}
	program := strings.NewReplacer(
		"@TITLE@", pythonText(b.title()), "@WHAT@", what, "@CONCURRENCY@", strconv.Itoa(concurrency), "@MODEL@", string(model),
		"@TIMEOUT@", strconv.FormatFloat(timeout, 'f', -1, 64), "@SHA256@", hex.EncodeToString(sum[:]),
		"@BROKEN@", strconv.Itoa(seen.Failures), "@JUDGED@", strconv.Itoa(seen.Trials), "@SEEN@", seenWhen,
		"@PACKED@", lines(base64.StdEncoding.EncodeToString(packed.Bytes()), 120),
	).Replace(reproTemplate)
	return b.write(ReproFile, []byte(program), 0o755)
}

// What repro.py says of itself.
const (
	reproRun = `It sends the very requests of the run that
failed, as many conversations at once, and checks every reply against the only
right answer; before that, some of the conversations one at a time, as a control.`
	reproWorkload = `It plays a small workload, shrunk from
the run that failed, several times with other contents, and checks every reply
against the only right answer; before that, some of the conversations one at a
time, as a control.`
)

// pythonText fits into a docstring.
func pythonText(s string) string {
	return strings.NewReplacer(`\`, `\\`, `"`, "'").Replace(s)
}

func lines(text string, width int) string {
	var b strings.Builder
	for len(text) > width {
		b.WriteString(text[:width] + "\n")
		text = text[width:]
	}
	b.WriteString(text)
	return b.String()
}

// configs writes what was running: of each arm, or of the run.
func (b *bundle) configs() error {
	b.plan.ExtraBody = redactBody(b.plan.ExtraBody)
	if err := b.writeJSON(experiment.PlanFile, b.plan); err != nil {
		return err
	}
	arms := b.Arms
	if len(arms) == 0 {
		arms = []Arm{{Name: "run", Dir: b.Run}}
	}
	var first *target.Attestation
	for _, a := range arms {
		if err := b.config(a, &first); err != nil {
			return err
		}
	}
	return nil
}

func (b *bundle) config(a Arm, first **target.Attestation) error {
	dir := configDir + "/" + a.Name + "/"
	plan, err := experiment.ReadPlan(a.Dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err == nil && a.Dir != b.Run {
		plan.ExtraBody = redactBody(plan.ExtraBody)
		if err := b.writeJSON(dir+experiment.PlanFile, plan); err != nil {
			return err
		}
	}
	text, err := os.ReadFile(filepath.Join(a.Dir, experiment.AttestFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	at := new(target.Attestation)
	if err := json.Unmarshal(text, at); err != nil {
		return fmt.Errorf("read attestation of %s: %w", a.Dir, err)
	}
	if err := b.write(dir+experiment.AttestFile, text, 0o644); err != nil { // secrets were left out when it was taken
		return err
	}
	if *first == nil {
		*first = at
		return b.write("versions.txt", versions(b.Tool, b.plan, at), 0o644)
	}
	var diff strings.Builder
	for _, d := range target.Diff(*first, at) {
		fmt.Fprintf(&diff, "%s %s: %s | %s\n", d.Kind, d.Name, d.A, d.B)
	}
	return b.write(dir+"differs.txt", []byte(diff.String()), 0o644)
}

// redactBody replaces the settings of a request that may be secret.
func redactBody(body map[string]json.RawMessage) map[string]json.RawMessage {
	out := maps.Clone(body)
	for _, name := range secretSettings(body) {
		out[name] = json.RawMessage(strconv.Quote(target.Redacted))
	}
	return out
}

// secretSettings are those that are secret by name or by shape.
func secretSettings(body map[string]json.RawMessage) (names []string) {
	for name, value := range body {
		if text := strings.Trim(string(value), `"`); target.RedactNamed(name, text) != text {
			names = append(names, name)
		}
	}
	return names
}

// withoutSecrets takes secret settings out of a request as it was sent.
func withoutSecrets(request json.RawMessage, secret []string) json.RawMessage {
	var body map[string]json.RawMessage
	if len(secret) == 0 || json.Unmarshal(request, &body) != nil {
		return request
	}
	for _, name := range secret {
		delete(body, name)
	}
	out, err := json.Marshal(body)
	if err != nil {
		return request
	}
	return out
}

// versions says what ran, in lines.
func versions(tool string, p experiment.Plan, a *target.Attestation) []byte {
	var b strings.Builder
	line := func(name, value string) {
		if value != "" {
			fmt.Fprintf(&b, "%-20s %s\n", name, value)
		}
	}
	line("tool", tool)
	line("server", p.Server)
	line("engine", strings.TrimSpace(a.Engine+" "+a.Version))
	line("models", strings.Join(a.Models, ", "))
	for _, h := range a.Hosts {
		line("kernel", h.Kernel)
		for _, g := range h.GPUs {
			line("gpu", g.Name+", driver "+g.Driver)
		}
	}
	for _, q := range a.Packages {
		line("package "+q.Name, strings.TrimSpace(q.Version+" "+q.Commit+" sha256 "+q.SHA256))
	}
	for _, name := range slices.Sorted(maps.Keys(a.Distributions)) {
		line(name, a.Distributions[name])
	}
	for _, m := range a.Missing {
		line("not read", m)
	}
	return []byte(b.String())
}

func (b *bundle) verdict() error {
	v := b.judged
	if b.made.Masked {
		v.Broken.Examples, v.Broken.ControlExamples = nil, nil
		v.Classes = slices.Clone(v.Classes)
		for i := range v.Classes {
			v.Classes[i].Examples, v.Classes[i].ControlExamples = nil, nil
		}
	}
	if err := b.writeJSON(experiment.VerdictFile, v); err != nil {
		return err
	}
	if b.Finding == nil {
		return nil
	}
	return b.writeJSON(experiment.FindingFile, b.Finding)
}

// title is the verdict in a sentence.
func (b *bundle) title() string {
	r := b.judged.Broken.Main
	text := fmt.Sprintf("%s: %d of %d replies broken at %d conversations at once", b.judged.Status, r.Failures, r.Trials, b.plan.Concurrency)
	if b.Finding != nil && b.Finding.Status == search.Found && len(b.Finding.Causes) > 0 {
		text += "; needed for it: " + b.Finding.Causes[0].Set.String()
	}
	return text
}

func (b *bundle) readme() error {
	var w strings.Builder
	fmt.Fprintf(&w, "# %s\n\nMade by %s from a run of %s.\n", oneLine(b.title()), b.Tool, b.header.Started.UTC().Format(time.DateTime+" UTC"))
	for _, r := range b.judged.Reasons {
		fmt.Fprintf(&w, "\n- %s", oneLine(r))
	}
	fmt.Fprintf(&w, "\n\nServer: %s, model %s. Workload: %s, %d conversations of %d rounds.\n",
		oneLine(b.plan.Server), oneLine(b.plan.Model), b.plan.Workload.Kind, b.plan.Workload.Sessions, b.plan.Workload.Rounds)
	if b.Finding != nil {
		b.arms(&w)
	}
	w.WriteString("\n## See it again\n\n")
	if b.made.NoRepro != "" {
		fmt.Fprintf(&w, "There is no %s: %s.\n", ReproFile, b.made.NoRepro)
	} else {
		sends := "sends the run's requests again"
		if s := b.Workload; s != nil {
			sends = fmt.Sprintf("plays a workload of %d requests (%d conversations of %d rounds) several times", s.requests(), s.Plan.Workload.Sessions, s.Plan.Workload.Rounds)
		}
		fmt.Fprintf(&w, "    python3 %s --base-url http://127.0.0.1:30000\n\nneeds Python alone: it %s, checks every reply, prints the rate under load and alone, and exits\nwith 1 when it broke under load.\n", ReproFile, sends)
	}
	w.WriteString("\n## What is here\n\n")
	for _, f := range slices.Sorted(slices.Values(append(b.made.Files, ReadmeFile))) {
		fmt.Fprintf(&w, "- `%s`%s\n", f, explain(f))
	}
	if b.made.Masked {
		w.WriteString("\nThe text of users is replaced by `x` and `0`, letter by letter; the verdict is of the real text.\n")
	}
	return b.write(ReadmeFile, []byte(w.String()), 0o644)
}

func (b *bundle) arms(w *strings.Builder) {
	w.WriteString("\n## The arms\n\n| arm | launches | broken | 95% at any time |\n|---|---|---|---|\n")
	row := func(name string, e search.Evidence) {
		fmt.Fprintf(w, "| %s | %d | %d of %d | %.1f%% to %.1f%% |\n", name, e.Launches, e.Failures, e.Requests, 100*e.Low, 100*e.High)
	}
	for _, c := range b.Finding.Causes {
		row("all safe but "+c.Set.String(), c.With)
		for _, e := range c.Without {
			row("as it fails, but "+e.Factor+"="+e.Arm[e.Factor], e)
		}
	}
	fmt.Fprintf(w, "\nWrong with probability under %g. \"Needed\" is under this workload; it isn't the root cause by itself.\n", b.Finding.Error)
}

func explain(name string) string {
	switch filepath.Base(name) {
	case ReproFile:
		return ": the requests, and a program that sends and checks them"
	case experiment.HistoryFile:
		return ": every request with everything that came back and when; `culprit check` reads it"
	case experiment.VerdictFile:
		return ": counts, intervals, examples wanted and got"
	case experiment.FindingFile:
		return ": which settings are needed, and what that rests on"
	case experiment.AttestFile:
		return ": read back from the live server: command line, environment, what it says, hashes of its source"
	case "differs.txt":
		return ": against the first arm"
	case experiment.PlanFile:
		return ": what was sent"
	}
	if strings.HasPrefix(name, logsDir+"/") {
		return ": around the first broken replies"
	}
	return ""
}

func oneLine(s string) string { return strings.Join(strings.Fields(s), " ") }

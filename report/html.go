package report

import (
	"crypto/sha256"
	_ "embed"
	"encoding/base64"
	"fmt"
	"html/template"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
)

// PageFile is the page of a hunt or a run, in its directory.
const PageFile = "report.html"

//go:embed page.html
var pageText string

//go:embed style.css
var style string

//go:embed live.js
var liveScript string

// The page is safe to open whatever a model wrote: every text goes through
// html/template, and the page's own policy allows no script, no request and no
// style but its own. A page that is served while its hunt runs has one script,
// ours, which asks for nothing but the page itself.
var pageTemplate = template.Must(template.New("page").Parse(pageText))

// page is what the template shows. Texts in it are plain; what models and
// servers wrote has gone through [visible].
type page struct {
	Title, Word, Class, Sentence string
	Reasons                      []string // paragraphs below the sentence
	Sections                     []section
	Hunt                         *huntPage
	Run                          *runPage
	Again                        []Command
	Tool, Made                   string
	Hypotheses                   []hypothesisPage
	Evidence                     string
	Style                        template.CSS
	Policy                       string
	Live                         bool
	Now                          string
	Script                       template.JS
}

type section struct{ ID, Title string }

func (p *page) write(w io.Writer) error {
	p.Style = template.CSS(style) //nolint:gosec // it is ours
	p.Policy = "default-src 'none'; style-src " + source(style) + "; img-src data:; base-uri 'none'; form-action 'none'"
	if p.Live {
		p.Script = template.JS(liveScript) //nolint:gosec // it is ours
		p.Policy += "; script-src " + source(liveScript) + "; connect-src 'self'"
	}
	for i, c := range p.Again {
		p.Again[i] = Command{visible(c.Shows), visible(c.Line)}
	}
	if len(p.Again) > 0 {
		p.Sections = append(p.Sections, section{"again", "See it again"})
	}
	if err := pageTemplate.Execute(w, p); err != nil {
		return fmt.Errorf("write page: %w", err)
	}
	return nil
}

// source names a text in a page's policy.
func source(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "'sha256-" + base64.StdEncoding.EncodeToString(sum[:]) + "'"
}

// PageOptions is what a hunt's page shows beside its record.
type PageOptions struct {
	Tool       string // name and version of the program
	Made       time.Time
	Again      []Command
	Hypotheses *Standing // nil where the case has none
	// Live is of a page that is served while the hunt goes on; Now says what it
	// is doing.
	Live bool
	Now  string
}

// HuntPage writes the page of a hunt. Its links start from the hunt's own
// directory.
func HuntPage(w io.Writer, r *experiment.Record, o PageOptions) error {
	word, _ := statusWord(r.Result.Status)
	p := page{
		Title: filepath.Base(r.Dir), Word: word, Class: "warn", Again: slices.Clone(o.Again),
		Tool: o.Tool, Made: o.Made.Format("2006-01-02 15:04"), Hunt: newHuntPage(r), Live: o.Live, Now: visible(o.Now),
	}
	said := sentences(r)
	p.Sentence = said[0]
	if len(said) > 1 {
		p.Reasons = []string{strings.Join(said[1:], " ")}
	}
	if o.Hypotheses != nil && len(o.Hypotheses.Hypotheses) > 0 {
		p.Hypotheses, p.Evidence = newHypothesisPages(o.Hypotheses, r.Dir), standingSentence(o.Hypotheses)
	}
	switch {
	case r.Result.Status == search.Found:
		p.Class = "fails"
		p.Reasons = append(p.Reasons, claimScope(r))
	case r.Result.Status != search.Running:
	case len(r.Trials) == 0 && p.Hypotheses != nil:
		p.Word, p.Sentence, p.Evidence = "HYPOTHESES", p.Evidence, ""
	case o.Live:
		p.Word, p.Sentence = "HUNTING", soFar(r)
	}
	p.Sections = p.Hunt.sections()
	if p.Hypotheses != nil {
		p.Sections = append(p.Sections, section{"hypotheses", "Hypotheses"})
	}
	worst := r.Worst()
	if worst == nil {
		worst = r.WorstAsked()
	}
	if worst != nil {
		dir := filepath.Join(r.Dir, worst.Dir)
		v, err := experiment.ReadVerdict(dir)
		if err != nil {
			return err
		}
		if p.Run, err = newRunPage(dir, worst.Dir, v); err != nil {
			return err
		}
		o := worst.Observation
		p.Run.Broken = fmt.Sprintf("%s of %s replies broken.", count(o.Failures), count(o.Requests))
		p.Run.Title = fmt.Sprintf("The trial with the most broken replies: %d", r.Number(worst))
		p.Sections = append(p.Sections, p.Run.sections()...)
		if n := r.Number(worst) - 1; r.Worst() != nil {
			p.Hunt.Trials[n].Links = linksTo("", v.Broken.Ops, p.Run.shown())
		}
	}
	p.Sections = append(p.Sections, p.Hunt.recordSections()...)
	return p.write(w)
}

// soFar says what a hunt that goes on thinks.
func soFar(r *experiment.Record) string {
	text := fmt.Sprintf("The hunt goes on, after %s in %s.", counted(len(r.Trials), "trial", "trials"), counted(r.Result.Launches, "launch", "launches"))
	for _, b := range slices.Backward(r.Beliefs) {
		if b == nil {
			continue
		}
		if now := leading(*b); now != "" {
			return text + " The likeliest causes now: " + now + "."
		}
	}
	return text
}

// RunPage writes the page of a run.
func RunPage(w io.Writer, v *oracle.Verdict, run Run, tool string, made time.Time) error {
	p := page{
		Title: filepath.Base(run.Dir), Word: strings.ToUpper(string(v.Status)), Class: statusClass(v.Status), Sentence: brokenText(v),
		Tool: tool, Made: made.Format("2006-01-02 15:04"),
	}
	for _, reason := range v.Reasons {
		p.Reasons = append(p.Reasons, visible(reason))
	}
	var err error
	if p.Run, err = newRunPage(run.Dir, "", v); err != nil {
		return err
	}
	p.Run.Title = "The run"
	p.Run.Broken = visible(sentText(v, run) + "; to " + serverText(v) + ".")
	p.Sections = p.Run.sections()
	p.Again = []Command{{"judge it again", "culprit check " + run.Dir}}
	return p.write(w)
}

func statusClass(status oracle.Status) string {
	switch status {
	case oracle.Clean:
		return "clean"
	case oracle.Corrupt, oracle.Wedged:
		return "fails"
	case oracle.Numerics, oracle.NotExercised, oracle.Void, oracle.Inconclusive:
	}
	return "warn"
}

// visible makes control characters and those that turn the direction of text
// visible, but keeps lines.
func visible(text string) string {
	lines := strings.Split(text, "\n")
	for i := range lines {
		lines[i] = term.Safe(lines[i])
	}
	return strings.Join(lines, "\n")
}

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

// The page is safe to open whatever a model wrote: every text goes through
// html/template, and the page's own policy allows no script, no request and no
// style but its own.
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
	Style                        template.CSS
	StyleHash                    string
}

type section struct{ ID, Title string }

func (p *page) write(w io.Writer) error {
	sum := sha256.Sum256([]byte(style))
	p.Style, p.StyleHash = template.CSS(style), base64.StdEncoding.EncodeToString(sum[:]) //nolint:gosec // it is ours
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

// HuntPage writes the page of a hunt. dir is where its links start from: the
// hunt's own directory.
func HuntPage(w io.Writer, r *experiment.Record, tool string, made time.Time, again []Command) error {
	word, _ := statusWord(r.Result.Status)
	p := page{
		Title: filepath.Base(r.Dir), Word: word, Class: "warn", Again: slices.Clone(again),
		Tool: tool, Made: made.Format("2006-01-02 15:04"), Hunt: newHuntPage(r),
	}
	said := sentences(r)
	p.Sentence, p.Reasons = said[0], []string{strings.Join(said[1:], " ")}
	if r.Result.Status == search.Found {
		p.Class = "fails"
		p.Reasons = append(p.Reasons, claimScope(r))
	}
	p.Sections = p.Hunt.sections()
	if worst := r.Worst(); worst != nil {
		dir := filepath.Join(r.Dir, worst.Dir)
		v, err := experiment.ReadVerdict(dir)
		if err != nil {
			return err
		}
		if p.Run, err = newRunPage(dir, worst.Dir, v); err != nil {
			return err
		}
		p.Run.Title = fmt.Sprintf("The trial with the most broken replies: %d", r.Number(worst))
		p.Sections = append(p.Sections, p.Run.sections()...)
	}
	p.Sections = append(p.Sections, p.Hunt.recordSections()...)
	return p.write(w)
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

package oracle

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// CULPRIT_CORPUS names folders of ordinary text, separated like PATH. Without
// it, Go's own documentation and part of its source are measured.
const corpusVariable = "CULPRIT_CORPUS"

// mostFalseAlarms per thousand pieces of ordinary text: no detector is to be
// worse. Texts about the very thing (tables of characters, chat templates,
// test data) are most of them.
const mostFalseAlarms = 7.0

// pieceBytes is a long reply: some 600 tokens.
const pieceBytes = 2400

// TestFalseAlarms counts what the text detectors say about ordinary text and
// code, cut into pieces the size of replies. A piece's prompt is the piece before
// it, so that a text in Japanese isn't held against a reply that goes on in it.
func TestFalseAlarms(t *testing.T) {
	roots := filepath.SplitList(os.Getenv(corpusVariable))
	limit := 300_000_000
	if len(roots) == 0 {
		goroot, err := exec.Command("go", "env", "GOROOT").Output()
		if err != nil {
			t.Skip("no Go source to measure on")
		}
		for _, dir := range []string{"doc", "src/net", "src/unicode"} {
			roots = append(roots, filepath.Join(strings.TrimSpace(string(goroot)), dir))
		}
		limit = 3_000_000
	}
	alarms := map[Class]int{}
	pieces := 0
	for _, root := range roots {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() || limit <= 0 {
				return nil
			}
			text, err := os.ReadFile(path)
			if err != nil || strings.IndexByte(string(text[:min(len(text), 8000)]), 0) >= 0 {
				return nil // a binary file
			}
			limit -= len(text)
			before := ""
			for piece := range piecesOf(string(text)) {
				pieces++
				found := textViolations(before, piece)
				before = piece
				for _, v := range found {
					alarms[v.Class]++
					if alarms[v.Class] <= 40 {
						t.Logf("%s: %s: %s: %.80q", v.Class, path, v.Note, v.Got)
					}
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if pieces == 0 {
		t.Skipf("no text under %q", roots)
	}
	for _, class := range []Class{MixedScripts, BrokenText, ConstantRun, Repetition, SpecialToken} {
		rate := 1000 * float64(alarms[class]) / float64(pieces)
		t.Logf("%-14s %4d alarms in %d pieces: %.2f per thousand", class, alarms[class], pieces, rate)
		if rate > mostFalseAlarms && os.Getenv(corpusVariable) == "" {
			t.Errorf("%s: %.2f false alarms per thousand pieces, more than %v", class, rate, mostFalseAlarms)
		}
	}
}

func piecesOf(text string) func(func(string) bool) {
	return func(yield func(string) bool) {
		for len(text) > 0 {
			cut := min(len(text), pieceBytes)
			if at := strings.LastIndexByte(text[:cut], '\n'); at > 0 && cut < len(text) {
				cut = at + 1
			}
			if !yield(text[:cut]) {
				return
			}
			text = text[cut:]
		}
	}
}

// textViolations judges a text as a reply, to that prompt, that ran into its
// limit.
func textViolations(prompt, text string) []Violation {
	v := &View{
		Op:      &history.Op{ID: 1, Outcome: history.OK},
		Reply:   &openai.Reply{Content: text, FinishReason: "length"},
		decoded: true, request: &openai.ChatRequest{Messages: []openai.Message{{Role: "user", Content: openai.Text(prompt)}}},
	}
	return judgeOne(v, Script, Run, Loop, Special)
}

package main

import (
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/culprit-project/culprit/lab/fault"
)

var trackAll = flag.Bool("track", false, "run every story of testdata/track, not only those of quickTracks")

// quickTracks are the stories that each test run plays: of the engine, of the
// parser, and one of a server that doesn't recover.
var quickTracks = []string{"first-token-swap", "parser-drop", "poison"}

// TestTrackRecord plays the stories in which the tool finds the lab's faults.
// docs/track-record.md says what each must come to.
func TestTrackRecord(t *testing.T) {
	var files []string
	for _, name := range quickTracks {
		files = append(files, filepath.Join("testdata", "track", name+".txtar"))
	}
	if *trackAll {
		var err error
		if files, err = filepath.Glob("testdata/track/*.txtar"); err != nil {
			t.Fatal(err)
		}
	}
	testscript.Run(t, testscript.Params{
		Files:               files,
		RequireExplicitExec: true,
		Setup:               setExamples,
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"waitfile": waitFile,
			"waitops":  waitOps,
			"post":     post,
		},
	})
}

// post sends a request that must be answered with 200: post URL BODY.
func post(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) != 2 {
		ts.Fatalf("usage: post URL BODY")
	}
	resp, err := http.Post(args[0], "application/json", strings.NewReader(args[1]))
	ts.Check(err)
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		ts.Fatalf("%s says %s", args[0], resp.Status)
	}
}

// untracked are faults that no story finds; docs/track-record.md says why.
var untracked []string

// TestTrackRecordIsComplete: each fault has a story, which sets it, and a row.
func TestTrackRecordIsComplete(t *testing.T) {
	document, err := os.ReadFile("../../docs/track-record.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range fault.Catalogue() {
		if !strings.Contains(string(document), "\n| `"+e.Name+"` |") {
			t.Errorf("docs/track-record.md has no row of %s", e.Name)
		}
		story, err := os.ReadFile(filepath.Join("testdata", "track", e.Name+".txtar"))
		if missing := slices.Contains(untracked, e.Name); missing != (err != nil) {
			t.Errorf("%s: story %v, listed as untracked %t", e.Name, err, missing)
		}
		if err == nil && !regexp.MustCompile(`--fault[= ]`+e.Name+`\b`).Match(story) {
			t.Errorf("%s: its story doesn't set it", e.Name)
		}
	}
}

package ledger

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var now = time.UnixMilli(1_800_000_000_123)

// processVariable tells this test's executable that it is one of many writers.
const processVariable = "CULPRIT_LEDGER_TEST_WRITER"

const writes = 40

func TestMain(m *testing.M) {
	if name := os.Getenv(processVariable); name != "" {
		if err := writer(os.Args[1], name); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// writer does what a hunt does, beside others that do it too.
func writer(path, name string) error {
	ctx := context.Background()
	l, err := Open(ctx, path)
	if err != nil {
		return err
	}
	defer l.Close()
	if _, err := l.Add(ctx, Hypothesis{Name: "shared", Statement: "everybody adds it", Written: now, Predictions: []Prediction{{Text: "rate() > 0"}}}); err != nil {
		return err
	}
	for i := range writes {
		id, _, err := l.AddEvidence(ctx, Evidence{Kind: "run", Source: fmt.Sprintf("%s/%d", name, i), Content: json.RawMessage(`{}`), Taken: now})
		if err != nil {
			return err
		}
		if err := l.Judge(ctx, []Judgement{{Prediction: 1, Evidence: id, Verdict: Undecided, Error: 1, Judged: now}}); err != nil {
			return err
		}
	}
	return nil
}

func open1(t *testing.T, path string) *Ledger {
	t.Helper()
	l, err := Open(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

func TestSeveralProcesses(t *testing.T) {
	path := filepath.Join(t.TempDir(), File)
	const processes = 4
	var all sync.WaitGroup
	for i := range processes {
		all.Go(func() {
			c := exec.Command(os.Args[0], path)
			c.Env = append(os.Environ(), fmt.Sprintf("%s=writer%d", processVariable, i))
			if out, err := c.CombinedOutput(); err != nil {
				t.Errorf("writer %d: %v\n%s", i, err, out)
			}
		})
	}
	all.Wait()
	l := open1(t, path)
	evidence, err := l.Evidence(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	judgements, err := l.Judgements(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(evidence) != processes*writes || len(judgements) != processes*writes {
		t.Errorf("%d pieces of evidence and %d judgements, want %d of each", len(evidence), len(judgements), processes*writes)
	}
	hypotheses, err := l.Hypotheses(t.Context())
	if err != nil || len(hypotheses) != 1 || len(hypotheses[0].Predictions) != 1 {
		t.Errorf("hypotheses: %+v, %v; want the one that all added", hypotheses, err)
	}
}

func TestKeepsWhatIsWritten(t *testing.T) {
	ctx := t.Context()
	path := filepath.Join(t.TempDir(), "a case's dir?#%", File)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	l := open1(t, path)
	h := Hypothesis{Name: "stale", Statement: "a page is stale", Source: "test", Written: now, Predictions: []Prediction{{Text: "rate() > 0.1"}, {Text: "rate(radix=safe) < 0.01"}}}
	if added, err := l.Add(ctx, h); err != nil || !added {
		t.Fatalf("add: %v, %v", added, err)
	}
	if added, err := l.Add(ctx, h); err != nil || added {
		t.Errorf("add again: %v, %v; want false", added, err)
	}
	other := h
	other.Predictions = h.Predictions[:1]
	if _, err := l.Add(ctx, other); !isDiffers(err) {
		t.Errorf("another of that name: %v, want a DiffersError", err)
	}
	number := 0.18
	e := Evidence{Kind: "run", Source: "runs/0001", Content: json.RawMessage(`{"requests":320}`), Taken: now}
	id, _, err := l.AddEvidence(ctx, e)
	if err != nil {
		t.Fatal(err)
	}
	if again, added, err := l.AddEvidence(ctx, e); err != nil || added || again != id {
		t.Errorf("evidence again: %d, %v, %v; want %d, false", again, added, err, id)
	}
	first := Judgement{Prediction: 1, Evidence: id, Verdict: Supported, Number: &number, Error: 0.001, Text: "18%", Judged: now}
	second := first
	second.Verdict = Refuted
	for _, j := range []Judgement{first, second} {
		if err := l.Judge(ctx, []Judgement{j}); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := l.AddClaim(ctx, Claim{Investigator: "a", Statement: "it is stale", Hypothesis: 1, Content: json.RawMessage(`[]`), Made: now}); err != nil {
		t.Fatal(err)
	}
	l2 := open1(t, path)
	gotH, err1 := l2.Hypotheses(ctx)
	gotE, err2 := l2.Evidence(ctx)
	gotJ, err3 := l2.Judgements(ctx)
	gotC, err4 := l2.Claims(ctx)
	if err := errors.Join(err1, err2, err3, err4); err != nil {
		t.Fatal(err)
	}
	noID := cmpopts.IgnoreFields
	for _, d := range []string{
		cmp.Diff([]Hypothesis{h}, gotH, noID(Hypothesis{}, "ID"), noID(Prediction{}, "ID")),
		cmp.Diff([]Evidence{e}, gotE, noID(Evidence{}, "ID")),
		cmp.Diff([]Judgement{first}, gotJ, noID(Judgement{}, "ID")),
		cmp.Diff([]Claim{{1, "a", "it is stale", 1, json.RawMessage(`[]`), now}}, gotC),
	} {
		if d != "" {
			t.Errorf("kept (-want +got):\n%s", d)
		}
	}
	for _, table := range []string{"hypothesis", "prediction", "evidence", "judgement", "claim"} {
		for _, q := range []string{"DELETE FROM " + table, "UPDATE " + table + " SET id = id + 1"} {
			if _, err := l.db.ExecContext(ctx, q); err == nil || !strings.Contains(err.Error(), "keeps everything") {
				t.Errorf("%s: %v, want that the ledger keeps everything", q, err)
			}
		}
	}
}

func isDiffers(err error) bool {
	_, ok := errors.AsType[*DiffersError](err)
	return ok
}

func TestMigrate(t *testing.T) {
	path := filepath.Join(t.TempDir(), File)
	l := open1(t, path)
	if _, err := l.Add(t.Context(), Hypothesis{Name: "old", Written: now}); err != nil {
		t.Fatal(err)
	}
	more := append([]string{}, migrations...)
	more = append(more, "ALTER TABLE hypothesis ADD COLUMN extra TEXT")
	newer, err := open(t.Context(), path, more)
	if err != nil {
		t.Fatal(err)
	}
	defer newer.Close()
	if got, err := newer.Hypotheses(t.Context()); err != nil || len(got) != 1 {
		t.Errorf("after the migration: %v, %v; want the old hypothesis", got, err)
	}
	if _, err := Open(t.Context(), path); err == nil || !strings.Contains(err.Error(), "newer culprit") {
		t.Errorf("open a newer one: %v, want an error that says so", err)
	}
}

func TestOtherFiles(t *testing.T) {
	dir := t.TempDir()
	text := filepath.Join(dir, "text.db")
	if err := os.WriteFile(text, []byte(strings.Repeat("not a database\n", 100)), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), text); err == nil {
		t.Error("a text file was opened as a ledger")
	}
	if _, err := OpenExisting(t.Context(), filepath.Join(dir, "none.db")); !errors.Is(err, ErrNone) {
		t.Errorf("no file: %v, want ErrNone", err)
	}
	foreign := filepath.Join(dir, "foreign.db")
	f, err := sql.Open("sqlite", foreign)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.ExecContext(t.Context(), "CREATE TABLE theirs (x); PRAGMA user_version = 1"); err != nil {
		t.Fatal(err)
	}
	f.Close()
	if _, err := Open(t.Context(), foreign); err == nil || !strings.Contains(err.Error(), "another program") {
		t.Errorf("another program's database: %v", err)
	}
}

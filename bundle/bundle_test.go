package bundle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/workload"
)

const (
	userText = "Gretchen's invoice 4711"
	secret   = "sk-proj-abcdefghijklmnopqrstuvwxyz0123456789ABCD"
)

// makeRun writes a run of three ops, the second of them broken.
func makeRun(t *testing.T, kind string, started time.Time) string {
	t.Helper()
	dir := t.TempDir()
	plan := experiment.Plan{Model: "m", Concurrency: 2, Workload: workload.Plan{Kind: kind, Sessions: 3}, ExtraBody: map[string]json.RawMessage{
		"auth": json.RawMessage(`"` + secret + `"`), "top_k": json.RawMessage("1"), "my_api_key": json.RawMessage(`"hunter2"`),
	}}
	header := history.Header{Format: history.Format, Started: started, Workload: json.RawMessage(`{}`), Model: "m"}
	w, err := history.Create(filepath.Join(dir, experiment.HistoryFile), header)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		request := fmt.Sprintf(`{"model":"m","messages":[{"role":"user","content":%q}],"max_tokens":7,"auth":%q,"my_api_key":"hunter2"}`, fmt.Sprint(userText, i), secret)
		op := history.Op{
			ID: int64(i + 1), Phase: history.Main, Session: i, Outcome: history.OK, Status: 200, LastByte: time.Duration(i+1) * 10 * time.Minute,
			Request: json.RawMessage(request), Expect: history.Expect{Answer: userText},
			Chunks: []history.Chunk{{Data: []byte(`{"id":"x1","choices":[{"delta":{"content":"` + userText + `"},"finish_reason":"stop"}]}`)}, {Data: []byte("[DONE]")}},
		}
		if i == 2 {
			op.Outcome, op.Error, op.Status = history.Failed, "refused: Bearer "+secret, 401
		}
		if err := w.Op(&op); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Event(&history.Event{Kind: history.Log, Name: "x", Text: "Authorization: Bearer " + secret}), w.Close()); err != nil {
		t.Fatal(err)
	}
	var v oracle.Verdict
	v.Status, v.Broken.Ops = oracle.Corrupt, []int64{2}
	v.Broken.Main.Failures, v.Broken.Main.Trials = 1, 3
	v.Broken.Examples = []oracle.Example{{Op: 2, Got: userText}}
	var log strings.Builder
	for minute := range 40 {
		fmt.Fprintf(&log, "[%s] step\n  api_key=%s\n", started.Add(time.Duration(minute)*time.Minute).Local().Format(time.DateTime), secret)
	}
	if err := errors.Join(
		experiment.WriteJSON(filepath.Join(dir, experiment.PlanFile), plan), experiment.WriteJSON(filepath.Join(dir, experiment.VerdictFile), v),
		os.Mkdir(filepath.Join(dir, "logs"), 0o755), os.WriteFile(filepath.Join(dir, "logs", "server.log"), []byte(log.String()), 0o644),
	); err != nil {
		t.Fatal(err)
	}
	return dir
}

// everything is the text of all files of a bundle, the history's written out.
func everything(t *testing.T, dir string) string {
	t.Helper()
	var all strings.Builder
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		if d.Name() != experiment.HistoryFile {
			b, err := os.ReadFile(path)
			all.Write(b)
			return err
		}
		r, err := history.Open(path)
		if err != nil {
			return err
		}
		defer r.Close()
		for {
			record, err := r.Next()
			if errors.Is(err, io.EOF) {
				return nil
			}
			if err != nil {
				return err
			}
			b, err := json.Marshal(record)
			if err != nil {
				return err
			}
			all.Write(b)
			if record.Op != nil {
				for _, c := range record.Op.Chunks {
					all.Write(c.Data)
				}
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	return all.String()
}

func TestUsersTextAndSecretsStayOut(t *testing.T) {
	started := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	for _, tt := range []struct {
		kind   string
		masked bool
	}{{"recorded", true}, {"agent", false}} {
		t.Run(tt.kind, func(t *testing.T) {
			out := filepath.Join(t.TempDir(), "out")
			made, err := Write(Options{Dir: out, Run: makeRun(t, tt.kind, started), Tool: "culprit test"})
			if err != nil {
				t.Fatal(err)
			}
			text := everything(t, out)
			if strings.Contains(text, secret) || strings.Contains(text, "hunter2") {
				t.Error("a secret is in the bundle")
			}
			if got := strings.Contains(text, "Gretchen") || strings.Contains(text, "4711"); got == tt.masked {
				t.Errorf("users' text is there: %t, want %t", got, !tt.masked)
			}
			if made.Masked != tt.masked || (made.NoRepro != "") != tt.masked {
				t.Errorf("masked %t, no repro %q", made.Masked, made.NoRepro)
			}
			if tt.masked && !strings.Contains(text, "Xxxxxxxx'x xxxxxxx 0000") {
				t.Error("the text has lost its shape")
			}
		})
	}
}

// The log around the broken op, 20 minutes in, and no more.
func TestLogsAroundFailures(t *testing.T) {
	started := time.Date(2026, 3, 4, 5, 6, 7, 0, time.UTC)
	out := filepath.Join(t.TempDir(), "out")
	if _, err := Write(Options{Dir: out, Run: makeRun(t, "agent", started)}); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(out, "logs", "server.log"))
	if err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(string(b), "step"); n != 3 || strings.Count(string(b), "api_key") != 3 {
		t.Errorf("%d lines around the failure, want those of minutes 19, 20 and 21, each with what belongs to it:\n%s", n, b)
	}
}

func TestLogsWithoutTimes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.log")
	var log strings.Builder
	for i := range 3 * tailLines {
		fmt.Fprintf(&log, "line %d\n", i)
	}
	if err := os.WriteFile(path, []byte(log.String()), 0o644); err != nil {
		t.Fatal(err)
	}
	b, err := near(path, []time.Time{time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Count(string(b), "\n"); got != tailLines || !strings.HasSuffix(string(b), fmt.Sprintf("line %d\n", 3*tailLines-1)) {
		t.Errorf("%d lines, want the last %d", got, tailLines)
	}
}

func TestMaskJSON(t *testing.T) {
	for _, tt := range []struct{ name, in, want string }{
		{"request", `{"role":"user","content":"Call Ms. Ng at 555"}`, `{"content":"Xxxx Xx. Xx xx 000","role":"user"}`},
		{"parts", `{"content":[{"type":"text","text":"héllo"}]}`, `{"content":[{"text":"xxxxx","type":"text"}]}`},
		{"arguments", `{"arguments":"{\"to\":\"ann\"}"}`, `{"arguments":"{\"xx\":\"xxx\"}"}`},
		{"numbers stay", `{"seed":12345678901234567890}`, `{"seed":12345678901234567890}`},
		{"done", `[DONE]`, `[DONE]`},
		{"no JSON", `oops: Ann`, `xxxx: Xxx`},
		{"two values", `{"a":"b"} {"c":"secret"}`, `{"x":"x"} {"x":"xxxxxx"}`},
	} {
		if got := string(maskJSON([]byte(tt.in))); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.name, got, tt.want)
		}
	}
}

// TestPlays: a workload's plays are complete, differ, and number their
// requests; secret settings aren't in them.
func TestPlays(t *testing.T) {
	run := makeRun(t, "recorded", time.Now())
	w, err := workload.Plan{Kind: "agent", Sessions: 3, Rounds: 2, Seed: 7}.WithDefaults()
	if err != nil {
		t.Fatal(err)
	}
	plan := experiment.Plan{Model: "m", Workload: w, ExtraBody: map[string]json.RawMessage{"top_k": json.RawMessage("1"), "my_api_key": json.RawMessage(`"hunter2"`)}}
	out := filepath.Join(t.TempDir(), "out")
	made, err := Write(Options{Dir: out, Run: run, Workload: &Workload{Plan: plan}})
	if err != nil || made.NoRepro != "" || !made.Masked {
		t.Fatalf("%v, %+v", err, made)
	}
	if text := everything(t, out); strings.Contains(text, "Gretchen") {
		t.Error("users' text is there")
	}
	b := &bundle{Options: Options{Workload: &Workload{Plan: plan}}}
	plays, none, err := b.plays()
	if err != nil || none != "" || len(plays) != mostPlays {
		t.Fatalf("%d plays, %q, %v", len(plays), none, err)
	}
	seen, number := map[string]bool{}, int64(0)
	for _, p := range plays {
		if len(p) != 3 {
			t.Errorf("%d conversations, want 3", len(p))
		}
		for _, turns := range p {
			if len(turns) != 2 {
				t.Errorf("%d turns, want 2", len(turns))
			}
			for _, turn := range turns {
				number++
				text := string(turn.Request)
				if turn.Op != number || seen[text] || turn.Expect.Call == nil || !strings.Contains(text, `"top_k":1`) || strings.Contains(text, "hunter2") {
					t.Errorf("request %d, want %d, seen %t: %s", turn.Op, number, seen[text], text)
				}
				seen[text] = true
			}
		}
	}
	plan.Workload.Sessions = mostRequests
	b.Workload.Plan = plan
	if plays, _, err := b.plays(); err != nil || len(plays) != 1 {
		t.Errorf("%d plays of a large workload, %v", len(plays), err)
	}
}

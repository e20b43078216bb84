package oracle

import (
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
)

// writeRun writes a clean history as a healthy server and a good model leave
// it: sessions of 4 rounds, streamed, each reply some text and a right tool
// call in about so many chunks of 250 bytes. It returns the uncompressed size
// of requests and chunks.
func writeRun(t testing.TB, path string, sessions, chunks int) (size int64) {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	words := strings.Fields("the file that you asked for is in this folder and its last line says what the next step will be so I read it first before anything else changes there again")
	text := func(n int) string {
		var b strings.Builder
		for range n {
			b.WriteString(words[r.IntN(len(words))])
			b.WriteByte(" .,\n"[min(r.IntN(40), 3)*r.IntN(2)])
			b.WriteByte(' ')
		}
		return b.String()
	}
	started := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	w, err := history.Create(path, history.Header{
		Started: started, Tool: "culprit test", Model: "small", RunKey: hex.EncodeToString(testKey), Sessions: sessions,
		Concurrency: sessions, Cores: 2, Workload: json.RawMessage(`{"kind":"agent"}`),
	})
	if err != nil {
		t.Fatal(err)
	}
	check := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	tools := `[{"type":"function","function":{"name":"read_file","description":"Reads a file.","parameters":{"type":"object","properties":{"path":{"type":"string"}},"required":["path"],"additionalProperties":false}}}]`
	check(w.Event(&history.Event{Kind: history.Started, Name: string(history.Main)}))
	id := int64(0)
	context := make([]string, sessions)
	for s := range context {
		context[s] = text(1500)
	}
	at := time.Duration(0)
	for turn := range 4 {
		start := at
		for session := range sessions {
			id++
			context[session] += text(300)
			canary := history.Canary(testKey, session, false)
			op := history.Op{
				ID: id, Phase: history.Main, Kind: "agent", Session: session, Turn: turn, InFlight: sessions, Stream: true,
				Planned: start, Sent: start + time.Millisecond, Status: 200, Outcome: history.OK,
			}
			prompt, _ := json.Marshal(canary + " " + context[session])
			op.Request = json.RawMessage(fmt.Sprintf(`{"model":"small","messages":[{"role":"system","content":%s},{"role":"user","content":"Go on."}],"tools":%s,"temperature":0,"stream":true}`, prompt, tools))
			name := fmt.Sprintf("src/file%d.go", r.IntN(10000))
			op.Expect = history.Expect{Canary: canary, Call: &history.Call{Name: "read_file", Arguments: map[string]string{"path": name}}}
			when := op.Sent + 200*time.Millisecond
			add := func(delta, finish string) {
				when += 20*time.Millisecond + time.Duration(r.IntN(1e6))
				op.Chunks = append(op.Chunks, history.Chunk{At: when, Data: fmt.Appendf(nil,
					`{"id":"chatcmpl-3f7c2a9d5b8e4f60a1c2d3e4f5a6b7c8","object":"chat.completion.chunk","created":1767323045,"model":"small-instruct-fp8","choices":[{"index":0,"delta":%s,"logprobs":null,"finish_reason":%s,"stop_reason":null}],"prompt_token_ids":null}`, delta, finish)})
			}
			add(`{"role":"assistant","content":""}`, "null")
			for range chunks {
				piece, _ := json.Marshal(strings.TrimSpace(text(1)) + " ")
				add(`{"content":`+string(piece)+`}`, "null")
			}
			add(`{"tool_calls":[{"index":0,"id":"call_1","type":"function","function":{"name":"read_file","arguments":""}}]}`, "null")
			for _, piece := range []string{`{\"pa`, `th\": \"`, name[:6], name[6:], `\"}`} {
				add(`{"tool_calls":[{"index":0,"function":{"arguments":"`+piece+`"}}]}`, "null")
			}
			add(`{}`, `"tool_calls"`)
			op.Chunks = append(op.Chunks, history.Chunk{At: when, Data: fmt.Appendf(nil,
				`{"id":"chatcmpl-3f7c2a9d5b8e4f60a1c2d3e4f5a6b7c8","object":"chat.completion.chunk","created":1767323045,"model":"small-instruct-fp8","choices":[],"usage":{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d,"prompt_tokens_details":{"cached_tokens":%d}}}`,
				len(context[session])/4, chunks+8, len(context[session])/4+chunks+8, turn*400)}, history.Chunk{At: when, Data: []byte("[DONE]")})
			op.FirstByte, op.LastByte = op.Chunks[0].At, when
			at = max(at, when)
			size += int64(len(op.Request))
			for _, c := range op.Chunks {
				size += int64(len(c.Data))
			}
			check(w.Op(&op))
		}
		for tick := start; tick < at; tick += time.Second {
			check(w.Event(&history.Event{At: tick, Kind: history.Tick, Values: map[string]float64{"in_flight": float64(sessions), "chunks": 1000, "late_ms": 0.2, "cpu": 0.3}}))
		}
	}
	check(w.Event(&history.Event{At: at, Kind: history.Ended, Name: string(history.Main)}))
	check(w.Close())
	return size
}

func judgeFile(t testing.TB, path string) *Verdict {
	t.Helper()
	r, err := history.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	v, err := Judge(r, Options{})
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// TestCleanRun is a healthy server's run of the usual size: nothing may fire,
// and the judging is done before anybody looks at a clock.
func TestCleanRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	writeRun(t, path, 80, 40)
	began := time.Now()
	v := judgeFile(t, path)
	t.Logf("judged in %v", time.Since(began))
	if v.Status != Clean {
		t.Errorf("status %q: %s", v.Status, strings.Join(v.Reasons, "; "))
	}
	for _, c := range v.Classes {
		if c.Main.Failures > 0 {
			t.Errorf("%s: %s, for instance %+v", c.Class, c.Main, c.Examples[0])
		}
	}
	if v.Broken.Main.Trials != 320 {
		t.Errorf("%d ops were judged, want 320", v.Broken.Main.Trials)
	}
}

// BenchmarkJudge is all oracles over a run of streamed replies, reading and
// decompressing included. MB/s is of uncompressed history; the project asks
// for 150 on one core.
func BenchmarkJudge(b *testing.B) {
	path := filepath.Join(b.TempDir(), "history.jsonl.zst")
	b.SetBytes(writeRun(b, path, 80, 300))
	b.ReportAllocs()
	for b.Loop() {
		if v := judgeFile(b, path); v.Status != Clean {
			b.Fatal(v.Status)
		}
	}
}

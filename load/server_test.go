package load_test

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

const (
	chunkA    = `{"choices":[{"index":0,"delta":{"content":"a"}}]}`
	chunkStop = `{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}`
	whole     = `{"choices":[{"index":0,"message":{"role":"assistant","content":"a"},"finish_reason":"stop"}]}`
	streamed  = "data: " + chunkA + "\n\ndata: " + chunkStop + "\n\ndata: [DONE]\n\n"
	streamOK  = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
	wholeOK   = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
)

func gzipped(s string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, s)
	w.Close()
	return b.String()
}

// chunked is s as one chunk of an HTTP body, without the body's end.
func chunked(s string) string {
	var b strings.Builder
	w := bufio.NewWriter(&b)
	w.WriteString("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
	w.WriteString(strings.ToUpper(hex(len(s))) + "\r\n" + s + "\r\n")
	w.Flush()
	return b.String()
}

func hex(n int) string {
	const digits = "0123456789abcdef"
	if n < 16 {
		return digits[n : n+1]
	}
	return hex(n/16) + digits[n%16:n%16+1]
}

// Whatever a server does is the outcome of that op; the next one goes on.
func TestServers(t *testing.T) {
	for _, test := range []struct {
		name     string
		response string
		stay     bool // the server leaves the connection open
		noStream bool // what the client asks for

		outcome history.Outcome
		err     string   // contained in the op's error
		status  int      // HTTP
		stream  bool     // as recorded
		chunks  []string // as recorded; nil where they aren't compared
		content string   // of the reply that the session is shown
	}{
		{"sound", streamOK + streamed, false, false, history.OK, "", 200, true, []string{chunkA, chunkStop, "[DONE]"}, "a"},
		{"not streamed", wholeOK + whole, false, true, history.OK, "", 200, false, []string{whole}, "a"},
		{"not streamed though it was asked for", wholeOK + whole, false, false, history.OK, "", 200, false, []string{whole}, "a"},
		{"streamed under another type", "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + streamed, false, false, history.OK, "", 200, true, []string{chunkA, chunkStop, "[DONE]"}, "a"},
		{"streamed under no type, a comment first", "HTTP/1.0 200 OK\r\n\r\n: ping\n\n" + streamed, false, false, history.OK, "", 200, true, []string{chunkA, chunkStop, "[DONE]"}, "a"},
		{"without [DONE]", streamOK + "data: " + chunkA + "\n\ndata: " + chunkStop + "\n\n", false, false, history.OK, "", 200, true, []string{chunkA, chunkStop}, "a"},
		{"gzip, not asked for", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n" + gzipped(streamed), false, false, history.OK, "", 200, true, []string{chunkA, chunkStop, "[DONE]"}, "a"},
		{"gzip that is cut", "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n" + gzipped(streamed)[:30], false, false, history.Failed, "unexpected EOF", 200, true, nil, ""},
		{"gzip that isn't", "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nConnection: close\r\n\r\n" + streamed, false, false, history.Failed, "gzip: invalid header", 200, false, nil, ""},
		{"an encoding nobody asked for", "HTTP/1.1 200 OK\r\nContent-Encoding: br\r\nConnection: close\r\n\r\nxx", false, false, history.Failed, `Content-Encoding "br"`, 200, true, nil, ""},

		{"closes without an answer", "", false, false, history.Failed, "no response: EOF", 0, true, nil, ""},
		{"speaks something else", "SSH-2.0-OpenSSH_9.6\r\n", false, false, history.Failed, "malformed HTTP", 0, true, nil, ""},
		{"cuts the stream", chunked("data: " + chunkA + "\n\ndata: {"), false, false, history.Failed, "the reply broke off after 1 chunks: unexpected EOF", 200, true, []string{chunkA}, ""},
		{"500 as JSON", "HTTP/1.1 500 Internal Server Error\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n" + `{"error":{"message":"CUDA error"}}`, false, false, history.Failed, "HTTP 500: CUDA error", 500, true, []string{`{"error":{"message":"CUDA error"}}`}, ""},
		{"502 as HTML", "HTTP/1.1 502 Bad Gateway\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<h1>502</h1>", false, false, history.Failed, "HTTP 502: <h1>502</h1>", 502, true, []string{"<h1>502</h1>"}, ""},
		{"503 with nothing", "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n", false, false, history.Failed, "HTTP 503: the body is empty", 503, true, nil, ""},
		{"an error that repeats the key", "HTTP/1.1 401 Unauthorized\r\nConnection: close\r\n\r\n" + `{"error":"bad key sk-0123456789abcdef"}`, false, false, history.Failed, "HTTP 401: bad key [secret]", 401, true, []string{`{"error":"bad key [secret]"}`}, ""},
		{"a page where a reply should be", "HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nConnection: close\r\n\r\n<html>login</html>", false, false, history.Failed, "not a reply: <html>login</html>", 200, false, []string{"<html>login</html>"}, ""},
		{"a page in a stream's type", streamOK + "<html>login</html>", false, false, history.Failed, "not a stream of server-sent events", 200, true, []string{"<html>login</html>"}, ""},
		{"a stream of nothing", streamOK, false, false, history.Failed, "the stream ended without an event", 200, true, nil, ""},
		{"a redirect", "HTTP/1.1 307 Temporary Redirect\r\nLocation: https://elsewhere/v1\r\nContent-Length: 0\r\n\r\n", false, false, history.Failed, "HTTP 307, which redirects to https://elsewhere/v1", 307, false, nil, ""},
		{"an error in mid-stream", streamOK + "data: " + chunkA + "\n\ndata: {\"error\":{\"message\":\"boom\"}}\n\ndata: [DONE]\n\n", false, false, history.Failed, "error in mid-stream: boom", 200, true, []string{chunkA, `{"error":{"message":"boom"}}`, "[DONE]"}, ""},
		{"an error event of plain text", streamOK + "event: error\ndata: boom\n\n", false, false, history.Failed, "error in mid-stream: boom", 200, true, []string{"boom"}, ""},
		{"llama.cpp's error field", streamOK + "data: " + chunkA + "\n\nerror: {\"code\":500,\"message\":\"boom\",\"type\":\"server_error\"}\n\n", false, false, history.Failed, "error in mid-stream: boom", 200, true, nil, ""},
		{"one event without end", streamOK + "data: " + chunkA + "\n\ndata: " + strings.Repeat("x", 100_000), true, false, history.Failed, "event is too large", 200, true, []string{chunkA}, ""},
		{"a stream without end", streamOK + strings.Repeat("data: "+strings.Repeat("x", 50_000)+"\n\n", 700), true, false, history.Failed, "the reply is larger than 32 MiB", 200, true, nil, ""},
		{"a body without end", wholeOK + strings.Repeat("x", 200_000), true, false, history.Failed, "the body is larger than 65536 bytes", 200, false, nil, ""},
		{"silence in mid-stream", streamOK + "data: " + chunkA + "\n\n", true, false, history.TimedOut, "gave up after 1 chunks", 200, true, []string{chunkA}, ""},
		{"silence in the header", "HTTP/1.1 200 OK\r\n", true, false, history.TimedOut, "gave up after 0 chunks", 0, true, nil, ""},
		{"breaks off after [DONE]", chunked(streamed), false, false, history.OK, "", 200, true, []string{chunkA, chunkStop, "[DONE]"}, "a"},
		{"open after [DONE]", streamOK + streamed, true, false, history.OK, "", 200, true, []string{chunkA, chunkStop, "[DONE]"}, "a"},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				l := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
				go serveRaw(l, test.response, test.stay)
				m := &memory{}
				s := &script{turns: []workload.Turn{{Request: hello, NoStream: test.noStream}, {Request: openai.ChatRequest{}, NoStream: true}}}
				o := load.Options{
					BaseURL: "http://server", Dial: l.dial, Start: time.Now(), History: m, Workload: s, Sessions: 1,
					Timeout: time.Minute, EventLimit: 64 << 10, APIKey: "sk-0123456789abcdef",
				}
				mustRun(t, o)
				l.Close()
				op := m.ops[0]
				if op.Outcome != test.outcome || op.Status != test.status || op.Stream != test.stream {
					t.Errorf("%s, status %d, stream %t", op.Outcome, op.Status, op.Stream)
				}
				if !strings.Contains(op.Error, test.err) || (op.Error == "") != (test.err == "") {
					t.Errorf("error %q, want %q", op.Error, test.err)
				}
				var chunks []string
				for _, c := range op.Chunks {
					chunks = append(chunks, string(c.Data))
				}
				if test.chunks != nil {
					if diff := cmp.Diff(test.chunks, chunks); diff != "" {
						t.Errorf("chunks (-want +got):\n%s", diff)
					}
				}
				switch reply := s.replies[0]; {
				case test.outcome != history.OK:
					if reply != nil {
						t.Errorf("the session was shown %+v", reply)
					}
				case reply.Content != test.content || reply.FinishReason != "stop":
					t.Errorf("the session was shown %+v", reply)
				}
				if want := map[bool]time.Duration{true: time.Minute}[test.outcome == history.TimedOut]; op.LastByte-op.Sent != want {
					t.Errorf("it ended after %v, want %v", op.LastByte-op.Sent, want)
				}
				if next := m.ops[1]; next.Outcome != history.OK {
					t.Errorf("the next op: %s, %s", next.Outcome, next.Error)
				}
			})
		})
	}
}

// serveRaw answers the first connection with response and later ones well.
func serveRaw(l *pipeListener, response string, stay bool) {
	for first := true; ; first = false {
		c, err := l.Accept()
		if err != nil {
			return
		}
		response, stay := response, stay
		if !first {
			response, stay = wholeOK+whole, false
		}
		go func() {
			defer c.Close()
			r := bufio.NewReader(c)
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			io.Copy(io.Discard, req.Body)
			if _, err := io.WriteString(c, response); err == nil && stay {
				io.Copy(io.Discard, r) // until the client hangs up
			}
		}()
	}
}

// llama.cpp promises to keep a connection and hangs up after each stream. A
// request that was sent on it meanwhile would fail, without the server's doing.
func TestHangsUpAfterReply(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := &pipeListener{conns: make(chan net.Conn), done: make(chan struct{})}
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					r := bufio.NewReader(c)
					if req, err := http.ReadRequest(r); err == nil {
						io.Copy(io.Discard, req.Body)
						io.WriteString(c, chunked(streamed)+"0\r\n\r\n")
						r.ReadByte() // of the next request, or the end
					}
				}()
			}
		}()
		m := &memory{}
		s := &script{turns: []workload.Turn{{Request: hello}, {Request: hello}, {Request: hello}}}
		mustRun(t, load.Options{BaseURL: "http://server", Dial: l.dial, Start: time.Now(), History: m, Workload: s, Sessions: 1})
		l.Close()
		for _, op := range m.ops {
			if op.Outcome != history.OK {
				t.Errorf("op %d: %s, %s", op.ID, op.Outcome, op.Error)
			}
		}
	})
}

// Chunks of any size, many of them, are recorded byte for byte.
func TestLargeReply(t *testing.T) {
	var sent []string
	for i := range 3000 {
		size := i % 300
		if i%500 == 0 {
			size = 100*i + 1
		}
		sent = append(sent, strings.Repeat(string(rune('a'+i%26)), size))
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		events := openai.NewWriter(w, nil)
		for _, data := range sent {
			events.Event([]byte(data))
		}
	}))
	defer server.Close()
	m := &memory{}
	mustRun(t, load.Options{BaseURL: server.URL, History: m, Workload: &script{turns: []workload.Turn{{Request: hello}, {Request: hello}}}, Sessions: 4, Concurrency: 2})
	for _, op := range m.ops {
		var got []string
		for _, c := range op.Chunks {
			got = append(got, string(c.Data))
		}
		if diff := cmp.Diff(sent, got); diff != "" {
			t.Fatalf("op %d: chunks (-sent +recorded):\n%s", op.ID, diff)
		}
	}
}

// What a server is sent.
func TestRequests(t *testing.T) {
	zero := 0.0
	request := openai.ChatRequest{Model: "theirs", Messages: []openai.Message{{Role: "user", Content: "a < b"}}, MaxTokens: 5, Temperature: &zero}
	for _, test := range []struct {
		name       string
		base       string // after the server's address
		o          load.Options
		path, body string
		header     http.Header
	}{
		{
			"plain", "",
			load.Options{},
			"/v1/chat/completions",
			`{"model":"theirs","messages":[{"role":"user","content":"a < b"}],"max_tokens":5,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`,
			http.Header{"Content-Type": {"application/json"}, "Accept-Encoding": nil, "Authorization": nil},
		},
		{
			"with /v1, a key and a model", "/v1/",
			load.Options{APIKey: "k", Model: "ours"},
			"/v1/chat/completions",
			`{"model":"ours","messages":[{"role":"user","content":"a < b"}],"max_tokens":5,"temperature":0,"stream":true,"stream_options":{"include_usage":true}}`,
			http.Header{"Authorization": {"Bearer k"}},
		},
		{
			"under a path, without usage", "/api/v1",
			load.Options{NoUsage: true},
			"/api/v1/chat/completions",
			`{"model":"theirs","messages":[{"role":"user","content":"a < b"}],"max_tokens":5,"temperature":0,"stream":true}`, nil,
		},
		{
			"the whole address", "/v1/chat/completions",
			load.Options{NoStream: true},
			"/v1/chat/completions",
			`{"model":"theirs","messages":[{"role":"user","content":"a < b"}],"max_tokens":5,"temperature":0}`, nil,
		},
		{
			"more members and headers", "",
			load.Options{
				NoStream:  true,
				ExtraBody: map[string]json.RawMessage{"top_k": json.RawMessage(" 1 "), "max_tokens": json.RawMessage("9"), "chat_template_kwargs": json.RawMessage(`{"enable_thinking": false}`)},
				Header:    http.Header{"user-agent": {"me"}, "X-Team": {"a"}},
			},
			"/v1/chat/completions",
			`{"chat_template_kwargs":{"enable_thinking": false},"max_tokens":9,"top_k":1,"model":"theirs","messages":[{"role":"user","content":"a < b"}],"temperature":0}`,
			http.Header{"User-Agent": {"me"}, "X-Team": {"a"}},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			var path, body string
			var header http.Header
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				data, _ := io.ReadAll(r.Body)
				path, body, header = r.URL.Path, string(data), r.Header
				io.WriteString(w, whole)
			}))
			defer server.Close()
			m := &memory{}
			o := test.o
			o.BaseURL, o.History, o.Workload, o.Sessions = server.URL+test.base, m, &script{turns: []workload.Turn{{Request: request}}}, 1
			mustRun(t, o)
			if path != test.path {
				t.Errorf("path %s, want %s", path, test.path)
			}
			if diff := cmp.Diff(test.body, body); diff != "" {
				t.Errorf("body (-want +got):\n%s", diff)
			}
			if got := string(m.ops[0].Request); got != body {
				t.Errorf("recorded %s, sent %s", got, body)
			}
			for key, want := range test.header {
				if diff := cmp.Diff(want, header[key]); diff != "" {
					t.Errorf("header %s (-want +got):\n%s", key, diff)
				}
			}
		})
	}
}

func TestWrongOptions(t *testing.T) {
	s := &script{turns: []workload.Turn{{Request: hello}}}
	for _, test := range []struct {
		name string
		o    load.Options
		want string
	}{
		{"no workload", load.Options{BaseURL: "http://x", History: &memory{}}, "no workload"},
		{"no history", load.Options{BaseURL: "http://x", Workload: s}, "no workload or no history"},
		{"no scheme", load.Options{BaseURL: "localhost:8000", Workload: s, History: &memory{}}, `base URL "localhost:8000" isn't of the form`},
		{"negative", load.Options{BaseURL: "http://x", Workload: s, History: &memory{}, Sessions: -1}, "must not be negative"},
		{"extra body", load.Options{BaseURL: "http://x", Workload: s, History: &memory{}, Sessions: 1, ExtraBody: map[string]json.RawMessage{"a": json.RawMessage("{")}}, "extra body isn't JSON"},
	} {
		t.Run(test.name, func(t *testing.T) {
			if _, err := load.Run(t.Context(), test.o); err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error %v, want %q", err, test.want)
			}
		})
	}
}

// Over real sockets, with many sessions at once, into a real file: what is
// read back is what the server sent.
func TestHistoryFile(t *testing.T) {
	server := httptest.NewServer(tokens(20, time.Millisecond))
	defer server.Close()
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	w, err := history.Create(path, history.Header{Started: time.Now()})
	if err != nil {
		t.Fatal(err)
	}
	result := mustRun(t, load.Options{
		BaseURL: server.URL, History: w, Workload: &script{turns: []workload.Turn{{Request: hello}, {Request: hello}}}, Sessions: 40, Concurrency: 20,
	})
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if result.Ops.OK != 80 {
		t.Errorf("result %+v", result)
	}
	r, err := history.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ops := 0
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if record.Op == nil {
			continue
		}
		ops++
		var a openai.Assembler
		last := record.Op.Sent
		for _, c := range record.Op.Chunks {
			a.Add(c.Data)
			if c.At < last {
				t.Errorf("op %d: a chunk at %v after one at %v", record.Op.ID, c.At, last)
			}
			last = c.At
		}
		if reply := a.Reply(); reply.Content != "0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 " || !reply.Done || len(reply.Anomalies) > 0 {
			t.Errorf("op %d: %+v", record.Op.ID, reply)
		}
		if record.Op.LastByte < last {
			t.Errorf("op %d ended at %v, its last chunk came at %v", record.Op.ID, record.Op.LastByte, last)
		}
	}
	if ops != 80 || r.Truncated() {
		t.Errorf("%d ops, truncated %t", ops, r.Truncated())
	}
}

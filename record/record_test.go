package record

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/oracle"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// chunk is one event of a stream, as servers write it.
func chunk(text, finish string) string {
	delta, _ := json.Marshal(map[string]any{ //nolint:errchkjson // strings
		"id": "c1", "object": "chat.completion.chunk", "model": "m",
		"choices": []any{map[string]any{"index": 0, "delta": map[string]string{"content": text}, "finish_reason": map[bool]any{true: finish, false: nil}[finish != ""]}},
	})
	return string(delta)
}

// upstream streams three chunks; "wait" in the request makes it wait for the
// test before the second.
func upstream(t *testing.T, step <-chan struct{}) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		if r.URL.Path != "/v1/chat/completions" {
			fmt.Fprintf(w, "%s %s %s", r.Method, r.URL.Path, r.Header.Get("Authorization"))
			return
		}
		var out io.Writer = w
		flush := http.NewResponseController(w).Flush
		w.Header().Set("Content-Type", "text/event-stream")
		if r.Header.Get("Accept-Encoding") == "gzip" {
			w.Header().Set("Content-Encoding", "gzip")
			z := gzip.NewWriter(w)
			defer z.Close()
			out = z
		}
		events := openai.NewWriter(out, flush)
		for i, text := range []string{"Hel", "lo ", "Bob"} {
			if i == 1 && bytes.Contains(body, []byte("wait")) {
				select {
				case <-step:
				case <-r.Context().Done():
					return
				}
			}
			if i == 2 && bytes.Contains(body, []byte("break")) {
				panic(http.ErrAbortHandler)
			}
			if err := events.Event([]byte(chunk(text, map[bool]string{true: "stop"}[i == 2]))); err != nil {
				return
			}
		}
		_ = events.Done() // the client may have gone
	}))
	t.Cleanup(s.Close)
	return s
}

// proxied starts a proxy before a server. end closes both and returns the ops
// of all segments.
func proxied(t *testing.T, upstreamURL string, o Options) (url string, p *Proxy, end func() []*history.Op) {
	t.Helper()
	o.Upstream = mustParse(t, upstreamURL)
	if o.Dir == "" {
		o.Dir = t.TempDir()
	}
	p, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(p)
	var once sync.Once
	end = func() []*history.Op {
		once.Do(func() {
			s.Close()
			if err := p.Close(); err != nil {
				t.Error(err)
			}
			p.Transport.(*http.Transport).CloseIdleConnections()
		})
		return ops(t, o.Dir)
	}
	t.Cleanup(func() { end() })
	return s.URL, p, end
}

func mustParse(t testing.TB, raw string) *url.URL {
	t.Helper()
	u, err := url.Parse(raw)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func ops(t *testing.T, dir string) []*history.Op {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(dir, "*", history.FileName))
	if err != nil {
		t.Fatal(err)
	}
	var out []*history.Op
	for _, f := range files {
		r, err := history.Open(f)
		if err != nil {
			t.Fatal(err)
		}
		for {
			rec, err := r.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if rec.Op != nil {
				op := *rec.Op
				op.Chunks = slices.Clone(op.Chunks)
				for i, c := range op.Chunks {
					op.Chunks[i].Data = bytes.Clone(c.Data)
				}
				op.Request = bytes.Clone(op.Request)
				out = append(out, &op)
			}
		}
		r.Close()
	}
	return out
}

func request(texts ...string) string {
	var messages []map[string]string
	for i, text := range texts {
		messages = append(messages, map[string]string{"role": []string{"user", "assistant"}[i%2], "content": text})
	}
	b, _ := json.Marshal(map[string]any{"model": "m", "stream": true, "messages": messages, "seed": 7, "x_vendor": []int{1}}) //nolint:errchkjson // plain
	return string(b)
}

func post(ctx context.Context, t *testing.T, url, body string, header ...string) (*http.Response, error) {
	t.Helper()
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer very-secret-token")
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	transport := &http.Transport{DisableCompression: true, DisableKeepAlives: true}
	return transport.RoundTrip(r)
}

func text(op *history.Op) string {
	var a openai.Assembler
	for _, c := range op.Chunks {
		a.Add(c.Data)
	}
	return a.Reply().Content
}

func TestStreamPassesAtOnce(t *testing.T) {
	step := make(chan struct{})
	url, _, end := proxied(t, upstream(t, step).URL, Options{})
	resp, err := post(t.Context(), t, url, request("wait"))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b := bufio.NewReader(resp.Body)
	line, err := b.ReadString('\n') // the first event is here before the second is written
	if err != nil || !strings.Contains(line, "Hel") {
		t.Fatalf("first line %q, %v", line, err)
	}
	close(step)
	rest, err := io.ReadAll(b)
	if err != nil || !strings.HasSuffix(string(rest), "data: [DONE]\n\n") {
		t.Fatalf("the rest: %q, %v", rest, err)
	}
	resp.Body.Close()
	got := end()
	if len(got) != 1 {
		t.Fatalf("%d ops", len(got))
	}
	op := got[0]
	if op.Outcome != history.OK || op.Status != 200 || !op.Stream || text(op) != "Hello Bob" || op.InFlight != 1 || op.ID != 1 {
		t.Errorf("op %+v, text %q", op, text(op))
	}
	if d := cmp.Diff(request("wait"), string(op.Request)); d != "" {
		t.Errorf("the request's bytes (-sent +recorded):\n%s", d)
	}
	if op.Sent > op.FirstByte || op.FirstByte != op.Chunks[0].At || op.Chunks[0].At >= op.Chunks[1].At || op.Chunks[3].At > op.LastByte {
		t.Errorf("times: sent %v, first byte %v, chunks %v, last byte %v", op.Sent, op.FirstByte, op.Chunks, op.LastByte)
	}
}

func TestOutcomes(t *testing.T) {
	live := upstream(t, nil).URL
	tests := []struct {
		name, upstream, body string
		header               []string
		want                 history.Outcome
		wantText, wantError  string
	}{
		{"whole", live, request("hi"), nil, history.OK, "Hello Bob", ""},
		{"gzip", live, request("hi"), []string{"Accept-Encoding", "gzip"}, history.OK, "Hello Bob", ""},
		{"breaks off", live, request("break"), nil, history.Failed, "Hello ", "broke off after 2 chunks"},
		{"nobody there", "http://127.0.0.1:1", request("hi"), nil, history.Failed, "", "no response"},
		{"not JSON", live, "{", nil, history.OK, "Hello Bob", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			url, _, end := proxied(t, tt.upstream, Options{})
			resp, err := post(t.Context(), t, url, tt.body, tt.header...)
			if err != nil {
				t.Fatal(err)
			}
			_, err = io.ReadAll(resp.Body)
			resp.Body.Close()
			if broken := err != nil; broken != (tt.name == "breaks off") {
				t.Errorf("the client's reading ended with %v", err)
			}
			if (resp.StatusCode == http.StatusBadGateway) != (tt.name == "nobody there") {
				t.Errorf("the client got status %d", resp.StatusCode)
			}
			got := end()
			if len(got) != 1 {
				t.Fatalf("%d ops", len(got))
			}
			if op := got[0]; op.Outcome != tt.want || text(op) != tt.wantText || !strings.Contains(op.Error, tt.wantError) {
				t.Errorf("outcome %s, text %q, error %q", op.Outcome, text(op), op.Error)
			}
		})
	}
}

func TestClientHangsUp(t *testing.T) {
	url, p, end := proxied(t, upstream(t, make(chan struct{})).URL, Options{})
	ctx, cancel := context.WithCancel(t.Context())
	resp, err := post(ctx, t, url, request("wait"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := bufio.NewReader(resp.Body).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	cancel()
	resp.Body.Close()
	for p.inFlight.Load() > 0 { // the proxy hears of it from the kernel
		time.Sleep(time.Millisecond)
	}
	got := end()
	if len(got) != 1 || got[0].Outcome != history.Cancelled || text(got[0]) != "Hel" {
		t.Fatalf("ops %+v", got)
	}
}

func TestConversationsAndConcurrency(t *testing.T) {
	url, p, end := proxied(t, upstream(t, nil).URL, Options{})
	var wg sync.WaitGroup
	for i := range 40 {
		wg.Go(func() {
			for _, texts := range [][]string{{fmt.Sprint("I am ", i)}, {fmt.Sprint("I am ", i), "Hello Bob", "and now?"}} {
				resp, err := post(t.Context(), t, url, request(texts...))
				if err != nil {
					t.Error(err)
					return
				}
				io.ReadAll(resp.Body)
				resp.Body.Close()
			}
		})
	}
	wg.Wait()
	got := end()
	turns := map[int][]int{}
	for _, op := range got {
		turns[op.Session] = append(turns[op.Session], op.Turn)
	}
	if len(got) != 80 || len(turns) != 40 {
		t.Fatalf("%d ops of %d conversations, want 80 of 40", len(got), len(turns))
	}
	for s, ts := range turns {
		if slices.Sort(ts); !slices.Equal(ts, []int{0, 1}) {
			t.Errorf("conversation %d has turns %v", s, ts)
		}
	}
	if s := p.Stats(); s.Requests != 80 || s.Recorded != 80 || s.Dropped != 0 || s.Suspicious != 0 {
		t.Errorf("stats %+v", s)
	}
}

func TestSampleKeepsConversationsWhole(t *testing.T) {
	url, p, end := proxied(t, upstream(t, nil).URL, Options{Sample: 0.5})
	for i := range 40 {
		for _, texts := range [][]string{{fmt.Sprint("I am ", i)}, {fmt.Sprint("I am ", i), "Hello Bob", "and now?"}} {
			resp, err := post(t.Context(), t, url, request(texts...))
			if err != nil {
				t.Fatal(err)
			}
			io.ReadAll(resp.Body)
			resp.Body.Close()
		}
	}
	got := end()
	s := p.Stats()
	if int64(len(got)) != s.Recorded || s.Recorded+s.Unsampled != 80 || s.Recorded == 0 || s.Unsampled == 0 {
		t.Fatalf("stats %+v, %d ops", s, len(got))
	}
	count := map[int]int{}
	for _, op := range got {
		count[op.Session]++
	}
	for session, n := range count {
		if n != 2 {
			t.Errorf("conversation %d has %d of 2 ops", session, n)
		}
	}
}

// TestTrafficGoesOn takes away what recording needs.
func TestTrafficGoesOn(t *testing.T) {
	ask := func(t *testing.T, url string) {
		t.Helper()
		resp, err := post(t.Context(), t, url, request("hi"))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || !strings.HasSuffix(string(body), "data: [DONE]\n\n") {
			t.Errorf("the client got %q, %v", body, err)
		}
	}
	t.Run("no memory", func(t *testing.T) {
		url, p, end := proxied(t, upstream(t, nil).URL, Options{Memory: 64})
		ask(t, url)
		if got := end(); len(got) != 0 || p.Stats().Dropped != 1 || p.waiting.Load() != 0 {
			t.Errorf("%d ops, stats %+v, %d bytes kept", len(got), p.Stats(), p.waiting.Load())
		}
	})
	t.Run("slow disk", func(t *testing.T) {
		const after = 30
		answers := make(chan struct{})
		url, p, end := proxied(t, upstream(t, nil).URL, Options{Memory: 4 << 10, SegmentSize: 1, Segment: func(dir string) error {
			if !strings.HasSuffix(dir, "0001") {
				<-answers
			}
			return nil
		}})
		for range sizeEvery + after { // all come to their end, though the disk stands still
			ask(t, url)
		}
		before := p.Stats()
		if before.Requests != sizeEvery+after || before.Dropped == 0 || p.waiting.Load() > 4<<10 {
			t.Errorf("stats %+v, %d bytes kept", before, p.waiting.Load())
		}
		close(answers)
		end()
		if s := p.Stats(); s.Recorded <= before.Recorded || s.Recorded+s.Dropped != sizeEvery+after {
			t.Errorf("stats %+v, then %+v", before, s)
		}
	})
	t.Run("no disk", func(t *testing.T) {
		begun := 0
		url, p, end := proxied(t, upstream(t, nil).URL, Options{SegmentSize: 1, Segment: func(dir string) error {
			begun++
			if !strings.HasSuffix(dir, "0001") {
				return errors.New("no space left on device")
			}
			return nil
		}})
		for range sizeEvery + 5 { // the first segment ends after sizeEvery
			ask(t, url)
		}
		for p.Stats().Dropped < 5 {
			time.Sleep(time.Millisecond)
		}
		s := p.Stats()
		if s.Recorded != sizeEvery || s.Dropped != 5 || s.Trouble != "no space left on device" || p.waiting.Load() != 0 {
			t.Errorf("stats %+v, %d bytes kept", s, p.waiting.Load())
		}
		end()
		if begun != 2 { // the disk isn't asked again at once
			t.Errorf("%d segments were begun, want 2", begun)
		}
	})
}

func TestSegments(t *testing.T) {
	dir := t.TempDir()
	var segments []string
	url, _, end := proxied(t, upstream(t, nil).URL, Options{Dir: dir, SegmentSize: 1, TotalSize: 1, Segment: func(dir string) error {
		segments = append(segments, filepath.Base(dir))
		return nil
	}})
	for range 3*sizeEvery + 1 {
		resp, err := post(t.Context(), t, url, request("hi"))
		if err != nil {
			t.Fatal(err)
		}
		io.ReadAll(resp.Body)
		resp.Body.Close()
	}
	got := end()
	if d := cmp.Diff([]string{"0001", "0002", "0003", "0004"}, segments); d != "" {
		t.Error(d)
	}
	if len(got) != 1 || got[0].ID != 3*sizeEvery+1 { // the last one alone fits
		t.Errorf("%d ops are left", len(got))
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != "0004" {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestOtherPathsPass(t *testing.T) {
	url, p, end := proxied(t, upstream(t, nil).URL, Options{})
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url+"/v1/models", nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer x")
	transport := &http.Transport{DisableKeepAlives: true}
	resp, err := transport.RoundTrip(r)
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || string(body) != "GET /v1/models Bearer x" {
		t.Errorf("got %q, %v", body, err)
	}
	if got := end(); len(got) != 0 || p.Stats().Requests != 0 {
		t.Errorf("%d ops", len(got))
	}
}

// TestSynthetic checks that nothing of the words is left and that what oracles
// look at is.
func TestSynthetic(t *testing.T) {
	deltas := []string{"Dear Ma", "rgaret, your <|tool_call|> is 448", "1 至急 ", "!!!!!!!!!!!! ", "aaaaaaaaaaaaaa"}
	var chunks []history.Chunk
	for i, d := range deltas {
		chunks = append(chunks, history.Chunk{At: time.Duration(i), Data: []byte(chunk(d, ""))})
	}
	op := &history.Op{Request: json.RawMessage(`{"user":"mary@example.com","tools":[{"type":"function","function":{"name":"look_up","description":"Finds Margaret","parameters":{"properties":{"city":{"type":"string"}}}}}],"messages":[` +
		`{"role":"user","content":"I am Margaret of 4481 Elm"},{"role":"assistant","tool_calls":[{"id":"1","function":{"name":"look_up","arguments":"{\"city\":\"Margaret\\n\"}"}}]}]}`), Chunks: chunks}
	key := []byte("k")
	synthesize(op, key)
	again := &synthesizer{key: key, keep: map[string]bool{}}
	margaret := again.word("Margaret")
	got := text(op)
	for _, secret := range []string{"Margaret", "4481", "Elm", "mary", "Dear"} {
		if strings.Contains(string(op.Request)+got, secret) && !strings.Contains("Finds Margaret", secret) {
			t.Errorf("%q is still there", secret)
		}
	}
	if margaret == "Margaret" || len(margaret) != 8 {
		t.Errorf("Margaret became %q", margaret)
	}
	if !strings.Contains(string(op.Request), `{\"city\":\"`+margaret+`\\n\"}`) || !strings.Contains(string(op.Request), again.word("of")+" "+again.word("4481")) {
		t.Errorf("the request became %s", op.Request)
	}
	if !strings.HasPrefix(got, again.word("Dear")+" "+margaret+", ") || !strings.Contains(got, "<|tool_call|>") || !strings.Contains(got, "!!!!!!!!!!!!") {
		t.Errorf("the reply became %q", got)
	}
	if last := got[strings.LastIndex(got, " ")+1:]; strings.Trim(last, last[:1]) != "" || last[:1] == "a" {
		t.Errorf("the run became %q", last)
	}
	for i, c := range op.Chunks {
		var d struct {
			Choices []struct{ Delta struct{ Content string } }
		}
		if err := json.Unmarshal(c.Data, &d); err != nil || len([]rune(d.Choices[0].Delta.Content)) != len([]rune(deltas[i])) {
			t.Errorf("chunk %d became %s", i, c.Data)
		}
	}
	classes := func(synthetic bool) []oracle.Class {
		op := &history.Op{ID: 1, Phase: history.Main, Outcome: history.OK, Status: 200, Stream: true, Request: json.RawMessage(`{"messages":[]}`)}
		for i, d := range deltas {
			op.Chunks = append(op.Chunks, history.Chunk{At: time.Duration(i), Data: []byte(chunk(d, map[bool]string{true: "stop"}[i == len(deltas)-1]))})
		}
		if synthetic {
			synthesize(op, key)
		}
		_, classes := oracle.NewLive(history.Header{}).Violations(op)
		return classes
	}
	before, after := classes(false), classes(true)
	if d := cmp.Diff(before, after); d != "" || len(before) == 0 {
		t.Errorf("found before and after (%v): %s", before, d)
	}
}

func FuzzSynthetic(f *testing.F) {
	f.Add([]byte(request("hi")), []byte(chunk("x", "stop")))
	f.Add([]byte("{"), []byte(`{"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{\"a"}}]}}]}`))
	f.Fuzz(func(t *testing.T, body, data []byte) {
		op := &history.Op{Request: body, Chunks: []history.Chunk{{Data: data}, {Data: data}}}
		synthesize(op, []byte("k"))
		if json.Valid(body) && !json.Valid(op.Request) {
			t.Errorf("%q became %q", body, op.Request)
		}
	})
}

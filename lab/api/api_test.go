package api

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"github.com/culprit-project/culprit/lab"
	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/openai"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var testVocabulary = sync.OnceValues(func() (*model.Tokenizer, *model.Model) {
	words := []string{"ship", "berth"}
	for i := range 300 { // so that two often meet
		words = append(words, fmt.Sprintf("word%d", i))
	}
	t, err := model.NewTokenizer(words)
	if err != nil {
		panic(err)
	}
	return t, model.Random(1, t.Size())
})

type testServer struct {
	*httptest.Server
	engine *lab.Engine
	stop   func() // the engine, and waits for its end
}

func newServer(tb testing.TB, c lab.Config) *testServer {
	tb.Helper()
	c.Tokenizer, c.Model = testVocabulary()
	if c.MaxTokens == 0 {
		c.MaxTokens = 4096
	}
	e, err := lab.New(c)
	if err != nil {
		tb.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { e.Run(ctx) })
	s := &testServer{engine: e, stop: func() { cancel(); running.Wait() }}
	s.Server = httptest.NewServer(New(Options{Engine: e, Model: "tiny", Version: "culprit test", ID: "boot", Started: time.Unix(1e9, 0)}))
	tb.Cleanup(func() {
		s.stop()
		s.Close()
	})
	return s
}

// response is a http.Response that has been read.
type response struct {
	status int
	header http.Header
}

func (s *testServer) do(tb testing.TB, method, path, body string) (response, []byte) {
	tb.Helper()
	r, err := http.NewRequest(method, s.URL+path, strings.NewReader(body))
	if err != nil {
		tb.Fatal(err)
	}
	resp, err := s.Client().Do(r)
	if err != nil {
		tb.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		tb.Fatal(err)
	}
	return response{resp.StatusCode, resp.Header}, b
}

// ask posts a request and puts the reply together, streamed or not.
func (s *testServer) ask(tb testing.TB, path, body string) openai.Reply {
	tb.Helper()
	resp, b := s.do(tb, http.MethodPost, path, body)
	if resp.status != http.StatusOK {
		tb.Fatalf("%d: %s", resp.status, b)
	}
	if !strings.HasPrefix(resp.header.Get("Content-Type"), "text/event-stream") {
		return *openai.ReadBody(b)
	}
	var a openai.Assembler
	events := openai.NewReader(bytes.NewReader(b), func() time.Duration { return 0 }, 0)
	for {
		e, err := events.Next()
		if err != nil {
			return *a.Reply()
		}
		a.Add(e.Data)
	}
}

func TestBadRequests(t *testing.T) {
	const chat, text = "/v1/chat/completions", "/v1/completions"
	const hello = `"messages":[{"role":"user","content":"hello"}]`
	long := strings.Repeat("é", 600)
	tests := []struct {
		name, method, path, body string
		status                   int
		message, param, code     string
	}{
		{"unknown role", "POST", chat, `{"messages":[{"role":"wizard","content":"x"}]}`, 400, `role "wizard" is not one of system, developer, user, assistant, tool`, "messages", ""},
		{"no messages", "POST", chat, `{}`, 400, "messages is missing or empty", "messages", ""},
		{"empty messages", "POST", chat, `{"messages":[]}`, 400, "messages is missing or empty", "messages", ""},
		{"context too long", "POST", chat, `{"messages":[{"role":"user","content":"` + long + `"}]}`, 400, "the prompt has 1203 tokens; the context of 1024 has no room", "messages", "context_length_exceeded"},
		{"reply too long", "POST", chat, `{` + hello + `,"max_tokens":5000}`, 400, "together 50", "messages", "context_length_exceeded"},
		{"messages of a wrong type", "POST", chat, `{"messages":"hello"}`, 400, "messages is a JSON string, want a list", "messages", ""},
		{"role of a wrong type", "POST", chat, `{"messages":[{"role":7}]}`, 400, "messages.role is a JSON number, want a string", "messages.role", ""},
		{"an image", "POST", chat, `{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"x"}}]}]}`, 400, `content part of type "image_url" is not supported`, "", ""},
		{"temperature of a wrong type", "POST", chat, `{` + hello + `,"temperature":"hot"}`, 400, "temperature is a JSON string, want a number", "temperature", ""},
		{"temperature", "POST", chat, `{` + hello + `,"temperature":-1}`, 400, "temperature is -1, not within 0 and 2", "temperature", ""},
		{"top_p", "POST", chat, `{` + hello + `,"top_p":0}`, 400, "top_p is 0", "top_p", ""},
		{"max_tokens", "POST", chat, `{` + hello + `,"max_tokens":0}`, 400, "max_tokens is 0, less than 1", "max_tokens", ""},
		{"max_tokens of a wrong type", "POST", chat, `{` + hello + `,"max_tokens":1.5}`, 400, "max_tokens is a JSON number 1.5, want a whole number", "max_tokens", ""},
		{"max_completion_tokens", "POST", chat, `{` + hello + `,"max_completion_tokens":-3}`, 400, "max_completion_tokens is -3", "max_completion_tokens", ""},
		{"top_logprobs", "POST", chat, `{` + hello + `,"logprobs":true,"top_logprobs":21}`, 400, "not within 0 and 20", "top_logprobs", ""},
		{"top_logprobs alone", "POST", chat, `{` + hello + `,"top_logprobs":2}`, 400, "needs logprobs", "top_logprobs", ""},
		{"seventeen stops", "POST", chat, `{` + hello + `,"stop":["` + strings.Repeat(`x","`, 16) + `x"]}`, 400, "stop has 17 strings, the limit is 16", "stop", ""},
		{"an empty stop", "POST", chat, `{` + hello + `,"stop":""}`, 400, "a stop string has 0 bytes", "stop", ""},
		{"stream_options alone", "POST", chat, `{` + hello + `,"stream_options":{"include_usage":true}}`, 400, "set stream to true", "stream_options", ""},
		{"n", "POST", chat, `{` + hello + `,"n":2}`, 400, "n is not supported by this server, unless it is 1", "n", "unsupported_parameter"},
		{"response_format", "POST", chat, `{` + hello + `,"response_format":{"type":"json_object"}}`, 400, "response_format is not supported", "response_format", "unsupported_parameter"},
		{"response_format without schema", "POST", chat, `{` + hello + `,"response_format":{"type":"json_schema","json_schema":{"name":"x"}}}`, 400, "response_format is not supported", "response_format", "unsupported_parameter"},
		{"logit_bias", "POST", chat, `{` + hello + `,"logit_bias":{"5":1}}`, 400, "logit_bias is not supported", "logit_bias", "unsupported_parameter"},
		{"tool_choice required", "POST", chat, `{` + hello + `,"tool_choice":"required"}`, 400, `tool_choice "required" is not supported`, "tool_choice", "unsupported_parameter"},
		{"tool_choice named", "POST", chat, `{` + hello + `,"tool_choice":{"type":"function","function":{"name":"f"}}}`, 400, "is not supported", "tool_choice", "unsupported_parameter"},
		{"a tool without name", "POST", chat, `{` + hello + `,"tools":[{"type":"function"}]}`, 400, "tools[0] has type", "tools", ""},
		{"a schema that is none", "POST", chat, `{` + hello + `,"tools":[{"type":"function","function":{"name":"f","parameters":7}}]}`, 400, "tools[0].function.parameters", "messages", ""},
		{"unknown model", "POST", chat, `{` + hello + `,"model":"gpt-9"}`, 404, `"gpt-9" does not exist here; this server has "tiny"`, "model", "model_not_found"},
		{"a request id with a line feed", "POST", chat, `{` + hello + `,"rid":"a\nb"}`, 400, "not printable", "rid", ""},
		{"bad JSON", "POST", chat, `{"messages":[`, 400, "the body is not valid JSON: unexpected end of JSON input, at byte 13", "", ""},
		{"two values", "POST", chat, `{} {}`, 400, "not valid JSON", "", ""},
		{"no body", "POST", chat, ``, 400, "not valid JSON", "", ""},
		{"a list", "POST", chat, `[]`, 400, "the body is a JSON array, want an object", "", ""},
		{"deep", "POST", chat, strings.Repeat("[", 1<<20), 400, "the body", "", ""},
		{"wrong method", "GET", chat, ``, 405, "takes POST, not GET", "", ""},
		{"wrong path", "POST", "/v2/chat", ``, 404, "there is no /v2/chat here", "", ""},
		{"no prompt", "POST", text, `{}`, 400, "prompt is missing", "prompt", ""},
		{"an empty prompt", "POST", text, `{"prompt":""}`, 400, "the prompt is empty", "prompt", ""},
		{"two prompts", "POST", text, `{"prompt":["a","b"]}`, 400, "one prompt a request", "prompt", ""},
		{"a prompt of a wrong type", "POST", text, `{"prompt":{"a":1}}`, 400, "not a string or a list of tokens", "prompt", ""},
		{"a nested prompt", "POST", text, `{"prompt":[[[1]]]}`, 400, "not a string or a list of tokens", "prompt", ""},
		{"a null prompt", "POST", text, `{"prompt":null}`, 400, "prompt is missing", "prompt", ""},
		{"a token out of range", "POST", text, `{"prompt":[1,70000]}`, 400, "token 1 of the prompt is 70000", "prompt", ""},
		{"echo", "POST", text, `{"prompt":"a","echo":true}`, 400, "echo is not supported", "echo", "unsupported_parameter"},
		{"logprobs", "POST", text, `{"prompt":"a","logprobs":50}`, 400, "logprobs is 50", "logprobs", ""},
		{"an unknown model's card", "GET", "/v1/models/gpt-9", ``, 404, "does not exist", "model", "model_not_found"},
		{"abort nobody", "POST", "/abort_request", `{}`, 400, "name a request", "rid", ""},
	}
	s := newServer(t, lab.Config{})
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			resp, b := s.do(t, tt.method, tt.path, tt.body)
			var got struct {
				Error struct {
					Message, Type string
					Param, Code   *string
				}
			}
			d := json.NewDecoder(bytes.NewReader(b))
			d.DisallowUnknownFields()
			if err := d.Decode(&got); err != nil || resp.header.Get("Content-Type") != "application/json" {
				t.Fatalf("%v: %s", err, b)
			}
			e := got.Error
			if resp.status != tt.status || !strings.Contains(e.Message, tt.message) || e.Type != "invalid_request_error" {
				t.Errorf("%d %s", resp.status, b)
			}
			if diff := cmp.Diff([]any{orNull(tt.param), orNull(tt.code)}, []any{orNull(deref(e.Param)), orNull(deref(e.Code))}); diff != "" {
				t.Error(diff)
			}
			if tt.status == http.StatusMethodNotAllowed && resp.header.Get("Allow") != "POST" {
				t.Errorf("Allow: %q", resp.header.Get("Allow"))
			}
		})
	}
	if n := s.engine.Stats().Ended[lab.Failed]; n > 0 {
		t.Errorf("%d requests failed in the engine", n)
	}
}

func deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// TestHarmlessMembers: what asks for nothing, or is unknown, is taken.
func TestHarmlessMembers(t *testing.T) {
	s := newServer(t, lab.Config{})
	for _, extra := range []string{
		`"n":1`, `"n":null`, `"frequency_penalty":0.0`, `"logit_bias":{}`, `"response_format":{"type":"text"}`, `"response_format":{"type":"json_schema","json_schema":{"name":"x","schema":{"type":"object"}}}`, `"user":"me"`, `"stop":null`,
		`"stop":[]`, `"tool_choice":"auto"`, `"tools":[]`, `"metadata":{"a":1}`, `"parallel_tool_calls":true`, `"max_completion_tokens":3`,
		`"chat_template_kwargs":{"thinking":true}`, `"seed":-5`, `"model":"tiny"`, `"top_k":-1`, `"temperature":null`, `"stream":false`,
	} {
		resp, b := s.do(t, http.MethodPost, "/v1/chat/completions", `{"messages":[{"role":"user","content":[{"type":"text","text":"hi"}]}],"max_tokens":2,`+extra+`}`)
		if resp.status != http.StatusOK {
			t.Errorf("%s: %s", extra, b)
		}
	}
}

// TestLargeBody: 50 MB get an answer that states the limit, whether the client
// says how much it sends or not.
func TestLargeBody(t *testing.T) {
	s := newServer(t, lab.Config{})
	for _, chunked := range []bool{false, true} {
		var body io.Reader = bytes.NewReader(make([]byte, 50<<20))
		if chunked {
			body = io.MultiReader(body)
		}
		resp, err := s.Client().Post(s.URL+"/v1/chat/completions", "application/json", body)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusRequestEntityTooLarge || !strings.Contains(string(b), "limit of 4194304 bytes") {
			t.Errorf("%d %s %v", resp.StatusCode, b, err)
		}
	}
}

const tools = `"tools":[{"type":"function","function":{"name":"move","parameters":{"properties":{"ship":{"type":"string"}}}}}]`

// TestStreamedOrNot: both forms say the same, to the last bit of a logprob.
func TestStreamedOrNot(t *testing.T) {
	s := newServer(t, lab.Config{Workers: 2})
	for i := range 40 {
		path, question := "/v1/chat/completions", fmt.Sprintf(`"messages":[{"role":"user","content":"ship %d"}],%s,"logprobs":true,"top_logprobs":%d`, i, tools, i%3)
		if i%4 == 3 {
			path, question = "/v1/completions", fmt.Sprintf(`"prompt":"ship %d","logprobs":%d`, i, i%3)
		}
		if i%2 == 0 {
			question += `,"temperature":0`
		}
		if i%5 == 0 {
			question += `,"stop":["e","\""]`
		}
		question += fmt.Sprintf(`,"max_tokens":%d,"seed":%d`, 1+i, i)
		var replies [2]openai.Reply
		var together sync.WaitGroup
		for k, form := range []string{`{`, `{"stream":true,"stream_options":{"include_usage":true},`} {
			together.Go(func() { replies[k] = s.ask(t, path, form+question+`}`) })
		}
		together.Wait()
		whole, streamed := replies[0], replies[1]
		if whole.Anomalies != nil || streamed.Anomalies != nil || !streamed.Done || streamed.FinishReason == "" {
			t.Fatalf("%+v\n%+v", whole, streamed)
		}
		// Only one of the two can find the other's prompt in the cache.
		whole.Usage.CachedTokens, streamed.Usage.CachedTokens = 0, 0
		if diff := cmp.Diff(whole, streamed, cmpopts.IgnoreFields(openai.Reply{}, "ID", "Done")); diff != "" {
			t.Fatal(diff)
		}
		if n := whole.Usage.CompletionTokens; n != len(whole.Logprobs) || n == 0 {
			t.Errorf("%d tokens, %d logprobs", n, len(whole.Logprobs))
		}
	}
}

// TestLogprobs: the bytes of a reply's tokens are its text.
func TestLogprobs(t *testing.T) {
	s := newServer(t, lab.Config{})
	_, b := s.do(t, http.MethodPost, "/v1/chat/completions", `{"messages":[{"role":"user","content":"hi"}],"logprobs":true,"top_logprobs":2,"seed":1,"max_tokens":50}`)
	var reply struct {
		Choices []struct {
			Message  struct{ Content string }
			Logprobs struct {
				Content []struct {
					Logprob float64
					Bytes   []int
					Top     []struct{ Logprob float64 } `json:"top_logprobs"`
				}
			}
		}
	}
	if err := json.Unmarshal(b, &reply); err != nil {
		t.Fatal(err)
	}
	var text []byte
	for _, l := range reply.Choices[0].Logprobs.Content {
		for _, c := range l.Bytes {
			text = append(text, byte(c))
		}
		if len(l.Top) != 2 || l.Top[0].Logprob < l.Top[1].Logprob || l.Logprob > l.Top[0].Logprob || l.Logprob > 0 {
			t.Errorf("%+v", l)
		}
	}
	if got, want := string([]rune(string(text))), reply.Choices[0].Message.Content; got != want || len(got) < 50 {
		t.Errorf("the tokens are %q, the text is %q", got, want)
	}
}

// TestPromptForms: one prompt in its four forms.
func TestPromptForms(t *testing.T) {
	s := newServer(t, lab.Config{})
	tok, _ := testVocabulary()
	tokens := tok.AppendEncode([]model.Token{model.Begin}, "ship berth")
	ids := marshal(tokens)
	var first openai.Reply
	for i, prompt := range []string{`"ship berth"`, `["ship berth"]`, string(ids), "[" + string(ids) + "]"} {
		got := s.ask(t, "/v1/completions", `{"temperature":0,"max_tokens":5,"prompt":`+prompt+`}`)
		if i == 0 {
			first = got
		}
		if got.Content != first.Content || got.Usage.PromptTokens != len(tokens) {
			t.Errorf("%s: %+v", prompt, got)
		}
	}
}

func TestCachedTokens(t *testing.T) {
	s := newServer(t, lab.Config{PageSize: 16})
	question := `{"messages":[{"role":"user","content":"` + strings.Repeat("x", 40) + `"}],"max_tokens":1}`
	for i, want := range []string{
		`{"cached_tokens":0,"cached_tokens_details":{"device":0,"host":0}}`,
		`{"cached_tokens":32,"cached_tokens_details":{"device":32,"host":0}}`,
	} {
		_, b := s.do(t, http.MethodPost, "/v1/chat/completions", question)
		if !strings.Contains(string(b), want) {
			t.Errorf("request %d: %s", i, b)
		}
	}
}

// TestCachedTokensOfTheHost: on a device with room for one request, the host
// has what another pushed out, all but their common page, and the metrics say
// how it came back.
func TestCachedTokensOfTheHost(t *testing.T) {
	s := newServer(t, lab.Config{PageSize: 16, MaxTokens: 64, HostTokens: 256})
	ask := func(content string) string {
		_, b := s.do(t, http.MethodPost, "/v1/chat/completions",
			`{"messages":[{"role":"user","content":"`+strings.Repeat(content, 40)+`"}],"max_tokens":1}`)
		return string(b)
	}
	ask("x")
	ask("y")
	if got, want := ask("x"), `{"cached_tokens":32,"cached_tokens_details":{"device":16,"host":16}}`; !strings.Contains(got, want) {
		t.Errorf("%s, want %s", got, want)
	}
	_, metrics := s.do(t, http.MethodGet, "/metrics", "")
	for _, want := range []string{
		`culprit_lab_cached_tokens_total{tier="host"} 16`,
		`culprit_lab_loaded_pages_total 1`,
		`culprit_lab_copies_total{pool="index_k",direction="load",branch="page_aligned"} 4`,
		`culprit_lab_copied_tokens_total{pool="latent",direction="load",branch="page_aligned"} 64`,
		`culprit_lab_copies_total{pool="index_k",direction="load",branch="token_granular"} 0`,
		`culprit_lab_host_pages{state="used"} `,
		`culprit_lab_layer_waits_total{state="idle"} `,
	} {
		if !strings.Contains(string(metrics), want) {
			t.Errorf("no %s in %s", want, metrics)
		}
	}
	_, info := s.do(t, http.MethodGet, "/server_info", "")
	for _, want := range []string{`"enable_hierarchical_cache":true`, `"hicache_mem_layout":"page_first"`, `"hicache_write_policy":"write_through"`, `"hicache_total_tokens":256`} {
		if !strings.Contains(string(info), want) {
			t.Errorf("no %s in %s", want, info)
		}
	}
}

func TestRequestID(t *testing.T) {
	s := newServer(t, lab.Config{})
	const body = `"messages":[{"role":"user","content":"hi"}],"max_tokens":1}`
	resp, b := s.do(t, http.MethodPost, "/v1/chat/completions", `{"rid":"mine",`+body)
	if resp.header.Get("X-Request-Id") != "mine" || !strings.Contains(string(b), `"id":"chatcmpl-mine"`) {
		t.Errorf("%v %s", resp.header, b)
	}
	r, err := http.NewRequest(http.MethodPost, s.URL+"/v1/chat/completions", strings.NewReader(`{`+body))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("X-Request-Id", "theirs")
	theirs, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	theirs.Body.Close()
	if got := theirs.Header.Get("X-Request-Id"); got != "theirs" {
		t.Error(got)
	}
	if resp, _ := s.do(t, http.MethodPost, "/v1/chat/completions", `{`+body); resp.header.Get("X-Request-Id") != "boot-3" {
		t.Errorf("%v", resp.header)
	}
}

func TestAdmin(t *testing.T) {
	s := newServer(t, lab.Config{PageSize: 32, IndexDType: model.BF16, NoOverlap: true})
	get := func(path string) string {
		resp, b := s.do(t, http.MethodGet, path, "")
		if resp.status != http.StatusOK {
			t.Errorf("%s: %d", path, resp.status)
		}
		return string(b)
	}
	for _, want := range []string{`"id":"tiny"`, `"owned_by":"culprit-lab"`, `"max_model_len":1024`} {
		if list, one := get("/v1/models"), get("/v1/models/tiny"); !strings.Contains(list, want) || !strings.Contains(one, want) {
			t.Errorf("%s\n%s", list, one)
		}
	}
	get("/health")
	get("/health_generate")
	var info map[string]any
	if err := json.Unmarshal([]byte(get("/server_info")), &info); err != nil {
		t.Fatal(err)
	}
	want := map[string]any{"page_size": 32.0, "index_k_dtype": "bf16", "version": "culprit test", "max_body_bytes": float64(BodyLimit), "disable_radix_cache": false, "context_length": 1024.0}
	for name, value := range want {
		if info[name] != value {
			t.Errorf("%s is %v, want %v", name, info[name], value)
		}
	}
	s.ask(t, "/v1/chat/completions", `{"messages":[{"role":"user","content":"`+strings.Repeat("x", 40)+`"}],"max_tokens":4,"temperature":0}`)
	if s.engine.Stats().CachedPages == 0 {
		t.Error("no page is cached")
	}
	get("/flush_cache")
	if resp, b := s.do(t, http.MethodPost, "/flush_cache", ""); resp.status != http.StatusOK {
		t.Errorf("%s", b)
	}
	if n := s.engine.Stats().CachedPages; n != 0 {
		t.Errorf("%d pages are cached", n)
	}

	line := regexp.MustCompile(`^culprit_lab_[a-z_]+(\{[a-z]+="[a-z_+0-9A-Z]*"(,[a-z]+="[^"]*")*\})? [0-9]+$`)
	values := map[string]string{}
	for l := range strings.Lines(get("/metrics")) {
		l = strings.TrimSuffix(l, "\n")
		if strings.HasPrefix(l, "# ") {
			continue
		}
		if !line.MatchString(l) {
			t.Errorf("metrics: %q", l)
		}
		name, value, _ := strings.Cut(l, " ")
		if _, twice := values[name]; twice {
			t.Errorf("metrics: %s comes twice", name)
		}
		values[name] = value
	}
	for name, want := range map[string]string{
		`culprit_lab_num_requests_total{outcome="length"}`: "2", `culprit_lab_pages{state="used"}`: "0", `culprit_lab_pages{state="free"}`: "128",
		`culprit_lab_step_requests_count{kind="prefill"}`: "2", `culprit_lab_step_requests_bucket{kind="decode",le="1"}`: "3", `culprit_lab_generation_tokens_total`: "5",
	} {
		if values[name] != want {
			t.Errorf("%s is %q, want %s", name, values[name], want)
		}
	}
}

// open starts a stream and returns it after its first chunks.
func (s *testServer) open(tb testing.TB, body string) (*http.Response, *bufio.Reader) {
	tb.Helper()
	r, err := http.NewRequestWithContext(tb.Context(), http.MethodPost, s.URL+"/v1/chat/completions", strings.NewReader(body))
	if err != nil {
		tb.Fatal(err)
	}
	resp, err := s.Client().Do(r)
	if err != nil {
		tb.Fatal(err)
	}
	lines := bufio.NewReader(resp.Body)
	for range 4 {
		if _, err := lines.ReadString('\n'); err != nil {
			tb.Fatal(err)
		}
	}
	return resp, lines
}

const endless = `{"messages":[{"role":"user","content":"hi"}],"stream":true,"temperature":0,"max_tokens":900}`

// TestShutDownInMidStream: a stream that the server can't finish says so.
func TestShutDownInMidStream(t *testing.T) {
	s := newServer(t, lab.Config{})
	resp, lines := s.open(t, endless)
	defer resp.Body.Close()
	s.stop()
	rest, err := io.ReadAll(lines)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(string(rest), `data: {"error":{"code":null,"message":"the server is shutting down","param":null,"type":"server_error"}}`+"\n\ndata: [DONE]\n\n") {
		t.Errorf("it ends with %q", rest[max(0, len(rest)-300):])
	}
	for _, path := range []string{"/v1/chat/completions", "/flush_cache"} {
		if resp, b := s.do(t, http.MethodPost, path, `{"messages":[{"role":"user","content":"hi"}]}`); resp.status != http.StatusServiceUnavailable {
			t.Errorf("%s: %d %s", path, resp.status, b)
		}
	}
	if resp, _ := s.do(t, http.MethodGet, "/health_generate", ""); resp.status != http.StatusServiceUnavailable {
		t.Error(resp.status)
	}
}

func TestAbort(t *testing.T) {
	s := newServer(t, lab.Config{})
	resp, lines := s.open(t, `{"rid":"a",`+endless[1:])
	defer resp.Body.Close()
	if resp, b := s.do(t, http.MethodPost, "/flush_cache", ""); resp.status != http.StatusBadRequest || !strings.Contains(string(b), "1 requests are running or waiting") {
		t.Errorf("%d %s", resp.status, b)
	}
	for body, want := range map[string]string{`{"rid":"b"}`: `{"aborted":0}`, `{"rid":"a"}`: `{"aborted":1}`} {
		if _, b := s.do(t, http.MethodPost, "/abort_request", body); strings.TrimSpace(string(b)) != want {
			t.Errorf("%s: %s", body, b)
		}
	}
	rest, err := io.ReadAll(lines)
	if err != nil || !strings.Contains(string(rest), `"finish_reason":"abort"`) {
		t.Errorf("%q %v", rest, err)
	}
}

// TestDisconnects: clients that hang up at any time leave nothing behind.
func TestDisconnects(t *testing.T) {
	s := newServer(t, lab.Config{PageSize: 16, MaxTokens: 16384})
	var clients sync.WaitGroup
	for c := range 20 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(c), 0))
			for range 20 {
				ctx, cancel := context.WithCancel(t.Context())
				r, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL+"/v1/chat/completions", strings.NewReader(endless))
				if err != nil {
					t.Error(err)
					cancel()
					return
				}
				if rng.IntN(4) == 0 {
					time.AfterFunc(time.Duration(rng.IntN(3000))*time.Microsecond, cancel)
				}
				if resp, err := s.Client().Do(r); err == nil {
					lines := bufio.NewReader(resp.Body)
					for range rng.IntN(12) {
						if _, err := lines.ReadString('\n'); err != nil {
							break
						}
					}
					cancel()
					resp.Body.Close()
				}
				cancel()
			}
		})
	}
	clients.Wait()
	// Each handler ends when it has noticed, and closing waits for the last.
	s.Close()
	s.stop()
	stats := s.engine.Stats()
	if stats.Running+stats.Waiting > 0 || stats.FreePages+stats.CachedPages != stats.Pages {
		t.Errorf("%+v", stats)
	}
	if stats.Ended[lab.Cancelled] < 200 || stats.Ended[lab.Failed] > 0 {
		t.Errorf("%v", stats.Ended)
	}
	if err := s.engine.Check(); err != nil {
		t.Error(err)
	}
}

// FuzzChat: whatever is sent, the answer is a reply or an error of the
// client's, in JSON.
func FuzzChat(f *testing.F) {
	s := newServer(f, lab.Config{MaxTokens: 64})
	f.Add(`{"messages":[{"role":"user","content":"hi"}],"max_tokens":2}`)
	f.Add(`{"messages":[{"role":"assistant","content":null,"tool_calls":[{"id":"1","type":"function","function":{"name":"f","arguments":"{\"a\":[1]}"}}]},{"role":"tool","content":[{"type":"text","text":"x"}]}],` + tools + `,"tool_choice":"auto","logprobs":true,"top_logprobs":3}`)
	f.Add(`{"messages":[{"role":"user","content":"hi"}],"stream":true,"stream_options":{"include_usage":true},"stop":["a"],"seed":1,"temperature":1.5,"top_p":0.5}`)
	f.Add(`{"prompt":[[1,2,3]],"logprobs":2,"stop":"x"}`)
	f.Fuzz(func(t *testing.T, body string) {
		for _, path := range []string{"/v1/chat/completions", "/v1/completions", "/abort_request"} {
			w := httptest.NewRecorder()
			s.Config.Handler.ServeHTTP(w, httptest.NewRequest(http.MethodPost, path, strings.NewReader(body)))
			switch {
			case w.Code >= 500:
				t.Errorf("%s: %d %s", path, w.Code, w.Body)
			case strings.HasPrefix(w.Header().Get("Content-Type"), "text/event-stream"):
				if !strings.HasSuffix(w.Body.String(), "data: [DONE]\n\n") {
					t.Errorf("%s: %s", path, w.Body)
				}
			case !json.Valid(w.Body.Bytes()):
				t.Errorf("%s: %s", path, w.Body)
			}
		}
	})
}

// TestFaultsAreNotTold: a tester reads the toggles, which mean nothing by
// themselves, and neither a fault nor what it waits for.
func TestFaultsAreNotTold(t *testing.T) {
	faults, err := fault.Parse([]string{"page-share,when=toggle.alpha", "poison,rate=0", "slow-decay,rate=0,per-launch"}, 1)
	if err != nil {
		t.Fatal(err)
	}
	s := newServer(t, lab.Config{Faults: faults, Toggle: []string{"alpha"}})
	for _, path := range []string{"/server_info", "/metrics", "/v1/models"} {
		_, b := s.do(t, http.MethodGet, path, "")
		for _, e := range fault.Catalogue() {
			if bytes.Contains(b, []byte(e.Name)) {
				t.Errorf("%s names %s", path, e.Name)
			}
		}
		if bytes.Contains(b, []byte("fault")) || bytes.Contains(b, []byte("toggle.")) {
			t.Errorf("%s speaks of faults: %s", path, b)
		}
	}
	if _, b := s.do(t, http.MethodGet, "/server_info", ""); !bytes.Contains(b, []byte(`"toggles":["alpha"]`)) {
		t.Errorf("no toggles: %s", b)
	}
}

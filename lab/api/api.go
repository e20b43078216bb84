// Package api puts the lab's engine behind HTTP, as OpenAI has it for models
// and SGLang for the rest. Handlers only read, enqueue and write: the engine
// owns all state.
//
// Its API may change.
package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/culprit-project/culprit/lab"
	"github.com/culprit-project/culprit/lab/model"
)

// Limits of a request. /server_info states them.
const (
	BodyLimit      = 4 << 20 // bytes
	MaxTopLogprobs = 20
	MaxStops       = 16
	MaxStopBytes   = 256
	maxIDBytes     = 128
)

// Options says what is served. All must be set but Info.
type Options struct {
	Engine  *lab.Engine
	Model   string // its name
	Version string // of the program
	ID      string // of this start of the server: part of the ids of replies
	Started time.Time
	Info    map[string]any // flags by name, for /server_info
}

// Server is the HTTP handler.
type Server struct {
	Options
	tokenizer *model.Tokenizer
	mux       *http.ServeMux
	number    atomic.Uint64 // of requests
	markup    markupCounts
}

// New makes the handler of an engine that runs.
func New(o Options) *Server {
	s := &Server{Options: o, tokenizer: o.Engine.Config().Tokenizer, mux: http.NewServeMux()}
	const get, post = http.MethodGet, http.MethodPost
	s.handle("/v1/chat/completions", s.chat, post)
	s.handle("/v1/completions", s.completion, post)
	s.handle("/v1/models", s.models, get)
	s.handle("/v1/models/{model}", s.oneModel, get)
	s.handle("/health", s.health, get)
	s.handle("/health_generate", s.healthGenerate, get)
	s.handle("/server_info", s.serverInfo, get)
	s.handle("/get_server_info", s.serverInfo, get)
	s.handle("/metrics", s.metrics, get)
	s.handle("/flush_cache", s.flushCache, post, get)
	s.handle("/abort_request", s.abortRequest, post)
	s.mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		fail(w, &failure{status: http.StatusNotFound, message: fmt.Sprintf("there is no %s here; try /v1/chat/completions, /v1/completions or /v1/models", r.URL.Path)})
	})
	return s
}

// handle serves a path to some methods.
func (s *Server) handle(path string, serve func(http.ResponseWriter, *http.Request) *failure, methods ...string) {
	s.mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
		for _, m := range methods {
			if r.Method == m || r.Method == http.MethodHead && m == http.MethodGet {
				if f := serve(w, r); f != nil {
					fail(w, f)
				}
				return
			}
		}
		allowed := strings.Join(methods, ", ")
		w.Header().Set("Allow", allowed)
		fail(w, &failure{status: http.StatusMethodNotAllowed, message: fmt.Sprintf("%s takes %s, not %s", r.URL.Path, allowed, r.Method)})
	})
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Server", "culprit-lab")
	s.mux.ServeHTTP(w, r)
}

// failure is an error as OpenAI has it.
type failure struct {
	status  int
	message string
	param   string // the member of the request that is wrong
	code    string
}

// bad is what is wrong with a request's member.
func bad(param, format string, args ...any) *failure {
	return &failure{status: http.StatusBadRequest, message: fmt.Sprintf(format, args...), param: param}
}

func (f *failure) body() any {
	kind := "invalid_request_error"
	if f.status >= http.StatusInternalServerError {
		kind = "server_error"
	}
	return map[string]any{"error": map[string]any{
		"message": f.message, "type": kind, "param": orNull(f.param), "code": orNull(f.code),
	}}
}

func orNull(s string) any {
	if s == "" {
		return nil
	}
	return s
}

func fail(w http.ResponseWriter, f *failure) { answer(w, f.status, f.body()) }

// answer writes JSON. Nobody can be told that the client has gone.
func answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(marshal(body), '\n'))
}

// marshal writes one of this package's own values as JSON, which can't fail;
// <, > and & stay readable.
func marshal(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(fmt.Sprintf("a reply of %T can't be written as JSON: %v", v, err))
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

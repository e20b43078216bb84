package disagg

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"sync/atomic"
	"time"
)

// Router is an OpenAI-compatible front of prefill and decode servers. It gives
// each request to one of each, with a room to meet in, and hands on what the
// decode server answers.
type Router struct {
	Prefill, Decode []string // URLs, taken in turn
	Seed            uint64   // of the rooms' numbers

	turn   atomic.Uint64
	once   sync.Once
	mu     sync.Mutex
	rng    *rand.Rand
	places map[string]place // by the prefill server's URL
	client http.Client
	counts struct{ requests, failures atomic.Uint64 }
}

// place is where a prefill server serves transfers.
type place struct {
	host string
	port int
}

const (
	bodyLimit    = 4 << 20
	adminTimeout = 30 * time.Second
)

// ServeHTTP implements http.Handler.
func (r *Router) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.once.Do(func() {
		r.rng = rand.New(rand.NewPCG(r.Seed, 0))
		r.places = map[string]place{}
		r.client.Transport = &http.Transport{MaxIdleConnsPerHost: 256, IdleConnTimeout: 30 * time.Second}
	})
	n := int(r.turn.Add(1) - 1)
	prefill, decode := r.Prefill[n%len(r.Prefill)], r.Decode[n%len(r.Decode)]
	switch req.URL.Path {
	case "/health":
		w.WriteHeader(http.StatusOK)
	case "/v1/chat/completions", "/v1/completions":
		r.pair(w, req, prefill, decode)
	case "/health_generate":
		body := `{"prompt":"health","max_tokens":1,"temperature":0}`
		check, err := http.NewRequestWithContext(req.Context(), http.MethodPost, "/v1/completions", bytes.NewReader([]byte(body)))
		if err != nil {
			fail(w, http.StatusInternalServerError, err)
			return
		}
		r.pair(w, check, prefill, decode)
	case "/flush_cache", "/abort_request":
		r.both(w, req)
	case "/server_info", "/get_server_info":
		r.info(w, req, prefill, decode)
	case "/metrics":
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		fmt.Fprintf(w, "# TYPE culprit_router_requests_total counter\nculprit_router_requests_total %d\n"+
			"# TYPE culprit_router_failures_total counter\nculprit_router_failures_total %d\n", r.counts.requests.Load(), r.counts.failures.Load())
	default:
		r.forward(w, req, decode)
	}
}

// Close lets go of idle connections.
func (r *Router) Close() { r.client.CloseIdleConnections() }

// pair gives a request to both servers.
func (r *Router) pair(w http.ResponseWriter, req *http.Request, prefill, decode string) {
	r.counts.requests.Add(1)
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, bodyLimit))
	if err != nil {
		fail(w, http.StatusBadRequest, fmt.Errorf("the body can't be read: %w", err))
		return
	}
	var members map[string]json.RawMessage
	if json.Unmarshal(body, &members) != nil || members == nil {
		r.send(w, req, decode, body) // which knows best what is wrong with it
		return
	}
	at, err := r.place(req.Context(), prefill)
	if err != nil {
		r.counts.failures.Add(1)
		fail(w, http.StatusBadGateway, err)
		return
	}
	r.mu.Lock()
	room := r.rng.Uint64() >> 1 // JSON readers take it for signed
	r.mu.Unlock()
	host, err := json.Marshal(at.host)
	if err != nil {
		fail(w, http.StatusBadGateway, err)
		return
	}
	members["bootstrap_host"] = host
	members["bootstrap_port"] = json.RawMessage(strconv.Itoa(at.port))
	members["bootstrap_room"] = json.RawMessage(strconv.FormatUint(room, 10))
	forDecode, err := json.Marshal(members)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	delete(members, "stream_options")
	members["stream"] = json.RawMessage("false")
	forPrefill, err := json.Marshal(members)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}

	// When one half fails the other is given up. The prefill server's word
	// counts only where the decode server, which hears of it too, has none.
	ctx, cancel := context.WithCancelCause(req.Context())
	defer cancel(nil)
	var prefilling sync.WaitGroup
	prefilling.Go(func() {
		if err := r.ask(ctx, req, prefill, forPrefill); err != nil && ctx.Err() == nil {
			r.forget(prefill)
			time.AfterFunc(time.Second, func() { cancel(err) })
		}
	})
	r.send(w, req.WithContext(ctx), decode, forDecode)
	cancel(nil)
	prefilling.Wait()
}

// ask sends a request and wants nothing but its success.
func (r *Router) ask(ctx context.Context, like *http.Request, server string, body []byte) error {
	resp, err := r.post(ctx, like, server, body)
	if err != nil {
		return fmt.Errorf("the prefill server: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<16))
	switch {
	case err != nil:
		return fmt.Errorf("the prefill server: %w", err)
	case resp.StatusCode != http.StatusOK:
		return fmt.Errorf("the prefill server says %d: %s", resp.StatusCode, text)
	}
	return nil
}

func (r *Router) post(ctx context.Context, like *http.Request, server string, body []byte) (*http.Response, error) {
	out, err := http.NewRequestWithContext(ctx, http.MethodPost, server+like.URL.Path, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	maps.Copy(out.Header, like.Header)
	out.Header.Del("Content-Length")
	out.Header.Set("Content-Type", "application/json")
	return r.client.Do(out)
}

// send sends a request to the decode server and hands on the answer. An answer
// that breaks off breaks off for the client too.
func (r *Router) send(w http.ResponseWriter, req *http.Request, server string, body []byte) {
	resp, err := r.post(req.Context(), req, server, body)
	if err != nil {
		r.counts.failures.Add(1)
		if cause := context.Cause(req.Context()); cause != nil && !errors.Is(cause, context.Canceled) {
			err = cause
		}
		fail(w, http.StatusBadGateway, fmt.Errorf("no answer from the decode server: %w", err))
		return
	}
	r.answer(w, resp)
}

// answer hands on a response as it comes.
func (r *Router) answer(w http.ResponseWriter, resp *http.Response) {
	defer resp.Body.Close()
	maps.Copy(w.Header(), resp.Header)
	w.WriteHeader(resp.StatusCode)
	flush := http.NewResponseController(w).Flush
	b := make([]byte, 32<<10)
	for {
		n, err := resp.Body.Read(b)
		if n > 0 {
			if _, err := w.Write(b[:n]); err != nil {
				return // the client has gone
			}
			_ = flush() // if it can't be flushed, it is at the end
		}
		switch {
		case errors.Is(err, io.EOF):
			return
		case err != nil:
			r.counts.failures.Add(1)
			panic(http.ErrAbortHandler)
		}
	}
}

// place asks a prefill server where it serves transfers.
func (r *Router) place(ctx context.Context, prefill string) (place, error) {
	r.mu.Lock()
	at, ok := r.places[prefill]
	r.mu.Unlock()
	if ok {
		return at, nil
	}
	var info struct {
		Mode string `json:"disaggregation_mode"`
		Port int    `json:"disaggregation_bootstrap_port"`
	}
	if err := r.get(ctx, prefill, &info); err != nil {
		return at, fmt.Errorf("no answer from the prefill server: %w", err)
	}
	u, err := url.Parse(prefill)
	switch {
	case err != nil:
		return at, err
	case info.Mode != "prefill" || info.Port == 0:
		return at, fmt.Errorf("%s is no prefill server: its mode of disaggregation is %q", prefill, info.Mode)
	}
	at = place{u.Hostname(), info.Port}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.places[prefill] = at
	return at, nil
}

// forget makes the next request ask again: a new server has another port.
func (r *Router) forget(prefill string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.places, prefill)
}

// get reads a server's information.
func (r *Router) get(ctx context.Context, server string, info any) error {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, server+"/server_info", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := r.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(info)
}

// info answers with the decode server's information, and that of the prefill
// server in it.
func (r *Router) info(w http.ResponseWriter, req *http.Request, prefill, decode string) {
	var p, d map[string]any
	if err := errors.Join(r.get(req.Context(), prefill, &p), r.get(req.Context(), decode, &d)); err != nil {
		fail(w, http.StatusBadGateway, err)
		return
	}
	d["prefill"] = p
	writeJSON(w, http.StatusOK, d)
}

// both does to every server what the client wants done, decode first.
func (r *Router) both(w http.ResponseWriter, req *http.Request) {
	body, err := io.ReadAll(http.MaxBytesReader(w, req.Body, bodyLimit))
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	ctx, cancel := context.WithTimeout(req.Context(), adminTimeout)
	defer cancel()
	answers := map[string]json.RawMessage{}
	status := http.StatusOK
	for _, servers := range [][]string{r.Decode, r.Prefill} {
		for _, server := range servers {
			resp, err := r.post(ctx, req, server, body)
			if err != nil {
				fail(w, http.StatusBadGateway, err)
				return
			}
			text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
			resp.Body.Close()
			if err != nil || !json.Valid(text) {
				fail(w, http.StatusBadGateway, fmt.Errorf("%s answers %d: %q", server, resp.StatusCode, text))
				return
			}
			status = max(status, resp.StatusCode)
			answers[server] = text
		}
	}
	writeJSON(w, status, answers)
}

// forward hands a request on as it is.
func (r *Router) forward(w http.ResponseWriter, req *http.Request, server string) {
	out, err := http.NewRequestWithContext(req.Context(), req.Method, server+req.URL.RequestURI(), req.Body)
	if err != nil {
		fail(w, http.StatusBadRequest, err)
		return
	}
	out.Header = req.Header.Clone()
	resp, err := r.client.Do(out)
	if err != nil {
		fail(w, http.StatusBadGateway, err)
		return
	}
	r.answer(w, resp)
}

func fail(w http.ResponseWriter, status int, err error) {
	writeJSON(w, status, map[string]any{"error": map[string]any{"message": err.Error(), "type": "server_error", "param": nil, "code": nil}})
}

// writeJSON answers. Nobody can be told that the client has gone.
func writeJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}

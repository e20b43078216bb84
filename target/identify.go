// Package target is the server under test as a thing in the world: what it
// says it is and how to bring it to a known state. It knows nothing of
// workloads or verdicts.
//
// Stability: may change.
package target

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Server is a running server, reached over HTTP.
type Server struct {
	BaseURL string      // without /v1 and without a slash at the end
	Header  http.Header // sent with each request, the key included
	Client  *http.Client
}

// Identity is what a server says of itself.
type Identity struct {
	Models  []string
	Engine  string // vllm, sglang, llama.cpp, culprit-lab; empty when it can't be told
	Version string
}

// String names the engine and its version, or says that they aren't known.
func (id Identity) String() string {
	if id.Engine == "" {
		return "unknown server"
	}
	return strings.TrimSpace(id.Engine + " " + id.Version)
}

// bodyLimit bounds what is read of any answer about the server itself.
const bodyLimit = 4 << 20

// ParseBaseURL takes a base URL as users write it, with or without /v1.
func ParseBaseURL(s string) (string, error) {
	if !strings.Contains(s, "://") {
		s = "http://" + s
	}
	u, err := url.Parse(s)
	if err != nil {
		return "", fmt.Errorf("base URL %q: %w", s, err)
	}
	if u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return "", fmt.Errorf("base URL %q: want http://HOST:PORT or https://HOST:PORT, with or without /v1", s)
	}
	if u.User != nil {
		return "", errors.New("base URL: take the user and password out of it and pass --header instead, since the URL is written to files")
	}
	u.RawQuery, u.Fragment = "", ""
	return strings.TrimSuffix(strings.TrimRight(u.String(), "/"), "/v1"), nil
}

// Identify asks the server what it serves and what it is. It fails when
// /v1/models can't be had; the rest is a guess from what answers.
func (s *Server) Identify(ctx context.Context) (Identity, error) {
	var models struct {
		Data []struct {
			ID      string `json:"id"`
			OwnedBy string `json:"owned_by"`
		} `json:"data"`
	}
	header, err := s.get(ctx, "/v1/models", &models)
	if err != nil {
		return Identity{}, fmt.Errorf("ask %s for its models: %w", s.BaseURL, err)
	}
	var id Identity
	owner := ""
	for _, m := range models.Data {
		id.Models = append(id.Models, m.ID)
		owner = m.OwnedBy
	}
	var version struct {
		Version string `json:"version"`
		Build   string `json:"build_info"`
	}
	var paths []string
	switch {
	case owner == "culprit-lab":
		id.Engine, paths = "culprit-lab", []string{"/server_info"}
	case owner == "sglang":
		id.Engine, paths = "sglang", []string{"/server_info", "/get_server_info"} // the second before 0.5.6
	case owner == "vllm":
		id.Engine, paths = "vllm", []string{"/version"}
	case owner == "llamacpp" || header.Get("Server") == "llama.cpp":
		id.Engine, paths = "llama.cpp", []string{"/props"}
	}
	for _, path := range paths {
		if _, err := s.get(ctx, path, &version); err == nil {
			id.Version = cmp.Or(version.Version, version.Build)
			break
		}
	}
	return id, nil
}

// Workers lists where a router of SGLang's says that it sends requests.
func (s *Server) Workers(ctx context.Context) []string {
	var said struct {
		Workers []struct {
			URL string `json:"url"`
		} `json:"workers"`
	}
	if _, err := s.get(ctx, "/workers", &said); err != nil {
		return nil // it is another's
	}
	var all []string
	for _, w := range said.Workers {
		if base, err := ParseBaseURL(w.URL); err == nil && !slices.Contains(all, base) {
			all = append(all, base)
		}
	}
	return all
}

// FlushCache empties the server's prefix cache by the first way it knows, and
// says which; empty when it knows none.
func (s *Server) FlushCache(ctx context.Context) string {
	for _, path := range []string{"/flush_cache", "/reset_prefix_cache"} {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.BaseURL+path, http.NoBody)
		if err != nil {
			return ""
		}
		if _, _, err := s.do(req); err == nil {
			return path
		}
	}
	return ""
}

func (s *Server) get(ctx context.Context, path string, into any) (http.Header, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.BaseURL+path, http.NoBody)
	if err != nil {
		return nil, err
	}
	body, header, err := s.do(req)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(body, into); err != nil {
		return nil, fmt.Errorf("GET %s answered %.60q, which isn't what an OpenAI-compatible server says", path, body)
	}
	return header, nil
}

func (s *Server) do(req *http.Request) ([]byte, http.Header, error) {
	maps.Copy(req.Header, s.Header)
	resp, err := s.Client.Do(req)
	if err != nil {
		if u, ok := errors.AsType[*url.Error](err); ok {
			err = u.Err // the URL is in the message already
		}
		return nil, nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, bodyLimit))
	if err != nil {
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, nil, &statusError{req.Method, req.URL.Path, resp.Status, resp.StatusCode, body}
	}
	return body, resp.Header, nil
}

// statusError is an answer that isn't 200.
type statusError struct {
	method, path, status string
	code                 int
	body                 []byte
}

func (e *statusError) Error() string {
	return fmt.Sprintf("%s %s answered %s: %.200q", e.method, e.path, e.status, e.body)
}

package load

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/go-faster/jx"

	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// target is a server's addresses and what goes with every request to it.
type target struct {
	chat, health, models *url.URL
	header               http.Header
	host                 string
	secrets              []string
}

// newTarget reads o.BaseURL.
func newTarget(o *Options) (target, error) {
	u, err := url.Parse(o.BaseURL)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return target{}, fmt.Errorf("play: base URL %q isn't of the form http://host:port or http://host:port/v1", o.BaseURL)
	}
	t := target{header: http.Header{
		"Content-Type": {"application/json"},
		"Accept":       {"text/event-stream, application/json"},
		"User-Agent":   {"culprit"},
	}}
	if o.APIKey != "" {
		t.header.Set("Authorization", "Bearer "+o.APIKey)
		t.secrets = append(t.secrets, o.APIKey)
	}
	if password, ok := u.User.Password(); ok || u.User.Username() != "" {
		r := http.Request{Header: t.header}
		r.SetBasicAuth(u.User.Username(), password)
		t.secrets = append(t.secrets, password)
		u.User = nil
	}
	for key, values := range o.Header {
		t.header[http.CanonicalHeaderKey(key)] = values
		t.secrets = append(t.secrets, values...)
	}
	t.host = t.header.Get("Host")
	t.header.Del("Host")
	// A short secret, such as the "EMPTY" that local servers are given, isn't
	// one, and would be found in texts where it isn't meant.
	t.secrets = slices.DeleteFunc(t.secrets, func(s string) bool { return len(s) < 12 })

	root := strings.TrimRight(u.Path, "/")
	root = strings.TrimSuffix(root, "/chat/completions")
	root = strings.TrimSuffix(root, "/v1")
	at := func(path string) *url.URL {
		v := *u
		v.Path, v.RawPath = root+path, ""
		return &v
	}
	t.chat, t.health, t.models = at("/v1/chat/completions"), at("/health"), at("/v1/models")
	return t, nil
}

func newTransport(o *Options) *http.Transport {
	dial := o.Dial
	if dial == nil {
		dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	}
	return &http.Transport{
		DialContext:         dial,
		TLSHandshakeTimeout: 10 * time.Second,
		// We ask for no compression, and read it where it comes all the same.
		DisableCompression: true,
		// A connection for each request. Servers hang up on idle ones, Python's
		// after 5 s, llama.cpp's right after a stream though it promised to
		// stay; a request that is sent just then fails without an answer, and
		// that would be our doing.
		DisableKeepAlives: true,
	}
}

// request makes an HTTP request with the target's header.
func (t *target) request(ctx context.Context, method string, u *url.URL, body []byte) *http.Request {
	r := &http.Request{Method: method, URL: u, Host: t.host, Header: t.header.Clone(), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1}
	if body != nil {
		r.ContentLength = int64(len(body))
		r.Body = io.NopCloser(bytes.NewReader(body))
	}
	return r.WithContext(ctx)
}

// redact takes the secrets out of what a server said.
func (t *target) redact(text string) string {
	for _, s := range t.secrets {
		text = strings.ReplaceAll(text, s, "[secret]")
	}
	return text
}

// Body is the JSON that is sent for a turn.
func (o *Options) Body(t *workload.Turn) (json.RawMessage, error) {
	return o.body(t, !o.NoStream && !t.NoStream)
}

func (o *Options) body(t *workload.Turn, stream bool) (json.RawMessage, error) {
	if t.Body != nil {
		extra := o.ExtraBody
		if o.Model != "" {
			model, err := json.Marshal(o.Model)
			if err != nil {
				return nil, err
			}
			extra = map[string]json.RawMessage{"model": model}
			maps.Copy(extra, o.ExtraBody)
		}
		return withMembers(t.Body, extra)
	}
	r := t.Request
	if o.Model != "" {
		r.Model = o.Model
	}
	r.Stream, r.StreamOptions = stream, nil
	if stream && !o.NoUsage {
		r.StreamOptions = &openai.StreamOptions{IncludeUsage: true}
	}
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(r); err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	return withMembers(bytes.TrimSpace(b.Bytes()), o.ExtraBody)
}

// withMembers puts members into a JSON object, in place of those of the same
// names.
func withMembers(body []byte, extra map[string]json.RawMessage) (json.RawMessage, error) {
	if len(extra) == 0 {
		return body, nil
	}
	// The extra members come first, then the others that they don't replace.
	var w jx.Encoder
	w.ObjStart()
	for _, key := range slices.Sorted(maps.Keys(extra)) {
		w.FieldStart(key)
		w.Raw(bytes.TrimSpace(extra[key]))
	}
	err := jx.DecodeBytes(body).ObjBytes(func(d *jx.Decoder, key []byte) error {
		value, err := d.Raw()
		if _, replaced := extra[string(key)]; err != nil || replaced {
			return err
		}
		w.FieldStart(string(key))
		w.Raw(value)
		return nil
	})
	w.ObjEnd()
	if err == nil && !json.Valid(w.Bytes()) {
		err = fmt.Errorf("a member of the extra body isn't JSON")
	}
	if err != nil {
		return nil, fmt.Errorf("encode request: %w", err)
	}
	return w.Bytes(), nil
}

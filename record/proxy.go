// Package record is a reverse proxy that writes down what passes through it: a
// history of real traffic, fit for the oracles that need no expected answer
// and for replay.
//
// Traffic comes first. A request's path copies bytes and the time at which
// they came, and nothing more; whatever takes longer happens afterwards, in
// one goroutine. When that one can't keep up (a slow disk, a full one), whole
// ops are dropped and counted; no request ever waits for it.
//
// Stability: may change.
package record

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// What an Options field of zero means.
const (
	DefaultMemory      = 256 << 20
	DefaultSegmentSize = 256 << 20
	DefaultTotalSize   = 4 << 30
)

// Options says what is recorded, and where. Only Upstream and Dir must be set.
type Options struct {
	Upstream *url.URL // scheme, host and, where there is one, the path that requests' paths are put behind
	Dir      string   // gets a run directory for each segment: 0001, 0002, ...
	Tool     string   // name and version of the program

	Memory      int64   // bytes of traffic that may wait for the disk; what comes beyond them is dropped
	SegmentSize int64   // bytes of a history, about, after which the next one begins
	TotalSize   int64   // bytes of all of them, about; the oldest go first
	Sample      float64 // share of conversations that is recorded, 0 < Sample <= 1; 0 is all

	// Synthetic replaces what users and the model wrote by text of the same
	// structure that says nothing. Secrets are taken out in any case.
	Synthetic bool

	Transport http.RoundTripper      // nil is one made for streams
	Segment   func(dir string) error // called once for each new segment, before its history
	Logger    *slog.Logger
}

// Proxy passes requests on to the upstream server and records those for chat
// completions. It is an [http.Handler].
type Proxy struct {
	Options
	proxy    *httputil.ReverseProxy
	started  time.Time
	captures chan *capture
	worker   *worker
	done     chan struct{} // closed when the worker has ended

	closing  sync.RWMutex // held for reading while a capture is handed over
	closed   bool
	waiting  atomic.Int64 // bytes captured and not yet written
	inFlight atomic.Int64
	lastID   atomic.Int64
	requests atomic.Int64
	dropped  atomic.Int64
}

// Stats is what has passed so far.
type Stats struct {
	Requests   int64 // for chat completions
	InFlight   int64
	Recorded   int64
	Unsampled  int64 // left out by Sample
	Dropped    int64 // lost: no memory, no disk
	Suspicious int64 // of Recorded
	Classes    map[string]int64
	Trouble    string // why nothing can be written now
}

// handedOver is how many ended requests may wait for the worker beside their
// bytes, which Memory bounds.
const handedOver = 1 << 16

// New makes the first segment and returns a proxy that is ready to serve.
func New(o Options) (*Proxy, error) {
	switch {
	case o.Upstream == nil || o.Upstream.Host == "":
		return nil, errors.New("record: no upstream server is given")
	case o.Sample < 0 || o.Sample > 1:
		return nil, fmt.Errorf("record: a share of %g of the conversations is asked for; want one from 0 to 1", o.Sample)
	case o.Memory < 0 || o.SegmentSize < 0 || o.TotalSize < 0:
		return nil, errors.New("record: sizes must not be negative")
	}
	if o.Memory == 0 {
		o.Memory = DefaultMemory
	}
	if o.SegmentSize == 0 {
		o.SegmentSize = DefaultSegmentSize
	}
	if o.TotalSize == 0 {
		o.TotalSize = DefaultTotalSize
	}
	if o.Sample == 0 {
		o.Sample = 1
	}
	if o.Transport == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.MaxIdleConns, t.MaxIdleConnsPerHost = 0, 1024
		t.DisableCompression = true // the client asks for what it wants, and gets it untouched
		t.Proxy = nil
		o.Transport = t
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	p := &Proxy{Options: o, started: time.Now(), captures: make(chan *capture, handedOver), done: make(chan struct{})}
	p.proxy = &httputil.ReverseProxy{
		Rewrite:        func(r *httputil.ProxyRequest) { r.SetURL(o.Upstream); r.Out.Host = o.Upstream.Host; r.SetXForwarded() },
		Transport:      o.Transport,
		FlushInterval:  -1, // each read of the upstream's reply goes to the client at once
		BufferPool:     new(bufferPool),
		ModifyResponse: p.captureReply,
		ErrorHandler:   p.noReply,
		ErrorLog:       slog.NewLogLogger(o.Logger.Handler(), slog.LevelDebug),
	}
	var err error
	if p.worker, err = newWorker(p); err != nil {
		return nil, err
	}
	go p.work()
	return p, nil
}

func (p *Proxy) now() time.Duration { return time.Since(p.started) }

type captureKey struct{}

// ServeHTTP passes a request on.
func (p *Proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || !strings.HasSuffix(r.URL.Path, "/chat/completions") {
		p.proxy.ServeHTTP(w, r)
		return
	}
	p.requests.Add(1)
	c := &capture{memory: p.reserve, inFlight: int(p.inFlight.Add(1)), id: p.lastID.Add(1), sent: p.now()}
	r = r.WithContext(context.WithValue(r.Context(), captureKey{}, c))
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = &tee{ReadCloser: r.Body, to: &c.request, c: c, now: p.now}
	}
	defer func() {
		p.inFlight.Add(-1)
		c.end(p.now(), r.Context().Err() != nil)
		p.hand(c)
	}()
	// It panics with http.ErrAbortHandler when the reply breaks off, which
	// breaks off the client's too, as it should.
	p.proxy.ServeHTTP(w, r)
}

// captureReply has the reply's bytes noted as they pass.
func (p *Proxy) captureReply(resp *http.Response) error {
	if c, ok := resp.Request.Context().Value(captureKey{}).(*capture); ok {
		c.status, c.contentType, c.encoding = resp.StatusCode, resp.Header.Get("Content-Type"), resp.Header.Get("Content-Encoding")
		resp.Body = &tee{ReadCloser: resp.Body, to: &c.reply, c: c, now: p.now}
	}
	return nil
}

// noReply answers for an upstream server that didn't.
func (p *Proxy) noReply(w http.ResponseWriter, r *http.Request, err error) {
	if c, ok := r.Context().Value(captureKey{}).(*capture); ok {
		c.fail(err)
	}
	if r.Context().Err() != nil {
		return // the client has gone
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusBadGateway)
	io.WriteString(w, `{"error":{"message":"culprit record: the upstream server gave no answer","type":"bad_gateway","code":502}}`+"\n") //nolint:errcheck // the client may have gone
}

// reserve takes memory for captured bytes, if there is some.
func (p *Proxy) reserve(n int64) bool {
	if p.waiting.Add(n) > p.Memory {
		p.waiting.Add(-n)
		return false
	}
	return true
}

// hand gives a capture to the worker, or drops it.
func (p *Proxy) hand(c *capture) {
	p.closing.RLock()
	defer p.closing.RUnlock()
	if !p.closed && !c.lost() {
		select {
		case p.captures <- c:
			return
		default:
		}
	}
	p.drop(c)
}

func (p *Proxy) drop(c *capture) {
	p.dropped.Add(1)
	p.release(c)
}

func (p *Proxy) release(c *capture) { p.waiting.Add(-c.free()) }

// Close writes what has been captured and ends the history. Requests that are
// still on their way are passed on to their end, and not recorded; end the
// HTTP server first.
func (p *Proxy) Close() error {
	p.closing.Lock()
	if !p.closed {
		p.closed = true
		close(p.captures)
	}
	p.closing.Unlock()
	<-p.done
	return p.worker.closeErr
}

// Stats says what has passed so far.
func (p *Proxy) Stats() Stats {
	s := p.worker.stats()
	s.Requests, s.InFlight = p.requests.Load(), p.inFlight.Load()
	s.Dropped = p.dropped.Load()
	return s
}

type bufferPool struct{ pool sync.Pool }

const copySize = 32 << 10

func (b *bufferPool) Get() []byte {
	if p, ok := b.pool.Get().(*[copySize]byte); ok {
		return p[:]
	}
	return new([copySize]byte)[:]
}

func (b *bufferPool) Put(buf []byte) { b.pool.Put((*[copySize]byte)(buf)) }

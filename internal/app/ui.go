package app

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/search"
)

// livePage serves a hunt's page while the hunt runs, with the files that it
// leads to. Its methods may be called at once, and on nil, which serves nothing.
type livePage struct {
	URL string

	subject *experiment.Case
	dir     string
	tool    string
	book    *book
	server  *http.Server
	root    *os.Root
	stale   chan struct{} // the hunt has got on since the page was made
	made    sync.WaitGroup

	mu      sync.Mutex
	page    []byte
	trial   string // which one runs
	now     string
	end     string        // set at the end
	pages   int           // how many there were
	changed chan struct{} // closed when any of these changes
}

// drain is how long readers get to take the last page.
const drain = 3 * time.Second

// serveLive starts serving the page of a hunt that is about to run in dir.
func serveLive(ctx context.Context, address string, c *experiment.Case, dir, tool string, b *book) (*livePage, error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, usage("--ui: %w", err)
	}
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, errors.Join(err, l.Close())
	}
	p := &livePage{
		URL: "http://" + l.Addr().String() + "/", subject: c, dir: dir, tool: tool, book: b, root: root,
		stale: make(chan struct{}, 1), changed: make(chan struct{}), now: "The hunt begins.",
	}
	handler := p.routes()
	if a, ok := l.Addr().(*net.TCPAddr); ok && a.IP.IsLoopback() {
		handler = onlyLoopback(handler)
	}
	p.server = &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	p.made.Go(func() {
		for range p.stale {
			p.make(false)
		}
	})
	p.Refresh()
	go p.server.Serve(l) //nolint:errcheck // it ends when Close closes it
	return p, nil
}

// Refresh makes the page anew, soon.
func (p *livePage) Refresh() {
	if p == nil {
		return
	}
	select {
	case p.stale <- struct{}{}:
	default: // it is about to be
	}
}

// Now says what the hunt is doing.
func (p *livePage) Now(text string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.now = p.trial + text
	p.wake()
}

// Trial says which trial runs, before what follows by Now.
func (p *livePage) Trial(text string) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.trial = text
}

// wake tells the readers that something changed; mu is held.
func (p *livePage) wake() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// make makes the page from what is in the hunt's directory.
func (p *livePage) make(ended bool) {
	page, err := p.render(ended)
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.now = "The page couldn't be made: " + err.Error()
		p.wake()
		return
	}
	p.page = page
	p.pages++
	p.wake()
}

func (p *livePage) render(ended bool) ([]byte, error) {
	record, err := experiment.ReadHunt(p.dir)
	if errors.Is(err, fs.ErrNotExist) { // there is nothing yet
		record, err = &experiment.Record{Dir: p.dir, Case: p.subject, Result: new(experiment.Result)}, nil
	}
	if err != nil {
		return nil, err
	}
	if !ended {
		record.Result.Status = search.Running // a finding would be an earlier hunt's
	}
	standing, err := p.book.standing(context.Background())
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	now := p.now
	p.mu.Unlock()
	var page bytes.Buffer
	err = report.HuntPage(&page, record, report.PageOptions{Tool: p.tool, Made: time.Now(), Again: again(record), Hypotheses: &standing, Live: true, Now: now})
	return page.Bytes(), err
}

// Close gives the readers the last page and says what came of the hunt.
func (p *livePage) Close(text string) {
	if p == nil {
		return
	}
	close(p.stale)
	p.made.Wait()
	p.make(true)
	p.mu.Lock()
	p.now, p.end = text, text
	p.wake()
	p.mu.Unlock()
	ctx, cancel := context.WithTimeout(context.Background(), drain)
	defer cancel()
	if err := p.server.Shutdown(ctx); err != nil {
		p.server.Close() //nolint:errcheck // readers that don't take the page get none
	}
	p.root.Close() //nolint:errcheck // it was only read
}

func (p *livePage) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", p.servePage)
	mux.HandleFunc("GET /events", p.serveEvents)
	files := http.FileServerFS(p.root.FS())
	mux.HandleFunc("GET /", func(w http.ResponseWriter, r *http.Request) {
		// What a server under test wrote is shown, and may do nothing.
		w.Header().Set("Content-Security-Policy", "default-src 'none'; sandbox")
		files.ServeHTTP(w, r)
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Content-Type-Options", "nosniff")
		w.Header().Set("Cache-Control", "no-store")
		mux.ServeHTTP(w, r)
	})
}

func (p *livePage) servePage(w http.ResponseWriter, r *http.Request) {
	for {
		p.mu.Lock()
		page, changed := p.page, p.changed
		p.mu.Unlock()
		if page != nil {
			w.Header().Set("Content-Type", "text/html; charset=utf-8")
			w.Write(page) //nolint:errcheck // the reader went away
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// serveEvents tells a reader what changes: "now" with what the hunt is doing,
// "page" with a new page, and "end", after which there is nothing more.
func (p *livePage) serveEvents(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Type", "text/event-stream")
	control := http.NewResponseController(w)
	seen, said := 0, ""
	for {
		p.mu.Lock()
		page, pages, now, end, changed := p.page, p.pages, p.now, p.end, p.changed
		p.mu.Unlock()
		var err error
		if pages != seen {
			seen = pages
			err = writeEvent(w, "page", string(page))
		}
		if now != said && end == "" {
			said = now
			err = errors.Join(err, writeEvent(w, "now", now))
		}
		if end != "" {
			err = errors.Join(err, writeEvent(w, "end", end))
		}
		if err = errors.Join(err, control.Flush()); err != nil || end != "" {
			return
		}
		select {
		case <-changed:
		case <-r.Context().Done():
			return
		}
	}
}

// writeEvent writes a server-sent event; its data is a text as JSON, which has
// no line ends.
func writeEvent(w io.Writer, name, text string) error {
	data, err := json.Marshal(text)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "event: %s\ndata: %s\n\n", name, data)
	return err
}

// onlyLoopback refuses requests by a name that isn't loopback's: a page from
// elsewhere could make a name of its own point here.
func onlyLoopback(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		host, _, err := net.SplitHostPort(r.Host)
		if err != nil {
			host = r.Host
		}
		if ip := net.ParseIP(host); host != "localhost" && (ip == nil || !ip.IsLoopback()) {
			http.Error(w, "this page is served to this machine alone", http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// endText says where the page is when nobody serves it any more.
func endText(dir string, err error) string {
	text := "The hunt has ended"
	if err != nil {
		text = "The hunt stopped"
	}
	path := filepath.Join(dir, report.PageFile)
	if _, statErr := os.Stat(path); statErr != nil {
		return text + ". Nothing more comes here."
	}
	if absolute, absErr := filepath.Abs(path); absErr == nil {
		path = absolute
	}
	return text + ". Nothing more comes here; the page is in " + path + "."
}

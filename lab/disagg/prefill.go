package disagg

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"
)

// Prefill is a rank's end on a prefill server.
type Prefill struct {
	config Config
	counts counts

	mu     sync.Mutex
	rooms  map[uint64]*Sender // that haven't ended, or whose other half hasn't heard of it
	links  map[*link]bool
	closed bool
	wg     sync.WaitGroup
}

// NewPrefill makes an end without connections.
func NewPrefill(c Config) *Prefill {
	return &Prefill{config: c.withDefaults(), rooms: map[uint64]*Sender{}, links: map[*link]bool{}}
}

// Sender is one transfer, out of pages that the caller keeps until Idle.
type Sender struct {
	p    *Prefill
	room uint64

	// Guarded by p.mu.
	state  State
	err    error
	opened bool    // by the engine
	asked  bool    // the decode side has come
	link   *link   // nil before the decode side has come
	pages  []int32 // its pages
	jobs   int     // queued or being written
	sent   int     // pages whose rows were sent or are queued
	timer  *time.Timer
}

// Serve hands the connections of a listener to ranks, until it is closed.
func Serve(l net.Listener, ranks ...*Prefill) error {
	ctx, stop := context.WithCancel(context.Background())
	var handshakes sync.WaitGroup
	defer handshakes.Wait()
	defer stop()
	for {
		conn, err := l.Accept()
		if err != nil {
			return err
		}
		handshakes.Go(func() {
			greeted := context.AfterFunc(ctx, func() { conn.Close() })
			defer greeted()
			c := &ranks[0].config
			g, err := readHello(impatient{conn, silence * c.Heartbeat})
			if err == nil && int(g.rank) >= len(ranks) {
				err = fmt.Errorf("there is no rank %d", g.rank)
			}
			if err != nil {
				conn.Close()
				c.Logger.Warn("a connection for transfers was refused", slog.Any("error", err))
				return
			}
			ranks[g.rank].connect(conn, g)
		})
	}
}

// connect serves a connection in the background.
func (p *Prefill) connect(conn net.Conn, theirs geometry) {
	l := newLink(&p.config)
	mine := geometryOf(&p.config)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		conn.Close()
		return
	}
	p.links[l] = true
	l.frame(hello, 0, 0, mine.payload())
	mismatch := mine.agree(theirs)
	p.wg.Go(func() {
		err := l.run(conn, func(r *bufio.Reader) error {
			if mismatch != nil { // the other side finds the same in our hello
				_, _ = io.Copy(io.Discard, r)
				return mismatch
			}
			return p.read(l, r)
		})
		p.gone(l, err)
		l.drop()
	})
}

// read takes one frame.
func (p *Prefill) read(l *link, r *bufio.Reader) error {
	h, err := readHeader(r)
	if err != nil {
		return err
	}
	switch h.kind {
	case ping:
		_, err = r.Discard(h.length)
		return err
	case request:
		pages, n, err := readPages(r, h.length)
		if err != nil {
			return err
		}
		if n != h.length {
			return fmt.Errorf("a request of %d bytes for %d pages", h.length, len(pages))
		}
		p.requested(l, h.room, pages)
		return nil
	case abort, done:
		if h.length != 0 {
			return fmt.Errorf("a frame of kind %d with %d bytes", h.kind, h.length)
		}
		p.ended(l, h.room, h.kind == done)
		return nil
	default:
		return fmt.Errorf("a decode server sent a frame of kind %d", h.kind)
	}
}

// requested joins a room's two halves, whichever comes first.
func (p *Prefill) requested(l *link, room uint64, pages []int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.rooms[room]
	switch {
	case s == nil:
		s = p.add(room)
	case s.state == Failed:
		l.frame(failed, 0, room, []byte(s.err.Error()))
		s.forget()
		return
	case s.link != nil:
		l.frame(failed, 0, room, []byte("the room is in use"))
		return
	}
	s.link, s.pages, s.asked = l, pages, true
	if s.opened {
		s.move(WaitingForInput)
		s.timer.Stop()
	}
}

// ended takes the decode side's last word on a room.
func (p *Prefill) ended(l *link, room uint64, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.rooms[room]
	if s != nil && s.link != l {
		s = nil // another decode server's
	}
	switch {
	case !ok:
		if s != nil {
			s.link = nil // nobody wants to hear more than the acknowledgement
			s.fail(errors.New("the decode side gave it up"))
		}
		l.frame(ack, 0, room, nil) // after what is queued
	case s == nil:
		p.counts.late.Add(1)
	case s.state == Transferring:
		p.counts.transfers.Add(1)
		s.move(Success)
		s.forget()
	default:
		s.fail(fmt.Errorf("the decode side has everything, and the transfer is %v", s.state))
	}
}

// gone fails what a link carried.
func (p *Prefill) gone(l *link, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
	if !p.closed && !errors.Is(err, io.EOF) {
		p.config.Logger.Warn("the connection to a decode server is lost", slog.Any("error", err))
	}
	for _, s := range p.rooms {
		if s.link == l {
			s.link = nil
			s.fail(fmt.Errorf("the connection to the decode server is lost: %w", err))
		}
	}
}

// add makes a room's first half. Its time runs out if the other doesn't come.
func (p *Prefill) add(room uint64) *Sender {
	s := &Sender{p: p, room: room, state: Bootstrapping}
	p.rooms[room] = s
	s.timer = time.AfterFunc(p.config.Timeout, func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		if s.state == Failed {
			s.forget()
			return
		}
		s.fail(fmt.Errorf("nothing happened for %v, it was %v", p.config.Timeout, s.state))
	})
	return s
}

// Open begins a transfer. A room that is in use fails.
func (p *Prefill) Open(room uint64) *Sender {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.rooms[room]
	switch {
	case p.closed:
		return &Sender{p: p, room: room, err: errClosed}
	case s == nil:
		s = p.add(room)
	case s.opened:
		return &Sender{p: p, room: room, err: errors.New("the room is in use")}
	case s.state == Failed:
		s.forget()
	default:
		s.move(WaitingForInput)
		s.timer.Stop()
	}
	s.opened = true
	return s
}

// Poll says where the transfer stands.
func (s *Sender) Poll() State {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	return s.state
}

// Err says why it failed.
func (s *Sender) Err() error {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	return s.err
}

// Idle says that nothing reads the pages any more.
func (s *Sender) Idle() bool {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	return s.jobs == 0
}

// Send sends the rows of the prompt's next pages. Only the last of all may be
// incomplete.
func (s *Sender) Send(pages []int32) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if s.state == Failed || len(pages) == 0 {
		return
	}
	s.rows(pages, false)
}

// Finish sends the rows of the last pages, and what goes with them: the index
// keys of all pages, and the metadata.
func (s *Sender) Finish(last, all []int32, first First) {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	if s.state == Failed {
		return
	}
	if len(all) != len(s.pages) {
		s.fail(fmt.Errorf("the prompt has %d pages, and the decode side set %d aside", len(all), len(s.pages)))
		return
	}
	s.rows(last, true)
	b := first.payload()
	s.queue(func(w io.Writer) error {
		s.p.counts.bytes[Metadata].Add(uint64(len(b)))
		h := header{kind: data, component: Metadata, last: true, length: len(b), room: s.room}
		_, err := w.Write(append(h.append(nil), b...))
		return err
	})
	s.send(IndexK, all, s.pages, true)
	s.timer.Reset(s.p.config.Timeout)
}

// rows sends the rows of the next pages.
func (s *Sender) rows(pages []int32, last bool) {
	if s.sent+len(pages) > len(s.pages) {
		s.fail(fmt.Errorf("the prompt has more than the %d pages that the decode side set aside", len(s.pages)))
		return
	}
	s.send(Latent, pages, s.pages[s.sent:s.sent+len(pages)], last)
	s.sent += len(pages)
	s.move(Transferring)
}

// send queues pages of a component. They are read when their turn comes, and
// not at all if the transfer has failed by then.
func (s *Sender) send(part Component, from, to []int32, last bool) {
	from = slices.Clone(from)
	c, l := &s.p.config, s.link
	s.queue(func(w io.Writer) error {
		b := make([]byte, pageBytes(c.Cache, part))
		h := header{kind: data, component: part, last: last, length: 4 + 4*len(to) + len(c.Cache.Latent)*len(to)*len(b), room: s.room}
		if _, err := w.Write(appendPages(h.append(nil), to)); err != nil {
			return err
		}
		for layer := range c.Cache.Latent {
			for _, page := range from {
				load(b, c.Cache, part, layer, page)
				if _, err := w.Write(b); err != nil {
					return err
				}
				s.p.counts.bytes[part].Add(uint64(len(b)))
				l.pace(len(b))
			}
		}
		return nil
	})
}

// queue leaves a job for the link.
func (s *Sender) queue(write func(io.Writer) error) {
	s.jobs++
	s.link.send(func(w io.Writer) error {
		s.p.mu.Lock()
		dead := s.state == Failed
		s.p.mu.Unlock()
		var err error
		if !dead {
			err = write(w)
		}
		s.p.mu.Lock()
		defer s.p.mu.Unlock()
		s.jobs--
		if s.jobs == 0 && (s.state == Failed || s.state == Success) {
			s.p.config.Wake()
		}
		return err
	})
}

// Abort ends a transfer that hasn't ended.
func (s *Sender) Abort() {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.fail(errAborted)
}

// fail ends a transfer that hasn't ended, and tells the other side. If only one
// half has come, the other hears of it when it comes.
func (s *Sender) fail(err error) {
	if s.state == Failed || s.state == Success {
		return
	}
	s.err = fmt.Errorf("the transfer of room %d failed: %w", s.room, err)
	s.p.counts.failures.Add(1)
	if s.link != nil {
		s.link.frame(failed, 0, s.room, []byte(err.Error()))
	}
	s.move(Failed)
	if s.opened == s.asked || s.p.closed {
		s.forget()
	} else {
		s.timer.Reset(s.p.config.Timeout)
	}
}

func (s *Sender) forget() {
	s.timer.Stop()
	delete(s.p.rooms, s.room)
}

func (s *Sender) move(to State) {
	if s.state != to {
		s.state = to
		s.p.config.Wake()
	}
}

// Rooms counts the transfers that haven't ended, for tests.
func (p *Prefill) Rooms() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for _, s := range p.rooms {
		if s.state != Failed {
			n++
		}
	}
	return n
}

// Stats returns the counts so far.
func (p *Prefill) Stats() Stats { return p.counts.stats() }

// Close fails all transfers and waits until nothing reads their pages.
func (p *Prefill) Close() {
	p.mu.Lock()
	p.closed = true
	for _, s := range p.rooms {
		s.fail(errClosed)
		s.forget()
	}
	for l := range p.links {
		l.close(errClosed)
	}
	p.mu.Unlock()
	p.wg.Wait()
}

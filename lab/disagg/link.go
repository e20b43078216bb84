package disagg

import (
	"bufio"
	"io"
	"net"
	"sync"
	"time"
)

// silence is how many heartbeats a peer may miss.
const silence = 3

// link is a connection to one peer. Frames are written by one goroutine, in
// the order in which they were queued, and read by another.
type link struct {
	config *Config
	signal chan struct{} // the queue isn't empty
	closed chan struct{}

	mu    sync.Mutex
	queue []func(io.Writer) error
	err   error // why it closed
	conn  net.Conn
}

func newLink(c *Config) *link {
	return &link{config: c, signal: make(chan struct{}, 1), closed: make(chan struct{})}
}

// send queues a frame, or several. What is queued on a link that has closed is
// never written.
func (l *link) send(write func(io.Writer) error) {
	l.mu.Lock()
	l.queue = append(l.queue, write)
	l.mu.Unlock()
	select {
	case l.signal <- struct{}{}:
	default:
	}
}

// frame queues a frame without pages.
func (l *link) frame(k kind, part Component, room uint64, payload []byte) {
	h := header{kind: k, component: part, last: true, length: len(payload), room: room}
	b := append(h.append(nil), payload...)
	l.send(func(w io.Writer) error {
		_, err := w.Write(b)
		return err
	})
}

func (l *link) next() func(io.Writer) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.queue) == 0 {
		return nil
	}
	write := l.queue[0]
	l.queue = l.queue[1:]
	return write
}

// drop lets go of what is left in the queue: its writers find that there is
// nothing to write to.
func (l *link) drop() {
	for f := l.next(); f != nil; f = l.next() {
		_ = f(io.Discard)
	}
}

// close ends the link; the first reason counts.
func (l *link) close(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err != nil {
		return
	}
	l.err = err
	close(l.closed)
	if l.conn != nil {
		l.conn.Close()
	}
}

// run serves a connection until it ends, and returns why. When it returns,
// nothing is read or written any more.
func (l *link) run(conn net.Conn, read func(*bufio.Reader) error) error {
	l.mu.Lock()
	l.conn = conn
	if l.err != nil {
		conn.Close()
	}
	l.mu.Unlock()
	alive := impatient{conn, silence * l.config.Heartbeat}
	var writer sync.WaitGroup
	writer.Go(func() { l.close(l.write(alive)) })
	r := bufio.NewReaderSize(alive, 1<<16)
	for {
		if err := read(r); err != nil {
			l.close(err)
			writer.Wait()
			return l.err
		}
	}
}

// write empties the queue, and pings when there is nothing else to say.
func (l *link) write(conn io.Writer) error {
	w := bufio.NewWriterSize(conn, 1<<16)
	beat := time.NewTicker(l.config.Heartbeat)
	defer beat.Stop()
	for {
		select {
		case <-l.closed:
			return nil
		case <-l.signal:
		case <-beat.C:
			l.frame(ping, 0, 0, nil)
		}
		for f := l.next(); f != nil; f = l.next() {
			if err := f(w); err != nil {
				return err
			}
		}
		if err := w.Flush(); err != nil {
			return err
		}
	}
}

// pace waits as long as n bytes take.
func (l *link) pace(n int) {
	if l.config.Bandwidth <= 0 {
		return
	}
	select {
	case <-time.After(time.Duration(float64(n) / float64(l.config.Bandwidth) * float64(time.Second))):
	case <-l.closed:
	}
}

// impatient fails reads and writes that take too long.
type impatient struct {
	net.Conn
	patience time.Duration
}

func (c impatient) Read(b []byte) (int, error) {
	if err := c.SetReadDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

func (c impatient) Write(b []byte) (int, error) {
	if err := c.SetWriteDeadline(time.Now().Add(c.patience)); err != nil {
		return 0, err
	}
	return c.Conn.Write(b)
}

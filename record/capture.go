package record

import (
	"errors"
	"io"
	"sync"
	"time"
)

// capture is one exchange while it happens and until it is written: the bytes
// of both directions, and when they came.
type capture struct {
	memory   func(int64) bool
	id       int64
	inFlight int
	sent     time.Duration

	status                int
	contentType, encoding string

	mu      sync.Mutex // guards the rest: a reply may begin before the request has been read
	request stretch
	reply   stretch
	taken   int64 // of memory
	full    bool  // there was none left
	ended   bool
	err     error
	hungUp  bool // the client did
	last    time.Duration
}

// stretch is bytes as they came.
type stretch struct {
	data []byte
	ends []mark
	err  error // that ended them, io.EOF when they came to their end
}

// mark says when data up to a place had come.
type mark struct {
	at  time.Duration
	end int
}

// markCost is what a read adds to the memory that a capture takes, beside its
// bytes.
const markCost = 16

// tee notes what is read through it.
type tee struct {
	io.ReadCloser
	to  *stretch
	c   *capture
	now func() time.Duration
}

func (t *tee) Read(b []byte) (int, error) {
	n, err := t.ReadCloser.Read(b)
	if n > 0 || err != nil {
		t.c.note(t.to, t.now(), b[:n], err)
	}
	return n, err
}

func (c *capture) note(s *stretch, at time.Duration, data []byte, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil && s.err == nil {
		s.err = err
	}
	if c.ended || c.full || len(data) == 0 {
		return
	}
	n := int64(len(data) + markCost)
	if !c.memory(n) {
		c.full = true // half an op is worse than none
		s.data, s.ends = nil, nil
		return
	}
	c.taken += n
	s.data = append(s.data, data...)
	s.ends = append(s.ends, mark{at, len(s.data)})
}

func (c *capture) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = err
}

// end closes the capture: what comes later isn't noted. A client that is gone
// before the reply has come to its end has hung up.
func (c *capture) end(at time.Duration, clientGone bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended, c.last = true, at
	c.hungUp = !errors.Is(c.reply.err, io.EOF) && (clientGone || c.status != 0 && c.reply.err == nil)
}

func (c *capture) lost() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.full
}

// free forgets the bytes and returns how much memory they had taken.
func (c *capture) free() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := c.taken
	c.taken, c.request, c.reply, c.ended = 0, stretch{}, stretch{}, true
	return n
}

// replay reads a stretch again as it came: a piece for each read, at its time.
type replay struct {
	s    *stretch
	next int // mark
	from int // byte
	at   time.Duration
}

func (r *replay) Read(b []byte) (int, error) {
	for r.next < len(r.s.ends) && r.from == r.s.ends[r.next].end {
		r.next++
	}
	if r.next == len(r.s.ends) {
		if r.s.err == nil {
			return 0, io.ErrUnexpectedEOF
		}
		return 0, r.s.err
	}
	m := r.s.ends[r.next]
	n := copy(b, r.s.data[r.from:m.end])
	r.from += n
	r.at = m.at
	return n, nil
}

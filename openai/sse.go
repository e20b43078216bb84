package openai

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"time"
)

// DefaultEventLimit is the largest event that a Reader takes, in bytes.
const DefaultEventLimit = 16 << 20

// ErrEventTooLarge is wrapped by the error for an event over the limit. The
// rest of the stream can't be read.
var ErrEventTooLarge = errors.New("server-sent event is too large")

const (
	readerBuffer = 4 << 10
	keepBuffer   = 1 << 20 // larger buffers are given up after the event that needed them
	maxIdleReads = 100     // reads in a row that return nothing
)

// Event is one server-sent event. Data is valid until the next call of Next.
type Event struct {
	Name string
	Data []byte
	At   time.Duration // when its last byte arrived
}

// Reader reads server-sent events as the WHATWG standard has them, and more
// leniently where servers are:
//
//   - An event that the end of the stream cuts off before its blank line is
//     delivered, since servers leave the last blank line out. It isn't
//     delivered when the stream breaks (any error but io.EOF).
//   - A field "error" counts as data of an event with the name "error":
//     llama.cpp has sent its errors so.
//
// Bytes that aren't UTF-8 pass through as they are.
type Reader struct {
	src   io.Reader
	now   func() time.Duration
	limit int

	buf      []byte
	pos, end int    // buf[pos:end] is read and not yet used
	lf, cr   cursor // the next line ends
	skipLF   bool   // the last line ended in CR: an LF that follows belongs to it
	begun    bool   // the first line, with its byte order mark, is behind
	at       time.Duration
	err      error // what src returned, once buf is used up

	data     []byte // of the event being read
	has      bool   // it has a data line
	name     string
	lastName string // kept so that a name that repeats isn't allocated again
	size     int    // bytes of the event's whole lines, comments left out
}

// NewReader reads from r. now is asked after each read of r, so that an
// event's time is when its bytes came. limit 0 is DefaultEventLimit.
func NewReader(r io.Reader, now func() time.Duration, limit int) *Reader {
	if limit <= 0 {
		limit = DefaultEventLimit
	}
	return &Reader{src: r, now: now, limit: limit, buf: make([]byte, readerBuffer), lf: cursor{c: '\n'}, cr: cursor{c: '\r'}}
}

// Next returns the next event, io.EOF at a clean end.
func (r *Reader) Next() (Event, error) {
	r.startEvent()
	for {
		line, ok := r.line()
		switch {
		case !ok && r.size+r.end-r.pos > r.limit:
			return Event{}, r.tooLarge(r.size + r.end - r.pos)
		case !ok && r.err == nil:
			r.fill()
		case !ok:
			if errors.Is(r.err, io.EOF) {
				r.field(r.buf[r.pos:r.end])
				r.pos = r.end
				if r.has {
					return Event{Name: r.name, Data: r.data, At: r.at}, nil
				}
			}
			return Event{}, r.err
		case r.size+len(line) > r.limit:
			return Event{}, r.tooLarge(r.size + len(line))
		case len(line) > 0:
			r.field(line)
		case r.has:
			return Event{Name: r.name, Data: r.data, At: r.at}, nil
		default: // a blank line without data before it ends nothing
			r.begun = true
			r.startEvent()
		}
	}
}

func (r *Reader) startEvent() {
	if cap(r.data) > keepBuffer {
		r.data = nil
	}
	r.data, r.has, r.name, r.size = r.data[:0], false, "", 0
}

// line returns the next whole line without its end.
func (r *Reader) line() ([]byte, bool) {
	if r.skipLF && r.pos < r.end {
		r.skipLF = false
		if r.buf[r.pos] == '\n' {
			r.pos++
		}
	}
	i, ok := r.lf.find(r.buf, r.pos, r.end)
	if !ok {
		i = r.end
	}
	if j, found := r.cr.find(r.buf, r.pos, r.end); found && j < i {
		i, ok, r.skipLF = j, true, true
	}
	if !ok {
		return nil, false
	}
	line := r.buf[r.pos:i]
	r.pos = i + 1
	return line, true
}

// field takes one line of the event.
func (r *Reader) field(line []byte) {
	if !r.begun {
		r.begun = true
		line = bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
	}
	name, value, _ := bytes.Cut(line, []byte(":"))
	if len(name) == 0 { // a comment
		return
	}
	r.size += len(line)
	value = bytes.TrimPrefix(value, []byte(" "))
	switch string(name) {
	case "event":
		r.setName(value)
	case "error":
		r.setName(name)
		fallthrough
	case "data":
		if r.has {
			r.data = append(r.data, '\n')
		}
		r.has = true
		r.data = append(r.data, value...)
	}
}

func (r *Reader) setName(name []byte) {
	if string(name) != r.lastName {
		r.lastName = string(name)
	}
	r.name = r.lastName
}

// fill reads once, after making room behind the unfinished line.
func (r *Reader) fill() {
	unread := r.buf[r.pos:r.end]
	if r.end == len(r.buf) || len(unread) == 0 {
		buf := r.buf
		switch {
		case len(unread) > len(buf)/2:
			buf = make([]byte, min(2*len(buf), max(r.limit, readerBuffer)+1))
		case len(buf) > keepBuffer && len(unread) <= readerBuffer/2:
			buf = make([]byte, readerBuffer)
		}
		copy(buf, unread)
		r.lf.at -= r.pos
		r.cr.at -= r.pos
		r.buf, r.pos, r.end = buf, 0, len(unread)
	}
	for range maxIdleReads {
		n, err := r.src.Read(r.buf[r.end:])
		r.end += n
		r.err = err
		if n > 0 || err != nil {
			r.at = r.now()
			return
		}
	}
	r.err = io.ErrNoProgress
}

func (r *Reader) tooLarge(size int) error {
	r.err = fmt.Errorf("%w: %d bytes without an end, the limit is %d", ErrEventTooLarge, size, r.limit)
	*r = Reader{err: r.err, now: r.now, limit: r.limit, buf: make([]byte, 1)} // the next Next finds the error alone
	return r.err
}

// cursor remembers where the next byte c of a buffer is, so that no byte is
// searched twice.
type cursor struct {
	c     byte
	at    int // of the next c, or how far there is none
	found bool
}

func (k *cursor) find(buf []byte, pos, end int) (int, bool) {
	if k.at < pos {
		k.at, k.found = pos, false
	}
	if !k.found {
		i := bytes.IndexByte(buf[k.at:end], k.c)
		if i < 0 {
			k.at = end
			return 0, false
		}
		k.at, k.found = k.at+i, true
	}
	return k.at, true
}

// Writer writes server-sent events, one Write and one flush each.
type Writer struct {
	w     io.Writer
	flush func() error
	buf   []byte
}

// NewWriter writes to w and calls flush, unless it is nil, after each event.
// An HTTP handler passes the Flush of its http.ResponseController.
func NewWriter(w io.Writer, flush func() error) *Writer { return &Writer{w: w, flush: flush} }

// Event writes one event. Data of several lines becomes several data fields; it
// holds no CR.
func (w *Writer) Event(data []byte) error { return w.write("data: ", data) }

// Comment writes a comment, which keeps a silent connection open.
func (w *Writer) Comment(text string) error { return w.write(": ", []byte(text)) }

// Done writes the [DONE] that ends a stream.
func (w *Writer) Done() error { return w.Event(done) }

func (w *Writer) write(field string, data []byte) error {
	w.buf = w.buf[:0]
	for more := true; more; {
		var line []byte
		line, data, more = bytes.Cut(data, []byte("\n"))
		w.buf = append(w.buf, field...)
		w.buf = append(w.buf, line...)
		w.buf = append(w.buf, '\n')
	}
	w.buf = append(w.buf, '\n')
	if _, err := w.w.Write(w.buf); err != nil {
		return err
	}
	if w.flush == nil {
		return nil
	}
	return w.flush()
}

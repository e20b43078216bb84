package history

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/klauspost/compress/zstd"
)

const (
	// readSize is the buffer of a reader to begin with: small enough for a
	// core's own cache, so that a line is still there when it is decoded.
	readSize = 256 << 10
	// maxWindow is the largest zstd window that is accepted, as of the zstd
	// command: a history that was compressed again with -19 is still read.
	maxWindow = 128 << 20
)

var errEmpty = errors.New("it ends before its first record: nothing was recorded")

// Record is an op or an event: one of the two is set. It and everything it
// points to are valid until the next call of Next.
type Record struct {
	Op    *Op
	Event *Event
}

// Reader streams a history: memory is bounded by the largest record, not by
// the file. It is used by one goroutine.
type Reader struct {
	name   string // in errors
	header Header
	file   io.Closer // nil when the caller owns the input
	src    *source
	zstd   *zstd.Decoder

	buf        []byte
	start, end int   // buf[start:end] has been read and not been returned
	offset     int64 // of buf[start] in the uncompressed history
	record     int64 // number of the record last returned or being read; the header is 1
	limit      int   // longest line

	decoder   decoder
	truncated bool
	err       error // sticky
}

// source notes that the decompressor asked for more than there is. That tells
// a file that ends too early from one that is damaged in the middle.
type source struct {
	r   *bufio.Reader
	eof bool
	err error // of the input itself
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	switch {
	case errors.Is(err, io.EOF):
		s.eof = true
	case err != nil:
		s.err = err
	}
	return n, err
}

// Open opens a history file and reads its header; Close closes it.
func Open(path string) (*Reader, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("open history: %w", err)
	}
	r, err := newReader("history "+path, f)
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	r.file = f
	return r, nil
}

// NewReader reads the header.
func NewReader(r io.Reader) (*Reader, error) { return newReader("history", r) }

func newReader(name string, in io.Reader) (*Reader, error) {
	r := &Reader{name: name, src: &source{r: bufio.NewReaderSize(in, 64<<10)}, buf: make([]byte, readSize), limit: MaxRecord}
	var err error
	// One at a time: reading keeps to one core and leaves no goroutine behind.
	r.zstd, err = zstd.NewReader(r.src, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	line, err := r.line()
	switch {
	case errors.Is(err, zstd.ErrMagicMismatch):
		return nil, fmt.Errorf("read %s: not a zstd file; a run's history is its history.jsonl.zst", name)
	case errors.Is(err, io.EOF):
		return nil, fmt.Errorf("read %s: %w", name, errEmpty)
	case err != nil:
		return nil, err
	}
	r.header, err = parseHeader(line)
	if err != nil {
		return nil, r.broken(line, err)
	}
	return r, nil
}

func parseHeader(line []byte) (Header, error) {
	var h headerRecord
	// The number first: a later format may differ in everything else.
	var version struct {
		Record string
		Format int
	}
	err := json.Unmarshal(line, &version)
	switch {
	case err != nil:
		return h.Header, fmt.Errorf("not a header: %w", err)
	case version.Record != "run" || version.Format < 1:
		return h.Header, errors.New(`not a history: its first record must be {"record":"run","format":N,...}`)
	case version.Format > Format:
		return h.Header, fmt.Errorf("format %d, and this program knows formats up to %d: read it with a newer culprit", version.Format, Format)
	}
	if err := json.Unmarshal(line, &h); err != nil {
		return h.Header, fmt.Errorf("not a header: %w", err)
	}
	if string(h.Workload) == "null" {
		h.Workload = nil
	}
	return h.Header, nil
}

// Header is the first record.
func (r *Reader) Header() Header { return r.header }

// Next returns the next record, io.EOF at the end. A history that was cut
// short ends after its last whole record; see Truncated. Any other error says
// at which record and at which byte of the uncompressed history it is, and
// comes back from every later call.
func (r *Reader) Next() (Record, error) {
	for r.err == nil {
		line, err := r.line()
		if err != nil {
			r.err = err
			break
		}
		rec, err := r.decoder.decode(line)
		if err != nil {
			r.err = r.broken(line, err)
			break
		}
		if rec != (Record{}) {
			return rec, nil
		}
		// A kind of record that a later version has added.
	}
	return Record{}, r.err
}

// broken is the error about the line that was read last.
func (r *Reader) broken(line []byte, err error) error {
	return r.at(r.offset-int64(len(line))-1, err)
}

func (r *Reader) at(offset int64, err error) error {
	return fmt.Errorf("read %s: record %d, byte %d uncompressed: %w", r.name, r.record, offset, err)
}

// Truncated says, after io.EOF, that the history wasn't closed: its writer was
// killed, is still at work or had no room on the disk. The records up to there
// are whole.
func (r *Reader) Truncated() bool { return r.truncated }

// Close closes what Open opened.
func (r *Reader) Close() error {
	r.zstd.Close()
	if r.file == nil {
		return nil
	}
	return r.file.Close()
}

// line returns the next line without its newline. It points into r.buf.
func (r *Reader) line() ([]byte, error) {
	r.record++
	for searched := r.start; ; {
		if i := bytes.IndexByte(r.buf[searched:r.end], '\n'); i >= 0 {
			line := r.buf[r.start : searched+i]
			r.offset += int64(len(line)) + 1
			r.start = searched + i + 1
			return line, nil
		}
		searched = r.end
		if r.end == len(r.buf) {
			searched -= r.start
			if err := r.makeRoom(); err != nil {
				return nil, err
			}
		}
		n, err := r.zstd.Read(r.buf[r.end:])
		r.end += n
		if err != nil && n == 0 {
			return nil, r.ended(err)
		}
	}
}

// makeRoom moves what has been read to the front of the buffer, and makes the
// buffer larger when most of it is one line.
func (r *Reader) makeRoom() error {
	have := r.end - r.start
	if have >= r.limit {
		return r.at(r.offset, fmt.Errorf("a line of more than %d bytes", r.limit))
	}
	to := r.buf
	if have > len(to)/2 {
		to = make([]byte, min(2*len(to), r.limit+readSize))
	}
	copy(to, r.buf[r.start:r.end])
	r.buf, r.start, r.end = to, 0, have
	return nil
}

// ended says what the end of the decompressed stream means.
func (r *Reader) ended(err error) error {
	switch {
	case r.src.err != nil:
		return r.at(r.offset, r.src.err)
	case errors.Is(err, io.EOF):
		r.truncated = r.end > r.start
		return io.EOF
	case errors.Is(err, io.ErrUnexpectedEOF) && r.src.eof:
		r.truncated = true
		return io.EOF
	}
	return r.at(r.offset+int64(r.end-r.start), fmt.Errorf("damaged: %w", err))
}

package history

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
)

// MaxRecord is the most bytes of JSON that one record may have: what a reader
// must be ready to hold at once.
const MaxRecord = 256 << 20

const (
	// windowSize is what the compressor remembers. More finds little more
	// with its fastest level and costs memory and cache.
	windowSize = 1 << 19
	// maxWaiting is how many bytes of events wait for the next op or tick.
	maxWaiting = 64 << 10
	// maxKept is the largest buffer that is kept for use again, so that one
	// huge record doesn't hold its memory for the rest of the run.
	maxKept = 1 << 20
)

var errClosed = errors.New("the history is closed")

// Writer appends to a history. It is the file's only writer and is safe for
// use by many goroutines.
//
// Records are encoded by their own goroutine, join a queue, and are compressed
// and written by whichever goroutine gets to the file first, for all that wait.
type Writer struct {
	path string

	queue   sync.Mutex // guards the next four
	waiting []byte     // whole lines
	spare   []byte     // the buffer that waiting had before
	last    int64      // number of the last record that joined
	err     error      // sticky; errClosed after Close

	commit  sync.Mutex // guards the next four; taken before queue
	written int64      // number of the last record in the file
	zstd    *zstd.Encoder
	block   bytes.Buffer // compressed, to be written at once
	file    syncFile
}

// syncFile is what a Writer needs of an *os.File.
type syncFile interface {
	io.WriteCloser
	Sync() error
}

var lines = sync.Pool{New: func() any { return new([]byte) }}

// Create makes a new history file whose header is in it on return; an existing
// file is an error. The header's Format is set.
func Create(path string, h Header) (*Writer, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("create history %s: the file exists, and a history is written once: choose another directory", path)
	}
	if err != nil {
		return nil, fmt.Errorf("create history: %w", err)
	}
	w, err := newWriter(path, f, h)
	if err != nil {
		return nil, errors.Join(err, f.Close(), os.Remove(path))
	}
	return w, nil
}

func newWriter(path string, f syncFile, h Header) (*Writer, error) {
	line, err := appendHeader(nil, h)
	if err != nil {
		return nil, fmt.Errorf("create history %s: header: %w", path, err)
	}
	w := &Writer{path: path, file: f}
	w.zstd, err = zstd.NewWriter(&w.block, zstd.WithEncoderLevel(zstd.SpeedFastest),
		zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(windowSize))
	if err != nil {
		return nil, fmt.Errorf("create history %s: %w", path, err)
	}
	n, _, err := w.join(line)
	if err == nil {
		err = w.flush(n)
	}
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Path is the file that it writes.
func (w *Writer) Path() string { return w.path }

// Op appends an op. When it returns nil, the record survives kill -9 of this
// process: all of it has been handed to the operating system. The error of a
// write that failed comes back from every later call too.
func (w *Writer) Op(op *Op) error {
	buf := lines.Get().(*[]byte)
	line, err := appendOp((*buf)[:0], op)
	var n int64
	if err == nil {
		n, _, err = w.join(line)
	} else {
		err = fmt.Errorf("write history %s: %w", w.path, err)
	}
	if cap(line) <= maxKept {
		*buf = line
		lines.Put(buf)
	}
	if err != nil {
		return err
	}
	return w.flush(n)
}

// Event appends an event. It is written at once when it is a tick, otherwise
// together with the next op or tick: within a second, since ticks come each
// second.
func (w *Writer) Event(e *Event) error {
	n, waiting, err := w.join(appendEvent(nil, e))
	if err != nil {
		return err
	}
	if e.Kind == Tick || waiting >= maxWaiting {
		return w.flush(n)
	}
	return nil
}

// join puts a line into the queue. It returns the record's number and how many
// bytes now wait.
func (w *Writer) join(line []byte) (n int64, waiting int, err error) {
	if len(line) > MaxRecord {
		return 0, 0, fmt.Errorf("write history %s: a record of %d MiB; the most is %d MiB", w.path, len(line)>>20, MaxRecord>>20)
	}
	w.queue.Lock()
	defer w.queue.Unlock()
	if w.err != nil {
		return 0, 0, w.err
	}
	w.waiting = append(w.waiting, line...)
	w.last++
	return w.last, len(w.waiting), nil
}

// flush returns when record n is in the file. The goroutine that gets the lock
// writes everything that waits, so most of those behind it find their record
// written.
func (w *Writer) flush(n int64) error {
	w.commit.Lock()
	defer w.commit.Unlock()
	if w.written >= n {
		return nil
	}
	batch, last, err := w.take(nil)
	if err != nil {
		return err
	}
	if err := w.write(batch, (*zstd.Encoder).Flush); err != nil {
		return err
	}
	w.written = last
	return nil
}

// take empties the queue. When next isn't nil, nothing can join any more.
func (w *Writer) take(next error) (batch []byte, last int64, err error) {
	w.queue.Lock()
	defer w.queue.Unlock()
	if w.err != nil {
		return nil, 0, w.err
	}
	batch, w.waiting, w.spare = w.waiting, w.spare[:0], nil
	w.err = next
	return batch, w.last, nil
}

// write compresses the lines, ends a zstd block or the frame, and hands the
// result to the operating system. The caller holds w.commit.
func (w *Writer) write(batch []byte, end func(*zstd.Encoder) error) error {
	w.block.Reset()
	_, err := w.zstd.Write(batch)
	if err == nil {
		err = end(w.zstd)
	}
	if err == nil {
		_, err = w.file.Write(w.block.Bytes())
	}
	if w.block.Cap() > maxKept {
		w.block = bytes.Buffer{}
	}
	w.queue.Lock()
	defer w.queue.Unlock()
	if err != nil {
		w.err = fmt.Errorf("write history %s: %w; what was recorded before stays readable: "+
			"free space on the disk or choose another directory, and run again", w.path, err)
		return w.err
	}
	if cap(batch) <= maxKept {
		w.spare = batch
	}
	return nil
}

// Close writes what waits, ends the file and syncs it to the disk. After a
// failed write it closes the file and returns that error. Closing twice does
// nothing.
func (w *Writer) Close() error {
	w.commit.Lock()
	defer w.commit.Unlock()
	batch, last, err := w.take(errClosed)
	if errors.Is(err, errClosed) {
		return nil
	}
	if err == nil {
		err = w.write(batch, (*zstd.Encoder).Close)
	}
	if err == nil {
		w.written = last
		err = w.file.Sync()
	}
	if e := w.file.Close(); err == nil {
		err = e
	}
	return err
}

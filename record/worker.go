package record

import (
	"bytes"
	"cmp"
	"container/list"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/target"
)

const (
	// retryAfter is how long nothing is written after the disk refused.
	retryAfter = 10 * time.Second
	// conversations that are remembered, to tell which requests belong
	// together; an older one that goes on counts as a new one.
	conversations = 100_000
	sizeEvery     = 64 // ops between two looks at the history's size
	errorLimit    = 1 << 10
)

// worker turns captures into ops, judges and writes them. One goroutine runs
// it; stats alone is called by others.
type worker struct {
	*Proxy
	key       [32]byte // of the sample and of synthetic text; never written
	segment   int
	dir       string
	writer    *history.Writer
	live      *oracle.Live
	sinceSize int
	retryAt   time.Time
	closeErr  error
	known     map[[sha256.Size]byte]*list.Element
	recent    *list.List // of conversation, the one seen last in front
	sessions  int
	chunks    int64 // since the last tick

	mu     sync.Mutex
	totals Stats
}

type conversation struct {
	key     [sha256.Size]byte
	session int
}

func newWorker(p *Proxy) (*worker, error) {
	w := &worker{Proxy: p, known: map[[sha256.Size]byte]*list.Element{}, recent: list.New()}
	w.totals.Classes = map[string]int64{}
	if _, err := rand.Read(w.key[:]); err != nil {
		return nil, err
	}
	return w, w.open()
}

// open begins the next segment.
func (w *worker) open() error {
	for {
		w.segment++
		w.dir = filepath.Join(w.Dir, fmt.Sprintf("%04d", w.segment))
		if _, err := os.Stat(w.dir); errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	if err := os.MkdirAll(w.dir, 0o755); err != nil {
		return fmt.Errorf("record: %w", err)
	}
	if w.Segment != nil {
		if err := w.Segment(w.dir); err != nil {
			return err
		}
	}
	header := history.Header{
		Started: w.started, Tool: w.Tool, BaseURL: w.Upstream.Redacted(), Cores: runtime.GOMAXPROCS(0),
		Workload: json.RawMessage(`{"kind":"recorded"}`),
	}
	writer, err := history.Create(filepath.Join(w.dir, history.FileName), header)
	if err != nil {
		return err
	}
	w.writer, w.live = writer, oracle.NewLive(header)
	return w.event(&history.Event{At: w.now(), Kind: history.Started, Name: string(history.Main)})
}

func (w *worker) event(e *history.Event) error {
	if w.writer == nil {
		return nil
	}
	return w.writer.Event(e)
}

// shut ends the segment.
func (w *worker) shut(why string) error {
	if w.writer == nil {
		return nil
	}
	err := w.event(&history.Event{At: w.now(), Kind: history.Ended, Name: string(history.Main), Text: why})
	err = errors.Join(err, w.writer.Close())
	w.writer = nil
	return err
}

// work is the worker's goroutine.
func (p *Proxy) work() {
	w := p.worker
	defer close(p.done)
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case c, more := <-p.captures:
			if !more {
				w.closeErr = w.shut("")
				return
			}
			w.take(c)
		case <-tick.C:
			w.tick()
		}
	}
}

func (w *worker) tick() {
	err := w.event(&history.Event{At: w.now(), Kind: history.Tick, Values: map[string]float64{
		"in_flight": float64(w.inFlight.Load()), "chunks": float64(w.chunks),
	}})
	w.chunks = 0
	if err != nil {
		w.broken(err)
	}
}

// take writes one capture.
func (w *worker) take(c *capture) {
	defer w.release(c)
	if w.writer == nil && time.Now().After(w.retryAt) {
		if err := w.open(); err != nil {
			w.broken(err)
		}
	}
	if w.writer == nil {
		w.dropped.Add(1)
		return
	}
	op, sampled := w.op(c)
	if !sampled {
		w.count(func(s *Stats) { s.Unsampled++ })
		return
	}
	suspicious, classes := w.live.Violations(op)
	if w.Synthetic {
		synthesize(op, w.key[:])
	}
	redact(op)
	if err := w.writer.Op(op); err != nil {
		w.dropped.Add(1)
		w.broken(err)
		return
	}
	w.chunks += int64(len(op.Chunks))
	w.count(func(s *Stats) {
		s.Recorded++
		if suspicious {
			s.Suspicious++
		}
		for _, class := range classes {
			s.Classes[string(class)]++
		}
		s.Trouble = ""
	})
	if w.sinceSize++; w.sinceSize >= sizeEvery {
		w.sinceSize = 0
		w.rotate()
	}
}

func (w *worker) count(f func(*Stats)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	f(&w.totals)
}

func (w *worker) stats() Stats {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := w.totals
	s.Classes = maps.Clone(s.Classes)
	return s
}

// broken gives up the segment, for a while: the disk may be full only now.
func (w *worker) broken(err error) {
	w.Logger.Error("nothing is recorded for now; traffic goes on", slog.Any("error", err), slog.Duration("next_try", retryAfter))
	trouble := err.Error()
	if path, ok := errors.AsType[*fs.PathError](err); ok {
		trouble = path.Error() // without the advice for those who can begin again
	}
	w.count(func(s *Stats) { s.Trouble = trouble })
	if w.writer != nil {
		w.writer.Close() //nolint:errcheck // its error is the one that was just reported
		w.writer = nil
	}
	w.retryAt = time.Now().Add(retryAfter)
}

// rotate begins a new segment when this one is large enough, and removes the
// oldest when all together are too large.
func (w *worker) rotate() {
	info, err := os.Stat(filepath.Join(w.dir, history.FileName))
	if err != nil || info.Size() < w.SegmentSize {
		return
	}
	err = w.shut("the next segment begins")
	if err == nil {
		err = w.open()
	}
	if err != nil {
		w.broken(err)
	}
	w.prune()
}

func (w *worker) prune() {
	var total int64
	for n := w.segment; n > 0; n-- {
		dir := filepath.Join(w.Dir, fmt.Sprintf("%04d", n))
		info, err := os.Stat(filepath.Join(dir, history.FileName))
		if err != nil {
			continue
		}
		if total += info.Size(); total > w.TotalSize && n != w.segment {
			if err := os.RemoveAll(dir); err != nil {
				w.Logger.Error("an old segment can't be removed", slog.Any("error", err))
			}
		}
	}
}

// op makes a capture an op. sampled is false when its conversation isn't one
// of those to be recorded.
func (w *worker) op(c *capture) (op *history.Op, sampled bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	op = &history.Op{
		ID: c.id, Phase: history.Main, Kind: "recorded", InFlight: c.inFlight, Planned: c.sent, Sent: c.sent,
		LastByte: c.last, Status: c.status,
	}
	var request struct {
		Stream   bool `json:"stream"`
		User     string
		Messages []struct {
			Role    string          `json:"role"`
			Content json.RawMessage `json:"content"`
		} `json:"messages"`
	}
	body := c.request.data
	if json.Unmarshal(body, &request) == nil {
		op.Request, op.Stream = body, request.Stream
	} else {
		// What isn't a request isn't kept as one; a reader wants JSON there.
		op.Request, _ = json.Marshal(map[string]string{"unreadable": target.Redact(string(body[:min(len(body), 512)]))}) //nolint:errchkjson // a string
	}
	// A conversation is what begins with the same words to the same first
	// answer: its later requests repeat them.
	h := sha256.New()
	h.Write(w.key[:])
	for _, m := range request.Messages {
		if m.Role == "assistant" {
			op.Turn++
		}
	}
	for _, m := range request.Messages {
		io.WriteString(h, m.Role+"\x00") //nolint:errcheck // a hash
		h.Write(m.Content)
		if m.Role == "user" {
			break
		}
	}
	var key [sha256.Size]byte
	h.Sum(key[:0])
	if share := float64(binary.BigEndian.Uint64(key[:])) / (1 << 64); share >= w.Sample {
		return nil, false
	}
	op.Session = w.session(key)

	if c.status != 0 {
		w.reply(op, c)
	}
	switch {
	case op.Outcome != "":
	case c.hungUp:
		op.Outcome, op.Error = history.Cancelled, fmt.Sprintf("the client hung up after %d chunks", len(op.Chunks))
	case c.status == 0:
		op.Outcome, op.Error = history.Failed, fmt.Sprintf("no response: %v", cmp.Or(c.err, io.ErrUnexpectedEOF))
	case !errors.Is(c.reply.err, io.EOF):
		op.Outcome, op.Error = history.Failed, fmt.Sprintf("the reply broke off after %d chunks: %v", len(op.Chunks), c.reply.err)
	case c.status/100 != 2:
		op.Outcome, op.Error = history.Failed, fmt.Sprintf("HTTP %d", c.status)
	default:
		op.Outcome = history.OK
	}
	if len(op.Error) > errorLimit {
		op.Error = op.Error[:errorLimit]
	}
	op.Error = strings.ToValidUTF8(target.Redact(op.Error), "\uFFFD")
	return op, true
}

// reply reads what the upstream server sent, at the times at which it came.
func (w *worker) reply(op *history.Op, c *capture) {
	if len(c.reply.ends) > 0 {
		op.FirstByte = c.reply.ends[0].at
		op.LastByte = c.reply.ends[len(c.reply.ends)-1].at
	}
	as := &replay{s: &c.reply}
	body, err := openai.Decompress(as, c.encoding)
	if err != nil {
		body = bytes.NewReader(nil) // what it says can't be told
	}
	if !strings.Contains(c.contentType, "text/event-stream") {
		op.Stream = op.Stream && c.status >= 400
		data, _ := io.ReadAll(body) // what came is kept; c.reply.err says how it ended
		if len(data) > 0 {
			op.Chunks = []history.Chunk{{At: as.at, Data: data}}
		}
		return
	}
	events := openai.NewReader(body, func() time.Duration { return as.at }, 0)
	for {
		e, err := events.Next()
		if err != nil {
			return
		}
		op.Chunks = append(op.Chunks, history.Chunk{At: e.At, Data: bytes.Clone(e.Data)})
		if bytes.Equal(bytes.TrimSpace(e.Data), []byte("[DONE]")) {
			op.Outcome = history.OK // who hangs up now has got it all
		}
	}
}

// session is a conversation's number.
func (w *worker) session(key [sha256.Size]byte) int {
	if e, ok := w.known[key]; ok {
		w.recent.MoveToFront(e)
		return e.Value.(conversation).session
	}
	w.known[key] = w.recent.PushFront(conversation{key, w.sessions})
	w.sessions++
	if w.recent.Len() > conversations {
		delete(w.known, w.recent.Remove(w.recent.Back()).(conversation).key)
	}
	return w.sessions - 1
}

// redact takes secrets out of an op.
func redact(op *history.Op) {
	if s := target.Redact(string(op.Request)); s != string(op.Request) && json.Valid([]byte(s)) {
		op.Request = json.RawMessage(s)
	}
	for i, c := range op.Chunks {
		if s := target.Redact(string(c.Data)); s != string(c.Data) {
			op.Chunks[i].Data = []byte(s)
		}
	}
}

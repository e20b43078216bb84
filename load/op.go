package load

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

const (
	// replyLimit is the most bytes of one reply that are kept: six times as
	// many, which hostile bytes can become in JSON, still fit a record.
	replyLimit = 32 << 20
	// chunkCost is what a chunk adds to that beside its data.
	chunkCost = 48
	// doneGrace is how long a stream may stay open after its [DONE].
	doneGrace  = 2 * time.Second
	errorLimit = 1 << 10 // bytes of an op's error
	headLimit  = 512     // bytes kept of a body that turns out not to be a stream
)

// Why we hung up.
var (
	errPlanned  = errors.New("hung up as planned")
	errTimeout  = errors.New("timed out")
	errDone     = errors.New("the stream stayed open after [DONE]")
	errNoEvent  = errors.New("the stream ended without an event")
	errNoStream = errors.New("not a stream of server-sent events")
	errTooLarge = fmt.Errorf("the reply is larger than %d MiB", replyLimit>>20)
)

// sending is one op to be.
type sending struct {
	phase         history.Phase
	kind          string
	session, turn int
	planned       time.Duration
	timeout       time.Duration // 0 is that of the options
	ended         func(*history.Op, *openai.Reply)
}

// send sends one request, reads the reply to its end and records it. It
// returns the reply when it came to its end, and when that was.
func (p *player) send(s sending, t *workload.Turn) (*openai.Reply, time.Duration) {
	rec := recordings.Get().(*recording)
	defer rec.release()
	op := &rec.op
	*op = history.Op{
		Phase: s.phase, Kind: s.kind, Session: s.session, Turn: s.turn, Planned: s.planned, Expect: t.Expect,
		Stream: !p.NoStream && !t.NoStream,
	}
	body, err := p.body(t, op.Stream)
	if err != nil {
		p.fail(err) // the caller's mistake: no op can be sent
		return nil, p.now()
	}
	op.Request = body
	if s.timeout == 0 {
		s.timeout = p.Timeout
	}

	ctx, hangUp := context.WithCancelCause(p.ctx)
	defer hangUp(nil)
	defer time.AfterFunc(s.timeout, func() { hangUp(errTimeout) }).Stop()
	if t.CancelAfter > 0 {
		defer time.AfterFunc(t.CancelAfter, func() { hangUp(errPlanned) }).Stop()
	}
	open := &p.inFlight
	if s.session == OtherSession {
		open = &p.beside
	}
	open.Add(1)
	op.InFlight = int(p.inFlight.Load())
	op.ID = p.NextID.Add(1)
	op.Sent = p.now()
	err = p.exchange(ctx, hangUp, rec, t.CancelChunks)
	if err != nil {
		op.LastByte = p.now()
	}
	open.Add(-1)
	rec.finish(op)
	reply := rec.reply()
	p.judge(op, reply, err, context.Cause(ctx), rec.location, s.timeout)

	if err := p.History.Op(op); err != nil {
		p.fail(err)
	}
	if s.ended != nil {
		s.ended(op, reply)
	}
	if op.Outcome != history.OK {
		reply = nil
	}
	return reply, op.LastByte
}

// judge sets how an op ended. err is what ended the reading, cause why we hung
// up, if we did.
func (p *player) judge(op *history.Op, reply *openai.Reply, err, cause error, location string, timeout time.Duration) {
	chunks := fmt.Sprintf("after %d chunks", len(op.Chunks))
	switch {
	case err == nil && op.Status/100 != 2:
		op.Outcome, op.Error = history.Failed, fmt.Sprintf("HTTP %d", op.Status)
		if location != "" {
			op.Error += ", which redirects to " + location
		}
		if reply.Err != nil {
			op.Error += ": " + reply.Err.Message
		}
	case err == nil && reply.Err != nil && op.Stream:
		op.Outcome, op.Error = history.Failed, "error in mid-stream: "+reply.Err.Message
	case err == nil && reply.Err != nil:
		op.Outcome, op.Error = history.Failed, "not a reply: "+reply.Err.Message
	case err == nil:
		op.Outcome = history.OK
	case errors.Is(cause, errPlanned):
		op.Outcome, op.Error = history.Cancelled, fmt.Sprintf("%v %s", errPlanned, chunks)
	case errors.Is(cause, errTimeout):
		op.Outcome, op.Error = history.TimedOut, fmt.Sprintf("gave up %s: the reply didn't end within %g s", chunks, timeout.Seconds())
	case cause != nil:
		op.Outcome, op.Error = history.Cancelled, fmt.Sprintf("the run ended %s: %v", chunks, cause)
	case op.Status == 0:
		op.Outcome, op.Error = history.Failed, fmt.Sprintf("no response: %v", err)
	default:
		op.Outcome, op.Error = history.Failed, fmt.Sprintf("the reply broke off %s: %v", chunks, err)
	}
	op.Error = p.target.redact(strings.ToValidUTF8(op.Error, "\uFFFD"))
	if len(op.Error) > errorLimit {
		op.Error = strings.ToValidUTF8(op.Error[:errorLimit], "") + "..."
	}
}

// exchange sends the request and reads what comes back into rec.
func (p *player) exchange(ctx context.Context, hangUp context.CancelCauseFunc, rec *recording, cancelChunks int) error {
	op := &rec.op
	resp, err := p.transport.RoundTrip(p.target.request(ctx, http.MethodPost, p.target.chat, op.Request))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	op.Status = resp.StatusCode
	rec.location = resp.Header.Get("Location")
	body, err := openai.Decompress(&stampReader{r: resp.Body, rec: rec, now: p.now}, resp.Header.Get("Content-Encoding"))
	if err != nil {
		return err
	}
	if op.Status/100 != 2 || !op.Stream || !isStream(resp.Header.Get("Content-Type"), &body) {
		op.Stream = op.Stream && op.Status >= 400 // a stream was asked for, and this isn't one
		return p.readBody(rec, body)
	}
	return p.readStream(hangUp, rec, body, cancelChunks)
}

// isStream says whether a body is one of server-sent events. Where the header
// doesn't say so the body's first byte decides, since servers get it wrong.
func isStream(contentType string, body *io.Reader) bool {
	if strings.Contains(contentType, "text/event-stream") {
		return true
	}
	b := bufio.NewReader(*body)
	*body = b
	for n := 1; ; n++ {
		head, err := b.Peek(n)
		if err != nil {
			return false
		}
		switch head[n-1] {
		case ' ', '\t', '\r', '\n':
		case '{', '[', '<', '"':
			return false
		default:
			return strings.IndexByte("dei:r\xef", head[n-1]) >= 0 // data, event, error, id, a comment, retry, a byte order mark
		}
	}
}

func (p *player) readBody(rec *recording, body io.Reader) error {
	limit := min(p.EventLimit, replyLimit)
	data, err := io.ReadAll(io.LimitReader(body, int64(limit)+1))
	if err == nil && len(data) > limit {
		err = fmt.Errorf("the body is larger than %d bytes", limit)
		data = data[:limit]
	}
	if rec.op.Status/100 != 2 && len(p.target.secrets) > 0 {
		data = []byte(p.target.redact(string(data)))
	}
	if len(data) > 0 {
		rec.add(rec.at, data)
		p.chunks.Add(1)
	}
	rec.op.LastByte = rec.at
	return err
}

func (p *player) readStream(hangUp context.CancelCauseFunc, rec *recording, body io.Reader, cancelChunks int) error {
	var last time.Duration
	done := false
	events := openai.NewReader(body, func() time.Duration { return rec.at }, p.EventLimit)
	for n := 1; ; n++ {
		e, err := events.Next()
		switch {
		case errors.Is(err, io.EOF):
			rec.op.LastByte = rec.at
			switch {
			case n > 1:
				return nil
			case len(rec.head) == 0: // llama-cpp-python, when the prompt is too long
				return errNoEvent
			default:
				rec.add(rec.at, rec.head)
				return errNoStream
			}
		case err != nil && done: // the connection's end is nothing to the reply
			rec.op.LastByte = last
			return nil
		case err != nil:
			return err
		}
		last = e.At
		rec.add(e.At, e.Data)
		p.chunks.Add(1)
		if e.Name == "error" && rec.errorEvent == "" {
			rec.errorEvent = string(e.Data[:min(len(e.Data), headLimit)])
		}
		switch {
		case n == cancelChunks:
			hangUp(errPlanned)
			return errPlanned
		case rec.size > replyLimit:
			return errTooLarge
		case !done && len(e.Data) < 16 && bytes.Equal(bytes.TrimSpace(e.Data), []byte("[DONE]")):
			done = true
			// What comes after it is recorded too, if it comes soon.
			timer := time.AfterFunc(doneGrace, func() { hangUp(errDone) })
			defer timer.Stop()
		}
	}
}

// stampReader notes when bytes came, and the first of them.
type stampReader struct {
	r   io.Reader
	rec *recording
	now func() time.Duration
}

func (s *stampReader) Read(b []byte) (int, error) {
	n, err := s.r.Read(b)
	rec := s.rec
	rec.at = s.now()
	if n > 0 {
		if rec.op.FirstByte == 0 {
			rec.op.FirstByte = rec.at
		}
		if room := headLimit - len(rec.head); room > 0 {
			rec.head = append(rec.head, b[:min(n, room)]...)
		}
	}
	return n, err
}

// recording is an op while it happens. Until its end its chunks are bytes in
// blocks and places in them, which cost the garbage collector nothing.
type recording struct {
	op         history.Op
	at         time.Duration // of the last read
	head       []byte        // the body's first bytes, as they came
	errorEvent string        // data of an event with the name "error"
	location   string        // where a redirect leads
	size       int

	blocks [][]byte
	places []place
	chunks []history.Chunk

	assembler openai.Assembler
}

// place is where a chunk's data is. A chunk lies in one block.
type place struct {
	at         time.Duration
	block      int
	start, end int
}

// blockSize fits a hundred usual chunks; a larger chunk has a block of its own.
const blockSize = 32 << 10

var (
	recordings = sync.Pool{New: func() any { return new(recording) }}
	blocks     = sync.Pool{New: func() any { return new([blockSize]byte) }}
)

// maxKept is the largest number of chunks that a recording used again has room for.
const maxKept = 1 << 16

func (r *recording) release() {
	for _, b := range r.blocks {
		if cap(b) == blockSize {
			blocks.Put((*[blockSize]byte)(b[:blockSize]))
		}
	}
	if cap(r.places) > maxKept {
		return
	}
	clear(r.blocks)
	clear(r.chunks)
	r.assembler.Reset()
	*r = recording{head: r.head[:0], blocks: r.blocks[:0], places: r.places[:0], chunks: r.chunks[:0], assembler: r.assembler}
	recordings.Put(r)
}

func (r *recording) add(at time.Duration, data []byte) {
	n := len(r.blocks) - 1
	if n < 0 || len(data) > cap(r.blocks[n])-len(r.blocks[n]) {
		n++
		if len(data) > blockSize {
			r.blocks = append(r.blocks, make([]byte, 0, len(data)))
		} else {
			r.blocks = append(r.blocks, blocks.Get().(*[blockSize]byte)[:0])
		}
	}
	start := len(r.blocks[n])
	r.blocks[n] = append(r.blocks[n], data...)
	r.places = append(r.places, place{at, n, start, start + len(data)})
	r.size += len(data) + chunkCost
}

// finish gives the op its chunks.
func (r *recording) finish(op *history.Op) {
	for _, c := range r.places {
		r.chunks = append(r.chunks, history.Chunk{At: c.at, Data: r.blocks[c.block][c.start:c.end:c.end]})
	}
	op.Chunks = r.chunks
}

// reply puts the op's reply together.
func (r *recording) reply() *openai.Reply {
	if r.op.Status >= 400 || !r.op.Stream {
		if len(r.chunks) == 0 {
			return openai.ReadBody(nil)
		}
		return openai.ReadBody(r.chunks[0].Data)
	}
	for _, c := range r.chunks {
		r.assembler.Add(c.Data)
	}
	reply := r.assembler.Reply()
	if r.errorEvent != "" && reply.Err == nil {
		reply.Err = &openai.APIError{Message: r.errorEvent}
	}
	return reply
}

// Package lab is a small real LLM server's engine: it takes requests of
// tokens and streams tokens back, computed from real cache pages. Package
// lab/api puts it behind HTTP.
//
// One goroutine owns all state. It does three things over and over: schedule,
// forward, commit. What others want done to a request, they put into an inbox
// that is read between two steps.
//
// Its API may change.
package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/lab/sched"
)

// Config is fixed for an engine's life. Model and Tokenizer must be set; other
// zero values take the defaults below.
type Config struct {
	Model     *model.Model
	Tokenizer *model.Tokenizer

	PageSize     int // tokens; a multiple of 16
	MaxTokens    int // that the cache holds, in whole pages
	MaxRunning   int // requests that have pages at once
	ChunkTokens  int // the most tokens that one step prefills
	NoRadix      bool
	IndexDType   model.IndexDType
	Workers      int    // goroutines of the forward pass
	Seed         uint64 // of requests that bring none
	RetractEvery int    // for tests: retract one request each so many decode steps; 0 never

	Logger *slog.Logger // nil discards
}

// What a Config field of zero means.
const (
	DefaultPageSize    = 64
	DefaultMaxTokens   = 65536
	DefaultMaxRunning  = 128
	DefaultChunkTokens = 512
)

// WithDefaults returns the configuration with every default written out, or
// says what is wrong with its numbers.
func (c Config) WithDefaults() (Config, error) {
	for _, f := range []struct {
		name     string
		value    *int
		def, max int
	}{
		{"page size", &c.PageSize, DefaultPageSize, model.MaxContext},
		{"max total tokens", &c.MaxTokens, DefaultMaxTokens, 1 << 24},
		{"max running requests", &c.MaxRunning, DefaultMaxRunning, 4096},
		{"chunked prefill size", &c.ChunkTokens, DefaultChunkTokens, 1 << 16},
		{"workers", &c.Workers, 1, 1024},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < 1 || *f.value > f.max {
			return c, fmt.Errorf("%s is %d, not within 1 and %d", f.name, *f.value, f.max)
		}
	}
	switch {
	case c.PageSize%16 != 0:
		return c, fmt.Errorf("page size is %d, not a multiple of 16", c.PageSize)
	case c.MaxTokens < c.PageSize:
		return c, fmt.Errorf("max total tokens is %d, less than a page of %d", c.MaxTokens, c.PageSize)
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// Engine runs requests. Submit, Abort, Flush and Stats may be called by any
// goroutine; Run, Step and Check by one.
type Engine struct {
	config  Config
	sched   *sched.Scheduler
	cache   *model.Cache
	scratch *model.Scratch
	batch   model.Batch
	live    map[*sched.Request]*sequence
	number  uint64   // of requests so far
	news    []func() // tells others what happened, once it has been counted

	mu     sync.Mutex
	inbox  []func()
	closed bool
	stats  Stats
	wake   chan struct{}
}

// New makes an engine with an empty cache.
func New(c Config) (*Engine, error) {
	c, err := c.WithDefaults()
	switch {
	case err != nil:
		return nil, fmt.Errorf("lab: %w", err)
	case c.Model == nil || c.Tokenizer == nil:
		return nil, errors.New("lab: no model or no tokenizer")
	case c.Tokenizer.Size() != c.Model.Vocab:
		return nil, fmt.Errorf("lab: the vocabulary has %d tokens, the weights are for %d", c.Tokenizer.Size(), c.Model.Vocab)
	}
	pages := c.MaxTokens/c.PageSize + 1 // the reserved one
	e := &Engine{
		config: c,
		sched: sched.New(sched.Config{
			Pages: pages, PageSize: c.PageSize, MaxRunning: c.MaxRunning, ChunkTokens: c.ChunkTokens,
			NoRadix: c.NoRadix, RetractEvery: c.RetractEvery,
		}),
		cache:   &model.Cache{PageSize: c.PageSize, IndexDType: c.IndexDType},
		scratch: c.Model.NewScratch(max(c.ChunkTokens, c.MaxRunning)),
		live:    map[*sched.Request]*sequence{},
		wake:    make(chan struct{}, 1),
	}
	e.scratch.Workers = c.Workers
	for l := range model.Layers {
		e.cache.Latent[l] = make([]float32, pages*c.PageSize*model.RowDim)
		e.cache.Index[l] = make([]byte, pages*c.IndexDType.PageBytes(c.PageSize))
	}
	e.publish()
	return e, nil
}

// Config is the engine's configuration with every default written out.
func (e *Engine) Config() Config { return e.config }

// Context is the most tokens that a request can have, prompt and reply.
func (e *Engine) Context() int { return min(model.MaxContext, e.sched.Capacity()) }

// Run steps until ctx is done; it waits while there is nothing to do. Then it
// fails the requests that are left, with ErrShutDown.
func (e *Engine) Run(ctx context.Context) {
	defer e.close()
	for ctx.Err() == nil {
		if e.Step() {
			continue
		}
		select {
		case <-e.wake:
		case <-ctx.Done():
		}
	}
}

// Step reads the inbox and does one step; false when there is nothing to do.
func (e *Engine) Step() bool {
	e.receive()
	step := e.sched.Schedule()
	if step != nil {
		logits, err := e.forward(step)
		e.commit(step, logits, err)
	}
	e.publish()
	return step != nil
}

// forward computes a step: its cache entries, and the logits of each item that
// yields a token, [items, vocabulary], valid until the next call. An error
// says that the step's requests can't go on.
func (e *Engine) forward(step *sched.Step) (logits []float32, err error) {
	defer func() {
		if p := recover(); p != nil {
			e.config.Logger.Error("the forward pass panicked", slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			err = fmt.Errorf("the forward pass panicked: %v", p)
		}
	}()
	b := &e.batch
	b.Rows, b.Tables, b.Logits = b.Rows[:0], b.Tables[:0], b.Logits[:0]
	size := e.config.PageSize
	for i, item := range step.Items {
		r, table := item.Request, item.Request.Table()
		b.Tables = append(b.Tables, table)
		for p := item.From; p < item.To; p++ {
			b.Rows = append(b.Rows, model.Row{
				Token: r.Token(p), Prev1: r.Token(p - 1), Prev2: r.Token(p - 2),
				Position: int32(p),
				Slot:     table[p/size]*int32(size) + int32(p%size),
				Table:    int32(i),
			})
		}
		if item.Samples() {
			b.Logits = append(b.Logits, int32(len(b.Rows)-1))
		}
	}
	return e.config.Model.Forward(b, e.cache, e.scratch)
}

// commit takes a step's result: it chooses the next tokens, tells the
// scheduler, and gives the tokens to those who wait for them.
func (e *Engine) commit(step *sched.Step, logits []float32, err error) {
	if err != nil {
		e.config.Logger.Error("a step failed", slog.Any("error", err), slog.Int("requests", len(step.Items)))
		for _, item := range step.Items {
			e.end(e.live[item.Request], Failed, fmt.Errorf("%w: %w", ErrInternal, err))
		}
		return
	}
	e.count(step)
	var sequences []*sequence // that have a new token
	var sampled []int32
	row := func(i int) []float32 { return logits[i*e.config.Model.Vocab : (i+1)*e.config.Model.Vocab] }
	for _, item := range step.Items {
		if item.Samples() {
			s := e.live[item.Request]
			sampled = append(sampled, s.sample(row(len(sequences))))
			sequences = append(sequences, s)
		}
	}
	e.sched.Done(step, sampled)
	for i, s := range sequences {
		e.deliver(s, sampled[i], row(i))
	}
}

// deliver gives a sequence its next token, and ends it if that was the last.
func (e *Engine) deliver(s *sequence, id int32, logits []float32) {
	token := Token{ID: id}
	if s.request.Logprobs {
		token.Logprob, token.Top = logprobs(logits, id, s.request.TopLogprobs)
	}
	reason := Reason("")
	if id == model.End {
		token.Text, reason = s.text.flush(), Stop
	} else {
		var stopped bool
		token.Text, stopped = s.text.push(id)
		switch {
		case stopped:
			reason = Stop
		case len(s.Output) == s.MaxTokens:
			token.Text += s.text.flush()
			reason = Length
		}
	}
	s.stream.tokens <- token // has room for MaxTokens
	if reason != "" {
		e.end(s, reason, nil)
	}
}

// end frees what a sequence has and closes its stream.
func (e *Engine) end(s *sequence, reason Reason, err error) {
	if e.live[&s.Request] == nil {
		return // it ended before
	}
	delete(e.live, &s.Request)
	e.sched.Remove(&s.Request)
	s.unwatch()
	e.countEnd(reason)
	s.stream.ending = Ending{
		Reason: reason, Err: err, Text: s.text.flush(), Retractions: s.Retractions,
		Usage: Usage{Prompt: len(s.Prompt), Completion: len(s.Output), Device: max(0, s.CachedTokens)},
	}
	e.tell(func() { close(s.stream.tokens) })
}

// tell does f when the counts are published: who hears that something has
// happened finds it in Stats.
func (e *Engine) tell(f func()) { e.news = append(e.news, f) }

// post leaves f for the engine's goroutine; false when the engine is closed.
func (e *Engine) post(f func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.inbox = append(e.inbox, f)
	select {
	case e.wake <- struct{}{}:
	default:
	}
	return true
}

// receive does what others left in the inbox.
func (e *Engine) receive() {
	e.mu.Lock()
	inbox := e.inbox
	e.inbox = nil
	e.mu.Unlock()
	for _, f := range inbox {
		f()
	}
}

// close refuses new requests and fails those that are left.
func (e *Engine) close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.receive()
	for _, s := range e.sequences() {
		e.end(s, Failed, ErrShutDown)
	}
	e.publish()
}

// sequences lists what is live, by arrival: a run must not depend on a map's
// order.
func (e *Engine) sequences() []*sequence {
	return slices.SortedFunc(maps.Values(e.live), func(a, b *sequence) int { return cmp.Compare(a.ID, b.ID) })
}

// Check says what is wrong with the engine's books.
func (e *Engine) Check() error {
	if n := e.sched.Waiting() + e.sched.Running(); n != len(e.live) {
		return fmt.Errorf("the scheduler has %d requests and the engine %d", n, len(e.live))
	}
	for _, s := range e.live {
		if got := len(s.stream.tokens); got > len(s.Output) {
			return fmt.Errorf("request %d has %d tokens to be read and made %d", s.ID, got, len(s.Output))
		}
	}
	return e.sched.Check()
}

// Package lab is a small real LLM server's engine: it takes requests of
// tokens and streams tokens back, computed from real cache pages. Package
// lab/api puts it behind HTTP.
//
// One goroutine owns all state. It does three things over and over: schedule,
// forward, commit. What others want done to a request, they put into an inbox
// that is read between two steps. In the overlap loop the forward pass has a
// goroutine of its own, and a step is committed while the next one is computed.
//
// Its API may change.
package lab

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/host"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
)

// Config is fixed for an engine's life. Model and Tokenizer must be set; other
// zero values take the defaults below.
type Config struct {
	Model     *model.Model
	Tokenizer *model.Tokenizer

	PageSize    int // tokens; a multiple of 16
	MaxTokens   int // that the cache holds, in whole pages
	MaxRunning  int // requests that have pages at once
	ChunkTokens int // the most tokens that one step prefills
	NoRadix     bool
	IndexDType  model.IndexDType
	Workers     int    // goroutines of the forward pass
	Seed        uint64 // of requests that bring none
	NoOverlap   bool   // commit each step before the next one is scheduled
	DecodeSteps int    // in a row, before new requests are let in

	Ranks           int           // tensor-parallel ones: 1, 2 or 4
	CollectiveLimit time.Duration // how long ranks wait for each other before they give up everything

	// Decode steps are captured, for batches of so many requests.
	NoGraph       bool    // none is: all are eager
	GraphBatches  []int   // nil is model.Buckets(MaxRunning)
	NoAltStream   bool    // captured steps don't run the indexer on a stream of its own
	StreamJitter  float64 // how often one of the streams overtakes the other, 0 to 1; 0 is the default
	IndexKScatter bool    // store bf16 index keys by the scatter store in place of the fused one

	RetractEvery int // for tests: retract one request each so many decode steps; 0 never

	// The host tier. It needs the prefix cache.
	HostTokens  int // that it holds, in whole pages; 0 is no host tier
	HostLayout  host.Layout
	WritePolicy kv.WritePolicy
	HostParts   bool // load parts of pages too, token by token

	Mode     Mode
	Transfer TransferConfig

	Logger *slog.Logger // nil discards
	Faults *fault.Set   // nil is none
	Toggle []string     // that are on, for the faults' expressions
}

// What a Config field of zero means.
const (
	DefaultPageSize    = 64
	DefaultMaxTokens   = 65536
	DefaultMaxRunning  = 128
	DefaultChunkTokens = 512

	DefaultCollectiveLimit = 10 * time.Minute // as NCCL's

	// DefaultStreamJitter is what makes capture-alias as frequent as it was in the
	// incident.
	DefaultStreamJitter = 0.1
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
		{"continuous decode steps", &c.DecodeSteps, 1, 1024},
		{"tensor-parallel size", &c.Ranks, 1, model.Heads},
	} {
		if *f.value == 0 {
			*f.value = f.def
		}
		if *f.value < 1 || *f.value > f.max {
			return c, fmt.Errorf("%s is %d, not within 1 and %d", f.name, *f.value, f.max)
		}
	}
	if c.Mode == Decode {
		c.NoRadix = true // its prompts' pages come from elsewhere
	}
	c.CollectiveLimit = cmp.Or(c.CollectiveLimit, DefaultCollectiveLimit)
	switch {
	case model.Heads%c.Ranks != 0:
		return c, fmt.Errorf("tensor-parallel size is %d, and %d heads can't be divided so", c.Ranks, model.Heads)
	case c.Mode != NoDisaggregation && c.Mode != Prefill && c.Mode != Decode:
		return c, fmt.Errorf("the mode of disaggregation is %q, want %q or %q", c.Mode, Prefill, Decode)
	case c.PageSize%16 != 0:
		return c, fmt.Errorf("page size is %d, not a multiple of 16", c.PageSize)
	case c.MaxTokens < c.PageSize:
		return c, fmt.Errorf("max total tokens is %d, less than a page of %d", c.MaxTokens, c.PageSize)
	case c.HostTokens < 0 || c.HostTokens > 1<<24:
		return c, fmt.Errorf("the host tier has %d tokens, not within 0 and %d", c.HostTokens, 1<<24)
	case c.HostTokens > 0 && c.HostTokens < c.PageSize:
		return c, fmt.Errorf("the host tier has %d tokens, less than a page of %d", c.HostTokens, c.PageSize)
	case c.HostTokens > 0 && c.NoRadix:
		return c, errors.New("the host tier keeps prefixes, so it needs the prefix cache")
	}
	if c.StreamJitter == 0 {
		c.StreamJitter = DefaultStreamJitter
	}
	if !(c.StreamJitter > 0 && c.StreamJitter <= 1) {
		return c, fmt.Errorf("stream jitter is %v, not within 0 and 1", c.StreamJitter)
	}
	if c.GraphBatches == nil {
		c.GraphBatches = model.Buckets(c.MaxRunning)
	}
	for _, n := range c.GraphBatches {
		if n < 1 || n > c.MaxRunning {
			return c, fmt.Errorf("a captured batch is %d, not within 1 and the %d requests that run at most", n, c.MaxRunning)
		}
	}
	if c.NoGraph {
		c.GraphBatches = []int{}
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	return c, nil
}

// TokenBytes is what a token takes of either tier, all layers together.
func TokenBytes(d model.IndexDType) int { return model.Layers * (4*model.RowDim + d.PageBytes(1)) }

// Engine runs requests. Submit, Abort, Flush and Stats may be called by any
// goroutine; Run, Step and Check by one.
type Engine struct {
	*rank
	others []*Engine // of the other tensor-parallel ranks; what they make is read by nobody
	news   []func()  // tells others what happened, once it has been counted

	mu     sync.Mutex
	inbox  []func(*rank)
	closed bool
	stats  Stats
	wake   chan struct{}

	expressionErrors atomic.Uint64
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
	e := &Engine{wake: make(chan struct{}, 1)}
	c.Faults.Report(func(err error) {
		e.expressionErrors.Add(1)
		c.Logger.Error("an expression failed, and its fault strikes no more", slog.Any("error", err))
	})
	var g *group
	if c.Ranks > 1 {
		g = newGroup(c.Ranks, c.CollectiveLimit)
	}
	for i := range c.Ranks {
		of := e
		if i > 0 {
			of = &Engine{wake: e.wake}
			c.Faults = c.Faults.Copy() // so that all draw alike
			e.others = append(e.others, of)
		}
		if of.rank, err = newRank(c, of, i, g); err != nil {
			return nil, fmt.Errorf("lab: %w", err)
		}
		of.stats.Decoder = of.decoder.Stats()
		of.startTransfers()
		of.publish()
	}
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
	worked := false
	e.all(func(r *rank, inbox []func(*rank)) {
		if w := r.step(inbox); r.index == 0 {
			worked = w
		}
	})
	if e.breakUp() {
		e.close()
	}
	return worked
}

// breakUp says whether the ranks have lost each other; then they all know.
func (e *Engine) breakUp() bool {
	lost := e.lost
	for _, o := range e.others {
		lost = cmp.Or(lost, o.lost)
	}
	if lost == nil {
		return false
	}
	e.config.Logger.Error("the ranks have lost each other; the engine ends", slog.Any("error", lost))
	e.lost = lost
	for _, o := range e.others {
		o.lost = lost
	}
	return true
}

// all does the same on all ranks, with the same inbox, and waits for them.
func (e *Engine) all(do func(*rank, []func(*rank))) {
	inbox := e.take()
	var others sync.WaitGroup
	for _, o := range e.others {
		others.Go(func() {
			do(o.rank, inbox)
			o.publish()
		})
	}
	do(e.rank, inbox)
	e.publish()
	others.Wait()
}

// tell does f when the counts are published: who hears that something has
// happened finds it in Stats.
func (e *Engine) tell(f func()) { e.news = append(e.news, f) }

// post leaves f for the engine's goroutine; false when the engine is closed.
func (e *Engine) post(f func(*rank)) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		return false
	}
	e.inbox = append(e.inbox, f)
	e.ring()
	return true
}

// ring wakes the engine.
func (e *Engine) ring() {
	select {
	case e.wake <- struct{}{}:
	default:
	}
}

// take empties the inbox.
func (e *Engine) take() []func(*rank) {
	e.mu.Lock()
	defer e.mu.Unlock()
	inbox := e.inbox
	e.inbox = nil
	return inbox
}

// close refuses new requests and fails those that are left.
func (e *Engine) close() {
	e.mu.Lock()
	e.closed = true
	e.mu.Unlock()
	e.all((*rank).shutDown)
}

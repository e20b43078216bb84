package lab

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/sched"
)

// Request is what a client asks for.
type Request struct {
	ID     string // the client's name for it, for Abort; need not be unique
	Prompt []int32

	MaxTokens   int     // of the reply; 0 is as many as the context has room for
	Temperature float64 // 0 takes the likeliest token, the lower id where two are equal
	TopP        float64 // draw from the likeliest tokens that have so much of the probability; 0 is all
	Seed        *uint64 // of the draws; nil takes one from the engine's
	Stop        []string
	Logprobs    bool
	TopLogprobs int

	Room *Room // where it meets its other half, on a prefill or decode server
}

// Token is one token of a reply.
type Token struct {
	ID int32
	// Text is what may be shown since the token before: whole characters of
	// valid UTF-8, without a stop string or what may become one.
	Text    string
	Logprob float64 // in nats, of the model's own distribution; if asked for
	Top     []Logprob
}

// Logprob is a token's log-probability in nats.
type Logprob struct {
	ID      int32
	Logprob float64
}

// Reason says why a reply ended.
type Reason string

// The reasons.
const (
	Stop      Reason = "stop"      // the model ended its turn, or a stop string came
	Length    Reason = "length"    // MaxTokens
	Aborted   Reason = "abort"     // by Abort
	Cancelled Reason = "cancelled" // the request's context ended
	Failed    Reason = "failed"    // Err says why
)

// Reasons lists them.
func Reasons() []Reason { return []Reason{Stop, Length, Aborted, Cancelled, Failed} }

// Ending is what is known when a reply has ended.
type Ending struct {
	Reason      Reason
	Err         error  // of Failed
	Text        string // that no token showed yet, where the reply was cut off
	Usage       Usage
	Retractions int
}

// Usage counts tokens.
type Usage struct {
	Prompt, Completion int
	Device, Host       int // of the prompt, found in the cache, by tier
}

// Stream is a reply as it comes. Nobody has to read it: the engine never
// waits.
type Stream struct {
	tokens chan Token
	ending Ending
}

// Tokens is closed at the reply's end.
func (s *Stream) Tokens() <-chan Token { return s.tokens }

// Ending may be called when Tokens is closed.
func (s *Stream) Ending() Ending { return s.ending }

// Why a request fails.
var (
	ErrShutDown = errors.New("the server is shutting down")
	ErrInternal = errors.New("internal error")
)

// TooLongError says that a request doesn't fit into the context.
type TooLongError struct{ Prompt, MaxTokens, Context int }

func (e *TooLongError) Error() string {
	if e.MaxTokens == 0 {
		return fmt.Sprintf("the prompt has %d tokens; the context of %d has no room for a reply", e.Prompt, e.Context)
	}
	return fmt.Sprintf("the prompt has %d tokens and the reply may have %d, together %d; the context is %d tokens",
		e.Prompt, e.MaxTokens, e.Prompt+e.MaxTokens, e.Context)
}

// sequence is a request that hasn't ended.
type sequence struct {
	sched.Request
	request *Request
	seed    uint64
	text    text
	stream  *Stream
	made    int         // tokens of the reply that the client has been given
	drawn   int         // which draw of the last step that it was in yields its next token
	unwatch func() bool // stops waiting for the end of the client's context

	// Of a request with a room. One of the first two is set while it has a
	// transfer, and is then the third.
	sender   *disagg.Sender
	receiver *disagg.Receiver
	transfer transfer
	met      bool   // the two halves know each other
	sent     int    // pages
	reason   Reason // why it will have ended when its transfer has
}

// Submit queues a request. When ctx ends, so does the request, between two
// steps. Errors: *TooLongError, ErrShutDown, or a token out of range.
func (e *Engine) Submit(ctx context.Context, r Request) (*Stream, error) {
	room := e.Context() - len(r.Prompt)
	maxTokens := r.MaxTokens
	if maxTokens == 0 {
		maxTokens = room
	}
	switch {
	case len(r.Prompt) == 0:
		return nil, errors.New("the prompt is empty")
	case r.MaxTokens < 0 || r.TopLogprobs < 0:
		return nil, fmt.Errorf("max tokens is %d, top logprobs %d; neither may be negative", r.MaxTokens, r.TopLogprobs)
	case maxTokens > room || room <= 0:
		return nil, &TooLongError{len(r.Prompt), r.MaxTokens, e.Context()}
	case r.Room != nil && e.config.Mode == NoDisaggregation:
		return nil, errors.New("the request has a room, and this is neither a prefill nor a decode server")
	}
	for i, id := range r.Prompt {
		if id < 0 || int(id) >= e.config.Model.Vocab {
			return nil, fmt.Errorf("token %d of the prompt is %d; the vocabulary has %d", i, id, e.config.Model.Vocab)
		}
	}
	r.Prompt = slices.Clone(r.Prompt)
	stream := &Stream{tokens: make(chan Token, maxTokens)}
	accepted := e.post(func(k *rank) {
		k.number++
		s := &sequence{
			Request: sched.Request{ID: k.number, Prompt: r.Prompt, MaxTokens: maxTokens},
			request: &r,
			text:    text{tokenizer: e.config.Tokenizer, previous: r.Prompt[len(r.Prompt)-1], stop: r.Stop},
			stream:  stream,
			unwatch: func() bool { return true },
		}
		if k.index > 0 {
			s.stream = &Stream{tokens: make(chan Token, maxTokens)}
		}
		s.seed = e.config.Seed ^ s.ID<<32
		if r.Seed != nil {
			s.seed = *r.Seed
		}
		k.live[s.ID] = s
		if k.index == 0 {
			s.unwatch = context.AfterFunc(ctx, func() {
				e.post(func(k *rank) { k.end(k.live[s.ID], Cancelled, context.Cause(ctx)) })
			})
		}
		if r.Room != nil {
			k.meet(s)
		} else if err := k.sched.Add(&s.Request); err != nil {
			k.end(s, Failed, err)
		}
	})
	if !accepted {
		return nil, ErrShutDown
	}
	return stream, nil
}

// Abort ends the requests with an ID, or all of them, and returns how many
// that were, when they have ended. Their replies have the reason Aborted.
func (e *Engine) Abort(id string, all bool) int {
	count := make(chan int, 1)
	accepted := e.post(func(k *rank) {
		n := 0
		for _, s := range k.sequences() {
			if all || s.request.ID == id {
				k.end(s, Aborted, nil)
				n++
			}
		}
		if k.index == 0 {
			e.tell(func() { count <- n })
		}
	})
	if !accepted {
		return 0
	}
	return <-count
}

// Flush forgets every known prefix. It refuses while requests are waiting or
// running, and says how many are.
func (e *Engine) Flush() error {
	result := make(chan error, 1)
	accepted := e.post(func(k *rank) {
		var err error
		if n := len(k.live); n > 0 {
			err = fmt.Errorf("the cache wasn't flushed: %d requests are running or waiting", n)
		} else {
			k.land() // it still uses pages
			k.sched.Flush()
		}
		if k.index == 0 {
			e.tell(func() { result <- err })
		}
	})
	if !accepted {
		return ErrShutDown
	}
	return <-result
}

// Generate runs one request and waits for its end: tokens, text and ending.
func (e *Engine) Generate(ctx context.Context, r Request) ([]Token, Ending, error) {
	stream, err := e.Submit(ctx, r)
	if err != nil {
		return nil, Ending{}, err
	}
	var tokens []Token
	for token := range stream.Tokens() {
		tokens = append(tokens, token)
	}
	return tokens, stream.Ending(), nil
}

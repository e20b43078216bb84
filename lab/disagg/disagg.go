// Package disagg moves requests from a prefill server to a decode server: the
// pages of their cache and what else decoding needs, over TCP, straight into
// pages that the receiver has set aside. Its API may change.
//
// A request is known to both sides by its room, a number that the router
// draws. The decode side sets pages aside, connects to the prefill side and
// names the room and the pages. The prefill side sends each chunk when it has
// been computed, by the receiver's page numbers, and at the end the index keys
// and the first token. What is sent is read from the pages when it is written
// to the network, so whoever owns pages, on either side, must keep them until
// the transfer is Idle, which is later than its end if it was aborted.
package disagg

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/model"
)

// State is where a transfer stands. The order matters: ranks agree on the
// least of their states, so that Failed dominates and Success is everybody's.
type State uint8

// The states.
const (
	Failed          State = iota
	Bootstrapping         // the other side isn't known yet
	WaitingForInput       // both sides know each other; nothing has been computed
	Transferring
	Success
	stateCount
)

// States lists them.
func States() []State { return []State{Failed, Bootstrapping, WaitingForInput, Transferring, Success} }

func (s State) String() string {
	if s < stateCount {
		return [...]string{"Failed", "Bootstrapping", "WaitingForInput", "Transferring", "Success"}[s]
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// Component is a part of a transfer. Each is confirmed by itself.
type Component uint8

// The components.
const (
	Latent   Component = iota // chunk by chunk
	IndexK                    // of all pages, with the last chunk
	Metadata                  // with the last chunk
	componentCount
)

// Components lists them.
func Components() []Component { return []Component{Latent, IndexK, Metadata} }

func (c Component) String() string {
	if c < componentCount {
		return [...]string{"latent", "index_k", "metadata"}[c]
	}
	return fmt.Sprintf("Component(%d)", uint8(c))
}

// First is what decoding needs to know beside the cache.
type First struct {
	Token        int32
	Logprob      float64
	Top          []Logprob
	Cached, Host int // tokens of the prompt that the prefill side found in its cache; of these, on the host
}

// Logprob is a token's log-probability in nats.
type Logprob struct {
	ID      int32
	Logprob float64
}

// Config is one rank's end. Cache must be set; other zero values take the
// defaults below.
type Config struct {
	Cache       *model.Cache
	Rank, Ranks int // both sides have the same number
	Timeout     time.Duration
	Heartbeat   time.Duration // a peer that says nothing for three of them is dead
	Bandwidth   int           // bytes a second that are sent at most; 0 is no limit

	Wake   func()       // is called when a state has changed; must not block
	Logger *slog.Logger // nil discards
	Faults *fault.Set
	Env    fault.Env
}

// What a Config field of zero means.
const (
	DefaultTimeout   = time.Minute
	DefaultHeartbeat = 2 * time.Second
)

func (c Config) withDefaults() Config {
	c.Ranks = max(1, c.Ranks)
	c.Timeout = cmp.Or(c.Timeout, DefaultTimeout)
	c.Heartbeat = cmp.Or(c.Heartbeat, DefaultHeartbeat)
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	if c.Wake == nil {
		c.Wake = func() {}
	}
	return c
}

// Stats counts what an end did since its start.
type Stats struct {
	Transfers, Failures uint64
	Bytes               [componentCount]uint64 // sent or received
	Late                uint64                 // frames of rooms that had ended
}

// Add sums over ends.
func (s *Stats) Add(o Stats) {
	s.Transfers += o.Transfers
	s.Failures += o.Failures
	s.Late += o.Late
	for i, n := range o.Bytes {
		s.Bytes[i] += n
	}
}

type counts struct {
	transfers, failures, late atomic.Uint64
	bytes                     [componentCount]atomic.Uint64
}

func (c *counts) stats() Stats {
	s := Stats{Transfers: c.transfers.Load(), Failures: c.failures.Load(), Late: c.late.Load()}
	for i := range c.bytes {
		s.Bytes[i] = c.bytes[i].Load()
	}
	return s
}

// Why transfers fail.
var (
	errClosed  = errors.New("this side is shutting down")
	errAborted = errors.New("it was aborted")
)

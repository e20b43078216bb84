// Package workload decides what is sent and when. It is seeded and has no
// clock: the same plan gives the same bytes on every machine, as long as the
// server's replies are the same.
//
// Stability: may change.
package workload

import (
	"encoding/json"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// Turn is one request that a session wants to make.
type Turn struct {
	Request openai.ChatRequest
	// Body, unless it is nil, is sent as it is, in place of Request.
	Body   json.RawMessage
	Expect history.Expect
	// Delay is how long the session waits after its previous reply.
	Delay time.Duration
	// At, unless it is 0, is when the turn is due, since the phase's begin,
	// whatever Delay says; the session's previous reply comes first all the
	// same.
	At time.Duration
	// CancelAfter hangs up that long after sending; 0 never.
	CancelAfter time.Duration
	// CancelChunks hangs up after that many chunks; 0 never.
	CancelChunks int
	// NoStream asks for the reply in one piece.
	NoStream bool
}

// Session is one conversation. A session is used by one goroutine.
type Session interface {
	// Next returns the next request. prev is the reply to the last one, nil
	// at the start and after a request that failed or was cancelled. ok is
	// false when the session is over.
	Next(prev *openai.Reply) (turn Turn, ok bool)
}

// Workload makes sessions. It is safe for use by several goroutines.
type Workload interface {
	// Kind is the workload's name.
	Kind() string
	// Session makes session i, 0 <= i < Sessions. Its content depends on
	// nothing but the plan and i. alone says that it is a control: it has
	// the same content under another canary.
	Session(i int, alone bool) Session
}

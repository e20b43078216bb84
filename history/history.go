// Package history is the append-only record of a run: what was asked, when,
// and everything that came back, chunk by chunk. Everything before it only
// writes it, everything after it only reads it. docs/history-format.md is the
// format.
//
// Stability: stable.
package history

import (
	"encoding/json"
	"time"
)

// Format is the version of the file format that this package writes.
const Format = 1

// FileName is a history's in a run directory.
const FileName = "history.jsonl.zst"

// Header is the first record of a history.
type Header struct {
	Format      int             `json:"format"`
	Started     time.Time       `json:"started"`
	Tool        string          `json:"tool"` // program and version that wrote it
	BaseURL     string          `json:"base_url"`
	Model       string          `json:"model"`
	Server      string          `json:"server,omitempty"` // what the server says it is
	Seed        uint64          `json:"seed"`
	RunKey      string          `json:"run_key"` // hex; a session's canary is an HMAC under it
	Workload    json.RawMessage `json:"workload"`
	Sessions    int             `json:"sessions"`
	Concurrency int             `json:"concurrency,omitempty"`  // closed loop
	RequestRate float64         `json:"request_rate,omitempty"` // open loop, requests/s
	Cores       int             `json:"cores"`                  // of the client's machine, or of all of the shards' together
	Shards      []Shard         `json:"shards,omitempty"`       // that played the main phase together; see [Merge]
}

// Shard is one of several processes that played a run's main phase together:
// the sessions whose number leaves its own when divided by how many there are.
type Shard struct {
	Number int    `json:"shard"`
	Host   string `json:"host"`
	Cores  int    `json:"cores"`
	// BeganUS is when it was told to begin; that it did was known WithinUS
	// later. Microseconds, since the run's beginning.
	BeganUS  int64  `json:"began_us"`
	WithinUS int64  `json:"within_us"`
	Lost     string `json:"lost,omitempty"` // why it has no end; empty when it has
}

// Phase says which part of a run an op belongs to.
type Phase string

// The phases of a run, in order. Recovery ops are plain requests sent after a
// failure; sentinel ops are one-token generations sent beside health checks.
const (
	Control  Phase = "control"
	Main     Phase = "main"
	Recovery Phase = "recovery"
	Sentinel Phase = "sentinel"
)

// Outcome says how an op ended.
type Outcome string

// The outcomes of an op.
const (
	OK        Outcome = "ok"        // the reply came to its end
	Failed    Outcome = "failed"    // an HTTP status, a broken connection or an unreadable stream
	Cancelled Outcome = "cancelled" // we hung up as planned
	TimedOut  Outcome = "timeout"   // we gave up waiting
)

// Op is one request with everything that came back. Times are since the
// header's Started.
type Op struct {
	ID        int64 // from 1, in the order of sending
	Phase     Phase
	Kind      string // the workload's kind: agent, echo, ...
	Session   int
	Turn      int
	InFlight  int // requests of sessions open when this one was sent, itself included if it's one
	Stream    bool
	Planned   time.Duration // when the workload wanted it sent
	Sent      time.Duration
	FirstByte time.Duration // of the body; 0 when none came
	LastByte  time.Duration // end of the body, or of waiting
	Status    int           // HTTP status; 0 when no response came
	Outcome   Outcome
	Error     string // set when Outcome isn't OK
	Request   json.RawMessage
	Expect    Expect
	Chunks    []Chunk
}

// Chunk is one server-sent event's data (or a whole body that wasn't
// streamed) and when its last byte arrived.
type Chunk struct {
	At   time.Duration
	Data []byte
}

// Expect is what the workload knows about the right answer. The zero value
// expects nothing but a sound stream.
type Expect struct {
	Canary   string          `json:"canary,omitempty"`    // this session's own
	Call     *Call           `json:"call,omitempty"`      // the only right tool call
	TextCall bool            `json:"text_call,omitempty"` // the call is asked for as JSON in the text, not as tool_calls
	Copy     []string        `json:"copy,omitempty"`      // lines to be repeated, in order
	Answer   string          `json:"answer,omitempty"`    // must appear in the reply
	Distance int             `json:"distance,omitempty"`  // turns between telling and asking
	Schema   json.RawMessage `json:"schema,omitempty"`    // the reply must be JSON that satisfies it
	Same     string          `json:"same,omitempty"`      // ops with equal Same sent the same prompt
	Leg      string          `json:"leg,omitempty"`       // which leg of that comparison: cold, device, host, retry, ...
	MinChars int             `json:"min_chars,omitempty"` // a sound reply is at least this long
}

// Call is a tool call by value.
type Call struct {
	Name      string            `json:"name"`
	Arguments map[string]string `json:"arguments"`
}

// Event is anything that happened beside the ops: a tick of the client, a
// health check, scraped metrics, counts of a probe.
type Event struct {
	At     time.Duration
	Kind   EventKind
	Name   string             // which health URL, metric source, probe
	Values map[string]float64 // numbers by name
	Text   string
}

// EventKind names what an event reports.
type EventKind string

// The kinds of events.
//
// A tick comes every second of a run with the values "in_flight" (all requests
// that are open), "chunks" (received since the last tick), "late_ms" (how late the client's own timer
// fired) and "cpu" (share of one core that the client used since the last
// tick).
const (
	Tick    EventKind = "tick"
	Health  EventKind = "health"  // values: status, latency_ms
	Metrics EventKind = "metrics" // values: as scraped
	Probe   EventKind = "probe"
	Log     EventKind = "log"
	Started EventKind = "started" // name: the phase that begins
	Ended   EventKind = "ended"   // name: the phase that ended; text: why, when it was cut short
	// ShardTick is one shard's tick, its number as name, with "host_cpu": what
	// all shards of its machine used. A tick beside it speaks of all shards.
	ShardTick EventKind = "shard"
)

package workload

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/internal/nearest"
)

// Version is the version of everything that decides a session's bytes: texts,
// word lists, the order of draws. It is written into plans, so that an old
// plan isn't silently replayed with other bytes.
const Version = 1

// What a session does when a reply to one of its turns is wrong.
const (
	Continue = "continue" // the wrong reply stays in the conversation and takes effect
	Repair   = "repair"   // the right reply takes its place
	Stop     = "stop"     // the session ends
)

// How tool calls are asked for.
const (
	Native = "native" // the tools field and the tool role
	Text   = "text"   // one line of JSON in the text: for servers or models without tools
)

// Plan says everything that a workload's bytes depend on. A zero field takes
// the kind's default. A knob that the kind doesn't have must stay zero, so
// that nobody believes it did something.
type Plan struct {
	Version int    `json:"version"` // 0 is this program's
	Kind    string `json:"kind"`
	Seed    uint64 `json:"seed"`
	// RunKey, in hex, is the key of the canaries. Two runs with one seed and
	// one key send the same prompts, so the second meets the first one's
	// cache. Empty means one made from the seed.
	RunKey   string `json:"run_key"`
	Sessions int    `json:"sessions"`
	// Rounds is what a session does that many times; docs/workloads.md says
	// what that is for each kind.
	Rounds       int    `json:"rounds"`
	ContextLines int    `json:"context_lines,omitempty"` // lines of facts in a prompt
	MaxTokens    int    `json:"max_tokens"`
	OnError      string `json:"on_error,omitempty"` // Continue, Repair or Stop
	Tools        string `json:"tools,omitempty"`    // Native or Text
	Logprobs     bool   `json:"logprobs,omitempty"`
	TopLogprobs  int    `json:"top_logprobs,omitempty"`

	CopyLines      int `json:"copy_lines,omitempty"`       // lines to be repeated
	Fillers        int `json:"fillers,omitempty"`          // filler requests before each turn but the first; in evict, before the host leg
	FillerLines    int `json:"filler_lines,omitempty"`     // lines of facts in a filler request
	CancelEvery    int `json:"cancel_every,omitempty"`     // each so many turns are sent twice: hung up on, then to the end
	CancelWithinMS int `json:"cancel_within_ms,omitempty"` // a cancel in mid-prefill comes at most that late
	CancelChunks   int `json:"cancel_chunks,omitempty"`    // a cancel in mid-stream comes at most that many chunks late
	ShortEvery     int `json:"short_every,omitempty"`      // each so many sessions have a quarter of the lines
}

// UnmarshalJSON reads a plan and refuses keys that it doesn't know.
func (p *Plan) UnmarshalJSON(b []byte) error {
	type plain Plan // without this method
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err := d.Decode((*plain)(p))
	if err == nil {
		return nil
	}
	// The decoder has no error type for this; its text is part of Go's API in
	// practice, and without a match the plain error is returned.
	if _, key, ok := strings.Cut(err.Error(), "unknown field "); ok {
		key = strings.Trim(key, `"`)
		return fmt.Errorf("read workload plan: unknown key %q; nearest known key: %q", key, nearest.Name(key, planKeys()))
	}
	return fmt.Errorf("read workload plan: %w", err)
}

func planKeys() []string {
	var keys []string
	for f := range reflect.TypeFor[Plan]().Fields() {
		key, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		keys = append(keys, key)
	}
	return keys
}

// kind is one kind of workload. A knob that is zero in defaults isn't one of
// this kind's.
type kind struct {
	name     string
	defaults Plan
	session  func(w *workload, i int, alone bool) Session
}

// kinds lists the kinds of workloads, the main one first.
var kinds = []kind{
	{"agent", agentDefaults, newAgent},
	{"recall", recallDefaults, newRecall},
	{"echo", echoDefaults, newEcho},
	{"burst", burstDefaults, newBurst},
	{"evict", evictDefaults, newEvict},
	{"churn", churnDefaults, newChurn},
	{"mixed", mixedDefaults, newMixed},
}

// Kinds returns the names of the kinds.
func Kinds() []string {
	var names []string
	for _, k := range kinds {
		names = append(names, k.name)
	}
	return names
}

// knobs are the numbers that kinds have or don't have, and their limits.
var knobs = []struct {
	name     string
	field    func(*Plan) *int
	min, max int
}{
	{"sessions", func(p *Plan) *int { return &p.Sessions }, 1, 1 << 20},
	{"rounds", func(p *Plan) *int { return &p.Rounds }, 1, 1 << 16},
	{"context_lines", func(p *Plan) *int { return &p.ContextLines }, 2, 100_000},
	{"max_tokens", func(p *Plan) *int { return &p.MaxTokens }, 1, 1 << 20},
	{"copy_lines", func(p *Plan) *int { return &p.CopyLines }, 1, 50_000},
	{"fillers", func(p *Plan) *int { return &p.Fillers }, 1, 100_000},
	{"filler_lines", func(p *Plan) *int { return &p.FillerLines }, 1, 100_000},
	{"cancel_within_ms", func(p *Plan) *int { return &p.CancelWithinMS }, 1, 600_000},
	{"cancel_chunks", func(p *Plan) *int { return &p.CancelChunks }, 1, 100_000},
	{"cancel_every", func(p *Plan) *int { return &p.CancelEvery }, 1, 100_000},
	{"short_every", func(p *Plan) *int { return &p.ShortEvery }, 1, 100_000},
}

// everyKinds are the knobs that every kind has, though its default be none, and
// what goes with them where they are set.
func everyKinds(p Plan, defaults *Plan) (has []string) {
	has = []string{"fillers", "short_every"}
	if p.Fillers > 0 {
		has, defaults.FillerLines = append(has, "filler_lines"), cmp.Or(defaults.FillerLines, defaultFillerLines)
	}
	if defaults.CancelChunks > 0 { // the kind hangs up by itself
		return has
	}
	if has = append(has, "cancel_every"); p.CancelEvery > 0 {
		defaults.CancelWithinMS, defaults.CancelChunks = defaultCancelWithinMS, defaultCancelChunks
	}
	return has
}

// WithDefaults returns the plan with every default written out, or says what
// is wrong with it.
func (p Plan) WithDefaults() (Plan, error) {
	if p.Kind == "" {
		return p, fmt.Errorf("plan workload: no kind given; the kinds are %s", strings.Join(Kinds(), ", "))
	}
	at := slices.IndexFunc(kinds, func(k kind) bool { return k.name == p.Kind })
	if at < 0 {
		return p, fmt.Errorf("plan workload: unknown kind %q; did you mean %q? The kinds are %s",
			p.Kind, nearest.Name(p.Kind, Kinds()), strings.Join(Kinds(), ", "))
	}
	k := kinds[at]
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf("plan workload: "+format, args...)) }

	if p.Version == 0 {
		p.Version = Version
	}
	if p.Version != Version {
		bad("the plan is of workload version %d, this program makes version %d: it can't send the same bytes; use the program that made the plan, or take \"version\" out for a new run", p.Version, Version)
	}
	if p.RunKey == "" {
		sum := sha256.Sum256(fmt.Appendf(nil, "culprit run key %d", p.Seed))
		p.RunKey = hex.EncodeToString(sum[:16])
	}
	if key, err := hex.DecodeString(p.RunKey); err != nil || len(key) < 8 {
		bad("run_key is %d characters of something else than hex with at least 8 bytes", len(p.RunKey))
	}
	defaults := k.defaults
	if defaults.MaxTokens == 0 { // a line to be repeated has at most 17 characters, mostly 11
		defaults.MaxTokens = 64 + 16*cmp.Or(p.CopyLines, defaults.CopyLines)
	}
	always := everyKinds(p, &defaults)
	for _, knob := range knobs {
		got, def := knob.field(&p), *knob.field(&defaults)
		switch {
		case def == 0 && *got != 0 && !slices.Contains(always, knob.name):
			bad("kind %s has no %s; take it out", k.name, knob.name)
		case *got == 0:
			*got = def // 0 where the kind needs none
		case *got < knob.min || *got > knob.max:
			bad("%s is %d, not within %d and %d", knob.name, *got, knob.min, knob.max)
		}
	}
	for _, choice := range []struct {
		name   string
		got    *string
		def    string
		values []string
	}{
		{"on_error", &p.OnError, defaults.OnError, []string{Continue, Repair, Stop}},
		{"tools", &p.Tools, defaults.Tools, []string{Native, Text}},
	} {
		switch {
		case choice.def == "" && *choice.got != "":
			bad("kind %s has no %s; take it out", k.name, choice.name)
		case *choice.got == "":
			*choice.got = choice.def
		case !slices.Contains(choice.values, *choice.got):
			bad("%s is %q, not one of %s", choice.name, *choice.got, strings.Join(choice.values, ", "))
		}
	}
	if p.TopLogprobs < 0 || p.TopLogprobs > 20 {
		bad("top_logprobs is %d, not within 0 and 20", p.TopLogprobs)
	}
	if p.TopLogprobs > 0 {
		p.Logprobs = true
	}
	return p, errors.Join(errs...)
}

// workload is a plan at work.
type workload struct {
	plan Plan // complete
	key  []byte
	kind kind
}

// New makes the workload of a plan; WithDefaults says what p lacks.
func New(p Plan) (Workload, error) {
	p, err := p.WithDefaults()
	if err != nil {
		return nil, err
	}
	key, err := hex.DecodeString(p.RunKey)
	if err != nil {
		return nil, fmt.Errorf("plan workload: run_key: %w", err)
	}
	at := slices.IndexFunc(kinds, func(k kind) bool { return k.name == p.Kind })
	return &workload{p, key, kinds[at]}, nil
}

func (w *workload) Kind() string { return w.plan.Kind }

func (w *workload) Session(i int, alone bool) Session { return w.shape(i, alone) }

// rng returns the source of one purpose of one session. Each purpose has its
// own, so that one more draw here moves nothing there.
func (w *workload) rng(session int, purpose string) *rand.Rand {
	return newRand(w.plan.Seed, w.plan.Kind, session, purpose)
}

func newRand(seed uint64, kind string, session int, purpose string) *rand.Rand {
	sum := sha256.Sum256(fmt.Appendf(nil, "culprit workload %d %s %d %s", seed, kind, session, purpose))
	return rand.New(rand.NewPCG(binary.BigEndian.Uint64(sum[:8]), binary.BigEndian.Uint64(sum[8:16])))
}

// pick draws one of a list that isn't empty.
func pick[T any](r *rand.Rand, list []T) T { return list[r.IntN(len(list))] }

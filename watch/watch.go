// Package watch is a canary for a server in production: one self-checking
// conversation at a time, for ever, and an alarm when the evidence that more
// of them break than should is strong enough, or when the server doesn't
// answer. The evidence may be looked at after each conversation: false alarms
// are as rare as asked for, however long it watches.
//
// Stability: may change.
package watch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"time"

	"github.com/culprit-project/culprit/stats"
)

// What an Options field of zero means.
const (
	DefaultEvery       = time.Minute
	DefaultBaseline    = 0.001
	DefaultFalseAlarms = 1.0 / 12
	DefaultWedgeAfter  = 2
	DefaultQuiet       = time.Hour
)

const month = 30 * 24 * time.Hour

// Conversation is what became of one.
type Conversation struct {
	Number  int
	Ops     int
	Damaged int // ops that show damage
	Classes []string
	Lost    int       // ops that failed, timed out, or ended without a token
	LostWhy string    // of the last of them
	FirstMS []float64 // to the first chunk, of each op that had one
	ChunkMS []float64 // from each chunk to the next
	TotalMS []float64 // of each op that came to its end
	Record  string    // where what was said is
}

// Broken says that the conversation counts as one that broke.
func (c *Conversation) Broken() bool { return c.Damaged > 0 }

// Unanswered says that the server gave no whole reply at all.
func (c *Conversation) Unanswered() bool { return c.Ops > 0 && c.Lost == c.Ops }

// Alarm is why somebody should look.
type Alarm struct {
	Kind          string    `json:"kind"` // damage or wedge
	At            time.Time `json:"at"`
	Says          string    `json:"says"`
	Conversations int       `json:"conversations"` // since the watch began, or since the alarm before
	Broken        int       `json:"broken"`
	LogEvidence   float64   `json:"log_evidence"`
	Record        string    `json:"record"` // the conversation that set it off
}

// The kinds of alarms.
const (
	Damage = "damage"
	Wedge  = "wedge"
)

// Options says how a server is watched. Only Play must be set.
type Options struct {
	// Play plays one conversation, whose number tells its seed and canary.
	Play func(ctx context.Context, number int) (Conversation, error)

	Every       time.Duration // from one conversation's begin to the next one's
	Baseline    float64       // share of conversations that break on a sound server, at most
	FalseAlarms float64       // of damage, a month, on average at most
	WedgeAfter  int           // conversations without any reply, one after another
	Quiet       time.Duration // between two alarms of one kind

	Alarm  func(context.Context, Alarm) // gathers evidence, tells people; the watch waits for it
	Seen   func(Conversation, float64)  // each conversation, and the evidence after it as a share of what an alarm takes
	First  int                          // number of the first conversation
	Logger *slog.Logger
}

// Threshold is the logarithm of the evidence that an alarm takes.
func (o *Options) Threshold() float64 {
	conversations := float64(month) / float64(cmp.Or(o.Every, DefaultEvery))
	return math.Log(max(1, conversations/cmp.Or(o.FalseAlarms, DefaultFalseAlarms)))
}

// Run watches until ctx ends, or until a conversation can't be played for a
// reason of our own.
func Run(ctx context.Context, o Options) error {
	o.Every = cmp.Or(o.Every, DefaultEvery)
	o.Baseline = cmp.Or(o.Baseline, DefaultBaseline)
	o.WedgeAfter = cmp.Or(o.WedgeAfter, DefaultWedgeAfter)
	o.Quiet = cmp.Or(o.Quiet, DefaultQuiet)
	switch {
	case o.Play == nil:
		return errors.New("watch: nothing to play is given")
	case o.Every < 0 || o.Quiet < 0 || o.WedgeAfter < 0 || o.FalseAlarms < 0:
		return errors.New("watch: times, counts and rates must not be negative")
	case o.Baseline <= 0 || o.Baseline >= 0.5:
		return fmt.Errorf("watch: a baseline of %g is given; want the share of conversations that break on a sound server, above 0 and below 0.5", o.Baseline)
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	w := watcher{Options: o, threshold: o.Threshold(), detector: stats.NewDetector(o.Baseline), last: map[string]time.Time{}}
	tick := time.NewTicker(o.Every)
	defer tick.Stop()
	for number := o.First; ; number++ {
		c, err := o.Play(ctx, number)
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		w.take(ctx, c)
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil
		}
	}
}

type watcher struct {
	Options
	threshold  float64
	detector   *stats.Detector
	broken     int
	unanswered int // in a row
	last       map[string]time.Time
}

// take weighs a conversation. One without any reply says nothing of damage.
func (w *watcher) take(ctx context.Context, c Conversation) {
	if c.Unanswered() {
		w.unanswered++
	} else {
		w.unanswered = 0
		w.detector.Observe(c.Broken())
		if c.Broken() {
			w.broken++
		}
	}
	evidence := w.detector.LogEvidence()
	if w.Seen != nil {
		w.Seen(c, max(0, evidence/w.threshold))
	}
	switch {
	case w.unanswered >= w.WedgeAfter:
		w.alarm(ctx, Wedge, c, fmt.Sprintf("%d conversations in a row got no reply; the last: %s", w.unanswered, c.LostWhy))
	case evidence >= w.threshold:
		n := w.detector.Observations()
		says := fmt.Sprintf("%d of %d conversations broke, where %.3g%% is usual at most; without a change an alarm like this comes %.2g times a month at most",
			w.broken, n, 100*w.Baseline, cmp.Or(w.FalseAlarms, DefaultFalseAlarms))
		if w.alarm(ctx, Damage, c, says) {
			w.detector, w.broken = stats.NewDetector(w.Baseline), 0
		}
	}
}

// alarm says whether it was raised: soon after one, another of its kind isn't.
func (w *watcher) alarm(ctx context.Context, kind string, c Conversation, says string) bool {
	if last, ok := w.last[kind]; ok && time.Since(last) < w.Quiet {
		return false
	}
	w.last[kind] = time.Now()
	w.Logger.Warn("alarm", slog.String("kind", kind), slog.String("says", says))
	if w.Alarm != nil {
		w.Alarm(ctx, Alarm{
			Kind: kind, At: time.Now(), Says: says, Conversations: w.detector.Observations(), Broken: w.broken,
			LogEvidence: w.detector.LogEvidence(), Record: c.Record,
		})
	}
	return true
}

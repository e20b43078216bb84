package experiment

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/workload"
)

// ShardPlan is what a shard is asked to play: its share of a plan. What each
// session sends follows from its number, so shards have nothing to agree on but
// when to begin and to stop.
type ShardPlan struct {
	Plan       Plan           `json:"plan"`
	History    history.Header `json:"history"`
	Number, Of int
	// Header has secrets: it is for a pipe, and empty where messages pass
	// through others' hands. Then the shard has its own.
	Header http.Header `json:"header,omitempty"`
	Path   string      `json:"path,omitempty"` // of its history; empty leaves it to the shard
}

// ShardMessage is what a run and one of its shards tell each other: Play, which
// Ready answers, Begin, which Begun answers, then Progress each second, and
// Ended, early after a Stop. One field is set.
type ShardMessage struct {
	Play  *ShardPlan `json:"play,omitempty"`
	Begin bool       `json:"begin,omitempty"`
	Stop  string     `json:"stop,omitempty"` // why

	Ready    *ShardReady `json:"ready,omitempty"`
	Begun    bool        `json:"begun,omitempty"`
	Progress *Progress   `json:"progress,omitempty"`
	Ended    *ShardEnded `json:"ended,omitempty"`
}

// ShardReady says where a shard is.
type ShardReady struct {
	Host  string `json:"host"`
	Cores int    `json:"cores"`
}

// ShardEnded says that a shard's history is whole.
type ShardEnded struct {
	Stopped string `json:"stopped,omitempty"` // why not all sessions were played
	Error   string `json:"error,omitempty"`   // why there is no history, or none that is whole
}

// ShardLink is one end of what connects a run with a shard. Send and Receive may
// be used side by side. Receive returns an error once the other end is gone.
type ShardLink interface {
	Send(*ShardMessage) error
	Receive() (*ShardMessage, error)
}

// Shards starts the processes that play shards.
type Shards interface {
	// Start starts shard number, whose history comes to be at path. The link
	// is used until end is called, once: it ends what is left of the shard,
	// waits until its history is there, and says how the shard ended if that
	// wasn't well.
	Start(ctx context.Context, number int, path string) (link ShardLink, end func() error, err error)
}

// StreamLink sends messages as lines of JSON.
func StreamLink(r io.Reader, w io.Writer) ShardLink {
	return &streamLink{in: json.NewDecoder(r), out: w}
}

type streamLink struct {
	in  *json.Decoder
	mu  sync.Mutex
	out io.Writer
}

func (l *streamLink) Send(m *ShardMessage) error {
	var b bytes.Buffer
	if err := json.NewEncoder(&b).Encode(m); err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	_, err := l.out.Write(b.Bytes())
	return err
}

func (l *streamLink) Receive() (*ShardMessage, error) {
	var m ShardMessage
	return &m, l.in.Decode(&m)
}

// ShardOptions is what a shard has of its own.
type ShardOptions struct {
	Header http.Header // used where the plan brings none
	Path   string      // of its history where the plan names none
	Logger *slog.Logger
}

// PlayShard plays the shard that the other end of a link asks for. It returns
// when the shard's history is whole, or nobody wants it any more.
func PlayShard(ctx context.Context, link ShardLink, o ShardOptions) error {
	first, err := link.Receive()
	switch {
	case err != nil:
		return fmt.Errorf("play shard: it isn't said which: %w", err)
	case first.Stop != "":
		return link.Send(&ShardMessage{Ended: &ShardEnded{Stopped: first.Stop}})
	case first.Play == nil:
		return errors.New("play shard: the first message says nothing of which")
	}
	ended, err := playShard(ctx, link, first.Play, o)
	if err != nil {
		ended.Error = err.Error()
	}
	return errors.Join(err, link.Send(&ShardMessage{Ended: &ended}))
}

func playShard(ctx context.Context, link ShardLink, s *ShardPlan, o ShardOptions) (ended ShardEnded, err error) {
	w, err := workload.New(s.Plan.Workload)
	if err != nil {
		return ended, err
	}
	header := s.Header
	if header == nil {
		header = o.Header
	}
	for _, name := range s.Plan.HeaderNames {
		if len(header.Values(name)) == 0 {
			return ended, fmt.Errorf("play shard %d: the plan wants the request header %s, whose value is never sent: give it to the worker (--header, or OPENAI_API_KEY)", s.Number, name)
		}
	}
	live := oracle.NewLive(s.History)
	host, err := os.Hostname()
	if err != nil {
		return ended, fmt.Errorf("play shard %d: %w", s.Number, err)
	}
	s.History.Cores = runtime.GOMAXPROCS(0)
	if err := link.Send(&ShardMessage{Ready: &ShardReady{Host: host, Cores: s.History.Cores}}); err != nil {
		return ended, err
	}

	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	begin := make(chan struct{}, 1)
	go func() { // it ends with the link
		for {
			m, err := link.Receive()
			switch {
			case err != nil:
				stop(errors.New("the run that this shard belongs to is gone"))
				return
			case m.Stop != "":
				stop(errors.New(m.Stop))
			case m.Begin:
				select {
				case begin <- struct{}{}:
				default:
				}
			}
		}
	}()
	select {
	case <-begin:
	case <-ctx.Done():
		return ShardEnded{Stopped: context.Cause(ctx).Error()}, nil
	}
	s.History.Started = time.Now()
	if err := link.Send(&ShardMessage{Begun: true}); err != nil {
		return ended, err
	}
	writer, err := history.Create(cmp.Or(s.Path, o.Path), s.History)
	if err != nil {
		return ended, err
	}
	phase := mainPhase(&s.Plan, w, live)
	phase.Header, phase.History, phase.Start, phase.Logger = header, writer, s.History.Started, o.Logger
	phase.Shard, phase.Shards = s.Number, s.Of
	phase.MaxRecovery = max(1, load.DefaultMaxRecovery/s.Of)
	if s.Number != 0 { // one of them asks for the server's health
		phase.HealthEvery = 0
	}
	phase.Progress = func(p load.Progress) {
		main, _ := live.Counts()
		link.Send(&ShardMessage{Progress: &Progress{Progress: p, Main: main}}) //nolint:errcheck // Receive sees that the link is gone
	}
	result, err := load.Run(ctx, phase)
	return ShardEnded{Stopped: result.Stopped}, errors.Join(err, writer.Close())
}

// mainPhase is the load of a plan's main phase.
func mainPhase(p *Plan, w workload.Workload, live *oracle.Live) load.Options {
	o := load.Options{
		BaseURL: p.BaseURL, Model: p.Model, ExtraBody: p.ExtraBody,
		NoStream: p.NoStream, Timeout: time.Duration(p.TimeoutMS) * time.Millisecond,
		Workload: w, Seed: p.Workload.Seed, Phase: history.Main, Sessions: p.Workload.Sessions,
		Concurrency: p.Concurrency, RequestRate: p.RequestRate, Waves: p.Waves,
		HealthEvery: healthEvery,
		Sentinel:    openai.ChatRequest{Messages: []openai.Message{{Role: "user", Content: sentinelMessage}}, MaxTokens: 1},
		Suspect: func(op *history.Op, _ *openai.Reply) bool {
			return live.Op(op) || op.Outcome == history.Failed || op.Outcome == history.TimedOut
		},
	}
	if p.RequestRate > 0 && p.Replay == nil {
		o.TurnsPerSession = float64(workload.Turns(w, 0))
	}
	if r := p.Replay; r != nil {
		o.Sessions = r.Rows
		if r.Timed {
			o.Concurrency = r.Rows // each waits for its time
		}
	}
	o.Recovery = recovery(w, o.Sessions)
	return o
}

const (
	readyWithin = 2 * time.Minute  // a shard is ready: it was found a place, and has prepared its sessions' canaries
	lostAfter   = 20 * time.Second // without a word
	endsWithin  = 30 * time.Second // a shard that was told to stop
)

// conductor is a run with its shards.
type conductor struct {
	shards []*shard
	heard  chan heard
	over   chan struct{}
	hidden sync.WaitGroup // readers

	silence time.Duration // until a shard is lost
}

type shard struct {
	history.Shard
	link     ShardLink
	end      func() error
	told     time.Time // to begin
	last     time.Time // when it said something
	progress Progress
	gone     bool // ended or lost
}

type heard struct {
	shard   *shard
	message *ShardMessage
	err     error
	at      time.Time
}

// startShards starts all shards and returns when each is ready.
func startShards(ctx context.Context, o *Options, header history.Header, path func(number int) string) (*conductor, error) {
	c := &conductor{heard: make(chan heard), over: make(chan struct{}), silence: cmp.Or(o.ShardSilence, lostAfter)}
	for number := range o.Plan.Shards {
		link, end, err := o.Shards.Start(ctx, number, path(number))
		if err != nil {
			c.close()
			return nil, fmt.Errorf("start shard %d: %w", number, err)
		}
		s := &shard{Shard: history.Shard{Number: number}, link: link, end: end}
		s.progress.Sessions = load.Share(o.Plan.Workload.Sessions, number, o.Plan.Shards)
		c.shards = append(c.shards, s)
		c.hidden.Go(func() { c.listen(s) })
		plan := ShardPlan{Plan: o.Plan, History: header, Number: number, Of: o.Plan.Shards, Path: path(number)}
		if len(o.Header) > 0 {
			plan.Header = o.Header
			plan.Plan.HeaderNames = slices.Sorted(maps.Keys(o.Header))
		}
		if err := link.Send(&ShardMessage{Play: &plan}); err != nil {
			c.close()
			return nil, fmt.Errorf("start shard %d: %w", number, errors.Join(err, c.endOf(s)))
		}
	}
	if err := c.ready(ctx); err != nil {
		c.close()
		return nil, err
	}
	return c, nil
}

// listen hands on what a shard says, until it is gone.
func (c *conductor) listen(s *shard) {
	for {
		m, err := s.link.Receive()
		select {
		case c.heard <- heard{s, m, err, time.Now()}:
		case <-c.over:
			return
		}
		if err != nil {
			return
		}
	}
}

func (c *conductor) ready(ctx context.Context) error {
	timeout := time.NewTimer(readyWithin)
	defer timeout.Stop()
	for range c.shards {
		select {
		case h := <-c.heard:
			switch {
			case h.err != nil:
				return fmt.Errorf("start shard %d: it is gone: %w", h.shard.Number, errors.Join(c.endOf(h.shard), h.err))
			case h.message.Ended != nil:
				return fmt.Errorf("start shard %d: %s", h.shard.Number, cmp.Or(h.message.Ended.Error, h.message.Ended.Stopped))
			case h.message.Ready == nil:
				return fmt.Errorf("start shard %d: it says something else than that it is ready", h.shard.Number)
			}
			h.shard.Host, h.shard.Cores = h.message.Ready.Host, h.message.Ready.Cores
		case <-timeout.C:
			var missing []string
			for _, s := range c.shards {
				if s.Host == "" {
					missing = append(missing, fmt.Sprint(s.Number))
				}
			}
			return fmt.Errorf("start shards: %d of %d weren't ready within %v (%s): is there a worker for each?", len(missing), len(c.shards), readyWithin, strings.Join(missing, ", "))
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// play lets the shards play and returns when all have ended or are lost. zero
// is the history's time 0; known is told what is known of the shards, for a run
// that is killed.
func (c *conductor) play(ctx context.Context, zero time.Time, progress func(Progress), known func([]history.Shard) error) error {
	for _, s := range c.shards {
		s.told = time.Now()
		s.last = s.told
		s.BeganUS = s.told.Sub(zero).Microseconds()
		s.WithinUS = c.silence.Microseconds() // until it says that it has
		if err := s.link.Send(&ShardMessage{Begin: true}); err != nil {
			c.lose(s, err)
		}
	}
	if err := known(c.list()); err != nil {
		return err
	}
	begun := time.Now()
	stop, stopped := ctx.Done(), time.Time{}
	stopAll := func(why string) {
		if !stopped.IsZero() {
			return
		}
		stop, stopped = nil, time.Now()
		for _, s := range c.shards {
			if !s.gone {
				s.link.Send(&ShardMessage{Stop: why}) //nolint:errcheck // listen sees that it is gone
			}
		}
	}
	clock := time.NewTicker(time.Second)
	defer clock.Stop()
	for slices.ContainsFunc(c.shards, func(s *shard) bool { return !s.gone }) {
		if slices.ContainsFunc(c.shards, func(s *shard) bool { return s.Lost != "" }) {
			stopAll("another shard was lost") // the planned load can't be reached any more
		}
		select {
		case h := <-c.heard:
			s := h.shard
			if s.gone {
				continue
			}
			s.last = h.at
			switch {
			case h.err != nil:
				c.lose(s, h.err)
			case h.message.Begun:
				s.WithinUS = h.at.Sub(s.told).Microseconds()
				if err := known(c.list()); err != nil {
					return err
				}
			case h.message.Progress != nil:
				s.progress = *h.message.Progress
				progress(c.progress(time.Since(begun)))
			case h.message.Ended != nil:
				s.gone, s.Lost = true, h.message.Ended.Error
				if why := h.message.Ended.Stopped; why != "" {
					stopAll("another shard stopped")
				}
			}
		case <-clock.C:
			for _, s := range c.shards {
				silent := time.Since(s.last)
				switch {
				case s.gone:
				case silent > c.silence:
					c.lose(s, fmt.Errorf("it said nothing for %.0f s", silent.Seconds()))
				case !stopped.IsZero() && time.Since(stopped) > endsWithin:
					c.lose(s, fmt.Errorf("it didn't stop within %v", endsWithin))
				}
			}
		case <-stop:
			stopAll(context.Cause(ctx).Error())
		}
	}
	var ends sync.WaitGroup
	for _, s := range c.shards {
		ends.Go(func() {
			if err := c.endOf(s); err != nil && s.Lost == "" {
				s.Lost = err.Error()
			}
		})
	}
	ends.Wait()
	return known(c.list())
}

// lose gives a shard up.
func (c *conductor) lose(s *shard, err error) {
	s.gone = true
	if how := c.endOf(s); how != nil {
		err = how
	}
	s.Lost = err.Error()
}

// endOf ends a shard and says how it ended.
func (c *conductor) endOf(s *shard) error {
	if s.end == nil {
		return nil
	}
	end := s.end
	s.end = nil
	return end()
}

// close ends what is left.
func (c *conductor) close() {
	close(c.over)
	for _, s := range c.shards {
		c.endOf(s) //nolint:errcheck // nobody wants its history any more
	}
	c.hidden.Wait()
}

func (c *conductor) list() (list []history.Shard) {
	for _, s := range c.shards {
		list = append(list, s.Shard)
	}
	return list
}

// progress adds up what the shards said last.
func (c *conductor) progress(elapsed time.Duration) Progress {
	var all Progress
	all.Phase, all.Elapsed = history.Main, elapsed
	for _, s := range c.shards {
		all.Add(s.progress)
	}
	return all
}

// The folder of a run directory in which a run with shards is recorded, until
// their histories are merged into one.
func shardsBase(dir string) string { return filepath.Join(dir, "shards", "run.jsonl.zst") }
func shardsFile(dir string) string { return filepath.Join(dir, "shards", "shards.json") }
func shardHistory(dir string, number int) string {
	return filepath.Join(dir, "shards", fmt.Sprintf("%d.jsonl.zst", number))
}

func (o *Options) sharded() bool { return o.Shards != nil && o.Plan.Shards > 1 }

// mergeShards makes the history of a run with shards, where theirs are still
// there: the run is at its end, or was killed before it.
func mergeShards(dir string) error {
	if _, err := os.Stat(shardsBase(dir)); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	plan, err := ReadPlan(dir)
	if err != nil {
		return err
	}
	shards := make([]history.Shard, plan.Shards) // before they have begun
	for number := range shards {
		shards[number].Number = number
	}
	if _, err := readJSON(shardsFile(dir), &shards); err != nil {
		return err
	}
	var parts []history.Part
	for _, s := range shards {
		parts = append(parts, history.Part{Path: shardHistory(dir, s.Number), Shard: s})
	}
	return history.Merge(filepath.Join(dir, HistoryFile), shardsBase(dir), parts)
}

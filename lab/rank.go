package lab

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"math"
	"runtime/debug"
	"slices"

	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/host"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/lab/sched"
)

// rank is a model with its memory and the state of all requests.
type rank struct {
	engine *Engine
	index  int
	group  *group // nil where there is one rank
	lost   error  // the group has broken up
	config Config
	transfers
	sched     *sched.Scheduler
	cache     *model.Cache
	host      *host.Tier // the forward pass's; nil where there is none
	scratch   *model.Scratch
	decoder   *model.Decoder
	live      map[uint64]*sequence // by number
	number    uint64               // of requests so far
	flights   [3]flight            // one being made, one computed, and the one before, which feeds it
	turn      int
	flying    *flight    // launched and not committed
	env       fault.Env  // what doesn't change
	between   *fault.Env // as of the last time between two steps
	computing fault.Env  // of the step that is being computed
	steps     int        // launched so far
	cancels   int        // requests that were cancelled or aborted so far
	damage    damage
}

func newRank(c Config, e *Engine, index int, g *group) (*rank, error) {
	pages := c.MaxTokens/c.PageSize + 1 // the reserved one
	hostPages := 0
	if c.HostTokens > 0 {
		hostPages = c.HostTokens/c.PageSize + 1
	}
	between := new(fault.Env)
	var sum model.AllReduce
	if g != nil {
		var err error
		if c.Model, err = c.Model.Shard(index, c.Ranks); err != nil {
			return nil, err
		}
		sum = g.sum(index)
	}
	r := &rank{
		engine: e,
		index:  index,
		group:  g,
		config: c,
		sched: sched.New(sched.Config{
			Pages: pages, PageSize: c.PageSize, MaxRunning: c.MaxRunning, ChunkTokens: c.ChunkTokens,
			NoRadix: c.NoRadix, RetractEvery: c.RetractEvery, Faults: c.Faults, Env: between,
			HostPages: hostPages, WritePolicy: c.WritePolicy, Parts: c.HostParts, DecodeSteps: c.DecodeSteps,
		}),
		cache:   &model.Cache{PageSize: c.PageSize, IndexDType: c.IndexDType},
		scratch: c.Model.NewScratch(max(c.ChunkTokens, c.MaxRunning)),
		live:    map[uint64]*sequence{},
		between: between,
		env: fault.Env{
			PD: cmp.Or(string(c.Mode), "null"), TP: c.Ranks,
			Overlap: !c.NoOverlap, Radix: !c.NoRadix, IndexK: c.IndexDType.String(), PageSize: c.PageSize,
			HiCache: hostPages > 0, Layout: c.HostLayout.String(), DecodeSteps: c.DecodeSteps,
			Graph: !c.NoGraph, AltStream: !c.NoAltStream, IndexKStore: "fused", Toggle: map[string]bool{},
		},
	}
	if c.IndexKScatter {
		r.env.IndexKStore = "scatter"
	}
	r.damage.repeated = c.Tokenizer.Encode("!")[0]
	for _, name := range c.Toggle {
		r.env.Toggle[name] = true
	}
	r.scratch.Workers, r.scratch.Scatter = c.Workers, c.IndexKScatter
	if c.Faults.Has(fault.BatchNumerics) {
		r.scratch.Split = func() bool { return c.Faults.On(fault.BatchNumerics, &r.computing) }
	}
	r.scratch.AllReduce = sum
	for l := range model.Layers {
		r.cache.Latent[l] = make([]float32, pages*c.PageSize*model.RowDim)
		r.cache.Index[l] = make([]byte, pages*c.IndexDType.PageBytes(c.PageSize))
	}
	if hostPages > 0 {
		r.host = host.New(r.cache, host.Config{Pages: hostPages, Layout: c.HostLayout, Seed: c.Seed, Faults: c.Faults})
	}
	r.decoder = c.Model.NewDecoder(r.cache, model.DecodeOptions{
		AllReduce: sum, Rows: c.MaxRunning, Workers: c.Workers, Scatter: c.IndexKScatter,
		Buckets: c.GraphBatches, OneStream: c.NoAltStream, Jitter: c.StreamJitter, Seed: c.Seed,
		Faults: c.Faults, Env: &r.computing,
	})
	return r, nil
}

// flight is a step on its way: what the forward pass takes, and what it gives.
type flight struct {
	step  *sched.Step
	env   fault.Env // as of its launch
	batch model.Batch
	draws []draw // for each item that yields a token
	feeds []feed
	done  chan struct{} // closed when what follows is there

	tokens  []Token // for each draw, without text
	err     error   // says that the step's requests can't go on
	waits   host.Waits
	copies  []host.Copies
	prefill model.Counts
	decode  model.DecodeStats
}

// draw is a token to be chosen: a sequence's, so many after its first.
type draw struct {
	*sequence
	position uint64
}

// feed is a row whose token is one that the step before yields: nobody but
// the forward pass has seen it yet.
type feed struct{ row, draw int }

// step does what the inbox says and then one step; false when there is nothing
// to do. In the overlap loop it launches a step, and commits the one before
// while the new one is computed. So tokens are handed out, and ends noticed,
// one step late.
func (r *rank) step(inbox []func(*rank)) bool {
	r.look()
	for _, f := range inbox {
		f(r)
	}
	moved := r.transferStep()
	step, before := r.sched.Schedule(), r.flying
	if step == nil {
		r.land()
		return moved || before != nil
	}
	r.flying = r.launch(step, before)
	if before != nil {
		r.commit(before)
	}
	if r.config.NoOverlap {
		r.land()
	}
	return true
}

// land commits what is in flight.
func (r *rank) land() {
	if f := r.flying; f != nil {
		r.flying = nil
		r.commit(f)
	}
}

// launch starts a step's forward pass, which goes on by itself behind the one
// of the step before. It has its own copy of all that it needs.
func (r *rank) launch(step *sched.Step, before *flight) *flight {
	f := &r.flights[r.turn]
	r.turn = (r.turn + 1) % len(r.flights)
	b := &f.batch
	b.Rows, b.Tables, b.Logits = b.Rows[:0], b.Tables[:0], b.Logits[:0]
	f.step, f.draws, f.feeds, f.tokens, f.err = step, f.draws[:0], f.feeds[:0], f.tokens[:0], nil
	f.done = make(chan struct{})
	r.steps++
	f.env = r.moment(step)
	size := r.config.PageSize
	behind := 0
	if r.config.DecodeSteps == 5 && step.InRow == 5 && r.config.Faults.On(fault.DepthFive, &f.env) {
		behind = 1 // the fifth step has the fourth's idea of which tokens came before
	}
	for i, item := range step.Items {
		q, table := item.Request, item.Request.Table()
		s := r.live[q.ID]
		b.Tables = append(b.Tables, table)
		for p := item.From; p < item.To; p++ {
			token := q.Token(p)
			if token == sched.Pending {
				f.feeds = append(f.feeds, feed{len(b.Rows), s.drawn})
				token = 0
			}
			b.Rows = append(b.Rows, model.Row{
				Token: token, Prev1: q.Token(p - 1 - behind), Prev2: q.Token(p - 2 - behind),
				Position: int32(p),
				Slot:     table[p/size]*int32(size) + int32(p%size),
				Table:    int32(i),
			})
			if r.damage.worn[table[p/size]] { // by the fault slow-decay: what is written is lost
				b.Rows[len(b.Rows)-1].Slot = kv.Reserved
			}
		}
		if item.Samples() {
			b.Logits = append(b.Logits, int32(len(b.Rows)-1))
			s.drawn = len(f.draws)
			f.draws = append(f.draws, draw{s, uint64(len(s.Output))})
		}
	}
	r.sched.Launch(step)
	compute := func() {
		defer close(f.done)
		r.forward(f, before)
	}
	if r.config.NoOverlap {
		compute()
	} else {
		go compute()
	}
	return f
}

// forward computes a step: its cache entries, and a token for each draw.
func (r *rank) forward(f, before *flight) {
	defer func() {
		if p := recover(); p != nil {
			r.config.Logger.Error("the forward pass panicked", slog.Any("panic", p), slog.String("stack", string(debug.Stack())))
			f.err = fmt.Errorf("the forward pass panicked: %v", p)
		}
	}()
	if before != nil {
		<-before.done
	}
	defer func() { f.prefill, f.decode = r.scratch.Counts(), r.decoder.Stats() }()
	if r.host != nil { // whatever becomes of the step: others count on its copies
		env := f.env
		env.Tier = tierHost
		r.host.Begin(f.step.Backups, f.step.Loads, &env)
		defer func() {
			r.host.End()
			f.waits, f.copies = r.host.Waits(), r.host.Copies()
		}()
	}
	if before != nil && before.err != nil {
		f.err = fmt.Errorf("the step before: %w", before.err)
		return
	}
	for _, x := range f.feeds {
		f.batch.Rows[x.row].Token = before.tokens[x.draw].ID
	}
	logits, err := r.compute(f)
	if err != nil {
		f.err = err
		return
	}
	if r.config.Faults.On(fault.Poison, &f.env) {
		r.damage.poisoned = true
	}
	for i, d := range f.draws {
		row := logits[i*r.config.Model.Vocab : (i+1)*r.config.Model.Vocab]
		if r.damage.poisoned {
			row[r.damage.repeated] = float32(math.Inf(1))
		}
		t := Token{ID: sample(row, d.request.Temperature, d.request.TopP, d.seed, d.position)}
		if d.request.Logprobs {
			t.Logprob, t.Top = logprobs(row, t.ID, d.request.TopLogprobs)
		}
		f.tokens = append(f.tokens, t)
	}
}

// compute returns the logits of each draw.
func (r *rank) compute(f *flight) ([]float32, error) {
	r.computing = f.env
	if f.step.Prefill {
		return r.config.Model.Forward(&f.batch, r.cache, r.scratch)
	}
	return r.decoder.Step(&f.batch)
}

// commit takes a step's results: it tells the scheduler, and gives the tokens
// to those who wait for them.
func (r *rank) commit(f *flight) {
	<-f.done
	r.engine.countHost(f.waits, f.copies)
	r.engine.countForward(f.prefill, f.decode)
	if err := r.agreeOn(f); err != nil {
		r.config.Logger.Error("a step failed", slog.Any("error", err), slog.Int("requests", len(f.step.Items)))
		r.sched.Fail(f.step)
		for _, item := range f.step.Items {
			r.end(r.live[item.Request.ID], Failed, fmt.Errorf("%w: %w", ErrInternal, err))
		}
		return
	}
	tokens := f.tokens
	if f.step.Prefill && len(tokens) > 1 && !r.config.NoOverlap && r.config.Faults.On(fault.FirstTokenSwap, &f.env) {
		tokens = slices.Clone(tokens) // the next step reads the other
		tokens[0], tokens[1] = tokens[1], tokens[0]
	}
	sampled := make([]int32, len(tokens))
	for i, t := range tokens {
		sampled[i] = t.ID
	}
	r.sched.Done(f.step, sampled)
	r.engine.count(f.step)
	for _, item := range f.step.Items {
		if s := r.live[item.Request.ID]; s != nil && s.sender != nil && !item.Samples() {
			r.sendPages(s, item.To, nil)
		}
	}
	for i, d := range f.draws {
		if r.live[d.ID] == nil {
			continue // it has ended since
		}
		if d.sender != nil {
			r.sendPages(d.sequence, len(d.Prompt), &tokens[i])
		}
		r.deliver(d.sequence, tokens[i])
	}
}

// agreeOn says whether a step failed on any rank.
func (r *rank) agreeOn(f *flight) error {
	if r.group == nil {
		return f.err
	}
	waited := 0 // requests that still want a token of this step
	for _, item := range f.step.Items {
		if r.live[item.Request.ID] != nil {
			waited++
		}
	}
	if waited == 0 && r.index == 0 && r.strikes(fault.RankLocalGate, len(f.step.Items)) {
		return f.err // the bug: nobody waits for this step, but the other ranks wait for this one
	}
	state := []disagg.State{disagg.Success}
	if f.err != nil {
		state[0] = disagg.Failed
	}
	if r.agree(state); state[0] == disagg.Failed {
		return cmp.Or(f.err, r.lost, errors.New("it failed on another rank"))
	}
	return nil
}

// agree makes states the least of all ranks'. When the ranks have lost each
// other, they are all Failed.
func (r *rank) agree(states []disagg.State) {
	if r.group == nil {
		return
	}
	if r.lost == nil {
		r.lost = r.group.min(states)
	}
	if r.lost != nil {
		for i := range states {
			states[i] = disagg.Failed
		}
	}
}

// deliver gives a sequence its next token, and ends it if that was the last.
func (r *rank) deliver(s *sequence, token Token) {
	s.made++
	reason := Reason("")
	if token.ID == model.End {
		token.Text, reason = s.text.flush(), Stop
	} else {
		var stopped bool
		token.Text, stopped = s.text.push(token.ID)
		switch {
		case stopped:
			reason = Stop
		case s.made == s.MaxTokens:
			token.Text += s.text.flush()
			reason = Length
		}
	}
	r.engine.countToken()
	s.stream.tokens <- token // has room for MaxTokens
	switch {
	case reason == "":
	case s.sender != nil:
		s.reason = reason // when the transfer has ended
	default:
		r.end(s, reason, nil)
	}
}

// end frees what a sequence has and closes its stream. Nil is one that ended
// before.
func (r *rank) end(s *sequence, reason Reason, err error) {
	if s == nil || r.live[s.ID] == nil {
		return
	}
	delete(r.live, s.ID)
	if reason == Cancelled || reason == Aborted {
		r.cancels++
	}
	if table := s.Table(); len(table) > 0 && r.strikes(fault.SlowDecay, r.between.Batch) {
		r.damage.wear(table[len(table)-1])
	}
	if s.request.Room != nil {
		r.part(s)
	} else {
		r.sched.Remove(&s.Request)
	}
	s.unwatch()
	r.engine.countEnd(reason)
	s.stream.ending = Ending{
		Reason: reason, Err: err, Text: s.text.flush(), Retractions: s.Retractions,
		Usage: Usage{Prompt: len(s.Prompt), Completion: s.made, Device: max(0, s.CachedTokens-s.HostTokens), Host: s.HostTokens},
	}
	r.engine.tell(func() { close(s.stream.tokens) })
}

// shutDown does what the inbox says and fails what is left.
func (r *rank) shutDown(inbox []func(*rank)) {
	for _, f := range inbox {
		f(r)
	}
	r.land()
	for _, s := range r.sequences() {
		r.end(s, Failed, ErrShutDown)
	}
	r.stopTransfers()
}

// sequences lists what is live, by arrival: a run must not depend on a map's
// order.
func (r *rank) sequences() []*sequence {
	return slices.SortedFunc(maps.Values(r.live), func(a, b *sequence) int { return cmp.Compare(a.ID, b.ID) })
}

// Check says what is wrong with the engine's books.
func (r *rank) Check() error {
	placed := len(r.live) - len(r.queue)
	for _, s := range r.open {
		if s.sender != nil && !s.met {
			placed--
		}
	}
	if n := r.sched.Waiting() + r.sched.Running() + r.sched.Reserved(); n != placed {
		return fmt.Errorf("the scheduler has %d requests and the engine %d", n, placed)
	}
	for _, s := range r.live {
		if got := len(s.stream.tokens); got > len(s.Output) {
			return fmt.Errorf("request %d has %d tokens to be read and made %d", s.ID, got, len(s.Output))
		}
	}
	if r.host != nil && r.flying == nil { // else the forward pass has it
		if err := r.host.Check(); err != nil {
			return err
		}
	}
	return r.sched.Check()
}

// Package sched decides which requests join the next step: continuous
// batching with chunked prefill, a prefix cache, and retraction when memory
// runs out. It is a state machine with one owner and no clock; it never looks
// at what pages hold. Its API may change.
package sched

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/kv"
)

// Config is fixed for a scheduler's life.
type Config struct {
	Pages        int  // of the pool, the reserved one included
	PageSize     int  // tokens
	MaxRunning   int  // requests that have pages at once
	ChunkTokens  int  // the most tokens that one step prefills
	NoRadix      bool // don't share prefixes
	HostPages    int  // of the host tier, the reserved one included; 0 is no host tier
	WritePolicy  kv.WritePolicy
	Parts        bool // load parts of the host's pages too
	RetractEvery int  // for tests: retract one request each so many decode steps; 0 never
	DecodeSteps  int  // in a row, before new requests are let in; 0 is 1
	Faults       *fault.Set
	Env          *fault.Env // for the faults: as it is when they are asked for
}

// Request is one sequence. The owner of the scheduler reads it; only the
// scheduler writes what isn't exported.
type Request struct {
	ID        uint64
	Prompt    []int32
	MaxTokens int // of Output
	Output    []int32

	// PrefillOnly is a request that is never decoded. It keeps its pages until
	// it is removed.
	PrefillOnly bool

	CachedTokens int // of the prompt, that were found in the cache when it was first admitted; -1 before
	HostTokens   int // of CachedTokens, that were on the host alone
	Retractions  int

	order    uint64 // of arrival
	table    []int32
	computed int // positions whose cache entries exist, or will when the launched steps are done
	launched int // steps that it is in and that aren't done
	leaving  bool
}

// Pending stands in Output for a token that a launched step will yield.
const Pending int32 = -1

// Table is the request's page table; valid until the scheduler's next call.
func (r *Request) Table() []int32 { return r.table }

// Len is the number of tokens, prompt and output.
func (r *Request) Len() int { return len(r.Prompt) + len(r.Output) }

// Token is the token at a position; 0 before the first.
func (r *Request) Token(position int) int32 {
	switch {
	case position < 0:
		return 0
	case position < len(r.Prompt):
		return r.Prompt[position]
	default:
		return r.Output[position-len(r.Prompt)]
	}
}

// tokens are the first n.
func (r *Request) tokens(n int) []int32 {
	if n <= len(r.Prompt) {
		return r.Prompt[:n]
	}
	return slices.Concat(r.Prompt, r.Output[:n-len(r.Prompt)])
}

// Step is what to compute next: positions [From, To) of each item. A step is
// all prefill or all decode, as on the servers that this one is modelled on:
// only decode steps can be captured.
//
// Backups are done first, in their order, and then Loads, each layer at the
// latest when its entries are first read. That holds for a step that fails too.
type Step struct {
	Prefill        bool
	Items          []Item
	Backups, Loads []kv.Copy
	InRow          int // of a decode step: which it is since new requests were let in, from 1
	launched       bool
}

// Item is one request's part of a step. When To is the request's length, the
// step yields its next token.
type Item struct {
	Request  *Request
	From, To int
	samples  bool
	output   int // where its token goes
}

// Samples says whether the item yields a token.
func (i Item) Samples() bool { return i.samples }

// Stats counts what the scheduler did since its start.
type Stats struct {
	PrefillSteps, DecodeSteps, Retractions, Chunked uint64
	PromptTokens, CachedTokens, HostTokens          uint64
	kv.TreeStats
}

// Scheduler holds waiting and running requests and their memory.
type Scheduler struct {
	config  Config
	pages   *kv.Pages
	loads   []kv.Copy // of the step at hand
	tree    *kv.Tree
	waiting []*Request // by arrival
	running []*Request // by admission
	reserve []*Request // have pages that somebody else fills
	kept    []*Request // ended, but somebody else uses their pages
	leaving []*Request // removed, but a launched step still uses their pages
	flying  int        // steps that were launched and aren't done
	inRow   int        // decode steps since new requests were let in
	arrived uint64
	stats   Stats
}

// New makes an idle scheduler.
func New(c Config) *Scheduler {
	pages := kv.NewPages(c.Pages)
	pages.Lenient = c.Faults.Has(fault.PageShare)
	var host *kv.Pages
	if c.HostPages > 0 {
		host = kv.NewPages(c.HostPages)
	}
	tree := kv.NewTree(pages, host, c.PageSize)
	tree.Policy, tree.Parts = c.WritePolicy, c.Parts
	return &Scheduler{config: c, pages: pages, tree: tree}
}

// Stats returns the counts so far.
func (s *Scheduler) Stats() Stats {
	s.stats.TreeStats = s.tree.Stats()
	return s.stats
}

// Waiting and Running count requests.
func (s *Scheduler) Waiting() int { return len(s.waiting) }

// Running counts the requests that have pages.
func (s *Scheduler) Running() int { return len(s.running) }

// Reserved counts the requests that Reserve gave pages and Start didn't.
func (s *Scheduler) Reserved() int { return len(s.reserve) }

// FreePages counts pages that nobody uses, CachedPages those in the tree.
func (s *Scheduler) FreePages() int { return s.pages.Free() }

// CachedPages counts the pages of known prefixes.
func (s *Scheduler) CachedPages() int { return s.tree.Size() }

// HostPages counts the pages of known prefixes on the host.
func (s *Scheduler) HostPages() int { return s.tree.HostSize() }

// Capacity is the number of tokens that one request can hold at most.
func (s *Scheduler) Capacity() int { return s.pages.Total() * s.config.PageSize }

// Add queues a request. One that could never run, however empty the pool, is
// an error.
func (s *Scheduler) Add(r *Request) error {
	if need := len(r.Prompt) + r.MaxTokens; need > s.Capacity() {
		return fmt.Errorf("the request may need %d tokens of cache and the pool holds %d", need, s.Capacity())
	}
	s.arrived++
	r.order, r.CachedTokens = s.arrived, -1
	s.waiting = append(s.waiting, r)
	return nil
}

// Reserve gives a request pages for its prompt, which somebody else computes;
// false when there aren't enough, or when others wait for theirs.
func (s *Scheduler) Reserve(r *Request) bool {
	others := len(s.running) + len(s.reserve)
	if len(s.waiting) > 0 || others >= s.config.MaxRunning || !s.grow(r, len(r.Prompt), others) {
		return false
	}
	s.arrived++
	r.order = s.arrived
	s.reserve = append(s.reserve, r)
	return true
}

// Start says that a reserved request's prompt has been computed, and what its
// first token is: it runs.
func (s *Scheduler) Start(r *Request, first int32) {
	s.reserve = slices.DeleteFunc(s.reserve, func(o *Request) bool { return o == r })
	s.running = append(s.running, r)
	r.computed = len(r.Prompt)
	r.Output = append(r.Output, first)
}

// Remove ends a request wherever it is: finished, cancelled or failed. What it
// has computed stays known as a prefix. Its pages are free when the last step
// that it is in is done.
func (s *Scheduler) Remove(r *Request) {
	if !s.take(r) {
		return
	}
	if r.leaving = r.launched > 0; r.leaving {
		s.leaving = append(s.leaving, r)
		return
	}
	s.release(r)
}

// Keep ends a request as Remove does, but somebody else still uses its pages:
// Remove it when they don't.
func (s *Scheduler) Keep(r *Request) {
	if s.take(r) {
		s.kept = append(s.kept, r)
	}
}

// take takes a request out of whichever list has it; true if it has pages.
func (s *Scheduler) take(r *Request) bool {
	if i := slices.Index(s.waiting, r); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
		return false
	}
	for _, list := range []*[]*Request{&s.running, &s.reserve, &s.kept} {
		if i := slices.Index(*list, r); i >= 0 {
			*list = slices.Delete(*list, i, i+1)
			return true
		}
	}
	return false
}

// Flush forgets all prefixes that nobody is using.
func (s *Scheduler) Flush() { s.tree.Flush() }

// Schedule chooses the next step; nil when there is nothing to do, or nothing
// before a launched step is done. Prefill comes first: a new request's first
// token is worth more than a running one's next, unless the configuration has
// it wait until some decode steps are done. Before the next call comes
// Launch, or Done with the step's results.
func (s *Scheduler) Schedule() *Step {
	var step *Step
	if s.inRow == 0 || s.inRow >= s.config.DecodeSteps || len(s.running) == 0 {
		step, s.inRow = s.prefill(), 0
	}
	if step == nil {
		step = s.decode()
	}
	if step == nil && len(s.waiting) > 0 && s.flying == 0 { // every runner was retracted
		step = s.prefill()
	}
	switch {
	case step == nil:
		return nil
	case step.Prefill:
		s.stats.PrefillSteps++
		s.inRow = 0
	default:
		s.stats.DecodeSteps++
		s.inRow++
		step.InRow = s.inRow
	}
	step.Backups, step.Loads = s.tree.TakeBackups(), s.loads
	s.loads = nil
	return step
}

// prefill fills a step with parts of prompts: of running requests that were
// cut by an earlier step's limit, then of waiting ones in their order.
func (s *Scheduler) prefill() *Step {
	room := s.config.ChunkTokens
	step := &Step{Prefill: true}
	add := func(r *Request) {
		to := min(r.Len(), r.computed+room)
		if to < r.Len() {
			s.stats.Chunked++
		}
		step.Items = append(step.Items, Item{Request: r, From: r.computed, To: to, samples: to == r.Len()})
		room -= to - r.computed
	}
	for _, r := range s.running {
		// The last token of a prompt that is decoded is decode's first.
		if room > 0 && (r.computed < r.Len()-1 || r.PrefillOnly && len(r.Output) == 0) {
			add(r)
		}
	}
	for room > 0 && len(s.waiting) > 0 && len(s.running)+len(s.reserve) < s.config.MaxRunning {
		r := s.waiting[0]
		if !s.admit(r) {
			break // later ones must not overtake it for ever
		}
		s.waiting = s.waiting[1:]
		s.running = append(s.running, r)
		add(r)
	}
	if len(step.Items) == 0 {
		return nil
	}
	return step
}

// admit gives a request the pages for all its tokens, and keeps one in hand
// for each runner's next: admitting what must be retracted at once gains
// nothing. The first one is always let in if it fits.
func (s *Scheduler) admit(r *Request) bool {
	// The last token is computed even if its page is known: it yields the next.
	var known kv.Prefix
	if !s.config.NoRadix {
		known = s.tree.Match(r.tokens(r.Len() - 1))
	}
	r.table = known.Device
	if !s.grow(r, r.Len(), len(s.running)+len(s.reserve)) {
		s.tree.Release(known)
		r.table = nil
		return false
	}
	s.loads = append(s.loads, s.tree.Load(known, r.table[len(known.Device):])...)
	r.computed = s.tree.Tokens(known)
	if r.CachedTokens < 0 {
		r.CachedTokens = r.computed
		r.HostTokens = r.computed - len(known.Device)*s.config.PageSize
		s.stats.PromptTokens += uint64(len(r.Prompt))
		s.stats.CachedTokens += uint64(r.CachedTokens)
		s.stats.HostTokens += uint64(r.HostTokens)
	}
	return true
}

// grow gives a request pages for n tokens, evicting known prefixes if it
// must, and leaves reserve pages that could still be had. It does nothing if
// that can't be done.
func (s *Scheduler) grow(r *Request, n, reserve int) bool {
	want := (n+s.config.PageSize-1)/s.config.PageSize - len(r.table)
	if want <= 0 {
		return true
	}
	short := want - s.pages.Free()
	if short+reserve > 0 && short+reserve > s.tree.Evictable() {
		return false
	}
	if short > 0 {
		s.tree.Evict(short)
	}
	pages := s.pages.Alloc(want)
	r.table = append(r.table, pages...)
	return len(pages) == want // it isn't where page-share has made the books wrong
}

// decode takes every running request one token further; where memory is
// short, the latest ones are retracted, though not while a launched step may
// be using their pages.
func (s *Scheduler) decode() *Step {
	if n := s.config.RetractEvery; n > 0 && len(s.decoding()) > 1 && s.stats.DecodeSteps%uint64(n) == uint64(n)-1 {
		if s.flying > 0 {
			return nil
		}
		s.retract(s.latest())
	}
	for !s.growAll() {
		if s.flying > 0 {
			return nil
		}
		s.retract(s.latest())
	}
	step := &Step{}
	for _, r := range s.decoding() {
		step.Items = append(step.Items, Item{Request: r, From: r.Len() - 1, To: r.Len(), samples: true})
	}
	if len(step.Items) == 0 {
		return nil
	}
	return step
}

// growAll gives every decoding request the pages for its next token, false if
// there aren't enough.
func (s *Scheduler) growAll() bool {
	for _, r := range s.decoding() {
		if !s.grow(r, r.Len(), 0) {
			return false
		}
	}
	return true
}

// decoding are the running requests that are decoded.
func (s *Scheduler) decoding() []*Request {
	all := make([]*Request, 0, len(s.running))
	for _, r := range s.running {
		if !r.PrefillOnly {
			all = append(all, r)
		}
	}
	return all
}

// latest is the decoding request that arrived last.
func (s *Scheduler) latest() *Request {
	return slices.MaxFunc(s.decoding(), func(a, b *Request) int { return cmp.Compare(a.order, b.order) })
}

// retract takes a running request's memory and makes it wait again, in its
// old place. It keeps its output and computes its cache entries anew.
func (s *Scheduler) retract(r *Request) {
	s.running = slices.Delete(s.running, slices.Index(s.running, r), slices.Index(s.running, r)+1)
	s.release(r)
	r.Retractions++
	s.stats.Retractions++
	at, _ := slices.BinarySearchFunc(s.waiting, r, func(a, b *Request) int { return cmp.Compare(a.order, b.order) })
	s.waiting = slices.Insert(s.waiting, at, r)
}

// release gives a request's pages back; the tree keeps the whole ones.
func (s *Scheduler) release(r *Request) {
	s.remember(r)
	s.pages.Release(r.table...)
	if s.config.Faults.On(fault.PageShare, s.config.Env) {
		s.releaseShared(r.table)
	}
	r.table, r.computed = nil, 0
}

// releaseShared is the fault page-share: the last page of a table that others
// use too is given back once more.
func (s *Scheduler) releaseShared(table []int32) {
	for _, page := range slices.Backward(table) {
		if s.pages.Users(page) > 0 {
			s.pages.Release(page)
			return
		}
	}
}

func (s *Scheduler) remember(r *Request) {
	if !s.config.NoRadix {
		s.tree.Insert(r.tokens(r.computed), r.table)
	}
}

// share makes the tree know a request's first n tokens, so that others with
// the same prefix may use them at once. Where the tree has them in other pages
// it keeps those, and the request its own, which a launched step may be using;
// remember joins them at the request's end.
func (s *Scheduler) share(r *Request, n int) {
	if s.config.NoRadix {
		return
	}
	known := s.tree.Match(r.tokens(n))
	s.tree.Release(known)
	if slices.Equal(known.Device, r.table[:len(known.Device)]) {
		s.tree.Insert(r.tokens(n), r.table)
	}
}

// Launch says that a step is on its way: what is scheduled from now on comes
// after it, and counts on its cache entries. The tokens that it yields are
// Pending until it is Done.
func (s *Scheduler) Launch(step *Step) {
	step.launched = true
	s.flying++
	for i := range step.Items {
		item := &step.Items[i]
		r := item.Request
		r.launched++
		r.computed = item.To
		if item.samples {
			item.output = len(r.Output)
			r.Output = append(r.Output, Pending)
		}
	}
}

// Done takes a step's results: the cache entries exist, and sampled has a
// token for each item that yields one, in their order. Steps are done in the
// order of their launch; one that was not launched, is.
func (s *Scheduler) Done(step *Step, sampled []int32) {
	if !step.launched {
		s.Launch(step)
	}
	s.tree.Loaded(step.Loads)
	for _, item := range step.Items {
		if item.samples {
			item.Request.Output[item.output] = sampled[0]
			sampled = sampled[1:]
		}
		if step.Prefill && len(item.Request.table) > 0 {
			s.share(item.Request, item.To)
		}
	}
	s.land(step)
}

// Fail says that a launched step's cache entries can't be trusted and that
// there are no tokens. Its requests can only be removed.
func (s *Scheduler) Fail(step *Step) {
	s.tree.Loaded(step.Loads)
	for _, item := range step.Items {
		item.Request.computed = min(item.Request.computed, item.From)
	}
	s.land(step)
}

// land lets those go who waited for a step's end.
func (s *Scheduler) land(step *Step) {
	s.flying--
	for _, item := range step.Items {
		r := item.Request
		r.launched--
		if r.leaving && r.launched == 0 {
			s.leaving = slices.DeleteFunc(s.leaving, func(o *Request) bool { return o == r })
			r.leaving = false
			s.release(r)
		}
	}
}

// Check says what is wrong with the books.
func (s *Scheduler) Check() error {
	tables := [][]int32{s.tree.Pages()}
	for _, r := range s.leaving {
		tables = append(tables, r.table)
		if r.launched == 0 {
			return fmt.Errorf("request %d has left and nothing uses its pages", r.ID)
		}
	}
	for _, r := range s.kept {
		tables = append(tables, r.table)
	}
	for _, r := range s.reserve {
		tables = append(tables, r.table)
		if r.computed > 0 || r.launched > 0 {
			return fmt.Errorf("request %d has %d tokens computed, and its pages are for somebody else to fill", r.ID, r.computed)
		}
	}
	for _, r := range s.running {
		tables = append(tables, r.table)
		switch have := len(r.table) * s.config.PageSize; {
		case r.computed > have:
			return fmt.Errorf("request %d has computed %d tokens in pages for %d", r.ID, r.computed, have)
		case r.computed >= r.Len() && len(r.Output) < r.MaxTokens:
			return fmt.Errorf("request %d has computed %d of %d tokens, and the last yields the next", r.ID, r.computed, r.Len())
		}
	}
	for i, r := range s.waiting {
		switch {
		case len(r.table) > 0 || r.computed > 0 || r.launched > 0:
			return fmt.Errorf("request %d is waiting, has %d pages and is in %d launched steps", r.ID, len(r.table), r.launched)
		case i > 0 && s.waiting[i-1].order > r.order:
			return fmt.Errorf("request %d waits behind a later one", r.ID)
		}
	}
	if len(s.running) > s.config.MaxRunning {
		return fmt.Errorf("%d requests are running, at most %d may", len(s.running), s.config.MaxRunning)
	}
	if err := s.tree.Check(); err != nil {
		return err
	}
	return s.pages.Check(tables...)
}

package experiment

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/stats"
	"github.com/culprit-project/culprit/target"
)

// CompareFile is what a comparison has come to, in its directory, which has two
// run directories a block.
const CompareFile = "compare.json"

// Side is one of two servers that are compared: an arm of a case, or a server
// that runs already.
type Side struct {
	Case *Case // of a server that runs already, an empty one with its URL: see [ServerCase]
	Arm  design.Arm
	Plan Plan // of a server that runs already
}

// ServerCase is a case of a server that runs already and of which nothing is
// varied.
func ServerCase(base string) *Case { return &Case{BaseURL: base} }

// CompareOptions is what a comparison takes.
type CompareOptions struct {
	Dir           string // made by Compare; must not hold anything but what Resume goes on with
	A, B          Side
	Conversations int     // of a block, at each server; at least as many as are played at once
	Ratio         float64 // better is less than so many times as often; 0 is 1
	Difference    float64 // of the rates, that doesn't matter; 0 is 0.01
	Error         float64 // of what is said at the end; 0 is DefaultError
	Pairs         int     // to give up after; 0 is no limit
	Interleave    bool    // one server at a time
	Seed          uint64  // of the order, where it is one at a time
	Resume        bool    // go on from the blocks that are in Dir
	Tool          string
	Launcher      *target.Launcher
	Header        http.Header
	Crew          func() (Crew, error)    // plays the blocks elsewhere, several at once; nil plays them here. Called once
	Step          func(Block, Comparison) // after each block
	Load          func(side int, p Progress)
	Logger        *slog.Logger
}

// Ordering is what a comparison says of B.
type Ordering string

// The outcomes of a comparison.
const (
	Better       Ordering = "better"        // B fails less often
	Worse        Ordering = "worse"         // B fails more often
	NoDifference Ordering = "no-difference" // none that matters
	Unordered    Ordering = "undecided"
)

// Block is one load on both servers.
type Block struct {
	Number int              `json:"number"`
	Dirs   [2]string        `json:"dirs"` // A's and B's run directory
	First  int              `json:"first,omitempty"`
	Pairs  stats.PairCounts `json:"pairs"`
	Note   string           `json:"note,omitempty"` // why it doesn't count; empty where it does
	Worker string           `json:"worker,omitempty"`
}

// Comparison is what the blocks up to now come to. It is compare.json.
type Comparison struct {
	Of         string           `json:"of"` // a hash of both servers and what they are sent
	Ordering   Ordering         `json:"ordering"`
	Why        string           `json:"why,omitempty"` // nothing was decided
	Error      float64          `json:"error"`
	Ratio      float64          `json:"ratio"`
	Difference float64          `json:"difference"`
	Pairs      stats.PairCounts `json:"pairs"`
	// Evidence is how many times likelier what was seen is when the claim is
	// true than when it isn't, at most Enough of which is chance's.
	Evidence struct {
		Better       float64 `json:"better"`
		Worse        float64 `json:"worse"`
		NoDifference float64 `json:"no_difference"`
	} `json:"evidence"`
	Enough float64 `json:"enough"` // evidence that decides
	// OddsRatio holds the odds of B's failures in proportion to A's, 95%, at all
	// times; there is none before a pair in which one alone failed, and where
	// there is no upper end it is 100000.
	OddsRatio *[2]float64 `json:"odds_ratio,omitempty"`
	Counted   int         `json:"counted"`  // blocks that count
	Launches  bool        `json:"launches"` // each of them was a launch of each server
	Blocks    []Block     `json:"blocks"`
}

// DefaultDifference of rates doesn't matter.
const DefaultDifference = 0.01

// Defaults fills in what zero values mean.
func (o *CompareOptions) Defaults() {
	if o.Ratio == 0 {
		o.Ratio = 1
	}
	if o.Difference == 0 {
		o.Difference = DefaultDifference
	}
	if o.Error == 0 {
		o.Error = DefaultError
	}
}

// Alpha is the error of each single claim: two of them could be wrong.
func (o *CompareOptions) Alpha() float64 { return o.Error / 2 }

// launches reports whether servers are started for it.
func (s *Side) launches() bool { return len(s.Case.processes) > 0 }

// Dispersion is how much what the blocks show may differ: by launch, or by what
// happens between the two halves of one.
func (o *CompareOptions) Dispersion() stats.Dispersion {
	if o.A.launches() || o.B.launches() || o.Interleave {
		return stats.SharesDispersed()
	}
	return stats.Independent()
}

// Foretold is how many pairs it takes to see that B is better, when B never
// fails and A does so at a rate.
func (o *CompareOptions) Foretold(rate float64, rounds int) int {
	launch := 0
	if len(o.Dispersion().CV) > 1 {
		launch = o.Conversations * rounds
	}
	return stats.PairsNeeded(rate, o.Ratio, o.Alpha(), rounds, launch, o.Dispersion())
}

// ForetoldNone is how many pairs it takes to see that there is no difference
// that matters, when neither fails.
func (o *CompareOptions) ForetoldNone() int { return stats.PairsWithout(o.Difference, o.Alpha()) }

// Compare puts two servers under the same load until it is told which of them
// fails more often, or that there is no difference that matters. When ctx ends
// it says what it has come to.
func Compare(ctx context.Context, o CompareOptions) (Comparison, error) {
	o.Defaults()
	c := comparison{CompareOptions: o, paired: stats.NewPaired(o.Ratio, o.Difference, o.Dispersion())}
	of, err := o.fingerprint()
	if err != nil {
		return Comparison{}, err
	}
	c.result = Comparison{Of: of, Ordering: Unordered, Error: o.Error, Ratio: o.Ratio, Difference: o.Difference, Enough: 1 / o.Alpha(), Launches: o.A.launches() && o.B.launches()}
	if err := c.begin(); err != nil {
		return c.result, err
	}
	if o.Crew != nil {
		err := c.together(ctx)
		if ctx.Err() != nil {
			c.result.Why, err = context.Cause(ctx).Error(), nil
		}
		return c.result, errors.Join(err, c.write())
	}
	defer c.ready()()
	for c.undecided() {
		b, err := c.block(ctx, len(c.result.Blocks)+1)
		switch {
		case ctx.Err() != nil:
			c.result.Why = context.Cause(ctx).Error()
		case err != nil:
			return c.result, err
		default:
			c.count(b)
		}
		if err := c.write(); err != nil {
			return c.result, err
		}
		if err == nil && o.Step != nil {
			o.Step(c.result.Blocks[len(c.result.Blocks)-1], c.result)
		}
	}
	return c.result, nil
}

// ready prepares both sides; stop ends what runs of them.
func (c *comparison) ready() (stop func()) {
	for i, s := range []*Side{&c.A, &c.B} {
		h := &hunt{HuntOptions: HuntOptions{Dir: c.Dir, Case: s.Case, Tool: c.Tool, Launcher: c.Launcher, Header: c.Header, Logger: c.Logger}}
		if c.Load != nil {
			h.Load = func(p Progress) { c.Load(i, p) }
		}
		c.sides[i] = h
	}
	return func() {
		for _, h := range c.sides {
			h.stop()
		}
	}
}

// fingerprint tells apart comparisons whose blocks can't be added up.
func (o *CompareOptions) fingerprint() (string, error) {
	h := sha256.New()
	fmt.Fprintln(h, o.Conversations, o.Interleave, o.Seed)
	for _, s := range []*Side{&o.A, &o.B} {
		arm := &Rendered{Plan: s.Plan}
		if s.Arm != nil {
			var err error
			if arm, err = s.Case.Render(s.Arm); err != nil {
				return "", err
			}
		}
		plan := arm.Plan
		plan.Tool = ""
		if err := json.NewEncoder(h).Encode([]any{arm.Processes, plan}); err != nil {
			return "", fmt.Errorf("compare: %w", err)
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:16]), nil
}

// begin makes the directory, or takes in the blocks that are in it.
func (c *comparison) begin() error {
	if !c.Resume {
		return makeDir(c.Dir)
	}
	path := filepath.Join(c.Dir, CompareFile)
	b, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("resume: %w", err)
	}
	before := c.result
	if err == nil {
		if err := json.Unmarshal(b, &before); err != nil {
			return fmt.Errorf("resume: read %s: %w", path, err)
		}
	}
	switch r := c.result; {
	case before.Of != r.Of:
		return fmt.Errorf("resume %s: its blocks are of other servers or were sent something else; compare in another directory", c.Dir)
	case before.Error != r.Error || before.Ratio != r.Ratio || before.Difference != r.Difference:
		return fmt.Errorf("resume %s: it asks with --error %g --ratio %g --difference %g, and that can't be changed once there is evidence", c.Dir, before.Error, before.Ratio, before.Difference)
	}
	blocks := before.Blocks
	for len(blocks) > 0 && blocks[len(blocks)-1].Note != "" {
		blocks = blocks[:len(blocks)-1] // what kept them from counting may be gone
	}
	for _, b := range blocks {
		if err := c.again(b); err != nil {
			return fmt.Errorf("resume: block %d: %w", b.Number, err)
		}
	}
	return c.setAside(len(blocks))
}

// again takes in a block that was played before.
func (c *comparison) again(b Block) error {
	block := played{Block: b}
	if b.Note == "" {
		var results [2]outcomes
		for side := range results {
			results[side] = outcomes{ops: map[int][]oracle.OpResult{}}
			if _, err := judge(filepath.Join(c.Dir, b.Dirs[side]), results[side].add); err != nil {
				return err
			}
		}
		block.conversations = pairs(results[0].ops, results[1].ops)
	}
	c.count(block)
	if c.Step != nil {
		c.Step(c.result.Blocks[len(c.result.Blocks)-1], c.result)
	}
	return nil
}

// setAside moves the runs of later blocks away, so that they are played again.
func (c *comparison) setAside(blocks int) error {
	dirs, err := filepath.Glob(filepath.Join(c.Dir, "*-[ab]"))
	if err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	for _, dir := range dirs {
		number, side := 0, ""
		if _, err := fmt.Sscanf(filepath.Base(dir), "%d-%s", &number, &side); err != nil || number <= blocks {
			continue
		}
		if err := os.Rename(dir, fmt.Sprintf("%s.%d.partial", dir, time.Now().UnixMilli())); err != nil {
			return fmt.Errorf("resume: %w", err)
		}
	}
	return nil
}

func halfDir(number, side int) string { return fmt.Sprintf("%04d-%c", number, 'a'+side) }

// comparison is one in progress.
type comparison struct {
	CompareOptions
	sides  [2]*hunt
	paired *stats.Paired
	result Comparison
}

// voidLimit is how many blocks in a row may be worth nothing.
const voidLimit = 3

// played is a block with what became of each pair.
type played struct {
	Block
	conversations [][]stats.Pair
}

// block plays one.
func (c *comparison) block(ctx context.Context, number int) (played, error) {
	b := played{Block: Block{Number: number}}
	var results [2]outcomes
	var errs [2]error
	one := func(side int) {
		b.Dirs[side] = halfDir(number, side)
		results[side], errs[side] = c.half(ctx, side, number, b.Dirs[side])
	}
	if c.Interleave {
		b.First = c.first(number)
		for _, side := range []int{b.First, 1 - b.First} {
			if one(side); errs[side] != nil {
				return b, errs[side]
			}
			c.sides[side].stop() // there may be room for one alone
		}
	} else {
		var both sync.WaitGroup
		for side := range results {
			both.Go(func() { one(side) })
		}
		both.Wait()
	}
	if err := errors.Join(errs[0], errs[1]); err != nil {
		return b, err
	}
	for side, r := range results {
		if r.note != "" {
			b.Note = fmt.Sprintf("%c: %s", 'A'+side, r.note)
			return b, nil
		}
	}
	b.conversations = pairs(results[0].ops, results[1].ops)
	return b, nil
}

// first is which server a block begins with: by chance, and then the other way
// round, so that what changes steadily harms neither.
func (c *comparison) first(number int) int {
	const pairOfBlocks = 2
	r := rand.New(rand.NewPCG(c.Seed, uint64((number-1)/pairOfBlocks)))
	return (r.IntN(2) + (number-1)%pairOfBlocks) % 2
}

// outcomes are what became of the ops at one server, by session.
type outcomes struct {
	ops  map[int][]oracle.OpResult
	note string
}

func (o *outcomes) add(r oracle.OpResult) { o.ops[r.Session] = append(o.ops[r.Session], r) }

// half plays a block at one server.
func (c *comparison) half(ctx context.Context, side, number int, dir string) (outcomes, error) {
	s, h := []*Side{&c.A, &c.B}[side], c.sides[side]
	out := outcomes{ops: map[int][]oracle.OpResult{}}
	h.ops = out.add
	arm := &Rendered{Arm: s.Arm, Plan: s.Plan}
	if s.Arm != nil {
		var err error
		if arm, err = s.Case.Render(s.Arm); err != nil {
			return out, err
		}
	}
	dir = filepath.Join(c.Dir, dir)
	if s.launches() {
		if err := h.launch(ctx, arm, filepath.Join(dir, logsDir)); err != nil {
			return out, fmt.Errorf("%c: %w", 'A'+side, err)
		}
	}
	t := Trial{Proposal: search.Proposal{Arm: s.Arm, Requests: c.Conversations * arm.Plan.Workload.Rounds}, Observation: &search.Observation{Outcome: search.Ran}}
	if _, err := h.run(ctx, number, dir, arm, &t); err != nil {
		return out, fmt.Errorf("%c: %w", 'A'+side, err)
	}
	if o := t.Observation.Outcome; !o.Counts() {
		out.note = fmt.Sprintf("%s: %s", o, t.Note)
	}
	return out, nil
}

// pairs matches the ops of both servers, conversation by conversation.
func pairs(a, b map[int][]oracle.OpResult) [][]stats.Pair {
	var all [][]stats.Pair
	for session := range len(a) {
		byTurn := map[int]oracle.OpResult{}
		for _, op := range b[session] {
			byTurn[op.Turn] = op
		}
		var conversation []stats.Pair
		for _, op := range a[session] {
			if other, both := byTurn[op.Turn]; both && op.Judged && other.Judged {
				conversation = append(conversation, stats.Pair{A: op.Failed, B: other.Failed})
			}
		}
		all = append(all, conversation)
	}
	return all
}

// count takes a block in and says what all of them come to.
func (c *comparison) count(b played) {
	r := &c.result
	before := c.paired.Counts
	if b.Note == "" {
		if len(c.Dispersion().CV) > 1 {
			c.paired.Launch()
		}
		for _, conversation := range b.conversations {
			c.paired.Conversation(conversation...)
		}
		r.Counted++
	}
	r.Pairs = c.paired.Counts
	b.Pairs = stats.PairCounts{
		Both: r.Pairs.Both - before.Both, OnlyA: r.Pairs.OnlyA - before.OnlyA,
		OnlyB: r.Pairs.OnlyB - before.OnlyB, Neither: r.Pairs.Neither - before.Neither,
	}
	r.Blocks = append(r.Blocks, b.Block)
	better, worse, same := c.paired.LogBetter(), c.paired.LogWorse(), c.paired.LogNoDifference()
	r.Evidence.Better, r.Evidence.Worse, r.Evidence.NoDifference = shown(better), shown(worse), shown(same)
	if r.Pairs.OnlyA+r.Pairs.OnlyB > 0 {
		low, high := c.paired.OddsRatio(0.95)
		r.OddsRatio = &[2]float64{low, min(high, 1e5)}
	}
	enough := -math.Log(c.Alpha())
	switch {
	case better >= enough:
		r.Ordering = Better
	case worse >= enough:
		r.Ordering = Worse
	case same >= enough:
		r.Ordering = NoDifference
	case c.Pairs > 0 && r.Pairs.Pairs() >= c.Pairs:
		r.Why = fmt.Sprintf("the budget of %d pairs is used up", c.Pairs)
	case c.worthless():
		r.Why = fmt.Sprintf("%d blocks in a row were worth nothing", voidLimit)
	}
}

// worthless reports whether it goes on for nothing.
func (c *comparison) worthless() bool {
	blocks := c.result.Blocks
	if len(blocks) < voidLimit {
		return false
	}
	for _, b := range blocks[len(blocks)-voidLimit:] {
		if b.Note == "" && b.Pairs.Pairs() > 0 {
			return false
		}
	}
	return true
}

// shown is evidence as a number that JSON can hold.
func shown(log float64) float64 { return math.Exp(min(max(log, -600), 600)) }

func (c *comparison) write() error {
	if err := os.MkdirAll(c.Dir, 0o755); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	return WriteJSON(filepath.Join(c.Dir, CompareFile), c.result)
}

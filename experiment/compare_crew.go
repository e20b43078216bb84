package experiment

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/search"
)

// Against is the other side of a comparison's block. Whoever carries the order
// out plays both sides, so that no difference of machines is taken for one of the
// arms.
type Against struct {
	Arm        design.Arm `json:"arm"`
	Path       string     `json:"path"`
	Case       string     `json:"case"`
	Interleave bool       `json:"interleave,omitempty"`
	Seed       uint64     `json:"seed"`
}

// together has a crew play the blocks, several at once. They count in the order of
// their numbers, since how long one takes may depend on what it shows.
func (c *comparison) together(ctx context.Context) error {
	ahead := filepath.Join(c.Dir, AheadDir)
	if err := errors.Join(os.RemoveAll(ahead), os.MkdirAll(ahead, 0o755)); err != nil {
		return fmt.Errorf("compare: %w", err)
	}
	crew, err := c.Crew()
	if err != nil {
		return err
	}
	blocks := map[int]Block{} // that were played
	asked, came := len(c.result.Blocks), len(c.result.Blocks)
	for {
		for {
			b, there := blocks[len(c.result.Blocks)+1]
			if !there || !c.undecided() {
				break
			}
			if err := errors.Join(c.place(&b), c.again(b), c.write()); err != nil {
				return err
			}
		}
		if !c.undecided() {
			return os.RemoveAll(ahead)
		}
		for size := crew.Size(); asked-came < size && asked < len(c.result.Blocks)+2*size; {
			order, err := c.order(asked + 1)
			if err != nil {
				return err
			}
			if err := crew.Ask(ctx, order); err != nil {
				return err
			}
			asked++
		}
		d, err := crew.Next(ctx)
		if err != nil {
			return err
		}
		if _, twice := blocks[d.Number]; twice {
			if err := d.Kept(ctx); err != nil {
				return err
			}
			continue
		}
		if d.Error != "" {
			return fmt.Errorf("worker %s: %s", d.Worker, d.Error)
		}
		if err := d.fetch(ctx, c.aheadDir(d.Number), func(string) error { return nil }); err != nil {
			return err
		}
		b := Block{Number: d.Number, Worker: d.Worker, Note: d.Trial.Note}
		if c.Interleave {
			b.First = c.first(d.Number)
		}
		blocks[d.Number] = b
		came++
	}
}

func (c *comparison) undecided() bool { return c.result.Ordering == Unordered && c.result.Why == "" }

func (c *comparison) aheadDir(number int) string {
	return filepath.Join(c.Dir, AheadDir, fmt.Sprintf("%04d", number))
}

// place moves the run directories of a block to where they belong.
func (c *comparison) place(b *Block) error {
	for side := range b.Dirs {
		b.Dirs[side] = halfDir(b.Number, side)
		err := os.Rename(filepath.Join(c.aheadDir(b.Number), b.Dirs[side]), filepath.Join(c.Dir, b.Dirs[side]))
		if err != nil && (b.Note == "" || !errors.Is(err, fs.ErrNotExist)) { // nothing may be there of one that doesn't count
			return fmt.Errorf("compare: %w", err)
		}
	}
	return nil
}

// order is a block, for somebody else to play.
func (c *comparison) order(number int) (Order, error) {
	o := Order{
		Number: number, Launch: number, Arm: c.A.Arm, Requests: c.Conversations, Path: c.A.Case.Path, Case: string(c.A.Case.document),
		Headers: slices.Sorted(maps.Keys(c.Header)), Tool: c.Tool,
		Against: &Against{Arm: c.B.Arm, Path: c.B.Case.Path, Case: string(c.B.Case.document), Interleave: c.Interleave, Seed: c.Seed},
	}
	for _, s := range []*Side{&c.A, &c.B} {
		arm, err := s.Case.Render(s.Arm)
		if err != nil {
			return o, err
		}
		o.Needs = append(o.Needs, arm.Needs...)
	}
	slices.Sort(o.Needs)
	o.Needs = slices.Compact(o.Needs)
	return o, nil
}

// block plays a block in dir, in which each side has its run directory.
func (b *Bench) block(ctx context.Context, o Order, dir string) (*Trial, error) {
	b.hunt.stop()
	h := &b.hunt.HuntOptions
	c := comparison{CompareOptions: CompareOptions{
		Dir: dir, Conversations: o.Requests, Interleave: o.Against.Interleave, Seed: o.Against.Seed, Tool: o.Tool,
		Launcher: h.Launcher, Header: h.Header, Logger: h.Logger,
	}}
	var err error
	if c.A.Case, err = ParseCaseOf(o.Path, []byte(o.Case), b.slot); err != nil {
		return nil, err
	}
	if c.B.Case, err = ParseCaseOf(o.Against.Path, []byte(o.Against.Case), b.slot); err != nil {
		return nil, err
	}
	c.A.Arm, c.B.Arm = o.Arm, o.Against.Arm
	defer c.ready()()
	played, err := c.block(ctx, o.Number)
	if err != nil {
		return nil, err
	}
	return &Trial{Note: played.Note, Observation: &search.Observation{Outcome: search.Ran}}, nil
}

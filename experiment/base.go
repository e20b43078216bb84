package experiment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/target"
)

// BaseFile says what the model gets wrong by itself: in a hunt whose case asks
// for a control, the safe arm is played first, alone, in the run directory
// BaseDir.
const (
	BaseFile = "base.json"
	BaseDir  = "base"
)

// Base is what a model gets wrong by itself. Replies that are wrong in no other
// way don't count in the hunt: a fault is seen by what a sound server never
// shows, however often the model errs. Which ways those are is settled before
// the first trial, so that what the trials show has no say in it.
type Base struct {
	Replies int            `json:"replies"`
	Broken  int            `json:"broken"`
	Classes []oracle.Class `json:"classes"` // that it shows by itself
}

// learnBase plays the control in the safe arm, which runs.
func (h *hunt) learnBase(ctx context.Context, arm *Rendered, server *target.Server) error {
	plan, err := h.plan(ctx, 0, arm, server, arm.Plan.Control*arm.Plan.Workload.Rounds)
	if err != nil {
		return err
	}
	plan.Workload.Sessions, plan.Concurrency, plan.RequestRate = arm.Plan.Control, 1, 0
	dir := filepath.Join(h.Dir, BaseDir)
	if err := os.RemoveAll(dir); err != nil { // of a hunt that was killed in it
		return fmt.Errorf("base rate: %w", err)
	}
	v, err := Run(ctx, Options{Dir: dir, Plan: plan, Header: h.Header, Progress: h.Load, Logger: h.Logger})
	if err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	b := Base{Replies: v.Broken.Main.Trials, Broken: v.Broken.Main.Failures, Classes: []oracle.Class{}}
	for _, c := range v.Classes {
		if c.Means == oracle.Corrupt && c.Source == oracle.Model && c.Main.Failures > 0 {
			b.Classes = append(b.Classes, c.Class)
		}
	}
	h.base = &b
	return WriteJSON(filepath.Join(h.Dir, BaseFile), b)
}

// readBase reads what an earlier start learned, if it did.
func (h *hunt) readBase() error {
	path := filepath.Join(h.Dir, BaseFile)
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("resume: %w", err)
	}
	h.base = &Base{}
	if err := json.Unmarshal(text, h.base); err != nil {
		return fmt.Errorf("resume: read %s: %w", path, err)
	}
	return nil
}

// failures counts the replies that are broken in a way that the model doesn't
// show by itself. Without a base these are all that are broken.
func (b *Base) failures(v *oracle.Verdict) int {
	if b == nil {
		return v.Broken.Main.Failures
	}
	counted := map[int64]bool{}
	for _, c := range v.Classes {
		if c.Means != oracle.Corrupt || slices.Contains(b.Classes, c.Class) {
			continue
		}
		for _, op := range c.Ops {
			counted[op] = true
		}
	}
	n := 0
	for _, op := range v.Broken.Ops {
		if counted[op] {
			n++
		}
	}
	return n
}

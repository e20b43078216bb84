package experiment

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/search"
)

// ExperimentsDir has a run directory for each trial that a hypothesis asked
// for, beside those of the search in RunsDir.
const ExperimentsDir = "experiments"

// Asked is the phase of a trial that a hypothesis asked for.
const Asked search.Phase = "asked"

// RunArms launches and judges one arm after another, each on a fresh launch,
// until next has no more; next may look at the trials before it, which are on
// disk.
func RunArms(ctx context.Context, o HuntOptions, next func() (arm design.Arm, requests int, why string, more bool, err error)) error {
	h := &hunt{HuntOptions: o, space: o.Case.Space, fixed: design.Arm{}}
	defer h.stop()
	done, err := filepath.Glob(filepath.Join(o.Dir, ExperimentsDir, "*"))
	if err != nil {
		return err
	}
	for number := len(done) + 1; ; number++ {
		arm, requests, why, more, err := next()
		if err != nil || !more {
			return err
		}
		proposal := search.Proposal{Arm: arm, Requests: requests, Launch: true, Phase: Asked, Why: why}
		step := Step{Number: number, Trial: Trial{
			Dir:      filepath.Join(ExperimentsDir, fmt.Sprintf("%04d-%s", number, arm.Hash())),
			Space:    o.Case.Space.Fingerprint(),
			Proposal: proposal,
		}}
		if err := os.MkdirAll(filepath.Join(o.Dir, step.Trial.Dir), 0o755); err != nil {
			return fmt.Errorf("make run directory: %w", err)
		}
		h.show(step)
		// The seed of the workload goes by the number: no trial of the search
		// has these.
		if step.Verdict, err = h.trial(ctx, askedNumbers+number, &step.Trial); err != nil {
			return err
		}
		step.Ended = true
		h.show(step)
	}
}

const askedNumbers = 100_000

package app

import (
	"cmp"
	"fmt"
	"os"
	"time"

	"github.com/culprit-project/culprit/experiment"
)

// Sweep is what "vllm bench sweep serve" takes: a command line, and a file of
// parameters that are put into it.
type Sweep struct {
	Command string
	Params  string
	BaseURL string
	Ready   time.Duration // 0 is the launcher's
}

func (s *Sweep) read() (*experiment.Case, []experiment.NamedArm, error) {
	if s.Params == "" {
		return nil, nil, usage("--serve-cmd wants --serve-params, a JSON file of arms")
	}
	b, err := os.ReadFile(s.Params)
	if err != nil {
		return nil, nil, usage("read --serve-params: %w", err)
	}
	const vllm = "http://127.0.0.1:8000" // where vLLM listens
	c, arms, err := experiment.SweepCase(s.Command, b, cmp.Or(s.BaseURL, vllm))
	if err != nil {
		return nil, nil, &UsageError{err}
	}
	c.Path = fmt.Sprintf("--serve-params %s", s.Params)
	c.ReadyWithin(s.Ready)
	return c, arms, nil
}

package investigate

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/target"
)

// Command is an agent program: it reads the brief on standard input, and what it
// writes to standard output is its answer. It runs in an empty directory of its
// own.
type Command struct {
	Called string
	Args   []string
	Env    []string // its whole environment
}

// Name implements [Investigator].
func (c *Command) Name() string { return c.Called }

// endGrace is how long its output is waited for when it has been killed.
const endGrace = 2 * time.Second

// Investigate implements [Investigator].
func (c *Command) Investigate(ctx context.Context, brief string) ([]byte, error) {
	dir, err := os.MkdirTemp("", "culprit-investigator-")
	if err != nil {
		return nil, fmt.Errorf("start it: %w", err)
	}
	defer os.RemoveAll(dir) //nolint:errcheck // a temporary directory
	p := exec.CommandContext(ctx, c.Args[0], c.Args[1:]...)
	p.Dir, p.Env, p.Stdin, p.WaitDelay = dir, slices.Concat(c.Env, []string{"PWD=" + dir}), strings.NewReader(brief), endGrace
	ownGroup(p)
	out, complaints := &limited{limit: answerLimit}, &limited{limit: 4 << 10}
	p.Stdout, p.Stderr = out, complaints
	if err := p.Run(); err != nil {
		text := strings.TrimSpace(target.Redact(complaints.kept.String()))
		if i := strings.LastIndexByte(text, '\n'); i >= 0 {
			text = text[i+1:]
		}
		return out.kept.Bytes(), fmt.Errorf("%s: %w: %.200q", c.Args[0], err, text)
	}
	if out.dropped > 0 {
		return out.kept.Bytes(), fmt.Errorf("%s: it wrote more than %d bytes", c.Args[0], answerLimit)
	}
	return out.kept.Bytes(), nil
}

// limited keeps the first bytes, and takes in the rest, so that the program
// isn't stopped by a full pipe. The buffer isn't embedded: it would read from
// the pipe itself, without a limit.
type limited struct {
	kept           bytes.Buffer
	limit, dropped int
}

// Write implements [io.Writer].
func (l *limited) Write(b []byte) (int, error) {
	keep := min(len(b), l.limit-l.kept.Len())
	l.kept.Write(b[:keep])
	l.dropped += len(b) - keep
	return len(b), nil
}

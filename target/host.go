package target

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
)

// Host is a Linux machine that a server runs on, as attestation sees it: this
// one, or one behind ssh. Errors that say so match fs.ErrNotExist and
// fs.ErrPermission.
type Host interface {
	// ReadFile returns a whole file of at most fileLimit bytes.
	ReadFile(ctx context.Context, path string) ([]byte, error)
	Readlink(ctx context.Context, path string) (string, error)
	// Run runs a program to its end and returns its standard output, also
	// beside an error. It reads nothing and speaks the C locale.
	Run(ctx context.Context, command ...string) ([]byte, error)
}

// fileLimit bounds what is read of a file, and of a program's output.
const fileLimit = 64 << 20

// Local is this machine.
type Local struct{}

// ReadFile implements [Host].
func (Local) ReadFile(_ context.Context, path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := io.ReadAll(io.LimitReader(f, fileLimit+1))
	if err == nil && len(b) > fileLimit {
		err = fmt.Errorf("read %s: longer than %d bytes", path, fileLimit)
	}
	return b, err
}

// Readlink implements [Host].
func (Local) Readlink(_ context.Context, path string) (string, error) { return os.Readlink(path) }

// Run implements [Host].
func (Local) Run(ctx context.Context, command ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, command[0], command[1:]...)
	cmd.Env = append(cmd.Environ(), "LC_ALL=C")
	out, complaint := &limited{most: fileLimit}, &limited{most: 4 << 10}
	cmd.Stdout, cmd.Stderr = out, complaint
	if err := cmd.Run(); err != nil {
		return out.Bytes(), commandError(command, err, complaint.String())
	}
	if out.over {
		return nil, fmt.Errorf("run %s: it wrote more than %d bytes", command[0], fileLimit)
	}
	return out.Bytes(), nil
}

// commandError says what a program said when it failed.
func commandError(command []string, err error, complaint string) error {
	if line := lastLine(complaint); line != "" {
		return fmt.Errorf("run %s: %w: %s", command[0], complained(complaint, err), line)
	}
	return fmt.Errorf("run %s: %w", command[0], err)
}

// complained adds what programs say in words to an error.
func complained(complaint string, err error) error {
	switch {
	case strings.Contains(complaint, "No such file or directory"), strings.Contains(complaint, "not found"):
		return errors.Join(fs.ErrNotExist, err)
	case strings.Contains(complaint, "Permission denied"):
		return errors.Join(fs.ErrPermission, err)
	}
	return err
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return text[strings.LastIndexByte(text, '\n')+1:]
}

// limited keeps the first bytes of what is written and takes the rest.
type limited struct {
	bytes.Buffer
	most int
	over bool
}

func (l *limited) Write(b []byte) (int, error) {
	keep := b
	if room := l.most - l.Len(); len(b) > room {
		keep, l.over = b[:room], true
	}
	l.Buffer.Write(keep) // never fails
	return len(b), nil
}

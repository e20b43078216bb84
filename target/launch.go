package target

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"
)

// Process is one program of a server: a server may be a prefill, a decode and
// a router.
type Process struct {
	Name    string
	Command []string
	Env     map[string]string // beside our own environment
	Dir     string            // empty is ours
}

// Ready says when a launched server can be used.
type Ready struct {
	URL     string         // answers 200; empty for none
	Log     *regexp.Regexp // a line of some process's log; nil for none
	Timeout time.Duration  // 0 is DefaultReadyTimeout
}

// What zero fields mean.
const (
	DefaultReadyTimeout = 10 * time.Minute
	DefaultGrace        = 15 * time.Second
)

// Launcher starts servers on this machine.
type Launcher struct {
	// Supervisor is the command that runs Supervise on the arguments that
	// follow it, with its standard input as the hold.
	Supervisor []string
	Grace      time.Duration // between asking a server to end and killing it; Supervise is told the same
}

// Launched is a server that was started. Stop must be called.
type Launched struct {
	LogDir    string
	processes []*running
	ended     chan struct{} // closed when the first process has ended
	once      sync.Once
	grace     time.Duration
}

type running struct {
	Process
	cmd  *exec.Cmd
	hold io.WriteCloser
	log  string
	done chan struct{}
	err  error // after done
}

// LaunchError says why a server didn't come up: which process, and the last
// lines that it wrote.
type LaunchError struct {
	Process string
	Reason  string
	LogFile string
	Tail    string
}

func (e *LaunchError) Error() string {
	text := fmt.Sprintf("launch %s: %s", e.Process, e.Reason)
	if e.Tail != "" {
		text += fmt.Sprintf("; its log %s ends with:\n%s", e.LogFile, e.Tail)
	} else {
		text += fmt.Sprintf("; its log %s is empty", e.LogFile)
	}
	return text
}

// tailLines of a log are shown when a launch fails.
const tailLines = 15

// pollEvery is how often a server that is starting is asked.
const pollEvery = 100 * time.Millisecond

// Launch starts the processes in order and waits until the server is ready.
// Their output goes to NAME.log in logDir. When it fails, nothing is left
// running.
func (l *Launcher) Launch(ctx context.Context, processes []Process, ready Ready, logDir string) (*Launched, error) {
	if err := nobodyThere(ctx, ready.URL); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(logDir, 0o755); err != nil {
		return nil, fmt.Errorf("launch: %w", err)
	}
	s := &Launched{LogDir: logDir, ended: make(chan struct{}), grace: l.Grace}
	if s.grace == 0 {
		s.grace = DefaultGrace
	}
	for _, p := range processes {
		r, err := l.start(p, logDir)
		if err != nil {
			return nil, errors.Join(err, s.Stop())
		}
		s.processes = append(s.processes, r)
		go func() {
			<-r.done
			s.once.Do(func() { close(s.ended) })
		}()
	}
	if err := s.await(ctx, ready); err != nil {
		return nil, errors.Join(err, s.Stop())
	}
	return s, nil
}

// nobodyThere makes sure that what will answer is the server that we start.
func nobodyThere(ctx context.Context, address string) error {
	u, err := url.Parse(address)
	if address == "" || err != nil {
		return err
	}
	conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", u.Host)
	if err != nil {
		return nil
	}
	conn.Close()
	return fmt.Errorf("launch: something listens at %s already; stop it, or choose another port", u.Host)
}

func (l *Launcher) start(p Process, logDir string) (*running, error) {
	if len(p.Command) == 0 {
		return nil, fmt.Errorf("launch %s: no command", p.Name)
	}
	r := &running{Process: p, log: filepath.Join(logDir, p.Name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(r.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, fmt.Errorf("launch %s: %w", p.Name, err)
	}
	defer log.Close() // the child has its own
	args := slices.Concat(l.Supervisor, p.Command)
	r.cmd = exec.Command(args[0], args[1:]...) //nolint:noctx // Stop ends it, gently; a context would kill the supervisor
	r.cmd.Dir, r.cmd.Stdout, r.cmd.Stderr = p.Dir, log, log
	r.cmd.Env = r.cmd.Environ()
	for name, value := range p.Env {
		r.cmd.Env = append(r.cmd.Env, name+"="+value)
	}
	if r.hold, err = r.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("launch %s: %w", p.Name, err)
	}
	if err := r.cmd.Start(); err != nil {
		return nil, fmt.Errorf("launch %s: %w", p.Name, err)
	}
	go func() {
		r.err = r.cmd.Wait()
		close(r.done)
	}()
	return r, nil
}

// await waits until the server is ready, a process has ended, or it takes too
// long.
func (s *Launched) await(ctx context.Context, ready Ready) error {
	timeout := ready.Timeout
	if timeout == 0 {
		timeout = DefaultReadyTimeout
	}
	ctx, cancel := context.WithTimeoutCause(ctx, timeout, fmt.Errorf("not ready after %s", timeout))
	defer cancel()
	poll := time.NewTicker(pollEvery)
	defer poll.Stop()
	for {
		select {
		case <-s.ended:
			return s.died()
		case <-ctx.Done():
			last := s.processes[len(s.processes)-1]
			return last.failed(context.Cause(ctx).Error())
		case <-poll.C:
			if s.logged(ready.Log) && answers(ctx, ready.URL) {
				return nil
			}
		}
	}
}

func (s *Launched) logged(line *regexp.Regexp) bool {
	if line == nil {
		return true
	}
	for _, r := range s.processes {
		if b, err := os.ReadFile(r.log); err == nil && line.Match(b) {
			return true
		}
	}
	return false
}

func answers(ctx context.Context, address string) bool {
	if address == "" {
		return true
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, http.NoBody)
	if err != nil {
		return false
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return false
	}
	resp.Body.Close()
	return resp.StatusCode == http.StatusOK
}

// Ended is closed when a process has ended, whoever ended it.
func (s *Launched) Ended() <-chan struct{} { return s.ended }

// died says which process ended, and how; nil while all run.
func (s *Launched) died() error {
	for _, r := range s.processes {
		select {
		case <-r.done:
			how := "ended with exit code 0"
			if r.err != nil {
				how = "ended: " + r.err.Error()
			}
			return r.failed(how)
		default:
		}
	}
	return nil
}

func (r *running) failed(reason string) error {
	return &LaunchError{Process: r.Name, Reason: reason, LogFile: r.log, Tail: tail(r.log)}
}

func tail(path string) string {
	const most = 64 << 10
	f, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer f.Close()
	if info, err := f.Stat(); err == nil && info.Size() > most {
		if _, err := f.Seek(-most, io.SeekEnd); err != nil {
			return ""
		}
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return ""
	}
	lines := strings.Split(string(bytes.TrimRight(b, "\n")), "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}

// PIDs are the living processes of the server, those that its processes
// started among them, by process name.
func (s *Launched) PIDs() map[string][]int {
	pids := map[string][]int{}
	for _, r := range s.processes {
		pids[r.Name] = Descendants(r.cmd.Process.Pid)
	}
	return pids
}

// Stop ends the server: the last process first, each asked and then killed.
// It is safe to call twice.
func (s *Launched) Stop() error {
	var errs []error
	for _, r := range slices.Backward(s.processes) {
		r.hold.Close() // already closed when the supervisor has ended
	}
	for _, r := range slices.Backward(s.processes) {
		select {
		case <-r.done:
		case <-time.After(s.grace + 10*time.Second):
			errs = append(errs, fmt.Errorf("stop %s: the supervisor, process %d, doesn't end", r.Name, r.cmd.Process.Pid))
		}
	}
	return errors.Join(errs...)
}

// LaunchVariable marks what a launch started, in its environment.
const LaunchVariable = "CULPRIT_LAUNCH"

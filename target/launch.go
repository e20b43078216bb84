package target

import (
	"bytes"
	"cmp"
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
	"strconv"
	"strings"
	"sync"
	"time"
)

// Process is one program of a server: a server may be a prefill, a decode and
// a router.
type Process struct {
	Name    string
	Command []string
	Env     map[string]string // beside our own environment, or that of a login on Host
	Unset   []string          // variables to be taken out of that environment
	Dir     string            // empty is ours, or a login's
	Host    string            // reached by ssh; empty is this machine
	URL     string            // its own, where it answers beside the server's; empty for none
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

// Detached is the command of a process that isn't ours to hold: start ends when
// the server has been started (docker run -d, kubectl apply, sbatch, a script),
// and stop ends it. follow, if there is one, runs as long as the server does
// (docker logs -f): its output is the log. stop must end within the launcher's
// Grace.
func Detached(start, stop, follow []string) []string {
	if len(follow) == 0 {
		follow = []string{"sh", "-c", "while :; do sleep 60; done"}
	}
	end := ":"
	if len(stop) > 0 {
		end = quoteAll(stop)
	}
	script := "end() {\n" + end + "\n}\n" +
		"trap 'trap \"\" TERM; end; exit' TERM\n" +
		quoteAll(start) + " || { code=$?; echo \"the start command failed with exit code $code\" >&2; end; exit $code; }\n" +
		quoteAll(follow) + " & wait $! 2>/dev/null\ncode=$?\ntrap '' TERM\nend\nexit $code\n"
	return []string{"sh", "-c", script}
}

// Launcher starts servers, on this machine and on others.
type Launcher struct {
	// Supervisor is the command that runs Supervise on the arguments that
	// follow it, with its standard input as the hold.
	Supervisor []string
	Grace      time.Duration // between asking a server to end and killing it; Supervise is told the same
	SSH        []string      // the command that reaches a Process's Host; empty is DefaultSSH
}

// Launched is a server that was started. Stop must be called.
type Launched struct {
	LogDir    string
	processes []*running
	ended     chan struct{} // closed when the first process has ended
	once      sync.Once
	grace     time.Duration
	hosts     map[string]*SSH
}

type running struct {
	Process
	remote
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
	Code    int // exit code of the process; 0 where it has none
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

// portWait is how long a port may still be taken by who knows whom.
const portWait = 3 * time.Second

// pollEvery is how often a server that is starting is asked.
const pollEvery = 100 * time.Millisecond

// Launch starts the processes in order and waits until the server is ready.
// Their output goes to NAME.log in logDir. When it fails, nothing is left
// running.
func (l *Launcher) Launch(ctx context.Context, processes []Process, ready Ready, logDir string) (*Launched, error) {
	if err := l.nobodyThere(ctx, ready.URL); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(logDir, 0o755); err != nil {
		return nil, machineError{fmt.Errorf("launch: %w", err)}
	}
	s := &Launched{LogDir: logDir, ended: make(chan struct{}), grace: cmp.Or(l.Grace, DefaultGrace), hosts: map[string]*SSH{}}
	for _, p := range processes {
		if p.Host != "" && s.hosts[p.Host] == nil {
			s.hosts[p.Host] = &SSH{Command: l.SSH, Host: p.Host}
		}
		r, err := s.start(l, p)
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

// nobodyThere makes sure that what will answer is the server that we start. A
// server of an earlier start of ours that was killed may still be ending: it
// has as long as it may take. Somebody else's is told of at once.
func (l *Launcher) nobodyThere(ctx context.Context, address string) error {
	u, err := url.Parse(address)
	if address == "" || err != nil {
		return err
	}
	began := time.Now()
	var who listening
	for ctx.Err() == nil {
		conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", u.Host)
		if err != nil {
			return nil
		}
		conn.Close()
		if !who.ours { // it may end while it is looked for
			who = listenerAt(ctx, u.Port())
		}
		wait := portWait
		switch {
		case who.ours:
			wait = cmp.Or(l.Grace, DefaultGrace) + portWait
		case who.pid != 0:
			wait = 0
		}
		if time.Since(began) >= wait {
			return machineError{fmt.Errorf("launch: something listens at %s already%s; stop it, or choose another port", u.Host, who)}
		}
		select {
		case <-ctx.Done():
		case <-time.After(pollEvery):
		}
	}
	return fmt.Errorf("launch: %w", context.Cause(ctx))
}

// listening is who listens at a port of this machine, as far as it can be seen.
type listening struct {
	pid     int // 0: it can't be told
	ours    bool
	command string
}

func (l listening) String() string {
	switch {
	case l.pid == 0:
		return ""
	case l.ours:
		return fmt.Sprintf(" (process %d, which culprit started: %s)", l.pid, l.command)
	}
	return fmt.Sprintf(" (process %d: %s)", l.pid, l.command)
}

func listenerAt(ctx context.Context, port string) listening {
	number, err := strconv.Atoi(port)
	if err != nil {
		return listening{}
	}
	pid, err := Listener(ctx, Local{}, number)
	if err != nil || pid == 0 {
		return listening{}
	}
	l := listening{pid: pid}
	if b, err := (Local{}).ReadFile(ctx, fmt.Sprintf("/proc/%d/environ", pid)); err == nil {
		l.ours = parseEnv(b)[LaunchVariable] != ""
	}
	if args, err := Args(ctx, Local{}, pid); err == nil {
		l.command = clip(strings.Join(redactArgs(args), " "))
	}
	return l
}

func (s *Launched) start(l *Launcher, p Process) (*running, error) {
	if len(p.Command) == 0 {
		return nil, fmt.Errorf("launch %s: no command", p.Name)
	}
	r := &running{Process: p, log: filepath.Join(s.LogDir, p.Name+".log"), done: make(chan struct{})}
	log, err := os.OpenFile(r.log, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, machineError{fmt.Errorf("launch %s: %w", p.Name, err)}
	}
	defer log.Close() // the child has its own
	args := slices.Concat(l.Supervisor, p.Command)
	if p.Host != "" {
		r.remote = supervised(p, s.grace)
		args = s.hosts[p.Host].command(r.bootstrap())
	}
	r.cmd = exec.Command(args[0], args[1:]...) //nolint:noctx // Stop ends it, gently; a context would kill the supervisor
	r.cmd.Stdout, r.cmd.Stderr = log, log
	if p.Host == "" {
		r.cmd.Dir = p.Dir
		r.cmd.Env = p.environ(r.cmd.Environ())
	}
	if r.hold, err = r.cmd.StdinPipe(); err != nil {
		return nil, machineError{fmt.Errorf("launch %s: %w", p.Name, err)}
	}
	if err := r.cmd.Start(); err != nil {
		return nil, machineError{fmt.Errorf("launch %s: %w", p.Name, err)}
	}
	go func() {
		r.err = r.cmd.Wait()
		close(r.done)
	}()
	if p.Host != "" {
		if _, err := io.WriteString(r.hold, r.script); err != nil {
			r.hold.Close()
			<-r.done
			return nil, r.failed("ssh " + p.Host + " ended before it could be told what to start")
		}
		go beat(r.hold, r.done)
	}
	return r, nil
}

// environ is a process's environment, from the one around it.
func (p *Process) environ(around []string) []string {
	env := slices.DeleteFunc(around, func(entry string) bool {
		name, _, _ := strings.Cut(entry, "=")
		return slices.Contains(p.Unset, name)
	})
	for name, value := range p.Env {
		env = append(env, name+"="+value)
	}
	return env
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

// Logs are the files that the processes write to.
func (s *Launched) Logs() []string {
	var files []string
	for _, r := range s.processes {
		files = append(files, r.log)
	}
	return files
}

// Ended is closed when a process has ended, whoever ended it.
func (s *Launched) Ended() <-chan struct{} { return s.ended }

// died says which process ended, and how; nil while all run.
func (s *Launched) died() error {
	for _, r := range s.processes {
		select {
		case <-r.done:
			if r.err == nil {
				return r.failed("ended with exit code 0")
			}
			failed := r.failed("ended: " + r.err.Error())
			if exit, ok := errors.AsType[*exec.ExitError](r.err); ok {
				failed.Code = exit.ExitCode()
			}
			return failed
		default:
		}
	}
	return nil
}

func (r *running) failed(reason string) *LaunchError {
	return &LaunchError{Process: r.Name, Reason: reason, LogFile: r.log, Tail: tail(r.log)}
}

func tail(path string) string {
	text, err := Tail(path, 64<<10)
	if err != nil {
		return ""
	}
	lines := strings.Split(string(bytes.TrimRight(text, "\n")), "\n")
	return strings.Join(lines[max(0, len(lines)-tailLines):], "\n")
}

// Tail reads the last lines of a file, of that many bytes at most together. The
// line in which they would begin is left out: half of a secret isn't known for
// one.
func Tail(path string, most int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	skipped := max(0, info.Size()-most)
	if _, err := f.Seek(skipped, io.SeekStart); err != nil {
		return nil, err
	}
	text, err := io.ReadAll(io.LimitReader(f, most)) // it may be growing
	if err != nil {
		return nil, err
	}
	if skipped > 0 {
		end := bytes.IndexByte(text, '\n')
		if end < 0 { // a bar of progress, or one endless line
			end = bytes.IndexAny(text, "\r\t ")
		}
		text = text[end+1:]
	}
	return text, nil
}

// Trees are the living processes of the server, with what they started.
func (s *Launched) Trees(ctx context.Context) ([]Tree, error) {
	var trees []Tree
	for _, r := range s.processes {
		t := Tree{Name: r.Name, HostName: r.Host, URL: r.URL}
		if r.Host == "" {
			t.PIDs = Descendants(r.cmd.Process.Pid)
			trees = append(trees, t)
			continue
		}
		h := s.hosts[r.Host]
		b, err := h.ReadFile(ctx, r.dir+"/pid")
		if err != nil {
			return nil, fmt.Errorf("processes of %s: %w", r.Name, err)
		}
		pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
		if err != nil {
			return nil, fmt.Errorf("processes of %s: %w", r.Name, err)
		}
		below, err := DescendantsOn(ctx, h, pid)
		if err != nil {
			return nil, fmt.Errorf("processes of %s: %w", r.Name, err)
		}
		t.Host, t.PIDs = h, append([]int{pid}, below...)
		trees = append(trees, t)
	}
	return trees, nil
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
	for _, h := range s.hosts {
		h.Close()
	}
	return errors.Join(errs...)
}

// LaunchVariable marks what a launch started, in its environment.
const LaunchVariable = "CULPRIT_LAUNCH"

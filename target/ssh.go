package target

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"time"
)

// SSH is a machine behind the user's own ssh: their configuration, keys and
// jump hosts hold. It keeps one connection with a shell at its end, which runs
// one command after another. Close ends it.
type SSH struct {
	Command []string // empty is DefaultSSH
	Host    string

	mu      sync.Mutex
	session *session
}

// DefaultSSH asks no questions, since nobody may be there to answer, and
// notices a connection that is dead.
var DefaultSSH = []string{"ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15"}

// command is the line that runs a shell command on the host.
func (s *SSH) command(shell string) []string {
	line := DefaultSSH
	if len(s.Command) > 0 {
		line = s.Command
	}
	return append(append([]string{}, line...), "--", s.Host, shell)
}

// session is a shell at the other end.
type session struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	said *limited // by ssh itself; to be read after close
}

// connect starts a shell that lets us in by saying a word nobody else says:
// what a login's scripts print before it is skipped.
func (s *SSH) connect(mark string) (*session, error) {
	line := s.command("exec sh")
	cmd := exec.Command(line[0], line[1:]...) //nolint:noctx // a session outlives the calls that use it
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	c := &session{cmd: cmd, in: in, out: bufio.NewReader(out), said: &limited{most: 4 << 10}}
	cmd.Stderr = c.said
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("ssh %s: %w", s.Host, err)
	}
	// That a write fails shows in what can't be read.
	_, _ = fmt.Fprintf(in, "LC_ALL=C; export LC_ALL; echo; echo %s\n", mark)
	if _, _, err := readTo(c.out, mark); err != nil {
		c.close()
		return nil, fmt.Errorf("ssh %s: %s", s.Host, cmp.Or(lastLine(c.said.String()), err.Error()))
	}
	return c, nil
}

// close ends the session; it waits for ssh.
func (c *session) close() {
	c.in.Close()
	_ = c.cmd.Process.Kill()
	_ = c.cmd.Wait()
}

// Close ends the connection. The next call makes another.
func (s *SSH) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.session != nil {
		s.session.close()
		s.session = nil
	}
}

// ReadFile implements [Host].
func (s *SSH) ReadFile(ctx context.Context, path string) ([]byte, error) {
	return s.Run(ctx, "cat", "--", path)
}

// Readlink implements [Host].
func (s *SSH) Readlink(ctx context.Context, path string) (string, error) {
	// readlink itself keeps silent about the reason.
	out, err := s.Run(ctx, "sh", "-c", `readlink -- "$1" || { ls -d -- "$1" >/dev/null && echo "not a link: $1" >&2; exit 1; }`, "sh", path)
	return strings.TrimSuffix(string(out), "\n"), err
}

// Run implements [Host].
func (s *SSH) Run(ctx context.Context, command ...string) ([]byte, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var word [16]byte
	_, _ = rand.Read(word[:]) // never fails
	mark := fmt.Sprintf("%x", word)
	if s.session == nil {
		c, err := s.within(ctx, func() (*session, error) { return s.connect(mark) })
		if err != nil {
			return nil, err
		}
		s.session = c
	}
	c := s.session
	type answer struct {
		out       []byte
		code      int
		complaint string
		err       error
	}
	done := make(chan answer, 1)
	go func() {
		var a answer
		a.out, a.code, a.complaint, a.err = c.run(mark, command)
		done <- a
	}()
	select {
	case a := <-done:
		switch {
		case a.err != nil:
			c.close()
			s.session = nil
			return nil, fmt.Errorf("ssh %s: run %s: %s", s.Host, command[0], cmp.Or(lastLine(c.said.String()), a.err.Error()))
		case a.code != 0:
			return a.out, fmt.Errorf("ssh %s: %w", s.Host, commandError(command, fmt.Errorf("exit status %d", a.code), a.complaint))
		}
		return a.out, nil
	case <-ctx.Done():
		// The shell is busy with the command: both go with the connection.
		c.close()
		s.session = nil
		<-done
		return nil, fmt.Errorf("ssh %s: run %s: %w", s.Host, command[0], context.Cause(ctx))
	}
}

// within gives up on connecting when ctx ends.
func (s *SSH) within(ctx context.Context, connect func() (*session, error)) (*session, error) {
	type result struct {
		c   *session
		err error
	}
	done := make(chan result, 1)
	go func() {
		c, err := connect()
		done <- result{c, err}
	}()
	select {
	case r := <-done:
		return r.c, r.err
	case <-ctx.Done():
		go func() { // ssh has time-outs of its own
			if r := <-done; r.c != nil {
				r.c.close()
			}
		}()
		return nil, fmt.Errorf("ssh %s: %w", s.Host, context.Cause(ctx))
	}
}

// run has the shell run a command. The output comes as it is, then a line of
// the mark with the exit code, then what was said on standard error.
func (c *session) run(mark string, command []string) (out []byte, code int, complaint string, err error) {
	script := fmt.Sprintf("{ e=$( ( exec %s ) </dev/null 2>&1 1>&3 ); c=$?; } 3>&1; printf '\\n%s %%d\\n%%s\\n%s\\n' \"$c\" \"$e\"\n", quoteAll(command), mark, mark)
	if _, err := io.WriteString(c.in, script); err != nil {
		return nil, 0, "", err
	}
	out, rest, err := readTo(c.out, mark)
	if err != nil {
		return nil, 0, "", err
	}
	if code, err = strconv.Atoi(strings.TrimSpace(rest)); err != nil {
		return nil, 0, "", err
	}
	said, _, err := readTo(c.out, mark)
	return out, code, string(said), err
}

// readTo reads up to a line that begins with the mark. It returns what comes
// before, without the end of its last line, and the rest of that line.
func readTo(r *bufio.Reader, mark string) (before []byte, rest string, err error) {
	var b bytes.Buffer
	for lineStarts := true; ; {
		piece, err := r.ReadSlice('\n')
		if lineStarts && bytes.HasPrefix(piece, []byte(mark)) {
			return bytes.TrimSuffix(b.Bytes(), []byte("\n")), string(piece[len(mark):]), nil
		}
		b.Write(piece)
		lineStarts = err == nil
		switch {
		case errors.Is(err, io.EOF):
			return nil, "", errors.New("the connection ended")
		case err != nil && !errors.Is(err, bufio.ErrBufferFull):
			return nil, "", err
		case b.Len() > fileLimit:
			return nil, "", fmt.Errorf("more than %d bytes", fileLimit)
		}
	}
}

// quoteAll writes arguments so that a shell reads them as they are.
func quoteAll(args []string) string {
	quoted := make([]string, len(args))
	for i, arg := range args {
		quoted[i] = "'" + strings.ReplaceAll(arg, "'", `'\''`) + "'"
	}
	return strings.Join(quoted, " ")
}

// superviseScript is Supervise for a machine that has nothing of ours: a shell
// runs it. Its input is the hold: a byte must come every holdTimeout, and when
// none comes, or the input ends, the server is ended. What belongs to the
// server is told by its session and by a mark in its environment, which what
// starts a session of its own still has. The server writes to a file, never to
// the connection, which may be slow.
//
// It needs setsid, timeout, dd, tail and grep: coreutils and util-linux, or
// busybox.
const superviseScript = `command -v setsid >/dev/null && command -v timeout >/dev/null || { echo "culprit: this machine has no setsid or timeout (util-linux, coreutils)"; exit 127; }
umask 077
mkdir "$dir" || exit 127
exec 3<&0
: >"$dir/log"
( export "` + LaunchVariable + `=$id"; start ) </dev/null >"$dir/log" 2>&1 3<&- &
pid=$!
trap '' HUP INT TERM
echo "$pid" >"$dir/pid"
members() {
  {
    grep -l "` + LaunchVariable + `=$id" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3
    for f in /proc/[0-9]*/stat; do
      { read -r line <"$f"; } 2>/dev/null || continue
      p=${line%% *}
      set -- ${line##*) }
      [ "$1" != Z ] && [ "$4" = "$pid" ] && echo "$p"
    done
  } | sort -u
}
tail -n +1 -f "$dir/log" &
tail=$!
( while [ -n "$(timeout "$hold" dd bs=1 count=1 <&3 2>/dev/null)" ]; do :; done
  kill -TERM $(members)
  sleep "$grace"
  kill -KILL $(members) "$tail"
  rm -rf "$dir"
) >/dev/null 2>&1 &
holder=$!
wait "$pid"
code=$?
kill -KILL "$holder"
i=0
while [ "$i" -lt 50 ] && left=$(members) && [ -n "$left" ]; do
  kill -KILL $left 2>/dev/null
  sleep 0.1
  i=$((i+1))
done
# GNU's tail is told of what is written; others look once a second.
if tail --version >/dev/null 2>&1; then sleep 0.3; else sleep 1.2; fi
kill -KILL "$tail"
rm -rf "$dir"
exit "$code"
`

// holdEvery is how often the remote supervisor hears from us, and holdTimeout
// how long it waits before it takes us for dead: a machine that is cut off
// frees its GPUs by itself.
const (
	holdEvery   = 15 * time.Second
	holdTimeout = 60 * time.Second
)

// remote is a process's launch on another machine.
type remote struct {
	id     string
	dir    string // on that machine: its log and its process id
	script string
}

// supervised writes the script that runs a process of ours there.
func supervised(p Process, grace time.Duration) remote {
	var word [12]byte
	_, _ = rand.Read(word[:]) // never fails
	r := remote{id: fmt.Sprintf("%x", word)}
	r.dir = "/tmp/culprit-" + r.id
	var b strings.Builder
	fmt.Fprintf(&b, "id=%s dir=%s grace=%.1f hold=%.0f\nstart() {\n", r.id, r.dir, grace.Seconds(), holdTimeout.Seconds())
	for name, value := range p.Env {
		fmt.Fprintf(&b, "export %s\n", quoteAll([]string{name + "=" + value}))
	}
	for _, name := range p.Unset {
		fmt.Fprintf(&b, "unset %s\n", quoteAll([]string{name}))
	}
	if p.Dir != "" {
		fmt.Fprintf(&b, "cd %s || exit 127\n", quoteAll([]string{p.Dir}))
	}
	fmt.Fprintf(&b, "exec setsid %s\n}\n%s", quoteAll(p.Command), superviseScript)
	r.script = b.String()
	return r
}

// bootstrap is the shell command that reads the script from its input, where
// secrets of the environment don't show among the processes, and runs it.
func (r *remote) bootstrap() string {
	return fmt.Sprintf(`exec sh -c 'eval "$(dd bs=1 count=%d 2>/dev/null)"'`, len(r.script))
}

// beat writes to a hold until it is closed.
func beat(hold io.Writer, done <-chan struct{}) {
	tick := time.NewTicker(holdEvery)
	defer tick.Stop()
	for {
		select {
		case <-done:
			return
		case <-tick.C:
			if _, err := io.WriteString(hold, "."); err != nil {
				return
			}
		}
	}
}

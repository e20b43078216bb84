package target

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Supervise runs one process of a server until it ends or hold does, and then
// ends everything that it started. It is what stands between us and a server:
// a child of ours in a process of its own, so that the server goes whatever
// becomes of us, kill -9 included, since hold (a pipe from us) then ends too.
// As a subreaper it keeps even daemons among its descendants.
//
// grace is how long the server may take to end by itself after a SIGTERM. It
// returns the process's exit code, 128 and the signal's number when a signal
// ended it.
func Supervise(command []string, hold io.Reader, grace time.Duration) (code int, err error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return 0, fmt.Errorf("supervise: become a subreaper: %w", err)
	}
	// Signals to our process group (an interrupt at the terminal) are for the
	// one who holds us to answer.
	// They are caught, not ignored: what is ignored, the server would inherit.
	caught := make(chan os.Signal, 1)
	signal.Notify(caught, syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
	defer signal.Stop(caught)
	cmd := exec.Command(command[0], command[1:]...) //nolint:noctx // hold ends it
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr   //nolint:forbidigo // they are the log file that the launcher opened
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return 0, fmt.Errorf("start %s: %w", command[0], err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	released := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, hold)
		close(released)
	}()
	select {
	case err = <-ended:
	case <-released:
		killAll(os.Getpid(), syscall.SIGTERM)
		select {
		case err = <-ended:
		case <-time.After(grace):
		}
	}
	for range 50 { // a process may fork between the look and the kill
		if killAll(os.Getpid(), syscall.SIGKILL) == 0 {
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err == nil {
		return 0, nil
	}
	exit, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return 0, err
	}
	if status, ok := exit.Sys().(syscall.WaitStatus); ok && status.Signaled() {
		return 128 + int(status.Signal()), nil
	}
	return exit.ExitCode(), nil
}

// killAll signals every descendant of a process that is still alive and says
// how many there are.
func killAll(ancestor int, sig syscall.Signal) int {
	n := 0
	for _, pid := range Descendants(ancestor) {
		if syscall.Kill(pid, sig) == nil {
			n++
		}
	}
	return n
}

// Descendants lists the living processes that a process started, directly or
// not, parents first.
func Descendants(pid int) []int {
	children := map[int][]int{}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil
	}
	for _, e := range entries {
		child, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if parent, state, ok := parentOf(child); ok && state != "Z" {
			children[parent] = append(children[parent], child)
		}
	}
	var all []int
	for at := []int{pid}; len(at) > 0; at = at[1:] {
		all = append(all, children[at[0]]...)
		at = append(at, children[at[0]]...)
	}
	return all
}

// parentOf reads /proc/PID/stat. The command's name, in parentheses, may hold
// anything, so the fields are counted from the last one.
func parentOf(pid int) (parent int, state string, ok bool) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, "", false
	}
	text := string(b)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return 0, "", false
	}
	parent, err = strconv.Atoi(fields[1])
	return parent, fields[0], err == nil
}

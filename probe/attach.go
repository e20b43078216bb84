package probe

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// replyTimeout is how long a process may take to reach a point where Python
// runs a queued call: its main thread must run Python code.
const replyTimeout = 10 * time.Second

// knockAfter is how long a process that sleeps is left alone, each time: see
// [knock]. Of several workers that listen on one port, it wakes any.
const knockAfter = 300 * time.Millisecond

// Attach puts a directory's probes into a running process, which must be no
// child of this one: Go's own waiting for a child would see it stop. It returns
// when the agent has answered there.
func Attach(ctx context.Context, dir string, pid int) error {
	ticks := startTicks(pid)
	if ticks == 0 {
		return &RefusedError{"E_PROC_GONE", fmt.Sprintf("there is no process %d", pid)}
	}
	place, err := seenFrom(pid, dir)
	if err != nil {
		return err
	}
	if err := give(pid, dir); err != nil {
		return err
	}
	own := innerPID(pid)
	counters := filepath.Join(dir, fmt.Sprintf("%d-%d.ctr", own, ticks))
	refused := filepath.Join(dir, fmt.Sprintf("%d.refused.json", own))
	if c, err := readCounters(counters); err == nil && c.State == Armed {
		p, err := readPackFile(dir)
		if err != nil {
			return err
		}
		return &RefusedError{"E_ALREADY", fmt.Sprintf("PID %d already has pack %s (run %s). Detach it first.", pid, p.Name, filepath.Base(dir))}
	}
	for _, old := range []string{refused, filepath.Join(dir, closedFile)} {
		if err := os.Remove(old); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("attach: %w", err)
		}
	}
	ask := func() error {
		return inject(ctx, pid, dir, place, fmt.Sprintf("attach-%d.py", pid), attachScript(place))
	}
	if err := ask(); err != nil {
		return err
	}
	// An interpreter that is just starting has no builtins yet, and runs nothing:
	// it is asked again. An agent that is there already takes no notice.
	began, asked := time.Now(), 1
	return await(ctx, pid, func() (bool, error) {
		if b, err := readSmall(refused); err == nil {
			return true, agentRefusal(b)
		}
		c, err := readCounters(counters)
		if err == nil && c.State != Building {
			return true, nil
		}
		if err != nil && asked < askTimes && time.Since(began) > time.Duration(asked)*askAfter {
			asked++
			return false, ask()
		}
		return false, nil
	})
}

// askTimes and askAfter are how often, and after what time, a process that
// doesn't answer is asked again.
const (
	askTimes = 5
	askAfter = time.Second
)

// IsResourceTracker reports whether a process is Python's own tracker of shared
// memory, which runs none of the server's code and sleeps for good.
func IsResourceTracker(pid int) bool {
	command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(command), "from multiprocessing.resource_tracker import main")
}

// Detach takes a directory's probes out of a process: every function gets the
// code object back that it had. Counts stay.
func Detach(ctx context.Context, dir string, pid int) error {
	ticks := startTicks(pid)
	if ticks == 0 {
		return nil
	}
	counters := filepath.Join(dir, fmt.Sprintf("%d-%d.ctr", innerPID(pid), ticks))
	c, err := readCounters(counters)
	if err != nil || c.State != Armed {
		return nil
	}
	place, err := seenFrom(pid, dir)
	if err != nil {
		return err
	}
	if err := inject(ctx, pid, dir, place, fmt.Sprintf("detach-%d.py", pid), detachScript(place)); err != nil {
		return err
	}
	return await(ctx, pid, func() (bool, error) {
		c, err := readCounters(counters)
		return err == nil && c.State == Detached, nil
	})
}

// The scripts run in the process's main thread, in its __main__ module: they
// leave no name there. A second attach finds the agent that the first left.
const scriptHead = `(lambda directory: (
    lambda agent: agent.%s
)(__import__("sys").modules.get("_culprit_state") or (
    lambda util, sys: (
        lambda spec: (
            lambda module: (sys.modules.__setitem__("_culprit_state", module), spec.loader.exec_module(module), module)[2]
        )(util.module_from_spec(spec))
    )(util.spec_from_file_location("_culprit_state", directory + "/agent.py"))
)(__import__("importlib.util").util, __import__("sys"))))(%s)
`

func attachScript(dir string) string {
	return fmt.Sprintf(scriptHead, "begin(directory, 4)", pythonString(dir))
}

func detachScript(dir string) string {
	return fmt.Sprintf(scriptHead, "end(directory)", pythonString(dir))
}

// pythonString is a Python literal: what strconv quotes in ASCII, Python reads.
func pythonString(s string) string { return strconv.QuoteToASCII(s) }

func agentRefusal(b []byte) error {
	var e RefusedError
	if err := unmarshalRefusal(b, &e); err != nil {
		return fmt.Errorf("attach: the agent's answer: %w", err)
	}
	return &e
}

// inject has a process's main thread run a script soon. Python 3.14 has a way
// for that, [remoteExec], if it isn't switched off; else see [queueCall].
//
// The script is in dir, which the process knows as place.
func inject(ctx context.Context, pid int, dir, place, name, text string) error {
	if err := writeNew(filepath.Join(dir, name), []byte(text)); err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	script := filepath.Join(place, name)
	python, err := interpreterOf(pid)
	if err != nil {
		return err
	}
	// It must not raise, whatever happens: a queued call that fails is an error
	// in whatever the main thread was doing. Nor may it import anything while a
	// part of the standard library is being imported, as when Python starts.
	statement := "try:\n (lambda sys: ('site' in sys.modules or sys.flags.no_site) and not any(n.partition('.')[0] in sys.stdlib_module_names" +
		" and getattr(getattr(m, '__spec__', None), '_initializing', False) for n, m in list(sys.modules.items()))" +
		" and exec(compile(open(" + pythonString(script) + ").read(), " + pythonString(script) + ", 'exec')))(__import__('sys'))\nexcept: pass\n"
	if python.minor < 14 {
		return queueCall(pid, python, statement)
	}
	remote := remoteExec(ctx, pid, script)
	if remote == nil {
		// A main thread that waits for a lock would never look: a queued call
		// ends the wait. Where it can't be queued, the next request does.
		_ = queueCall(pid, python, "pass\n")
		return nil
	}
	if err := queueCall(pid, python, statement); err != nil {
		return &RefusedError{"E_REMOTE_OFF", fmt.Sprintf(
			"PID %d runs Python 3.%d with remote debugging disabled (PYTHON_DISABLE_REMOTE_DEBUG), and can't be traced either: %v; %v. Start it with culprit probe run.", pid, python.minor, remote, err)}
	}
	return nil
}

// remoteExec is Python 3.14's own way to run a script in another process
// (PEP 768), by that process's interpreter.
func remoteExec(ctx context.Context, pid int, script string) error {
	exe := fmt.Sprintf("/proc/%d/exe", pid)
	if path, err := os.Readlink(exe); err == nil && sameFile(path, exe) {
		exe = path // by its name it finds its library
	}
	out, err := exec.CommandContext(ctx, exe, "-I", "-c", "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])", strconv.Itoa(pid), script).CombinedOutput()
	if err == nil {
		return nil
	}
	text := strings.TrimSpace(string(out))
	return fmt.Errorf("sys.remote_exec: %w: %s", err, text[strings.LastIndexByte(text, '\n')+1:])
}

func sameFile(a, b string) bool {
	x, err := os.Stat(a)
	if err != nil {
		return false
	}
	y, err := os.Stat(b)
	return err == nil && os.SameFile(x, y)
}

// await polls for an agent's answer.
func await(ctx context.Context, pid int, answered func() (bool, error)) error {
	ctx, cancel := context.WithTimeout(ctx, replyTimeout)
	defer cancel()
	poll := time.NewTicker(20 * time.Millisecond)
	defer poll.Stop()
	began, knocks := time.Now(), 0
	for {
		if done, err := answered(); done || err != nil {
			return err
		}
		if time.Since(began) > knockAfter*time.Duration(knocks+1) {
			knocks++
			knock(ctx, pid)
		}
		if startTicks(pid) == 0 {
			return &RefusedError{"E_PROC_GONE", fmt.Sprintf("PID %d exited while it was being attached to or detached from.", pid)}
		}
		select {
		case <-ctx.Done():
			return &RefusedError{"E_NO_SAFEPOINT", fmt.Sprintf(
				"queued, but the main thread of PID %d has not reached a safe point for %.0f s (it is in %s). Send it one request. The queued call stays and will run then.",
				pid, replyTimeout.Seconds(), waitsIn(pid))}
		case <-poll.C:
		}
	}
}

// waitsIn names what a process's main thread waits in, as far as the kernel
// tells.
func waitsIn(pid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/wchan", pid))
	if name := strings.TrimSpace(string(b)); err == nil && name != "" && name != "0" {
		return name
	}
	return "a system call, or native code"
}

// AwaitPython gives a process that has just been started the time to become
// Python: a wrapper runs first, such as pyenv's, and the program is mapped
// before the library that has Python in it.
func AwaitPython(ctx context.Context, pid int) {
	const patience, poll = 3 * time.Second, 50 * time.Millisecond
	for until := time.Now().Add(patience); time.Now().Before(until) && startTicks(pid) != 0; {
		in, err := interpreterOf(pid)
		if err == nil {
			_, err = symbol(in, "Py_AddPendingCall")
		} else if refused, ok := errors.AsType[*RefusedError](err); ok && refused.Code != "E_NOT_PYTHON" {
			return
		}
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(poll):
		}
	}
}

// interpreter is where CPython is in a process.
type interpreter struct {
	path  string // of the file with its code, as we reach it
	base  uint64 // where that is mapped
	minor int    // of Python 3
}

var pythonName = regexp.MustCompile(`(?:^|/)(?:lib)?python(3)\.(\d+)[a-z]*(?:\.so.*)?$`)

// interpreterOf finds CPython in a process's memory map: its library, or the
// program itself.
func interpreterOf(pid int) (interpreter, error) {
	var in interpreter
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if errors.Is(err, os.ErrPermission) {
		return in, notPermitted(pid)
	}
	if err != nil {
		return in, &RefusedError{"E_PROC_GONE", fmt.Sprintf("PID %d: %v", pid, err)}
	}
	library := false
	for line := range strings.Lines(string(maps)) {
		// 7f0-7f1 r-xp 00000000 08:01 1234   /usr/lib/libpython3.11.so.1.0
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[2] != "00000000" {
			continue
		}
		m := pythonName.FindStringSubmatch(fields[5])
		if m == nil {
			continue
		}
		isLibrary := strings.Contains(filepath.Base(fields[5]), ".so")
		if in.path != "" && (library || !isLibrary) {
			continue
		}
		start, _, _ := strings.Cut(fields[0], "-")
		if in.base, err = strconv.ParseUint(start, 16, 64); err != nil {
			continue
		}
		in.path, library = fmt.Sprintf("/proc/%d/root%s", pid, fields[5]), isLibrary
		in.minor, err = strconv.Atoi(m[2])
		if err != nil {
			return in, fmt.Errorf("attach: %s: %w", fields[5], err)
		}
	}
	switch {
	case in.path == "":
		return in, &RefusedError{"E_NOT_PYTHON", fmt.Sprintf("PID %d is no Python process: neither python3.x nor libpython3.x is mapped.", pid)}
	case in.minor < 11:
		return in, &RefusedError{"E_NOT_PYTHON", fmt.Sprintf("PID %d runs Python 3.%d; probes want 3.11 or newer.", pid, in.minor)}
	}
	return in, nil
}

func notPermitted(pid int) error {
	scope := "unknown"
	if b, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope"); err == nil {
		scope = strings.TrimSpace(string(b))
	} else if errors.Is(err, os.ErrNotExist) {
		scope = "none"
	}
	return &RefusedError{"E_PTRACE", fmt.Sprintf(
		"not permitted to trace PID %d (uid %d, yama ptrace_scope=%s, CAP_SYS_PTRACE missing). In Docker: --cap-add SYS_PTRACE; or start the server with \"culprit probe run\".",
		pid, os.Getuid(), scope)}
}

// symbol is the address of a function in a process.
func symbol(in interpreter, name string) (uint64, error) {
	f, err := elf.Open(in.path)
	if err != nil {
		return 0, fmt.Errorf("attach: %w", err)
	}
	defer f.Close() //nolint:errcheck // it was read
	symbols, err := f.DynamicSymbols()
	if err != nil {
		return 0, fmt.Errorf("attach: symbols of %s: %w", in.path, err)
	}
	first := ^uint64(0) // address of the first segment, which base is that of
	for _, p := range f.Progs {
		if p.Type == elf.PT_LOAD && p.Off == 0 {
			first = p.Vaddr
		}
	}
	for _, s := range symbols {
		if s.Name == name && s.Value != 0 && first != ^uint64(0) {
			return in.base + s.Value - first, nil
		}
	}
	return 0, fmt.Errorf("attach: %s has no symbol %s", in.path, name)
}

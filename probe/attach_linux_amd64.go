package probe

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// queueCall has the main thread of a Python process run a statement at its next
// safe point: Py_AddPendingCall(PyRun_SimpleString, statement). Nothing of
// Python runs in the stopped thread but that one queueing: it may be anywhere,
// with any lock held, so nothing else would be safe.
//
// The calls return to address 0: the fault is the tracer's to see, and no code
// of the process is written over, which its other threads may be running.
//
// A process that is still starting is asked again: its libraries may not be
// linked yet, or its interpreter not be there.
func queueCall(pid int, in interpreter, statement string) error {
	const patience, poll = 3 * time.Second, 50 * time.Millisecond
	for until := time.Now().Add(patience); ; time.Sleep(poll) {
		err := queueOnce(pid, in, statement)
		if !errors.Is(err, errStarting) || time.Now().After(until) {
			return err
		}
	}
}

var errStarting = errors.New("its Python hasn't started")

func queueOnce(pid int, in interpreter, statement string) error {
	isInitialized, err := symbol(in, "Py_IsInitialized")
	if err != nil {
		return err
	}
	add, err := symbol(in, "Py_AddPendingCall")
	if err != nil {
		return err
	}
	run, err := symbol(in, "PyRun_SimpleString")
	if err != nil {
		return err
	}
	libc, err := libcOf(pid)
	if err != nil {
		return err
	}
	mmap, err := symbol(libc, "mmap")
	if err != nil {
		return err
	}
	return whileStopped(pid, func(t *tracee) error {
		// Before the libraries are linked even this call fails.
		if is, err := t.call(isInitialized); err != nil || int32(is) == 0 {
			return errors.Join(fmt.Errorf("attach: PID %d: %w", pid, errStarting), err)
		}
		const size = 4096
		length := uint64(len(statement)/size+1) * size
		page, err := t.call(mmap, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uint64(0), 0)
		if err != nil {
			return err
		}
		if page > ^uint64(4095) {
			return fmt.Errorf("attach: mmap in PID %d failed: %w", pid, unix.Errno(-page))
		}
		if _, err := unix.PtracePokeData(pid, uintptr(page), append([]byte(statement), 0)); err != nil {
			return fmt.Errorf("attach: write to PID %d: %w", pid, err)
		}
		queued, err := t.call(add, run, page)
		if err == nil && int32(queued) != 0 {
			err = fmt.Errorf("attach: PID %d has no room for a pending call", pid)
		}
		return err
	})
}

func whileStopped(pid int, do func(*tracee) error) error {
	// ptrace knows its tracer by the thread.
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		t := &tracee{pid: pid}
		if err := t.stop(); err != nil {
			done <- err
			return
		}
		done <- errors.Join(do(t), t.release())
	}()
	return <-done
}

// The kernel's own results of system calls that are to be restarted:
// include/linux/errno.h, ERESTARTSYS to ERESTART_RESTARTBLOCK.
const (
	restarts     = 512
	restartBlock = 516
)

// tracee is a stopped thread.
type tracee struct {
	pid   int
	saved unix.PtraceRegs
}

// stopTimeout is how long the thread may take to stop or to come back from a
// call; it takes about a millisecond.
const stopTimeout = 5 * time.Second

func (t *tracee) stop() error {
	if err := unix.PtraceSeize(t.pid); err != nil {
		if by := tracerOf(t.pid); by != 0 {
			name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", by)) // empty where it isn't told
			return &RefusedError{"E_TRACED", fmt.Sprintf("PID %d is already traced by PID %d (%s).", t.pid, by, strings.TrimSpace(string(name)))}
		}
		if errors.Is(err, unix.EPERM) {
			return notPermitted(t.pid)
		}
		return &RefusedError{"E_PROC_GONE", fmt.Sprintf("PID %d: %v", t.pid, err)}
	}
	err := unix.PtraceInterrupt(t.pid)
	if err == nil {
		err = t.waitForStop()
	}
	if err == nil {
		err = unix.PtraceGetRegs(t.pid, &t.saved)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("attach: stop PID %d: %w", t.pid, err), unix.PtraceDetach(t.pid))
	}
	return nil
}

// waitForStop waits until the interrupt has taken effect. A signal of the
// process's own that comes first is given to it.
func (t *tracee) waitForStop() error {
	for {
		status, err := t.wait()
		if err != nil {
			return err
		}
		const eventStop = 128 // PTRACE_EVENT_STOP
		if int(status)>>16 == eventStop {
			return nil
		}
		if err := unix.PtraceCont(t.pid, int(status.StopSignal())); err != nil {
			return err
		}
	}
}

func (t *tracee) wait() (unix.WaitStatus, error) {
	for until := time.Now().Add(stopTimeout); ; time.Sleep(100 * time.Microsecond) {
		var status unix.WaitStatus
		pid, err := unix.Wait4(t.pid, &status, unix.WALL|unix.WNOHANG, nil)
		switch {
		case errors.Is(err, unix.EINTR):
		case err != nil:
			return 0, err
		case pid == t.pid && (status.Exited() || status.Signaled()):
			return 0, &RefusedError{"E_PROC_GONE", fmt.Sprintf("PID %d exited while it was being attached to.", t.pid)}
		case pid == t.pid:
			return status, nil
		case time.Now().After(until):
			return 0, fmt.Errorf("the thread doesn't stop for %s", stopTimeout)
		}
	}
}

// call runs a function of the process in the stopped thread, below its stack's
// red zone, and returns what it returns.
func (t *tracee) call(function uint64, args ...uint64) (uint64, error) {
	regs := t.saved
	for i, r := range []*uint64{&regs.Rdi, &regs.Rsi, &regs.Rdx, &regs.Rcx, &regs.R8, &regs.R9}[:len(args)] {
		*r = args[i]
	}
	const redZone = 128
	regs.Rsp = (t.saved.Rsp-redZone-512)&^15 - 8 // as after a call instruction
	regs.Rip, regs.Rax = function, 0
	regs.Orig_rax = ^uint64(0) // no system call to be restarted
	if _, err := unix.PtracePokeData(t.pid, uintptr(regs.Rsp), make([]byte, 8)); err != nil {
		return 0, fmt.Errorf("attach: write to the stack of PID %d: %w", t.pid, err)
	}
	if err := unix.PtraceSetRegs(t.pid, &regs); err != nil {
		return 0, fmt.Errorf("attach: set registers of PID %d: %w", t.pid, err)
	}
	var held []int // signals of the process's own: they wait until it is itself again
	defer func() {
		for _, s := range held {
			unix.Tgkill(t.pid, t.pid, unix.Signal(s)) //nolint:errcheck // it is gone, or it gets its signal
		}
	}()
	for {
		if err := unix.PtraceCont(t.pid, 0); err != nil {
			return 0, fmt.Errorf("attach: run PID %d: %w", t.pid, err)
		}
		status, err := t.wait()
		if err != nil {
			return 0, fmt.Errorf("attach: call in PID %d: %w", t.pid, err)
		}
		if status.StopSignal() == unix.SIGSEGV {
			break
		}
		if int(status)>>16 == 0 && status.StopSignal() != unix.SIGTRAP {
			held = append(held, int(status.StopSignal()))
		}
	}
	if err := unix.PtraceGetRegs(t.pid, &regs); err != nil {
		return 0, fmt.Errorf("attach: read registers of PID %d: %w", t.pid, err)
	}
	if regs.Rip != 0 {
		return 0, fmt.Errorf("attach: the call in PID %d failed at %#x", t.pid, regs.Rip)
	}
	return regs.Rax, nil
}

// release gives the thread its registers back and lets it go on. A system call
// that the stop interrupted is restarted by the kernel; but a wait for a lock
// ends as if a signal had come, since Python runs queued calls then: a main
// thread that waits for its threads to end would never get to them otherwise.
func (t *tracee) release() error {
	regs := t.saved
	if n := -int64(regs.Rax); regs.Orig_rax == unix.SYS_FUTEX && restarts <= n && n <= restartBlock {
		regs.Rax, regs.Orig_rax = ^uint64(unix.EINTR)+1, ^uint64(0)
	}
	err := unix.PtraceSetRegs(t.pid, &regs)
	if err := errors.Join(err, unix.PtraceDetach(t.pid)); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("attach: let PID %d go on: %w", t.pid, err)
	}
	return nil
}

func tracerOf(pid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return 0
	}
	_, rest, _ := strings.Cut(string(b), "TracerPid:")
	line, _, _ := strings.Cut(rest, "\n")
	by, _ := strconv.Atoi(strings.TrimSpace(line)) // 0 where it isn't told
	return by
}

// libcOf finds the C library of a process.
func libcOf(pid int) (interpreter, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return interpreter{}, &RefusedError{"E_PROC_GONE", fmt.Sprintf("PID %d: %v", pid, err)}
	}
	for line := range strings.Lines(string(maps)) {
		fields := strings.Fields(line)
		if len(fields) < 6 || fields[2] != "00000000" {
			continue
		}
		name := fields[5][strings.LastIndexByte(fields[5], '/')+1:]
		if !strings.HasPrefix(name, "libc.so.") && !strings.HasPrefix(name, "libc-") && !strings.HasPrefix(name, "ld-musl-") {
			continue
		}
		start, _, _ := strings.Cut(fields[0], "-")
		base, err := strconv.ParseUint(start, 16, 64)
		if err != nil {
			continue
		}
		return interpreter{path: fmt.Sprintf("/proc/%d/root%s", pid, fields[5]), base: base}, nil
	}
	return interpreter{}, fmt.Errorf("attach: PID %d has no C library mapped: it is linked statically", pid)
}

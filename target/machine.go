package target

import (
	"errors"
	"regexp"
	"slices"
	"strings"
	"syscall"
)

// machineError marks an error as the machine's.
type machineError struct{ error }

func (e machineError) Unwrap() error { return e.error }

// noProgram are the exit codes of shells, and of our supervisor, for a program
// that can't be run or isn't there; killed is that of SIGKILL, which without
// anybody's doing comes from a kernel that has no memory left.
var noProgram, killed = []int{126, 127}, 128 + int(syscall.SIGKILL)

// machineLog is what a server writes that lacks something of its machine's,
// whatever its settings are. GPU memory isn't among it: how much is taken is a
// setting.
var machineLog = regexp.MustCompile(`(?i)no space left on device|disk quota exceeded|address already in use|cannot allocate memory|too many open files|` +
	`no cuda-capable device|no cuda gpus are available|cuda driver version is insufficient|failed to initialize nvml`)

// OfMachine reports whether an error is due to the machine rather than to what
// was launched or run on it: the disk is full, a port taken, a program missing,
// memory or a device not there. Another machine may not have it. A setting that
// has the same effect everywhere can't be told from it on one machine.
func OfMachine(err error) bool {
	if failed, ok := errors.AsType[*LaunchError](err); ok {
		return slices.Contains(noProgram, failed.Code) || failed.Code == killed || machineLog.MatchString(failed.Tail)
	}
	if _, ok := errors.AsType[machineError](err); ok {
		return true
	}
	errno, ok := errors.AsType[syscall.Errno](err)
	return ok && slices.Contains([]syscall.Errno{syscall.ENOSPC, syscall.EDQUOT, syscall.ENOMEM, syscall.EMFILE, syscall.ENFILE, syscall.EROFS}, errno)
}

// Brief is the error in a line: of a log, the last one that has a text.
func (e *LaunchError) Brief() string {
	text := "launch " + e.Process + ": " + e.Reason
	for _, line := range slices.Backward(strings.Split(e.Tail, "\n")) {
		if line = strings.TrimSpace(line); line != "" {
			return text + ": " + line
		}
	}
	return text
}

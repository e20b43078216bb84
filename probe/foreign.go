package probe

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
)

// A process may be another user's, whom root serves, and it may be in a
// container, with other numbers of processes and other files.

// NewDirFor makes a probe directory where a process sees it: in its own
// /dev/shm. That of a container can be read as long as the process lives.
func NewDirFor(pid int, p *Pack) (string, error) {
	root := rootOf(pid)
	uid, err := userOf(pid)
	if err != nil {
		return "", &RefusedError{"E_PROC_GONE", fmt.Sprintf("there is no process %d", pid)}
	}
	if root == "" && uid == os.Geteuid() {
		return NewDir("", p)
	}
	dir, err := os.MkdirTemp(root+"/dev/shm", "culprit-"+p.Name+"-*")
	if errors.Is(err, fs.ErrPermission) {
		return "", notPermitted(pid)
	}
	if err != nil {
		return "", fmt.Errorf("make probe directory: %w", err)
	}
	return NewDir(dir, p)
}

// rootOf is where the files of a process are that has others than we have;
// empty for ours.
func rootOf(pid int) string {
	ours, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return ""
	}
	if theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/mnt", pid)); err != nil || theirs == ours {
		return ""
	}
	return fmt.Sprintf("/proc/%d/root", pid)
}

func userOf(pid int) (int, error) {
	info, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
	if err != nil {
		return 0, err
	}
	uid, known := ownerOf(info)
	if !known {
		return os.Geteuid(), nil
	}
	return uid, nil
}

var ofProcess = regexp.MustCompile(`^/proc/\d+/root/`)

// seenFrom is a probe directory's path as a process has it.
func seenFrom(pid int, dir string) (string, error) {
	root := rootOf(pid)
	if root == "" {
		return dir, nil
	}
	path := ofProcess.ReplaceAllString(dir, "/")
	if !sameFile(root+filepath.Join(path, packFile), filepath.Join(dir, packFile)) {
		return "", &RefusedError{"E_CONTAINER", fmt.Sprintf(
			"PID %d runs in a container and doesn't see %s. Without --dir, the directory is made there; or name one that both see by the same path.", pid, dir)}
	}
	return path, nil
}

// give lets the user of a process read what root has put into a probe directory
// and write counters there.
func give(pid int, dir string) error {
	uid, err := userOf(pid)
	if err != nil || os.Geteuid() != 0 || uid == 0 {
		return err
	}
	for _, name := range []string{agentFile, packFile, filepath.Join(siteDir, siteFile), siteDir, ""} {
		if err := os.Lchown(filepath.Join(dir, name), uid, -1); err != nil {
			return fmt.Errorf("attach: %w", err)
		}
	}
	return nil
}

// writeNew writes a file in a directory that may be another user's: whatever
// stood there under that name isn't followed.
func writeNew(path string, text []byte) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(text)
	return errors.Join(err, f.Close())
}

// innerPID is a process's number as it has it itself, in its container.
func innerPID(pid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return pid
	}
	_, rest, found := strings.Cut(string(b), "\nNSpid:")
	line, _, _ := strings.Cut(rest, "\n")
	numbers := strings.Fields(line)
	if !found || len(numbers) == 0 {
		return pid
	}
	n, err := strconv.Atoi(numbers[len(numbers)-1])
	if err != nil {
		return pid
	}
	return n
}

// outerPID is the number that a process has for us; its own where it isn't
// found, as when it has ended.
func outerPID(inner int, ticks, namespace uint64) int {
	ours, err := os.Readlink("/proc/self/ns/pid") // pid:[4026531836]
	if err != nil || namespace == 0 || ours == fmt.Sprintf("pid:[%d]", namespace) {
		return inner
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return inner
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && startTicks(pid) == ticks && innerPID(pid) == inner {
			return pid
		}
	}
	return inner
}

package target

import (
	"context"
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
)

// parseNul splits what /proc gives as strings that end with a zero byte.
func parseNul(b []byte) []string {
	text := strings.TrimRight(string(b), "\x00")
	if text == "" {
		return nil
	}
	return strings.Split(text, "\x00")
}

// parseEnv reads an environment block. Of a name that is there twice, the
// first counts, as for getenv.
func parseEnv(b []byte) map[string]string {
	env := map[string]string{}
	for _, entry := range parseNul(b) {
		name, value, ok := strings.Cut(entry, "=")
		if _, twice := env[name]; ok && name != "" && !twice {
			env[name] = value
		}
	}
	return env
}

// stat is what we need of /proc/PID/stat.
type stat struct {
	pid, parent int
	state       string
	startTicks  int64 // since boot, in 1/100 s
}

// parseStat reads one line of /proc/PID/stat. The command's name, in
// parentheses, may hold anything, so the fields are counted from its end.
func parseStat(line string) (s stat, ok bool) {
	open, end := strings.IndexByte(line, '('), strings.LastIndexByte(line, ')')
	if open < 0 || end < open {
		return s, false
	}
	fields := strings.Fields(line[end+1:])
	const started = 19 // starttime is field 22, and the state, first here, is field 3
	if len(fields) <= started {
		return s, false
	}
	var errs [3]error
	s.pid, errs[0] = strconv.Atoi(strings.TrimSpace(line[:open]))
	s.parent, errs[1] = strconv.Atoi(fields[1])
	s.startTicks, errs[2] = strconv.ParseInt(fields[started], 10, 64)
	s.state = fields[0]
	return s, errs == [3]error{}
}

// parseMaps lists the files that a process has mapped to execute code from.
func parseMaps(b []byte) []string {
	var paths []string
	for line := range strings.Lines(string(b)) {
		// 7f0-7f1 r-xp 00000000 08:01 1234   /usr/lib/libc.so.6
		_, rest, _ := strings.Cut(line, " ")
		if len(rest) < 4 || rest[2] != 'x' {
			continue
		}
		if i := strings.IndexByte(rest, '/'); i >= 0 {
			paths = append(paths, strings.TrimRight(rest[i:], "\n"))
		}
	}
	slices.Sort(paths)
	return slices.Compact(paths)
}

// DescendantsOn is [Descendants] on any host.
func DescendantsOn(ctx context.Context, h Host, pid int) ([]int, error) {
	// A process may end between the shell's look and cat's, which is no error.
	b, err := h.Run(ctx, "sh", "-c", "cat /proc/[0-9]*/stat 2>/dev/null || :")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	children := map[int][]int{}
	for line := range strings.Lines(string(b)) {
		if s, ok := parseStat(line); ok && s.state != "Z" {
			children[s.parent] = append(children[s.parent], s.pid)
		}
	}
	var all []int
	for at := []int{pid}; len(at) > 0; at = at[1:] {
		slices.Sort(children[at[0]])
		all = append(all, children[at[0]]...)
		at = append(at, children[at[0]]...)
	}
	return all, nil
}

// bootTime is when a host was booted, in seconds since 1970.
func bootTime(ctx context.Context, h Host) (int64, error) {
	b, err := h.ReadFile(ctx, "/proc/stat")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if value, ok := strings.CutPrefix(line, "btime "); ok {
			return strconv.ParseInt(strings.TrimSpace(value), 10, 64)
		}
	}
	return 0, fmt.Errorf("/proc/stat has no btime")
}

// rootOf is the directory that a process has as its root, as we reach it: a
// process in a container has other files by the same names.
func rootOf(ctx context.Context, h Host, pid int) string {
	root := fmt.Sprintf("/proc/%d/root", pid)
	if _, err := h.Readlink(ctx, root); err != nil {
		return ""
	}
	return root
}

// within joins a path as a process writes it to its root and its working
// directory.
func within(root, dir, name string) string {
	if !path.IsAbs(name) {
		name = path.Join(dir, name)
	}
	return root + path.Clean("/"+name)
}

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

// sockets are the TCP ports that are listened at, by the sockets' inodes.
func sockets(ctx context.Context, h Host) map[string]int {
	ports := map[string]int{}
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		if b, err := h.ReadFile(ctx, name); err == nil { // there may be no IPv6
			parseListening(string(b), ports)
		}
	}
	return ports
}

// parseListening reads a file such as /proc/net/tcp.
func parseListening(text string, ports map[string]int) {
	for line := range strings.Lines(text) {
		fields := strings.Fields(line)
		const listens, inode = "0A", 9
		if len(fields) <= inode || fields[3] != listens {
			continue
		}
		_, hex, _ := strings.Cut(fields[1], ":")
		if port, err := strconv.ParseUint(hex, 16, 16); err == nil {
			ports[fields[inode]] = int(port)
		}
	}
}

// openSockets calls with each socket that processes hold, of those that we may
// look at: pids is a shell pattern.
func openSockets(ctx context.Context, h Host, pids string, each func(pid int, inode string)) error {
	// Of other users' processes nothing is listed, which is no error.
	out, err := h.Run(ctx, "sh", "-c", "ls -l /proc/"+pids+"/fd/ 2>/dev/null || :")
	if err != nil {
		return fmt.Errorf("look for sockets: %w", err)
	}
	pid := 0
	if n, err := strconv.Atoi(pids); err == nil {
		pid = n // one directory is listed without its name
	}
	for _, line := range splitLines(out) {
		if dir, ok := strings.CutPrefix(line, "/proc/"); ok {
			number, _, _ := strings.Cut(dir, "/")
			pid, _ = strconv.Atoi(number) // the pattern has digits alone
			continue
		}
		_, to, _ := strings.Cut(line, " -> ")
		if inode, ok := strings.CutPrefix(to, "socket:["); ok {
			each(pid, strings.TrimSuffix(inode, "]"))
		}
	}
	return nil
}

// Listener is the process that listens at a TCP port of a host, the one with
// the lowest number where several do; 0 for none that we may see.
func Listener(ctx context.Context, h Host, port int) (int, error) {
	ports, found := sockets(ctx, h), 0
	err := openSockets(ctx, h, "[0-9]*", func(pid int, inode string) {
		if at, ok := ports[inode]; ok && at == port && (found == 0 || pid < found) {
			found = pid
		}
	})
	return found, err
}

// Ports are the TCP ports that a process listens at.
func Ports(ctx context.Context, h Host, pid int) ([]int, error) {
	ports := sockets(ctx, h)
	var own []int
	err := openSockets(ctx, h, strconv.Itoa(pid), func(_ int, inode string) {
		if port, ok := ports[inode]; ok {
			own = append(own, port)
		}
	})
	slices.Sort(own)
	return slices.Compact(own), err
}

// Program is the process whose command line started another: workers of
// Python's multiprocessing, and processes that wrote a title over their
// arguments, are passed over for their parents.
func Program(ctx context.Context, h Host, pid int) (int, error) {
	for {
		proc := fmt.Sprintf("/proc/%d/", pid)
		b, err := h.ReadFile(ctx, proc+"cmdline")
		if err != nil {
			return 0, err
		}
		if !worker(parseNul(b)) {
			return pid, nil
		}
		line, err := h.ReadFile(ctx, proc+"stat")
		if err != nil {
			return 0, err
		}
		s, ok := parseStat(string(line))
		if !ok || s.parent <= 1 {
			return pid, nil
		}
		pid = s.parent
	}
}

func worker(args []string) bool {
	if len(args) == 0 {
		return false
	}
	title := strings.Contains(args[0], "::") // VLLM::EngineCore, sglang::scheduler
	return title || slices.Contains(args, "--multiprocessing-fork") || len(args) > 2 && args[len(args)-2] == "-c" && strings.HasPrefix(args[len(args)-1], "from multiprocessing")
}

// Args is a process's command line, as it is.
func Args(ctx context.Context, h Host, pid int) ([]string, error) {
	b, err := h.ReadFile(ctx, fmt.Sprintf("/proc/%d/cmdline", pid))
	return parseNul(b), err
}

// Contained reports whether a process has a file system of its own, as in a
// container.
func Contained(ctx context.Context, h Host, pid int) bool {
	own, err := h.Readlink(ctx, fmt.Sprintf("/proc/%d/ns/mnt", pid))
	ours, err2 := h.Readlink(ctx, "/proc/self/ns/mnt")
	return err == nil && err2 == nil && own != ours
}

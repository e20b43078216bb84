package target

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// The tests of ssh run with a stand-in, a script that runs here what it is
// asked to run elsewhere. "make test-ssh" runs them with ssh and sshd.
const sshVariable = "CULPRIT_TEST_SSH" // the command and the host, with spaces between

// sshTo is the command that reaches a host, and the host.
func sshTo(t *testing.T) (command []string, host string) {
	t.Helper()
	if line := strings.Fields(os.Getenv(sshVariable)); len(line) > 1 {
		return line[:len(line)-1], line[len(line)-1]
	}
	script := filepath.Join(t.TempDir(), "ssh")
	// What a login prints comes before everything else.
	if err := os.WriteFile(script, []byte("while [ \"$1\" != -- ]; do shift; done\nshift 2\necho welcome\nexec sh -c \"$*\"\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	return []string{"sh", script}, "elsewhere"
}

func sshLauncher(t *testing.T) (*Launcher, string) {
	t.Helper()
	l := launcher()
	command, host := sshTo(t)
	l.SSH = command
	return l, host
}

func TestSSHHost(t *testing.T) {
	command, host := sshTo(t)
	h := &SSH{Command: command, Host: host}
	t.Cleanup(h.Close)
	testHost(t, h)
}

func TestSSHAttest(t *testing.T) {
	l, host := sshLauncher(t)
	testAttest(t, l, host)
}

func TestSSHLaunch(t *testing.T) {
	l, host := sshLauncher(t)
	testLaunchAndStop(t, l, host)
	noneLeft(t)
}

// noneLeft makes sure that no launch of ours left files behind.
func noneLeft(t *testing.T) {
	t.Helper()
	var left []string
	for range 300 {
		left, _ = filepath.Glob("/tmp/culprit-*/pid") // the pattern is sound
		if len(left) == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("left behind: %q", left)
}

func TestSSHLaunchFails(t *testing.T) {
	l, host := sshLauncher(t)
	testLaunchFails(t, l, host)
}

func TestSSHStopIsGentle(t *testing.T) {
	l, host := sshLauncher(t)
	testStopIsGentle(t, l, host)
}

// When the connection breaks, the server ends by itself, its daemons too.
func TestSSHNoOrphans(t *testing.T) {
	for _, how := range []string{"connection killed", "silence"} {
		t.Run(how, func(t *testing.T) {
			l, host := sshLauncher(t)
			address, dir := freeAddress(t), t.TempDir()
			p := Process{Name: "decode", Command: []string{os.Args[0], "server", address, filepath.Join(dir, "pid")}, Host: host}
			s := &Launched{LogDir: dir, ended: make(chan struct{}), grace: l.Grace, hosts: map[string]*SSH{host: {Command: l.SSH, Host: host}}}
			defer s.hosts[host].Close()
			var end func()
			if how == "silence" {
				r := supervised(p, l.Grace)
				r.script = strings.Replace(r.script, "hold=60", "hold=2", 1)
				line := s.hosts[host].command(r.bootstrap())
				cmd := exec.Command(line[0], line[1:]...)
				in, err := cmd.StdinPipe()
				if err != nil {
					t.Fatal(err)
				}
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				if _, err := in.Write([]byte(r.script)); err != nil {
					t.Fatal(err)
				}
				s.processes = []*running{{Process: p, remote: r}}
				silent := make(chan struct{})
				go func() {
					for {
						select {
						case <-silent:
							return
						case <-time.After(100 * time.Millisecond):
							_, _ = in.Write([]byte(".")) // what it is for shows below
						}
					}
				}()
				end = func() {
					close(silent)
					_ = cmd.Wait() // killed by the other side
				}
			} else {
				r, err := s.start(l, p)
				if err != nil {
					t.Fatal(err)
				}
				s.processes = []*running{r}
				end = func() {
					_ = r.cmd.Process.Kill()
					<-r.done
				}
			}
			daemon := readPID(t, filepath.Join(dir, "pid"))
			pids := append(localPIDs(t, s), daemon)
			if len(pids) < 3 {
				t.Errorf("processes %v, want the server and its daemon", pids)
			}
			end()
			for _, pid := range pids {
				if !gone(pid) {
					t.Errorf("process %d is an orphan", pid)
				}
			}
			if left := mentioning(t, s.processes[0].dir); left != "" {
				t.Errorf("what watched the server is left: %s", left)
			}
			noneLeft(t)
		})
	}
}

// A connection that breaks costs the call that meets it, not those after it.
func TestSSHReconnects(t *testing.T) {
	command, host := sshTo(t)
	h := &SSH{Command: command, Host: host}
	defer h.Close()
	if _, err := h.Run(t.Context(), "true"); err != nil {
		t.Fatal(err)
	}
	if _, err := h.Run(t.Context(), "sh", "-c", "kill -9 $PPID"); err == nil || !strings.Contains(err.Error(), "ssh "+host) {
		t.Errorf("error %v of a connection that breaks", err)
	}
	if out, err := h.Run(t.Context(), "echo", "x"); err != nil || string(out) != "x\n" {
		t.Errorf("after that %q, %v", out, err)
	}
}

func TestSSHUnreachable(t *testing.T) {
	h := &SSH{Command: []string{"sh", "-c", "echo 'connect to host x port 22: No route to host' >&2; exit 255", "--"}, Host: "x"}
	if _, err := h.ReadFile(t.Context(), "/x"); err == nil || err.Error() != "ssh x: connect to host x port 22: No route to host" {
		t.Errorf("error %v", err)
	}
}

// mentioning waits until no process has a text in its command line, and lists
// those that still have.
func mentioning(t *testing.T, text string) string {
	t.Helper()
	left := ""
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		left = ""
		files, err := filepath.Glob("/proc/[0-9]*/cmdline")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), text) {
				left += f + ": " + strings.ReplaceAll(string(b), "\x00", " ") + "; "
			}
		}
		if left == "" {
			return ""
		}
	}
	return left
}

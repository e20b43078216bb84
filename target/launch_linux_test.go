package target

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The test binary plays a supervisor and several servers.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "supervise":
			code, err := Supervise(os.Args[2:], os.Stdin, 300*time.Millisecond)
			if err != nil {
				fmt.Println(err)
				os.Exit(127)
			}
			os.Exit(code)
		case "server":
			server(os.Args[2:])
		case "launcher":
			launchAndWait(os.Args[2:])
		}
	}
	os.Exit(m.Run())
}

// server listens on a port, after it has started a daemon of its own: a
// grandchild in a session of its own that ignores signals.
func server(args []string) {
	if len(args) > 1 {
		daemon := exec.Command("setsid", "sh", "-c", "trap '' TERM HUP; echo $$ > "+args[1]+"; while :; do sleep 1; done")
		if err := daemon.Start(); err != nil {
			panic(err)
		}
	}
	fmt.Println("the server is up")
	panic(http.ListenAndServe(args[0], http.HandlerFunc(func(http.ResponseWriter, *http.Request) {})))
}

// launchAndWait is a launcher that is killed.
func launchAndWait(args []string) {
	_, err := launcher().Launch(testContext{}, []Process{{Name: "decode", Command: []string{os.Args[0], "server", args[0], args[1]}}},
		Ready{URL: "http://" + args[0], Timeout: 20 * time.Second}, args[2])
	if err != nil {
		panic(err)
	}
	fmt.Println("launched")
	select {}
}

type testContext struct{}

func (testContext) Deadline() (time.Time, bool) { return time.Time{}, false }
func (testContext) Done() <-chan struct{}       { return nil }
func (testContext) Err() error                  { return nil }
func (testContext) Value(any) any               { return nil }

func launcher() *Launcher {
	return &Launcher{Supervisor: []string{os.Args[0], "supervise"}, Grace: 300 * time.Millisecond}
}

// freeAddress is one that nobody listens at now.
func freeAddress(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	return l.Addr().String()
}

// localPIDs are the living processes of a server of one process.
func localPIDs(t *testing.T, s *Launched) []int {
	t.Helper()
	trees, err := s.Trees(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return trees[0].PIDs
}

// gone waits until a process has ended.
func gone(pid int) bool {
	for range 500 {
		if _, state, ok := parentOf(pid); !ok || state == "Z" {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}

func readPID(t *testing.T, path string) int {
	t.Helper()
	for range 500 {
		if b, err := os.ReadFile(path); err == nil {
			if pid, err := strconv.Atoi(strings.TrimSpace(string(b))); err == nil {
				return pid
			}
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatalf("%s holds no process id", path)
	return 0
}

func TestLaunchAndStop(t *testing.T) { testLaunchAndStop(t, launcher(), "") }

func testLaunchAndStop(t *testing.T, l *Launcher, host string) {
	address, dir := freeAddress(t), t.TempDir()
	pidFile := filepath.Join(dir, "daemon.pid")
	t.Setenv("CULPRIT_TEST_UNSET", "1")
	s, err := l.Launch(t.Context(), []Process{{
		Name: "decode", Command: []string{os.Args[0], "server", address, pidFile}, Host: host,
		Env: map[string]string{"SGLANG_X": "bf16 it's"}, Unset: []string{"CULPRIT_TEST_UNSET"},
	}}, Ready{URL: "http://" + address, Log: regexp.MustCompile("server is up"), Timeout: 20 * time.Second}, dir)
	if err != nil {
		t.Fatal(err)
	}
	daemon := readPID(t, pidFile)
	pids := localPIDs(t, s)
	if len(pids) < 2 {
		t.Errorf("processes %v, want the server and its daemon", pids)
	}
	environment, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pids[0]))
	if err != nil || !strings.Contains(string(environment), "SGLANG_X=bf16 it's\x00") || strings.Contains(string(environment), "CULPRIT_TEST_UNSET") {
		t.Errorf("environment %q, %v: SGLANG_X isn't in it, or what isn't to be there is", environment, err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	for _, pid := range append(pids, daemon) {
		if !gone(pid) {
			t.Errorf("process %d is still there", pid)
		}
	}
	if err := s.Stop(); err != nil {
		t.Errorf("second Stop: %v", err)
	}
}

// TestNoOrphans: whoever launched a server and is killed leaves nothing.
func TestNoOrphans(t *testing.T) {
	address, dir := freeAddress(t), t.TempDir()
	pidFile := filepath.Join(dir, "daemon.pid")
	cmd := exec.Command(os.Args[0], "launcher", address, pidFile, dir)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := out.Read(make([]byte, 16)); err != nil {
		t.Fatal(err)
	}
	daemon := readPID(t, pidFile)
	pids := Descendants(cmd.Process.Pid)
	if len(pids) < 3 {
		t.Errorf("processes %v, want the supervisor, the server and its daemon", pids)
	}
	if err := cmd.Process.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait() // killed
	for _, pid := range append(pids, daemon) {
		if !gone(pid) {
			t.Errorf("process %d is an orphan", pid)
		}
	}
}

// A server that ends when it is asked to has the time for it.
func TestStopIsGentle(t *testing.T) { testStopIsGentle(t, launcher(), "") }

func testStopIsGentle(t *testing.T, l *Launcher, host string) {
	dir := t.TempDir()
	patient := *l
	patient.Grace = 20 * time.Second
	s, err := patient.Launch(t.Context(), []Process{{
		Name: "decode", Command: []string{"sh", "-c", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done"}, Host: host,
	}}, Ready{Log: regexp.MustCompile("(?m)^up"), Timeout: 20 * time.Second}, dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Stop(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(filepath.Join(dir, "decode.log")); err != nil || !strings.HasSuffix(string(b), "bye\n") {
		t.Errorf("log %q, %v", b, err)
	}
}

// What start started is followed, and ended by stop whatever becomes of us.
func TestDetached(t *testing.T) {
	tests := []struct {
		name                string
		start, stop, follow string
		ready               string
		log                 string
		err                 string
	}{
		{"to its end", "echo 'it''s up'", "echo down", "", "up", "its up\ndown\n", ""},
		{"with its log", "true", "echo down", "echo 1; sleep 60", "1", "1\ndown\n", ""},
		{"it can't be started", "echo no; exit 4", "echo clean", "", "never", "no\nthe start command failed with exit code 4\nclean\n", "exit status 4"},
		{"it ends by itself", "true", "echo clean", "echo gone; exit 5", "never", "gone\nclean\n", "exit status 5"},
		{"it has no stop", "echo up", "", "", "up", "up\n", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			shell := func(text string) []string {
				if text == "" {
					return nil
				}
				return []string{"sh", "-c", text}
			}
			dir := t.TempDir()
			l := launcher()
			s, err := l.Launch(t.Context(), []Process{{Name: "x", Command: Detached(shell(tt.start), shell(tt.stop), shell(tt.follow))}},
				Ready{Log: regexp.MustCompile(tt.ready), Timeout: 20 * time.Second}, dir)
			if (err != nil) != (tt.err != "") || err != nil && !strings.Contains(err.Error(), tt.err) {
				t.Fatalf("error %v, want %q", err, tt.err)
			}
			if err == nil {
				if err := s.Stop(); err != nil {
					t.Fatal(err)
				}
			}
			if b, err := os.ReadFile(filepath.Join(dir, "x.log")); err != nil || string(b) != tt.log {
				t.Errorf("log %q, %v, want %q", b, err, tt.log)
			}
		})
	}
}

func TestLaunchFails(t *testing.T) { testLaunchFails(t, launcher(), "") }

func testLaunchFails(t *testing.T, l *Launcher, host string) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	wait := 400 * time.Millisecond
	if host != "" {
		wait = 3 * time.Second // it takes a connection
	}
	tests := []struct {
		name    string
		command []string
		ready   Ready
		want    []string
		machine bool // it is the machine's
	}{
		{"no such program", []string{"no-such-server"}, Ready{}, []string{"launch decode", "127", "no-such-server"}, true},
		{"no such program in a script", []string{"sh", "-c", "no-such-server"}, Ready{}, []string{"127", "no-such-server"}, true},
		{"dies while starting", []string{"sh", "-c", "echo CUDA out of memory; exit 3"}, Ready{}, []string{"exit status 3", "CUDA out of memory"}, false},
		{"disk full", []string{"sh", "-c", "echo 'OSError: [Errno 28] No space left on device'; exit 1"}, Ready{}, []string{"exit status 1", "No space left"}, true},
		{"a port of its own taken", []string{"sh", "-c", "echo \"OSError: [Errno 98] error while attempting to bind on address ('0.0.0.0', 30001): address already in use\"; exit 1"}, Ready{}, []string{"30001"}, true},
		{"killed", []string{"sh", "-c", "kill -KILL $$"}, Ready{}, []string{"137"}, true},
		{"never ready", []string{"sh", "-c", "echo loading; sleep 60"}, Ready{Timeout: wait}, []string{"not ready after " + wait.String(), "loading"}, false},
		{"port taken", []string{"true"}, Ready{URL: "http://" + taken.Addr().String()}, []string{"something listens at", "choose another port"}, true},
		{"says nothing", []string{"false"}, Ready{}, []string{"exit status 1", "is empty"}, false},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if host != "" && tt.name == "says nothing" {
				t.Skip("what a login prints is in the log")
			}
			if tt.ready.URL == "" {
				tt.ready.URL = "http://" + freeAddress(t)
			}
			if tt.ready.Timeout == 0 {
				tt.ready.Timeout = 20 * time.Second
			}
			_, err := l.Launch(t.Context(), []Process{{Name: "decode", Command: tt.command, Host: host}}, tt.ready, t.TempDir())
			if err == nil {
				t.Fatal("no error")
			}
			for _, want := range tt.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q lacks %q", err, want)
				}
			}
			if _, ok := errors.AsType[*LaunchError](err); ok != (tt.name != "port taken") {
				t.Errorf("error %T", err)
			}
			if got := OfMachine(err); got != tt.machine {
				t.Errorf("of the machine: %v, want %v: %v", got, tt.machine, err)
			}
		})
	}
}

// A server that is told to end by an earlier start of ours is waited for;
// another isn't.
func TestPortStillTaken(t *testing.T) {
	l := launcher()
	l.Grace = 2 * time.Second
	address := freeAddress(t)
	ending := exec.Command(os.Args[0], "server", address)
	ending.Env = append(os.Environ(), LaunchVariable+"=earlier")
	if err := ending.Start(); err != nil {
		t.Fatal(err)
	}
	ended := time.AfterFunc(portWait+500*time.Millisecond, func() { ending.Process.Kill() })
	defer ended.Stop()
	go ending.Wait()
	for !answers(t.Context(), "http://"+address) {
		time.Sleep(10 * time.Millisecond)
	}
	if err := l.nobodyThere(t.Context(), "http://"+address); err != nil {
		t.Errorf("one of ours: %v", err)
	}

	other, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	began := time.Now()
	err = l.nobodyThere(t.Context(), "http://"+other.Addr().String())
	if took := time.Since(began); err == nil || took > portWait/2 || !strings.Contains(err.Error(), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("after %s: %v", took, err)
	}
}

package target

import (
	"context"
	"fmt"
	"io/fs"
	"strings"
	"testing"
)

// recorded is a machine whose files were written down.
type recorded map[string]string

func (r recorded) ReadFile(_ context.Context, path string) ([]byte, error) {
	if text, ok := r[path]; ok {
		return []byte(text), nil
	}
	return nil, fs.ErrNotExist
}

func (r recorded) Readlink(context.Context, string) (string, error) { return "", fs.ErrNotExist }

func (r recorded) Run(context.Context, ...string) ([]byte, error) { return nil, fs.ErrInvalid }

func TestProgram(t *testing.T) {
	machine := recorded{}
	process := func(pid, parent int, args ...string) {
		machine[fmt.Sprintf("/proc/%d/cmdline", pid)] = strings.Join(args, "\x00") + "\x00"
		machine[fmt.Sprintf("/proc/%d/stat", pid)] = fmt.Sprintf("%d (a b) c) S %d %s", pid, parent, strings.Repeat("7 ", 30))
	}
	process(10, 1, "/venv/bin/python3", "/venv/bin/vllm", "serve", "m")
	process(11, 10, "VLLM::EngineCore_DP0")
	process(12, 11, "/venv/bin/python3", "-c", "from multiprocessing.spawn import spawn_main; spawn_main(tracker_fd=5)", "--multiprocessing-fork")
	process(13, 10, "/venv/bin/python3", "-c", "from multiprocessing.resource_tracker import main;main(4)")
	process(20, 1, "sglang::scheduler_TP0")
	for pid, want := range map[int]int{10: 10, 11: 10, 12: 10, 13: 10, 20: 20} {
		if got, err := Program(t.Context(), machine, pid); got != want || err != nil {
			t.Errorf("process %d was started as %d, %v; want %d", pid, got, err, want)
		}
	}
	if _, err := Program(t.Context(), machine, 99); err == nil {
		t.Error("a process that isn't there has a command line")
	}
}

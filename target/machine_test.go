package target

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"syscall"
	"testing"
)

func TestOfMachine(t *testing.T) {
	_, noDir := (&Launcher{}).Launch(t.Context(), []Process{{Name: "x", Command: []string{"/nowhere/server"}}}, Ready{}, filepath.Join(t.TempDir(), "\x00"))
	_, noProgram := (&Launcher{}).Launch(t.Context(), []Process{{Name: "x", Command: []string{"/nowhere/server"}}}, Ready{}, t.TempDir())
	_, noCommand := (&Launcher{}).Launch(t.Context(), []Process{{Name: "x"}}, Ready{}, t.TempDir())
	tests := []struct {
		name string
		err  error
		want bool
	}{
		{"none", nil, false},
		{"logs that can't be written", noDir, true},
		{"a program that isn't there", noProgram, true},
		{"no command", noCommand, false},
		{"a full disk in mid-run", fmt.Errorf("write history: %w", &fs.PathError{Op: "write", Path: "history.jsonl.zst", Err: syscall.ENOSPC}), true},
		{"no memory", syscall.ENOMEM, true},
		{"another error", errors.New("attest: no answer"), false},
		{"another of the system's", fmt.Errorf("read: %w", syscall.ECONNRESET), false},
		{"a crash", &LaunchError{Process: "x", Reason: "ended", Code: 139}, false},
		{"a setting that isn't known", &LaunchError{Process: "x", Code: 2, Tail: "error: unrecognized arguments: --x"}, false},
		{"GPU memory", &LaunchError{Process: "x", Code: 1, Tail: "torch.OutOfMemoryError: CUDA out of memory"}, false},
		{"no GPU", &LaunchError{Process: "x", Code: 1, Tail: "RuntimeError: No CUDA GPUs are available\n"}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := OfMachine(tt.err); got != tt.want {
				t.Errorf("got %v, want %v: %v", got, tt.want, tt.err)
			}
		})
	}
}

func TestBrief(t *testing.T) {
	e := &LaunchError{Process: "decode", Reason: "ended: exit status 1", LogFile: "/x/decode.log", Tail: "loading\nOSError: no\n\n"}
	if got, want := e.Brief(), "launch decode: ended: exit status 1: OSError: no"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

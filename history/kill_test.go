package history

import (
	"bufio"
	"bytes"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

var (
	kills = flag.Int("kills", 30, "how often TestKill kills a writer")
	megas = flag.Int("mb", 200, "size in MB of the history that TestMemory reads")
)

// The tests that need a process of their own run this binary again.
const childVariable = "HISTORY_TEST_CHILD"

func TestMain(m *testing.M) {
	switch os.Getenv(childVariable) {
	case "write":
		writeUntilKilled(os.Args[1], os.Args[2])
	case "read":
		readAndReport(os.Args[1])
	default:
		flag.Parse()
		os.Exit(m.Run())
	}
}

func child(what string, args ...string) *exec.Cmd {
	cmd := exec.Command(os.Args[0], args...)
	cmd.Env = append(os.Environ(), childVariable+"="+what)
	cmd.Stderr = os.Stderr
	return cmd
}

// killOp is the op that a session writes at its turn: size and content follow
// from the two.
func killOp(session, turn int) *Op {
	r := rand.New(rand.NewPCG(uint64(session), uint64(turn)))
	op := &Op{ID: int64(turn), Phase: Main, Kind: "agent", Session: session, Turn: turn, Outcome: OK}
	for range r.IntN(40) {
		data := fmt.Appendf(nil, `{"n":%d,"filler":"%s"}`, r.Uint64(), strings.Repeat("x", r.IntN(400)))
		op.Chunks = append(op.Chunks, Chunk{time.Duration(r.IntN(1e6)) * time.Microsecond, data})
	}
	return op
}

// writeUntilKilled writes ops and says which ones have been written.
func writeUntilKilled(path, sessions string) {
	w, err := Create(path, Header{Model: "m"})
	if err != nil {
		panic(err)
	}
	n, err := strconv.Atoi(sessions)
	if err != nil {
		panic(err)
	}
	var wg sync.WaitGroup
	for session := range n {
		wg.Go(func() {
			for turn := 0; ; turn++ {
				if err := w.Op(killOp(session, turn)); err != nil {
					panic(err)
				}
				// One write(2) per line: lines of goroutines don't mix.
				fmt.Fprintf(os.Stdout, "%d %d\n", session, turn)
			}
		})
	}
	wg.Wait()
}

// Whatever moment a writer is killed at, no op that it had reported is
// missing, and what the file holds is whole and in order.
func TestKill(t *testing.T) {
	total, truncated := 0, 0
	for i := range *kills {
		r := rand.New(rand.NewPCG(11, uint64(i)))
		sessions := []int{1, 2, 30}[i%3]
		path := filepath.Join(t.TempDir(), "history.jsonl.zst")
		cmd := child("write", path, strconv.Itoa(sessions))
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		reported := make([]int, sessions) // ops per session
		left := 1 + r.IntN(300)
		for lines := bufio.NewScanner(out); lines.Scan(); left-- {
			var session, turn int
			if _, err := fmt.Sscan(lines.Text(), &session, &turn); err != nil {
				t.Fatalf("the child says %q: %v", lines.Text(), err)
			}
			if turn != reported[session] {
				t.Fatalf("session %d reports turn %d, %d is due", session, turn, reported[session])
			}
			reported[session]++
			if left == 1 {
				cmd.Process.Kill()
			}
		}
		cmd.Wait()
		if left > 0 {
			t.Fatalf("the child ended by itself, %d reports early", left)
		}

		f, err := Open(path)
		if err != nil {
			t.Fatal(err)
		}
		entries, err := readAll(t, f)
		if err != nil {
			t.Fatalf("kill %d: %v", i, err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if f.Truncated() {
			truncated++
		}
		found := make([]int, sessions)
		for _, e := range entries {
			if e.Op.Turn != found[e.Op.Session] {
				t.Fatalf("kill %d: session %d has turn %d where %d is due", i, e.Op.Session, e.Op.Turn, found[e.Op.Session])
			}
			want, _ := appendOp(nil, killOp(e.Op.Session, e.Op.Turn))
			if got, _ := appendOp(nil, e.Op); !bytes.Equal(got, want) {
				t.Fatalf("kill %d: wrote %s\nread %s", i, want, got)
			}
			found[e.Op.Session]++
		}
		for session, n := range reported {
			total += n
			if found[session] < n {
				t.Errorf("kill %d: session %d reported %d ops, the file holds %d", i, session, n, found[session])
			}
		}
	}
	if truncated != *kills {
		t.Errorf("%d of %d files say that they were cut short", truncated, *kills)
	}
	t.Logf("%d kills, %d reported ops, none missing", *kills, total)
}

// readAndReport reads a history as an oracle does and prints what it held and
// what that took.
func readAndReport(path string) {
	r, err := Open(path)
	if err != nil {
		panic(err)
	}
	defer r.Close()
	ops := 0
	for {
		rec, err := r.Next()
		if err != nil {
			break
		}
		if rec.Op != nil {
			ops++
		}
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		panic(err)
	}
	_, peak, _ := bytes.Cut(status, []byte("VmHWM:"))
	var kB int
	if _, err := fmt.Sscan(string(peak), &kB); err != nil {
		panic(err)
	}
	fmt.Fprintln(os.Stdout, ops, r.offset, kB)
}

// A history of any size is read in the same memory. -mb=2000 reads 2 GB.
func TestMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("needs /proc/self/status")
	}
	size := int64(*megas) * 1e6
	if testing.Short() {
		size = 20e6
	}
	// One frame of 100 ops, again and again.
	r := rand.New(rand.NewPCG(1, 1))
	var text []byte
	for i := range 100 {
		var err error
		if text, err = appendOp(text, streamOp(r, int64(i+1), 300)); err != nil {
			t.Fatal(err)
		}
	}
	frame := compress(t, string(text))
	frames := max(size/int64(len(text)), 1)
	path := filepath.Join(t.TempDir(), "history.jsonl.zst")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	f.Write(compress(t, headerLine))
	for range frames {
		f.Write(frame)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	out, err := child("read", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	took := time.Since(start)
	var ops, kB int
	var bytes int64
	if _, err := fmt.Sscan(string(out), &ops, &bytes, &kB); err != nil {
		t.Fatalf("the child says %q: %v", out, err)
	}
	if want := frames*int64(len(text)) + int64(len(headerLine)); int64(ops) != 100*frames || bytes != want {
		t.Errorf("%d ops of %d read, %d bytes of %d", ops, 100*frames, bytes, want)
	}
	t.Logf("%.0f MB of history, %d ops, read in %.1f s, peak RSS %.1f MiB", float64(bytes)/1e6, ops, took.Seconds(), float64(kB)/1024)
	// About 25 MiB, two zstd windows and a line among them; with the race
	// detector about 60.
	if kB > 100<<10 {
		t.Errorf("reading %d MB took %d KiB", bytes/1e6, kB)
	}
}

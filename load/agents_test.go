package load_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
)

const agentChunks = 250

// playAgent plays one shard of a benchmark's load, with one core, and prints
// chunks, CPU in microseconds, and how late it was in milliseconds at worst.
func playAgent(what string) {
	var url string
	var o load.Options
	var streams int
	if _, err := fmt.Sscan(what, &url, &o.Shard, &o.Shards, &streams); err != nil {
		panic(err)
	}
	runtime.GOMAXPROCS(1)
	dir, err := os.MkdirTemp("", "agent-")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	w, err := history.Create(filepath.Join(dir, history.FileName), history.Header{Started: time.Now()})
	if err != nil {
		panic(err)
	}
	defer w.Close()
	t := &ticks{Recorder: w}
	o.BaseURL, o.Workload, o.History = url, oneTurn{}, t
	o.Sessions, o.Concurrency = 3*streams*o.Shards, streams*o.Shards
	o.Header = http.Header{chunksHeader: {strconv.Itoa(agentChunks)}, intervalHeader: {"20ms"}}
	fmt.Println("ready")
	os.Stdin.Read(make([]byte, 1)) // the barrier
	cpu := cpuTime()
	result, err := load.Run(context.Background(), o)
	if err != nil {
		panic(err)
	}
	fmt.Println(result.Chunks, (cpuTime() - cpu).Microseconds(), slices.Max(t.late), result.Ops.Total()-result.Ops.OK)
}

// BenchmarkAgents adds agents, each a process with one core and so many streams
// of 50 chunks a second (-args -streams), for some fifteen seconds: do more of
// them do more, at the same cost? docs/scale.md has the figures.
func BenchmarkAgents(b *testing.B) {
	streams := *agentStreams
	for _, agents := range []int{1, 2, 4} {
		b.Run(strconv.Itoa(agents), func(b *testing.B) {
			url := startServer(b)
			var chunks, cpu, failed int64
			var late float64
			var took time.Duration
			for b.Loop() {
				var begin []io.WriteCloser
				var out []*bufio.Reader
				for k := range agents {
					cmd := exec.Command(os.Args[0], "-agent", fmt.Sprint(url, " ", k, " ", agents, " ", streams))
					in, err := cmd.StdinPipe()
					if err != nil {
						b.Fatal(err)
					}
					said, err := cmd.StdoutPipe()
					if err != nil {
						b.Fatal(err)
					}
					cmd.Stderr = os.Stderr
					if err := cmd.Start(); err != nil {
						b.Fatal(err)
					}
					defer cmd.Wait()
					begin, out = append(begin, in), append(out, bufio.NewReader(said))
					if _, err := out[k].ReadString('\n'); err != nil {
						b.Fatal(err)
					}
				}
				started := time.Now()
				for _, in := range begin {
					in.Close()
				}
				for k := range agents {
					var c, u, f int64
					var l float64
					if _, err := fmt.Fscan(out[k], &c, &u, &l, &f); err != nil {
						b.Fatal(err)
					}
					chunks, cpu, late, failed = chunks+c, cpu+u, max(late, l), failed+f
				}
				took += time.Since(started)
			}
			if failed > 0 {
				b.Fatalf("%d ops failed", failed)
			}
			b.ReportMetric(float64(chunks)/took.Seconds(), "chunks/s")
			b.ReportMetric(float64(cpu)/float64(chunks), "cpu-µs/chunk")
			b.ReportMetric(late, "late-ms/worst")
			b.ReportMetric(0, "ns/op")
		})
	}
}

package load_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/load"
	"github.com/culprit-project/culprit/openai"
	"github.com/culprit-project/culprit/workload"
)

// benchChunk is a chunk of 250 bytes as vLLM sends it.
const benchChunk = `{"id":"chatcmpl-1b0f4ea9c6f24ae2b06d1f4e88f7a4d3","object":"chat.completion.chunk","created":1764422040,"model":"google/gemma-3-270m-it","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`

// How a benchmark asks its server: a stream has so many chunks, give or take a
// half so that not all streams end at once, one each interval.
const (
	chunksHeader   = "X-Chunks"
	intervalHeader = "X-Interval"
)

// serveChunks is the benchmarks' server: it prints its address and lives until
// its standard input ends. The streams of one interval share a few timers, so
// that a small machine can feed thousands of them.
func serveChunks() {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	fmt.Println(l.Addr())
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go serveConn(c)
		}
	}()
	io.Copy(io.Discard, os.Stdin)
}

type stream struct {
	conn net.Conn
	left int
	done chan struct{}
}

const groupsPerInterval = 20

var (
	groupsMu sync.Mutex
	groups   = map[time.Duration][]chan stream{}
	turn     int
)

// join hands a stream to one of the goroutines that write at its interval.
func join(interval time.Duration, s stream) {
	groupsMu.Lock()
	list := groups[interval]
	if list == nil {
		for i := range groupsPerInterval {
			c := make(chan stream, 10_000)
			list = append(list, c)
			go writeGroup(interval, interval*time.Duration(i)/groupsPerInterval, c)
		}
		groups[interval] = list
	}
	turn++
	s.left = s.left/2 + s.left*(turn*7%101)/101
	c := list[turn%len(list)]
	groupsMu.Unlock()
	c <- s
}

func writeGroup(interval, offset time.Duration, joining chan stream) {
	time.Sleep(offset)
	words := []string{" the", " answer", ",", " is", " forty", "-two"}
	var events [][]byte
	for _, w := range words {
		data := fmt.Sprintf("data: "+benchChunk+"\n\n", w)
		events = append(events, fmt.Appendf(nil, "%x\r\n%s\r\n", len(data), data))
	}
	last := fmt.Sprintf("data: "+strings.Replace(benchChunk, `"finish_reason":null`, `"finish_reason":"stop"`, 1)+"\n\ndata: [DONE]\n\n", "")
	end := fmt.Appendf(nil, "%x\r\n%s\r\n0\r\n\r\n", len(last), last)
	var streams []stream
	next := time.Now()
	for n := 0; ; n++ {
		// A write takes time itself, so an interval counts from the last one's
		// start; a server that is behind by more doesn't send in bursts.
		next = next.Add(interval)
		if time.Since(next) > interval {
			next = time.Now()
		}
		time.Sleep(time.Until(next))
		for more := true; more; {
			select {
			case s := <-joining:
				streams = append(streams, s)
			default:
				if more = len(streams) == 0; more {
					streams = append(streams, <-joining)
				}
			}
		}
		streams = slices.DeleteFunc(streams, func(s stream) bool { return s.left < 0 })
		for i := range streams {
			s := &streams[i]
			s.left--
			event := events[n%len(events)]
			if s.left < 0 {
				event = end
			}
			if _, err := s.conn.Write(event); err != nil {
				s.left = -1
			}
			if s.left < 0 {
				close(s.done)
			}
		}
	}
}

func serveConn(c net.Conn) {
	defer c.Close()
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		io.Copy(io.Discard, req.Body)
		chunks, _ := strconv.Atoi(req.Header.Get(chunksHeader))
		interval, _ := time.ParseDuration(req.Header.Get(intervalHeader))
		io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
		s := stream{c, chunks, make(chan struct{})}
		join(interval, s)
		<-s.done
	}
}

// startServer runs the server in a process of its own.
func startServer(tb testing.TB) string {
	tb.Helper()
	cmd := exec.Command(os.Args[0], "-serve")
	stdin, err := cmd.StdinPipe()
	if err != nil {
		tb.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		tb.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { stdin.Close(); cmd.Wait() })
	address, err := bufio.NewReader(stdout).ReadString('\n')
	if err != nil {
		tb.Fatal(err)
	}
	return "http://" + strings.TrimSpace(address)
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// oneTurn is a workload whose sessions have one request.
type oneTurn struct{}

func (oneTurn) Kind() string                       { return "bench" }
func (oneTurn) Session(int, bool) workload.Session { return &oneTurnSession{} }

type oneTurnSession struct{ over bool }

func (s *oneTurnSession) Next(*openai.Reply) (workload.Turn, bool) {
	if s.over {
		return workload.Turn{}, false
	}
	s.over = true
	return workload.Turn{Request: openai.ChatRequest{Messages: []openai.Message{{Role: "user", Content: "hello"}}, MaxTokens: 500}}, true
}

// ticks keeps each second's lateness and chunks beside the history.
type ticks struct {
	load.Recorder
	mu           sync.Mutex
	late, chunks []float64
}

func (t *ticks) Event(e *history.Event) error {
	if e.Kind == history.Tick {
		t.mu.Lock()
		t.late = append(t.late, e.Values["late_ms"])
		t.chunks = append(t.chunks, e.Values["chunks"])
		t.mu.Unlock()
	}
	return t.Recorder.Event(e)
}

// BenchmarkChunk is the client's CPU for one streamed chunk of 250 bytes, of
// culprit and of a plain client that does the same: decodes the chunks, notes
// their times, and writes both to a file at the end. It reads the sockets as
// most programs do, with bufio.Scanner and encoding/json.
func BenchmarkChunk(b *testing.B) {
	const chunks = 250
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the work counts, not the waking of idle cores
	url := startServer(b)
	for _, shape := range []struct {
		streams  int
		interval time.Duration
	}{{100, 20 * time.Millisecond}, {1000, 20 * time.Millisecond}} {
		name := fmt.Sprintf("streams=%d/interval=%s", shape.streams, shape.interval)
		header := http.Header{chunksHeader: {strconv.Itoa(chunks)}, intervalHeader: {shape.interval.String()}}
		b.Run(name+"/culprit", func(b *testing.B) {
			w, err := history.Create(filepath.Join(b.TempDir(), "history.jsonl.zst"), history.Header{Started: time.Now()})
			if err != nil {
				b.Fatal(err)
			}
			defer w.Close()
			began, received := cpuTime(), int64(0)
			for b.Loop() {
				result, err := load.Run(b.Context(), load.Options{
					BaseURL: url, Header: header, Workload: oneTurn{}, Sessions: shape.streams, Concurrency: shape.streams, History: w,
				})
				if err != nil || result.Ops.OK != int64(shape.streams) {
					b.Fatalf("%v %+v", err, result)
				}
				received += result.Chunks
			}
			b.ReportMetric(float64((cpuTime()-began).Microseconds())/float64(received), "cpu-µs/chunk")
			b.ReportMetric(0, "ns/op")
		})
		b.Run(name+"/plain", func(b *testing.B) {
			file, err := os.Create(filepath.Join(b.TempDir(), "history.jsonl"))
			if err != nil {
				b.Fatal(err)
			}
			defer file.Close()
			var mu sync.Mutex
			history := json.NewEncoder(file)
			client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: shape.streams}}
			defer client.CloseIdleConnections()
			began, received := cpuTime(), 0
			for b.Loop() {
				counts := make(chan int)
				for range shape.streams {
					go func() {
						chunks := plainClient(b, client, url, header)
						mu.Lock()
						history.Encode(chunks)
						mu.Unlock()
						counts <- len(chunks)
					}()
				}
				for range shape.streams {
					received += <-counts
				}
			}
			b.ReportMetric(float64((cpuTime()-began).Microseconds())/float64(received), "cpu-µs/chunk")
			b.ReportMetric(0, "ns/op")
		})
	}
}

type plainChunk struct {
	At   time.Duration
	Data json.RawMessage
}

// plainClient reads one stream.
func plainClient(b *testing.B, client *http.Client, url string, header http.Header) (chunks []plainChunk) {
	body, _ := json.Marshal(map[string]any{"messages": []any{map[string]any{"role": "user", "content": "hello"}}, "stream": true})
	req, err := http.NewRequest(http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		b.Error(err)
		return nil
	}
	req.Header = header.Clone()
	began := time.Now()
	resp, err := client.Do(req)
	if err != nil {
		b.Error(err)
		return nil
	}
	defer resp.Body.Close()
	var content strings.Builder
	for lines := bufio.NewScanner(resp.Body); lines.Scan(); {
		data, ok := strings.CutPrefix(lines.Text(), "data: ")
		if !ok {
			continue
		}
		if data == "[DONE]" {
			chunks = append(chunks, plainChunk{time.Since(began), json.RawMessage(`"[DONE]"`)})
			continue
		}
		chunks = append(chunks, plainChunk{time.Since(began), json.RawMessage(data)})
		var chunk struct {
			ID, Object, Model string
			Created           int64
			Choices           []struct {
				Index        int
				Delta        struct{ Role, Content string }
				FinishReason *string `json:"finish_reason"`
			}
			Usage *struct{ PromptTokens, CompletionTokens int }
		}
		if err := json.Unmarshal([]byte(data), &chunk); err != nil {
			b.Error(err)
			return chunks
		}
		content.WriteString(chunk.Choices[0].Delta.Content)
	}
	return chunks
}

// BenchmarkStreams holds 4,000 streams of 50 chunks a second for some fifteen
// seconds with one core, and shows how late the client is. The server needs a
// core to itself.
func BenchmarkStreams(b *testing.B) {
	const streams, chunks = 4000, 250
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	url := startServer(b)
	w, err := history.Create(filepath.Join(b.TempDir(), "history.jsonl.zst"), history.Header{Started: time.Now()})
	if err != nil {
		b.Fatal(err)
	}
	defer w.Close()
	t := &ticks{Recorder: w}
	began, cpu, received := time.Now(), cpuTime(), int64(0)
	for b.Loop() {
		result, err := load.Run(b.Context(), load.Options{
			BaseURL: url, Workload: oneTurn{}, Sessions: 3 * streams, Concurrency: streams, History: t,
			Header: http.Header{chunksHeader: {strconv.Itoa(chunks)}, intervalHeader: {"20ms"}},
		})
		if err != nil || result.Ops.OK != 3*streams {
			b.Fatalf("%v %+v", err, result)
		}
		received += result.Chunks
	}
	used := cpuTime() - cpu
	slices.Sort(t.late)
	slices.Sort(t.chunks)
	b.ReportMetric(float64(used.Microseconds())/float64(received), "cpu-µs/chunk")
	b.ReportMetric(used.Seconds()/time.Since(began).Seconds(), "cores")
	b.ReportMetric(t.late[len(t.late)/2], "late-ms/median")
	b.ReportMetric(t.late[len(t.late)-1], "late-ms/worst")
	b.ReportMetric(t.chunks[len(t.chunks)/2], "chunks/s-median")
	b.ReportMetric(0, "ns/op")
}

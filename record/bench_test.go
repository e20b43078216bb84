package record

import (
	"bufio"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// BenchmarkProxy plays 1,000 streams of 250-byte chunks, five a second each,
// straight at a server and then through the proxy, and reports what the proxy
// adds: to the time until the first byte, and to the way of a chunk from the
// server's write to the client's read.
func BenchmarkProxy(b *testing.B) {
	const (
		streams  = 1000
		chunks   = 15
		interval = 200 * time.Millisecond
	)
	start := time.Now()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/event-stream")
		flush := http.NewResponseController(w).Flush
		tick := time.NewTicker(interval)
		defer tick.Stop()
		pad := strings.Repeat("x", 170)
		for range chunks {
			var stamp [8]byte
			binary.BigEndian.PutUint64(stamp[:], uint64(time.Since(start)))
			fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"%s%s\"}}]}\n\n", hex.EncodeToString(stamp[:]), pad)
			if flush() != nil {
				return
			}
			<-tick.C
		}
		io.WriteString(w, "data: [DONE]\n\n")
	}))
	defer server.Close()
	proxy, err := New(Options{Upstream: mustParse(b, server.URL), Dir: b.TempDir()})
	if err != nil {
		b.Fatal(err)
	}
	defer proxy.Close()
	through := httptest.NewServer(proxy)
	defer through.Close()

	play := func(url string) (first, way []time.Duration) {
		transport := &http.Transport{MaxIdleConnsPerHost: streams}
		defer transport.CloseIdleConnections()
		var mu sync.Mutex
		var wg sync.WaitGroup
		for i := range streams {
			wg.Go(func() {
				time.Sleep(interval * time.Duration(i) / streams * 5) // spread over a second
				r, err := http.NewRequestWithContext(b.Context(), http.MethodPost, url+"/v1/chat/completions", strings.NewReader(`{"stream":true,"messages":[{"role":"user","content":"hi"}]}`))
				if err != nil {
					b.Error(err)
					return
				}
				sent := time.Now()
				resp, err := transport.RoundTrip(r)
				if err != nil {
					b.Error(err)
					return
				}
				defer resp.Body.Close()
				lines := bufio.NewReader(resp.Body)
				var mine []time.Duration
				var mineFirst time.Duration
				for {
					line, err := lines.ReadString('\n')
					if err != nil {
						break
					}
					if _, stamp, ok := strings.Cut(line, `"content":"`); ok {
						raw, err := hex.DecodeString(stamp[:16])
						if err != nil {
							b.Error(err)
							return
						}
						if mineFirst == 0 {
							mineFirst = time.Since(sent)
						}
						mine = append(mine, time.Since(start)-time.Duration(binary.BigEndian.Uint64(raw)))
					}
				}
				mu.Lock()
				defer mu.Unlock()
				first, way = append(first, mineFirst), append(way, mine...)
			})
		}
		wg.Wait()
		slices.Sort(first)
		slices.Sort(way)
		return first, way
	}
	at := func(times []time.Duration, q float64) float64 {
		return float64(times[int(q*float64(len(times)-1))].Microseconds()) / 1000
	}
	for b.Loop() {
		plainFirst, plain := play(server.URL)
		first, way := play(through.URL)
		for _, q := range []float64{0.5, 0.99} {
			name := fmt.Sprintf("p%g", 100*q)
			b.ReportMetric(at(first, q)-at(plainFirst, q), "first-added-ms/"+name)
			b.ReportMetric(at(plainFirst, q), "first-ms/"+name)
			b.ReportMetric(at(way, q)-at(plain, q), "chunk-added-ms/"+name)
			b.ReportMetric(at(plain, q), "chunk-ms/"+name)
		}
	}
	b.StopTimer()
	if s := proxy.Stats(); s.Dropped > 0 {
		b.Fatalf("stats %+v", s)
	}
}

package history

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"
)

// streamOp is an op as a server streams it: chunks of about 250 bytes, each
// with another word.
func streamOp(r *rand.Rand, id int64, chunks int) *Op {
	op := &Op{
		ID: id, Phase: Main, Kind: "agent", Session: int(id % 80), Turn: 2, InFlight: 80, Stream: true,
		Planned: time.Second, Sent: time.Second + 40*time.Microsecond, FirstByte: 2 * time.Second, LastByte: 9 * time.Second,
		Status: 200, Outcome: OK,
		Expect: Expect{Canary: "k3vqz7mhw2xa", Call: &Call{"set_thermostat", map[string]string{"room": "b-114", "celsius": "21"}}},
	}
	words := strings.Fields("the valve in room answers with a reading of pressure and then returns to its set point before noon")
	request := map[string]any{"model": "gemma-3", "messages": []map[string]string{{"role": "user", "content": sentence(r, words, 200)}}}
	op.Request, _ = json.Marshal(request)
	at := op.FirstByte
	for range chunks {
		at += time.Duration(10000+r.IntN(20000)) * time.Microsecond
		op.Chunks = append(op.Chunks, Chunk{at, fmt.Appendf(nil,
			`{"id":"chatcmpl-%024d","object":"chat.completion.chunk","created":1764423959,"model":"google/gemma-3-270m-it","system_fingerprint":"fp_44709d6fcb","choices":[{"index":0,"delta":{"content":" %s"},"logprobs":null,"finish_reason":null}]}`,
			id, words[r.IntN(len(words))])})
	}
	op.Chunks = append(op.Chunks, Chunk{at, []byte("[DONE]")})
	return op
}

func sentence(r *rand.Rand, words []string, n int) string {
	var s strings.Builder
	for range n {
		s.WriteString(words[r.IntN(len(words))])
		fmt.Fprintf(&s, "-%d ", r.IntN(1000))
	}
	return s.String()
}

// memory is a file that keeps nothing but its length.
type memory struct{ io.Writer }

func (memory) Close() error { return nil }
func (memory) Sync() error  { return nil }

// BenchmarkWriteOp reports what one chunk of about 250 bytes costs, from the
// op in memory to compressed bytes.
func BenchmarkWriteOp(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	const chunks = 300
	var ops []*Op
	bytes := 0
	for i := range 100 {
		ops = append(ops, streamOp(r, int64(i+1), chunks))
		for _, c := range ops[i].Chunks {
			bytes += len(c.Data)
		}
	}
	w, err := newWriter("memory", memory{io.Discard}, Header{})
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if err := w.Op(ops[i%len(ops)]); err != nil {
			b.Fatal(err)
		}
		i++
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(i)/chunks, "ns/chunk")
	b.ReportMetric(float64(bytes)/float64(len(ops))/(chunks+1), "bytes/chunk")
}

// BenchmarkRead reports the speed in bytes of the uncompressed history.
func BenchmarkRead(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	var file buffer
	w, err := newWriter("memory", &file, Header{})
	if err != nil {
		b.Fatal(err)
	}
	for i := range 500 {
		if err := w.Op(streamOp(r, int64(i+1), 300)); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ReportMetric(0, "ns/op")
	for b.Loop() {
		h, err := NewReader(file.reader())
		if err != nil {
			b.Fatal(err)
		}
		for {
			if _, err = h.Next(); err != nil {
				break
			}
		}
		if !errors.Is(err, io.EOF) || h.Truncated() {
			b.Fatal(err, h.Truncated())
		}
		b.SetBytes(h.offset)
	}
	b.ReportMetric(float64(file.Len()), "file-bytes")
}

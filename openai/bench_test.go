package openai_test

import (
	"bytes"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/culprit-project/culprit/openai"
)

// words are pieces of text as a model streams them; some need escapes.
var words = []string{" the", " answer", " is", ",", "\\n", " \\\"quoted\\\"", " four", "ty", "-", "two", " caf\u00e9", "."}

// textChunks are chat chunks of about 250 bytes.
func textChunks() [][]byte {
	var chunks [][]byte
	for _, word := range words {
		chunks = append(chunks, fmt.Appendf(nil,
			`{"id":"chatcmpl-1b0f4ea9c6f24ae2b06d1f4e88f7a4d3","object":"chat.completion.chunk","created":1764422040,"model":"google/gemma-3-270m-it","choices":[{"index":0,"delta":{"content":"%s"},"logprobs":null,"finish_reason":null,"token_ids":null}]}`, word))
	}
	return chunks
}

func callChunks() [][]byte {
	var chunks [][]byte
	for _, word := range words {
		chunks = append(chunks, fmt.Appendf(nil,
			`{"id":"chatcmpl-1b0f4ea9c6f24ae2b06d1f4e88f7a4d3","object":"chat.completion.chunk","created":1764422040,"model":"google/gemma-3-270m-it","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"%s"}}]},"finish_reason":null}]}`, word))
	}
	return chunks
}

func BenchmarkAssembler(b *testing.B) {
	for _, bench := range []struct {
		name   string
		chunks [][]byte
	}{
		{"text", textChunks()},
		{"tool_call", callChunks()},
		{"unlike_each_other", slices.Concat(textChunks()[:1], callChunks()[:1])},
	} {
		b.Run(bench.name, func(b *testing.B) {
			b.SetBytes(int64(len(bytes.Join(bench.chunks, nil)) / len(bench.chunks)))
			b.ReportAllocs()
			var a openai.Assembler
			n := 0
			for b.Loop() {
				a.Add(bench.chunks[n%len(bench.chunks)])
				if n++; n%500 == 0 {
					a.Reset()
				}
			}
		})
	}
}

func BenchmarkReader(b *testing.B) {
	var stream bytes.Buffer
	w := openai.NewWriter(&stream, nil)
	for range 100 {
		for _, c := range textChunks() {
			w.Event(c)
		}
	}
	events := 100 * len(words)
	b.SetBytes(int64(stream.Len() / events))
	b.ReportAllocs()
	now := func() time.Duration { return 0 }
	source := bytes.NewReader(stream.Bytes())
	r := openai.NewReader(loop{source}, now, 0)
	for b.Loop() {
		if _, err := r.Next(); err != nil {
			b.Fatal(err)
		}
	}
}

// loop reads from the start again at the end.
type loop struct{ r *bytes.Reader }

func (l loop) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if err != nil {
		l.r.Seek(0, 0)
		return l.r.Read(p)
	}
	return n, nil
}

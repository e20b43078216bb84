package openai

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// recorded returns a few real transcripts.
func recorded(f *testing.F) (raw [][]byte) {
	f.Helper()
	files, err := filepath.Glob("testdata/transcripts/*-stream*.http")
	if err != nil || len(files) == 0 {
		f.Fatalf("no transcripts (%v)", err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		if len(b) < 8<<10 {
			raw = append(raw, b)
		}
	}
	return raw
}

// FuzzReader reads any bytes whole and byte by byte: the same events, the same
// end, and never an event over the limit.
func FuzzReader(f *testing.F) {
	for _, seed := range []string{
		"data: a\n\ndata: b\n\n", "\xef\xbb\xbfdata: a\r\n\r\n: c\rdata:b\r\r", "event: error\ndata: x\ndata\n\n", "error: x", "data: 0123456789012345678901234567890123456789\n\n",
	} {
		f.Add([]byte(seed))
	}
	for _, raw := range recorded(f) {
		f.Add(raw)
	}
	const limit = 32
	f.Fuzz(func(t *testing.T, stream []byte) {
		read := func(source io.Reader) (events []Event, err error) {
			r := NewReader(source, func() time.Duration { return 0 }, limit)
			for {
				e, err := r.Next()
				if err != nil {
					return events, err
				}
				if len(e.Data) > limit {
					t.Errorf("an event of %d bytes, the limit is %d", len(e.Data), limit)
				}
				e.Data = bytes.Clone(e.Data)
				events = append(events, e)
			}
		}
		whole, wholeErr := read(bytes.NewReader(stream))
		bytewise, bytewiseErr := read(iotest.OneByteReader(bytes.NewReader(stream)))
		if diff := cmp.Diff(whole, bytewise); diff != "" {
			t.Errorf("whole and byte by byte differ:\n%s", diff)
		}
		if errors.Is(wholeErr, io.EOF) != errors.Is(bytewiseErr, io.EOF) {
			t.Errorf("whole: %v, byte by byte: %v", wholeErr, bytewiseErr)
		}
	})
}

// FuzzAssembler adds any lines: nothing panics, the shortcut for chunks that
// are alike changes nothing, and a chunk that encoding/json refuses is refused.
func FuzzAssembler(f *testing.F) {
	for _, seed := range []string{
		`{"id":"x","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"a"},"finish_reason":null}]}` + "\n" +
			`{"id":"x","model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"b\n"},"finish_reason":null}]}`,
		`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"id":"a","function":{"name":"f","arguments":""}}]}}]}` + "\n" +
			`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{"}}]}}]}` + "\n" +
			`{"choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":"}"}}]}}]}`,
		`{"choices":[{"index":0,"text":"a","logprobs":{"content":[{"token":"a","logprob":-1,"top_logprobs":[]}],"tokens":["a"],"token_logprobs":[-1],"top_logprobs":[{"a":-1}]},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"prompt_tokens_details":{"cached_tokens":1}}}`,
		`{"error":{"message":"m","type":"t","code":1}}` + "\n" + `{"object":"error","message":"m"}` + "\n[DONE]\n" + `{"detail":[1]}`,
		`{"choices":[{"delta":{"content":[{"text":"a"}],"reasoning":"b","tool_calls":[{"function":{"arguments":{"a":1}}}]},"index":1}]}`,
	} {
		f.Add([]byte(seed))
	}
	for _, raw := range recorded(f) {
		f.Add(bytes.ReplaceAll(raw, []byte("data: "), nil))
	}
	f.Fuzz(func(t *testing.T, lines []byte) {
		var quick, slow Assembler
		for line := range bytes.SplitSeq(lines, []byte("\n")) {
			before := bytes.Clone(line)
			quick.Add(line)
			slow.frame.head = nil
			slow.Add(line)
			if !bytes.Equal(before, line) {
				t.Fatalf("Add changed its data: %q, was %q", line, before)
			}
			var alone Assembler
			alone.Add(line)
			if refused := len(alone.reply.Anomalies) > 0 && alone.reply.Anomalies[0] == InvalidJSON; !alone.reply.Done && !refused && !json.Valid(line) {
				t.Errorf("%q isn't JSON", line)
			}
		}
		if diff := cmp.Diff(slow.Reply(), quick.Reply()); diff != "" {
			t.Errorf("the shortcut changes the reply (-without +with):\n%s", diff)
		}
		if ReadBody(lines) == nil {
			t.Error("ReadBody returned nil")
		}
	})
}

package replay

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/history"
)

// maxLine is the longest line of a JSONL file.
const maxLine = 64 << 20

// Read reads a trace: a history or the run directory that one is in, or a file
// in one of the other formats, which its content tells. The whole trace is
// held in memory.
func Read(path string) (*Trace, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, history.FileName)
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("replay: %w", err)
	}
	defer f.Close()
	t, err := read(bufio.NewReaderSize(f, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("replay %s: %w", path, err)
	}
	return t, nil
}

func read(in *bufio.Reader) (t *Trace, err error) {
	head, err := in.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch first, err := firstByte(in); {
	case bytes.Equal(head, []byte{0x28, 0xb5, 0x2f, 0xfd}): // zstd
		t, err = readHistory(in)
		if err != nil {
			return nil, err
		}
	case err != nil:
		return nil, errors.New("the file is empty")
	case first == '[':
		if t, err = readArray(in); err != nil {
			return nil, err
		}
	case first == '{':
		if t, err = readLines(in); err != nil {
			return nil, err
		}
	default:
		if t, err = readCSV(in); err != nil {
			return nil, err
		}
	}
	t.rebase()
	return t, nil
}

// firstByte skips white space and a byte order mark.
func firstByte(in *bufio.Reader) (byte, error) {
	for {
		b, err := in.Peek(1)
		if err != nil {
			return 0, err
		}
		if !bytes.ContainsAny(b, " \t\r\n") && b[0] != 0xEF && b[0] != 0xBB && b[0] != 0xBF {
			return b[0], nil
		}
		if _, err := in.Discard(1); err != nil {
			return 0, err
		}
	}
}

// readHistory takes the ops of the sessions under load: the control, and what
// culprit sent beside the sessions, it sends by itself.
func readHistory(in io.Reader) (*Trace, error) {
	r, err := history.NewReader(in)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	t := &Trace{Format: "history", Header: r.Header(), Timed: true}
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			return t, nil
		}
		if err != nil {
			return nil, err
		}
		op := rec.Op
		if op == nil {
			continue
		}
		var body struct {
			Messages []json.RawMessage
			Stream   bool
		}
		if op.Phase != history.Main || json.Unmarshal(op.Request, &body) != nil || len(body.Messages) == 0 {
			t.Left++
			continue
		}
		q := Request{
			Op: op.ID, Conversation: strconv.Itoa(op.Session), At: op.Sent, Body: bytes.Clone(op.Request),
			Stream: body.Stream, Expect: op.Expect, End: op.LastByte,
		}
		if op.Outcome == history.Cancelled {
			q.HungUp, q.HungUpAfter = true, op.LastByte-op.Sent
			if q.Stream {
				q.HungUpChunks = len(op.Chunks)
			}
		}
		t.Requests = append(t.Requests, q)
	}
}

// line is what a line of the JSONL formats may have, of which each has some.
type line struct {
	Messages      []json.RawMessage `json:"messages"`
	Stream        bool              `json:"stream"`
	Conversations []turn            `json:"conversations"`
	ResourceSpans []resourceSpans   `json:"resourceSpans"`
	Timestamp     *float64          `json:"timestamp"` // milliseconds
	InputLength   *float64          `json:"input_length"`
	HashIDs       []int64           `json:"hash_ids"`
	SessionID     json.RawMessage   `json:"session_id"`
}

func readLines(in *bufio.Reader) (*Trace, error) {
	t := &Trace{}
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	for n := 1; lines.Scan(); n++ {
		raw := bytes.TrimSpace(lines.Bytes())
		if len(raw) == 0 {
			continue
		}
		if err := t.line(raw); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
	}
	return t, lines.Err()
}

func readArray(in *bufio.Reader) (*Trace, error) {
	t := &Trace{}
	d := json.NewDecoder(in)
	if _, err := d.Token(); err != nil {
		return nil, err
	}
	for n := 1; d.More(); n++ {
		var raw json.RawMessage
		err := d.Decode(&raw)
		if err == nil {
			err = t.line(raw)
		}
		if err != nil {
			return nil, fmt.Errorf("element %d: %w", n, err)
		}
	}
	return t, nil
}

// line takes one object, whose members tell the format.
func (t *Trace) line(raw []byte) error {
	var l line
	if err := json.Unmarshal(raw, &l); err != nil {
		return fmt.Errorf("not a JSON object of a known format: %w", err)
	}
	var format string
	var take func(line, []byte) error
	switch {
	case l.ResourceSpans != nil:
		format, take = "otel", t.spans
	case l.Conversations != nil:
		format, take = "sharegpt", t.shareGPT
	case l.Messages != nil:
		format, take = "messages", t.messages
	case l.InputLength != nil:
		format, take = "mooncake", t.mooncake
	default:
		return errors.New("it has none of messages (OpenAI, K2VV), conversations (ShareGPT), resourceSpans (OpenTelemetry), input_length (Mooncake); SGLang's request dumps are Python pickles: convert them to one request body a line")
	}
	if t.Format != "" && t.Format != format {
		return fmt.Errorf("it looks like %s, and what came before like %s", format, t.Format)
	}
	t.Format = format
	return take(l, raw)
}

// add numbers a request.
func (t *Trace) add(q Request) {
	q.Op = int64(len(t.Requests) + 1)
	t.Requests = append(t.Requests, q)
}

// messages takes a request body as it is, but for the members that verifiers'
// test sets and traces add to it.
func (t *Trace) messages(l line, raw []byte) error {
	var body map[string]json.RawMessage
	if err := json.Unmarshal(raw, &body); err != nil {
		return err
	}
	q := Request{Stream: l.Stream, Body: bytes.Clone(raw)}
	if l.Timestamp != nil {
		t.Timed = true
		var err error
		if q.At, err = milliseconds(*l.Timestamp); err != nil {
			return err
		}
	}
	had := len(body)
	for _, name := range []string{"check_type", "timestamp", "session_id"} {
		delete(body, name)
	}
	if len(body) < had {
		b, err := json.Marshal(body)
		if err != nil {
			return err
		}
		q.Body = b
	}
	t.add(q)
	return nil
}

func milliseconds(v float64) (time.Duration, error) {
	if math.IsNaN(v) || v < 0 || v > 1e12 {
		return 0, fmt.Errorf("a time of %g ms can't be", v)
	}
	return time.Duration(v * float64(time.Millisecond)), nil
}

// turn is one of ShareGPT's.
type turn struct {
	From  string `json:"from"`
	Value string `json:"value"`
}

var shareGPTRoles = map[string]string{
	"human": "user", "user": "user", "system": "system",
	"gpt": "assistant", "assistant": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant",
}

// shareGPT asks again what people asked, after the replies that they had got.
func (t *Trace) shareGPT(l line, _ []byte) error {
	type message struct {
		Role    string `json:"role"`
		Content string `json:"content"`
	}
	var so []message
	name := strconv.Itoa(t.conversations)
	t.conversations++
	for _, m := range l.Conversations {
		role, ok := shareGPTRoles[m.From]
		if !ok {
			t.Left++
			return nil // a role that chat completions don't have: the rest hangs on it
		}
		so = append(so, message{role, m.Value})
		if role != "user" {
			continue
		}
		body, err := json.Marshal(map[string]any{"messages": so, "stream": true})
		if err != nil {
			return err
		}
		t.add(Request{Conversation: name, Stream: true, Body: body})
	}
	return nil
}

// mooncake takes a row of the traces that hold lengths and blocks alone.
func (t *Trace) mooncake(l line, _ []byte) error {
	q := Request{Blocks: l.HashIDs, Conversation: strings.Trim(string(l.SessionID), `"`)}
	if *l.InputLength < 0 || *l.InputLength > 1e9 {
		return fmt.Errorf("an input_length of %g can't be", *l.InputLength)
	}
	q.InputTokens = int(*l.InputLength)
	if l.Timestamp != nil {
		t.Timed = true
		var err error
		if q.At, err = milliseconds(*l.Timestamp); err != nil {
			return err
		}
	}
	t.add(q)
	return nil
}

// readCSV reads BurstGPT's: a time in seconds and lengths.
func readCSV(in io.Reader) (*Trace, error) {
	r := csv.NewReader(in)
	r.FieldsPerRecord = -1
	head, err := r.Read()
	if err != nil {
		return nil, fmt.Errorf("neither a history nor JSON nor CSV: %w", err)
	}
	column := func(names ...string) int {
		return slices.IndexFunc(head, func(h string) bool { return slices.Contains(names, strings.ToLower(strings.TrimSpace(h))) })
	}
	at, input, name := column("timestamp"), column("request tokens", "input_length"), column("session id", "session_id")
	if at < 0 || input < 0 {
		return nil, errors.New(`neither a history nor JSON; CSV needs the columns "Timestamp" and "Request tokens", as BurstGPT has them`)
	}
	t := &Trace{Format: "burstgpt", Timed: true}
	for {
		row, err := r.Read()
		if errors.Is(err, io.EOF) {
			return t, nil
		}
		if err != nil {
			return nil, err
		}
		n, _ := r.FieldPos(0)
		if len(row) <= max(at, input, name) {
			return nil, fmt.Errorf("line %d has %d columns", n, len(row))
		}
		seconds, err1 := strconv.ParseFloat(row[at], 64)
		tokens, err2 := strconv.ParseFloat(row[input], 64)
		if err := cmp.Or(err1, err2); err != nil || !(tokens >= 0 && tokens <= 1e9) {
			return nil, fmt.Errorf("line %d: time %q or tokens %q can't be read", n, row[at], row[input])
		}
		q := Request{InputTokens: int(tokens)}
		if q.At, err = milliseconds(1000 * seconds); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		if name >= 0 {
			q.Conversation = row[name]
		}
		t.add(q)
	}
}

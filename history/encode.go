package history

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"
)

// headerRecord is the header as its line holds it.
type headerRecord struct {
	Record string `json:"record"`
	Header
}

func appendHeader(dst []byte, h Header) ([]byte, error) {
	h.Format = Format
	line, err := marshal(headerRecord{"run", h})
	if err != nil {
		return dst, err
	}
	return append(append(dst, line...), '\n'), nil
}

// marshal leaves <, > and & as they are, for those who read the file.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	err := e.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte{'\n'}), err
}

// appendOp appends the op's line. It writes by hand what occurs per chunk and
// leaves the rest to encoding/json.
func appendOp(dst []byte, op *Op) ([]byte, error) {
	dst = append(dst, `{"record":"op","id":`...)
	dst = strconv.AppendInt(dst, op.ID, 10)
	dst = appendTextField(dst, "phase", string(op.Phase))
	dst = appendTextField(dst, "kind", op.Kind)
	dst = appendIntField(dst, "session", op.Session)
	dst = appendIntField(dst, "turn", op.Turn)
	dst = appendIntField(dst, "in_flight", op.InFlight)
	dst = append(dst, `,"stream":`...)
	dst = strconv.AppendBool(dst, op.Stream)
	dst = appendTimeField(dst, "planned_us", op.Planned)
	dst = appendTimeField(dst, "sent_us", op.Sent)
	dst = appendTimeField(dst, "first_byte_us", op.FirstByte)
	dst = appendTimeField(dst, "last_byte_us", op.LastByte)
	dst = appendIntField(dst, "status", op.Status)
	dst = appendTextField(dst, "outcome", string(op.Outcome))
	if op.Error != "" {
		dst = appendTextField(dst, "error", op.Error)
	}
	if len(op.Request) > 0 {
		request, err := oneLine(op.Request)
		if err != nil {
			return dst, fmt.Errorf("request of op %d: %w", op.ID, err)
		}
		dst = append(dst, `,"request":`...)
		dst = append(dst, request...)
	}
	expect, err := marshal(op.Expect)
	if err != nil {
		return dst, fmt.Errorf("expectation of op %d: %w", op.ID, err)
	}
	if len(expect) > len("{}") {
		dst = append(dst, `,"expect":`...)
		dst = append(dst, expect...)
	}
	dst = append(dst, `,"chunks":[`...)
	for i := range op.Chunks {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(dst, `{"at_us":`...)
		dst = strconv.AppendInt(dst, op.Chunks[i].At.Microseconds(), 10)
		dst = appendData(dst, op.Chunks[i].Data)
		dst = append(dst, '}')
	}
	return append(dst, "]}\n"...), nil
}

// appendData appends a chunk's data in the most readable of the three ways
// that give back exactly these bytes: as the JSON that it is, as a string, or
// in base 64.
func appendData(dst, data []byte) []byte {
	switch {
	case !utf8.Valid(data):
		dst = append(dst, `,"base64":"`...)
		dst = base64.StdEncoding.AppendEncode(dst, data)
		return append(dst, '"')
	case embeds(data):
		dst = append(dst, `,"data":`...)
		return append(dst, data...)
	default:
		dst = append(dst, `,"text":`...)
		return appendText(dst, string(data))
	}
}

// embeds says whether data is one JSON value that keeps to its line and to its
// place in it: no newline, and no space around it, which a reader would take
// for the record's own.
func embeds(data []byte) bool {
	return valueEnd(data, 0, maxDepth) == len(data) && len(data) > 0 && bytes.IndexByte(data, '\n') < 0
}

// oneLine takes the space out of JSON that holds newlines or stands in space.
func oneLine(request []byte) ([]byte, error) {
	if utf8.Valid(request) && embeds(request) {
		return request, nil
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, request); err != nil {
		return nil, err
	}
	if !utf8.Valid(request) || !embeds(compact.Bytes()) {
		return nil, fmt.Errorf("not UTF-8, or nested deeper than %d", maxDepth)
	}
	return compact.Bytes(), nil
}

func appendEvent(dst []byte, e *Event) []byte {
	dst = append(dst, `{"record":"event"`...)
	dst = appendTimeField(dst, "at_us", e.At)
	dst = appendTextField(dst, "kind", string(e.Kind))
	if e.Name != "" {
		dst = appendTextField(dst, "name", e.Name)
	}
	if len(e.Values) > 0 {
		dst = append(dst, `,"values":`...)
		sep := byte('{')
		for _, name := range slices.Sorted(maps.Keys(e.Values)) {
			dst = append(dst, sep)
			dst = appendText(dst, name)
			dst = append(dst, ':')
			dst = appendNumber(dst, e.Values[name])
			sep = ','
		}
		dst = append(dst, '}')
	}
	if e.Text != "" {
		dst = appendTextField(dst, "text", e.Text)
	}
	return append(dst, "}\n"...)
}

// appendNumber writes what JSON has no number for, which scraped metrics do
// hold, as a string.
func appendNumber(dst []byte, v float64) []byte {
	switch {
	case math.IsNaN(v):
		return append(dst, `"NaN"`...)
	case math.IsInf(v, 1):
		return append(dst, `"+Inf"`...)
	case math.IsInf(v, -1):
		return append(dst, `"-Inf"`...)
	}
	return strconv.AppendFloat(dst, v, 'g', -1, 64)
}

func appendIntField(dst []byte, name string, v int) []byte {
	return strconv.AppendInt(appendName(dst, name), int64(v), 10)
}

func appendTimeField(dst []byte, name string, d time.Duration) []byte {
	return strconv.AppendInt(appendName(dst, name), d.Microseconds(), 10)
}

func appendTextField(dst []byte, name, text string) []byte {
	return appendText(appendName(dst, name), text)
}

func appendName(dst []byte, name string) []byte {
	dst = append(dst, ',', '"')
	dst = append(dst, name...)
	return append(dst, '"', ':')
}

// appendText appends a JSON string. Bytes that aren't UTF-8 become U+FFFD.
func appendText(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for i := 0; i < len(s); {
		c := s[i]
		if c >= utf8.RuneSelf {
			r, size := utf8.DecodeRuneInString(s[i:])
			dst = utf8.AppendRune(dst, r)
			i += size
			continue
		}
		switch {
		case c == '"' || c == '\\':
			dst = append(dst, '\\', c)
		case c == '\n':
			dst = append(dst, `\n`...)
		case c == '\r':
			dst = append(dst, `\r`...)
		case c == '\t':
			dst = append(dst, `\t`...)
		case c < ' ':
			dst = append(dst, `\u00`...)
			dst = append(dst, hex[c>>4], hex[c&15])
		default:
			dst = append(dst, c)
		}
		i++
	}
	return append(dst, '"')
}

// MarshalJSON writes the op as its record in a history.
func (op *Op) MarshalJSON() ([]byte, error) { return appendOp(nil, op) }

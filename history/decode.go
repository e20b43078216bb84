package history

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"time"
	"unicode/utf16"
	"unicode/utf8"
)

// decoder turns lines into records. It owns the op and the event that it
// returns and uses them again. Strings and base 64 are decoded in place: what
// it returns points into the line.
//
// Its methods work at line[i] and move i behind what they have read.
type decoder struct {
	line  []byte
	i     int
	first bool // no member of the innermost object or array has been read
	op    Op
	event Event
}

var errSyntax = errors.New("not JSON")

// decode returns the zero Record for a kind of record that it doesn't know.
func (d *decoder) decode(line []byte) (Record, error) {
	d.line, d.i = line, 0
	rec, err := d.fields()
	if err == nil && skipSpace(d.line, d.i) != len(d.line) {
		err = errSyntax
	}
	if err != nil {
		return Record{}, fmt.Errorf("not a record: %w", err)
	}
	return rec, nil
}

func (d *decoder) fields() (rec Record, err error) {
	if err := d.enter('{'); err != nil {
		return rec, err
	}
	key, _, err := d.key()
	if err != nil {
		return rec, err
	}
	if string(key) != "record" {
		return rec, errors.New(`its first key must be "record"`)
	}
	kind, err := d.text()
	if err != nil {
		return rec, err
	}
	switch string(kind) {
	case "run":
		return rec, errors.New("a second header: these are two histories in one file")
	case "op":
		rec.Op = &d.op
		// The strings serve again when the next op has the same ones.
		d.op = Op{Phase: d.op.Phase, Kind: d.op.Kind, Outcome: d.op.Outcome, Chunks: d.op.Chunks[:0]}
	case "event":
		rec.Event = &d.event
		clear(d.event.Values)
		d.event = Event{Kind: d.event.Kind, Values: d.event.Values}
	}
	for {
		key, ok, err := d.key()
		if err != nil || !ok {
			return rec, err
		}
		switch {
		case d.null():
		case rec.Op != nil:
			err = d.opField(key)
		case rec.Event != nil:
			err = d.eventField(key)
		default:
			err = d.skip()
		}
		if err != nil {
			return rec, fmt.Errorf("%q: %w", key, err)
		}
	}
}

func (d *decoder) opField(key []byte) (err error) {
	op := &d.op
	switch string(key) {
	case "id":
		op.ID, err = d.integer()
	case "phase":
		err = setText(d, &op.Phase)
	case "kind":
		err = setText(d, &op.Kind)
	case "session":
		err = d.count(&op.Session)
	case "turn":
		err = d.count(&op.Turn)
	case "in_flight":
		err = d.count(&op.InFlight)
	case "stream":
		op.Stream, err = d.boolean()
	case "planned_us":
		op.Planned, err = d.microseconds()
	case "sent_us":
		op.Sent, err = d.microseconds()
	case "first_byte_us":
		op.FirstByte, err = d.microseconds()
	case "last_byte_us":
		op.LastByte, err = d.microseconds()
	case "status":
		err = d.count(&op.Status)
	case "outcome":
		err = setText(d, &op.Outcome)
	case "error":
		err = setText(d, &op.Error)
	case "request":
		op.Request, err = d.raw()
	case "expect":
		var raw []byte
		if raw, err = d.raw(); err == nil {
			err = json.Unmarshal(raw, &op.Expect)
		}
	case "chunks":
		err = d.chunks()
	default:
		err = d.skip()
	}
	return err
}

func (d *decoder) chunks() error {
	if err := d.enter('['); err != nil {
		return err
	}
	d.op.Chunks = d.op.Chunks[:0]
	for {
		ok, err := d.element()
		if err != nil || !ok {
			return err
		}
		var c Chunk
		if err := d.chunk(&c); err != nil {
			return fmt.Errorf("chunk %d: %w", len(d.op.Chunks), err)
		}
		d.op.Chunks = append(d.op.Chunks, c)
	}
}

func (d *decoder) chunk(c *Chunk) error {
	if err := d.enter('{'); err != nil {
		return err
	}
	for {
		key, ok, err := d.key()
		if err != nil || !ok {
			return err
		}
		switch string(key) {
		case "at_us":
			c.At, err = d.microseconds()
		case "data":
			c.Data, err = d.raw()
		case "text":
			c.Data, err = d.text()
		case "base64":
			c.Data, err = d.base64()
		default:
			err = d.skip()
		}
		if err != nil {
			return fmt.Errorf("%q: %w", key, err)
		}
	}
}

func (d *decoder) eventField(key []byte) (err error) {
	e := &d.event
	switch string(key) {
	case "at_us":
		e.At, err = d.microseconds()
	case "kind":
		err = setText(d, &e.Kind)
	case "name":
		err = setText(d, &e.Name)
	case "text":
		err = setText(d, &e.Text)
	case "values":
		err = d.values()
	default:
		err = d.skip()
	}
	return err
}

func (d *decoder) values() error {
	if err := d.enter('{'); err != nil {
		return err
	}
	if d.event.Values == nil {
		d.event.Values = map[string]float64{}
	}
	for {
		key, ok, err := d.key()
		if err != nil || !ok {
			return err
		}
		// The key is used before the value is decoded: unescape may move it.
		name := string(unescape(key))
		if d.event.Values[name], err = d.number(); err != nil {
			return fmt.Errorf("%q: %w", name, err)
		}
	}
}

// enter reads the opening bracket of an object or array.
func (d *decoder) enter(bracket byte) error {
	d.i = skipSpace(d.line, d.i)
	if d.i >= len(d.line) || d.line[d.i] != bracket {
		return fmt.Errorf("no %q where one is due", bracket)
	}
	d.i++
	d.first = true
	return nil
}

// member moves to the next member of the object or array that ends with
// bracket. ok is false when there is none.
func (d *decoder) member(bracket byte) (ok bool, err error) {
	first := d.first
	d.first = false
	d.i = skipSpace(d.line, d.i)
	if d.i >= len(d.line) {
		return false, errSyntax
	}
	if d.line[d.i] == bracket {
		d.i++
		return false, nil
	}
	if !first {
		if d.line[d.i] != ',' {
			return false, errSyntax
		}
		d.i = skipSpace(d.line, d.i+1)
	}
	return true, nil
}

func (d *decoder) element() (ok bool, err error) { return d.member(']') }

// key reads the next key of an object, with its colon. Escapes stay as they
// are: no key that is known holds any.
func (d *decoder) key() (key []byte, ok bool, err error) {
	if ok, err = d.member('}'); err != nil || !ok {
		return nil, false, err
	}
	start := d.i
	if start >= len(d.line) || d.line[start] != '"' {
		return nil, false, errSyntax
	}
	end := stringEnd(d.line, start+1)
	if end < 0 {
		return nil, false, errSyntax
	}
	d.i = skipSpace(d.line, end)
	if d.i >= len(d.line) || d.line[d.i] != ':' {
		return nil, false, errSyntax
	}
	d.i = skipSpace(d.line, d.i+1)
	return d.line[start+1 : end-1], true, nil
}

// raw reads a value as it stands. Its capacity ends with it, so that appending
// to it doesn't write into the line.
func (d *decoder) raw() ([]byte, error) {
	end := valueEnd(d.line, d.i, maxDepth)
	if end < 0 {
		return nil, errSyntax
	}
	raw := d.line[d.i:end:end]
	d.i = end
	return raw, nil
}

func (d *decoder) skip() error {
	_, err := d.raw()
	return err
}

// null reads a null, which stands for a field that isn't there.
func (d *decoder) null() bool {
	if !bytes.HasPrefix(d.line[d.i:], []byte("null")) {
		return false
	}
	d.i += len("null")
	return true
}

func (d *decoder) boolean() (bool, error) {
	raw, err := d.raw()
	switch {
	case err != nil:
		return false, err
	case string(raw) == "true":
		return true, nil
	case string(raw) == "false":
		return false, nil
	}
	return false, errors.New("neither true nor false")
}

func (d *decoder) text() ([]byte, error) {
	raw, err := d.raw()
	if err != nil {
		return nil, err
	}
	if raw[0] != '"' {
		return nil, errors.New("not a string")
	}
	return unescape(raw[1 : len(raw)-1]), nil
}

// setText keeps the string that is there when it is the same, which saves its
// allocation.
func setText[S ~string](d *decoder, to *S) error {
	b, err := d.text()
	if err == nil && string(*to) != string(b) {
		*to = S(b)
	}
	return err
}

func (d *decoder) base64() ([]byte, error) {
	b, err := d.text()
	if err != nil {
		return nil, err
	}
	// In place: three bytes out never overtake four bytes in.
	n, err := base64.StdEncoding.Strict().Decode(b, b)
	return b[:n], err
}

func (d *decoder) number() (float64, error) {
	raw, err := d.raw()
	if err != nil {
		return 0, err
	}
	switch string(raw) {
	case `"NaN"`:
		return math.NaN(), nil
	case `"+Inf"`:
		return math.Inf(1), nil
	case `"-Inf"`:
		return math.Inf(-1), nil
	}
	if c := raw[0]; c != '-' && (c < '0' || c > '9') {
		return 0, errors.New("not a number")
	}
	return strconv.ParseFloat(string(raw), 64)
}

func (d *decoder) integer() (int64, error) {
	raw, err := d.raw()
	if err != nil {
		return 0, err
	}
	negative := raw[0] == '-'
	digits := raw
	if negative {
		digits = raw[1:]
	}
	if len(digits) > 18 { // all that fit into an int64 without a closer look
		return 0, errors.New("too large")
	}
	var v int64
	for _, c := range digits {
		if c < '0' || c > '9' {
			return 0, errors.New("not an integer")
		}
		v = v*10 + int64(c-'0')
	}
	if negative {
		v = -v
	}
	return v, nil
}

func (d *decoder) count(to *int) error {
	v, err := d.integer()
	*to = int(v)
	return err
}

func (d *decoder) microseconds() (time.Duration, error) {
	us, err := d.integer()
	if err == nil && (us > math.MaxInt64/1000 || us < math.MinInt64/1000) {
		err = errors.New("too large")
	}
	return time.Duration(us) * time.Microsecond, err
}

// unescape decodes the inside of a JSON string that valueEnd has accepted, in
// place: no escape is shorter than what it stands for. Half a surrogate pair
// becomes U+FFFD.
func unescape(s []byte) []byte {
	to := bytes.IndexByte(s, '\\')
	if to < 0 {
		return s
	}
	for i := to; i < len(s); {
		if s[i] != '\\' {
			s[to] = s[i]
			to++
			i++
			continue
		}
		c := s[i+1]
		i += 2
		switch c {
		case 'b':
			c = '\b'
		case 'f':
			c = '\f'
		case 'n':
			c = '\n'
		case 'r':
			c = '\r'
		case 't':
			c = '\t'
		case 'u':
			r, _ := hex4(s, i)
			i += 4
			if utf16.IsSurrogate(r) {
				low := rune(0)
				if i+1 < len(s) && s[i] == '\\' && s[i+1] == 'u' {
					low, _ = hex4(s, i+2)
				}
				if r = utf16.DecodeRune(r, low); r != utf8.RuneError {
					i += 6
				}
			}
			to += utf8.EncodeRune(s[to:i], r)
			continue
		}
		s[to] = c
		to++
	}
	return s[:to]
}

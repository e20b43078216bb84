package openai

import (
	"bytes"
	"cmp"
	"errors"
	"io"
	"strconv"
	"strings"

	"github.com/go-faster/jx"
)

// chunk is one event or body as decoded, before anything of it is used. Its
// buffers are used again; byte slices point into them or into the data.
type chunk struct {
	id, model, finish, role []byte

	content, reasoning []byte
	calls              []callDelta // of choice 0
	logprobs           []TokenLogprob
	usage              Usage
	byTier             *CachedByTier
	err                *APIError

	hasChoices, hasUsage   bool
	wrongType, otherChoice bool

	message, kind, code []byte // of an error that has no object of its own

	text  []byte // the last text read, as it is in the data
	texts int    // how many were read
}

// callDelta is one entry of tool_calls.
type callDelta struct {
	index           int
	hasIndex        bool
	id, kind        []byte
	name, arguments []byte
	object          bool // arguments came as an object
}

func (d *callDelta) onlyArguments() bool {
	return len(d.arguments) > 0 && d.hasIndex && len(d.id) == 0 && len(d.kind) == 0 && len(d.name) == 0
}

func (c *chunk) reset() {
	*c = chunk{content: c.content[:0], reasoning: c.reasoning[:0], calls: c.calls[:0], logprobs: c.logprobs[:0]}
}

// atEnd says whether nothing but space is left. Next answers Invalid for a
// stray byte as well; Skip then complains of that, not of the end.
func atEnd(d *jx.Decoder) bool {
	return d.Next() == jx.Invalid && errors.Is(d.Skip(), io.EOF)
}

// decode reads the whole object. An error means that it isn't JSON.
func (c *chunk) decode(d *jx.Decoder) error {
	if d.Next() != jx.Object {
		c.wrongType = true
		return d.Skip()
	}
	it, err := d.ObjIter()
	if err != nil {
		return err
	}
	for it.Next() {
		switch string(it.Key()) {
		case "choices":
			err = c.choices(d)
		case "id":
			c.id, err = c.string(d)
		case "model":
			c.model, err = c.string(d)
		case "usage":
			err = c.readUsage(d)
		case "sglext":
			err = c.readTiers(d)
		case "error":
			err = c.readError(d)
		case "message", "detail":
			c.message, err = c.messageText(d)
		case "type", "error_type":
			c.kind, err = c.string(d)
		case "code":
			c.code, err = c.scalar(d)
		default:
			err = d.Skip()
		}
		if err != nil {
			return err
		}
	}
	if c.err == nil && !c.hasChoices && len(c.message) > 0 {
		c.err = &APIError{Message: cut(c.message)}
	}
	if c.err != nil {
		c.err.Type = cmp.Or(c.err.Type, cut(c.kind))
		c.err.Code = cmp.Or(c.err.Code, cut(c.code))
	}
	return it.Err()
}

// string reads a string, which points into the data unless it has escapes.
// null is no string.
func (c *chunk) string(d *jx.Decoder) ([]byte, error) {
	switch d.Next() {
	case jx.String:
		return d.StrBytes()
	case jx.Null:
		return nil, d.Null()
	default:
		c.wrongType = true
		return nil, d.Skip()
	}
}

// appendText appends a string of the reply's text to buf.
func (c *chunk) appendText(d *jx.Decoder, buf []byte) ([]byte, error) {
	text, err := c.string(d)
	c.text = text
	c.texts++
	return append(buf, text...), err
}

// each calls f for every element of an array. null is an empty one.
func (c *chunk) each(d *jx.Decoder, f func() error) error {
	switch d.Next() {
	case jx.Array:
	case jx.Null:
		return d.Null()
	default:
		c.wrongType = true
		return d.Skip()
	}
	it, err := d.ArrIter()
	if err != nil {
		return err
	}
	for it.Next() {
		if err := f(); err != nil {
			return err
		}
	}
	return it.Err()
}

// fields calls f for every field of an object. null has none. f's key is
// valid until f reads.
func (c *chunk) fields(d *jx.Decoder, f func(key []byte) error) error {
	switch d.Next() {
	case jx.Object:
	case jx.Null:
		return d.Null()
	default:
		c.wrongType = true
		return d.Skip()
	}
	it, err := d.ObjIter()
	if err != nil {
		return err
	}
	for it.Next() {
		if err := f(it.Key()); err != nil {
			return err
		}
	}
	return it.Err()
}

func (c *chunk) integer(d *jx.Decoder, to *int) error {
	if d.Next() != jx.Number {
		if d.Next() != jx.Null {
			c.wrongType = true
		}
		return d.Skip()
	}
	n, err := d.Num()
	if err != nil {
		return err
	}
	v, err := n.Int64()
	if err != nil || n.Negative() {
		c.wrongType = true
		return nil
	}
	*to = int(v)
	return nil
}

// scalar reads a string, or a number as its text.
func (c *chunk) scalar(d *jx.Decoder) ([]byte, error) {
	if d.Next() == jx.Number {
		raw, err := d.Raw()
		return bytes.TrimSpace(raw), err
	}
	return c.string(d)
}

func (c *chunk) choices(d *jx.Decoder) error {
	if d.Next() == jx.Array {
		c.hasChoices = true
	}
	return c.each(d, func() error { return c.choice(d) })
}

func (c *chunk) choice(d *jx.Decoder) error {
	contentLen, reasoningLen, callsLen, logprobsLen := len(c.content), len(c.reasoning), len(c.calls), len(c.logprobs)
	finish, role := c.finish, c.role
	index := 0
	err := c.fields(d, func(key []byte) (err error) {
		switch string(key) {
		case "index":
			return c.integer(d, &index)
		case "delta", "message":
			return c.delta(d)
		case "text":
			c.content, err = c.appendText(d, c.content)
		case "finish_reason":
			var finish []byte
			if finish, err = c.string(d); len(finish) > 0 {
				c.finish = finish
			}
		case "logprobs":
			return c.readLogprobs(d)
		default:
			return d.Skip()
		}
		return err
	})
	if index != 0 {
		c.otherChoice = true
		c.content, c.reasoning = c.content[:contentLen], c.reasoning[:reasoningLen]
		c.calls, c.logprobs = c.calls[:callsLen], c.logprobs[:logprobsLen]
		c.finish, c.role = finish, role
	}
	return err
}

func (c *chunk) delta(d *jx.Decoder) error {
	return c.fields(d, func(key []byte) (err error) {
		switch string(key) {
		case "content":
			c.content, err = c.parts(d, c.content)
		case "reasoning_content", "reasoning":
			c.reasoning, err = c.appendText(d, c.reasoning)
		case "tool_calls":
			err = c.each(d, func() error { return c.call(d) })
		case "role":
			c.role, err = c.string(d)
		default:
			err = d.Skip()
		}
		return err
	})
}

// parts reads text, or a list of parts of which those with text count.
func (c *chunk) parts(d *jx.Decoder, buf []byte) ([]byte, error) {
	if d.Next() != jx.Array {
		return c.appendText(d, buf)
	}
	err := c.each(d, func() error {
		return c.fields(d, func(key []byte) (err error) {
			if string(key) != "text" {
				return d.Skip()
			}
			buf, err = c.appendText(d, buf)
			return err
		})
	})
	return buf, err
}

func (c *chunk) call(d *jx.Decoder) error {
	if len(c.calls) < cap(c.calls) {
		c.calls = c.calls[:len(c.calls)+1]
	} else {
		c.calls = append(c.calls, callDelta{})
	}
	t := &c.calls[len(c.calls)-1]
	*t = callDelta{name: t.name[:0], arguments: t.arguments[:0]}
	return c.fields(d, func(key []byte) (err error) {
		switch string(key) {
		case "index":
			t.index = noIndex
			err = c.integer(d, &t.index)
			t.hasIndex = t.index != noIndex
		case "id":
			t.id, err = c.string(d)
		case "type":
			t.kind, err = c.string(d)
		case "function":
			err = c.fields(d, func(key []byte) (err error) {
				switch string(key) {
				case "name":
					t.name, err = c.appendText(d, t.name)
				case "arguments":
					err = c.arguments(d, t)
				default:
					err = d.Skip()
				}
				return err
			})
		default:
			err = d.Skip()
		}
		return err
	})
}

func (c *chunk) arguments(d *jx.Decoder, t *callDelta) (err error) {
	switch d.Next() {
	case jx.String:
		t.arguments, err = c.appendText(d, t.arguments)
	case jx.Null:
		err = d.Null()
	default:
		t.object = true
		var raw []byte
		raw, err = d.Raw()
		t.arguments = append(t.arguments, bytes.TrimSpace(raw)...)
	}
	return err
}

func (c *chunk) readUsage(d *jx.Decoder) error {
	if d.Next() == jx.Object {
		c.hasUsage = true
		c.usage = Usage{CachedTokens: -1}
	}
	return c.fields(d, func(key []byte) error {
		switch string(key) {
		case "prompt_tokens":
			return c.integer(d, &c.usage.PromptTokens)
		case "completion_tokens":
			return c.integer(d, &c.usage.CompletionTokens)
		case "total_tokens":
			return c.integer(d, &c.usage.TotalTokens)
		case "prompt_tokens_details":
			return c.fields(d, func(key []byte) error {
				switch string(key) {
				case "cached_tokens":
					return c.integer(d, &c.usage.CachedTokens)
				case cachedByTier:
					return c.readByTier(d)
				}
				return d.Skip()
			})
		default:
			return d.Skip()
		}
	})
}

const cachedByTier = "cached_tokens_details"

// readTiers reads SGLang's extension, which is there when a request has
// return_cached_tokens_details.
func (c *chunk) readTiers(d *jx.Decoder) error {
	if d.Next() != jx.Object {
		return d.Skip()
	}
	return c.fields(d, func(key []byte) error {
		if string(key) == cachedByTier {
			return c.readByTier(d)
		}
		return d.Skip()
	})
}

// readByTier reads numbers by tier. What isn't an object is no news of tiers,
// and no mistake either: others use the name for other things.
func (c *chunk) readByTier(d *jx.Decoder) error {
	if d.Next() != jx.Object {
		return d.Skip()
	}
	var tiers CachedByTier
	return c.fields(d, func(key []byte) error {
		switch string(key) {
		case "device":
			c.byTier = &tiers
			return c.integer(d, &tiers.Device)
		case "host":
			c.byTier = &tiers
			return c.integer(d, &tiers.Host)
		case "storage":
			c.byTier = &tiers
			return c.integer(d, &tiers.Storage)
		}
		return d.Skip()
	})
}

// readError reads {"message":...}, or a bare text.
func (c *chunk) readError(d *jx.Decoder) error {
	switch d.Next() {
	case jx.Null:
		return d.Null()
	case jx.Object:
	default:
		text, err := c.messageText(d)
		c.err = &APIError{Message: cut(text)}
		return err
	}
	e := &APIError{}
	c.err = e
	return c.fields(d, func(key []byte) error {
		switch string(key) {
		case "message":
			text, err := c.messageText(d)
			e.Message = cut(text)
			return err
		case "type":
			text, err := c.scalar(d)
			e.Type = cut(text)
			return err
		case "code":
			text, err := c.scalar(d)
			e.Code = cut(text)
			return err
		default:
			return d.Skip()
		}
	})
}

// messageText reads a message that should be a string; anything else is its
// JSON text, as in FastAPI's {"detail": [...]}.
func (c *chunk) messageText(d *jx.Decoder) ([]byte, error) {
	switch d.Next() {
	case jx.String:
		return d.StrBytes()
	case jx.Null:
		return nil, d.Null()
	default:
		raw, err := d.Raw()
		return bytes.TrimSpace(raw), err
	}
}

// cut makes a string of at most errorTextLimit bytes.
func cut(text []byte) string {
	if len(text) > errorTextLimit {
		text = text[:errorTextLimit]
	}
	return strings.ToValidUTF8(string(text), "\uFFFD")
}

// readLogprobs reads a chat choice's {"content": [...]}, or a text choice's
// {"tokens": [...], "token_logprobs": [...], "top_logprobs": [...]}.
func (c *chunk) readLogprobs(d *jx.Decoder) error {
	first := len(c.logprobs)
	at := func(i int) *TokenLogprob {
		for len(c.logprobs) <= first+i {
			c.logprobs = append(c.logprobs, TokenLogprob{})
		}
		return &c.logprobs[first+i]
	}
	return c.fields(d, func(key []byte) error {
		i := -1
		switch string(key) {
		case "content":
			return c.each(d, func() error {
				t, err := c.tokenLogprob(d)
				c.logprobs = append(c.logprobs, t)
				return err
			})
		case "tokens":
			return c.each(d, func() error {
				i++
				text, err := c.string(d)
				at(i).Token = string(text)
				return err
			})
		case "token_logprobs":
			return c.each(d, func() error {
				i++
				return c.number(d, &at(i).Logprob)
			})
		case "top_logprobs":
			return c.each(d, func() error {
				i++
				t := at(i)
				return c.fields(d, func(key []byte) error {
					top := TokenLogprob{Token: string(key)}
					err := c.number(d, &top.Logprob)
					t.Top = append(t.Top, top)
					return err
				})
			})
		default:
			return d.Skip()
		}
	})
}

func (c *chunk) tokenLogprob(d *jx.Decoder) (t TokenLogprob, err error) {
	err = c.fields(d, func(key []byte) error {
		switch string(key) {
		case "token":
			text, err := c.string(d)
			t.Token = string(text)
			return err
		case "logprob":
			return c.number(d, &t.Logprob)
		case "top_logprobs":
			return c.each(d, func() error {
				top, err := c.tokenLogprob(d)
				t.Top = append(t.Top, top)
				return err
			})
		default:
			return d.Skip()
		}
	})
	return t, err
}

// number reads a float; null leaves it alone.
func (c *chunk) number(d *jx.Decoder, to *float64) error {
	switch d.Next() {
	case jx.Number:
		n, err := d.Num()
		if err != nil {
			return err
		}
		v, err := strconv.ParseFloat(string(n), 64)
		if err != nil { // out of range
			c.wrongType = true
			return nil
		}
		*to = v
		return nil
	case jx.Null:
		return d.Null()
	default:
		c.wrongType = true
		return d.Skip()
	}
}

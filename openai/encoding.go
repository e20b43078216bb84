package openai

import (
	"compress/gzip"
	"compress/zlib"
	"fmt"
	"io"
	"strings"
)

// Decompress undoes a body's Content-Encoding. It reads nothing yet.
func Decompress(body io.Reader, encoding string) (io.Reader, error) {
	switch strings.ToLower(strings.TrimSpace(encoding)) {
	case "", "identity":
		return body, nil
	case "gzip", "x-gzip":
		return &lazyReader{body: body, open: func(r io.Reader) (io.Reader, error) { return gzip.NewReader(r) }}, nil
	case "deflate":
		return &lazyReader{body: body, open: func(r io.Reader) (io.Reader, error) { return zlib.NewReader(r) }}, nil
	default:
		return nil, fmt.Errorf("the reply has Content-Encoding %q, which wasn't asked for and can't be read", encoding)
	}
}

// lazyReader opens a decompressor at the first read: opening reads its header.
type lazyReader struct {
	body   io.Reader
	open   func(io.Reader) (io.Reader, error)
	opened io.Reader
	err    error // of open
}

func (l *lazyReader) Read(b []byte) (int, error) {
	if l.opened == nil {
		l.opened, l.err = l.open(l.body)
	}
	if l.err != nil {
		return 0, l.err
	}
	return l.opened.Read(b)
}

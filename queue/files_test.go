package queue

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go/jetstream"
)

// neverAcked is a message of a worker that dies before it acknowledges.
type neverAcked struct{ jetstream.Msg }

func (neverAcked) DoubleAck(context.Context) error { return errors.New("killed") }

func TestUnpackRefuses(t *testing.T) {
	tests := []struct {
		name   string
		header tar.Header
	}{
		{"a way out", tar.Header{Name: "../x", Typeflag: tar.TypeReg}},
		{"an absolute path", tar.Header{Name: "/tmp/x", Typeflag: tar.TypeReg}},
		{"a symbolic link", tar.Header{Name: "x", Linkname: "/etc", Typeflag: tar.TypeSymlink}},
		{"a hard link", tar.Header{Name: "x", Linkname: "/etc/passwd", Typeflag: tar.TypeLink}},
		{"a device", tar.Header{Name: "x", Typeflag: tar.TypeChar}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			parent := t.TempDir()
			dir := filepath.Join(parent, "dir")
			if err := os.Mkdir(dir, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := unpack(bytes.NewReader(archive(t, tt.header)), dir); err == nil {
				t.Error("it was unpacked")
			}
			if entries, _ := os.ReadDir(parent); len(entries) != 1 {
				t.Errorf("outside there is %v", entries)
			}
		})
	}
}

func archive(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	z, err := zstd.NewWriter(&b)
	if err != nil {
		t.Fatal(err)
	}
	w := tar.NewWriter(z)
	for _, h := range headers {
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// FuzzUnpack gives it archives that are cut off or wrong.
func FuzzUnpack(f *testing.F) {
	f.Add(archive(f, tar.Header{Name: "a/b", Typeflag: tar.TypeReg}, tar.Header{Name: "c", Typeflag: tar.TypeDir}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) > 1<<16 {
			return
		}
		parent := t.TempDir()
		dir := filepath.Join(parent, "dir")
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		_ = unpack(bytes.NewReader(b), dir)
		if entries, _ := os.ReadDir(parent); len(entries) != 1 {
			t.Errorf("outside there is %v", entries)
		}
	})
}

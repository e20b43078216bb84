package queue

import (
	"archive/tar"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/klauspost/compress/zstd"
	"github.com/nats-io/nats.go/jetstream"
)

// NoSpaceError says that a cluster keeps no more.
type NoSpaceError struct{ Err error }

func (e *NoSpaceError) Error() string {
	return "the NATS cluster keeps no more: " + e.Err.Error() + "; give the account or its disks more, or wait until results were taken"
}

func (e *NoSpaceError) Unwrap() error { return e.Err }

// noSpace tells full storage from other errors, which stay as they are.
func noSpace(err error) error {
	if err == nil {
		return nil
	}
	if full(err) {
		return &NoSpaceError{err}
	}
	return err
}

// full says that an error is of storage that is full. The servers have several
// codes for it.
func full(err error) bool {
	return slices.ContainsFunc([]string{"maximum bytes exceeded", "insufficient", "resource limits exceeded", "resource exceeded", "no space left"}, func(says string) bool {
		return strings.Contains(err.Error(), says)
	})
}

// Upload puts a directory into the queue's store, whole or not at all.
func (q *Queue) Upload(ctx context.Context, name, dir string) error {
	size, err := sizeOf(dir)
	if err != nil {
		return fmt.Errorf("upload %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, transferTime(size))
	defer cancel()
	reader, writer := io.Pipe()
	go func() { writer.CloseWithError(pack(writer, dir)) }()
	_, err = q.files.Put(ctx, jetstream.ObjectMeta{Name: name}, reader)
	reader.Close() //nolint:errcheck // it is a pipe
	if err != nil {
		return fmt.Errorf("upload %s: %w", name, errors.Join(noSpace(gone(err)), q.forget(ctx, name)))
	}
	return nil
}

// forget takes off the name of an upload that failed: it is sent before the parts
// were acknowledged, and who finds it waits for them.
func (q *Queue) forget(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), requestTimeout)
	defer cancel()
	bucket := prefix + q.Name
	stream, err := q.conn.stream.Stream(ctx, "OBJ_"+bucket)
	if err == nil { // how the object store names things: NATS ADR-20
		err = stream.Purge(ctx, jetstream.WithPurgeSubject("$O."+bucket+".M."+base64.URLEncoding.EncodeToString([]byte(name))))
	}
	return gone(err)
}

// transferTime bounds how long so many bytes may be on their way: on a slow line,
// or when an answer gets lost.
func transferTime(size uint64) time.Duration {
	const least, bytesPerSecond = 30 * time.Second, 1 << 20
	return least + time.Duration(size/bytesPerSecond)*time.Second
}

func sizeOf(dir string) (size uint64, err error) {
	err = filepath.WalkDir(dir, func(_ string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		info, err := entry.Info()
		if err == nil {
			size += uint64(info.Size())
		}
		return err
	})
	return size, err
}

// ErrNoFiles says that the store has nothing of that name.
var ErrNoFiles = errors.New("the store has no such files")

// Download makes dir, which must not exist, from the store.
func (q *Queue) Download(ctx context.Context, name, dir string) error {
	short, cancelShort := context.WithTimeout(ctx, requestTimeout)
	defer cancelShort()
	info, err := q.files.GetInfo(short, name)
	var object jetstream.ObjectResult
	if err == nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, transferTime(info.Size))
		defer cancel()
		object, err = q.files.Get(ctx, name)
	}
	if errors.Is(err, jetstream.ErrObjectNotFound) {
		err = ErrNoFiles
	}
	if err != nil {
		return fmt.Errorf("download %s: %w", name, gone(err))
	}
	defer object.Close()
	if err := os.MkdirAll(dir, 0o755); err != nil { //nolint:gosec // as any run directory
		return fmt.Errorf("download %s: %w", name, err)
	}
	if err := unpack(object, dir); err != nil {
		os.RemoveAll(dir) //nolint:errcheck // the first error matters
		return fmt.Errorf("download %s: %w", name, err)
	}
	return nil
}

// Remove takes files off the store; those that aren't there need not.
func (q *Queue) Remove(ctx context.Context, name string) error {
	if err := q.files.Delete(ctx, name); err != nil && !errors.Is(err, jetstream.ErrObjectNotFound) {
		return fmt.Errorf("remove %s: %w", name, gone(err))
	}
	return nil
}

// Sweep removes files that nobody wants any more, and what is left of uploads of
// workers that died: those that haven't grown for ten times as long as a worker
// may be silent.
func (q *Queue) Sweep(ctx context.Context, wanted func(name string) bool) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	whole := map[string]bool{} // uploads
	objects, err := q.files.List(ctx)
	if err != nil && !errors.Is(err, jetstream.ErrNoObjectsFound) {
		return fmt.Errorf("sweep files: %w", gone(err))
	}
	for _, o := range objects {
		whole[o.NUID] = true
		if !wanted(o.Name) {
			if err := q.Remove(ctx, o.Name); err != nil {
				return err
			}
		}
	}
	// This is how the object store lays its chunks out (NATS ADR-20).
	chunks := "$O." + prefix + q.Name + ".C."
	stream, err := q.conn.stream.Stream(ctx, "OBJ_"+prefix+q.Name)
	if err != nil {
		return fmt.Errorf("sweep files: %w", gone(err))
	}
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(chunks+">"))
	if err != nil {
		return fmt.Errorf("sweep files: %w", gone(err))
	}
	before := q.parts
	q.parts = map[string]part{}
	for subject, count := range info.State.Subjects {
		if whole[strings.TrimPrefix(subject, chunks)] {
			continue
		}
		p := before[subject]
		if p.count != count {
			p = part{count, time.Now()}
		}
		q.parts[subject] = p
		const silences = 10
		if time.Since(p.since) > silences*q.ackWait {
			if err := stream.Purge(ctx, jetstream.WithPurgeSubject(subject)); err != nil {
				return fmt.Errorf("sweep files: %w", gone(err))
			}
		}
	}
	return nil
}

// part is an upload that isn't whole.
type part struct {
	count uint64 // chunks
	since time.Time
}

// pack writes a directory's files as a compressed tar archive.
func pack(w io.Writer, dir string) error {
	z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
	if err != nil {
		return err
	}
	t := tar.NewWriter(z)
	err = filepath.WalkDir(dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() && !entry.IsDir() {
			return err
		}
		name, err := filepath.Rel(dir, path)
		if err != nil || name == "." {
			return err
		}
		info, err := entry.Info()
		if err != nil {
			return err
		}
		header := &tar.Header{Name: filepath.ToSlash(name), Mode: int64(info.Mode().Perm()), ModTime: info.ModTime()}
		if entry.IsDir() {
			header.Typeflag = tar.TypeDir
			return t.WriteHeader(header)
		}
		f, err := os.Open(path)
		if err != nil {
			return err
		}
		defer f.Close()
		header.Typeflag, header.Size = tar.TypeReg, info.Size()
		if err := t.WriteHeader(header); err != nil {
			return err
		}
		// A log may still grow: what the header promises is what is read.
		_, err = io.CopyN(t, f, info.Size())
		return err
	})
	return errors.Join(err, t.Close(), z.Close())
}

// unpack makes an archive's files in a directory. Nothing in it leads out of
// there.
func unpack(r io.Reader, dir string) error {
	z, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1))
	if err != nil {
		return err
	}
	defer z.Close()
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close() //nolint:errcheck // it is a directory
	t := tar.NewReader(z)
	for {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		name := filepath.FromSlash(header.Name)
		if !filepath.IsLocal(name) {
			return fmt.Errorf("%q leads out of the directory", header.Name)
		}
		switch header.Typeflag {
		case tar.TypeDir:
			err = root.MkdirAll(name, 0o755)
		case tar.TypeReg:
			err = unpackFile(root, name, t)
			if err == nil {
				err = root.Chtimes(name, header.ModTime, header.ModTime)
			}
		default:
			err = fmt.Errorf("%q is no file and no directory", header.Name)
		}
		if err != nil {
			return err
		}
	}
}

func unpackFile(root *os.Root, name string, from io.Reader) error {
	if err := root.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Close())
}

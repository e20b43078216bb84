//go:build unix

package probe

import (
	"io/fs"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// mapped shows decode a counter file as it is in memory: only so are 8 bytes
// read at once.
func mapped(f *os.File, decode func([]byte) (*counters, error)) (*counters, error) {
	b, err := unix.Mmap(int(f.Fd()), 0, fileSize, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	defer unix.Munmap(b) //nolint:errcheck // it was mapped
	return guarded(b, decode)
}

// ownerOf is the user that a file belongs to.
func ownerOf(info fs.FileInfo) (uid int, known bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Uid), true
}

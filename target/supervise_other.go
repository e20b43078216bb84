//go:build !linux

package target

import (
	"errors"
	"io"
	"time"
)

// Supervise needs Linux: elsewhere nothing keeps hold of a server's
// descendants when we are killed.
func Supervise([]string, io.Reader, time.Duration) (int, error) {
	return 0, errors.New("supervise: launching servers works on Linux only; start the server yourself and give its --base-url")
}

// Descendants needs /proc.
func Descendants(int) []int { return nil }

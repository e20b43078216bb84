//go:build !linux || !amd64

package probe

import (
	"errors"
	"runtime"
)

// queueCall needs ptrace and the machine's registers.
func queueCall(int, interpreter, string) error {
	return errors.New("attach: to a running Python before 3.14 only on linux/amd64, not " + runtime.GOOS + "/" + runtime.GOARCH + "; start the server with culprit probe run")
}

package app

import (
	"context"
	"fmt"
	"net"
	"time"

	"github.com/culprit-project/culprit/target"
)

// LabOptions say how to start the lab for the time of a run: the tester shares
// no code with it, so it is started like any other server.
type LabOptions struct {
	Launcher *target.Launcher
	Command  []string // serves the lab; --host and --port are appended
	LogDir   string
}

const labStarts = 30 * time.Second

// StartLab starts the lab on a free port and returns its URL. stop ends it.
func StartLab(ctx context.Context, o LabOptions) (url string, stop func() error, err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", nil, fmt.Errorf("find a free port for the lab: %w", err)
	}
	port := l.Addr().(*net.TCPAddr).Port
	if err := l.Close(); err != nil {
		return "", nil, fmt.Errorf("find a free port for the lab: %w", err)
	}
	url = fmt.Sprintf("http://127.0.0.1:%d", port)
	command := append(append([]string{}, o.Command...), "--host", "127.0.0.1", "--port", fmt.Sprint(port))
	s, err := o.Launcher.Launch(ctx, []target.Process{{Name: "lab", Command: command}}, target.Ready{URL: url + "/health", Timeout: labStarts}, o.LogDir)
	if err != nil {
		return "", nil, &NoVerdictError{err}
	}
	return url, s.Stop, nil
}

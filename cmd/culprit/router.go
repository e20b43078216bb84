package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/culprit-project/culprit/lab"
	"github.com/culprit-project/culprit/lab/disagg"
)

// disaggregation is the flags of "culprit lab serve" about prefill and decode
// servers.
type disaggregation struct {
	DisaggregationMode          string        `enum:"null,prefill,decode" default:"null" help:"Compute prompts only (prefill), or only what follows them (decode): null, prefill or decode. Such servers are for a router, \"culprit lab router\"."`
	DisaggregationBootstrapPort int           `placeholder:"N" help:"Port where a prefill server serves transfers (default: a free one)."`
	DisaggregationTimeout       time.Duration `placeholder:"TIME" help:"How long nothing may happen in a transfer (default: 1m)."`
	DisaggregationBandwidth     float64       `placeholder:"MB" help:"Megabytes a second that one connection carries at most (default: no limit)."`
}

func (d *disaggregation) apply(c *lab.Config) {
	if d.DisaggregationMode != "null" {
		c.Mode = lab.Mode(d.DisaggregationMode)
	}
	c.Transfer = lab.TransferConfig{Timeout: d.DisaggregationTimeout, Bandwidth: int(d.DisaggregationBandwidth * 1e6)}
}

// serve lets decode servers connect. stop ends that; port is 0 if this is no
// prefill server.
func (d *disaggregation) serve(ctx context.Context, host string, e *lab.Engine) (port int, stop func(), err error) {
	if d.DisaggregationMode != string(lab.Prefill) {
		return 0, func() {}, nil
	}
	address := net.JoinHostPort(host, strconv.Itoa(d.DisaggregationBootstrapPort))
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return 0, nil, fmt.Errorf("listen for transfers on %s: %w", address, err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = e.ServeTransfers(l) // ends when l does
	}()
	return l.Addr().(*net.TCPAddr).Port, func() { _ = l.Close(); <-done }, nil
}

// labRouter is the command "culprit lab router".
type labRouter struct {
	Host     string   `default:"127.0.0.1" help:"Address to listen on."`
	Port     int      `default:"30000" help:"Port to listen on; 0 picks a free one."`
	AddrFile string   `type:"path" placeholder:"FILE" help:"Write the router's URL to this file when it listens."`
	Prefill  []string `required:"" placeholder:"URL" help:"A server with --disaggregation-mode prefill. Repeatable."`
	Decode   []string `required:"" placeholder:"URL" help:"A server with --disaggregation-mode decode. Repeatable."`
}

// Validate is called when the flags are parsed.
func (c *labRouter) Validate() error {
	for _, list := range [][]string{c.Prefill, c.Decode} {
		for i, u := range list {
			if !strings.HasPrefix(u, "http://") && !strings.HasPrefix(u, "https://") {
				return fmt.Errorf("%q is not a URL, such as http://127.0.0.1:30001", u)
			}
			list[i] = strings.TrimSuffix(strings.TrimSuffix(u, "/"), "/v1")
		}
	}
	return nil
}

// Run routes until it is interrupted.
func (c *labRouter) Run(ctx context.Context, s *streams) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	logger := slog.New(slog.NewTextHandler(s.err, nil))
	address := net.JoinHostPort(c.Host, strconv.Itoa(c.Port))
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", address, err)
	}
	url := "http://" + listener.Addr().String()
	router := &disagg.Router{Prefill: c.Prefill, Decode: c.Decode, Seed: rand.Uint64()}
	defer router.Close()
	server := &http.Server{
		Handler: router, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	if c.AddrFile != "" {
		if err := os.WriteFile(c.AddrFile, []byte(url), 0o644); err != nil {
			return errors.Join(err, server.Close())
		}
	}
	fmt.Fprintf(s.err, "culprit lab: routing at %s/v1\n", url)
	select {
	case err = <-served:
	case <-ctx.Done():
		drain, cancel := context.WithTimeout(context.WithoutCancel(ctx), drainTime)
		defer cancel()
		err = cmp.Or(server.Shutdown(drain), server.Close())
	}
	if err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return nil
}

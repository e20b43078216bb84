package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/culprit-project/culprit/internal/app"
	"github.com/culprit-project/culprit/internal/mcp"
)

type mcpCommand struct {
	Root      string `arg:"" optional:"" type:"existingdir" default:"." help:"The directory that the tools see (default: this one)."`
	AllowRuns bool   `help:"Offer the tools that start servers, send load and write files."`
	Listen    string `placeholder:"ADDR" help:"Serve HTTP on this loopback address, such as 127.0.0.1:7777, in place of standard input and output."`
	APIKey    string `name:"api-key" env:"OPENAI_API_KEY" placeholder:"KEY" help:"For servers under test, as a bearer token; never written to a file."`
}

func (c *mcpCommand) Run(ctx context.Context, s *streams) error {
	launcher, err := launcher()
	if err != nil {
		return err
	}
	server, err := mcp.New(mcp.Options{Root: c.Root, AllowRuns: c.AllowRuns, Launcher: launcher, APIKey: c.APIKey, Version: version()})
	if err != nil {
		return err
	}
	if c.Listen == "" {
		err := server.Run(ctx, &sdk.IOTransport{Reader: os.Stdin, Writer: os.Stdout})
		if ctx.Err() != nil {
			return nil
		}
		return err
	}
	return c.serve(ctx, s, mcp.Handler(server))
}

func (c *mcpCommand) serve(ctx context.Context, s *streams, handler http.Handler) error {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", c.Listen)
	if err != nil {
		return app.Usage("--listen: %w", err)
	}
	if a, ok := l.Addr().(*net.TCPAddr); !ok || !a.IP.IsLoopback() {
		return errors.Join(app.Usage("--listen %s: it is no loopback address, and everybody who reaches it could use the tools", c.Listen), l.Close())
	}
	fmt.Fprintf(s.err, "culprit mcp: http://%s/\n", l.Addr())
	h := &http.Server{Handler: handler, ReadHeaderTimeout: 10 * time.Second}
	stop := context.AfterFunc(ctx, func() { h.Close() }) //nolint:errcheck // it ends either way
	defer stop()
	if err := h.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

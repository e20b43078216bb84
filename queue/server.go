package queue

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/url"
	"strconv"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// ServerOptions is what a server within this program takes.
type ServerOptions struct {
	Dir string // where it keeps everything; one that was there before goes on
	// Listen is host:port for other processes, port 0 for a free one; empty
	// is this process alone. Whoever gets in may have workers run commands, so
	// they want Token too.
	Listen   string
	Token    string
	Name     string // in a cluster
	Cluster  string // host:port for its other servers; empty is no cluster
	Routes   []string
	MaxBytes int64 // of Dir; 0 is what the disk has
	Logger   *slog.Logger
}

// Server is a NATS server with JetStream within this program.
type Server struct {
	server *server.Server
	token  string
}

// startTimeout bounds the start of a server, which reads what it kept.
const startTimeout = 30 * time.Second

// Serve starts a server. Close it when done.
func Serve(o ServerOptions) (*Server, error) {
	options := &server.Options{
		ServerName: o.Name, JetStream: true, StoreDir: o.Dir, JetStreamMaxStore: o.MaxBytes, DontListen: o.Listen == "",
		Authorization: o.Token, NoSigs: true, NoSystemAccount: o.Cluster == "", DisableJetStreamBanner: true,
		JetStreamMaxMemory: 64 << 20, // nothing is kept in memory
	}
	if o.Listen != "" {
		var err error
		if options.Host, options.Port, err = hostPort(o.Listen); err != nil {
			return nil, fmt.Errorf("start NATS: %w", err)
		}
		if options.Port == 0 {
			options.Port = server.RANDOM_PORT
		}
	}
	if o.Cluster != "" {
		options.Cluster.Name = "culprit"
		var err error
		if options.Cluster.Host, options.Cluster.Port, err = hostPort(o.Cluster); err != nil {
			return nil, fmt.Errorf("start NATS: cluster: %w", err)
		}
		for _, r := range o.Routes {
			options.Routes = append(options.Routes, &url.URL{Scheme: "nats", Host: r})
		}
	}
	s, err := server.NewServer(options)
	if err != nil {
		return nil, fmt.Errorf("start NATS: %w", err)
	}
	if o.Logger != nil {
		s.SetLoggerV2(serverLog{o.Logger}, false, false, false)
	}
	s.Start()
	if !s.ReadyForConnections(startTimeout) || !s.JetStreamEnabled() && o.Cluster == "" {
		s.Shutdown()
		return nil, fmt.Errorf("start NATS: it isn't ready: is %s writable, and used by no other process?", o.Dir)
	}
	return &Server{s, o.Token}, nil
}

func hostPort(address string) (string, int, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return "", 0, err
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil {
		return "", 0, fmt.Errorf("%s: %w", address, errors.Unwrap(err))
	}
	return host, int(n), nil
}

// URL is where other processes reach it; empty when they can't.
func (s *Server) URL() string {
	if address, ok := s.server.Addr().(*net.TCPAddr); ok {
		return "nats://" + address.String()
	}
	return ""
}

// Connect connects within the process.
func (s *Server) Connect(ctx context.Context, name string, logger *slog.Logger) (*Conn, error) {
	return connect(ctx, "nats://in-process", name, logger, nats.InProcessServer(s.server), nats.Token(s.token))
}

// Close ends it. What it kept stays.
func (s *Server) Close() {
	s.server.Shutdown()
	s.server.WaitForShutdown()
}

// serverLog passes on what is worth knowing.
type serverLog struct{ *slog.Logger }

func (l serverLog) Noticef(format string, v ...any) { l.Debug("NATS: " + fmt.Sprintf(format, v...)) }
func (l serverLog) Warnf(format string, v ...any)   { l.Warn("NATS: " + fmt.Sprintf(format, v...)) }
func (l serverLog) Fatalf(format string, v ...any)  { l.Error("NATS: " + fmt.Sprintf(format, v...)) }

func (l serverLog) Errorf(format string, v ...any) { l.Error("NATS: " + fmt.Sprintf(format, v...)) }
func (l serverLog) Debugf(string, ...any)          {}
func (l serverLog) Tracef(string, ...any)          {}

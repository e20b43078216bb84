// Package queue shares work out to other processes and machines over NATS
// JetStream: a queue holds tasks, each of which is with one worker at a time
// until its result is kept, and a store for the files that go with them. A
// [Server] is a NATS server within this program, so that one machine runs the
// same code with nothing to install. The package doesn't know what a task is.
//
// Stability: may change.
package queue

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Access is how a NATS cluster is reached, with what its own command line
// tool takes. Empty fields aren't used.
type Access struct {
	URL      string // nats://host:4222 or tls://...; several with commas
	User     string
	Password string
	Token    string
	Creds    string // file of a JWT and its key
	NKey     string // file of an NKey seed
	CA       string // file of certificates that the server's is checked by
	Cert     string // file of this client's certificate, with Key
	Key      string
}

// ReadContext reads a context that the nats command line tool keeps, by its
// name or as a file.
func ReadContext(name string) (Access, error) {
	path := name
	if !strings.ContainsRune(name, filepath.Separator) {
		config, err := os.UserConfigDir()
		if err != nil {
			return Access{}, fmt.Errorf("nats context %s: %w", name, err)
		}
		path = filepath.Join(config, "nats", "context", name+".json")
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return Access{}, fmt.Errorf("nats context %s: %w", name, err)
	}
	var c struct {
		URL      string `json:"url"`
		User     string `json:"user"`
		Password string `json:"password"`
		Token    string `json:"token"`
		Creds    string `json:"creds"`
		NKey     string `json:"nkey"`
		CA       string `json:"ca"`
		Cert     string `json:"cert"`
		Key      string `json:"key"`
	}
	if err := json.Unmarshal(b, &c); err != nil {
		return Access{}, fmt.Errorf("nats context %s: read %s: %w", name, path, err)
	}
	return Access(c), nil
}

// options are NATS's own for it.
func (a *Access) options() ([]nats.Option, error) {
	var o []nats.Option
	if a.User != "" || a.Password != "" {
		o = append(o, nats.UserInfo(a.User, a.Password))
	}
	if a.Token != "" {
		o = append(o, nats.Token(a.Token))
	}
	if a.Creds != "" {
		o = append(o, nats.UserCredentials(a.Creds))
	}
	if a.NKey != "" {
		key, err := nats.NkeyOptionFromSeed(a.NKey)
		if err != nil {
			return nil, fmt.Errorf("connect to NATS: nkey: %w", err)
		}
		o = append(o, key)
	}
	if a.CA != "" {
		o = append(o, nats.RootCAs(a.CA))
	}
	switch {
	case a.Cert != "" && a.Key != "":
		o = append(o, nats.ClientCert(a.Cert, a.Key))
	case a.Cert+a.Key != "":
		return nil, errors.New("connect to NATS: a client's certificate and its key go together")
	}
	return o, nil
}

// Conn is a connection to a NATS cluster. It is safe for concurrent use, and
// comes back by itself when it breaks.
type Conn struct {
	*nats.Conn // for what needn't be kept: signals, live figures
	stream     jetstream.JetStream
}

// requestTimeout bounds a question to JetStream: a cluster that elects a new
// leader answers within seconds.
const requestTimeout = 10 * time.Second

// Connect connects to a cluster that must be there. name shows in its lists of
// clients.
func Connect(ctx context.Context, a Access, name string, logger *slog.Logger) (*Conn, error) {
	options, err := a.options()
	if err != nil {
		return nil, err
	}
	conn, err := connect(ctx, cmp.Or(a.URL, nats.DefaultURL), name, logger, options...)
	if hint := a.refused(err); hint != "" {
		return nil, fmt.Errorf("%w; %s", err, hint)
	}
	return conn, err
}

// refused says what a cluster that lets nobody in was shown, and what it wants.
func (a *Access) refused(err error) string {
	if err == nil {
		return ""
	}
	text := err.Error()
	unauthorized := strings.Contains(text, "Authorization Violation")
	// A server that refuses a client's certificate says so and hangs up: which of
	// the two is seen first is chance.
	uncertified := strings.Contains(text, "remote error: tls") || errors.Is(err, nats.ErrTLS) && strings.Contains(text, "closed by remote")
	switch {
	case unauthorized && a.Creds != "":
		return "it doesn't know the user of " + a.Creds + ", or the user's time is over"
	case unauthorized && a.NKey != "":
		return "it doesn't know the NKey of " + a.NKey
	case unauthorized:
		return "it wants other credentials than it was shown: a creds file, an NKey, a user with a password, or a token"
	case uncertified && a.Cert == "":
		return "it wants a client's certificate and its key, and was shown none"
	case uncertified:
		return "it doesn't take the certificate of " + a.Cert
	}
	return ""
}

func connect(ctx context.Context, url, name string, logger *slog.Logger, options ...nats.Option) (*Conn, error) {
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	options = append(options,
		nats.Name(name), nats.MaxReconnects(-1), nats.ReconnectWait(time.Second), nats.Timeout(requestTimeout),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil {
				logger.Warn("the connection to NATS is lost; waiting for it to come back", slog.Any("error", err))
			}
		}),
		nats.ReconnectHandler(func(c *nats.Conn) {
			logger.Info("connected to NATS again", slog.String("server", c.ConnectedUrlRedacted()))
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { logger.Warn("NATS", slog.Any("error", err)) }),
		nats.IgnoreAuthErrorAbort(), // a creds file is read again each time, and may have been renewed
	)
	c, err := nats.Connect(url, options...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS at %s: %w", redacted(url), err)
	}
	q := &Conn{Conn: c}
	if q.stream, err = jetstream.New(c, jetstream.WithDefaultTimeout(requestTimeout)); err == nil {
		err = patiently(ctx, logger, func(ctx context.Context) error { _, err := q.stream.AccountInfo(ctx); return err })
	}
	if err != nil {
		c.Close()
		if errors.Is(err, jetstream.ErrJetStreamNotEnabled) || errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) || errors.Is(err, nats.ErrNoResponders) {
			return nil, fmt.Errorf("connect to NATS at %s: it has no JetStream: start nats-server with -js, or turn JetStream on for the account", redacted(url))
		}
		return nil, fmt.Errorf("connect to NATS at %s: JetStream: %w", redacted(url), err)
	}
	return q, nil
}

// patiently asks until a cluster that lost a server, or starts, has a leader.
func patiently(ctx context.Context, logger *slog.Logger, ask func(context.Context) error) error {
	const tries = 12
	for n := 1; ; n++ {
		short, cancel := context.WithTimeout(ctx, requestTimeout)
		err := ask(short)
		cancel()
		if err == nil || ctx.Err() != nil || n == tries || !passing(err) {
			return err
		}
		if n == 1 && logger != nil {
			logger.Info("JetStream doesn't answer yet", slog.Any("error", err))
		}
		_ = sleep(ctx, time.Second)
	}
}

// passing says that an error goes by itself.
func passing(err error) bool {
	const unavailable = 503
	api, is := errors.AsType[*jetstream.APIError](err)
	return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, nats.ErrTimeout) ||
		is && api.Code == unavailable && api.ErrorCode != jetstream.JSErrCodeJetStreamNotEnabled && api.ErrorCode != jetstream.JSErrCodeJetStreamNotEnabledForAccount && !full(err)
}

// redacted is a list of URLs without what is in front of the host.
func redacted(urls string) string {
	var out []string
	for u := range strings.SplitSeq(urls, ",") {
		scheme, rest, ok := strings.Cut(strings.TrimSpace(u), "://")
		if !ok {
			scheme, rest = "nats", scheme
		}
		out = append(out, scheme+"://"+rest[strings.LastIndexByte(rest, '@')+1:])
	}
	return strings.Join(out, ",")
}

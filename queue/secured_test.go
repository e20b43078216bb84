package queue

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/culprit-project/culprit/queue/natstest"
)

// A cluster in operator mode with TLS on both sides lets in who shows both, and
// tells the others what it wants.
func TestCredsAndCertificate(t *testing.T) {
	t.Parallel()
	s, err := natstest.Start(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	both := Access{URL: s.URL, CA: s.CA, Cert: s.Cert, Key: s.Key, Creds: s.Creds}
	with := func(change func(*Access)) Access { a := both; change(&a); return a }
	tests := []struct {
		name   string
		access Access
		says   string // of the error; empty is none
	}{
		{"both", both, ""},
		{"no certificate", with(func(a *Access) { a.Cert, a.Key = "", "" }), "it wants a client's certificate"},
		{"a certificate of another authority", with(func(a *Access) { a.Cert, a.Key = s.OtherCert, s.OtherKey }), "it doesn't take the certificate of"},
		{"a certificate with another's key", with(func(a *Access) { a.Key = s.OtherKey }), "private key does not match"},
		{"no such certificate", with(func(a *Access) { a.Cert += "x" }), "no such file"},
		{"no authority", with(func(a *Access) { a.CA = "" }), "unknown authority"},
		{"no credentials", with(func(a *Access) { a.Creds = "" }), "it wants other credentials"},
		{"another operator's user", with(func(a *Access) { a.Creds = s.OtherCreds }), "other.creds, or the user's time is over"},
		{"a user whose time is over", with(func(a *Access) { a.Creds = s.ExpiredCreds }), "expired.creds, or the user's time is over"},
		{"no such credentials", with(func(a *Access) { a.Creds += "x" }), "no such file"},
		{"credentials that are something else", with(func(a *Access) { a.Creds = s.CA }), "no nkey seed"},
		{"a password in place of credentials", with(func(a *Access) { a.Creds, a.User, a.Password = "", "hunter", "hunter3" }), "it wants other credentials"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { connects(t, tt.access, tt.says, append(s.Secrets, "hunter3")...) })
	}
}

// A user whose time is over while connected comes back with the file's new
// credentials, however often the old ones were refused in between.
func TestCredsRenewed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	s, err := natstest.Start(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	creds := dir + "/short.creds"
	if err := s.WriteCreds(creds, 2*time.Second); err != nil {
		t.Fatal(err)
	}
	logged := &counter{}
	conn, err := Connect(t.Context(), Access{URL: s.URL, CA: s.CA, Cert: s.Cert, Key: s.Key, Creds: creds}, "test", slog.New(logged))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	wait := func(what string, holds func() bool) {
		for deadline := time.Now().Add(15 * time.Second); !holds(); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("waited in vain for %s", what)
			}
		}
	}
	wait("the old credentials to be refused thrice", func() bool { return logged.n.Load() >= 3 })
	if err := s.WriteCreds(creds, time.Hour); err != nil {
		t.Fatal(err)
	}
	wait("the connection", conn.IsConnected)
	if _, err := conn.Queues(t.Context()); err != nil {
		t.Error(err)
	}
}

// counter counts errors of authorization.
type counter struct {
	slog.Handler
	n atomic.Int64
}

func (c *counter) Enabled(context.Context, slog.Level) bool { return true }

func (c *counter) Handle(_ context.Context, r slog.Record) error {
	r.Attrs(func(a slog.Attr) bool {
		if strings.Contains(strings.ToLower(a.Value.String()), "auth") {
			c.n.Add(1)
		}
		return true
	})
	return nil
}

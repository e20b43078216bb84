package queue

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// secured starts a server with TLS, a user and an NKey, and says how it is
// reached: with none of these.
func secured(t *testing.T) (url, ca, seed string) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour), NotBefore: time.Now().Add(-time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	ca = filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	user, err := nkeys.CreateUser()
	if err != nil {
		t.Fatal(err)
	}
	public, err := user.PublicKey()
	if err != nil {
		t.Fatal(err)
	}
	text, err := user.Seed()
	if err != nil {
		t.Fatal(err)
	}
	seed = filepath.Join(t.TempDir(), "user.nk")
	if err := os.WriteFile(seed, text, 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := server.NewServer(&server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: t.TempDir(), NoSigs: true, NoLog: true,
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}, MinVersion: tls.VersionTLS12}, TLSTimeout: 5,
		Users: []*server.User{{Username: "hunter", Password: "hunter2"}}, Nkeys: []*server.NkeyUser{{Nkey: public}},
	})
	if err != nil {
		t.Fatal(err)
	}
	s.Start()
	t.Cleanup(s.Shutdown)
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("the server isn't ready")
	}
	return "tls://" + s.Addr().String(), ca, seed
}

func TestAccess(t *testing.T) {
	t.Parallel()
	url, ca, seed := secured(t)
	context := filepath.Join(t.TempDir(), "lab.json")
	if err := os.WriteFile(context, []byte(`{"description": "of the nats tool", "url": "`+url+`", "user": "hunter", "password": "hunter2", "ca": "`+ca+`"}`), 0o600); err != nil {
		t.Fatal(err)
	}
	kept, err := ReadContext(context)
	if err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		name   string
		access Access
		says   string // of the error; empty is none
	}{
		{"a user", Access{URL: url, CA: ca, User: "hunter", Password: "hunter2"}, ""},
		{"a user in the URL", Access{URL: strings.Replace(url, "tls://", "tls://hunter:hunter2@", 1), CA: ca}, ""},
		{"an NKey", Access{URL: url, CA: ca, NKey: seed}, ""},
		{"a context", kept, ""},
		{"nobody", Access{URL: url, CA: ca}, "Authorization"},
		{"a wrong password", Access{URL: strings.Replace(url, "tls://", "tls://hunter:hunter3@", 1), CA: ca}, "Authorization"},
		{"an unknown authority", Access{URL: url, User: "hunter", Password: "hunter2"}, "certificate"},
		{"no such NKey", Access{URL: url, CA: ca, NKey: seed + "x"}, "no such file"},
		{"half a certificate", Access{URL: url, Cert: ca}, "go together"},
		{"nobody there", Access{URL: "nats://user:hunter3@127.0.0.1:1"}, "no servers"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { connects(t, tt.access, tt.says, "hunter3") })
	}
}

// connects checks that a client is let in, or with says that it isn't, for a
// reason that has this text and none of the secrets.
func connects(t *testing.T, access Access, says string, secrets ...string) {
	t.Helper()
	conn, err := Connect(t.Context(), access, "test", nil)
	if err == nil {
		conn.Close()
	}
	switch {
	case says == "" && err != nil:
		t.Error(err)
	case says != "" && (err == nil || !strings.Contains(err.Error(), says)):
		t.Errorf("the error is %v, want one with %q", err, says)
	case err != nil && slices.ContainsFunc(secrets, func(secret string) bool { return strings.Contains(err.Error(), secret) }):
		t.Errorf("the error has a secret: %v", err)
	}
}

// Package natstest runs a NATS server as careful users run theirs: in operator
// mode, where each client shows a JWT and signs with its key, and with TLS, where
// each client shows a certificate too. It is for tests.
//
// Stability: may change.
package natstest

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/nats-io/jwt/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nkeys"
)

// Server is one that wants credentials and a client's certificate. Its fields
// but for URL are files.
type Server struct {
	URL       string
	CA        string // that the server's certificate is checked by
	Cert, Key string // a client's
	Creds     string // a user's

	// What it refuses: a certificate of another authority, a user of another
	// operator, one whose time is over.
	OtherCert, OtherKey      string
	OtherCreds, ExpiredCreds string

	Secrets []string // what of the files no other file may hold

	server   *server.Server
	operator *operatorMode
}

// Start starts a server and writes what its clients need to dir. Close it when
// done.
func Start(dir string) (*Server, error) {
	s := &Server{}
	if err := s.start(dir); err != nil {
		return nil, fmt.Errorf("start a NATS server for tests: %w", err)
	}
	return s, nil
}

func (s *Server) start(dir string) error {
	path := func(name string) string { return filepath.Join(dir, name) }
	ours, err := newAuthority()
	if err != nil {
		return err
	}
	others, err := newAuthority()
	if err != nil {
		return err
	}
	s.CA, s.Cert, s.Key, s.OtherCert, s.OtherKey = path("ca.pem"), path("client.pem"), path("client.key"), path("other.pem"), path("other.key")
	if err := os.WriteFile(s.CA, ours.pem(), 0o600); err != nil {
		return err
	}
	own, _, err := ours.issue()
	if err != nil {
		return err
	}
	for _, to := range []struct {
		*authority
		cert, key string
	}{{ours, s.Cert, s.Key}, {others, s.OtherCert, s.OtherKey}} {
		cert, key, err := to.issue()
		if err != nil {
			return err
		}
		if err := errors.Join(os.WriteFile(to.cert, pemOf("CERTIFICATE", cert.Certificate[0]), 0o600), os.WriteFile(to.key, key, 0o600)); err != nil {
			return err
		}
		s.Secrets = append(s.Secrets, secondLine(key))
	}
	if s.operator, err = newOperator(); err != nil {
		return err
	}
	stranger, err := newOperator()
	if err != nil {
		return err
	}
	s.Creds, s.OtherCreds, s.ExpiredCreds = path("user.creds"), path("other.creds"), path("expired.creds")
	if err := errors.Join(s.WriteCreds(s.Creds, time.Hour), s.WriteCreds(s.ExpiredCreds, -time.Hour), s.writeCreds(stranger, s.OtherCreds, time.Hour)); err != nil {
		return err
	}
	trusted := x509.NewCertPool()
	trusted.AddCert(ours.cert)
	const tlsTimeoutSeconds = 5
	options := &server.Options{
		Host: "127.0.0.1", Port: server.RANDOM_PORT, JetStream: true, StoreDir: path("store"), NoSigs: true, NoLog: true,
		TLS: true, TLSVerify: true, TLSTimeout: tlsTimeoutSeconds,
		TLSConfig:        &tls.Config{Certificates: []tls.Certificate{own}, ClientCAs: trusted, ClientAuth: tls.RequireAndVerifyClientCert, MinVersion: tls.VersionTLS12},
		TrustedOperators: []*jwt.OperatorClaims{s.operator.claims}, SystemAccount: s.operator.system, AccountResolver: s.operator.accounts,
	}
	if s.server, err = server.NewServer(options); err != nil {
		return err
	}
	s.server.Start()
	const startTimeout = 10 * time.Second
	if !s.server.ReadyForConnections(startTimeout) {
		s.Close()
		return errors.New("it isn't ready")
	}
	s.URL = "tls://" + s.server.Addr().String()
	return nil
}

// WriteCreds writes the credentials of a new user, who is let in for so long.
func (s *Server) WriteCreds(path string, valid time.Duration) error {
	return s.writeCreds(s.operator, path, valid)
}

func (s *Server) writeCreds(o *operatorMode, path string, valid time.Duration) error {
	creds, secret, err := o.user(time.Now().Add(valid))
	if err != nil {
		return err
	}
	s.Secrets = append(s.Secrets, secret)
	return os.WriteFile(path, creds, 0o600)
}

// Close ends it.
func (s *Server) Close() {
	s.server.Shutdown()
	s.server.WaitForShutdown()
}

// authority issues certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority() (*authority, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	template := template("authority")
	template.IsCA, template.BasicConstraintsValid, template.KeyUsage = true, true, x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	return &authority{cert, key}, err
}

func template(name string) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
	}
}

func (a *authority) pem() []byte { return pemOf("CERTIFICATE", a.cert.Raw) }

// issue makes a certificate of this machine, for a server or a client, and its
// key as PEM.
func (a *authority) issue() (tls.Certificate, []byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	template := template("127.0.0.1")
	template.IPAddresses = []net.IP{net.IPv4(127, 0, 0, 1)}
	template.KeyUsage, template.ExtKeyUsage = x509.KeyUsageDigitalSignature, []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	der, err := x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key)
	if err != nil {
		return tls.Certificate{}, nil, err
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, pemOf("PRIVATE KEY", private), err
}

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// secondLine is the first one of what a PEM block holds.
func secondLine(block []byte) string {
	const lineBytes = 64
	_, rest, _ := bytes.Cut(block, []byte("\n"))
	return string(rest[:lineBytes])
}

// operatorMode is an operator with one account that has JetStream.
type operatorMode struct {
	claims   *jwt.OperatorClaims
	system   string // the account that the server itself uses
	account  nkeys.KeyPair
	accounts *server.MemAccResolver
}

func newOperator() (*operatorMode, error) {
	key, err := nkeys.CreateOperator()
	if err != nil {
		return nil, err
	}
	id, err := key.PublicKey()
	if err != nil {
		return nil, err
	}
	o := &operatorMode{claims: jwt.NewOperatorClaims(id), accounts: &server.MemAccResolver{}}
	if o.system, _, err = o.add(key, false); err != nil {
		return nil, err
	}
	if _, o.account, err = o.add(key, true); err != nil {
		return nil, err
	}
	// The server takes an operator's claims as they are once they were signed.
	text, err := o.claims.Encode(key)
	if err != nil {
		return nil, err
	}
	o.claims, err = jwt.DecodeOperatorClaims(text)
	return o, err
}

// add makes an account.
func (o *operatorMode) add(operator nkeys.KeyPair, jetstream bool) (id string, key nkeys.KeyPair, err error) {
	if key, err = nkeys.CreateAccount(); err != nil {
		return "", nil, err
	}
	if id, err = key.PublicKey(); err != nil {
		return "", nil, err
	}
	claims := jwt.NewAccountClaims(id)
	if jetstream {
		claims.Limits.JetStreamLimits = jwt.JetStreamLimits{
			MemoryStorage: jwt.NoLimit, DiskStorage: jwt.NoLimit, Streams: jwt.NoLimit, Consumer: jwt.NoLimit,
		}
	}
	text, err := claims.Encode(operator)
	if err != nil {
		return "", nil, err
	}
	return id, key, o.accounts.Store(id, text)
}

// user makes the credentials of a user of the account, and the secret in them.
func (o *operatorMode) user(expires time.Time) (creds []byte, secret string, err error) {
	key, err := nkeys.CreateUser()
	if err != nil {
		return nil, "", err
	}
	id, err := key.PublicKey()
	if err != nil {
		return nil, "", err
	}
	seed, err := key.Seed()
	if err != nil {
		return nil, "", err
	}
	claims := jwt.NewUserClaims(id)
	claims.Expires = expires.Unix()
	text, err := claims.Encode(o.account)
	if err != nil {
		return nil, "", err
	}
	creds, err = jwt.FormatUserConfig(text, seed)
	return creds, string(seed), err
}

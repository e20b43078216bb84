package app

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/report"
	"github.com/culprit-project/culprit/target"
)

// AttestOptions is what attest is asked for.
type AttestOptions struct {
	Server            // its BaseURL is taken from What
	What     string   // a process id, a URL, a case, or a stored attestation
	Against  string   // another, to be compared with; empty for none
	Files    []string // to be hashed
	Packages []string // nil is the engine's own
	Output   string   // file to write the attestation to
}

// Attest reads what is really running, and what differs from another.
func Attest(ctx context.Context, o AttestOptions, out Output) error {
	a, c, err := o.attest(ctx, o.What)
	if err != nil {
		return err
	}
	if o.Output != "" {
		if err := experiment.WriteJSON(o.Output, a); err != nil {
			return err
		}
	}
	if o.Against == "" {
		return showAttestation(a, c, out)
	}
	b, _, err := o.attest(ctx, o.Against)
	if err != nil {
		return err
	}
	diffs := target.Diff(a, b)
	if out.Screen == nil {
		return writeJSON(out.JSON, map[string]any{"a": a, "b": b, "differences": diffs})
	}
	report.Differences(out.Screen, term.Safe(o.What), term.Safe(o.Against), diffs)
	return nil
}

// attest reads one of the things that can be attested; the case, if it is one.
func (o *AttestOptions) attest(ctx context.Context, what string) (*target.Attestation, *experiment.Case, error) {
	if pid, err := strconv.Atoi(what); err == nil && pid > 0 {
		a, err := o.process(ctx, pid)
		return a, nil, err
	}
	if info, err := os.Stat(what); err == nil {
		switch _, err := os.Stat(filepath.Join(what, experiment.AttestFile)); {
		case strings.HasSuffix(what, ".json"):
			a, err := readAttestation(what)
			return a, nil, err
		case info.IsDir() && err == nil:
			a, err := readAttestation(filepath.Join(what, experiment.AttestFile))
			return a, nil, err
		}
		c, err := experiment.ReadCase(what)
		if err != nil {
			return nil, nil, &UsageError{err}
		}
		a, err := o.ofCase(ctx, c)
		return a, c, err
	}
	base, err := target.ParseBaseURL(what)
	if err != nil || !strings.Contains(what, "://") && !strings.Contains(what, ":") {
		return nil, nil, usage("attest %s: want a process id, a URL, a case (a directory with %s) or a stored attestation (%s)", what, experiment.CaseFile, experiment.AttestFile)
	}
	options := o.options()
	options.Server = o.at(base)
	if options.Trees, err = localTrees(ctx, "server", base); err != nil {
		return nil, nil, err
	}
	a, err := attested(ctx, options)
	return a, nil, err
}

func (o *AttestOptions) options() target.AttestOptions {
	return target.AttestOptions{Files: o.Files, Packages: o.Packages}
}

func (o *AttestOptions) at(base string) *target.Server {
	return &target.Server{BaseURL: base, Header: o.headers(), Client: http.DefaultClient}
}

func attested(ctx context.Context, o target.AttestOptions) (*target.Attestation, error) {
	a, err := target.Attest(ctx, o)
	if err != nil {
		return nil, &NoVerdictError{err}
	}
	return a, nil
}

// process attests a process and what it started, and the server that answers
// at one of the ports that they listen at.
func (o *AttestOptions) process(ctx context.Context, pid int) (*target.Attestation, error) {
	below, err := target.DescendantsOn(ctx, target.Local{}, pid)
	if err != nil {
		return nil, &NoVerdictError{err}
	}
	options := o.options()
	family := append([]int{pid}, below...)
	options.Trees = []target.Tree{{Name: "server", PIDs: family}}
	for _, member := range family {
		ports, err := target.Ports(ctx, target.Local{}, member)
		if err != nil {
			return nil, &NoVerdictError{err}
		}
		for _, port := range ports {
			s := o.at(fmt.Sprintf("http://127.0.0.1:%d", port))
			if options.Server == nil && answers(ctx, s) {
				options.Server = s
			}
		}
	}
	return attested(ctx, options)
}

// answers reports whether a server of the kind that we test is there.
func answers(ctx context.Context, s *target.Server) bool {
	const most = 3 * time.Second
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	_, err := s.Identify(ctx)
	return err == nil
}

// ofCase attests what runs now at a case's URLs.
func (o *AttestOptions) ofCase(ctx context.Context, c *experiment.Case) (*target.Attestation, error) {
	arm, err := c.Render(c.Space.Failing())
	if err != nil {
		return nil, &UsageError{err}
	}
	options := target.AttestOptions{Server: o.at(c.BaseURL), Files: append(c.Files, o.Files...), Packages: c.Packages}
	if o.Packages != nil {
		options.Packages = o.Packages
	}
	hosts := map[string]*target.SSH{}
	defer func() {
		for _, h := range hosts {
			h.Close()
		}
	}()
	urls := map[string]bool{}
	for _, p := range arm.Processes {
		at := whereabouts(&p, arm, c.BaseURL)
		if at == "" {
			options.Missing = append(options.Missing, p.Name+": nothing says where it listens, so its process wasn't looked for: give it a url in the case")
			continue
		}
		var trees []target.Tree
		if p.Host != "" {
			h := hosts[p.Host]
			if h == nil {
				h = &target.SSH{Command: c.SSH, Host: p.Host}
				hosts[p.Host] = h
			}
			trees, err = listenerTree(ctx, h, p.Name, at)
		} else {
			trees, err = localTrees(ctx, p.Name, at)
		}
		if err != nil {
			options.Missing = append(options.Missing, fmt.Sprintf("%s: its process can't be looked for: %v", p.Name, err))
			continue
		}
		if len(trees) == 0 {
			options.Missing = append(options.Missing, fmt.Sprintf("%s: no process that we may look at listens at %s on %s", p.Name, at, cmp.Or(p.Host, "this machine")))
		}
		for i := range trees {
			trees[i].URL = p.URL
			if p.Host != "" {
				trees[i].Host, trees[i].HostName = hosts[p.Host], p.Host
			}
		}
		options.Trees, urls[at] = append(options.Trees, trees...), true
	}
	if !urls[c.BaseURL] {
		trees, err := localTrees(ctx, "server", c.BaseURL)
		if err != nil {
			return nil, err
		}
		options.Trees = append(options.Trees, trees...)
	}
	return attested(ctx, options)
}

// whereabouts is the URL where a process of a case listens: its own, the only
// one that there is, or what its command says.
func whereabouts(p *target.Process, arm *experiment.Rendered, base string) string {
	if p.URL != "" {
		return p.URL
	}
	if len(arm.Processes) == 1 {
		return base
	}
	if _, flags := target.Flags(p.Command); flags["--port"] != "" {
		return "http://127.0.0.1:" + flags["--port"]
	}
	return ""
}

// localTrees finds the process that listens at a URL, if that is on this
// machine.
func localTrees(ctx context.Context, name, base string) ([]target.Tree, error) {
	u, err := url.Parse(base)
	if err != nil || !local(u.Hostname()) {
		return nil, nil //nolint:nilerr // a URL that can't be parsed is nobody's here
	}
	return listenerTree(ctx, target.Local{}, name, base)
}

// listenerTree finds the process that listens at a URL's port on a host.
func listenerTree(ctx context.Context, host target.Host, name, base string) ([]target.Tree, error) {
	u, err := url.Parse(base)
	if err != nil {
		return nil, err
	}
	pid, err := target.Listener(ctx, host, portOf(u))
	if err != nil || pid == 0 {
		return nil, err
	}
	below, err := target.DescendantsOn(ctx, host, pid)
	if err != nil {
		return nil, err
	}
	return []target.Tree{{Name: name, PIDs: append([]int{pid}, below...)}}, nil
}

func local(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	addresses, err := net.InterfaceAddrs()
	return ip != nil && (ip.IsLoopback() || ip.IsUnspecified() || err == nil && slices.ContainsFunc(addresses, func(a net.Addr) bool {
		n, ok := a.(*net.IPNet)
		return ok && n.IP.Equal(ip)
	}))
}

func readAttestation(path string) (*target.Attestation, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, usage("read attestation: %w", err)
	}
	if err != nil {
		return nil, fmt.Errorf("read attestation: %w", err)
	}
	var a target.Attestation
	if err := json.Unmarshal(b, &a); err != nil {
		return nil, usage("read attestation %s: %w", path, err)
	}
	if a.Format != target.AttestationFormat {
		return nil, usage("read attestation %s: it has format %d, this program reads format %d", path, a.Format, target.AttestationFormat)
	}
	return &a, nil
}

// liveLevel is a factor with the level that the live server has.
type liveLevel struct {
	Factor  string `json:"factor"`
	Live    string `json:"live,omitempty"` // empty: can't be told, or none fits
	Failing string `json:"failing"`        // that of the failing arm
	Why     string `json:"why,omitempty"`  // why it isn't that one
}

func showAttestation(a *target.Attestation, c *experiment.Case, out Output) error {
	var levels []liveLevel
	if c != nil {
		wrong := c.Attest(a, c.Space.Failing())
		for _, f := range c.Space.Factors {
			if f.Attest == "" {
				continue
			}
			l := liveLevel{Factor: f.Name, Live: c.LevelOf(a, f.Name), Failing: f.Levels[f.Failing()].Name}
			for _, why := range wrong {
				if rest, ok := strings.CutPrefix(why, "factor "+f.Name+": "); ok {
					l.Why = rest
				}
			}
			levels = append(levels, l)
		}
	}
	if out.Screen == nil {
		return writeJSON(out.JSON, struct {
			*target.Attestation
			Levels []liveLevel `json:"levels,omitempty"`
		}{a, levels})
	}
	report.Attestation(out.Screen, a)
	if len(levels) == 0 {
		return nil
	}
	rows := [][]string{{"factor", "live", "failing arm", ""}}
	for _, l := range levels {
		live, note := l.Live, ""
		switch {
		case live == "":
			live, note = "?", l.Why
		case l.Why != "":
			note = "differs"
		}
		rows = append(rows, []string{term.Safe(l.Factor), term.Safe(live), term.Safe(l.Failing), term.Clip(term.Safe(note), out.Screen.Columns())})
	}
	out.Screen.Printf("\n%s", out.Screen.Table("llll", rows))
	return nil
}

package app

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/suspect"
	"github.com/culprit-project/culprit/target"
)

// InitOptions is what init is asked for.
type InitOptions struct {
	Server
	What        []string // process ids and URLs: first where requests go, then more of the server's processes
	Host        string   // where the processes are, by ssh; empty is this machine
	Output      string   // the case's file, or the directory that it goes to; "-" is the standard output
	Force       bool     // in place of one that is there
	Suspects    []string // files with more of them
	Concurrency int
	Environment []string // ours, as NAME=VALUE
}

// Init reads a live server and writes the case in which its suspects are
// varied.
func Init(ctx context.Context, o InitOptions, out Output) error {
	table := suspect.Builtin()
	for _, file := range o.Suspects {
		b, err := os.ReadFile(file)
		if err != nil {
			return usage("read suspects: %w", err)
		}
		more, err := suspect.Parse(file, b)
		if err != nil {
			return &UsageError{err}
		}
		table.Add(more)
	}
	path := o.Output
	if info, err := os.Stat(path); path != "-" && (err == nil && info.IsDir() || filepath.Ext(path) == "") {
		path = filepath.Join(path, experiment.CaseFile)
	}
	if _, err := os.Stat(path); err == nil && !o.Force && path != "-" {
		return usage("init: %s is there already; give another --output, or --force", path)
	}
	server, err := o.server(ctx)
	if err != nil {
		return err
	}
	environment := map[string]string{}
	for _, entry := range o.Environment {
		name, value, _ := strings.Cut(entry, "=")
		environment[name] = value
	}
	made := suspect.Make(server, suspect.Options{Table: table, Environment: environment, Concurrency: o.Concurrency})
	if _, err := experiment.ParseCase(path, []byte(made.Text)); err != nil {
		return fmt.Errorf("init: the case that was made isn't one, which is a defect of culprit's: %w", err)
	}
	if path == "-" {
		out.Screen.Printf("%s", made.Text)
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("make case directory: %w", err)
	}
	if err := os.WriteFile(path, []byte(made.Text), 0o644); err != nil {
		return fmt.Errorf("write case: %w", err)
	}
	showCase(path, server, made, out.Screen)
	return nil
}

// part is one process of a server.
type part struct {
	suspect.Process
	pid    int // 0: it isn't known
	url    string
	routes bool
	args   []string
}

// server finds the processes and attests them.
func (o *InitOptions) server(ctx context.Context) (suspect.Server, error) {
	var s suspect.Server
	var host target.Host = target.Local{}
	if o.Host != "" {
		ssh := &target.SSH{Host: o.Host}
		defer ssh.Close()
		host = ssh
	}
	attest := AttestOptions{Server: o.Server}
	var parts []part
	for at := 0; at < len(o.What); at++ {
		p, err := o.part(ctx, host, o.What[at])
		if err != nil {
			return s, err
		}
		if slices.ContainsFunc(parts, func(q part) bool { return q.pid == p.pid && p.pid != 0 }) {
			continue
		}
		parts = append(parts, p)
		if p.routes {
			behind := upstream(p.args)
			if len(behind) == 0 && p.url != "" {
				behind = attest.at(p.url).Workers(ctx)
			}
			o.What = append(o.What, behind...)
		}
	}
	s.BaseURL = parts[0].url
	if s.BaseURL == "" {
		return s, &NoVerdictError{fmt.Errorf("init %s: no process there listens at a port where an OpenAI-compatible server answers; is it up yet? Give its URL", o.What[0])}
	}
	name(parts)
	options := target.AttestOptions{Server: attest.at(s.BaseURL)}
	for _, p := range parts {
		if p.pid == 0 {
			continue
		}
		below, err := target.DescendantsOn(ctx, host, p.pid)
		if err != nil {
			return s, &NoVerdictError{err}
		}
		tree := target.Tree{Name: p.Name, PIDs: append([]int{p.pid}, below...), HostName: o.Host, URL: p.URL}
		if o.Host != "" {
			tree.Host = host
		}
		options.Trees = append(options.Trees, tree)
		s.Processes = append(s.Processes, p.Process)
	}
	var err error
	s.Live, err = attested(ctx, options)
	return s, err
}

// part finds one process by its id, or by the URL where it answers.
func (o *InitOptions) part(ctx context.Context, host target.Host, what string) (part, error) {
	p := part{Process: suspect.Process{Host: o.Host}}
	pid, err := strconv.Atoi(what)
	if err == nil && pid > 0 {
		p.url, pid, err = o.listening(ctx, host, pid)
		if err != nil {
			return p, err
		}
	} else {
		if p.url, err = target.ParseBaseURL(what); err != nil || !strings.Contains(what, ":") {
			return p, usage("init %s: want a process id, or a URL such as http://127.0.0.1:8000", what)
		}
		if pid, err = o.listener(ctx, host, p.url); err != nil {
			return p, &NoVerdictError{err}
		}
	}
	if pid == 0 {
		return p, nil
	}
	if p.pid, err = target.Program(ctx, host, pid); err != nil {
		return p, &NoVerdictError{fmt.Errorf("init: %w", err)}
	}
	if p.args, err = target.Args(ctx, host, p.pid); err != nil {
		return p, &NoVerdictError{fmt.Errorf("init: %w", err)}
	}
	p.Container, p.routes = target.Contained(ctx, host, p.pid), suspect.Routes(p.args)
	return p, nil
}

// listener is the process that listens at a URL; 0 if that is elsewhere.
func (o *InitOptions) listener(ctx context.Context, host target.Host, base string) (int, error) {
	u, err := url.Parse(base)
	if err != nil || o.Host == "" && !local(u.Hostname()) {
		return 0, nil //nolint:nilerr // a URL that can't be parsed is nobody's here
	}
	return target.Listener(ctx, host, portOf(u))
}

func portOf(u *url.URL) int {
	if port, err := strconv.Atoi(u.Port()); err == nil {
		return port
	}
	return map[string]int{"http": 80, "https": 443}[u.Scheme]
}

// listening finds which of a process and those that it started serves, and
// where.
func (o *InitOptions) listening(ctx context.Context, host target.Host, pid int) (base string, serves int, err error) {
	below, err := target.DescendantsOn(ctx, host, pid)
	if err != nil {
		return "", 0, &NoVerdictError{err}
	}
	name := cmp.Or(o.Host, "127.0.0.1")
	attest := AttestOptions{Server: o.Server}
	for _, member := range append([]int{pid}, below...) {
		ports, err := target.Ports(ctx, host, member)
		if err != nil {
			return "", 0, &NoVerdictError{err}
		}
		for _, port := range ports {
			at := "http://" + net.JoinHostPort(name, strconv.Itoa(port))
			if s := attest.at(at); answers(ctx, s) {
				return at, member, nil
			}
		}
	}
	return "", pid, nil
}

var (
	address = regexp.MustCompile(`^(?:https?://)?[A-Za-z0-9.\[\]:-]+:[0-9]{2,5}/?$`)
	workers = regexp.MustCompile(`^--(prefill|decode|worker|backend)[a-z-]*$`)
)

// upstream lists where a router sends what it gets, by its command line.
func upstream(args []string) []string {
	var all []string
	flag, hosts := "", map[string]string{}
	for _, arg := range args {
		name, value, joined := strings.Cut(arg, "=")
		switch {
		case strings.HasPrefix(arg, "-") && !joined:
			flag = arg
			continue
		case strings.HasPrefix(arg, "-"):
			flag, arg = name, value
		}
		switch role := workers.FindStringSubmatch(flag); {
		case role == nil:
		case strings.Contains(flag, "host"):
			hosts[role[1]] = arg
		case strings.Contains(flag, "port"):
			all = append(all, net.JoinHostPort(cmp.Or(hosts[role[1]], "127.0.0.1"), arg))
		case address.MatchString(arg):
			all = append(all, arg)
		}
	}
	return all
}

// name names the parts of a server by what they are, and puts them in the order
// in which they start: what hands requests on comes last.
func name(parts []part) {
	used := map[string]int{}
	for i := range parts {
		p := &parts[i]
		p.Name = "server"
		_, flags := target.Flags(p.args)
		switch mode := cmp.Or(flags["--disaggregation-mode"], flags["--disaggregation_mode"]); {
		case p.routes:
			p.Name = "router"
		case mode == "prefill" || mode == "decode":
			p.Name = mode
		case strings.Contains(flags["--kv-transfer-config"], "kv_producer"):
			p.Name = "prefill"
		case strings.Contains(flags["--kv-transfer-config"], "kv_consumer"):
			p.Name = "decode"
		}
		if used[p.Name]++; used[p.Name] > 1 {
			p.Name += strconv.Itoa(used[p.Name])
		}
		if len(parts) > 1 && i > 0 {
			p.URL = p.url
		}
	}
	rank := func(p part) int {
		return slices.Index([]bool{strings.HasPrefix(p.Name, "prefill"), strings.HasPrefix(p.Name, "decode"), !p.routes, true}, true)
	}
	slices.SortStableFunc(parts, func(a, b part) int { return cmp.Compare(rank(a), rank(b)) })
}

func showCase(path string, server suspect.Server, c *suspect.Case, s *term.Screen) {
	said := strings.TrimSpace(server.Live.Engine + " " + server.Live.Version)
	s.Printf("%s at %s: %d suspects\n", term.Safe(cmp.Or(said, "an unknown server")), term.Safe(server.BaseURL), len(c.Factors))
	rows := [][]string{{"suspect", "live", "safe", "odds", "attested by"}}
	for _, f := range c.Factors {
		by := "nothing"
		switch {
		case strings.Contains(f.Attest, "server_info"), strings.Contains(f.Attest, "props"), strings.Contains(f.Attest, "model_info"):
			by = "server"
		case strings.Contains(f.Attest, "env."):
			by = "environment"
		case f.Attest != "":
			by = "command"
		}
		rows = append(rows, []string{f.Name, term.Clip(term.Safe(f.Suspect), 22), term.Clip(term.Safe(f.Safe), 26), strconv.FormatFloat(f.Odds, 'g', -1, 64), by})
	}
	if len(c.Factors) > 0 {
		s.Printf("\n%s", s.Table("lllrl", rows))
	}
	if len(c.LeftOut) > 0 {
		s.Printf("\n%d settings are left out, with the reasons in the file.\n", len(c.LeftOut))
	}
	for _, todo := range c.Todo {
		for i, line := range term.Wrap(term.Safe("to do: "+todo), s.Columns()-2) {
			s.Printf("%s%s\n", map[bool]string{true: "", false: "  "}[i == 0], line)
		}
	}
	s.Printf("\nWritten: %s\nNext: read it, stop the live server, then\n  culprit hunt --dry-run %s\n  culprit hunt %s\n", path, path, path)
}

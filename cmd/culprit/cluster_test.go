package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/search"
)

var wholeCluster = flag.Bool("cluster", false, "three NATS servers, six workers, and everything that can die")

// natsNode is a NATS server as a process, of a cluster or alone.
func natsNode() {
	var o queue.ServerOptions
	var routes string
	flag.StringVar(&o.Dir, "dir", "", "")
	flag.StringVar(&o.Name, "name", "", "")
	flag.StringVar(&o.Listen, "listen", "", "")
	flag.StringVar(&o.Cluster, "cluster-listen", "", "")
	flag.StringVar(&routes, "routes", "", "")
	flag.Int64Var(&o.MaxBytes, "max-bytes", 1<<30, "")
	flag.CommandLine.Parse(os.Args[1:])
	if routes != "" {
		o.Routes = strings.Split(routes, ",")
	}
	s, err := queue.Serve(o)
	if err != nil {
		panic(err)
	}
	defer s.Close()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	<-ctx.Done()
}

// process is one of a test's.
type process struct {
	args []string
	cmd  *exec.Cmd
	log  string
	done chan struct{}
}

func start(t *testing.T, log string, args ...string) *process {
	t.Helper()
	p := &process{args: args, log: log}
	p.start(t)
	t.Cleanup(p.kill)
	return p
}

func (p *process) start(t *testing.T) {
	t.Helper()
	f, err := os.OpenFile(p.log, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p.cmd = exec.Command(p.args[0], p.args[1:]...)
	p.cmd.Stdout, p.cmd.Stderr = f, f
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	p.done = done
	go func(cmd *exec.Cmd) { _ = cmd.Wait(); close(done) }(p.cmd)
}

// kill is kill -9.
func (p *process) kill() {
	_ = p.cmd.Process.Signal(syscall.SIGKILL)
	<-p.done
}

func (p *process) says(text string) bool {
	b, _ := os.ReadFile(p.log)
	return bytes.Contains(b, []byte(text))
}

// gate passes a connection's bytes on, until it is shut: then nothing comes
// through, and nobody is told.
type gate struct {
	listener net.Listener
	to       string
	mu       sync.Mutex
	opened   *sync.Cond
	shut     bool
}

func newGate(t *testing.T, to string) *gate {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	g := &gate{listener: l, to: to}
	g.opened = sync.NewCond(&g.mu)
	t.Cleanup(func() { g.set(false); l.Close() })
	go func() {
		for {
			a, err := l.Accept()
			if err != nil {
				return
			}
			b, err := net.Dial("tcp", to)
			if err != nil {
				a.Close()
				continue
			}
			go g.pass(a, b)
			go g.pass(b, a)
		}
	}()
	return g
}

func (g *gate) set(shut bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = shut
	g.opened.Broadcast()
}

func (g *gate) pass(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	buffer := make([]byte, 64<<10)
	for {
		n, err := from.Read(buffer)
		g.mu.Lock()
		for g.shut {
			g.opened.Wait()
		}
		g.mu.Unlock()
		if _, err2 := to.Write(buffer[:n]); err != nil || err2 != nil {
			return
		}
	}
}

// cluster is what a test of hunts elsewhere runs on.
type cluster struct {
	*testing.T
	dir     string
	ports   string // ten ports, without the last digit
	urls    []string
	nodes   []*process
	workers []*process
	conn    *nats.Conn
	gates   []*gate

	mu      sync.Mutex
	results []wired
}

// wired is a result that was seen on its way.
type wired struct {
	queue  string
	number int
	worker string
	at     time.Time
}

func freePorts(t *testing.T) string {
	for range 100 {
		start := fmt.Sprint(1100 + rand.IntN(2000))
		if free(start) {
			return start
		}
	}
	t.Fatal("there are no free ports")
	return ""
}

func free(start string) bool {
	for digit := range 10 {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%s%d", start, digit))
		if err != nil {
			return false
		}
		l.Close()
	}
	return true
}

// newCluster starts a cluster on this machine, and workers with a way to it each
// that can be cut.
func newCluster(t *testing.T, nodes, workers int) *cluster {
	t.Helper()
	c := newNodes(t, "127.0.0.1", nodes)
	for i := range workers {
		g := newGate(t, strings.TrimPrefix(c.urls[i%nodes], "nats://"))
		c.gates = append(c.gates, g)
		url := "nats://" + g.listener.Addr().String() + "," + strings.Join(c.urls, ",")
		if i == 0 {
			url = "nats://" + g.listener.Addr().String() // no way round
		}
		c.work(url)
	}
	return c
}

// work starts one more worker: through a command, if there is one.
func (c *cluster) work(url string, through ...string) {
	c.Helper()
	i := fmt.Sprint(len(c.workers))
	c.workers = append(c.workers, start(c.T, filepath.Join(c.dir, "worker"+i+".log"), append(through,
		"culprit", "worker", "--nats", url, "--name", "w"+i, "--slot", i, "--label", "kind=fake", "--dir", filepath.Join(c.dir, "work", i))...))
}

// newNodes starts a cluster at an address of this machine.
func newNodes(t *testing.T, host string, nodes int) *cluster {
	t.Helper()
	c := &cluster{T: t, dir: t.TempDir(), ports: freePorts(t)}
	own := freePorts(t)
	for own == c.ports {
		own = freePorts(t)
	}
	routes := make([]string, nodes)
	for i := range nodes {
		c.urls = append(c.urls, fmt.Sprintf("nats://%s:%s%d", host, own, i))
		routes[i] = fmt.Sprintf("127.0.0.1:%s%d", own, nodes+i)
	}
	for i := range nodes {
		args := []string{"natsnode", "-dir", filepath.Join(c.dir, "node", fmt.Sprint(i)), "-name", fmt.Sprint("n", i), "-listen", strings.TrimPrefix(c.urls[i], "nats://")}
		if nodes > 1 {
			args = append(args, "-cluster-listen", routes[i], "-routes", strings.Join(routes, ","))
		}
		c.nodes = append(c.nodes, start(t, filepath.Join(c.dir, fmt.Sprint("node", i, ".log")), args...))
	}
	var err error
	c.wait("the cluster", func() bool {
		if c.conn == nil {
			if c.conn, err = nats.Connect(strings.Join(c.urls, ","), nats.MaxReconnects(-1)); err != nil {
				return false
			}
		}
		js, err := jetstream.New(c.conn)
		if err != nil {
			return false
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = js.CreateOrUpdateStream(ctx, jetstream.StreamConfig{Name: "ready", Subjects: []string{"ready"}, Replicas: nodes})
		return err == nil
	})
	t.Cleanup(c.conn.Close)
	if _, err := c.conn.Subscribe("culprit.result.>", c.see); err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *cluster) see(m *nats.Msg) {
	var r struct {
		Number int    `json:"number"`
		Worker string `json:"worker"`
	}
	if json.Unmarshal(m.Data, &r) != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.results = append(c.results, wired{strings.Split(m.Subject, ".")[2], r.Number, r.Worker, time.Now()})
}

const waitTime = 90 * time.Second

// wait waits until something holds.
func (c *cluster) wait(what string, holds func() bool) {
	c.Helper()
	for deadline := time.Now().Add(waitTime); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		if holds() {
			return
		}
	}
	logs, _ := filepath.Glob(filepath.Join(c.dir, "*.log"))
	for _, path := range logs {
		b, _ := os.ReadFile(path)
		c.Logf("%s:\n%s", filepath.Base(path), b[max(0, len(b)-3000):])
	}
	c.Fatalf("%s: waited in vain", what)
}

const clusterCase = `
target:
  processes:
    - name: fake
      command: [fakeserver, -listen, "127.0.0.1:PORTS{{worker}}", -sessions, "100", -rounds, "4", -context-lines, "8", -fault, salad, -every, "5", -delay, 20ms, -addr-file, "DIR/addr{{worker}}",
        -set, "a={{a}}", -set, "b={{b}}", -set, "c={{c}}", -set, "d={{d}}", -set, "e={{e}}"]
  base_url: http://127.0.0.1:PORTS{{worker}}
  ready: {url: /health, timeout: 30s}
  needs: [kind=fake]
factors:
  a: {suspect: "on", safe: "off"}
  b: {suspect: "on", safe: "off"}
  c: {suspect: "on", safe: "off"}
  d: {suspect: "on", safe: "off"}
  e: {suspect: "on", safe: "off"}
workload: {kind: agent, rounds: 4, context_lines: 8, sessions: 8, seed: 1}
load: {concurrency: 8}
`

// hunt is one that runs.
type clusterHunt struct {
	*process
	dir   string
	ended time.Time
}

func (c *cluster) hunt(name string, workers ...string) *clusterHunt {
	c.Helper()
	dir := filepath.Join(c.dir, name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		c.Fatal(err)
	}
	text := clusterCase
	if !*wholeCluster {
		for _, factor := range []string{"d", "e"} {
			text = strings.Replace(text, fmt.Sprintf(`, -set, "%s={{%s}}"`, factor, factor), "", 1)
			text = strings.Replace(text, fmt.Sprintf("  %s: {suspect: \"on\", safe: \"off\"}\n", factor), "", 1)
		}
	}
	text = strings.NewReplacer("PORTS", c.ports, "DIR", c.dir).Replace(text)
	if err := os.WriteFile(filepath.Join(dir, "case.yaml"), []byte(text), 0o644); err != nil {
		c.Fatal(err)
	}
	if workers == nil {
		workers = []string{"--nats", strings.Join(c.urls, ","), "--nats-replicas", fmt.Sprint(len(c.nodes)), "--nats-max-bytes", "50000"}
	}
	args := append([]string{"culprit", "hunt", "--silence", "3s", dir}, workers...)
	return &clusterHunt{process: start(c.T, filepath.Join(c.dir, name+".log"), args...), dir: dir}
}

func (h *clusterHunt) trials() int {
	paths, _ := filepath.Glob(filepath.Join(h.dir, "runs", "*", experiment.TrialFile))
	return len(paths)
}

func (h *clusterHunt) running() bool {
	select {
	case <-h.done:
		if h.ended.IsZero() {
			h.ended = time.Now()
		}
		return false
	default:
		return true
	}
}

// check looks whether a hunt came to its finding, and lost and counted nothing
// twice.
func (c *cluster) check(h *clusterHunt) {
	c.Helper()
	text, _ := os.ReadFile(h.log)
	if code := h.cmd.ProcessState.ExitCode(); code != exitClean {
		c.Fatalf("the hunt ended with %d:\n%s", code, text)
	}
	r, err := experiment.ReadHunt(h.dir)
	if err != nil {
		c.Fatal(err)
	}
	var sets []design.Arm
	for _, cause := range r.Result.Causes {
		sets = append(sets, cause.Set)
	}
	if diff := cmp.Diff([]design.Arm{{"a": "on", "b": "on"}}, sets); diff != "" {
		c.Errorf("finding: %s\n%s", diff, text)
	}
	told := map[int]bool{}
	seeds := map[uint64]bool{}
	launches, void := 0, 0
	for _, trial := range r.Trials {
		if trial.Ran == nil || told[trial.Ran.Order] {
			c.Errorf("%s counts twice: %+v", trial.Dir, trial.Ran)
			continue
		}
		told[trial.Ran.Order] = true
		if trial.Launches() {
			launches++
		}
		if trial.Observation.Outcome != search.Ran {
			void++
			c.Logf("%s: %s: %s", trial.Dir, trial.Observation.Outcome, trial.Note)
			continue
		}
		dir := filepath.Join(h.dir, trial.Dir)
		plan, err := experiment.ReadPlan(dir)
		if err != nil {
			c.Error(err)
		}
		if seeds[plan.Workload.Seed] {
			c.Errorf("%s has another trial's load", trial.Dir)
		}
		seeds[plan.Workload.Seed] = true
		v, err := experiment.Judge(dir)
		if err != nil {
			c.Error(err)
		} else if v.Broken.Main.Failures != trial.Observation.Failures || v.Broken.Main.Trials != trial.Observation.Requests {
			c.Errorf("%s: counted %+v, and its history has %+v", trial.Dir, trial.Observation, v.Broken.Main)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	name := queueOf(string(text))
	seen := 0
	for _, w := range c.results {
		if w.queue != name || w.number == 0 || h.ended.Sub(w.at) < 2*time.Second {
			continue
		}
		seen++
		if !told[w.number] {
			c.Errorf("the result of order %d, from %s, is lost", w.number, w.worker)
		}
	}
	c.Logf("%d trials, %d launches, %d that don't count; %d results came %s or more before the end", len(r.Trials), launches, void, seen, 2*time.Second)
}

// queueOf finds the queue of a hunt in what it says.
func queueOf(text string) string {
	_, rest, _ := strings.Cut(text, "queue ")
	return strings.TrimRight(append(strings.Fields(rest), "")[0], ".")
}

// phases are where a worker is, by its directory of a run.
var phases = []struct {
	name string
	in   func(dir string) bool
}{
	{"launching", func(dir string) bool { return there(dir, "logs") && !there(dir, "plan.json") }},
	{"loading", func(dir string) bool { return there(dir, "history.jsonl.zst") && !there(dir, "verdict.json") }},
	{"judging", func(dir string) bool { return there(dir, "verdict.json") && !there(dir, "trial.json") }},
	{"uploading", func(dir string) bool { return there(dir, "result.json") }},
}

func there(dir, name string) bool {
	_, err := os.Stat(filepath.Join(dir, name))
	return err == nil
}

// killIn kills a worker in a phase, and starts it again. It reports whether it
// came in time.
func (c *cluster) killIn(phase string, in func(string) bool, alive func() bool) bool {
	for tries := 0; alive(); {
		for i, w := range c.workers {
			dirs, _ := filepath.Glob(filepath.Join(c.dir, "work", fmt.Sprint(i), "hunt-*"))
			for _, dir := range dirs {
				if !in(dir) {
					continue
				}
				w.kill()
				got := in(dir)
				w.start(c.T)
				if got {
					c.Logf("w%d killed while %s", i, phase)
					return true
				}
				if tries++; tries > 20 {
					c.Fatalf("no worker could be killed while %s", phase)
				}
			}
		}
		time.Sleep(100 * time.Microsecond)
	}
	return false
}

// killBeforeAck kills a worker when its result is on the wire.
func (c *cluster) killBeforeAck(alive func() bool) bool {
	killed := make(chan bool, 1)
	var once sync.Once
	sub, err := c.conn.Subscribe("culprit.result.>", func(m *nats.Msg) {
		var r struct{ Worker string }
		if json.Unmarshal(m.Data, &r) != nil {
			return
		}
		once.Do(func() {
			for i, w := range c.workers {
				if fmt.Sprint("w", i) != r.Worker {
					continue
				}
				w.kill()
				dirs, _ := filepath.Glob(filepath.Join(c.dir, "work", fmt.Sprint(i), "hunt-*", "result.json"))
				w.start(c.T)
				c.Logf("w%d killed when its result was on the wire, its run directory still there: %v", i, len(dirs) > 0)
				killed <- true
			}
		})
	})
	if err != nil {
		c.Fatal(err)
	}
	defer sub.Unsubscribe()
	for alive() {
		select {
		case <-killed:
			return true
		case <-time.After(10 * time.Millisecond):
		}
	}
	return false
}

// TestClusterQuick is what of TestCluster runs within seconds.
func TestClusterQuick(t *testing.T) {
	if *wholeCluster {
		t.Skip("TestCluster has all of it")
	}
	t.Parallel()
	c := newCluster(t, 1, 2)
	h := c.hunt("case")
	c.killIn("loading", phases[1].in, h.running)
	c.wait("two trials", func() bool { return h.trials() >= 2 || !h.running() })
	if h.running() {
		h.kill()
		h.args = append(h.args, "--resume")
		h.start(t)
	}
	c.wait("the hunt's end", func() bool { return !h.running() })
	c.check(h)
}

// TestWorkersWithin kills a hunt with the queue and the workers in it.
func TestWorkersWithin(t *testing.T) {
	t.Parallel()
	c := &cluster{T: t, dir: t.TempDir(), ports: freePorts(t)}
	h := c.hunt("case", "--workers", "2")
	for n := range 2 {
		c.wait("two more trials", func() bool { return h.trials() >= 2*(n+1) || !h.running() })
		if h.running() {
			h.kill()
			h.args = append(slices.Clip(h.args), "--resume")
			h.start(t)
		}
	}
	c.wait("the hunt's end", func() bool { return !h.running() })
	c.check(h)
}

// TestCluster kills everything that can die, cuts a worker off and fills the
// store, while hunts run; each comes to the same finding.
func TestCluster(t *testing.T) {
	if !*wholeCluster {
		t.Skip("with -cluster: some minutes")
	}
	c := newCluster(t, 3, 6)
	var h *clusterHunt
	hunts := 0
	// during has something done while a hunt runs, in the next one where the
	// hunt was over before.
	during := func(what string, do func() bool) {
		t.Helper()
		for range 4 {
			if h == nil || !h.running() {
				if h != nil {
					c.check(h)
				}
				hunts++
				h = c.hunt(fmt.Sprint("case", hunts))
				c.wait("the hunt's first trial", func() bool { return h.trials() > 0 || !h.running() })
			}
			if do() {
				t.Logf("%s: done, at trial %d of hunt %d", what, h.trials(), hunts)
				return
			}
		}
		t.Errorf("%s: no hunt ran long enough", what)
	}
	running := func() bool { return h.running() }
	for _, p := range phases {
		during("a worker dies "+p.name, func() bool { return c.killIn(p.name, p.in, running) })
	}
	during("a worker dies before the ack", func() bool { return c.killBeforeAck(running) })
	during("a node dies", func() bool {
		at := h.trials()
		c.nodes[1].kill()
		c.wait("trials without the node", func() bool { return h.trials() > at || !h.running() })
		c.nodes[1].start(t)
		return h.trials() > at
	})
	during("a worker is cut off", func() bool {
		c.wait("w0 to work", func() bool {
			dirs, _ := filepath.Glob(filepath.Join(c.dir, "work", "0", "hunt-*"))
			return len(dirs) > 0 || !h.running()
		})
		c.gates[0].set(true)
		cut := time.Now()
		time.Sleep(8 * time.Second) // more than twice the silence that is allowed
		c.gates[0].set(false)
		return h.ended.IsZero() || h.ended.Sub(cut) > 4*time.Second
	})
	during("the coordinator dies", func() bool {
		at := h.trials()
		c.wait("one more trial", func() bool { return h.trials() > at || !h.running() })
		if !h.running() {
			return false
		}
		h.kill()
		h.ended = time.Time{}
		if !slices.Contains(h.args, "--resume") {
			h.args = append(h.args, "--resume")
		}
		time.Sleep(time.Second) // workers finish what they have
		h.start(t)
		return true
	})
	during("the store is full", func() bool { return c.fill(h) })
	c.wait("the last hunt's end", func() bool { return !h.running() })
	c.check(h)
	t.Logf("%d hunts", hunts)
}

// TestClusterNamespaces cuts a worker off in the network itself: it runs in a
// network namespace of its own, whose link goes down in mid-trial for longer than
// its silence may last, and comes up again.
func TestClusterNamespaces(t *testing.T) {
	if !*wholeCluster {
		t.Skip("with -cluster: some minutes")
	}
	n := newNamespace(t)
	c := newNodes(t, n.outside, 1)
	c.work(c.urls[0], "ip", "netns", "exec", n.name)
	c.work(c.urls[0])
	for try := range 4 {
		h := c.hunt(fmt.Sprint("case", try))
		c.wait("w0 to work", func() bool {
			dirs, _ := filepath.Glob(filepath.Join(c.dir, "work", "0", "hunt-*"))
			return len(dirs) > 0 || !h.running()
		})
		n.link("down")
		cut := time.Now()
		time.Sleep(8 * time.Second) // more than twice the silence that is allowed
		lasted := h.running()
		mended := time.Now()
		n.link("up")
		c.wait("the hunt's end", func() bool { return !h.running() })
		c.check(h)
		through := map[string]int{}
		c.mu.Lock()
		for _, r := range c.results {
			const onItsWay = 500 * time.Millisecond
			if r.at.After(cut.Add(onItsWay)) && r.at.Before(mended) {
				through[r.worker]++
			}
		}
		c.mu.Unlock()
		if through["w0"] > 0 {
			t.Errorf("%d results of w0 came while it was cut off", through["w0"])
		}
		if lasted && through["w1"] > 0 {
			t.Logf("w0 was cut off for %s, in which w1 brought %d results", mended.Sub(cut).Round(time.Millisecond), through["w1"])
			return
		}
	}
	t.Error("no hunt ran on while the worker was cut off")
}

// namespace is a network of its own, which one link joins with this machine's.
type namespace struct {
	*testing.T
	name, inside string // inside is the link's end there
	outside      string // the address of its other end
}

func newNamespace(t *testing.T) *namespace {
	t.Helper()
	own := fmt.Sprintf("cul%d", os.Getpid()%100000)
	n := &namespace{T: t, name: own, inside: own + "b", outside: "10.203.7.1"}
	if said, err := exec.Command("ip", "netns", "add", n.name).CombinedOutput(); err != nil {
		t.Skipf("network namespaces can't be made here, so no partition of the network is tried: ip netns add: %v: %s", err, said)
	}
	t.Cleanup(func() { n.ip("netns", "del", n.name) }) // the link goes with it
	n.ip("link", "add", own+"a", "type", "veth", "peer", "name", n.inside)
	n.ip("link", "set", n.inside, "netns", n.name)
	n.ip("addr", "add", n.outside+"/30", "dev", own+"a")
	n.ip("link", "set", own+"a", "up")
	n.ip("-n", n.name, "addr", "add", "10.203.7.2/30", "dev", n.inside)
	n.ip("-n", n.name, "link", "set", "lo", "up")
	n.link("up")
	return n
}

// link takes the namespace's end of the link down, or up again.
func (n *namespace) link(state string) {
	n.Helper()
	n.ip("-n", n.name, "link", "set", n.inside, state)
}

func (n *namespace) ip(args ...string) {
	n.Helper()
	if said, err := exec.Command("ip", args...).CombinedOutput(); err != nil {
		n.Fatalf("ip %s: %v: %s", strings.Join(args, " "), err, said)
	}
}

// fill stops the coordinator until a worker says that it can't upload.
func (c *cluster) fill(h *clusterHunt) bool {
	said := func() bool {
		return slices.ContainsFunc(c.workers, func(w *process) bool { return w.says("keeps no more") })
	}
	if said() {
		return true
	}
	_ = h.cmd.Process.Signal(syscall.SIGSTOP)
	deadline := time.Now().Add(20 * time.Second)
	for !said() && time.Now().Before(deadline) {
		time.Sleep(20 * time.Millisecond)
	}
	_ = h.cmd.Process.Signal(syscall.SIGCONT)
	return said()
}

package experiment

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/stats"
)

const crewCase = `
target:
  processes: [{command: [server, "{{a}}{{b}}{{c}}{{d}}{{e}}{{f}}"]}]
  base_url: http://127.0.0.1:1
factors:
  a: {suspect: 1, safe: 0}
  b: {suspect: 1, safe: 0}
  c: {suspect: 1, safe: 0}
  d: {suspect: 1, safe: 0}
  e: {suspect: 1, safe: 0}
  f: {suspect: 1, safe: 0}
workload: {sessions: 8, rounds: 4}
`

// errKilled is a hunt's end before its time.
var errKilled = errors.New("killed")

// instant is a crew that has done everything when it is asked. In any order,
// and twice, as a queue may deliver.
type instant struct {
	size   int
	random *rand.Rand
	rate   float64
	orders []Order
	seen   map[int]bool
	life   int // deliveries until it is killed; 0 is for ever
}

func (c *instant) Size() int                            { return c.size }
func (c *instant) Release(context.Context, int)         {}
func (c *instant) Ask(_ context.Context, o Order) error { c.orders = append(c.orders, o); return nil }

func (c *instant) Next(context.Context) (*Delivery, error) {
	if c.life--; c.life == 0 {
		return nil, errKilled
	}
	if len(c.orders) == 0 {
		return nil, errors.New("it waits for nothing")
	}
	at := c.random.IntN(len(c.orders))
	o := c.orders[at]
	if c.seen[o.Number] || o.Number == 0 || c.random.IntN(8) > 0 {
		c.orders = append(c.orders[:at], c.orders[at+1:]...) // else it comes once more
	}
	c.seen[o.Number] = true
	d := &Delivery{Number: o.Number, Worker: "w", Up: true, Kept: func(context.Context) error { return nil }}
	d.Files = func(_ context.Context, dir string) error {
		return errors.Join(os.MkdirAll(dir, 0o755), WriteJSON(filepath.Join(dir, PreflightFile), []Unmet(nil)))
	}
	if o.Number == 0 {
		return d, nil
	}
	// What an order shows doesn't depend on when, or how often, it is delivered.
	r := rand.New(rand.NewPCG(uint64(o.Number), 1))
	d.Trial = &Trial{Space: "", Proposal: search.Proposal{Arm: o.Arm, Requests: o.Requests}, Observation: &search.Observation{Outcome: search.Ran, Requests: o.Requests}, LaunchMS: 1000, RunMS: 1000}
	for range o.Requests {
		if o.Arm["a"] == "1" && o.Arm["b"] == "1" && r.Float64() < c.rate {
			d.Trial.Observation.Failures++
		}
	}
	return d, nil
}

func crewHunt(t testing.TB, dir string, c *instant, resume bool) (Result, error) {
	t.Helper()
	parsed, err := ParseCase("case.yaml", []byte(crewCase))
	if err != nil {
		t.Fatal(err)
	}
	c.seen = map[int]bool{}
	return Hunt(context.Background(), HuntOptions{
		Dir: dir, Case: parsed, Crew: c, Resume: resume, Search: search.Options{Seed: 3, Batch: 32, SpotChecks: -1, Dispersion: stats.Independent()},
	})
}

// However often the coordinator dies, whatever comes in whichever order and
// twice: each order counts once, and the finding is the same.
func TestCrewCountsOnce(t *testing.T) {
	for seed := range uint64(10) { // each takes a hundred writes that reach the disk
		random := rand.New(rand.NewPCG(seed, 0))
		dir := t.TempDir()
		var result Result
		var err error
		resume := false
		for kills := random.IntN(6); ; kills-- {
			c := &instant{size: 1 + random.IntN(6), random: random, rate: 0.5}
			if kills > 0 {
				c.life = 1 + random.IntN(12)
			}
			result, err = crewHunt(t, dir, c, resume)
			if resume = true; !errors.Is(err, errKilled) {
				break
			}
		}
		if err != nil {
			t.Fatal(err)
		}
		if result.Status != search.Found || len(result.Causes) != 1 || !cmp.Equal(result.Causes[0].Set, design.Arm{"a": "1", "b": "1"}) {
			t.Fatalf("found %+v", result.Finding)
		}
		record, err := ReadHunt(dir)
		if err != nil {
			t.Fatal(err)
		}
		orders, requests := map[int]bool{}, 0
		for i, trial := range record.Trials {
			if orders[trial.Ran.Order] {
				t.Errorf("order %d counts twice", trial.Ran.Order)
			}
			orders[trial.Ran.Order] = true
			requests += trial.Observation.Requests
			if want := fmt.Sprintf("%04d-", i+1); filepath.Base(trial.Dir)[:5] != want {
				t.Errorf("trial %d is in %s", i+1, trial.Dir)
			}
		}
		if requests != result.Requests {
			t.Errorf("the trials have %d requests, and the finding %d", requests, result.Requests)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, AheadDir, "*")); len(left) > 0 {
			t.Errorf("left behind: %v", left)
		}
	}
}

// BenchmarkCoordinator is what a trial costs who asks for it, without the queue:
// the search, looking ahead, and the files.
func BenchmarkCoordinator(b *testing.B) {
	for _, size := range []int{1, 8, 32} {
		b.Run(fmt.Sprintf("workers=%d", size), func(b *testing.B) {
			trials := 0
			for b.Loop() {
				dir := b.TempDir()
				c := &instant{size: size, random: rand.New(rand.NewPCG(1, 1)), rate: 0.2}
				if _, err := crewHunt(b, dir, c, false); err != nil {
					b.Fatal(err)
				}
				record, err := ReadHunt(dir)
				if err != nil {
					b.Fatal(err)
				}
				trials += len(record.Trials)
			}
			b.ReportMetric(float64(b.Elapsed().Milliseconds())/float64(trials), "ms/trial")
		})
	}
}

// An order goes to other machines: it has no secret.
func TestOrderHasNoSecret(t *testing.T) {
	parsed, err := ParseCase("case.yaml", []byte(crewCase))
	if err != nil {
		t.Fatal(err)
	}
	h := &hunt{HuntOptions: HuntOptions{Case: parsed, Header: http.Header{"Authorization": {"Bearer sk-secret"}}}, space: parsed.Space}
	order := h.order(search.Ticket{Number: 1, Launch: 1, Proposal: search.Proposal{Arm: parsed.Space.Failing()}})
	b, err := json.Marshal(order)
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(b), "secret") {
		t.Errorf("the order says %s", b)
	}
	if !cmp.Equal(order.Headers, []string{"Authorization"}) {
		t.Errorf("the order wants the headers %v", order.Headers)
	}
}

func TestNeedsAndWorker(t *testing.T) {
	text := strings.Replace(crewCase, "base_url: http://127.0.0.1:1", `base_url: http://127.0.0.1:3000{{worker}}
  needs: ["gpu={{a}}", zone=x]`, 1)
	c, err := ParseCaseOf("case.yaml", []byte(text), 7)
	if err != nil {
		t.Fatal(err)
	}
	r, err := c.Render(c.Space.Failing())
	if err != nil {
		t.Fatal(err)
	}
	if r.Plan.BaseURL != "http://127.0.0.1:30007" || !c.ByWorker() {
		t.Errorf("worker 7 has its server at %s", r.Plan.BaseURL)
	}
	if !cmp.Equal(r.Needs, []string{"gpu=1", "zone=x"}) {
		t.Errorf("the failing arm needs %v", r.Needs)
	}
	if _, err := ParseCase("case.yaml", []byte(strings.ReplaceAll(text, "  f: {", "  worker: {"))); err == nil || !strings.Contains(err.Error(), "worker") {
		t.Errorf("a factor may be called worker: %v", err)
	}
}

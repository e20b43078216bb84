package worker

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/queue"
	"github.com/culprit-project/culprit/search"
)

const (
	silence    = 5 * presenceEvery // after which a worker counts as dead
	nobodySaid = 20 * time.Second
	sweepEvery = 10 * time.Second
)

// CrewOptions is what a crew takes.
type CrewOptions struct {
	Most int  // orders at once; 0 is as many as there are workers
	Here bool // its workers are within this program: labels don't matter
	Say  func(format string, args ...any)
}

// Crew has the workers of a queue carry out the orders of one hunt. It is the
// only one that takes the queue's results.
type Crew struct {
	CrewOptions
	q       *queue.Queue
	silence time.Duration

	mu      sync.Mutex
	workers map[string]presence
	seen    map[string]time.Time
	held    map[string]int // in how many of its messages a worker held the same server
	since   time.Time

	open       map[int]*order // that nothing was delivered for
	taking     map[int]bool   // delivered, and not kept yet
	swept      time.Time
	sweptBadly bool           // and said so
	holders    map[int]string // of launches
	results    chan received
	sub        *nats.Subscription
	stop       context.CancelFunc
	done       sync.WaitGroup
	lastSaid   time.Time
}

type received struct {
	*queue.Result
	error
}

// order is one that waits.
type order struct {
	experiment.Order
	holder string // that it was sent to; empty is to anybody
	unsure bool   // or to one that isn't known
	not    bool   // or to anybody but those whose machines failed on it
	task   string
	at     time.Time
}

// needs are the labels that a worker must have to take it.
func (w *order) needs() []string {
	if w.holder != "" {
		return []string{queue.Only(w.holder)}
	}
	needs := slices.Clone(w.Needs)
	if w.not {
		for _, f := range w.Failed {
			needs = append(needs, queue.Not(f.Worker))
		}
	}
	return needs
}

// NewCrew makes the crew of a queue. Close it when done.
func NewCrew(ctx context.Context, conn *queue.Conn, q *queue.Queue, o CrewOptions) (*Crew, error) {
	if o.Say == nil {
		o.Say = func(string, ...any) {}
	}
	c := &Crew{
		CrewOptions: o, q: q, silence: silence, workers: map[string]presence{}, seen: map[string]time.Time{}, held: map[string]int{}, since: time.Now(),
		open: map[int]*order{}, taking: map[int]bool{}, holders: map[int]string{}, results: make(chan received), lastSaid: time.Now(),
	}
	var err error
	c.sub, err = conn.Subscribe(presenceSubject+"*", func(m *nats.Msg) {
		var p presence
		if json.Unmarshal(m.Data, &p) != nil || p.Queue != "" && p.Queue != q.Name {
			return
		}
		c.mu.Lock()
		defer c.mu.Unlock()
		c.held[p.Name]++
		if before := c.workers[p.Name]; before.Holds != p.Holds || before.Launch != p.Launch {
			c.held[p.Name] = 1
		}
		c.workers[p.Name], c.seen[p.Name] = p, time.Now()
	})
	if err != nil {
		return nil, fmt.Errorf("wait for workers: %w", err)
	}
	ctx, c.stop = context.WithCancel(ctx)
	c.done.Go(func() {
		for {
			r, err := q.Result(ctx)
			select {
			case c.results <- received{r, err}:
			case <-ctx.Done():
				return
			}
			if err != nil {
				return
			}
		}
	})
	return c, nil
}

// Close ends it. The queue stays.
func (c *Crew) Close() {
	c.stop()
	_ = c.sub.Unsubscribe()
	c.done.Wait()
}

// Size is how many orders are carried out at once, now.
func (c *Crew) Size() int {
	if c.Most > 0 {
		return c.Most
	}
	return max(1, len(c.able(nil)))
}

// able are the workers that are heard of, take orders of this queue, and meet
// the needs.
func (c *Crew) able(needs []string) []presence {
	return slices.DeleteFunc(c.alive(), func(p presence) bool { return p.Left[c.q.Name] != "" || !queue.Meets(p.Labels, needs) })
}

// alive are the workers that are heard of.
func (c *Crew) alive() []presence {
	c.mu.Lock()
	defer c.mu.Unlock()
	var all []presence
	for _, name := range slices.Sorted(maps.Keys(c.workers)) {
		if time.Since(c.seen[name]) < c.silence {
			all = append(all, c.workers[name])
		}
	}
	return all
}

// dead says that a worker wasn't heard of for a while, though it could have been.
func (c *Crew) dead(name string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	last := c.seen[name]
	if last.IsZero() {
		last = c.since
	}
	return time.Since(last) > c.silence
}

// taskName names an order's first try.
func taskName(number int) string { return fmt.Sprintf("%04d", number) }

// nextTask names the try after another: in place of one that only a dead worker
// could carry out, or that a machine failed on. A queue takes each name once.
func nextTask(task string) string {
	first, try, _ := strings.Cut(task, "-")
	n, _ := strconv.Atoi(try) // 0 for the first
	return fmt.Sprintf("%s-%d", first, n+1)
}

// Ask asks for an order: of who runs its server, or of anybody.
func (c *Crew) Ask(ctx context.Context, o experiment.Order) error {
	if c.Here {
		o.Needs = nil
	}
	w := &order{Order: o, task: taskName(o.Number), at: time.Now()}
	if o.Launch != o.Number {
		if w.holder = c.holders[o.Launch]; w.holder == "" {
			w.unsure = true // it may have been asked for by an earlier start, of one that is known no more
		}
	}
	c.open[o.Number] = w
	return c.put(ctx, w)
}

func (c *Crew) put(ctx context.Context, w *order) error {
	body, err := json.Marshal(w.Order)
	if err != nil {
		return err
	}
	return c.patiently(ctx, func() error { return c.q.Put(ctx, w.task, w.needs(), body) })
}

// patience is how long the cluster may be away.
const patience = 10 * time.Minute

// patiently does something until it works: a cluster comes back.
func (c *Crew) patiently(ctx context.Context, do func() error) error {
	said := false
	for start := time.Now(); ; wait(ctx, again) {
		err := do()
		if err == nil || ctx.Err() != nil || errors.Is(err, queue.ErrNoQueue) || errors.Is(err, queue.ErrNoFiles) || time.Since(start) > patience {
			return err
		}
		if !said {
			said = true
			c.Say("%s; trying again", err)
		}
	}
}

// Release says that nobody asks for more of a launch.
func (c *Crew) Release(_ context.Context, launch int) {
	if name := c.holders[launch]; name != "" {
		_ = c.q.Signal(releaseSubject+name, fmt.Sprint(launch)) // else its server waits a while in vain
		delete(c.holders, launch)
	}
}

// Next waits for a delivery.
func (c *Crew) Next(ctx context.Context) (*experiment.Delivery, error) {
	look := time.NewTicker(presenceEvery)
	defer look.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-look.C:
			if err := c.look(ctx); err != nil {
				return nil, err
			}
		case r := <-c.results:
			if r.error != nil {
				return nil, r.error
			}
			if d, err := c.delivery(ctx, r.Result); d != nil || err != nil {
				return d, err
			}
		}
	}
}

// look asks anybody for what only a worker that is gone could do, and says when
// nobody is there.
func (c *Crew) look(ctx context.Context) error {
	for _, number := range slices.Sorted(maps.Keys(c.open)) {
		w := c.open[number]
		switch {
		case w.unsure:
			w.holder = c.holding(w.Launch)
			w.unsure = w.holder == "" && time.Since(w.at) < c.silence
			if w.unsure || w.holder != "" && !c.dead(w.holder) {
				continue
			}
		case w.holder != "" && c.dead(w.holder):
			c.Say("worker %s is gone; another launches its arm anew", w.holder)
		case w.not && len(c.able(w.needs())) == 0 && len(c.able(w.Needs)) > 0:
			w.not = false // those who didn't fail are gone; the others try again
		default:
			continue
		}
		if err := c.patiently(ctx, func() error { return c.q.Withdraw(ctx, w.task) }); err != nil {
			return err
		}
		w.holder, w.task = "", nextTask(w.task)
		if err := c.put(ctx, w); err != nil {
			return err
		}
	}
	c.unhand()
	c.sweep(ctx)
	alive := c.alive()
	if c.Here && len(alive) > 0 && len(c.able(nil)) == 0 {
		return fmt.Errorf("this machine failed on %d trials in a row: %s", mostTrouble, alive[0].Left[c.q.Name])
	}
	if time.Since(c.lastSaid) < nobodySaid {
		return nil
	}
	for _, w := range c.open {
		if w.holder != "" || time.Since(w.at) < nobodySaid || len(c.able(w.needs())) > 0 {
			continue
		}
		c.lastSaid = time.Now()
		var names []string
		for _, p := range alive {
			name := p.Name
			if why := p.Left[c.q.Name]; why != "" {
				name += " (takes no more of it: " + why + ")"
			}
			names = append(names, name)
		}
		there := "there is none"
		if len(names) > 0 {
			there = "there are " + strings.Join(names, ", ")
		}
		if len(w.Needs) > 0 {
			c.Say("waiting for a worker with %s; %s", strings.Join(w.Needs, " "), there)
		} else {
			c.Say("waiting for a worker; %s: culprit worker --nats URL starts one", there)
		}
		break
	}
	return nil
}

// holding is the worker that holds the server of a launch.
func (c *Crew) holding(launch int) string {
	for _, p := range c.alive() {
		if p.Holds == c.q.Name && p.Launch == launch {
			return p.Name
		}
	}
	return ""
}

// unhand tells workers that hold servers for nothing, as those do whose hunt was
// killed and resumed, that they needn't.
func (c *Crew) unhand() {
	for _, p := range c.alive() {
		c.mu.Lock()
		long := c.held[p.Name] > 2 || time.Since(c.since) < c.silence
		c.mu.Unlock()
		wanted := c.holders[p.Launch] == p.Name
		for _, w := range c.open {
			wanted = wanted || w.Launch == p.Launch && w.Number != w.Launch
		}
		if p.Holds == c.q.Name && long && !wanted {
			_ = c.q.Signal(releaseSubject+p.Name, fmt.Sprint(p.Launch))
		}
	}
}

// sweep makes room in the store.
func (c *Crew) sweep(ctx context.Context) {
	if time.Since(c.swept) < sweepEvery {
		return
	}
	c.swept = time.Now()
	err := c.q.Sweep(ctx, func(name string) bool {
		var number int
		if _, err := fmt.Sscanf(name, "%d.", &number); err != nil {
			return true // not ours
		}
		return c.open[number] != nil || c.taking[number]
	})
	if err != nil && ctx.Err() == nil && !c.sweptBadly {
		c.sweptBadly = true
		c.Say("%s", err)
	}
}

// delivery is what a result says; nil for one that can't be read, which is
// dropped, and for one of a machine that failed, whose order another gets.
func (c *Crew) delivery(ctx context.Context, r *queue.Result) (*experiment.Delivery, error) {
	var got result
	if err := json.Unmarshal(r.Body, &got); err != nil {
		c.Say("result %s can't be read: %s", r.ID, err)
		_ = r.Kept(ctx)
		return nil, nil
	}
	w := c.open[got.Number]
	if len(got.Failed) > 0 {
		if w == nil {
			return nil, r.Kept(ctx) // it was delivered meanwhile
		}
		if again, err := c.elsewhere(ctx, w, r, &got); again || err != nil {
			return nil, err
		}
	}
	d := &experiment.Delivery{Number: got.Number, Worker: got.Worker, Up: got.Up, Trial: got.Trial, Error: got.Error}
	d.Files = func(ctx context.Context, dir string) error {
		if got.Files == "" {
			return os.MkdirAll(dir, 0o755)
		}
		if err := c.patiently(ctx, func() error { return c.q.Download(ctx, got.Files, dir) }); err != nil {
			return err
		}
		err := os.Remove(dir + string(os.PathSeparator) + resultFile)
		if errors.Is(err, os.ErrNotExist) {
			err = nil
		}
		return err
	}
	d.Kept = func(ctx context.Context) error {
		return c.patiently(ctx, func() error {
			if got.Files != "" {
				if err := c.q.Remove(ctx, got.Files); err != nil {
					return err
				}
			}
			if err := r.Kept(ctx); err != nil {
				return err
			}
			delete(c.taking, got.Number)
			return nil
		})
	}
	if got.Error == "" && got.Number > 0 && (got.Trial == nil || got.Trial.Observation == nil) {
		d.Error = "its result has no observation"
	}
	if w != nil {
		if got.Up {
			c.holders[w.Launch] = got.Worker
		}
		delete(c.open, got.Number)
		c.taking[got.Number] = true
	}
	return d, nil
}

// elsewhere asks another worker for an order that a machine failed on: one whose
// machine hasn't, or the only one again. When all failed, it makes the result one
// of a void trial, and says so by false.
func (c *Crew) elsewhere(ctx context.Context, w *order, r *queue.Result, got *result) (again bool, err error) {
	if !c.Here || len(c.alive()) < c.Most {
		wait(ctx, 2*presenceEvery-time.Since(c.since)) // until all workers were heard of
	}
	w.Failed, w.holder, w.unsure, w.not, w.task = got.Failed, "", false, true, nextTask(r.ID)
	why := failures(w.Failed)
	if len(c.able(w.needs())) == 0 {
		w.not = false
		only := !slices.ContainsFunc(w.Failed, func(f experiment.Failure) bool { return f.Worker != got.Worker })
		if !only || len(w.Failed) >= mostTrouble {
			got.Failed = nil
			if got.Number == 0 {
				c.Say("no worker's machine could launch the arm in which all is safe: %s", why)
				return false, nil
			}
			got.Trial = &experiment.Trial{Note: "no worker's machine could launch it: " + why, Observation: &search.Observation{Outcome: search.Void}}
			return false, nil
		}
	}
	next := "another gets it"
	if !w.not {
		next = "it tries again"
	}
	c.Say("worker %s can't run order %d, by its machine's fault, so %s: %s", got.Worker, got.Number, next, got.Failed[len(got.Failed)-1].Why)
	// The result goes once the order is on the queue again: after a kill it comes
	// once more, and asks for the same.
	if err := c.put(ctx, w); err != nil {
		return false, err
	}
	return true, r.Kept(ctx)
}

// failures says on which machines an order failed, and why.
func failures(all []experiment.Failure) string {
	var names []string
	times, why := map[string]int{}, map[string]string{}
	for _, f := range all {
		if times[f.Worker]++; times[f.Worker] == 1 {
			names = append(names, f.Worker)
		}
		why[f.Worker] = f.Why
	}
	for i, name := range names {
		often := ""
		if times[name] > 1 {
			often = fmt.Sprintf(" (%d times)", times[name])
		}
		names[i] = name + often + ": " + why[name]
	}
	return strings.Join(names, "; ")
}

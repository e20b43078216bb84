package experiment

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/search"
)

// AheadDir holds what a crew was asked for and what it brought, until the search
// asks for it and it becomes a trial in RunsDir.
const AheadDir = "ahead"

// Order is one run of a hunt, for somebody else to carry out. It holds no secret:
// of the headers only the names.
type Order struct {
	Number   int        `json:"number"` // from 1; 0 is the look at the safe arm, before the first
	Launch   int        `json:"launch"` // the order that launches its server: its own number, or an earlier one
	Arm      design.Arm `json:"arm"`    // all factors
	Requests int        `json:"requests"`
	Needs    []string   `json:"needs,omitempty"` // labels that who carries it out must have
	Base     *Base      `json:"base,omitempty"`
	Wedge    bool       `json:"wedge,omitempty"` // see [Trial]
	Path     string     `json:"path"`            // of the case, where it was read
	Case     string     `json:"case"`
	Headers  []string   `json:"headers,omitempty"`
	Tool     string     `json:"tool"`
	Failed   []Failure  `json:"failed,omitempty"` // who couldn't carry it out
	// Against makes it a block of a comparison; Requests are conversations then.
	Against *Against `json:"against,omitempty"`
}

// Failure is why a worker couldn't carry an order out, by its machine's fault.
type Failure struct {
	Worker string `json:"worker"`
	Why    string `json:"why"`
}

// Delivery is what came of an order.
type Delivery struct {
	Number int
	Worker string
	Up     bool   // its server runs on
	Trial  *Trial // nil for order 0
	Error  string // nothing came of it
	// Files makes the run directory; Kept says that it is safe, and that nobody
	// needs it any more.
	Files func(ctx context.Context, dir string) error
	Kept  func(ctx context.Context) error
}

// Crew carries orders out, several at once, and delivers in any order.
type Crew interface {
	// Size is how many orders are carried out at once, now.
	Size() int
	// Ask asks for an order; the same again, after a restart, asks once.
	Ask(ctx context.Context, o Order) error
	// Release says that nobody asks for more of a launch.
	Release(ctx context.Context, launch int)
	// Next waits for a delivery. It may come twice until it is kept.
	Next(ctx context.Context) (*Delivery, error)
}

// Ran says of a crew's trial where and when it ran.
type Ran struct {
	Worker string `json:"worker"`
	Order  int    `json:"order"`
	Launch int    `json:"launch"` // the order that launched its server
	Beside bool   `json:"beside,omitempty"`
	// By the clock of who asked, as late and as early as they can have been.
	BeganMS int64 `json:"began_ms"`
	EndedMS int64 `json:"ended_ms"`
}

// asked is an order that waits for its delivery, in its file.
type asked struct {
	search.Ticket
	At time.Time `json:"at"`
}

// together has a crew run what the search asks for.
func (h *hunt) together(ctx context.Context, s *search.Search, done []Trial) (trials []Trial, err error) {
	c := search.NewCrew(s, h.Crew.Size())
	defer c.Close()
	t := &together{hunt: h, search: s, crew: c, open: map[int]asked{}}
	if err := os.MkdirAll(filepath.Join(h.Dir, AheadDir), 0o755); err != nil {
		return nil, fmt.Errorf("make case directory: %w", err)
	}
	if err := t.repeat(done); err != nil {
		return nil, err
	}
	if err := t.resume(ctx); err != nil {
		return nil, err
	}
	for {
		if err := t.observe(); err != nil {
			return nil, err
		}
		if _, more := s.Next(); !more {
			return t.trials, os.RemoveAll(filepath.Join(h.Dir, AheadDir))
		}
		c.Resize(h.Crew.Size())
		if len(t.trials) == 0 {
			c.Resize(1) // the first says what counts as a failure
		}
		if err := t.ask(ctx); err != nil {
			return nil, err
		}
		if err := t.receive(ctx); err != nil {
			return nil, err
		}
	}
}

// together is a hunt with a crew.
type together struct {
	*hunt
	search *search.Search
	crew   *search.Crew
	trials []Trial
	open   map[int]asked // by number
}

// repeat tells the search what it was told before.
func (t *together) repeat(done []Trial) error {
	for i, trial := range done {
		if trial.Ran == nil {
			return fmt.Errorf("resume %s: its trials were run without workers; go on without", t.Dir)
		}
		if p, _ := t.search.Next(); !trial.Ran.Beside && !sameProposal(trial.Proposal, p) {
			return t.otherSearch(i+1, trial.Proposal, p)
		}
		t.wedge = trial.Wedge
		if err := t.crew.Repeat(trial.told()); err != nil {
			return fmt.Errorf("trial %d: %w", i+1, err)
		}
		t.trials = append(t.trials, trial)
		t.show(Step{Number: i + 1, Trial: trial, Resumed: true, Ended: true, Progress: t.search.Progress(believed)})
	}
	return nil
}

func (t *Trial) told() search.Told {
	r := t.Ran
	return search.Told{
		Ticket:   search.Ticket{Number: r.Order, Launch: r.Launch, Proposal: t.Proposal},
		Proposal: t.Proposal, Observation: *t.Observation, Beside: r.Beside,
		Began: milliseconds(r.BeganMS), Ended: milliseconds(r.EndedMS),
	}
}

func milliseconds(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

// resume takes up what was asked for and not told.
func (t *together) resume(ctx context.Context) error {
	told := map[int]bool{}
	for _, trial := range t.trials {
		told[trial.Ran.Order] = true
	}
	files, err := filepath.Glob(filepath.Join(t.Dir, AheadDir, "*.json"))
	if err != nil {
		return err
	}
	slices.Sort(files)
	for _, path := range files {
		var a asked
		if _, err := readJSON(path, &a); err != nil {
			return err
		}
		if told[a.Number] { // killed between the two
			if err := os.Remove(path); err != nil {
				return fmt.Errorf("resume: %w", err)
			}
			continue
		}
		t.open[a.Number] = a
		t.crew.Resume(a.Ticket)
		var trial Trial
		there, err := readJSON(filepath.Join(t.ahead(a.Number), TrialFile), &trial)
		if err != nil {
			return err
		}
		if there && trial.Ran != nil {
			err = t.crew.Done(a.Number, *trial.Observation, milliseconds(trial.Ran.BeganMS), milliseconds(trial.Ran.EndedMS))
		} else {
			err = t.Crew.Ask(ctx, t.order(a.Ticket))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (t *together) ahead(number int) string {
	return filepath.Join(t.Dir, AheadDir, fmt.Sprintf("%04d", number))
}

func (h *hunt) order(t search.Ticket) Order {
	arm := h.complete(t.Proposal.Arm)
	o := Order{
		Number: t.Number, Launch: t.Launch, Arm: arm, Requests: t.Proposal.Requests, Base: h.base, Wedge: h.wedge, Path: h.Case.Path, Case: string(h.Case.document), Tool: h.Tool,
		Headers: slices.Sorted(maps.Keys(h.Header)),
	}
	if r, err := h.Case.Render(arm); err == nil {
		o.Needs = r.Needs
	}
	return o
}

// observe tells the search all that it may be told, and makes trials of it.
func (t *together) observe() error {
	for {
		told, more, err := t.crew.Step()
		if err != nil || !more {
			return err
		}
		number := len(t.trials) + 1
		from := t.ahead(told.Number)
		var trial Trial
		if there, err := readJSON(filepath.Join(from, TrialFile), &trial); err != nil || !there {
			return cmp.Or(err, fmt.Errorf("%s isn't there any more", from))
		}
		trial.Dir, trial.Space = trialDir(number, told.Proposal), t.Case.Space.Fingerprint()
		trial.Proposal, trial.Observation, trial.Ran.Beside = told.Proposal, &told.Observation, told.Beside
		if told.Beside {
			trial.Proposal.Why = "ran ahead, and wasn't asked for then"
		}
		step := Step{Number: number, Trial: trial, Ended: true, Progress: t.search.Progress(believed)}
		if err := WriteJSON(filepath.Join(from, BeliefFile), step.Progress); err != nil {
			return err
		}
		if err := WriteJSON(filepath.Join(from, TrialFile), trial); err != nil {
			return err
		}
		// From here on it is a trial.
		if err := os.Rename(from, filepath.Join(t.Dir, trial.Dir)); err != nil {
			return fmt.Errorf("keep trial %d: %w", number, err)
		}
		if err := os.Remove(from + ".json"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("keep trial %d: %w", number, err)
		}
		if v, err := ReadVerdict(filepath.Join(t.Dir, trial.Dir)); err == nil {
			step.Verdict = v
		}
		t.wedge = t.wedge || trial.Wedge
		delete(t.open, told.Number)
		t.trials = append(t.trials, trial)
		t.show(step)
	}
}

// ask has the crew begin what is to be run now.
func (t *together) ask(ctx context.Context) error {
	tickets, release := t.crew.Ask()
	for _, launch := range release {
		t.Crew.Release(ctx, launch)
	}
	for _, ticket := range tickets {
		a := asked{ticket, time.Now()}
		if err := WriteJSON(t.ahead(ticket.Number)+".json", a); err != nil {
			return err
		}
		t.open[ticket.Number] = a
		if err := t.Crew.Ask(ctx, t.order(ticket)); err != nil {
			return err
		}
	}
	if t.UnderWay != nil && len(tickets) > 0 {
		var all []search.Ticket
		for _, number := range slices.Sorted(maps.Keys(t.open)) {
			all = append(all, t.open[number].Ticket)
		}
		t.UnderWay(all)
	}
	return nil
}

// receive waits for one delivery and keeps it.
func (t *together) receive(ctx context.Context) error {
	d, err := t.Crew.Next(ctx)
	if err != nil {
		return err
	}
	a, waiting := t.open[d.Number]
	if _, err := os.Stat(t.ahead(d.Number)); err == nil || !waiting {
		return d.Kept(ctx) // it came before
	}
	if d.Error != "" {
		return fmt.Errorf("worker %s: %s", d.Worker, d.Error)
	}
	dir := t.ahead(d.Number)
	if err := d.fetch(ctx, dir, func(temporary string) error {
		now, trial := time.Now(), d.Trial
		trial.Ran = &Ran{
			Worker: d.Worker, Order: d.Number, Launch: a.Launch,
			BeganMS: now.UnixMilli() - trial.RunMS, EndedMS: a.At.UnixMilli() + trial.LaunchMS + trial.RunMS,
		}
		return WriteJSON(filepath.Join(temporary, TrialFile), trial)
	}); err != nil {
		return err
	}
	if !d.Up {
		t.crew.Lost(a.Launch)
	}
	r := d.Trial.Ran
	return t.crew.Done(d.Number, *d.Trial.Observation, milliseconds(r.BeganMS), milliseconds(r.EndedMS))
}

// fetch makes dir of the delivery's files, whole or not at all.
func (d *Delivery) fetch(ctx context.Context, dir string, complete func(temporary string) error) error {
	temporary := dir + ".partial"
	if err := os.RemoveAll(temporary); err != nil {
		return fmt.Errorf("fetch run %d: %w", d.Number, err)
	}
	if err := d.Files(ctx, temporary); err != nil {
		return fmt.Errorf("fetch run %d from worker %s: %w", d.Number, d.Worker, err)
	}
	if err := complete(temporary); err != nil {
		return err
	}
	if err := os.Rename(temporary, dir); err != nil {
		return fmt.Errorf("fetch run %d: %w", d.Number, err)
	}
	return d.Kept(ctx)
}

// lookAtSafeElsewhere has the crew do what lookAtSafe does.
func (h *hunt) lookAtSafeElsewhere(ctx context.Context) ([]Unmet, error) {
	if safe := h.space.Safe(); !h.space.Allowed(safe) {
		return nil, WriteJSON(filepath.Join(h.Dir, PreflightFile), []Unmet(nil))
	}
	if err := h.Crew.Ask(ctx, h.order(search.Ticket{Proposal: search.Proposal{Arm: h.space.Safe()}})); err != nil {
		return nil, err
	}
	var d *Delivery
	for d == nil {
		var err error
		if d, err = h.Crew.Next(ctx); err != nil {
			return nil, err
		}
		if d.Number != 0 { // of a hunt that was killed before it had looked
			if err := d.Kept(ctx); err != nil {
				return nil, err
			}
			d = nil
		}
	}
	if d.Error != "" {
		return nil, fmt.Errorf("worker %s: %s", d.Worker, d.Error)
	}
	dir := filepath.Join(h.Dir, ".preflight")
	if err := os.RemoveAll(dir); err != nil {
		return nil, fmt.Errorf("look at the safe arm: %w", err)
	}
	if err := d.fetch(ctx, dir, func(string) error { return nil }); err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Join(h.Dir, logsDir), 0o755); err != nil {
		return nil, fmt.Errorf("look at the safe arm: %w", err)
	}
	for _, name := range []string{filepath.Join(logsDir, "preflight"), BaseDir, BaseFile, PreflightFile} { // the last one says that all are there
		to := filepath.Join(h.Dir, name)
		err := os.RemoveAll(to)
		if err == nil {
			err = os.Rename(filepath.Join(dir, name), to)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, fmt.Errorf("look at the safe arm: %w", err)
		}
	}
	var unmet []Unmet
	path := filepath.Join(h.Dir, PreflightFile)
	there, err := readJSON(path, &unmet)
	if err == nil && !there { // no machine could look
		err = WriteJSON(path, unmet)
	}
	if err != nil {
		return nil, err
	}
	return unmet, cmp.Or(h.readBase(), os.RemoveAll(dir))
}

// Bench carries out orders one after the other, on this machine.
type Bench struct {
	hunt   *hunt
	slot   int
	launch int // the order that launched the running server
}

// NewBench makes a bench for the orders of one hunt. Of the options it takes the
// launcher, the header and the logger. slot is the worker's number on its machine.
func NewBench(o HuntOptions, first Order, slot int) (*Bench, error) {
	c, err := ParseCaseOf(first.Path, []byte(first.Case), slot)
	if err != nil {
		return nil, err
	}
	o.Case, o.Tool = c, first.Tool
	return &Bench{slot: slot, hunt: &hunt{HuntOptions: o, space: c.Space, fixed: design.Arm{}, elsewhere: true}}, nil
}

// Up says whether a server runs, and by which order.
func (b *Bench) Up() (launch int, up bool) { return b.launch, b.hunt.server != nil }

// Stop ends the running server.
func (b *Bench) Stop() { b.hunt.stop() }

// Run carries an order out in dir, which must not exist. Of order 0 there is no
// trial. An error may be this machine's: see [target.OfMachine].
func (b *Bench) Run(ctx context.Context, o Order, dir string) (*Trial, error) {
	h := b.hunt
	h.Dir = dir
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make run directory: %w", err)
	}
	if o.Against != nil {
		return b.block(ctx, o, dir)
	}
	if o.Number == 0 {
		defer h.stop()
		unmet, err := h.lookAtSafe(ctx)
		if err != nil {
			return nil, err
		}
		return nil, WriteJSON(filepath.Join(dir, PreflightFile), unmet)
	}
	h.base, h.wedge = o.Base, o.Wedge
	anew := o.Number == o.Launch || b.launch != o.Launch
	if anew {
		h.stop()
	}
	t := &Trial{Space: h.Case.Space.Fingerprint(), Proposal: search.Proposal{Arm: o.Arm, Requests: o.Requests, Launch: o.Number == o.Launch}}
	if _, err := h.trial(ctx, o.Number, t); err != nil {
		return nil, err
	}
	b.launch = o.Launch
	return t, nil
}

// launchNumbers says which launch each trial was in, from 1.
func launchNumbers(trials []Trial) []int {
	var out []int
	byOrder := map[int]int{}
	last, current := 0, 0
	for _, t := range trials {
		known := current
		if t.Ran != nil {
			known = byOrder[t.Ran.Launch]
		}
		if known == 0 || t.Observation.Launched || t.Ran == nil && t.Proposal.Launch {
			last++
			known = last
		}
		if t.Ran != nil {
			byOrder[t.Ran.Launch] = known
		}
		current = known
		out = append(out, known)
	}
	return out
}

// workerName stands in a case for the number of the worker on its machine, so
// that each has ports and devices of its own.
const workerName = "worker"

var workerPlaces = strings.NewReplacer("{{"+workerName+"}}", "\x00", "{{ "+workerName+" }}", "\x00")

// ParseCaseOf reads a case as the worker of a number has it.
func ParseCaseOf(path string, text []byte, worker int) (*Case, error) {
	own := strings.ReplaceAll(workerPlaces.Replace(string(text)), "\x00", strconv.Itoa(worker))
	c, err := ParseCase(path, []byte(own))
	if err == nil {
		c.document = text
	}
	return c, err
}

// ByWorker says whether workers of one machine have something of their own in
// the case.
func (c *Case) ByWorker() bool {
	return workerPlaces.Replace(string(c.document)) != string(c.document)
}

// Launches says whether the case starts a server.
func (c *Case) Launches() bool { return len(c.processes) > 0 }

package probe

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/culprit-project/culprit/history"
)

// The shortest and the usual time between two readings: a reader that spins
// makes each count in the server slower.
const (
	shortestPoll = 100 * time.Millisecond
	usualPoll    = time.Second
	// recordEvery is short enough to say which requests a count goes with.
	recordEvery = 200 * time.Millisecond
)

// Watcher reads a probe directory again and again, and detaches the probes when
// they cost more than the pack's budget or have been in longer than it allows.
type Watcher struct {
	Dir     string
	Every   time.Duration // 0 is a second
	Stopped string        // after Run: why it detached; empty where it didn't
	Ended   []string      // after Run: processes that ended with the probes in
}

// Run watches until ctx ends, no process is left, or it detached. It returns
// the last reading.
func (w *Watcher) Run(ctx context.Context, moved func(before, after *Reading)) (*Reading, error) {
	every := max(w.Every, shortestPoll)
	if w.Every == 0 {
		every = usualPoll
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	before, err := Read(w.Dir)
	if err != nil {
		return nil, err
	}
	expires, err := before.Pack.expires()
	if err != nil {
		return nil, fmt.Errorf("watch probes: expires: %w", err)
	}
	began := time.Now()
	ended := map[string]bool{}
	for {
		select {
		case <-ctx.Done():
			return Read(w.Dir)
		case <-tick.C:
		}
		after, err := Read(w.Dir)
		if err != nil {
			return nil, err
		}
		moved(before, after)
		w.Ended = append(w.Ended, after.ended(before, ended, began)...)
		if w.Stopped = overBudget(before, after, time.Since(began)); w.Stopped == "" && time.Since(began) >= expires {
			w.Stopped = fmt.Sprintf("pack expired after %s and was detached.", expires)
		}
		switch {
		case w.Stopped != "":
			_, err := DetachAll(ctx, after)
			return after, err
		case len(after.Processes) > 0 && !after.anyAlive():
			return after, nil
		}
		before = after
	}
}

func (r *Reading) anyAlive() bool {
	for i := range r.Processes {
		if r.Processes[i].Alive {
			return true
		}
	}
	return false
}

// ended tells of processes that were alive, each once.
func (r *Reading) ended(before *Reading, told map[string]bool, since time.Time) []string {
	var gone []string
	for i := range r.Processes {
		p := &r.Processes[i]
		alive := slices.ContainsFunc(before.Processes, func(q Process) bool { return q.Alive && q.key() == p.key() })
		if p.Alive || !alive || told[p.key()] || p.State != Armed.String() {
			continue
		}
		told[p.key()] = true
		gone = append(gone, fmt.Sprintf("PID %d exited after %s of watching. Last counts kept in %s.", p.PID, time.Since(since).Round(100*time.Millisecond), filepath.Join(r.Dir, p.name+".ctr")))
	}
	return gone
}

func overBudget(before, after *Reading, watched time.Duration) string {
	b := after.Pack.budget()
	for _, l := range Loads(before, after) {
		if l.CorePercent > b.CorePercent || l.HitsPerS > b.MaxHitsPerS {
			return fmt.Sprintf("disarmed after %.1f s: in PID %d %.0f hits/s × %.2f µs = %.1f%% of a core, budget %g%% and %.0f hits/s.",
				watched.Seconds(), l.PID, l.HitsPerS, l.NSPerHit/1000, l.CorePercent, b.CorePercent, b.MaxHitsPerS)
		}
	}
	return ""
}

// DetachAll takes the probes out of every live process of a reading, and says
// of how many.
//
// Processes that start later, or that a queued attach reaches later, take no
// probes from this directory any more.
func DetachAll(ctx context.Context, r *Reading) (int, error) {
	if err := writeNew(filepath.Join(r.Dir, closedFile), nil); err != nil {
		return 0, fmt.Errorf("detach: %w", err)
	}
	n := 0
	var errs []error
	for i := range r.Processes {
		p := &r.Processes[i]
		if !p.Alive || p.State != Armed.String() {
			continue
		}
		if err := Detach(ctx, r.Dir, p.PID); err != nil {
			errs = append(errs, err)
			continue
		}
		n++
	}
	return n, errors.Join(errs...)
}

// Recorder puts counts into a history, as far as they are evidence: a zero is
// only there once the control has moved.
type Recorder struct {
	Dirs  []string
	Every time.Duration // 0 is a fifth of a second
	Start time.Time     // the history's time 0
	Emit  func(*history.Event) error
}

// Run records until ctx ends, and once more then. An event has the counts that
// changed since the last one, by the probe's name: since the recorder began,
// summed over processes, all hits and by label.
func (r *Recorder) Run(ctx context.Context) error {
	every := max(r.Every, shortestPoll)
	if r.Every == 0 {
		every = recordEvery
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	first, before, last := map[string]*Reading{}, map[string]*Reading{}, map[string]float64{}
	told := map[string]bool{}
	look := func() error {
		for _, dir := range r.Dirs {
			reading, err := Read(dir)
			switch {
			case err != nil:
				if !told[dir] {
					told[dir] = true
					if err := r.Emit(&history.Event{At: time.Since(r.Start), Kind: history.Probe, Name: filepath.Base(dir), Text: err.Error()}); err != nil {
						return err
					}
				}
				continue
			case first[dir] == nil:
				first[dir] = reading
			}
			if err := r.record(reading, first[dir], before[dir], last); err != nil {
				return err
			}
			before[dir] = reading
		}
		return nil
	}
	for {
		if err := look(); err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return look()
		case <-tick.C:
		}
	}
}

func (r *Recorder) record(reading, first, before *Reading, last map[string]float64) error {
	e := history.Event{At: time.Since(r.Start), Kind: history.Probe, Name: reading.Pack.Name, Values: map[string]float64{}}
	for series, n := range values(first, reading) {
		key := reading.Dir + "\x00" + series
		if old, known := last[key]; !known || old != n {
			last[key], e.Values[series] = n, n
		}
	}
	if len(e.Values) == 0 {
		return nil
	}
	if before != nil {
		for _, l := range Loads(before, reading) {
			e.Values["core_percent"] = max(e.Values["core_percent"], l.CorePercent)
		}
	}
	return r.Emit(&e)
}

// values are the counts between two readings by name: docs/history-format.md
// has the names. Several probes that share a name are one count.
func values(first, reading *Reading) map[string]float64 {
	v := map[string]float64{}
	silent := map[string]bool{} // names of which a part isn't evidence
	for _, result := range Results(first, reading) {
		n := float64(result.Count())
		if result.Expect == Must {
			v["must:"+result.ID] += n
		}
		if !result.Evident() {
			silent[result.As] = true
			continue
		}
		v[result.ID] = n
		if result.Counts.Entered > 0 {
			v[result.ID+"_entered"] = float64(result.Counts.Entered)
		}
		if result.Expect == Never {
			v["never:"+result.ID] = n
		}
		name := result.ID
		if result.As != "" {
			name = result.As
			v[name] += n
		}
		for label, n := range result.Labels {
			v[name+"{"+label+"}"] += float64(n)
		}
	}
	for name := range silent {
		if v[name] == 0 {
			delete(v, name)
		}
	}
	return v
}

// Remove deletes a probe directory that no process uses any more.
func Remove(dir string) error {
	if _, err := readPackFile(dir); err != nil {
		return err // not one of ours
	}
	return os.RemoveAll(dir)
}

package worker

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/search"
	"github.com/culprit-project/culprit/target"
)

// broken is the launcher of a machine on which nothing can be started.
func broken() *target.Launcher { return &target.Launcher{Supervisor: []string{"/nowhere/culprit"}} }

// sound is one on which the server starts, takes a while, and ends for the arm's
// sake.
func sound() *target.Launcher {
	return &target.Launcher{Supervisor: []string{"sh", "-c", "sleep 0.1; exit 3"}}
}

// launched is an order of a case that a worker can launch.
func launched(number int) experiment.Order {
	o := orderOf(number, number)
	o.Case = strings.Replace(serverless, "[/nowhere/server]", `[/nowhere/server, "{{a}}"]`, 1)
	o.Arm = design.Arm{"a": "1", "concurrency": "8"}
	return o
}

// knows has the crew know its workers.
func (b *table) knows(workers int) {
	b.Helper()
	for deadline := time.Now().Add(5 * time.Second); len(b.crew.alive()) != workers; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("it knows %+v", b.crew.alive())
		}
	}
	b.crew.since = time.Now().Add(-time.Minute)
}

// What a machine fails on another carries out, and counts against neither arm; the
// machine that keeps failing is left out.
func TestBrokenMachine(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	_, bad := b.work(Options{Name: "bad", Launcher: broken()})
	b.work(Options{Name: "good", Launcher: sound()})
	b.knows(2)
	const orders = 8
	for n := range orders {
		b.ask(launched(n + 1))
	}
	for range orders {
		d := b.next()
		if d.Error != "" || d.Worker != "good" || d.Trial.Observation.Outcome != search.Invalid {
			t.Errorf("delivered %+v of %s: %+v", d, d.Worker, d.Trial)
		}
		if err := d.Kept(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if !bad.has("takes no more trials of hunt-1") || !bad.has("/nowhere/culprit") {
		t.Errorf("it said %q", bad.all)
	}
	// It is there, and isn't counted on.
	for deadline := time.Now().Add(5 * time.Second); len(b.crew.alive()) != 2 || b.crew.Size() != 1; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("of %+v, %d take orders", b.crew.alive(), b.crew.Size())
		}
	}
}

// An arm is void once every machine failed on it, or the only one thrice.
func TestEveryMachineBroken(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		workers int
		note    []string
	}{
		{1, []string{"w0 (3 times): launch "}},
		{2, []string{"w0: launch ", "w1: launch "}},
	} {
		t.Run(fmt.Sprint(tt.workers), func(t *testing.T) {
			t.Parallel()
			b := newTable(t)
			for i := range tt.workers {
				b.work(Options{Name: fmt.Sprint("w", i), Launcher: broken()})
			}
			b.knows(tt.workers)
			b.ask(launched(1))
			d := b.next()
			if d.Trial == nil || d.Trial.Observation.Outcome != search.Void {
				t.Fatalf("delivered %+v", d)
			}
			for _, want := range tt.note {
				if !strings.Contains(d.Trial.Note, want) {
					t.Errorf("the note is %q, want %q in it", d.Trial.Note, want)
				}
			}
		})
	}
}

// A hunt whose workers are all within its program ends when their machine keeps
// failing.
func TestOwnMachineBroken(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	b.crew.Here, b.crew.Most = true, 1
	b.work(Options{Name: "w0", Launcher: broken()})
	for n := range mostTrouble + 1 {
		b.ask(launched(n + 1))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for {
		d, err := b.crew.Next(ctx)
		if err != nil {
			if !strings.Contains(err.Error(), "failed on 3 trials in a row: launch ") {
				t.Error(err)
			}
			return
		}
		if d.Number > mostTrouble || d.Trial == nil || d.Trial.Observation.Outcome != search.Void {
			t.Fatalf("delivered %+v", d)
		}
		if err := d.Kept(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// Who failed on an order is known to the coordinator that comes after one that
// was killed.
func TestFailuresOutliveCoordinator(t *testing.T) {
	t.Parallel()
	b := newTable(t)
	b.knows(0)
	b.ask(launched(1))
	task, o := b.take("w1")
	b.finish(task, result{Number: 1, Worker: "w1", Failed: append(o.Failed, experiment.Failure{Worker: "w1", Why: "the disk is full"})})
	ctx, cancel := context.WithCancel(t.Context())
	go b.crew.Next(ctx) // it delivers nothing
	if second, o := b.take("w2"); second.ID != "0001-1" || len(o.Failed) != 1 || o.Failed[0].Worker != "w1" {
		t.Fatalf("w2 took %s: %+v", second.ID, o)
	} else if err := second.GiveBack(); err != nil {
		t.Fatal(err)
	}
	cancel()
	b.crew.Close()
	var err error
	if b.crew, err = NewCrew(t.Context(), b.conn, b.queue, CrewOptions{Say: b.said.say}); err != nil {
		t.Fatal(err)
	}
	b.knows(0)
	b.ask(launched(1))
	third, o := b.take("w2")
	b.finish(third, result{Number: 1, Worker: "w2", Failed: append(o.Failed, experiment.Failure{Worker: "w2", Why: "so is mine"})})
	if d := b.next(); d.Trial == nil || !strings.Contains(d.Trial.Note, "w1: the disk is full; w2: so is mine") {
		t.Errorf("delivered %+v", d.Trial)
	}
}

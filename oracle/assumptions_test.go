package oracle

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/culprit-project/culprit/history"
)

// TestStands makes each assumption fail beside each kind of evidence. What is
// to stand is read from the table of docs/oracles.md.
func TestStands(t *testing.T) {
	page, err := os.ReadFile("../docs/oracles.md")
	if err != nil {
		t.Fatal(err)
	}
	table := map[string][]string{}
	for line := range strings.Lines(string(page)) {
		cells := strings.Split(line, "|")
		if len(cells) > 5 {
			table[strings.TrimSpace(cells[1])] = []string{strings.TrimSpace(cells[2]), strings.TrimSpace(cells[3]), strings.TrimSpace(cells[4]), strings.TrimSpace(cells[5])}
		}
	}
	tick := func(name string, value float64) func(*history.Event) bool {
		return func(e *history.Event) bool {
			e.Values[name] = value
			return true
		}
	}
	fails := map[string]func(*play){
		thatEnded: func(p *play) { p.cut = true },
		thatAnswered: func(p *play) {
			p.op = func(op *history.Op) {
				if op.Session >= 50 {
					op.Outcome, op.Status, op.Error = history.Failed, 500, "HTTP 500"
				}
			}
		},
		thatReached: func(p *play) {
			p.op = func(op *history.Op) {
				op.Sent += time.Duration(op.Session/8) * 10 * time.Second
				op.Planned, op.LastByte = op.Sent, op.Sent+time.Second
			}
		},
		thatOnTime: func(p *play) {
			p.header = func(h *history.Header) { h.Concurrency, h.RequestRate = 0, 80 }
			p.op = func(op *history.Op) { op.Planned -= time.Duration(op.Session) * 10 * time.Millisecond }
		},
		thatRan:    func(p *play) { p.ticks = tick("late_ms", 9000) },
		thatKeptUp: func(p *play) { p.ticks = tick("cpu", 1.9) },
		thatAlone:  func(p *play) { p.control, p.op = nothing, func(op *history.Op) { op.InFlight = 80 } },
		thatCold:   func(p *play) { p.control, p.op = nothing, usage(259, 253) },
		thatPathsRan: func(p *play) {
			p.events = append(p.events, history.Event{Kind: history.Probe, Name: "pack", Values: map[string]float64{"must:load": 0, "must:store": 5}})
		},
		thatHit: func(p *play) {
			cached := usage(200, 0)
			p.op = func(op *history.Op) {
				op.Expect.Leg = "device"
				cached(op)
			}
		},
	}
	evidence := []struct {
		class  Class
		means  Status
		column int
	}{
		{ForeignCanary, Corrupt, 0},
		{BrokenStream, Corrupt, 1},
		{Poisoned, Wedged, 1},
		{NoTokens, Wedged, 2},
		{GreedyDiffers, Numerics, 3},
		{"", Clean, 3},
	}
	for name := range stands {
		row := table[name]
		if row == nil {
			t.Errorf("docs/oracles.md has no row %q", name)
			continue
		}
		fail := fails[name]
		if fail == nil {
			// Nothing to judge: then no class but that of a wedge has a trial.
			continue
		}
		for _, e := range evidence {
			t.Run(fmt.Sprintf("%s/%s", name, e.class), func(t *testing.T) {
				p := play{main: every(20, e.class), oracles: []Oracle{told(WrongArgument, ForeignCanary, Poisoned, NoTokens, GreedyDiffers, BrokenStream)}}
				if e.class == "" {
					p.main = nothing
				}
				fail(&p)
				v := p.judge()
				for _, a := range v.Assumptions {
					if a.Holds == (a.Name == name) && (name != thatRan || a.Name != thatKeptUp) {
						t.Errorf("%s: holds %t", a.Name, a.Holds)
					}
				}
				want := e.means
				if row[e.column] != "stands" {
					want = Inconclusive
					if name == thatReached || name == thatHit || name == thatPathsRan {
						want = NotExercised
					}
				}
				if v.Status != want {
					t.Errorf("status %q, want %q: %s", v.Status, want, strings.Join(v.Reasons, "; "))
				}
			})
		}
	}
}

package report

import (
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/oracle"
	"github.com/culprit-project/culprit/target"
)

// of is a class with some failures and one example.
func of(class oracle.Class, main, control oracle.Rate, e oracle.Example) oracle.ClassResult {
	c := oracle.ClassResult{Class: class, Means: oracle.Corrupt, Source: oracle.Model, Main: main, Examples: []oracle.Example{e}}
	if control.Trials > 0 {
		c.Control = &control
	}
	return c
}

func rate(failures, trials int) oracle.Rate {
	return oracle.Rate{Failures: failures, Trials: trials, Rate: float64(failures) / float64(trials), High: 1}
}

func TestTerminal(t *testing.T) {
	leak := of(oracle.ForeignCanary, rate(1, 48), oracle.Rate{}, oracle.Example{Op: 9, Phase: history.Main, Session: 3, Turn: 1, Want: "its own", Got: "an other's", Note: "bad \x1b[2J"})
	leak.Source, leak.Convicts = oracle.Server, true
	weak := of(oracle.WrongArgument, rate(43, 48), rate(42, 48), oracle.Example{Op: 7, Phase: history.Main, Turn: 2, Want: "weak want", Got: "weak got"})
	unsure := of(oracle.WrongArgument, rate(43, 48), oracle.Rate{}, oracle.Example{Op: 7, Phase: history.Recovery, Session: -1, Turn: 2, Want: "weak want", Got: "weak got"})
	unsure.NeedsControl = true
	churned := of(oracle.EchoDoubled, rate(9, 48), rate(0, 48), oracle.Example{Op: 12, Phase: history.Main, Session: 6, Turn: 8, Leg: "again", Want: "once", Got: "twice"})
	churned.Convicts = true
	all := func(main, control oracle.Rate) oracle.ClassResult {
		return of(oracle.Broken, main, control, oracle.Example{})
	}
	tests := []struct {
		name    string
		verdict oracle.Verdict
		want    []string
		absent  []string
	}{
		{
			"a weak model on a sound server",
			oracle.Verdict{Status: oracle.Clean, Broken: all(rate(43, 48), rate(42, 48)), Classes: []oracle.ClassResult{weak}},
			[]string{"CLEAN  43 of 48 replies wrong, 42 of 48 alone\n", "the model's own mistakes"},
			[]string{"Worst", "weak want", "Where replies are wrong"},
		},
		{
			"nobody knows whose mistakes they are",
			oracle.Verdict{Status: oracle.Inconclusive, Broken: all(rate(43, 48), oracle.Rate{}), Classes: []oracle.ClassResult{unsure}},
			[]string{"43 of 48 replies wrong, perhaps the model's own mistakes\n", "Worst, perhaps the model's own\n", "op 7 (plain request 3 after a failure)"},
			[]string{"session -1"},
		},
		{
			"what convicts comes first, the model's own not at all",
			oracle.Verdict{Status: oracle.Corrupt, Broken: all(rate(44, 48), rate(42, 48)), Classes: []oracle.ClassResult{weak, leak, churned}},
			[]string{
				"CORRUPT  44 of 48 replies wrong, 42 of 48 alone\n", "ForeignCanary in op 9 (session 3, round 2)", `bad \x1b[2J`,
				"op 12 (session 6, request 9: again)", "\n  culprit check --op 9 'some dir/with a name that is long enough to be broken at the edge of a screen'\n",
			},
			[]string{"weak want", "\x1b"},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			test.verdict.Breakdowns = []oracle.Breakdown{{By: "round", Bins: []oracle.Bin{{Label: "1", Rate: rate(3, 24)}, {Label: "2", Rate: rate(20, 24)}}}}
			var b strings.Builder
			Terminal(term.NewScreen(&b), &test.verdict, Run{Dir: "some dir/with a name that is long enough to be broken at the edge of a screen", Workload: "agent"})
			for _, want := range test.want {
				if !strings.Contains(b.String(), want) {
					t.Errorf("%q is missing", want)
				}
			}
			for _, absent := range test.absent {
				if strings.Contains(b.String(), absent) {
					t.Errorf("%q is there", absent)
				}
			}
			for line := range strings.Lines(b.String()) {
				if utf8.RuneCountInString(strings.TrimSuffix(line, "\n")) > 80 && !strings.HasPrefix(line, "  culprit check ") {
					t.Errorf("more than 80 columns: %s", line)
				}
			}
			if t.Failed() {
				t.Log(b.String())
			}
		})
	}
}

// A paragraph keeps to the screen where its later lines stand further in.
func TestParagraphFits(t *testing.T) {
	var out strings.Builder
	s := term.NewScreen(&out)
	paragraph(s, "  ", "            ", strings.Repeat("a bc ", 100))
	for line := range strings.Lines(out.String()) {
		if len(strings.TrimSuffix(line, "\n")) > s.Columns() {
			t.Errorf("wider than %d columns: %s", s.Columns(), line)
		}
	}
}

// A note's first line doesn't announce what isn't shown.
func TestFirstLine(t *testing.T) {
	note := (&target.LaunchError{Process: "clients", Reason: "not ready after 1m0s", LogFile: "logs/clients.log", Tail: "one\ntwo"}).Error()
	if got, want := firstLine(note), "launch clients: not ready after 1m0s; its log logs/clients.log"; got != want {
		t.Errorf("%q, want %q", got, want)
	}
}

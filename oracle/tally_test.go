package oracle

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// TestRecorder: an op counts once per class, and the worst examples are kept.
func TestRecorder(t *testing.T) {
	rec := newRecorder()
	for id := int64(1); id <= 6; id++ {
		rec.add(&View{Op: &history.Op{ID: id, Phase: history.Main, Session: int(id)}, Reply: &openai.Reply{}})
		rec.Trial(id, WrongArgument)
		rec.Trial(id, WrongArgument)
	}
	for _, v := range []Violation{
		{Op: 5, Note: "first"},
		{Op: 2, Severity: 1, Note: "milder"},
		{Op: 2, Severity: 3, Note: "worst"},
		{Op: 2, Severity: 2, Note: "milder again"},
		{Op: 4, Note: "fourth"},
		{Op: 3, Note: "third"},
		{Op: 6, Severity: 1, Note: strings.Repeat("ü", maxExampleBytes)},
	} {
		v.Class = WrongArgument
		rec.Violation(v)
	}
	class := rec.byClass[WrongArgument]
	want := []Example{{Op: 2, Note: "worst"}, {Op: 6}, {Op: 3, Note: "third"}}
	got := rec.classes[class].worst[mainArm]
	long := got[1].Note
	got[1].Note = ""
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Example{}, "Phase", "Session"), cmpopts.IgnoreUnexported(Example{})); diff != "" {
		t.Errorf("examples (-want +got):\n%s", diff)
	}
	if !utf8.ValidString(long) || len(long) > maxExampleBytes+50 || !strings.HasSuffix(long, "(2000 more bytes)") {
		t.Errorf("a long note is kept as %d bytes ending in %q", len(long), long[len(long)-30:])
	}
	_, classes := rec.results()
	if len(classes) != 1 || classes[0].Main.Trials != 6 || classes[0].Main.Failures != 5 {
		t.Errorf("classes %+v, want one with 5 of 6", classes)
	}
	if diff := cmp.Diff([]int64{2, 3, 4, 5, 6}, classes[0].Ops); diff != "" {
		t.Errorf("ops (-want +got):\n%s", diff)
	}
}

func TestRecorderRefuses(t *testing.T) {
	tests := []struct {
		name string
		do   func(*Recorder)
		want string
	}{
		{"a class without a row", func(r *Recorder) { r.Trial(0, "NoSuchClass") }, `class "NoSuchClass" has no row in the table of classes`},
		{"an op that isn't there", func(r *Recorder) { r.Trial(7, WrongArgument) }, "there is no op 7"},
		{"another oracle's class", func(r *Recorder) {
			r.oracle = &Canary
			r.Violation(Violation{Class: WrongArgument})
		}, `class "WrongArgument" isn't declared by the oracle`},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			defer func() {
				if got := fmt.Sprint(recover()); got != test.want {
					t.Errorf("panic %q, want %q", got, test.want)
				}
			}()
			test.do(newRecorder())
		})
	}
}

func TestAround(t *testing.T) {
	text := strings.Repeat("ä", 200) + "HERE" + strings.Repeat("ö", 200)
	got := around(text, 400, 404)
	if !utf8.ValidString(got) || !strings.Contains(got, "äHEREö") || !strings.HasPrefix(got, "... ") || !strings.HasSuffix(got, " ...") || len(got) > 300 {
		t.Errorf("got %q", got)
	}
}

// TestErrorCounts: the same words with other numbers are one error, another
// status is another.
func TestErrorCounts(t *testing.T) {
	var p phases
	for i, failure := range []struct {
		status int
		text   string
	}{{400, "the prompt has 1241 tokens"}, {400, "the prompt has 900 tokens"}, {500, "the prompt has 900 tokens"}, {400, "no such model"}} {
		p.op(&View{Op: &history.Op{ID: int64(i + 1), Phase: history.Main, Outcome: history.Failed, Status: failure.status, Error: failure.text}, Reply: &openai.Reply{}})
	}
	var got []string
	for _, e := range p.results()[0].Errors {
		got = append(got, fmt.Sprintf("%d x %s (op %d)", e.Ops, e.Message, e.Example))
	}
	want := []string{"2 x the prompt has 1241 tokens (op 1)", "1 x the prompt has 900 tokens (op 3)", "1 x no such model (op 4)"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

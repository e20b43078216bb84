package oracle

import (
	"fmt"
	"strings"
	"unicode"

	"github.com/culprit-project/culprit/history"
)

// RecallLost is a reply without the fact that was told some turns before.
const RecallLost Class = "RecallLost"

// Recall judges ops that ask for a fact told before.
var Recall = Oracle{
	Name:    "recall",
	Classes: []Class{RecallLost},
	New:     func(history.Header) Observer { return &recallObserver{} },
}

type recallObserver struct{}

func (o *recallObserver) Op(v *View, rec *Recorder) {
	answer := v.Op.Expect.Answer
	if answer == "" || !v.Complete() {
		return
	}
	rec.Trial(v.Op.ID, RecallLost)
	for _, t := range v.Texts() {
		if t.Where != "reasoning" && recalls(t.Text, answer) {
			return
		}
	}
	note := "told in the same request"
	if d := v.Op.Expect.Distance; d > 0 {
		note = fmt.Sprintf("told %d turns before", d)
	}
	rec.Violation(Violation{
		Class: RecallLost, Op: v.Op.ID,
		Want: answer, Got: v.Reply.Content,
		Note: note,
		// A fact that is near is the more surely lost by the server.
		Severity: 1 / float64(1+v.Op.Expect.Distance),
	})
}

func (o *recallObserver) Event(*history.Event, *Recorder) {}
func (o *recallObserver) Finish(*Recorder)                {}

// recalls says whether text holds answer. Case counts only if the answer has
// upper case, space only if the answer has space.
func recalls(text, answer string) bool {
	if strings.Contains(text, answer) {
		return true
	}
	if strings.IndexFunc(answer, unicode.IsUpper) < 0 {
		text = strings.ToLower(text)
	}
	if strings.IndexFunc(answer, unicode.IsSpace) < 0 {
		text = strings.Map(func(r rune) rune {
			if unicode.IsSpace(r) {
				return -1
			}
			return r
		}, text)
	}
	return strings.Contains(text, answer)
}

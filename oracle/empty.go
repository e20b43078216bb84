package oracle

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/culprit-project/culprit/history"
)

// Classes of replies that say too little.
const (
	// EmptyReply is a reply that came to its end and holds neither content
	// nor a call.
	EmptyReply Class = "EmptyReply"
	// CutReply is a reply that ended too early.
	CutReply Class = "CutReply"
)

// Empty looks for replies that say nothing, or stop short.
var Empty = Oracle{
	Name:    "empty",
	Classes: []Class{EmptyReply, CutReply},
	New:     func(history.Header) Observer { return &emptyObserver{} },
}

// emptyObserver keeps replies that claim to have reached a limit that isn't
// max_tokens. The server's context may have been full; but not if another
// op of the run held more tokens.
type emptyObserver struct {
	longest int // most tokens of prompt and completion of any op
	early   []earlyLength
}

type earlyLength struct {
	op                       int64
	total, completion, limit int
}

// maxEarly bounds the memory for replies whose judging has to wait.
const maxEarly = 4096

func (o *emptyObserver) Op(v *View, rec *Recorder) {
	// One token may well be a space or the end: sentinels ask for just one.
	if !v.Complete() || v.Op.Phase == history.Sentinel {
		return
	}
	rec.Trial(v.Op.ID, EmptyReply, CutReply)
	r := v.Reply
	completion := -1
	if r.Usage != nil {
		completion = r.Usage.CompletionTokens
		o.longest = max(o.longest, r.Usage.PromptTokens+completion)
	}
	if strings.TrimSpace(r.Content) == "" && len(r.ToolCalls) == 0 {
		// All of max_tokens spent on reasoning is a small budget, not damage.
		if r.FinishReason != "length" || r.Reasoning == "" {
			rec.Violation(Violation{
				Class: EmptyReply, Op: v.Op.ID,
				Want: "content or a call", Got: r.Content, Note: emptyNote(v, completion), Severity: float64(completion),
			})
		}
		return
	}
	if want := v.Op.Expect.MinChars; r.FinishReason == "stop" && len(r.ToolCalls) == 0 {
		if n := utf8.RuneCountInString(r.Content); 100*n < want*cutShare {
			rec.Violation(Violation{
				Class: CutReply, Op: v.Op.ID,
				Want: fmt.Sprintf("at least %d characters", want), Got: r.Content,
				Note:     fmt.Sprintf("stopped after %d characters", n),
				Severity: 1 - float64(n)/float64(want),
			})
		}
	}
	if r.FinishReason == "length" && completion >= 0 && len(o.early) < maxEarly {
		if limit := v.maxTokens(); completion < limit {
			o.early = append(o.early, earlyLength{v.Op.ID, r.Usage.PromptTokens + completion, completion, limit})
		}
	}
}

func (o *emptyObserver) Event(*history.Event, *Recorder) {}

func (o *emptyObserver) Finish(rec *Recorder) {
	for _, e := range o.early {
		if e.total < o.longest {
			rec.Violation(Violation{
				Class: CutReply, Op: e.op,
				Want: fmt.Sprintf("%d tokens, if finish_reason is length", e.limit), Got: fmt.Sprintf("%d tokens", e.completion),
				Note:     fmt.Sprintf("nor was the context full: another op held %d tokens, this one %d", o.longest, e.total),
				Severity: 1 - float64(e.completion)/float64(e.limit),
			})
		}
	}
}

func emptyNote(v *View, completion int) string {
	note := "finish_reason " + v.Reply.FinishReason
	if v.Reply.FinishReason == "" {
		note = "no finish_reason"
	}
	if completion >= 0 {
		note += fmt.Sprintf(", completion_tokens %d", completion)
	}
	if v.Reply.Reasoning != "" {
		note += fmt.Sprintf(", %d bytes of reasoning only", len(v.Reply.Reasoning))
	}
	return note
}

package oracle

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// Classes of replies whose form can't be right, whatever the model says.
const (
	NoFinish       Class = "NoFinish"       // the reply came to its end without a finish_reason
	BrokenStream   Class = "BrokenStream"   // the connection broke, or an error came, in mid-reply
	StreamGap      Class = "StreamGap"      // chunks missing, out of order, unreadable, or of another reply
	BadUsage       Class = "BadUsage"       // token counts that can't be
	StreamMismatch Class = "StreamMismatch" // streamed or not makes another structure of calls
)

// Integrity looks at the form of replies.
var Integrity = Oracle{
	Name:    "integrity",
	Classes: []Class{NoFinish, BrokenStream, StreamGap, BadUsage, StreamMismatch},
	New: func(history.Header) Observer {
		return &integrityObserver{seed: maphash.MakeSeed(), prompts: map[uint64]promptSize{}, same: map[string]*structures{}}
	},
}

type integrityObserver struct {
	seed    maphash.Seed
	prompts map[uint64]promptSize  // by the hash of the request or of Expect.Same
	same    map[string]*structures // by Expect.Same
}

type promptSize struct {
	op     int64
	tokens int
}

// structures are the first streamed and the first other reply to one prompt.
type structures struct {
	known  [2]bool
	op     [2]int64
	shapes [2]string
}

// maxPrompts bounds what is kept of prompts: the first so many are compared.
const maxPrompts = 1 << 16

// damaged are the anomalies that aren't a matter of dialect.
var damaged = []string{
	openai.InvalidJSON, openai.AfterDone, openai.AfterFinish, openai.AfterError, openai.FinishChanged,
	openai.IDChanged, openai.ModelChanged, openai.OtherChoice,
	openai.ToolIndexGap, openai.ToolIndexBack, openai.ToolIDChanged, openai.TooManyToolCalls,
}

func (o *integrityObserver) Op(v *View, rec *Recorder) {
	op, r := v.Op, v.Reply
	if len(op.Chunks) == 0 {
		return
	}
	if op.Outcome == history.OK || op.Outcome == history.Failed {
		rec.Trial(op.ID, BrokenStream)
		if note := brokenNote(v); note != "" {
			rec.Violation(Violation{
				Class: BrokenStream, Op: op.ID, Want: "a whole reply", Got: r.Content, Note: note,
				Severity: float64(len(op.Chunks)),
			})
		}
	}
	if op.Outcome == history.OK || op.Stream {
		rec.Trial(op.ID, StreamGap)
		var found []string
		for _, a := range r.Anomalies {
			if slices.Contains(damaged, a) {
				found = append(found, a)
			}
		}
		if found != nil && op.Status < 400 { // an error page needn't be JSON
			rec.Violation(Violation{
				Class: StreamGap, Op: op.ID, Want: "chunks in order", Got: strings.Join(found, ", "), Note: "see openai.Reply.Anomalies",
				Severity: float64(len(found)),
			})
		}
	}
	if !v.Complete() {
		return
	}
	rec.Trial(op.ID, NoFinish)
	if r.FinishReason == "" {
		note := "[DONE] came"
		switch {
		case !op.Stream:
			note = "not streamed"
		case !r.Done:
			note = "[DONE] didn't come either"
		}
		rec.Violation(Violation{Class: NoFinish, Op: op.ID, Want: "a finish_reason", Got: r.Content, Note: note, Severity: float64(len(r.Content))})
	}
	if r.Usage != nil {
		rec.Trial(op.ID, BadUsage)
		if note := o.badUsage(v); note != "" {
			rec.Violation(Violation{
				Class: BadUsage, Op: op.ID, Want: "counts that fit", Got: fmt.Sprintf("%+v", *r.Usage), Note: note, Severity: 1,
			})
		}
	}
	if op.Expect.Same != "" {
		o.structure(v, rec)
	}
}

func (o *integrityObserver) Event(*history.Event, *Recorder) {}
func (o *integrityObserver) Finish(*Recorder)                {}

// brokenNote says how a reply broke off after it had begun; empty if it
// didn't.
func brokenNote(v *View) string {
	switch r := v.Reply; {
	case v.Op.Outcome == history.Failed && v.Op.Status < 300:
		return v.Op.Error
	case r.Err != nil && v.Op.Stream && v.Op.Status < 300:
		return "an error in mid-stream: " + r.Err.Message
	default:
		return ""
	}
}

// badUsage says which count can't be; empty if all can.
func (o *integrityObserver) badUsage(v *View) string {
	u, r := v.Reply.Usage, v.Reply
	text := len(r.Content) + len(r.Reasoning)
	for _, c := range r.ToolCalls {
		text += len(c.Function.Name) + len(c.Function.Arguments)
	}
	switch limit := v.maxTokens(); {
	case u.PromptTokens <= 0:
		return "no prompt_tokens for a prompt"
	case u.TotalTokens != 0 && u.TotalTokens != u.PromptTokens+u.CompletionTokens:
		return "total_tokens isn't the sum"
	case u.CachedTokens > u.PromptTokens:
		return "more cached tokens than the prompt has"
	case limit > 0 && u.CompletionTokens > limit+tokensOver:
		return fmt.Sprintf("more completion_tokens than max_tokens, %d", limit)
	case text > u.CompletionTokens*tokenBytes:
		return fmt.Sprintf("%d bytes of text are more than %d tokens can be", text, u.CompletionTokens)
	}
	key := maphash.Bytes(o.seed, v.Op.Request)
	if same := v.Op.Expect.Same; same != "" {
		key = maphash.String(o.seed, same)
	}
	first, known := o.prompts[key]
	switch {
	case !known && len(o.prompts) < maxPrompts:
		o.prompts[key] = promptSize{v.Op.ID, u.PromptTokens}
	case known && first.tokens != u.PromptTokens:
		return fmt.Sprintf("op %d sent the same prompt and was told %d prompt_tokens", first.op, first.tokens)
	}
	return ""
}

// structure compares the calls of a reply with those of the first reply to
// the same prompt that was sent the other way.
func (o *integrityObserver) structure(v *View, rec *Recorder) {
	s := o.same[v.Op.Expect.Same]
	if s == nil {
		if len(o.same) >= maxPrompts {
			return
		}
		s = &structures{}
		o.same[v.Op.Expect.Same] = s
	}
	way := 0
	if v.Op.Stream {
		way = 1
	}
	shape := shapeOf(v.Reply)
	if !s.known[way] {
		s.known[way], s.op[way], s.shapes[way] = true, v.Op.ID, shape
	}
	other := 1 - way
	if !s.known[other] {
		return
	}
	rec.Trial(v.Op.ID, StreamMismatch)
	if shape != s.shapes[other] {
		rec.Violation(Violation{
			Class: StreamMismatch, Op: v.Op.ID, Want: s.shapes[other], Got: shape,
			Note: fmt.Sprintf("op %d sent the same prompt, stream %t there and %t here", s.op[other], other == 1, way == 1), Severity: 1,
		})
	}
}

// shapeOf is what a program does with a reply: which tools it calls.
func shapeOf(r *openai.Reply) string {
	if len(r.ToolCalls) == 0 {
		return "no calls"
	}
	names := make([]string, len(r.ToolCalls))
	for i, c := range r.ToolCalls {
		names[i] = c.Function.Name
	}
	return "calls " + strings.Join(names, ", ")
}

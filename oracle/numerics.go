package oracle

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"math"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// Classes of greedy replies to one prompt that differ.
const (
	// GreedyDiffers is another text than the reference's, which another
	// order of additions explains, or which nothing is known about.
	GreedyDiffers Class = "GreedyDiffers"
	// GreedyImpossible is a token that the reference itself scores so low
	// that rounding can't have chosen it: it comes from another state.
	GreedyImpossible Class = "GreedyImpossible"
)

// Greedy compares replies at temperature 0 to the same prompt.
var Greedy = Oracle{
	Name:    "numerics",
	Classes: []Class{GreedyDiffers, GreedyImpossible},
	New: func(history.Header) Observer {
		return &greedyObserver{seed: maphash.MakeSeed(), references: map[uint64]*reference{}}
	},
}

// greedyObserver keeps the first reply to each prompt as the reference for
// later ones. When maxReferenceBytes are kept, the oldest reference goes for
// each new one: a comparison that comes too late isn't made, and isn't a trial.
type greedyObserver struct {
	seed       maphash.Seed
	references map[uint64]*reference
	order      []uint64 // of the references, the oldest first
	bytes      int
}

const (
	maxReferenceBytes = 64 << 20
	// maxReferences bounds the map even where replies are tiny.
	maxReferences = 1 << 16
)

// reference is what is kept of a reply.
type reference struct {
	op       int64
	whole    bool // it ended by itself: nothing of it is missing
	text     string
	logprobs []openai.TokenLogprob
	bytes    int
}

func (o *greedyObserver) Op(v *View, rec *Recorder) {
	if v.Op.Phase == history.Sentinel || len(v.Op.Chunks) == 0 || v.Reply.Err != nil || !temperatureZero(v.Op.Request) {
		return
	}
	// Same is given where prompts are the same but bodies may differ.
	key := maphash.Bytes(o.seed, withoutStream(v.Op.Request))
	if same := v.Op.Expect.Same; same != "" {
		key = maphash.String(o.seed, same)
	}
	text := replyText(v.Reply)
	whole := v.Complete() && v.Reply.FinishReason != "length"
	first := o.references[key]
	if first == nil {
		o.keep(key, &reference{op: v.Op.ID, whole: whole, text: text, logprobs: v.Reply.Logprobs})
		return
	}
	classes := []Class{GreedyDiffers}
	judged := len(first.logprobs) > 0 && len(v.Reply.Logprobs) > 0
	if judged {
		classes = append(classes, GreedyImpossible)
	}
	rec.Trial(v.Op.ID, classes...)
	at := samePrefix(first.text, text)
	if at == len(text) && (!whole || at == len(first.text)) || at == len(first.text) && !first.whole {
		return // the same, or the beginning of it
	}
	violation := Violation{
		Class: GreedyDiffers, Op: v.Op.ID, Want: excerpt(first.text, at), Got: excerpt(text, at),
		Note: fmt.Sprintf("op %d got another text for the same prompt, from byte %d on", first.op, at),
	}
	if judged {
		d := divergence(first.logprobs, v.Reply.Logprobs)
		violation.Severity = d.margin
		switch {
		case d.token < 0:
			violation.Note += "; no token of the log-probabilities differs"
		case d.margin > impossibleMargin:
			violation.Class = GreedyImpossible
			violation.Note += "; " + d.String()
		default:
			violation.Note += "; " + d.String()
		}
	}
	rec.Violation(violation)
}

func (o *greedyObserver) Event(*history.Event, *Recorder) {}
func (o *greedyObserver) Finish(*Recorder)                {}

func (o *greedyObserver) keep(key uint64, r *reference) {
	r.bytes = len(r.text)
	for _, l := range r.logprobs {
		r.bytes += 64 + 64*len(l.Top)
	}
	for len(o.order) > 0 && (o.bytes+r.bytes > maxReferenceBytes || len(o.order) >= maxReferences) {
		oldest := o.order[0]
		o.order = o.order[1:]
		o.bytes -= o.references[oldest].bytes
		delete(o.references, oldest)
	}
	o.references[key] = r
	o.order = append(o.order, key)
	o.bytes += r.bytes
}

// firstDifference is where a reply leaves its reference.
type firstDifference struct {
	token        int // -1 when no token differs
	wanted, took string
	// margin is how much less likely, in nats, the reference makes the
	// token taken than its own best. Where that token isn't in the
	// reference's list, it is the least that the margin can be.
	margin float64
	listed bool
}

func (d firstDifference) String() string {
	at := fmt.Sprintf("token %d is %q instead of %q", d.token+1, d.took, d.wanted)
	least := ""
	if !d.listed {
		least = "at least "
	}
	s := fmt.Sprintf("%s, which the reference finds %s%.2f nat less likely", at, least, d.margin)
	if d.margin >= numericsMargin && d.margin <= impossibleMargin {
		s += ": much for rounding, little for corruption"
	}
	return s
}

// divergence compares two replies token by token.
func divergence(want, got []openai.TokenLogprob) firstDifference {
	for i := range min(len(want), len(got)) {
		if want[i].Token == got[i].Token {
			continue
		}
		d := firstDifference{token: i, wanted: want[i].Token, took: got[i].Token}
		best, worst := want[i].Logprob, want[i].Logprob
		for _, alternative := range want[i].Top {
			best, worst = max(best, alternative.Logprob), min(worst, alternative.Logprob)
			if alternative.Token == d.took {
				d.listed = true
				d.margin = alternative.Logprob
			}
		}
		if d.listed {
			d.margin = best - d.margin
		} else {
			// Not listed: it is at most as likely as the last one listed.
			d.margin = best - worst
		}
		if math.IsNaN(d.margin) {
			d.margin = 0 // a server that gives NaN gives no evidence
		}
		return d
	}
	return firstDifference{token: -1}
}

// replyText is all that a reply says, in one string.
func replyText(r *openai.Reply) string {
	if r.Reasoning == "" && len(r.ToolCalls) == 0 {
		return r.Content
	}
	var b bytes.Buffer
	b.WriteString(r.Reasoning)
	if r.Reasoning != "" {
		b.WriteString("\n\n")
	}
	b.WriteString(r.Content)
	for _, c := range r.ToolCalls {
		b.WriteString("\n\n" + c.Function.Name + " " + c.Function.Arguments)
	}
	return b.String()
}

// temperatureZero says whether a request asks for greedy sampling. It doesn't
// decode the request: every quote inside a string is escaped, so the name in
// bare quotes is the member's.
func temperatureZero(request []byte) bool {
	_, value, ok := bytes.Cut(request, []byte(`"temperature":`))
	if !ok {
		return false
	}
	value = bytes.TrimLeft(value, " ")
	digits := bytes.TrimLeft(value, "0.")
	return len(digits) < len(value) && len(digits) > 0 && (digits[0] == ',' || digits[0] == '}' || digits[0] == ' ')
}

// withoutStream cuts off a request's last members where they only say how the
// reply is to be sent; the program writes them last.
func withoutStream(request []byte) []byte {
	request = bytes.TrimSuffix(request, []byte("}"))
	for _, member := range []string{
		`,"stream_options":{"include_usage":true}`, `,"stream_options":{"include_usage":false}`,
		`,"stream":true`, `,"stream":false`,
	} {
		request = bytes.TrimSuffix(request, []byte(member))
	}
	return request
}

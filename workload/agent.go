package workload

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

var agentDefaults = Plan{
	Sessions: 8, Rounds: 4, ContextLines: 28, OnError: Repair, Tools: Native,
	MaxTokens: 128, // a right call is at most 90 characters of JSON
}

// keptTextLimit is the most of a reply's text, in bytes, that goes back into
// the conversation: a flood in one reply must not become the next prompt.
const keptTextLimit = 64 << 10

// keptCallsLimit is the most of a reply's calls that go back.
const keptCallsLimit = 16

// agent is a conversation at the parcel desk: each round asks for one tool
// call that follows from the conversation so far.
type agent struct {
	w        *workload
	index    int
	world    *world
	messages []openai.Message
	round    int
	call     history.Call // the right call of the last turn
	result   string       // Tools Text: of the last call, heads the next user message
}

func newAgent(w *workload, i int, alone bool) Session {
	s := &agent{w: w, index: i}
	tag := history.Canary(w.key, i, alone)
	s.world = newWorld(w.rng(i, "world"), w.plan.ContextLines, tag)
	shared := textSystem
	if s.text() {
		shared = textSystemText
	}
	s.messages = []openai.Message{{Role: "system", Content: openai.Text(shared + tag + "\n" + s.world.facts())}}
	return s
}

func (s *agent) text() bool { return s.w.plan.Tools == Text }

// Next settles the reply to the last round and asks for the next call.
func (s *agent) Next(prev *openai.Reply) (Turn, bool) {
	if s.round > s.w.plan.Rounds || s.round > 0 && !s.settle(prev) {
		s.round = s.w.plan.Rounds + 1 // over for good
		return Turn{}, false
	}
	if s.round == s.w.plan.Rounds {
		s.round++
		return Turn{}, false
	}
	ask, call, distance := s.ask()
	s.call = call
	s.round++
	if s.result != "" {
		ask = textResult + s.result + "\n" + ask
	}
	s.messages = append(s.messages, openai.Message{Role: "user", Content: openai.Text(ask)})
	turn := s.w.turn(s.messages, history.Expect{
		Canary: s.world.tag, Call: &history.Call{Name: call.Name, Arguments: maps.Clone(call.Arguments)},
		TextCall: s.text(), Distance: distance,
	})
	if !s.text() {
		turn.Request.Tools = toolList
	}
	return turn, true
}

// settle puts the last round's reply, or the right one in its place, into the
// conversation and lets it take effect. It says whether the session goes on.
func (s *agent) settle(prev *openai.Reply) bool {
	failed := prev == nil || prev.Err != nil
	wrong := failed || !s.right(prev)
	switch {
	case !wrong:
		s.keep(prev)
	case s.w.plan.OnError == Stop:
		return false
	case failed || s.w.plan.OnError == Repair:
		s.keep(rightCall(s.call, s.text(), len(s.messages)))
	default:
		s.keep(prev)
	}
	return true
}

// right says whether a reply is the one call that was asked for.
func (s *agent) right(reply *openai.Reply) bool {
	var call history.Call
	var err error
	switch {
	case s.text():
		call, err = textCall(reply.Content)
	case len(reply.ToolCalls) != 1:
		return false
	default:
		f := reply.ToolCalls[0].Function
		call, err = decodeArguments(f.Name, f.Arguments)
	}
	return err == nil && call.Name == s.call.Name && maps.Equal(call.Arguments, s.call.Arguments)
}

// keep appends a reply to the conversation and executes its calls.
func (s *agent) keep(reply *openai.Reply) {
	turn := s.round - 1
	message := openai.Message{Role: "assistant", Content: kept(reply.Content)}
	if s.text() {
		s.messages = append(s.messages, message)
		call, err := textCall(reply.Content)
		if err != nil {
			s.result = failure(errNoCall)
			return
		}
		s.result = s.world.do(call, turn)
		return
	}
	message.Reasoning = string(kept(reply.Reasoning))
	calls := slices.Clone(reply.ToolCalls)
	calls = calls[:min(len(calls), keptCallsLimit)]
	var results []openai.Message
	for i := range calls {
		c := &calls[i]
		c.Type = "function"
		if c.ID == "" {
			c.ID = fmt.Sprintf("call_%d_%d", turn, i)
		}
		if !isObject(c.Function.Arguments) {
			// Servers refuse a conversation that holds arguments which
			// aren't a JSON object.
			c.Function.Arguments = "{}"
		}
		result := failure(errArguments)
		if call, err := decodeArguments(c.Function.Name, c.Function.Arguments); err == nil {
			result = s.world.do(call, turn)
		}
		c.Function.Name = string(kept(c.Function.Name))
		results = append(results, openai.Message{Role: "tool", ToolCallID: c.ID, Content: openai.Text(result)})
	}
	message.ToolCalls = calls
	s.messages = append(append(s.messages, message), results...)
}

func isObject(text string) bool {
	var object map[string]json.RawMessage
	return len(text) <= keptTextLimit && json.Unmarshal([]byte(text), &object) == nil && object != nil
}

func kept(text string) openai.Text {
	if len(text) > keptTextLimit {
		text = text[:keptTextLimit]
	}
	return openai.Text(strings.ToValidUTF8(text, "\uFFFD"))
}

// textCall reads a call from a reply's text: the first JSON object in it. What
// stands around it, a Markdown fence or prose, is the model's manner.
func textCall(text string) (history.Call, error) {
	start := strings.IndexByte(text, '{')
	if start < 0 {
		return history.Call{}, errors.New("no JSON object")
	}
	var call struct {
		Name      string          `json:"name"`
		Arguments json.RawMessage `json:"arguments"`
	}
	if err := json.NewDecoder(strings.NewReader(text[start:])).Decode(&call); err != nil {
		return history.Call{}, err
	}
	if call.Name == "" {
		return history.Call{}, errors.New("no name")
	}
	return decodeArguments(call.Name, string(call.Arguments))
}

// ask draws the next round's request: its text, the only right call, and how
// many rounds ago the value to be copied was told. The system prompt was told
// one round before the first. Only what the world's state supports is drawn,
// so whatever happened before, exactly one call is right.
func (s *agent) ask() (text string, call history.Call, distance int) {
	r := s.w.rng(s.index, fmt.Sprintf("round %d", s.round))
	all := s.world.parcels
	which := func(ok func(*parcel) bool) (list []*parcel) {
		for i := range all {
			if ok(&all[i]) {
				list = append(list, &all[i])
			}
		}
		return list
	}
	// A fresh parcel is one that no request has named, while there is one.
	fresh := func(list []*parcel) []*parcel {
		unnamed := slices.DeleteFunc(slices.Clone(list), func(p *parcel) bool { return p.named })
		if len(unnamed) > 0 {
			return unnamed
		}
		return list
	}
	unshipped := which(func(p *parcel) bool { return p.shippedAt < 0 })
	unmoved := which(func(p *parcel) bool { return p.movedAt < 0 })
	moved := which(func(p *parcel) bool { return p.movedAt >= 0 && !p.followed })
	shipped := which(func(p *parcel) bool { return p.shippedAt >= 0 && !p.confirmed })
	everything := which(func(*parcel) bool { return true })

	// What was told longer ago is likelier to be asked for: it is the harder
	// test, and most sessions are short.
	var can []string
	if len(unshipped) > 0 {
		can = append(can, "ship")
	}
	if len(unmoved) > 0 {
		can = append(can, "move")
	}
	if s.round > 0 {
		can = append(can, "sign")
	}
	if len(moved) > 0 {
		first := slices.MinFunc(moved, func(p, q *parcel) int { return p.movedAt - q.movedAt })
		can = append(can, slices.Repeat([]string{"follow"}, s.round-first.movedAt)...)
		moved = []*parcel{first}
	}
	if len(shipped) > 0 {
		first := slices.MinFunc(shipped, func(p, q *parcel) int { return p.shippedAt - q.shippedAt })
		can = append(can, slices.Repeat([]string{"confirm"}, s.round-first.shippedAt)...)
		shipped = []*parcel{first}
	}
	ask := pick(r, can)
	phrase := pick(r, textAsks[ask])
	since := s.round + 1
	switch ask {
	case "ship":
		p := pick(r, fresh(unshipped))
		p.named = true
		return fmt.Sprintf(phrase, p.name), history.Call{Name: "ship", Arguments: map[string]string{
			"parcel": p.name, "carrier": p.carrier, "code": p.code,
		}}, since
	case "move", "follow":
		to := unmoved
		if ask == "follow" {
			to = moved
		}
		q := pick(r, fresh(to))
		// To go where it already stands would be a strange thing to ask.
		others := which(func(p *parcel) bool { return p != q && p.dock != q.dock })
		if len(others) == 0 {
			others = which(func(p *parcel) bool { return p != q })
		}
		p := pick(r, fresh(others))
		p.named, q.named = true, true
		if ask == "follow" {
			p.followed, q.followed = true, true
			since = s.round - q.movedAt
		}
		return fmt.Sprintf(phrase, p.name, q.name), history.Call{Name: "move", Arguments: map[string]string{
			"parcel": p.name, "dock": q.dock,
		}}, since
	case "confirm":
		p := shipped[0]
		return fmt.Sprintf(phrase, p.name), history.Call{Name: "confirm", Arguments: map[string]string{
			"receipt": p.receipt,
		}}, s.round - p.shippedAt
	default: // sign
		p := pick(r, fresh(everything))
		p.named = true
		return fmt.Sprintf(phrase, p.name), history.Call{Name: "sign", Arguments: map[string]string{
			"parcel": p.name, "tag": s.world.tag,
		}}, since
	}
}

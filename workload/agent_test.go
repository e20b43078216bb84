package workload

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/agext/levenshtein"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

func mustNew(t interface{ Fatal(...any) }, p Plan) Workload {
	w, err := New(p)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// play plays a session to its end; reply answers each turn.
func play(s Session, reply func(Turn) *openai.Reply) []Turn {
	var turns []Turn
	turn, ok := s.Next(nil)
	for ok {
		turns = append(turns, turn)
		turn, ok = s.Next(reply(turn))
	}
	return turns
}

// heard is what a model has been told at a turn: every message's text and
// every call in it.
func heard(turn Turn) string {
	var b strings.Builder
	for _, m := range turn.Request.Messages {
		b.WriteString(string(m.Content) + "\n")
		for _, c := range m.ToolCalls {
			b.WriteString(c.Function.Name + c.Function.Arguments + "\n")
		}
	}
	return b.String()
}

// solve works the right call out from the request's text alone, as a model
// has to, and knows nothing of the world.
func solve(t interface{ Fatalf(string, ...any) }, turn Turn) history.Call {
	messages := turn.Request.Messages
	system := string(messages[0].Content)
	ask := string(messages[len(messages)-1].Content)
	ask = ask[strings.LastIndex(ask, "\n")+1:]
	var named []string
	for _, m := range regexp.MustCompile(`[Pp]arcel (\S+?)[ .:]`).FindAllStringSubmatch(ask+" ", -1) {
		named = append(named, strings.TrimRight(m[1], "."))
	}
	fact := func(name string) []string {
		m := regexp.MustCompile(`(?m)^parcel `+name+`: carrier (\S+), code (\S+), dock (\S+)$`).FindAllStringSubmatch(system, -1)
		if len(m) != 1 {
			t.Fatalf("%d fact lines for %q in\n%s", len(m), name, system)
		}
		return m[0]
	}
	// told is a value of the last result about a parcel.
	told := func(name, key string) string {
		m := regexp.MustCompile(`"ok":true,"parcel":"`+name+`","`+key+`":"([^"]+)"`).FindAllStringSubmatch(heard(turn), -1)
		if len(m) == 0 {
			t.Fatalf("no %s told for %s in\n%s", key, name, heard(turn))
		}
		return m[len(m)-1][1]
	}
	call := func(name string, pairs ...string) history.Call {
		c := history.Call{Name: name, Arguments: map[string]string{}}
		for i := 0; i < len(pairs); i += 2 {
			c.Arguments[pairs[i]] = pairs[i+1]
		}
		return c
	}
	lower := strings.ToLower(ask)
	switch {
	case strings.Contains(lower, "ship"):
		f := fact(named[0])
		return call("ship", "parcel", named[0], "carrier", f[1], "code", f[2])
	case strings.Contains(lower, "stands now"):
		return call("move", "parcel", named[0], "dock", told(named[1], "dock"))
	case strings.Contains(lower, "move"):
		if strings.Contains(heard(turn), `"ok":true,"parcel":"`+named[1]+`","dock"`) {
			t.Fatalf("%s was moved, so its dock is ambiguous: %s", named[1], ask)
		}
		return call("move", "parcel", named[0], "dock", fact(named[1])[3])
	case strings.Contains(lower, "confirm"):
		return call("confirm", "receipt", told(named[0], "receipt"))
	default:
		return call("sign", "parcel", named[0], "tag", regexp.MustCompile(`Your tag is (\S+)`).FindStringSubmatch(system)[1])
	}
}

// wreck makes a wrong reply.
func wreck(t *rapid.T, turn Turn, w Workload) *openai.Reply {
	right, wrong := RightReply(turn), alter(t, turn, w)
	if cmp.Equal(right, wrong) { // by chance
		return nil
	}
	return wrong
}

// alter makes another reply out of the right one.
func alter(t *rapid.T, turn Turn, w Workload) *openai.Reply {
	right := RightReply(turn)
	call := *turn.Expect.Call
	call.Arguments = maps.Clone(call.Arguments)
	other := w.Session(1, false).(*agent).world.parcels[0]
	replace := func(key, value string) {
		if _, ok := call.Arguments[key]; ok {
			call.Arguments[key] = value
		}
	}
	set := func(name, args string) *openai.Reply {
		if turn.Expect.TextCall {
			right.Content = fmt.Sprintf(textCallForm, name, args)
		} else {
			right.ToolCalls[0].Function = openai.FunctionCall{Name: name, Arguments: args}
		}
		return right
	}
	mine := parcelsOf(turn)
	switch rapid.IntRange(0, 9).Draw(t, "wreck") {
	case 0:
		return nil
	case 1:
		return &openai.Reply{Err: &openai.APIError{Message: "out of memory"}}
	case 2: // salad
		return &openai.Reply{Content: "<invoke ship \" , carrier \" V V V \xff\xfe", FinishReason: "length"}
	case 3:
		return set(call.Name, `{"parcel": "`)
	case 4:
		return set("shop", arguments(call))
	case 5:
		return set(call.Name, `null`)
	case 6: // another parcel of this session, a call that can be executed
		to := mine[rapid.IntRange(0, len(mine)-1).Draw(t, "parcel")]
		return set("ship", fmt.Sprintf(`{"parcel":%q,"carrier":%q,"code":%q}`, to[1], to[2], to[3]))
	case 7:
		to := mine[rapid.IntRange(0, len(mine)-1).Draw(t, "parcel")]
		return set("move", fmt.Sprintf(`{"parcel":%q,"dock":"%d"}`, to[1], rapid.IntRange(9, 100).Draw(t, "dock")))
	case 8: // the right call twice, or behind another object
		right.ToolCalls = append(right.ToolCalls, right.ToolCalls...)
		right.Content = `{"ok":true}` + right.Content
		return right
	default:
		replace("parcel", other.name)
		replace("tag", history.Canary(w.(*workload).key, 7, false))
		replace("receipt", other.receipt)
		return set(call.Name, arguments(call))
	}
}

func parcelsOf(turn Turn) [][]string {
	return regexp.MustCompile(`(?m)^parcel (\S+): carrier (\S+), code (\S+), dock (\S+)$`).
		FindAllStringSubmatch(string(turn.Request.Messages[0].Content), -1)
}

// TestAgentCallFollowsFromText: whatever the replies were, in every mode, each
// request has one right call, and a reader of the text alone finds it.
func TestAgentCallFollowsFromText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		plan := Plan{
			Kind: "agent", Seed: rapid.Uint64().Draw(t, "seed"), Sessions: 2,
			Rounds:       rapid.IntRange(1, 12).Draw(t, "rounds"),
			ContextLines: rapid.SampledFrom([]int{2, 3, 5, 28, 100, 520}).Draw(t, "lines"),
			OnError:      rapid.SampledFrom([]string{Continue, Repair, Stop}).Draw(t, "on error"),
			Tools:        rapid.SampledFrom([]string{Native, Text}).Draw(t, "tools"),
		}
		w := mustNew(t, plan)
		wrong := rapid.IntRange(0, 3).Draw(t, "wrong in three")
		turns := play(w.Session(0, false), func(turn Turn) *openai.Reply {
			if rapid.IntRange(1, 3).Draw(t, "reply") <= wrong {
				return wreck(t, turn, w)
			}
			return RightReply(turn)
		})
		if plan.OnError != Stop && len(turns) != plan.Rounds {
			t.Fatalf("%d turns, want %d", len(turns), plan.Rounds)
		}
		if plan.OnError == Stop && wrong == 3 && len(turns) != 1 {
			t.Fatalf("%d turns after a wrong first reply", len(turns))
		}
		for i, turn := range turns {
			e := turn.Expect
			if got := solve(t, turn); got.Name != e.Call.Name || !maps.Equal(got.Arguments, e.Call.Arguments) {
				t.Fatalf("turn %d: the text says %v, expected is %v\n%s", i, got, e.Call, heard(turn))
			}
			for key, value := range e.Call.Arguments {
				if !strings.Contains(heard(turn), value) {
					t.Fatalf("turn %d: %s %q was never told", i, key, value)
				}
			}
			if e.Distance < 1 || e.Distance > i+1 || e.Canary == "" || e.TextCall != (plan.Tools == Text) {
				t.Fatalf("turn %d: %+v", i, e)
			}
			checkRoles(t, turn, plan)
			if _, err := json.Marshal(turn.Request); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// checkRoles: text style alternates strictly, as some templates demand; in
// native style each call has its result right behind it.
func checkRoles(t *rapid.T, turn Turn, plan Plan) {
	var roles []string
	for i, m := range turn.Request.Messages {
		roles = append(roles, m.Role)
		for k, c := range m.ToolCalls {
			answer := turn.Request.Messages[i+1+k]
			if answer.Role != "tool" || answer.ToolCallID != c.ID || c.ID == "" || c.Type != "function" {
				t.Fatalf("call %+v is followed by %+v", c, answer)
			}
			var object map[string]any
			if err := json.Unmarshal([]byte(c.Function.Arguments), &object); err != nil || object == nil {
				t.Fatalf("arguments %q went back: servers refuse them", c.Function.Arguments)
			}
		}
	}
	if roles[0] != "system" || roles[len(roles)-1] != "user" {
		t.Fatalf("roles %v", roles)
	}
	if plan.Tools == Native {
		for i, tool := range turn.Request.Tools {
			var schema struct {
				Required   []string
				Properties map[string]struct{ Type string }
			}
			err := json.Unmarshal(tool.Function.Parameters, &schema)
			if err != nil || tool.Function.Name != tools[i].name || !slices.Equal(schema.Required, tools[i].parameters) || len(schema.Properties) != len(tools[i].parameters) {
				t.Fatalf("tool %+v: %v", tool, err)
			}
		}
		if len(turn.Request.Tools) != len(tools) {
			t.Fatalf("%d tools", len(turn.Request.Tools))
		}
	}
	if plan.Tools == Text {
		for i, role := range roles[1:] {
			if want := []string{"user", "assistant"}[i%2]; role != want {
				t.Fatalf("roles %v", roles)
			}
		}
		if turn.Request.Tools != nil {
			t.Fatal("text style sends tools")
		}
	}
}

// TestAgentRepair: after a wrong reply the conversation is the same as if the
// reply had been right, and after a failed one even when wrong ones are kept.
func TestAgentRepair(t *testing.T) {
	salad := &openai.Reply{Content: "salad"}
	for _, test := range []struct {
		name, onError string
		reply         func(Turn) *openai.Reply
	}{
		{"salad", Repair, func(Turn) *openai.Reply { return salad }},
		{"nothing", Repair, func(Turn) *openai.Reply { return nil }},
		{"nothing, continue", Continue, func(Turn) *openai.Reply { return nil }},
		{"error in mid-stream, continue", Continue, func(Turn) *openai.Reply {
			return &openai.Reply{Content: "sal", Err: &openai.APIError{Message: "out of memory"}}
		}},
		{"the right call twice", Repair, func(turn Turn) *openai.Reply {
			r := RightReply(turn)
			r.ToolCalls = append(r.ToolCalls, r.ToolCalls...)
			return r
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			for _, tools := range []string{Native, Text} {
				w := mustNew(t, Plan{Kind: "agent", Tools: tools, OnError: test.onError})
				good, bad := play(w.Session(3, false), RightReply), play(w.Session(3, false), test.reply)
				if diff := cmp.Diff(marshal(t, good), marshal(t, bad)); diff != "" {
					t.Errorf("%s: a repaired conversation differs from a right one: %s", tools, diff)
				}
			}
		})
	}
}

// TestAgentContinue: a wrong reply stays, and what it did is told.
func TestAgentContinue(t *testing.T) {
	for tools, want := range map[string]string{
		Native: `{"ok":false,"error":"wrong arguments"}`,
		Text:   "Result: {\"ok\":false,\"error\":\"no call found\"}\n",
	} {
		w := mustNew(t, Plan{Kind: "agent", Tools: tools, OnError: Continue})
		turns := play(w.Session(0, false), func(Turn) *openai.Reply {
			return &openai.Reply{Content: "salad", ToolCalls: []openai.ToolCall{{Function: openai.FunctionCall{Name: "ship", Arguments: "V V V"}}}}
		})
		messages := turns[1].Request.Messages
		if messages[2].Content != "salad" || !strings.HasPrefix(string(messages[3].Content), want) {
			t.Errorf("%s: the conversation goes on with %+v", tools, messages[2:])
		}
		if tools == Native && (messages[3].ToolCallID == "" || messages[3].ToolCallID != messages[2].ToolCalls[0].ID) {
			t.Errorf("a call without an id came back as %+v with the result %+v", messages[2], messages[3])
		}
	}
}

// TestAgentKeepsOwnMessage: a right reply goes back byte for byte, with the
// server's ids.
func TestAgentKeepsOwnMessage(t *testing.T) {
	w := mustNew(t, Plan{Kind: "agent"})
	turns := play(w.Session(0, false), func(turn Turn) *openai.Reply {
		r := RightReply(turn)
		r.Content, r.Reasoning, r.ToolCalls[0].ID = "I'll do it.", "let me see", "chatcmpl-tool-77"
		r.ToolCalls[0].Function.Arguments = strings.ReplaceAll(r.ToolCalls[0].Function.Arguments, `":"`, `": "`)
		return r
	})
	m := turns[1].Request.Messages[2]
	if m.Content != "I'll do it." || m.Reasoning != "let me see" || m.ToolCalls[0].ID != "chatcmpl-tool-77" ||
		!strings.Contains(m.ToolCalls[0].Function.Arguments, `": "`) {
		t.Errorf("the message came back as %+v", m)
	}
	if m := turns[1].Request.Messages[3]; m.ToolCallID != "chatcmpl-tool-77" || !strings.Contains(string(m.Content), `"ok":true`) {
		t.Errorf("the result is %+v", m)
	}
}

// TestAgentFlood: a flood in one reply doesn't become the next prompt.
func TestAgentFlood(t *testing.T) {
	w := mustNew(t, Plan{Kind: "agent", OnError: Continue})
	flood := strings.Repeat("é!", 1<<18)
	args := `{"a":"` + flood + `"}`
	turns := play(w.Session(0, false), func(turn Turn) *openai.Reply {
		r := &openai.Reply{Content: flood, Reasoning: flood}
		for range 1000 {
			r.ToolCalls = append(r.ToolCalls, openai.ToolCall{Function: openai.FunctionCall{Name: flood, Arguments: args}})
		}
		return r
	})
	if n := len(heard(turns[1])); n > 4<<20 {
		t.Errorf("the next prompt is %d bytes", n)
	}
}

// TestAgentMix: every kind of request and every distance that 4 rounds allow
// comes, none of them rarely; the first round is answerable from the facts.
func TestAgentMix(t *testing.T) {
	const sessions = 400
	w := mustNew(t, Plan{Kind: "agent", Sessions: sessions})
	count := map[string]int{}
	for i := range sessions {
		for round, turn := range play(w.Session(i, false), RightReply) {
			ask := turn.Expect.Call.Name
			if strings.Contains(string(turn.Request.Messages[len(turn.Request.Messages)-1].Content), "stands now") {
				ask = "follow"
			}
			if round == 0 && ask != "ship" && ask != "move" {
				t.Fatalf("session %d begins with %s", i, ask)
			}
			count[ask]++
			if ask == "confirm" || ask == "follow" {
				count[fmt.Sprintf("%s from %d rounds back", ask, turn.Expect.Distance)]++
			}
		}
	}
	t.Log(count)
	for _, want := range []string{
		"ship", "move", "follow", "confirm", "sign",
		"confirm from 1 rounds back", "confirm from 2 rounds back", "confirm from 3 rounds back",
		"follow from 1 rounds back", "follow from 2 rounds back", "follow from 3 rounds back",
	} {
		if count[want] < sessions/40 {
			t.Errorf("%s came %d times in %d sessions", want, count[want], sessions)
		}
	}
}

// TestAgentSharedPrefix: two sessions share the system prompt's shared part
// and not a byte of what follows, whatever comes first in the tag.
func TestAgentSharedPrefix(t *testing.T) {
	for tools, shared := range map[string]string{Native: textSystem, Text: textSystemText} {
		w := mustNew(t, Plan{Kind: "agent", Tools: tools})
		var seen []string
		for i := range 8 {
			for _, alone := range []bool{false, true} {
				turn, _ := w.Session(i, alone).Next(nil)
				own, ok := strings.CutPrefix(string(turn.Request.Messages[0].Content), shared)
				if !ok || !strings.HasPrefix(own, turn.Expect.Canary+"\n") || slices.Contains(seen, turn.Expect.Canary) {
					t.Fatalf("%s: session %d alone %t begins %.300q, canary %s", tools, i, alone, turn.Request.Messages[0].Content, turn.Expect.Canary)
				}
				seen = append(seen, turn.Expect.Canary)
			}
		}
	}
	if n := len(strings.Fields(textSystem)); n > 40 {
		t.Errorf("the shared part has %d words", n)
	}
}

// TestAgentAlone: a control session is the same but for the canary.
func TestAgentAlone(t *testing.T) {
	w := mustNew(t, Plan{Kind: "agent", Rounds: 8})
	for i := range 8 {
		one, two := play(w.Session(i, false), RightReply), play(w.Session(i, true), RightReply)
		a, b := marshal(t, one), marshal(t, two)
		if a == b {
			t.Errorf("session %d alone has the same canary", i)
		}
		if strings.ReplaceAll(a, one[0].Expect.Canary, "TAG") != strings.ReplaceAll(b, two[0].Expect.Canary, "TAG") {
			t.Errorf("session %d alone differs by more than its canary", i)
		}
	}
}

var labToken = regexp.MustCompile(`[A-Za-z0-9]+|[^A-Za-z0-9 ]`)

// labTokens estimates the lab's tokens: a word of the lists, one character of
// anything else, a punctuation mark with its space; markup of 3 per message,
// 8 per call and 6 per parameter.
func labTokens(turn Turn, known map[string]bool) int {
	count := func(text string) (n int) {
		for _, run := range labToken.FindAllString(text, -1) {
			if known[run] {
				n++
			} else {
				n += len(run)
			}
		}
		return n
	}
	n := 0
	for _, m := range append(turn.Request.Messages, openai.Message{ToolCalls: RightReply(turn).ToolCalls}) {
		n += 3 + count(string(m.Content))
		for _, c := range m.ToolCalls {
			var args map[string]string
			json.Unmarshal([]byte(c.Function.Arguments), &args)
			n += 8
			for _, value := range args {
				n += 6 + count(value)
			}
		}
	}
	for _, tool := range turn.Request.Tools { // as name(parameter, ...)
		n += 4 + 2*len(parameters(tool.Function.Name))
	}
	return n
}

// TestAgentFitsLab: the lab's context is 1,024 tokens.
func TestAgentFitsLab(t *testing.T) {
	w := mustNew(t, Plan{Kind: "agent", Sessions: 200})
	known := map[string]bool{}
	for _, word := range slices.Concat(Words(), ParcelNames(), CarrierNames()) {
		known[word] = true
	}
	most := 0
	for i := range 200 {
		turns := play(w.Session(i, false), RightReply)
		most = max(most, labTokens(turns[len(turns)-1], known))
	}
	t.Logf("the longest of 200 conversations has %d tokens", most)
	if most >= 1000 {
		t.Errorf("%d tokens", most)
	}
}

// TestAgentVocabulary: the texts hold no word that Words and the lists of
// names don't have, but codes, docks and canaries. The lab's vocabulary
// depends on it.
func TestAgentVocabulary(t *testing.T) {
	known := slices.Concat(Words(), ParcelNames(), CarrierNames())
	slices.Sort(known)
	if n := len(slices.Compact(slices.Clone(known))); n != len(known) {
		t.Errorf("%d words are in two lists", len(known)-n)
	}
	run, dock := regexp.MustCompile(`[A-Za-z0-9]+`), regexp.MustCompile(`^\d\d$`)
	for _, plan := range []Plan{
		{Kind: "agent", Sessions: 50, Rounds: 8},
		{Kind: "agent", Sessions: 50, Rounds: 8, Tools: Text},
		{Kind: "agent", Sessions: 3, ContextLines: 600},
	} {
		w := mustNew(t, plan)
		for i := range plan.Sessions {
			turns := play(w.Session(i, false), RightReply)
			last := turns[len(turns)-1]
			text := heard(last)
			for _, tool := range last.Request.Tools {
				text += tool.Function.Name + " " + tool.Function.Description + string(tool.Function.Parameters)
			}
			for _, run := range run.FindAllString(text, -1) {
				_, found := slices.BinarySearch(known, run)
				if !found && !strings.ContainsAny(run, "23456789") && run != last.Expect.Canary && !dock.MatchString(run) {
					t.Fatalf("%q is in no list", run)
				}
				if found && strings.ContainsAny(run, "0123456789") {
					t.Fatalf("the word %q looks like a code", run)
				}
			}
		}
	}
}

func TestNames(t *testing.T) {
	if n, m := len(ParcelNames()), len(CarrierNames()); n != 512 || m != 64 {
		t.Errorf("%d parcel names and %d carriers", n, m)
	}
	all := slices.Concat(ParcelNames(), CarrierNames())
	for i, a := range all {
		for _, b := range all[:i] {
			if levenshtein.Distance(a, b, nil) < 2 {
				t.Errorf("%s and %s are too like each other", a, b)
			}
		}
		if !regexp.MustCompile(`^[a-z]{4,5}$|^[aeiou][a-z]{3,4}$`).MatchString(a) {
			t.Errorf("%q isn't a short lower-case word", a)
		}
	}
}

// TestWorld: what each call does and says, whether it is the right one or not.
func TestWorld(t *testing.T) {
	w := newWorld(newRand(1, "test", 0, "world"), 3, "abcdefgh2345")
	p, q := &w.parcels[0], &w.parcels[1]
	*p = parcel{name: "mara", carrier: "otto", code: "k7f2", dock: "31", receipt: "q8zd", movedAt: -1, shippedAt: -1}
	w.byName = map[string]*parcel{"mara": p, q.name: q}
	for _, step := range []struct{ name, args, want string }{
		{"shop", `{"parcel":"mara"}`, `{"ok":false,"error":"no such tool"}`},
		{"", `{}`, `{"ok":false,"error":"no such tool"}`},
		{"ship", `{"parcel":"mara","carrier":"otto"}`, `{"ok":false,"error":"wrong arguments"}`},
		{"ship", `{"parcel":"mara","carrier":"otto","dock":"31"}`, `{"ok":false,"error":"wrong arguments"}`},
		{"ship", `{"parcel":"mara","carrier":"otto","code":"k7f2","dock":"31"}`, `{"ok":false,"error":"wrong arguments"}`},
		{"ship", `{"parcel":"marra","carrier":"otto","code":"k7f2"}`, `{"ok":false,"error":"no such parcel"}`},
		{"ship", `{"parcel":"mara","carrier":"utto","code":"k7f2"}`, `{"ok":false,"error":"wrong carrier"}`},
		{"ship", `{"parcel":"mara","carrier":"otto","code":"k7f3"}`, `{"ok":false,"error":"wrong code"}`},
		{"confirm", `{"receipt":"q8zd"}`, `{"ok":false,"error":"no such receipt"}`},
		{"ship", `{"parcel":"mara","carrier":"otto","code":"k7f2"}`, `{"ok":true,"parcel":"mara","receipt":"q8zd"}`},
		{"ship", `{"parcel":"mara","carrier":"otto","code":"k7f2"}`, `{"ok":false,"error":"already shipped"}`},
		{"confirm", `{"receipt":"q8zd"}`, `{"ok":true}`},
		{"confirm", `{"receipt":"q8zd"}`, `{"ok":false,"error":"already confirmed"}`},
		{"move", `{"parcel":"mara","dock":"9"}`, `{"ok":false,"error":"no such dock"}`},
		{"move", `{"parcel":"mara","dock":"+9"}`, `{"ok":false,"error":"no such dock"}`},
		{"move", `{"parcel":"mara","dock":"A"}`, `{"ok":false,"error":"no such dock"}`},
		{"move", `{"parcel":"mara","dock":"77"}`, `{"ok":true,"parcel":"mara","dock":"77"}`},
		{"sign", `{"parcel":"mara","tag":"abcdefgh2346"}`, `{"ok":false,"error":"wrong tag"}`},
		{"sign", `{"parcel":"mara","tag":"abcdefgh2345"}`, `{"ok":true}`},
	} {
		call, err := decodeArguments(step.name, step.args)
		if err != nil {
			t.Fatal(err)
		}
		if got := w.do(call, 5); got != step.want {
			t.Errorf("%s%s says %s, want %s", step.name, step.args, got, step.want)
		}
	}
	if p.shippedAt != 5 || p.movedAt != 5 || p.dock != "77" {
		t.Errorf("the parcel is %+v", *p)
	}
}

// TestWorldIsUnambiguous: in a big world no two names, codes or receipts are
// the same, and no name begins another.
func TestWorldIsUnambiguous(t *testing.T) {
	for _, lines := range []int{512, 5000} {
		w := newWorld(newRand(1, "test", 0, "world"), lines, "")
		seen := map[string]bool{}
		for _, p := range w.parcels {
			for _, value := range []string{p.name, p.code, p.receipt} {
				if seen[value] {
					t.Fatalf("%d lines: %s comes twice", lines, value)
				}
				seen[value] = true
			}
			if strings.Contains(p.name, "-") != (lines > 512) {
				t.Fatalf("%d lines: the name %s", lines, p.name)
			}
		}
	}
}

func TestTextCall(t *testing.T) {
	for _, test := range []struct{ text, want string }{
		{`{"name":"sign","arguments":{"parcel":"mara","tag":"x"}}`, ""},
		{" {\"name\": \"sign\", \"arguments\": {}}\n", ""},
		{"```json\n{\"name\":\"sign\",\"arguments\":{}}\n```", ""},
		{`Sure: {"name":"sign","arguments":{}} and {"name":"ship"}`, ""},
		{`{"name":"sign","arguments":{"parcel":7}}`, "number"},
		{`{"name":"sign","arguments":{"parcel":null}}`, "null"},
		{`{"name":"sign","arguments":null}`, "null"},
		{`{"name":"sign"}`, "unexpected end"},
		{`{"name":"sign","arguments":{"parcel":"ma`, "unexpected EOF"},
		{`{"arguments":{}}`, "no name"},
		{`{sign}`, "invalid character"},
		{"I sign for parcel mara.", "no JSON object"},
		{"", "no JSON object"},
	} {
		call, err := textCall(test.text)
		if (err == nil) != (test.want == "") || err != nil && !strings.Contains(err.Error(), test.want) {
			t.Errorf("%q: error %v, want %q", test.text, err, test.want)
		}
		if err == nil && call.Name != "sign" {
			t.Errorf("%q is read as %+v", test.text, call)
		}
	}
}

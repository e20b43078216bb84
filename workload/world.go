package workload

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// tools are what an agent can do at the parcel desk. Every argument is a
// string and required. Parameters stand in the order in which a right call
// gives them.
var tools = []struct {
	name, description string
	parameters        []string
}{
	{"ship", "Ship a parcel.", []string{"parcel", "carrier", "code"}},
	{"move", "Move a parcel to a dock.", []string{"parcel", "dock"}},
	{"confirm", "Confirm a receipt.", []string{"receipt"}},
	{"sign", "Sign for a parcel.", []string{"parcel", "tag"}},
}

// toolList is tools as a request carries them. It is shared by all requests
// and never written.
var toolList = func() []openai.Tool {
	var list []openai.Tool
	for _, tool := range tools {
		var properties, required []string
		for _, p := range tool.parameters {
			properties = append(properties, fmt.Sprintf(`%q:{"type":"string"}`, p))
			required = append(required, strconv.Quote(p))
		}
		list = append(list, openai.Tool{Type: "function", Function: openai.Function{
			Name: tool.name, Description: tool.description,
			Parameters: fmt.Appendf(nil, `{"type":"object","properties":{%s},"required":[%s],"additionalProperties":false}`,
				strings.Join(properties, ","), strings.Join(required, ",")),
		}})
	}
	return list
}()

// parameters returns a tool's parameters, nil when there is no such tool.
func parameters(tool string) []string {
	for _, t := range tools {
		if t.name == tool {
			return t.parameters
		}
	}
	return nil
}

// arguments writes a call's arguments as a JSON object, in the tool's order.
// The values are ours: they need no escapes.
func arguments(call history.Call) string {
	var fields []string
	for _, p := range parameters(call.Name) {
		fields = append(fields, fmt.Sprintf(`%q:%q`, p, call.Arguments[p]))
	}
	return "{" + strings.Join(fields, ",") + "}"
}

// parcel is one parcel of a world. Turn -1 means not yet.
type parcel struct {
	name, carrier, code string
	dock                string // where it stands now
	receipt             string // what shipping it returns
	movedAt, shippedAt  int
	confirmed           bool
	named               bool // a request has named it
	followed            bool // it is an end of a "follow"; a chain of them would ask for one dock again and again
}

// world is the state that one session's tools change.
type world struct {
	tag     string
	parcels []parcel
	byName  map[string]*parcel
}

// newWorld draws a world. Codes and receipts are unique, and so are carriers
// and docks as far as they go.
func newWorld(r *rand.Rand, lines int, tag string) *world {
	w := &world{tag: tag, parcels: make([]parcel, lines), byName: map[string]*parcel{}}
	carriers := slices.Clone(carrierNames)
	r.Shuffle(len(carriers), func(i, j int) { carriers[i], carriers[j] = carriers[j], carriers[i] })
	docks := r.Perm(90)
	names := drawNames(r, lines)
	seen := map[string]bool{}
	for i := range w.parcels {
		w.parcels[i] = parcel{
			name: names[i], carrier: carriers[i%len(carriers)], code: drawCode(r, 4+r.IntN(2), seen),
			dock: strconv.Itoa(10 + docks[i%len(docks)]), receipt: drawCode(r, 4, seen),
			movedAt: -1, shippedAt: -1,
		}
		w.byName[names[i]] = &w.parcels[i]
	}
	return w
}

// drawNames draws distinct names: single words while there are enough, else
// two words with a hyphen throughout, so that no name begins another.
func drawNames(r *rand.Rand, n int) []string {
	names := make([]string, n)
	if n <= len(parcelNames) {
		for i, at := range r.Perm(len(parcelNames))[:n] {
			names[i] = parcelNames[at]
		}
		return names
	}
	seen := map[string]bool{}
	for i := range names {
		for names[i] == "" || seen[names[i]] {
			names[i] = pick(r, parcelNames) + "-" + pick(r, parcelNames)
		}
		seen[names[i]] = true
	}
	return names
}

// codeAlphabet has no i, l, o, 0 or 1: nobody has to ask which it is.
const codeAlphabet = "abcdefghjkmnpqrstuvwxyz23456789"

// drawCode draws a code that isn't in seen and puts it there. It has a letter
// and a digit, so it is neither a word nor a number.
func drawCode(r *rand.Rand, length int, seen map[string]bool) string {
	for {
		b := make([]byte, length)
		for i := range b {
			b[i] = codeAlphabet[r.IntN(len(codeAlphabet))]
		}
		code := string(b)
		if !seen[code] && strings.ContainsAny(code, "23456789") && strings.Trim(code, "23456789") != "" {
			seen[code] = true
			return code
		}
	}
}

// facts returns the world's fact lines.
func (w *world) facts() string {
	lines := make([]string, len(w.parcels))
	for i, p := range w.parcels {
		lines[i] = fmt.Sprintf(textFact, p.name, p.carrier, p.code, p.dock)
	}
	return strings.Join(lines, "\n")
}

// do executes a call at a turn and returns the tool's result. A call that
// can't be executed changes nothing. Of the call only values that the world
// knows get into the result.
func (w *world) do(call history.Call, turn int) string {
	want := parameters(call.Name)
	if want == nil {
		return failure(errTool)
	}
	if len(call.Arguments) != len(want) {
		return failure(errArguments)
	}
	for _, p := range want {
		if _, ok := call.Arguments[p]; !ok {
			return failure(errArguments)
		}
	}
	if call.Name == "confirm" {
		return w.confirm(call.Arguments["receipt"])
	}
	p := w.byName[call.Arguments["parcel"]]
	if p == nil {
		return failure(errParcel)
	}
	switch call.Name {
	case "ship":
		switch {
		case call.Arguments["carrier"] != p.carrier:
			return failure(errCarrier)
		case call.Arguments["code"] != p.code:
			return failure(errCode)
		case p.shippedAt >= 0:
			return failure(errShipped)
		}
		p.shippedAt = turn
		return fmt.Sprintf(textShipped, p.name, p.receipt)
	case "move":
		dock := call.Arguments["dock"]
		if n, err := strconv.Atoi(dock); err != nil || n < 10 || n > 99 || len(dock) != 2 {
			return failure(errDock)
		}
		p.dock, p.movedAt = dock, turn
		return fmt.Sprintf(textMoved, p.name, p.dock)
	default: // sign
		if call.Arguments["tag"] != w.tag {
			return failure(errTag)
		}
		return textDone
	}
}

func (w *world) confirm(receipt string) string {
	for i := range w.parcels {
		p := &w.parcels[i]
		if p.shippedAt >= 0 && p.receipt == receipt {
			if p.confirmed {
				return failure(errConfirmed)
			}
			p.confirmed = true
			return textDone
		}
	}
	return failure(errReceipt)
}

func failure(why string) string { return fmt.Sprintf(textFailed, why) }

// decodeArguments reads a call's arguments. They must be one JSON object whose
// values are strings.
func decodeArguments(name, text string) (history.Call, error) {
	call := history.Call{Name: name}
	var values map[string]*string
	if err := json.Unmarshal([]byte(text), &values); err != nil {
		return call, err
	}
	call.Arguments = make(map[string]string, len(values))
	for key, value := range values {
		if value == nil {
			return call, fmt.Errorf("argument %q is null", key)
		}
		call.Arguments[key] = *value
	}
	if values == nil {
		return call, fmt.Errorf("arguments are null")
	}
	return call, nil
}

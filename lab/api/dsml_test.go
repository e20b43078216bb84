package api

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/lab/model"
	"github.com/culprit-project/culprit/openai"
)

// parsed is what a client puts together from deltas.
type parsed struct {
	Content string
	Calls   []openai.FunctionCall
}

// assemble follows the protocol's rules: a call begins with its name, calls
// come in order, and arguments belong to a call that has begun.
func assemble(t interface{ Fatalf(string, ...any) }, deltas []Delta) parsed {
	var p parsed
	for _, d := range deltas {
		switch {
		case d.Content != "" && d.Name == "" && d.Arguments == "":
			p.Content += d.Content
		case d.Name != "" && d.Call == len(p.Calls) && d.Arguments == "":
			p.Calls = append(p.Calls, openai.FunctionCall{Name: d.Name})
		case d.Arguments != "" && d.Call == len(p.Calls)-1:
			p.Calls[d.Call].Arguments += d.Arguments
		default:
			t.Fatalf("a delta out of order: %+v", d)
		}
	}
	return p
}

func parse(t interface{ Fatalf(string, ...any) }, pieces ...string) parsed {
	var p Parser
	var deltas []Delta
	for _, piece := range pieces {
		deltas = append(deltas, p.Write(piece)...)
	}
	return assemble(t, append(deltas, p.Close()...))
}

// dsml writes markup with a plain bar, for people.
func dsml(s string) string { return strings.ReplaceAll(s, "|", "｜") }

func TestParser(t *testing.T) {
	const (
		one     = "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"true\">1</|DSML|parameter>\n</|DSML|invoke>\n"
		open    = "<|DSML|tool_calls>\n"
		closing = "</|DSML|tool_calls>"
	)
	call := openai.FunctionCall{Name: "a", Arguments: `{"x":"1"}`}
	tests := []struct {
		name   string
		text   string
		want   parsed
		strict bool // the strict parser says the same
	}{
		{"text", "hello", parsed{Content: "hello"}, true},
		{"nothing", "", parsed{}, true},
		{"a call", open + one + closing, parsed{Calls: []openai.FunctionCall{call}}, true},
		{"two calls after text", "so\n\n" + open + one + one + closing, parsed{"so", []openai.FunctionCall{call, call}}, true},
		{"no parameters", open + "<|DSML|invoke name=\"a\">\n</|DSML|invoke>\n" + closing, parsed{Calls: []openai.FunctionCall{{Name: "a", Arguments: "{}"}}}, true},
		{"JSON values", open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"n\" string=\"false\">[1, {}]</|DSML|parameter>\n<|DSML|parameter name=\"s\" string=\"true\">\"q\"\n</|DSML|parameter>\n</|DSML|invoke>\n" + closing, parsed{Calls: []openai.FunctionCall{{Name: "a", Arguments: `{"n":[1, {}],"s":"\"q\"\n"}`}}}, true},
		{"arguments as an object", open + "<|DSML|invoke name=\"a\">\n{\"x\": 1}</|DSML|invoke>\n" + closing, parsed{Calls: []openai.FunctionCall{{Name: "a", Arguments: `{"x": 1}`}}}, true},

		{"white space", open + "\n  <|DSML|invoke name=\"a\"> <|DSML|parameter name=\"x\" string=\"true\">1</|DSML|parameter></|DSML|invoke>" + closing, parsed{Calls: []openai.FunctionCall{call}}, false},
		{"no line feeds before", "so" + open + one + closing, parsed{"so", []openai.FunctionCall{call}}, false},
		{"three line feeds before", "so\n\n\n" + open + one + closing, parsed{"so\n", []openai.FunctionCall{call}}, true},
		{"a short call", open + "<|DSML|invoke name=\"a\"/>\n" + closing, parsed{Calls: []openai.FunctionCall{{Name: "a", Arguments: "{}"}}}, false},
		{"a value that should be JSON", open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"false\">1k</|DSML|parameter>\n</|DSML|invoke>\n" + closing, parsed{Calls: []openai.FunctionCall{{Name: "a", Arguments: `{"x":"1k"}`}}}, false},
		{"no end of the wrapper", open + one, parsed{Calls: []openai.FunctionCall{call}}, false},
		{"text after", open + one + closing + " so", parsed{" so", []openai.FunctionCall{call}}, false},
		{"two wrappers", open + one + closing + "\n\n" + open + one + closing, parsed{"", []openai.FunctionCall{call, call}}, false},
		{"a name twice", open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"true\">1</|DSML|parameter>\n<|DSML|parameter name=\"x\" string=\"true\">2</|DSML|parameter>\n</|DSML|invoke>\n" + closing, parsed{Calls: []openai.FunctionCall{{Name: "a", Arguments: `{"x":"1","x":"2"}`}}}, false},

		{"cut in the wrapper", "so\n\n<|DSML|tool", parsed{Content: "so\n\n<|DSML|tool"}, false},
		{"cut in the name", "so\n\n" + open + "<|DSML|invoke name=\"a", parsed{Content: "so\n\n" + open + "<|DSML|invoke name=\"a"}, false},
		{"cut in a value", open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"true\">1", parsed{Content: open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"true\">1"}, false},
		{"cut in the second call", open + one + "<|DSML|invoke name=\"b\">\n", parsed{"\n<|DSML|invoke name=\"b\">\n", []openai.FunctionCall{call}}, false},
		{"cut in the closing tag", open + one + "</|DSML|tool_", parsed{"\n</|DSML|tool_", []openai.FunctionCall{call}}, false},
		{"an empty wrapper", open + closing, parsed{Content: open + closing}, false},
		{"no wrapper", one, parsed{Content: one}, false},
		{"another wrapper", "<|DSML|function_calls>\n" + one, parsed{Content: "<|DSML|function_calls>\n" + one}, false},
		{
			"a parameter within a value", open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"true\">1<|DSML|parameter name=\"y\" string=\"true\">2</|DSML|parameter>\n</|DSML|invoke>\n" + closing,
			parsed{Content: open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"true\">1<|DSML|parameter name=\"y\" string=\"true\">2</|DSML|parameter>\n</|DSML|invoke>\n" + closing},
			false,
		},
		{"no object", open + "<|DSML|invoke name=\"a\">\n{x}</|DSML|invoke>\n", parsed{Content: open + "<|DSML|invoke name=\"a\">\n{x}</|DSML|invoke>\n"}, false},
		{"neither true nor false", open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"yes\">1</|DSML|parameter>\n</|DSML|invoke>\n", parsed{Content: open + "<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"yes\">1</|DSML|parameter>\n</|DSML|invoke>\n"}, false},
		{"a name without end", open + "<|DSML|invoke name=\"" + strings.Repeat("n", 300), parsed{Content: open + "<|DSML|invoke name=\"" + strings.Repeat("n", 300)}, false},
		{"a call after rubbish", open + "rubbish\n\n" + open + one + closing, parsed{open + "rubbish", []openai.FunctionCall{call}}, false},
		{"the incident", "<invoke ship \" , carrier \" V V V", parsed{Content: "<invoke ship \" , carrier \" V V V"}, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			text := dsml(tt.text)
			want := parsed{Content: dsml(tt.want.Content), Calls: tt.want.Calls}
			if diff := cmp.Diff(want, parse(t, text)); diff != "" {
				t.Error(diff)
			}
			if diff := cmp.Diff(want, parse(t, strings.Split(text, "")...)); diff != "" {
				t.Errorf("rune by rune: %s", diff)
			}
			content, calls, err := ParseStrict(text)
			if (err == nil) != tt.strict {
				t.Fatalf("strict: %v", err)
			}
			if diff := cmp.Diff(want, parsed{content, calls}); tt.strict && diff != "" {
				t.Errorf("strict: %s", diff)
			}
		})
	}
}

// TestParserStreams: content comes as soon as it can't be markup, a call when
// it is whole.
func TestParserStreams(t *testing.T) {
	var p Parser
	for _, step := range []struct {
		text string
		want []Delta
	}{
		{"he", []Delta{{Content: "he"}}},
		{"llo\n", []Delta{{Content: "llo"}}},
		{"a<", []Delta{{Content: "\na"}}},
		{"b\n\n<｜DSML｜tool_calls>", []Delta{{Content: "<b"}}},
		{"\n<｜DSML｜invoke name=\"f\">\n", nil},
		{"<｜DSML｜parameter name=\"x\" string=\"true\">1</｜DSML｜parameter>\n<｜DSML｜parameter name=\"y\" string=\"false\">2</｜DSML｜parameter>\n", nil},
		{"</｜DSML｜invoke>", []Delta{{Name: "f"}, {Arguments: `{"x":"1"`}, {Arguments: `,"y":2`}, {Arguments: "}"}}},
		{"\n</｜DSML｜tool_calls>!", []Delta{{Content: "!"}}},
	} {
		if diff := cmp.Diff(step.want, p.Write(step.text)); diff != "" {
			t.Fatalf("%q: %s", step.text, diff)
		}
	}
}

// TestParserReadsTheTemplate: both parsers give back what the chat template
// writes.
func TestParserReadsTheTemplate(t *testing.T) {
	name := rapid.StringMatching(`[a-z_]{1,12}`)
	// A value that holds markup can't be told from markup.
	text := rapid.String().Filter(func(s string) bool {
		return !strings.Contains(s, mark) && !strings.Contains(s, "<｜") && !strings.Contains(s, "</｜")
	})
	rapid.Check(t, func(t *rapid.T) {
		m := openai.Message{Role: "assistant", Content: openai.Text(text.Draw(t, "content"))}
		want := parsed{Content: string(m.Content)}
		for range rapid.IntRange(0, 3).Draw(t, "calls") {
			arguments := map[string]any{}
			for range rapid.IntRange(0, 3).Draw(t, "arguments") {
				var value any = text.Draw(t, "value")
				if rapid.Bool().Draw(t, "JSON") {
					value = []any{float64(rapid.IntRange(0, 9).Draw(t, "number")), true, nil, map[string]any{"k": name.Draw(t, "inner")}}
				}
				arguments[name.Draw(t, "key")] = value
			}
			call := openai.FunctionCall{Name: name.Draw(t, "name"), Arguments: string(marshal(arguments))}
			want.Calls = append(want.Calls, call)
			m.ToolCalls = append(m.ToolCalls, openai.ToolCall{Function: call})
		}
		written := model.AssistantText(&m)
		if diff := cmp.Diff(want, parse(t, written)); diff != "" {
			t.Fatal(diff)
		}
		content, calls, err := ParseStrict(written)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, parsed{content, calls}); diff != "" {
			t.Fatalf("strict: %s", diff)
		}
	})
}

// checkParser: however a text is cut, the parser says the same; arguments are
// JSON objects; without a call, the text is all there; and what the strict
// parser reads, the lenient one reads alike.
func checkParser(t interface{ Fatalf(string, ...any) }, text string, pieces []string) (calls int) {
	want := parse(t, text)
	if diff := cmp.Diff(want, parse(t, pieces...)); diff != "" {
		t.Fatalf("cut otherwise: %s", diff)
	}
	for _, c := range want.Calls {
		var object map[string]json.RawMessage
		if err := json.Unmarshal([]byte(c.Arguments), &object); err != nil || object == nil {
			t.Fatalf("arguments %q: %v", c.Arguments, err)
		}
	}
	if len(want.Calls) == 0 && want.Content != text {
		t.Fatalf("%q became %q", text, want.Content)
	}
	content, strict, err := ParseStrict(text)
	if diff := cmp.Diff(want, parsed{content, strict}); err == nil && diff != "" {
		t.Fatalf("strict: %s", diff)
	}
	return len(want.Calls)
}

func FuzzParser(f *testing.F) {
	f.Add(dsml("so\n\n<|DSML|tool_calls>\n<|DSML|invoke name=\"a\">\n<|DSML|parameter name=\"x\" string=\"false\">1</|DSML|parameter>\n</|DSML|invoke>\n</|DSML|tool_calls>"), uint8(3))
	f.Add(dsml("<|DSML|tool_calls>\n<|DSML|invoke name=\"a\">\n{\"x\": 1}</|DSML|invoke>\n<|DSML|invoke name=\"b\"/></|DSML|tool_calls>\n\n<|DSML|tool_calls>"), uint8(1))
	f.Fuzz(func(t *testing.T, text string, size uint8) {
		var pieces []string
		for rest := text; rest != ""; {
			n := min(len(rest), int(size)%16+1)
			pieces, rest = append(pieces, rest[:n]), rest[n:]
		}
		checkParser(t, text, pieces)
	})
}

// TestParserMarkup draws texts that are nearly calls.
func TestParserMarkup(t *testing.T) {
	fragments := []string{
		openCalls, closeCalls, openInvoke, closeInvoke, openParameter, closeParameter, separator, "\n", " ", "a", "7", `"`, `">`, ">", "/>",
		`" string="`, `true">`, `false">`, "{", "}", `{"k":1}`, "<", "</", "<｜", mark,
		openCalls + "\n" + openInvoke + `a">`, openInvoke + `a">`, openParameter + `k" string="true">v` + closeParameter,
		openParameter + `n" string="false">[0]` + closeParameter, closeInvoke + "\n" + closeCalls,
		openCalls + "\n" + openInvoke + `b">` + "\n" + closeInvoke + "\n",
	}
	total := 0
	rapid.Check(t, func(t *rapid.T) {
		text := strings.Join(rapid.SliceOfN(rapid.SampledFrom(fragments), 0, 14).Draw(t, "fragments"), "")
		var pieces []string
		for rest := text; rest != ""; {
			n := rapid.IntRange(1, len(rest)).Draw(t, "cut")
			pieces, rest = append(pieces, rest[:n]), rest[n:]
		}
		total += checkParser(t, text, pieces)
	})
	if total == 0 {
		t.Error("not one call was found")
	}
}

// TestParserDrop: with the fault a reply that ends within a call loses what was
// held back, and nothing else; without it nothing is lost.
func TestParserDrop(t *testing.T) {
	const text = "Wait."
	whole := text + separator + openCalls + "\n" + openInvoke + "ship\">\n" + closeInvoke + "\n" + closeCalls
	for cut := range len(whole) + 1 {
		var got [2]string
		for i, drop := range []bool{false, true} {
			p := Parser{Drop: drop}
			for _, d := range append(p.Write(whole[:cut]), p.Close()...) {
				got[i] += d.Content + d.Name + d.Arguments
			}
		}
		want := whole[:min(cut, len(text))]
		if strings.Contains(got[0], "ship{}") {
			want += "ship{}"
		} else if got[0] != whole[:cut] {
			t.Errorf("after %d bytes: %q without the fault, want %q", cut, got[0], whole[:cut])
		}
		if got[1] != want {
			t.Errorf("after %d bytes: %q with the fault, want %q", cut, got[1], want)
		}
	}
}

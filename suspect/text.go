package suspect

import (
	"encoding/json"
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"unicode"
)

// text is the case's file.
func (m *maker) text() string {
	var b strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&b, format, args...) }
	said := strings.TrimSpace(m.Live.Engine + " " + m.Live.Version)
	if said == "" {
		said = "a server that doesn't say what it is"
	}
	comment(&b, "", "What may be at fault in "+said+" at "+m.BaseURL+", by culprit init. The suspect levels are those of the live server. "+
		"Read it, take out what you know to be innocent, then: culprit hunt. It starts servers of its own on the same ports, so stop the live one first.")
	for _, todo := range m.out.Todo {
		comment(&b, "", "TO DO: "+todo)
	}
	say("target:\n")
	m.processesText(&b)
	say("  base_url: %s\n", quote(m.BaseURL))
	ready, logs := "/health", map[string]string(nil)
	for _, p := range m.processes {
		if e, ok := m.Table.Engines[p.engine]; ok {
			logs = e.Logs
			if len(m.processes) == 1 && e.Ready != "" {
				ready = e.Ready // a router answers at paths of its own
			}
		}
	}
	if len(m.processes) > 0 {
		say("  ready: {url: %s, timeout: 20m}\n", ready)
	}
	if len(logs) > 0 {
		say("  logs: {")
		for i, name := range sortedKeys(logs) {
			if i > 0 {
				say(", ")
			}
			say("%s: %s", name, quoted(logs[name]))
		}
		say("} # lines that are counted in each run\n")
	}
	m.factorsText(&b)
	m.loadText(&b)
	m.leftOutText(&b)
	return b.String()
}

func (m *maker) processesText(b *strings.Builder) {
	if len(m.processes) == 0 {
		comment(b, "  ", "How the server is started isn't known here. With that, settings of the server can be factors too:")
		fmt.Fprint(b, "  # processes:\n  #   - {name: server, command: [python3, -m, sglang.launch_server, \"{{graph}}\"]}\n")
		return
	}
	fmt.Fprint(b, "  processes:\n")
	for _, p := range m.processes {
		fmt.Fprintf(b, "    - name: %s\n", p.Name)
		var items []string
		for _, w := range p.words {
			items = append(items, w.yaml())
		}
		flow(b, "      command: ", "[", items, "]")
		if p.dir != "" {
			fmt.Fprintf(b, "      dir: %s\n", word{text: p.dir}.yaml())
		}
		if len(p.env) > 0 {
			var items []string
			for _, name := range sortedKeys(p.env) {
				items = append(items, quote(name)+": "+p.env[name].yaml())
			}
			flow(b, "      env: ", "{", items, "}")
		}
		if p.Host != "" {
			fmt.Fprintf(b, "      host: %s\n", quote(p.Host))
		}
		if p.URL != "" {
			fmt.Fprintf(b, "      url: %s\n", quote(p.URL))
		}
	}
}

func (m *maker) factorsText(b *strings.Builder) {
	fmt.Fprint(b, "factors: # odds: how often such a setting was the cure in public reports, against the usual\n")
	for _, f := range m.out.Factors {
		if f.Why != "" {
			comment(b, "  ", f.Why)
		}
		var parts []string
		parts = append(parts, "suspect: "+f.suspect.yaml(), "safe: "+f.safe.yaml())
		if f.Odds != 1 {
			parts = append(parts, "odds: "+strconv.FormatFloat(f.Odds, 'g', -1, 64))
		}
		if f.Attest != "" {
			parts = append(parts, "attest: "+single(f.Attest))
		} else {
			comment(b, "  ", "Nothing that the server says tells whether this takes effect: an attest expression would.")
		}
		flow(b, "  "+f.Name+": ", "{", parts, "}")
	}
	if len(m.out.Factors) == 0 && len(m.processes) > 0 {
		comment(b, "  ", "No suspect of this server is known. A factor is put into a command, or into env, by {{its name}}:")
		fmt.Fprint(b, "  # graph: {suspect: [], safe: [--disable-cuda-graph], attest: 'argv contains \"--disable-cuda-graph\" == (level == \"safe\")'}\n")
	}
	fmt.Fprintf(b, "  concurrency: {suspect: %d, safe: 1, odds: 1} # of the client: needs no launch\n", m.concurrency())
}

const usualConcurrency = 80 // the incident's

// concurrency is enough that what a server does at once is more than it can,
// but not so much that all it does is queue.
func (m *maker) concurrency() int {
	if m.Concurrency > 0 {
		return m.Concurrency
	}
	if running, _ := m.limits(); running > 0 {
		return max(2, min(usualConcurrency, 2*running))
	}
	return usualConcurrency
}

func (m *maker) loadText(b *strings.Builder) {
	// As docs/workloads.md has it by default, where the context has the room:
	// a line of facts takes some 30 tokens.
	const lines, lineTokens, reply, replies = 28, 30, 128, 4
	knobs := fmt.Sprintf("kind: agent, sessions: %d, seed: 1", m.concurrency())
	if _, context := m.limits(); context > 0 && context < 2*(lines*lineTokens+replies*reply) {
		knobs += fmt.Sprintf(", rounds: 2, context_lines: %d, max_tokens: %d", max(4, context/4/lineTokens), max(32, min(reply, context/8)))
	}
	fmt.Fprintf(b, "workload: {%s}\n", knobs)
	if len(m.forbidden) > 0 {
		fmt.Fprint(b, "forbid:\n")
		for _, f := range m.forbidden {
			fmt.Fprintf(b, "  - {%s: safe, %s: suspect} # the second needs the first\n", f[0], f[1])
		}
	}
	fmt.Fprint(b, "budget: {launches: 60}\nerror: 0.01\n")
}

func (m *maker) leftOutText(b *strings.Builder) {
	if len(m.out.LeftOut)+len(m.out.Off) == 0 {
		return
	}
	fmt.Fprint(b, "\n# Not varied:\n")
	var whys []string
	settings := map[string][]string{}
	for _, l := range m.out.LeftOut {
		if settings[l.Why] == nil {
			whys = append(whys, l.Why)
		}
		setting := l.Setting
		if len(m.processes) > 1 {
			setting += " of " + l.Process
		}
		settings[l.Why] = append(settings[l.Why], setting)
	}
	for _, why := range whys {
		comment(b, "", "- "+strings.Join(settings[why], ", ")+": "+why)
	}
	if len(m.out.Off) > 0 {
		comment(b, "", "- "+strings.Join(m.out.Off, ", ")+": not on in this server, or of no effect in it")
	}
}

const columns = 120

// comment writes lines of a comment.
func comment(b *strings.Builder, indent, text string) {
	text = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' || r == '\ufeff' {
			return ' '
		}
		return r
	}, strings.ToValidUTF8(text, "\ufffd"))
	line := indent + "#"
	for w := range strings.FieldsSeq(text) {
		if len(line)+1+len(w) > columns && line != indent+"#" {
			fmt.Fprintln(b, line)
			line = indent + "#"
			if strings.HasPrefix(text, "- ") {
				line += "  "
			}
		}
		line += " " + w
	}
	fmt.Fprintln(b, line)
}

// flow writes a list or a mapping on as many lines as it takes.
func flow(b *strings.Builder, head, open string, items []string, end string) {
	indent := strings.Repeat(" ", len(head)-len(strings.TrimLeft(head, " "))+4)
	line := head + open
	for i, item := range items {
		if i < len(items)-1 {
			item += ","
		} else {
			item += end
		}
		if len(line)+1+len(item) > columns && i > 0 {
			fmt.Fprintln(b, line)
			line = indent + item
			continue
		}
		if i > 0 {
			line += " "
		}
		line += item
	}
	if len(items) == 0 {
		line += end
	}
	fmt.Fprintln(b, line)
}

func (w word) yaml() string {
	text := strings.ReplaceAll(w.text, "{{", `\{{`)
	if w.factor == "" {
		return quote(text)
	}
	return quoted(text + "{{" + w.factor + "}}")
}

func (l level) yaml() string {
	switch {
	case l.none:
		return "null"
	case !l.list:
		return quote(l.text[0])
	}
	var items []string
	for _, arg := range l.text {
		items = append(items, quote(arg))
	}
	return "[" + strings.Join(items, ", ") + "]"
}

// plain is what YAML takes for a text, or for a number that is written as it
// is read, also inside lists.
var (
	plain  = regexp.MustCompile(`^((-{0,2}[A-Za-z]|[.]{0,2}/)[A-Za-z0-9_./-]*|0|[1-9][0-9]{0,14}|https?://[A-Za-z0-9_./:-]*[A-Za-z0-9/])$`)
	spoken = regexp.MustCompile(`^(?i:true|false|yes|no|on|off|y|n|null|\.nan|[-.]inf)$`)
)

// quote writes a text as YAML.
func quote(s string) string {
	if plain.MatchString(s) && !spoken.MatchString(s) {
		return s
	}
	return quoted(s)
}

// quoted writes it between quotes: JSON's are YAML's too.
func quoted(s string) string {
	var b strings.Builder
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(strings.ToValidUTF8(s, "\ufffd")); err != nil {
		panic(err) // a text is JSON
	}
	return strings.TrimSpace(b.String())
}

// single writes it between single quotes, which expressions are read best in.
func single(s string) string { return "'" + strings.ReplaceAll(s, "'", "''") + "'" }

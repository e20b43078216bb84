package experiment

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/target"
)

// NamedArm is an arm that somebody gave a name.
type NamedArm struct {
	Name string
	Arm  design.Arm
}

// SweepCase makes a case of what "vllm bench sweep serve" takes: --serve-cmd, a
// command line, and --serve-params, a JSON list of objects, or an object of
// objects by name, each of them an arm. The parameters whose values differ are
// the factors; a value replaces the flag's in the command, or is added to it.
// The first arm is the failing one, and a factor's safe level is the first
// other that it has.
func SweepCase(serveCmd string, params []byte, baseURL string) (*Case, []NamedArm, error) {
	command, err := splitWords(serveCmd)
	if err != nil {
		return nil, nil, fmt.Errorf("serve command: %w", err)
	}
	if len(command) == 0 {
		return nil, nil, fmt.Errorf("serve command: it is empty")
	}
	base, err := target.ParseBaseURL(baseURL)
	if err != nil {
		return nil, nil, err
	}
	records, err := sweepRecords(params)
	if err != nil {
		return nil, nil, fmt.Errorf("serve parameters: %w", err)
	}
	c := &Case{
		BaseURL: base, Error: DefaultError, Logs: map[string]*regexp.Regexp{}, levels: map[string]map[string]level{}, claims: map[string]*target.Claim{},
		knobs: map[string]any{}, load: map[string]any{}, ready: target.Ready{URL: base + "/health"},
	}
	arms := make([]NamedArm, len(records))
	for i, r := range records {
		arms[i] = NamedArm{r.name, design.Arm{}}
	}
	line := make([]template, len(command))
	for i, word := range command {
		line[i] = template{[]part{{text: word}}}
	}
	for _, key := range sweepKeys(records) {
		line = c.sweepFactor(key, records, arms, line)
	}
	if err := c.Space.Validate(); err != nil {
		return nil, nil, fmt.Errorf("serve parameters: %w", err)
	}
	c.processes = []processSpec{{name: "server", command: line}}
	return c, arms, nil
}

// unset is the level of a factor that an arm doesn't have.
const unset = "(unset)"

// sweepFactor gives a parameter its place in the command: a factor where its
// values differ, else its one value.
func (c *Case) sweepFactor(key string, records []sweepRecord, arms []NamedArm, line []template) []template {
	flag := "--" + flagOf(key)
	at := slices.IndexFunc(line, func(t template) bool {
		return len(t.parts) == 1 && t.parts[0].factor == "" && (t.parts[0].text == flag || flagOf(strings.TrimPrefix(t.parts[0].text, "--")) == flagOf(key) && strings.HasPrefix(t.parts[0].text, "--"))
	})
	name := strings.ReplaceAll(strings.ReplaceAll(flagOf(key), "-", "_"), ".", "_")
	if name == "" || name[0] >= '0' && name[0] <= '9' {
		name = "_" + name
	}
	f := design.Factor{Name: name}
	levels := map[string]value{}
	before := 0 // arguments that the flag has in the command
	if at >= 0 {
		before = 1
		for _, r := range records {
			if v, ok := r.get(key); ok && len(v.arguments(key)) == 2 && at+1 < len(line) {
				before = 2
			}
		}
	}
	for i, r := range records {
		level, args := unset, []string(nil)
		if v, ok := r.get(key); ok {
			level, args = v.level(), v.arguments(key)
			if at >= 0 && before == 2 && len(args) == 1 {
				args = append(args, plainText(line[at+1])) // as it is replaced there
			}
		} else if at >= 0 {
			for _, t := range line[at : at+before] {
				args = append(args, plainText(t))
			}
		}
		if f.Level(level) < 0 {
			f.Levels = append(f.Levels, design.Level{Name: level})
			levels[level] = value{list: true, text: args}
		}
		arms[i].Arm[name] = level
	}
	in := []template{{[]part{{factor: name}}}}
	if len(f.Levels) == 1 {
		in = nil
		for _, arg := range levels[f.Levels[0].Name].text {
			in = append(in, template{[]part{{text: arg}}})
		}
		for i := range arms {
			delete(arms[i].Arm, name)
		}
	} else {
		f.Levels[0].Role, f.Levels[1].Role = design.Suspect, design.Safe
		c.Space.Factors = append(c.Space.Factors, f)
		c.levels[name] = map[string]level{}
		for of, v := range levels {
			c.levels[name][of] = level{value: v}
		}
	}
	if at < 0 {
		return append(line, in...)
	}
	return slices.Replace(line, at, at+before, in...)
}

func plainText(t template) string {
	if len(t.parts) == 0 {
		return ""
	}
	return t.parts[0].text
}

// flagOf writes a parameter as flags do: "_" is "-", but not in the settings
// inside one, after a point.
func flagOf(key string) string {
	head, rest, dotted := strings.Cut(key, ".")
	head = strings.ReplaceAll(head, "_", "-")
	if dotted {
		return head + "." + rest
	}
	return head
}

// sweepRecord is one arm's parameters, in the file's order.
type sweepRecord struct {
	name   string
	params []sweepParam
}

type sweepParam struct {
	key   string
	value sweepValue
}

// sweepValue is a parameter's value as JSON.
type sweepValue json.RawMessage

func (r *sweepRecord) get(key string) (sweepValue, bool) {
	for _, p := range r.params {
		if flagOf(p.key) == flagOf(key) {
			return p.value, true
		}
	}
	return nil, false
}

// text is the value as Python's str writes it, for what servers take.
func (v sweepValue) text() string {
	var text string
	if json.Unmarshal(v, &text) == nil && v[0] == '"' {
		return text
	}
	if string(v) == "null" {
		return "None"
	}
	return string(v)
}

// level is the value's name: its text, or JSON where that would be another's.
func (v sweepValue) level() string {
	if v[0] == '"' && slices.Contains([]string{"true", "false", "None", unset}, v.text()) {
		return string(v)
	}
	return v.text()
}

// arguments are what the value adds to a command.
func (v sweepValue) arguments(key string) []string {
	switch on := string(v) == "true"; {
	case !on && string(v) != "false":
		return []string{"--" + flagOf(key), v.text()}
	case strings.Contains(key, "."):
		return []string{"--" + flagOf(key) + "=" + string(v)}
	case on:
		return []string{"--" + flagOf(key)}
	}
	return []string{"--no-" + flagOf(key)}
}

const sweepName = "_benchmark_name"

func sweepRecords(params []byte) ([]sweepRecord, error) {
	members, err := orderedObject(params)
	byName := err == nil
	if !byName {
		var list []json.RawMessage
		if json.Unmarshal(params, &list) != nil {
			return nil, fmt.Errorf("want a JSON list of objects, or an object of objects by name")
		}
		for _, one := range list {
			members = append(members, sweepParam{value: sweepValue(one)})
		}
	}
	var records []sweepRecord
	names := map[string]bool{}
	for i, m := range members {
		inner, err := orderedObject(m.value)
		if err != nil {
			return nil, fmt.Errorf("arm %d: %w", i+1, err)
		}
		r := sweepRecord{name: m.key}
		var all []string
		for _, p := range inner {
			if p.key == sweepName {
				r.name = cmp.Or(r.name, p.value.text())
				continue
			}
			if p.value[0] == '[' {
				return nil, fmt.Errorf("arm %d: %s is a list, which no flag takes", i+1, p.key)
			}
			if _, twice := r.get(p.key); twice {
				return nil, fmt.Errorf("arm %d: %s is there twice", i+1, p.key)
			}
			r.params = append(r.params, p)
			all = append(all, p.key+"="+p.value.text())
		}
		r.name = cmp.Or(r.name, strings.Join(all, "-"), fmt.Sprintf("arm %d", i+1))
		if names[r.name] {
			return nil, fmt.Errorf("arm %d: name %q is there twice", i+1, r.name)
		}
		names[r.name] = true
		records = append(records, r)
	}
	if len(records) < 2 {
		return nil, fmt.Errorf("holds %d arms: two or more can be compared", len(records))
	}
	return records, nil
}

// sweepKeys lists the parameters in the order in which they are met.
func sweepKeys(records []sweepRecord) []string {
	var keys []string
	for _, r := range records {
		for _, p := range r.params {
			if !slices.ContainsFunc(keys, func(key string) bool { return flagOf(key) == flagOf(p.key) }) {
				keys = append(keys, p.key)
			}
		}
	}
	return keys
}

// orderedObject reads a JSON object with its members in their order.
func orderedObject(b []byte) ([]sweepParam, error) {
	d := json.NewDecoder(bytes.NewReader(b))
	open, err := d.Token()
	if err != nil || open != json.Delim('{') {
		return nil, fmt.Errorf("%.60q isn't a JSON object", b)
	}
	var members []sweepParam
	for d.More() {
		key, err := d.Token()
		if err != nil {
			return nil, err
		}
		var raw json.RawMessage
		if err := d.Decode(&raw); err != nil {
			return nil, err
		}
		var compact bytes.Buffer
		if err := json.Compact(&compact, raw); err != nil {
			return nil, err
		}
		members = append(members, sweepParam{fmt.Sprint(key), sweepValue(compact.Bytes())})
	}
	_, err = d.Token()
	return members, err
}

// sweepText is a sweep's case as a file has it.
func (c *Case) sweepText() (string, error) {
	var b strings.Builder
	var failed error
	value := func(v any) string {
		var text bytes.Buffer
		e := json.NewEncoder(&text) // JSON is YAML
		e.SetEscapeHTML(false)
		failed = errors.Join(failed, e.Encode(v))
		return strings.TrimSpace(text.String())
	}
	var words []string
	for _, t := range c.processes[0].command {
		word := strings.ReplaceAll(plainText(t), "{{", `\{{`)
		if name, whole := t.whole(); whole {
			word = "{{" + name + "}}"
		}
		words = append(words, word)
	}
	fmt.Fprintf(&b, "target:\n  processes:\n    - {name: %s, command: %s}\n  base_url: %s\n", c.processes[0].name, value(words), value(c.BaseURL))
	if c.Model != "" {
		fmt.Fprintf(&b, "  model: %s\n", value(c.Model))
	}
	if c.ready.Timeout > 0 {
		fmt.Fprintf(&b, "  ready: {timeout: %s}\n", c.ready.Timeout)
	}
	fmt.Fprint(&b, "factors:\n")
	for _, f := range c.Space.Factors {
		fmt.Fprintf(&b, "  %s:\n    suspect: %s\n    safe: %s\n    ordered: false\n    levels:\n", f.Name, value(f.Levels[f.Failing()].Name), value(f.Levels[f.Safe()].Name))
		for _, l := range f.Levels {
			args := c.levels[f.Name][l.Name].text
			if args == nil {
				args = []string{}
			}
			fmt.Fprintf(&b, "      %s: %s\n", value(l.Name), value(args))
		}
	}
	fmt.Fprintf(&b, "workload: %s\nload: %s\n", value(c.knobs), value(c.load))
	return b.String(), failed
}

// WriteSweep writes the case of a sweep into a directory and reads it back: from
// then on it is a case like any other.
func (c *Case) WriteSweep(dir string) (*Case, error) {
	text, err := c.sweepText()
	if err != nil {
		return nil, fmt.Errorf("write case: %w", err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("make case directory: %w", err)
	}
	path := filepath.Join(dir, CaseFile)
	read, err := ParseCase(path, []byte(text))
	if err != nil {
		return nil, err
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		return nil, fmt.Errorf("write case: %w", err)
	}
	return read, nil
}

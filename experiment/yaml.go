package experiment

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/culprit-project/culprit/internal/nearest"
	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// document reads a YAML file strictly. What is wrong is collected with its
// line; the reading goes on, so that a user sees all of it at once.
type document struct {
	name    string
	anchors map[string]ast.Node
	aliases int // followed so far
	errs    []error
}

// aliasLimit stops a file whose aliases go round, or grow without end.
const aliasLimit = 10_000

// openDocument parses a file of one document that is a mapping.
func openDocument(name string, text []byte) (*document, ast.Node, error) {
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("%s: %s", name, yaml.FormatError(err, false, true))
	}
	var bodies []ast.Node
	for _, doc := range file.Docs {
		if doc.Body != nil && doc.Body.Type() != ast.CommentType {
			bodies = append(bodies, doc.Body)
		}
	}
	if len(bodies) != 1 {
		return nil, nil, fmt.Errorf("%s: holds %d YAML documents, must hold one", name, len(bodies))
	}
	d := &document{name: name, anchors: map[string]ast.Node{}}
	ast.Walk(anchorsOf(d.anchors), bodies[0])
	return d, bodies[0], nil
}

type anchorsOf map[string]ast.Node

// Visit implements ast.Visitor.
func (a anchorsOf) Visit(n ast.Node) ast.Visitor {
	if anchor, ok := n.(*ast.AnchorNode); ok {
		a[anchor.Name.String()] = anchor.Value
	}
	return a
}

func (d *document) fail(at ast.Node, format string, args ...any) {
	line := 0
	if at != nil && at.GetToken() != nil && at.GetToken().Position != nil {
		line = at.GetToken().Position.Line
	}
	d.errs = append(d.errs, &lineError{d.name, line, fmt.Errorf(format, args...)})
}

// lineError is a mistake in a file.
type lineError struct {
	file string
	line int
	err  error
}

func (e *lineError) Error() string {
	if e.line == 0 {
		return fmt.Sprintf("%s: %v", e.file, e.err)
	}
	return fmt.Sprintf("%s:%d: %v", e.file, e.line, e.err)
}

func (e *lineError) Unwrap() error { return e.err }

// err is everything that is wrong, in the order of the lines.
func (d *document) err() error {
	slices.SortStableFunc(d.errs, func(a, b error) int {
		x, _ := errors.AsType[*lineError](a)
		y, _ := errors.AsType[*lineError](b)
		return x.line - y.line
	})
	return errors.Join(d.errs...)
}

// plain follows aliases and takes anchors and tags off.
func (d *document) plain(n ast.Node) ast.Node {
	for {
		switch v := n.(type) {
		case *ast.AnchorNode:
			n = v.Value
		case *ast.TagNode:
			n = v.Value
		case *ast.AliasNode:
			if d.aliases++; d.aliases > aliasLimit {
				if d.aliases == aliasLimit+1 {
					d.fail(n, "aliases go round, or there are too many")
				}
				return nil
			}
			n = d.anchors[v.Value.String()]
		default:
			return n
		}
	}
}

// entry is a key with its value.
type entry struct {
	key   string
	at    ast.Node // the key
	value ast.Node
}

// entries lists a mapping. Anything else is wrong.
func (d *document) entries(n ast.Node, what string) []entry {
	mapping, ok := d.plain(n).(*ast.MappingNode)
	if !ok {
		if single, ok := d.plain(n).(*ast.MappingValueNode); ok {
			return []entry{d.entry(single)}
		}
		d.fail(n, "%s: want lines of \"key: value\"", what)
		return nil
	}
	var all []entry
	seen := map[string]bool{}
	for _, v := range mapping.Values {
		e := d.entry(v)
		if seen[e.key] {
			d.fail(e.at, "%s: key %q is there twice", what, e.key)
		}
		seen[e.key] = true
		all = append(all, e)
	}
	return all
}

func (d *document) entry(v *ast.MappingValueNode) entry {
	key, ok := scalarText(d.plain(v.Key))
	if !ok {
		d.fail(v.Key, "key %s: want a plain word", v.Key)
	}
	return entry{key, v.Key, v.Value}
}

// keys reads a mapping whose keys are known, each by a function.
func (d *document) keys(n ast.Node, what string, known map[string]func(ast.Node)) {
	for _, e := range d.entries(n, what) {
		read, ok := known[e.key]
		if !ok {
			var names []string
			for name := range known {
				names = append(names, name)
			}
			d.fail(e.at, "%s: unknown key %q; nearest known key: %q", what, e.key, nearest.Name(e.key, slices.Sorted(slices.Values(names))))
			continue
		}
		read(e.value)
	}
}

// items lists a sequence; a single value is a sequence of itself.
func (d *document) items(n ast.Node) []ast.Node {
	switch v := d.plain(n).(type) {
	case *ast.SequenceNode:
		return v.Values
	case nil, *ast.NullNode:
		return nil
	default:
		return []ast.Node{v}
	}
}

func (d *document) isList(n ast.Node) bool {
	_, ok := d.plain(n).(*ast.SequenceNode)
	return ok
}

func isNull(n ast.Node) bool {
	_, ok := n.(*ast.NullNode)
	return ok || n == nil
}

// scalarText is a scalar as it is written: 1.10 stays so.
func scalarText(n ast.Node) (string, bool) {
	switch v := n.(type) {
	case *ast.StringNode:
		return v.Value, true
	case *ast.LiteralNode:
		return v.Value.Value, true
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.GetToken().Value, true
	}
	return "", false
}

func (d *document) text(n ast.Node, what string) string {
	text, ok := scalarText(d.plain(n))
	if !ok {
		d.fail(n, "%s: want a text", what)
	}
	return text
}

func (d *document) texts(n ast.Node, what string) []string {
	var all []string
	for _, item := range d.items(n) {
		all = append(all, d.text(item, what))
	}
	return all
}

func (d *document) integer(n ast.Node, what string) int {
	text, _ := scalarText(d.plain(n))
	i, err := strconv.Atoi(strings.ReplaceAll(text, "_", ""))
	if err != nil || i < 0 {
		d.fail(n, "%s: want a whole number that isn't negative, got %q", what, text)
	}
	return i
}

func (d *document) number(n ast.Node, what string) float64 {
	text, _ := scalarText(d.plain(n))
	f, err := strconv.ParseFloat(text, 64)
	if err != nil {
		d.fail(n, "%s: want a number, got %q", what, text)
	}
	return f
}

func (d *document) flag(n ast.Node, what string) bool {
	b, ok := d.plain(n).(*ast.BoolNode)
	if !ok {
		d.fail(n, "%s: want true or false", what)
		return false
	}
	return b.Value
}

func (d *document) duration(n ast.Node, what string) time.Duration {
	text, _ := scalarText(d.plain(n))
	v, err := time.ParseDuration(text)
	if err != nil || v <= 0 {
		d.fail(n, "%s: want a time such as 90s, 10m or 4h, got %q", what, text)
	}
	return v
}

// any turns a value into what JSON would hold.
func (d *document) any(n ast.Node) any {
	switch v := d.plain(n).(type) {
	case *ast.MappingNode, *ast.MappingValueNode:
		m := map[string]any{}
		for _, e := range d.entries(v, "value") {
			m[e.key] = d.any(e.value)
		}
		return m
	case *ast.SequenceNode:
		list := []any{}
		for _, item := range v.Values {
			list = append(list, d.any(item))
		}
		return list
	case *ast.BoolNode:
		return v.Value
	case *ast.IntegerNode:
		return v.Value
	case *ast.FloatNode:
		return v.Value
	case nil, *ast.NullNode:
		return nil
	default:
		text, ok := scalarText(v)
		if !ok {
			d.fail(n, "want a text, a number, true, false, a list or a mapping")
		}
		return text
	}
}

// withBlocks puts values in the place of top-level keys of a file, at its end.
func withBlocks(text []byte, values map[string]any) ([]byte, error) {
	if len(text) == 0 { // a case that was made of no file
		return text, nil
	}
	file, err := parser.ParseBytes(text, 0)
	if err != nil {
		return nil, err
	}
	keys := map[int]string{} // by line, from 0
	for _, doc := range file.Docs {
		var entries []*ast.MappingValueNode
		switch body := doc.Body.(type) {
		case *ast.MappingNode:
			entries = body.Values
		case *ast.MappingValueNode:
			entries = append(entries, body)
		}
		for _, e := range entries {
			at := e.Key.GetToken().Position
			if at.Column != 1 {
				return nil, errors.New("its keys don't begin their lines, so its workload can't be replaced")
			}
			keys[at.Line-1] = e.Key.String()
		}
	}
	var out strings.Builder
	replaced := false
	for i, line := range strings.SplitAfter(strings.TrimRight(string(text), "\n")+"\n", "\n") {
		if key, begins := keys[i]; begins || strings.HasPrefix(line, "#") {
			_, replaced = values[key]
		}
		if !replaced {
			out.WriteString(line)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(values)) {
		b, err := json.Marshal(values[name]) // JSON is YAML
		if err != nil {
			return nil, err
		}
		fmt.Fprintf(&out, "%s: %s\n", name, b)
	}
	return []byte(out.String()), nil
}

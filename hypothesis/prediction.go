// Package hypothesis says what predictions mean, whether they can be meant of a
// case, and what evidence makes of them. It is pure: what was observed goes in,
// judgements come out; package ledger keeps both. docs/ledger.md describes the
// language of predictions.
//
// Stability: may change.
package hypothesis

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/parser"
	"github.com/expr-lang/expr/parser/lexer"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/internal/nearest"
	"github.com/culprit-project/culprit/target"
)

// Subject is what predictions may speak of: a case's factors, processes, log
// patterns and probes.
type Subject struct {
	Space     design.Space
	Processes []string
	Logs      []string
	Probes    []string
}

// Prediction is one that was checked against its subject.
type Prediction struct {
	Text  string
	left  *term
	op    string
	right *term // nil where it is compared with a constant
	// number is the constant, or the right term's factor.
	number  float64
	claim   *target.Claim // of an attest term, with its comparison
	value   string        // that the claim wants; empty when it isn't one text
	negated bool          // of needed and of an attest term
}

// kind is a kind of term.
type kind string

const (
	rate   kind = "rate"   // the share of broken replies of an arm
	metric kind = "metric" // what a metric of the server did in a run
	probe  kind = "probe"  // hits of a probe in a run
	logs   kind = "logs"   // lines of the server's logs in a run
	attest kind = "attest" // a live setting
	needed kind = "needed" // whether the hunt's finding has factors in it
)

var kinds = []string{string(rate), string(metric), string(probe), string(logs), string(attest), string(needed)}

// base says what the factors that a term doesn't name are like.
type base string

const (
	failing  base = "failing" // as where it fails; the default
	safe     base = "safe"
	anyLevel base = "any"
)

// term is one side of a prediction.
type term struct {
	kind    kind
	name    string            // of the counter
	labels  map[string]string // of the counter
	arm     design.Arm        // factors that are named
	base    base
	process string   // of attest
	inner   ast.Node // of attest
	factors []string // of needed
}

// othersKey sets a term's base: rate(graph=captured, others=safe).
const othersKey = "others"

// settingName stands for NAME=VALUE in what the expression library parses.
const settingName = "_setting"

// Parse reads a prediction and checks it: that each factor, level, process, log
// pattern and probe is there.
func Parse(text string, s Subject) (*Prediction, error) {
	p, err := parse(text, s)
	if err != nil {
		return nil, fmt.Errorf("prediction %q: %w", text, err)
	}
	return p, nil
}

func parse(text string, s Subject) (*Prediction, error) {
	source, err := settings(text)
	if err != nil {
		return nil, err
	}
	tree, err := parser.Parse(source)
	if err != nil {
		if e, ok := errors.AsType[*file.Error](err); ok {
			return nil, fmt.Errorf("%s; it is written like rate(FACTOR=LEVEL) < 0.05", e.Message)
		}
		return nil, err
	}
	p := &Prediction{Text: text}
	node := tree.Node
	if u, ok := node.(*ast.UnaryNode); ok && (u.Operator == "not" || u.Operator == "!") {
		p.negated, node = true, u.Node
	}
	b, compared := node.(*ast.BinaryNode)
	switch {
	case !compared:
		err = p.alone(node, s)
	case p.negated:
		err = errors.New("turn the comparison round in place of \"not\"")
	case !slices.Contains([]string{"<", "<=", ">", ">=", "==", "!="}, b.Operator):
		err = fmt.Errorf("%q doesn't compare: write one prediction for each thing that is to be seen", b.Operator)
	default:
		err = p.comparison(b, s)
	}
	return p, err
}

// settings rewrites each NAME=VALUE of a call as the expression library's own
// syntax has none for it.
func settings(text string) (string, error) {
	tokens, err := lexer.Lex(file.NewSource(text))
	if err != nil {
		if e, ok := errors.AsType[*file.Error](err); ok {
			return "", errors.New(e.Message)
		}
		return "", err
	}
	runes := []rune(text)
	var b strings.Builder
	from := 0
	for i := 0; i+2 < len(tokens); i++ {
		if !tokens[i].Is(lexer.Identifier) || !tokens[i+1].Is(lexer.Operator, "=") {
			continue
		}
		end := i + 2
		for !tokens[end].Is(lexer.EOF) && !tokens[end].Is(lexer.Operator, ",") && !tokens[end].Is(lexer.Bracket, ")") {
			end++
		}
		if tokens[end].Is(lexer.EOF) || end == i+2 {
			return "", fmt.Errorf("%s= wants a value, inside a call such as rate(...)", tokens[i].Value)
		}
		value := strings.TrimSpace(string(runes[tokens[i+1].To:tokens[end].From]))
		if end == i+3 && tokens[i+2].Is(lexer.String) {
			value = tokens[i+2].Value
		}
		fmt.Fprintf(&b, "%s%s(%q, %q)", string(runes[from:tokens[i].From]), settingName, tokens[i].Value, value)
		from, i = tokens[end].From, end
	}
	b.WriteString(string(runes[from:]))
	return b.String(), nil
}

// alone is a prediction without a comparison: attest or needed.
func (p *Prediction) alone(n ast.Node, s Subject) (err error) {
	if p.left, err = readTerm(n, s); err != nil {
		return err
	}
	switch p.left.kind {
	case needed:
		return nil
	case attest:
		return p.compile(p.left.inner.String())
	default:
		return fmt.Errorf("%s(...) is compared with something: < 0.01, or > 0", p.left.kind)
	}
}

func (p *Prediction) comparison(b *ast.BinaryNode, s Subject) error {
	left, leftFactor, err := side(b.Left, s)
	if err != nil {
		return err
	}
	p.op, p.left = b.Operator, left
	if left != nil && left.kind == attest {
		right := constantText(b.Right)
		if right == "" || leftFactor != 1 {
			return errors.New("attest(...) is compared with a text, a number, true or false")
		}
		p.value = right
		return p.compile(fmt.Sprintf("%s %s %s", left.inner, b.Operator, right))
	}
	right, rightFactor, err := side(b.Right, s)
	if err != nil {
		return err
	}
	if left == nil { // 0.01 > rate(...)
		left, leftFactor, right, rightFactor = right, rightFactor, left, leftFactor
		p.left, p.op = left, turned(b.Operator)
	}
	switch {
	case left == nil:
		return errors.New("says nothing of the server: it wants rate, metric, probe, logs, attest or needed")
	case left.kind == needed:
		return errors.New("needed(...) isn't compared: write needed(...) or not needed(...)")
	case right == nil:
		p.number = rightFactor / leftFactor
	case right.kind != left.kind:
		return fmt.Errorf("%s and %s can't be compared", left.kind, right.kind)
	default:
		p.right, p.number = right, rightFactor/leftFactor
	}
	if p.left.kind == rate {
		switch {
		case p.op == "==" || p.op == "!=":
			return errors.New("a rate is compared by < or >: no number of requests shows that it is exactly so")
		case right == nil && (p.number <= 0 || p.number >= 1):
			return fmt.Errorf("a rate is a share, and %g isn't between 0 and 1", p.number)
		case right == nil && p.number < smallestRate:
			return fmt.Errorf("%g: to tell so small a rate takes more than %.0f requests; the smallest limit is %g", p.number, 3/smallestRate, smallestRate)
		}
		p.op = p.op[:1]
	}
	if p.number < 0 || right != nil && p.number == 0 {
		return fmt.Errorf("%g: want a positive number", p.number)
	}
	return nil
}

// smallestRate is the smallest limit that a run can be judged by.
const smallestRate = 1e-4

func turned(op string) string {
	return cmp.Or(map[string]string{"<": ">", "<=": ">=", ">": "<", ">=": "<="}[op], op)
}

// compile makes an attest term's comparison a claim on the whole attestation.
func (p *Prediction) compile(text string) (err error) {
	p.claim, err = target.CompileClaim(text)
	return err
}

// side is a term, a number, or a term times or by a number.
func side(n ast.Node, s Subject) (*term, float64, error) {
	if v, ok := number(n); ok {
		return nil, v, nil
	}
	if b, ok := n.(*ast.BinaryNode); ok && (b.Operator == "*" || b.Operator == "/") {
		if v, ok := number(b.Left); ok && b.Operator == "*" {
			t, err := readTerm(b.Right, s)
			return t, v, err
		}
		if v, ok := number(b.Right); ok && v > 0 {
			if b.Operator == "/" {
				v = 1 / v
			}
			t, err := readTerm(b.Left, s)
			return t, v, err
		}
	}
	t, err := readTerm(n, s)
	return t, 1, err
}

func number(n ast.Node) (float64, bool) {
	switch n := n.(type) {
	case *ast.IntegerNode:
		return float64(n.Value), true
	case *ast.FloatNode:
		return n.Value, true
	}
	return 0, false
}

func constantText(n ast.Node) string {
	switch n.(type) {
	case *ast.StringNode, *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		return n.String()
	}
	return ""
}

func readTerm(n ast.Node, s Subject) (*term, error) {
	call, ok := n.(*ast.CallNode)
	if !ok {
		return nil, fmt.Errorf("%s: want a number or one of %s", n, strings.Join(kinds, ", "))
	}
	name := call.Callee.String()
	if !slices.Contains(kinds, name) {
		return nil, fmt.Errorf("there is no %s(...); nearest: %q", name, nearest.Name(name, slices.Sorted(slices.Values(kinds))))
	}
	t := &term{kind: kind(name), arm: design.Arm{}, base: failing, labels: map[string]string{}}
	var plain []ast.Node
	for _, arg := range call.Arguments {
		if c, ok := arg.(*ast.CallNode); ok && c.Callee.String() == settingName {
			if err := t.set(c.Arguments[0].(*ast.StringNode).Value, c.Arguments[1].(*ast.StringNode).Value, s); err != nil {
				return nil, err
			}
			continue
		}
		plain = append(plain, arg)
	}
	return t, t.read(plain, s)
}

// set takes NAME=VALUE: a factor's level, or a counter's label.
func (t *term) set(name, value string, s Subject) error {
	if name == othersKey {
		t.base = base(value)
		if !slices.Contains([]base{failing, safe, anyLevel}, t.base) {
			return fmt.Errorf("others=%s: want failing, safe or any", value)
		}
		return nil
	}
	i := slices.IndexFunc(s.Space.Factors, func(f design.Factor) bool { return f.Name == name })
	if i < 0 {
		if t.kind == metric || t.kind == probe {
			t.labels[name] = value
			return nil
		}
		return unknown("factor", name, factorNames(s.Space))
	}
	f := s.Space.Factors[i]
	level := f.Level(value)
	switch {
	case level >= 0:
	case value == string(design.Suspect):
		level = f.Failing()
	case value == string(design.Safe):
		level = f.Safe()
	default:
		var levels []string
		for _, l := range f.Levels {
			levels = append(levels, l.Name)
		}
		return fmt.Errorf("factor %s: %w", name, unknown("level", value, levels))
	}
	t.arm[name] = f.Levels[level].Name
	return nil
}

func factorNames(s design.Space) []string {
	var names []string
	for _, f := range s.Factors {
		names = append(names, f.Name)
	}
	return names
}

// read takes the arguments that aren't NAME=VALUE.
func (t *term) read(args []ast.Node, s Subject) error {
	switch t.kind {
	case rate:
		if len(args) > 0 {
			return fmt.Errorf("rate takes FACTOR=LEVEL, not %s", args[0])
		}
	case metric, probe, logs:
		if len(args) != 1 {
			return fmt.Errorf("%s takes one name, and FACTOR=LEVEL or LABEL=VALUE after it", t.kind)
		}
		t.name = args[0].String()
		if text, ok := args[0].(*ast.StringNode); ok {
			t.name = text.Value
		}
		if t.kind == logs && !slices.Contains(s.Logs, t.name) {
			return unknown("log pattern", t.name, s.Logs)
		}
		if t.kind == probe && !slices.Contains(s.Probes, t.name) {
			if len(s.Probes) == 0 {
				return fmt.Errorf("unknown probe %q: the case has none; name their packs under probes: in case.yaml", t.name)
			}
			return unknown("probe", t.name, s.Probes)
		}
	case attest:
		return t.attested(args, s)
	case needed:
		for _, a := range args {
			if !slices.Contains(factorNames(s.Space), a.String()) {
				return unknown("factor", a.String(), factorNames(s.Space))
			}
			t.factors = append(t.factors, a.String())
		}
		if len(args) == 0 || len(t.arm) > 0 {
			return errors.New("needed takes names of factors")
		}
	}
	return nil
}

// ofProcess are the names of an attestation that each process has of its own.
var ofProcess = []string{"env", "argv", "server_info", "model_info", "props"}

// attested reads attest(PROCESS, EXPRESSION), or attest(EXPRESSION).
func (t *term) attested(args []ast.Node, s Subject) error {
	if len(args) == 0 || len(args) > 2 {
		return errors.New("attest takes a process and an expression, such as attest(decode, env.NAME)")
	}
	t.inner = args[len(args)-1]
	if len(args) == 2 {
		t.process = args[0].String()
		if !slices.Contains(s.Processes, t.process) {
			return unknown("process", t.process, s.Processes)
		}
		if len(s.Processes) > 1 {
			ast.Walk(&t.inner, processOf(t.process))
		}
	}
	// Whether its names are known; compiled again with its comparison.
	_, err := target.CompileClaim(fmt.Sprintf("(%s) == nil", t.inner))
	return err
}

// processOf makes env.X of one process: processes.NAME.env.X.
type processOf string

// Visit implements ast.Visitor.
func (p processOf) Visit(n *ast.Node) {
	id, ok := (*n).(*ast.IdentifierNode)
	if !ok || !slices.Contains(ofProcess, id.Value) {
		return
	}
	member := func(of ast.Node, name string) ast.Node {
		return &ast.MemberNode{Node: of, Property: &ast.StringNode{Value: name}}
	}
	ast.Patch(n, member(member(&ast.IdentifierNode{Value: "processes"}, string(p)), id.Value))
}

func unknown(what, name string, known []string) error {
	if len(known) == 0 {
		return fmt.Errorf("unknown %s %q: the case has none", what, name)
	}
	return fmt.Errorf("unknown %s %q; nearest: %q", what, name, nearest.Name(name, slices.Sorted(slices.Values(known))))
}

// want is the arm that a term is about; factors that it doesn't care for are
// left out.
func (t *term) want(s design.Space) design.Arm {
	arm := design.Arm{}
	switch t.base {
	case failing:
		arm = s.Failing()
	case safe:
		arm = s.Safe()
	case anyLevel:
	}
	maps.Copy(arm, t.arm)
	return arm
}

// String is the term as it is written.
func (t *term) String() string {
	var parts []string
	switch t.kind {
	case attest:
		if t.process != "" {
			parts = append(parts, t.process)
		}
		parts = append(parts, t.inner.String())
	case needed:
		parts = append(parts, t.factors...)
	default:
		if t.name != "" {
			parts = append(parts, t.name)
		}
	}
	for _, set := range []map[string]string{t.labels, t.arm} {
		for _, name := range slices.Sorted(maps.Keys(set)) {
			parts = append(parts, name+"="+set[name])
		}
	}
	if t.base != failing {
		parts = append(parts, othersKey+"="+string(t.base))
	}
	return string(t.kind) + "(" + strings.Join(parts, ", ") + ")"
}

func percent(share float64) string {
	return strconv.FormatFloat(100*share, 'g', 3, 64) + "%"
}

package target

import (
	"errors"
	"fmt"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/agext/levenshtein"
	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/parser"
	"github.com/expr-lang/expr/vm"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/internal/nearest"
)

// Claim is an expression about a live server: that it has a factor's level.
// Its language is that of expr-lang.org, with these names:
//
//	level                       the level that the arm has; == compares its text or its role
//	env.NAME                    the environment of the server's processes
//	argv contains "--x 1"       whether the arguments are there, one after another
//	flag("--x")                 a flag's value, true where it has none, nil where it isn't there
//	server_info.NAME            what the server says at that path; so model_info, props, version, models
//	files, packages             SHA-256 by name; commits by a package's name
//	distributions, gpus, driver versions by name; names; a version
//	processes.NAME              env, argv, server_info of one process of several
type Claim struct {
	text    string
	tree    ast.Node
	program *vm.Program
}

// claimNames are the names that claims may use, with why one has no value.
var claimNames = map[string]string{
	"level": "", "env": "no process of the server could be read", "argv": "no process of the server could be read",
	"flag": "", "server_info": "the server doesn't answer at /server_info", "model_info": "the server doesn't answer at /model_info",
	"props": "the server doesn't answer at /props", "version": "the server doesn't say its version", "models": "", "engine": "the server doesn't say what it is",
	"files": "", "packages": "", "commits": "", "distributions": "", "gpus": "nvidia-smi lists none", "driver": "nvidia-smi lists none", "processes": "no process of the server could be read",
}

// CompileClaim reads an expression.
func CompileClaim(text string) (*Claim, error) {
	tree, err := parseExpression(text)
	if err != nil {
		return nil, err
	}
	known := slices.Collect(maps.Keys(claimNames))
	for _, name := range namesIn(tree) {
		if !slices.Contains(known, name) {
			return nil, fmt.Errorf("expression %#q: unknown name %q; nearest known name: %q", text, name, nearest.Name(name, slices.Sorted(slices.Values(known))))
		}
	}
	// The names were checked above; of their values nothing is known yet.
	functions := map[string]any{
		"flag": func(string, ...string) any { return nil }, hasArgsName: hasArgs, hasLevelName: func(any) bool { return false },
	}
	program, err := expr.Compile(text, expr.Env(functions), expr.AllowUndefinedVariables(), expr.AsBool(), expr.Patch(claimPatch{}))
	if err != nil {
		return nil, fmt.Errorf("expression %#q: %w", text, err)
	}
	return &Claim{text, tree, program}, nil
}

// String is the expression.
func (c *Claim) String() string { return c.text }

const (
	hasArgsName  = "_hasArgs"
	hasLevelName = "_hasLevel"
)

// claimPatch gives "argv contains" and "== level" their meanings.
type claimPatch struct{}

// Visit implements ast.Visitor.
func (claimPatch) Visit(node *ast.Node) {
	b, ok := (*node).(*ast.BinaryNode)
	if !ok {
		return
	}
	call := func(name string, args ...ast.Node) ast.Node {
		return &ast.CallNode{Callee: &ast.IdentifierNode{Value: name}, Arguments: args}
	}
	switch {
	case b.Operator == "contains" && isArgv(b.Left):
		ast.Patch(node, call(hasArgsName, b.Left, b.Right))
	case b.Operator == "==" && isLevel(b.Left):
		ast.Patch(node, call(hasLevelName, b.Right))
	case b.Operator == "==" && isLevel(b.Right):
		ast.Patch(node, call(hasLevelName, b.Left))
	case b.Operator == "!=" && isLevel(b.Left):
		ast.Patch(node, &ast.UnaryNode{Operator: "not", Node: call(hasLevelName, b.Right)})
	case b.Operator == "!=" && isLevel(b.Right):
		ast.Patch(node, &ast.UnaryNode{Operator: "not", Node: call(hasLevelName, b.Left)})
	}
}

func isLevel(n ast.Node) bool {
	id, ok := n.(*ast.IdentifierNode)
	return ok && id.Value == "level"
}

func isArgv(n ast.Node) bool {
	if m, ok := n.(*ast.MemberNode); ok {
		s, ok := m.Property.(*ast.StringNode)
		return ok && s.Value == "argv"
	}
	id, ok := n.(*ast.IdentifierNode)
	return ok && id.Value == "argv"
}

// hasArgs reports whether words, split at spaces, are among the arguments, one
// after another; "--x=1" counts as "--x 1" on both sides.
func hasArgs(args any, words any) (bool, error) {
	text, ok := words.(string)
	if !ok {
		return false, fmt.Errorf("argv contains: want text, got %v", words)
	}
	list, ok := args.([]string)
	if !ok {
		return false, errors.New("argv contains: there is no argv")
	}
	all, wanted := unjoin(list), unjoin(strings.Fields(text))
	for i := range all {
		if len(wanted) > 0 && len(all)-i >= len(wanted) && slices.Equal(all[i:i+len(wanted)], wanted) {
			return true, nil
		}
	}
	return false, nil
}

func unjoin(args []string) []string {
	var out []string
	for _, arg := range args {
		if name, value, joined := strings.Cut(arg, "="); joined && strings.HasPrefix(arg, "-") {
			out = append(out, name, value)
		} else {
			out = append(out, arg)
		}
	}
	return out
}

// Answered reports whether the server says all that the claim asks it. To an
// expression, what it doesn't say is nil, as what it says is null.
func (c *Claim) Answered(a *Attestation) bool {
	env, _ := claimEnv(a, design.Level{})
	for _, used := range membersIn(c.tree) {
		if !slices.ContainsFunc(used, func(name string) bool { return slices.Contains(ofServer, name) }) {
			continue // it is the environment's, say
		}
		parent, ok := lookUp(env, used.parent()).(map[string]any)
		if !ok {
			return false
		}
		if _, said := parent[used.last()]; !said {
			return false
		}
	}
	return true
}

// ofServer are the names of what the server says of itself.
var ofServer = []string{"server_info", "model_info", "props"}

// Holds reports whether the claim is true of a live server that should have a
// level. When it isn't, why says what was found instead; an error says that it
// can't be told.
func (c *Claim) Holds(a *Attestation, level design.Level) (ok bool, why string, err error) {
	env, conflicts := claimEnv(a, level)
	for _, name := range namesIn(c.tree) {
		if reason := claimNames[name]; env[name] == nil && reason != "" {
			return false, "", fmt.Errorf("attest %#q: %s is unknown: %s", c.text, name, reason)
		}
	}
	for _, used := range membersIn(c.tree) {
		if reason, conflicting := conflicts[used.String()]; conflicting {
			return false, "", fmt.Errorf("attest %#q: %s", c.text, reason)
		}
		if v := lookUp(env, used); v == Redacted {
			return false, "", fmt.Errorf("attest %#q: %s is redacted, since it may be a secret", c.text, used)
		}
	}
	result, err := expr.Run(c.program, env)
	if err != nil {
		return false, "", fmt.Errorf("attest %#q: %w", c.text, err)
	}
	if ok, _ = result.(bool); ok {
		return true, "", nil
	}
	if level.Name == "" {
		return false, c.found(env), nil
	}
	return false, fmt.Sprintf("%#q doesn't hold for level %q: %s", c.text, level.Name, c.found(env)), nil
}

// found says which values a claim met.
func (c *Claim) found(env map[string]any) string {
	var parts []string
	for _, used := range membersIn(c.tree) {
		value := lookUp(env, used)
		text := fmt.Sprintf("%s is %s", used, show(value))
		if parent, ok := lookUp(env, used.parent()).(map[string]any); ok && value == nil {
			text = fmt.Sprintf("%s isn't set", used)
			if near := nearest.Name(used.last(), slices.Sorted(maps.Keys(parent))); similar(near, used.last()) {
				text += fmt.Sprintf(" (%s is)", near)
			}
		}
		parts = append(parts, text)
	}
	if args, ok := env["argv"].([]string); ok && strings.Contains(c.text, "argv") {
		parts = append(parts, "argv is "+clip(strings.Join(args, " ")))
	}
	if flag, ok := env["flag"].(func(string, ...string) any); ok {
		for _, call := range flagCalls(c.tree) {
			parts = append(parts, fmt.Sprintf("flag(%q) is %s", call[0], show(flag(call[0], call[1:]...))))
		}
	}
	return strings.Join(unique(parts), ", ")
}

func show(v any) string {
	switch v := v.(type) {
	case nil:
		return "not there"
	case string:
		return strconv.Quote(clip(v))
	}
	if b, err := encodeJSON(v); err == nil {
		return clip(string(b))
	}
	return clip(fmt.Sprint(v))
}

func clip(s string) string {
	const most = 300
	if len(s) > most {
		return s[:most] + "..."
	}
	return s
}

// claimEnv gives the names of claims their values. Variables and settings that
// processes of the server don't have alike have none, but a reason.
func claimEnv(a *Attestation, level design.Level) (env map[string]any, conflicts map[string]string) {
	env, conflicts = map[string]any{}, map[string]string{}
	files, packages, commits, distributions := map[string]any{}, map[string]any{}, map[string]any{}, map[string]any{}
	for _, f := range a.Files {
		files[f.Path], files[path.Base(f.Path)] = f.SHA256, f.SHA256
	}
	for _, p := range a.Packages {
		packages[p.Name], commits[p.Name] = p.SHA256, p.Commit
	}
	for name, version := range a.Distributions {
		distributions[name] = version
	}
	env["files"], env["packages"], env["commits"], env["distributions"] = files, packages, commits, distributions
	env["models"] = anys(a.Models)
	if a.Version != "" {
		env["version"] = a.Version
	}
	if a.Engine != "" {
		env["engine"] = a.Engine
	}
	var gpus []string
	for _, h := range a.Hosts {
		for _, g := range h.GPUs {
			gpus = append(gpus, g.Name)
			env["driver"] = g.Driver
		}
	}
	if gpus != nil {
		env["gpus"] = anys(gpus)
	}
	processes := map[string]any{}
	process := func(name string) map[string]any {
		p, ok := processes[name].(map[string]any)
		if !ok {
			p = map[string]any{}
			processes[name], env["processes"] = p, processes
		}
		return p
	}
	for _, e := range a.Endpoints {
		value, err := decodeJSON(e.Body)
		name := strings.ReplaceAll(strings.Trim(e.Path, "/"), "/", "_")
		if _, known := claimNames[name]; err != nil || !known || name == "version" {
			continue
		}
		if e.Process != "" {
			process(e.Process)[name] = numbers(value)
		} else {
			env[name] = numbers(value)
		}
	}
	mergeProcesses(a.Processes, process, env, conflicts)
	env["level"] = level.Name
	env[hasArgsName] = hasArgs
	env[hasLevelName] = func(v any) bool {
		text := levelText(v)
		return text == level.Name || text == string(level.Role)
	}
	return env, conflicts
}

func mergeProcesses(all []ProcessFacts, process func(string) map[string]any, env map[string]any, conflicts map[string]string) {
	type owned struct{ process, value string }
	first := map[string]owned{}
	var argv []string
	flags := map[string]map[string]string{}
	for _, p := range all {
		if !p.Main {
			continue
		}
		own := map[string]any{}
		for name, value := range p.Env {
			own[name] = value
			if old, twice := first[name]; twice && old.value != value {
				conflicts["env."+name] = fmt.Sprintf("env.%s is %q of process %s and %q of process %s: ask for one of them, processes.%s.env.%s", name, old.value, old.process, value, p.Name, p.Name, name)
				continue
			}
			first[name] = owned{p.Name, value}
		}
		process(p.Name)["env"], process(p.Name)["argv"] = own, p.Args
		argv = append(argv, p.Args...)
		_, flags[p.Name] = Flags(p.Args)
	}
	if argv == nil {
		env["flag"] = func(string, ...string) any { return nil }
		return
	}
	merged := map[string]any{}
	for name, o := range first {
		merged[name] = o.value
	}
	env["env"], env["argv"] = merged, argv
	env["flag"] = func(name string, of ...string) any {
		for _, p := range all {
			if value, ok := flags[p.Name][name]; ok && (len(of) == 0 || slices.Contains(of, p.Name)) {
				if value == "true" {
					return true
				}
				return value
			}
		}
		return nil
	}
}

func anys(values []string) []any {
	out := []any{}
	for _, v := range values {
		out = append(out, v)
	}
	return out
}

// numbers turns JSON's numbers into those that expressions calculate with.
func numbers(value any) any {
	switch v := value.(type) {
	case map[string]any:
		for key, member := range v {
			v[key] = numbers(member)
		}
	case []any:
		for i, member := range v {
			v[i] = numbers(member)
		}
	case interface{ Int64() (int64, error) }:
		if n, err := v.Int64(); err == nil {
			return int(n)
		}
		if f, ok := value.(interface{ Float64() (float64, error) }); ok {
			if n, err := f.Float64(); err == nil {
				return n
			}
		}
	}
	return value
}

// levelText is how a level with such a value is named.
func levelText(v any) string {
	if f, ok := v.(float64); ok {
		return strconv.FormatFloat(f, 'g', -1, 64)
	}
	return fmt.Sprint(v)
}

// parseExpression reads an expression without checking its names.
func parseExpression(text string) (ast.Node, error) {
	tree, err := parser.Parse(text)
	if err != nil {
		return nil, fmt.Errorf("expression %#q: %w", text, err)
	}
	return tree.Node, nil
}

// visitor calls a function for each node.
type visitor func(ast.Node)

// Visit implements ast.Visitor.
func (v visitor) Visit(node *ast.Node) { v(*node) }

func walk(tree ast.Node, visit func(ast.Node)) { ast.Walk(&tree, visitor(visit)) }

// namesIn lists the names that an expression takes from outside.
func namesIn(tree ast.Node) []string {
	var names, own []string
	walk(tree, func(n ast.Node) {
		switch n := n.(type) {
		case *ast.IdentifierNode:
			names = append(names, n.Value)
		case *ast.VariableDeclaratorNode:
			own = append(own, n.Name)
		}
	})
	return unique(slices.DeleteFunc(names, func(name string) bool { return slices.Contains(own, name) }))
}

// member is a chain of names: server_info.speculative.steps.
type member []string

func (m member) String() string { return strings.Join(m, ".") }
func (m member) parent() member { return m[:len(m)-1] }
func (m member) last() string   { return m[len(m)-1] }

// membersIn lists the longest chains of names in an expression.
func membersIn(tree ast.Node) []member {
	var all []member
	inner := map[ast.Node]bool{}
	walk(tree, func(n ast.Node) {
		if m, ok := n.(*ast.MemberNode); ok {
			inner[m.Node] = true
		}
	})
	walk(tree, func(n ast.Node) {
		if chain := chainOf(n); len(chain) > 1 && !inner[n] && chain.last() != "argv" {
			all = append(all, chain)
		}
	})
	slices.SortFunc(all, func(a, b member) int { return strings.Compare(a.String(), b.String()) })
	return slices.CompactFunc(all, func(a, b member) bool { return slices.Equal(a, b) })
}

func chainOf(n ast.Node) member {
	switch n := n.(type) {
	case *ast.ChainNode:
		return chainOf(n.Node)
	case *ast.IdentifierNode:
		return member{n.Value}
	case *ast.MemberNode:
		name, ok := n.Property.(*ast.StringNode)
		if before := chainOf(n.Node); ok && before != nil {
			return append(slices.Clone(before), name.Value)
		}
	}
	return nil
}

// flagCalls lists the constant arguments of calls of flag.
func flagCalls(tree ast.Node) [][]string {
	var calls [][]string
	walk(tree, func(n ast.Node) {
		call, ok := n.(*ast.CallNode)
		if !ok {
			return
		}
		if id, ok := call.Callee.(*ast.IdentifierNode); !ok || id.Value != "flag" {
			return
		}
		var args []string
		for _, arg := range call.Arguments {
			if s, ok := arg.(*ast.StringNode); ok {
				args = append(args, s.Value)
			}
		}
		if len(args) > 0 {
			calls = append(calls, args)
		}
	})
	return calls
}

func lookUp(env map[string]any, m member) any {
	var at any = env
	for _, name := range m {
		in, ok := at.(map[string]any)
		if !ok {
			return nil
		}
		at = in[name]
	}
	return at
}

// similar reports whether one of the names may be a slip for the other.
func similar(a, b string) bool {
	return a != "" && levenshtein.Distance(a, b, nil) <= max(2, len(b)/4)
}

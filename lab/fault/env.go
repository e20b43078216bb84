package fault

import (
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/agext/levenshtein"
	"github.com/expr-lang/expr"
	"github.com/expr-lang/expr/ast"
	"github.com/expr-lang/expr/file"
	"github.com/expr-lang/expr/parser"
	"github.com/expr-lang/expr/vm"
)

// Env is what the expression of a fault may ask about. Tags give the names of
// its variables, what they mean, and which values a text can have.
type Env struct {
	// Of the server, fixed at its start.
	Graph       bool            `expr:"graph" help:"decode steps are captured"`
	AltStream   bool            `expr:"alt_stream" help:"captured steps run the indexer on an alternate stream"`
	Overlap     bool            `expr:"overlap" help:"the overlap loop runs"`
	Radix       bool            `expr:"radix" help:"common prefixes share pages"`
	HiCache     bool            `expr:"hicache" help:"the host tier is on"`
	Layout      string          `expr:"layout" help:"of host memory" values:"layer_first page_first"`
	IndexK      string          `expr:"index_k" help:"type of index keys" values:"fp8 bf16"`
	IndexKStore string          `expr:"index_k_store" help:"which store writes bf16 index keys" values:"fused scatter"`
	PageSize    int             `expr:"page_size" help:"tokens of a page"`
	TP          int             `expr:"tp" help:"tensor-parallel ranks"`
	PD          string          `expr:"pd" help:"the server's part in disaggregation" values:"null prefill decode"`
	DecodeSteps int             `expr:"decode_steps" help:"decode steps in a row before new requests are let in"`
	Toggle      map[string]bool `expr:"toggle" help:"toggle.NAME: --toggle NAME was given"`

	// Of the moment.
	Batch    int    `expr:"batch" help:"requests of the step at hand"`
	Tier     string `expr:"tier" help:"where the request's cached prefix came from; of a step, the lowest of its requests'" values:"none device host"`
	Cancels  int    `expr:"cancels" help:"requests that were cancelled or aborted since the start"`
	Requests int    `expr:"requests" help:"requests that came since the start"`
	Uptime   int    `expr:"uptime" help:"steps since the start"`
}

// Variable is one thing that an expression may ask about.
type Variable struct {
	Name   string
	Help   string
	Values []string // that a text can have; none for numbers and booleans
}

// Variables lists them.
func Variables() []Variable {
	var all []Variable
	for f := range reflect.TypeFor[Env]().Fields() {
		all = append(all, Variable{f.Tag.Get("expr"), f.Tag.Get("help"), strings.Fields(f.Tag.Get("values"))})
	}
	return all
}

// never is what becomes of an expression that failed.
var never = func() *vm.Program {
	program, err := compile("false")
	if err != nil {
		panic(err)
	}
	return program
}()

// compile checks an expression's names, values and types.
func compile(source string) (*vm.Program, error) {
	tree, err := parser.Parse(source)
	if err != nil {
		return nil, explain(err)
	}
	names := &nameCheck{variables: Variables()}
	ast.Walk(&tree.Node, names)
	if names.err != nil {
		return nil, names.err
	}
	program, err := expr.Compile(source, expr.Env(&Env{}), expr.AsBool(), expr.DisableAllBuiltins())
	if err != nil {
		return nil, explain(err)
	}
	return program, nil
}

// explain puts an error into one line.
func explain(err error) error {
	if e, ok := errors.AsType[*file.Error](err); ok {
		return fmt.Errorf("when=: %s, at character %d", e.Message, e.Column+1)
	}
	return fmt.Errorf("when=: %w", err)
}

// nameCheck finds unknown variables, and texts that no variable can be equal
// to: such a condition would never hold, and the fault would look harmless.
type nameCheck struct {
	variables []Variable
	err       error
}

func (c *nameCheck) Visit(node *ast.Node) {
	switch n := (*node).(type) {
	case *ast.IdentifierNode:
		if c.err == nil && c.find(n.Value) == nil {
			names := make([]string, len(c.variables))
			for i, v := range c.variables {
				names[i] = v.Name
			}
			c.err = fmt.Errorf("when=: there is no variable %q; nearest is %q", n.Value, nearest(n.Value, names))
		}
	case *ast.BuiltinNode:
		c.err = cmp.Or(c.err, fmt.Errorf("when=: there are no functions, so no %q", n.Name))
	case *ast.BinaryNode:
		c.compare(n.Left, n.Right)
		c.compare(n.Right, n.Left)
	}
}

func (c *nameCheck) compare(name, value ast.Node) {
	identifier, ok := name.(*ast.IdentifierNode)
	if !ok {
		return
	}
	v := c.find(identifier.Value)
	if v == nil || len(v.Values) == 0 {
		return
	}
	values := []ast.Node{value}
	if list, ok := value.(*ast.ArrayNode); ok {
		values = list.Nodes
	}
	for _, value := range values {
		if text, ok := value.(*ast.StringNode); ok && c.err == nil && !slices.Contains(v.Values, text.Value) {
			c.err = fmt.Errorf("when=: %s is never %q; nearest is %q", v.Name, text.Value, nearest(text.Value, v.Values))
		}
	}
}

func (c *nameCheck) find(name string) *Variable {
	i := slices.IndexFunc(c.variables, func(v Variable) bool { return v.Name == name })
	if i < 0 {
		return nil
	}
	return &c.variables[i]
}

func distance(a, b string) int { return levenshtein.Distance(a, b, nil) }

package main

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/culprit-project/culprit/internal/app"
	"github.com/culprit-project/culprit/internal/nearest"
	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
)

// config is a YAML file of flags: each key is a flag's name with underscores.
// It is strict: a key that is no flag is an error with its line and the
// nearest flag.
type config struct {
	path   string
	values map[string]any
	lines  map[string]int
}

// configFlag is the flag that names one.
type configFlag struct {
	Config string `short:"c" type:"existingfile" placeholder:"FILE" help:"YAML file with these flags as keys (concurrency: ...), such as culprit amplify writes. Flags beat the file, the file beats the environment."`
}

// BeforeResolve lets --config add its file to what flags are resolved from.
func (configFlag) BeforeResolve(k *kong.Context, path *kong.Path) error {
	file, _ := k.FlagValue(flagOf(path, "config")).(string)
	if file == "" {
		return nil
	}
	read, err := readConfig(file)
	if err != nil {
		return err
	}
	if err := read.check(path.Flags); err != nil {
		return err
	}
	k.AddResolver(kong.ResolverFunc(func(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
		return read.values[key(flag.Name)], nil
	}))
	return nil
}

// readWorkload reads a file as run -c does, and nothing but the file.
func readWorkload(file string) (app.RunOptions, error) {
	read, err := readConfig(file)
	if err != nil {
		return app.RunOptions{}, err
	}
	var c runCommand
	parser, err := kong.New(&c, kong.Vars(app.Defaults()), kong.Resolvers(kong.ResolverFunc(
		func(_ *kong.Context, _ *kong.Path, flag *kong.Flag) (any, error) {
			return read.values[key(flag.Name)], nil
		},
	)))
	if err != nil {
		return app.RunOptions{}, err
	}
	if err := read.check(parser.Model.Flags); err != nil {
		return app.RunOptions{}, err
	}
	if _, err := parser.Parse(nil); err != nil {
		return app.RunOptions{}, fmt.Errorf("read config %s: %w", file, err)
	}
	o := c.options()
	o.Model = c.Model
	return o, nil
}

func flagOf(path *kong.Path, name string) *kong.Flag {
	for _, f := range path.Flags {
		if f.Name == name {
			return f
		}
	}
	return nil
}

func key(flag string) string { return strings.ReplaceAll(flag, "-", "_") }

func readConfig(path string) (*config, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read config: %w", err)
	}
	c := &config{path: path, values: map[string]any{}, lines: map[string]int{}}
	file, err := parser.ParseBytes(b, 0)
	if err != nil {
		return nil, fmt.Errorf("read config %s: %w", path, err)
	}
	for _, doc := range file.Docs {
		mapping, ok := doc.Body.(*ast.MappingNode)
		if !ok {
			if doc.Body == nil {
				continue
			}
			return nil, fmt.Errorf("read config %s: want lines of \"key: value\"", path)
		}
		for _, v := range mapping.Values {
			name := v.Key.String()
			var value any
			if err := yaml.NodeToValue(v.Value, &value); err != nil {
				return nil, fmt.Errorf("read config %s: %w", path, err)
			}
			c.values[name], c.lines[name] = plain(value), v.Key.GetToken().Position.Line
		}
	}
	return c, nil
}

// plain turns a YAML number into the text that flags are parsed from.
func plain(value any) any {
	switch value.(type) {
	case uint64, int64, float64:
		return fmt.Sprint(value)
	}
	return value
}

func (c *config) check(flags []*kong.Flag) error {
	var known []string
	for _, f := range flags {
		if f.Name != "help" && f.Name != "config" {
			known = append(known, key(f.Name))
		}
	}
	var errs []error
	for name, line := range c.lines {
		if slices.Contains(known, name) {
			continue
		}
		errs = append(errs, fmt.Errorf("%s:%d: unknown key %q; nearest known key: %q", c.path, line, name, nearest.Name(name, known)))
	}
	slices.SortFunc(errs, func(a, b error) int { return strings.Compare(a.Error(), b.Error()) })
	return errors.Join(errs...)
}

// Package suspect knows which settings have made inference servers fail, and
// writes the case in which a live server's own are varied. The knowledge is
// data: suspects.yaml, and what users add to it.
//
// Stability: may change.
package suspect

import (
	"cmp"
	_ "embed"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml"

	"github.com/culprit-project/culprit/target"
)

//go:embed suspects.yaml
var builtin []byte

// Table is what is known of engines' settings. docs/suspects.md is the format
// of its file.
type Table struct {
	Engines     map[string]Engine `yaml:"engines"`
	Suspects    []Suspect         `yaml:"suspects"`
	Harmless    []Harmless        `yaml:"harmless"`
	Environment []string          `yaml:"environment"` // beginnings of names
}

// Engine is what a case of its servers has beside the suspects.
type Engine struct {
	Ready string            `yaml:"ready"` // path that answers 200
	Logs  map[string]string `yaml:"logs"`  // patterns by name
}

// Suspect is a setting that has been at fault somewhere. It has one of On, Off,
// Value and Env. Flags that take a value end with "=".
type Suspect struct {
	Name    string   `yaml:"name"`    // of the factor
	Engine  string   `yaml:"engine"`  // one or several, with spaces between
	Since   string   `yaml:"since"`   // first version that has it
	Before  string   `yaml:"before"`  // first version that hasn't
	When    string   `yaml:"when"`    // expression about the live server; empty is always
	On      []string `yaml:"on"`      // any of these flags turns it on
	Off     []string `yaml:"off"`     // it is on unless one of these flags is there; the first turns it off
	Value   []string `yaml:"value"`   // spellings of a flag whose value it is
	Env     string   `yaml:"env"`     // variable whose value it is
	With    []string `yaml:"with"`    // flags that go when it is turned off
	Safe    *string  `yaml:"safe"`    // value of Value or Env; nil takes the variable out
	Default string   `yaml:"default"` // value where the flag or variable isn't there; empty: then it is off
	// HarmlessValues are as good as Safe.
	HarmlessValues []string `yaml:"harmless"`
	Needs          []string `yaml:"needs"`  // suspects that can't be safe while this one isn't
	Attest         string   `yaml:"attest"` // empty takes the command line or the environment
	Cures          float64  `yaml:"cures"`  // public reports that were cured by making it safe
	Odds           float64  `yaml:"odds"`   // in place of those that follow from Cures
	Why            string   `yaml:"why"`    // what it is
}

// Harmless are flags that aren't worth a factor.
type Harmless struct {
	Why   string   `yaml:"why"`
	Flags []string `yaml:"flags"`
}

// Builtin is the table that the program has.
func Builtin() *Table {
	t, err := Parse("suspects.yaml", builtin)
	if err != nil {
		panic(err) // a test reads it too
	}
	return t
}

// Parse reads a table.
func Parse(name string, text []byte) (*Table, error) {
	var t Table
	if err := yaml.UnmarshalWithOptions(text, &t, yaml.Strict()); err != nil {
		return nil, fmt.Errorf("read suspects %s: %s", name, strings.TrimSpace(yaml.FormatError(err, false, true)))
	}
	for i := range t.Suspects {
		s := &t.Suspects[i]
		if err := s.check(); err != nil {
			return nil, fmt.Errorf("read suspects %s: %q: %w", name, s.Name, err)
		}
	}
	for engine, e := range t.Engines {
		for name, pattern := range e.Logs {
			if _, err := regexp.Compile(pattern); err != nil {
				return nil, fmt.Errorf("read suspects %s: engine %s: logs: %s: %w", name, engine, name, err)
			}
		}
	}
	return &t, nil
}

var suspectName = regexp.MustCompile(`^[a-z][a-z0-9_]*$`)

func (s *Suspect) check() error {
	kinds := 0
	for _, set := range []bool{len(s.On) > 0, len(s.Off) > 0, len(s.Value) > 0, s.Env != ""} {
		if set {
			kinds++
		}
	}
	switch {
	case !suspectName.MatchString(s.Name):
		return fmt.Errorf("want a name of small letters, digits and _")
	case s.Engine == "":
		return fmt.Errorf("engine: which? %q is any", AnyEngine)
	case kinds != 1:
		return fmt.Errorf("want one of on, off, value and env, has %d", kinds)
	case len(s.Value) > 0 && s.Safe == nil:
		return fmt.Errorf("safe: a value that is known to be good is missing")
	}
	for _, expression := range []string{s.When, s.Attest} {
		if expression == "" {
			continue
		}
		if _, err := target.CompileClaim(expression); err != nil {
			return err
		}
	}
	return nil
}

// AnyEngine is the engine of suspects that don't depend on it.
const AnyEngine = "any"

// Add puts another table's contents in front: a suspect of the same name and
// engine takes the place of the one that was there.
func (t *Table) Add(more *Table) {
	kept := slices.DeleteFunc(slices.Clone(t.Suspects), func(s Suspect) bool {
		return slices.ContainsFunc(more.Suspects, func(m Suspect) bool { return m.Name == s.Name && m.Engine == s.Engine })
	})
	t.Suspects = slices.Concat(more.Suspects, kept)
	t.Harmless = slices.Concat(more.Harmless, t.Harmless)
	t.Environment = slices.Concat(more.Environment, t.Environment)
	for name, e := range more.Engines {
		if t.Engines == nil {
			t.Engines = map[string]Engine{}
		}
		t.Engines[name] = e
	}
}

// of lists an engine's suspects at a version, the likeliest first.
func (t *Table) of(engine, version string) []Suspect {
	var own []Suspect
	for _, s := range t.Suspects {
		if engines := strings.Fields(s.Engine); !slices.Contains(engines, engine) && !slices.Contains(engines, AnyEngine) {
			continue
		}
		known := number.MatchString(version)
		if known && (s.Since != "" && older(version, s.Since) || s.Before != "" && !older(version, s.Before)) {
			continue
		}
		own = append(own, s)
	}
	slices.SortStableFunc(own, func(a, b Suspect) int { return cmp.Compare(b.odds(), a.odds()) })
	return own
}

// typicalCures is the number of cures that a suspect of even odds has.
const typicalCures = 8

// odds is how much likelier than others it is to be needed: as its cures say,
// within what a prior should say at most.
func (s *Suspect) odds() float64 {
	const most = 5
	odds := s.Odds
	if odds == 0 {
		odds = 1
		if s.Cures > 0 {
			odds = math.Round(10*s.Cures/typicalCures) / 10
		}
	}
	return min(max(odds, 1.0/most), most)
}

var number = regexp.MustCompile(`[0-9]+`)

// older compares the numbers in two versions, one after another.
func older(version, than string) bool {
	a, b := number.FindAllString(version, 4), number.FindAllString(than, 4)
	for i := range b {
		if i >= len(a) {
			return true
		}
		x, errX := strconv.Atoi(a[i])
		y, errY := strconv.Atoi(b[i])
		if errX != nil || errY != nil || x != y {
			return errX == nil && errY == nil && x < y
		}
	}
	return false
}

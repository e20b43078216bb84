// Package design says which arms of a server there are and in which order they
// run. It is data: it starts nothing and judges nothing.
//
// Stability: may change.
package design

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Role says what a level is in an investigation.
type Role string

// The roles of a level. A level with neither is only tried when its factor has
// been accused.
const (
	Suspect Role = "suspect" // as it is where things fail
	Safe    Role = "safe"    // as it is where things are believed to work
)

// Level is one value that a factor can have.
type Level struct {
	Name string `json:"name" yaml:"name"`
	Role Role   `json:"role,omitempty" yaml:"role,omitempty"`
	// RequestCost is how many times longer a request takes at this level than
	// in the failing arm; 0 means once.
	RequestCost float64 `json:"request_cost,omitempty" yaml:"request_cost,omitempty"`
}

// Factor is something that may vary: a flag, an environment variable, a patch,
// the concurrency.
type Factor struct {
	Name   string  `json:"name" yaml:"name"`
	Levels []Level `json:"levels" yaml:"levels"`
	// Ordered says that the levels are in order: what fails at one is expected
	// to fail at those further from the safe one, until shown otherwise.
	Ordered bool `json:"ordered,omitempty" yaml:"ordered,omitempty"`
	// ClientSide factors (concurrency, streaming) need no launch to change.
	ClientSide bool `json:"client_side,omitempty" yaml:"client_side,omitempty"`
	// Attest is an expression that holds when the live server has the level.
	Attest string `json:"attest,omitempty" yaml:"attest,omitempty"`
	// Odds are how much likelier this factor is to be needed than the average
	// one, before any evidence; 0 means 1. The search uses 1/5 to 5.
	Odds float64 `json:"odds,omitempty" yaml:"odds,omitempty"`
}

// Space is every arm that could run.
type Space struct {
	Factors []Factor `json:"factors" yaml:"factors"`
	// Forbidden are combinations that are never run: an arm is forbidden when
	// it has all levels of one of them.
	Forbidden []Arm `json:"forbidden,omitempty" yaml:"forbidden,omitempty"`
}

// Arm is a choice of level by factor. An arm to be run has every factor.
type Arm map[string]string

// String is the same for equal arms: "graph=on index_k=bf16".
func (a Arm) String() string {
	parts := make([]string, 0, len(a))
	for factor, level := range a {
		parts = append(parts, quote(factor)+"="+quote(level))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// quote keeps the parts of an arm's string apart whatever their names.
func quote(s string) string {
	if s == "" || strings.ContainsAny(s, " =\"\\\n\t") {
		return fmt.Sprintf("%q", s)
	}
	return s
}

// Hash names an arm in 12 hexadecimal digits.
func (a Arm) Hash() string {
	sum := sha256.Sum256([]byte(a.String()))
	return hex.EncodeToString(sum[:6])
}

// Has reports whether a has every level of part.
func (a Arm) Has(part Arm) bool {
	for factor, level := range part {
		if own, ok := a[factor]; !ok || own != level {
			return false
		}
	}
	return true
}

// Level is the position of a factor's level by name, or -1.
func (f Factor) Level(name string) int {
	return slices.IndexFunc(f.Levels, func(l Level) bool { return l.Name == name })
}

// Failing is the position of the level that the failing arm has: the first
// suspect one.
func (f Factor) Failing() int { return f.first(Suspect) }

// Safe is the position of the level to turn to: the first safe one.
func (f Factor) Safe() int { return f.first(Safe) }

func (f Factor) first(role Role) int {
	return slices.IndexFunc(f.Levels, func(l Level) bool { return l.Role == role })
}

// Failing is the arm that things fail in.
func (s Space) Failing() Arm { return s.arm(Factor.Failing) }

// Safe is the arm in which every factor is safe.
func (s Space) Safe() Arm { return s.arm(Factor.Safe) }

func (s Space) arm(level func(Factor) int) Arm {
	a := Arm{}
	for _, f := range s.Factors {
		a[f.Name] = f.Levels[level(f)].Name
	}
	return a
}

// Allowed reports whether no forbidden combination is in the arm.
func (s Space) Allowed(a Arm) bool {
	return !slices.ContainsFunc(s.Forbidden, a.Has)
}

// WithOdds is the space with each factor's odds multiplied.
func (s Space) WithOdds(odds map[string]float64) Space {
	s.Factors = slices.Clone(s.Factors)
	for i := range s.Factors {
		if by, ok := odds[s.Factors[i].Name]; ok {
			s.Factors[i].Odds = cmp.Or(s.Factors[i].Odds, 1) * by
		}
	}
	return s
}

// Fingerprint is the same for spaces that hold the same: records made for one
// can be used for the other.
func (s Space) Fingerprint() string {
	data, err := json.Marshal(s)
	if err != nil {
		panic(err) // a Space holds nothing that JSON can't
	}
	sum := sha256.Sum256(data)
	return hex.EncodeToString(sum[:])
}

// Validate says what is wrong with a space, if anything.
func (s Space) Validate() error {
	if len(s.Factors) == 0 {
		return fmt.Errorf("factors: there are none")
	}
	byName := map[string]Factor{}
	for _, f := range s.Factors {
		if err := f.validate(); err != nil {
			return fmt.Errorf("factor %q: %w", f.Name, err)
		}
		if _, twice := byName[f.Name]; twice {
			return fmt.Errorf("factor %q: is there twice", f.Name)
		}
		byName[f.Name] = f
	}
	for _, part := range s.Forbidden {
		if len(part) == 0 {
			return fmt.Errorf("forbidden: an empty combination forbids every arm")
		}
		for name, level := range part {
			f, ok := byName[name]
			if !ok {
				return fmt.Errorf("forbidden %s: no factor %q", part, name)
			}
			if f.Level(level) < 0 {
				return fmt.Errorf("forbidden %s: factor %q has no level %q", part, name, level)
			}
		}
	}
	if !s.Allowed(s.Failing()) {
		return fmt.Errorf("forbidden: the failing arm (%s) is forbidden", s.Failing())
	}
	return nil
}

func (f Factor) validate() error {
	if f.Name == "" {
		return fmt.Errorf("has no name")
	}
	seen := map[string]bool{}
	for _, l := range f.Levels {
		switch l.Role {
		case Suspect, Safe, "":
		default:
			return fmt.Errorf("level %q: role is %q, must be %q, %q or left out", l.Name, l.Role, Suspect, Safe)
		}
		if seen[l.Name] {
			return fmt.Errorf("level %q: is there twice", l.Name)
		}
		if l.RequestCost < 0 {
			return fmt.Errorf("level %q: request cost is %g, must not be negative", l.Name, l.RequestCost)
		}
		seen[l.Name] = true
	}
	switch {
	case len(f.Levels) < 2:
		return fmt.Errorf("has %d levels, needs two or more", len(f.Levels))
	case f.Failing() < 0:
		return fmt.Errorf("no level is suspect: which one do things fail with?")
	case f.Safe() < 0:
		return fmt.Errorf("no level is safe: what should be tried instead?")
	case f.Odds < 0:
		return fmt.Errorf("odds are %g, must not be negative", f.Odds)
	}
	return nil
}

// Package fault holds the lab's deliberate bugs by name and decides when one
// strikes. The code where a bug would be asks
//
//	if faults.On(fault.StaleIndexK, env) { // the bug
//
// which costs a comparison while the fault isn't set. Its API may change.
package fault

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/expr-lang/expr/vm"
)

// Set is the faults of one server. A nil Set has none. It may be used by any
// number of goroutines.
type Set struct {
	armed  [count]*armed
	report func(error)
}

// armed is a fault that was asked for.
type armed struct {
	rate float64 // how often it strikes where it could
	when *vm.Program

	mu  sync.Mutex
	pcg rand.PCG
	rng *rand.Rand // draws from pcg
	vm  vm.VM
	err error
}

// Parse reads the values of --fault, NAME[,rate=R][,when=EXPR][,per-launch].
// Draws come from the seed, each fault's from a source of its own. It returns
// nil if there are none.
func Parse(specs []string, seed uint64) (*Set, error) {
	if len(specs) == 0 {
		return nil, nil
	}
	s := &Set{}
	for _, spec := range specs {
		if err := s.parse(spec, seed); err != nil {
			return nil, fmt.Errorf("fault %q: %w", spec, err)
		}
	}
	return s, nil
}

func (s *Set) parse(spec string, seed uint64) error {
	parts := strings.Split(spec, ",")
	f, err := ByName(parts[0])
	if err != nil {
		return err
	}
	if s.armed[f] != nil {
		return errors.New("it is named twice; join the conditions with or")
	}
	a := &armed{rate: 1, pcg: *rand.NewPCG(seed, uint64(f))}
	a.rng = rand.New(&a.pcg)
	perLaunch := false
	for i := 1; i < len(parts); i++ {
		key, value, _ := strings.Cut(parts[i], "=")
		switch {
		case parts[i] == "per-launch":
			perLaunch = true
		case key == "rate":
			a.rate, err = strconv.ParseFloat(value, 64)
			if err != nil || !(a.rate >= 0 && a.rate <= 1) {
				return fmt.Errorf("rate is %q, want a number from 0 to 1", value)
			}
		case key == "when":
			// An expression may have commas; it ends where another option starts.
			for i+1 < len(parts) && parts[i+1] != "per-launch" && !strings.HasPrefix(parts[i+1], "rate=") {
				i++
				value += "," + parts[i]
			}
			if a.when, err = compile(value); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unknown option %q; there are rate=R, when=EXPR and per-launch", parts[i])
		}
	}
	if perLaunch {
		a.rate *= a.rng.Float64()
	}
	s.armed[f] = a
	return nil
}

// Copy returns a set that will draw as s does from now on.
func (s *Set) Copy() *Set {
	if s == nil {
		return nil
	}
	c := &Set{}
	for f, a := range s.armed {
		if a == nil {
			continue
		}
		a.mu.Lock()
		b := &armed{rate: a.rate, when: a.when, pcg: a.pcg}
		a.mu.Unlock()
		b.rng = rand.New(&b.pcg)
		c.armed[f] = b
	}
	return c
}

// ByName finds a fault; an error names the nearest.
func ByName(name string) (Fault, error) {
	names := make([]string, count)
	for i, e := range catalogue {
		if e.Name == name {
			return e.Fault, nil
		}
		names[i] = e.Name
	}
	return 0, fmt.Errorf("there is no fault %q; nearest is %q (culprit lab faults lists them)", name, nearest(name, names))
}

// Has reports whether a fault is set, whenever it may strike.
func (s *Set) Has(f Fault) bool { return s != nil && s.armed[f] != nil }

// Report has f called with the error of each expression that fails, at most one
// for a fault, by the goroutine that asked. It must be set before the first On;
// a copy doesn't report.
func (s *Set) Report(f func(error)) {
	if s != nil {
		s.report = f
	}
}

// On reports whether a fault strikes now: it is set, its expression holds, and
// the draw of its rate says so.
func (s *Set) On(f Fault, env *Env) bool {
	if s == nil || s.armed[f] == nil {
		return false
	}
	strikes, err := s.armed[f].on(env)
	if err != nil && s.report != nil {
		s.report(fmt.Errorf("fault %v: %w", f, err))
	}
	return strikes
}

func (a *armed) on(env *Env) (bool, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.when != nil {
		result, err := a.vm.Run(a.when, env)
		if err != nil {
			a.err, a.when = err, never
			return false, err
		}
		if !result.(bool) { // compile says so
			return false, nil
		}
	}
	return a.rate == 1 || a.rng.Float64() < a.rate, nil
}

// Rate is how often a fault strikes where it could: 0 if it isn't set.
func (s *Set) Rate(f Fault) float64 {
	if !s.Has(f) {
		return 0
	}
	return s.armed[f].rate
}

// Names lists the faults that are set.
func (s *Set) Names() []string {
	var names []string
	for f := range count {
		if s.Has(f) {
			names = append(names, f.String())
		}
	}
	return names
}

// Err is what went wrong in expressions since the start, such as a division by
// zero. A fault whose expression failed never strikes again.
func (s *Set) Err() error {
	if s == nil {
		return nil
	}
	var errs []error
	for f, a := range s.armed {
		if a == nil {
			continue
		}
		a.mu.Lock()
		if a.err != nil {
			errs = append(errs, fmt.Errorf("fault %v: %w", Fault(f), a.err))
		}
		a.mu.Unlock()
	}
	return errors.Join(errs...)
}

// nearest is the candidate with the fewest changes from a name.
func nearest(name string, candidates []string) string {
	return slices.MinFunc(candidates, func(a, b string) int { return distance(name, a) - distance(name, b) })
}

package design

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func space() Space {
	return Space{
		Factors: []Factor{
			{Name: "graph", Levels: []Level{{Name: "off", Role: Safe}, {Name: "on", Role: Suspect}}},
			{Name: "concurrency", Ordered: true, ClientSide: true, Levels: []Level{
				{Name: "1", Role: Safe, RequestCost: 8}, {Name: "8"}, {Name: "80", Role: Suspect}, {Name: "200"},
			}},
		},
		Forbidden: []Arm{{"graph": "off", "concurrency": "200"}},
	}
}

func TestArms(t *testing.T) {
	s := space()
	if err := s.Validate(); err != nil {
		t.Fatal(err)
	}
	if got, want := s.Failing().String(), "concurrency=80 graph=on"; got != want {
		t.Errorf("failing arm is %q, want %q", got, want)
	}
	if got, want := s.Safe().String(), "concurrency=1 graph=off"; got != want {
		t.Errorf("safe arm is %q, want %q", got, want)
	}
	if s.Allowed(Arm{"graph": "off", "concurrency": "200"}) || !s.Allowed(Arm{"graph": "on", "concurrency": "200"}) {
		t.Error("the wrong arm is forbidden")
	}
}

func TestValidate(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Space)
		want   string
	}{
		{"no factors", func(s *Space) { s.Factors = nil }, "there are none"},
		{"twice", func(s *Space) { s.Factors[1].Name = "graph" }, "twice"},
		{"one level", func(s *Space) { s.Factors[0].Levels = s.Factors[0].Levels[:1] }, "needs two or more"},
		{"no safe level", func(s *Space) { s.Factors[0].Levels[0].Role = "" }, "no level is safe"},
		{"no suspect level", func(s *Space) { s.Factors[0].Levels[1].Role = Safe }, "no level is suspect"},
		{"level twice", func(s *Space) { s.Factors[0].Levels[1].Name = "off" }, "twice"},
		{"role", func(s *Space) { s.Factors[0].Levels[1].Role = "bad" }, `role is "bad"`},
		{"unknown factor", func(s *Space) { s.Forbidden[0] = Arm{"grape": "on"} }, `no factor "grape"`},
		{"unknown level", func(s *Space) { s.Forbidden[0] = Arm{"graph": "in"} }, `no level "in"`},
		{"all forbidden", func(s *Space) { s.Forbidden[0] = Arm{} }, "forbids every arm"},
		{"failing forbidden", func(s *Space) { s.Forbidden[0] = Arm{"graph": "on"} }, "failing arm"},
		{"odds", func(s *Space) { s.Factors[0].Odds = -1 }, "negative"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := space()
			tt.change(&s)
			err := s.Validate()
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestStoredSpaceIsTheSame(t *testing.T) {
	s := space()
	for name, through := range map[string]func() (Space, error){
		"JSON": func() (back Space, err error) {
			data, err := json.Marshal(s)
			if err != nil {
				return back, err
			}
			return back, json.Unmarshal(data, &back)
		},
		"YAML": func() (back Space, err error) {
			data, err := yaml.Marshal(s)
			if err != nil {
				return back, err
			}
			return back, yaml.Unmarshal(data, &back)
		},
	} {
		back, err := through()
		if err != nil {
			t.Fatal(name, err)
		}
		if diff := cmp.Diff(s, back); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
		if s.Fingerprint() != back.Fingerprint() {
			t.Errorf("%s: the fingerprint changed", name)
		}
	}
	other := space()
	other.Factors[0].Odds = 2
	if s.Fingerprint() == other.Fingerprint() {
		t.Error("spaces that differ have one fingerprint")
	}
}

// Two arms have one string exactly when they are equal, whatever the names.
func TestArmStringIsCanonical(t *testing.T) {
	arms := rapid.MapOfN(rapid.StringOfN(rapid.RuneFrom([]rune(`ab =\"`)), 0, 3, -1), rapid.StringOfN(rapid.RuneFrom([]rune(`ab =\"`)), 0, 3, -1), 0, 3)
	rapid.Check(t, func(t *rapid.T) {
		a, b := Arm(arms.Draw(t, "a")), Arm(arms.Draw(t, "b"))
		if cmp.Equal(a, b) != (a.String() == b.String()) {
			t.Fatalf("%#v is %s, %#v is %s", a, a, b, b)
		}
	})
}

func TestInterleave(t *testing.T) {
	arms := []Arm{{"x": "1"}, {"x": "2"}, {"x": "3"}}
	p := Interleave(7, arms, 5)
	if diff := cmp.Diff(p, Interleave(7, arms, 5)); diff != "" {
		t.Errorf("the same seed gives another plan: %s", diff)
	}
	if cmp.Equal(p.Runs, Interleave(8, arms, 5).Runs) {
		t.Error("another seed gives the same plan")
	}
	count := map[int]map[string]int{}
	for _, r := range p.Runs {
		if count[r.Block] == nil {
			count[r.Block] = map[string]int{}
		}
		count[r.Block][r.Arm.String()]++
	}
	for b := range 5 {
		if diff := cmp.Diff(map[string]int{"x=1": 1, "x=2": 1, "x=3": 1}, count[b]); diff != "" {
			t.Errorf("block %d: %s", b, diff)
		}
	}
}

func TestWithOdds(t *testing.T) {
	s := Space{Factors: []Factor{{Name: "a"}, {Name: "b", Odds: 2}, {Name: "c"}}}
	got := s.WithOdds(map[string]float64{"a": 4, "b": 0.25, "x": 9})
	var odds []float64
	for _, f := range got.Factors {
		odds = append(odds, f.Odds)
	}
	if want := []float64{4, 0.5, 0}; !cmp.Equal(odds, want) {
		t.Errorf("odds are %v, want %v", odds, want)
	}
	if s.Factors[0].Odds != 0 {
		t.Error("the space itself was changed")
	}
}

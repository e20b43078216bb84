package fault

import (
	"strings"
	"testing"
)

func parse(tb testing.TB, seed uint64, specs ...string) *Set {
	tb.Helper()
	s, err := Parse(specs, seed)
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

func TestCatalogue(t *testing.T) {
	seen := map[string]bool{}
	for i, e := range Catalogue() {
		if e.Fault != Fault(i) || e.Fault.String() != e.Name || seen[e.Name] {
			t.Errorf("entry %d is %v, %q", i, e.Fault, e.Name)
		}
		seen[e.Name] = true
		if len(e.Summary) < 20 || len(e.Explanation) < 150 || e.From == "" || strings.Contains(e.Summary, "\n") {
			t.Errorf("%s isn't explained", e.Name)
		}
		if s := parse(t, 1, e.Name); !s.Has(e.Fault) || !s.On(e.Fault, &Env{}) || len(s.Names()) != 1 {
			t.Errorf("%s: its name doesn't set it, or sets others", e.Name)
		}
	}
}

func TestWhen(t *testing.T) {
	on := Env{
		Graph: true, AltStream: true, IndexK: "bf16", IndexKStore: "fused", Batch: 80, Tier: "host",
		Cancels: 3, PageSize: 64, TP: 2, Requests: 7, Toggle: map[string]bool{"A": true},
	}
	for _, test := range []struct {
		when string
		want bool
	}{
		{"graph", true},
		{"overlap", false},
		{"graph and not hicache", true},
		{"graph && batch > 1", true},
		{"batch > 80", false},
		{"batch in [1,80]", true},
		{"batch in 64..80 and page_size == 64", true},
		{`index_k == "bf16" and tier == "host"`, true},
		{`index_k in ["fp8"]`, false},
		{"toggle.A", true},
		{"toggle.B", false},
		{"toggle.A and !toggle.B and cancels >= 3", true},
		{"requests % 7 == 0", true},
		{"tp == 2 ? radix : graph", false},
	} {
		s := parse(t, 1, "poison,when="+test.when+",rate=1")
		if got := s.On(Poison, &on); got != test.want {
			t.Errorf("%s is %v", test.when, got)
		}
		if err := s.Err(); err != nil {
			t.Errorf("%s: %v", test.when, err)
		}
	}
	if s := parse(t, 1, "poison,when=toggle.A"); s.On(Poison, &Env{}) {
		t.Error("a toggle is on where there are none")
	}
}

func TestParseErrors(t *testing.T) {
	for _, test := range []struct{ spec, want string }{
		{"capture-alais", `there is no fault "capture-alais"; nearest is "capture-alias"`},
		{"", `there is no fault ""`},
		{"poison,rate=2", `rate is "2", want a number from 0 to 1`},
		{"poison,rate=NaN", `rate is "NaN"`},
		{"poison,rate=", `rate is ""`},
		{"poison,often", `unknown option "often"`},
		{"poison,when=", "when=: unexpected token EOF"},
		{"poison,when=grahp", `there is no variable "grahp"; nearest is "graph"`},
		{"poison,when=batch > 1 and", "when=: unexpected token EOF"},
		{"poison,when=batch", "when=: expected bool, but got int"},
		{"poison,when=graph > 1", "when=: invalid operation"},
		{`poison,when=index_k == "bf61"`, `index_k is never "bf61"; nearest is "bf16"`},
		{`poison,when="hots" == tier`, `tier is never "hots"; nearest is "host"`},
		{`poison,when=layout in ["page_first","layer_frist"]`, `layout is never "layer_frist"; nearest is "layer_first"`},
		{"poison,when=len(tier) > 1", `there are no functions, so no "len"`},
	} {
		_, err := Parse([]string{test.spec}, 1)
		if err == nil || !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v, want %q", test.spec, err, test.want)
		}
	}
	if _, err := Parse([]string{"poison", "poison,rate=0.1"}, 1); err == nil || !strings.Contains(err.Error(), "named twice") {
		t.Error(err)
	}
}

// strikes is how often a fault strikes in n cases.
func strikes(s *Set, f Fault, n int) (hits int, pattern string) {
	for range n {
		if s.On(f, &Env{}) {
			hits++
			pattern += "x"
		} else {
			pattern += "."
		}
	}
	return hits, pattern
}

func TestRate(t *testing.T) {
	const n = 10_000
	for _, test := range []struct {
		spec      string
		low, high int
	}{{"poison,rate=0", 0, 0}, {"poison,rate=0.2", 1800, 2200}, {"poison,rate=1", n, n}, {"poison", n, n}} {
		if hits, _ := strikes(parse(t, 1, test.spec), Poison, n); hits < test.low || hits > test.high {
			t.Errorf("%s strikes %d times in %d", test.spec, hits, n)
		}
	}
	_, first := strikes(parse(t, 1, "poison,rate=0.5"), Poison, 100)
	if _, again := strikes(parse(t, 1, "poison,rate=0.5"), Poison, 100); again != first {
		t.Error("one seed strikes in two ways")
	}
	if _, other := strikes(parse(t, 2, "poison,rate=0.5"), Poison, 100); other == first {
		t.Error("two seeds strike in the same way")
	}
	both := parse(t, 1, "poison,rate=0.5", "slow-decay,rate=0.5")
	_, decay := strikes(both, SlowDecay, 100)
	if _, again := strikes(both, Poison, 100); again != first {
		t.Error("another fault's draws change this one's")
	}
	if decay == first {
		t.Error("two faults strike together")
	}
}

func TestPerLaunch(t *testing.T) {
	var sum, least, most float64 = 0, 1, 0
	const launches = 200
	for seed := range uint64(launches) {
		rate := parse(t, seed, "poison,rate=0.6,per-launch").Rate(Poison)
		if rate != parse(t, seed, "poison,per-launch,rate=0.6").Rate(Poison) {
			t.Fatal("one seed gives two rates")
		}
		sum, least, most = sum+rate, min(least, rate), max(most, rate)
	}
	if mean := sum / launches; mean < 0.25 || mean > 0.35 || least > 0.05 || most < 0.55 || most > 0.6 {
		t.Errorf("rates from %v to %v, on average %v", least, most, mean)
	}
}

func TestUnset(t *testing.T) {
	var none *Set
	if none.Has(Poison) || none.On(Poison, nil) || none.Names() != nil || none.Err() != nil || none.Rate(Poison) != 0 {
		t.Error("a nil set has something")
	}
	if s, err := Parse(nil, 1); s != nil || err != nil {
		t.Error(s, err)
	}
	s := parse(t, 1, "poison")
	if s.On(SlowDecay, nil) || s.Has(SlowDecay) || s.Rate(SlowDecay) != 0 {
		t.Error("a fault is on that isn't set")
	}
}

func TestFailingExpression(t *testing.T) {
	s := parse(t, 1, "poison,when=requests % cancels == 0")
	if !s.On(Poison, &Env{Requests: 4, Cancels: 2}) {
		t.Fatal("it doesn't strike where it should")
	}
	var reported []error
	s.Report(func(err error) { reported = append(reported, err) })
	for range 2 {
		if s.On(Poison, &Env{}) {
			t.Error("it strikes though its expression failed")
		}
	}
	if len(reported) != 1 || reported[0].Error() != s.Err().Error() {
		t.Errorf("reported %v, want once %v", reported, s.Err())
	}
	if err := s.Err(); err == nil || !strings.Contains(err.Error(), "fault poison: ") {
		t.Error(err)
	}
	if s.On(Poison, &Env{Requests: 4, Cancels: 2}) {
		t.Error("it strikes after its expression failed")
	}
}

func FuzzParse(f *testing.F) {
	for _, spec := range []string{
		"poison", "poison,rate=0.5,per-launch", "capture-alias,when=batch > 1 and toggle.A,rate=1",
		`host-stride,when=tier in ["host","device"]`, "poison,when=", "poison,when=1/0 == 1", "poison,when=((((",
	} {
		f.Add(spec)
	}
	f.Fuzz(func(t *testing.T, spec string) {
		s, err := Parse([]string{spec}, 1)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "fault ") {
				t.Error(err)
			}
			return
		}
		for f := range count {
			s.On(f, &Env{Batch: 3, IndexK: "fp8"})
		}
		s.Err()
	})
}

// What a fault costs: not set, set without and with an expression.
func BenchmarkOn(b *testing.B) {
	env := &Env{Graph: true, Batch: 80, IndexK: "bf16", Toggle: map[string]bool{"A": true}}
	for _, test := range []struct{ name, spec string }{
		{"none", ""},
		{"another", "poison"},
		{"always", "capture-alias"},
		{"when", "capture-alias,when=graph and batch > 1"},
		{"toggle", `capture-alias,when=index_k == "bf16" and toggle.A`},
	} {
		b.Run(test.name, func(b *testing.B) {
			var s *Set
			if test.spec != "" {
				s = parse(b, 1, test.spec)
			}
			b.ReportAllocs()
			for b.Loop() {
				s.On(CaptureAlias, env)
			}
		})
	}
}

// TestCopyDrawsAlike: a copy goes on as the original does.
func TestCopyDrawsAlike(t *testing.T) {
	a, err := Parse([]string{"poison,rate=0.5", "slow-decay,when=batch > 1"}, 3)
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		a.On(Poison, &Env{})
	}
	b, struck := a.Copy(), 0
	for i := range 200 {
		env := Env{Batch: i % 3}
		x, y := a.On(Poison, &env), b.On(Poison, &env)
		if x != y || a.On(SlowDecay, &env) != b.On(SlowDecay, &env) {
			t.Fatalf("draw %d: %t and %t", i, x, y)
		}
		if x {
			struck++
		}
	}
	if struck == 0 || struck == 200 || (*Set)(nil).Copy() != nil {
		t.Errorf("%d of 200", struck)
	}
}

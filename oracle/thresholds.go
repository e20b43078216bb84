package oracle

// Rule is what the verdict does with one class of violation.
type Rule struct {
	Class  Class
	Means  Status // Corrupt, Wedged or Numerics
	Source Source
	// Tolerance is the rate that a sound server may show: a class of source
	// Server convicts when its rate is above it for certain (the interval's
	// lower bound; with tolerance 0, a single op).
	Tolerance float64
	// MinExcess is the smallest excess over the control arm, as a rate,
	// that convicts; the excess' lower bound must reach it.
	MinExcess float64
	Why       string // the reason for these numbers, in one sentence
	// FalseAlarm is what was measured on healthy servers.
	FalseAlarm Measured
}

// Source says who can cause a violation.
type Source string

// The sources.
const (
	// Server: no model does it, however weak, as long as the server is sound.
	Server Source = "server"
	// Model: a weak model does it too, so only an excess over the control
	// arm is the server's doing.
	Model Source = "model"
)

// Measured is a rate that was counted. The zero value says that it hasn't
// been measured yet.
type Measured struct {
	Alarms, Trials int
	On             string // what it was counted on
}

// Classes is the one table of what may be found, and what it takes to convict.
var Classes = []Rule{
	// Tool calls: toolcall.go.
	{Class: DroppedCall, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips},
	{Class: MarkupLeak, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: "a weak model writes call markup that its parser can't read; a sound server does it no more often under load"},
	{Class: InvalidJSON, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips},
	{Class: UnknownName, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips},
	{Class: SchemaMismatch, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips},
	{Class: WrongArgument, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips},

	// Another session's secret: canary.go.
	{Class: ForeignCanary, Means: Corrupt, Source: Server, Tolerance: 0, Why: "a session's canary is 60 random bits that no other session's prompt holds, and 8 of its characters are 40: a chance match in a 2 GB history against 10,000 canaries has odds under 1 in 10,000"},
}

// Reasons that several rules share.
const (
	modelSlips = "models slip alone and cold too, so only the excess over the control arm is the server's"
)

// smallestExcess is the excess over the control arm that is worth a verdict:
// half a percent of the ops. Below it a run would need thousands of ops to
// tell a server's doing from the model's.
const smallestExcess = 0.005

// rule finds a class' row.
func rule(c Class) (Rule, bool) {
	for _, r := range Classes {
		if r.Class == c {
			return r, true
		}
	}
	return Rule{}, false
}

// The verdict: judge.go.
const (
	// level of all intervals.
	level = 0.95
	// significance is the error that a whole run's comparison with its
	// control may have, shared by all classes (Holm).
	significance = 0.01
)

// Canaries: canary.go.
const (
	// canaryPrefix is how many characters of a canary are enough to call it
	// a leak. Corruption often cuts text short; 8 characters of base 32 are
	// 40 random bits.
	canaryPrefix = 8
)

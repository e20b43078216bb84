package oracle

import "time"

// Rule is what the verdict does with one class of violation.
type Rule struct {
	Class  Class
	Means  Status // Corrupt, Wedged or Numerics
	Source Source
	Rests  Evidence
	// Tolerance is the rate that a sound server may show: a class of source
	// Server convicts when its rate is above it for certain (the interval's
	// lower bound; with tolerance 0, a single op).
	Tolerance float64
	// MinExcess is the smallest excess over the control arm, as a rate,
	// that convicts, beside being more than chance.
	MinExcess float64
	Why       string // the reason for these numbers, in one sentence
	// FalseAlarm is how often it was found where nothing was wrong.
	FalseAlarm Measured
	// WeakModel is how often a weak model did it on healthy servers: no false
	// alarms, but mistakes of its own.
	WeakModel Measured
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

// Evidence is what a class rests on.
type Evidence int

// The kinds of evidence, the one that needs the least of the client first.
const (
	// Replies: what they say. Nothing that the client does makes them wrong.
	Replies Evidence = iota
	// Connections: that a reply broke off or never came. A client that stood
	// still for long may have lost it.
	Connections
	// Times: when something came, by the client's own clock.
	Times
)

// Measured is a rate that was counted. The zero value says that it hasn't
// been measured yet.
type Measured struct {
	Alarms int    `json:"alarms"`
	Trials int    `json:"trials"`
	On     string `json:"on"` // what it was counted on
}

// Classes is the one table of what may be found, and what it takes to convict.
var Classes = []Rule{
	// Tool calls: toolcall.go.
	{Class: DroppedCall, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 320, rightReplies}, WeakModel: Measured{80, 384, weakModel}},
	{Class: MarkupLeak, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: "a weak model writes call markup that its parser can't read; a sound server does it no more often under load", FalseAlarm: Measured{0, 3920, rightReplies}, WeakModel: Measured{0, 960, weakModel}},
	{Class: InvalidJSON, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 443, rightReplies}, WeakModel: Measured{42, 384, weakModel}},
	{Class: UnknownName, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 320, rightReplies}, WeakModel: Measured{0, 384, weakModel}},
	{Class: SchemaMismatch, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 443, rightReplies}, WeakModel: Measured{0, 384, weakModel}},
	{Class: WrongArgument, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 320, rightReplies}, WeakModel: Measured{211, 384, weakModel}},

	// The text itself: script.go, run.go, repetition.go, special.go, empty.go.
	{Class: MixedScripts, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: "a weak or multilingual model strays into other scripts alone too", FalseAlarm: Measured{878, 261834, ordinaryText}},
	{Class: BrokenText, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: "a model that writes bytes can write half a character alone too", FalseAlarm: Measured{47, 261834, ordinaryText}},
	{Class: ConstantRun, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{128, 261834, ordinaryText}},
	{Class: Repetition, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: "small greedy models loop alone too", FalseAlarm: Measured{455, 261834, ordinaryText}},
	{Class: SpecialToken, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: "some servers show special tokens alone too, and a model can spell one out", FalseAlarm: Measured{39, 261834, ordinaryText}},
	{Class: EmptyReply, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 3920, rightReplies}, WeakModel: Measured{0, 960, weakModel}},
	{Class: CutReply, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 3920, rightReplies}, WeakModel: Measured{0, 960, weakModel}},

	// What was to be repeated or remembered: echo.go, recall.go.
	{Class: EchoFirstToken, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 705, rightReplies}, WeakModel: Measured{28, 256, weakModel}},
	{Class: EchoDoubled, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 705, rightReplies}, WeakModel: Measured{0, 256, weakModel}},
	{Class: EchoDropped, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 705, rightReplies}, WeakModel: Measured{10, 256, weakModel}},
	{Class: EchoSubstituted, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 705, rightReplies}, WeakModel: Measured{0, 256, weakModel}},
	{Class: RecallLost, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: modelSlips, FalseAlarm: Measured{0, 2375, rightReplies}, WeakModel: Measured{177, 256, weakModel}},

	// The form of replies: integrity.go.
	{Class: NoFinish, Means: Corrupt, Source: Server, Tolerance: 0, Why: "the protocol ends every reply with a finish_reason, whatever the model says", FalseAlarm: Measured{0, 1175, healthyServers}},
	{Class: BrokenStream, Means: Corrupt, Source: Server, Rests: Connections, Tolerance: 0.005, Why: "a connection may break on its way once in a long run", FalseAlarm: Measured{0, 1175, healthyServers}},
	{Class: StreamGap, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: serverDialects, FalseAlarm: Measured{0, 4082, rightReplies}, WeakModel: Measured{0, 992, weakModel}},
	{Class: BadUsage, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: serverDialects, FalseAlarm: Measured{0, 3920, rightReplies}, WeakModel: Measured{0, 960, weakModel}},
	{Class: StreamMismatch, Means: Corrupt, Source: Model, MinExcess: smallestExcess, Why: "two samples of one prompt may call differently alone too", FalseAlarm: Measured{0, 294, rightReplies}, WeakModel: Measured{0, 64, weakModel}},

	// Stuck servers: wedge.go, poison.go.
	{Class: SlowFirstToken, Means: Wedged, Source: Server, Rests: Times, Tolerance: 0.005, Why: "one long wait in hundreds may be a collection or a recompilation", FalseAlarm: Measured{0, 1105, healthyServers}},
	{Class: Stalled, Means: Wedged, Source: Server, Rests: Times, Tolerance: 0.005, Why: "one long pause in hundreds may be a preemption", FalseAlarm: Measured{0, 1041, healthyServers}},
	{Class: NoTokens, Means: Wedged, Source: Server, Rests: Times, Tolerance: 0, Why: "a server that moves gives some request a token in five times its slowest usual prefill", FalseAlarm: Measured{0, 2951, healthyServers}},
	{Class: HealthLies, Means: Wedged, Source: Server, Rests: Connections, Tolerance: 0, Why: "a health check that says yes while a one-token generation fails is the wedge that monitoring doesn't see"},
	{Class: Poisoned, Means: Wedged, Source: Server, Rests: Connections, Tolerance: 0, Why: "three plain requests in a row don't fail by chance on a server that works", FalseAlarm: Measured{0, 133, healthyServers}},

	// Code that must not run: path.go.
	{Class: ForbiddenPath, Means: Corrupt, Source: Server, Tolerance: 0, Why: "whoever wrote the pack says that this code must never run, and a probe in the process counted it"},

	// Greedy replies that differ: numerics.go.
	{Class: GreedyDiffers, Means: Numerics, Source: Server, Tolerance: 0, Why: "another batch makes another order of additions, so different isn't wrong", FalseAlarm: Measured{17, 165, healthyServers}},
	{Class: GreedyImpossible, Means: Corrupt, Source: Server, Tolerance: 0, Why: "rounding moves a logit by a few tenths of a nat, so it can't choose a token that the reference puts more than 2 nat lower"},

	// Another session's secret: canary.go.
	{Class: ForeignCanary, Means: Corrupt, Source: Server, Tolerance: 0, Why: "a session's canary is random, and no other session's prompt holds it", FalseAlarm: Measured{0, 1203, healthyServers}},
}

// Reasons that several rules share.
const (
	modelSlips = "models slip alone and cold too, so only the excess over the control arm is the server's"
	// ordinaryText is what TestFalseAlarms cuts into pieces of 2,400 bytes, each
	// with the piece before it as its prompt, and counts on: a machine's manual
	// pages (a tenth of them in 22 other languages), package documentation,
	// READMEs, and Python's and Go's own source with their tests. Nearly all
	// alarms are texts about the very thing: tables of characters, names in
	// their own script, generated tables of like rows, PostScript, chat
	// templates.
	ordinaryText = "ordinary text and code"
	// rightReplies are those of TestPerfectServer, to all kinds of workload.
	rightReplies = "right replies"
	// healthyServers and weakModel are what examples/llama-cpp and
	// examples/vllm-cpu count on, under load and alone: 16 runs, in which no
	// class was called the server's doing. What a weak model gets wrong there
	// isn't a false alarm.
	healthyServers = "healthy llama.cpp and vLLM servers"
	weakModel      = "Gemma 3 270M, a weak model, on healthy llama.cpp and vLLM servers"
	serverDialects = "servers have their dialects and show them alone too, so only the excess over the control arm is damage"
)

// smallestExcess is the excess over the control arm that is worth a verdict:
// half a percent of the ops. Below it a run would need thousands of ops to
// tell a server's doing from the model's.
const smallestExcess = 0.005

// The verdict: judge.go.
const (
	// level of all intervals.
	level = 0.95
	// significance is the error that a whole run's comparison with its
	// control may have, shared by all classes (Holm).
	significance = 0.01
	// loadSignificance and loadExcess hold where there is no control arm and
	// only the run's own quiet moments can be compared with its busy ones.
	// These aren't drawn by lot, and a session's turns aren't independent, so
	// ten times as much is asked for.
	loadSignificance = 0.001
	loadExcess       = 0.05
)

// Assumptions: assumptions.go.
const (
	// failedShare of ops without an answer: above it the rest is no longer
	// the load that was planned.
	failedShare = 0.20
	// brokenShare of ops answered with a server's error: above it the server
	// isn't sound, whatever its other replies say. A 503 doesn't count: a
	// server at its limit sheds load with it.
	brokenShare = 0.01
	// lateLimit is how late a request may be sent in open loop (99th
	// percentile), and a tick of the client may come: a quarter of a second
	// changes no batch that a server forms from requests lasting seconds.
	lateLimit = 250 * time.Millisecond
	// lateParts: in closed loop, a quarter of what a usual reply takes is
	// the limit where that is longer. A client that is late by less keeps at
	// least three quarters of the planned requests before the server.
	lateParts = 4
	// lateTicks is the share of ticks that may be later.
	lateTicks = 0.10
	// busyShare of its cores is what the client may use at most: above it
	// it is the client that is measured.
	busyShare = 0.90
	// standstill of the client for so long (a suspended machine, a stopped
	// process) can't be told from a server that stalls.
	standstill = 5 * time.Second
	// togetherLimit is how far apart shards may have begun: what is judged by
	// times across sessions takes several seconds.
	togetherLimit = time.Second
	// coldTokens is how many tokens of a prompt aren't cached, at least, when
	// it wasn't sent before: its canary and its question are more. Of one that
	// was, what is less than a page isn't cached either, at most 16 tokens in
	// most servers.
	coldTokens = 16
	// reachedLoad is the share of the planned concurrency that counts as
	// reached, and reachedTime the share of the time in which it has to be.
	reachedLoad = 0.90
	reachedTime = 0.50
)

// Canaries: canary.go.
const (
	// canaryPrefix is how many characters of a canary are enough to call it
	// a leak, since corruption often cuts text short. They are 40 random
	// bits: if 320 replies of 1,000 characters were random letters
	// throughout, one of 160 canaries would begin in them by chance in one
	// run of 20,000; all 12 characters, in one of 20 billion.
	canaryPrefix = 8
	// canaryPrefixSessions is how many sessions that is for: with so many, one
	// run of 500 such, and of ordinary text far fewer, since most of it isn't
	// made of eight such characters in a row. See canaryPrefixOf.
	canaryPrefixSessions = 512
	// besideSessions after the run's own lend their first turns to the plain
	// requests that follow a failure; experiment sends three.
	besideSessions = 8
)

// Constant runs: run.go.
const (
	// runTokens is how often one character or token may come in a row.
	runTokens = 24
	// letterRun is the same for letters and digits: hashes of zeros have 64,
	// test strings some more.
	letterRun = 128
	// ruleRun is the same for space and for what lines are drawn with.
	ruleRun = 512
	// runWindow and windowShare: a token that is more than so many percent
	// of a window of tokens.
	runWindow   = 64
	windowShare = 60
)

// Loops: repetition.go.
const (
	loopTimes  = 8    // repeats of one phrase at a reply's end
	loopPeriod = 1000 // bytes of the longest such phrase, some 200 tokens
	loopTail   = loopTimes * loopPeriod
	loopBytes  = 128 // bytes of the shortest loop: eight equal short lines of a table are none
	// phraseShare is how much of the last loopWords words one phrase of four
	// may cover, in a reply that ran into its limit. Tables of like rows
	// reach 0.5.
	phraseShare = 0.6
	loopWords   = 512
)

// Scripts: script.go.
const (
	strangeLetters = 8 // of one script that the prompt doesn't use
	strangeScripts = 3 // that the prompt doesn't use
	brokenRunes    = 2 // U+FFFD or bytes that aren't UTF-8
)

// Cut replies: empty.go.
const (
	// cutShare is the percentage of Expect.MinChars below which a reply that
	// stopped by itself is cut.
	cutShare = 50
)

// Usage: integrity.go.
const (
	// tokensOver is how many tokens over max_tokens may be counted: the end
	// token, and one in flight.
	tokensOver = 2
	// tokenBytes is more than any token's text: the longest of common
	// vocabularies are runs of 128 spaces or signs.
	tokenBytes = 256
)

// Poison: poison.go.
const (
	poisonedAfter = 3  // plain requests in a row that go wrong
	deadAfter     = 10 // ops sent after the last good reply, all failing
	// garbledShare of the usual replies is what may be garbled (Laplace's
	// estimate) for three garbled ones in a row to mean anything: by chance
	// these come once in a thousand times.
	garbledShare = 0.10
	usualOps     = 100 // that are looked at to know it
)

// Numerics: numerics.go. Margins in nats.
const (
	// numericsMargin is what another order of additions moves a logit by at
	// most, in bf16 or fp8.
	numericsMargin = 0.5
	// impossibleMargin is more than any rounding was seen to move one.
	impossibleMargin = 2.0
)

// Wedge: wedge.go.
const (
	slowFloor   = 30 * time.Second       // a wait below it is never too long
	slowTimes   = 20                     // times the median
	normSamples = 5                      // ops that make a norm
	quietTicks  = 3                      // ticks in a row without a token
	quietFloor  = 10 * time.Second       // that they span at least
	quietTimes  = 5                      // and times the slowest usual first token
	clientStall = 500 * time.Millisecond // a tick so late is the client's own stall
	healthNear  = 5 * time.Second        // a health check so soon after counts as at the same time
)

package load_test

import (
	"flag"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// serve makes the test binary a server, so that a benchmark's figures are the
// client's alone.
var serve = flag.Bool("serve", false, "be the server of the benchmarks, until standard input ends")

// agent makes the test binary one of BenchmarkAgents.
var agent = flag.String("agent", "", "be one of a benchmark's agents: URL SHARD SHARDS STREAMS")

var agentStreams = flag.Int("streams", 400, "streams of each of BenchmarkAgents' agents")

func TestMain(m *testing.M) {
	flag.Parse()
	if *serve {
		serveChunks()
		os.Exit(0)
	}
	if *agent != "" {
		playAgent(*agent)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/culprit-project/culprit/lab"
	"github.com/culprit-project/culprit/lab/api"
	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/host"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
)

// labServe is the command "culprit lab serve". Where SGLang has a flag, this
// one has its name.
type labServe struct {
	Host     string `default:"127.0.0.1" help:"Address to listen on."`
	Port     int    `default:"30000" help:"Port to listen on; 0 picks a free one."`
	AddrFile string `type:"path" placeholder:"FILE" help:"Write the server's URL to this file when it listens."`

	ServedModelName string `default:"culprit-lab" placeholder:"NAME" help:"The model's name (default: ${default})."`
	LoadFormat      string `enum:"auto,dummy" default:"auto" help:"auto: the trained weights; dummy: seeded random ones."`

	PageSize           int  `placeholder:"N" help:"Tokens of a page of the cache, a multiple of 16 (default: ${page_size})."`
	MaxTotalTokens     int  `placeholder:"N" help:"Tokens that the cache holds (default: ${max_total_tokens})."`
	MaxRunningRequests int  `placeholder:"N" help:"Requests that have pages at once (default: ${max_running_requests})."`
	ChunkedPrefillSize int  `placeholder:"N" help:"The most tokens that one step prefills (default: ${chunked_prefill_size})."`
	DisableRadixCache  bool `help:"Don't share the pages of common prefixes."`
	disaggregation     `embed:""`

	TpSize                 int  `placeholder:"N" help:"Tensor-parallel ranks, in one process: 1, 2 or 4 (default: 1)."`
	DisableOverlapSchedule bool `help:"Commit each step before the next one is scheduled."`

	IndexKDtype string `enum:"fp8,bf16" default:"fp8" help:"How index keys are stored: fp8 or bf16."`

	IndexKStore string `enum:"fused,scatter" default:"fused" help:"Which store writes bf16 index keys: fused or scatter."`

	DisableCudaGraph bool    `help:"Run decode steps eagerly, instead of replaying captured ones."`
	CudaGraphBs      []int   `placeholder:"N" help:"Batches that decode steps are captured for (default: 1, 2, 4, 8, 12, 16, 24 and so on)."`
	DisableAltStream bool    `help:"Captured steps run the indexer on the main stream."`
	StreamJitter     float64 `default:"${stream_jitter}" placeholder:"X" help:"How often one stream of a captured step overtakes the other, above 0, at most 1 (default: ${default})."`

	EnableHierarchicalCache bool    `help:"Keep prefixes in host memory too, and load them from there."`
	HicacheRatio            float64 `default:"2" placeholder:"X" help:"Tokens of the host tier for each of the device's (default: ${default})."`
	HicacheSize             float64 `placeholder:"GB" help:"Size of the host tier in gigabytes, in place of the ratio."`
	HicacheWritePolicy      string  `enum:"write_through,write_back" default:"write_through" help:"When pages are copied to the host: write_through, at once, or write_back, when the device needs the room."`
	HicacheMemLayout        string  `enum:"layer_first,page_first" default:"page_first" help:"How pages stand in host memory: page_first or layer_first."`
	HicachePartialPages     bool    `help:"Load the beginning of a host page too, token by token."`

	Workers    int     `placeholder:"N" help:"Threads of the forward pass (default: one per processor, but one, at most 8)."`
	RandomSeed *uint64 `aliases:"seed" placeholder:"N" help:"Seed of requests that bring none, of the streams and of faults (default: drawn at start)."`

	NumContinuousDecodeSteps int `placeholder:"N" help:"Decode steps in a row before new requests are let in (default: 1)."`

	Fault  []string `sep:"none" placeholder:"NAME[,rate=R][,when=EXPR][,per-launch]" help:"Break the server on purpose; \"culprit lab faults\" lists the ways. Repeatable."`
	Toggle []string `sep:"none" placeholder:"NAME" help:"Switch something on that only the expressions of faults ask about. Repeatable."`
}

const gcPercent = 20 // of the live heap

// drainTime is how long a server that is told to stop lets requests go on.
const drainTime = 3 * time.Second

// labDefaults are what zero values become, by the names that help texts use.
func labDefaults() map[string]string {
	return map[string]string{
		"page_size":            strconv.Itoa(lab.DefaultPageSize),
		"max_total_tokens":     strconv.Itoa(lab.DefaultMaxTokens),
		"max_running_requests": strconv.Itoa(lab.DefaultMaxRunning),
		"chunked_prefill_size": strconv.Itoa(lab.DefaultChunkTokens),
		"stream_jitter":        strconv.FormatFloat(lab.DefaultStreamJitter, 'g', -1, 64),
	}
}

// config is what the flags ask for, without model and seed.
func (c *labServe) config() lab.Config {
	config := lab.Config{
		PageSize: c.PageSize, MaxTokens: c.MaxTotalTokens, MaxRunning: c.MaxRunningRequests, ChunkTokens: c.ChunkedPrefillSize,
		NoRadix: c.DisableRadixCache, Workers: c.Workers,
		NoGraph: c.DisableCudaGraph, GraphBatches: c.CudaGraphBs, NoAltStream: c.DisableAltStream,
		StreamJitter: c.StreamJitter, IndexKScatter: c.IndexKStore == "scatter", Toggle: c.Toggle,
		DecodeSteps: c.NumContinuousDecodeSteps,
	}
	config.NoOverlap, config.Ranks = c.DisableOverlapSchedule, c.TpSize
	c.apply(&config)
	if config.Workers == 0 {
		// A processor is left for the client, which often runs beside the lab:
		// one that can't keep up with its own clock can't judge a server.
		config.Workers = min(max(runtime.GOMAXPROCS(0)-1, 1), 8)
	}
	if c.IndexKDtype == model.BF16.String() {
		config.IndexDType = model.BF16
	}
	if c.EnableHierarchicalCache {
		config.HostTokens = c.hostTokens(config)
		config.HostParts = c.HicachePartialPages
		if c.HicacheWritePolicy == kv.WriteBack.String() {
			config.WritePolicy = kv.WriteBack
		}
		if c.HicacheMemLayout == host.LayerFirst.String() {
			config.HostLayout = host.LayerFirst
		}
	}
	return config
}

// hostTokens is how many tokens the host tier is to hold.
func (c *labServe) hostTokens(config lab.Config) int {
	tokens := c.HicacheRatio * float64(cmp.Or(config.MaxTokens, lab.DefaultMaxTokens))
	if c.HicacheSize != 0 {
		tokens = c.HicacheSize * 1e9 / float64(lab.TokenBytes(config.IndexDType))
	}
	return int(max(-1, min(tokens, math.MaxInt32)))
}

// Validate is called when the flags are parsed.
func (c *labServe) Validate() error {
	if c.EnableHierarchicalCache && c.hostTokens(c.config()) < 1 {
		return errors.New("--hicache-ratio and --hicache-size must be above 0")
	}
	if _, err := fault.Parse(c.Fault, 0); err != nil {
		return err
	}
	_, err := c.config().WithDefaults()
	return err
}

func (c *labServe) engine(logger *slog.Logger) (*lab.Engine, error) {
	config := c.config()
	config.Logger = logger
	var err error
	if config.Tokenizer, err = model.Vocabulary(); err != nil {
		return nil, err
	}
	if config.Model, err = c.weights(config.Tokenizer); err != nil {
		return nil, err
	}
	config.Seed = uint64(rand.Uint32()) // a start's own; a number that JSON's readers can hold
	if c.RandomSeed != nil {
		config.Seed = *c.RandomSeed
	}
	if config.Faults, err = fault.Parse(c.Fault, config.Seed); err != nil {
		return nil, err
	}
	return lab.New(config)
}

func (c *labServe) weights(t *model.Tokenizer) (*model.Model, error) {
	if c.LoadFormat == "dummy" {
		const seed = 1
		return model.Random(seed, t.Size()), nil
	}
	return model.Trained()
}

// Run serves until it is interrupted.
func (c *labServe) Run(ctx context.Context, s *streams) error {
	started := time.Now()
	// Most of the heap is the cache, which never becomes garbage: without this
	// the collector lets as much again pile up beside it.
	debug.SetGCPercent(gcPercent)
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM)
	defer stop()
	logger := slog.New(slog.NewTextHandler(s.err, nil))
	engine, err := c.engine(logger)
	if err != nil {
		return err
	}
	address := net.JoinHostPort(c.Host, strconv.Itoa(c.Port))
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("listen on %s: another process does already; stop it, or give another --port (0 picks a free one)", address)
	}
	if err != nil {
		return fmt.Errorf("listen on %s: %w", address, err)
	}
	url := "http://" + listener.Addr().String()
	bootstrapPort, stopTransfers, err := c.serve(ctx, c.Host, engine)
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	defer stopTransfers()

	// Requests outlive ctx: they are drained.
	engineContext, stopEngine := context.WithCancel(context.WithoutCancel(ctx))
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		engine.Run(engineContext)
	}()
	server := &http.Server{
		Handler: api.New(api.Options{
			Engine: engine, Model: c.ServedModelName, Version: strings.TrimPrefix(version(), "culprit "),
			ID: strconv.FormatUint(uint64(started.UnixMilli()), 36), Started: started,
			Info: map[string]any{"disaggregation_bootstrap_port": bootstrapPort, "host": c.Host, "port": listener.Addr().(*net.TCPAddr).Port, "load_format": c.LoadFormat},
		}),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		ErrorLog:          slog.NewLogLogger(logger.Handler(), slog.LevelWarn),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()

	if c.AddrFile != "" {
		if err := os.WriteFile(c.AddrFile, []byte(url), 0o644); err != nil {
			stopEngine()
			return errors.Join(err, server.Close())
		}
	}
	fmt.Fprintf(s.err, "culprit lab: serving %s at %s/v1, ready in %v\n", c.ServedModelName, url, time.Since(started).Round(time.Millisecond))

	select {
	case err = <-served:
	case <-ctx.Done():
		drain, cancel := context.WithTimeout(engineContext, drainTime)
		defer cancel()
		err = server.Shutdown(drain)
	}
	stopEngine() // what is left fails, which its handlers say
	<-stopped
	if errors.Is(err, context.DeadlineExceeded) {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		err = server.Shutdown(grace)
	}
	if err != nil && !errors.Is(err, http.ErrServerClosed) {
		return errors.Join(err, server.Close())
	}
	return engine.Config().Faults.Err()
}

package app

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/internal/term"
	"github.com/culprit-project/culprit/record"
	"github.com/culprit-project/culprit/target"
	"github.com/culprit-project/culprit/workload"
)

// RecordOptions is what record is asked for.
type RecordOptions struct {
	Listen, Upstream string
	Output           string
	Sample           float64
	Synthetic        bool
	MemoryMB         int64
	SegmentMB        int64
	TotalMB          int64
	Tool             string
}

// recorded is the kind of what wasn't made by a workload.
const recorded = "recorded"

// recordGrace is how long replies that are on their way may take to end, once
// the proxy is asked to.
const recordGrace = 30 * time.Second

// Record passes traffic on and records it, until ctx ends.
func Record(ctx context.Context, o RecordOptions, out Output) error {
	base, err := target.ParseBaseURL(o.Upstream)
	if err != nil {
		return &UsageError{err}
	}
	upstream, err := url.Parse(strings.TrimSuffix(base, "/v1"))
	if err != nil {
		return &UsageError{err}
	}
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", o.Listen)
	if err != nil {
		return usage("record: can't listen on %s: %w; choose another address with --listen", o.Listen, err)
	}
	dir := cmp.Or(o.Output, filepath.Join("runs", time.Now().Format("2006-01-02T15-04-05")+"-record"))
	proxy, err := record.New(record.Options{
		Upstream: upstream, Dir: dir, Tool: o.Tool, Sample: o.Sample, Synthetic: o.Synthetic,
		Memory: o.MemoryMB << 20, SegmentSize: o.SegmentMB << 20, TotalSize: o.TotalMB << 20,
		Segment: func(dir string) error {
			return experiment.WriteJSON(filepath.Join(dir, experiment.PlanFile), experiment.Plan{
				Tool: o.Tool, BaseURL: base, Workload: workload.Plan{Kind: recorded},
			})
		},
		Logger: out.Logger,
	})
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	server := &http.Server{Handler: proxy, ReadHeaderTimeout: time.Minute}
	failed := make(chan error, 1)
	go func() { failed <- server.Serve(listener) }()
	out.Progress.Printf("http://%s passes on to %s and records into %s\nInterrupt (Ctrl-C) to end it.\n", listener.Addr(), term.Safe(base), term.Safe(dir))

	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	var last record.Stats
	for seconds := 1; ; seconds++ {
		select {
		case <-tick.C:
			if s := proxy.Stats(); out.Progress.Live || seconds%10 == 0 && s.Requests != last.Requests {
				out.Progress.Progress(recordLine(s))
				last = s
			}
			continue
		case err = <-failed:
		case <-ctx.Done():
			grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordGrace)
			err = server.Shutdown(grace)
			cancel()
			if errors.Is(err, context.DeadlineExceeded) {
				err = server.Close() // what is still on its way breaks off
			}
		}
		break
	}
	err = errors.Join(err, proxy.Close())
	s := proxy.Stats()
	if out.Screen == nil {
		return errors.Join(err, writeJSON(out.JSON, map[string]any{
			"dir": dir, "requests": s.Requests, "recorded": s.Recorded, "unsampled": s.Unsampled, "dropped": s.Dropped, "suspicious": s.Suspicious, "classes": s.Classes,
		}))
	}
	out.Screen.Printf("%s\n", recordLine(s))
	segments, globErr := filepath.Glob(filepath.Join(dir, "[0-9]*"))
	for _, segment := range segments {
		out.Screen.Printf("  culprit check %s\n", term.Safe(segment))
	}
	return errors.Join(err, globErr)
}

func recordLine(s record.Stats) string {
	text := fmt.Sprintf("%d requests, %d in flight, %d recorded", s.Requests, s.InFlight, s.Recorded)
	if s.Unsampled > 0 {
		text += fmt.Sprintf(", %d not sampled", s.Unsampled)
	}
	if s.Dropped > 0 {
		text += fmt.Sprintf(", %d dropped", s.Dropped)
	}
	if s.Trouble != "" {
		text += " (for now nothing is written: " + term.Safe(s.Trouble) + ")"
	}
	var found strings.Builder
	for _, class := range slices.Sorted(maps.Keys(s.Classes)) {
		fmt.Fprintf(&found, ", %d %s", s.Classes[class], class)
	}
	return text + found.String()
}

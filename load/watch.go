package load

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/workload"
)

const (
	// timerStep is how often the client looks how late its timers are: often
	// enough that a stall of 100 ms within a second can't hide.
	timerStep       = 20 * time.Millisecond
	healthTimeout   = 10 * time.Second
	sentinelTimeout = 60 * time.Second
	sentinelEvery   = 3 // health checks
)

// tick reports each second what the client itself is doing.
func (p *player) tick(over <-chan struct{}) {
	timer := time.NewTimer(timerStep)
	defer timer.Stop()
	due, second := p.begun+timerStep, p.begun+time.Second
	var late time.Duration
	chunks, cpu, last := p.chunks.Load(), cpuTime(), p.begun
	report := func(now time.Duration) {
		c, u := p.chunks.Load(), cpuTime()
		p.event(&history.Event{At: now, Kind: history.Tick, Values: map[string]float64{
			"in_flight": float64(p.inFlight.Load() + p.beside.Load()),
			"chunks":    float64(c - chunks),
			"late_ms":   float64(late.Microseconds()) / 1000,
			"cpu":       float64(u-cpu) / float64(now-last),
		}})
		chunks, cpu, last, late = c, u, now, 0
	}
	progress := func() {
		if p.Progress != nil {
			p.Progress(p.progress())
		}
	}
	for {
		select {
		case <-timer.C:
		case <-over:
			if now := p.now(); now > last {
				report(now) // the part of a second that is left
			}
			progress()
			return
		}
		now := p.now()
		late = max(late, now-due)
		if now >= second {
			report(now)
			progress()
			second += (now-second)/time.Second*time.Second + time.Second
		}
		due = now + timerStep
		timer.Reset(timerStep)
	}
}

// watchHealth compares what the server says of itself with what it does.
func (p *player) watchHealth(played <-chan struct{}) {
	if p.HealthEvery <= 0 {
		return
	}
	ctx, cancel := context.WithCancel(p.ctx)
	defer cancel()
	var sentinels sync.WaitGroup
	defer sentinels.Wait()
	running := make(chan struct{}, 1)
	u := p.target.health
	ticker := time.NewTicker(p.HealthEvery)
	defer ticker.Stop()
	for n := 0; ; n++ {
		status := p.checkHealth(ctx, u)
		if n == 0 && u == p.target.health && (status == http.StatusNotFound || status == http.StatusMethodNotAllowed || status == http.StatusNotImplemented) {
			u = p.target.models
			p.checkHealth(ctx, u)
		}
		if n%sentinelEvery == 0 && len(p.Sentinel.Messages) > 0 {
			select {
			case running <- struct{}{}:
				sentinels.Go(func() {
					p.send(sending{
						phase: history.Sentinel, kind: "sentinel", session: OtherSession, turn: n / sentinelEvery, planned: p.now(),
						timeout: min(p.Timeout, sentinelTimeout),
					}, &workload.Turn{Request: p.Sentinel})
					<-running
				})
			default: // the last one isn't answered yet
			}
		}
		select {
		case <-ticker.C:
		case <-played:
			return
		case <-ctx.Done():
			return
		}
	}
}

// checkHealth records one check and returns its HTTP status, 0 for none.
func (p *player) checkHealth(ctx context.Context, u *url.URL) int {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	began := p.now()
	e := &history.Event{Kind: history.Health, Name: u.Path}
	status := 0
	resp, err := p.transport.RoundTrip(p.target.request(ctx, http.MethodGet, u, nil))
	if err == nil {
		status = resp.StatusCode
		_, err = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
		resp.Body.Close()
	}
	if p.ctx.Err() != nil {
		return status // the run's end says nothing of the server
	}
	if err != nil {
		e.Text = p.target.redact(fmt.Sprint(err))
	}
	e.At = p.now()
	e.Values = map[string]float64{"status": float64(status), "latency_ms": float64((e.At - began).Microseconds()) / 1000}
	p.event(e)
	return status
}

package queue

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
)

// BenchmarkTrials takes trials through a queue on a server within the program:
// put, taken, a run directory of 100 KB uploaded, finished, downloaded, kept.
func BenchmarkTrials(b *testing.B) {
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) { benchmarkTrials(b, workers) })
	}
}

func benchmarkTrials(b *testing.B, workers int) {
	maker, conn := newQueue(b, Options{})
	run := b.TempDir()
	noise := make([]byte, 100_000)
	state := uint32(1)
	for i := range noise {
		state = state*1664525 + 1013904223
		noise[i] = byte(state >> 24)
	}
	if err := os.WriteFile(filepath.Join(run, "history.jsonl.zst"), noise, 0o644); err != nil {
		b.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.Context())
	var all sync.WaitGroup
	for range workers {
		w := worker(b, conn)
		all.Go(func() {
			for {
				task, err := w.Take(ctx, nil)
				if err != nil {
					return
				}
				if err := errors.Join(w.Upload(ctx, task.ID, run)); err != nil && ctx.Err() == nil {
					b.Error(err)
				}
				if _, err := task.Finish(ctx, []byte("{}")); err != nil && ctx.Err() == nil {
					b.Error(err)
				}
			}
		})
	}
	to := b.TempDir()
	n := 0
	for b.Loop() {
		// As many are under way as there are workers.
		if n == 0 {
			for i := range workers {
				put(b, maker, fmt.Sprint("first", i))
			}
		}
		n++
		put(b, maker, fmt.Sprint(n))
		r, err := maker.Result(ctx)
		if err != nil {
			b.Fatal(err)
		}
		dir := filepath.Join(to, r.ID)
		if err := errors.Join(maker.Download(ctx, r.ID, dir), os.RemoveAll(dir), maker.Remove(ctx, r.ID), r.Kept(ctx)); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "trials/s")
	stop()
	all.Wait()
}

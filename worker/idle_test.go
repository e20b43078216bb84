package worker

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/culprit-project/culprit/queue"
)

// Not parallel: NATS servers of one process share a goroutine, which must be the
// bubble's.
func TestIdle(t *testing.T) {
	const idle = 10 * time.Minute
	tests := []struct {
		name   string
		orders int           // that its machine fails on
		at     time.Duration // when they come
		lost   bool          // the cluster is gone by then
		after  time.Duration // it ends
		says   string        // of the error; empty is none
	}{
		{"no work at all", 0, 0, false, idle, ""},
		{"work", 1, 8 * time.Minute, false, 18 * time.Minute, ""},
		{"work that it failed on, for good", mostTrouble, 8 * time.Minute, false, 18 * time.Minute, "no work for 10m0s: it takes no more trials of hunt-1, since its machine failed: launch "},
		{"no cluster", 0, 8 * time.Minute, true, idle, "no work for 10m0s: "},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				server, err := queue.Serve(queue.ServerOptions{Dir: t.TempDir()})
				if err != nil {
					t.Fatal(err)
				}
				defer server.Close()
				conn, err := server.Connect(t.Context(), "w", nil)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				q, err := conn.Make(t.Context(), "hunt-1", queue.Options{})
				if err != nil {
					t.Fatal(err)
				}
				go func() {
					time.Sleep(tt.at)
					for n := range tt.orders {
						body, err := json.Marshal(launched(n + 1))
						if err == nil {
							err = q.Put(t.Context(), fmt.Sprint(n), nil, body)
						}
						if err != nil {
							t.Error(err)
						}
					}
					if tt.lost {
						server.Close()
					}
				}()
				began := time.Now()
				var said lines
				err = Run(t.Context(), conn, Options{Name: "w", Dir: t.TempDir(), Launcher: broken(), Idle: idle, Say: said.say})
				if tt.says == "" && err != nil || tt.says != "" && (err == nil || !strings.Contains(err.Error(), tt.says)) {
					t.Errorf("the error is %v, want %q; it said %q", err, tt.says, said.all)
				}
				const look = 30 * time.Second
				if took := time.Since(began); took < tt.after || took > tt.after+look {
					t.Errorf("it ended after %s, want %s; it said %q", took, tt.after, said.all)
				}
				if said.has("ends: there was no work") != (tt.says == "") {
					t.Errorf("it said %q", said.all)
				}
			})
		})
	}
}

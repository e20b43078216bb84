package model

import (
	"strings"
	"sync/atomic"
	"testing"
)

// TestShareHandsPanicsOn: a panic of any worker is the caller's, which can
// recover from it, and the others have stopped by then.
func TestShareHandsPanicsOn(t *testing.T) {
	for _, bad := range []int{0, 1, 2, 3} {
		p := &pass{s: &Scratch{Workers: 4}}
		p.s.start()
		var working atomic.Int64
		func() {
			defer func() {
				v, _ := recover().(string)
				if !strings.HasPrefix(v, "out of order") || !strings.Contains(v, "share_test.go") {
					t.Errorf("worker %d: recovered %.40q", bad, v)
				}
				if n := working.Load(); n != 0 {
					t.Errorf("%d workers still work", n)
				}
			}()
			p.share(4, func(_ *worker, lo, _ int) {
				working.Add(1)
				defer working.Add(-1)
				if lo == bad {
					panic("out of order")
				}
			})
		}()
		done := 0
		p.s.Workers = 1
		p.share(4, func(_ *worker, lo, hi int) { done += hi - lo })
		if done != 4 {
			t.Errorf("%d rows of 4 afterwards", done)
		}
	}
}

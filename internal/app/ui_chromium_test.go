//go:build chromium

package app

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"

	"github.com/culprit-project/culprit/design"
	"github.com/culprit-project/culprit/experiment"
	"github.com/culprit-project/culprit/search"
)

// TestLivePageInChromium reads a page that follows its hunt: what is new comes
// without a reload, the reader's place, what is open and what has the focus
// stay, and nothing that a server wrote runs. make test-page runs it.
func TestLivePageInChromium(t *testing.T) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.WindowSize(900, 600))
	allocator, stop := chromedp.NewExecAllocator(t.Context(), options...)
	defer stop()
	ctx, cancel := chromedp.NewContext(allocator)
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var mu sync.Mutex
	var console []string
	err := chromedp.Listen(ctx, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventConsoleAPICalled:
			console = append(console, string(e.Type))
		case *runtime.EventExceptionThrown:
			console = append(console, e.ExceptionDetails.Text)
		case *log.EventEntryAdded:
			console = append(console, e.Entry.Text)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := chromedp.Call(ctx, log.Enable, cdp.Empty{}); err != nil {
		t.Fatal(err)
	}
	if _, err := chromedp.Call(ctx, runtime.Enable, cdp.Empty{}); err != nil {
		t.Fatal(err)
	}

	const hostile = `</p><script>window.ran=1</script><img src=x onerror="window.ran=1">`
	p := liveHunt(t)
	for n := 1; n <= 30; n++ {
		writeTrial(t, p.dir, n, hostile)
	}
	p.Refresh()
	if err := chromedp.Do(ctx, chromedp.Navigate(p.URL)); err != nil {
		t.Fatal(err)
	}
	wait(t, ctx, `document.getElementById("trial30") !== null`)
	// Not every browser keeps a place by itself.
	evaluate[bool](t, ctx, `document.documentElement.style.overflowAnchor = "none", document.body.style.overflowAnchor = "none", true`)
	// A reader opens the 20th trial, goes to its first link, and reads there.
	evaluate[bool](t, ctx, `window.same = true, document.getElementById("trial20").parentElement.open = true`)
	evaluate[bool](t, ctx, `document.querySelector("#trial20 a").focus(), document.getElementById("trial20").scrollIntoView(), true`)
	const place = `Math.round(document.getElementById("trial20").getBoundingClientRect().top) + 0` // -0 has no JSON
	before := evaluate[int](t, ctx, place)

	p.Now("Trial 31: " + hostile)
	wait(t, ctx, `document.getElementById("now").textContent.startsWith("Trial 31: </p>")`)
	for n := 31; n <= 40; n++ {
		writeTrial(t, p.dir, n, hostile)
	}
	// What the search thinks comes above what is read.
	writeBelief(t, p.dir, 40)
	p.Refresh()
	wait(t, ctx, `document.getElementById("trial40") !== null`)
	for _, tt := range []struct{ name, is string }{
		{"the page was loaded anew", `window.same === true`},
		{"the opened trial was closed", `document.getElementById("trial20").parentElement.open`},
		{"another trial was opened", `!document.getElementById("trial21").parentElement.open`},
		{"what is new above isn't there", `document.getElementById("posterior").getBoundingClientRect().height > 100`},
		{"the focus was lost", `document.activeElement === document.querySelector("#trial20 a")`},
		{"a script of the server's ran", `window.ran === undefined`},
	} {
		if !evaluate[bool](t, ctx, tt.is) {
			t.Error(tt.name)
		}
	}
	if after := evaluate[int](t, ctx, place); after < before-2 || after > before+2 {
		t.Errorf("the reader's place moved from %d to %d", before, after)
	}

	// Marked text isn't taken from under the reader.
	evaluate[bool](t, ctx, `getSelection().selectAllChildren(document.querySelector("#trial20 p")), true`)
	writeTrial(t, p.dir, 41, "more")
	p.Refresh()
	wait(t, ctx, `document.querySelector("h1").textContent.includes("41 trials")`)
	if !evaluate[bool](t, ctx, `!getSelection().isCollapsed && document.getElementById("trial41") === null`) {
		t.Error("marked text was replaced")
	}
	evaluate[bool](t, ctx, `getSelection().empty(), true`)
	wait(t, ctx, `document.getElementById("trial41") !== null`)

	p.Close("The hunt has ended. The page is in report.html.")
	wait(t, ctx, `document.getElementById("now").textContent === "The hunt has ended. The page is in report.html."`)
	time.Sleep(4 * time.Second) // a client that asks again would, and complain
	if got := evaluate[string](t, ctx, `document.getElementById("now").textContent`); got != "The hunt has ended. The page is in report.html." {
		t.Errorf("after the end it says %q", got)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(console) > 0 {
		t.Errorf("the console says: %q", console)
	}
}

func writeBelief(t *testing.T, dir string, n int) {
	t.Helper()
	arm := design.Arm{"graph": "suspect", "dtype": "bf16"}
	belief := search.Progress{Leading: []search.Belief{{Set: arm, Probability: 0.5}}, Arms: []search.Evidence{{Arm: arm, Requests: 160, Launches: 1, High: 1}}}
	if err := experiment.WriteJSON(filepath.Join(dir, fmt.Sprintf("runs/%04d-%s", n, arm.Hash()), experiment.BeliefFile), belief); err != nil {
		t.Fatal(err)
	}
}

func wait(t *testing.T, ctx context.Context, condition string) {
	t.Helper()
	for range 100 {
		if evaluate[bool](t, ctx, condition) {
			return
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatal(fmt.Errorf("it never came to %s", condition))
}

func evaluate[T any](t *testing.T, ctx context.Context, expression string) T {
	t.Helper()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		t.Fatal(err)
	}
	return value
}

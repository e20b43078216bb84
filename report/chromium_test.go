//go:build chromium

package report

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// TestPagesInChromium opens pages full of hostile text in a real browser, from
// a file and from a server, light and dark: nothing runs, nothing is fetched,
// and the console has nothing to say. make test-page runs it; it wants Debian's
// chromium. With CULPRIT_SCREENSHOTS=DIR it leaves pictures to look at.
func TestPagesInChromium(t *testing.T) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.WindowSize(1100, 900))
	allocator, stop := chromedp.NewExecAllocator(t.Context(), options...)
	defer stop()
	for name, page := range hostilePages(t) {
		path := filepath.Join(t.TempDir(), name+".html")
		if err := os.WriteFile(path, []byte(page), 0o644); err != nil {
			t.Fatal(err)
		}
		server := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(path))))
		defer server.Close()
		for _, from := range []string{(&url.URL{Scheme: "file", Path: path}).String(), server.URL + "/" + name + ".html"} {
			for _, scheme := range []string{"light", "dark"} {
				t.Run(name+" "+from[:4]+" "+scheme, func(t *testing.T) { openPage(t, allocator, from, scheme, name) })
			}
		}
	}
}

// TestChromiumWouldSee makes sure that the test of pages can fail: a page that
// runs, fetches and complains is seen to.
func TestChromiumWouldSee(t *testing.T) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox)
	allocator, stop := chromedp.NewExecAllocator(t.Context(), options...)
	defer stop()
	path := filepath.Join(t.TempDir(), "bad.html")
	bad := `<title>bad</title><script>window.ran=1;console.error("x")</script><img src="http://127.0.0.1:1/x.png">`
	if err := os.WriteFile(path, []byte(bad), 0o644); err != nil {
		t.Fatal(err)
	}
	seen := visit(t, allocator, "file://"+path, "light", "")
	if !seen.ran || len(seen.console) == 0 || len(seen.requests) < 2 {
		t.Errorf("of a bad page was seen: %+v", seen)
	}
}

// TestKeyboardInChromium goes through a page by keyboard: the way past the
// sections comes first, whatever has the focus is in view and shows it, and
// nothing holds it.
func TestKeyboardInChromium(t *testing.T) {
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.NoSandbox, chromedp.WindowSize(1100, 900))
	allocator, stop := chromedp.NewExecAllocator(t.Context(), options...)
	defer stop()
	ctx, cancel := chromedp.NewContext(allocator)
	defer cancel()
	ctx, cancel = context.WithTimeout(ctx, time.Minute)
	defer cancel()
	path := filepath.Join(t.TempDir(), "hunt.html")
	if err := os.WriteFile(path, []byte(hostilePages(t)["hunt"]), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := chromedp.Do(ctx, chromedp.Navigate("file://"+path)); err != nil {
		t.Fatal(err)
	}
	press := func(key string) {
		if err := chromedp.Do(ctx, chromedp.KeyEvent(key)); err != nil {
			t.Fatal(err)
		}
	}
	reached := map[string]bool{}
	for i := range 400 {
		press("\t")
		at := evaluate[string](t, ctx, `(() => { const e = document.activeElement; e.nth ??= ++window.n || (window.n = 1); return e.tagName + " " + e.nth })()`)
		tag, _, _ := strings.Cut(at, " ")
		if tag == "BODY" || i > 0 && reached[at] {
			break // round again
		}
		if i == 0 && !evaluate[bool](t, ctx, `document.activeElement.className === "skip"`) {
			t.Errorf("%s has the focus first", at)
		}
		reached[at], reached[tag] = true, true
		if !evaluate[bool](t, ctx, `(() => { const e = document.activeElement, b = e.getBoundingClientRect(), s = getComputedStyle(e);
			return b.bottom > 0 && b.top < innerHeight && b.right > 0 && s.outlineStyle !== "none" && parseFloat(s.outlineWidth) >= 1 })()`) {
			t.Errorf("%s has the focus and doesn't show it", at)
		}
	}
	for _, tag := range []string{"A", "SUMMARY", "DIV"} { // links, what opens, what scrolls
		if !reached[tag] {
			t.Errorf("no %s is reached", tag)
		}
	}
	evaluate[bool](t, ctx, `document.querySelector("#trials summary").focus(), true`)
	press("\r")
	if !evaluate[bool](t, ctx, `document.querySelector("#trials details").open`) {
		t.Error("a trial isn't opened by keyboard")
	}
	evaluate[bool](t, ctx, `document.querySelector('.behind').open = true, document.querySelector('.behind a').focus(), true`)
	press("\r")
	time.Sleep(200 * time.Millisecond)
	if !evaluate[bool](t, ctx, `document.getElementById("op1").getBoundingClientRect().height > 0 && document.getElementById("op1").getBoundingClientRect().top < innerHeight`) {
		t.Error("a link to a request doesn't open it")
	}
}

func openPage(t *testing.T, allocator context.Context, from, scheme, name string) {
	picture := ""
	if dir := os.Getenv("CULPRIT_SCREENSHOTS"); dir != "" {
		picture = filepath.Join(dir, fmt.Sprintf("%s-%s.png", name, scheme))
	}
	seen := visit(t, allocator, from, scheme, picture)
	if seen.ran {
		t.Error("a script ran")
	}
	if len(seen.console) > 0 {
		t.Errorf("the console says: %q", seen.console)
	}
	for _, to := range seen.requests {
		if to != from && to != "data:," {
			t.Errorf("it asked for %s", to)
		}
	}
	if seen.title == "" || seen.location != from {
		t.Errorf("it is %q at %s", seen.title, seen.location)
	}
	if seen.background == "" || seen.background == "rgba(0, 0, 0, 0)" {
		t.Errorf("its style isn't in force: the background is %q", seen.background)
	}
	if len(seen.wide) > 0 {
		t.Errorf("the page is wider than the window: %q", seen.wide)
	}
}

// tooWide names what is wider than the window and stands in nothing that scrolls.
const tooWide = `document.documentElement.scrollWidth <= window.innerWidth ? [] :
	[document.documentElement.scrollWidth + " of " + window.innerWidth, ...[...document.querySelectorAll("body *")].
	filter(e => e.scrollWidth > window.innerWidth && !e.closest(".scroll")).slice(0, 9).map(e => e.tagName + " " + e.textContent.slice(0, 30))]`

// visited is what a page did.
type visited struct {
	ran                         bool
	wide                        []string // what makes the page wider than the window
	title, location, background string
	console, requests           []string
}

func visit(t *testing.T, allocator context.Context, from, scheme, picture string) visited {
	ctx, stop := chromedp.NewContext(allocator)
	defer stop()
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	var mu sync.Mutex
	var got visited
	err := chromedp.Listen(ctx, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *runtime.EventConsoleAPICalled:
			got.console = append(got.console, string(e.Type))
		case *runtime.EventExceptionThrown:
			got.console = append(got.console, e.ExceptionDetails.Text)
		case *log.EventEntryAdded:
			got.console = append(got.console, e.Entry.Text)
		case *network.EventRequestWillBeSent:
			got.requests = append(got.requests, e.Request.URL)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	call(t, ctx, log.Enable, cdp.Empty{})
	call(t, ctx, runtime.Enable, cdp.Empty{})
	call(t, ctx, network.Enable, network.EnableParams{})
	call(t, ctx, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}})
	if err := chromedp.Do(ctx, chromedp.Navigate(from)); err != nil {
		t.Fatal(err)
	}
	// Whatever a pointer or the keyboard could set off.
	evaluate[bool](t, ctx, `document.querySelectorAll("details").forEach(d => d.open = true), true`)
	evaluate[bool](t, ctx, `document.querySelectorAll("*").forEach(e => { if (e.tagName !== "A") for (const k of ["mouseover", "focus", "error", "load"]) e.dispatchEvent(new Event(k)) }), true`)
	time.Sleep(300 * time.Millisecond) // a script could take its time
	got.ran = evaluate[bool](t, ctx, `window.ran === 1 || document.title === "ran"`)
	got.wide = evaluate[[]string](t, ctx, tooWide)
	call(t, ctx, emulation.SetDeviceMetricsOverride, emulation.SetDeviceMetricsOverrideParams{Width: 400, Height: 800, DeviceScaleFactor: 1})
	got.wide = append(got.wide, evaluate[[]string](t, ctx, tooWide)...)
	call(t, ctx, emulation.ClearDeviceMetricsOverride, cdp.Empty{})
	got.title = evaluate[string](t, ctx, `document.title`)
	got.location = evaluate[string](t, ctx, `location.href`)
	got.background = evaluate[string](t, ctx, `getComputedStyle(document.body).backgroundColor`)
	if picture != "" {
		b, err := chromedp.Run(ctx, chromedp.FullScreenshot(90))
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(picture, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	return got
}

func call[P, R any](t *testing.T, ctx context.Context, command cdp.Command[P, R], params P) {
	t.Helper()
	if _, err := chromedp.Call(ctx, command, params); err != nil {
		t.Fatal(err)
	}
}

func evaluate[T any](t *testing.T, ctx context.Context, expression string) T {
	t.Helper()
	value, err := chromedp.Run(ctx, chromedp.Evaluate[T](expression))
	if err != nil {
		t.Fatal(err)
	}
	return value
}

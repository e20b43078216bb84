package oracle

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/culprit-project/culprit/history"
)

// What is found is what a search for each canary by itself finds.
func TestFindCanaries(t *testing.T) {
	const sessions = 40
	o := newCanaryObserver(history.Header{RunKey: fmt.Sprintf("%x", testKey), Sessions: sessions}).(*canaryObserver)
	rapid.Check(t, func(r *rapid.T) {
		var b strings.Builder
		for range rapid.IntRange(0, 8).Draw(r, "pieces") {
			canary := history.Canary(testKey, rapid.IntRange(0, sessions+besideSessions-1).Draw(r, "session"), rapid.Bool().Draw(r, "alone"))
			b.WriteString(rapid.SampledFrom([]string{"", " ", "a", "zz2", "é", "0", "A"}).Draw(r, "between"))
			b.WriteString(canary[rapid.IntRange(0, 2).Draw(r, "from"):rapid.IntRange(4, 12).Draw(r, "to")])
		}
		text := b.String()
		var got, want []string
		o.find(text, func(owner *canaryOwner, start, length int) {
			got = append(got, fmt.Sprint(owner.session, owner.alone, start, length))
		})
		for _, owner := range o.owners {
			for start := range len(text) {
				if n := commonPrefix(owner.canary[:], text[start:]); n >= canaryPrefix {
					want = append(want, fmt.Sprint(owner.session, owner.alone, start, n))
				}
			}
		}
		slices.Sort(got)
		slices.Sort(want)
		if d := cmp.Diff(want, got); d != "" {
			r.Fatalf("%q (-want +got):\n%s", text, d)
		}
	})
}

// The more sessions, the more of a canary it takes.
func TestCanaryPrefix(t *testing.T) {
	for _, c := range []struct{ sessions, want int }{{0, 8}, {80, 8}, {512, 8}, {513, 9}, {2896, 9}, {2897, 10}, {16_384, 10}, {92_000, 11}, {100_000, 12}, {1 << 20, 12}} {
		if got := canaryPrefixOf(c.sessions); got != c.want {
			t.Errorf("%d sessions: %d characters, want %d", c.sessions, got, c.want)
		}
	}
	// Two that begin alike are told apart.
	o := &canaryObserver{prefix: 8, owners: []canaryOwner{{session: 1}, {session: 2}}, first: map[uint64]int32{0: 0}}
	copy(o.owners[0].canary[:], "aaaaaaaabbbb")
	copy(o.owners[1].canary[:], "aaaaaaaacccc")
	var got []string
	o.find("aaaaaaaacc", func(owner *canaryOwner, _, length int) { got = append(got, fmt.Sprint(owner.session, " ", length)) })
	if d := cmp.Diff([]string{"1 8", "2 10"}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// BenchmarkCanaries is the cost of looking for the canaries of 100,000 sessions
// in ordinary text, and of making them.
func BenchmarkCanaries(b *testing.B) {
	for _, sessions := range []int{80, 100_000} {
		b.Run(fmt.Sprint(sessions), func(b *testing.B) {
			o := newCanaryObserver(history.Header{RunKey: fmt.Sprintf("%x", testKey), Sessions: sessions}).(*canaryObserver)
			text := strings.Repeat(`The container at terminal three leaves tomorrow. {"parcel":"gilal","destination":"warehouse"} understandably `, 100)
			b.SetBytes(int64(len(text)))
			for b.Loop() {
				o.find(text, func(*canaryOwner, int, int) { b.Fatal("a leak") })
			}
		})
	}
	b.Run("make 100000", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			newCanaryObserver(history.Header{RunKey: fmt.Sprintf("%x", testKey), Sessions: 100_000})
		}
	})
}

package kv

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// user is somebody with a page table.
type user struct {
	tokens, table []int32
	shared        int // tokens that were there when it came
}

// memory stands for what pages hold: the tokens up to each slot's own.
type memory map[int32]string

// world is users, books and memory of both tiers.
type world struct {
	pageSize     int
	pages, host  *Pages
	tree         *Tree
	mem, hostMem memory
	users        []*user
	loads        []Copy // not done yet
	parts        int    // of pages that were loaded
}

func newWorld(t *rapid.T) *world {
	w := &world{pageSize: 2, mem: memory{}, hostMem: memory{}}
	w.pages = NewPages(rapid.IntRange(2, 12).Draw(t, "pages"))
	if n := rapid.IntRange(0, 8).Draw(t, "host pages"); n > 0 {
		w.host = NewPages(n)
	}
	w.tree = NewTree(w.pages, w.host, w.pageSize)
	w.tree.Policy = rapid.SampledFrom([]WritePolicy{WriteThrough, WriteBack}).Draw(t, "policy")
	w.tree.Parts = rapid.Bool().Draw(t, "parts")
	return w
}

func (w *world) copy(to, from memory, toPage, fromPage int32, n int) {
	for i := range int32(n) {
		to[toPage*int32(w.pageSize)+i] = from[fromPage*int32(w.pageSize)+i]
	}
}

func (w *world) come(t *rapid.T, tokens []int32) {
	u := &user{tokens: tokens}
	prefix := w.tree.Match(u.tokens)
	want := (len(u.tokens)+w.pageSize-1)/w.pageSize - len(prefix.Device)
	fresh := w.pages.Alloc(want)
	if fresh == nil && want > 0 {
		evictable := w.tree.Evictable()
		freed := w.tree.Evict(want - w.pages.Free())
		if fresh = w.pages.Alloc(want); fresh == nil && freed < evictable && freed < want {
			t.Fatalf("evicted %d of %d evictable pages, wanted %d", freed, evictable, want)
		}
	}
	if fresh == nil && want > 0 {
		w.tree.Release(prefix)
		return
	}
	u.shared = w.tree.Tokens(prefix)
	u.table = slices.Concat(prefix.Device, fresh)
	for _, c := range w.tree.TakeBackups() {
		w.copy(w.hostMem, w.mem, c.Host, c.Device, c.Tokens)
	}
	w.loads = append(w.loads, w.tree.Load(prefix, fresh)...)
	if prefix.Part > 0 {
		w.parts++
	}
	for p := u.shared; p < len(u.tokens); p++ {
		w.mem[w.slot(u, p)] = key(u.tokens[:p+1])
	}
	w.users = append(w.users, u)
}

func (w *world) slot(u *user, p int) int32 {
	return u.table[p/w.pageSize]*int32(w.pageSize) + int32(p%w.pageSize)
}

// load does what is left to be loaded.
func (w *world) load() {
	for _, c := range w.loads {
		w.copy(w.mem, w.hostMem, c.Device, c.Host, c.Tokens)
	}
	w.tree.Loaded(w.loads)
	w.loads = nil
}

func (w *world) check() error {
	tables := [][]int32{w.tree.Pages()}
	for _, u := range w.users {
		tables = append(tables, u.table)
		for p := range u.tokens {
			if got := w.mem[w.slot(u, p)]; len(w.loads) == 0 && got != key(u.tokens[:p+1]) {
				return fmt.Errorf("%v finds %q at %d", u.tokens, got, p)
			}
		}
	}
	if err := w.pages.Check(tables...); err != nil {
		return err
	}
	return w.tree.Check()
}

// TestRandomUse plays users against the books and checks them after each step.
// Every user finds what it should, whichever tier it came from.
func TestRandomUse(t *testing.T) {
	var total TreeStats
	parts := 0
	play := func(t *rapid.T) {
		w := newWorld(t)
		take := func(t *rapid.T) *user {
			if len(w.users) == 0 {
				t.Skip("no users")
			}
			i := rapid.IntRange(0, len(w.users)-1).Draw(t, "user")
			u := w.users[i]
			w.users = slices.Delete(w.users, i, i+1)
			return u
		}
		t.Repeat(map[string]func(*rapid.T){
			"come": func(t *rapid.T) {
				tokens := []int32{1, 2, 2, 1, 1, 1, 2, 1, 2}[:rapid.IntRange(0, 9).Draw(t, "length")]
				if at := rapid.IntRange(0, 14).Draw(t, "another token"); at < len(tokens) {
					tokens = slices.Clone(tokens)
					tokens[at] = 3
				}
				w.come(t, tokens)
			},
			"load": func(*rapid.T) { w.load() },
			"insert": func(t *rapid.T) {
				u := take(t)
				w.load()
				w.tree.Insert(u.tokens, u.table)
				w.users = append(w.users, u)
			},
			"leave": func(t *rapid.T) {
				u := take(t)
				if rapid.Bool().Draw(t, "insert") {
					w.load()
					w.tree.Insert(u.tokens, u.table)
				}
				w.pages.Release(u.table...)
			},
			"evict": func(t *rapid.T) { w.tree.Evict(rapid.IntRange(0, 3).Draw(t, "n")) },
			"flush": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "really") == 9 {
					w.tree.Flush()
				}
			},
			"": func(t *rapid.T) {
				if err := w.check(); err != nil {
					t.Fatal(err)
				}
			},
		})
		w.load()
		for _, u := range w.users {
			w.pages.Release(u.table...)
		}
		w.tree.Flush()
		if w.pages.Free() != w.pages.Total() || w.tree.HostSize() != 0 {
			t.Fatalf("after all left and a flush, %d of %d pages are free, %d are on the host", w.pages.Free(), w.pages.Total(), w.tree.HostSize())
		}
		s := w.tree.Stats()
		total.Evicted += s.Evicted
		total.HostEvicted += s.HostEvicted
		total.BackedUp += s.BackedUp
		total.BackupsDropped += s.BackupsDropped
		total.Loaded += s.Loaded
		parts += w.parts
	}
	for range 5 {
		rapid.Check(t, play)
	}
	t.Logf("%+v, %d parts of pages", total, parts)
	if !t.Failed() && (total.Evicted == 0 || total.HostEvicted == 0 || total.BackupsDropped == 0 || total.Loaded == 0 || parts == 0) {
		t.Error("not everything that could make a difference happened")
	}
}

func TestMatchSharesWholePages(t *testing.T) {
	pages := NewPages(10)
	tree := NewTree(pages, nil, 2)
	table := pages.Alloc(3)
	tree.Insert([]int32{1, 2, 3, 4, 5}, table) // the last page isn't whole
	got := tree.Match([]int32{1, 2, 3, 9}).Device
	if want := table[:1]; !slices.Equal(got, want) {
		t.Errorf("Match = %v, want %v", got, want)
	}
	if tree.Size() != 2 {
		t.Errorf("the tree holds %d pages, want 2", tree.Size())
	}
}

func TestInsertKeepsOneOfTwoEqualPages(t *testing.T) {
	pages := NewPages(10)
	tree := NewTree(pages, nil, 2)
	a, b := pages.Alloc(2), pages.Alloc(2)
	tree.Insert([]int32{1, 2, 3, 4}, a)
	tree.Insert([]int32{1, 2, 3, 4}, b)
	if !slices.Equal(a, b) || pages.Free() != 7 {
		t.Errorf("tables %v and %v, %d free; want equal tables and 7 free", a, b, pages.Free())
	}
}

func TestEvictTakesLeastRecentlyUsedLeaf(t *testing.T) {
	pages := NewPages(10)
	tree := NewTree(pages, nil, 1)
	a, b := pages.Alloc(2), pages.Alloc(1)
	tree.Insert([]int32{1, 2}, a)
	tree.Insert([]int32{3}, b)
	pages.Release(a...)
	pages.Release(b...)
	tree.Match([]int32{1, 2}) // makes 3 the older one, and holds 1 and 2
	if freed := tree.Evict(5); freed != 1 || tree.Size() != 2 {
		t.Errorf("freed %d pages and kept %d, want 1 and 2", freed, tree.Size())
	}
}

// hostTree has the tokens of table on the host, and on the device too unless
// evicted.
func hostTree(pages, host *Pages, evicted bool) (*Tree, []int32) {
	tree := NewTree(pages, host, 2)
	table := pages.Alloc(2)
	tree.Insert([]int32{1, 2, 3, 4}, table)
	if evicted {
		pages.Release(table...)
		tree.Evict(2)
		table = nil
	}
	return tree, table
}

func TestHostKeepsWhatTheDeviceEvicts(t *testing.T) {
	pages := NewPages(6)
	tree, _ := hostTree(pages, NewPages(4), true)
	p := tree.Match([]int32{1, 2, 3, 4, 5})
	if len(p.Device) != 0 || !slices.Equal(p.Host, []int32{1, 2}) || tree.Size() != 0 || tree.HostSize() != 2 {
		t.Fatalf("Match = %+v, %d pages on the device and %d on the host", p, tree.Size(), tree.HostSize())
	}
	if got, want := tree.TakeBackups(), []Copy{{1, 1, 2}, {2, 2, 2}}; !slices.Equal(got, want) {
		t.Errorf("backups %v, want %v", got, want)
	}
	fresh := pages.Alloc(2)
	loads := tree.Load(p, fresh)
	if want := []Copy{{fresh[0], 1, 2}, {fresh[1], 2, 2}}; !slices.Equal(loads, want) {
		t.Errorf("loads %v, want %v", loads, want)
	}
	if p := tree.Match([]int32{1, 2, 3, 4}); !slices.Equal(p.Device, fresh) {
		t.Errorf("Match = %+v, want device pages %v", p, fresh)
	}
}

func TestWhatIsBeingLoadedStays(t *testing.T) {
	pages, host := NewPages(6), NewPages(4)
	tree, _ := hostTree(pages, host, true)
	fresh := pages.Alloc(2)
	loads := tree.Load(tree.Match([]int32{1, 2, 3, 4}), fresh)
	pages.Release(fresh...) // whoever wanted it is gone
	tree.Flush()
	if tree.Size() != 2 || tree.HostSize() != 2 {
		t.Errorf("%d pages on the device and %d on the host, want 2 and 2", tree.Size(), tree.HostSize())
	}
	tree.Loaded(loads)
	tree.Flush()
	if tree.Size() != 0 || tree.HostSize() != 0 || pages.Free() != 5 {
		t.Errorf("%d pages on the device and %d on the host are left, %d free", tree.Size(), tree.HostSize(), pages.Free())
	}
}

func TestPartOfAHostPage(t *testing.T) {
	pages := NewPages(6)
	tree, _ := hostTree(pages, NewPages(4), false)
	tree.Parts = true
	p := tree.Match([]int32{1, 2, 3, 9})
	if len(p.Device) != 1 || !slices.Equal(p.Host, []int32{2}) || p.Part != 1 || tree.Tokens(p) != 3 {
		t.Fatalf("Match = %+v, %d tokens", p, tree.Tokens(p))
	}
	fresh := pages.Alloc(1)
	loads := tree.Load(p, fresh)
	if want := []Copy{{fresh[0], 2, 1}}; !slices.Equal(loads, want) {
		t.Errorf("loads %v, want %v", loads, want)
	}
	if p := tree.Match([]int32{1, 2, 3, 4}); slices.Contains(p.Device, fresh[0]) {
		t.Errorf("the tree knows page %d, which holds a part", fresh[0])
	}
}

// TestWhatStandsUnderALoadStays: a part of a host page is being loaded, so the
// page before it can't go, though nobody uses it any more.
func TestWhatStandsUnderALoadStays(t *testing.T) {
	for _, onDevice := range []int{0, 1} { // of what is loaded: its own page may go
		pages := NewPages(6)
		tree, table := hostTree(pages, NewPages(4), false)
		tree.Parts = true
		pages.Release(table...)
		tree.Evict(1 - onDevice) // the second page: its host page stands on the first
		p := tree.Match([]int32{1, 2, 3, 9})
		fresh := pages.Alloc(1)
		loads := tree.Load(p, fresh)
		pages.Release(fresh...)
		pages.Release(p.Device...)
		if n, freed := tree.Evictable(), tree.Evict(2); n != onDevice || freed != onDevice {
			t.Errorf("%d pages evictable, %d evicted, want %d", n, freed, onDevice)
		}
		if err := tree.Check(); err != nil {
			t.Error(err)
		}
		tree.Loaded(loads)
		if n, freed := tree.Evictable(), tree.Evict(2); n != 1 || freed != 1 {
			t.Errorf("%d pages evictable, %d evicted, want 1", n, freed)
		}
	}
}

func TestWritePolicies(t *testing.T) {
	for _, policy := range []WritePolicy{WriteThrough, WriteBack} {
		t.Run(policy.String(), func(t *testing.T) {
			pages := NewPages(6)
			tree := NewTree(pages, NewPages(4), 2)
			tree.Policy = policy
			table := pages.Alloc(2)
			tree.Insert([]int32{1, 2, 3, 4}, table)
			if got, want := len(tree.TakeBackups()) == 2, policy == WriteThrough; got != want {
				t.Errorf("backed up at once: %t", got)
			}
			pages.Release(table...)
			tree.Evict(1)
			if got, want := len(tree.TakeBackups()) == 1, policy == WriteBack; got != want {
				t.Errorf("backed up at eviction: %t", got)
			}
		})
	}
}

// TestHostCheckFails shows that each invariant of the host tier can fail.
func TestHostCheckFails(t *testing.T) {
	tests := []struct {
		name, want string
		evicted    bool
		spoil      func(*Tree)
	}{
		{"no page", "has no page", true, func(t *Tree) { t.nodes()[0].host = Reserved }},
		{"host page with two nodes", "host page 1 is in the tree twice", false, func(t *Tree) { t.nodes()[1].host = 1 }},
		{"host-only parent", "its parent isn't", false, func(t *Tree) { t.nodes()[0].device = Reserved }},
		{"host page of nobody", "2 has 1 users by the books and 0", false, func(t *Tree) { t.nodes()[1].host = Reserved }},
		{"free host page", "1 has 0 users by the books and 1", false, func(t *Tree) { t.host.Release(1) }},
		{"host page free twice", "free twice", false, func(t *Tree) { t.host.free = append(t.host.free, 3) }},
		{"load without a lock on the host", "1 has 1 users by the books and 2", true, func(t *Tree) {
			t.Load(t.Match([]int32{1, 2}), t.device.Alloc(1))
			t.host.Release(1)
		}},
		{"load without a lock on the device", "users by the books", true, func(t *Tree) {
			fresh := t.device.Alloc(1)
			t.Load(t.Match([]int32{1, 2}), fresh)
			t.device.Release(fresh...)
			t.device.Release(fresh...)
		}},
		{"load from nowhere", "isn't in the tree", true, func(t *Tree) {
			t.loads = []Copy{{1, 3, 2}}
		}},
		{"load to elsewhere", "the tree knows it as page", true, func(t *Tree) {
			t.Load(t.Match([]int32{1, 2}), t.device.Alloc(1))
			t.loads[0].Device = 1
		}},
		{"part that is shared", "a part of it", false, func(t *Tree) {
			t.loads = []Copy{{2, 1, 1}}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pages := NewPages(6)
			tree, table := hostTree(pages, NewPages(4), tt.evicted)
			check := func() error {
				if err := tree.Check(); err != nil {
					return err
				}
				return pages.Check(table, tree.Pages())
			}
			if err := check(); err != nil {
				t.Fatal(err)
			}
			tt.spoil(tree)
			if err := check(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Check = %v, want an error with %q", err, tt.want)
			}
		})
	}
}

// TestCheckFails shows that each invariant can fail.
func TestCheckFails(t *testing.T) {
	tests := []struct {
		name, want string
		spoil      func(*Pages, *Tree, []int32)
	}{
		{"free twice", "free twice", func(p *Pages, _ *Tree, _ []int32) { p.free = append(p.free, p.free[0]) }},
		{"freed too early", "users by the books", func(p *Pages, _ *Tree, table []int32) { p.Release(table[1]) }},
		{"never freed", "free is false", func(p *Pages, _ *Tree, _ []int32) { p.free = p.free[1:] }},
		{"in the free list and in use", "free is true", func(p *Pages, _ *Tree, table []int32) { p.free = append(p.free, table[0]) }},
		{"out of range", "names page", func(_ *Pages, _ *Tree, table []int32) { table[0] = 99 }},
		{"size", "counts", func(_ *Pages, t *Tree, _ []int32) { t.size++ }},
		{"page twice in the tree", "in the tree twice", func(_ *Pages, t *Tree, _ []int32) {
			all := t.nodes()
			all[1].device = all[0].device
		}},
		{"not its parent's child", "parent's child", func(_ *Pages, t *Tree, _ []int32) { t.nodes()[0].key = "x" }},
		{"child used by more", "more users", func(p *Pages, _ *Tree, table []int32) { p.Retain(table[1]) }},
		{"child used later", "was used after", func(_ *Pages, t *Tree, _ []int32) { t.nodes()[1].used = 99 }},
		{"short key", "holds", func(_ *Pages, t *Tree, _ []int32) {
			n := t.nodes()[1]
			delete(n.parent.children, n.key)
			n.key = n.key[:4]
			n.parent.children[n.key] = n
		}},
		{"reserved page", "reserved page", func(p *Pages, _ *Tree, _ []int32) { p.users[Reserved] = 2 }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			pages := NewPages(6)
			tree := NewTree(pages, nil, 2)
			table := pages.Alloc(2)
			tree.Insert([]int32{1, 2, 3, 4}, table)
			check := func() error {
				if err := tree.Check(); err != nil {
					return err
				}
				return pages.Check(table, tree.Pages())
			}
			if err := check(); err != nil {
				t.Fatal(err)
			}
			tt.spoil(pages, tree, table)
			if err := check(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("Check = %v, want an error with %q", err, tt.want)
			}
		})
	}
}

// BenchmarkFullTiers lets requests of 16 pages come and go where both tiers
// are full, so that each evicts, is backed up and loads nothing.
func BenchmarkFullTiers(b *testing.B) {
	pages, host := NewPages(1025), NewPages(2049)
	tree := NewTree(pages, host, 64)
	tokens := make([]int32, 16*64)
	n := int32(0)
	for b.Loop() {
		n++
		for i := range tokens {
			tokens[i] = n
		}
		if short := 16 - pages.Free(); short > 0 {
			tree.Evict(short)
		}
		table := pages.Alloc(16)
		tree.Insert(tokens, table)
		pages.Release(table...)
		tree.TakeBackups()
	}
}

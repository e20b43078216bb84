package kv

import (
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// user is somebody with a page table.
type user struct{ tokens, table []int32 }

// TestRandomUse plays users against the books and checks them after each step.
func TestRandomUse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const pageSize = 2
		pages := NewPages(rapid.IntRange(2, 12).Draw(t, "pages"))
		tree := NewTree(pages, pageSize)
		var users []*user
		tables := func() [][]int32 {
			all := [][]int32{tree.Pages()}
			for _, u := range users {
				all = append(all, u.table)
			}
			return all
		}
		take := func(t *rapid.T) *user {
			if len(users) == 0 {
				t.Skip("no users")
			}
			i := rapid.IntRange(0, len(users)-1).Draw(t, "user")
			u := users[i]
			users = slices.Delete(users, i, i+1)
			return u
		}
		t.Repeat(map[string]func(*rapid.T){
			"come": func(t *rapid.T) {
				u := &user{tokens: rapid.SliceOfN(rapid.Int32Range(1, 2), 0, 9).Draw(t, "tokens")}
				u.table = tree.Match(u.tokens)
				want := (len(u.tokens)+pageSize-1)/pageSize - len(u.table)
				fresh := pages.Alloc(want)
				if fresh == nil && want > 0 {
					evictable := tree.Evictable()
					freed := tree.Evict(want - pages.Free())
					if fresh = pages.Alloc(want); fresh == nil && freed < evictable && freed < want {
						t.Fatalf("evicted %d of %d evictable pages, wanted %d", freed, evictable, want)
					}
				}
				if fresh == nil && want > 0 {
					pages.Release(u.table...)
					return
				}
				u.table = append(u.table, fresh...)
				users = append(users, u)
			},
			"insert": func(t *rapid.T) {
				u := take(t)
				tree.Insert(u.tokens, u.table)
				users = append(users, u)
			},
			"leave": func(t *rapid.T) { pages.Release(take(t).table...) },
			"evict": func(t *rapid.T) { tree.Evict(rapid.IntRange(0, 3).Draw(t, "n")) },
			"": func(t *rapid.T) {
				if err := pages.Check(tables()...); err != nil {
					t.Fatal(err)
				}
				if err := tree.Check(); err != nil {
					t.Fatal(err)
				}
			},
		})
	})
}

func TestMatchSharesWholePages(t *testing.T) {
	pages := NewPages(10)
	tree := NewTree(pages, 2)
	table := pages.Alloc(3)
	tree.Insert([]int32{1, 2, 3, 4, 5}, table) // the last page isn't whole
	got := tree.Match([]int32{1, 2, 3, 9})
	if want := table[:1]; !slices.Equal(got, want) {
		t.Errorf("Match = %v, want %v", got, want)
	}
	if tree.Size() != 2 {
		t.Errorf("the tree holds %d pages, want 2", tree.Size())
	}
}

func TestInsertKeepsOneOfTwoEqualPages(t *testing.T) {
	pages := NewPages(10)
	tree := NewTree(pages, 2)
	a, b := pages.Alloc(2), pages.Alloc(2)
	tree.Insert([]int32{1, 2, 3, 4}, a)
	tree.Insert([]int32{1, 2, 3, 4}, b)
	if !slices.Equal(a, b) || pages.Free() != 7 {
		t.Errorf("tables %v and %v, %d free; want equal tables and 7 free", a, b, pages.Free())
	}
}

func TestEvictTakesLeastRecentlyUsedLeaf(t *testing.T) {
	pages := NewPages(10)
	tree := NewTree(pages, 1)
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
			all[1].page = all[0].page
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
			tree := NewTree(pages, 2)
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

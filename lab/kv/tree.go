package kv

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// Tree remembers which page holds which tokens after which prefix, in whole
// pages. It is a user of every page in it. A request that uses a node's page
// uses its ancestors' too, so a leaf that nobody else uses can always go.
type Tree struct {
	pages    *Pages
	pageSize int
	root     node
	size     int
	clock    uint64 // counts uses, so that least recently used has an order
	evicted  uint64
}

type node struct {
	page     int32
	key      string // the page's tokens
	parent   *node
	children map[string]*node
	used     uint64
}

// NewTree makes an empty tree over pages of so many tokens.
func NewTree(pages *Pages, pageSize int) *Tree {
	return &Tree{pages: pages, pageSize: pageSize}
}

// Size is the number of pages in the tree.
func (t *Tree) Size() int { return t.size }

// Evicted counts the pages that had to go, since the start.
func (t *Tree) Evicted() uint64 { return t.evicted }

// Match finds the longest known prefix of tokens, in whole pages, and makes
// the caller a user of its pages.
func (t *Tree) Match(tokens []int32) []int32 {
	var pages []int32
	at := &t.root
	for len(tokens) >= t.pageSize {
		child := at.children[key(tokens[:t.pageSize])]
		if child == nil {
			break
		}
		at, tokens = child, tokens[t.pageSize:]
		pages = append(pages, at.page)
	}
	t.touch(at)
	t.pages.Retain(pages...)
	return pages
}

// Insert makes the tree know the whole pages of tokens, which are in table,
// whose user the caller is. Where the tree knows the same tokens in another
// page, that page takes the place of the caller's in table: both hold the same
// values, and one is enough.
func (t *Tree) Insert(tokens, table []int32) {
	at := &t.root
	for i := 0; (i+1)*t.pageSize <= len(tokens); i++ {
		k := key(tokens[i*t.pageSize : (i+1)*t.pageSize])
		child := at.children[k]
		switch {
		case child == nil:
			child = &node{page: table[i], key: k, parent: at}
			if at.children == nil {
				at.children = map[string]*node{}
			}
			at.children[k] = child
			t.pages.Retain(child.page)
			t.size++
		case child.page != table[i]:
			t.pages.Retain(child.page)
			t.pages.Release(table[i])
			table[i] = child.page
		}
		at = child
	}
	t.touch(at)
}

// touch marks a node and its ancestors as used now.
func (t *Tree) touch(n *node) {
	t.clock++
	for ; n != nil; n = n.parent {
		n.used = t.clock
	}
}

// Evictable counts the pages that Evict could free.
func (t *Tree) Evictable() int {
	n := 0
	for _, child := range t.nodes() {
		if t.pages.Users(child.page) == 1 {
			n++
		}
	}
	return n
}

// Evict frees up to n pages, least recently used leaves first, and says how
// many it could.
func (t *Tree) Evict(n int) int {
	var leaves []*node
	for _, node := range t.nodes() {
		if t.idleLeaf(node) {
			leaves = append(leaves, node)
		}
	}
	freed := 0
	for freed < n && len(leaves) > 0 {
		i := slices.Index(leaves, slices.MinFunc(leaves, func(a, b *node) int { return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(a.page, b.page)) }))
		leaf := leaves[i]
		leaves = slices.Delete(leaves, i, i+1)
		delete(leaf.parent.children, leaf.key)
		t.pages.Release(leaf.page)
		t.size--
		t.evicted++
		freed++
		if parent := leaf.parent; parent != &t.root && t.idleLeaf(parent) {
			leaves = append(leaves, parent)
		}
	}
	return freed
}

func (t *Tree) idleLeaf(n *node) bool {
	return len(n.children) == 0 && t.pages.Users(n.page) == 1
}

// nodes lists all nodes, parents first.
func (t *Tree) nodes() []*node {
	all := make([]*node, 0, t.size)
	at := []*node{&t.root}
	for len(at) > 0 {
		n := at[len(at)-1]
		at = at[:len(at)-1]
		for _, child := range n.children {
			all = append(all, child)
			at = append(at, child)
		}
	}
	return all
}

// Pages lists the pages in the tree: its page table, for Pages.Check.
func (t *Tree) Pages() []int32 {
	var pages []int32
	for _, n := range t.nodes() {
		pages = append(pages, n.page)
	}
	return pages
}

// Check says what is wrong with the tree: a page in it twice, a child used by
// more than its parent, a wrong count, a broken link.
func (t *Tree) Check() error {
	seen := map[int32]bool{}
	all := t.nodes()
	if len(all) != t.size {
		return fmt.Errorf("the tree has %d nodes and counts %d", len(all), t.size)
	}
	for _, n := range all {
		switch {
		case seen[n.page]:
			return fmt.Errorf("page %d is in the tree twice", n.page)
		case n.parent.children[n.key] != n:
			return fmt.Errorf("page %d isn't its parent's child", n.page)
		case len(n.key) != 4*t.pageSize:
			return fmt.Errorf("page %d holds %d tokens, not %d", n.page, len(n.key)/4, t.pageSize)
		case n.parent != &t.root && t.pages.Users(n.page) > t.pages.Users(n.parent.page):
			return fmt.Errorf("page %d has more users than page %d before it", n.page, n.parent.page)
		case n.used > n.parent.used:
			return fmt.Errorf("page %d was used after page %d before it", n.page, n.parent.page)
		}
		seen[n.page] = true
	}
	if t.pages.Users(Reserved) != 1 {
		return errors.New("the reserved page is in use")
	}
	return nil
}

// key is the tokens' bytes.
func key(tokens []int32) string {
	b := make([]byte, 0, 4*len(tokens))
	for _, token := range tokens {
		b = binary.LittleEndian.AppendUint32(b, uint32(token))
	}
	return string(b)
}

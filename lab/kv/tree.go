package kv

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
)

// WritePolicy says when a page is copied to the host.
type WritePolicy uint8

// The zero value is WriteThrough.
const (
	WriteThrough WritePolicy = iota // as soon as its tokens are known
	WriteBack                       // when it has to leave the device
)

// String returns the name that flags use: write_through or write_back.
func (p WritePolicy) String() string {
	switch p {
	case WriteThrough:
		return "write_through"
	case WriteBack:
		return "write_back"
	default:
		return fmt.Sprintf("WritePolicy(%d)", uint8(p))
	}
}

// Tree remembers which page holds which tokens after which prefix, in whole
// pages. A node's page is on the device, on the host, or on both; what is on
// the device stands on what is on the device, so host-only nodes are the ends
// of branches. The tree is a user of every page in it. A request that uses a
// node's device page uses its ancestors' too, so a leaf of the device's part
// that nobody else uses can always go; what goes first is what was used least
// recently.
//
// The tree only says what is to be copied between the tiers. Its caller copies,
// backups first and in their order, before anything is written to a device
// page that it got since.
type Tree struct {
	Policy WritePolicy
	Parts  bool // offer the host's pages of which only the first tokens are the same

	device, host *Pages // host is nil where there is no such tier
	pageSize     int
	root         node
	size         int    // nodes on the device
	clock        uint64 // counts uses, so that least recently used has an order
	backups      []Copy // for the caller to take
	loads        []Copy // under way: each is a user of both its pages
	stats        TreeStats
}

// TreeStats counts pages since the start.
type TreeStats struct {
	Evicted        uint64 // from the device
	HostEvicted    uint64
	BackedUp       uint64
	BackupsDropped uint64 // for want of a host page
	Loaded         uint64 // the parts of pages too
}

// Copy is the first Tokens tokens of a page, to be copied between the tiers.
type Copy struct {
	Device, Host int32
	Tokens       int
}

// Prefix is a known prefix. Whoever found it is a user of its pages, until
// Load or Release.
type Prefix struct {
	Device []int32 // the pages of its beginning
	Host   []int32 // the host pages of what follows
	Part   int     // the tokens that belong to it of Host's last page; 0 is all

	nodes []*node // of Host, but for the part of a page
}

type node struct {
	device, host int32  // pages; Reserved where it has none
	key          string // the page's tokens
	parent       *node
	children     map[string]*node
	used         uint64
}

// NewTree makes an empty tree over pages of so many tokens. host is nil where
// there is no host tier.
func NewTree(device, host *Pages, pageSize int) *Tree {
	return &Tree{device: device, host: host, pageSize: pageSize}
}

// Size is the number of the tree's pages on the device.
func (t *Tree) Size() int { return t.size }

// HostSize is the number of the tree's pages on the host.
func (t *Tree) HostSize() int {
	if t.host == nil {
		return 0
	}
	return t.host.Total() - t.host.Free()
}

// Stats returns the counts so far.
func (t *Tree) Stats() TreeStats { return t.stats }

// Match finds the longest known prefix of tokens.
func (t *Tree) Match(tokens []int32) Prefix {
	var p Prefix
	at := &t.root
	for len(tokens) >= t.pageSize {
		child := at.children[key(tokens[:t.pageSize])]
		if child == nil {
			break
		}
		at, tokens = child, tokens[t.pageSize:]
		if at.device != Reserved {
			p.Device = append(p.Device, at.device)
		} else {
			p.Host, p.nodes = append(p.Host, at.host), append(p.nodes, at)
		}
	}
	if t.Parts {
		if part, n := at.part(tokens); part != nil {
			at, p.Host, p.Part = part, append(p.Host, part.host), n
		}
	}
	t.touch(at)
	t.device.Retain(p.Device...)
	if len(p.Host) > 0 {
		t.host.Retain(p.Host...)
	}
	return p
}

// part finds the child on the host that begins with most of tokens, at least
// one, and says how many.
func (n *node) part(tokens []int32) (best *node, most int) {
	wanted := key(tokens)
	for _, child := range n.children {
		if child.host == Reserved {
			continue
		}
		same := 0
		for same < min(len(wanted), len(child.key)) && wanted[same:same+4] == child.key[same:same+4] {
			same += 4
		}
		if same > 4*most || same == 4*most && best != nil && child.host < best.host {
			best, most = child, same/4
		}
	}
	return best, most
}

// Tokens is the prefix's length.
func (t *Tree) Tokens(p Prefix) int {
	n := (len(p.Device) + len(p.Host)) * t.pageSize
	if p.Part > 0 {
		n -= t.pageSize - p.Part
	}
	return n
}

// Release gives a prefix back.
func (t *Tree) Release(p Prefix) {
	t.device.Release(p.Device...)
	if len(p.Host) > 0 {
		t.host.Release(p.Host...)
	}
}

// Load says what is to be copied to pages, the caller's, so that they hold
// what p.Host does. From now on the tree knows the whole ones by these pages,
// and the caller is a user of them as of p.Device. Nobody may read or insert
// them before they are loaded.
func (t *Tree) Load(p Prefix, pages []int32) []Copy {
	loads := make([]Copy, len(p.Host))
	for i, host := range p.Host {
		loads[i] = Copy{Device: pages[i], Host: host, Tokens: t.pageSize}
		if i < len(p.nodes) {
			p.nodes[i].device = pages[i]
			t.size++
			t.device.Retain(pages[i])
		} else {
			loads[i].Tokens = p.Part
		}
		t.device.Retain(pages[i]) // the load's; the host page's is the prefix's own
	}
	t.loads = append(t.loads, loads...)
	return loads
}

// Loaded says that loads are done.
func (t *Tree) Loaded(loads []Copy) {
	for _, load := range loads {
		i := slices.Index(t.loads, load)
		if i < 0 {
			panic(fmt.Sprintf("host page %d isn't being loaded to page %d", load.Host, load.Device))
		}
		t.loads = slices.Delete(t.loads, i, i+1)
		t.device.Release(load.Device)
		t.host.Release(load.Host)
		t.stats.Loaded++
	}
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
		if child == nil {
			child = &node{key: k, parent: at}
			if at.children == nil {
				at.children = map[string]*node{}
			}
			at.children[k] = child
		}
		switch child.device {
		case table[i]:
		case Reserved:
			child.device = table[i]
			t.size++
			t.device.Retain(child.device)
		default:
			t.device.Retain(child.device)
			t.device.Release(table[i])
			table[i] = child.device
		}
		at = child
	}
	t.touch(at)
	if t.Policy == WriteThrough && t.host != nil {
		var missing []*node
		for ; at != &t.root; at = at.parent {
			if at.host == Reserved {
				missing = append(missing, at)
			}
		}
		slices.Reverse(missing)
		t.backUp(missing...)
	}
}

// backUp copies nodes of the device to the host, the first ones if there isn't
// room for all.
func (t *Tree) backUp(nodes ...*node) {
	if short := len(nodes) - t.host.Free(); short > 0 {
		t.evictHost(short, nodes[0].used)
	}
	room := min(len(nodes), t.host.Free())
	for i, page := range t.host.Alloc(room) {
		nodes[i].host = page
		t.backups = append(t.backups, Copy{Device: nodes[i].device, Host: page, Tokens: t.pageSize})
	}
	t.stats.BackedUp += uint64(room)
	t.stats.BackupsDropped += uint64(len(nodes) - room)
}

// TakeBackups returns what is to be copied to the host, once.
func (t *Tree) TakeBackups() []Copy {
	backups := t.backups
	t.backups = nil
	return backups
}

// touch marks a node and its ancestors as used now.
func (t *Tree) touch(n *node) {
	t.clock++
	for ; n != nil; n = n.parent {
		n.used = t.clock
	}
}

// Evictable counts the device pages that Evict could free.
func (t *Tree) Evictable() int {
	n, _ := t.evictable(&t.root)
	return n
}

// evictable counts the device pages at and below a node that could go, and
// says whether nothing of it keeps its parent's page from going.
func (t *Tree) evictable(n *node) (count int, all bool) {
	all = true
	for _, child := range n.children {
		below, allBelow := t.evictable(child)
		count, all = count+below, all && allBelow
	}
	switch {
	case n.device == Reserved:
		return count, all && !t.locked(n)
	case all && t.device.Users(n.device) == 1:
		return count + 1, !t.locked(n)
	default:
		return count, false
	}
}

// Evict frees up to n device pages, least recently used leaves first, and says
// how many it could.
func (t *Tree) Evict(n int) int {
	return t.evictDevice(n, t.Policy == WriteBack && t.host != nil)
}

func (t *Tree) evictDevice(n int, writeBack bool) int {
	freed := t.evict(n, t.idleLeaf, func(leaf *node) {
		if writeBack && leaf.host == Reserved {
			t.backUp(leaf)
		}
		t.device.Release(leaf.device)
		leaf.device = Reserved
	})
	t.size -= freed
	t.stats.Evicted += uint64(freed)
	return freed
}

// evictHost frees up to n host pages of nodes that were last used before a
// time: what comes never pushes out what was used as recently.
func (t *Tree) evictHost(n int, before uint64) {
	idle := func(n *node) bool { return n.used < before && t.idleHostLeaf(n) }
	freed := t.evict(n, idle, func(leaf *node) {
		t.host.Release(leaf.host)
		leaf.host = Reserved
	})
	t.stats.HostEvicted += uint64(freed)
}

// evict takes a page from up to n of the nodes that can spare it, least
// recently used first, and forgets those that have none left.
func (t *Tree) evict(n int, spares func(*node) bool, take func(*node)) int {
	var leaves []*node
	for _, node := range t.nodes() {
		if spares(node) {
			leaves = append(leaves, node)
		}
	}
	freed := 0
	for freed < n && len(leaves) > 0 {
		leaf := slices.MinFunc(leaves, func(a, b *node) int {
			return cmp.Or(cmp.Compare(a.used, b.used), cmp.Compare(a.device, b.device), cmp.Compare(a.host, b.host))
		})
		leaves = slices.Delete(leaves, slices.Index(leaves, leaf), slices.Index(leaves, leaf)+1)
		take(leaf)
		freed++
		parent := leaf.parent
		if leaf.device == Reserved && leaf.host == Reserved {
			t.forget(leaf)
		}
		if parent != &t.root && spares(parent) {
			leaves = append(leaves, parent)
		}
	}
	return freed
}

// forget takes a node without pages out of the tree. What stands on it goes
// too, which is on the host alone: it can't be reached any more.
func (t *Tree) forget(n *node) {
	delete(n.parent.children, n.key)
	var pages []int32
	for _, below := range below(n, nil) {
		pages = append(pages, below.host)
	}
	if len(pages) > 0 {
		slices.Sort(pages) // the next ones to be used must not depend on a map's order
		t.host.Release(pages...)
		t.stats.HostEvicted += uint64(len(pages))
	}
}

// idleLeaf says whether a node's device page can go.
func (t *Tree) idleLeaf(n *node) bool {
	if n.device == Reserved || t.device.Users(n.device) != 1 {
		return false
	}
	for _, child := range n.children {
		if child.device != Reserved || t.locked(child) {
			return false
		}
	}
	return true
}

// locked says whether a node's host page is being loaded.
func (t *Tree) locked(n *node) bool { return n.host != Reserved && t.host.Users(n.host) > 1 }

// idleHostLeaf says whether a node's host page can go.
func (t *Tree) idleHostLeaf(n *node) bool {
	if n.host == Reserved || t.locked(n) {
		return false
	}
	for _, child := range n.children {
		if child.host != Reserved {
			return false
		}
	}
	return true
}

// Flush forgets all that nobody is using, on both tiers.
func (t *Tree) Flush() {
	if t.host != nil {
		t.evictHost(t.host.Total(), t.clock+1)
	}
	t.evictDevice(t.device.Total(), false)
}

// nodes lists all nodes, parents first.
func (t *Tree) nodes() []*node { return below(&t.root, nil) }

func below(n *node, all []*node) []*node {
	for _, child := range n.children {
		all = below(child, append(all, child))
	}
	return all
}

// Pages lists the device pages that the tree and the loads use, once for each
// use: for Pages.Check.
func (t *Tree) Pages() []int32 {
	var pages []int32
	for _, n := range t.nodes() {
		if n.device != Reserved {
			pages = append(pages, n.device)
		}
	}
	for _, load := range t.loads {
		pages = append(pages, load.Device)
	}
	return pages
}

// hostPages lists the host pages that the tree and the loads use.
func (t *Tree) hostPages() []int32 {
	var pages []int32
	for _, n := range t.nodes() {
		if n.host != Reserved {
			pages = append(pages, n.host)
		}
	}
	for _, load := range t.loads {
		pages = append(pages, load.Host)
	}
	return pages
}

// Check says what is wrong with the tree and the host's books: a page with two
// nodes, a node without a page, one on the device that stands on none, a child
// used by more or later than its parent, a load whose pages aren't held, a
// broken link.
func (t *Tree) Check() error {
	onDevice, onHost := map[int32]bool{}, map[int32]*node{}
	loading := map[int32]int{} // by device page
	for _, load := range t.loads {
		loading[load.Device]++
	}
	for _, n := range t.nodes() {
		name := fmt.Sprintf("page %d", n.device)
		if n.device == Reserved {
			name = fmt.Sprintf("host page %d", n.host)
		}
		top := n.parent == &t.root
		switch {
		case n.device == Reserved && n.host == Reserved:
			return errors.New("a node of the tree has no page")
		case n.device != Reserved && onDevice[n.device]:
			return fmt.Errorf("page %d is in the tree twice", n.device)
		case n.host != Reserved && onHost[n.host] != nil:
			return fmt.Errorf("host page %d is in the tree twice", n.host)
		case n.parent.children[n.key] != n:
			return fmt.Errorf("%s isn't its parent's child", name)
		case len(n.key) != 4*t.pageSize:
			return fmt.Errorf("%s holds %d tokens, not %d", name, len(n.key)/4, t.pageSize)
		case n.used > n.parent.used:
			return fmt.Errorf("%s was used after its parent", name)
		case !top && n.device != Reserved && n.parent.device == Reserved:
			return fmt.Errorf("%s is on the device and its parent isn't", name)
		case !top && n.device != Reserved && t.device.Users(n.device)-loading[n.device] > t.device.Users(n.parent.device)-loading[n.parent.device]:
			return fmt.Errorf("%s has more users than page %d before it", name, n.parent.device)
		}
		onDevice[n.device], onHost[n.host] = true, n
	}
	for _, load := range t.loads {
		n := onHost[load.Host]
		switch {
		case load.Host == Reserved || n == nil:
			return fmt.Errorf("host page %d is being loaded and isn't in the tree", load.Host)
		case load.Tokens == t.pageSize && n.device != load.Device:
			return fmt.Errorf("host page %d is being loaded to page %d, and the tree knows it as page %d", load.Host, load.Device, n.device)
		case load.Tokens < t.pageSize && onDevice[load.Device]:
			return fmt.Errorf("page %d is in the tree and a part of it is being loaded", load.Device)
		}
	}
	delete(onDevice, Reserved)
	if len(onDevice) != t.size {
		return fmt.Errorf("the tree has %d pages on the device and counts %d", len(onDevice), t.size)
	}
	if t.device.Users(Reserved) != 1 {
		return errors.New("the reserved page is in use")
	}
	if t.host == nil {
		return nil
	}
	if err := t.host.Check(t.hostPages()); err != nil {
		return fmt.Errorf("host: %w", err)
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

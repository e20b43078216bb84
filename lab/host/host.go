// Package host is the memory of the lab's host tier: it mirrors the device's
// cache pages, in one pool for each kind of state, and copies between the two.
// Which page goes where is package kv's to say: its host pages are the logical
// pool that all pools here are anchored to, so page h of each holds the same
// tokens.
//
// Pages are copied to the host at once, and back beside the forward pass,
// layer by layer. The stream that does this is simulated: it gets on whenever
// the forward pass comes to a layer, by as much as its seed says, and the pass
// waits until that layer is there. All of it happens in the goroutine that
// calls Forward.
//
// Its API may change.
package host

import (
	"fmt"
	"math/rand/v2"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/kv"
	"github.com/culprit-project/culprit/lab/model"
)

// Layout says in which order a pool's rows stand in host memory. A row is one
// page of one layer.
type Layout uint8

// The zero value is PageFirst.
const (
	PageFirst  Layout = iota // all layers of a page together
	LayerFirst               // all pages of a layer together
)

// String returns the name that flags use: page_first or layer_first.
func (l Layout) String() string {
	switch l {
	case PageFirst:
		return "page_first"
	case LayerFirst:
		return "layer_first"
	default:
		return fmt.Sprintf("Layout(%d)", uint8(l))
	}
}

// Config is fixed for a tier's life.
type Config struct {
	Pages  int // the reserved one included
	Layout Layout
	Seed   uint64 // of the stream's own pace
	Pace   Pace   // nil draws it
	Faults *fault.Set
}

// Pace says how many copies the stream gets done before the forward pass comes
// to a layer, of so many that each layer has.
type Pace func(layer, copies int) int

// Tier is host memory and the stream that loads from it. One goroutine owns it.
type Tier struct {
	pageSize int
	pages    int
	pools    []*Pool
	pace     Pace
	waits    Waits

	// What is being loaded: each transfer is one copy in each layer, and copies
	// of them are done, those of layer 0 first.
	transfers []transfer
	done      int

	faults *fault.Set
	env    *fault.Env // of the step at hand
}

// transfer is one pool's part of a load.
type transfer struct {
	pool         *Pool
	device, host []int32 // slots
}

// Waits counts how the forward pass found the layers that it came to.
type Waits struct {
	Idle    uint64 // nothing was being loaded
	Loaded  uint64 // it was there
	Loading uint64 // it was waited for
}

// New makes the host's mirror of a device's memory. Every forward pass with
// this cache waits from now on for what is being loaded.
func New(device *model.Cache, c Config) *Tier {
	t := &Tier{pageSize: device.PageSize, pages: c.Pages, pace: c.Pace, faults: c.Faults, env: &fault.Env{}}
	if t.pace == nil {
		rng := rand.New(rand.NewPCG(c.Seed, 0))
		t.pace = func(_, copies int) int { return rng.IntN(2*copies + 1) } // on average, as fast as the pass
	}
	add := func(name string, g geometry, memory func(layer int) []byte) {
		p := &Pool{name: name, tier: t, pages: c.Pages, layout: c.Layout, geometry: g}
		p.host = make([]byte, model.Layers*c.Pages*g.pageBytes())
		for l := range p.device {
			p.device[l] = memory(l)
		}
		t.pools = append(t.pools, p)
	}
	add(Latent, latentGeometry(t.pageSize), func(l int) []byte { return bytesOf(device.Latent[l]) })
	add(IndexK, indexGeometry(t.pageSize, device.IndexDType), func(l int) []byte { return device.Index[l] })
	device.Wait = t.WaitUntil
	return t
}

// on says whether a fault strikes now.
func (t *Tier) on(f fault.Fault) bool { return t.faults.On(f, t.env) }

// Begin does a step's backups, in their order, and begins its loads. Loads end
// with the step, by End. env is what the faults are told of it.
func (t *Tier) Begin(backups, loads []kv.Copy, env *fault.Env) {
	if t.transfers != nil {
		panic("a step's loads begin before the last one's have ended")
	}
	t.env = env
	// Backups that come one after another may use a page again, so each is a
	// copy of its own.
	for _, c := range backups {
		device, host := t.slots(c)
		for _, p := range t.pools {
			p.BackupFromDeviceAllLayer(device, host)
		}
	}
	for _, p := range t.pools {
		var whole transfer
		var parts []transfer
		for _, c := range loads {
			if p.name == IndexK && t.on(fault.StaleIndexK) {
				continue
			}
			device, host := t.slots(c)
			if c.Tokens == t.pageSize {
				whole.device, whole.host = append(whole.device, device...), append(whole.host, host...)
			} else {
				parts = append(parts, transfer{p, device, host})
			}
		}
		if len(whole.device) > 0 {
			whole.pool = p
			t.transfers = append(t.transfers, whole)
		}
		t.transfers = append(t.transfers, parts...)
	}
}

// slots are the tokens of a copy on both sides.
func (t *Tier) slots(c kv.Copy) (device, host []int32) {
	for i := range c.Tokens {
		device = append(device, c.Device*int32(t.pageSize)+int32(i))
		host = append(host, c.Host*int32(t.pageSize)+int32(i))
	}
	return device, host
}

// WaitUntil returns when a layer has been loaded.
func (t *Tier) WaitUntil(layer int) {
	if len(t.transfers) == 0 {
		t.waits.Idle++
		return
	}
	t.advance(t.pace(layer, len(t.transfers)))
	missing := (layer+1)*len(t.transfers) - t.done
	if missing <= 0 {
		t.waits.Loaded++
		return
	}
	if t.on(fault.MissingLayerWait) {
		return
	}
	t.waits.Loading++
	t.advance(missing)
}

// advance does the next n copies.
func (t *Tier) advance(n int) {
	for ; n > 0 && t.done < model.Layers*len(t.transfers); n-- {
		next := t.transfers[t.done%len(t.transfers)]
		next.pool.LoadToDevicePerLayer(t.done/len(t.transfers), next.device, next.host)
		t.done++
	}
}

// End does what is left to be loaded.
func (t *Tier) End() {
	t.advance(model.Layers * len(t.transfers))
	t.transfers, t.done = nil, 0
}

// Waits returns the counts so far.
func (t *Tier) Waits() Waits { return t.waits }

// Copies returns the counts so far: of each pool, direction and branch, always
// in the same order.
func (t *Tier) Copies() []Copies {
	var all []Copies
	for _, p := range t.pools {
		for d, direction := range []string{"backup", "load"} {
			for b, branch := range []string{"page_aligned", "token_granular"} {
				c := p.copies[d][b]
				c.Pool, c.Direction, c.Branch = p.name, direction, branch
				all = append(all, c)
			}
		}
	}
	return all
}

// Bytes is the size of the host's memory.
func (t *Tier) Bytes() int {
	n := 0
	for _, p := range t.pools {
		n += len(p.host)
	}
	return n
}

// Check says what is wrong with the tier: a pool that isn't as large as its
// pages, a slot out of range, of the reserved page or loaded to twice, a
// stream that did more than there was to do.
func (t *Tier) Check() error {
	for _, p := range t.pools {
		if p.pages != t.pages || len(p.host) != model.Layers*t.pages*p.pageBytes() {
			return fmt.Errorf("pool %s has %d bytes for %d pages of the %d", p.name, len(p.host), p.pages, t.pages)
		}
	}
	type target struct {
		pool *Pool
		slot int32
	}
	taken := map[target]bool{}
	for _, tr := range t.transfers {
		for i, slot := range tr.device {
			page, pages := int(slot)/t.pageSize, len(tr.pool.device[0])/tr.pool.pageBytes()
			hostPage := int(tr.host[i]) / t.pageSize
			switch {
			case page <= int(kv.Reserved) || page >= pages:
				return fmt.Errorf("pool %s loads to page %d of %d", tr.pool.name, page, pages)
			case hostPage <= int(kv.Reserved) || hostPage >= t.pages:
				return fmt.Errorf("pool %s loads from host page %d of %d", tr.pool.name, hostPage, t.pages)
			case taken[target{tr.pool, slot}]:
				return fmt.Errorf("pool %s loads to slot %d twice", tr.pool.name, slot)
			}
			taken[target{tr.pool, slot}] = true
		}
	}
	if t.done < 0 || t.done > model.Layers*len(t.transfers) {
		return fmt.Errorf("the stream did %d of %d copies", t.done, model.Layers*len(t.transfers))
	}
	return nil
}

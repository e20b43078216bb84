package host

import (
	"fmt"
	"slices"
	"unsafe"

	"github.com/culprit-project/culprit/lab/fault"
	"github.com/culprit-project/culprit/lab/model"
)

// The pools' names.
const (
	Latent = "latent"
	IndexK = "index_k"
)

// Pool mirrors one kind of state.
type Pool struct {
	name   string
	tier   *Tier
	device [model.Layers][]byte // page p at [p*pageBytes, (p+1)*pageBytes)
	host   []byte               // rows of one page of one layer, as the layout says
	pages  int                  // of the host, the reserved one included
	layout Layout
	geometry
	copies [2][2]Copies // by direction and branch
}

// geometry says how a page is made up: of planes, each of which has so many
// bytes of every token, token by token. Latent rows are one plane; index keys
// are one of keys, and for fp8 another of scales.
type geometry struct {
	pageSize int // tokens
	planes   []int
}

func (g geometry) pageBytes() int {
	n := 0
	for _, width := range g.planes {
		n += g.pageSize * width
	}
	return n
}

func latentGeometry(pageSize int) geometry { return geometry{pageSize, []int{4 * model.RowDim}} }

func indexGeometry(pageSize int, d model.IndexDType) geometry {
	g := geometry{pageSize, []int{d.KeyBytes()}}
	if n := d.ScaleBytes(); n > 0 {
		g.planes = append(g.planes, n)
	}
	return g
}

// bytesOf is the memory of floats.
func bytesOf(floats []float32) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(floats))), 4*len(floats))
}

// direction is which way a copy goes.
type direction int

const (
	backup direction = iota
	load
)

// copy moves bytes of the device and of the host, which are equally many.
func (d direction) copy(device, host []byte) {
	if d == backup {
		copy(host, device)
	} else {
		copy(device, host)
	}
}

// branch is one of the two copy routines.
type branch int

const (
	pageAligned branch = iota
	tokenGranular
)

// Copies counts what one of a pool's two copy routines did, in one direction.
type Copies struct {
	Pool      string
	Direction string // backup or load
	Branch    string // page_aligned or token_granular
	Calls     uint64 // one for each layer
	Tokens    uint64 // one for each layer
}

// BackupFromDeviceAllLayer copies the device's slots to the host's.
func (p *Pool) BackupFromDeviceAllLayer(device, host []int32) {
	for l := range model.Layers {
		p.move(backup, l, device, host)
	}
}

// LoadToDevicePerLayer copies one layer of the host's slots to the device's.
func (p *Pool) LoadToDevicePerLayer(layer int, device, host []int32) {
	p.move(load, layer, device, host)
}

// move copies whole pages if that is what the slots are: their number must be
// a multiple of the page size, and each page's must stand together and in
// order. All else goes token by token.
func (p *Pool) move(d direction, layer int, device, host []int32) {
	if len(device) != len(host) {
		panic(fmt.Sprintf("copy %d slots of the device's and %d of the host's", len(device), len(host)))
	}
	if len(device) == 0 {
		return
	}
	b := tokenGranular
	if p.whole(device) && p.whole(host) {
		b = pageAligned
		p.movePages(d, layer, device, host)
	} else {
		p.moveTokens(d, layer, device, host)
	}
	c := &p.copies[d][b]
	c.Calls++
	c.Tokens += uint64(len(device))
}

// whole says whether slots are whole pages.
func (p *Pool) whole(slots []int32) bool {
	if len(slots)%p.pageSize != 0 {
		return false
	}
	for page := range slices.Chunk(slots, p.pageSize) {
		if int(page[0])%p.pageSize != 0 {
			return false
		}
		for i, slot := range page {
			if slot != page[0]+int32(i) {
				return false
			}
		}
	}
	return true
}

func (p *Pool) movePages(d direction, layer int, device, host []int32) {
	n := p.pageBytes()
	for i := 0; i < len(device); i += p.pageSize {
		from := int(device[i]) / p.pageSize * n
		d.copy(p.device[layer][from:][:n], p.row(layer, int(host[i])/p.pageSize))
	}
}

// row is the host's memory of a page of a layer.
func (p *Pool) row(layer, page int) []byte {
	row := layer*p.pages + page
	if p.layout == PageFirst {
		row = page*model.Layers + layer
	}
	n := p.pageBytes()
	stride := n
	if p.name == IndexK && p.tier.on(fault.HostStride) {
		stride = min(n, model.FP8.PageBytes(p.pageSize)) // whatever the device holds
	}
	return p.host[row*stride:][:n]
}

func (p *Pool) moveTokens(d direction, layer int, device, host []int32) {
	g := p.geometry
	if p.tier.on(fault.TokenGranularGeometry) {
		g = latentGeometry(p.pageSize) // of every pool
	}
	for i := range device {
		from, row := p.device[layer], p.row(layer, int(host[i])/p.pageSize)
		page, at, hostAt := int(device[i])/p.pageSize*g.pageBytes(), int(device[i])%p.pageSize, int(host[i])%p.pageSize
		plane := 0
		for _, width := range g.planes {
			// Only a wrong geometry runs past the end; nothing is copied there.
			d.copy(span(from, page+plane+at*width, width), span(row, plane+hostAt*width, width))
			plane += p.pageSize * width
		}
	}
}

// span is n bytes from a place on, or as many as there are.
func span(b []byte, at, n int) []byte {
	at = min(at, len(b))
	return b[at:min(at+n, len(b))]
}

package disagg

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"

	"github.com/culprit-project/culprit/lab/model"
)

// A connection carries frames both ways: a header of 16 bytes and a payload.
// Numbers are little-endian.
//
//	kind u8, component u8, last u8, zero u8, payload's length u32, room u64
type kind uint8

const (
	hello   kind = iota + 1 // both ways, first: geometry
	ping                    // both ways: the sender is alive
	request                 // decode to prefill: room, and its pages
	abort                   // decode to prefill: send no more of this room
	done                    // decode to prefill: every component has come
	data                    // prefill to decode: pages of a component, or the metadata
	failed                  // prefill to decode: nothing more will come; payload says why
	ack                     // prefill to decode: after abort, nothing more will come
)

const (
	headerBytes = 16
	version     = 1

	maxPages   = 4096    // of a request
	maxControl = 1 << 17 // bytes of a payload other than pages
)

type header struct {
	kind      kind
	component Component
	last      bool // the component's last frame
	length    int
	room      uint64
}

func (h header) append(b []byte) []byte {
	last := byte(0)
	if h.last {
		last = 1
	}
	b = append(b, byte(h.kind), byte(h.component), last, 0)
	b = binary.LittleEndian.AppendUint32(b, uint32(h.length))
	return binary.LittleEndian.AppendUint64(b, h.room)
}

// readHeader reads and checks what can be checked without the room.
func readHeader(r io.Reader) (header, error) {
	var b [headerBytes]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return header{}, err
	}
	h := header{
		kind: kind(b[0]), component: Component(b[1]), last: b[2] == 1,
		length: int(binary.LittleEndian.Uint32(b[4:])), room: binary.LittleEndian.Uint64(b[8:]),
	}
	switch {
	case h.kind < hello || h.kind > ack || h.component >= componentCount || b[2] > 1 || b[3] != 0:
		return h, fmt.Errorf("not a frame: it begins with %x", b[:4])
	case h.kind == data && h.component != Metadata:
		if h.length < 4 {
			return h, fmt.Errorf("a data frame of %d bytes", h.length)
		}
	case h.length > maxControl:
		return h, fmt.Errorf("a frame of kind %d has %d bytes, the limit is %d", h.kind, h.length, maxControl)
	}
	return h, nil
}

func readPayload(r io.Reader, h header) ([]byte, error) {
	b := make([]byte, h.length)
	_, err := io.ReadFull(r, b)
	return b, err
}

// geometry is what both sides must have alike.
type geometry struct{ version, rank, ranks, pageSize, index, layers, row uint32 }

func geometryOf(c *Config) geometry {
	return geometry{version, uint32(c.Rank), uint32(c.Ranks), uint32(c.Cache.PageSize), uint32(c.Cache.IndexDType), model.Layers, model.RowDim}
}

func (g geometry) payload() []byte {
	var b []byte
	for _, v := range []uint32{g.version, g.rank, g.ranks, g.pageSize, g.index, g.layers, g.row} {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return b
}

// readHello reads the first frame of a connection.
func readHello(r io.Reader) (geometry, error) {
	h, err := readHeader(r)
	if err != nil {
		return geometry{}, err
	}
	if h.kind != hello || h.length != 28 {
		return geometry{}, fmt.Errorf("the first frame has kind %d and %d bytes, want a hello of 28", h.kind, h.length)
	}
	b, err := readPayload(r, h)
	if err != nil {
		return geometry{}, err
	}
	var v [7]uint32
	for i := range v {
		v[i] = binary.LittleEndian.Uint32(b[4*i:])
	}
	return geometry{v[0], v[1], v[2], v[3], v[4], v[5], v[6]}, nil
}

// agree says what two sides have that isn't alike.
func (g geometry) agree(o geometry) error {
	for _, f := range []struct {
		name         string
		mine, theirs uint32
	}{
		{"protocol version", g.version, o.version},
		{"tensor-parallel size", g.ranks, o.ranks},
		{"rank", g.rank, o.rank},
		{"page size", g.pageSize, o.pageSize},
		{"index-K dtype", g.index, o.index},
		{"layers", g.layers, o.layers},
		{"row", g.row, o.row},
	} {
		if f.mine != f.theirs {
			return fmt.Errorf("the other side has %s %d, this one %d: start both with the same flags", f.name, f.theirs, f.mine)
		}
	}
	return nil
}

func appendPages(b []byte, pages []int32) []byte {
	b = binary.LittleEndian.AppendUint32(b, uint32(len(pages)))
	for _, p := range pages {
		b = binary.LittleEndian.AppendUint32(b, uint32(p))
	}
	return b
}

// readPages reads a list of pages, out of at most limit bytes, and returns how
// many bytes it took.
func readPages(r io.Reader, limit int) ([]int32, int, error) {
	var b [4]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return nil, 0, err
	}
	n := int(binary.LittleEndian.Uint32(b[:]))
	if n < 1 || n > maxPages || 4+4*n > limit {
		return nil, 0, fmt.Errorf("a list of %d pages in %d bytes", n, limit)
	}
	list := make([]byte, 4*n)
	if _, err := io.ReadFull(r, list); err != nil {
		return nil, 0, err
	}
	pages := make([]int32, n)
	for i := range pages {
		pages[i] = int32(binary.LittleEndian.Uint32(list[4*i:]))
	}
	return pages, 4 + 4*n, nil
}

func (f *First) payload() []byte {
	b := binary.LittleEndian.AppendUint32(nil, uint32(f.Token))
	b = binary.LittleEndian.AppendUint32(b, uint32(f.Cached))
	b = binary.LittleEndian.AppendUint32(b, uint32(f.Host))
	b = binary.LittleEndian.AppendUint64(b, math.Float64bits(f.Logprob))
	for _, l := range f.Top {
		b = binary.LittleEndian.AppendUint32(b, uint32(l.ID))
		b = binary.LittleEndian.AppendUint64(b, math.Float64bits(l.Logprob))
	}
	return b
}

func parseFirst(b []byte) (First, error) {
	const fixed, each = 20, 12
	if len(b) < fixed || (len(b)-fixed)%each != 0 {
		return First{}, fmt.Errorf("metadata of %d bytes", len(b))
	}
	f := First{
		Token:  int32(binary.LittleEndian.Uint32(b)),
		Cached: int(binary.LittleEndian.Uint32(b[4:])), Host: int(binary.LittleEndian.Uint32(b[8:])),
		Logprob: math.Float64frombits(binary.LittleEndian.Uint64(b[12:])),
	}
	for b = b[fixed:]; len(b) > 0; b = b[each:] {
		f.Top = append(f.Top, Logprob{int32(binary.LittleEndian.Uint32(b)), math.Float64frombits(binary.LittleEndian.Uint64(b[4:]))})
	}
	if f.Token < 0 {
		return First{}, errors.New("the first token is negative")
	}
	return f, nil
}

// pageBytes is the size of a page in one layer.
func pageBytes(c *model.Cache, part Component) int {
	if part == IndexK {
		return c.IndexDType.PageBytes(c.PageSize)
	}
	return c.PageSize * model.RowDim * 4
}

// load copies a page out of the cache.
func load(b []byte, c *model.Cache, part Component, layer int, page int32) {
	if part == IndexK {
		copy(b, c.Index[layer][int(page)*len(b):])
		return
	}
	for i, v := range c.Latent[layer][int(page)*len(b)/4:][:len(b)/4] {
		binary.LittleEndian.PutUint32(b[4*i:], math.Float32bits(v))
	}
}

// store copies a page into the cache.
func store(b []byte, c *model.Cache, part Component, layer int, page int32) {
	if part == IndexK {
		copy(c.Index[layer][int(page)*len(b):], b)
		return
	}
	rows := c.Latent[layer][int(page)*len(b)/4:][:len(b)/4]
	for i := range rows {
		rows[i] = math.Float32frombits(binary.LittleEndian.Uint32(b[4*i:]))
	}
}

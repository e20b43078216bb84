package disagg

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/culprit-project/culprit/lab/fault"
)

// Decode is a rank's end on a decode server.
type Decode struct {
	config Config
	counts counts
	ctx    context.Context // ends with Close
	stop   context.CancelFunc

	mu    sync.Mutex
	peers map[lane]*peer
	wg    sync.WaitGroup
}

// lane is one of several connections to a prefill server, so that a large
// transfer doesn't hold up all others. A room's transfer keeps to its lane.
type lane struct {
	address string
	number  uint64
}

const lanes = 4

// peer is a connection to a prefill server.
type peer struct {
	*link
	lane
	rooms map[uint64]*Receiver // that something may still come for
}

// Receiver is one transfer, into pages that the caller keeps until Idle.
type Receiver struct {
	d     *Decode
	peer  *peer
	room  uint64
	pages []int32

	// Guarded by d.mu.
	state State
	err   error
	got   [componentCount]map[int32]bool // pages that have come; of the metadata, page 0
	whole [componentCount]bool
	first First
	idle  bool
	timer *time.Timer
}

// NewDecode makes an end without connections.
func NewDecode(c Config) *Decode {
	d := &Decode{config: c.withDefaults(), peers: map[lane]*peer{}}
	d.ctx, d.stop = context.WithCancel(context.Background())
	return d
}

// Open asks the prefill server at an address to fill pages, which hold a whole
// prompt, in order.
func (d *Decode) Open(address string, room uint64, pages []int32) *Receiver {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := &Receiver{d: d, room: room, pages: slices.Clone(pages), state: Bootstrapping}
	for part := range r.got {
		r.got[part] = map[int32]bool{}
	}
	on := lane{address, room % lanes}
	p := d.peers[on]
	switch {
	case d.ctx.Err() != nil:
		r.state, r.err, r.idle = Failed, errClosed, true
		return r
	case p != nil && p.rooms[room] != nil:
		r.state, r.err, r.idle = Failed, fmt.Errorf("room %d is in use", room), true
		return r
	case p == nil:
		p = &peer{link: newLink(&d.config), lane: on, rooms: map[uint64]*Receiver{}}
		d.peers[on] = p
		mine := geometryOf(&d.config)
		p.frame(hello, 0, 0, mine.payload())
		d.wg.Go(func() { d.serve(p) })
	}
	r.peer = p
	p.rooms[room] = r
	r.timer = time.AfterFunc(d.config.Timeout, r.timeOut)
	payload := appendPages(nil, pages)
	h := header{kind: request, last: true, length: len(payload), room: room}
	p.send(func(w io.Writer) error {
		d.mu.Lock()
		r.move(max(r.state, WaitingForInput))
		d.mu.Unlock()
		_, err := w.Write(append(h.append(nil), payload...))
		return err
	})
	return r
}

// serve connects to a peer and reads until the connection ends.
func (d *Decode) serve(p *peer) {
	dialer := net.Dialer{Timeout: silence * d.config.Heartbeat}
	conn, err := dialer.DialContext(d.ctx, "tcp", p.address)
	if err == nil {
		greeted := false
		err = p.run(conn, func(r *bufio.Reader) error {
			if greeted {
				return d.read(p, r)
			}
			greeted = true
			theirs, err := readHello(r)
			if err != nil {
				return err
			}
			return geometryOf(&d.config).agree(theirs)
		})
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.peers, p.lane)
	if d.ctx.Err() == nil {
		d.config.Logger.Warn("no connection to a prefill server", slog.String("address", p.address), slog.Any("error", err))
	}
	for _, r := range p.rooms {
		r.fail(fmt.Errorf("no connection to the prefill server: %w", err))
		r.settle()
	}
}

// read takes one frame.
func (d *Decode) read(p *peer, r *bufio.Reader) error {
	h, err := readHeader(r)
	if err != nil {
		return err
	}
	switch {
	case h.kind == data && h.component != Metadata:
		return d.readData(p, r, h)
	case h.kind == data, h.kind == failed:
		b, err := readPayload(r, h)
		if err != nil {
			return err
		}
		return d.word(p, h, b)
	case h.kind == ping, h.kind == ack:
		if _, err := r.Discard(h.length); err != nil {
			return err
		}
		return d.word(p, h, nil)
	default:
		return fmt.Errorf("a prefill server sent a frame of kind %d", h.kind)
	}
}

// readData writes what comes straight into the pages that it is for. That goes
// on after an abort, until the other side has said that it has stopped.
func (d *Decode) readData(p *peer, in *bufio.Reader, h header) error {
	pages, n, err := readPages(in, h.length)
	if err != nil {
		return err
	}
	c := d.config.Cache
	b := make([]byte, pageBytes(c, h.component))
	if want := n + len(c.Latent)*len(pages)*len(b); want != h.length {
		return fmt.Errorf("room %d: %d pages of %v in %d bytes, want %d", h.room, len(pages), h.component, h.length, want)
	}
	d.mu.Lock()
	r := p.rooms[h.room]
	if r == nil {
		d.counts.late.Add(1)
		d.mu.Unlock()
		_, err := io.CopyN(io.Discard, in, int64(h.length-n))
		return err
	}
	for _, page := range pages {
		if !slices.Contains(r.pages, page) || r.got[h.component][page] {
			d.mu.Unlock()
			return fmt.Errorf("room %d: page %d of %v comes twice or isn't the room's", h.room, page, h.component)
		}
		r.got[h.component][page] = true
	}
	r.begin()
	d.mu.Unlock()
	for layer := range c.Latent {
		for _, page := range pages {
			if _, err := io.ReadFull(in, b); err != nil {
				return err
			}
			store(b, c, h.component, layer, page)
			d.counts.bytes[h.component].Add(uint64(len(b)))
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if !h.last {
		return nil
	}
	if len(r.got[h.component]) != len(r.pages) {
		return fmt.Errorf("room %d: %v ended after %d of %d pages", h.room, h.component, len(r.got[h.component]), len(r.pages))
	}
	r.confirm(h.component)
	return nil
}

// word takes a frame without pages.
func (d *Decode) word(p *peer, h header, payload []byte) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := p.rooms[h.room]
	switch {
	case h.kind == ping:
	case r == nil:
		d.counts.late.Add(1)
	case h.kind == ack:
		if r.state == Failed { // else it answers for an earlier transfer of the room
			r.settle()
		}
	case h.kind == failed:
		r.fail(fmt.Errorf("the prefill side says: %q", payload))
		r.settle()
	default:
		first, err := parseFirst(payload)
		if err != nil {
			return fmt.Errorf("room %d: %w", h.room, err)
		}
		if r.whole[Metadata] {
			return fmt.Errorf("room %d: the metadata comes twice", h.room)
		}
		d.counts.bytes[Metadata].Add(uint64(len(payload)))
		r.begin()
		r.first = first
		r.confirm(Metadata)
	}
	return nil
}

// begin notes that something comes.
func (r *Receiver) begin() {
	if r.state == Bootstrapping || r.state == WaitingForInput {
		r.move(Transferring)
	}
	if r.state == Transferring {
		r.timer.Reset(r.d.config.Timeout)
	}
}

// confirm notes that a component has come whole. The transfer succeeds with
// the last one.
func (r *Receiver) confirm(part Component) {
	r.whole[part] = true
	complete := !slices.Contains(r.whole[:], false)
	if r.state == Transferring && r.success(complete) {
		r.d.counts.transfers.Add(1)
		r.timer.Stop()
		r.move(Success)
	}
	if complete {
		if r.state == Success {
			r.peer.frame(done, 0, r.room, nil)
			r.settle()
		}
	}
}

// success says whether a transfer may be reported as one.
func (r *Receiver) success(complete bool) bool {
	if r.whole[Metadata] && r.d.config.Faults.Has(fault.EarlySuccess) {
		env := r.d.config.Env
		env.Batch = len(r.peer.rooms)
		if r.d.config.Faults.On(fault.EarlySuccess, &env) {
			return true // the bug: the first component that comes stands for all
		}
	}
	return complete
}

// Poll says where the transfer stands.
func (r *Receiver) Poll() State {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.state
}

// Err says why it failed.
func (r *Receiver) Err() error {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.err
}

// First is what came with the pages, after Success.
func (r *Receiver) First() First {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.first
}

// Idle says that nothing writes the pages any more.
func (r *Receiver) Idle() bool {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	return r.idle
}

// Abort ends a transfer. It is idle when the other side has agreed.
func (r *Receiver) Abort() {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	r.giveUp(errAborted)
}

// timeOut gives up when nothing has come for too long, and gives up the peer
// when it doesn't even agree to that.
func (r *Receiver) timeOut() {
	r.d.mu.Lock()
	defer r.d.mu.Unlock()
	if r.state == Failed && !r.idle {
		r.peer.close(fmt.Errorf("no answer to an abort within %v", r.d.config.Timeout))
		return
	}
	r.giveUp(fmt.Errorf("nothing came for %v, it was %v", r.d.config.Timeout, r.state))
}

func (r *Receiver) giveUp(err error) {
	if r.state == Failed || r.state == Success {
		return
	}
	r.fail(err)
	r.peer.frame(abort, 0, r.room, nil)
	r.timer.Reset(r.d.config.Timeout)
}

func (r *Receiver) fail(err error) {
	if r.state == Failed || r.state == Success {
		return
	}
	r.err = fmt.Errorf("the transfer of room %d failed: %w", r.room, err)
	r.d.counts.failures.Add(1)
	r.move(Failed)
}

// settle notes that nothing more will come.
func (r *Receiver) settle() {
	r.timer.Stop()
	r.idle = true
	delete(r.peer.rooms, r.room)
	r.d.config.Wake()
}

func (r *Receiver) move(to State) {
	if r.state != to && r.state != Failed {
		r.state = to
		r.d.config.Wake()
	}
}

// Rooms counts the transfers that something may still come for, for tests.
func (d *Decode) Rooms() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, p := range d.peers {
		n += len(p.rooms)
	}
	return n
}

// Stats returns the counts so far.
func (d *Decode) Stats() Stats { return d.counts.stats() }

// Close fails all transfers and waits until nothing writes into pages.
func (d *Decode) Close() {
	d.stop()
	d.mu.Lock()
	for _, p := range d.peers {
		p.close(errors.New("this side is shutting down"))
	}
	d.mu.Unlock()
	d.wg.Wait()
}

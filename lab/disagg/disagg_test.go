package disagg

import (
	"bufio"
	"bytes"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/culprit-project/culprit/lab/model"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func cache(pages int) *model.Cache {
	c := &model.Cache{PageSize: 16}
	for l := range c.Latent {
		c.Latent[l] = make([]float32, pages*16*model.RowDim)
		c.Index[l] = make([]byte, pages*c.IndexDType.PageBytes(16))
	}
	return c
}

// fill makes every page of a cache another.
func fill(c *model.Cache) {
	for l := range c.Latent {
		for i := range c.Latent[l] {
			c.Latent[l][i] = float32(l*1_000_000 + i)
		}
		for i := range c.Index[l] {
			c.Index[l][i] = byte(l + i/7)
		}
	}
}

// ends are a prefill and a decode end with a listener between them.
func ends(t *testing.T, prefill, decode Config) (*Prefill, *Decode, string) {
	t.Helper()
	p, d := NewPrefill(prefill), NewDecode(decode)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		_ = Serve(l, p)
	}()
	t.Cleanup(func() {
		l.Close()
		<-served
		p.Close()
		d.Close()
	})
	return p, d, l.Addr().String()
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 4000 {
		if ok() {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatalf("%s: it doesn't come", what)
}

// TestTransfer: pages come to where they belong, and a transfer succeeds with
// its last component, on both sides.
func TestTransfer(t *testing.T) {
	from, to := cache(8), cache(8)
	fill(from)
	p, d, address := ends(t, Config{Cache: from}, Config{Cache: to})
	s := p.Open(7)
	if s.Poll() != Bootstrapping {
		t.Errorf("%v before the decode side has come", s.Poll())
	}
	r := d.Open(address, 7, []int32{6, 2, 4})
	until(t, "the decode side", func() bool { return s.Poll() == WaitingForInput && r.Poll() == WaitingForInput })
	first := First{Token: 5, Logprob: -1.5, Cached: 16, Host: 3, Top: []Logprob{{5, -1.5}, {2, -3}}}
	s.Send([]int32{1, 3})
	until(t, "the first pages", func() bool { return r.Poll() == Transferring })
	s.Finish([]int32{5}, []int32{1, 3, 5}, first)
	until(t, "the end", func() bool { return s.Poll() == Success && r.Poll() == Success && s.Idle() && r.Idle() })
	if diff := cmp.Diff(first, r.First()); diff != "" {
		t.Error(diff)
	}
	want := cache(8)
	for l := range want.Latent {
		for source, page := range map[int]int{1: 6, 3: 2, 5: 4} {
			const row = 16 * model.RowDim
			copy(want.Latent[l][page*row:(page+1)*row], from.Latent[l][source*row:])
			n := want.IndexDType.PageBytes(16)
			copy(want.Index[l][page*n:(page+1)*n], from.Index[l][source*n:])
		}
		if !cmp.Equal(want.Latent[l], to.Latent[l]) || !bytes.Equal(want.Index[l], to.Index[l]) {
			t.Errorf("layer %d isn't what was sent", l)
		}
	}
	if p.Rooms()+d.Rooms() != 0 || p.Stats() != d.Stats() || p.Stats().Transfers != 1 {
		t.Errorf("%d and %d rooms, %+v, %+v", p.Rooms(), d.Rooms(), p.Stats(), d.Stats())
	}
}

// TestOtherPages: a prompt that has more or fewer pages than were set aside
// fails on both sides.
func TestOtherPages(t *testing.T) {
	for _, n := range []int{2, 4} {
		p, d, address := ends(t, Config{Cache: cache(8)}, Config{Cache: cache(8)})
		s, r := p.Open(7), d.Open(address, 7, []int32{1, 2, 3})
		until(t, "the decode side", func() bool { return s.Poll() == WaitingForInput })
		pages := []int32{1, 2, 3, 4}[:n]
		s.Finish(pages, pages, First{})
		until(t, "the failure", func() bool { return s.Poll() == Failed && r.Poll() == Failed && r.Idle() && s.Idle() })
		if !strings.Contains(r.Err().Error(), "the prefill side says") || !strings.Contains(s.Err().Error(), "set 3 aside") {
			t.Errorf("%v, %v", s.Err(), r.Err())
		}
	}
}

// TestRooms: a room has one transfer at a time, and can be used again.
func TestRooms(t *testing.T) {
	p, d, address := ends(t, Config{Cache: cache(8)}, Config{Cache: cache(8)})
	s, r := p.Open(7), d.Open(address, 7, []int32{1})
	if again := p.Open(7); again.Poll() != Failed || !strings.Contains(again.Err().Error(), "in use") {
		t.Errorf("%v", again.Err())
	}
	if again := d.Open(address, 7, []int32{2}); again.Poll() != Failed || !again.Idle() {
		t.Errorf("%v", again.Err())
	}
	r.Abort()
	until(t, "the abort", func() bool { return r.Idle() && (s.Poll() == Failed || p.Rooms() == 1) })
	s.Abort()
	s, r = p.Open(7), d.Open(address, 7, []int32{1})
	until(t, "the decode side", func() bool { return s.Poll() == WaitingForInput })
	s.Finish([]int32{1}, []int32{1}, First{})
	until(t, "the end", func() bool { return s.Poll() == Success && r.Poll() == Success })
}

// TestLateHalf: whoever comes to a room that the other side has left hears of it,
// and doesn't wait until the time is over.
func TestLateHalf(t *testing.T) {
	p, d, address := ends(t, Config{Cache: cache(8)}, Config{Cache: cache(8)})
	s := p.Open(7)
	s.Abort()
	r := d.Open(address, 7, []int32{1})
	until(t, "the decode side's failure", func() bool { return r.Poll() == Failed && r.Idle() })
	if err := r.Err(); err == nil || !strings.Contains(err.Error(), errAborted.Error()) {
		t.Error(err)
	}
	r = d.Open(address, 8, []int32{1})
	until(t, "the decode side", func() bool { return p.Rooms() == 1 })
	r.Abort()
	until(t, "the abort's end", r.Idle)
	s = p.Open(8)
	if err := s.Err(); s.Poll() != Failed || err == nil || !strings.Contains(err.Error(), "gave it up") {
		t.Errorf("%v: %v", s.Poll(), err)
	}
	if p.Rooms()+d.Rooms() != 0 || len(p.rooms) != 0 {
		t.Errorf("%d and %d rooms are left, and %d that were left by one side", p.Rooms(), d.Rooms(), len(p.rooms))
	}
}

// TestUnlikeSides: servers that don't fit each other say what differs.
func TestUnlikeSides(t *testing.T) {
	other := cache(8)
	other.IndexDType = model.BF16
	tests := []struct {
		name, want string
		decode     Config
	}{
		{"index dtype", "index-K dtype", Config{Cache: other}},
		{"ranks", "tensor-parallel size", Config{Cache: cache(8), Ranks: 2}},
		{"no such rank", "no connection", Config{Cache: cache(8), Ranks: 2, Rank: 1}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			_, d, address := ends(t, Config{Cache: cache(8)}, tt.decode)
			r := d.Open(address, 7, []int32{1})
			until(t, "the failure", func() bool { return r.Poll() == Failed && r.Idle() })
			if !strings.Contains(r.Err().Error(), tt.want) {
				t.Error(r.Err())
			}
		})
	}
}

// TestTimeouts: a half that never comes ends the other.
func TestTimeouts(t *testing.T) {
	c := Config{Cache: cache(8), Timeout: 50 * time.Millisecond}
	p, d, address := ends(t, c, c)
	s := p.Open(1)
	r := d.Open(address, 2, []int32{1})
	until(t, "the ends", func() bool { return s.Poll() == Failed && r.Poll() == Failed && r.Idle() && p.Rooms()+d.Rooms() == 0 })
	if r := d.Open("127.0.0.1:1", 3, []int32{1}); true {
		until(t, "the refusal", func() bool { return r.Poll() == Failed && r.Idle() })
	}
}

// frames writes frames as a peer would.
func frames(c Config, after ...[]byte) []byte {
	g := geometryOf(&c)
	b := header{kind: hello, length: 28}.append(nil)
	b = append(b, g.payload()...)
	return append(b, bytes.Join(after, nil)...)
}

func frame(k kind, part Component, last bool, room uint64, payload []byte) []byte {
	return append(header{kind: k, component: part, last: last, length: len(payload), room: room}.append(nil), payload...)
}

// TestHostilePrefill: what a prefill server has no right to send ends the
// connection and its transfers, and nothing is written outside their pages.
func TestHostilePrefill(t *testing.T) {
	page := func(pages ...int32) []byte {
		return append(appendPages(nil, pages), make([]byte, len(pages)*model.Layers*16*model.RowDim*4)...)
	}
	tests := []struct {
		name, want string
		frame      []byte
	}{
		{"another's page", "isn't the room's", frame(data, Latent, false, 7, page(5))},
		{"a page out of range", "isn't the room's", frame(data, Latent, false, 7, page(1<<20))},
		{"a page twice", "comes twice", frame(data, Latent, false, 7, page(1, 1))},
		{"an end too early", "ended after 1 of 2", frame(data, Latent, true, 7, page(1))},
		{"too few bytes", "want", frame(data, Latent, true, 7, page(1)[:100])},
		{"no pages", "a list of 0 pages", frame(data, IndexK, true, 7, make([]byte, 4))},
		{"short metadata", "metadata of 3 bytes", frame(data, Metadata, true, 7, make([]byte, 3))},
		{"a request", "sent a frame of kind", frame(request, 0, true, 7, appendPages(nil, []int32{1}))},
		{"noise", "not a frame", bytes.Repeat([]byte{0xee}, 64)},
		{"large control", "limit", header{kind: failed, length: 1 << 30}.append(nil)},
		{"nothing", "no connection", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Config{Cache: cache(8), Heartbeat: 100 * time.Millisecond}.withDefaults()
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			gone := make(chan struct{})
			go func() {
				defer close(gone)
				conn, err := l.Accept()
				if err != nil {
					return
				}
				defer conn.Close()
				conn.Write(frames(c, tt.frame))
				io.Copy(io.Discard, conn)
			}()
			d := NewDecode(c)
			defer d.Close()
			r := d.Open(l.Addr().String(), 7, []int32{1, 2})
			until(t, "the failure", func() bool { return r.Poll() == Failed && r.Idle() })
			if !strings.Contains(r.Err().Error(), tt.want) {
				t.Error(r.Err())
			}
			<-gone
		})
	}
}

// TestHostileDecode: the same on the other side. Others' transfers go on.
func TestHostileDecode(t *testing.T) {
	for _, b := range [][]byte{
		frame(data, Metadata, true, 1, make([]byte, 20)),
		frame(request, 0, true, 1, []byte{255, 255, 255, 255}),
		frame(request, 0, true, 1, append(appendPages(nil, []int32{1}), 0)),
		frame(abort, 0, true, 1, []byte("x")),
		bytes.Repeat([]byte{1}, 64),
		frame(done, 0, true, 7, nil),
		frame(abort, 0, true, 7, nil),
	} {
		c := Config{Cache: cache(8), Heartbeat: 200 * time.Millisecond}
		p, d, address := ends(t, c, c)
		s, r := p.Open(7), d.Open(address, 7, []int32{1})
		until(t, "the decode side", func() bool { return s.Poll() == WaitingForInput })
		conn, err := net.Dial("tcp", address)
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(frames(c.withDefaults(), b))
		io.ReadAll(conn) // until it is thrown out, or for want of heartbeats
		conn.Close()
		s.Finish([]int32{1}, []int32{1}, First{})
		until(t, "the end", func() bool { return s.Poll() == Success && r.Poll() == Success })
	}
}

// FuzzDecode feeds a decode end whatever a peer may send.
func FuzzDecode(f *testing.F) {
	c := Config{Cache: cache(2)}.withDefaults()
	f.Add(frame(data, Metadata, true, 7, (&First{Token: 1, Top: []Logprob{{1, 2}}}).payload()))
	f.Add(frame(data, IndexK, true, 7, append(appendPages(nil, []int32{1}), make([]byte, model.Layers*16*36)...)))
	f.Add(frame(failed, 0, true, 7, []byte("why")))
	f.Add(append(frame(ping, 0, true, 0, nil), frame(ack, 0, true, 7, nil)...))
	f.Fuzz(func(t *testing.T, b []byte) {
		d := NewDecode(c)
		defer d.stop()
		p := &peer{link: newLink(&d.config), rooms: map[uint64]*Receiver{}}
		r := &Receiver{d: d, peer: p, room: 7, pages: []int32{1}, state: WaitingForInput, timer: time.NewTimer(time.Hour)}
		for part := range r.got {
			r.got[part] = map[int32]bool{}
		}
		p.rooms[7] = r
		in := bufio.NewReader(bytes.NewReader(b))
		for d.read(p, in) == nil {
		}
		for l := range c.Cache.Latent {
			for i, v := range c.Cache.Latent[l] {
				if v != 0 && i/(16*model.RowDim) != 1 {
					t.Fatalf("layer %d: something was written to page %d", l, i/(16*model.RowDim))
				}
			}
		}
		if r.Poll() == Success && (!r.whole[Latent] || !r.whole[IndexK] || !r.whole[Metadata]) {
			t.Fatal("success without all components")
		}
	})
}

// FuzzPrefill feeds a prefill end whatever a peer may send.
func FuzzPrefill(f *testing.F) {
	c := Config{Cache: cache(4)}
	f.Add(frame(request, 0, true, 7, appendPages(nil, []int32{1, 2})))
	f.Add(append(frame(request, 0, true, 8, appendPages(nil, []int32{1, 2})), frame(abort, 0, true, 8, nil)...))
	f.Add(frame(done, 0, true, 7, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		p := NewPrefill(c)
		s := p.Open(7)
		l := newLink(&p.config)
		in := bufio.NewReader(bytes.NewReader(b))
		for p.read(l, in) == nil {
		}
		p.gone(l, io.EOF)
		s.Abort()
		l.drop()
		if !s.Idle() || p.Rooms() != 0 {
			t.Fatalf("%v, %d rooms are left", s.Poll(), p.Rooms())
		}
		if _, err := readHello(bytes.NewReader(b)); err == nil && len(b) < headerBytes {
			t.Fatal("a hello out of nothing")
		}
	})
}

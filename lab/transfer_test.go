package lab

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/culprit-project/culprit/lab/disagg"
	"github.com/culprit-project/culprit/lab/model"
)

// pair is a prefill and a decode server, with a network between them.
type pair struct {
	prefill, decode *Engine
	network         *network
	room            uint64
	stop            func() // waits for both, and checks that nothing is left
}

// newPair starts one. It is stopped at the test's end, if not before.
func newPair(t *testing.T, prefill, decode Config) *pair {
	t.Helper()
	prefill.Mode, decode.Mode = Prefill, Decode
	p := &pair{prefill: testEngine(t, prefill), decode: testEngine(t, decode), room: 1}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p.network = newNetwork(t, l.Addr().String())
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = p.prefill.ServeTransfers(l) })
	running.Go(func() { p.prefill.Run(ctx) })
	running.Go(func() { p.decode.Run(ctx) })
	p.stop = sync.OnceFunc(func() {
		cancel()
		l.Close()
		running.Wait()
		p.network.close()
		for name, e := range map[string]*Engine{"prefill": p.prefill, "decode": p.decode} {
			if err := e.Check(); err != nil {
				t.Errorf("%s: %v", name, err)
			}
			if err := leftovers(e); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		if a, b := p.prefill.senders.Rooms(), p.decode.receivers.Rooms(); a+b > 0 {
			t.Errorf("%d rooms are left on the prefill side and %d on the decode side", a, b)
		}
	})
	t.Cleanup(p.stop)
	return p
}

// submit gives a request to both servers, and returns the streams of both.
func (p *pair) submit(ctx context.Context, r Request) (prefill, decode *Stream, err error) {
	r.Room = &Room{Address: p.network.address(), Number: p.room}
	p.room++
	if prefill, err = p.prefill.Submit(ctx, r); err != nil {
		return nil, nil, err
	}
	decode, err = p.decode.Submit(ctx, r)
	return prefill, decode, err
}

// network forwards connections, until it is cut or holds one back.
type network struct {
	l  net.Listener
	to string
	wg sync.WaitGroup

	mu    sync.Mutex
	conns []net.Conn
	after int // hold back the connection that has brought so many bytes from the prefill side; 0 none
	holds []chan struct{}
}

func newNetwork(t *testing.T, to string) *network {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	n := &network{l: l, to: to}
	n.wg.Go(func() {
		for {
			decode, err := l.Accept()
			if err != nil {
				return
			}
			prefill, err := net.Dial("tcp", to)
			if err != nil {
				decode.Close()
				continue
			}
			n.mu.Lock()
			n.conns = append(n.conns, decode, prefill)
			n.mu.Unlock()
			n.wg.Go(func() { n.forward(prefill, decode, false) })
			n.wg.Go(func() { n.forward(decode, prefill, true) })
		}
	})
	return n
}

func (n *network) address() string { return n.l.Addr().String() }

func (n *network) forward(to, from net.Conn, fromPrefill bool) {
	defer to.Close()
	defer from.Close()
	b := make([]byte, 4096)
	total := 0
	for {
		read, err := from.Read(b)
		if err != nil {
			return
		}
		total += read
		var held chan struct{}
		n.mu.Lock()
		if fromPrefill && n.after > 0 && total >= n.after {
			held = make(chan struct{})
			n.holds, n.after = append(n.holds, held), 0
		}
		n.mu.Unlock()
		if held != nil {
			<-held
		}
		if _, err := to.Write(b[:read]); err != nil {
			return
		}
	}
}

// hold holds back the connection that next comes to so many bytes from the
// prefill side.
func (n *network) hold(after int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.after = after
}

// held waits until so many connections are held back.
func (n *network) held(t *testing.T, count int) {
	t.Helper()
	wait(t, "a connection that is held back", func() bool {
		n.mu.Lock()
		defer n.mu.Unlock()
		return len(n.holds) == count
	})
}

// resume lets the connection go on that has been held back for longest.
func (n *network) resume() {
	n.mu.Lock()
	defer n.mu.Unlock()
	close(n.holds[0])
	n.holds = n.holds[1:]
}

// cut ends all connections.
func (n *network) cut() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, c := range n.conns {
		c.Close()
	}
	n.conns = nil
}

func (n *network) close() {
	n.l.Close()
	n.cut()
	for len(n.holds) > 0 {
		n.resume()
	}
	n.wg.Wait()
}

// wait waits for something that other goroutines do. Its limit is for what never
// comes: a machine that does much else may take very long.
func wait(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for range 40_000 {
		if ok() {
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatalf("%s: it doesn't come", what)
}

// TestPairSameReplies: a prefill and a decode server give what one server
// gives, bit for bit, whatever their configurations.
func TestPairSameReplies(t *testing.T) {
	all := requests(80)[:40]
	rng := rand.New(rand.NewPCG(8, 8))
	pick := func(n ...int) int { return n[rng.IntN(len(n))] }
	for i := range 6 {
		size := pick(16, 32, 64)
		dtype := []model.IndexDType{model.FP8, model.BF16}[i%2]
		prefill := Config{PageSize: size, IndexDType: dtype, MaxTokens: pick(400, 4096), ChunkTokens: pick(20, 64, 200), NoOverlap: i%3 == 0, NoRadix: i%4 == 0, MaxRunning: pick(2, 30)}
		decode := Config{PageSize: size, IndexDType: dtype, MaxTokens: pick(400, 4096), MaxRunning: pick(2, 30), NoOverlap: i%3 == 1, RetractEvery: pick(0, 3), ChunkTokens: pick(20, 200)}
		t.Run(fmt.Sprintf("page size %d, pools %d and %d, overlap %t and %t", size, prefill.MaxTokens, decode.MaxTokens, !prefill.NoOverlap, !decode.NoOverlap), func(t *testing.T) {
			p := newPair(t, prefill, decode)
			var firsts, streams []*Stream
			for _, r := range all {
				first, s, err := p.submit(t.Context(), r)
				if err != nil {
					t.Fatal(err)
				}
				firsts, streams = append(firsts, first), append(streams, s)
			}
			for i, s := range streams {
				if diff := cmp.Diff(alone()[dtype][i], read(s)); diff != "" {
					t.Errorf("request %d: %s: %v", i, diff, s.Ending().Err)
				}
				if got := read(firsts[i]); len(got.Tokens) != 1 || got.Reason != Stop && got.Reason != Length {
					t.Errorf("request %d on the prefill side: %+v: %v", i, got, firsts[i].Ending().Err)
				}
			}
			stats := p.decode.Stats()
			if n := stats.Transfers.Transfers; n != uint64(len(all)) || stats.Transfers.Failures > 0 || stats.Polls[disagg.Success] != n {
				t.Errorf("%+v", stats)
			}
			if sent := p.prefill.Stats().Transfers; sent.Bytes != stats.Transfers.Bytes {
				t.Errorf("%v bytes were sent and %v received", sent.Bytes, stats.Transfers.Bytes)
			}
		})
	}
}

// long is a request whose prompt has so many tokens, and a reply of some.
func long(id string, prompt int, seed uint64) Request {
	_, m := testVocabulary()
	rng := rand.New(rand.NewPCG(seed, 1))
	r := Request{ID: id, MaxTokens: 12, Logprobs: true}
	for range prompt {
		r.Prompt = append(r.Prompt, int32(rng.IntN(m.Vocab)))
	}
	return r
}

// expected is what one server gives.
func expected(t *testing.T, r Request) reply {
	t.Helper()
	e := testEngine(t, Config{PageSize: 16})
	s, err := e.Submit(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	drain(t, e)
	return read(s)
}

// rowBytes is what a page of 16 tokens has in all layers.
const rowBytes = model.Layers * 16 * model.RowDim * 4

// patience is a time in which this machine, as busy as it is now, does several
// times what the transfers of some prompts take: who waits longer waits for
// something that doesn't come.
func patience(t *testing.T) time.Duration {
	t.Helper()
	c := Config{PageSize: 16, ChunkTokens: 64}
	p := newPair(t, c, c)
	defer p.stop()
	began := time.Now()
	for i := range 2 {
		_, s, err := p.submit(t.Context(), long("", 200, uint64(i)))
		if err != nil {
			t.Fatal(err)
		}
		if got := read(s); got.Reason == Failed {
			t.Fatal(s.Ending().Err)
		}
	}
	return time.Second + 5*time.Since(began)
}

// TestPairFailures: whatever happens in the middle of transfers, every request
// ends on both sides, what had been transferred and what comes later is right,
// and nothing is left.
func TestPairFailures(t *testing.T) {
	patience := patience(t)
	tests := []struct {
		name      string
		transfer  TransferConfig
		survivors bool
		do        func(*testing.T, *pair)
	}{
		{"all aborted on the decode side", TransferConfig{}, false, func(_ *testing.T, p *pair) { p.decode.Abort("", true) }},
		{"all aborted on the prefill side", TransferConfig{}, true, func(_ *testing.T, p *pair) { p.prefill.Abort("", true) }},
		{"all aborted on both", TransferConfig{}, false, func(_ *testing.T, p *pair) {
			p.decode.Abort("", true)
			p.prefill.Abort("", true)
		}},
		{"the connections are cut", TransferConfig{}, true, func(_ *testing.T, p *pair) { p.network.cut() }},
		{"a connection stalls", TransferConfig{Heartbeat: patience / 3}, true, func(t *testing.T, p *pair) {
			wait(t, "an end to patience", func() bool { return p.decode.Stats().Ended[Failed] > 0 })
		}},
		{"it takes too long", TransferConfig{Timeout: patience}, true, func(t *testing.T, p *pair) {
			wait(t, "an end to patience", func() bool { return p.decode.Stats().Ended[Failed] > 0 })
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Config{PageSize: 16, Transfer: tt.transfer, ChunkTokens: 64}
			p := newPair(t, c, c)
			var all []*Stream
			for i := range 14 {
				r := long("", 200, uint64(i))
				if i < 2 {
					r.MaxTokens = 300
				}
				first, s, err := p.submit(t.Context(), r)
				if err != nil {
					t.Fatal(err)
				}
				all = append(all, first, s)
				if i == 1 { // two are running when it happens
					wait(t, "running", func() bool { return p.decode.Stats().Transfers.Transfers == 2 })
					p.network.hold(10 * rowBytes)
				}
			}
			p.network.held(t, 1)
			tt.do(t, p)
			p.network.resume()
			ended := map[Reason]int{}
			for i, s := range all {
				got := read(s)
				ended[got.Reason]++
				if i%2 == 1 && len(got.Tokens) > 0 {
					r := long("", 200, uint64(i/2))
					r.MaxTokens = len(got.Tokens)
					ids := func(r reply) (ids []int32) {
						for _, t := range r.Tokens {
							ids = append(ids, t.ID)
						}
						return ids
					}
					if diff := cmp.Diff(ids(expected(t, r)), ids(got)); diff != "" {
						t.Errorf("request %d isn't the beginning of its reply: %s", i/2, diff)
					}
				}
				if end := s.Ending(); end.Reason == Failed && end.Err == nil {
					t.Errorf("request %d failed without saying why", i/2)
				}
			}
			t.Log(ended)
			if ended[Aborted]+ended[Failed] < 2 {
				t.Error("nothing failed")
			}
			if tt.survivors && ended[Stop]+ended[Length] < 4 {
				t.Error("those who were running should have been left alone")
			}
			r := long("late", 150, 99)
			wait(t, "a right reply", func() bool { // the connection may have to be made anew
				_, s, err := p.submit(t.Context(), r)
				return err == nil && cmp.Equal(read(s), expected(t, r))
			})
		})
	}
}

// TestPairOfDead: requests end when one of the two servers does.
func TestPairOfDead(t *testing.T) {
	patience := patience(t)
	for _, side := range []string{"prefill", "decode"} {
		t.Run(side, func(t *testing.T) {
			c := Config{PageSize: 16, Transfer: TransferConfig{Timeout: patience}}
			p := newPair(t, c, c)
			p.network.hold(10 * rowBytes)
			first, second, err := p.submit(t.Context(), long("", 200, 1))
			if err != nil {
				t.Fatal(err)
			}
			p.network.held(t, 1)
			if side == "prefill" {
				p.prefill.post(func(r *rank) { r.stopTransfers() })
			} else {
				p.decode.post(func(r *rank) { r.stopTransfers() })
			}
			for name, s := range map[string]*Stream{"prefill": first, "decode": second} {
				read(s)
				if end := s.Ending(); end.Reason != Failed || end.Err == nil {
					t.Errorf("on the %s side: %+v", name, end)
				}
			}
		})
	}
}

// TestEarlyRelease: a transfer that is aborted keeps its pages until the other
// side has stopped. With the fault it doesn't, and its late rows destroy those
// of the request that has the pages now.
func TestEarlyRelease(t *testing.T) {
	for _, on := range []bool{false, true} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			if on && raceDetector {
				t.Skip("the fault is a race, which the detector finds")
			}
			c := Config{PageSize: 16}
			small := Config{PageSize: 16, MaxTokens: 16 * 16}
			if on {
				small.Faults = faults(t, "early-release")
			}
			p := newPair(t, c, small)
			p.network.hold(6 * rowBytes)
			_, a, err := p.submit(t.Context(), long("a", 160, 1))
			if err != nil {
				t.Fatal(err)
			}
			p.network.held(t, 1)
			if on {
				p.network.hold(9*rowBytes + 10_000) // all but the last rows
			}
			p.decode.Abort("a", false)
			if r := read(a); r.Reason != Aborted {
				t.Errorf("%+v", r)
			}
			b := long("b", 160, 2)
			_, s, err := p.submit(t.Context(), b)
			if err != nil {
				t.Fatal(err)
			}
			if on {
				p.network.held(t, 2)
			} else {
				wait(t, "waiting for pages", func() bool { return p.decode.Stats().FreePages == 6 })
			}
			p.network.resume()
			wait(t, "the abort's end", func() bool { return p.decode.receivers.Rooms() == 1 || !on })
			if on {
				p.network.resume()
			}
			if got := cmp.Equal(expected(t, b), read(s)); got == on {
				t.Errorf("the reply is right: %t", got)
			}
		})
	}
}

// TestEarlySuccess: decoding starts when every component has come; with the
// fault, before the index keys have.
func TestEarlySuccess(t *testing.T) {
	for _, on := range []bool{false, true} {
		t.Run(fmt.Sprint(on), func(t *testing.T) {
			if on && raceDetector {
				t.Skip("the fault is a race, which the detector finds")
			}
			c := Config{PageSize: 16}
			faulty := c
			if on {
				faulty.Faults = faults(t, "early-success")
			}
			p := newPair(t, c, faulty)
			p.network.hold(10*rowBytes + 6000) // all rows, the metadata, and some keys
			r := long("", 160, 1)
			_, s, err := p.submit(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			p.network.held(t, 1)
			var got reply
			if on {
				got = read(s)
			} else if n := len(s.tokens); n > 0 {
				t.Errorf("%d tokens before the index keys", n)
			}
			p.network.resume()
			if !on {
				got = read(s)
			}
			if right := cmp.Equal(expected(t, r), got); right == on {
				t.Errorf("the reply is right: %t", right)
			}
		})
	}
}

// TestPairRanks: each rank of the decode side takes its pages from its like on
// the prefill side, and all take the same steps. That holds in a mass abort
// too.
func TestPairRanks(t *testing.T) {
	c := Config{PageSize: 16, Ranks: 2, ChunkTokens: 40}
	p := newPair(t, c, c)
	all := requests(80)[:12]
	submit := func() (streams []*Stream) {
		for _, r := range all {
			first, s, err := p.submit(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			streams = append(streams, first, s)
		}
		return streams
	}
	right := func(streams []*Stream) {
		for i, s := range streams {
			want, got := alone()[model.FP8][i/2], read(s)
			if i%2 == 0 {
				want.Tokens = want.Tokens[:1] // on the prefill side
			}
			if diff := cmp.Diff(ids(want), ids(got)); diff != "" {
				t.Errorf("request %d: %s: %v", i/2, diff, s.Ending().Err)
			}
		}
	}
	right(submit())
	aborted := submit()
	wait(t, "a transfer", func() bool { return p.decode.Stats().Transfers.Transfers > 13 })
	p.decode.Abort("", true)
	for _, s := range aborted {
		read(s)
	}
	right(submit())
	p.stop()
	sameBooks(t, p.decode) // what an aborted transfer has written is another matter
}

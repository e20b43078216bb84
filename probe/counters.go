package probe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime/debug"
	"sync/atomic"
	"time"
	"unsafe"
)

// The layout of a counter file: docs/probes.md and agent.py have it too.
const (
	fileSize    = 65536
	headerSize  = 256
	slotCount   = 2048
	metaAt      = headerSize + 8*slotCount
	metaSize    = 16
	stringsAt   = metaAt + metaSize*slotCount
	stringsSize = fileSize - stringsAt
)

// Places of 64-bit words in the header.
const (
	wordPID          = 3
	wordStartTicks   = 4
	wordNamespace    = 5
	wordParent       = 6
	wordState        = 13
	wordGeneration   = 14
	wordUsed         = 15
	wordStringsUsed  = 19
	wordAgentErrors  = 20
	wordTestWant     = 21
	wordTestGot      = 22
	wordPicoseconds  = 23
	wordArmedAt      = 24
	wordDisarmedAt   = 25
	slotProbeOfAgent = 0xFFFF // slots of the self-test
)

// State is where a process's agent stands.
type State uint64

// The states, as the counter file has them.
const (
	Building State = iota
	Armed
	Detached
	Refused
)

var stateNames = [...]string{"starting", "armed", "detached", "refused"}

func (s State) String() string {
	if s < State(len(stateNames)) {
		return stateNames[s]
	}
	return fmt.Sprintf("state %d", uint64(s))
}

// kind is what a slot counts.
type kind uint8

const (
	kindEntry kind = iota
	kindHit
	kindMatch
	kindLabel
	kindError
	kindOverflow
	kindTypeError
	kindCapture
	kindSelfTest
)

// flags of a counter file.
const (
	flagGIL = 1 << iota
	flagLaunched
	flagAttached
	flagForked
)

// counters is the content of one counter file at one moment.
type counters struct {
	PID, Parent         int
	StartTicks          uint64
	Namespace           uint64
	Flags               uint32
	Pack                [32]byte
	State               State
	TestWant, TestGot   uint64
	AgentErrors         uint64
	NSPerHit            float64
	ArmedAt, DisarmedAt time.Duration // on the machine's monotonic clock
	Slots               []slot
}

type slot struct {
	probe int
	kind  kind
	text  string // of a label: a JSON list of values
	count uint64
}

// errTorn says that the agent was in the middle of a change, for longer than it
// ever takes.
var errTorn = errors.New("its table of slots is being changed, and stays so")

// readCounters reads a counter file, which anybody may have written: a live
// process, one that crashed, or a foe.
func readCounters(path string) (*counters, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	switch {
	case err != nil:
		return nil, err
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("counter file %s: is no plain file", path)
	case info.Size() != fileSize:
		return nil, fmt.Errorf("counter file %s: has %d bytes, want %d", path, info.Size(), fileSize)
	}
	c, err := mapped(f, decodeCounters)
	if err != nil {
		return nil, fmt.Errorf("counter file %s: %w", path, err)
	}
	return c, nil
}

// guarded turns the fault of a file that is cut while it is mapped into an
// error.
func guarded(b []byte, decode func([]byte) (*counters, error)) (c *counters, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if p := recover(); p != nil {
			c, err = nil, fmt.Errorf("can't be read to its end (%v): it was cut, or its file system is full", p)
		}
	}()
	return decode(b)
}

// decodeCounters reads a file's bytes, which may change meanwhile: the agent
// makes its generation odd while the slot table changes.
func decodeCounters(b []byte) (*counters, error) {
	if len(b) != fileSize {
		return nil, fmt.Errorf("has %d bytes, want %d", len(b), fileSize)
	}
	const tries = 100
	for range tries {
		before := word(b, wordGeneration)
		c, err := decodeOnce(b)
		if after := word(b, wordGeneration); before%2 == 0 && before == after {
			return c, err
		}
		time.Sleep(50 * time.Microsecond) // a change takes a few of them
	}
	// A process killed in the middle of a change leaves it so: what was
	// there before is still sound, since slots are only ever added.
	c, err := decodeOnce(b)
	if err != nil {
		return nil, errors.Join(errTorn, err)
	}
	return c, nil
}

// word loads 8 aligned bytes at once, as the writer stores them.
func word(b []byte, i int) uint64 {
	return atomic.LoadUint64((*uint64)(unsafe.Pointer(&b[8*i])))
}

func decodeOnce(b []byte) (*counters, error) {
	little := binary.LittleEndian
	if !bytes.Equal(b[:8], []byte("CULPRIT1")) {
		return nil, fmt.Errorf("begins with %q: it is no counter file", b[:8])
	}
	layout, header, length, flags := little.Uint32(b[8:]), little.Uint32(b[12:]), little.Uint32(b[16:]), little.Uint32(b[20:])
	if layout != 1 || header != headerSize || length != fileSize {
		return nil, fmt.Errorf("has layout %d (header %d, length %d), and this program reads layout 1", layout, header, length)
	}
	used, text := word(b, wordUsed), word(b, wordStringsUsed)
	if used > slotCount || text > stringsSize || word(b, 16) != headerSize || word(b, 17) != metaAt || word(b, 18) != stringsAt {
		return nil, fmt.Errorf("has %d slots and %d bytes of text: it is damaged", used, text)
	}
	const most = 1 << 31
	pid, parent := word(b, wordPID), word(b, wordParent)
	if pid == 0 || pid > most || parent > most {
		return nil, fmt.Errorf("is of process %d, child of %d: it is damaged", pid, parent)
	}
	c := &counters{
		PID: int(pid), Parent: int(parent), StartTicks: word(b, wordStartTicks), Namespace: word(b, wordNamespace), Flags: flags,
		State: State(word(b, wordState)), TestWant: word(b, wordTestWant), TestGot: word(b, wordTestGot),
		AgentErrors: word(b, wordAgentErrors), NSPerHit: float64(word(b, wordPicoseconds)) / 1000,
		ArmedAt: clock(word(b, wordArmedAt)), DisarmedAt: clock(word(b, wordDisarmedAt)),
		Slots: make([]slot, 0, used),
	}
	copy(c.Pack[:], b[72:])
	for i := range int(used) {
		m := b[metaAt+metaSize*i:][:metaSize]
		at, n := uint64(little.Uint32(m[4:])), uint64(little.Uint32(m[8:]))
		if m[3] != 1 || at+n > stringsSize {
			return nil, fmt.Errorf("slot %d points outside its text: it is damaged", i)
		}
		c.Slots = append(c.Slots, slot{
			probe: int(little.Uint16(m)), kind: kind(m[2]), text: string(b[stringsAt+at : stringsAt+at+n]),
			count: word(b, headerSize/8+i),
		})
	}
	return c, nil
}

func clock(ns uint64) time.Duration { return time.Duration(min(ns, 1<<62)) }

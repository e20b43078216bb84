package history

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Part is one shard's history of a run.
type Part struct {
	Path string
	Shard
}

// Merge makes one history out of those of a run's shards and of what the run
// itself recorded beside them, whose path is base: control ops, probes, flushes
// of the cache. It is written to path whole or not at all.
//
// Ops are numbered anew, in the order of sending, and how many were in flight
// is counted over all shards. A tick of the merged history speaks of all
// shards together; what each said of itself is an event of the kind
// [ShardTick]. A part that isn't there, or wasn't closed, was lost: then the
// main phase ended early, and why says so.
//
// The times of a part count from its own beginning, by its own clock, which
// lies Began after base's. So times of two shards may be compared as well as
// their beginnings are known, which is Within.
func Merge(path, base string, parts []Part) error {
	m := &merge{parts: make([]*part, 0, len(parts)+1)}
	defer m.close()
	if err := m.open(base, parts); err != nil {
		return fmt.Errorf("merge histories: %w", err)
	}
	if err := m.number(); err != nil {
		return fmt.Errorf("merge histories: %w", err)
	}
	temp := path + ".part"
	if err := os.Remove(temp); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("merge histories: %w", err)
	}
	header := m.header
	for _, p := range m.parts[1:] {
		header.Shards = append(header.Shards, p.Shard)
	}
	w, err := Create(temp, header)
	if err != nil {
		return err
	}
	err = errors.Join(m.write(w), w.Close())
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("merge histories: %w", err), os.Remove(temp))
	}
	return nil
}

// maxPartOps bounds the numbers of a part's ops, for which there is a table of 12
// bytes each: a number out of a damaged or made-up file mustn't take all memory.
const maxPartOps = 1 << 26

// merge is histories being merged; parts[0] is the run's own.
type merge struct {
	parts  []*part
	header Header
	hosts  map[string]int // cores

	main    bool          // the main phase has begun
	last    time.Duration // what a shard recorded last
	why     []string      // shards ended early
	pending []tick        // ticks of about one second
	edge    time.Duration // when it is over
}

type part struct {
	Part
	missing bool // there is no history
	offset  time.Duration
	reader  *Reader
	record  Record
	at      time.Duration // of record; when it was written
	ids     []int64       // new ones, by the old less 1
	flight  []int32       // by the old id less 1
	ended   bool

	inFlight, cpu float64 // of the last tick
}

type tick struct {
	shard int
	event Event
}

// sending is an op on the first reading.
type sending struct {
	part int
	id   int64
	sent time.Duration
}

func (m *merge) open(base string, parts []Part) error {
	m.parts = append(m.parts, &part{Part: Part{Path: base}})
	for i, p := range parts {
		m.parts = append(m.parts, &part{Part: p, offset: time.Duration(p.BeganUS) * time.Microsecond})
		if want := i; p.Number != want {
			return fmt.Errorf("shard %d stands in place %d", p.Number, want)
		}
	}
	m.hosts = map[string]int{}
	for i, p := range m.parts {
		r, err := Open(p.Path)
		switch {
		case i == 0 && err != nil:
			return err
		case i == 0:
			m.header = r.Header()
			if err := r.Close(); err != nil {
				return err
			}
			continue
		case errors.Is(err, os.ErrNotExist), errors.Is(err, errEmpty):
			p.missing, p.Lost = true, cmp.Or(p.Lost, "it left no history")
			continue
		case err != nil:
			return err
		}
		h := r.Header()
		if err := r.Close(); err != nil {
			return err
		}
		if h.RunKey != m.header.RunKey || h.Sessions != m.header.Sessions || h.Seed != m.header.Seed {
			return fmt.Errorf("%s is of another run than %s", p.Path, base)
		}
	}
	m.header.Cores = 0
	for _, p := range m.parts[1:] {
		m.hosts[p.Host] = max(m.hosts[p.Host], p.Cores)
	}
	for _, cores := range m.hosts {
		m.header.Cores += cores
	}
	return nil
}

// each reads a part from its beginning to its end.
func (p *part) each(f func(Record) error) error {
	if p.missing {
		return nil
	}
	r, err := Open(p.Path)
	if err != nil {
		return err
	}
	defer r.Close()
	for {
		rec, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = f(rec)
		}
		if err != nil {
			return err
		}
	}
}

// number reads all parts once and gives each op its new number.
func (m *merge) number() error {
	var sent []sending
	type change struct {
		at   time.Duration
		open int32
		op   int // in sent; -1 at an end
	}
	var changes []change
	for i, p := range m.parts {
		err := p.each(func(rec Record) error {
			op := rec.Op
			if op == nil {
				return nil
			}
			if op.ID < 1 || op.ID > maxPartOps {
				return fmt.Errorf("%s: op %d: its number is out of range", p.Path, op.ID)
			}
			for int64(len(p.ids)) < op.ID {
				p.ids, p.flight = append(p.ids, 0), append(p.flight, 0)
			}
			if p.ids[op.ID-1] != 0 {
				return fmt.Errorf("%s: there are two ops %d", p.Path, op.ID)
			}
			p.ids[op.ID-1] = -1
			own := int32(0)
			if op.Session >= 0 {
				own = 1
				changes = append(changes, change{op.LastByte + p.offset, -1, -1})
			}
			changes = append(changes, change{op.Sent + p.offset, own, len(sent)})
			sent = append(sent, sending{i, op.ID, op.Sent + p.offset})
			return nil
		})
		if err != nil {
			return err
		}
	}
	// What ends just when another is sent isn't open beside it.
	slices.SortFunc(changes, func(a, b change) int { return cmp.Or(cmp.Compare(a.at, b.at), cmp.Compare(a.open, b.open)) })
	open := int32(0)
	for _, c := range changes {
		open += c.open
		if c.op >= 0 {
			s := sent[c.op]
			m.parts[s.part].flight[s.id-1] = open
		}
	}
	slices.SortFunc(sent, func(a, b sending) int {
		return cmp.Or(cmp.Compare(a.sent, b.sent), cmp.Compare(a.part, b.part), cmp.Compare(a.id, b.id))
	})
	for i, s := range sent {
		m.parts[s.part].ids[s.id-1] = int64(i + 1)
	}
	return nil
}

func (m *merge) close() {
	for _, p := range m.parts {
		if p.reader != nil {
			p.reader.Close()
		}
	}
}

// next reads a part's next record; reader is nil after the last.
func (p *part) next() error {
	rec, err := p.reader.Next()
	if errors.Is(err, io.EOF) {
		if p.reader.Truncated() {
			p.Lost = cmp.Or(p.Lost, "its history ends in the middle of a record")
		}
		err = p.reader.Close()
		p.reader = nil
		return err
	}
	if err != nil {
		return err
	}
	p.record = rec
	if rec.Op != nil {
		shift(rec.Op, p.offset)
		p.at = rec.Op.LastByte
	} else {
		rec.Event.At += p.offset
		p.at = rec.Event.At
	}
	return nil
}

// shift moves an op by d.
func shift(op *Op, d time.Duration) {
	op.Planned += d
	op.Sent += d
	op.LastByte += d
	if op.FirstByte != 0 { // none came
		op.FirstByte += d
	}
	for i := range op.Chunks {
		op.Chunks[i].At += d
	}
}

// write reads all parts again, side by side.
func (m *merge) write(w *Writer) error {
	for _, p := range m.parts {
		if p.missing {
			continue
		}
		var err error
		if p.reader, err = Open(p.Path); err != nil {
			return err
		}
		if err := p.next(); err != nil {
			return err
		}
	}
	for {
		first := -1
		for i, p := range m.parts {
			if p.reader != nil && (first < 0 || p.at < m.parts[first].at) {
				first = i
			}
		}
		if first < 0 {
			break
		}
		p := m.parts[first]
		if m.main && p.at >= m.edge {
			if err := m.flush(w); err != nil {
				return err
			}
			for m.edge <= p.at {
				m.edge += time.Second
			}
		}
		if first > 0 {
			m.last = max(m.last, p.at)
		}
		if err := m.put(w, first, p); err != nil {
			return err
		}
		if err := p.next(); err != nil {
			return err
		}
	}
	return m.end(w)
}

func (m *merge) put(w *Writer, i int, p *part) error {
	if op := p.record.Op; op != nil {
		op.InFlight = int(p.flight[op.ID-1])
		op.ID = p.ids[op.ID-1]
		return w.Op(op)
	}
	e := p.record.Event
	if i == 0 {
		return w.Event(e)
	}
	switch {
	case e.Kind == Tick:
		m.pending = append(m.pending, tick{i, Event{At: e.At, Values: maps.Clone(e.Values)}})
		return nil
	case e.Kind == Started && Phase(e.Name) == Main:
		if m.main {
			return nil
		}
		// Ticks come at whole seconds from here, and a little later.
		m.main, m.edge = true, e.At+3*time.Second/2
	case e.Kind == Ended && Phase(e.Name) == Main:
		p.ended, p.inFlight, p.cpu = true, 0, 0
		if e.Text != "" && !slices.ContainsFunc(m.why, func(w string) bool { return strings.HasSuffix(w, e.Text) }) {
			m.why = append(m.why, fmt.Sprintf("shard %d: %s", p.Number, e.Text))
		}
		return nil
	}
	return w.Event(e)
}

// flush writes the ticks that wait: what each shard says, and all together.
func (m *merge) flush(w *Writer) error {
	if len(m.pending) == 0 {
		return nil
	}
	all := Event{Kind: Tick, Values: map[string]float64{}}
	for _, t := range m.pending {
		p, v := m.parts[t.shard], t.event.Values
		p.inFlight, p.cpu = v["in_flight"], v["cpu"]
		all.At = max(all.At, t.event.At)
		all.Values["chunks"] += v["chunks"]
		all.Values["late_ms"] = max(all.Values["late_ms"], v["late_ms"])
	}
	host := map[string]float64{}
	for _, p := range m.parts[1:] {
		host[p.Host] += p.cpu
		all.Values["in_flight"] += p.inFlight
		all.Values["cpu"] += p.cpu
	}
	for _, t := range m.pending {
		p, e := m.parts[t.shard], t.event
		e.Kind, e.Name = ShardTick, strconv.Itoa(p.Number)
		e.Values["host_cpu"] = host[p.Host]
		if err := w.Event(&e); err != nil {
			return err
		}
		if p.ended { // this was its last
			p.inFlight, p.cpu = 0, 0
		}
	}
	m.pending = m.pending[:0]
	return w.Event(&all)
}

// end writes the end of the main phase, which is that of its last shard.
func (m *merge) end(w *Writer) error {
	if err := m.flush(w); err != nil {
		return err
	}
	var lost []string
	for _, p := range m.parts[1:] {
		if p.Lost != "" || !p.ended {
			lost = append(lost, fmt.Sprintf("shard %d of %d was lost: %s", p.Number, len(m.parts)-1, cmp.Or(p.Lost, "its history has no end")))
		}
	}
	if !m.main {
		return nil
	}
	return w.Event(&Event{At: m.last, Kind: Ended, Name: string(Main), Text: strings.Join(append(lost, m.why...), "; ")})
}

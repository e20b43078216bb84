package oracle

import (
	"errors"
	"fmt"
	"io"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// Options of a judgement. The zero value is the usual one.
type Options struct {
	Oracles []Oracle       // nil is Registry
	Ops     func(OpResult) // is told of each op of a session under load, in the order of their numbers; nil for nobody
}

// OpResult is what became of one op.
type OpResult struct {
	ID            int64
	Session, Turn int
	// Judged says that damage would have shown, or that no reply came; Failed
	// that it did, or none did.
	Judged, Failed bool
}

// Judge streams a history once and judges it, in memory that grows by some
// 150 bytes per op. An error means that the history can't be read; whatever
// else is wrong with a run is in the verdict.
func Judge(r *history.Reader, opts Options) (*Verdict, error) {
	oracles := opts.Oracles
	if oracles == nil {
		oracles = Registry
	}
	j := newJudgement(r.Header(), oracles)
	for {
		record, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("judge history: after %d ops: %w", len(j.rec.rows), err)
		}
		switch {
		case record.Op != nil:
			j.op(record.Op)
		case record.Event != nil:
			j.event(record.Event)
		}
	}
	j.finish()
	v := j.verdict(r.Truncated())
	if opts.Ops != nil {
		j.rec.tell(opts.Ops)
	}
	return v, nil
}

// tell tells of the rows, which are sorted.
func (r *Recorder) tell(each func(OpResult)) {
	corrupt := r.corruptClasses()
	for i := range r.rows {
		w := &r.rows[i]
		if w.phase != history.Main || w.session < 0 {
			continue
		}
		lost := w.outcome == history.Failed || w.outcome == history.TimedOut
		each(OpResult{w.id, w.session, w.turn, lost || w.trials&corrupt != 0, lost || w.violations&corrupt != 0})
	}
}

// judgement is one history being judged.
type judgement struct {
	header    history.Header
	rec       *Recorder
	running   []*running
	crashes   []Crash
	phases    phases
	clients   []client // the whole, then each shard, where there are several
	counts    counts
	legs      legs
	logs      logs
	assembler openai.Assembler
}

// running is an oracle at work; observer is nil once it has crashed.
type running struct {
	oracle   Oracle
	observer Observer
}

// Crash is an oracle that failed on this history. It says nothing about the
// server.
type Crash struct {
	Oracle string `json:"oracle"`
	Op     int64  `json:"op,omitempty"` // 0 when it wasn't looking at an op
	Panic  string `json:"panic"`
}

func newJudgement(h history.Header, oracles []Oracle) *judgement {
	j := &judgement{header: h, rec: newRecorder(), clients: newClients(h)}
	for _, o := range oracles {
		w := &running{oracle: o}
		j.running = append(j.running, w)
		j.guard(w, 0, func() { w.observer = o.New(h) })
	}
	return j
}

func (j *judgement) op(op *history.Op) {
	v := View{Op: op, Reply: j.reply(op)}
	j.rec.add(&v)
	j.phases.op(&v)
	j.legs.op(&v)
	for _, w := range j.running {
		if w.observer != nil {
			j.guard(w, op.ID, func() { w.observer.Op(&v, j.rec) })
		}
	}
}

func (j *judgement) event(e *history.Event) {
	j.phases.event(e)
	for i := range j.clients {
		j.clients[i].event(e)
	}
	j.logs.event(e)
	j.counts.event(e)
	for _, w := range j.running {
		if w.observer != nil {
			j.guard(w, 0, func() { w.observer.Event(e, j.rec) })
		}
	}
}

func (j *judgement) finish() {
	for _, w := range j.running {
		if w.observer != nil {
			j.guard(w, 0, func() { w.observer.Finish(j.rec) })
		}
	}
}

// guard runs a step of an oracle. A panic ends that oracle, not the judging:
// the others' results still count for the reader.
func (j *judgement) guard(w *running, op int64, step func()) {
	j.rec.oracle = &w.oracle
	defer func() {
		j.rec.oracle = nil
		if p := recover(); p != nil {
			w.observer = nil
			j.crashes = append(j.crashes, Crash{Oracle: w.oracle.Name, Op: op, Panic: clip(fmt.Sprint(p), maxExampleBytes)})
		}
	}()
	step()
}

// reply puts an op's reply together.
func (j *judgement) reply(op *history.Op) *openai.Reply {
	if len(op.Chunks) == 0 {
		return &openai.Reply{}
	}
	if !op.Stream || op.Status >= 400 {
		var body []byte
		for _, c := range op.Chunks {
			body = append(body, c.Data...)
		}
		return openai.ReadBody(body)
	}
	j.assembler.Reset()
	for _, c := range op.Chunks {
		j.assembler.Add(c.Data)
	}
	return j.assembler.Reply()
}

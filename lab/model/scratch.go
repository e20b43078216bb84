package model

// buffer names an intermediate of the forward pass. Each holds one vector a row
// of the batch.
type buffer int

const (
	bufCache       buffer = iota // not a buffer: the batch's entries in the cache
	bufResidual                  // x
	bufNormed                    // h
	bufQuery                     // q
	bufLatent                    // kv, then the cache row: c, r
	bufIndexQuery                // iq
	bufIndexStage                // iq, and room for some unpacked index keys
	bufIndexKey                  // ik
	bufIndexWeight               // iw / sqrt(32)
	bufLatentQuery               // for each head the query that meets a cache row: Wuk applied, then rotated
	bufScore                     // of every token before the row's own
	bufSelected                  // the slots that attention reads, kept in Scratch.selected and count
	bufIndexPlace                // the slot that an index key is scattered to, kept in Scratch.places
	bufAttended                  // for each head the weighted sum of latents
	bufValue                     // o
	bufDelta                     // what is added to x
	bufGate
	bufUp
	bufferCount
)

// width is the number of float32s that a row has in each buffer.
var width = [bufferCount]int{
	bufResidual:    Width,
	bufNormed:      Width,
	bufQuery:       Heads * QueryDim,
	bufLatent:      RowDim,
	bufIndexQuery:  IndexHeads * IndexDim,
	bufIndexStage:  IndexHeads*IndexDim + stageTokens*IndexDim,
	bufIndexKey:    IndexDim,
	bufIndexWeight: panel,
	bufLatentQuery: headsRow,
	bufScore:       MaxContext,
	bufAttended:    Heads * LatentDim,
	bufValue:       Heads * PlainDim,
	bufDelta:       Width,
	bufGate:        HiddenDim,
	bufUp:          HiddenDim,
}

const stageTokens = 32 // index keys that a row's stage holds

// Scratch holds every intermediate of a forward pass, so that Forward itself
// allocates next to nothing. One Forward uses it at a time.
type Scratch struct {
	Workers int  // goroutines that share the rows; 0 means 1. Results don't depend on it
	Dense   bool // read every token, without the indexer; for tests
	Scatter bool // store bf16 index keys by the scatter store, not by the fused one
	// Split says whether the sums of the logits are cut into parts, by how many
	// rows there are; nil never. Several goroutines call it.
	Split func() bool

	AllReduce AllReduce // of a Shard's passes; nil where the model is whole

	rows     int
	buffers  [bufferCount][]float32
	selected []int32 // a row's slots that attention reads, in the order of their positions: [rows][MaxContext]
	count    []int32 // how many they are
	places   []int32
	counts   *Counts
	workers  []*worker
	logits   []float32
}

// Counts says how often the steps ran of which there are several: once a layer
// and pass.
type Counts struct {
	FusedStores, ScatterStores uint64          // of index keys
	Reads                      [F32 + 1]uint64 // of index keys, by IndexDType
}

// Counts returns what was counted in passes with s.
func (s *Scratch) Counts() Counts { return *s.counts }

// worker is what one goroutine needs for the row at hand.
type worker struct {
	keys        [keyTokens * IndexDim]float32
	scales      [keyTokens]float32
	mask        [MaxContext / 8]byte
	probability [(MaxContext + 1) * Heads]float32
	inverse     [Heads]float32
}

// NewScratch returns buffers for batches of at most rows rows.
func (m *Model) NewScratch(rows int) *Scratch {
	s := &Scratch{
		rows:     rows,
		selected: make([]int32, rows*MaxContext),
		count:    make([]int32, rows),
		places:   make([]int32, rows),
		counts:   &Counts{},
		logits:   make([]float32, rows*m.Vocab),
	}
	for b := range s.buffers {
		s.buffers[b] = make([]float32, rows*width[b])
	}
	return s
}

// start sees to it that each goroutine has its worker.
func (s *Scratch) start() {
	for len(s.workers) < max(1, s.Workers) {
		s.workers = append(s.workers, new(worker))
	}
}

// of returns row r's vector in a buffer.
func (s *Scratch) of(b buffer, r int) []float32 {
	w := width[b]
	return s.buffers[b][r*w : (r+1)*w : (r+1)*w]
}

// multiply computes to = w from for rows lo to hi of two buffers.
func (s *Scratch) multiply(to buffer, w *matrix, from buffer, lo, hi int) {
	w.times(s.buffers[to][lo*width[to]:], width[to], s.buffers[from][lo*width[from]:], width[from], hi-lo)
}

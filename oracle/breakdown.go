package oracle

import (
	"cmp"
	"fmt"
	"maps"
	"math/bits"
	"slices"
	"strconv"

	"github.com/culprit-project/culprit/history"
	"github.com/culprit-project/culprit/openai"
)

// Breakdown is the broken rate of the main phase along one dimension.
type Breakdown struct {
	By   string `json:"by"`
	Bins []Bin  `json:"bins"` // in the dimension's order; empty ones are left out
}

// Bin is one stretch of a dimension.
type Bin struct {
	Label string  `json:"label"`
	Rate  Rate    `json:"rate"`
	Ops   []int64 `json:"ops,omitempty"` // the broken ones
}

// ByIndex is the dimension that cuts the main phase into equal parts, by order
// of sending; indexBins is into how many.
const (
	ByIndex   = "request index"
	indexBins = 10
)

// smallestBin is the share of the ops that a stretch of numbers should have:
// the few sent while the load rises and falls show nothing one by one.
const smallestBin = 0.05

// dimension puts each op into a bin.
type dimension struct {
	by string
	of func(i int, w *row) (bin, bool) // false: the op isn't in this dimension
	// merge puts a bin with few ops together with the next one.
	merge bool
}

// bin is a place in a dimension's order, and how it is shown: a text, or else
// the numbers that it spans.
type bin struct {
	order    int
	text     string
	from, to int
}

func (b bin) label() string {
	switch {
	case b.text != "":
		return b.text
	case b.from == b.to:
		return strconv.Itoa(b.from)
	default:
		return fmt.Sprintf("%d-%d", b.from, b.to)
	}
}

// breakdowns wants the rows in the order of sending.
func (r *Recorder) breakdowns() []Breakdown {
	corrupt := r.corruptClasses()
	var rows []*row
	tokens, hasLegs, tiers := true, false, false
	for i := range r.rows {
		if w := &r.rows[i]; w.phase == history.Main && w.trials&corrupt != 0 {
			rows = append(rows, w)
			tokens = tokens && w.promptTokens > 0
			hasLegs = hasLegs || w.leg != ""
			tiers = tiers || w.tier > cacheHit
		}
	}
	// Where a round has several legs, which one matters more than when.
	dimensions := []dimension{{by: "round", of: func(_ int, w *row) (bin, bool) { return few(w.turn + 1), true }}}
	if hasLegs {
		dimensions[0] = dimension{by: "leg", of: byLeg(rows)}
	}
	dimensions = append(
		dimensions,
		dimension{by: "requests in flight", of: func(_ int, w *row) (bin, bool) { return octave(w.inFlight), true }, merge: true},
		dimension{by: ByIndex, of: func(i int, _ *row) (bin, bool) {
			part := i * indexBins / len(rows)
			from, to := (part*len(rows)+indexBins-1)/indexBins, ((part+1)*len(rows)+indexBins-1)/indexBins
			return bin{order: part, from: from + 1, to: to}, true
		}},
	)
	if tokens {
		dimensions = append(dimensions, dimension{by: "prompt tokens", of: func(_ int, w *row) (bin, bool) { return octave(w.promptTokens), true }, merge: true})
	} else {
		dimensions = append(dimensions, dimension{by: "request bytes", of: func(_ int, w *row) (bin, bool) { return octave(w.requestBytes), true }, merge: true})
	}
	dimensions = append(
		dimensions,
		dimension{by: "cache tier", of: func(_ int, w *row) (bin, bool) {
			return bin{order: int(w.tier), text: tierNames[w.tier]}, tiers
		}},
		dimension{by: "cached share of prompt", of: func(_ int, w *row) (bin, bool) { return cachedShare(w), true }},
		dimension{by: "recall distance", of: func(_ int, w *row) (bin, bool) { return few(w.distance), w.distance >= 0 }},
	)
	out := []Breakdown{}
	for _, d := range dimensions {
		if b := d.breakdown(rows, corrupt); b.Bins != nil {
			out = append(out, b)
		}
	}
	return out
}

func (d *dimension) breakdown(rows []*row, corrupt classSet) Breakdown {
	place := make([]int, len(rows)) // the order of each row's bin, -1 for none
	ops := map[int]int{}
	bins := map[int]bin{}
	for i, w := range rows {
		b, ok := d.of(i, w)
		if place[i] = b.order; !ok {
			place[i] = -1
			continue
		}
		ops[b.order]++
		bins[b.order] = b
	}
	orders := slices.Sorted(maps.Keys(bins))
	merged := map[int]int{} // a bin to the one that it went into
	for i, order := range orders {
		if d.merge && i < len(orders)-1 && float64(ops[order]) < smallestBin*float64(len(rows)) {
			next := orders[i+1]
			b := bins[next]
			b.from = bins[order].from
			bins[next] = b
			ops[next] += ops[order]
			merged[order] = next
		}
	}
	rates, broken := map[int]*bySession{}, map[int][]int64{}
	for i, w := range rows {
		order := place[i]
		for next, ok := merged[order]; ok; next, ok = merged[order] {
			order = next
		}
		if order < 0 {
			continue
		}
		if rates[order] == nil {
			rates[order] = &bySession{}
		}
		failed := w.violations&corrupt != 0
		rates[order].add(w.session, failed)
		if failed {
			broken[order] = append(broken[order], w.id)
		}
	}
	b := Breakdown{By: d.by}
	for _, order := range orders {
		if rate := rates[order]; rate != nil {
			b.Bins = append(b.Bins, Bin{Label: bins[order].label(), Rate: rateOf(rate.all), Ops: broken[order]})
		}
	}
	return b
}

// byLeg puts ops into the legs of their rounds, in the order in which the first
// session's come.
func byLeg(rows []*row) func(int, *row) (bin, bool) {
	const filler = "filler"   // what is sent between legs
	first := map[string]int{} // the earliest turn of each leg
	for _, w := range rows {
		if turn, ok := first[w.leg]; !ok || w.turn < turn {
			first[w.leg] = w.turn
		}
	}
	return func(_ int, w *row) (bin, bool) {
		return bin{order: first[w.leg], text: cmp.Or(w.leg, filler)}, true
	}
}

// few keeps small numbers as they are and puts the rest into octaves.
func few(n int) bin {
	if n <= 16 {
		n = max(n, 0)
		return bin{order: n, from: n, to: n}
	}
	b := octave(n)
	b.order += 16
	return b
}

// octave puts n between two powers of two: 1, 2, 3-4, 5-8, 9-16, ...
func octave(n int) bin {
	if n <= 1 {
		n = max(n, 0)
		return bin{order: n, from: n, to: n}
	}
	power := bits.Len(uint(n - 1))
	return bin{order: 1 + power, from: 1<<(power-1) + 1, to: 1 << power}
}

func cachedShare(w *row) bin {
	if w.cachedTokens < 0 || w.promptTokens <= 0 {
		return bin{text: "not reported"}
	}
	switch share := float64(w.cachedTokens) / float64(w.promptTokens); {
	case share <= 0:
		return bin{order: 1, text: "none"}
	case share <= 0.25:
		return bin{order: 2, text: "up to 25%"}
	case share <= 0.50:
		return bin{order: 3, text: "25 to 50%"}
	case share <= 0.75:
		return bin{order: 4, text: "50 to 75%"}
	case share <= 1:
		return bin{order: 5, text: "75 to 100%"}
	default:
		return bin{order: 6, text: "over 100%"}
	}
}

// tier is the slowest tier of the cache that a prompt's tokens came from: what
// restores them is the likeliest to restore them wrong.
type tier uint8

const (
	tierUnknown tier = iota
	cacheMiss
	cacheHit // in a tier that the server doesn't name
	deviceTier
	hostTier
	storageTier
)

var tierNames = [...]string{tierUnknown: "not reported", cacheMiss: "miss", cacheHit: "hit", deviceTier: "device", hostTier: "host", storageTier: "storage"}

func tierOf(u *openai.Usage) tier {
	t := u.ByTier
	switch {
	case t != nil && t.Storage > 0:
		return storageTier
	case t != nil && t.Host > 0:
		return hostTier
	case t != nil && t.Device > 0:
		return deviceTier
	case u.CachedTokens < 0:
		return tierUnknown
	case u.CachedTokens == 0:
		return cacheMiss
	}
	return cacheHit
}

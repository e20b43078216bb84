package model

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
)

// tensors are the tensors of a safetensors file that haven't been taken yet.
type tensors struct {
	entries map[string]tensorEntry
	data    []byte
	errs    []error
}

type tensorEntry struct {
	DType   string   `json:"dtype"`
	Shape   []int    `json:"shape"`
	Offsets [2]int64 `json:"data_offsets"`
}

// parseSafetensors reads the file's header: its length in 8 bytes, little
// endian, then JSON; the offsets in it count from its end.
func parseSafetensors(file []byte) (*tensors, error) {
	if len(file) < 8 {
		return nil, fmt.Errorf("safetensors: %d bytes are too few for a header", len(file))
	}
	n := binary.LittleEndian.Uint64(file)
	rest := file[8:]
	if n > uint64(len(rest)) {
		return nil, fmt.Errorf("safetensors: the header says %d bytes, the file has %d", n, len(rest))
	}
	var header map[string]json.RawMessage
	if err := json.Unmarshal(rest[:n], &header); err != nil {
		return nil, fmt.Errorf("safetensors: header: %w", err)
	}
	delete(header, "__metadata__")
	t := &tensors{entries: make(map[string]tensorEntry, len(header)), data: rest[n:]}
	for name, raw := range header {
		var e tensorEntry
		if err := json.Unmarshal(raw, &e); err != nil {
			return nil, fmt.Errorf("safetensors: tensor %q: %w", name, err)
		}
		t.entries[name] = e
	}
	return t, nil
}

// take returns a tensor as float32 and removes it. The first size may be 0: it
// is then whatever the file says. What is wrong is added to errs, and the
// result is nil.
func (t *tensors) take(name string, shape ...int) []float32 {
	values, err := t.read(name, shape)
	if err != nil {
		t.errs = append(t.errs, fmt.Errorf("tensor %q: %w", name, err))
	}
	delete(t.entries, name)
	return values
}

func (t *tensors) read(name string, shape []int) ([]float32, error) {
	e, ok := t.entries[name]
	if !ok {
		return nil, errors.New("missing")
	}
	want := slices.Clone(shape)
	if want[0] == 0 && len(e.Shape) > 0 {
		want[0] = e.Shape[0]
	}
	if !slices.Equal(e.Shape, want) {
		if shape[0] == 0 {
			return nil, fmt.Errorf("its shape is %v, want [V %d]", e.Shape, shape[1])
		}
		return nil, fmt.Errorf("its shape is %v, want %v", e.Shape, shape)
	}
	var bytes int64
	switch e.DType {
	case "F32":
		bytes = 4
	case "F16", "BF16":
		bytes = 2
	default:
		return nil, fmt.Errorf("its dtype is %q, want F32, F16 or BF16", e.DType)
	}
	count := int64(1)
	for _, n := range want {
		if n <= 0 || int64(n) > int64(len(t.data)) {
			return nil, fmt.Errorf("its shape %v is larger than the file", e.Shape)
		}
		count *= int64(n)
	}
	from, to := e.Offsets[0], e.Offsets[1]
	if from < 0 || from > to || to > int64(len(t.data)) || to-from != count*bytes {
		return nil, fmt.Errorf("its bytes %d to %d are not the %d of its shape within the %d of the file",
			from, to, count*bytes, len(t.data))
	}
	src, values := t.data[from:to], make([]float32, count)
	for i := range values {
		switch e.DType {
		case "F32":
			values[i] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*i:]))
		case "F16":
			values[i] = fromF16(binary.LittleEndian.Uint16(src[2*i:]))
		case "BF16":
			values[i] = fromBF16(binary.LittleEndian.Uint16(src[2*i:]))
		}
	}
	return values, nil
}

// finish returns what was wrong with the tensors taken and which ones are left.
func (t *tensors) finish() error {
	for _, name := range slices.Sorted(maps.Keys(t.entries)) {
		t.errs = append(t.errs, fmt.Errorf("tensor %q: the model has none of this name", name))
	}
	if len(t.errs) == 0 {
		return nil
	}
	more := ""
	if n := len(t.errs) - 1; n > 0 {
		more = fmt.Sprintf(" (and %d more like it)", n)
	}
	return fmt.Errorf("weights: %w%s", t.errs[0], more)
}

func fromF16(h uint16) float32 {
	sign, exponent, mantissa := uint32(h&0x8000)<<16, uint32(h>>10&0x1f), uint32(h&0x3ff)
	switch exponent {
	case 0: // steps of 2^-24
		return math.Float32frombits(sign | math.Float32bits(float32(mantissa)/(1<<24)))
	case 31:
		return math.Float32frombits(sign | 0x7f800000 | mantissa<<13)
	default:
		return math.Float32frombits(sign | (exponent+112)<<23 | mantissa<<13)
	}
}

package model

import (
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
)

// Model is a loaded model. It is immutable and may be shared.
type Model struct {
	// Vocab is the number of tokens; ids are 0 to Vocab-1.
	Vocab int

	heads  int          // that it computes
	embed  [3][]float32 // of the token, the one before, the one before that
	layers [Layers]layer
	norm   []float32
	head   matrix
	cos    []float32 // [MaxContext][RotaryDim/2]
	sin    []float32
}

type layer struct {
	attentionNorm, kvNorm, indexNorm, mlpNorm []float32
	query, kv, output                         matrix
	keyUp                                     [Heads]matrix // from a head's plain query to the latent: transposed
	valueUp                                   [Heads]matrix
	indexQuery, indexKey, indexWeight         matrix
	gate, up, down                            matrix
}

// matrix is [out, in], packed for matmulPanel: panels of 16 outputs, each
// [in][16], the last one filled up with zeros.
type matrix struct {
	in, out int
	packed  []float32
}

func pack(w []float32, out, in int) matrix {
	panels := (out + panel - 1) / panel
	m := matrix{in: in, out: out, packed: make([]float32, panels*panel*in)}
	for o := range out {
		p := m.packed[o/panel*panel*in:]
		for i := range in {
			p[i*panel+o%panel] = w[o*in+i]
		}
	}
	return m
}

func transpose(w []float32, rows, columns int) []float32 {
	t := make([]float32, len(w))
	for r := range rows {
		for c := range columns {
			t[c*rows+r] = w[r*columns+c]
		}
	}
	return t
}

// times computes w x for some rows of a buffer: c[r] = w x[r], where a row has
// cStride or xStride values. What a row of c has beyond w.out, up to a whole
// panel, becomes zero.
func (w *matrix) times(c []float32, cStride int, x []float32, xStride, rows int) {
	for p := 0; p < w.out; p += panel {
		packed := w.packed[p*w.in:]
		if p+panel <= cStride {
			matmulPanel(c[p:], x, packed, w.in, rows, cStride, xStride)
			continue
		}
		const some = 12
		var part [some * panel]float32
		for r := 0; r < rows; r += some {
			n := min(some, rows-r)
			matmulPanel(part[:], x[r*xStride:], packed, w.in, n, panel, xStride)
			for i := range n {
				copy(c[(r+i)*cStride+p:(r+i)*cStride+w.out], part[i*panel:])
			}
		}
	}
}

// Load reads a safetensors file. It returns an error if a tensor is missing,
// unknown, or not of the documented shape.
func Load(safetensors []byte) (*Model, error) {
	t, err := parseSafetensors(safetensors)
	if err != nil {
		return nil, err
	}
	m := assemble(t.take)
	if err := t.finish(); err != nil {
		return nil, err
	}
	return m, nil
}

// Random makes a model of seeded random weights, which writes nonsense, but
// the same nonsense everywhere: for tests of all that isn't the model.
func Random(seed uint64, vocab int) *Model {
	rng := rand.New(rand.NewPCG(seed, 0))
	return assemble(func(name string, shape ...int) []float32 {
		if shape[0] == 0 {
			shape[0] = vocab
		}
		n := 1
		for _, size := range shape {
			n *= size
		}
		values := make([]float32, n)
		for i := range values {
			x := rng.NormFloat64()
			switch {
			case len(shape) == 1: // the weights of a norm
				x = 1 + 0.3*x
			case !strings.HasPrefix(name, "embed"):
				x /= math.Sqrt(float64(shape[1]))
			}
			values[i] = float32(x)
		}
		return values
	})
}

// assemble makes a model of tensors that take returns by name and shape; the
// vocabulary's size is 0 until the first one tells it. take may return nil,
// where the model is thrown away.
func assemble(take func(name string, shape ...int) []float32) *Model {
	m := &Model{heads: Heads}
	m.embed[0] = take("embed.0", 0, Width)
	m.Vocab = len(m.embed[0]) / Width
	m.embed[1] = take("embed.1", m.Vocab, Width)
	m.embed[2] = take("embed.2", m.Vocab, Width)
	matrixOf := func(name string, out, in int) matrix {
		w := take(name, out, in)
		if w == nil {
			return matrix{}
		}
		return pack(w, out, in)
	}
	for i := range m.layers {
		l, name := &m.layers[i], fmt.Sprintf("layers.%d.", i)
		l.attentionNorm = take(name+"attn.norm", Width)
		l.query = matrixOf(name+"attn.q", Heads*QueryDim, Width)
		l.kv = matrixOf(name+"attn.kv", RowDim, Width)
		l.kvNorm = take(name+"attn.kv_norm", LatentDim)
		keyUp := take(name+"attn.k_up", Heads*PlainDim, LatentDim)
		valueUp := take(name+"attn.v_up", Heads*PlainDim, LatentDim)
		for h := range Heads {
			if keyUp == nil || valueUp == nil {
				break
			}
			rows := func(w []float32) []float32 { return w[h*PlainDim*LatentDim:][:PlainDim*LatentDim] }
			l.keyUp[h] = pack(transpose(rows(keyUp), PlainDim, LatentDim), LatentDim, PlainDim)
			l.valueUp[h] = pack(rows(valueUp), PlainDim, LatentDim)
		}
		l.output = matrixOf(name+"attn.o", Width, Heads*PlainDim)
		l.indexQuery = matrixOf(name+"index.q", IndexHeads*IndexDim, Width)
		l.indexKey = matrixOf(name+"index.k", IndexDim, Width)
		l.indexNorm = take(name+"index.k_norm", IndexDim)
		l.indexWeight = matrixOf(name+"index.w", IndexHeads, Width)
		l.mlpNorm = take(name+"mlp.norm", Width)
		l.gate = matrixOf(name+"mlp.gate", HiddenDim, Width)
		l.up = matrixOf(name+"mlp.up", HiddenDim, Width)
		l.down = matrixOf(name+"mlp.down", Width, HiddenDim)
	}
	m.norm = take("norm", Width)
	m.head = matrixOf("head", m.Vocab, Width)
	m.cos, m.sin = rotations()
	return m
}

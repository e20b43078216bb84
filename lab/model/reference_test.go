package model

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"testing"
)

// randomWeights returns a safetensors file and the values in it.
func randomWeights(seed uint64, vocab int) (file []byte, values map[string][]float64) {
	rng := rand.New(rand.NewPCG(seed, 0))
	header := map[string]any{"__metadata__": map[string]string{"made": "by a test"}}
	values = map[string][]float64{}
	var data []byte
	tensor := func(name string, shape ...int) {
		n := 1
		for _, s := range shape {
			n *= s
		}
		from := len(data)
		v := make([]float64, n)
		dtype := []string{"F32", "BF16"}[rng.IntN(2)]
		for i := range v {
			x := float32(rng.NormFloat64() / math.Sqrt(float64(shape[len(shape)-1])))
			switch {
			case len(shape) == 1:
				x = float32(1 + 0.3*rng.NormFloat64())
			case name[0] == 'e':
				x = float32(rng.NormFloat64())
			}
			if dtype == "BF16" {
				data = binary.LittleEndian.AppendUint16(data, toBF16(x))
				x = fromBF16(toBF16(x))
			} else {
				data = binary.LittleEndian.AppendUint32(data, math.Float32bits(x))
			}
			v[i] = float64(x)
		}
		values[name] = v
		header[name] = map[string]any{"dtype": dtype, "shape": shape, "data_offsets": []int{from, len(data)}}
	}
	for i := range 3 {
		tensor(fmt.Sprintf("embed.%d", i), vocab, 192)
	}
	for l := range 4 {
		prefix := fmt.Sprintf("layers.%d.", l)
		tensor(prefix+"attn.norm", 192)
		tensor(prefix+"attn.q", 320, 192)
		tensor(prefix+"attn.kv", 128, 192)
		tensor(prefix+"attn.kv_norm", 96)
		tensor(prefix+"attn.k_up", 192, 96)
		tensor(prefix+"attn.v_up", 192, 96)
		tensor(prefix+"attn.o", 192, 192)
		tensor(prefix+"index.q", 128, 192)
		tensor(prefix+"index.k", 32, 192)
		tensor(prefix+"index.k_norm", 32)
		tensor(prefix+"index.w", 4, 192)
		tensor(prefix+"mlp.norm", 192)
		tensor(prefix+"mlp.gate", 512, 192)
		tensor(prefix+"mlp.up", 512, 192)
		tensor(prefix+"mlp.down", 192, 512)
	}
	tensor("norm", 192)
	tensor("head", vocab, 192)
	text, err := json.Marshal(header)
	if err != nil {
		panic(err)
	}
	file = binary.LittleEndian.AppendUint64(nil, uint64(len(text)))
	return append(append(file, text...), data...), values
}

func testModel(tb testing.TB, vocab int) *Model {
	tb.Helper()
	file, _ := randomWeights(1, vocab)
	m, err := Load(file)
	if err != nil {
		tb.Fatal(err)
	}
	return m
}

// reference computes the formulas of the package comment as they stand, in
// float64, without a cache: the logits of every position.
func reference(w map[string][]float64, tokens []int32, dense bool) [][]float64 {
	times := func(name string, rows [][]float64) [][]float64 {
		m := w[name]
		var result [][]float64
		for _, x := range rows {
			y := make([]float64, len(m)/len(x))
			for o := range y {
				for i := range x {
					y[o] += m[o*len(x)+i] * x[i]
				}
			}
			result = append(result, y)
		}
		return result
	}
	rms := func(name string, rows [][]float64) [][]float64 {
		var result [][]float64
		for _, x := range rows {
			var sum float64
			for _, v := range x {
				sum += v * v
			}
			y := slices.Clone(x)
			for i := range y {
				y[i] *= w[name][i] / math.Sqrt(sum/float64(len(x))+1e-6)
			}
			result = append(result, y)
		}
		return result
	}
	rope := func(x []float64, position int) {
		for j := range 16 {
			sin, cos := math.Sincos(float64(position) / math.Pow(10000, float64(j)/16))
			x[j], x[j+16] = x[j]*cos-x[j+16]*sin, x[j+16]*cos+x[j]*sin
		}
	}
	dot := func(a, b []float64) (sum float64) {
		for i := range a {
			sum += a[i] * b[i]
		}
		return sum
	}
	add := func(to, from [][]float64) {
		for r := range to {
			for i := range to[r] {
				to[r][i] += from[r][i]
			}
		}
	}

	var x [][]float64
	for t := range tokens {
		row := make([]float64, 192)
		for e := range 3 {
			token := int32(0)
			if t-e >= 0 {
				token = tokens[t-e]
			}
			for i := range row {
				row[i] += w[fmt.Sprintf("embed.%d", e)][int(token)*192+i]
			}
		}
		x = append(x, row)
	}
	for l := range 4 {
		prefix := fmt.Sprintf("layers.%d.", l)
		h := rms(prefix+"attn.norm", x)
		q, kv := times(prefix+"attn.q", h), times(prefix+"attn.kv", h)
		iq, iw := times(prefix+"index.q", h), times(prefix+"index.w", h)
		ik := rms(prefix+"index.k_norm", times(prefix+"index.k", h))
		var latent [][]float64
		for t := range x {
			latent = append(latent, kv[t][:96])
			rope(kv[t][96:], t)
			rope(ik[t], t)
			for i := range 4 {
				rope(iq[t][32*i:], t)
				rope(q[t][80*i+48:], t)
			}
		}
		latent = rms(prefix+"attn.kv_norm", latent)
		k, v := times(prefix+"attn.k_up", latent), times(prefix+"attn.v_up", latent)
		var o [][]float64
		for t := range x {
			var set []int
			for s := range t {
				set = append(set, s)
			}
			if !dense && t >= 64 {
				score := make([]float64, t)
				for s := range t {
					for i := range 4 {
						score[s] += iw[t][i] * max(0, dot(iq[t][32*i:32*i+32], ik[s])) / math.Sqrt(32)
					}
				}
				slices.SortStableFunc(set, func(a, b int) int {
					switch {
					case score[a] > score[b]:
						return -1
					case score[a] < score[b]:
						return 1
					}
					return 0
				})
				set = set[:63]
			}
			set = append(set, t)
			row := make([]float64, 192)
			for i := range 4 {
				a, top, total := make([]float64, len(set)), math.Inf(-1), 0.0
				for n, s := range set {
					a[n] = (dot(q[t][80*i:80*i+48], k[s][48*i:48*i+48]) + dot(q[t][80*i+48:80*i+80], kv[s][96:])) / math.Sqrt(80)
					top = max(top, a[n])
				}
				for n := range a {
					a[n] = math.Exp(a[n] - top)
					total += a[n]
				}
				for n, s := range set {
					for d := range 48 {
						row[48*i+d] += a[n] / total * v[s][48*i+d]
					}
				}
			}
			o = append(o, row)
		}
		add(x, times(prefix+"attn.o", o))
		h = rms(prefix+"mlp.norm", x)
		gate, up := times(prefix+"mlp.gate", h), times(prefix+"mlp.up", h)
		for t := range gate {
			for i, g := range gate[t] {
				gate[t][i] = g / (1 + math.Exp(-g)) * up[t][i]
			}
		}
		add(x, times(prefix+"mlp.down", gate))
	}
	return times("head", rms("norm", x))
}

// agree fails unless the largest difference is at most 1e-4 of the largest
// logit.
func agree(t *testing.T, what string, got []float32, want []float64) {
	t.Helper()
	var difference, largest float64
	for i := range want {
		difference = max(difference, math.Abs(float64(got[i])-want[i]))
		largest = max(largest, math.Abs(want[i]))
	}
	if !(difference <= 1e-4*largest) || largest == 0 {
		t.Errorf("%s: logits differ by %g, the largest is %g", what, difference, largest)
	}
}

func TestFloat64Reference(t *testing.T) {
	const vocab = 50
	file, values := randomWeights(7, vocab)
	m, err := Load(file)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(8, 8))
	tokens := make([]int32, 80)
	for i := range tokens {
		tokens[i] = int32(rng.IntN(vocab))
	}
	for _, dense := range []bool{false, true} {
		t.Run(fmt.Sprintf("dense=%v", dense), func(t *testing.T) {
			want := reference(values, tokens, dense)
			got := alone(t, m, tokens, F32, dense)
			for p := range tokens {
				agree(t, fmt.Sprintf("position %d", p), got[p*vocab:(p+1)*vocab], want[p])
			}
		})
	}
}

// The logits that the trainer recorded, with the weights that the project
// ships. The weights never come without them.
func TestRecordedLogits(t *testing.T) {
	const weights, recorded = "weights/model.safetensors", "testdata/reference.json"
	file, err := os.ReadFile(weights)
	if errors.Is(err, fs.ErrNotExist) {
		t.Skip("no trained weights yet")
	}
	if err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(recorded)
	if err != nil {
		t.Fatal(err)
	}
	var reference struct {
		Cases []struct {
			Name      string      `json:"name"`
			Dense     bool        `json:"dense"`
			Tokens    []int32     `json:"tokens"`
			Positions []int       `json:"positions"`
			Logits    [][]float64 `json:"logits"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(text, &reference); err != nil {
		t.Fatalf("%s: %v", recorded, err)
	}
	m, err := Load(file)
	if err != nil {
		t.Fatalf("%s: %v", weights, err)
	}
	seen := map[string]bool{}
	for _, c := range reference.Cases {
		t.Run(c.Name, func(t *testing.T) {
			if len(c.Positions) == 0 || len(c.Positions) != len(c.Logits) {
				t.Fatalf("%d positions, %d rows of logits", len(c.Positions), len(c.Logits))
			}
			got := alone(t, m, c.Tokens, F32, c.Dense)
			for i, p := range c.Positions {
				if len(c.Logits[i]) != m.Vocab {
					t.Fatalf("%d logits, the vocabulary has %d", len(c.Logits[i]), m.Vocab)
				}
				agree(t, fmt.Sprintf("position %d", p), got[p*m.Vocab:(p+1)*m.Vocab], c.Logits[i])
				if p >= TopK {
					seen[fmt.Sprint("dense ", c.Dense)] = true
				}
			}
		})
	}
	if !seen["dense true"] || !seen["dense false"] {
		t.Errorf("%s has no position beyond %d both dense and sparse", recorded, TopK)
	}
}

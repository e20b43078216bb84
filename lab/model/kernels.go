package model

import "math"

// The kernels are the inner loops. Each exists twice: in assembly for amd64
// with AVX2 and FMA (kernels_amd64.s), and here in Go, which defines it: the two
// agree bit for bit, because every sum has one order and every a*b+c is rounded
// once. In Go a product that is added to something is converted explicitly, so
// that no compiler fuses the two. AVX-512 isn't used: on Zen 4 the AVX2 kernel
// for matrix products is at the core's peak.

const (
	panel     = 16             // outputs that a packed matrix keeps side by side
	keyPanel  = IndexDim * 16  // float32s of 16 unpacked index keys
	keyTokens = 64             // index keys that are unpacked at a time
	headsRow  = Heads * RowDim // a row's absorbed query
)

// fma32 is a*b+c rounded once. The product of two float32s is exact in
// float64; rounding the sum to float64 and then to float32 is wrong only if
// the float64 lies half-way between two float32s, or is too small to be normal.
func fma32(a, b, c float32) float32 {
	p := float64(a) * float64(b)
	s := p + float64(c)
	if twiceRounded(s) {
		return fma32Slow(p, float64(c), s)
	}
	return float32(s)
}

// twiceRounded reports whether rounding s to float32 may go wrong because s was
// rounded before.
func twiceRounded(s float64) bool {
	b := math.Float64bits(s)
	return b&(1<<29-1) == 1<<28 || b<<1 < (1023-126)<<53
}

// fma32Slow rounds p+c = s+e to odd before it rounds to float32 (Boldo and
// Melquiond, "Emulation of a FMA and correctly rounded sums", 2008).
func fma32Slow(p, c, s float64) float32 {
	// e is the exact error of s (Knuth's two-sum).
	t := s - p
	e := (p - (s - t)) + (c - t)
	bits := math.Float64bits(s)
	if e == 0 || e != e || bits&1 == 1 {
		return float32(s)
	}
	if (e > 0) == (s > 0) {
		bits++
	} else {
		bits--
	}
	return float32(math.Float64frombits(bits))
}

// sum8 is how the lanes of a vector are added up.
func sum8(l *[8]float32) float32 {
	return ((l[0] + l[1]) + (l[2] + l[3])) + ((l[4] + l[5]) + (l[6] + l[7]))
}

// matmulPanelGo computes 16 columns of c for all rows: c[r][j] is the sum over
// k of x[r][k]*w[k][j], in the order of k. w is [in][16].
func matmulPanelGo(c, x, w []float32, in, rows, cStride, xStride int) {
	for r := range rows {
		xr := x[r*xStride : r*xStride+in]
		var sum [panel]float32
		for k, xk := range xr {
			wk, x := (*[panel]float32)(w[k*panel:]), float64(xk)
			for j, v := range sum { // fma32, which is too large to be inlined
				p := x * float64(wk[j])
				s := p + float64(v)
				if sum[j] = float32(s); twiceRounded(s) {
					sum[j] = fma32Slow(p, float64(v), s)
				}
			}
		}
		copy(c[r*cStride:r*cStride+panel], sum[:])
	}
}

// rmsNormGo sets dst to x / sqrt(mean(x*x)+1e-6) * g. dst may be x. The length
// is a multiple of 8.
func rmsNormGo(dst, x, g []float32) {
	var lanes [8]float32
	for i := 0; i < len(x); i += 8 {
		for j := range lanes {
			lanes[j] = fma32(x[i+j], x[i+j], lanes[j])
		}
	}
	inv := 1 / float32(math.Sqrt(float64(sum8(&lanes)/float32(len(x))+epsilon)))
	for i := range x {
		dst[i] = x[i] * inv * g[i]
	}
}

// addGo adds x to dst. The length is a multiple of 8.
func addGo(dst, x []float32) {
	for i := range dst {
		dst[i] += x[i]
	}
}

// Constants of exp32, from Cephes' expf.
const (
	expMax  = 88
	expMin  = -87.33654
	log2e   = 1.44269504088896341
	ln2High = 0.693359375
	ln2Low  = -2.12194440e-4
	expC0   = 1.9875691500e-4
	expC1   = 1.3981999507e-3
	expC2   = 8.3334519073e-3
	expC3   = 4.1665795894e-2
	expC4   = 1.6666665459e-1
	expC5   = 5.0000001201e-1
)

// exp32 is e to the x, to about one unit in the last place; x is first brought
// between -87.3 and 88, so the result is never 0 or infinite.
func exp32(x float32) float32 {
	x = max(min(x, expMax), expMin)
	n := float32(math.RoundToEven(float64(float32(x * log2e))))
	r := fma32(n, -ln2High, x)
	r = fma32(n, -ln2Low, r)
	y := float32(expC0)
	for _, c := range [...]float32{expC1, expC2, expC3, expC4, expC5} {
		y = fma32(y, r, c)
	}
	y = fma32(y, float32(r*r), r) + 1
	return float32(y * math.Float32frombits(uint32(int32(n)+127)<<23))
}

// siluMulGo sets gate to silu(gate) * up. The length is a multiple of 8.
func siluMulGo(gate, up []float32) {
	for i, g := range gate {
		gate[i] = g / (1 + exp32(-g)) * up[i]
	}
}

// indexScoreGo scores n tokens, a multiple of 16, for one row. q is [4][32], w
// is [4]; keys are panels of 16 tokens, each [32][16]; scales are n float32s.
// A score that isn't a number becomes -Inf.
func indexScoreGo(out, q, w, keys, scales []float32, n int) {
	for t := range n {
		k := keys[t/16*keyPanel+t%16:]
		var score float32
		for h := range IndexHeads {
			var dot float32
			for d := range IndexDim {
				dot = fma32(q[h*IndexDim+d], k[d*16], dot)
			}
			if !(dot > 0) {
				dot = 0
			}
			score = fma32(w[h], dot, score)
		}
		score = fma32(score, scales[t], 0)
		if score != score {
			score = float32(math.Inf(-1))
		}
		out[t] = score
	}
}

// atLeastGo sets bit i%8 of mask[i/8] if x[i] >= least, and counts. The length
// of x is a multiple of 8.
func atLeastGo(mask []byte, x []float32, least float32) int {
	count := 0
	for i := 0; i < len(x); i += 8 {
		var m byte
		for j, v := range x[i : i+8] {
			if v >= least {
				m |= 1 << j
				count++
			}
		}
		mask[i/8] = m
	}
	return count
}

// attendScoresGo sets p[i][h] to scale * (q[h] . cache row of slots[i]). q is
// [4][128].
func attendScoresGo(p, q, latent []float32, slots []int32, scale float32) {
	for i, slot := range slots {
		row := latent[int(slot)*RowDim:][:RowDim]
		for h := range Heads {
			var lanes [8]float32
			for d, v := range row {
				lanes[d%8] = fma32(q[h*RowDim+d], v, lanes[d%8])
			}
			p[i*Heads+h] = sum8(&lanes) * scale
		}
	}
}

// softmaxGo sets p[i][h] to exp(p[i][h] - max) and returns one over the sum, for
// each head. p has room for n+1 tokens, rounded up to an even number.
func softmaxGo(p []float32, n int, inverse *[Heads]float32) {
	for h := range Heads {
		top := float32(math.Inf(-1))
		for i := range n {
			top = max(top, p[i*Heads+h])
		}
		var sum [2]float32
		for i := range n {
			e := exp32(p[i*Heads+h] - top)
			p[i*Heads+h] = e
			sum[i%2] += e
		}
		inverse[h] = 1 / (sum[0] + sum[1])
	}
}

// attendValuesGo sets out[h] to the sum over i of p[i][h] times the latent of
// slots[i], times inverse[h]. out is [4][96].
func attendValuesGo(out, p, latent []float32, slots []int32, inverse *[Heads]float32) {
	for h := range Heads {
		o := out[h*LatentDim : (h+1)*LatentDim]
		clear(o)
		for i, slot := range slots {
			row := latent[int(slot)*RowDim:][:LatentDim]
			for d, v := range row {
				o[d] = fma32(p[i*Heads+h], v, o[d])
			}
		}
		for d := range o {
			o[d] *= inverse[h]
		}
	}
}

//go:build !purego

package model

import "golang.org/x/sys/cpu"

// useAVX2 is a variable so that tests can compare.
var useAVX2 = cpu.X86.HasAVX2 && cpu.X86.HasFMA && cpu.X86.HasPOPCNT

// The functions below check the slices' lengths, which assembly doesn't.

func matmulPanel(c, x, w []float32, in, rows, cStride, xStride int) {
	if !useAVX2 {
		matmulPanelGo(c, x, w, in, rows, cStride, xStride)
		return
	}
	_, _, _ = c[(rows-1)*cStride+panel-1], x[(rows-1)*xStride+in-1], w[in*panel-1]
	matmulPanelAVX2(&c[0], &x[0], &w[0], in, rows, cStride, xStride)
}

func rmsNorm(dst, x, g []float32) {
	if !useAVX2 {
		rmsNormGo(dst, x, g)
		return
	}
	_, _ = dst[len(x)-1], g[len(x)-1]
	rmsNormAVX2(&dst[0], &x[0], &g[0], len(x))
}

func add(dst, x []float32) {
	if !useAVX2 {
		addGo(dst, x)
		return
	}
	_ = x[len(dst)-1]
	addAVX2(&dst[0], &x[0], len(dst))
}

func siluMul(gate, up []float32) {
	if !useAVX2 {
		siluMulGo(gate, up)
		return
	}
	_ = up[len(gate)-1]
	siluMulAVX2(&gate[0], &up[0], len(gate))
}

func indexScore(out, q, w, keys, scales []float32, n int) {
	if !useAVX2 {
		indexScoreGo(out, q, w, keys, scales, n)
		return
	}
	_, _, _, _, _ = out[n-1], q[IndexHeads*IndexDim-1], w[IndexHeads-1], keys[n*IndexDim-1], scales[n-1]
	indexScoreAVX2(&out[0], &q[0], &w[0], &keys[0], &scales[0], n)
}

func atLeast(mask []byte, x []float32, least float32) int {
	if !useAVX2 {
		return atLeastGo(mask, x, least)
	}
	_ = mask[len(x)/8-1]
	return atLeastAVX2(&mask[0], &x[0], len(x), least)
}

// The slots must be within latent: Forward checks the page tables.

func attendScores(p, q, latent []float32, slots []int32, scale float32) {
	if !useAVX2 {
		attendScoresGo(p, q, latent, slots, scale)
		return
	}
	_, _ = p[len(slots)*Heads-1], q[headsRow-1]
	attendScoresAVX2(&p[0], &q[0], &latent[0], &slots[0], len(slots), scale)
}

func softmax(p []float32, n int, inverse *[Heads]float32) {
	if !useAVX2 {
		softmaxGo(p, n, inverse)
		return
	}
	_ = p[(n+n%2)*Heads-1]
	softmaxAVX2(&p[0], n, &inverse[0])
}

func attendValues(out, p, latent []float32, slots []int32, inverse *[Heads]float32) {
	if !useAVX2 {
		attendValuesGo(out, p, latent, slots, inverse)
		return
	}
	_, _ = out[Heads*LatentDim-1], p[len(slots)*Heads-1]
	attendValuesAVX2(&out[0], &p[0], &latent[0], &slots[0], len(slots), &inverse[0])
}

func unpackFP8(dst []float32, src []byte, n int) {
	if !useAVX2 {
		unpackFP8Go(dst, src, n)
		return
	}
	_, _ = dst[n*IndexDim-1], src[n*IndexDim-1]
	unpackFP8AVX2(&dst[0], &src[0], n)
}

func unpackBF16(dst []float32, src []byte, n int) {
	if !useAVX2 {
		unpackBF16Go(dst, src, n)
		return
	}
	_, _ = dst[n*IndexDim-1], src[2*n*IndexDim-1]
	unpackBF16AVX2(&dst[0], &src[0], n)
}

//go:noescape
func matmulPanelAVX2(c, x, w *float32, in, rows, cStride, xStride int)

//go:noescape
func rmsNormAVX2(dst, x, gain *float32, n int)

//go:noescape
func addAVX2(dst, x *float32, n int)

//go:noescape
func siluMulAVX2(gate, up *float32, n int)

//go:noescape
func indexScoreAVX2(out, q, w, keys, scales *float32, n int)

//go:noescape
func atLeastAVX2(mask *byte, x *float32, n int, least float32) int

//go:noescape
func attendScoresAVX2(p, q, latent *float32, slots *int32, n int, scale float32)

//go:noescape
func softmaxAVX2(p *float32, n int, inverse *float32)

//go:noescape
func attendValuesAVX2(out, p, latent *float32, slots *int32, n int, inverse *float32)

//go:noescape
func unpackFP8AVX2(dst *float32, src *byte, n int)

//go:noescape
func unpackBF16AVX2(dst *float32, src *byte, n int)

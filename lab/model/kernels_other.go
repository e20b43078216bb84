//go:build purego || !amd64

package model

func matmulPanel(c, x, w []float32, in, rows, cStride, xStride int) {
	matmulPanelGo(c, x, w, in, rows, cStride, xStride)
}

func rmsNorm(dst, x, g []float32) { rmsNormGo(dst, x, g) }

func add(dst, x []float32) { addGo(dst, x) }

func siluMul(gate, up []float32) { siluMulGo(gate, up) }

func indexScore(out, q, w, keys, scales []float32, n int) {
	indexScoreGo(out, q, w, keys, scales, n)
}

func atLeast(mask []byte, x []float32, least float32) int { return atLeastGo(mask, x, least) }

func attendScores(p, q, latent []float32, slots []int32, scale float32) {
	attendScoresGo(p, q, latent, slots, scale)
}

func softmax(p []float32, n int, inverse *[Heads]float32) { softmaxGo(p, n, inverse) }

func attendValues(out, p, latent []float32, slots []int32, inverse *[Heads]float32) {
	attendValuesGo(out, p, latent, slots, inverse)
}

func unpackFP8(dst []float32, src []byte, n int) { unpackFP8Go(dst, src, n) }

func unpackBF16(dst []float32, src []byte, n int) { unpackBF16Go(dst, src, n) }

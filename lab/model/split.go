package model

import "math"

// timesInParts is times with each sum cut into parts, as kernels do that
// spread a small batch over more of the machine: each part is rounded to bf16,
// and the parts are added in their order. Other parts make other last bits, and
// neither is wrong.
func (w *matrix) timesInParts(c []float32, cStride int, x []float32, xStride, rows, parts int) {
	const unit = 4 // inputs that matmulPanel takes at a time
	var sum [panel]float32
	for p := 0; p < w.out; p += panel {
		for r := range rows {
			out := c[r*cStride+p : r*cStride+min(p+panel, w.out)]
			clear(out)
			for i := range parts {
				from, to := i*(w.in/unit)/parts*unit, (i+1)*(w.in/unit)/parts*unit
				matmulPanel(sum[:], x[r*xStride+from:], w.packed[p*w.in+from*panel:], to-from, 1, panel, xStride)
				for j := range out {
					out[j] += math.Float32frombits(uint32(toBF16(sum[j])) << 16)
				}
			}
		}
	}
}

// partsOf is into how many parts sums are cut for so many rows: the fewer rows,
// the more of the machine is left to each.
func partsOf(rows int) int { return min(max(128/rows, 1), 16) }

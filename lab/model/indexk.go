package model

import (
	"encoding/binary"
	"fmt"
	"math"
)

// IndexDType says how index keys are stored.
type IndexDType uint8

// The zero value is FP8.
const (
	FP8  IndexDType = iota // e4m3fn and one float32 scale a token: 32 + 4 bytes
	BF16                   // 64 bytes a token
	F32                    // 128 bytes a token; not rounded, for comparison with other implementations
)

// String returns the name that flags use: fp8, bf16 or f32.
func (d IndexDType) String() string {
	switch d {
	case FP8:
		return "fp8"
	case BF16:
		return "bf16"
	case F32:
		return "f32"
	default:
		return fmt.Sprintf("IndexDType(%d)", uint8(d))
	}
}

// KeyBytes is the size of one token's key.
func (d IndexDType) KeyBytes() int {
	switch d {
	case FP8:
		return IndexDim
	case BF16:
		return 2 * IndexDim
	default:
		return 4 * IndexDim
	}
}

// ScaleBytes is the size of one token's scale, 0 if the type has none.
func (d IndexDType) ScaleBytes() int {
	if d == FP8 {
		return 4
	}
	return 0
}

// PageBytes is the size of a page of pageSize tokens: all keys, then all scales.
func (d IndexDType) PageBytes(pageSize int) int {
	return pageSize * (d.KeyBytes() + d.ScaleBytes())
}

// storeIndexKey rounds a token's key into its page, page-planar: keys, then
// scales.
func storeIndexKey(page []byte, d IndexDType, pageSize, offset int, key []float32) {
	dst := page[offset*d.KeyBytes():][:d.KeyBytes()]
	switch d {
	case FP8:
		var largest float32
		for _, v := range key {
			largest = max(largest, float32(math.Abs(float64(v))))
		}
		scale := max(1e-4, largest) / fp8Max
		for i, v := range key {
			dst[i] = toFP8(v / scale)
		}
		binary.LittleEndian.PutUint32(page[pageSize*IndexDim+4*offset:], math.Float32bits(scale))
	case BF16:
		for i, v := range key {
			binary.LittleEndian.PutUint16(dst[2*i:], toBF16(v))
		}
	default:
		for i, v := range key {
			binary.LittleEndian.PutUint32(dst[4*i:], math.Float32bits(v))
		}
	}
}

// unpackIndexKeys reads n keys (a multiple of 16) of a page from offset on, into
// panels of 16 tokens, each [32][16], and their scales, 1 if d has none.
func unpackIndexKeys(keys, scales []float32, page []byte, d IndexDType, pageSize, offset, n int) {
	src := page[offset*d.KeyBytes():][:n*d.KeyBytes()]
	for i := range n {
		scales[i] = 1
	}
	switch d {
	case FP8:
		unpackFP8(keys, src, n)
		stored := page[pageSize*IndexDim+4*offset:][:4*n]
		for i := range n {
			scales[i] = math.Float32frombits(binary.LittleEndian.Uint32(stored[4*i:]))
		}
	case BF16:
		unpackBF16(keys, src, n)
	default:
		for t := range n {
			for i := range IndexDim {
				keys[t/16*keyPanel+i*16+t%16] = math.Float32frombits(binary.LittleEndian.Uint32(src[4*(t*IndexDim+i):]))
			}
		}
	}
}

func unpackFP8Go(keys []float32, src []byte, n int) {
	for t := range n {
		for i := range IndexDim {
			keys[t/16*keyPanel+i*16+t%16] = fromFP8(src[t*IndexDim+i])
		}
	}
}

func unpackBF16Go(keys []float32, src []byte, n int) {
	for t := range n {
		for i := range IndexDim {
			keys[t/16*keyPanel+i*16+t%16] = fromBF16(binary.LittleEndian.Uint16(src[2*(t*IndexDim+i):]))
		}
	}
}

const fp8Max = 448 // the largest e4m3fn number

// toFP8 rounds to e4m3fn, to nearest, ties to even; what is beyond 448 becomes
// 448, and what isn't a number becomes 0x7f.
func toFP8(x float32) byte {
	bits := math.Float32bits(x)
	sign, size := byte(bits>>24)&0x80, bits&0x7fffffff
	switch {
	case size > 0x7f800000:
		return 0x7f
	case size >= 0x43e00000: // 448
		return sign | 0x7e
	case size < 0x3c800000: // 2^-6, the smallest normal: steps of 2^-9
		return sign | byte(math.RoundToEven(float64(math.Float32frombits(size))*512))
	default:
		// Round the mantissa from 23 to 3 bits; a carry goes into the exponent.
		size += 1<<19 - 1 + size>>20&1
		return sign | byte(size>>20-120<<3)
	}
}

// fromFP8 reads e4m3fn, but for the two codes that aren't numbers: they read as
// 480 and -480.
func fromFP8(b byte) float32 {
	bits := uint32(b&0x80)<<24 | uint32(b&0x7f)<<20
	return math.Float32frombits(bits) * (1 << 120)
}

// toBF16 rounds to nearest, ties to even.
func toBF16(x float32) uint16 {
	bits := math.Float32bits(x)
	if bits&0x7fffffff > 0x7f800000 {
		return uint16(bits>>16) | 0x40 // keep it not a number
	}
	return uint16((bits + 0x7fff + bits>>16&1) >> 16)
}

func fromBF16(h uint16) float32 { return math.Float32frombits(uint32(h) << 16) }

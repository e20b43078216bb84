package model

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"testing"
)

func random(rng *rand.Rand, n int) []float32 {
	x := make([]float32, n)
	for i := range x {
		x[i] = float32(rng.NormFloat64())
	}
	return x
}

// sameBits reports the first difference, which may be only in the sign of zero.
func sameBits(t *testing.T, what string, got, want []float32) {
	t.Helper()
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			t.Fatalf("%s: element %d is %g (%#x), want %g (%#x)", what, i,
				got[i], math.Float32bits(got[i]), want[i], math.Float32bits(want[i]))
		}
	}
}

// The kernels that the machine chooses, which are assembly on amd64, against
// those in Go. With the build tag purego this compares Go with itself.
func TestKernels(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, in := range []int{PlainDim, LatentDim, Width, HiddenDim} {
		for rows := 1; rows <= 27; rows++ {
			const cStride, pad = 48, 7
			x, w := random(rng, rows*(in+pad)), random(rng, in*panel)
			got, want := random(rng, rows*cStride), []float32(nil)
			want = slices.Clone(got)
			matmulPanel(got[3:], x, w, in, rows, cStride, in+pad)
			matmulPanelGo(want[3:], x, w, in, rows, cStride, in+pad)
			sameBits(t, fmt.Sprintf("matmulPanel, %d rows of %d", rows, in), got, want)
		}
	}
	for _, n := range []int{IndexDim, LatentDim, Width, HiddenDim} {
		for range 20 {
			x, g := random(rng, n), random(rng, n)
			got, want := make([]float32, n), make([]float32, n)
			rmsNorm(got, x, g)
			rmsNormGo(want, x, g)
			sameBits(t, fmt.Sprintf("rmsNorm %d", n), got, want)
			add(got, x)
			addGo(want, x)
			sameBits(t, fmt.Sprintf("add %d", n), got, want)
			for i := range x {
				x[i] *= float32(math.Exp(3 * rng.NormFloat64()))
			}
			got, want = slices.Clone(x), slices.Clone(x)
			siluMul(got, g)
			siluMulGo(want, g)
			sameBits(t, fmt.Sprintf("siluMul %d", n), got, want)
		}
	}
	for n := panel; n <= 2*keyTokens; n += panel {
		q, w, keys, scales := random(rng, IndexHeads*IndexDim), random(rng, IndexHeads), random(rng, n*IndexDim), random(rng, n)
		scales[rng.IntN(n)] = float32(math.NaN())
		scales[rng.IntN(n)] = float32(math.Inf(1))
		got, want := make([]float32, n), make([]float32, n)
		indexScore(got, q, w, keys, scales, n)
		indexScoreGo(want, q, w, keys, scales, n)
		sameBits(t, fmt.Sprintf("indexScore %d", n), got, want)

		gotMask, wantMask := make([]byte, n/8), make([]byte, n/8)
		for _, least := range append(got, 0, float32(math.Inf(-1))) {
			gotCount, wantCount := atLeast(gotMask, got, least), atLeastGo(wantMask, got, least)
			if gotCount != wantCount || !slices.Equal(gotMask, wantMask) {
				t.Fatalf("atLeast %g: %d %x, want %d %x", least, gotCount, gotMask, wantCount, wantMask)
			}
		}

		src := make([]byte, 2*n*IndexDim)
		for i := range src {
			src[i] = byte(rng.Uint32())
		}
		gotKeys, wantKeys := make([]float32, n*IndexDim), make([]float32, n*IndexDim)
		unpackFP8(gotKeys, src, n)
		unpackFP8Go(wantKeys, src, n)
		sameBits(t, fmt.Sprintf("unpackFP8 %d", n), gotKeys, wantKeys)
		unpackBF16(gotKeys, src, n)
		unpackBF16Go(wantKeys, src, n)
		sameBits(t, fmt.Sprintf("unpackBF16 %d", n), gotKeys, wantKeys)
	}
	for n := 1; n <= 200; n++ {
		latent, slots := random(rng, n*RowDim), make([]int32, n)
		for i := range slots {
			slots[i] = int32(rng.IntN(n))
		}
		q := random(rng, headsRow)
		for i := range q { // some heads sharp, some flat
			q[i] *= float32(i/RowDim) / 2
		}
		got, want := make([]float32, (n+1)*Heads), make([]float32, (n+1)*Heads)
		attendScores(got, q, latent, slots, attentionScale)
		attendScoresGo(want, q, latent, slots, attentionScale)
		sameBits(t, fmt.Sprintf("attendScores %d", n), got, want)
		var gotInverse, wantInverse [Heads]float32
		softmax(got, n, &gotInverse)
		softmaxGo(want, n, &wantInverse)
		sameBits(t, fmt.Sprintf("softmax %d", n), got[:n*Heads], want[:n*Heads])
		sameBits(t, fmt.Sprintf("softmax %d, inverse", n), gotInverse[:], wantInverse[:])
		gotOut, wantOut := random(rng, Heads*LatentDim), make([]float32, Heads*LatentDim)
		attendValues(gotOut, got, latent, slots, &gotInverse)
		attendValuesGo(wantOut, want, latent, slots, &wantInverse)
		sameBits(t, fmt.Sprintf("attendValues %d", n), gotOut, wantOut)
	}
}

// fma32 against exact arithmetic, on numbers chosen so that sums cancel, tie
// and become subnormal.
func TestFMA(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	number := func() float32 {
		mantissa := rng.Uint32() & (1<<23 - 1) &^ (1<<rng.IntN(24) - 1)
		exponent := uint32(127 - 6 + rng.IntN(12))
		switch rng.IntN(8) {
		case 0:
			exponent = uint32(rng.IntN(140))
		case 1:
			exponent = 64
		}
		return math.Float32frombits(rng.Uint32()&(1<<31) | exponent<<23 | mantissa)
	}
	exact := func(x float32) *big.Float { return new(big.Float).SetPrec(2000).SetFloat64(float64(x)) }
	slow := 0
	for range 300_000 {
		a, b, c := number(), number(), number()
		if rng.IntN(3) == 0 { // half a unit in the last place of c: a tie, or nearly
			c = -float32(float64(a) * float64(b) * math.Exp2(float64(rng.IntN(50)-25)))
			if rng.IntN(2) == 0 {
				c = math.Float32frombits(math.Float32bits(c) &^ (1<<rng.IntN(23) - 1))
			}
		}
		sum := new(big.Float).SetPrec(2000).Mul(exact(a), exact(b))
		sum.Add(sum, exact(c))
		want, _ := sum.Float32()
		if s := float64(a)*float64(b) + float64(c); float32(s) != want {
			slow++
		}
		if got := fma32(a, b, c); got != want {
			t.Fatalf("fma32(%x, %x, %x) = %x, want %x", a, b, c, got, want)
		}
	}
	if slow == 0 {
		t.Error("no case needed the correction: the test doesn't test it")
	}
}

func TestExp(t *testing.T) {
	worst := 0.0
	for x := float32(-87); x < 88; x += 0.0007 {
		want := math.Exp(float64(x))
		worst = max(worst, math.Abs(float64(exp32(x))-want)/want)
	}
	if worst > 2e-7 {
		t.Errorf("exp32 is off by %.2g of its value, want at most 2e-7", worst)
	}
}

// selectTop against sorting, with many equal scores.
func TestSelectTop(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	for trial := range 2000 {
		k := 1 + rng.IntN(TopK)
		n := k + 1 + rng.IntN(MaxContext-k-8)
		scores := random(rng, roundUp(n, 8))
		coarse := rng.IntN(4) == 0
		for i := range scores {
			if coarse {
				scores[i] = float32(rng.IntN(3) - 1)
			}
			switch {
			case trial%5 == 0 && rng.IntN(3) == 0:
				scores[i] = float32(math.Inf(rng.IntN(2)*2 - 1))
			case trial%7 == 0 && rng.IntN(2) == 0:
				scores[i] = float32(math.Copysign(0, rng.NormFloat64()))
			}
		}
		order := make([]int32, n)
		for i := range order {
			order[i] = int32(i)
		}
		slices.SortStableFunc(order, func(a, b int32) int {
			switch x, y := scores[a], scores[b]; {
			case x > y:
				return -1
			case x < y:
				return 1
			}
			return 0
		})
		want := order[:k]
		slices.Sort(want)
		got := make([]int32, MaxContext)
		got = got[:selectTop(got, make([]byte, MaxContext/8), scores, n, k)]
		if !slices.Equal(got, want) {
			t.Fatalf("the %d largest of %v are %v, got %v", k, scores[:n], want, got)
		}
	}
}

// Every e4m3fn number reads as it should and is stored as itself; what lies
// between two goes to the nearer, and from the middle to the even one.
func TestFP8(t *testing.T) {
	value := func(code int) float64 { // of codes 0 to 0x7e
		e, m := code>>3, float64(code&7)
		if e == 0 {
			return m / 512
		}
		return (1 + m/8) * math.Exp2(float64(e-7))
	}
	for code := range 0x7f {
		v := value(code)
		for _, sign := range []float64{1, -1} {
			b := byte(code)
			if sign < 0 {
				b |= 0x80
			}
			if got := fromFP8(b); float64(got) != sign*v || math.Signbit(float64(got)) != (sign < 0) {
				t.Errorf("fromFP8(%#x) = %g, want %g", b, got, sign*v)
			}
			if code == 0x7e {
				continue
			}
			middle := float32(sign * (v + value(code+1)) / 2)
			outward := float32(sign * math.Inf(1))
			even := b + byte(code&1)
			for _, test := range []struct {
				x    float32
				want byte
			}{
				{float32(sign * v), b},
				{math.Nextafter32(middle, 0), b},
				{middle, even},
				{math.Nextafter32(middle, outward), b + 1},
				{float32(sign * math.Nextafter(value(code+1), 0)), b + 1},
			} {
				if code == 0 && test.x == 0 {
					test.x = float32(math.Copysign(0, sign))
				}
				if got := toFP8(test.x); got != test.want {
					t.Errorf("toFP8(%g) = %#x, want %#x", test.x, got, test.want)
				}
			}
		}
	}
	for _, test := range []struct {
		x    float64
		want byte
	}{{449, 0x7e}, {1e30, 0x7e}, {math.Inf(1), 0x7e}, {math.Inf(-1), 0xfe}, {-1e9, 0xfe}, {math.NaN(), 0x7f}} {
		if got := toFP8(float32(test.x)); got != test.want {
			t.Errorf("toFP8(%g) = %#x, want %#x", test.x, got, test.want)
		}
	}
}

func TestBF16(t *testing.T) {
	for code := range 1 << 16 {
		h := uint16(code)
		v := fromBF16(h)
		if v != v {
			if got := fromBF16(toBF16(v)); got == got {
				t.Fatalf("toBF16(%#x, not a number) = %g", h, got)
			}
			continue
		}
		if got := toBF16(v); got != h {
			t.Fatalf("toBF16(%g) = %#x, want %#x", v, got, h)
		}
		if math.IsInf(float64(v), 0) {
			continue
		}
		middle := math.Float32bits(v) | 0x8000
		for _, test := range []struct {
			bits uint32
			want uint16
		}{{middle - 1, h}, {middle, h + h&1}, {middle + 1, h + 1}} {
			if got := toBF16(math.Float32frombits(test.bits)); got != test.want {
				t.Fatalf("toBF16(%#x) = %#x, want %#x", test.bits, got, test.want)
			}
		}
	}
}

func TestF16(t *testing.T) {
	for code := range 1 << 16 {
		sign, e, m := 1-2*float64(code>>15), code>>10&31, float64(code&1023)
		want := sign * (1024 + m) * math.Exp2(float64(e-25))
		switch {
		case e == 0:
			want = sign * m * math.Exp2(-24)
		case e == 31 && m == 0:
			want = math.Inf(int(sign))
		case e == 31:
			want = math.NaN()
		}
		if got := float64(fromF16(uint16(code))); got != want && (got == got || want == want) {
			t.Fatalf("fromF16(%#x) = %g, want %g", code, got, want)
		}
	}
}

// An index key lies where its type says, changes no other byte, and reads back
// as itself up to rounding.
func TestStoreIndexKey(t *testing.T) {
	const pageSize, offset = 32, 21
	rng := rand.New(rand.NewPCG(9, 10))
	for _, test := range []struct {
		d     IndexDType
		error float64 // relative
	}{{FP8, 1. / 16}, {BF16, 1. / 256}, {F32, 0}} {
		for _, size := range []float64{0, 1e-6, 1, 1e4} {
			key := random(rng, IndexDim)
			var largest float64
			for i := range key {
				key[i] *= float32(size)
				largest = max(largest, math.Abs(float64(key[i])))
			}
			page := make([]byte, test.d.PageBytes(pageSize))
			for i := range page {
				page[i] = 0xa5
			}
			storeIndexKey(page, test.d, pageSize, offset, key)
			n := test.d.KeyBytes()
			for i, b := range page {
				mine := i/n == offset && i < n*pageSize
				if test.d == FP8 && i >= n*pageSize {
					mine = (i-n*pageSize)/4 == offset
				}
				if !mine && b != 0xa5 {
					t.Fatalf("%v: byte %d was written", test.d, i)
				}
			}
			if test.d == FP8 {
				scale := math.Float32frombits(binary.LittleEndian.Uint32(page[n*pageSize+4*offset:]))
				if want := float32(max(1e-4, float32(largest))) / 448; scale != want {
					t.Errorf("a key of at most %g has scale %g, want %g", largest, scale, want)
				}
			}
			keys, scales := make([]float32, 16*IndexDim), make([]float32, 16)
			unpackIndexKeys(keys, scales, page, test.d, pageSize, 16, 16)
			for i, v := range key {
				got := float64(keys[i*16+offset-16]) * float64(scales[offset-16])
				allowed := math.Abs(float64(v)) * test.error
				if test.d == FP8 {
					allowed += max(1e-4, largest) / 448 / 512
				}
				if math.Abs(got-float64(v)) > allowed {
					t.Errorf("%v: %g reads as %g", test.d, v, got)
				}
			}
		}
	}
}

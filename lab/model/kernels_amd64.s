//go:build !purego

#include "textflag.h"

// The kernels of kernels.go for AVX2 and FMA. Strides are in float32s. Vector
// operands stand in Go's order: the last is the destination.

#define BROADCAST(name, bits) \
	DATA name<>+0(SB)/4, $bits  \
	DATA name<>+4(SB)/4, $bits  \
	DATA name<>+8(SB)/4, $bits  \
	DATA name<>+12(SB)/4, $bits \
	DATA name<>+16(SB)/4, $bits \
	DATA name<>+20(SB)/4, $bits \
	DATA name<>+24(SB)/4, $bits \
	DATA name<>+28(SB)/4, $bits \
	GLOBL name<>(SB), RODATA|NOPTR, $32

BROADCAST(one, 0x3f800000)
BROADCAST(signBit, 0x80000000)
BROADCAST(minusInfinity, 0xff800000)
BROADCAST(expMax, 0x42b00000)
BROADCAST(expMin, 0xc2aeac4f)
BROADCAST(log2e, 0x3fb8aa3b)
BROADCAST(ln2High, 0x3f318000)
BROADCAST(ln2Low, 0xb95e8083)
BROADCAST(expC0, 0x39506967)
BROADCAST(expC1, 0x3ab743ce)
BROADCAST(expC2, 0x3c088908)
BROADCAST(expC3, 0x3d2aa9c1)
BROADCAST(expC4, 0x3e2aaaaa)
BROADCAST(expC5, 0x3f000000)
BROADCAST(exponentBias, 127)
BROADCAST(fp8Mask, 0x87f00000)
BROADCAST(fp8Scale, 0x7b800000) // 2^120: from e4m3's exponent bias to float32's

DATA epsilon32<>+0(SB)/4, $0x358637bd // 1e-6
GLOBL epsilon32<>(SB), RODATA|NOPTR, $4

// EXP replaces Y0 by e to the Y0. It uses Y1, Y2 and Y3.
#define EXP \
	VMINPS expMax<>(SB), Y0, Y0                    \
	VMAXPS expMin<>(SB), Y0, Y0                    \
	VMULPS log2e<>(SB), Y0, Y1                     \
	VROUNDPS $0, Y1, Y1                            \
	VFNMADD231PS ln2High<>(SB), Y1, Y0             \
	VFNMADD231PS ln2Low<>(SB), Y1, Y0              \
	VMOVUPS expC0<>(SB), Y2                        \
	VFMADD213PS expC1<>(SB), Y0, Y2                \
	VFMADD213PS expC2<>(SB), Y0, Y2                \
	VFMADD213PS expC3<>(SB), Y0, Y2                \
	VFMADD213PS expC4<>(SB), Y0, Y2                \
	VFMADD213PS expC5<>(SB), Y0, Y2                \
	VMULPS Y0, Y0, Y3                              \
	VFMADD213PS Y0, Y3, Y2                         \
	VADDPS one<>(SB), Y2, Y2                       \
	VCVTPS2DQ Y1, Y1                               \
	VPADDD exponentBias<>(SB), Y1, Y1              \
	VPSLLD $23, Y1, Y1                             \
	VMULPS Y1, Y2, Y0

// ROW adds one row's product at k: address of x[row][k], its two accumulators.
#define ROW(address, low, high) \
	VBROADCASTSS address, Y14  \
	VFMADD231PS Y12, Y14, low  \
	VFMADD231PS Y13, Y14, high

#define SIX(k) \
	VMOVUPS k*64(R11), Y12          \
	VMOVUPS k*64+32(R11), Y13       \
	ROW(k*4(R13), Y0, Y1)           \
	ROW(k*4(R13)(R8*1), Y2, Y3)     \
	ROW(k*4(R13)(R8*2), Y4, Y5)     \
	ROW(k*4(R9), Y6, Y7)            \
	ROW(k*4(R9)(R8*1), Y8, Y9)      \
	ROW(k*4(R9)(R8*2), Y10, Y11)

// func matmulPanelAVX2(c, x, w *float32, in, rows, cStride, xStride int)
//
// Six rows at a time; where the rows don't divide by six, the last six
// overlap those before and are computed again. in is a multiple of 4.
TEXT ·matmulPanelAVX2(SB), NOSPLIT, $0-56
	MOVQ c+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ w+16(FP), DX
	MOVQ in+24(FP), CX
	MOVQ rows+32(FP), R12
	MOVQ cStride+40(FP), R10
	MOVQ xStride+48(FP), R8
	SHLQ $2, R10
	SHLQ $2, R8
	CMPQ R12, $6
	JLT  single

six:
	MOVQ SI, R13
	LEAQ (SI)(R8*2), R9
	ADDQ R8, R9
	MOVQ DX, R11
	MOVQ CX, BX
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
	VXORPS Y2, Y2, Y2
	VXORPS Y3, Y3, Y3
	VXORPS Y4, Y4, Y4
	VXORPS Y5, Y5, Y5
	VXORPS Y6, Y6, Y6
	VXORPS Y7, Y7, Y7
	VXORPS Y8, Y8, Y8
	VXORPS Y9, Y9, Y9
	VXORPS Y10, Y10, Y10
	VXORPS Y11, Y11, Y11

sixLoop:
	SIX(0)
	SIX(1)
	SIX(2)
	SIX(3)
	ADDQ $16, R13
	ADDQ $16, R9
	ADDQ $256, R11
	SUBQ $4, BX
	JNZ  sixLoop

	LEAQ (DI)(R10*2), R9
	ADDQ R10, R9
	VMOVUPS Y0, (DI)
	VMOVUPS Y1, 32(DI)
	VMOVUPS Y2, (DI)(R10*1)
	VMOVUPS Y3, 32(DI)(R10*1)
	VMOVUPS Y4, (DI)(R10*2)
	VMOVUPS Y5, 32(DI)(R10*2)
	VMOVUPS Y6, (R9)
	VMOVUPS Y7, 32(R9)
	VMOVUPS Y8, (R9)(R10*1)
	VMOVUPS Y9, 32(R9)(R10*1)
	VMOVUPS Y10, (R9)(R10*2)
	VMOVUPS Y11, 32(R9)(R10*2)

	SUBQ $6, R12
	JZ   done
	MOVQ $6, AX
	CMPQ R12, AX
	JGE  advance
	MOVQ R12, AX // rows left: step back so that the last six end with them
	MOVQ $6, R12

advance:
	MOVQ  AX, BX
	IMULQ R8, AX
	ADDQ  AX, SI
	IMULQ R10, BX
	ADDQ  BX, DI
	JMP   six

single:
	TESTQ R12, R12
	JZ    done
	MOVQ  SI, R13
	MOVQ  DX, R11
	MOVQ  CX, BX
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1

singleLoop:
	VBROADCASTSS (R13), Y14
	VFMADD231PS (R11), Y14, Y0
	VFMADD231PS 32(R11), Y14, Y1
	VBROADCASTSS 4(R13), Y14
	VFMADD231PS 64(R11), Y14, Y0
	VFMADD231PS 96(R11), Y14, Y1
	VBROADCASTSS 8(R13), Y14
	VFMADD231PS 128(R11), Y14, Y0
	VFMADD231PS 160(R11), Y14, Y1
	VBROADCASTSS 12(R13), Y14
	VFMADD231PS 192(R11), Y14, Y0
	VFMADD231PS 224(R11), Y14, Y1
	ADDQ $16, R13
	ADDQ $256, R11
	SUBQ $4, BX
	JNZ  singleLoop

	VMOVUPS Y0, (DI)
	VMOVUPS Y1, 32(DI)
	ADDQ R8, SI
	ADDQ R10, DI
	DECQ R12
	JMP  single

done:
	VZEROUPPER
	RET

// func rmsNormAVX2(dst, x, gain *float32, n int)
TEXT ·rmsNormAVX2(SB), NOSPLIT, $0-32
	MOVQ dst+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ gain+16(FP), DX
	MOVQ n+24(FP), CX
	XORQ AX, AX
	VXORPS Y0, Y0, Y0

squares:
	VMOVUPS (SI)(AX*4), Y1
	VFMADD231PS Y1, Y1, Y0
	ADDQ $8, AX
	CMPQ AX, CX
	JLT  squares

	VHADDPS Y0, Y0, Y0
	VHADDPS Y0, Y0, Y0
	VEXTRACTF128 $1, Y0, X1
	VADDSS X1, X0, X0
	VXORPS X2, X2, X2
	VCVTSI2SSQ CX, X2, X2
	VDIVSS X2, X0, X0
	VADDSS epsilon32<>(SB), X0, X0
	VSQRTSS X0, X0, X0
	VMOVSS one<>(SB), X1
	VDIVSS X0, X1, X0
	VBROADCASTSS X0, Y0
	XORQ AX, AX

scale:
	VMULPS (SI)(AX*4), Y0, Y1
	VMULPS (DX)(AX*4), Y1, Y1
	VMOVUPS Y1, (DI)(AX*4)
	ADDQ $8, AX
	CMPQ AX, CX
	JLT  scale
	VZEROUPPER
	RET

// func addAVX2(dst, x *float32, n int)
TEXT ·addAVX2(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ n+16(FP), CX
	XORQ AX, AX

loop:
	VMOVUPS (DI)(AX*4), Y0
	VADDPS (SI)(AX*4), Y0, Y0
	VMOVUPS Y0, (DI)(AX*4)
	ADDQ $8, AX
	CMPQ AX, CX
	JLT  loop
	VZEROUPPER
	RET

// func siluMulAVX2(gate, up *float32, n int)
TEXT ·siluMulAVX2(SB), NOSPLIT, $0-24
	MOVQ gate+0(FP), DI
	MOVQ up+8(FP), SI
	MOVQ n+16(FP), CX
	XORQ AX, AX

loop:
	VMOVUPS (DI)(AX*4), Y4
	VXORPS signBit<>(SB), Y4, Y0
	EXP
	VADDPS one<>(SB), Y0, Y0
	VDIVPS Y0, Y4, Y0
	VMULPS (SI)(AX*4), Y0, Y0
	VMOVUPS Y0, (DI)(AX*4)
	ADDQ $8, AX
	CMPQ AX, CX
	JLT  loop
	VZEROUPPER
	RET

// KEY adds the products of dimension d: 16 keys with 4 query heads.
#define KEY(d) \
	VMOVUPS d*64(R11), Y12          \
	VMOVUPS d*64+32(R11), Y13       \
	ROW(d*4(R13), Y0, Y1)           \
	ROW(d*4+128(R13), Y2, Y3)       \
	ROW(d*4+256(R13), Y4, Y5)       \
	ROW(d*4+384(R13), Y6, Y7)

// WEIGH adds a head's weight times relu of its products to Y8 and Y9.
#define WEIGH(h, low, high) \
	VMAXPS Y10, low, low             \
	VMAXPS Y10, high, high           \
	VBROADCASTSS h*4(BX), Y14        \
	VFMADD231PS low, Y14, Y8         \
	VFMADD231PS high, Y14, Y9

// func indexScoreAVX2(out, q, w, keys, scales *float32, n int)
TEXT ·indexScoreAVX2(SB), NOSPLIT, $0-48
	MOVQ out+0(FP), DI
	MOVQ q+8(FP), SI
	MOVQ w+16(FP), BX
	MOVQ keys+24(FP), R11
	MOVQ scales+32(FP), R9
	MOVQ n+40(FP), CX
	VXORPS Y10, Y10, Y10
	VMOVUPS minusInfinity<>(SB), Y11

tokens:
	MOVQ SI, R13
	MOVQ $8, AX
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
	VXORPS Y2, Y2, Y2
	VXORPS Y3, Y3, Y3
	VXORPS Y4, Y4, Y4
	VXORPS Y5, Y5, Y5
	VXORPS Y6, Y6, Y6
	VXORPS Y7, Y7, Y7
	VXORPS Y8, Y8, Y8
	VXORPS Y9, Y9, Y9

dimensions:
	KEY(0)
	KEY(1)
	KEY(2)
	KEY(3)
	ADDQ $16, R13
	ADDQ $256, R11
	DECQ AX
	JNZ  dimensions

	// The larger of zero and what isn't a number is zero: the second source.
	WEIGH(0, Y0, Y1)
	WEIGH(1, Y2, Y3)
	WEIGH(2, Y4, Y5)
	WEIGH(3, Y6, Y7)
	VMOVUPS (R9), Y12
	VMOVUPS 32(R9), Y13
	VFMADD213PS Y10, Y12, Y8
	VFMADD213PS Y10, Y13, Y9
	VMAXPS Y11, Y8, Y8
	VMAXPS Y11, Y9, Y9
	VMOVUPS Y8, (DI)
	VMOVUPS Y9, 32(DI)
	ADDQ $64, DI
	ADDQ $64, R9
	SUBQ $16, CX
	JNZ  tokens
	VZEROUPPER
	RET

// func atLeastAVX2(mask *byte, x *float32, n int, least float32) int
TEXT ·atLeastAVX2(SB), NOSPLIT, $0-40
	MOVQ mask+0(FP), DI
	MOVQ x+8(FP), SI
	MOVQ n+16(FP), CX
	VBROADCASTSS least+24(FP), Y1
	XORQ DX, DX

loop:
	VMOVUPS (SI), Y0
	VCMPPS $0x1d, Y1, Y0, Y0 // x >= least, quiet
	VMOVMSKPS Y0, AX
	MOVB AX, (DI)
	POPCNTL AX, AX
	ADDQ AX, DX
	ADDQ $32, SI
	INCQ DI
	SUBQ $8, CX
	JNZ  loop
	MOVQ DX, ret+32(FP)
	VZEROUPPER
	RET

// DOT4 adds the products of 8 dimensions of a cache row with 4 query heads.
#define DOT4(d) \
	VMOVUPS d*4(R11), Y4                \
	VFMADD231PS d*4(SI), Y4, Y0         \
	VFMADD231PS d*4+512(SI), Y4, Y1     \
	VFMADD231PS d*4+1024(SI), Y4, Y2    \
	VFMADD231PS d*4+1536(SI), Y4, Y3

// ahead is how many tokens before its use a row is fetched: the rows lie
// anywhere in memory.
#define ahead 8

// func attendScoresAVX2(p, q, latent *float32, slots *int32, n int, scale float32)
TEXT ·attendScoresAVX2(SB), NOSPLIT, $0-44
	MOVQ p+0(FP), DI
	MOVQ q+8(FP), SI
	MOVQ latent+16(FP), DX
	MOVQ slots+24(FP), R9
	MOVQ n+32(FP), CX
	VBROADCASTSS scale+40(FP), X8
	LEAQ -4(R9)(CX*4), R10 // the last slot

token:
	LEAQ ahead*4(R9), R12
	CMPQ R12, R10
	CMOVQGT R10, R12
	MOVLQSX (R12), R12
	SHLQ $9, R12
	ADDQ DX, R12
	PREFETCHT0 (R12)
	PREFETCHT0 64(R12)
	PREFETCHT0 128(R12)
	PREFETCHT0 192(R12)
	PREFETCHT0 256(R12)
	PREFETCHT0 320(R12)
	PREFETCHT0 384(R12)
	PREFETCHT0 448(R12)
	MOVLQSX (R9), R11
	SHLQ $9, R11
	ADDQ DX, R11
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
	VXORPS Y2, Y2, Y2
	VXORPS Y3, Y3, Y3
	DOT4(0)
	DOT4(8)
	DOT4(16)
	DOT4(24)
	DOT4(32)
	DOT4(40)
	DOT4(48)
	DOT4(56)
	DOT4(64)
	DOT4(72)
	DOT4(80)
	DOT4(88)
	DOT4(96)
	DOT4(104)
	DOT4(112)
	DOT4(120)
	VHADDPS Y1, Y0, Y0
	VHADDPS Y3, Y2, Y2
	VHADDPS Y2, Y0, Y0
	VEXTRACTF128 $1, Y0, X1
	VADDPS X1, X0, X0
	VMULPS X8, X0, X0
	VMOVUPS X0, (DI)
	ADDQ $16, DI
	ADDQ $4, R9
	DECQ CX
	JNZ  token
	VZEROUPPER
	RET

// func softmaxAVX2(p *float32, n int, inverse *float32)
//
// Two tokens at a time; an odd one is joined by one of score -Inf.
TEXT ·softmaxAVX2(SB), NOSPLIT, $0-24
	MOVQ p+0(FP), DI
	MOVQ n+8(FP), CX
	MOVQ inverse+16(FP), DX
	TESTQ $1, CX
	JZ   even
	MOVQ CX, AX
	SHLQ $4, AX
	VMOVUPS minusInfinity<>(SB), X0
	VMOVUPS X0, (DI)(AX*1)
	INCQ CX

even:
	VMOVUPS minusInfinity<>(SB), Y5
	MOVQ DI, SI
	MOVQ CX, AX

maximum:
	VMAXPS (SI), Y5, Y5
	ADDQ $32, SI
	SUBQ $2, AX
	JNZ  maximum
	VPERM2F128 $1, Y5, Y5, Y4
	VMAXPS Y4, Y5, Y5
	VXORPS Y6, Y6, Y6

sum:
	VMOVUPS (DI), Y0
	VSUBPS Y5, Y0, Y0
	EXP
	VMOVUPS Y0, (DI)
	VADDPS Y0, Y6, Y6
	ADDQ $32, DI
	SUBQ $2, CX
	JNZ  sum
	VEXTRACTF128 $1, Y6, X4
	VADDPS X4, X6, X6
	VMOVUPS one<>(SB), X4
	VDIVPS X6, X4, X4
	VMOVUPS X4, (DX)
	VZEROUPPER
	RET

// func attendValuesAVX2(out, p, latent *float32, slots *int32, n int, inverse *float32)
TEXT ·attendValuesAVX2(SB), NOSPLIT, $0-48
	MOVQ out+0(FP), DI
	MOVQ p+8(FP), SI
	MOVQ latent+16(FP), DX
	MOVQ inverse+40(FP), R10
	MOVQ $4, BX // heads

head:
	MOVQ slots+24(FP), R9
	MOVQ n+32(FP), CX
	MOVQ SI, R8
	VXORPS Y0, Y0, Y0
	VXORPS Y1, Y1, Y1
	VXORPS Y2, Y2, Y2
	VXORPS Y3, Y3, Y3
	VXORPS Y4, Y4, Y4
	VXORPS Y5, Y5, Y5
	VXORPS Y6, Y6, Y6
	VXORPS Y7, Y7, Y7
	VXORPS Y8, Y8, Y8
	VXORPS Y9, Y9, Y9
	VXORPS Y10, Y10, Y10
	VXORPS Y11, Y11, Y11

token:
	MOVLQSX (R9), R11
	SHLQ $9, R11
	ADDQ DX, R11
	VBROADCASTSS (R8), Y12
	VFMADD231PS (R11), Y12, Y0
	VFMADD231PS 32(R11), Y12, Y1
	VFMADD231PS 64(R11), Y12, Y2
	VFMADD231PS 96(R11), Y12, Y3
	VFMADD231PS 128(R11), Y12, Y4
	VFMADD231PS 160(R11), Y12, Y5
	VFMADD231PS 192(R11), Y12, Y6
	VFMADD231PS 224(R11), Y12, Y7
	VFMADD231PS 256(R11), Y12, Y8
	VFMADD231PS 288(R11), Y12, Y9
	VFMADD231PS 320(R11), Y12, Y10
	VFMADD231PS 352(R11), Y12, Y11
	ADDQ $16, R8
	ADDQ $4, R9
	DECQ CX
	JNZ  token

	VBROADCASTSS (R10), Y12
	VMULPS Y12, Y0, Y0
	VMULPS Y12, Y1, Y1
	VMULPS Y12, Y2, Y2
	VMULPS Y12, Y3, Y3
	VMULPS Y12, Y4, Y4
	VMULPS Y12, Y5, Y5
	VMULPS Y12, Y6, Y6
	VMULPS Y12, Y7, Y7
	VMULPS Y12, Y8, Y8
	VMULPS Y12, Y9, Y9
	VMULPS Y12, Y10, Y10
	VMULPS Y12, Y11, Y11
	VMOVUPS Y0, (DI)
	VMOVUPS Y1, 32(DI)
	VMOVUPS Y2, 64(DI)
	VMOVUPS Y3, 96(DI)
	VMOVUPS Y4, 128(DI)
	VMOVUPS Y5, 160(DI)
	VMOVUPS Y6, 192(DI)
	VMOVUPS Y7, 224(DI)
	VMOVUPS Y8, 256(DI)
	VMOVUPS Y9, 288(DI)
	VMOVUPS Y10, 320(DI)
	VMOVUPS Y11, 352(DI)
	ADDQ $384, DI
	ADDQ $4, SI
	ADDQ $4, R10
	DECQ BX
	JNZ  head
	VZEROUPPER
	RET

// TRANSPOSE loads 8 words of each of 8 keys, at intervals of stride bytes from
// SI, and leaves word i of all keys in Y(8+i). It uses Y0 to Y15.
#define TRANSPOSE(stride) \
	VMOVUPS 0*stride(SI), Y0        \
	VMOVUPS 1*stride(SI), Y1        \
	VMOVUPS 2*stride(SI), Y2        \
	VMOVUPS 3*stride(SI), Y3        \
	VMOVUPS 4*stride(SI), Y4        \
	VMOVUPS 5*stride(SI), Y5        \
	VMOVUPS 6*stride(SI), Y6        \
	VMOVUPS 7*stride(SI), Y7        \
	VUNPCKLPS Y1, Y0, Y8            \
	VUNPCKHPS Y1, Y0, Y9            \
	VUNPCKLPS Y3, Y2, Y10           \
	VUNPCKHPS Y3, Y2, Y11           \
	VUNPCKLPS Y5, Y4, Y12           \
	VUNPCKHPS Y5, Y4, Y13           \
	VUNPCKLPS Y7, Y6, Y14           \
	VUNPCKHPS Y7, Y6, Y15           \
	VUNPCKLPD Y10, Y8, Y0           \
	VUNPCKHPD Y10, Y8, Y1           \
	VUNPCKLPD Y11, Y9, Y2           \
	VUNPCKHPD Y11, Y9, Y3           \
	VUNPCKLPD Y14, Y12, Y4          \
	VUNPCKHPD Y14, Y12, Y5          \
	VUNPCKLPD Y15, Y13, Y6          \
	VUNPCKHPD Y15, Y13, Y7          \
	VPERM2F128 $0x20, Y4, Y0, Y8    \
	VPERM2F128 $0x20, Y5, Y1, Y9    \
	VPERM2F128 $0x20, Y6, Y2, Y10   \
	VPERM2F128 $0x20, Y7, Y3, Y11   \
	VPERM2F128 $0x31, Y4, Y0, Y12   \
	VPERM2F128 $0x31, Y5, Y1, Y13   \
	VPERM2F128 $0x31, Y6, Y2, Y14   \
	VPERM2F128 $0x31, Y7, Y3, Y15

// FP8 stores the 4 dimensions from d that are the bytes of word's lanes. A
// shift to the right that keeps the sign leaves exponent and mantissa where a
// float32 has them.
#define FP8(word, d) \
	VPSLLD $24, word, Y0             \
	VPSLLD $16, word, Y1             \
	VPSLLD $8, word, Y2              \
	VPSRAD $4, Y0, Y0                \
	VPSRAD $4, Y1, Y1                \
	VPSRAD $4, Y2, Y2                \
	VPSRAD $4, word, Y3              \
	VPAND Y4, Y0, Y0                 \
	VPAND Y4, Y1, Y1                 \
	VPAND Y4, Y2, Y2                 \
	VPAND Y4, Y3, Y3                 \
	VMULPS Y5, Y0, Y0                \
	VMULPS Y5, Y1, Y1                \
	VMULPS Y5, Y2, Y2                \
	VMULPS Y5, Y3, Y3                \
	VMOVUPS Y0, d*64(DI)             \
	VMOVUPS Y1, d*64+64(DI)          \
	VMOVUPS Y2, d*64+128(DI)         \
	VMOVUPS Y3, d*64+192(DI)

// NEXT8 moves DI to the next 8 tokens: the other half of a panel of 16, or the
// next panel, 32*64 bytes on. R8 alternates between the two steps.
#define NEXT8 \
	ADDQ R8, DI      \
	NEGQ R8          \
	ADDQ $2048, R8

// func unpackFP8AVX2(dst *float32, src *byte, n int)
TEXT ·unpackFP8AVX2(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVQ $32, R8

loop:
	TRANSPOSE(32)
	VMOVUPS fp8Mask<>(SB), Y4
	VMOVUPS fp8Scale<>(SB), Y5
	FP8(Y8, 0)
	FP8(Y9, 4)
	FP8(Y10, 8)
	FP8(Y11, 12)
	FP8(Y12, 16)
	FP8(Y13, 20)
	FP8(Y14, 24)
	FP8(Y15, 28)
	ADDQ $256, SI
	NEXT8
	SUBQ $8, CX
	JNZ  loop
	VZEROUPPER
	RET

// BF16 stores the 2 dimensions from d that are the halves of word's lanes.
#define BF16(word, d) \
	VPSLLD $16, word, Y0             \
	VPSRLD $16, word, Y1             \
	VPSLLD $16, Y1, Y1               \
	VMOVUPS Y0, d*64(DI)             \
	VMOVUPS Y1, d*64+64(DI)

// func unpackBF16AVX2(dst *float32, src *byte, n int)
TEXT ·unpackBF16AVX2(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX
	MOVQ $32, R8

loop:
	TRANSPOSE(64)
	BF16(Y8, 0)
	BF16(Y9, 2)
	BF16(Y10, 4)
	BF16(Y11, 6)
	BF16(Y12, 8)
	BF16(Y13, 10)
	BF16(Y14, 12)
	BF16(Y15, 14)
	ADDQ $32, SI
	TRANSPOSE(64)
	BF16(Y8, 16)
	BF16(Y9, 18)
	BF16(Y10, 20)
	BF16(Y11, 22)
	BF16(Y12, 24)
	BF16(Y13, 26)
	BF16(Y14, 28)
	BF16(Y15, 30)
	ADDQ $480, SI
	NEXT8
	SUBQ $8, CX
	JNZ  loop
	VZEROUPPER
	RET

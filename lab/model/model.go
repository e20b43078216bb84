// Package model is the lab's language model: a small decoder with latent
// attention and a sparse indexer, computed on the CPU from cache pages that the
// caller owns. Its API may change.
//
// # Arithmetic
//
// All sums are float32, in an order that depends on the row alone: not on what
// else is in the batch, the chunk size, the page size, the pages' numbers or
// the number of workers. So the logits of a row are the same bits in all these
// cases, and on every machine: the assembly kernels (amd64 with AVX2) and the
// plain Go ones (elsewhere, or with the build tag purego; about 70 times slower)
// agree bit for bit.
//
// # Formulas
//
// A matrix W is [out, in], row-major; W h is W times the column h. There are no
// biases. Names in brackets are tensors of the weights file, N a layer from 0.
//
//	rms(x, g)  = x / sqrt(mean(x*x) + 1e-6) * g
//	rope(x, p) : 32 values, half-split. For j in 0..15: a = x[j], b = x[j+16],
//	             angle = p * 10000^(-j/16), result[j] = a cos - b sin,
//	             result[j+16] = b cos + a sin. Cosines and sines are
//	             computed in float64 and then rounded to float32.
//	silu(x)    = x / (1 + exp(-x))
//
// Input, position t from 0, tokens before the first are id 0 (whose rows are
// learned like any other):
//
//	x = E0[token t] + E1[token t-1] + E2[token t-2]     [embed.0] [embed.1] [embed.2]: V x 192
//
// Each of the 4 layers, with h = rms(x, [layers.N.attn.norm]):
//
//	q     = Wq h                  [layers.N.attn.q] 320 x 192; head i has values 80i..80i+79:
//	                              48 plain, then 32 rotary
//	kv    = Wkv h                 [layers.N.attn.kv] 128 x 192: 96 latent, then 32 rotary
//	c     = rms(kv[0:96], g)      [layers.N.attn.kv_norm] 96
//	r     = rope(kv[96:128], t)   one rotary key for all heads; c and r are the token's cache row
//	k_i   = Wuk[48i:48i+48] c     [layers.N.attn.k_up] 192 x 96
//	v_i   = Wuv[48i:48i+48] c     [layers.N.attn.v_up] 192 x 96
//	a_i(s) = (q_i[0:48] . k_i(s) + rope(q_i[48:80], t) . r(s)) / sqrt(80)
//	o_i   = sum over s in S of softmax_S(a_i)(s) v_i(s)
//	x     = x + Wo [o_0 o_1 o_2 o_3]    [layers.N.attn.o] 192 x 192
//
//	h     = rms(x, g)                             [layers.N.mlp.norm] 192
//	x     = x + Wdown (silu(Wgate h) * (Wup h))   [layers.N.mlp.gate] [layers.N.mlp.up] 512 x 192,
//	                                              [layers.N.mlp.down] 192 x 512
//
// S, the tokens that t may read, is all s <= t if there are at most 64 of them
// (and always in dense mode); else t itself and the 63 others of the largest
// score, the lower position first where scores are equal. The score uses the
// same h as the attention:
//
//	iq    = Wiq h, rope(iq_i, t) for each head     [layers.N.index.q] 128 x 192; 4 heads of 32
//	ik    = rope(rms(Wik h, g), t)                 [layers.N.index.k] 32 x 192, [layers.N.index.k_norm] 32
//	iw    = Wiw h                                  [layers.N.index.w] 4 x 192
//	score(t, s) = sum over i of iw_i relu(iq_i(t) . ik(s)) / sqrt(32)
//
// Output:
//
//	logits = Whead rms(x, g)      [norm] 192, [head] V x 192
//
// The index keys are read as they are stored: fp8 (e4m3fn, round to nearest
// even, with one float32 scale a token, max(1e-4, max|ik|)/448, where the
// stored value is ik/scale), bf16 (round to nearest even) or float32, unrounded,
// which exists for comparison with other implementations.
//
// Attention is computed on the latent itself: Wuk is applied to the query
// instead of to every key, and Wuv to the weighted sum of latents. The formulas
// above are equal to this up to rounding.
//
// # Weights
//
// A safetensors file with exactly the tensors above, each F32, F16 or BF16;
// whatever the file holds is the reference, converted exactly to float32.
//
// # Recorded logits
//
// testdata/reference.json, made by another implementation from the same file of
// weights with index keys in float32, holds
// {"cases": [{"name": "...", "dense": false, "tokens": [...], "positions": [...],
// "logits": [[V numbers] for each position]}]}. A row agrees if its largest
// difference is at most 1e-4 of its largest logit in size.
package model

// The model's fixed shape. Only the vocabulary comes from the weights.
const (
	Layers     = 4
	Width      = 192
	Heads      = 4
	PlainDim   = 48                    // of a head's query: not rotated
	RotaryDim  = 32                    // of a head's query, of the shared key, of all index vectors
	QueryDim   = PlainDim + RotaryDim  // of a head
	LatentDim  = 96                    // what keys and values are made from
	RowDim     = LatentDim + RotaryDim // a token's cache row, in float32s
	HiddenDim  = 512                   // of the MLP
	IndexHeads = 4
	IndexDim   = 32   // of an index query head and of an index key
	TopK       = 64   // tokens that attention reads
	MaxContext = 1024 // positions 0 to MaxContext-1

	epsilon = 1e-6 // of rms
)

// Cache is the paged memory that Forward reads and writes. The caller owns it
// and chooses the pages; a forward pass touches only the slots and page tables
// named by its batch. Slot s is token s%PageSize of page s/PageSize.
type Cache struct {
	PageSize   int // tokens; a multiple of 16
	IndexDType IndexDType
	Latent     [Layers][]float32 // slot s at [s*RowDim, (s+1)*RowDim): latent, then rotary key
	Index      [Layers][]byte    // page p at [p*PageBytes, (p+1)*PageBytes): keys, then scales; little endian

	// Wait, if there is one, is called by Forward's own goroutine before it
	// touches a layer's entries: whoever writes entries beside the forward pass
	// has to be done with that layer when Wait returns.
	Wait func(layer int)
}

// Row is one token of one sequence in a batch.
type Row struct {
	Token        int32
	Prev1, Prev2 int32 // the tokens at Position-1 and Position-2; 0 where there is none
	Position     int32
	Slot         int32 // where the row's cache entry is written. Padding rows use slot 0
	Table        int32 // its sequence's page table: an index into Batch.Tables
}

// Batch is what one forward pass computes: rows of many sequences, prefill
// chunks and decode rows mixed, in any order; it is faster when a sequence's
// rows stand together. The cache entries of all positions before a row's own
// must have been written, by an earlier pass or by rows of the same batch.
type Batch struct {
	Rows   []Row
	Tables [][]int32 // Tables[i][p] is the page that holds positions p*PageSize to (p+1)*PageSize-1
	Logits []int32   // the rows whose logits are wanted
}

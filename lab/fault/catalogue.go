package fault

import "fmt"

// Fault is one deliberate bug of the lab.
type Fault uint8

// The catalogue. Each is one visible if where the bug would be.
const (
	CaptureAlias Fault = iota
	StaleIndexK
	HostStride
	TokenGranularGeometry
	ScatterTemporaries
	MissingLayerWait
	EarlyRelease
	RankLocalGate
	EarlySuccess
	PageShare
	ParserDrop
	FirstTokenSwap
	Poison
	SlowDecay
	DepthFive
	BatchNumerics
	count
)

// Entry is what is told about a fault.
type Entry struct {
	Fault       Fault
	Name        string // what --fault takes
	Summary     string // what is wrong, in a line
	Explanation string // a paragraph
	From        string // where it was seen
}

// Catalogue lists every fault.
func Catalogue() []Entry { return catalogue[:] }

// String is the fault's name.
func (f Fault) String() string {
	if f >= count {
		return fmt.Sprintf("Fault(%d)", uint8(f))
	}
	return catalogue[f].Name
}

const incident = "the incident"

var catalogue = [count]Entry{
	{
		CaptureAlias, "capture-alias", "a captured step reuses the indexer's query buffer before its reader is done",
		"In a captured decode step the indexer runs on an alternate stream beside the main one, and all buffers share one " +
			"arena. The buffer that the indexer's reader takes its query from is given back when the reader has been recorded, " +
			"before the main stream waits for it. A buffer that the main stream needs next may get the same memory, and " +
			"whichever stream is late destroys what the other wrote. Eager steps give each buffer its own memory; on one stream " +
			"the recorded order is the real one; fp8's query is too small for the main stream's next buffer; and at batch 1 all " +
			"buffers are too small to be shared.",
		incident + "'s root cause; sglang 36547",
	},
	{
		StaleIndexK, "stale-index-k", "a page restored from the host brings its KV but not its index-K",
		"The host tier mirrors each kind of state in a pool of its own. When pages come back to the device, the latent rows " +
			"are copied and the index keys are not, so the indexer scores the tokens by what the device pages held before. " +
			"Attention then reads the right rows of the wrong tokens.",
		incident + "; sglang 39830, 38031",
	},
	{
		HostStride, "host-stride", "host index-K rows are sized for fp8 while the device holds bf16",
		"The host pool of index keys is laid out for the bytes that a token has in fp8. With bf16 on the device, rows are " +
			"copied with the wrong stride: neighbours overlap in host memory and what comes back is cut from several pages.",
		incident,
	},
	{
		TokenGranularGeometry, "token-granular-geometry", "the token-granular copy uses the latent pool's geometry for every pool",
		"There are two copy routines: one of whole pages, and one of single tokens, taken when the number of indices isn't a " +
			"multiple of the page size. The second has the latent pool's bytes a token written into it and uses them for the " +
			"index keys as well. Whether it is ever taken for that pool is a question for a counter, not for reading.",
		incident + "; sglang 24880",
	},
	{
		ScatterTemporaries, "scatter-temporaries", "the scatter store is captured with temporaries",
		"The scatter store of bf16 index keys first computes where each key goes and then writes. Captured, the places are " +
			"computed once, at capture, from its dummy inputs, and are not part of the recording: each replay writes to the " +
			"stale places and the real ones keep what they had. It is dead code unless a flag selects the scatter store; by " +
			"default the fused one runs.",
		incident + "'s most detailed wrong hypothesis",
	},
	{
		MissingLayerWait, "missing-layer-wait", "a reader doesn't wait for its layer's load",
		"Pages come back from the host layer by layer while the forward pass runs, and each layer's readers wait until their " +
			"layer has come. One reader doesn't wait, and computes from what the page held before whenever the load is slower " +
			"than the pass.",
		"sglang 22811",
	},
	{
		EarlyRelease, "early-release", "an abort frees pages while the transfer still writes them",
		"A request that is aborted in the middle of its transfer gives its pages back at once. The writer on the other side " +
			"doesn't know and goes on. Who is given the pages next finds another request's rows in them.",
		"sglang 35049",
	},
	{
		RankLocalGate, "rank-local-gate", "after a mass abort a rank skips a collective on local state",
		"Before each collective a rank looks at its own queue and skips the call when nothing is left in it. After a mass " +
			"abort the ranks' queues differ for a step: some enter the collective, the others idle, and all wait for ever while " +
			"the health check, which needs none of them, says ok.",
		incident + "; sglang 36928",
	},
	{
		EarlySuccess, "early-success", "a transfer of several components reports success at the first",
		"A request's state travels in components: latent rows, index keys, metadata. Each arrival is noted by the rank that " +
			"sent it, not by component, so the first makes the transfer look complete, and decoding starts on pages whose other " +
			"parts are still on their way.",
		"sglang 39846",
	},
	{
		PageShare, "page-share", "a page freed once too often is shared by two sessions",
		"A page that two holders share is given back by one of them twice. It counts as free while the other still reads it, " +
			"and the next request writes its own tokens there: one session's text turns up in another.",
		"mlx-lm 965",
	},
	{
		ParserDrop, "parser-drop", "the stream's end drops an unfinished tool call",
		"The streaming parser holds text back while it may still become a tool call. When the reply ends in the middle of " +
			"one, what was held back is thrown away: the client sees neither a call nor the text.",
		"SGLang's lenient parser",
	},
	{
		FirstTokenSwap, "first-token-swap", "under overlap a request gets another's first token",
		"In the overlap loop a step's results are handled while the next step runs. The first tokens of two requests that " +
			"were prefilled together are handed out by the order of the newer batch, and change places.",
		"sglang 17259",
	},
	{
		Poison, "poison", "one event turns all later output into one repeated token until restart",
		"A single bad number reaches state that all requests share. From then on each reply is one token over and over, and " +
			"only a restart helps. Requests aren't independent: one failure makes all later ones.",
		"vllm 53480",
	},
	{
		SlowDecay, "slow-decay", "accuracy falls with the number of requests served",
		"Each request leaves a little damage behind, so the share of wrong replies grows with how many were served. A short " +
			"test of a fresh server finds nothing.",
		"a report on SGLang's disaggregated prefill",
	},
	{
		DepthFive, "depth-five", "only one middle value of a numeric flag fails",
		"A numeric flag works at its lowest and its highest values and fails at exactly 5. A search that tries the two ends " +
			"calls the flag innocent, and so does one that walks away from the failing value in large steps.",
		"sglang 33800",
	},
	{
		BatchNumerics, "batch-numerics", "not a bug: sums are split by batch size",
		"A sum is cut into as many parts as suit the batch, so the last bits of the logits, and with them the greedy text, " +
			"change with the load. Nothing is wrong with the text. A tool that calls this corruption isn't to be believed.",
		"vllm 39146",
	},
}

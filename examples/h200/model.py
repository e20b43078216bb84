"""The lab's model in PyTorch, computed from cache pages; lab/model/model.go has the formulas.

R is the number of rows (tokens, of any sequences) of a forward pass, P the pages of a page table. All arithmetic is
float32; only index keys are rounded, when they are stored.
"""

import collections
import json
import math
import struct

import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, PLAIN, ROTARY, LATENT = 4, 192, 4, 48, 32, 96
INDEX_HEADS, INDEX, TOP = 4, 32, 64
CONTEXT = 1024
FP8_MAX = 448

# A row of a pass's input: a token, the two before it, its position, the slot of its cache entry, then its sequence's
# page table. Slot s is token s % page_size of page s // page_size. Page 0 belongs to padding rows.
TOKENS, POSITION, SLOT, TABLE = slice(0, 3), 3, 4, 5


def load(path, device):
    """A safetensors file as tensors by name, in float32."""
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    with open(path, "rb") as f:
        data = bytearray(f.read())
    (size,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + size])
    header.pop("__metadata__", None)
    tensors = {}
    for name, t in header.items():
        low, high = t["data_offsets"]
        flat = torch.frombuffer(data, dtype=torch.uint8, offset=8 + size + low, count=high - low)
        tensors[name] = flat.clone().view(kinds[t["dtype"]]).view(t["shape"]).to(device, torch.float32)
    return tensors


def rms(x, gain):
    return F.rms_norm(x, gain.shape, gain, 1e-6)


def rotation(device):
    """Cosines and sines by position, [CONTEXT, 1, ROTARY / 2] each, made in float64."""
    half = ROTARY // 2
    exponent = -torch.arange(half, dtype=torch.float64) / half
    angle = torch.arange(CONTEXT, dtype=torch.float64)[:, None, None] * 10000**exponent
    return angle.cos().float().to(device), angle.sin().float().to(device)


def rope(x, turn):
    """x is [R, heads, ROTARY]; turn has its rows' cosines and sines."""
    a, b = x.chunk(2, -1)
    cos, sin = turn
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Layer:
    """A layer's weights and its part of the cache."""

    def __init__(self, weights, prefix, pages, page_size, index_dtype, device):
        w = {name.removeprefix(prefix): t for name, t in weights.items() if name.startswith(prefix)}
        self.attn_norm, self.q, self.kv, self.kv_norm, self.o = (
            w[f"attn.{name}"] for name in ("norm", "q", "kv", "kv_norm", "o")
        )
        self.k_up = w["attn.k_up"].view(HEADS, PLAIN, LATENT)
        self.v_up = w["attn.v_up"].view(HEADS, PLAIN, LATENT)
        self.mlp_norm, self.gate, self.up, self.down = (w[f"mlp.{name}"] for name in ("norm", "gate", "up", "down"))
        self.index_q, self.index_k, self.index_k_norm, self.index_w = (
            w[f"index.{name}"] for name in ("q", "k", "k_norm", "w")
        )
        # Index keys are bytes in fp8, since few operations take that type.
        kind = torch.uint8 if index_dtype == "fp8" else torch.bfloat16
        self.latent = torch.zeros(pages * page_size, LATENT + ROTARY, device=device)
        self.keys = torch.zeros(pages, page_size, INDEX, dtype=kind, device=device)
        self.scales = torch.zeros(pages, page_size, device=device)  # of fp8 keys


class Model:
    """The weights, the cache and the forward pass.

    hold_query: keep the indexer's query until the streams have joined. Without it, a captured pass has the incident's
    bug: see index. keep_queries: keep every query, to be looked at after the pass; captured ones are kept for good.
    """

    def __init__(
        self, weights, *, device, pages, page_size, index_dtype, read_rows, hold_query=False, keep_queries=False
    ):
        self.device, self.page_size, self.index_dtype = device, page_size, index_dtype
        self.read_rows, self.hold_query, self.keep_queries = read_rows, hold_query, keep_queries
        self.embed = [weights[f"embed.{i}"] for i in range(3)]
        self.norm, self.head = weights["norm"], weights["head"]
        self.layers = [Layer(weights, f"layers.{n}.", pages, page_size, index_dtype, device) for n in range(LAYERS)]
        self.cos, self.sin = rotation(device)
        self.span = torch.arange(CONTEXT // page_size * page_size, device=device)
        self.counts = collections.Counter()  # of what a launch of a store or a reader is: both run once a layer
        self.queries = []  # of the last pass's layers, with keep_queries
        self.chosen = None  # if it is a list, each pass appends what each of its layers reads

    @property
    def table_pages(self):
        return CONTEXT // self.page_size

    def forward(self, rows, wanted=None, alternate=None):
        """The next token of each of the wanted rows (default: all), greedy. rows is [R, TABLE + P], int64.

        Cache entries of all positions before a row's own are there or are made by rows of the same pass. alternate is
        the stream that the indexer runs on beside the current one.
        """
        tokens, position = rows[:, TOKENS], rows[:, POSITION]
        turn = self.cos[position], self.sin[position]
        x = sum(F.embedding(tokens[:, i], table) for i, table in enumerate(self.embed))
        self.queries = []
        for w in self.layers:
            x = x + F.linear(self.attention(w, rms(x, w.attn_norm), rows, turn, alternate), w.o)
            h = rms(x, w.mlp_norm)
            x = x + F.linear(F.silu(F.linear(h, w.gate)) * F.linear(h, w.up), w.down)
        if wanted is not None:
            x = x[wanted]
        return F.linear(rms(x, self.norm), self.head).argmax(-1)

    def attention(self, w, h, rows, turn, alternate):
        """The heads' outputs, [R, HEADS * PLAIN]. Keys and values stay latent: k_up is applied to the query."""
        self.store_index_keys(w, h, rows[:, SLOT], turn)
        chosen, held = self.index(w, h, rows, turn, alternate)
        kv = F.linear(h, w.kv)
        latent, shared = rms(kv[:, :LATENT], w.kv_norm), rope(kv[:, None, LATENT:], turn)[:, 0]
        w.latent.index_copy_(0, rows[:, SLOT], torch.cat((latent, shared), -1))
        q = F.linear(h, w.q).view(-1, HEADS, PLAIN + ROTARY)
        absorbed = torch.einsum("rhd,hdl->rhl", q[..., :PLAIN], w.k_up)
        query = torch.cat((absorbed, rope(q[..., PLAIN:], turn)), -1)
        if alternate is not None:
            torch.cuda.current_stream().wait_stream(alternate)
        del held  # from here on the main stream comes after all that the alternate one has read
        if self.chosen is not None:
            self.chosen.append(chosen)

        slots = rows[:, TABLE:].gather(1, chosen // self.page_size) * self.page_size + chosen % self.page_size
        read = w.latent[slots]  # [R, TOP, LATENT + ROTARY]
        logits = query @ read.transpose(1, 2) / math.sqrt(PLAIN + ROTARY)
        logits = logits.masked_fill((chosen > rows[:, POSITION, None])[:, None], -math.inf)
        mixed = logits.softmax(-1) @ read[..., :LATENT]
        return torch.einsum("rhl,hdl->rhd", mixed, w.v_up).reshape(-1, HEADS * PLAIN)

    def store_index_keys(self, w, h, slots, turn):
        """Rounds the rows' index keys into their slots."""
        self.counts["store", self.index_dtype] += 1
        keys = rope(rms(F.linear(h, w.index_k), w.index_k_norm)[:, None], turn)[:, 0]
        if self.index_dtype == "bf16":
            w.keys.view(-1, INDEX).index_copy_(0, slots, keys.bfloat16())
            return
        scale = keys.abs().amax(-1).clamp_min(1e-4) / FP8_MAX
        rounded = (keys / scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
        w.keys.view(-1, INDEX).index_copy_(0, slots, rounded)
        w.scales.view(-1).index_copy_(0, slots, scale)

    def index(self, w, h, rows, turn, alternate):
        """Which positions each row reads, [R, TOP], and what must be kept until the streams have joined.

        The incident's bug is in what this function lets go. The query is the main stream's memory. When the last
        reference to it is dropped, the allocator gives that memory to whatever the main stream asks for next. That is
        right for a reader on the same stream: it comes first. The alternate stream's reader may come later, and then
        it reads what the main stream has put there since. In eager mode there is no alternate stream.
        """
        query = rope(F.linear(h, w.index_q).view(-1, INDEX_HEADS, INDEX), turn)
        if self.keep_queries:
            self.queries.append(query)
        if alternate is None:
            return self.choose(w, h, query, rows), None
        alternate.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(alternate):
            chosen = self.choose(w, h, query, rows)
        return chosen, query if self.hold_query else None

    def choose(self, w, h, query, rows):
        """The rows' own positions and the TOP - 1 others of the largest scores, of equal ones the lower first."""
        read = self.read_bf16 if self.index_dtype == "bf16" else self.read_fp8
        dots = read(w, query, rows[:, TABLE:])
        scores = (dots.relu() * F.linear(h, w.index_w)[:, :, None]).sum(1) / math.sqrt(INDEX)
        position = rows[:, POSITION, None]
        scores = scores.masked_fill(self.span > position, -math.inf).masked_fill(self.span == position, math.inf)
        return scores.sort(dim=-1, descending=True, stable=True).indices[:, :TOP]

    def read_bf16(self, w, query, tables):
        """[R, INDEX_HEADS, P * page_size]: the query's products with all keys.

        The keys are staged in float32, for a few rows at a time since that takes much memory. So most of the query is
        read late.
        """
        self.counts["read", "bf16"] += 1
        dots = query.new_empty(len(query), INDEX_HEADS, len(self.span))
        for low in range(0, len(query), self.read_rows):
            part = slice(low, low + self.read_rows)
            staged = w.keys[tables[part]].flatten(1, 2).float()
            torch.bmm(query[part], staged.transpose(1, 2), out=dots[part])
        return dots

    def read_fp8(self, w, query, tables):
        """As read_bf16, for keys with scales. The query is read at once, into this reader's own memory."""
        self.counts["read", "fp8"] += 1
        query = query.clone()
        dots = query.new_empty(len(query), INDEX_HEADS, len(self.span))
        for low in range(0, len(query), self.read_rows):
            part = slice(low, low + self.read_rows)
            staged = w.keys[tables[part]].view(torch.float8_e4m3fn).flatten(1, 2).float()
            torch.bmm(query[part], staged.transpose(1, 2), out=dots[part])
            dots[part] *= w.scales[tables[part]].flatten(1, 2)[:, None]
        return dots


class Captured:
    """Decode steps as CUDA graphs, one for each of some numbers of rows. All graphs share one pool of memory."""

    def __init__(self, model, sizes, alternate):
        self.model, self.sizes = model, sorted(sizes)
        largest = self.sizes[-1]
        self.rows = torch.zeros(largest, TABLE + model.table_pages, dtype=torch.int64, device=model.device)
        self.next = torch.zeros(largest, dtype=torch.int64, device=model.device)
        self.graphs, self.launches, self.replays, self.queries = {}, {}, collections.Counter(), {}
        model.forward(self.rows[:1])  # makes what must not be made during capture: cuBLAS's handle and workspace
        if alternate is not None:
            with torch.cuda.stream(alternate):
                model.forward(self.rows[:1])
        torch.cuda.synchronize()
        pool = None
        for size in reversed(self.sizes):
            before = model.counts.copy()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool):
                self.next[:size] = model.forward(self.rows[:size], alternate=alternate)
            pool = pool or graph.pool()
            self.graphs[size], self.launches[size] = graph, model.counts - before
            self.queries[size] = model.queries
            model.counts = before  # nothing has run

    def step(self, rows):
        """The next tokens of rows, on the model's device; None if there are more than any graph takes."""
        size = next((n for n in self.sizes if n >= len(rows)), None)
        if size is None:
            return None
        self.rows[: len(rows)].copy_(rows, non_blocking=True)
        self.rows[len(rows) : size] = 0
        self.graphs[size].replay()
        self.replays[size] += 1
        self.model.counts += self.launches[size]
        self.model.queries = self.queries[size]
        return self.next[: len(rows)]

"""The lab's model in PyTorch. lab/model/model.go has the formulas; names of tensors are those of the weights file."""

import math

import torch
import torch.nn.functional as F

LAYERS, WIDTH, HEADS, PLAIN, ROTARY, LATENT, HIDDEN = 4, 192, 4, 48, 32, 96, 512
QUERY = PLAIN + ROTARY
INDEX_HEADS, INDEX, TOP = 4, 32, 64
CONTEXT = 1024


def shapes(vocabulary):
    """Every tensor's shape by name."""
    s = {f"embed.{i}": (vocabulary, WIDTH) for i in range(3)}
    for n in range(LAYERS):
        layer = {
            "attn.norm": (WIDTH,),
            "attn.q": (HEADS * QUERY, WIDTH),
            "attn.kv": (LATENT + ROTARY, WIDTH),
            "attn.kv_norm": (LATENT,),
            "attn.k_up": (HEADS * PLAIN, LATENT),
            "attn.v_up": (HEADS * PLAIN, LATENT),
            "attn.o": (WIDTH, HEADS * PLAIN),
            "mlp.norm": (WIDTH,),
            "mlp.gate": (HIDDEN, WIDTH),
            "mlp.up": (HIDDEN, WIDTH),
            "mlp.down": (WIDTH, HIDDEN),
            "index.q": (INDEX_HEADS * INDEX, WIDTH),
            "index.k": (INDEX, WIDTH),
            "index.k_norm": (INDEX,),
            "index.w": (INDEX_HEADS, WIDTH),
        }
        s.update({f"layers.{n}.{name}": shape for name, shape in layer.items()})
    return s | {"norm": (WIDTH,), "head": (vocabulary, WIDTH)}


def initial(vocabulary, device, generator):
    """Fresh weights: norms 1, embeddings of deviation 0.1, matrices of 0.58 / sqrt(inputs)."""
    weights = {}
    for name, shape in shapes(vocabulary).items():
        if name.endswith("norm"):
            w = torch.ones(shape)
        else:
            deviation = 0.1 if name.startswith("embed") else 0.58 / math.sqrt(shape[1])
            if name.endswith((".o", ".down")):
                deviation /= math.sqrt(2 * LAYERS)
            w = torch.randn(shape, generator=generator) * deviation
        weights[name] = w.to(device).requires_grad_()
    return weights


def rms(x, gain):
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain


def rotation(length, device):
    """Cosines and sines, [length, ROTARY / 2] each, made in float64."""
    half = ROTARY // 2
    exponent = -torch.arange(half, dtype=torch.float64, device=device) / half
    angle = torch.arange(length, dtype=torch.float64, device=device)[:, None] * 10000**exponent
    return angle.cos().float(), angle.sin().float()


def rope(x, cos, sin):
    """x is [batch, length, heads, ROTARY]."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def stored(keys, dtype):
    """Index keys as they are read back from the cache."""
    if dtype == "bf16":
        return keys.bfloat16().float()
    if dtype == "fp8":
        scale = keys.abs().amax(-1, keepdim=True).clamp_min(1e-4) / 448
        return (keys / scale).to(torch.float8_e4m3fn).float() * scale
    return keys


def index_scores(w, h, cos, sin, dtype):
    """[batch, length, length]: how much each token wants to read each other."""
    b, t, _ = h.shape
    q = rope(F.linear(h, w["index.q"]).view(b, t, INDEX_HEADS, INDEX), cos, sin)
    k = rope(rms(F.linear(h, w["index.k"]), w["index.k_norm"])[:, :, None], cos, sin)[:, :, 0]
    weight = F.linear(h, w["index.w"]).float()
    dots = torch.einsum("bthd,bsd->bhts", q, stored(k, dtype)).float()
    return torch.einsum("bhts,bth->bts", dots.relu(), weight) / math.sqrt(INDEX)


def chosen(scores, causal, exact):
    """The tokens that each token reads. exact puts the lower position first among equals; without it, any."""
    t = scores.shape[-1]
    if t <= TOP:
        return causal.expand_as(scores)
    own = torch.eye(t, dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(~causal, -math.inf).masked_fill(own, math.inf)
    if exact:
        best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :TOP]
    else:
        best = scores.topk(TOP, sorted=False).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True) & causal


def attention(w, h, cos, sin, sparse, index_dtype, exact, teach, near):
    """Returns the heads' outputs [batch, length, HEADS * PLAIN] and the indexer's divergence from the attention."""
    b, t, _ = h.shape
    q = F.linear(h, w["attn.q"]).view(b, t, HEADS, QUERY)
    q = torch.cat((q[..., :PLAIN], rope(q[..., PLAIN:], cos, sin).to(q.dtype)), -1).transpose(1, 2)
    kv = F.linear(h, w["attn.kv"])
    latent = rms(kv[..., :LATENT], w["attn.kv_norm"])
    shared = rope(kv[..., LATENT:][:, :, None], cos, sin).to(q.dtype).expand(b, t, HEADS, ROTARY)
    k = torch.cat((F.linear(latent, w["attn.k_up"]).view(b, t, HEADS, PLAIN), shared), -1).transpose(1, 2)
    v = F.linear(latent, w["attn.v_up"]).view(b, t, HEADS, PLAIN).transpose(1, 2)

    if not sparse and not teach:
        # The fused kernels want keys and values of one size.
        out = F.scaled_dot_product_attention(q, k, F.pad(v, (0, ROTARY)), attn_mask=near, is_causal=near is None)[..., :PLAIN]
        return out.transpose(1, 2).reshape(b, t, HEADS * PLAIN), 0.0

    causal = torch.ones(t, t, dtype=torch.bool, device=h.device).tril()
    logits = (q @ k.transpose(-1, -2)).float() / math.sqrt(QUERY)
    divergence = 0.0
    if teach:
        target = logits.detach().masked_fill(~causal, -math.inf).softmax(-1).mean(1)
        taught = index_scores(w, h.detach(), cos, sin, "f32").masked_fill(~causal, -1e9).log_softmax(-1)
        divergence = (torch.xlogy(target, target) - target * taught).sum(-1).mean()
    if sparse:
        with torch.no_grad():
            reads = chosen(index_scores(w, h, cos, sin, index_dtype), causal, exact)[:, None]
    else:
        reads = causal
    out = logits.masked_fill(~reads, -math.inf).softmax(-1).to(v.dtype) @ v
    return out.transpose(1, 2).reshape(b, t, HEADS * PLAIN), divergence


def layer(w, x, cos, sin, sparse, index_dtype, exact, teach, near):
    h = rms(x, w["attn.norm"])
    out, divergence = attention(w, h, cos, sin, sparse, index_dtype, exact, teach, near)
    x = x + F.linear(out, w["attn.o"])
    h = rms(x, w["mlp.norm"])
    x = x + F.linear(F.silu(F.linear(h, w["mlp.gate"])) * F.linear(h, w["mlp.up"]), w["mlp.down"])
    return x, divergence


def forward(weights, tokens, sparse=False, index_dtype="f32", exact=True, teach=False, window=None, layer=layer):
    """Logits [batch, length, vocabulary] of tokens [batch, length], and the indexer's mean divergence.

    The float32 pass with exact=True is the reference of the Go one. teach computes how far the indexer's distribution is
    from the attention's, averaged over heads (Kullback-Leibler, nats); its gradient reaches the indexer alone. window
    limits the first layer's dense attention to that many tokens. layer may be a compiled form of this module's.
    """
    before = F.pad(tokens, (2, 0))
    x = sum(F.embedding(before[:, 2 - i : before.shape[1] - i], weights[f"embed.{i}"]) for i in range(3))
    cos, sin = rotation(tokens.shape[1], tokens.device)
    near = None
    if window is not None:
        t = torch.arange(tokens.shape[1], device=tokens.device)
        near = (t[:, None] >= t) & (t[:, None] - t < window)
    divergence = torch.zeros((), device=tokens.device)
    for n in range(LAYERS):
        prefix = f"layers.{n}."
        w = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
        x, d = layer(w, x, cos, sin, sparse, index_dtype, exact, teach, near if n == 0 else None)
        divergence = divergence + d / LAYERS
    return F.linear(rms(x, weights["norm"]), weights["head"]), divergence

"""Trains the lab's model: python3 train.py --corpus DIR --out DIR. README.md says how, and what came of it.

Dense attention first; then the indexer alone, taught to find what the attention reads; then both with sparse attention.
"""

import argparse
import dataclasses
import json
import math
import pathlib
import time

import numpy as np
import torch
import torch.nn.functional as F

import model

LOSS_BIT = 1 << 15


@dataclasses.dataclass
class Part:
    """Steps of one kind on one set. A batch holds `tokens` tokens."""

    phase: str  # dense, index or sparse
    set: str
    steps: int
    tokens: int = 128 * 512


PLANS = {
    "full": [
        Part("dense", "few", 2000, 64 * 512),
        Part("dense", "many", 2500, 64 * 512),
        Part("dense", "long", 4000, 64 * 1024),
        Part("index", "long", 600, 64 * 1024),
        Part("sparse", "long", 2800, 64 * 1024),
    ],
    # For a machine without a GPU: shows that every phase runs and learns something, no more.
    "tiny": [
        Part("dense", "few", 6, 4 * 512),
        Part("dense", "many", 2, 2 * 512),
        Part("index", "many", 3, 2 * 512),
        Part("sparse", "many", 3, 2 * 512),
    ],
}
PEAK_RATE = {"dense": 1e-3, "index": 1e-3, "sparse": 4e-4}
WARM_UP = {"dense": 200, "index": 20, "sparse": 20}
FIRST_NAMES = 40  # of each class; more than a conversation of the set "few" has
FIRST_WINDOW = 24  # tokens


def share_of_names(part, progress):
    """Which share of each class's names is in use at that share of a part.

    Few at first: with hundreds from the start, to compare two names is never learned.
    """
    return min(1.0, progress / 0.7) ** 2 if part.set == "few" else 1.0


def first_window(part, progress):
    """How many tokens the first layer reads at that share of a part; None: all.

    A first layer that reads everything soon finds what is of the right kind (a carrier), and the model never gets from
    there to what belongs to the right name. One that reads only what is near brings each token's neighbours together,
    and the next layer compares names from the first few hundred steps on.
    """
    if part.phase != "dense" or part.set == "long":
        return None
    if part.set == "few":
        return FIRST_WINDOW
    return round(FIRST_WINDOW * (model.CONTEXT / FIRST_WINDOW) ** progress)


class Corpus:
    """The tables of `culprit lab corpus`, on the device."""

    def __init__(self, directory, device):
        directory = pathlib.Path(directory)
        self.index = json.loads((directory / "corpus.json").read_text())
        if self.index["format"] != 1:
            raise SystemExit(f"{directory}/corpus.json has format {self.index['format']}, this trainer reads 1")
        self.vocabulary = self.index["vocabulary"]
        self.renamed = [torch.tensor(c, device=device) for c in self.index["renamed"] if c]
        self.train, self.held_out = {}, {}
        for s in self.index["sets"]:
            rows = torch.from_numpy(np.fromfile(directory / s["file"], dtype="<i2").reshape(s["rows"], s["length"])).to(device)
            if s.get("held_out"):
                self.held_out[s["name"]] = rows
            else:
                self.train[s["name"]] = rows

    def split(self, rows):
        """Tokens, and whether the loss counts predicting them."""
        rows = rows.int()
        return (rows & (LOSS_BIT - 1)).long(), rows < 0  # bit 15 is the sign

    def batch(self, name, rows, generator, share=1.0):
        """A random batch in which names and codes are renamed, each row its own way, to a share of each class's names."""
        table = self.train[name]
        at = torch.randint(len(table), (rows,), generator=generator, device=table.device)
        tokens, counts = self.split(table[at])
        used = torch.zeros(rows, self.vocabulary, device=table.device).scatter_(1, tokens, 1.0)
        new = torch.arange(self.vocabulary, device=table.device).repeat(rows, 1)
        for c in self.renamed:
            n = len(c)
            # Used names come first in a random order; the i-th gets the i-th of the permitted names, shuffled.
            rank = (torch.rand(rows, n, generator=generator, device=table.device) - 2 * used[:, c]).argsort(1).argsort(1)
            banned = torch.arange(n, device=table.device) >= max(FIRST_NAMES, round(n * share))
            names = (torch.rand(rows, n, generator=generator, device=table.device) + 2 * banned).argsort(1)
            new[:, c] = c[names.gather(1, rank)]
        return new.gather(1, tokens), counts


def loss(weights, tokens, counts, phase, window, layer):
    """Mean loss of the counted tokens, and the indexer's divergence."""
    logits, divergence = model.forward(
        weights, tokens[:, :-1], sparse=phase == "sparse", index_dtype="fp8", exact=False, teach=phase != "dense",
        window=window, layer=layer
    )
    counts = counts[:, 1:].float()
    each = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none").view_as(counts)
    return (each * counts).sum() / counts.sum(), divergence


def train(weights, corpus, plan, generator, log, deadline):
    """Trains weights in place; yields each phase's name when it is over."""
    device = next(iter(weights.values())).device
    autocast = torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda")
    layer = torch.compile(model.layer, dynamic=False) if device.type == "cuda" else model.layer
    for phase in ("dense", "index", "sparse"):
        parts = [p for p in plan if p.phase == phase]
        if not parts:
            continue
        total = sum(p.steps for p in parts)
        trained = {n: w for n, w in weights.items() if phase == "sparse" or (".index." in n) == (phase == "index")}
        for n, w in weights.items():
            w.requires_grad_(n in trained)
        groups = [
            {"params": [w for w in trained.values() if w.ndim > 1], "weight_decay": 0.01},
            {"params": [w for w in trained.values() if w.ndim == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.98), fused=device.type == "cuda")
        step, began = 0, time.time()
        for part in parts:
            rows = part.tokens // corpus.train[part.set].shape[1]
            for at in range(part.steps):
                progress = step / total
                rate = PEAK_RATE[phase] * min(1, (step + 1) / WARM_UP[phase], 0.02 + 0.49 * (1 + math.cos(math.pi * progress)))
                for g in optimizer.param_groups:
                    g["lr"] = rate
                tokens, counts = corpus.batch(part.set, rows, generator, share_of_names(part, at / part.steps))
                window = first_window(part, at / part.steps)
                with autocast:
                    value, divergence = loss(weights, tokens, counts, phase, window, layer)
                    objective = divergence if phase == "index" else value + divergence
                objective.backward()
                torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
                step += 1
                if step % log.every == 0 or step == total:
                    log(f"{phase} {part.set} step {step}/{total} loss {value.item():.5f} divergence {divergence.item():.5f} "
                        f"{step / (time.time() - began):.1f} steps/s")
                    if time.time() > deadline:
                        raise SystemExit(f"out of time in phase {phase} at step {step} of {total}")
        yield phase


@torch.no_grad()
def score(weights, corpus, sparse, index_dtype, rows_at_once=50, limit=10**9):
    """Counts right replies of held-out sessions: {set: [right in round 1, 2, ...]}, and how many each could be.

    A greedy reply is the expected one exactly if each expected token has the largest logit after the prompt and the
    expected tokens before it, so one pass over the whole conversation judges all its rounds.
    """
    right, of = {}, {}
    for name, table in corpus.held_out.items():
        for rows in table[:limit].split(rows_at_once):
            tokens, counts = corpus.split(rows)
            used = int((tokens != 0).any(0).nonzero().max()) + 1
            tokens, counts = tokens[:, :used], counts[:, :used]
            logits, _ = model.forward(weights, tokens[:, :-1], sparse=sparse, index_dtype=index_dtype)
            wrong = (logits.argmax(-1) != tokens[:, 1:]) & counts[:, 1:]
            # A counted token belongs to the round of the assistant's role tokens before it.
            turn = (tokens[:, :-1] == corpus.index["assistant"]).cumsum(1)
            rounds = int(turn.max())
            for r in range(1, rounds + 1):
                asked = ((turn == r) & counts[:, 1:]).any(1)
                failed = ((turn == r) & wrong).any(1)
                right.setdefault(name, [0] * rounds)[r - 1] += int((asked & ~failed).sum())
                of.setdefault(name, [0] * rounds)[r - 1] += int(asked.sum())
    return right, of


@torch.no_grad()
def generate(weights, corpus, sparse, index_dtype, sessions):
    """Writes the last round's reply of held-out sessions token by token; returns how many were right, of how many."""
    rows = torch.cat([t[: max(1, sessions // len(corpus.held_out))] for t in corpus.held_out.values()])
    tokens, _ = corpus.split(rows)
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    start = ((tokens == corpus.index["assistant"]) * positions).max(1).values + 1
    end = ((tokens == corpus.index["end"]) * positions).max(1).values + 1
    written = torch.where(positions < start[:, None], tokens, 0)
    for i in range(int((end - start).max())):
        at = (start + i).clamp_max(tokens.shape[1] - 1)
        logits, _ = model.forward(weights, written[:, : int(at.max())], sparse=sparse, index_dtype=index_dtype)
        new = logits.gather(1, (at - 1)[:, None, None].expand(-1, 1, logits.shape[-1]))[:, 0].argmax(-1)
        written.scatter_(1, at[:, None], new[:, None])
    wrong = (written != tokens) & (positions >= start[:, None]) & (positions < end[:, None])
    return len(tokens) - int(wrong.any(1).sum()), len(tokens)


def rounded(weights):
    """The weights as the file holds them."""
    return {n: w.detach().bfloat16().float() for n, w in weights.items()}


def save(weights, path, metadata):
    """Writes a safetensors file in bf16: a length, a JSON header, the data."""
    header, data = {"__metadata__": metadata}, b""
    for name, w in weights.items():
        b = w.detach().bfloat16().cpu().contiguous().view(torch.int16).numpy().astype("<i2").tobytes()
        header[name] = {"dtype": "BF16", "shape": list(w.shape), "data_offsets": [len(data), len(data) + len(b)]}
        data += b
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def load(path):
    """Reads a file that `save` wrote, as float32."""
    b = path.read_bytes()
    size = int.from_bytes(b[:8], "little")
    header = json.loads(b[8 : 8 + size])
    weights = {}
    for name, t in header.items():
        if name != "__metadata__":
            begin, end = t["data_offsets"]
            bits = np.frombuffer(b[8 + size + begin : 8 + size + end], dtype="<i2").copy()
            weights[name] = torch.from_numpy(bits).view(torch.bfloat16).float().view(t["shape"])
    return weights


class Log:
    def __init__(self, path, every):
        self.file, self.every, self.began = open(path, "a"), every, time.time()

    def __call__(self, text):
        line = f"[{time.time() - self.began:6.1f}s] {text}"
        print(line, flush=True)
        print(line, file=self.file, flush=True)


def report(weights, corpus, log, sparse, index_dtype, limit=10**9):
    """Scores weights and logs what they got right: agent sessions by round and by number of facts, the other kinds whole."""
    right, of = score(weights, corpus, sparse, index_dtype, limit=limit)
    what = f"sparse {index_dtype}" if sparse else "dense"
    agent = [n for n in right if n.startswith("agent-") and n != "agent-text"]
    rounds = [(sum(right[n][r] for n in agent), sum(of[n][r] for n in agent)) for r in range(4)]
    total, wanted = sum(r for r, _ in rounds), sum(o for _, o in rounds)
    log(f"{what}: agent {total}/{wanted} calls right, {100 * total / wanted:.3f}%; "
        f"by round {' '.join(f'{r}/{o}' for r, o in rounds)}; "
        f"by facts {' '.join(f'{n[-2:]}:{sum(right[n])}/{sum(of[n])}' for n in agent)}")
    log(f"{what}: " + ", ".join(f"{n} {sum(right[n])}/{sum(of[n])}" for n in right if n not in agent))
    return {"right": right, "of": of}, (total, wanted)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--plan", choices=PLANS, default="full")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies the plan's steps")
    parser.add_argument("--weights", help="checkpoint (PHASE.pt) to go on from")
    parser.add_argument("--phases", default="dense,index,sparse", help="which to run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop training after that long, with what there is")
    parser.add_argument("--log-every", type=int, default=200)
    args = parser.parse_args()

    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    log = Log(out / "train.log", args.log_every)
    deadline = time.time() + args.seconds
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(args.seed)
    plan = [dataclasses.replace(p, steps=max(1, round(p.steps * args.scale))) for p in PLANS[args.plan]
            if p.phase in args.phases.split(",")]

    corpus = Corpus(args.corpus, args.device)
    if args.plan == "tiny":
        corpus.held_out = dict(list(corpus.held_out.items())[:2])
    weights = model.initial(corpus.vocabulary, args.device, torch.Generator().manual_seed(args.seed))
    if args.weights:
        for n, w in torch.load(args.weights, map_location=args.device).items():
            weights[n].data.copy_(w)
    log(f"torch {torch.__version__} on {torch.cuda.get_device_name() if args.device == 'cuda' else 'cpu'}, seed {args.seed}, "
        f"vocabulary {corpus.vocabulary}, {sum(w.numel() for w in weights.values())} parameters")
    generator = torch.Generator(args.device).manual_seed(args.seed)
    scores = {}
    metadata = {"seed": str(args.seed), "steps": json.dumps({f"{p.phase} {p.set}": p.steps for p in plan})}
    try:
        for phase in train(weights, corpus, plan, generator, log, deadline):
            save(weights, out / "model.safetensors", metadata | {"phase": phase})
            torch.save({n: w.detach().cpu() for n, w in weights.items()}, out / f"{phase}.pt")
            if phase == "dense":
                total, wanted = report(rounded(weights), corpus, log, False, "f32", limit=10)[1]
                if args.plan == "full" and args.scale >= 1 and total < 0.5 * wanted:
                    raise SystemExit("less than half right after the dense phase: the rest would not help")
    except SystemExit as e:
        log(str(e))
        save(weights, out / "model.safetensors", metadata | {"phase": "unfinished"})
    final = rounded(weights)
    for what, sparse, dtype in (("dense", False, "f32"), ("sparse fp8", True, "fp8"), ("sparse bf16", True, "bf16")):
        scores[what], _ = report(final, corpus, log, sparse, dtype)
        (out / "scores.json").write_text(json.dumps(scores))
    for what, sparse, dtype in (("dense", False, "f32"), ("sparse fp8", True, "fp8")):
        right, of = generate(final, corpus, sparse, dtype, 64 if args.plan == "full" else 2)
        log(f"written token by token, {what}: {right}/{of} replies right")
    log("done")


if __name__ == "__main__":
    main()

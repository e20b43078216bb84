"""The race itself, without a server: how many rows of a captured decode step read wrong tokens, by its settings.

    race.py [--rows 8 32 80] [--replays 50] [--trace]

The cache is filled with the prompts of as many sequences, and the same step is replayed again and again. What each
layer chose is compared with an eager step of the same rows.
"""

import argparse
import itertools
import random
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import text
from model import LAYERS, Captured, Model, load
from server import WEIGHTS

PAGE, LENGTH = 64, 600


def prompts(tokenizer, count):
    """Token lists of LENGTH: a parcel desk's facts."""
    rng = random.Random(1)
    words = [w.decode() for w in tokenizer.words if len(w) > 3]
    result = []
    for _ in range(count):
        facts = []
        for _ in range(80):
            parcel, carrier = rng.choice(words), rng.choice(words)
            facts.append(f"parcel {parcel}: carrier {carrier}, code {rng.randrange(10**4)}, dock {rng.randrange(99)}")
        result.append(text.prompt(tokenizer, [{"role": "system", "content": "\n".join(facts)}], None)[:LENGTH])
    return result


def rows_of(sequence, number, low, high):
    """A pass's rows for a sequence's tokens; sequence number n has pages of its own."""
    pages = -(-LENGTH // PAGE)
    table = [1 + number * pages + i for i in range(pages)]
    padded = table + [0] * (1024 // PAGE - pages)
    before = [0, 0, *sequence]
    return [
        [before[i + 2], before[i + 1], before[i], i, table[i // PAGE] * PAGE + i % PAGE, *padded]
        for i in range(low, high)
    ]


def filled(weights, sequences, **options):
    device = torch.device("cuda")
    pages = 1 + len(sequences) * -(-LENGTH // PAGE)
    model = Model(weights, device=device, pages=pages, page_size=PAGE, **options)
    for n, sequence in enumerate(sequences):
        model.forward(torch.tensor(rows_of(sequence, n, 0, LENGTH - 1), device=device))
    step = [rows_of(sequence, n, LENGTH - 1, LENGTH)[0] for n, sequence in enumerate(sequences)]
    return model, torch.tensor(step, device=device)


def measure(model, step, size, alternate, replays):
    """Replays with a wrong row; wrong rows of all, by what the first layer chose and by any; time of a replay in us."""
    rows = torch.zeros_like(step[:1]).repeat(size, 1)
    count = min(size, len(step))
    rows[:count] = step[:count]
    model.chosen = []
    model.forward(rows)
    want = [c.sort(-1).values for c in model.chosen]
    model.chosen = []
    captured = Captured(model, [size], alternate)
    got, model.chosen = model.chosen[-LAYERS:], None
    bad, first, anywhere = 0, 0, 0
    for _ in range(replays):
        captured.step(rows)
        torch.cuda.synchronize()
        wrong = torch.stack([(g.sort(-1).values != w).any(-1)[:count] for g, w in zip(got, want, strict=True)])
        bad += wrong.any().item()
        first += wrong[0].sum().item()
        anywhere += wrong.any(0).sum().item()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(50):
        captured.graphs[size].replay()
    end.record()
    torch.cuda.synchronize()
    return bad, first, anywhere, count * replays, 1000 * start.elapsed_time(end) / 50


class Trace(TorchDispatchMode):
    """What the main stream puts over the indexer's query before it waits for the alternate one."""

    def __init__(self, model):
        super().__init__()
        self.main, self.query, self.after, self.lines = torch.cuda.current_stream(), None, 0, []
        index = model.index

        def traced(w, h, rows, turn, alternate):
            self.query = None
            result = index(w, h, rows, turn, alternate)
            self.after = 0
            return result

        choose = model.choose

        def noted(w, h, query, rows):
            self.query = (query.data_ptr(), query.nbytes)
            return choose(w, h, query, rows)

        model.index, model.choose = traced, noted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and self.query and torch.cuda.current_stream() == self.main:
            self.after += 1
            at, size = self.query
            low, high = out.data_ptr(), out.data_ptr() + out.nbytes
            if low < at + size and at < high:
                covered = min(high, at + size) - max(low, at)
                self.lines.append(f"op {self.after} {func} {tuple(out.shape)} covers {covered} of {size} bytes")
                self.query = None
        return out


def trace(weights, sequences, size):
    model, step = filled(weights, sequences, index_dtype="bf16", read_rows=16)
    alternate = torch.cuda.Stream()
    rows = step[:1].repeat(size, 1)
    model.forward(rows)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), Trace(model) as t:
        model.forward(rows, alternate=alternate)
    print(f"{size} rows:", *t.lines, sep="\n  ")


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--rows", type=int, nargs="+", default=[8, 32, 80])
    p.add_argument("--read-rows", type=int, nargs="+", default=[16])
    p.add_argument("--replays", type=int, default=50)
    p.add_argument("--trace", action="store_true", help="say what takes the query's memory")
    o = p.parse_args()
    started = time.monotonic()
    tokenizer = text.Tokenizer(WEIGHTS / "vocabulary.json")
    weights = load(WEIGHTS / "model.safetensors", torch.device("cuda"))
    sequences = prompts(tokenizer, max(o.rows))
    print(
        f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}, set up in {time.monotonic() - started:.1f} s",
        flush=True,
    )
    print("| index keys | staged at once | streams | query | rows | bad replays | wrong rows: first layer | any | us |")
    print("| --- | --: | --- | --- | --: | --: | --: | --: | --: |")
    settings = [("two", "freed"), ("two", "held"), ("one", "freed")]
    for dtype, read_rows, (streams, query) in itertools.product(["bf16", "fp8"], o.read_rows, settings):
        model, step = filled(weights, sequences, index_dtype=dtype, read_rows=read_rows, hold_query=query == "held")
        for size in o.rows:
            alternate = torch.cuda.Stream() if streams == "two" else None
            bad, first, anywhere, total, us = measure(model, step, size, alternate, o.replays)
            shares = f"{first / total:.1%} | {anywhere / total:.1%}"
            setting = f"{dtype} | {read_rows} | {streams} | {query} | {size}"
            print(f"| {setting} | {bad}/{o.replays} | {shares} | {us:.0f} |", flush=True)
    if o.trace:
        for size in o.rows:
            trace(weights, sequences, size)


if __name__ == "__main__":
    main()

"""On the CPU: python3 -m pytest examples/h200 (needs PyTorch)."""

import importlib.util
import json
import pathlib
import random

import pytest
import torch

import text
from engine import Pages, Request
from model import CONTEXT, LAYERS, TABLE, Model, load
from server import WEIGHTS

SIZE = 64


@pytest.fixture(scope="module")
def weights():
    return load(WEIGHTS / "model.safetensors", "cpu")


@pytest.fixture(scope="module")
def tokenizer():
    return text.Tokenizer(WEIGHTS / "vocabulary.json")


def reference():
    path = pathlib.Path(__file__).parents[2] / "lab" / "train" / "model.py"
    spec = importlib.util.spec_from_file_location("reference", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
def test_paged_passes_are_the_reference(weights, dtype):
    length, pages = 300, [3, 7, 2, 9, 4]
    tokens = torch.randint(300, 900, (length,), generator=torch.Generator().manual_seed(1))
    want = reference().forward(weights, tokens[None], sparse=True, index_dtype=dtype)[0][0].argmax(-1)

    model = Model(weights, device=torch.device("cpu"), pages=10, page_size=SIZE, index_dtype=dtype, read_rows=16)
    rows = torch.zeros(length, TABLE + CONTEXT // SIZE, dtype=torch.int64)
    for back in range(3):
        rows[back:, back] = tokens[: length - back]
    position, table = torch.arange(length), torch.tensor(pages)
    rows[:, 3], rows[:, 4] = position, table[position // SIZE] * SIZE + position % SIZE
    rows[:, TABLE : TABLE + len(pages)] = table
    got = torch.cat([model.forward(rows[low:high]) for low, high in ((0, 130), (130, 299), (299, 300))])
    assert got.tolist() == want.tolist()
    assert model.counts["store", dtype] == model.counts["read", dtype] == 3 * LAYERS


def test_any_text_comes_back(tokenizer):
    rng = random.Random(1)
    pieces = ["parcel", " ", "  ", "code", "x9", "é", "｜", text.OPEN_CALLS, "\n", "dock_", ", code ", '{"ok":']
    for _ in range(300):
        written = "".join(rng.choices(pieces, k=rng.randrange(12)))
        data, previous = b"", text.PADDING
        for token in tokenizer.encode(written):
            data += tokenizer.added(previous, token)
            previous = token
        assert data.decode() == written
        assert previous == text.PADDING or previous >= text.FIRST_BYTE  # no text encodes to a control token


CALL = [{"function": {"name": "move", "arguments": '{"parcel":"kalva","dock":7}'}}]


@pytest.mark.parametrize(
    ("written", "content", "calls"),
    [
        (text.assistant({"tool_calls": CALL}), "", [("move", '{"parcel":"kalva","dock":7}')]),
        (
            text.assistant({"content": "ok", "tool_calls": CALL * 2}),
            "ok",
            [("move", '{"parcel":"kalva","dock":7}')] * 2,
        ),
        ("no <call", "no <call", []),
        (text.OPEN_CALLS + "\n" + text.OPEN_INVOKE + 'move">', None, []),
    ],
)
def test_calls_are_found(tokenizer, written, content, calls):
    reply = text.Reply(tokenizer, text.ASSISTANT, calls=True)
    shown = "".join(reply.push(token) for token in tokenizer.encode(written))
    rest, found = reply.close()
    assert shown + rest == (written if content is None else content)
    assert found == calls
    for _, arguments in found:
        json.loads(arguments)


def test_pages_are_shared_and_come_back():
    rng = random.Random(1)
    pages, running = Pages(40, 4, share=True), []
    prefixes = [[rng.randrange(900) for _ in range(24)] for _ in range(3)]
    for _ in range(3000):
        if running and rng.random() < 0.5:
            r = running.pop(rng.randrange(len(running)))
            pages.release(r)
        else:
            prompt = rng.choice(prefixes)[: rng.randrange(4, 25)] + [rng.randrange(900) for _ in range(3)]
            r = Request(prompt, 5, None)
            if pages.take(r):
                assert len(r.table) == -(-(len(prompt) + 5) // 4)
                assert r.cached < len(prompt)
                r.computed = len(prompt)
                pages.remember(r)
                running.append(r)
        users = [0] * 40
        for r in running:
            for page in r.table:
                users[page] += 1
        assert users == pages.users
        dealt = {p for r in running for p in r.table}
        assert sorted([*dealt, *pages.free, *pages.idle]) == list(range(1, 40))
    for r in running:
        pages.release(r)
    assert not any(pages.users)

"""Runs every phase of the training for a few steps on the CPU: python3 -m pytest lab/train (needs go)."""

import json
import pathlib
import subprocess
import sys

import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import model  # noqa: E402
import train  # noqa: E402

ROOT = pathlib.Path(__file__).parents[2]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    out = tmp_path_factory.mktemp("corpus")
    subprocess.run(
        ["go", "run", "./cmd/culprit", "lab", "corpus", "--out", out, "--sessions", "30", "--held-out", "1"],
        cwd=ROOT, check=True,
    )
    return train.Corpus(out, "cpu")


def test_renaming_is_one_to_one(corpus, monkeypatch):
    name, generator = "many", torch.Generator().manual_seed(1)
    monkeypatch.setitem(corpus.train, name, corpus.train[name][:1])
    before = corpus.split(corpus.train[name])[0][0].tolist()
    for share in (0.0, 1.0):
        tokens, _ = corpus.batch(name, 4, generator, share)
        for row in tokens.tolist():
            new = dict(zip(before, row))
            assert [new[t] for t in before] == row
            assert len(set(new.values())) == len(new)
            assert row != before


def test_sparse_reads_everything_in_short_contexts_and_the_future_never():
    weights = model.initial(300, "cpu", torch.Generator().manual_seed(1))
    tokens = torch.randint(300, (2, 100), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        dense, _ = model.forward(weights, tokens)
        sparse, _ = model.forward(weights, tokens, sparse=True)
        shorter, _ = model.forward(weights, tokens[:, :90], sparse=True)
    assert torch.allclose(dense[:, : model.TOP], sparse[:, : model.TOP], atol=1e-5)
    assert not torch.allclose(dense, sparse, atol=1e-5)
    assert torch.allclose(sparse[:, :90], shorter, atol=1e-5)


def test_every_phase_learns(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "WARM_UP", dict.fromkeys(train.WARM_UP, 1))
    weights = model.initial(corpus.vocabulary, "cpu", torch.Generator().manual_seed(1))
    log = train.Log(tmp_path / "log", every=1)
    generator = torch.Generator().manual_seed(1)
    plan = [train.Part("dense", "few", 5, 1024), train.Part("index", "many", 3, 512), train.Part("sparse", "many", 2, 512)]
    before = {n: w.detach().clone() for n, w in weights.items()}
    for phase in train.train(weights, corpus, plan, generator, log, deadline=float("inf")):
        for name, w in weights.items():
            changed = not torch.equal(w, before[name])
            wanted = phase == "sparse" or (".index." in name) == (phase == "index")
            assert changed == wanted, (phase, name)
        before = {n: w.detach().clone() for n, w in weights.items()}
    lines = [line.split() for line in (tmp_path / "log").read_text().splitlines()]
    loss = [float(line[line.index("loss") + 1]) for line in lines]
    divergence = [float(line[line.index("divergence") + 1]) for line in lines]
    assert loss[4] < loss[0] - 0.3
    assert divergence[7] < divergence[5]


def test_weights_come_back_as_saved(tmp_path):
    weights = train.rounded(model.initial(300, "cpu", torch.Generator().manual_seed(1)))
    train.save(weights, tmp_path / "w.safetensors", {"made": "by a test"})
    again = train.load(tmp_path / "w.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[n], weights[n]) for n in weights)
    size = int.from_bytes((tmp_path / "w.safetensors").read_bytes()[:8], "little")
    assert json.loads((tmp_path / "w.safetensors").read_bytes()[8 : 8 + size])["__metadata__"] == {"made": "by a test"}

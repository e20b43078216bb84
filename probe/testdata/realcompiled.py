"""As compiled.py, with the real triton, numba and torch: make probe-compilers."""

import numba
import torch
import triton


@triton.jit
def kernel(x):
    y = x
    return


@triton.autotune(configs=[triton.Config({})], key=[])
@triton.jit
def tuned(x):
    y = x
    return


@numba.njit
def add(a, b):
    return a + b


@torch.compile(backend="eager")
def decorated(x):
    y = x - 1
    return y


@torch.jit.script
def scripted(x):
    y = x + 1
    return y


def helper(x):
    y = x * 2
    return y


def framed(x):
    y = helper(x) - 1
    return y


class Model(torch.nn.Module):
    def forward(self, x):
        y = x + 1
        return self.method(y)

    def method(self, x):
        z = x * 3
        return z


def plain():
    return 1


def main():
    from torch._dynamo.utils import counters

    model, frame = torch.compile(Model(), backend="eager", fullgraph=True), torch.compile(framed, backend="eager", fullgraph=True)
    x = torch.ones(2)
    for _ in range(3):
        plain(), decorated(x), scripted(x)
        assert add(1, 2) == 3 and model(x).tolist() == [6, 6] and frame(x).tolist() == [1, 1]
    print(counters["stats"]["unique_graphs"], dict(counters["graph_break"]))

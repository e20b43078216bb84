"""Functions that compilers take, with stand-ins for these in compilers/."""

import numba
import torch
import triton


@triton.jit
def kernel(x):
    y = x
    return y


@triton.autotune
@triton.jit
def tuned(x):
    y = x
    return y


@numba.njit
def add(a, b):
    return a + b


@torch.compile
def decorated(x):
    return x


@torch.disable
def disabled(x):
    return x


def helper(x):
    y = x
    return y


def framed(x):
    return x


class Model:
    def forward(self, x):
        return x


def plain():
    return 1


def main():
    import os
    import _culprit_state as agent
    from torch._dynamo import convert_frame
    from torch._dynamo.variables import functions

    plain(), disabled(1), decorated(1)
    print(convert_frame.inline(helper), convert_frame.meet(framed), convert_frame.inline(Model.forward))
    helper(1), framed(1), Model().forward(1)
    agent.end(os.environ["CULPRIT_PROBE_DIR"])
    print(*("<lambda>" not in f.__qualname__ and not hasattr(f, "__wrapped__") for f in (functions.UserFunctionVariable.get_code, convert_frame.CatchErrorsWrapper.__call__)))

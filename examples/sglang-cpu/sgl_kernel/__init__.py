"""Stands in for SGLang's compiled kernels, which have no wheel for CPUs.

SGLang has a way in PyTorch for all that this model needs, but imports the
kernels all the same. What is called after all says so.
"""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} isn't here: see examples/sglang-cpu")

    return missing

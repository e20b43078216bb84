import types

from torch._dynamo.variables.functions import UserFunctionVariable


class Frame:
    def __init__(self, fn):
        self.f_code = fn.__code__


class CatchErrorsWrapper:
    def __call__(self, frame, cache_entry, frame_state):
        return read(frame.f_code)


def read(code):
    """What the real one does at a constant that is no literal."""
    for c in code.co_consts:
        assert isinstance(c, (int, str, bytes, tuple, type(None), types.CodeType)), f"Cannot construct `ConstantVariable` for value of type {type(c)}."
    return "sound"


def meet(fn):
    """The first call of a compiled function, and what is met in it."""
    return CatchErrorsWrapper()(Frame(fn), None, None)


def inline(fn):
    return read(UserFunctionVariable(fn).get_code())

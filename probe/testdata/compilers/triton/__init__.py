class JITFunction:
    def __init__(self, fn):
        self.fn = fn


class Autotuner:
    def __init__(self, fn):
        self.fn = fn


jit, autotune = JITFunction, Autotuner

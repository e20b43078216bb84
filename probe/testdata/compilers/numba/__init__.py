import functools


class CPUDispatcher:
    def __init__(self, py_func):
        functools.update_wrapper(self, py_func)
        self.py_func = py_func


njit = CPUDispatcher

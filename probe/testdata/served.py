"""Functions of every shape that a probe may go into."""

import functools


def decorator(f):
    def wrapped(*args):
        return f(*args)

    return wrapped


class Base:
    def size(self):
        return 1


class Pool(Base):
    """Has a docstring."""

    def __init__(self):
        self.page_size = 64
        self.__secret = "s"

    def free(self, n):
        """Has one too."""
        if n is None:  # nothing to do
            return 0
        if n % 2:
            x = 1
        elif n % 3:
            x = 2
        else:
            x = 3
        if n < 0:
            raise ValueError(n)
        return x

    def size(self):
        return super().size() + 1

    @property
    def pages(self):
        return self.page_size

    @staticmethod
    def static(n):
        return n

    @classmethod
    def of(cls, n):
        return n

    @decorator
    def hidden(self, n):
        return n

    @functools.lru_cache
    def cached(self, n):
        return n

    def twice(self, n):
        if n:
            y = 1
        y = 2
        if n:
            y = 1
        return y

    def unbound(self, n):
        if n > 50:
            later = n
        return n

    def last(self, n):
        try:
            return n
        finally:
            self.seen = n


def outer():
    k = 2
    other = 3

    def inner(a):
        b = a + k
        return b

    return inner, other


def dead(n):
    return n
    n = 2


def generator(n):
    for i in range(n):
        yield i


async def coroutine(n):
    return n


def forever(stop):
    n = 0
    while not stop.is_set():
        n += 1
    return n

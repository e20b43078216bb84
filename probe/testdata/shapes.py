"""Drives served.py, then takes the probes out and tells what is left."""

import asyncio
import json
import os
import sys

before = {"threads": 1, "meta_path": [type(f).__name__ if not isinstance(f, type) else f.__name__ for f in sys.meta_path]}
import served

pool, (inner, _) = served.Pool(), served.outer()
for n in range(100):
    pool.free(n), pool.size(), pool.pages, served.Pool.static(n), served.Pool.of(n), pool.hidden(n), pool.cached(n)
    pool.twice(n), pool.unbound(n), pool.last(n), inner(n), served.dead(n), list(served.generator(3)), asyncio.run(served.coroutine(n))
try:
    pool.free(-1)
except ValueError as e:
    line = e.__traceback__.tb_next.tb_lineno  # must not move

import _culprit_state as agent

pairs = list(agent.AGENT.pairs)
agent.end(os.environ["CULPRIT_PROBE_DIR"])
functions = [
    served.Pool.free, served.Pool.size, served.Pool.pages.fget, served.Pool.static, served.Pool.of.__func__,
    served.Pool.hidden.__closure__[0].cell_contents, served.Pool.cached.__wrapped__, inner, served.generator, served.coroutine,
]
originals = {id(a) for a, _ in pairs}
pool.free(1), inner(1)
json.dump({
    "line": line,
    "restored": [id(f.__code__) in originals for f in functions],
    "path": [p for p in sys.path if p.startswith(os.environ["CULPRIT_PROBE_DIR"])],
    "finders": [type(f).__name__ for f in sys.meta_path if type(f).__name__ == "Finder"],
    "sitecustomize": os.environ.get("CHAINED", ""),
}, sys.stdout)

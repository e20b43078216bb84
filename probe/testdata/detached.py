"""Compares itself before an attach with itself after the detach, while it works."""

import gc
import json
import os
import signal
import sys
import threading
import time

import served

NAMES = set(sys.stdlib_module_names)


def snapshot():
    gc.collect()
    functions = [f for f in gc.get_objects() if type(f).__name__ == "function" and f.__module__ == "served"]
    monitoring = getattr(sys, "monitoring", None)
    with open("/proc/self/maps") as f:
        maps = sorted({line.split()[5] for line in f if len(line.split()) > 5 and ".ctr" in line})
    return {
        "codes": {f.__qualname__ + str(f.__code__.co_firstlineno): id(f.__code__) for f in functions},
        "hashes": {f.__qualname__: hash(f.__code__) for f in functions},
        "module": sorted(vars(served)),
        "main": sorted(vars(sys.modules["__main__"])),
        "modules": sorted(m for m in sys.modules if m.partition(".")[0] not in NAMES),
        "threads": sorted(t.name for t in threading.enumerate()),
        "files": sorted(os.readlink(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}")),
        "maps": maps,
        "finders": [id(f) for f in sys.meta_path],
        "path": list(sys.path),
        "hooks": [sys.gettrace(), sys.getprofile(), len(gc.callbacks)],
        "tools": [monitoring.get_tool(n) for n in range(6)] if monitoring else [],
        "signals": [str(signal.getsignal(s)) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "environment": dict(os.environ),
    }


def main():
    pool, (inner, _) = served.Pool(), served.outer()
    stop = threading.Event()
    threading.Thread(target=served.forever, args=(stop,), name="forever", daemon=True).start()
    before = snapshot()
    print('"ready"', flush=True)
    n = 0
    while getattr(getattr(sys.modules.get("_culprit_state"), "AGENT", None), "state", 0) != 2:
        pool.free(n), inner(n)
        n += 1
        time.sleep(0.0005)
    pool.free(n), inner(n)
    after = snapshot()
    with open(sys.argv[1], "w") as f:
        json.dump({k: [before[k], after[k]] for k in before if before[k] != after[k]}, f)


main()

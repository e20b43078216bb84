"""A server of several processes: fork, spawn, a worker pool, threads and
asyncio. Prints how often each process called what, then ends as it is told."""

import asyncio
import concurrent.futures
import multiprocessing
import os
import sys
import threading
import time

import served


def work(calls):
    pool, (inner, _) = served.Pool(), served.outer()
    for n in range(calls):
        pool.free(n)
        inner(n)
    return calls


async def serve(calls):
    async def handle(n):
        await asyncio.sleep(0)
        return await served.coroutine(n)

    await asyncio.gather(*(handle(n) for n in range(calls)))


def main(how):
    sys.setswitchinterval(1e-5)
    total = 0
    processes = [multiprocessing.get_context(m).Process(target=work, args=(5000,)) for m in ("fork", "spawn", "forkserver")]
    for p in processes:
        p.start()
    threads = [threading.Thread(target=work, args=(5000,)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads + processes:
        t.join()
    with concurrent.futures.ProcessPoolExecutor(2) as executor:
        total += sum(executor.map(work, [1000] * 4))
    asyncio.run(serve(1000))
    pid = os.fork()
    if pid == 0:
        work(500)
        os.fork() or work(50)
        os._exit(0)
    os.waitpid(pid, 0)
    time.sleep(0.1)
    if how == "abort":
        os.abort()
    print(total + 7 * 5000 + 500 + 50)


if __name__ == "__main__":
    main(sys.argv[1])

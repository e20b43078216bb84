"""Requests in, tokens out: pages, continuous batching and the step loop. One thread owns all of it but the inbox."""

import collections
import hashlib
import logging
import queue
import struct

import torch

from model import Captured
from text import END

log = logging.getLogger("engine")


class Request:
    """One request. send(token, reason) is called for each token; reason is None before the last."""

    def __init__(self, prompt, max_tokens, send):
        self.prompt, self.max_tokens, self.send = prompt, max_tokens, send
        self.tokens = list(prompt)
        self.table = []  # pages, for all tokens that it may come to have
        self.keys = []  # of its table's whole pages that are known or were made known
        self.computed = self.cached = 0  # tokens that have cache entries; those of them that were found
        self.cancelled = False

    def decodes(self):
        return self.computed == len(self.tokens) - 1 and len(self.tokens) > len(self.prompt)


class Pages:
    """Deals in pages of the cache, and knows which hold which prefix. Page 0 is never dealt."""

    def __init__(self, count, page_size, share):
        self.page_size, self.share = page_size, share
        self.free = list(range(count - 1, 0, -1))
        self.users = [0] * count
        self.known = {}  # page by key: a hash of all tokens up to its end
        self.key = {}  # and back
        self.idle = collections.OrderedDict()  # known pages that nobody uses, the longest unused first

    def take(self, request):
        """Gives a request its table; False if there aren't enough pages."""
        found, keys = self._match(request.prompt)
        new = -(-(len(request.prompt) + request.max_tokens) // self.page_size) - len(found)
        if new > len(self.free) + len(self.idle) - sum(page in self.idle for page in found):
            return False
        for page in found:
            self.idle.pop(page, None)
        while len(self.free) < new:
            page, _ = self.idle.popitem(last=False)
            del self.known[self.key.pop(page)]
            self.free.append(page)
        request.table = found + [self.free.pop() for _ in range(new)]
        request.keys = keys
        request.computed = request.cached = len(found) * self.page_size
        for page in request.table:
            self.users[page] += 1
        return True

    def remember(self, request):
        """Makes a request's whole computed pages known."""
        while self.share and (len(request.keys) + 1) * self.page_size <= request.computed:
            n = len(request.keys)
            key = self._key(request.keys[-1] if n else b"", request.tokens, n)
            request.keys.append(key)
            if key not in self.known:
                self.known[key], self.key[request.table[n]] = request.table[n], key

    def release(self, request):
        for page in reversed(request.table):  # so that a prefix goes after what follows it
            self.users[page] -= 1
            if self.users[page]:
                continue
            if page in self.key:
                self.idle[page] = None
            else:
                self.free.append(page)
        request.table = []

    def _match(self, prompt):
        """Known pages that the prompt begins with. Its last token is always computed: it yields the next."""
        pages, keys, key = [], [], b""
        while self.share and (len(pages) + 1) * self.page_size < len(prompt):
            key = self._key(key, prompt, len(pages))
            if key not in self.known:
                break
            pages.append(self.known[key])
            keys.append(key)
        return pages, keys

    def _key(self, before, tokens, n):
        part = tokens[n * self.page_size : (n + 1) * self.page_size]
        return hashlib.blake2b(before + struct.pack(f"<{len(part)}H", *part), digest_size=16).digest()


class Engine:
    """The step loop: schedule, forward, commit. With overlap, a step's tokens are sent while the next one runs.

    post(function) has the function called by whoever owns the clients' connections.
    """

    def __init__(
        self, model, *, pages, max_running, chunk, share, overlap, graph_sizes, alternate, decode_steps, log_steps, post
    ):
        self.model, self.max_running, self.chunk, self.overlap, self.post = model, max_running, chunk, overlap, post
        self.decode_steps, self.log_steps = decode_steps, log_steps
        self.pages = Pages(pages, model.page_size, share)
        self.inbox = queue.SimpleQueue()
        self.waiting, self.running = collections.deque(), []
        self.in_row = 0  # decode steps since the last prefill
        self.stats = collections.Counter()
        self.captured = Captured(model, graph_sizes, alternate) if graph_sizes else None
        self.unsent = []

    def submit(self, request):
        self.inbox.put(request)

    def run(self):
        while True:
            self.receive()
            items = self.schedule()
            if items:
                self.step(items)

    def receive(self):
        """Reads the inbox; waits for something if there is nothing to do."""
        if not self.waiting and not self.running:
            self.send_unsent()
            self.waiting.append(self.inbox.get())
        while not self.inbox.empty():
            self.waiting.append(self.inbox.get())
        for request in [r for r in self.running if r.cancelled]:
            self.end(request)
        self.waiting = collections.deque(r for r in self.waiting if not r.cancelled)

    def schedule(self):
        """The next step's (request, from, to): parts of prompts first, else the running requests' next tokens."""
        if self.in_row in (0, self.decode_steps) or not self.running:
            self.in_row = 0
            if items := self.prefill():
                return items
        self.in_row += 1
        return [(r, r.computed, r.computed + 1) for r in self.running if r.decodes()] or self.prefill()

    def prefill(self):
        items, room = [], self.chunk
        for r in self.running:
            if room and not r.decodes():
                to = min(len(r.tokens), r.computed + room)
                items.append((r, r.computed, to))
                room -= to - r.computed
        while room and self.waiting and len(self.running) < self.max_running and self.pages.take(self.waiting[0]):
            r = self.waiting.popleft()
            self.running.append(r)
            self.stats["prompt_tokens"] += len(r.prompt)
            self.stats["cached_tokens"] += r.cached
            to = min(len(r.tokens), r.computed + room)
            items.append((r, r.computed, to))
            room -= to - r.computed
        return items

    def step(self, items):
        rows = torch.tensor([self.row(r, i) for r, low, to in items for i in range(low, to)])
        ends = [to == len(r.tokens) for r, _, to in items]  # whose last row yields a token
        decode = len(rows) == len(items) and all(r.decodes() for r, _, _ in items)
        following = None
        if decode:
            self.stats["decode_steps"] += 1
            self.stats["decode_rows"] += len(rows)
            if self.captured:
                following = self.captured.step(pinned(rows))
        else:
            self.stats["prefill_steps"] += 1
        if following is None:
            self.stats["eager_decode_steps"] += decode
            lasts = torch.tensor([to - low for _, low, to in items]).cumsum(0) - 1
            device = self.model.device
            following = self.model.forward(pinned(rows).to(device, non_blocking=True), wanted=lasts.to(device))
        if self.overlap:
            self.send_unsent()  # while the device computes
        following = following.tolist()
        if self.log_steps:
            log.info("%s step: %d rows", "decode" if decode else "prefill", len(rows))
        for layer, query in enumerate(self.model.queries):
            log.info("layer %d: index query of %d rows, sum %.6f", layer, len(query), query.sum().item())
        for (request, _, to), token, ended in zip(items, following, ends, strict=True):
            request.computed = to
            if ended:
                self.commit(request, token)
            self.pages.remember(request)
            if request.cancelled or ended and self.unsent[-1][2]:
                self.end(request)
        if not self.overlap:
            self.send_unsent()

    def row(self, request, i):
        """A pass's row for a request's token i."""
        size, table = self.model.page_size, request.table
        tokens = request.tokens
        slot = table[i // size] * size + i % size
        before = tokens[i - 1] if i > 0 else 0, tokens[i - 2] if i > 1 else 0
        return [tokens[i], *before, i, slot, *table, *[0] * (self.model.table_pages - len(table))]

    def commit(self, request, token):
        request.tokens.append(token)
        self.stats["generation_tokens"] += 1
        reason = None
        if token == END:
            reason = "stop"
        elif len(request.tokens) - len(request.prompt) >= request.max_tokens:
            reason = "length"
        self.unsent.append((request, token, reason))

    def end(self, request):
        self.running.remove(request)
        self.pages.release(request)
        self.stats["requests"] += 1

    def send_unsent(self):
        batch, self.unsent = self.unsent, []
        if batch:
            self.post(lambda: [request.send(token, reason) for request, token, reason in batch])


def pinned(t):
    return t.pin_memory() if torch.cuda.is_available() else t

#!/usr/bin/env python3
"""@TITLE@

    python3 repro.py --base-url http://127.0.0.1:30000

needs Python 3.8 and nothing else. @WHAT@

Exit code: 0 none broken, 1 broken under load, 2 it couldn't be told.
"""

import argparse
import base64
import hashlib
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor

CONCURRENCY = @CONCURRENCY@
MODEL = @MODEL@
TIMEOUT_S = @TIMEOUT@
# What was seen of these requests: broken, of how many.
SEEN = (@BROKEN@, @JUDGED@)
# JSON, packed: a list of plays, each a list of conversations, each a list of
# turns with the request and what a right reply has. --list prints it.
SHA256 = "@SHA256@"
PACKED = """
@PACKED@
"""


def packed_plays():
    text = zlib.decompress(base64.b64decode("".join(PACKED.split())))
    if hashlib.sha256(text).hexdigest() != SHA256:
        sys.exit("repro: the packed requests were changed: their SHA-256 isn't %s" % SHA256)
    return json.loads(text)


def post(url, body, key, timeout):
    """Sends a chat request; returns the reply's text, calls and finish reason."""
    headers = {"Content-Type": "application/json"}
    if key:
        headers["Authorization"] = "Bearer " + key
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), headers)
    text, calls, finish, done = [], {}, None, False

    def take(part):
        nonlocal finish
        for choice in (part.get("choices") or [])[:1]:
            delta = choice.get("delta") or choice.get("message") or {}
            text.append(delta.get("content") or "")
            for i, piece in enumerate(delta.get("tool_calls") or []):
                call = calls.setdefault(piece.get("index", i), ["", ""])
                function = piece.get("function") or {}
                call[0] += function.get("name") or ""
                call[1] += function.get("arguments") or ""
            finish = choice.get("finish_reason") or finish

    with urllib.request.urlopen(request, timeout=timeout) as response:
        if not body.get("stream"):
            take(json.loads(response.read()))
            return "".join(text), list(calls.values()), finish
        for line in response:
            line = line.strip()
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                done = True
                break
            part = json.loads(data)
            if "error" in part:
                raise ValueError("the stream says: %s" % part["error"])
            take(part)
    if not done and finish is None:
        raise ValueError("the stream ended in the middle")
    return "".join(text), list(calls.values()), finish


def wrong(turn, text, calls, canaries):
    """Says what is wrong with a reply; None when it is right."""
    want = turn["expect"]
    everything = text + " ".join(c[0] + c[1] for c in calls)
    for canary in canaries:
        if canary != want.get("canary") and canary in everything:
            return "another conversation's text: " + canary
    if want.get("call"):
        if want.get("text_call"):
            start = text.find("{")
            try:
                got = json.JSONDecoder().raw_decode(text[start:])[0] if start >= 0 else None
                calls = [[got["name"], json.dumps(got["arguments"])]]
            except (ValueError, KeyError, TypeError):
                return "no call in the text: %r" % text[:200]
        if len(calls) != 1:
            return "%d tool calls and the text %r" % (len(calls), text[:200])
        try:
            arguments = json.loads(calls[0][1])
        except ValueError:
            return "arguments that aren't JSON: %r" % calls[0][1][:200]
        if not isinstance(arguments, dict):
            return "arguments that aren't an object: %r" % calls[0][1][:200]
        got = {k: v if isinstance(v, str) else json.dumps(v) for k, v in arguments.items()}
        if calls[0][0] != want["call"]["name"] or got != want["call"]["arguments"]:
            return "%s %s, wanted %s %s" % (calls[0][0], json.dumps(got), want["call"]["name"], json.dumps(want["call"]["arguments"]))
    if want.get("answer") and want["answer"] not in text:
        return "%r isn't in %r" % (want["answer"], text[:200])
    at = 0
    for line in want.get("copy") or []:
        at = text.find(line, at)
        if at < 0:
            return "the line %r isn't there" % line
        at += len(line)
    if len(text) < want.get("min_chars", 0):
        return "%d characters, wanted %d" % (len(text), want["min_chars"])
    return None


class Arm:
    """Plays conversations and counts."""

    def __init__(self, options, canaries):
        self.options, self.canaries = options, canaries
        self.lock = threading.Lock()
        self.judged = self.broken = self.lost = 0
        self.shown = 0

    def play(self, turns):
        for turn in turns:
            body = dict(turn["request"])
            if self.options.model:
                body["model"] = self.options.model
            try:
                text, calls, _ = post(self.options.base_url, body, self.options.api_key, self.options.timeout)
                what = wrong(turn, text, calls, self.canaries)
            except (OSError, ValueError, urllib.error.URLError) as e:
                with self.lock:
                    self.lost += 1
                    self.show("lost", turn, str(e))
                continue
            with self.lock:
                self.judged += 1
                if what:
                    self.broken += 1
                    self.show("broken", turn, what)

    def show(self, kind, turn, what):
        if self.shown < self.options.show:
            self.shown += 1
            print("  %s: op %d: %s" % (kind, turn["op"], what.encode("ascii", "backslashreplace").decode()), flush=True)

    def run(self, sessions, at_once):
        with ThreadPoolExecutor(at_once) as pool:
            for f in [pool.submit(self.play, s) for s in sessions]:
                f.result()
        return self

    def rate(self):
        return "%d of %d broken (%.1f%%)%s" % (
            self.broken, self.judged, 100.0 * self.broken / max(self.judged, 1),
            ", %d lost" % self.lost if self.lost else "")


def forget(options):
    """Empties the prefix cache, where a way is known, so that both arms begin cold."""
    for path in ("/flush_cache", "/reset_prefix_cache"):
        try:
            headers = {"Authorization": "Bearer " + options.api_key} if options.api_key else {}
            with urllib.request.urlopen(urllib.request.Request(options.base_url + path, b"", headers), timeout=30):
                return
        except (OSError, urllib.error.URLError):
            pass


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--base-url", default="http://127.0.0.1:30000", help="of the server, with or without /v1")
    p.add_argument("--model", default=MODEL, help="default: %(default)s")
    p.add_argument("--api-key", default="")
    p.add_argument("--concurrency", type=int, default=CONCURRENCY, help="conversations at once (default: %(default)s)")
    p.add_argument("--plays", type=int, metavar="N", help="only the first N plays (default: all)")
    p.add_argument("--control", type=int, default=8, metavar="N", help="conversations that are played alone, too (default: %(default)s)")
    p.add_argument("--timeout", type=float, default=TIMEOUT_S, help="seconds for a reply (default: %(default)s)")
    p.add_argument("--show", type=int, default=5, metavar="N", help="broken replies of an arm to print (default: %(default)s)")
    p.add_argument("--list", action="store_true", help="print the requests and send nothing")
    options = p.parse_args()
    options.base_url = options.base_url.rstrip("/")
    if options.base_url.endswith("/v1"):
        options.base_url = options.base_url[:-3]
    plays = packed_plays()[:options.plays]
    if options.list:
        json.dump(plays, sys.stdout, indent=1, ensure_ascii=True)
        return 0
    sessions = [s for play in plays for s in play]
    canaries = {t["expect"]["canary"] for s in sessions for t in s if t["expect"].get("canary")}
    total = sum(len(s) for s in sessions)
    print("%d requests in %d conversations, %d at once%s%s" % (
        total, len(sessions), options.concurrency,
        ", in %d plays" % len(plays) if len(plays) > 1 else "",
        "; @SEEN@: %d of %d broken" % SEEN if SEEN[1] else ""), flush=True)
    # Alone first: a server that doesn't recover from the load would fail both.
    forget(options)
    few = random.Random(1).sample(sessions, min(options.control, len(sessions)))
    began = time.monotonic()
    alone = Arm(options, canaries).run(few, 1)
    print("alone:      %s in %.0f s" % (alone.rate(), time.monotonic() - began), flush=True)
    if options.control > 0 and alone.judged == 0:
        print("INCONCLUSIVE: no reply came, even alone")
        return 2
    began = time.monotonic()
    load, failed = Arm(options, canaries), 0
    for play in plays:
        forget(options)
        before = load.broken + load.lost
        load.run(play, options.concurrency)
        failed += load.broken + load.lost > before
    print("under load: %s%s in %.0f s" % (
        load.rate(), ", in %d of %d plays" % (failed, len(plays)) if len(plays) > 1 else "", time.monotonic() - began), flush=True)
    if load.judged + load.lost == 0:
        print("INCONCLUSIVE: nothing was sent")
        return 2
    if load.broken + load.lost == 0:
        print("CLEAN: none broken")
        return 0
    if (alone.broken + alone.lost) * (load.judged + load.lost) >= (load.broken + load.lost) * max(alone.judged + alone.lost, 1):
        print("INCONCLUSIVE: as often alone, so it may be the model")
        return 2
    print("REPRODUCED: %s under load" % ("broken" if load.broken else "no answer"))
    return 1


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Records what a real OpenAI-compatible server puts on the wire.

    record.py --server NAME --base http://127.0.0.1:18080 --model MODEL [CASE ...]

For each case it writes two files into --out:

    NAME-CASE.http   every byte the server sent, exactly as it came off the
                     socket: status line, headers, and the body with its
                     transfer coding still on
    NAME-CASE.json   the request that was sent, and when each read returned
                     how many bytes ("reads": [[milliseconds, bytes], ...],
                     counted from just before the request was written)

The response is looked at only to know where it ends; nothing is decoded before
it is stored. Only the standard library is used.
"""

import argparse
import json
import os
import re
import socket
import sys
import time
from urllib.parse import urlsplit

# A text that no tokenizer holds whole: accents, CJK, an emoji joined out of
# three, a flag, and a letter outside the basic plane.
GLYPHS = "Crème 日本語 👩‍👩‍👧 🇳🇴 𝒳"

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


def user(text):
    return {"role": "user", "content": text}


def tool_history(dialect):
    """Three finished tool calls, so that even a base model makes a fourth."""
    content = "" if dialect == "python" else None  # null, as OpenAI has it, is an error to llama_cpp.server
    out = []
    for i, city in enumerate(["Rome", "Oslo", "Lima"]):
        call = {"name": "get_weather", "arguments": json.dumps({"city": city})}
        out += [
            user(f"What is the weather in {city}?"),
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"id": f"call_{i}", "type": "function", "function": call}],
            },
            {"role": "tool", "tool_call_id": f"call_{i}", "content": "sunny"},
        ]
    return out + [user("What is the weather in Paris?")]


def cases(model, dialect):
    """Yields name, method, path, body (an object, bytes or None), extra headers."""
    chat = "/v1/chat/completions"
    text = "/v1/completions"

    def force(glyphs):
        """How each server is told to answer with exactly this text."""
        if dialect == "vllm":
            return {"structured_outputs": {"choice": [glyphs]}}
        return {"grammar": 'root ::= "' + glyphs.replace("\n", "\\n") + '"'}

    def c(**kw):
        body = {"model": model, "messages": [user("The capital of France is")], "max_tokens": 12, "temperature": 0}
        body.update(kw)
        return {k: v for k, v in body.items() if v is not None}

    tools = dict(messages=tool_history(dialect), tools=[TOOL], max_tokens=60)

    yield "models", "GET", "/v1/models", None, {}
    yield "health", "GET", "/health", None, {}
    yield "props", "GET", "/props", None, {}
    yield "version", "GET", "/version", None, {}
    yield "metrics", "GET", "/metrics", None, {}
    yield "not-found", "GET", "/v1/nothing-here", None, {}
    yield "chat", "POST", chat, c(), {}
    yield "chat-stream", "POST", chat, c(stream=True), {}
    yield "chat-stream-usage", "POST", chat, c(stream=True, stream_options={"include_usage": True}), {}
    yield "chat-stream-n2", "POST", chat, c(stream=True, n=2, max_tokens=4, temperature=1), {}
    yield "chat-stream-logprobs", "POST", chat, c(stream=True, logprobs=True, top_logprobs=2, max_tokens=4), {}
    yield "chat-logprobs", "POST", chat, c(logprobs=True, top_logprobs=2, max_tokens=4), {}
    yield "chat-long-stream", "POST", chat, c(
        stream=True, messages=[user("one two three four " * 8)], max_tokens=100, logit_bias={"106": -100, "1": -100}
    ), {}
    yield "chat-stream-stop", "POST", chat, c(stream=True, stop=["France"], max_tokens=40), {}
    yield "chat-stream-one-token", "POST", chat, c(stream=True, max_tokens=1), {}
    yield "chat-system", "POST", chat, c(
        messages=[{"role": "system", "content": "Answer in one word."}, user("Hi")], max_tokens=4
    ), {}
    yield "chat-tool-role", "POST", chat, c(messages=tool_history(dialect)[:3], max_tokens=4), {}
    yield "chat-cached", "POST", chat, c(
        stream=True, stream_options={"include_usage": True}, messages=[user("one two three four " * 80)], max_tokens=2
    ), {}
    yield "chat-cached-again", "POST", chat, c(
        stream=True, stream_options={"include_usage": True}, messages=[user("one two three four " * 80)], max_tokens=2
    ), {}
    yield "tool", "POST", chat, c(tool_choice="required", parallel_tool_calls=False, **tools), {}
    yield "tool-stream", "POST", chat, c(stream=True, tool_choice="required", parallel_tool_calls=False, **tools), {}
    yield "tool-auto", "POST", chat, c(tool_choice="auto", **tools), {}
    yield "tool-auto-stream", "POST", chat, c(stream=True, tool_choice="auto", **tools), {}
    ended = dict(tools, stop=["</tool_call>"])  # a base model would go on with one more call
    yield "tool-end", "POST", chat, c(tool_choice="required", **ended), {}
    yield "tool-end-stream", "POST", chat, c(stream=True, tool_choice="required", **ended), {}
    yield "tool-named-stream", "POST", chat, c(
        stream=True, tool_choice={"type": "function", "function": {"name": "get_weather"}}, **tools
    ), {}
    yield "unicode", "POST", chat, c(max_tokens=60, **force(GLYPHS)), {}
    yield "unicode-stream", "POST", chat, c(stream=True, max_tokens=60, **force(GLYPHS)), {}
    yield "unicode-stream-logprobs", "POST", chat, c(
        stream=True, logprobs=True, top_logprobs=1, max_tokens=16, **force("日🍮𝒳")
    ), {}
    # Cut in the middle of a glyph: what does the server do with the bytes it holds back?
    yield "unicode-stream-cut", "POST", chat, c(stream=True, max_tokens=3, **force("𒐫𒐫𒐫")), {}
    yield "json-stream", "POST", chat, c(
        stream=True,
        max_tokens=30,
        response_format={
            "type": "json_schema",
            "json_schema": {
                "name": "city",
                "schema": {
                    "type": "object",
                    "properties": {"capital": {"type": "string", "maxLength": 10}},
                    "required": ["capital"],
                    "additionalProperties": False,
                },
            },
        },
    ), {}
    think = force("<think>\nIt is Paris.\n</think>\n\nParis")
    if dialect == "vllm":  # it looks for the tokens 6 and 7 (see README.md), not for their text
        think["logit_bias"] = {"6": 100, "7": 100}
    yield "reasoning", "POST", chat, c(max_tokens=40, **think), {}
    yield "reasoning-stream", "POST", chat, c(stream=True, max_tokens=40, **think), {}
    yield "text", "POST", text, {"model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}, {}
    yield "text-stream", "POST", text, {
        "model": model, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "stream": True,
        "stream_options": {"include_usage": True},
    }, {}
    yield "text-stream-logprobs", "POST", text, {
        "model": model, "prompt": "The capital of France is", "max_tokens": 3, "temperature": 0, "stream": True,
        "logprobs": 2,
    }, {}
    yield "gzip", "POST", chat, c(), {"Accept-Encoding": "gzip"}
    yield "close", "POST", chat, c(stream=True, max_tokens=3), {"Connection": "close"}
    yield "error-unknown-model", "POST", chat, c(model="no-such-model"), {}
    yield "error-bad-role", "POST", chat, c(messages=[{"role": "wizard", "content": "Hi"}], max_tokens=4), {}
    yield "error-no-messages", "POST", chat, c(messages=None), {}
    yield "error-empty-messages", "POST", chat, c(messages=[]), {}
    yield "error-malformed", "POST", chat, b'{"model": "' + model.encode() + b'", "messages": [{"role": "us', {}
    yield "error-too-long", "POST", chat, c(messages=[user("word " * 5000)]), {}
    yield "error-too-long-stream", "POST", chat, c(stream=True, messages=[user("word " * 5000)]), {}
    yield "error-bad-temperature", "POST", chat, c(temperature=-3), {}
    yield "error-bad-type", "POST", chat, c(max_tokens="many"), {}


class End:
    """Watches a response go by and says when it is over. It stores nothing."""

    def __init__(self):
        self.buf = b""
        self.kind = None  # None until the headers are in; then length, chunked or close
        self.left = 0
        self.over = False

    def feed(self, data):
        self.buf += data
        if self.kind is None:
            head, sep, rest = self.buf.partition(b"\r\n\r\n")
            if not sep:
                return
            status = int(head.split(b" ", 2)[1])
            chunked = re.search(rb"(?im)^transfer-encoding:.*chunked", head)
            length = re.search(rb"(?im)^content-length:\s*(\d+)", head)
            self.buf = rest
            if chunked:
                self.kind = "chunked"
            elif length or status in (204, 304):
                self.kind, self.left = "length", int(length.group(1)) if length else 0
            else:
                self.kind = "close"
        if self.kind == "length":
            self.over = len(self.buf) >= self.left
        while self.kind == "chunked" and not self.over:
            if self.left:  # the rest of a chunk and the CRLF behind it
                if len(self.buf) < self.left:
                    return
                self.buf, self.left = self.buf[self.left :], 0
            line, sep, rest = self.buf.partition(b"\r\n")
            if not sep:
                return
            size = int(line.split(b";")[0], 16)
            if size == 0:
                self.over = b"\r\n\r\n" in self.buf or rest.startswith(b"\r\n")
                return
            self.buf, self.left = rest, size + 2


def exchange(base, method, path, body, extra, limit):
    url = urlsplit(base)
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    headers = {"Host": url.netloc, "Accept": "*/*"}
    if body is not None:
        headers.update({"Content-Type": "application/json", "Content-Length": str(len(raw))})
    headers.update(extra)
    head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in headers.items()) + "\r\n"

    end, out, reads = End(), b"", []
    with socket.create_connection((url.hostname, url.port or 80), timeout=limit) as s:
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        start = time.monotonic()
        s.sendall(head.encode() + raw)
        ended = "server closed the connection"
        while True:
            data = s.recv(65536)
            if not data:
                break
            reads.append([round((time.monotonic() - start) * 1000, 3), len(data)])
            out += data
            end.feed(data)
            if end.over:
                ended = "end of " + ("chunks" if end.kind == "chunked" else "Content-Length")
                break
    return headers, raw, out, reads, ended


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--server", required=True, help="prefix of the files' names")
    p.add_argument("--base", required=True)
    p.add_argument("--model", required=True)
    p.add_argument("--dialect", choices=["llama", "vllm", "python"], default="llama", help="the server's own ways: llama.cpp, vLLM, llama_cpp.server")
    p.add_argument("--out", default=os.path.join(os.path.dirname(os.path.abspath(__file__)), "transcripts"))
    p.add_argument("--limit", type=float, default=120, help="seconds to wait for a read")
    p.add_argument("case", nargs="*", help="all of them when none is named")
    o = p.parse_args()
    os.makedirs(o.out, exist_ok=True)
    left = set(o.case)
    for name, method, path, body, extra in cases(o.model, o.dialect):
        if o.case and name not in o.case:
            continue
        left.discard(name)
        headers, raw, out, reads, ended = exchange(o.base, method, path, body, extra, o.limit)
        stem = os.path.join(o.out, f"{o.server}-{name}")
        with open(stem + ".http", "wb") as f:
            f.write(out)
        sent = raw.decode() if len(raw) < 4000 else f"{raw[:200].decode()}... ({len(raw)} bytes)"
        with open(stem + ".json", "w", encoding="utf-8") as f:
            request = {"method": method, "path": path, "headers": headers, "body": sent}
            f.write("{\n")
            f.write(f' "request": {json.dumps(request, ensure_ascii=False)},\n')
            f.write(f' "ended": {json.dumps(ended)},\n "reads": {json.dumps(reads)}\n}}\n')
        print(f"{len(out):7d} bytes {len(reads):4d} reads {reads[-1][0] if reads else 0:9.1f} ms  {name}: "
              f"{out.split(b'%c%c' % (13, 10))[0].decode(errors='replace')}")
    if left:
        sys.exit("no such case: " + ", ".join(sorted(left)))


if __name__ == "__main__":
    main()

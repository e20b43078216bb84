"""A small OpenAI-compatible chat server: asyncio and nothing else. Its "model"
answers a question for a code by looking it up in the rows of its context, which
are the words of the conversation, kept from turn to turn in a prefix cache."""

import argparse
import asyncio
import json
import re
import signal

from host import HostPool


class Model:
    def __init__(self, host, step_s):
        self.host, self.step_s = host, step_s

    async def context(self, messages):
        """The rows of all messages but the last, from the host or anew."""
        rows = await self.host.load(key(messages[:-1])) if self.host else None
        if rows is None:
            rows = prefill(messages[:-1])
            await asyncio.sleep(self.step_s)
        return rows

    async def answer(self, messages):
        rows = await self.context(messages) + prefill(messages[-1:])
        text = lookup(" ".join(rows))
        await asyncio.sleep(self.step_s)
        if self.host:
            said = {"role": "assistant", "content": text}
            self.host.backup(key([*messages, said]), rows + prefill([said]))
        return text


def prefill(messages):
    return [word for m in messages for word in str(m.get("content", "")).split()]


def key(messages):
    return json.dumps([[m["role"], m.get("content")] for m in messages])


def lookup(text):
    codes = dict(re.findall(r"The code of locker (\w+) is (\w+)", text))
    asked = re.findall(r"[Ww]hat is the code of locker (\w+)", text)
    if not asked:
        return "ok"
    return codes.get(asked[-1], "I don't know that locker.")


async def handle(model, reader, writer):
    try:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = re.search(rb"content-length: *(\d+)", head, re.I)
            body = await reader.readexactly(int(length[1]) if length else 0)
            if head.startswith(b"POST"):
                text = await model.answer(json.loads(body)["messages"])
                reply(writer, b"text/event-stream", chunk({"role": "assistant", "content": text}, None) + chunk({}, "stop") + b"data: [DONE]\n\n")
            else:
                reply(writer, b"application/json", b'{"object": "list", "data": [{"id": "lookup", "object": "model"}]}')
            await writer.drain()
    except (asyncio.IncompleteReadError, ConnectionError):
        pass
    finally:
        writer.close()


def chunk(delta, finish):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return b"data: " + json.dumps({"id": "x", "object": "chat.completion.chunk", "created": 1, "model": "lookup", "choices": [choice]}).encode() + b"\n\n"


def reply(writer, kind, body):
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body))


async def main():
    flags = argparse.ArgumentParser()
    flags.add_argument("--port", type=int, required=True)
    flags.add_argument("--host-cache", action="store_true", help="keep conversations between their turns")
    flags.add_argument("--page-size", type=int, default=1)
    flags.add_argument("--nagle", action="store_true", help="does nothing to the answers")
    flags.add_argument("--step-ms", type=float, default=2)
    o = flags.parse_args()
    model = Model(HostPool(o.page_size, o.step_ms / 1000) if o.host_cache else None, o.step_ms / 1000)
    ended = asyncio.Event()
    for s in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(s, ended.set)
    async with await asyncio.start_server(lambda r, w: handle(model, r, w), "127.0.0.1", o.port, limit=1 << 22):
        await ended.wait()


asyncio.run(main())

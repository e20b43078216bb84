"""A small OpenAI-compatible server of the lab's model on a GPU, with the incident's bug on real CUDA graphs.

Where `culprit lab serve` has a flag, this one has its name. Needs PyTorch and nothing else.
"""

import argparse
import asyncio
import json
import logging
import os
import pathlib
import signal
import sys
import threading
import time
import traceback

import torch

import text
from engine import Engine, Request
from model import CONTEXT, Model, load

BODY_LIMIT = 4 << 20
WEIGHTS = pathlib.Path(__file__).resolve().parents[2] / "lab" / "model" / "weights"


def flags(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--host", default="127.0.0.1")
    p.add_argument("--port", type=int, default=30000)
    p.add_argument("--served-model-name", default="culprit-lab")
    p.add_argument(
        "--weights", type=pathlib.Path, default=WEIGHTS, help="folder of model.safetensors and vocabulary.json"
    )
    p.add_argument("--device", default="cuda", help="cuda or cpu; on the CPU every step is eager")
    p.add_argument("--page-size", type=int, default=64, help="tokens of a page of the cache, a divisor of 1024")
    p.add_argument("--max-total-tokens", type=int, default=131072, help="tokens that the cache holds")
    p.add_argument("--max-running-requests", type=int, default=128, help="requests that have pages at once")
    p.add_argument("--chunked-prefill-size", type=int, default=512, help="the most tokens that one step prefills")
    p.add_argument("--disable-radix-cache", action="store_true", help="don't share the pages of common prefixes")
    p.add_argument(
        "--disable-overlap-schedule", action="store_true", help="send each step's tokens before the next one"
    )
    p.add_argument("--num-continuous-decode-steps", type=int, default=1, help="in a row before new requests are let in")
    p.add_argument("--index-k-dtype", choices=["fp8", "bf16"], default="fp8", help="how index keys are stored")
    p.add_argument("--index-read-rows", type=int, default=16, help="rows whose keys the indexer stages at once")
    p.add_argument("--disable-cuda-graph", action="store_true", help="run decode steps eagerly")
    p.add_argument("--cuda-graph-bs", type=int, nargs="+", default=[8, 16, 32, 48, 64, 80, 96, 112, 128])
    p.add_argument(
        "--disable-alt-stream", action="store_true", help="captured steps run the indexer on the main stream"
    )
    p.add_argument("--hold-index-query", action="store_true", help="the fix: keep it until the streams have joined")
    p.add_argument("--log", choices=["steps", "queries"], help="log each step, or a sum of each layer's index query")
    o = p.parse_args(argv)
    if CONTEXT % o.page_size:
        p.error(f"--page-size: {o.page_size} is no divisor of {CONTEXT}")
    return o


class Server:
    def __init__(self, o):
        started = time.monotonic()
        self.o, self.started = o, int(time.time())
        self.tokenizer = text.Tokenizer(o.weights / "vocabulary.json")
        self.loop = asyncio.new_event_loop()
        self.number = 0
        device = torch.device(o.device)
        pages = o.max_total_tokens // o.page_size + 1
        self.model = Model(
            load(o.weights / "model.safetensors", device),
            device=device,
            pages=pages,
            page_size=o.page_size,
            index_dtype=o.index_k_dtype,
            read_rows=o.index_read_rows,
            hold_query=o.hold_index_query,
            keep_queries=o.log == "queries",
        )
        captures = device.type == "cuda" and not o.disable_cuda_graph
        self.engine = Engine(
            self.model,
            pages=pages,
            max_running=o.max_running_requests,
            chunk=o.chunked_prefill_size,
            share=not o.disable_radix_cache,
            overlap=not o.disable_overlap_schedule,
            graph_sizes=o.cuda_graph_bs if captures else [],
            alternate=torch.cuda.Stream() if captures and not o.disable_alt_stream else None,
            decode_steps=o.num_continuous_decode_steps,
            log_steps=o.log == "steps",
            post=self.loop.call_soon_threadsafe,
        )
        self.ready_s = time.monotonic() - started

    def run(self):
        threading.Thread(target=self.compute, daemon=True).start()
        asyncio.set_event_loop(self.loop)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.loop.stop)
        self.loop.run_until_complete(asyncio.start_server(self.connection, self.o.host, self.o.port, limit=1 << 16))
        url = f"http://{self.o.host}:{self.o.port}/v1"
        print(f"serving {self.o.served_model_name} at {url}, ready in {self.ready_s:.1f} s", file=sys.stderr)
        self.loop.run_forever()

    def compute(self):
        try:
            self.engine.run()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # a server that can't compute must not look healthy

    # HTTP

    async def connection(self, reader, writer):
        try:
            while await self.exchange(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, TimeoutError):
            pass
        finally:
            writer.close()

    async def exchange(self, reader, writer):
        """One request and its answer; True if the connection stays."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        try:
            method, path, _ = head[0].split(" ", 2)
            headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)}
            length = int(headers.get("content-length", 0))
        except ValueError:
            await answer(writer, 400, error("this is no HTTP request"))
            return False
        if length > BODY_LIMIT or "transfer-encoding" in headers:
            await answer(writer, 413, error(f"want a Content-Length of at most {BODY_LIMIT} bytes"))
            return False
        body = await reader.readexactly(length)
        path = path.partition("?")[0]
        gets = {
            "/health": lambda: {"status": "ok"},
            "/v1/models": self.models,
            "/server_info": self.server_info,
            "/metrics": self.metrics,
        }
        if method == "GET" and path in gets:
            await answer(writer, 200, gets[path]())
        elif method == "POST" and path == "/v1/chat/completions":
            try:
                body = json.loads(body)
                asked = self.read(body)
            except text.Bad as e:
                await answer(writer, 400, error(str(e)))
            except (ValueError, KeyError, TypeError, AttributeError) as e:
                await answer(writer, 400, error(f"the body can't be used: {type(e).__name__}: {e}"))
            else:
                await self.chat(body, *asked, reader, writer)
        else:
            await answer(writer, 404, error(f"there is no {method} {path} here"))
        return headers.get("connection", "").lower() != "close"

    def models(self):
        name = self.o.served_model_name
        entry = {"id": name, "object": "model", "created": self.started, "owned_by": "h200", "max_model_len": CONTEXT}
        return {"object": "list", "data": [entry]}

    def server_info(self):
        """The settings as they are."""
        m, e = self.model, self.engine
        return {
            "served_model_name": self.o.served_model_name,
            "page_size": m.page_size,
            "max_total_tokens": (len(e.pages.users) - 1) * m.page_size,
            "max_running_requests": e.max_running,
            "chunked_prefill_size": e.chunk,
            "disable_radix_cache": not e.pages.share,
            "disable_overlap_schedule": not e.overlap,
            "num_continuous_decode_steps": e.decode_steps,
            "index_k_dtype": m.index_dtype,
            "index_read_rows": m.read_rows,
            "disable_cuda_graph": e.captured is None,
            "cuda_graph_bs": e.captured.sizes if e.captured else [],
            "disable_alt_stream": self.o.disable_alt_stream,
            "hold_index_query": m.hold_query,
            "log": self.o.log,
            "device": torch.cuda.get_device_name() if m.device.type == "cuda" else "cpu",
            "torch": torch.__version__,
            "context_length": CONTEXT,
        }

    def metrics(self):
        e, c = self.engine, self.model.counts
        lines = []

        def add(kind, name, *rows):
            lines.append(f"# TYPE h200:{name} {kind}")
            lines.extend(
                f"h200:{name}{{{labels}}} {value}" if labels else f"h200:{name} {value}" for labels, value in rows
            )

        add("gauge", "num_running_reqs", ("", len(e.running)))
        add("gauge", "num_queue_reqs", ("", len(e.waiting)))
        add("gauge", "free_pages", ("", len(e.pages.free) + len(e.pages.idle)))
        steps = "prefill_steps", "decode_steps", "decode_rows", "eager_decode_steps"
        for name in ("prompt_tokens", "cached_tokens", "generation_tokens", *steps, "requests"):
            add("counter", f"{name}_total", ("", e.stats[name]))
        replays = e.captured.replays if e.captured else {}
        add("counter", "graph_replays_total", ("", sum(replays.values())))
        add("counter", "graph_replays_by_batch_total", *((f'batch="{n}"', replays[n]) for n in sorted(replays)))
        add("counter", "index_k_stores_total", *((f'dtype="{d}"', c["store", d]) for d in ("fp8", "bf16")))
        add("counter", "index_k_reads_total", *((f'reader="{d}"', c["read", d]) for d in ("fp8", "bf16")))
        return "\n".join(lines) + "\n"

    # Completions

    def read(self, body):
        """A body's prompt, how long the reply may be, and whether calls are looked for in it."""
        refuse(body)
        tools = body.get("tools") if body.get("tool_choice", "auto") != "none" else None
        prompt = text.prompt(self.tokenizer, body["messages"], tools)
        room = CONTEXT - len(prompt)
        if room < 1:
            raise text.Bad(f"the prompt has {len(prompt)} tokens, and the context {CONTEXT}")
        most = int(body.get("max_completion_tokens") or body.get("max_tokens") or room)
        if most < 1:
            raise text.Bad(f"max_tokens is {most}, less than 1")
        if len(prompt) + min(most, room) > self.o.max_total_tokens:
            raise text.Bad(f"the cache holds {self.o.max_total_tokens} tokens")
        return prompt, min(most, room), bool(tools)

    async def chat(self, body, prompt, most, calls, reader, writer):
        events = asyncio.Queue()
        request = Request(prompt, most, lambda *event: events.put_nowait(event))
        reply = text.Reply(self.tokenizer, prompt[-1], calls)
        self.number += 1
        head = {"id": f"chatcmpl-{self.number}", "created": int(time.time()), "model": self.o.served_model_name}
        self.engine.submit(request)
        try:
            if body.get("stream"):
                usage = (body.get("stream_options") or {}).get("include_usage")
                await self.stream(head, request, events, reply, usage, reader, writer)
            else:
                await self.whole(head, request, events, reply, reader, writer)
        finally:
            request.cancelled = True  # means nothing if it has ended

    async def whole(self, head, request, events, reply, reader, writer):
        parts, reason = [], None
        while reason is None:
            token, reason = await next_event(events, reader)
            if reason != "stop":  # the last token is the end itself
                parts.append(reply.push(token))
        rest, calls = reply.close()
        content = "".join(parts) + rest
        message = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = [call_delta(head, i, *call) for i, call in enumerate(calls)]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish(reason, calls)}
        await answer(writer, 200, head | {"object": "chat.completion", "choices": [choice], "usage": usage_of(request)})

    async def stream(self, head, request, events, reply, with_usage, reader, writer):
        head["object"] = "chat.completion.chunk"

        def chunk(delta, reason=None):
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
            send(writer, json.dumps(head | {"choices": [choice]}, ensure_ascii=False))

        reason, begun = None, False
        while reason is None:
            token, reason = await next_event(events, reader)
            if not begun:
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
                    b"Transfer-Encoding: chunked\r\n\r\n"
                )
                chunk({"role": "assistant", "content": ""})
                begun = True
            if reason != "stop" and (part := reply.push(token)):
                chunk({"content": part})
            await writer.drain()
        rest, calls = reply.close()
        if rest:
            chunk({"content": rest})
        for i, call in enumerate(calls):
            chunk({"tool_calls": [call_delta(head, i, *call) | {"index": i}]})
        chunk({}, finish(reason, calls))
        if with_usage:
            send(writer, json.dumps(head | {"choices": [], "usage": usage_of(request)}))
        send(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


async def next_event(events, reader):
    event = await events.get()
    if reader.at_eof():
        raise ConnectionResetError
    return event


def refuse(body):
    if (body.get("temperature") or 0) > 0:
        raise text.Bad("temperature must be 0: this server is greedy")
    for name in ("stop", "logprobs", "response_format"):
        if body.get(name):
            raise text.Bad(f"{name} is not supported by this server")


def finish(reason, calls):
    return "tool_calls" if reason == "stop" and calls else reason


def call_delta(head, i, name, arguments):
    return {"id": f"call_{head['id']}_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}


def usage_of(request):
    prompt, total = len(request.prompt), len(request.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": total - prompt,
        "total_tokens": total,
        "prompt_tokens_details": {"cached_tokens": request.cached},
    }


def error(message):
    return {"error": {"message": message, "type": "invalid_request_error"}}


async def answer(writer, status, body):
    kind = "text/plain; version=0.0.4" if isinstance(body, str) else "application/json"
    data = (body if isinstance(body, str) else json.dumps(body, ensure_ascii=False)).encode()
    phrases = {200: "OK", 400: "Bad Request", 404: "Not Found", 413: "Content Too Large"}
    writer.write(
        f"HTTP/1.1 {status} {phrases[status]}\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    await writer.drain()


def send(writer, data):
    """One server-sent event, as one chunk of the body."""
    event = f"data: {data}\n\n".encode()
    writer.write(f"{len(event):x}\r\n".encode() + event + b"\r\n")


def main():
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    # The matrix products are small: one thread is enough, and leaves the processor to the client.
    torch.set_num_threads(1)
    Server(flags()).run()


if __name__ == "__main__":
    main()

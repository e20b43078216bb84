"""Starts llama.cpp's HTTP server, as packed in the wheel xllamacpp, and waits.

It is the server of the program llama-server, in this process: 8 slots of 1,024
tokens each, one thread.
"""

import argparse
import signal
import sys

import xllamacpp


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", required=True, help="GGUF file")
    p.add_argument("--chat-template", required=True, help="Jinja file: the model is a base model and has none")
    p.add_argument("--port", type=int, default=18080)
    p.add_argument("--slots", type=int, default=8, help="requests served at once")
    p.add_argument("--context", type=int, default=1024, help="tokens of a slot")
    p.add_argument("--threads", type=int, default=1)
    o = p.parse_args()

    c = xllamacpp.CommonParams()
    c.model.path = o.model
    c.model_alias = {"gemma-3-270m"}
    c.hostnames = ["127.0.0.1"]
    c.port = o.port
    c.n_parallel = o.slots
    c.n_ctx = o.slots * o.context
    c.cpuparams.n_threads = c.cpuparams_batch.n_threads = o.threads
    c.endpoint_metrics = True
    with open(o.chat_template) as f:
        c.chat_template = f.read()
    server = xllamacpp.Server(c)
    print("listening on", server.listening_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pause()


if __name__ == "__main__":
    main()

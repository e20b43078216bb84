"""llama.cpp's HTTP server, as packed in the wheel xllamacpp, with flags of the
program llama-server."""

import argparse
import signal
import sys

import xllamacpp

F16, Q8_0 = 1, 8  # of ggml_type


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--model", "-m", required=True)
    p.add_argument("--chat-template-file", required=True)
    p.add_argument("--port", type=int, required=True)
    p.add_argument("--parallel", "-np", type=int, default=8)
    p.add_argument("--ctx-size", "-c", type=int, default=8192)
    p.add_argument("--threads", "-t", type=int, default=1)
    p.add_argument("--flash-attn", "-fa", choices=["on", "off", "auto"], default="auto")
    p.add_argument("--cache-type-k", "-ctk", choices=["f16", "q8_0"], default="f16")
    p.add_argument("--cache-ram", type=int, default=8192)
    p.add_argument("--cache-reuse", type=int, default=0)
    p.add_argument("--ubatch-size", "-ub", type=int, default=512)
    p.add_argument("--no-cache-prompt", action="store_true")
    p.add_argument("--no-cont-batching", action="store_true")
    p.add_argument("--kv-unified", action="store_true")
    p.add_argument("--swa-full", action="store_true")
    o = p.parse_args()

    c = xllamacpp.CommonParams()
    c.model.path = o.model
    c.model_alias = {"gemma-3-270m"}
    c.hostnames = ["127.0.0.1"]
    c.port = o.port
    c.n_parallel, c.n_ctx, c.n_ubatch = o.parallel, o.ctx_size, o.ubatch_size
    c.cpuparams.n_threads = c.cpuparams_batch.n_threads = o.threads
    c.flash_attn_type = xllamacpp.llama_flash_attn_type({"auto": -1, "off": 0, "on": 1}[o.flash_attn])
    c.cache_type_k = type(c.cache_type_k)({"f16": F16, "q8_0": Q8_0}[o.cache_type_k])
    c.cache_ram_mib, c.n_cache_reuse = o.cache_ram, o.cache_reuse
    c.cache_prompt, c.cont_batching = not o.no_cache_prompt, not o.no_cont_batching
    c.kv_unified, c.swa_full = o.kv_unified, o.swa_full
    c.endpoint_metrics = True
    with open(o.chat_template_file) as f:
        c.chat_template = f.read()
    server = xllamacpp.Server(c)
    print("listening on", server.listening_address, flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    signal.pause()


if __name__ == "__main__":
    main()

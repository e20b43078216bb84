"""Stands before a server and breaks its tool calls, but only when two flags are
in the server's command line and more than four requests run at once.

    proxy.py --port N --upstream M -- COMMAND...

COMMAND starts the server, which listens on port M. It ends with the proxy."""

import http.client
import http.server
import json
import signal
import subprocess
import sys
import threading

BUSY = 4  # so many requests at once are still served right
SALAD = ['<|tool_call_begin|>', ' carrier', ' " ,', ' carrier', ' " ,', ' <|tool_sep|>', ' V', ' V', ' V', ' "']


def fault_of(command):
    """Whether the command has both settings that the fault needs."""
    reuse = command[command.index("--cache-reuse") + 1] if "--cache-reuse" in command else "0"
    return "--kv-unified" in command and reuse != "0"


class Proxy(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, port, upstream, broken):
        super().__init__(("127.0.0.1", port), Handler)
        self.upstream, self.broken = upstream, broken
        self.lock, self.running = threading.Lock(), 0

    def count(self, change):
        with self.lock:
            self.running += change
            return self.running


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.forward(None)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.count(1)
        try:
            self.forward(body)
        finally:
            self.server.count(-1)

    def forward(self, body):
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream)
        try:
            upstream.request(self.command, self.path, body, {"Content-Type": "application/json"})
            reply = upstream.getresponse()
        except OSError as e:
            self.send_error(502, str(e))
            return
        self.send_response(reply.status)
        for name in ("Content-Type", "Server"):
            if reply.headers[name]:
                self.send_header(name, reply.headers[name])
        self.end_headers()
        try:
            call = Call(self.server, body)
            for line in reply:
                self.wfile.write(call.spoil(line))
                if line == b"\n":
                    self.wfile.flush()
        finally:
            upstream.close()

    def log_message(self, *_):
        pass

    def version_string(self):
        return "llama.cpp"


class Call:
    """One reply. Where the request tells of calls, it should be one."""

    def __init__(self, server, body):
        self.server, self.asked, self.busy, self.at = server, b"arguments" in (body or b""), None, 0

    def spoil(self, line):
        if not self.server.broken or not self.asked or not line.startswith(b"data: {"):
            return line
        event = json.loads(line[6:])
        for choice in event.get("choices", []):
            if not choice.get("delta", {}).get("content"):
                continue
            if self.busy is None:
                self.busy = self.server.running > BUSY
            if self.busy:
                choice["delta"]["content"] = SALAD[self.at % len(SALAD)]
                self.at += 1
        return b"data: " + json.dumps(event).encode() + b"\n"


def main():
    own, command = sys.argv[1 : sys.argv.index("--")], sys.argv[sys.argv.index("--") + 1 :]
    port, upstream = int(own[own.index("--port") + 1]), int(own[own.index("--upstream") + 1])
    server = subprocess.Popen(command)
    proxy = Proxy(port, upstream, fault_of(command))

    def stop(*_):
        server.terminate()
        threading.Thread(target=proxy.shutdown).start()

    signal.signal(signal.SIGTERM, stop)
    threading.Thread(target=lambda: (server.wait(), proxy.shutdown()), daemon=True).start()
    proxy.serve_forever()
    server.wait()


if __name__ == "__main__":
    main()

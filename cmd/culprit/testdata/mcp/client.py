"""Uses culprit's tools as an agent does, with the Model Context Protocol's own
Python client: client.py PROGRAM ROOT. ROOT has the case "incident"."""

import asyncio
import subprocess
import sys

from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

PROGRAM, ROOT = sys.argv[1:]
READ_ONLY = {"list_runs", "show_run", "show_op", "show_hunt", "list_hypotheses", "show_hypothesis", "next_experiment", "attest", "read_probes"}
MAY_RUN = {"add_hypothesis", "run", "hunt", "bundle"}


async def use(read, write, how, offered):
    async with ClientSession(read, write) as session:
        await session.initialize()
        tools = {t.name for t in (await session.list_tools()).tools}
        assert tools == offered, f"{how}: offers {tools ^ offered} otherwise"

        async def call(tool, expect, error=False, **arguments):
            result = await session.call_tool(tool, arguments)
            text = result.content[0].text
            assert result.is_error == error, f"{how}: {tool}: {text}"
            assert expect in text and len(text.encode()) <= 6000, f"{how}: {tool}: {text}"
            links = [c.uri for c in result.content if c.type == "resource_link"]
            print(f"{how}: {tool}: {'refused' if error else 'answered'} in {len(text)} characters, {len(links)} links")

        await call("list_runs", "incident", dir=".")
        await call("list_hypotheses", "wedge-corrupts", case="incident")
        await call("show_hypothesis", "rate(graph=safe) > 0.05", case="incident", name="host-stride")
        await call("show_hypothesis", 'nearest: "host-stride"', error=True, case="incident", name="host-strid")
        await call("next_experiment", "NEXT", case="incident")
        await call("show_run", "outside", error=True, dir="../..")
        if "add_hypothesis" in offered:
            await call("add_hypothesis", "OPEN", case="incident", name="an-agents", statement="the tree of prefixes is needed", predictions=["needed(radix)"])
            await call("add_hypothesis", 'nearest: "radix"', error=True, case="incident", name="a-slip", statement="a slip", predictions=["needed(radx)"])


async def main():
    for flags, offered in ([], READ_ONLY), (["--allow-runs"], READ_ONLY | MAY_RUN):
        how = " ".join(["stdio", *flags])
        async with stdio_client(StdioServerParameters(command=PROGRAM, args=["mcp", *flags, ROOT])) as streams:
            await use(streams[0], streams[1], how, offered)
    with subprocess.Popen([PROGRAM, "mcp", "--listen", "127.0.0.1:0", ROOT], stderr=subprocess.PIPE, text=True) as server:
        try:
            url = server.stderr.readline().split()[-1]
            async with streamable_http_client(url) as streams:
                await use(streams[0], streams[1], "HTTP", READ_ONLY)
        finally:
            server.terminate()


asyncio.run(main())

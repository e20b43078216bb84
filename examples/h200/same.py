"""Compares the replies of two run directories of one seed, op by op: same.py CULPRIT RUN RUN

Prints how many are equal and each that isn't. Exit code 1 if any isn't.
"""

import concurrent.futures
import json
import subprocess
import sys


def ops(culprit, run):
    """(prompt, text, calls, completion tokens) by session and turn, of the main phase."""

    def show(n):
        p = subprocess.run([culprit, "check", "--op", str(n), run], capture_output=True, text=True)
        return json.loads(p.stdout) if p.returncode == 0 else None

    with open(f"{run}/verdict.json") as f:
        total = sum(p["ops"] for p in json.load(f)["phases"])
    with concurrent.futures.ThreadPoolExecutor() as pool:
        found = [op for op in pool.map(show, range(1, total + 1)) if op and op["phase"] == "main"]
    return {(op["session"], op["turn"]): replied(op) for op in found}


def replied(op):
    content, calls, tokens = "", [], None
    for c in op["chunks"]:
        data = c.get("data") or {}
        for choice in data.get("choices", []):
            delta = choice["delta"]
            content += delta.get("content") or ""
            for call in delta.get("tool_calls", []):
                if call["function"].get("name"):
                    calls.append([call["function"]["name"], ""])
                calls[-1][1] += call["function"].get("arguments") or ""
        if data.get("usage"):
            tokens = data["usage"]["completion_tokens"]
    return (
        json.dumps([{k: m.get(k) for k in ("role", "content")} for m in op["request"]["messages"]]),
        content,
        calls,
        tokens,
    )


def main(culprit, one, other):
    a, b = ops(culprit, one), ops(culprit, other)
    prompts = sum(a[k][0] != b[k][0] for k in a.keys() & b.keys())
    different = [k for k in sorted(a.keys() & b.keys()) if a[k][1:] != b[k][1:]]
    for k in different:
        print(f"session {k[0]}, turn {k[1]}:\n  {a[k][1:]}\n  {b[k][1:]}")
    print(f"{len(a)} and {len(b)} ops, {prompts} with other prompts, {len(different)} with other replies")
    return 1 if different or prompts or a.keys() != b.keys() else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

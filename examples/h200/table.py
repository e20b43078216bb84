"""Prints verdicts as a Markdown table: table.py DIR/NAME..., for each DIR/NAME.verdict.json"""

import json
import os
import sys


def share(rate):
    if not rate:
        return "-"
    return f"{rate['failures']}/{rate['trials']}"


def main(paths):
    print("| arm | verdict | broken | broken alone | tokens/s | what |")
    print("| --- | --- | --: | --: | --: | --- |")
    for path in paths:
        name = os.path.basename(path)
        try:
            with open(f"{path}.verdict.json") as f:
                v = json.load(f)
        except OSError as e:
            print(f"| {name} | none: {e.strerror} | | | | |")
            continue
        phase = next(p for p in v["phases"] if p["phase"] == "main")
        speed = 1000 * phase["completion_tokens"] / (phase["to_ms"] - phase["from_ms"])
        fired = ", ".join(f"{c['class']} {c['main']['failures']}" for c in v["classes"] if c["main"]["failures"])
        broken = v["broken"]
        print(
            f"| {name} | {v['status']} | {share(broken['main'])} | {share(broken.get('control'))} "
            f"| {speed:.0f} | {fired or '-'} |"
        )


if __name__ == "__main__":
    main(sys.argv[1:])

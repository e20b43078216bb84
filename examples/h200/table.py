"""Prints verdicts as a Markdown table: table.py NAME.verdict.json..."""

import json
import os
import sys


def share(rate):
    if not rate:
        return "-"
    return f"{rate['failures']}/{rate['trials']}"


def main(paths):
    print("| arm | verdict | broken | broken alone | replies/s | what |")
    print("| --- | --- | --: | --: | --: | --- |")
    for path in paths:
        try:
            with open(path) as f:
                v = json.load(f)
        except OSError as e:
            print(f"| {path} | {e.strerror} | | | | |")
            continue
        phase = next(p for p in v["phases"] if p["phase"] == "main")
        fired = [f"{c['class']} {c['main']['failures']}" for c in v["classes"] if c["main"]["failures"]]
        name = os.path.basename(path).removesuffix(".verdict.json")
        rate = f"{1000 * phase['ops'] / (phase['to_ms'] - phase['from_ms']):.0f}"
        main, control = v["broken"]["main"], v["broken"].get("control")
        print(f"| {name} | {v['status']} | {share(main)} | {share(control)} | {rate} | {', '.join(fired) or '-'} |")


if __name__ == "__main__":
    main(sys.argv[1:])

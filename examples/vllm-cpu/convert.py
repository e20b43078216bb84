"""Turns the GGUF file into a folder of bfloat16 weights that vLLM loads."""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(gguf, folder):
    torch.set_num_threads(1)
    directory, name = os.path.split(gguf)
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    part = folder + ".part"
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    os.replace(part, folder)


if __name__ == "__main__":
    main(*sys.argv[1:])

#!/usr/bin/env bash
# Sets up SGLang with Gemma 3 270M beside this script and starts its server on a
# processor, in the foreground.
#
#   run.sh [FLAG...]         wants Python 3.12, 9 GB of disk, 6 GB of memory; FLAGs are SGLang's
#   PYTHON=/usr/bin/python3.12 PORT=30000 run.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

sglang=0.5.23
gguf=models/gemma-3-270m-q4_k_m.gguf
model=models/gemma-3-270m-hf

if [[ ! -x .venv/bin/pip ]]; then
  "${PYTHON:-python3.12}" -m venv .venv
fi
.venv/bin/pip install --quiet uv==0.13.9
.venv/bin/uv pip install --quiet --python .venv/bin/python --requirement requirements.txt
# The rest of what it asks for is for GPUs.
.venv/bin/uv pip install --quiet --python .venv/bin/python --no-deps "sglang==$sglang"
.venv/bin/python ../gemma/assemble.py "$gguf"
export HF_HUB_OFFLINE=1
if [[ ! -d $model ]]; then
  .venv/bin/python ../vllm-cpu/convert.py "$gguf" "$model"
fi

# sgl_kernel is found here. Each of the server's processes imports 5,000 files:
# without their compiled form it takes minutes.
export SGLANG_USE_CPU_ENGINE=1 PYTHONPATH=$PWD
unset PYTHONDONTWRITEBYTECODE
exec .venv/bin/python -m sglang.launch_server --model-path "$model" --host 127.0.0.1 --port "${PORT:-30000}" \
  --device cpu --attention-backend torch_native --max-total-tokens 65536 --chat-template ../gemma/chat.jinja "$@"

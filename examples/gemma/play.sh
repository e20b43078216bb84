#!/usr/bin/env bash
# Starts a server of Gemma 3 270M, plays four workloads at it, at concurrency 1
# and 8, prints a table of the verdicts, and stops the server whatever happens.
#
#   play.sh PORT COMMAND...  COMMAND starts the server and stays
#
# Run directories and table.md go to runs/ in the current directory, what COMMAND
# says to server.log. CULPRIT names the program; otherwise it is built from this
# repository.
#
# Exit code 1 when a verdict is corrupt or wedged, 125 when one is neither clean
# nor numerics.
set -euo pipefail

port=$1
shift
url=http://127.0.0.1:$port
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

mkdir -p runs
culprit=${CULPRIT:-}
if [[ -z $culprit ]]; then
  culprit=$PWD/runs/culprit
  (cd "$here/../.." && CGO_ENABLED=0 go build -o "$culprit" ./cmd/culprit)
fi

if curl --silent --output /dev/null "$url/health"; then
  echo "port $port is taken: stop what listens there, or set PORT" >&2
  exit 1
fi

# What is started runs in the background, since a trap waits for what runs in
# the foreground.
server='' run=''
stop() {
  local pid
  for pid in $run $server; do
    kill "$pid" 2>/dev/null || true
    wait "$pid" 2>/dev/null || true
  done
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

"$@" >server.log 2>&1 &
server=$!
echo "waiting for the server on port $port; it writes to $PWD/server.log"
until curl --silent --fail --output /dev/null "$url/health"; do
  if ! kill -0 "$server" 2>/dev/null; then
    tail -n 20 server.log >&2
    echo "the server died before it was ready" >&2
    exit 1
  fi
  sleep 1
done

# A base model doesn't end its turn: the blank line after each message of
# chat.jinja ends it.
stop_at='{"stop":["\n\n"]}'

play() { # WORKLOAD FLAG...
  local concurrency dir code
  for concurrency in 1 8; do
    dir=runs/$1-$concurrency
    rm -rf "$dir"
    code=0
    # A seed of its own: other facts, so that no mistake counts twice.
    "$culprit" run --base-url "$url" --workload "$@" --sessions 8 --concurrency "$concurrency" \
      --seed "$concurrency" --control --extra-body "$stop_at" --output "$dir" &
    run=$!
    wait "$run" || code=$?
    run=
    case $code in
      0 | 1 | 125) ;;
      *) exit "$code" ;;
    esac
  done
}

# Calls in the text: calls under a grammar take seconds each with this model's
# vocabulary of 262,144 tokens. The right call takes the place of a wrong one, so
# that later rounds have examples to follow.
play agent --tools text --context-lines 4 --rounds 6 --max-tokens 40
play echo --rounds 2 --set copy_lines=4 --max-tokens 80
play recall --rounds 5 --max-tokens 16
play churn --rounds 1 --context-lines 6 --set copy_lines=4 --max-tokens 80

python3 "$here/table.py" runs/{agent,echo,recall,churn}-{1,8} | tee runs/table.md

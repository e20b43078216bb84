#!/usr/bin/env bash
# The incident on one NVIDIA GPU: shows the race, plays the incident's table, hunts the cause, and measures what probes and
# logging do to it.
#
#   run.sh OUT [race|same|table|dose|observer|hunt]...    all of them by default
#
# CULPRIT names the static program (default: culprit), PYTHON a python3 with PyTorch. What is worth keeping goes to OUT:
# verdicts, tables, the hunt's finding and report; run directories stay in OUT/runs. A part that fails doesn't stop the others.
set -uo pipefail

out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
culprit=${CULPRIT:-culprit}
python=${PYTHON:-python3}
port=${PORT:-30000}
url=http://127.0.0.1:$port
bug=(--index-k-dtype bf16)
control=(--control-sessions 20)
export PYTHONUNBUFFERED=1
mkdir -p "$out/runs"

server=
stop() {
  [[ -n $server ]] || return 0
  kill "$server" 2>/dev/null
  wait "$server" 2>/dev/null
  server=
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

serve() { # FLAG...
  stop
  "$python" "$here/server.py" --port "$port" ${DEVICE:+--device "$DEVICE"} ${READ_ROWS:+--index-read-rows "$READ_ROWS"} "$@" >>"$out/server.log" 2>&1 &
  server=$!
  for _ in {1..600}; do
    (: <"/dev/tcp/127.0.0.1/$port") 2>/dev/null && return # it listens when it is ready
    kill -0 "$server" 2>/dev/null || break
    sleep 0.1
  done
  tail -n 20 "$out/server.log" >&2
  echo "the server did not start: $*" >&2
  return 1
}

get() { # PATH: of the server
  env -u PYTHONPATH "$python" -c 'import sys, urllib.request as u; sys.stdout.write(u.urlopen(sys.argv[1]).read().decode())' "$url$1"
}

play() { # NAME FLAG...: one run against the server
  local name=$1
  shift
  rm -rf "$out/runs/$name"
  "$culprit" run --base-url "$url" --sessions "${SESSIONS:-80}" --rounds 4 "$@" --output "$out/runs/$name" >"$out/runs/$name.txt" 2>&1
  cp "$out/runs/$name/verdict.json" "$out/$name.verdict.json"
  echo "$name: $(grep -m 1 -E '^(CLEAN|CORRUPT|WEDGED|NUMERICS|NOT|VOID|INCONCLUSIVE)' "$out/runs/$name.txt")"
}

arm() { # NAME CONCURRENCY FLAG...: the server with these flags, and one run against it
  local name=$1 concurrency=$2
  shift 2
  serve "$@" && play "$name" --concurrency "$concurrency" "${control[@]}"
  get /metrics >"$out/runs/$name.metrics"
}

race() {
  "$python" "$here/race.py" --trace | tee "$out/race.txt"
}

same() { # a healthy server says what the lab says, token for token
  local dtype
  for dtype in fp8 bf16; do
    serve --index-k-dtype "$dtype" --hold-index-query && play "same-$dtype"
    stop
    rm -rf "$out/runs/lab-$dtype"
    "$culprit" run --lab --lab-arg=--index-k-dtype="$dtype" --sessions "${SESSIONS:-80}" --rounds 4 --seed 1 --output "$out/runs/lab-$dtype" >"$out/runs/lab-$dtype.txt" 2>&1
    echo "index keys in $dtype: $("$python" "$here/same.py" "$culprit" "$out/runs/same-$dtype" "$out/runs/lab-$dtype" | tee "$out/runs/same-$dtype.replies" | tail -n 1)"
  done | tee "$out/same.txt"
}

incident() { arm incident 80 "${bug[@]}"; }

table() {
  incident
  arm eager 80 "${bug[@]}" --disable-cuda-graph
  arm fp8 80 --index-k-dtype fp8
  arm one-stream 80 "${bug[@]}" --disable-alt-stream
  arm alone 1 "${bug[@]}"
  arm held 80 "${bug[@]}" --hold-index-query
  arm incident-again 80 "${bug[@]}"
  show table incident eager fp8 one-stream alone held incident-again
}

dose() { # how many at once it takes
  local n
  serve "${bug[@]}" || return
  for n in 8 16 24 32 48 64; do
    play "at-$n" --concurrency "$n" --seed "$n"
  done
  show dose at-{8,16,24,32,48,64}
}

show() { # TABLE NAME...
  local table=$1
  shift
  "$python" "$here/table.py" "${@/#/$out/}" | tee "$out/$table.md"
}

observer() { # what counting and logging at the same places do to the failure, and what they cost
  local i control=()
  for i in 1 2; do
    arm "plain-$i" 80 "${bug[@]}"
    rm -rf "$out/probes-$i"
    "$culprit" probe env "$here/probes.yaml" --dir "$out/probes-$i" >"$out/runs/probe-env.txt"
    PYTHONPATH=$out/probes-$i/python CULPRIT_PROBE_DIR=$out/probes-$i arm "probed-$i" 80 "${bug[@]}"
    arm "steps-logged-$i" 80 "${bug[@]}" --log steps
    arm "queries-logged-$i" 80 "${bug[@]}" --log queries
  done
  stop
  "$culprit" probe read "$out/probes-1" | tee "$out/probes.txt"
  show observer {plain,probed,steps-logged,queries-logged}-{1,2}
  cost
}

cost() { # of the probes, on a healthy server: without, with, with, without
  local dir=$out/probes-cost i=0
  serve "${bug[@]}" --hold-index-query --disable-radix-cache || return
  play cost-warm
  play cost-plain-1
  rm -rf "$dir"
  (sleep 1 && get /health >/dev/null) & # the agent starts at the main thread's next step, and that one sleeps
  "$culprit" probe attach "$server" "$here/probes.yaml" --dir "$dir" || return
  play cost-probed-1
  play cost-probed-2
  (sleep 1 && get /health >/dev/null) &
  "$culprit" probe detach "$dir"
  play cost-plain-2
  "$culprit" probe read "$dir" >"$out/probes-cost.txt"
  show cost cost-{plain-1,probed-1,probed-2,plain-2}
  "$culprit" probe cost --python "$python" | tee "$out/probe-cost.txt"
}

hunt() {
  rm -rf "$out/hunt"
  sed "s#SERVER#$here/server.py#; s#PYTHON#$python#; s#PORT#$port#g" "$here/case.yaml" >"$out/case.yaml"
  "$culprit" hunt "$out/case.yaml" --output "$out/hunt" --seed 3 --min-rate 0.05 ${WALL:+--wall "$WALL"} 2>"$out/hunt-trials.txt" | tee "$out/hunt.txt"
  cp "$out/hunt/finding.json" "$out/"
}

[[ $# -gt 0 ]] || set -- race same table dose observer hunt
for part; do
  echo "== $part, $SECONDS s"
  "$part" || echo "$part failed"
done
echo "== done, $SECONDS s"

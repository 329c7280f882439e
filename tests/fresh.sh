#!/usr/bin/env bash
# tests/fresh.sh [AT_ONCE [ALONE]]: make test in fresh clones of this commit, each with an empty home. First AT_ONCE
# (3) runs that keep each other's processors busy, the first under NUMBA_CPU_NAME=generic; then ALONE (7) runs. A red
# one ends it and keeps its clone; logs are in a folder of data/fresh by the time of the start.
set -uo pipefail
cd "$(dirname "$0")/.."
source=$PWD
folder=$source/data/fresh/$(date +%Y-%m-%d-%H%M%S)

run() {
  local name=$1 begin=$SECONDS status=red
  shift
  mkdir -p "$folder/$name/home"
  git clone --quiet "$source" "$folder/$name/clone"
  env -u PYTHONPATH HOME="$folder/$name/home" "$@" make -sC "$folder/$name/clone" test ARGS=-q > "$folder/$name.log" 2>&1 \
    && status=green && rm -rf "${folder:?}/$name"
  echo "$name: $status, $((SECONDS - begin)) s, $(tail -n 1 "$folder/$name.log")"
  [ $status = green ]
}

processes=()
for ((i = 1; i <= ${1:-3}; i++)); do
  run "busy-$i" $([ $i = 1 ] && echo NUMBA_CPU_NAME=generic) &
  processes+=($!)
done
failed=0
for process in "${processes[@]}"; do wait "$process" || failed=1; done
for ((i = 1; i <= ${2:-7} && !failed; i++)); do
  run "alone-$i" || failed=1
done
exit $failed

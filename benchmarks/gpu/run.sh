#!/bin/bash
# OUT=FOLDER bash .gpu/run.sh SECONDS [options of python -m benchmarks.gpu]: measure on a machine with a GPU and without
# a network, in a copy of the checkout with the folder .gpu that prepare.sh made. Results are in $OUT, at most six files.
# Exit status 2: a wheel cannot be installed; 3: the gate failed. Where a cell ends the process, another one resumes.
set -u
seconds=${1:?"usage: OUT=FOLDER bash .gpu/run.sh SECONDS [options]"}; shift
: "${OUT:?"an empty folder for the results"}"
mkdir -p data
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error TOKENIZERS_PARALLELISM=true
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target data/gpu-site .gpu/wheels/*.whl \
  >"$OUT/install.txt" 2>&1 || { cat "$OUT/install.txt"; exit 2; }
export PYTHONPATH=$PWD/data/gpu-site
if command -v nvidia-smi >/dev/null; then
  nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,power.draw --format=csv >"$OUT/smi.txt" 2>&1
fi
resume=()
for _ in 1 2 3; do
  left=$((seconds - SECONDS))
  timeout -k 5 $((left + 15)) python3 -m benchmarks.gpu --data .gpu/data --work data/gpu --out "$OUT" --seconds "$left" \
    ${resume[@]+"${resume[@]}"} "$@" 2>>"$OUT/log.txt"
  code=$?
  case $code in 4 | 134 | 139) resume=(--resume) ;; *) break ;; esac
  [ $((seconds - SECONDS)) -gt 30 ] || break
done
[ $code = 0 ] || { echo "exit status $code; the log ends:"; tail -n 25 "$OUT/log.txt"; }
exit $code

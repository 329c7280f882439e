#!/usr/bin/env bash
# tests/engines.sh [SECONDS]: run real engines, builds on Ray, and decoding with the oldest transformers, each installed
# first, for SECONDS (300) as they take on two idle cores: those whose files, or whose shared drafting files, changed in
# the last three hours of commits; without any, one. They take turns, and the first one runs even if it needs more
# (SGLang). The last lines say what was run and what was skipped. DRY=1 only says it.
set -euo pipefail
cd "$(dirname "$0")/.."
seconds=${1:-300}
[[ $seconds =~ ^[0-9]+$ ]] || { echo "usage: tests/engines.sh [SECONDS]" >&2; exit 2; }
declare -A needs=([sglang]=430 [vllm]=240 [llama-cpp]=150 [transformers]=210 [ray]=240)
shared='assembly/|drafting/|live/|remote/|search/|trees/|engines/(config|figures|load|proposer|texts)\.py'
declare -A files=(
  [sglang]="^draftstore/(engines/sglang\.py|$shared)|^tests/engines_sglang/"
  [vllm]="^draftstore/(engines/vllm\.py|$shared)|^tests/engines_vllm/"
  [llama-cpp]='^draftstore/engines/llama_cpp\.py|^tests/engines_llama_cpp/'
  [ray]='^draftstore/(cluster|processes|text/(corpus|sharding|tokens)|stores/rest/(build|segments))\.py|^tests/cluster/'
  [transformers]='^draftstore/(decoding|hf)/|^tests/unit/hf/'
)

newest=$(git log -1 --format=%ct)
changed=$(git log --since=@$((newest - 10800)) --name-only --format= | sort -u)
names=(sglang vllm llama-cpp transformers ray)
turn=$(($(git rev-list --count HEAD) % ${#names[@]}))
first=() others=()
for name in "${names[@]:turn}" "${names[@]:0:turn}"; do
  if grep -qE "${files[$name]}" <<< "$changed"; then first+=("$name"); else others+=("$name"); fi
done
[ ${#first[@]} -gt 0 ] || { first=("${others[0]}") others=("${others[@]:1}"); }

said=() left=$seconds
for name in "${first[@]}"; do
  if [ "${needs[$name]}" -gt "$left" ] && [ "$name" != "${first[0]}" ]; then
    said+=("$name: skipped although its files changed; make test-$name takes ${needs[$name]} s, and $left s are left")
    continue
  fi
  left=$((left > needs[$name] ? left - needs[$name] : 0))
  if [ -n "${DRY:-}" ]; then
    said+=("$name: to be run")
  elif make ".venv-$name/.done"; then
    make "test-$name"
    said+=("$name: passed")
  else
    said+=("$name: skipped: it cannot be installed here")
  fi
done
for name in "${others[@]}"; do said+=("$name: skipped, its files did not change"); done
printf '%s\n' "${said[@]}"

#!/bin/bash
# benchmarks/gpu/prepare.sh: make the folder .gpu of this checkout: data, wheels and run.sh for a machine with a GPU and
# without a network. PYTHON chooses the interpreter whose pip downloads the wheels.
set -euo pipefail
cd "$(dirname "$0")/../.."
data=${DRAFTSTORE_TEST_DATA:?"set it to the folder with corpora/, replays/, tokenizers/ and models/"}
most=$((64 * 1024 * 1024))

mkdir -p .gpu/data/{tokenizers/llama2,corpora,replays,models/stories260K} .gpu/wheels
cp -u "$data"/tokenizers/llama2/tokenizer{,_config}.json .gpu/data/tokenizers/llama2/
cp -u "$data"/corpora/chat_sharegpt.jsonl.zst .gpu/data/corpora/
cp -u "$data"/replays/alpaca_eval.jsonl.zst .gpu/data/replays/
cp -u "$data"/models/stories260K/* .gpu/data/models/stories260K/
cp benchmarks/gpu/run.sh .gpu/
chmod -R u+rwX .gpu

# What that machine lacks, in the versions of a fresh install. Two versions of one package would stop the installation.
names='lmdb|zstandard|pydantic|pydantic_core|annotated-types|typing-inspection|typing_extensions'
pins=$(grep -E "^($names)==" constraints.txt)
if [ "$pins" != "$(cat .gpu/wheels/pins.txt 2>/dev/null)" ]; then
  rm -f .gpu/wheels/*
  platforms=(--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64)
  # shellcheck disable=SC2086  # one word each
  "${PYTHON:-python3}" -m pip download -q --disable-pip-version-check --no-deps --only-binary=:all: --python-version 3.12 \
    --implementation cp "${platforms[@]}" -d .gpu/wheels $pins
  echo "$pins" >.gpu/wheels/pins.txt
fi

checkout=$(git ls-files -z --cached --others --exclude-standard | xargs -0 -r stat -c %s 2>/dev/null | awk '{s += $1} END {print s}')
carried=$(find .gpu -type f -printf '%s\n' | awk '{s += $1} END {print s}')
echo "checkout $((checkout >> 20)) MiB, .gpu $((carried >> 20)) MiB, of $((most >> 20)) MiB that may travel"
[ $((checkout + carried)) -lt $most ] || { echo "error: too much to carry"; exit 1; }

"""Acceptance by llama-server of drafts from exported files, replayed: `python -m benchmarks.engines.llama_cpp`.

101 outputs of Vicuna-7B-v1.5 (AlpacaEval) pass through one slot by the rule that `make test-llama-cpp` compares with a
real server; the files are exported from a store of ShareGPT, 27.9 M tokens.

A table first; the last line of stdout is one JSON document, also written to OUT/engine_llama_cpp.json.

Examples:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.engines.llama_cpp --work ~/bench
"""

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.common import CHAT, TINY, VICUNA, add_arguments, evenly, open_workspace
from benchmarks.engines.__main__ import OUTPUTS, QUICK_OUTPUTS
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_rows
from draftstore.decoding.replay import Recording
from draftstore.engines.llama_cpp import ExportOptions, export_cache
from tests.fakes.llama_cpp import Ngram, Part, Simple, Slot, read_cache

FILES = {
    "--max-bytes 5MB": ExportOptions(max_bytes=5_000_000),
    "--min-count 2": ExportOptions(min_count=2),
    "default": ExportOptions(),
}
TYPES = {"ngram-cache": None, "and ngram-simple": Simple(), "and ngram-simple 3 8": Simple(3, 8)}


def accepted_length(
    static: Mapping[Ngram, Part], simple: Simple | None, recordings: Sequence[Recording]
) -> float:
    """Replay all outputs in one slot; return tokens per pass."""
    slot = Slot(static, simple)
    drafts = [slot.answer(each.prompt.tolist(), each.output.tolist()) for each in recordings]
    tokens = sum(len(each.output) - 1 for each in recordings)
    return round(tokens / sum(each.passes for each in drafts), 3)


def main() -> None:
    """Measure and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines.llama_cpp", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    with open_workspace(args) as space:
        store = space.store(TINY if args.quick else CHAT)
        recordings = evenly(space.recordings(VICUNA), QUICK_OUTPUTS if args.quick else OUTPUTS)
        rows: list[dict[str, Any]] = []
        for name, options in {"none": None, **FILES}.items():
            progress(name)
            static: Mapping[Ngram, Part] = {}
            row: dict[str, Any] = {"file": name}
            if options is not None:
                made = export_cache(store.path, space.work / "cache.bin", options, overwrite=True)
                static = read_cache(made.path)
                row |= {"pairs": made.ngrams, "bytes": made.size}
            rows.append(
                row | {kind: accepted_length(static, simple, recordings) for kind, simple in TYPES.items()}
            )
    show_rows(f"llama-server: {len(recordings)} outputs", rows)
    finish(args.out, "engine_llama_cpp", describe_machine() | {"quick": args.quick, "files": rows})


if __name__ == "__main__":
    main()

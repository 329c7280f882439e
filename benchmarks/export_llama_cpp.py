"""What llama.cpp's lookup decoding gains from an exported store: `python -m benchmarks.export_llama_cpp`.

101 AlpacaEval outputs of Vicuna and a store of chats. llama.cpp's rule is replayed by tests/fakes/llama_cpp.py, from
the file alone and with the text so far, as llama.cpp drafts; beside it our own drafts as chains of the same length. Two
tables first; the last line of stdout is one JSON document, also written to OUT/export_llama_cpp.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.export_llama_cpp --work ~/bench
"""

import argparse
import time
from typing import Any

from benchmarks.common import CHAT, RecordingSet, Source, add_arguments, open_workspace
from benchmarks.measure import progress
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.replay import replay
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.request import RequestDrafter
from draftstore.engines.llama_cpp import export_cache
from draftstore.stores.rest.store import BUDGET, STRATEGIES
from tests.fakes.llama_cpp import LookupDrafter, read_cache

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
EVERY = 4
"""One of so many of the 402 outputs is replayed."""
QUICK = Source("chat_quick", CHAT.files, tokens=300_000)
CHAIN = 8
"""Tokens of a draft, as llama-server drafts from n-gram caches."""
FILES: dict[str, dict[str, Any]] = {
    "no file": {},
    "5 MB": {"max_bytes": 5_000_000},
    "default": {},
    "--all": {"whole": True},
}


def main() -> None:
    """Export, replay, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.export_llama_cpp", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args()
    exports, drafts = [], []
    with open_workspace(args) as workspace:
        store = workspace.store(QUICK if args.quick else CHAT)
        recordings = workspace.recordings(RECORDED)[:: EVERY * (10 if args.quick else 1)]

        def measure(drafter: Drafter, name: str, context: bool, budget: int) -> None:
            progress(f"{name}, {'with' if context else 'without'} the text")
            figures = replay(drafter, recordings, budget=budget, chain=CHAIN).summary()
            kept = {key: figures[key] for key in ("accepted_length", "nodes_mean", "miss_rate", "passes")}
            drafts.append({"drafts": name, "context": context} | kept)

        for name, options in FILES.items():
            cache = {}
            if name != "no file":
                path = workspace.work / f"{store.path.name}.bin"
                begin = time.perf_counter()
                made = export_cache(store.path, path, overwrite=True, **options)
                seconds = round(time.perf_counter() - begin, 2)
                exports.append(
                    {"file": name, "ngrams": made.ngrams, "followers": made.followers, "bytes": made.size,
                     "seconds": seconds}
                )  # fmt: skip
                cache = read_cache(path)
            for context in (False, True):
                if cache or context:
                    measure(LookupDrafter(cache, context=context), f"llama.cpp, {name}", context, CHAIN)
        request = RequestDrafter(store.manifest.vocab_size)
        for strategy in STRATEGIES:
            ours = store.drafter(strategy)
            measure(ours, strategy, False, BUDGET)
            measure(Mixture([request, ours]), strategy, True, BUDGET)
        tokens = store.manifest.counts["tokens"]
    show_table(
        f"files from {tokens:,} tokens", ["file", "n-grams", "followers", "bytes", "seconds"],
        [[each["file"], each["ngrams"], each["followers"], each["bytes"], each["seconds"]] for each in exports],
    )  # fmt: skip
    show_table(
        f"accepted length, chains of {CHAIN} tokens", ["drafts", "with the text", "M", "tokens drafted", "misses"],
        [[each["drafts"], str(each["context"]), f"{each['accepted_length']:.3f}", each["nodes_mean"],
          f"{each['miss_rate']:.1%}"] for each in drafts],
    )  # fmt: skip
    document = {
        "quick": args.quick, "store": CHAT.name, "tokens": tokens, "outputs": len(recordings), "chain": CHAIN,
        "budget": BUDGET, "files": exports, "drafts": drafts,
    }  # fmt: skip
    finish(args.out, "export_llama_cpp", describe_machine() | document)


if __name__ == "__main__":
    main()

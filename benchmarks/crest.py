"""What CREST stores cost to build and to ask: `python -m benchmarks.crest`.

Counting n-grams next to polars, ranking, cutting and compressing trees, loading LMDB and PostgreSQL; then drafts from
LMDB, from PostgreSQL over its socket and from the suffix array, for the same contexts of recorded outputs. Every part
runs in a process of its own. Tables first; the last line of stdout is one JSON document, also written to
OUT/crest_build.json. PostgreSQL is $DRAFTSTORE_DATABASE_URL, else an embedded server in the work folder.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.crest --work ~/bench
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import CHAT, RecordingSet, Source, Workspace, add_arguments, open_workspace
from benchmarks.curve_points import AUTHORS_TOKEN_BYTES
from benchmarks.measure import progress, run_fresh
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import ContextDrafter
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.entries import BACKENDS
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.rest.store import MAX_MATCH
from schema.database import close, is_embedded
from schema.home import HOME_VARIABLE

MAX_N = 5
PART_OF_REST = 13.5
"""The store that is asked has REST's bytes divided by this."""
RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
TINY = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)
COUNT_PROBE, LOOKUP_PROBE = "benchmarks.crestprobe", "benchmarks.lookupprobe"


def main() -> None:
    """Run all parts and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.crest", description=__doc__)
    add_arguments(parser)
    parser.add_argument(
        "--ngrams", type=int, default=200_000, help="n-grams whose trees are cut (%(default)s)"
    )
    parser.add_argument("--contexts", type=int, default=10_000, help="contexts that are asked (%(default)s)")
    args = parser.parse_args()
    source = TINY if args.quick else CHAT
    ngrams, contexts = (5_000, 500) if args.quick else (args.ngrams, args.contexts)
    with open_workspace(args) as workspace:
        os.environ.setdefault(HOME_VARIABLE, str(workspace.work / "home"))
        figures: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        figures |= run_build(workspace, source, ngrams)
        figures |= run_lookups(workspace, source, contexts)
        close()
    packages = ("polars", "lmdb", "zstandard", "psycopg")
    finish(args.out, "crest_build", describe_machine(packages) | {"quick": args.quick} | figures)


def run_build(workspace: Workspace, source: Source, ngrams: int) -> dict[str, Any]:
    """Measure the steps of a build; print the tables."""
    store = workspace.store(source)
    tokens = store.manifest.counts["tokens"]
    counts = str(workspace.work / "stores" / f"{source.name}-ngrams")
    counted = {"store": str(store.path), "max_n": MAX_N, "counts": counts}
    progress("counting")
    counting = run_fresh(COUNT_PROBE, {"what": "counting", **counted})
    progress("counting with polars")
    polars = run_fresh(COUNT_PROBE, {"what": "polars", **counted})
    progress("ranking, cutting, compressing")
    scratch = str(workspace.work)
    steps = run_fresh(
        COUNT_PROBE,
        {
            "what": "steps",
            "store": str(store.path),
            "max_n": MAX_N,
            "ngrams": ngrams,
            "scratch": scratch,
        },
    )
    show_table(
        f"counting n = 1 .. {MAX_N} of {tokens:,} tokens; polars: `group_by` alone, the better engine for each n, "
        "equal in every row",
        ["", "seconds", "CPU seconds", "peak MB"],
        [
            ["suffix array", counting["seconds"], counting["cpu_seconds"], counting["peak_bytes"] / 1e6],
            ["suffix array, into Parquet", counting["parquet"]["seconds"], "", counting["parquet"]["peak_bytes"] / 1e6],
            ["polars", polars["seconds"], polars["cpu_seconds"], polars["peak_bytes"] / 1e6],
        ],
    )  # fmt: skip
    _show_steps(steps)
    return {"source": source.name, "tokens": tokens, "counting": counting, "polars": polars, "steps": steps}


def _show_steps(steps: dict[str, Any]) -> None:
    """Print what follows counting."""
    show_table(
        f"ranking {steps['ngrams']:,} n-grams, counting included", ["selection", "seconds"],
        [[name, took] for name, took in steps["ranking_seconds"].items()],
    )  # fmt: skip
    cutting, packing, decode = steps["cutting"], steps["compressing"], steps["decode_us"]
    show_table(f"trees of {packing['entries']:,} n-grams", ["", "value"], [
        ["cut, trees/s, one core", cutting["trees_per_second"]["one_core"]],
        [f"cut, trees/s, {steps['threads']} cores", cutting["trees_per_second"]["all_cores"]],
        ["bytes an entry, raw", packing["raw_bytes_an_entry"]],
        ["bytes an entry, compressed", packing["bytes_an_entry"]],
        ["compress, µs an entry, all cores", packing["us_an_entry"]],
        ["train the dictionary, s", packing["dictionary_seconds"]],
        ["decode, µs, raw", decode["raw"]["p50"]],
        ["decode, µs, compressed", decode["compressed"]["p50"]],
        ["LMDB, sorted append, rows/s", steps["lmdb"]["append_rows_per_second"]],
        ["LMDB, append, compact, sync, rows/s", steps["lmdb"]["append_copy_sync_rows_per_second"]],
    ])  # fmt: skip


def run_lookups(workspace: Workspace, source: Source, count: int) -> dict[str, Any]:
    """Build a store in both backends, load it again, ask it; print the tables."""
    rest = workspace.store(source)
    most_bytes = int(rest.manifest.counts["tokens"] * AUTHORS_TOKEN_BYTES / PART_OF_REST)
    options = CrestOptions(f"{source.name}-crest", max_n=MAX_N, max_bytes=most_bytes, backends=BACKENDS)
    progress("CREST store in LMDB and PostgreSQL")
    crest = build_crest(options, rest.path, workspace.work / "stores" / options.name, overwrite=True).path
    progress("loading PostgreSQL")
    loading = run_fresh(LOOKUP_PROBE, {"what": "loading", "crest": str(crest)})
    path = workspace.work / "crest-contexts.npy"
    np.save(path, follow(CrestStore.open(crest).drafter(), workspace.recordings(RECORDED), count))
    progress("lookups")
    asked = {"rest": str(rest.path), "crest": str(crest), "contexts": str(path)}
    lookups = run_fresh(LOOKUP_PROBE, {"what": "lookups", **asked})
    server = "embedded" if is_embedded() else "named"
    show_table(f"PostgreSQL {loading['postgres']} ({server}), {loading['rows']:,} entries", ["", "value"], [
        ["binary COPY, rows/s", loading["copy_rows_per_second"]],
        ["key and statistics after it, s", loading["key_seconds"]],
        ["both, rows/s", loading["copy_and_key_rows_per_second"]],
        ["checked load of a store, rows/s", loading["checked_load_rows_per_second"]],
    ])  # fmt: skip
    _show_lookups(lookups, crest)
    return {"postgres": loading | {"server": server}, "lookups": lookups}


def follow(drafter: ContextDrafter, recordings: Sequence[Recording], count: int) -> NDArray[np.int32]:
    """Return int32 [count, 16]: the contexts that decoding meets, one output after the other, padded with -1.

    Outputs stand at even distances, as many as it takes at some 60 passes each.
    """
    contexts = np.full((count, MAX_MATCH), -1, np.int32)
    size = 0
    for recording in recordings[:: max(1, len(recordings) * 60 // count)]:
        text = np.concatenate([recording.prompt, recording.output])
        position = len(recording.prompt) + 1
        while position < len(text) and size < count:
            tail = text[max(0, position - MAX_MATCH) : position]
            contexts[size, MAX_MATCH - len(tail) :] = tail
            tree = drafter.draft(contexts[size : size + 1])[0].tree
            position += len(tree.accepted(text[position:])) + 1
            size += 1
    return contexts[:size]


def _show_lookups(lookups: dict[str, Any], crest: Path) -> None:
    """Print how long drafts take."""
    rows = []
    for name, turn in lookups["in_turn_us"].items():
        alone = lookups["alone_us"][name]
        rows.append([name, turn["p50"], turn["p99"], turn["mean"], alone["p50"], alone["p99"], alone["mean"]])
    columns = [f"{how}{what} µs" for how in ("", "alone: ") for what in ("p50", "p99", "mean")]
    title = (
        f"one draft, {lookups['contexts']:,} contexts met in decoding, {crest.name} ({lookups['entries']:,} entries); "
        "in turn with the others in random order, and alone"
    )
    show_table(title, ["drafter", *columns], rows)


if __name__ == "__main__":
    main()

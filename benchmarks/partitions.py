"""A store in partitions against one of everything: `python -m benchmarks.partitions`.

The documents of ShareGPT are dealt into 16 parts by their hash. Two, four, eight and sixteen partitions of equal size
are replayed as one release (draftstore.drafting.partitions), beside one store of all documents and beside a single
partition, with and without drafts from the request. Then partitions are served, each by a lookup service of its own on
this machine, and a client asks for one draft after the other. All services share its cores, and the client joins what
they say: several machines would only add their network.

Tables first; the last line of stdout is one JSON document, also written to OUT/partitions.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.partitions --work ~/bench
"""

import argparse
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import (
    CHAT,
    Workspace,
    accepted_length,
    add_arguments,
    draw_contexts,
    open_workspace,
    write_records,
)
from benchmarks.measure import percentiles, progress, time_calls, undisturbed
from benchmarks.replays import REPLAYS
from benchmarks.report import describe_machine, finish, show_table
from benchmarks.service import running
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.mixture import Mixture
from draftstore.drafting.partitions import PartitionedDrafter
from draftstore.drafting.request import RequestDrafter
from draftstore.remote.partitions import open_release
from draftstore.storage.report import ReadReport
from draftstore.stores.rest.build import RestOptions, build_rest
from draftstore.stores.rest.store import MAX_MATCH, RestStore
from draftstore.text.corpus import read_corpus
from draftstore.text.digests import text_digest

BUCKETS = 16
PARTITIONS, QUICK_PARTITIONS = (1, 2, 4, 8, 16), (1, 2)
SERVED = 4
"""Most partitions that are served: each is a process, and the machine has few cores."""
NODES = (16, 64)
ROWS, QUICK_ROWS, QUICK_DOCUMENTS = 100, 4, 300
CONTEXTS = 800
REPLAYED = "AlpacaEval: Vicuna-7B-v1.5"
SECONDS = 5.0


def deal(workspace: Workspace, most: int | None) -> list[Path]:
    """Write the documents, or the first ones, into files by their hash; return these."""
    render = partial(workspace.tokenizer.render_chat, add_generation_prompt=False)
    dealt: list[list[dict[str, Any]]] = [[] for _ in range(BUCKETS)]
    for number, document in enumerate(
        read_corpus(workspace.inputs(CHAT), render=render, report=ReadReport())
    ):
        if number == most:
            break
        dealt[text_digest(document.text)[0] % BUCKETS].append({"id": document.id, "text": document.text})
    files = [workspace.work / "corpora" / f"bucket-{bucket}.jsonl" for bucket in range(BUCKETS)]
    for file, records in zip(files, dealt, strict=True):
        write_records(file, records)
    return files


def build(workspace: Workspace, files: Sequence[Path], count: int) -> list[Path]:
    """Build the stores of so many partitions."""
    stores = []
    for number in range(count):
        progress(f"partition {number + 1} of {count}")
        name = f"partition-{number + 1}-of-{count}"
        options = RestOptions(tuple(files[number::count]), name)
        stores.append(build_rest(options, workspace.tokenizer, workspace.work / "stores" / name).path)
    return stores


def lengths(drafter: Drafter, vocab_size: int, recordings: Sequence[Recording]) -> dict[str, float]:
    """Return the accepted lengths of a drafter, alone and beside drafts from the request, by nodes."""
    both = Mixture([RequestDrafter(vocab_size), drafter])
    found = {str(nodes): accepted_length(drafter, recordings, nodes) for nodes in NODES}
    found |= {f"{nodes}, with request": accepted_length(both, recordings, nodes) for nodes in NODES}
    return {name: figures["accepted_length"] for name, figures in found.items()}


def replay(paths: Sequence[Path], recordings: Sequence[Recording]) -> dict[str, Any]:
    """Replay the partitions as one release, and the first of them alone."""
    with ExitStack() as opened:
        stores = [RestStore.open(path) for path in paths]
        for store in stores:
            opened.callback(store.close)
        drafters = [store.drafter() for store in stores]
        size = stores[0].manifest.vocab_size
        return {
            "partitions": len(paths),
            "tokens": sum(store.manifest.counts["tokens"] for store in stores),
            "accepted_length": lengths(PartitionedDrafter(drafters), size, recordings),
            "one_alone": lengths(drafters[0], size, recordings),
        }


def ask(paths: Sequence[Path], contexts: Any) -> dict[str, float]:
    """Serve each partition by a service of its own; return the times of drafts in microseconds."""
    with ExitStack() as opened:
        services = [opened.enter_context(running({"chat": path})) for path in paths]
        addresses = ",".join(service.address for service in services)
        client = open_release(addresses, "chat", deadline=SECONDS)
        opened.callback(client.close)
        client.check()
        drafter = client.drafter()
        calls = [partial(drafter.draft, context[None]) for context in contexts]
        for call in calls[: len(calls) // 4]:
            call()
        with undisturbed():
            return percentiles(time_calls(calls))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print tables, and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.partitions", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    counts = QUICK_PARTITIONS if args.quick else PARTITIONS
    with open_workspace(args) as workspace:
        recordings = REPLAYS[REPLAYED].read(workspace, QUICK_ROWS if args.quick else ROWS)
        files = deal(workspace, QUICK_DOCUMENTS if args.quick else None)
        stores = {count: build(workspace, files, count) for count in counts}
        contexts = draw_contexts(recordings, CONTEXTS // (8 if args.quick else 1), MAX_MATCH)
        found = [replay(paths, recordings) for paths in stores.values()]
        served = {
            str(count): ask(paths, np.ascontiguousarray(contexts))
            for count, paths in stores.items()
            if count <= SERVED
        }
    show(found, served)
    figures = {"quick": args.quick, "rows": len(recordings), "measured": found, "served_us": served}
    finish(args.out, "partitions", describe_machine() | figures)


def show(found: Sequence[dict[str, Any]], served: dict[str, dict[str, float]]) -> None:
    """Print accepted lengths, and times."""
    whole = found[0]["accepted_length"]
    rows = []
    for each in found:
        for name in ("accepted_length", "one_alone"):
            shares = [f"{length:.3f} ({length / whole[nodes]:.3f})" for nodes, length in each[name].items()]
            rows.append([str(each["partitions"]) if name == "accepted_length" else "one alone", *shares])
    show_table("accepted length by nodes (of that of one store)", ["partitions", *whole], rows)
    times = [[services, each["p50"], each["p99"]] for services, each in served.items()]
    show_table("µs of a draft", ["services", "p50", "p99"], times)


if __name__ == "__main__":
    main()

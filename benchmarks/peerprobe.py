"""draftstore and its peers side by side, in one fresh process: `python -m benchmarks.peerprobe JSON`.

Used by benchmarks.comparison. One core; every peer is built from the same token ids, is asked the same
contexts in turn with draftstore, and replays the same outputs.
"""

import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.buildprobe import warm_up_sorting
from benchmarks.common import RecordingSet, Workspace, accepted_length, evenly, index_tokens
from benchmarks.measure import percentiles, pin_to_one_core, progress, resident, time_calls, undisturbed
from benchmarks.peers import PEERS, Documents, Peer, PeerDrafter
from benchmarks.queryprobe import map_pages
from draftstore.drafting.drafter import Drafter
from draftstore.search.suffix import SuffixIndex
from draftstore.stores.rest.store import RestStore
from draftstore.text.tokens import sentinel

OURS = {
    "longest, 64 nodes": ("longest", 64),
    "backoff, 64 nodes": ("backoff", 64),
    "backoff, 8 nodes": ("backoff", 8),
}
"""How draftstore is asked: strategy and budget."""
REFERENCE = "backoff, 64 nodes"
"""What the others are timed beside and compared with."""


@dataclasses.dataclass
class Contender:
    """One row of the comparison.

    Attributes:
        system: package.
        mode: how it is asked.
        drafter: for the replay.
        budget: most nodes.
        prepare: makes of a context the call that is timed.
        costs: build speed and memory of the system.
    """

    system: str
    mode: str
    drafter: Drafter
    budget: int
    prepare: Callable[[NDArray[np.int32]], Callable[[], Any]]
    costs: dict[str, Any]


def split_documents(index: SuffixIndex) -> Documents:
    """Return the documents of a store without sentinels."""
    tokens = np.asarray(index.tokens)
    ends = np.flatnonzero(tokens == sentinel(tokens.dtype))
    offsets = np.concatenate(([0], ends - np.arange(len(ends))))
    return Documents(np.delete(tokens, ends).astype(np.int32), offsets, index.vocab_size)


def our_contenders(store: RestStore) -> list[Contender]:
    """Sort the store's tokens again for the time, and take its files for the memory."""
    index = store.index
    tokens, count = np.array(index.tokens), store.manifest.counts["tokens"]
    warm_up_sorting(index.vocab_size)
    begin = perf_counter()
    index_tokens(tokens, index.vocab_size)
    seconds = perf_counter() - begin
    map_pages(index)
    size = sum(array.nbytes for array in index[:5])
    costs = {
        "build_tokens_per_second": round(count / seconds),
        "memory_bytes_per_token": round(size / count, 2),
    }
    contenders = []
    for mode, (strategy, budget) in OURS.items():
        drafter = store.drafter(strategy)
        drafter.warm_up()

        def prepare(
            context: NDArray[np.int32], drafter: Any = drafter, budget: int = budget
        ) -> Callable[[], Any]:
            session = drafter.session(context[-drafter.context_size :])
            return lambda: session.propose(budget)

        contenders.append(Contender("draftstore", mode, drafter, budget, prepare, costs))
    return contenders


def peer_contenders(peer: Peer, documents: Documents, folder: Path) -> list[Contender]:
    """Build a peer, measuring time and the growth of resident memory; none if it is not installed."""
    size = len(documents.tokens)
    before = resident(trim=True)
    begin = perf_counter()
    try:
        peer.build(documents, folder)
    except ImportError:
        return []
    seconds = perf_counter() - begin
    grown = sum(resident(trim=True).values()) - sum(before.values())
    costs = {
        "version": version(peer.package),
        "build_tokens_per_second": round(size / seconds),
        "memory_bytes_per_token": round(grown / size, 2),
    }
    contenders = []
    for mode, budget in peer.modes.items():

        def prepare(context: NDArray[np.int32], mode: str = mode, budget: int = budget) -> Callable[[], Any]:
            usable = np.ascontiguousarray(context[-peer.context_size :])
            return lambda: peer.draft(usable, budget, mode)

        contenders.append(
            Contender(
                peer.package, mode, PeerDrafter(peer, mode, documents.vocab_size), budget, prepare, costs
            )
        )
    return contenders


def time_beside(contender: Contender, reference: Contender, contexts: NDArray[np.int32]) -> dict[str, Any]:
    """Time a contender and the reference in turn, one context each, and summarize both.

    The reference is half the contexts ahead, so that neither finds in the cache what the other has just read.
    """
    usable = [context[context >= 0] for context in contexts]
    half = len(usable) // 2
    theirs = [contender.prepare(context) for context in usable]
    ours = [reference.prepare(context) for context in usable[half:] + usable[:half]]
    with undisturbed():
        times = np.array(time_calls([call for pair in zip(theirs, ours, strict=True) for call in pair]))
    return {"query_us": percentiles(times[::2]), "reference_query_us": percentiles(times[1::2])}


def compare(
    data: str, work: str, store: str, contexts: str, file: str, model: str, rows: int
) -> dict[str, Any]:
    """Build all that is installed, ask all, replay all."""
    pin_to_one_core()
    opened = RestStore.open(store)
    contenders = our_contenders(opened)
    reference = next(contender for contender in contenders if contender.mode == REFERENCE)
    documents = split_documents(opened.index)
    absent = {}
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for make in PEERS:
            peer = make()
            progress(f"  build {peer.package}")
            found = peer_contenders(peer, documents, Path(folder))
            contenders += found
            if not found:
                absent[peer.package] = f"not installed: {peer.install}"
        recordings = evenly(
            Workspace(Path(data), Path(work), Path()).recordings(RecordingSet(file, model)), rows
        )
        drawn = np.load(contexts)
        entries = []
        for contender in contenders:
            progress(f"  {contender.system}, {contender.mode}")
            entry: dict[str, Any] = {"system": contender.system, "mode": contender.mode}
            entry |= accepted_length(contender.drafter, recordings, contender.budget)
            entries.append(entry | time_beside(contender, reference, drawn) | contender.costs)
    return {"tokens": len(documents.tokens), "rows": len(recordings), "contenders": entries, "absent": absent}


if __name__ == "__main__":
    print(json.dumps(compare(**json.loads(sys.argv[1]))))

"""REST stores beside other libraries that find stored continuations: `python -m benchmarks.stores.peers`.

All get the documents as token ids, one core, the same contexts and the same outputs; times are taken in turn with
draftstore's `backoff`. The others return what they are made for: arctic-inference a tree (here from the documents
alone), tokengrams and infini-gram counts of what follows an n-gram, so a draft is a chain of the most frequent next
tokens. None is a dependency, and one that is absent is left out; how arctic-inference is installed says
benchmarks/quality/libraries.py, the others:

    pip install --no-deps tokengrams==0.3.3 infini-gram==2.6.0

A table first; the last line of stdout is one JSON document, also written to OUT/rest_peers.json.

Example:
    DRAFTSTORE_TEST_DATA=~/data python -m benchmarks.stores.peers --work ~/bench --rows 20
"""

import argparse
import contextlib
import importlib
import importlib.util
import io
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from benchmarks.common import (
    CHAT,
    TINY,
    Documents,
    accepted_length,
    add_arguments,
    draw_contexts,
    open_workspace,
    split_documents,
)
from benchmarks.measure import (
    ONE_CORE,
    map_pages,
    percentiles,
    pin_to_one_core,
    progress,
    resident,
    time_calls,
    undisturbed,
)
from benchmarks.quality.libraries import as_tree, suffix_cache
from benchmarks.quality.replays import REPLAYS
from benchmarks.report import describe_machine, finish, show_table
from draftstore.decoding.replay import Recording
from draftstore.drafting.drafter import ContextSession, Drafter
from draftstore.stores.rest.store import CONTINUATION, MAX_MATCH, RestStore
from draftstore.trees.batch import Draft
from draftstore.trees.tree import DraftTree

OURS = {
    "backoff, 64 nodes": ("backoff", 64),
    "backoff, 8 nodes": ("backoff", 8),
    "longest, 64 nodes": ("longest", 64),
}
"""Strategy and budget; the first is what the others are timed beside."""
REPLAY = "AlpacaEval: Vicuna-7B-v1.5"
ROWS, QUICK_ROWS = 100, 4
CONTEXTS, QUICK_CONTEXTS = 3200, 160


class Peer:
    """A library with the documents, as a drafter."""

    context_size = MAX_MATCH
    vocab_size: int

    def __init__(self, documents: Documents, folder: Path) -> None:
        """Index documents; `folder` takes files.

        Raises:
            ImportError: not installed.
        """
        raise NotImplementedError

    def tree(self, context: NDArray[np.int32], budget: int) -> DraftTree:
        """Return a draft."""
        raise NotImplementedError

    def draft(
        self, contexts: NDArray[np.int32], budget: int = 64, min_prob: float = 0.0, queries: object = None  # noqa: ARG002
    ) -> list[Draft]:  # fmt: skip
        """Draft for a batch of contexts; see `ContextDrafter.draft`. The nodes have no probabilities."""
        return [Draft(self.tree(context[context >= 0], budget), 0, 0) for context in contexts]

    def session(self, prompt_ids: ArrayLike, **_prefill: Any) -> ContextSession:
        """Start the drafts of one text: its last tokens are all that the library gets."""
        return ContextSession(self, prompt_ids)


class Arctic(Peer):
    """Suffix decoding of arctic-inference: a suffix tree of finished responses, here the documents.

    The request has no prompt: only the documents draft.
    """

    context_size = MAX_MATCH + 1  # it leaves the oldest token out of the match
    options: dict[str, Any] = {"use_tree_spec": True}  # noqa: RUF012 (read only)

    def __init__(self, documents: Documents, folder: Path) -> None:  # noqa: ARG002
        """Index documents; see `Peer`."""
        self.vocab_size = documents.vocab_size
        self._cache = suffix_cache(documents)
        self._cache.start_request("query", [])

    def tree(self, context: NDArray[np.int32], budget: int) -> DraftTree:
        """Return a draft; see `Peer`."""
        draft = self._cache.speculate("query", context, max_spec_tokens=budget, **self.options)
        return as_tree(draft.token_ids, draft.parents)


class ArcticUnlimited(Arctic):
    """The same with no limit but the nodes."""

    options = {"use_tree_spec": True, "max_spec_factor": 64.0, "min_token_prob": 0.0}  # noqa: RUF012 (read only)


class Chains(Peer):
    """A library that counts what follows an n-gram: a draft is a chain of the most frequent next tokens."""

    def tree(self, context: NDArray[np.int32], budget: int) -> DraftTree:
        """Append the most frequent next token after the longest match, again and again."""
        text = context.tolist()
        size = len(text)
        while len(text) < size + budget and (token := self.next_token(text[-MAX_MATCH:])) >= 0:
            text.append(token)
        return as_tree(text[size:])

    def next_token(self, text: list[int]) -> int:
        """Return what follows the longest suffix of a text that occurs most often; -1: nothing."""
        raise NotImplementedError


class Tokengrams(Chains):
    """The in-memory index of tokengrams: a suffix array over tokens, 64-bit."""

    def __init__(self, documents: Documents, folder: Path) -> None:
        """Index documents; see `Peer`. A separator, one past the vocabulary, stands after each."""
        library = _compiled_module("tokengrams")
        self.vocab_size = documents.vocab_size
        dtype = (
            np.uint16 if self.vocab_size < 65_536 else np.uint32
        )  # the width that the library takes for so many
        tokens = np.insert(documents.tokens.astype(dtype), documents.offsets[1:], self.vocab_size)
        path = folder / "tokengrams.bin"
        tokens.tofile(path)
        self._index = library.InMemoryIndex.from_token_file(str(path), None, self.vocab_size + 1, False)

    def next_token(self, text: list[int]) -> int:
        """See `Chains`: where a suffix occurs, all shorter ones do."""
        low, high = 0, len(text)
        while low < high:
            middle = (low + high + 1) // 2
            found = self._index.contains(text[-middle:])
            low, high = (middle, high) if found else (low, middle - 1)
        counts = self._index.count_next(text[len(text) - low :])[: self.vocab_size] if low else [0]
        return counts.index(max(counts)) if max(counts) else -1


class InfiniGram(Chains):
    """The engine of infini-gram: a byte suffix array on disk, here loaded into memory."""

    def __init__(self, documents: Documents, folder: Path) -> None:
        """Index documents; see `Peer`. Each is preceded by the largest id, as the library does it."""
        indexing = importlib.import_module("infini_gram.indexing")
        engine = importlib.import_module("infini_gram.engine")
        self.vocab_size = (
            documents.vocab_size
        )  # below 65,536: the library would sort others with 32 GiB of buckets
        starts = documents.offsets[:-1]
        np.insert(documents.tokens.astype(np.uint16), starts, 0xFFFF).tofile(folder / "tokenized.0")
        ((starts + np.arange(len(starts))) * 2).astype(np.uint64).tofile(folder / "offset.0")
        options = argparse.Namespace(
            save_dir=str(folder), temp_dir=str(folder), worker_id=0, workers=1, shards=1, cpus=1,
            token_width=2, mem=4,
        )  # fmt: skip
        with _elsewhere():
            indexing.build_sa(options)
        self._engine = engine.InfiniGramEngine(
            index_dir=str(folder), eos_token_id=self.vocab_size, vocab_size=self.vocab_size + 1, version=4,
            token_dtype="u16", load_to_ram=True, ds_prefetch_depth=0, sa_prefetch_depth=0, od_prefetch_depth=0,
        )  # fmt: skip

    def next_token(self, text: list[int]) -> int:
        """See `Chains`."""
        found = self._engine.infgram_ntd(prompt_ids=text)["result_by_token_id"]
        counts = {token: entry["cont_cnt"] for token, entry in found.items() if token < self.vocab_size}
        return max(counts, key=counts.__getitem__, default=-1)


PEERS: dict[str, tuple[Callable[[Documents, Path], Peer], int]] = {
    "arctic-inference, tree, its defaults": (Arctic, 16),
    "arctic-inference, tree of 64 nodes": (ArcticUnlimited, 64),
    "infini-gram, greedy chain": (InfiniGram, CONTINUATION),
    "tokengrams, greedy chain": (Tokengrams, CONTINUATION),
}
"""Each with the largest budget that it makes use of."""


def _compiled_module(package: str) -> ModuleType:
    """Load a package's compiled module alone: the package itself may import what only its extras need."""
    spec = importlib.util.find_spec(package)
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder).glob(f"{package}*.so")]
    inner = importlib.util.spec_from_file_location(f"{package}.{package}", files[0]) if files else None
    if inner is None or inner.loader is None:
        raise ImportError(f"no compiled module in {package}")
    module = importlib.util.module_from_spec(inner)
    inner.loader.exec_module(module)
    return module


@contextlib.contextmanager
def _elsewhere() -> Iterator[None]:
    """Undo a change of folder, and keep what is printed away from the results."""
    here = Path.cwd()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        os.chdir(here)


def time_beside(
    drafter: Drafter, budget: int, reference: Drafter, contexts: Sequence[NDArray[np.int32]]
) -> dict[str, Any]:
    """Time a drafter and the reference in turn, one context each.

    The reference is half the contexts ahead, so that neither finds in the cache what the other has just read.
    """
    half = len(contexts) // 2
    theirs = [drafter.session(context) for context in contexts]
    ours = [reference.session(context) for context in [*contexts[half:], *contexts[:half]]]
    calls = [
        call
        for their, our in zip(theirs, ours, strict=True)
        for call in (lambda their=their: their.propose(budget), lambda our=our: our.propose(64))
    ]
    with undisturbed():
        times = np.array(time_calls(calls))
    return {"query_us": percentiles(times[::2]), "reference_query_us": percentiles(times[1::2])}


def measure(
    store: RestStore, recordings: Sequence[Recording], contexts: Sequence[NDArray[np.int32]], work: Path
) -> list[dict[str, Any]]:
    """Measure draftstore, then each library, one of which is held at a time."""
    documents = split_documents(store.index)
    tokens, files = len(documents.tokens), sum(array.nbytes for array in store.index[:5])
    map_pages(store.index)
    reference = store.drafter("backoff")
    rows = []

    def add(name: str, drafter: Drafter, budget: int, memory: int) -> None:
        progress(f"  {name}")
        row: dict[str, Any] = {"drafter": name, "memory_bytes_per_token": round(memory / tokens, 2)}
        row |= accepted_length(drafter, recordings, budget)
        rows.append(row | time_beside(drafter, budget, reference, contexts))

    for name, (strategy, budget) in OURS.items():
        add(f"draftstore, {name}", store.drafter(strategy), budget, files)
    for name, (make, budget) in PEERS.items():
        before = sum(resident(trim=True).values())
        with tempfile.TemporaryDirectory(dir=work) as folder:
            try:
                peer = make(documents, Path(folder))
            except ImportError:
                progress(f"  {name}: not installed, left out")
                continue
            add(name, peer, budget, sum(resident(trim=True).values()) - before)
            del peer
    return rows


def show(rows: Sequence[dict[str, Any]], tokens: int, outputs: int) -> None:
    """Print the table; times are divided by those taken beside them."""
    table = [
        [row["drafter"], row["accepted_length"], row["nodes_mean"]]
        + [row["query_us"][key] / row["reference_query_us"][key] for key in ("p50", "p99")]
        + [row["memory_bytes_per_token"]]
        for row in rows
    ]
    columns = ["drafter", "M", "nodes", "p50, ours = 1", "p99, ours = 1", "memory B/token"]
    show_table(f"{tokens:,} tokens, one core; M over {outputs} outputs", columns, table)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all and finish with the JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stores.peers", description=__doc__)
    add_arguments(parser)
    parser.add_argument("--rows", type=int, help=f"recorded outputs to replay (default: {ROWS})")
    args = parser.parse_args(arguments)
    rows, count = (QUICK_ROWS, QUICK_CONTEXTS) if args.quick else (ROWS, CONTEXTS)
    with open_workspace(args) as workspace:
        store = workspace.store(TINY if args.quick else CHAT)
        os.environ.update(ONE_CORE)
        pin_to_one_core()
        drawn = draw_contexts(REPLAYS[REPLAY].read(workspace), count, MAX_MATCH + 1)
        recordings = REPLAYS[REPLAY].read(workspace, args.rows or rows)
        found = measure(store, recordings, [context[context >= 0] for context in drawn], workspace.work)
    tokens = store.manifest.counts["tokens"]
    show(found, tokens, len(recordings))
    about = describe_machine(["arctic-inference", "infini-gram", "tokengrams"]) | {"quick": args.quick}
    finish(args.out, "rest_peers", about | {"tokens": tokens, "rows": len(recordings), "contenders": found})


if __name__ == "__main__":
    main()

"""Vector indexes that benchmarks.dresd_search measures: ours, faiss and ScaNN, asked for entries of one first token.

Peers index all entries. The filter on the first token is a range of entry numbers, as entries are sorted by first
token, the cheapest filter there is: faiss takes it as a selector, or like ScaNN fetches more neighbours than are
wanted, of which those in the range are kept. Selectors, ranges and settings are made before the clock runs.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import faiss
import numpy as np
from numpy.typing import NDArray

from benchmarks.measure import progress
from draftstore.jit import read_only
from draftstore.stores.dresd.kernels.clusters import cluster, lists_for
from draftstore.stores.dresd.kernels.nearest import ALL, PROBING, DenseIndex, search
from draftstore.stores.dresd.kernels.quantised import quantise

K = 10
HNSW_LINKS = 16
EFFORTS = (32, 128, 512, 2048, 8192, 32768)
"""Candidates that HNSW keeps, and neighbours that are fetched before the filter."""
VISITS = (1, 4, 16, 64, 256, 1024)
"""Lists of an inverted file that are visited."""

Call = Callable[[], NDArray[np.int64]]
"""One query, asked; returns entries of the wanted first token, best first."""


class Entries(NamedTuple):
    """All entries of a store, sorted by first token.

    Attributes:
        vectors: float32 [entries, dims], of unit length, not quantised.
        groups: int64 [vocab_size + 1], first entry of each first token.
        token_bytes: bytes of the corpus for each entry.
        copies: part of the entries that are copies of others, with noise.
    """

    vectors: NDArray[np.float32]
    groups: NDArray[np.int64]
    token_bytes: float
    copies: float


class Peer(Protocol):
    """An index, built.

    Attributes:
        name: what it is.
        build_seconds: on the cores that the process has.
        size: bytes of it.
        settings: from the cheapest to the dearest, each with its name.
    """

    name: str
    build_seconds: float
    size: int
    settings: dict[str, Any]

    def ask(self, setting: Any, query: NDArray[np.float32], token: int) -> Call:
        """Return what asks one query, float32 [dims], of unit length."""


class Ours:
    """Groups, and lists in the large ones."""

    def __init__(self, entries: Entries, dtype: str) -> None:
        """Build it."""
        begin = perf_counter()
        self.name = f"draftstore {dtype}"
        self.index, self.order = _group(entries, dtype)
        self.build_seconds = perf_counter() - begin
        self.size = sum(array.nbytes for array in self.index)
        self.size += round(entries.token_bytes * len(entries.vectors))
        self.settings = {"default": PROBING, "exact": ALL}

    def ask(self, setting: float, query: NDArray[np.float32], token: int) -> Call:
        """See `Peer`; the numbers of the entries before they were put in lists are looked up outside the clock."""
        return partial(_search_ours, self.index, query[None], np.array([token], np.int32), setting)


def _search_ours(
    index: DenseIndex, query: NDArray[np.float32], token: NDArray[np.int32], probing: float
) -> NDArray[np.int64]:
    found: NDArray[np.int64] = search(index, query, token, K, probing).entries[0]
    return found


def _group(entries: Entries, dtype: str) -> tuple[DenseIndex, NDArray[np.int64]]:
    """Cut the large groups into lists; return the index, and the entry that stands in each place."""
    vectors, groups = entries.vectors, entries.groups
    order = np.arange(len(vectors))
    counts, lists, centroids = [0], [], [np.empty((0, vectors.shape[1]), np.float32)]
    for token, (start, stop) in enumerate(zip(groups[:-1].tolist(), groups[1:].tolist(), strict=True)):
        if count := lists_for(stop - start):
            centres, assignment = cluster(vectors[start:stop], count, seed=token)
            arranged = np.argsort(assignment, kind="stable")
            order[start:stop] = start + arranged
            lists.append(start + np.searchsorted(assignment[arranged], np.arange(count)))
            centroids.append(centres)
        counts.append(counts[-1] + count)
    codes = np.concatenate([quantise(vectors[part], dtype) for part in np.array_split(order, 64)])
    index = DenseIndex(
        read_only(codes.view(np.uint16) if dtype == "float16" else codes),
        read_only(np.arange(len(vectors), dtype=np.uint32)),
        read_only(groups),
        read_only(np.array(counts, np.int32)),
        read_only(np.concatenate([*lists, [len(vectors)]]).astype(np.int64)),
        read_only(np.concatenate(centroids)),
    )
    return index, order


class Faiss:
    """An index of faiss over all entries."""

    def __init__(
        self, name: str, entries: Entries, index: Any, settings: dict[str, Any], add: int = 1 << 30
    ) -> None:
        """Train and fill it."""
        begin = perf_counter()
        self.name, self.index, self.settings, self._groups = name, index, settings, entries.groups
        if not index.is_trained:
            index.train(entries.vectors)
        for start in range(0, len(entries.vectors), add):
            index.add(entries.vectors[start : start + add])
            progress(f"  {name}: {index.ntotal:,} entries, {perf_counter() - begin:.0f} s")
        self.build_seconds = perf_counter() - begin
        self.size = len(faiss.serialize_index(index))

    def ask(self, setting: Any, query: NDArray[np.float32], token: int) -> Call:
        """See `Peer`."""
        kind, options, fetched = setting
        start, stop = self._groups[token : token + 2].tolist()
        if fetched:
            parameters = None if kind is None else kind(**options)
            return partial(_fetch, self.index, query[None], fetched, parameters, start, stop)
        selector = faiss.IDSelectorRange(start, stop)
        return partial(_select, self.index, query[None], kind(sel=selector, **options))


def _select(index: Any, query: NDArray[np.float32], parameters: Any) -> NDArray[np.int64]:
    found: NDArray[np.int64] = index.search(query, K, params=parameters)[1][0]
    return found


def _fetch(
    index: Any, query: NDArray[np.float32], fetched: int, parameters: Any, start: int, stop: int
) -> NDArray[np.int64]:
    found: NDArray[np.int64] = index.search(query, fetched, params=parameters)[1][0]
    return found[(found >= start) & (found < stop)][:K]


class Scann:
    """ScaNN over all entries: a tree of lists, hashes, and exact products of what is fetched."""

    def __init__(self, entries: Entries) -> None:
        """Build it.

        Raises:
            ImportError: there is no ScaNN.
        """
        import scann

        begin = perf_counter()
        self.name, self._groups = "ScaNN", entries.groups
        leaves = max(1, round(len(entries.vectors) ** 0.5))
        self._searcher = (
            scann.scann_ops_pybind.builder(entries.vectors, K, "dot_product")
            .tree(leaves, min(leaves, 10), training_sample_size=min(len(entries.vectors), 250_000))
            .score_ah(2, anisotropic_quantization_threshold=0.2)
            .reorder(K)
            .set_n_training_threads(len(os.sched_getaffinity(0)))
            .build()
        )
        self.build_seconds = perf_counter() - begin
        with tempfile.TemporaryDirectory() as folder:
            self._searcher.serialize(folder)
            self.size = sum(file.stat().st_size for file in Path(folder).iterdir())
        self.settings = {
            f"fetch {fetched}, {visits} lists": (fetched, visits)
            for fetched in (*EFFORTS, 4 * EFFORTS[-1])
            for visits in sorted({min(visits, leaves) for visits in (*VISITS[2:], leaves)})
        }

    def ask(self, setting: Any, query: NDArray[np.float32], token: int) -> Call:
        """See `Peer`."""
        fetched, visits = setting
        start, stop = self._groups[token : token + 2].tolist()
        return partial(_fetch_scann, self._searcher, query, fetched, visits, start, stop)


def _fetch_scann(
    searcher: Any, query: NDArray[np.float32], fetched: int, visits: int, start: int, stop: int
) -> NDArray[np.int64]:
    found: NDArray[np.int64] = searcher.search(
        query, final_num_neighbors=fetched, pre_reorder_num_neighbors=fetched, leaves_to_search=visits
    )[0].astype(np.int64)
    return found[(found >= start) & (found < stop)][:K]


def build_peers(entries: Entries, names: list[str]) -> Iterator[Peer]:
    """Build the peers of some names, one after the other."""
    dims, total = entries.vectors.shape[1], len(entries.vectors)
    efforts = [effort for effort in EFFORTS if effort <= total]
    if "flat" in names:
        settings: dict[str, Any] = {"selector": (faiss.SearchParameters, {}, 0)}
        yield Faiss("faiss flat", entries, faiss.IndexFlatIP(dims), settings)
    if "ivf" in names:
        lists = max(1, round(total**0.5))
        index: Any = faiss.index_factory(dims, f"IVF{lists},SQ8", faiss.METRIC_INNER_PRODUCT)
        index.cp.max_points_per_centroid = 64
        visits = {
            f"selector, {visits} lists": (faiss.SearchParametersIVF, {"nprobe": visits}, 0)
            for visits in VISITS
            if visits <= lists
        }
        yield Faiss("faiss IVF-SQ8", entries, index, visits)
    if "hnsw" in names:
        index = faiss.IndexHNSWFlat(dims, HNSW_LINKS, faiss.METRIC_INNER_PRODUCT)
        kind = faiss.SearchParametersHNSW  # type: ignore[attr-defined]
        chosen = {f"selector, ef {effort}": (kind, {"efSearch": effort}, 0) for effort in efforts}
        fetched = {f"fetch {effort}": (kind, {"efSearch": effort}, effort) for effort in efforts}
        yield Faiss(f"faiss HNSW{HNSW_LINKS}", entries, index, chosen | fetched, add=100_000)
    if "scann" in names:
        try:
            yield Scann(entries)
        except ImportError:
            progress("  no ScaNN here: it is left out")

"""Building a CREST store from a REST store: rank n-grams, cut and compress their trees, write, load, publish.

The working directory (draftstore.storage.staging) contains

    trees.lmdb           all entries
    store/               the store; once it has a manifest, a resumed build only loads and publishes it
"""

import dataclasses
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from draftstore.errors import BuildError, StoreError, needs_extra, require_limits
from draftstore.search.ngrams import MAX_N, running_total
from draftstore.storage.files import link_or_copy
from draftstore.storage.manifest import MANIFEST_NAME, load_manifest, manifest_digest, save_manifest
from draftstore.storage.report import ReadReport
from draftstore.storage.staging import STORE, BuildResult, build_store, hash_files
from draftstore.stores.crest.counts import DEFAULT_MAX_N, derive_manifest, new_store
from draftstore.stores.crest.entries import (
    BACKENDS,
    LMDB,
    LMDB_FILE,
    LmdbEntries,
    entries_digest,
    load_entries,
    open_entries,
)
from draftstore.stores.crest.envelope import ENTRIES_VERSION, Envelope
from draftstore.stores.crest.packing import (
    Cutter,
    PackedNgram,
    pack_ngrams,
    train_on_ranking,
    write_best,
    write_ngrams,
)
from draftstore.stores.crest.selection import GAIN, SELECTIONS, rank_ngrams
from draftstore.stores.crest.store import (
    BACKOFF,
    BUDGET,
    DICTIONARY_FILE,
    KEPT_FILE,
    KIND,
    LONGEST,
    STRATEGIES,
)
from draftstore.stores.rest.store import CONTINUATION, RestStore
from draftstore.stores.rest.store import STRATEGIES as REST_STRATEGIES
from draftstore.trees.frontier import MAX_DEPTH

DEFAULT_NGRAMS = 100_000
RULES = {BACKOFF: REST_STRATEGIES["backoff"]._replace(rows=4096, floor=0.003), LONGEST: None}
"""How trees are drawn, by name; None: cut exactly. A build has time to read more than a draft: docs/findings.md."""
MAX_NODES = 256
PAGE = 4096
USUAL_ENTRY_BYTES = 100
"""Estimated size of an entry: determines how many n-grams are first ranked for a byte limit."""


@dataclasses.dataclass
class CrestProgress:
    """Progress callbacks of a build, each called repeatedly with the amount done and the total.

    Packed are n-grams, or bytes if the limit is in bytes.
    """

    counted: Callable[[int, int], None] = lambda _rows, _all: None
    packed: Callable[[int, int], None] = lambda _done, _all: None
    loaded: Callable[[int, int], None] = lambda _entries, _all: None


@dataclasses.dataclass(frozen=True)
class CrestOptions:
    """Options of a CREST build.

    Attributes:
        name: display name of the store.
        max_n: maximum tokens of an n-gram; the only length for the selection `single`.
        selection: one of `draftstore.stores.crest.selection.SELECTIONS`.
        ngrams: maximum number of n-grams; 100,000 if neither this nor `max_bytes` is given.
        max_bytes: maximum size of trees.lmdb.
        backends: backends for the entries.
        nodes: maximum nodes of a tree.
        depth: maximum tokens of a path.
        rule: strategy of the REST store that draws the trees: `backoff`, all match lengths together, or `longest`, what
            followed the n-gram alone, as CREST was published.
    """

    name: str
    max_n: int = DEFAULT_MAX_N
    selection: str = GAIN
    ngrams: int | None = None
    max_bytes: int | None = None
    backends: tuple[str, ...] = (LMDB,)
    nodes: int = BUDGET
    depth: int = CONTINUATION
    rule: str = BACKOFF

    def check(self) -> None:
        """Raise a BuildError if an option is invalid."""
        if self.ngrams is not None and self.max_bytes is not None:
            raise BuildError("a number of n-grams and a number of bytes are both given: choose one")
        limits: dict[str, tuple[float, float, float]] = {
            "max_n": (self.max_n, 1, MAX_N),
            "ngrams": (DEFAULT_NGRAMS if self.ngrams is None else self.ngrams, 1, 1 << 40),
            "max_bytes": (4 * PAGE if self.max_bytes is None else self.max_bytes, 4 * PAGE, 1 << 50),
            "nodes": (self.nodes, 1, MAX_NODES),
            "depth": (self.depth, 1, MAX_DEPTH),
        }
        require_limits("a CREST store", limits, BuildError, digits=",")
        if self.selection not in SELECTIONS:
            raise BuildError(f"unknown selection {self.selection!r}: expected one of {', '.join(SELECTIONS)}")
        if self.rule not in RULES:
            raise BuildError(f"unknown rule {self.rule!r}: expected one of {', '.join(RULES)}")
        if not self.backends or set(self.backends) - set(BACKENDS):
            raise BuildError(
                f"unknown backends {list(self.backends)}: expected some of {', '.join(BACKENDS)}"
            )


def build_crest(
    options: CrestOptions,
    rest: Path,
    out: Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    progress: CrestProgress | None = None,
) -> BuildResult:
    """Build a CREST store, or resume an interrupted build of it.

    Args:
        options: what to build.
        rest: REST store to cut the trees from; not needed afterwards.
        out: directory of the store; its parent is created if missing.
        overwrite: whether to replace an existing store.
        workers: threads that cut trees; default: all cores.
        progress: progress callbacks.

    Raises:
        BuildError: invalid options, or see `draftstore.storage.staging.build_store`.
        StoreError: the REST store cannot be opened.
    """
    options.check()
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    with needs_extra("pyarrow"):
        import pyarrow  # noqa: F401 (before any work)
    source = RestStore.open(rest)
    formed = {"kind": KIND, "entries_version": ENTRIES_VERSION, "source": manifest_digest(rest)}
    plan = formed | dataclasses.asdict(options)
    plan["backends"] = sorted(options.backends)
    callbacks = progress or CrestProgress()

    def fill(partial: Path) -> ReadReport:
        if not (partial / STORE / MANIFEST_NAME).exists():
            _make_store(partial, options, source, plan, workers, callbacks)
        manifest = load_manifest(partial / STORE, KIND)
        for backend in set(options.backends) - {LMDB}:
            _load(backend, partial / STORE, out, partial / LMDB_FILE, callbacks)
        return ReadReport(manifest.counts["documents"])

    result = build_store(out, plan, options.name, overwrite, fill, sources=lambda: [rest / MANIFEST_NAME])
    # The build, and with it its entries, may have been dropped from the catalogue while the store is still there.
    for backend in _not_loaded(result) if result.reused else ():
        if LMDB not in options.backends:
            return build_store(out, plan, options.name, True, fill, sources=lambda: [rest / MANIFEST_NAME])
        _load(backend, out, out, out / LMDB_FILE, callbacks)
    return result


def _load(backend: str, store: Path, published: Path, file: Path, progress: CrestProgress) -> None:
    with closing(LmdbEntries(file)) as entries:
        load_entries(backend, store, published, load_manifest(store, KIND), entries, progress.loaded)


def _not_loaded(result: BuildResult) -> list[str]:
    """Return the backends that lack the entries of a store."""
    absent = []
    for backend in result.manifest.parameters["backends"]:
        try:
            open_entries(result.path, result.manifest, backend).close()
        except StoreError:
            absent.append(backend)
    return absent


def _make_store(
    partial: Path,
    options: CrestOptions,
    source: RestStore,
    plan: dict[str, Any],
    workers: int | None,
    progress: CrestProgress,
) -> None:
    """Complete `partial/store`, writing the manifest last."""
    dictionary, packed = _choose(options, source, workers, progress)
    if not packed:
        raise BuildError(f"{source.path} holds no n-gram that another token follows: nothing to build from")
    packed = write_best(partial / LMDB_FILE, packed, options.max_bytes)
    store = new_store(partial, source.path)
    (store / DICTIONARY_FILE).write_bytes(dictionary)
    write_ngrams(store / KEPT_FILE, packed)
    if LMDB in options.backends:
        link_or_copy(partial / LMDB_FILE, store / LMDB_FILE)
    built = {key: plan[key] for key in dataclasses.asdict(options) if key != "name"}
    parameters = built | {
        "entries_version": ENTRIES_VERSION,
        "source": str(source.path),
        "entries_sha256": entries_digest(sorted((item.key, item.value) for item in packed)),
        "raw_bytes": sum(item.raw_bytes for item in packed),
        "value_bytes": sum(len(item.value) for item in packed),
        "lmdb_bytes": (partial / LMDB_FILE).stat().st_size,
    }
    manifest = derive_manifest(source, KIND, options.name, plan, parameters)
    lengths = np.bincount([len(item.tokens) for item in packed], minlength=options.max_n + 1)
    manifest.counts["entries"] = len(packed)
    manifest.counts.update({f"n{n}": int(lengths[n]) for n in range(1, options.max_n + 1)})
    manifest.files.update(hash_files(store))
    save_manifest(store, manifest)


def _choose(
    options: CrestOptions, source: RestStore, workers: int | None, progress: CrestProgress
) -> tuple[bytes, list[PackedNgram]]:
    """Return the dictionary and the store's n-grams, best first; with a byte limit, enough of them to reach it."""
    most = options.ngrams or DEFAULT_NGRAMS
    if options.max_bytes is not None:
        most = options.max_bytes // USUAL_ENTRY_BYTES
    cutter = Cutter(source.index, options.nodes, options.depth, workers, RULES[options.rule])
    while True:
        ranking = rank_ngrams(
            source.index,
            options.selection,
            options.max_n,
            most,
            depth=options.depth,
            trust=STRATEGIES[BACKOFF],
            on_rows=running_total(progress.counted, len(source.index.suffixes)),
        )
        dictionary = train_on_ranking(cutter, ranking)
        packed = pack_ngrams(cutter, ranking, Envelope(dictionary), options.max_bytes, progress.packed)
        size = sum(item.stored_bytes for item in packed)
        if options.max_bytes is None or size > options.max_bytes or len(ranking.places) < most:
            return dictionary, packed
        most = int(most * max(2.0, 1.2 * options.max_bytes / max(size, 1)))  # entries are small

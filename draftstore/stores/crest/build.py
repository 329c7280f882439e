"""Building a CREST store from a REST store: rank n-grams, cut and compress their trees, write, load, publish.

The working directory (draftstore.storage.staging) contains

    trees.lmdb           all entries
    store/               the store; once it has a manifest, a resumed build only loads and publishes it
"""

import functools
import os
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from draftstore.errors import BuildError, StoreError, needs_extra
from draftstore.options import EXPERT, Bytes, Shown
from draftstore.search.cutting import draw_trees
from draftstore.storage.files import link_or_copy
from draftstore.storage.manifest import MANIFEST_NAME, load_manifest, manifest_digest, save_manifest
from draftstore.storage.report import Progress, ReadReport, silent
from draftstore.storage.staging import STORE, BuildResult, build_store, hash_files
from draftstore.stores.crest.codes import ENTRIES_VERSION
from draftstore.stores.crest.counts import CountOptions
from draftstore.stores.crest.entries import (
    BACKENDS,
    LMDB,
    LMDB_FILE,
    entries_digest,
    key_dtype,
    load_entries,
    open_entries,
)
from draftstore.stores.crest.packing import pack_best, write_best, write_ngrams
from draftstore.stores.crest.selection import Ranking, rank_ngrams
from draftstore.stores.crest.store import DICTIONARY_FILE, KEPT_FILE, KIND
from draftstore.stores.kind import Builder
from draftstore.stores.rest.build import RestSources
from draftstore.stores.rest.store import STRATEGIES, RestStore, derive_manifest, derived_store
from draftstore.text.tokenizing import Named
from draftstore.trees.frontier import BUDGET

DEFAULT_NGRAMS = 100_000
RULE = STRATEGIES["backoff"]._replace(rows=4096, floor=0.003)
"""How trees are drawn: as the REST store drafts, but a build can afford more reads: docs/team/findings.md."""
MAX_NODES = 256
PAGE = 4096
CODES, WITH_LIST = 8192, 1.1
"""Bytes beside the file of the trees: of the codes, and, relative to that file, with the list of the n-grams."""
Share = Annotated[
    float | None,
    Shown(hidden=True),
    Field(gt=0, le=1, description="Largest share of the REST store's bytes, without ngrams and max_bytes."),
]


class TreeOptions(CountOptions):
    """Which n-grams a CREST store holds, and how their trees are drawn."""

    ngrams: Annotated[int | None, Shown(unset=f"{DEFAULT_NGRAMS:,}")] = Field(
        None, ge=1, le=1 << 40, description="Number of n-grams to keep.", examples=[DEFAULT_NGRAMS]
    )
    max_bytes: Bytes | None = Field(
        None,
        ge=4 * PAGE,
        le=1 << 50,
        description="Keep as many n-grams as fit in a file of this size, such as 100MB, instead of --ngrams. "
        "A list of the n-grams (about a tenth more) and the tokenizer come on top.",
        examples=[100_000_000],
    )
    share: Share = None
    backend: Literal["lmdb", "postgres", "both"] = Field(
        "lmdb",
        description="Where to store the trees; PostgreSQL is $DRAFTSTORE_DATABASE_URL, or an embedded server.",
    )
    nodes: Annotated[int, EXPERT] = Field(
        BUDGET, ge=1, le=MAX_NODES, description="Maximum number of nodes in a tree."
    )

    @property
    def backends(self) -> list[str]:
        """Backends for the entries."""
        return sorted(BACKENDS) if self.backend == "both" else [self.backend]

    def plan(self, *without: str) -> dict[str, Any]:
        """Return the fields as JSON values."""
        fields = super().plan("backend", *without, *["share"] * (self.share is None))
        return fields | {"backends": self.backends}

    def limits(self, source: RestStore) -> tuple[int, int | None]:
        """Return the most n-grams of a store that is cut from `source`, and the most bytes of their trees."""
        if self.max_bytes is not None:
            return self.max_bytes, self.max_bytes
        if self.share is None or self.ngrams is not None:
            return self.ngrams or DEFAULT_NGRAMS, None
        trees = (self.share * source.manifest.index_size - CODES) / WITH_LIST
        return DEFAULT_NGRAMS, max(4 * PAGE, int(trees))

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.ngrams is not None and self.max_bytes is not None:
            raise ValueError("a number of n-grams and a number of bytes are both given: choose one")
        return self


class CrestOptions(TreeOptions, Named):
    """Options of a CREST build."""


def build_crest(
    options: CrestOptions,
    rest: Path,
    out: Path,
    *,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress = silent,
) -> BuildResult:
    """Build a CREST store at `out`, or resume an interrupted build of it.

    The trees are cut from the REST store `rest`, which is not needed afterwards, on `workers` threads, by default all
    cores. Raises BuildError (see `build_store`), or StoreError if `rest` cannot be opened.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that should be replaced)
    with needs_extra("pyarrow"):
        import pyarrow  # noqa: F401 (before any work)
    source = RestStore.open(rest)
    made_from = {"kind": KIND, "entries_version": ENTRIES_VERSION, "source": manifest_digest(rest)}
    plan = made_from | options.plan()

    def fill(partial: Path) -> ReadReport:
        if not (partial / STORE / MANIFEST_NAME).exists():
            _make_store(partial, options, source, plan, workers, progress)
        manifest = load_manifest(partial / STORE, KIND)
        for backend in set(options.backends) - {LMDB}:
            load_entries(backend, partial / STORE, out, partial / LMDB_FILE, progress("loading", "entries"))
        return ReadReport(manifest.counts["documents"])

    result = build_store(out, plan, options.name, overwrite, fill, sources=lambda: [rest / MANIFEST_NAME])
    # The build and its entries may have been dropped from the catalogue while the store still exists.
    for backend in _not_loaded(result) if result.reused else ():
        if LMDB not in options.backends:
            return build_store(out, plan, options.name, True, fill, sources=lambda: [rest / MANIFEST_NAME])
        load_entries(backend, out, out, out / LMDB_FILE, progress("loading", "entries"))
    return result


def _not_loaded(result: BuildResult) -> list[str]:
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
    progress: Progress,
) -> None:
    """Complete `partial/store`, writing the manifest last."""
    ngrams, max_bytes = options.limits(source)

    def rank(most: int) -> Ranking:
        return rank_ngrams(source.index, options.max_n, most, RULE, progress("ranking", "tokens"))

    draw = functools.partial(draw_trees, source.index, RULE, nodes=options.nodes, workers=workers)
    key = key_dtype(source.manifest.vocab_size)
    on_packed = progress("packing", "n-grams" if max_bytes is None else "bytes")
    codes, packed = pack_best(draw, rank, key, ngrams, max_bytes, on_packed)
    if not packed:
        raise BuildError(f"{source.path} holds no n-gram followed by another token: nothing to build from")
    packed = write_best(partial / LMDB_FILE, packed, max_bytes)
    store = derived_store(partial, source.path)
    (store / DICTIONARY_FILE).write_bytes(codes)
    write_ngrams(store / KEPT_FILE, packed)
    if LMDB in options.backends:
        link_or_copy(partial / LMDB_FILE, store / LMDB_FILE)
    parameters = options.plan("name") | {
        "entries_version": ENTRIES_VERSION,
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


HELP = """Build a CREST store: precomputed draft trees of the most useful n-grams, as small as you choose.

\b
Examples:
  draftstore build crest --rest stores/chat --out stores/chat-crest --max-bytes 10MB
  draftstore build crest --rest stores/chat stores/code --out stores/both-crest --max-bytes 50MB
  draftstore build crest --corpus chats.jsonl.zst --tokenizer ./llama2 --out stores/chat-crest
"""
BUILDER = Builder(CrestOptions, RestSources, build_crest, HELP, counted=True)

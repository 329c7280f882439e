"""A REST store with the segments of several, copied in the order of the stores: no token is sorted again.

    stores    A: segments 0, 1      B: segment 0
    joined    segments A 0, A 1, B 0

What is built from it is built from the texts of all of them: a document that several stores hold counts once for each.
"""

import dataclasses
import hashlib
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from draftstore.errors import BuildError
from draftstore.search.suffix import segment_table
from draftstore.storage.files import HASH_CHUNK
from draftstore.storage.manifest import MANIFEST_NAME, Manifest, manifest_digest, save_manifest
from draftstore.storage.report import OnProgress, Progress, ReadReport, silent
from draftstore.storage.staging import BuildResult, build_store, build_time, hash_files, require_space
from draftstore.stores.rest.store import DOCUMENTS_FILE, DTYPES, KIND, RestStore, derived_store

SEGMENTS_FILE = "segments.bin"
COPIED = [name for name in (*DTYPES, DOCUMENTS_FILE) if name != SEGMENTS_FILE]
SUMS = "characters", "bad_records", "empty_documents", "filtered", "truncated"
"""Facts of a corpus (`Manifest.corpus`) that add up."""


def join_rest(
    stores: Sequence[Path],
    out: Path,
    *,
    name: str = "",
    overwrite: bool = False,
    progress: Progress = silent,
) -> BuildResult:
    """Build a REST store at `out` from the segments of several; its default name is the directory's.

    A killed build starts again. Raises BuildError (see `build_store`; one store twice; stores of different tokenizers,
    templates or versions; no space), or StoreError if one cannot be opened.
    """
    sources, name = [RestStore.open(path) for path in stores], name or out.name
    digests = [manifest_digest(path) for path in stores]
    plan = {"kind": KIND, "joined": digests, **_made_alike(sources, digests)}

    def fill(partial: Path) -> ReadReport:
        store = derived_store(partial, stores[0])
        require_space(store, sum(source.manifest.index_size for source in sources))
        _copy(sources, store, progress("joining", "bytes"))
        manifest = _joined([source.manifest for source in sources], name, plan)
        manifest.files.update(hash_files(store, progress("hashing", "bytes")))
        save_manifest(store, manifest)
        return ReadReport(manifest.counts["documents"])

    places = [path / MANIFEST_NAME for path in stores]
    return build_store(out, plan, name, overwrite, fill, sources=lambda: places)


def _made_alike(sources: Sequence[RestStore], digests: Sequence[str]) -> dict[str, Any]:
    """Return how the documents of all stores got ids and digests, for the plan; refuse stores that differ in it."""
    for (one, digest), (other, same) in combinations(zip(sources, digests, strict=True), 2):
        if digest == same:
            raise BuildError(f"{one.path} and {other.path} are the same store: name it once", "rest")
        for key, value in _made_with(one).items():
            if _made_with(other)[key] != value:
                raise BuildError(
                    f"{one.path} and {other.path} were built with different values of {key}: build both with the same",
                    "rest",
                )
    return _made_with(sources[0])


def _made_with(store: RestStore) -> dict[str, Any]:
    """Return what `draftstore.text.tokenizing.made_with` put into the plan of a store, and its number of ids."""
    manifest = store.manifest
    plan = manifest.parameters.get("plan", {})
    made = {key: plan.get(key) for key in ("template", "identity", "date")}
    return {"tokenizer": manifest.tokenizer.fingerprint, "vocab_size": manifest.vocab_size, **made}


def _copy(sources: Sequence[RestStore], store: Path, on_bytes: OnProgress) -> None:
    total = sum(source.manifest.files[name].size for source in sources for name in COPIED)
    done = 0
    for name in COPIED:
        with (store / name).open("wb") as joined:
            for source in sources:
                with (source.path / name).open("rb") as file:
                    shutil.copyfileobj(file, joined, HASH_CHUNK)
                done += source.manifest.files[name].size
                on_bytes(done, total)
    table = segment_table(np.concatenate([source.index.segments[:, 1] for source in sources]))
    (store / SEGMENTS_FILE).write_bytes(table[:-1].astype("<i8").tobytes())


def _joined(manifests: Sequence[Manifest], name: str, plan: dict[str, Any]) -> Manifest:
    """Return the manifest of the joined store, without files."""
    first, corpora = manifests[0], [manifest.corpus for manifest in manifests]
    fingerprints = "".join(str(corpus.get("fingerprint")) for corpus in corpora)
    corpus = {
        "fingerprint": hashlib.sha256(fingerprints.encode()).hexdigest(),
        "sources": [place for corpus in corpora for place in corpus.get("sources", [])],
        **{key: sum(corpus.get(key, 0) for corpus in corpora) for key in SUMS},
    }
    counts = {key: sum(manifest.counts[key] for manifest in manifests) for key in first.counts}
    return dataclasses.replace(
        first,
        name=name,
        created=build_time(),
        parameters={"plan": plan},
        corpus=corpus,
        counts=counts,
        files={},
    )

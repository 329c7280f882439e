"""What the benchmarks of the lookup service serve and ask: stores of every kind, built once, and contexts."""

import dataclasses
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import CHAT, RecordingSet, Source, Workspace
from benchmarks.crest import MAX_N, PART_OF_REST, follow
from benchmarks.curve_points import AUTHORS_TOKEN_BYTES
from benchmarks.measure import progress
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.entries import LMDB, POSTGRES
from draftstore.stores.crest.store import CrestStore
from draftstore.stores.rest.store import RestStore

RECORDED = RecordingSet("alpaca_eval.jsonl.zst", "vicuna-7b-v1.5")
SMALLER = Source("chat_sharegpt_5M", CHAT.files, tokens=5_000_000)
TINY = Source("chat_sharegpt_1M", CHAT.files, tokens=1_000_000)
TINIER = Source("chat_sharegpt_500k", CHAT.files, tokens=500_000)


@dataclasses.dataclass(frozen=True)
class Served:
    """Directories of stores; two builds of each kind that releases move between.

    Attributes:
        rest: of the corpus, and of a part of it.
        crest: in LMDB, of a 13.5th of REST's bytes, and of half of that.
        crest_postgres: as the first of them, in PostgreSQL.
        contexts: file of int32 [contexts, 16], those that decoding meets.
    """

    rest: tuple[Path, Path]
    crest: tuple[Path, Path]
    crest_postgres: Path | None
    contexts: Path

    def draw(self, batch: int, count: int) -> NDArray[np.int32]:
        """Return int32 [count, batch, 16], contexts in the order of decoding, from the start again where they end."""
        contexts = np.load(self.contexts)
        drawn: NDArray[np.int32] = contexts[np.arange(count * batch) % len(contexts)]
        return drawn.reshape(count, batch, -1)


def prepare(workspace: Workspace, *, quick: bool, contexts: int, postgres: bool) -> Served:
    """Build what is not there yet.

    Args:
        workspace: with the folder for stores.
        quick: small stores.
        contexts: how many.
        postgres: whether a store in PostgreSQL is needed.
    """
    first, second = (TINY, TINIER) if quick else (CHAT, SMALLER)
    rest, part = workspace.store(first), workspace.store(second)
    size = int(rest.manifest.counts["tokens"] * AUTHORS_TOKEN_BYTES / PART_OF_REST)
    crest = _crest(rest, workspace.work, f"{first.name}-crest-lmdb", size, LMDB)
    half = _crest(rest, workspace.work, f"{first.name}-crest-half", size // 2, LMDB)
    in_postgres = (
        _crest(rest, workspace.work, f"{first.name}-crest-postgres", size, POSTGRES) if postgres else None
    )
    path = workspace.work / f"{first.name}-contexts-{contexts}.npy"
    if not path.exists():
        progress("contexts")
        np.save(path, follow(CrestStore.open(crest).drafter(), workspace.recordings(RECORDED), contexts))
    return Served((rest.path, part.path), (crest, half), in_postgres, path)


def _crest(rest: RestStore, work: Path, name: str, size: int, backend: str) -> Path:
    """Return a CREST store of at most `size` bytes, built if it is not there yet."""
    progress(f"store {name}")
    options = CrestOptions(name, max_n=MAX_N, max_bytes=size, backends=(backend,))
    return build_crest(options, rest.path, work / "stores" / name).path

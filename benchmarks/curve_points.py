"""The points of benchmarks.crest_curve: one store each, with its bytes and its accepted lengths.

Points are measured in processes, one a core, and noted in the work folder under the digest of the manifest of the
REST store that they come from. A later run takes a point from there while the code that it depends on is the same.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.common import (
    STRATEGY_NAMES,
    RecordingSet,
    Workspace,
    accepted_length,
    first_documents,
)
from draftstore.decoding.replay import Recording
from draftstore.storage.files import write_json
from draftstore.storage.manifest import TOKENIZER_FOLDER
from draftstore.stores.crest.build import CrestOptions, build_crest
from draftstore.stores.crest.store import BUDGET, CrestStore
from draftstore.stores.rest.store import STRATEGIES, RestDrafter, RestStore

AUTHORS_TOKEN_BYTES = 6
"""What REST's authors store for each token: its id, and a suffix of four bytes."""
REST_CODE = ("decoding", "drafting", "search", "stores/rest", "text", "trees")
CREST_CODE = (*REST_CODE, "stores/crest")
"""Rooms of draftstore that a point depends on."""


@dataclasses.dataclass(frozen=True)
class Subject:
    """What all points of one curve have in common.

    Attributes:
        rest: directory of the REST store.
        digest: of its manifest.
        data: folder with replays/ and tokenizers/.
        recorded: the outputs to replay.
        rows: how many of them; None: all.
    """

    rest: Path
    digest: str
    data: Path
    recorded: RecordingSet
    rows: int | None = None

    @property
    def identity(self) -> dict[str, Any]:
        """What the figures depend on, as JSON values."""
        recorded = dataclasses.asdict(self.recorded)
        return {"rest": self.digest, "recorded": recorded, "rows": self.rows, "budget": BUDGET}


@dataclasses.dataclass(frozen=True)
class RestPoint:
    """A REST store of the first documents."""

    share: float

    kind = "rest"
    code = REST_CODE

    @property
    def cost(self) -> float:
        """About how long it takes, to begin with what takes longest."""
        return 30 * self.share

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Return bytes and accepted lengths."""
        store = RestStore.open(subject.rest)
        index = store.index if self.share == 1.0 else first_documents(store, self.share)
        tokens = int((index.tokens < index.vocab_size).sum())
        drafters = {name: RestDrafter(index, STRATEGIES[name]) for name in STRATEGY_NAMES}
        return {
            "share": self.share,
            "documents": len(index.tokens) - tokens,
            "tokens": tokens,
            "bytes": AUTHORS_TOKEN_BYTES * tokens,
            "draftstore_bytes": sum(array.nbytes for array in index[:5]),
            **{name: accepted_length(each, _recordings(subject), BUDGET) for name, each in drafters.items()},
        }


@dataclasses.dataclass(frozen=True)
class CrestPoint:
    """A CREST store of at most so many bytes."""

    selection: str
    max_n: int
    max_bytes: int

    code = CREST_CODE

    @property
    def kind(self) -> str:
        """The selection, which may be the only code that has changed."""
        return self.selection

    @property
    def cost(self) -> float:
        """About how long it takes."""
        return self.max_bytes / 1e6

    def measure(self, subject: Subject) -> dict[str, Any]:
        """Return bytes and accepted lengths; the store goes away again."""
        options = CrestOptions("curve", max_n=self.max_n, selection=self.selection, max_bytes=self.max_bytes)
        with TemporaryDirectory(prefix=".curve-", dir=subject.rest.parent) as folder:
            manifest = build_crest(options, subject.rest, Path(folder) / "store").manifest
            store = CrestStore.open(Path(folder) / "store")
            files = {name: entry.size for name, entry in manifest.files.items()}
            figures = {
                **dataclasses.asdict(self),
                "bytes": manifest.parameters["lmdb_bytes"],
                "directory_bytes": sum(
                    size for name, size in files.items() if not name.startswith(TOKENIZER_FOLDER)
                ),
                "entries": manifest.counts["entries"],
                "entries_by_n": [manifest.counts.get(f"n{n}", 0) for n in range(1, self.max_n + 1)],
                "raw_bytes_an_entry": round(manifest.parameters["raw_bytes"] / manifest.counts["entries"], 1),
                "bytes_an_entry": round(manifest.parameters["value_bytes"] / manifest.counts["entries"], 1),
                **{
                    name: accepted_length(store.drafter(name), _recordings(subject), BUDGET)
                    for name in STRATEGY_NAMES
                },
            }
            store.close()
        return figures


Point = RestPoint | CrestPoint


@cache
def _recordings(subject: Subject) -> list[Recording]:
    """Read the outputs, once a process."""
    workspace = Workspace(subject.data, subject.rest.parent, subject.rest.parent)
    return workspace.recordings(subject.recorded)[: subject.rows]


class Notes:
    """Figures of points, in the work folder.

    A note stands for the code that it was made with; notes of the kinds in `trusted` stand for any.
    """

    def __init__(self, folder: Path, trusted: Sequence[str] = ()) -> None:
        """Keep notes in a folder, which is made."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._trusted = trusted

    def find(self, subject: Subject, point: Point) -> dict[str, Any] | None:
        """Return the figures of an earlier run, if they hold."""
        path = self._path(subject, point)
        if not path.exists():
            return None
        note: dict[str, Any] = json.loads(path.read_text())
        holds = point.kind in self._trusted or note["code"] == code_digest(point.code)
        return note["figures"] if holds else None

    def keep(self, subject: Subject, point: Point, figures: dict[str, Any]) -> None:
        """Note the figures of a point."""
        note = {
            "of": subject.identity | dataclasses.asdict(point),
            "code": code_digest(point.code),
            "figures": figures,
        }
        write_json(self._path(subject, point), note)

    def _path(self, subject: Subject, point: Point) -> Path:
        identity = json.dumps([subject.identity, point.kind, dataclasses.asdict(point)], sort_keys=True)
        return self._folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:16]}.json"


@cache
def code_digest(rooms: Sequence[str]) -> str:
    """Return a digest of the modules in rooms of draftstore, as they were when it was first asked for."""
    folder = Path(__file__).parent.parent / "draftstore"
    paths = [path for room in rooms for path in sorted((folder / room).rglob("*.py"))]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def measure_points(
    subject: Subject, points: Sequence[Point], notes: Notes
) -> Iterator[tuple[Point, dict[str, Any]]]:
    """Yield points with their figures as they get known, those of notes first."""
    waiting = []
    for point in points:
        noted = notes.find(subject, point)
        if noted is None:
            waiting.append(point)
        else:
            yield point, noted
    waiting.sort(key=lambda point: -point.cost)
    workers = max(1, min(len(os.sched_getaffinity(0)), len(waiting)))
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        futures = {pool.submit(point.measure, subject): point for point in waiting}
        for future in as_completed(futures):
            figures = future.result()
            notes.keep(subject, futures[future], figures)
            yield futures[future], figures

"""The counters of all processes, read from shared memory and added up; see `counting`."""

import enum
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from services.lookup.figures import words as at

NO_RELEASE = ""
"""Key for requests that belong to no served release: unknown names, broken requests."""

SILENT = 10.0
"""Seconds without a heartbeat after which a worker counts as hanging."""


class WorkerState(enum.IntEnum):
    """State of a process."""

    ABSENT = 0
    STARTING = 1
    READY = 2
    DRAINING = 3


class Labels(NamedTuple):
    """The store that is served under a name.

    Attributes:
        kind: kind of the store.
        build: first digits of its digest.
        tokenizer: first digits of its tokenizer's fingerprint.
    """

    kind: str = ""
    build: str = ""
    tokenizer: str = ""


class ReleaseTotals(NamedTuple):
    """The counters of one release, in one process or summed over several.

    Attributes:
        name: name of the release; empty for requests that belong to none.
        labels: the store served under it, now or last.
        ready: processes that serve it.
        misses: contexts with an empty draft.
        nodes: nodes of all drafts.
        request_bytes: size of all requests, including refused ones.
        answer_bytes: size of all answers.
        swaps: number of swaps to another build.
        unopened: failed attempts to open a store under the name.
        seconds: sum over all queries, see `words.SECONDS_BUCKETS`.
        failures: requests that failed, by `Status`.
        batches: queries by their number of contexts, see `words.BATCH_BUCKETS`.
        matches: contexts by match length, see `words.MATCH_BUCKETS`.
        lapses: queries by duration, see `words.SECONDS_BUCKETS`.
    """

    name: str
    labels: Labels
    ready: int
    misses: int
    nodes: int
    request_bytes: int
    answer_bytes: int
    swaps: int
    unopened: int
    seconds: float
    failures: tuple[int, ...]
    batches: tuple[int, ...]
    matches: tuple[int, ...]
    lapses: tuple[int, ...]

    @property
    def queries(self) -> int:
        """Number of requests answered with drafts."""
        return sum(self.batches)

    @property
    def contexts(self) -> int:
        """Number of contexts in them."""
        return sum(self.matches)

    @property
    def matched(self) -> int:
        """Sum of the match lengths of all contexts."""
        return sum(length * count for length, count in enumerate(self.matches))


class WorkerFigures(NamedTuple):
    """The counters of one process.

    Attributes:
        slot: slot number.
        pid: process id, 0 before the first start.
        state: state of the process.
        silence: seconds since its last heartbeat.
        restarts: number of restarts.
        in_flight: requests being answered.
        connections: open connections.
        waiting: contexts that wait for their lookup.
        storage_read: bytes read from storage, over all restarts.
        catalogue_age: seconds since the catalogue was last read; None if it never was, or if there is none.
        catalogue_away: whether the catalogue cannot be read now.
        releases: totals by release.
    """

    slot: int
    pid: int
    state: WorkerState
    silence: float
    restarts: int
    in_flight: int
    connections: int
    waiting: int
    storage_read: int
    catalogue_age: float | None
    catalogue_away: bool
    releases: dict[str, ReleaseTotals]

    @property
    def answers(self) -> bool:
        """Whether the process takes requests: it is ready, and shows signs of life."""
        return self.state == WorkerState.READY and self.silence < SILENT


def add_up(workers: Iterable[WorkerFigures]) -> dict[str, ReleaseTotals]:
    """Return sums over processes by release, sorted by name."""
    found: dict[str, ReleaseTotals] = {}
    for worker in workers:
        for name, totals in worker.releases.items():
            found[name] = _add(found[name], totals) if name in found else totals
    return dict(sorted(found.items()))


def read_slot(number: int, words: memoryview) -> WorkerFigures:
    """Return the content of a slot."""
    read = [_read_entry(at.entry_of(words, position)) for position in range(1 + words[at.USED])]
    silence = (time.monotonic_ns() - words[at.HEARTBEAT]) / 1e9 if words[at.HEARTBEAT] else 0.0
    restarts, in_flight, connections, waiting, storage_read = words[at.RESTARTS : at.CATALOGUE].tolist()
    read_at = words[at.CATALOGUE]
    age = max((time.time_ns() - read_at) / 1e9, 0.0) if read_at else None
    return WorkerFigures(
        number, words[at.PID], WorkerState(words[at.STATE]), silence, restarts, in_flight, connections, waiting,
        storage_read, age, bool(words[at.AWAY]), {totals.name: totals for totals in read},
    )  # fmt: skip


def read_labels(entry: memoryview) -> Labels:
    """Return the labels of an entry as they are now."""
    return Labels(
        *(at.read_text(entry[start : start + at.LABEL_WORDS]) for start in (at.KIND, at.BUILD, at.TOKENIZER))
    )


def _read_entry(entry: memoryview) -> ReleaseTotals:
    """Return the content of an entry."""
    name = at.read_text(entry[at.NAME : at.KIND])
    ready, misses, nodes, requested, answered, swaps, unopened, nanos = entry[at.READY : at.FAILURES].tolist()
    failures = tuple(entry[at.FAILURES : at.BATCHES])
    batches = tuple(entry[at.BATCHES : at.MATCHES])
    matches, lapses = tuple(entry[at.MATCHES : at.LAPSES]), tuple(entry[at.LAPSES :])
    return ReleaseTotals(
        name, _settled_labels(entry), ready, misses, nodes, requested, answered, swaps, unopened,
        nanos / 1e9,
        failures, batches, matches, lapses,
    )  # fmt: skip


def _settled_labels(entry: memoryview) -> Labels:
    """Return the labels of an entry; blank ones while they are being written."""
    for _ in range(10):
        version = entry[at.VERSION]
        labels = read_labels(entry)
        if version == entry[at.VERSION] and not version & 1:
            return labels
    return Labels()


def _add(left: ReleaseTotals, right: ReleaseTotals) -> ReleaseTotals:
    """Return the sums of two processes' totals of one release, with the labels of one that is ready."""
    labels = left.labels if left.ready or not right.ready else right.labels
    sums = [_sum(one, other) for one, other in zip(left[2:], right[2:], strict=True)]
    return ReleaseTotals(left.name, labels, *sums)


def _sum(left: Any, right: Any) -> Any:
    """Return the sum of two numbers or two histograms."""
    if isinstance(left, tuple):
        return tuple(one + other for one, other in zip(left, right, strict=True))
    return left + right

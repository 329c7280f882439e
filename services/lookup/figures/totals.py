"""What the processes of the service counted, read from shared memory and added up; see `counting`."""

import enum
import time
from collections.abc import Iterable
from typing import Any, NamedTuple

from services.lookup.figures import words as at

NO_RELEASE = ""
"""Stands for what belongs to no release that is served: unknown names, broken requests."""


class WorkerState(enum.IntEnum):
    """What a process is doing."""

    ABSENT = 0
    STARTING = 1
    READY = 2
    DRAINING = 3


class Labels(NamedTuple):
    """What is served under a name.

    Attributes:
        kind: of the store.
        build: the first digits of its digest.
        tokenizer: the first digits of the fingerprint.
    """

    kind: str = ""
    build: str = ""
    tokenizer: str = ""


class ReleaseTotals(NamedTuple):
    """What was counted for one release; sums where several processes serve it.

    Attributes:
        name: of the release; empty for what belongs to none.
        labels: of what is served under it, or was last.
        ready: processes that can answer for it.
        misses: contexts that got an empty draft.
        nodes: nodes of all drafts.
        request_bytes: of all requests, the refused ones too.
        answer_bytes: of all answers.
        swaps: times that another build took over under the name.
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
    seconds: float
    failures: tuple[int, ...]
    batches: tuple[int, ...]
    matches: tuple[int, ...]
    lapses: tuple[int, ...]

    @property
    def queries(self) -> int:
        """Requests that were answered with drafts."""
        return sum(self.batches)

    @property
    def contexts(self) -> int:
        """Contexts in them."""
        return sum(self.matches)

    @property
    def matched(self) -> int:
        """Sum of the match lengths of all contexts."""
        return sum(length * count for length, count in enumerate(self.matches))


class WorkerFigures(NamedTuple):
    """What one process counted.

    Attributes:
        slot: its number.
        pid: its process id, 0 before the first start.
        state: what it is doing.
        silence: seconds since it last showed that its loop goes round.
        restarts: times that it was started again.
        in_flight: requests that it is answering.
        connections: that are open.
        waiting: contexts that wait to be looked up.
        storage_read: bytes that were read from storage for it, over all its lives.
        releases: totals by name.
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
    releases: dict[str, ReleaseTotals]


def add_up(workers: Iterable[WorkerFigures]) -> dict[str, ReleaseTotals]:
    """Return sums over some processes by name of the release, sorted."""
    found: dict[str, ReleaseTotals] = {}
    for worker in workers:
        for name, totals in worker.releases.items():
            found[name] = _add(found[name], totals) if name in found else totals
    return dict(sorted(found.items()))


def read_slot(number: int, words: memoryview) -> WorkerFigures:
    """Return what a slot holds."""
    read = [_read_entry(at.entry_of(words, position)) for position in range(1 + words[at.USED])]
    silence = (time.monotonic_ns() - words[at.HEARTBEAT]) / 1e9 if words[at.HEARTBEAT] else 0.0
    restarts, in_flight, connections, waiting, storage_read = words[at.RESTARTS : at.USED].tolist()
    return WorkerFigures(
        number, words[at.PID], WorkerState(words[at.STATE]), silence, restarts, in_flight, connections, waiting,
        storage_read, {totals.name: totals for totals in read},
    )  # fmt: skip


def read_labels(entry: memoryview) -> Labels:
    """Return the labels of an entry as they stand there now."""
    return Labels(
        *(at.read_text(entry[start : start + at.LABEL_WORDS]) for start in (at.KIND, at.BUILD, at.TOKENIZER))
    )


def _read_entry(entry: memoryview) -> ReleaseTotals:
    """Return what an entry holds."""
    name = at.read_text(entry[at.NAME : at.KIND])
    ready, misses, nodes, requested, answered, swaps, nanos = entry[at.READY : at.FAILURES].tolist()
    failures = tuple(entry[at.FAILURES : at.BATCHES])
    batches = tuple(entry[at.BATCHES : at.MATCHES])
    matches, lapses = tuple(entry[at.MATCHES : at.LAPSES]), tuple(entry[at.LAPSES :])
    return ReleaseTotals(
        name, _settled_labels(entry), ready, misses, nodes, requested, answered, swaps, nanos / 1e9,
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
    """Return the sums of two processes' totals of one release; the labels are those of one that is ready."""
    labels = left.labels if left.ready or not right.ready else right.labels
    sums = [_sum(one, other) for one, other in zip(left[2:], right[2:], strict=True)]
    return ReleaseTotals(left.name, labels, *sums)


def _sum(left: Any, right: Any) -> Any:
    """Return the sum of two numbers, or of two histograms."""
    if isinstance(left, tuple):
        return tuple(one + other for one, other in zip(left, right, strict=True))
    return left + right

"""The figures of the service: counters of all its processes in one piece of shared memory.

The supervisor makes `SharedCounters` before it forks. Each worker writes into its own `Slot` alone, so nothing is
locked; whoever reads sees all of them. A worker that is started again takes over the slot of the one that died: totals
never go down, and what was counted up to the moment of a `kill -9` stays counted.

    figures = SharedCounters(slots=2)
    ...fork...
    slot = figures.slot(0)
    slot.begin()
    slot.announce([("chat", Labels("rest", build, tokenizer))])
    slot.release("chat").record(...)
"""

import mmap
import os
import time
from bisect import bisect_left
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftstore.remote.wire import Status
from services.lookup.figures import words as at
from services.lookup.figures.totals import (
    NO_RELEASE,
    Labels,
    ReleaseTotals,
    WorkerFigures,
    WorkerState,
    add_up,
    read_labels,
    read_slot,
)

_NANOS = tuple(round(bound * 1e9) for bound in at.SECONDS_BUCKETS)
_LONGEST = len(at.MATCH_BUCKETS)
_FEW = 8
"""From so many contexts on, numpy counts faster than a loop."""


class ReleaseCounters:
    """The counters of one release in one process; only the thread of its event loop counts."""

    __slots__ = ("_words", "name")

    def __init__(self, words: memoryview, name: str) -> None:
        """Count into an entry, int64 [ENTRY]."""
        self._words = words
        self.name = name

    def record(
        self,
        contexts: int,
        match_lengths: NDArray[np.int32],
        nodes: int,
        misses: int,
        request_bytes: int,
        answer_bytes: int,
        seconds: float,
    ) -> None:
        """Count a request that was answered; about a microsecond for one context.

        Args:
            contexts: in the request.
            match_lengths: int32 [contexts].
            nodes: of all drafts.
            misses: empty drafts.
            request_bytes: of the request.
            answer_bytes: of the answer.
            seconds: from the arrival of the request to its answer.
        """
        words = self._words
        nanos = int(seconds * 1e9)
        words[at.NODES] += nodes
        words[at.REQUESTED] += request_bytes
        words[at.ANSWERED] += answer_bytes
        words[at.LAPSE] += nanos
        words[at.LAPSES + bisect_left(_NANOS, nanos)] += 1
        words[at.BATCHES + bisect_left(at.BATCH_BUCKETS, contexts)] += 1
        if misses:
            words[at.MISSES] += misses
        if contexts < _FEW:
            for length in match_lengths.tolist():
                words[at.MATCHES + (length if length < _LONGEST else _LONGEST)] += 1
        else:
            for length, count in enumerate(np.bincount(np.minimum(match_lengths, _LONGEST)).tolist()):
                words[at.MATCHES + length] += count

    def fail(self, status: Status, request_bytes: int = 0, answer_bytes: int = 0) -> None:
        """Count a request that failed."""
        self._words[at.FAILURES + status] += 1
        self._words[at.REQUESTED] += request_bytes
        self._words[at.ANSWERED] += answer_bytes

    def swapped(self) -> None:
        """Count that another build took over."""
        self._words[at.SWAPS] += 1

    def serve(self, labels: Labels) -> None:
        """Say what is served under the name from now on."""
        words = self._words
        if read_labels(words) != labels:
            words[at.VERSION] |= 1  # odd: readers wait
            for start, text in zip((at.KIND, at.BUILD, at.TOKENIZER), labels, strict=True):
                at.write_text(words[start : start + at.LABEL_WORDS], text)
            words[at.VERSION] += 1
        words[at.READY] = 1

    def withdraw(self) -> None:
        """Say that nothing is served under the name any more."""
        self._words[at.READY] = 0


def _head_word(place: int, doc: str) -> property:
    """Return a property that is one word of a slot's head."""

    def read(slot: "Slot") -> int:
        return int(slot._words[place])

    def write(slot: "Slot", value: int) -> None:
        slot._words[place] = value

    return property(read, write, doc=doc)


class Slot:
    """The part of one process."""

    in_flight = _head_word(at.IN_FLIGHT, "Requests that are being answered.")
    connections = _head_word(at.CONNECTIONS, "Connections that are open.")
    waiting = _head_word(at.WAITING, "Contexts that wait to be looked up.")

    def __init__(self, words: memoryview) -> None:
        """Write into int64 [SLOT]."""
        self._words = words
        self._found: dict[str, ReleaseCounters] = {}
        self._read_before = 0
        for position in range(words[at.USED]):
            self._add(1 + position)
        self.nothing = ReleaseCounters(at.entry_of(words, 0), NO_RELEASE)
        """Counts what belongs to no release that is served."""

    @property
    def restarts(self) -> int:
        """Times that the process of this slot was started again."""
        return int(self._words[at.RESTARTS])

    def begin(self) -> None:
        """Take the slot over for this process: what its predecessor held open is gone, what it counted stays."""
        self.end()
        self._read_before = _storage_read()
        self._words[at.PID] = os.getpid()
        self.state = WorkerState.STARTING
        self.heartbeat()

    def end(self) -> None:
        """Say that the process of this slot is gone; the supervisor calls it, which knows none of its releases."""
        for position in range(1 + self._words[at.USED]):
            at.entry_of(self._words, position)[at.READY] = 0
        for place in (at.IN_FLIGHT, at.CONNECTIONS, at.WAITING, at.STATE, at.PID):
            self._words[place] = 0

    def restarted(self) -> None:
        """Count that the process of this slot is started again; the supervisor calls it."""
        self._words[at.RESTARTS] += 1

    def release(self, name: str) -> ReleaseCounters:
        """Return the counters of a release that is or was served; they may be kept.

        Names that a request invents belong to `nothing`: every name takes a place for good.
        """
        if (found := self._found.get(name)) is not None:
            return found
        used = self._words[at.USED]
        if not name or used >= at.RELEASES:
            return self.nothing
        at.write_text(at.entry_of(self._words, 1 + used)[at.NAME : at.KIND], name)
        self._words[at.USED] = used + 1  # last: readers look at whole entries alone
        return self._add(1 + used)

    def _add(self, position: int) -> ReleaseCounters:
        entry = at.entry_of(self._words, position)
        name = at.read_text(entry[at.NAME : at.KIND])
        self._found[name] = made = ReleaseCounters(entry, name)
        return made

    def announce(self, served: Iterable[tuple[str, Labels]]) -> None:
        """Say for which releases this process answers from now on; nothing else is served."""
        names = dict(served)
        for name, figures in self._found.items():
            if name not in names:
                figures.withdraw()
        for name, labels in names.items():
            self.release(name).serve(labels)

    def heartbeat(self) -> None:
        """Show that the event loop goes round, and what was read from storage."""
        self._words[at.HEARTBEAT] = time.monotonic_ns()
        read = _storage_read()
        self._words[at.READ] += max(read - self._read_before, 0)
        self._read_before = read

    @property
    def state(self) -> WorkerState:
        """What the process is doing."""
        return WorkerState(self._words[at.STATE])

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._words[at.STATE] = state


class SharedCounters:
    """The counters of all processes."""

    def __init__(self, slots: int) -> None:
        """Make them, all zero; before the processes are forked."""
        memory = mmap.mmap(-1, slots * at.SLOT * at.WORD)
        words = memoryview(memory).cast("q")
        self._slots = [words[start : start + at.SLOT] for start in range(0, slots * at.SLOT, at.SLOT)]

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, number: int) -> Slot:
        """Return the part of one process, to write into."""
        return Slot(self._slots[number])

    def connections(self, besides: int = -1) -> list[int]:
        """Return how many connections each worker has that is ready, leaving one of them out."""
        return [
            words[at.CONNECTIONS]
            for number, words in enumerate(self._slots)
            if number != besides and words[at.STATE] == WorkerState.READY
        ]

    def snapshot(self) -> list[WorkerFigures]:
        """Return what every process counted up to now."""
        return [read_slot(number, words) for number, words in enumerate(self._slots)]

    def totals(self) -> dict[str, ReleaseTotals]:
        """Return sums over all processes by name of the release; `NO_RELEASE` is always there."""
        return add_up(self.snapshot())


def _storage_read() -> int:
    """Return the bytes that were read from storage for this process; 0 where the system does not tell."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_bytes().splitlines():
            if line.startswith(b"read_bytes:"):
                return int(line[11:])
    return 0

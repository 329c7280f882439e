"""The counters of all processes of the service, in one block of shared memory.

The supervisor creates `SharedCounters` before it forks. Each worker writes only to its own `Slot`, so there are no
locks; readers see all slots. A restarted worker takes over the slot of the one that died: totals never go down, and
everything counted up to a `kill -9` stays counted.

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
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

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


class ReleaseCounters:
    """The counters of one release in one process; only the event loop's thread writes them."""

    __slots__ = ("_words", "name")

    def __init__(self, words: memoryview, name: str) -> None:
        """Count into an entry: int64 [ENTRY]."""
        self._words = words
        self.name = name

    def record(
        self,
        contexts: int,
        match_lengths: Sequence[int],
        nodes: int,
        misses: int,
        request_bytes: int,
        answer_bytes: int,
        seconds: float,
    ) -> None:
        """Count an answered request; takes about a microsecond for one context.

        Args:
            contexts: contexts in the request.
            match_lengths: of each context.
            nodes: nodes of all drafts.
            misses: empty drafts.
            request_bytes: size of the request.
            answer_bytes: size of the answer.
            seconds: from the arrival of the request to its answer.
        """
        words = self._words
        nanos = int(seconds * 1e9)
        words[at.NODES] += nodes
        words[at.REQUESTED] += request_bytes
        words[at.ANSWERED] += answer_bytes
        words[at.LATENCY_SUM] += nanos
        words[at.LAPSES + bisect_left(_NANOS, nanos)] += 1
        words[at.BATCHES + bisect_left(at.BATCH_BUCKETS, contexts)] += 1
        if misses:
            words[at.MISSES] += misses
        if contexts == 1:  # the same, faster
            words[at.MATCHES + min(match_lengths[0], _LONGEST)] += 1
            return
        for length, count in Counter(match_lengths).items():
            words[at.MATCHES + min(length, _LONGEST)] += count

    def fail(self, status: Status, request_bytes: int = 0, answer_bytes: int = 0) -> None:
        """Count a request that failed."""
        self._words[at.FAILURES + status] += 1
        self._words[at.REQUESTED] += request_bytes
        self._words[at.ANSWERED] += answer_bytes

    def swapped(self) -> None:
        """Count a swap to another build."""
        self._words[at.SWAPS] += 1

    def unopened(self) -> None:
        """Count a failed attempt to open the store of this name."""
        self._words[at.UNOPENED] += 1

    def serve(self, labels: Labels) -> None:
        """Publish the labels of the store served under this name from now on."""
        words = self._words
        if read_labels(words) != labels:
            words[at.VERSION] |= 1  # odd: readers wait (seqlock)
            for start, text in zip((at.KIND, at.BUILD, at.TOKENIZER), labels, strict=True):
                at.write_text(words[start : start + at.LABEL_WORDS], text)
            words[at.VERSION] += 1
        words[at.READY] = 1

    def withdraw(self) -> None:
        """Mark the name as no longer served."""
        self._words[at.READY] = 0


def _head_word(place: int, doc: str) -> property:
    """Return a property for one word of a slot's head."""

    def read(slot: "Slot") -> int:
        return int(slot._words[place])

    def write(slot: "Slot", value: int) -> None:
        slot._words[place] = value

    return property(read, write, doc=doc)


class Slot:
    """The counters of one process."""

    in_flight = _head_word(at.IN_FLIGHT, "Requests that are being answered.")
    connections = _head_word(at.CONNECTIONS, "Connections that are open.")
    waiting = _head_word(at.WAITING, "Contexts that wait to be looked up.")

    def __init__(self, words: memoryview) -> None:
        """Write to int64 [SLOT]."""
        self._words = words
        self._found: dict[str, ReleaseCounters] = {}
        self._read_before = 0
        for position in range(words[at.USED]):
            self._add(1 + position)
        self.nothing = ReleaseCounters(at.entry_of(words, 0), NO_RELEASE)
        """Counters of requests that belong to no served release."""

    @property
    def restarts(self) -> int:
        """Number of restarts of this slot's process."""
        return int(self._words[at.RESTARTS])

    @property
    def catalogue_read(self) -> bool:
        """Whether this process or a predecessor has ever known the releases of the catalogue."""
        return bool(self._words[at.CATALOGUE])

    def follow(self, read_at: float | None, *, away: bool) -> None:
        """Record how far this process follows the catalogue.

        Args:
            read_at: when it was last read, as Unix time in seconds; None if never, or without a catalogue.
            away: whether it cannot be read now.
        """
        if read_at is not None:
            self._words[at.CATALOGUE] = int(read_at * 1e9)
        self._words[at.AWAY] = away

    @property
    def silence(self) -> float:
        """Seconds since the last heartbeat of a process that is ready; 0 for others."""
        if self._words[at.STATE] != WorkerState.READY:
            return 0.0
        return float(time.monotonic_ns() - self._words[at.HEARTBEAT]) / 1e9

    def begin(self) -> None:
        """Take the slot over for this process: gauges of its predecessor are reset, counters stay."""
        self.end()
        self._read_before = _storage_read()
        self._words[at.PID] = os.getpid()
        self.state = WorkerState.STARTING
        self.heartbeat()

    def end(self) -> None:
        """Mark this slot's process as ended; called by the supervisor, which knows none of its releases."""
        for position in range(1 + self._words[at.USED]):
            at.entry_of(self._words, position)[at.READY] = 0
        for place in (at.IN_FLIGHT, at.CONNECTIONS, at.WAITING, at.AWAY, at.STATE, at.PID):
            self._words[place] = 0

    def restarted(self) -> None:
        """Count a restart of this slot's process; called by the supervisor."""
        self._words[at.RESTARTS] += 1

    def release(self, name: str) -> ReleaseCounters:
        """Return the counters of a release that is or was served; callers may keep them.

        Unknown names from requests are counted under `nothing`, since every name occupies an entry for good.
        """
        if (found := self._found.get(name)) is not None:
            return found
        used = self._words[at.USED]
        if not name or used >= at.RELEASES:
            return self.nothing
        at.write_text(at.entry_of(self._words, 1 + used)[at.NAME : at.KIND], name)
        self._words[at.USED] = used + 1  # last: readers only see whole entries
        return self._add(1 + used)

    def _add(self, position: int) -> ReleaseCounters:
        entry = at.entry_of(self._words, position)
        name = at.read_text(entry[at.NAME : at.KIND])
        self._found[name] = made = ReleaseCounters(entry, name)
        return made

    def announce(self, served: Iterable[tuple[str, Labels]]) -> None:
        """Publish the releases that this process serves from now on; all others are withdrawn."""
        names = dict(served)
        for name, figures in self._found.items():
            if name not in names:
                figures.withdraw()
        for name, labels in names.items():
            self.release(name).serve(labels)

    def heartbeat(self) -> None:
        """Record that the event loop is alive, and the bytes read from storage."""
        self._words[at.HEARTBEAT] = time.monotonic_ns()
        read = _storage_read()
        self._words[at.READ] += max(read - self._read_before, 0)
        self._read_before = read

    @property
    def state(self) -> WorkerState:
        """State of the process."""
        return WorkerState(self._words[at.STATE])

    @state.setter
    def state(self, state: WorkerState) -> None:
        self._words[at.STATE] = state


class SharedCounters:
    """The counters of all processes."""

    def __init__(self, slots: int) -> None:
        """Allocate the counters, all zero, before the processes are forked."""
        size = slots * at.SLOT
        words = memoryview(mmap.mmap(-1, (size + 1) * at.WORD)).cast("q")
        self._slots = [words[start : start + at.SLOT] for start in range(0, size, at.SLOT)]
        self._shared = words[size:]

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def stopping(self) -> bool:
        """Whether the service is about to stop."""
        return bool(self._shared[0])

    @stopping.setter
    def stopping(self, stopping: bool) -> None:
        self._shared[0] = stopping

    def slot(self, number: int) -> Slot:
        """Return the slot of one process, for writing."""
        return Slot(self._slots[number])

    def connections(self, besides: int = -1) -> list[int]:
        """Return the number of connections of each ready worker, except for one if given."""
        return [
            words[at.CONNECTIONS]
            for number, words in enumerate(self._slots)
            if number != besides and words[at.STATE] == WorkerState.READY
        ]

    def snapshot(self) -> list[WorkerFigures]:
        """Return the present counters of every process."""
        return [read_slot(number, words) for number, words in enumerate(self._slots)]

    def totals(self) -> dict[str, ReleaseTotals]:
        """Return sums over all processes by release; `NO_RELEASE` is always included."""
        return add_up(self.snapshot())


def _storage_read() -> int:
    """Return the bytes read from storage for this process; 0 where the system does not report them."""
    with suppress(OSError):
        for line in Path("/proc/self/io").read_bytes().splitlines():
            if line.startswith(b"read_bytes:"):
                return int(line[11:])
    return 0

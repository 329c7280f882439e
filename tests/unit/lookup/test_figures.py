import os
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftstore.remote.wire import Status
from services.lookup.figures.counting import SharedCounters, Slot
from services.lookup.figures.totals import NO_RELEASE, Labels, WorkerState, add_up
from services.lookup.figures.words import BATCH_BUCKETS, MATCH_BUCKETS, RELEASES, SECONDS_BUCKETS

LABELS = Labels("rest", "0123456789abcdef", "fedcba9876543210")


def record(slot: Slot, name: str, matches: NDArray[np.int32], seconds: float = 5e-5) -> None:
    slot.release(name).record(
        len(matches), matches.tolist(), 10, int((matches == 0).sum()), 100, 300, seconds
    )


def lengths(*matches: int) -> NDArray[np.int32]:
    return np.array(matches, np.int32)


def test_nothing_is_counted_at_the_start() -> None:
    figures = SharedCounters(2)
    totals = figures.totals()
    assert list(totals) == [NO_RELEASE]
    assert totals[NO_RELEASE].queries == totals[NO_RELEASE].ready == 0
    assert [worker.state for worker in figures.snapshot()] == [WorkerState.ABSENT] * 2
    assert len(figures) == 2


def test_requests_are_counted_by_release() -> None:
    figures = SharedCounters(1)
    slot = figures.slot(0)
    record(slot, "chat", lengths(3, 0, 16))
    record(slot, "chat", lengths(5), 0.2)
    record(slot, "code", lengths(1))
    slot.release("chat").fail(Status.BUSY, 40, 30)
    slot.nothing.fail(Status.NOT_FOUND, 50, 20)
    totals = figures.totals()
    assert list(totals) == [NO_RELEASE, "chat", "code"]
    chat = totals["chat"]
    assert (chat.queries, chat.contexts, chat.misses, chat.nodes) == (2, 4, 1, 20)
    assert (chat.request_bytes, chat.answer_bytes) == (240, 630)
    assert (chat.failures[Status.BUSY], sum(chat.failures)) == (1, 1)
    assert (chat.matched, chat.matches[0], chat.matches[16]) == (24, 1, 1)
    assert chat.batches[BATCH_BUCKETS.index(1)] == chat.batches[BATCH_BUCKETS.index(4)] == 1
    assert chat.lapses[SECONDS_BUCKETS.index(50e-6)] == chat.lapses[-1] == 1
    assert chat.seconds == pytest.approx(0.20005)
    assert totals["code"].queries == 1
    assert totals[NO_RELEASE].failures[Status.NOT_FOUND] == 1
    assert (totals[NO_RELEASE].queries, totals[NO_RELEASE].request_bytes) == (0, 50)


@given(
    matches=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    nanos=st.integers(0, 10**9),
)
def test_histograms_hold_what_was_recorded(matches: list[int], nanos: int) -> None:
    figures = SharedCounters(1)
    record(figures.slot(0), "r", lengths(*matches), nanos / 1e9)
    totals = figures.totals()["r"]
    longest = len(MATCH_BUCKETS)
    expected = [sum(min(match, longest) == length for match in matches) for length in range(longest + 1)]
    assert list(totals.matches) == expected
    assert totals.contexts == len(matches)
    [batch] = np.flatnonzero(totals.batches)
    assert len(matches) <= (*BATCH_BUCKETS, 1 << 16)[batch]
    assert batch == 0 or len(matches) > BATCH_BUCKETS[batch - 1]
    [lapse] = np.flatnonzero(totals.lapses)
    seconds = int(nanos / 1e9 * 1e9) / 1e9
    assert seconds <= (*SECONDS_BUCKETS, 10)[lapse]
    assert lapse == 0 or seconds > SECONDS_BUCKETS[lapse - 1]


def test_several_processes_add_up() -> None:
    figures = SharedCounters(3)
    for number in range(3):
        slot = figures.slot(number)
        slot.begin()
        record(slot, "chat", lengths(2))
        slot.announce([("chat", LABELS)])
        slot.connections, slot.in_flight, slot.waiting = 4, 5, 6
    figures.slot(1).end()
    totals = figures.totals()["chat"]
    assert (totals.queries, totals.ready, totals.labels) == (3, 2, LABELS)
    assert [(w.connections, w.in_flight, w.waiting) for w in figures.snapshot()] == [
        (4, 5, 6),
        (0, 0, 0),
        (4, 5, 6),
    ]
    assert add_up(figures.snapshot()[:1])["chat"].queries == 1


def test_what_is_served_is_announced() -> None:
    figures = SharedCounters(1)
    slot = figures.slot(0)
    slot.announce([("chat", LABELS), ("code", Labels("crest", "1", "2"))])
    slot.announce([("chat", LABELS._replace(build="b" * 99))])
    slot.release("chat").swapped()
    chat, code = figures.totals()["chat"], figures.totals()["code"]
    assert (chat.ready, chat.labels.build, chat.swaps) == (1, "b" * 31, 1)  # cut to what fits
    assert (code.ready, code.labels.kind) == (0, "crest")


def test_a_process_that_takes_over_goes_on_counting() -> None:
    figures = SharedCounters(1)
    first = figures.slot(0)
    first.begin()
    first.state = WorkerState.READY
    record(first, "chat", lengths(2))
    first.announce([("chat", LABELS)])
    first.connections = 7
    figures.slot(0).end()  # as the supervisor does, which has announced nothing itself
    assert figures.totals()["chat"].ready == 0
    second = figures.slot(0)
    second.restarted()
    second.begin()
    record(second, "chat", lengths(2))
    record(second, "code", lengths(2))
    [worker] = figures.snapshot()
    assert (worker.state, worker.restarts, worker.connections, worker.pid) == (
        WorkerState.STARTING,
        1,
        0,
        os.getpid(),
    )
    assert second.restarts == 1
    assert {name: totals.queries for name, totals in worker.releases.items()} == {"": 0, "chat": 2, "code": 1}


def test_names_are_bounded() -> None:
    figures = SharedCounters(1)
    slot = figures.slot(0)
    longest = "é" * 127
    for name in (longest, *(f"r{number}" for number in range(RELEASES))):
        slot.release(name).fail(Status.BUSY)
    totals = figures.totals()
    assert len(totals) == RELEASES + 1
    assert totals[longest].failures[Status.BUSY] == 1
    assert totals[NO_RELEASE].failures[Status.BUSY] == 1  # the one that found no place
    assert slot.release("") is slot.nothing


def test_a_forked_process_counts_into_shared_memory_until_it_is_killed() -> None:
    figures = SharedCounters(1)
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:  # a child does nothing that could return into the test
        try:
            slot = figures.slot(0)
            slot.begin()
            for _ in range(1000):
                record(slot, "chat", lengths(4))
            os.write(writing, b"x")
            signal.pause()
        finally:
            os._exit(1)
    os.read(reading, 1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(reading)
    os.close(writing)
    [worker] = figures.snapshot()
    assert (worker.pid, worker.releases["chat"].queries) == (pid, 1000)


def test_silence_is_the_time_since_the_last_sign_of_life() -> None:
    figures = SharedCounters(1)
    slot = figures.slot(0)
    slot.begin()
    before = figures.snapshot()[0].silence
    after = figures.snapshot()[0].silence
    assert 0 <= before <= after
    slot.heartbeat()
    assert figures.snapshot()[0].storage_read >= 0

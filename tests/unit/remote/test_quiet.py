"""When and for how long a failing service is left alone."""

import pytest

from draftstore.remote.quiet import FAILURES, FIRST, LONGEST, Quiet


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def make() -> tuple[Quiet, Clock]:
    clock = Clock()
    return Quiet(clock), clock


def length_of(quiet: Quiet, clock: Clock) -> float:
    """Return the seconds until the pause is over."""
    start = clock.now
    while quiet.holds:
        clock.now += 0.001
    return clock.now - start


def test_a_pause_begins_after_three_failures_in_a_row_or_a_refused_connection() -> None:
    quiet, _ = make()
    for _ in range(10):  # never three in a row
        assert not any(quiet.fail() for _ in range(FAILURES - 1))
        quiet.succeed()
    assert [quiet.fail() for _ in range(FAILURES)] == [False] * (FAILURES - 1) + [True]
    assert quiet.holds
    assert make()[0].fail(refused=True)


def test_it_doubles_with_every_failure_up_to_the_longest_and_an_answer_starts_over() -> None:
    quiet, clock = make()
    quiet.fail(refused=True)
    for expected in [FIRST * 2**i for i in range(7)] + [LONGEST] * 3:
        assert not quiet.fail()  # of another thread in the same moment
        assert length_of(quiet, clock) == pytest.approx(expected, abs=0.0011)
        assert quiet.fail()
    quiet.succeed()
    assert length_of(quiet, clock) == 0
    assert not quiet.fail()
    assert quiet.fail(refused=True)
    assert length_of(quiet, clock) == pytest.approx(FIRST, abs=0.0011)

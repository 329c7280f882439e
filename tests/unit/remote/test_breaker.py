import threading

from draftstore.remote.breaker import REFUSED, Breaker
from tests.fakes.waiting import in_threads


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make(chance: float = 1.0, **settings: float) -> tuple[Breaker, Clock]:
    clock = Clock()
    return Breaker(clock=clock, chance=lambda: chance, **settings), clock  # type: ignore[arg-type]


def open_up(breaker: Breaker) -> None:
    for _ in range(3):
        breaker.fail(breaker.enter())


def test_it_lets_everybody_in_while_all_is_well() -> None:
    breaker, _ = make()
    for _ in range(100):
        ticket = breaker.enter()
        assert ticket != REFUSED
        breaker.succeed(ticket)
    assert not breaker.is_open


def test_it_opens_after_three_failures_in_a_row() -> None:
    breaker, _ = make()
    for _ in range(10):  # never three in a row
        assert not breaker.fail(breaker.enter())
        assert not breaker.fail(breaker.enter())
        breaker.succeed(breaker.enter())
    assert not breaker.fail(breaker.enter())
    assert not breaker.fail(breaker.enter())
    assert breaker.fail(breaker.enter())
    assert breaker.is_open
    assert breaker.enter() == REFUSED


def test_one_probe_after_the_time_is_over() -> None:
    breaker, clock = make()
    open_up(breaker)
    clock.now += 0.0499
    assert breaker.enter() == REFUSED
    clock.now += 0.0002
    probe = breaker.enter()
    assert probe != REFUSED
    assert breaker.enter() == REFUSED
    breaker.succeed(probe)
    assert not breaker.is_open
    assert breaker.enter() != REFUSED


def test_it_stays_open_twice_as_long_each_time_up_to_five_seconds() -> None:
    breaker, clock = make()
    open_up(breaker)
    waits = []
    for _ in range(10):
        start = clock.now
        while (ticket := breaker.enter()) == REFUSED:
            clock.now += 0.001
        waits.append(clock.now - start)
        assert breaker.fail(ticket)
    for wait, expected in zip(waits, [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 5.0], strict=True):
        assert expected - 1e-6 <= wait < expected + 0.002


def test_success_starts_over() -> None:
    breaker, clock = make()
    open_up(breaker)
    for _ in range(4):
        clock.now += 10
        breaker.fail(breaker.enter())
    clock.now += 10
    breaker.succeed(breaker.enter())
    open_up(breaker)
    clock.now += 0.051
    assert breaker.enter() != REFUSED


def test_chance_shortens_the_wait_to_a_half_at_most() -> None:
    for chance, wait in ((0.0, 0.025), (0.5, 0.0375), (1.0, 0.05)):
        breaker, clock = make(chance)
        open_up(breaker)
        clock.now += wait - 0.0001
        assert breaker.enter() == REFUSED
        clock.now += 0.0002
        assert breaker.enter() != REFUSED


def test_a_probe_of_which_nothing_is_heard_is_replaced() -> None:
    breaker, clock = make()
    open_up(breaker)
    clock.now += 1
    lost = breaker.enter()
    assert lost != REFUSED
    clock.now += 0.9
    assert breaker.enter() == REFUSED
    clock.now += 0.2
    assert breaker.enter() not in (REFUSED, lost)
    assert not breaker.fail(lost)  # too late to say anything


def test_an_abandoned_probe_is_replaced_at_once() -> None:
    breaker, clock = make()
    open_up(breaker)
    clock.now += 1
    breaker.abandon(breaker.enter())
    assert breaker.enter() != REFUSED
    breaker.reset()
    breaker.abandon(breaker.enter())
    assert not breaker.is_open


def test_tickets_from_before_do_not_count() -> None:
    breaker, clock = make()
    early = [breaker.enter() for _ in range(8)]
    assert [breaker.fail(ticket) for ticket in early] == [False, False, True] + [False] * 5
    clock.now += 0.051  # so many failures at once have not made it longer
    probe = breaker.enter()
    assert probe != REFUSED
    breaker.succeed(early[0])
    assert breaker.is_open
    breaker.succeed(probe)
    assert not breaker.is_open


def test_a_pause_is_as_long_as_asked_or_a_tenth_longer() -> None:
    for chance, most in ((0.0, 2.0), (1.0, 2.2)):
        breaker, clock = make(chance)
        ticket, other = breaker.enter(), breaker.enter()
        breaker.pause(ticket, 2.0)
        breaker.pause(other, 1000.0)
        breaker.succeed(other)
        clock.now += most - 0.001
        assert breaker.enter() == REFUSED
        clock.now += 0.002
        breaker.succeed(breaker.enter())
        assert not breaker.is_open


def test_reset_closes() -> None:
    breaker, _ = make()
    ticket = breaker.enter()
    open_up(breaker)
    breaker.reset()
    assert not breaker.is_open
    assert not any(breaker.fail(ticket) for _ in range(5))


def test_of_many_threads_one_is_the_probe() -> None:
    breaker, clock = make()
    open_up(breaker)
    clock.now += 1
    start, tickets = threading.Barrier(8), list[int]()

    def run() -> None:
        start.wait()
        tickets.append(breaker.enter())

    in_threads([run] * 8)
    assert sum(ticket != REFUSED for ticket in tickets) == 1

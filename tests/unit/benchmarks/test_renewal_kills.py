"""What the benchmark of killed rebuilds makes of answers and kills."""

import pytest

pytest.importorskip("psutil")
pytest.importorskip("prefect")

from benchmarks.renewal_kills import Kill, compare, longest_pauses
from benchmarks.renewal_site import Move


def test_answers_are_those_of_builds_that_were_live_until_then() -> None:
    moves = [Move(0.0, [b"a", b"x"]), Move(10.0, [b"b", b"x"]), Move(20.0, [b"c", b"x"])]
    assert compare([(5.0, 0, b"a"), (12.0, 0, b"b"), (15.0, 1, b"x"), (25.0, 0, b"c")], moves) == ([], 0.0)
    assert compare([(12.5, 0, b"a"), (23.0, 0, b"a"), (25.0, 0, b"b")], moves) == ([], 13.0)
    wrong, _ = compare([(5.0, 0, b"b"), (25.0, 0, b"d"), (25.0, 0, b"c")], moves)
    assert len(wrong) == 2


def test_the_longest_pause_is_that_after_a_kill_or_around_it() -> None:
    answered = [0.0, 1.0, 4.0, 4.5, 5.0, 7.0, 7.5]
    kills = [Kill("flow", 1.5, True), Kill("postgres", 4.2, True), Kill("flow", 7.2, False)]
    assert longest_pauses(answered, kills) == {"flow": 3.0, "postgres": 2.0}

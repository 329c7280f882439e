"""The picture of accepted lengths over time, read as what it is: XML."""

import re
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from schema.length_chart import Move, draw_lengths

SVG = "{http://www.w3.org/2000/svg}"
DAY = datetime(2026, 3, 1, tzinfo=UTC)


def drawn(moves: list[Move], release: str = "chat") -> ElementTree.Element:
    return ElementTree.fromstring(draw_lengths(release, moves))


def texts(picture: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in picture.iter(f"{SVG}text")]


def test_a_dot_for_every_replay_where_it_falls_in_time_and_length() -> None:
    moves = [
        Move(DAY + timedelta(days=10), False, {"held <out>": 1.9, "code": 2.5}),
        Move(DAY, False, {"held <out>": 1.5}),
        Move(DAY + timedelta(days=5), True, {"held <out>": 1.7}),
        Move(DAY + timedelta(days=7), False, {}),
    ]
    picture = drawn(moves)
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in picture.iter(f"{SVG}circle")]
    assert len(dots) == 4
    (x, y), (middle, higher), (end, highest), (code, top) = dots
    assert x < middle < end == code
    assert abs(middle - (x + end) / 2) < 0.2
    assert y > higher > highest > top, "more is further up"
    assert abs((y - higher) - (higher - highest)) < 0.2
    hollow = [dot for dot in picture.iter(f"{SVG}circle") if dot.attrib["fill"] == "white"]
    assert [float(dot.attrib["cx"]) for dot in hollow] == [middle], "a rollback"
    assert {"held <out> 1.900", "code 2.500", "2026-03-01", "2026-03-11"} <= set(texts(picture))


@pytest.mark.parametrize("number", [1, 5, 18, 60])
@pytest.mark.parametrize("step", [-0.001, 0.0, 0.001, 1.0])
def test_names_lie_in_the_picture_and_not_upon_each_other(number: int, step: float) -> None:
    picture = drawn(
        [Move(DAY, False, {f"r{place}": 2.0 + place * step for place in range(number)} | {"top": 90.0})]
    )
    named = [each for each in picture.iter(f"{SVG}text") if re.match("(r|top)", each.text or "")]
    heights = sorted(float(each.attrib["y"]) for each in named)
    assert len(heights) == number + 1
    assert all(after - before > 13.8 for before, after in pairwise(heights))
    assert heights[0] > 18, "below the title"
    assert heights[-1] < float(picture.attrib["viewBox"].split()[-1])


def test_names_are_any_text() -> None:
    picture = drawn([Move(DAY, False, {"\x1b[31m\x0b<&\udc80": 2.0})], release="\x01")
    assert "\ufffd[31m\ufffd<&\ufffd 2.000" in texts(picture)


def test_a_release_that_never_was_replayed_has_an_empty_picture() -> None:
    picture = drawn([Move(DAY, False, {})], release="a & b")
    assert not list(picture.iter(f"{SVG}circle"))
    assert "accepted length M of a & b, which was never replayed" in texts(picture)
    assert not [text for text in texts(picture) if re.match(r"\d\d-\d\d", text)], "no time"

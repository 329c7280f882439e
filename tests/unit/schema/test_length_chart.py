"""The picture of accepted lengths over time, read as what it is: XML."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise
from xml.etree import ElementTree

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


def test_names_do_not_lie_upon_each_other() -> None:
    picture = drawn([Move(DAY, False, {f"r{number}": 2.0 + number / 1000 for number in range(5)})])
    named = [each for each in picture.iter(f"{SVG}text") if (each.text or "").startswith("r")]
    heights = sorted(float(each.attrib["y"]) for each in named)
    assert len(heights) == 5
    assert all(after - before >= 14 for before, after in pairwise(heights))


def test_a_release_that_never_was_replayed_has_an_empty_picture() -> None:
    picture = drawn([Move(DAY, False, {})], release="a & b")
    assert not list(picture.iter(f"{SVG}circle"))
    assert "accepted length M of a & b, as replayed when it moved" in texts(picture)

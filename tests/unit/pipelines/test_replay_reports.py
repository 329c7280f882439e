"""The page of a publishing: a table of replays, and a picture that is valid SVG whatever names are."""

import re
from typing import Any
from xml.etree import ElementTree

import pytest

from pipelines.replay_reports import WIDTH, draw_replays


def row(
    which: str, length: float, p99: float, limits: tuple[float, float] | None, name: str
) -> dict[str, Any]:
    least, most = limits or (None, None)
    return {
        "recording": name, "as": which, "build": 7, "accepted_length": length, "p99_us": p99, "bytes": 5,
        "least_length": least, "most_us": most, "max_bytes": None,
    }  # fmt: skip


@pytest.mark.parametrize("limits", [None, (1.96, 150.0)])
def test_bars_are_as_long_as_figures(limits: tuple[float, float] | None) -> None:
    rows = [row("new", 1.0, 300.0, limits, "<a> & b"), row("live", 2.0, 100.0, limits, "<a> & b")]
    drawn = ElementTree.fromstring(draw_replays(rows if limits else rows[:1]))
    space = "{http://www.w3.org/2000/svg}"
    bars = [float(each.attrib["width"]) for each in drawn.iter(f"{space}rect")][1:]
    expected = [WIDTH / 2, WIDTH, WIDTH, WIDTH / 3] if limits else [WIDTH, WIDTH]
    assert bars == pytest.approx(expected, abs=0.06)
    marks = [re.match(r"M([\d.]+) ", each.attrib["d"]) for each in drawn.iter(f"{space}path")]
    assert len(marks) == (2 if limits else 0)
    texts = ["".join(each.itertext()) for each in drawn.iter(f"{space}text")]
    assert "<a> & b" in texts
    assert "1.000" in texts
    assert {"300"} <= set(texts)

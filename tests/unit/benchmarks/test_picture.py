"""The pictures of README and docs show what the file of results holds."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

pytest.importorskip("matplotlib")

from benchmarks.common import RESULTS
from benchmarks.picture import (
    LABELS,
    LENGTHS,
    RELIABILITY,
    draw_lengths,
    draw_reliability,
    mean_lengths,
    spread,
)
from benchmarks.systems import OURS, SYSTEMS


def results() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / RESULTS / "quality.json").read_text(encoding="utf-8"))
    return found


def texts_of(picture: Path) -> list[str]:
    """Return the texts in a picture that hold a figure of two or three digits after the point."""
    return re.findall(r">([^<>]* \d\.\d{2,3})</text>", picture.read_text(encoding="utf-8"))


def test_the_picture_of_lengths_shows_the_results(tmp_path: Path) -> None:
    replays = results()["accepted_length"]["sample"]
    draw_lengths(tmp_path / "again.svg", replays)
    drawn = texts_of(tmp_path / "again.svg")
    assert len(drawn) == len(SYSTEMS) == len(LABELS)
    assert texts_of(ROOT / LENGTHS) == drawn
    best = max(mean_lengths(replays)["stored text and request"].values())
    assert f"{LABELS['stored text and request'][0]} {best:.2f}" in drawn


def test_the_reliability_diagram_shows_the_results(tmp_path: Path) -> None:
    draw_reliability(tmp_path / "again.svg", results()["calibration"]["sample"])
    drawn = texts_of(tmp_path / "again.svg")
    assert len(drawn) == 2 * len(OURS)
    assert texts_of(ROOT / RELIABILITY) == drawn


def test_names_stand_apart_in_their_order() -> None:
    assert spread({"a": 2.0, "b": 1.0, "c": 1.05, "d": 1.1}, 0.5) == {"b": 1.0, "c": 1.5, "d": 2.0, "a": 2.5}

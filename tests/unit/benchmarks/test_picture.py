"""The picture of the README shows what the files of results hold."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

pytest.importorskip("matplotlib")

from benchmarks.common import RESULTS
from benchmarks.picture import PEERS, PICTURE, draw, points_of_peers


def results(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def named_values(picture: Path) -> list[str]:
    """Return the names in a picture that end in a value."""
    return re.findall(r">([^<>]+: \d\.\d\d)</text>", picture.read_text(encoding="utf-8"))


def test_the_picture_shows_the_results(tmp_path: Path) -> None:
    ours, theirs = results("accepted_nodes"), results("rest_peers")
    draw(tmp_path / "again.svg", ours["lines"], points_of_peers(theirs, ours["source"], ours["rows"]))
    drawn = named_values(tmp_path / "again.svg")
    assert len(drawn) == len(ours["lines"]) + len(PEERS)
    assert named_values(ROOT / PICTURE) == drawn


def test_peers_measured_on_something_else_are_not_drawn() -> None:
    with pytest.raises(SystemExit, match="no figures of the peers over 7 outputs"):
        points_of_peers(results("rest_peers"), "chat_sharegpt", 7)

"""What a round trip costs is split into parts that add up to its ratio."""

import pytest

pytest.importorskip("psutil")
pytest.importorskip("uvloop")
pytest.importorskip("matplotlib")

from benchmarks.roundtrip import summarize


def row(client: float) -> dict[str, object]:
    us = {"client": client, "frames": 150.0, "echo": 40.0, "in process": 60.0, "rested": 90.0}
    return {
        "us": {kind: {"p25": value, "p50": 2 * value} for kind, value in us.items()},
        "ratio": client / 100,
    }


def test_parts_add_up_to_the_ratio() -> None:
    found = summarize("crest", 1, [row(170.0), row(190.0), row(400.0)])
    shares = found["shares"]
    assert (found["ratio"], found["lowest"], found["highest"], found["quiet"]) == (1.9, 1.7, 4.0, 1.9)
    assert found["unit_us"] == 100
    assert shares["rested"] == 0.9
    parts = [shares[share] for share in ("echo", "in process", "service", "client")]
    assert sum(parts) == pytest.approx(found["quiet"], abs=0.02)

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.growth import Notes
from benchmarks.growth_law import fit_law, fit_laws
from benchmarks.growth_picture import draw_growth
from benchmarks.growth_report import fit, show
from benchmarks.growth_texts import part_of
from benchmarks.growthprobe import cut_index
from draftstore.search.suffix import index_segment
from draftstore.text.tokens import sentinel

SIZES = (1e6, 3e6, 1e7, 3e7, 1e8)
END = sentinel(np.dtype("<u2"))


@given(st.floats(0.1, 1.0), st.floats(0.05, 0.5))
def test_a_logarithm_is_found_again(offset: float, slope: float) -> None:
    law = fit_law(SIZES, [1 + offset + slope * np.log10(size) for size in SIZES])
    assert law.slope == pytest.approx(slope, rel=1e-3)
    assert law.at(1e10)[1] == pytest.approx(1 + offset + slope * 10, rel=1e-3)


@given(st.floats(0.01, 0.5), st.floats(0.02, 0.3))
def test_a_power_law_is_found_again(factor: float, exponent: float) -> None:
    found = fit_laws(SIZES, [1 + factor * size**exponent for size in SIZES])
    assert found["law"]["exponent"] == pytest.approx(exponent, rel=1e-3)
    assert found["rms"]["power"] <= found["rms"]["log"]
    assert found["held_out"]["power"] == pytest.approx(found["held_out"]["measured"], rel=1e-3)
    assert found["far"][2] >= 1 + factor * 1e10**exponent - 1e-2


def test_the_range_of_a_line_is_that_of_a_textbook() -> None:
    x, y = np.array([6.0, 7.0, 8.0]), np.array([1.5, 1.8, 1.9])
    law = fit_law((10**x).tolist(), y.tolist())
    errors = y - np.polyval(np.polyfit(x, y, 1), x)
    spread = np.sqrt((errors**2).sum() / 1)
    margin = 12.706 * spread * np.sqrt(1 + 1 / 3 + (10 - 7) ** 2 / 2)
    assert law.error * (1 + 1 / 3 + 9 / law.weight) ** 0.5 == pytest.approx(margin, rel=1e-3)


@given(st.text())
def test_samples_are_nested(text: str) -> None:
    few, many = (0.1, 1.0), (0.1, 0.3, 1.0)
    assert (part_of(text, few) == 0) == (part_of(text, many) == 0)
    assert part_of(text, (0.0,)) == 1


def test_samples_have_their_shares() -> None:
    parts = np.bincount([part_of(str(number), (0.1, 0.3, 1.0)) for number in range(2000)])
    assert parts / 2000 == pytest.approx([0.1, 0.2, 0.7], abs=0.03)


@given(
    st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=8), min_size=1, max_size=30), st.integers(1, 6)
)
def test_a_cut_index_has_every_segment_sorted(documents: list[list[int]], count: int) -> None:
    tokens = np.array([token for document in documents for token in (*document, END)], np.uint16)
    index = cut_index(tokens, 10, count)
    assert len(index.segments) <= count
    assert index.segments[:, 1].sum() == len(tokens)
    for row, (first, length, _) in enumerate(index.segments.tolist()):
        part = tokens[first : first + length]
        suffixes, _, first_rows = index_segment(part, 10)
        assert part[-1] == END
        assert index.suffixes[first : first + length].tolist() == suffixes.tolist()
        assert index.first_rows[row].tolist() == first_rows.tolist()


def test_notes_are_taken_once_and_never_where_only_known_ones_are_wanted(tmp_path: Path) -> None:
    taken: list[int] = []

    def measure() -> dict[str, int]:
        taken.append(1)
        return {"figure": len(taken)}

    assert Notes(tmp_path, known=True).take("a", measure) is None
    assert [Notes(tmp_path, known=False).take("a", measure) for _ in range(2)] == [{"figure": 1}] * 2
    assert Notes(tmp_path, known=True).take("a", measure) == {"figure": 1}


def a_point(tokens: float, nested: bool = True) -> dict[str, Any]:
    costs = {"build_seconds": 60.0, "cpu_seconds": 50.0, "peak_anonymous": 10**9, "peak_resident": 2 * 10**9}
    length = 1 + 0.1 * float(np.log10(tokens))
    return {
        "name": "chat", "kind": "chat", "nested": nested, "tokens": int(tokens), "cold": None,
        "rest": costs | {"segments": 1, "bytes_per_token": 6.5},
        "lookup": {"open_ms": 1.0, "backoff": {"query_us": {"p50": 100.0, "p99": 200.0}}},
        "accepted_length": {"REST": {"talk": {"16": length, "64": length + 0.1}}},
    }  # fmt: skip


def test_what_is_known_is_fitted_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    points = [*map(a_point, SIZES), a_point(5e7, nested=False)]
    points[0]["accepted_length"]["CREST, 50 MB"] = points[0]["accepted_length"][
        "REST"
    ]  # of too few: not fitted
    laws = fit(points)
    assert [(law["store"], law["nodes"], law["law"]["points"]) for law in laws] == [
        ("REST", 16, 5),
        ("REST", 64, 5),
    ]
    show(points, laws)
    assert "100,000,000" in capsys.readouterr().out
    draw_growth(tmp_path / "growth.svg", points, laws)
    assert "talk" in (tmp_path / "growth.svg").read_text(encoding="utf-8")

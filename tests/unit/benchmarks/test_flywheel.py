from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from benchmarks.flywheel import ANSWERS, BOTH, OTHER, deal, draw


@given(st.lists(st.integers(), unique=True), st.integers(1, 6))
def test_days_share_the_records_out(ids: list[int], days: int) -> None:
    dealt = deal([{"id": each} for each in ids], days)
    assert sorted(record["id"] for day in dealt for record in day) == sorted(ids)
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_a_picture_has_a_line_for_every_store(tmp_path: Path) -> None:
    first = {"day": 1, **{name: {"accepted_length": 1.5} for name in (OTHER, BOTH)}}
    second = {"day": 2, **{name: {"accepted_length": 1.6} for name in (ANSWERS, OTHER, BOTH)}}
    draw(tmp_path / "days.svg", {"a model": [first, second]})
    picture = (tmp_path / "days.svg").read_text(encoding="utf-8")
    assert all(f"{name}, a model" in picture for name in (ANSWERS, OTHER, BOTH))

"""Cost curves: the time of a pass by its rows, and their files."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.curve import Conditions, CostCurve, Costs
from draftstore.errors import CurveError

CPU = CostCurve((1, 2, 4, 8, 16, 32, 64, 128), (0.041, 0.062, 0.062, 0.074, 0.090, 0.115, 0.176, 0.287))
BATCHES = dataclasses.replace(
    CPU, batches=(Costs(4, (1, 2, 8), (0.07, 0.08, 0.13)), Costs(16, (1, 2, 8), (0.09, 0.13, 0.3)))
)
WHERE = Conditions("org/model", "0123", "some processor", "float32", "sdpa", 2)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=7))
def test_the_ascending_numbers_are_the_nearest(seconds: list[float]) -> None:
    """The nearest ascending numbers are greatest of least means (Barlow et al., 1972)."""
    curve = CostCurve(tuple(range(1, len(seconds) + 1)), tuple(seconds))
    for i, found in enumerate(curve.seconds):
        least = [
            min(float(np.mean(seconds[start:stop])) for stop in range(i + 1, len(seconds) + 1))
            for start in range(i + 1)
        ]
        assert found == pytest.approx(max(least))


def test_costs_are_interpolated_and_extrapolated() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 4.0, 6.0))
    assert [curve.cost(rows) for rows in (1, 2, 3, 4, 6, 8, 10)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]
    assert CostCurve((1,), (2.0,)).cost(50) == 2.0


def test_padded_costs_are_those_of_the_next_number() -> None:
    curve = CostCurve((1, 4, 8), (1.0, 4.0, 6.0), padded=True)
    assert [curve.cost(rows) for rows in (1, 2, 4, 5, 8, 10)] == [1.0, 4.0, 4.0, 6.0, 6.0, 7.0]


@pytest.mark.parametrize("texts", [(1,), (8, 4), (8, 8)])
def test_batches_have_ascending_texts(texts: tuple[int, ...]) -> None:
    with pytest.raises(CurveError, match="expected ascending numbers of texts"):
        CostCurve((1,), (1.0,), batches=tuple(Costs(each, (1,), (2.0,)) for each in texts))


@pytest.mark.parametrize(
    ("rows", "seconds", "words"),
    [
        ((2, 4), (1.0, 2.0), "expected ascending numbers of rows starting with 1"),
        ((1, 4, 4), (1.0, 2.0, 3.0), "expected ascending"),
        ((1, 4), (1.0,), "with 1 times"),
        ((1, 4), (1.0, 0.0), "a forward pass of 0.0 seconds"),
        ((1, 4), (1.0, float("inf")), "expected a positive number"),
    ],
)
def test_invalid_curves_are_refused(rows: tuple[int, ...], seconds: tuple[float, ...], words: str) -> None:
    for make in (CostCurve, functools.partial(Costs, 8)):
        with pytest.raises(CurveError, match=words):
            make(rows, seconds)


def test_curves_are_kept_in_files(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "curve.json"
    curve = CostCurve((1, 8), (0.5, 1.25), True, WHERE, 512, "2025-01-01T00:00:00+00:00")
    curve.save(path)
    assert CostCurve.load(path) == curve
    for other in (CPU, BATCHES):
        other.save(path)
        assert CostCurve.load(path) == other


def change(document: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps(document | changes).encode()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda text, document: text[: len(text) // 2], "is not a cost curve .JSONDecodeError"),
        (lambda text, document: b"[1, 2]", "is not a cost curve .TypeError"),
        (
            lambda text, document: change(document, kind="store"),
            "is a store of version 2, expected a cost curve",
        ),
        (lambda text, document: change(document, format=1), "version 1, expected a cost curve of version 2"),
        (lambda text, document: change(document, seconds=[1, -1]), "a forward pass of -1.0 seconds"),
        (
            lambda text, document: change(document, batches=[{"texts": 8, "rows": [2], "seconds": [1]}]),
            "starting with 1",
        ),
        (lambda text, document: b"{}", "is not a cost curve .KeyError"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, damage: Any, words: str) -> None:
    path = tmp_path / "curve.json"
    CostCurve((1, 8), (0.5, 1.0), False, WHERE).save(path)
    text = path.read_bytes()
    path.write_bytes(damage(text, json.loads(text)))
    with pytest.raises(CurveError, match=words) as refusal:
        CostCurve.load(path)
    assert str(path) in str(refusal.value)
    assert "measure it again with `draftstore tune`" in str(refusal.value)
    with pytest.raises(CurveError, match=r"no cost curve at .*none\.json \(No such file"):
        CostCurve.load(tmp_path / "none.json")


def test_a_curve_holds_for_its_conditions() -> None:
    curve = dataclasses.replace(CPU, conditions=WHERE)
    curve.require(WHERE)
    curve.require(dataclasses.replace(WHERE, model="the same under another name"))
    CPU.require(WHERE)
    other = dataclasses.replace(WHERE, device="another processor", dtype="bfloat16")
    words = (
        "measured with device 'some processor', found 'another processor' and dtype 'float32', found 'bfloat16': "
        "run `draftstore tune --model org/model` for this one"
    )
    with pytest.raises(CurveError, match=words):
        curve.require(other)


# --- several texts ---


def test_without_costs_of_batches_a_pass_costs_as_much_as_its_rows() -> None:
    costs = CPU.costs(4, 3)
    assert costs.tolist() == [CPU.cost(4), CPU.cost(8), CPU.cost(12)]
    padded = CostCurve((1, 4, 8), (1.0, 2.0, 4.0), padded=True)
    assert padded.costs(1, 5).tolist() == [1.0, 2.0, 2.0, 2.0, 4.0]
    assert padded.costs(2, 5).tolist() == pytest.approx([4 / 3, 4.0, 4.0, 4.0, 8.0])


def test_other_texts_cost_as_much_as_those_beside_with_as_many_rows() -> None:
    curve = CostCurve((1, 8, 16), (1.0, 2.0, 3.0), batches=(Costs(5, (1, 2, 4), (2.0, 2.5, 4.5)),))
    assert curve.cost(4, 2) == pytest.approx(2.0 * 3 / 4 + 2.3 / 4)
    assert curve.cost(1, 2) == pytest.approx(8 / 7 * 3 / 4 + 2.0 / 4), "5 texts have no fewer rows"
    assert curve.cost(10, 2) == pytest.approx(3.8 * 3 / 4 + 4.5 / 4), (
        "1 text with 20 rows as 5 with 16 and 20"
    )
    assert curve.cost(2, 10) == pytest.approx(4.5), "as 5 texts with 4"
    less = dataclasses.replace(curve, batches=(Costs(5, (1, 2), (1.1, 1.2)),))
    assert [less.cost(1, texts) for texts in (4, 5)] == [1.1, 1.1], "no more than more texts cost"


SECONDS = st.floats(0.1, 10.0)


@st.composite
def costs_of(draw: Any, texts: int) -> Costs:
    rows = sorted({1, *draw(st.lists(st.sampled_from((2, 4, 8, 16)), max_size=4))})
    return Costs(texts, tuple(rows), tuple(draw(st.lists(SECONDS, min_size=len(rows), max_size=len(rows)))))


@st.composite
def curves(draw: Any) -> CostCurve:
    single = draw(costs_of(1))
    batches = [draw(costs_of(texts)) for texts in sorted(draw(st.sets(st.sampled_from((2, 4, 8, 16)))))]
    return CostCurve(single.rows, single.seconds, draw(st.booleans()), batches=tuple(batches))


@given(curves())
def test_costs_never_fall(curve: CostCurve) -> None:
    table = np.array([curve.costs(texts, 20) for texts in range(1, 40)])
    assert (np.diff(table, axis=0) >= -1e-9).all()
    assert (np.diff(table, axis=1) >= -1e-9).all()


@given(curves())
def test_measured_costs_are_exact(curve: CostCurve) -> None:
    """Unless fewer texts cost more."""
    last, fewer = curve.rows[-1], 1
    for costs in curve.every():
        for rows, seconds in zip(costs.rows, costs.seconds, strict=True):
            if not curve.padded or rows in curve.rows or rows > last:
                assert curve.cost(rows, costs.texts) == pytest.approx(max(seconds, curve.cost(rows, fewer)))
        fewer = costs.texts
    single = dataclasses.replace(curve, batches=())
    assert curve.costs(1, last).tolist() == single.costs(1, last).tolist()


@given(curves(), st.integers(1, 20), st.integers(1, 40))
def test_padded_passes_cost_as_much_as_their_shapes(curve: CostCurve, rows: int, texts: int) -> None:
    curve = dataclasses.replace(curve, padded=True)
    shape = next((size for size in curve.rows if size >= rows), rows), 1
    while shape[1] < texts:
        shape = shape[0], 2 * shape[1]
    assert curve.cost(rows, texts) == curve.cost(*shape)

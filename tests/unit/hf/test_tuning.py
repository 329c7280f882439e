"""`draftstore tune`: cost curves are measured, stored, and found again only for the same model on the same device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from draftstore.cli import cli
from draftstore.decoding.curve import CostCurve
from draftstore.hf import tuning
from draftstore.hf.pools import CachePool
from draftstore.hf.tuning import conditions_of, curve_path, find_curve, measure
from tests.fakes.hf_models import build, stories, tiny

ROWS = (1, 2, 4, 8)


@pytest.fixture(autouse=True)
def cache_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep stored curves to the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def store(model: Any, **conditions: Any) -> Path:
    """Store some curve where that of a model is found; return its path."""
    where = conditions_of(model)
    path = curve_path(where)
    CostCurve((1, 8), (0.5, 1.0), False, type(where)(**(vars(where) | conditions)), 16).save(path)
    return path


def tune(*arguments: object) -> Result:
    return CliRunner().invoke(cli, ["tune", *map(str, arguments)])


# --- what a curve holds for ---


@pytest.mark.parametrize(
    "other", [{"dtype": torch.float64}, {"attention": "eager"}, {"num_hidden_layers": 1}]
)
def test_another_model_has_another_curve(other: dict[str, Any]) -> None:
    model, another = tiny(dtype=torch.float32), tiny(**({"dtype": torch.float32} | other))
    assert conditions_of(another).differences(conditions_of(model))
    assert curve_path(conditions_of(another)) != curve_path(conditions_of(model))
    assert conditions_of(tiny(dtype=torch.float32, seed=2)) == conditions_of(model), (
        "other weights cost as much"
    )


# --- measuring ---


def test_measuring() -> None:
    model, seen = tiny("mistral", sliding_window=8), list[tuple[Any, ...]]()
    curve = measure(
        model, context=20, repeats=2, texts=(3, 200), rows=ROWS, on_pass=lambda *now: seen.append(now)
    )
    sizes = [(costs.texts, costs.rows) for costs in curve.every()]
    assert sizes == [(1, ROWS), (3, ROWS), (200, (1, 2))]
    assert all(0 < seconds < 10 for costs in curve.every() for seconds in costs.seconds)
    assert (curve.padded, curve.context) == (False, 20)
    assert curve.conditions == conditions_of(model)
    assert curve.created
    total = (2 * len(ROWS) + 2) * 2
    assert seen == [(done + 1, total) for done in range(total)]


def test_batches_are_reduced_to_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CachePool, "most_tokens", lambda _pool: 1700)
    arguments: dict[str, Any] = {"context": 20, "repeats": 2, "rows": (1,)}
    for texts, found in ((1, 8, 32), (1, 4)), ((2, 1), (1, 2)), ((), (1,)):
        curve = measure(tiny(), texts=texts, **arguments)
        assert tuple(costs.texts for costs in curve.every()) == found
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert not measure(build(rope_parameters=rope), **arguments).batches, "it takes one text at a time"


class Clock:
    """A clock by which a pass takes 1 to 5 seconds while the machine is busy, and 1 second then."""

    def __init__(self, busy_passes: float) -> None:
        self._busy_passes, self._readings = busy_passes, 0

    def __call__(self) -> float:
        passes, at_the_end = divmod(self._readings, 2)
        self._readings += 1
        return at_the_end * (1.0 + passes % 5 if passes < self._busy_passes else 1.0)


def test_disturbed_passes_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "perf_counter", Clock(len(ROWS) * (tuning.WARM_UPS + 8)))
    seen = list[tuple[Any, ...]]()
    curve = measure(
        tiny(), context=20, repeats=8, texts=(1,), rows=ROWS, on_pass=lambda *now: seen.append(now)
    )
    assert curve.seconds == (1.0,) * len(ROWS)
    assert seen[-1] == (2 * 8 * len(ROWS),) * 2


# --- the command ---


def test_a_busy_machine_keeps_its_earlier_curve(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "perf_counter", Clock(float("inf")))
    model = stories(data, torch.float64)
    store(model)
    earlier = find_curve(model)
    command = (
        "--model",
        data / "models" / "stories260K",
        "--dtype",
        "float64",
        "--context",
        40,
        "--texts",
        1,
        3,
    )
    ran = tune(*command)
    assert (ran.exit_code, find_curve(model)) == (1, earlier)
    assert "ms at best" in str(ran.exception)
    ran = tune(*command, "--spread", 9)
    assert ran.exit_code == 0, ran.output
    assert "500" in ran.output, "the earlier milliseconds of a row"
    curve = find_curve(model)
    assert curve is not None
    assert [costs.texts for costs in curve.batches] == [3]
    assert tune(*command[:-1], 0).exit_code == 2

"""`draftstore tune`: cost curves measured, stored, and found again for the same model on the same device alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from draftstore.cli import cli
from draftstore.decoding.curve import CostCurve
from draftstore.hf import tuning
from draftstore.hf.tuning import conditions_of, curve_path, find_curve, measure
from tests.fakes.hf_models import stories, tiny

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


# --- finding one ---


def test_a_stored_curve_is_found() -> None:
    model = tiny()
    assert find_curve(model) is None
    path = store(model)
    assert find_curve(model) == CostCurve.load(path)


# --- measuring ---


def test_measuring() -> None:
    model, seen = tiny("mistral", sliding_window=8), list[tuple[int, int]]()
    curve = measure(
        model, context=20, repeats=2, rows=ROWS, on_pass=lambda done, total: seen.append((done, total))
    )
    assert curve.rows == ROWS
    assert all(0 < seconds < 10 for seconds in curve.seconds)
    assert (curve.padded, curve.context) == (False, 20)
    assert curve.conditions == conditions_of(model)
    assert curve.created
    total = len(ROWS) * (tuning.WARM_UPS + 2)
    assert seen == [(done + 1, total) for done in range(total)]


# --- the command ---


def test_the_command_stores_what_generate_finds(data: Path) -> None:
    folder = data / "models" / "stories260K"
    ran = tune("--model", folder, "--dtype", "float64", "--context", 40, "--repeats", 1)
    assert ran.exit_code == 0, ran.output
    model = stories(data, torch.float64)
    curve = find_curve(model)
    assert curve is not None
    assert curve.conditions is not None
    assert curve.conditions.model == "stories260K"
    assert ran.output.startswith("stories260K, float64, sdpa, 40 tokens in the cache\n")
    assert ran.output.endswith(f"stored as {curve_path(conditions_of(model))}\n")

"""`draftstore tune`: cost curves measured, stored, and found again for the same model on the same device alone."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from draftstore.cli import cli
from draftstore.decoding.budget import CostPlanner
from draftstore.decoding.curve import CostCurve
from draftstore.errors import CurveError, ModelError
from draftstore.hf import generate, tuning
from draftstore.hf.exactness import why_plain
from draftstore.hf.runner import Runner
from draftstore.hf.tuning import conditions_of, curve_path, find_curve, load_curve, measure
from tests.fakes.adversaries import Prophet
from tests.fakes.hf_models import stories, story_ids, tiny

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


def test_conditions_name_what_cost_depends_on() -> None:
    model = tiny(dtype=torch.float32, seed=1)
    where = conditions_of(model, name="tiny")
    assert (where.model, where.dtype, where.attention) == ("tiny", "float32", "sdpa")
    assert where.threads == torch.get_num_threads()
    assert where.device
    assert conditions_of(tiny(dtype=torch.float32, seed=2), name="tiny") == where, (
        "other weights cost the same"
    )


@pytest.mark.parametrize(
    "other",
    [
        {"dtype": torch.float64},
        {"attention": "eager"},
        {"num_hidden_layers": 1},
        {"vocab_size": 65},
        {"architecture": "qwen2"},
    ],
    ids=str,
)
def test_another_model_has_another_curve(other: dict[str, Any]) -> None:
    model, another = tiny(dtype=torch.float32), tiny(**({"dtype": torch.float32} | other))
    assert conditions_of(another).differences(conditions_of(model))
    assert curve_path(conditions_of(another)) != curve_path(conditions_of(model))


def test_curves_lie_in_the_cache_of_the_user(cache_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = conditions_of(tiny())
    assert curve_path(where).parent == cache_home / "draftstore" / "curves"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert curve_path(where).parent == Path.home() / ".cache" / "draftstore" / "curves"


def test_the_name_of_a_processor() -> None:
    assert tuning._device_name(torch.device("cpu"))
    assert tuning._device_name(torch.device("meta")) == "meta"


# --- finding one ---


def test_a_stored_curve_is_found() -> None:
    model = tiny()
    assert find_curve(model) is None
    path = store(model)
    assert find_curve(model) == CostCurve.load(path)


@pytest.mark.parametrize("text", [b"", b"{", b'{"kind": "cost curve", "format": 9}'])
def test_a_damaged_curve_is_left_alone(text: bytes, caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    path = store(model)
    path.write_bytes(text)
    with caplog.at_level(logging.WARNING, "draftstore"):
        assert find_curve(model) is None
    [record] = caplog.records
    assert record.getMessage().startswith(f"the cost curve is not used: {path} is")


def test_a_curve_of_another_device_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model = tiny()
    path = store(model, device="a faster one")
    with caplog.at_level(logging.WARNING, "draftstore"):
        assert find_curve(model) is None
    [record] = caplog.records
    assert "measured with device 'a faster one', found" in record.getMessage()
    with pytest.raises(CurveError, match="run `draftstore tune --model"):
        load_curve(path, conditions_of(model))


# --- measuring ---


@pytest.mark.parametrize(
    "model",
    [tiny(), tiny(attention="eager"), tiny("mistral", sliding_window=8)],
    ids=["sdpa", "eager", "window"],
)
def test_measuring(model: Any) -> None:
    seen: list[tuple[int, int]] = []
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


def test_each_number_of_rows_is_measured_as_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is slow for a while is slow for all of them."""
    order: list[int] = []
    clock = [0.0]
    run = Runner.run

    def timed(runner: Runner, entries: Any, wants: Any) -> Any:
        order.append(len(entries[0].tokens))
        clock[0] += order[-1] + (100.0 if len(order) > 4 * 4 else 0.0)
        return run(runner, entries, wants)

    why_plain(tiny())  # runs passes of its own
    monkeypatch.setattr(Runner, "run", timed)
    monkeypatch.setattr(tuning, "perf_counter", lambda: clock[0])
    curve = measure(tiny(), context=20, repeats=3, rows=ROWS)
    assert [sorted(order[start : start + 4]) for start in range(0, 20, 4)] == [list(ROWS)] * 5
    assert curve.seconds == ROWS, "the median leaves out the slow turn, and warming up does not count"


def test_the_context_gives_way_where_positions_are_few() -> None:
    model = tiny(max_position_embeddings=40)
    assert measure(model, context=512, repeats=1, rows=ROWS).context == 32
    with pytest.raises(ModelError, match="the model has 40 positions, expected more than 64"):
        measure(model, repeats=1, rows=(1, 64))


def test_passes_leave_no_trace(data: Path) -> None:
    model, ids = stories(data), story_ids(data)
    truth = model.generate(ids, max_new_tokens=20, do_sample=False)  # type: ignore[operator]
    curve = measure(model, context=20, repeats=1, rows=ROWS)
    drafter = Prophet(512, [truth[0].tolist()])
    output = generate(
        model, ids, drafter=drafter, planner=CostPlanner(curve), max_new_tokens=20, do_sample=False
    )
    assert isinstance(output, torch.Tensor)
    assert torch.equal(output, truth)


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
    lines = ran.output.splitlines()
    assert lines[0] == "stories260K, float64, sdpa, 40 tokens in the cache"
    assert "plain passes" in ran.output
    assert all(f"{rows} " in ran.output for rows in (1, 2, 4, 8, 16, 32, 64, 96, 128))
    assert ran.output.endswith(f"stored as {curve_path(conditions_of(model))}\n")


def test_the_command_writes_elsewhere_and_as_json(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "curves" / "mine.json"
    folder = data / "models" / "stories260K"
    ran = tune("--model", folder, "--context", 40, "--repeats", 1, "--out", out, "--json")
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert document["path"] == str(out)
    assert document["rows"] == [1, 2, 4, 8, 16, 32, 64, 96, 128]
    assert list(CostCurve.load(out).seconds) == document["seconds"]
    assert find_curve(stories(data, torch.float32)) is None


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    ran = tune("--model", tmp_path / "none")
    assert isinstance(ran.exception, ModelError)

"""The cells of `benchmarks.quality`: chosen by name, measured once, taken from notes while the code is the same."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks import quality
from benchmarks.quality import Notes, measure, parse_arguments
from benchmarks.quality_report import figures_of, judge, show_calibration, show_lengths
from benchmarks.replays import REPLAYS
from benchmarks.systems import IN_MEMORY, SYSTEMS, System
from draftstore.decoding.replay import Recording, replay
from draftstore.drafting.request import RequestDrafter

TEXT = np.tile(np.arange(7, dtype=np.int32), 8)
RECORDING = Recording("one", TEXT[:10], TEXT[10:])


def test_all_is_chosen_unless_some_is_named() -> None:
    args = parse_arguments([])
    assert set(SYSTEMS) - set(args.systems) <= IN_MEMORY.keys()
    assert (args.replays, args.sizes, args.whole) == (list(REPLAYS), ["sample", "whole"], True)
    some = parse_arguments(["--systems", "REST, request", "--replays", "HumanEval,Vicuna", "--nodes", "8"])
    assert (some.systems, some.nodes, some.whole) == (["REST", "request"], [8], False)
    assert some.replays == ["AlpacaEval: Vicuna-7B-v1.5", "HumanEval: CodeLlama-7b-Instruct"]
    assert parse_arguments(["--quick"]).sizes == ["tiny"]
    with pytest.raises(SystemExit):
        parse_arguments(["--systems", "Rest"])


def test_a_cell_is_what_a_replay_finds() -> None:
    drafter = RequestDrafter(8)
    cell = measure(System(drafter), [RECORDING], 4, promises=True)
    expected = replay(drafter, [RECORDING], budget=4).summary()
    assert {key: cell[key] for key in ("accepted_length", "nodes_mean", "passes", "tokens")} == {
        key: expected[key] for key in ("accepted_length", "nodes_mean", "passes", "tokens")
    }


def test_figures_are_kept_by_their_place(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        {
            "size": "tiny",
            "system": "request",
            "nodes": nodes,
            "replay": replay,
            "bytes_a_token": 6.5,
            "mapped": True,
        }
        | measure(System(RequestDrafter(8)), [RECORDING], nodes, promises=True)
        for nodes in (4, 8)
        for replay in ("one", "same")
    ]
    place = {"size": "tiny", "system": "request", "nodes": 4, "replay": "one"}
    times = [place | {"draft": {"p50": 77.0, "p99": 99.0}, "learn": {}}]
    judged = judge(cells)
    kept = figures_of(cells, times, judged)
    assert kept["accepted_length"]["tiny"]["same"]["request"] == {
        "4": cells[0]["accepted_length"],
        "8": cells[2]["accepted_length"],
    }
    assert kept["memory"] == {"tiny": {"request": {"bytes_a_token": 6.5, "mapped": True}}}
    together, one, same = kept["calibration"]["tiny"]["request"]["4"].values()
    assert (
        one
        == same
        == {question: {k: v for k, v in s.items() if k != "bins"} for question, s in together.items()}
    )
    assert sum(count for count, *_ in together["path"]["bins"]) == 2 * np.sum(cells[0]["sums"], axis=1)[0][0]
    show_lengths(cells, times)
    show_calibration(judged)
    assert "77 (99)" in capsys.readouterr().out


def test_a_cell_is_measured_once_for_the_same_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def figures() -> dict[str, Any]:
        asked.append(1)
        return {"accepted_length": 2.0}

    for _ in range(2):
        cell = Notes(tmp_path).take({"system": "REST", "nodes": 4}, figures)
        assert cell == {"system": "REST", "nodes": 4, "accepted_length": 2.0}
    assert len(asked) == 1
    Notes(tmp_path).take({"system": "REST", "nodes": 8}, figures)
    monkeypatch.setattr(quality, "code_digest", lambda: "other")
    Notes(tmp_path).take({"system": "REST", "nodes": 4}, figures)
    assert len(asked) == 3


def test_a_run_keeps_what_it_prints(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [
        "--systems",
        "request,prompt lookup",
        "--replays",
        "summarization",
        "--nodes",
        "4,8",
        "--rows",
        "1",
    ]
    folders = ["--data", str(data), "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    for _ in range(2):
        quality.main([*chosen, *folders, "--quick"])
    printed = capsys.readouterr()
    figures = json.loads(printed.out.splitlines()[-1])
    assert json.loads((tmp_path / "quality.json").read_text()) == figures
    (systems,) = figures["accepted_length"]["tiny"].values()
    assert systems.keys() == {"request", "prompt lookup"}
    assert all(1.0 <= systems[name]["4"] <= systems[name]["8"] for name in systems)
    assert printed.err.count("prompt lookup, ") == 2, "the second run measures nothing"

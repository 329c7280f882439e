"""The cells of `benchmarks.quality`: chosen by name, measured once, taken from notes while the code is the same."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks import quality
from benchmarks.quality import Notes, calibration, measure, parse_arguments
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
    place = {"size": "tiny", "system": "request", "nodes": 4, "replay": "one"}
    whole, one = calibration([place | cell])
    assert whole | {"replay": "one"} == one
    assert one["path"]["bins"]


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

"""The decoding benchmarks run, count right, and notice what differs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from benchmarks import decode, forced, identity
from benchmarks.common import Workspace
from benchmarks.decode_runs import LOOP, PLAIN, Outcome, Series, Way, figures_of, run_ways, take_turns
from benchmarks.lossless import compare, margin_at
from benchmarks.smollm import smollm
from draftstore.decoding.acceptance import Acceptance
from draftstore.decoding.curve import CostCurve
from draftstore.decoding.loop import Fixed, Tally
from draftstore.decoding.replay import RecordedTarget, Recording
from draftstore.drafting.drafter import Drafter
from draftstore.drafting.request import RequestDrafter
from tests.fakes.adversaries import Prophet, RandomTrees, Silent
from tests.fakes.hf_models import tiny

VOCAB = 64
PROMPTS = [np.array(ids, np.int32) for ids in ([3, 4, 5, 3, 4], [9, 8, 7, 9])]


def model() -> Any:
    return tiny(vocab_size=VOCAB)


# --- taking turns ---


def test_ways_take_turns_with_fresh_drafters_in_every_round() -> None:
    made: list[RandomTrees] = []
    calls = []

    def make() -> Drafter:
        made.append(RandomTrees(VOCAB))
        return made[-1]

    def answer(way: Way, drafter: Drafter | None, prompt: str) -> Outcome:
        calls.append((way.name, prompt, drafter))
        return Outcome([1], 1.0)

    ways = [Way("a"), Way("b", make), Way("c")]
    series = take_turns(ways, ["x", "y"], answer, rounds=2)
    assert [name for name, _, _ in calls] == ["a", "b", "c", "b", "c", "a", "b", "c", "a", "c", "a", "b"]
    assert [drafter for name, _, drafter in calls if name == "b"] == [made[0], made[0], made[1], made[1]]
    assert [[len(outcomes) for outcomes in each.rounds] for each in series] == [[2, 2]] * 3


def outcome(seconds: float, tally: Tally | None = None, rows: Counter[int] | None = None) -> Outcome:
    return Outcome([1, 2], seconds, 0.1, tally or Tally(), rows or Counter())


def test_speedups_are_medians_over_rounds() -> None:
    plain, loop, ours = Series(Way(PLAIN, plain=True)), Series(Way(LOOP)), Series(Way("ours"))
    plain.rounds = [[outcome(2), outcome(4)], [outcome(2), outcome(4)], [outcome(20), outcome(4)]]
    loop.rounds = [[outcome(1), outcome(2)]] * 3
    ours.rounds = [[outcome(1), outcome(2, Tally(4, 10, 12, 6, 1, 8, 1), Counter({4: 3, 1: 1}))]] * 3
    figures = figures_of([plain, loop, ours], CostCurve((1, 4), (1.0, 2.0)))[-1]
    assert figures["by_curve"] == round(10 / (3 * 2.0 + 1.0), 3)
    assert figures["over_plain"] == {
        "rounds": 2.0,
        "least_round": 2.0,
        "median_prompt": 2.0,
        "least_prompt": 2.0,
    }
    assert figures["over_loop"]["rounds"] == 1.0
    assert (figures["tokens"], figures["tokens_per_second"]) == (4, 1.33)
    assert (figures["accepted_length"], figures["nodes"], figures["forward_share"]) == (2.5, 3.0, 0.8)


def test_a_model_is_measured_in_every_way() -> None:
    ways = [Way(PLAIN, plain=True), Way(LOOP), Way("request", lambda: RequestDrafter(VOCAB), Fixed(4))]
    done: list[str] = []
    series = run_ways(model(), ways, PROMPTS, tokens=12, rounds=2, on_answer=done.append)
    assert sorted(done) == sorted([way.name for way in ways] * 4)
    figures = {row["way"]: row for row in figures_of(series)}
    assert all(row["tokens"] == 24 and row["differences"] == [] for row in figures.values())
    assert figures[LOOP]["accepted_length"] == 1.0
    assert "accepted_length" not in figures[PLAIN]
    decode.show_ways("ways", list(figures.values()))


def test_goals(capsys: pytest.CaptureFixture[str]) -> None:
    def row(way: str, speedup: float, **more: Any) -> dict[str, Any]:
        speeds = {"rounds": speedup}
        return {"way": way, "over_plain": speeds, "over_loop": speeds, "differences": [], **more}

    rows = [row(PLAIN, 1), row(LOOP, 1), row("REST", 0.96), row("all", 1.4)]
    assert decode.reached("own", rows) == {
        "lossless": True,
        "least_speedup": 1.4,
        "goal": 1.3,
        "reached": True,
    }
    assert decode.reached("apart", rows)["reached"]
    assert not decode.reached("apart", [*rows, row("CREST", 0.94)])["reached"]
    assert decode.reached("copy", [*rows, row("x", 1, differences=[{"excused": False}])]) == {
        "lossless": False
    }


# --- lossless or not ---


def test_differences_are_found_with_their_margin() -> None:
    prompt = PROMPTS[0]
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    expected = model().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, do_sample=False)
    tokens: list[int] = expected[0, len(prompt) :].tolist()
    assert compare(model(), prompt, tokens, tokens) is None
    other = [*tokens[:2], (tokens[2] + 1) % VOCAB, *tokens[3:]]
    found = compare(model(), prompt, tokens, other)
    assert found is not None
    assert (found.place, found.expected, found.found, found.excused) == (2, tokens[2], other[2], False)
    with torch.no_grad():
        logits = model()(expected[:, : len(prompt) + 2]).logits[0, -1].float()
    assert found.margin == pytest.approx(float(logits.topk(2).values.diff().abs()), abs=1e-5)
    cut = compare(model(), prompt, tokens, tokens[:-1])
    assert cut is not None
    assert (cut.place, cut.found, cut.excused) == (5, -1, False)


def test_a_tie_is_an_excuse() -> None:
    same: Any = tiny(vocab_size=VOCAB, seed=5)
    head = same.lm_head.weight.data
    kept = head.clone()
    try:
        head[:] = head[0]  # all logits are equal
        assert margin_at(same, PROMPTS[0]) == 0
        difference = compare(same, PROMPTS[0], [0, 0], [1, 0])
        assert difference is not None
        assert difference.excused
    finally:
        head[:] = kept


def test_every_drafter_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "DRAFTERS", ("none", "request", "empty", "prophet"))

    def drafter(_case: identity.Case, name: str, texts: Any) -> Drafter | None:
        made: dict[str, Drafter] = {
            "request": RequestDrafter(VOCAB),
            "empty": Silent(VOCAB),
            "prophet": Prophet(VOCAB, texts),
        }
        return made.get(name)

    monkeypatch.setattr(identity.Case, "drafter", drafter)
    case = identity.Case(model(), VOCAB, 0, None, None, None, 16)  # type: ignore[arg-type]
    rows = identity.compare_all(
        case, PROMPTS, plain_cache="dynamic", cache="static", on_row=lambda _count: None
    )
    assert [(row["drafter"], row["identical"]) for row in rows] == [
        (name, 2) for name in ("none", "request", "empty", "prophet")
    ]
    prophet = rows[-1]
    assert prophet["accepted_length"] > 1.5
    assert prophet["off_first"] > 0
    assert prophet["moved"] > 0
    assert identity.unexcused(rows) == 0
    identity.show("tiny", [{"attention": "sdpa", "cache": "static", **row} for row in rows])


# --- forced outputs ---


def recording(seed: int) -> Recording:
    rng = np.random.default_rng(seed)
    output = np.tile(rng.integers(0, VOCAB, 8), 4).astype(np.int32)
    return Recording(str(seed), rng.integers(0, VOCAB, 20).astype(np.int32), output)


def test_a_forced_model_writes_what_was_recorded() -> None:
    shape = forced.random_model(forced.SHAPES["tiny"], VOCAB, device="cpu")
    ways = [Way(PLAIN, plain=True), Way(LOOP), Way("request", lambda: RequestDrafter(VOCAB), Fixed(8))]
    recordings = [recording(0), recording(1)]
    figures = {row["way"]: row for row in figures_of(forced.run_forced(shape, ways, recordings, rounds=1))}
    assert {row["tokens"] for row in figures.values()} == {64}
    assert figures[LOOP]["accepted_length"] == 1.0
    assert figures["request"]["accepted_length"] > 1.5, "the outputs repeat themselves"


def test_a_forced_pass_is_computed_and_kept() -> None:
    class Model:
        """A target that takes notes."""

        def __init__(self) -> None:
            self.notes: list[str] = []

        def verify(self, _tree: Any) -> "Model":
            self.notes.append("verify")
            return self

        def choose(self, row: int, _emitted: Any) -> int:
            self.notes.append(f"choose {row}")
            return 63

        def candidates(self) -> NDArray[np.int32] | None:
            return np.zeros((1, 8), np.int32)

        def hidden(self, _row: int) -> NDArray[np.float32] | None:
            return None

        def keep(self, _accepted: Acceptance) -> None:
            self.notes.append("keep")

    inner = Model()
    target = forced.ForcedTarget(inner, RecordedTarget(np.array([1, 2, 3], np.int32)))
    verdict = target.verify(None)  # type: ignore[arg-type]
    assert verdict.choose(0, []) == 2
    assert verdict.candidates() is not None
    target.keep(Acceptance([], np.array([2], np.int32)))
    assert target.verify(None).choose(0, []) == 3  # type: ignore[arg-type]
    assert inner.notes == ["verify", "choose 0", "keep", "verify", "choose 0"]


# --- where the model comes from ---


def test_the_model_is_taken_from_a_folder_or_refused(tmp_path: Path) -> None:
    space = Workspace(tmp_path / "data", tmp_path / "work", tmp_path / "out")
    with pytest.raises(SystemExit, match=r"holds no model\.safetensors"):
        smollm(space, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert smollm(space, tmp_path) == tmp_path
    with pytest.raises(SystemExit, match="DRAFTSTORE_TEST_DATA"):
        smollm(space)
    done = space.work / "models" / "SmolLM2-135M-Instruct"
    done.mkdir(parents=True)
    (done / "model.safetensors").write_bytes(b"")
    assert smollm(space) == done


def test_arguments() -> None:
    args = decode.parse_arguments(["--quick", "--prompts", "3", "--parts", "own"])
    extent = decode.extent_of(args)
    assert (extent.prompts, extent.tokens, extent.ngrams) == (3, 16, 2_000)
    for program in (decode, identity):
        with pytest.raises(SystemExit):
            program.parse_arguments(["--parts", "nonsense"])


@pytest.mark.data
@pytest.mark.slow
def test_identity_of_the_small_model(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "ATTENTIONS", ("sdpa",))
    places = ["--data", str(data), "--work", str(tmp_path / "work"), "--out", str(tmp_path)]
    identity.main([*places, "--quick", "--parts", "stories"])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found == json.loads((tmp_path / "identity_stories.json").read_text())
    assert found["unexcused"] == 0
    assert len(found["stories"]) == len(identity.DRAFTERS) * 2

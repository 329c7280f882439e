"""`draftstore replay`, `generate` and `query` with stores of hidden states: the model must be named and match."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from draftstore.hf import load_model
from draftstore.hf.states import StateReader
from draftstore.stores.dresd.store import DEFAULT_STRATEGY, STRATEGIES
from draftstore.text.tokenizer import TextTokenizer
from tests.fakes.dense_stores import make_dense_store, make_projection
from tests.unit.cli.test_commands import Runner, run
from tests.unit.hf.test_loading import model_folder

__all__ = ["model_folder", "run"]  # fixtures

PROMPT = "def add(left,"
OUTPUT = " right):\n    return left + right\n"


@pytest.fixture(scope="module")
def dense(
    model_folder: Path, small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Return a store of one text, with the states of the small model."""
    ids = small_tokenizer.encode(PROMPT + OUTPUT, bos=True)
    ((_, states),) = StateReader(load_model(model_folder).model).read([ids])
    return make_dense_store(
        tmp_path_factory.mktemp("stores") / "own",
        [ids.tolist()],
        [states],
        projection=make_projection(states.shape[1], 16),
        target_model="small-model",
        tokenizer=small_tokenizer,
    )


@pytest.fixture
def replays(tmp_path: Path) -> Path:
    path = tmp_path / "replays.jsonl"
    records = [{"id": "known", "prompt": PROMPT, "output": OUTPUT}, {"prompt": "x", "output": "y"}]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_replay_asks_with_the_states_of_the_model(
    run: Runner, dense: Path, replays: Path, model_folder: Path
) -> None:
    """The store holds the first output: each draft is what comes next, as deep as drafts go."""
    arguments = ["replay", dense, "--replays", replays, "--target-model", model_folder, "--limit", 1]
    for strategy, length in ((None, STRATEGIES[DEFAULT_STRATEGY].length), ("deep", 20)):
        chosen = ["--strategy", strategy] if strategy else []
        found = run(*arguments, "--json", *chosen).json()
        assert (found["strategy"], found["rows"]) == (strategy or DEFAULT_STRATEGY, 1)
        assert found["passes"] == -(-found["tokens"] // (length + 1))
        assert found["acceptance_rate"] > 0.5
    ran = run(*arguments)
    assert re.search(rf"own +│ {DEFAULT_STRATEGY} +│ +64 ", ran.out)
    assert ran.err == ""


def test_a_replay_of_stores_of_several_kinds(
    run: Runner, dense: Path, small_store: Path, replays: Path, model_folder: Path
) -> None:
    arguments = ["replay", small_store, dense, "--replays", replays, "--target-model", model_folder, "--json"]
    ran = run(*arguments, "--strategy", "longest", "--request")
    lines = [json.loads(line) for line in ran.out.splitlines()]
    assert [line["strategy"] for line in lines] == ["longest", DEFAULT_STRATEGY]
    assert len({line["tokens"] for line in lines}) == 1
    assert lines[1]["accepted_length"] > 3


def test_a_replay_of_chains(run: Runner, small_store: Path, replays: Path) -> None:
    found = run("replay", small_store, "--replays", replays, "--chain", 3, "--json").json()
    assert found["chain"] == 3
    assert found["nodes_mean"] <= 3
    refused = run("replay", small_store, "--replays", replays, "--chain", 3, "--record")
    assert refused.status == 2
    assert "--record saves results of whole trees" in refused.err


def test_generate_drafts_from_it(run: Runner, model_folder: Path, dense: Path, small_store: Path) -> None:
    asked = ["generate", "--model", model_folder, "--prompt", PROMPT, "--max-tokens", 20, "--json"]
    asked += ["--budget", 8, "--fixed-budget"]
    alone = run(*asked, "--store", dense, "--no-request").json()
    assert alone["drafters"] == [{"kind": "dresd", "name": "own"}]
    assert alone["first_difference"] is None
    mixed = run(*asked, "--store", dense, "--store", small_store, "--recycling", "--strategy", "deep").json()
    kinds: list[Any] = [drafter["kind"] for drafter in mixed["drafters"]]
    assert kinds == ["request", "dresd", "rest", "recycling"]
    assert mixed["first_difference"] is None
    assert mixed["text"] == alone["text"]


def test_incompatible_options_are_refused(
    run: Runner, dense: Path, small_store: Path, replays: Path, model_folder: Path, tmp_path: Path
) -> None:
    named = ["--replays", replays, "--target-model"]
    error = run("replay", dense, *named[:2]).error()
    assert "which drafts from hidden states of the model 'small-model'" in error
    assert "--target-model" in error
    renamed = shutil.copytree(model_folder, tmp_path / "renamed")
    for command in (
        ["replay", dense, *named, renamed],
        ["generate", "--model", renamed, "--store", dense, "--prompt", "x"],
    ):
        assert "of the model 'small-model', found 'renamed'" in run(*command).error()
    assert "not from text" in run("query", dense, "--text", "x").error()
    error = run("replay", small_store, *named, model_folder, "--strategy", "deep").error()
    assert "no store here supports the strategy 'deep': expected one of backoff, longest" in error

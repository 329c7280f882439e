"""`draftstore generate`: the answer of plain decoding, its highlighting, and figures that add up."""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from draftstore.cli.generate import (
    Printer,
    Question,
    TimedAnswer,
    check_positions,
)
from draftstore.decoding.conversation import Pieces, encode_conversation
from draftstore.decoding.loop import Step
from draftstore.errors import DraftstoreError
from draftstore.hf import exactness, load_model
from draftstore.hf.requests import GenerationRequest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.tree import DraftTree
from tests.unit.cli.test_commands import Runner, run
from tests.unit.hf.test_loading import model_folder

__all__ = ["model_folder", "run"]  # fixtures

ONCE = "Once upon a time"


@pytest.fixture(scope="session")
def plain_story(data: Path) -> str:
    """Return what plain generate goes on with."""
    loaded = load_model(data / "models" / "stories260K")
    model: Any = loaded.model
    ids = torch.from_numpy(loaded.text.encode(ONCE, bos=True).astype(np.int64))[None]
    output_ids = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=40, do_sample=False)
    return loaded.text.decode(output_ids[0, ids.shape[1] :].tolist())


@pytest.fixture
def tells(data: Path) -> list[object]:
    return ["generate", "--model", data / "models" / "stories260K", "--max-tokens", 40]


@pytest.mark.data
def test_text_on_stdout_figures_on_stderr(run: Runner, tells: list[object], plain_story: str) -> None:
    ran = run(*tells, "--prompt", ONCE, "--recycling")
    assert (ran.status, ran.out) == (0, plain_story + "\n")
    assert re.search(r"; M \d\.\d\d, \d+\.\d\d times as fast, the same output", ran.err)
    found = run(*tells, "--prompt", ONCE, "--recycling", "--budget", 16, "--fixed-budget", "--json").json()
    assert (found["text"], found["finish"], found["first_difference"]) == (plain_story, "length", None)
    assert [drafter["kind"] for drafter in found["drafters"]] == ["request", "recycling"]
    assert found["effort"] == "at most 16 nodes per pass, regardless of cost"
    drafted, plain = found["with_drafts"], found["without_drafts"]
    assert plain["tokens"] == drafted["tokens"] == 40
    assert (plain["passes"], plain["drafted"], plain["accepted_length"]) == (39, 0, 1.0)
    assert drafted["passes"] + drafted["accepted"] == 39
    assert found["machine"]["spread"] >= 0
    assert drafted["accepted_length"] == round(39 / drafted["passes"], 3)


@pytest.mark.data
def test_sampling_with_a_seed_is_the_same_with_drafts_and_without(run: Runner, tells: list[object]) -> None:
    arguments = [*tells, "--prompt", ONCE * 3, "--recycling", "--temperature", 0.8, "--top-p", 0.9, "--json"]
    first, second = (run(*arguments, "--seed", 7).json() for _ in range(2))
    assert first["text"] == second["text"]
    assert (first["first_difference"], first["seed"]) == (None, 7)
    assert first["with_drafts"]["drafted"] > 0


def test_without_drafts_and_without_comparison(run: Runner, model_folder: Path) -> None:
    arguments = ["--model", model_folder, "--no-request", "--max-tokens", 5, "--no-compare", "--json"]
    found = run("generate", *arguments, "--prompt", "x").json()
    assert found["drafters"] == []
    assert "without_drafts" not in found
    assert found["with_drafts"]["passes"] == found["with_drafts"]["tokens"] - 1
    ran = run("generate", *arguments[:-1], "--prompt", "x")
    assert "drafts from nothing" in ran.err
    assert "times as fast" not in ran.err


def test_the_prompt_comes_from_one_place(
    run: Runner, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["generate", "--model", model_folder, "--max-tokens", 8, "--no-compare", "--json"]
    expected = run(*arguments, "--prompt", "The quick\nbrown fox").json()
    (tmp_path / "prompt.txt").write_text("The quick\nbrown fox\n")
    assert run(*arguments, "--prompt-file", tmp_path / "prompt.txt").json()["text"] == expected["text"]
    monkeypatch.setattr("sys.stdin", io.StringIO("The quick\nbrown fox\n"))
    assert run(*arguments).json()["prompt_tokens"] == expected["prompt_tokens"]
    ran = run(*arguments, "--prompt", "x", "--prompt-file", tmp_path / "prompt.txt")
    assert ran.status == 2
    assert "give one of them" in ran.err
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    ran = run(*arguments)
    assert ran.status == 2
    assert "no prompt" in ran.err


def test_invalid_questions_are_refused(run: Runner, model_folder: Path, tmp_path: Path) -> None:
    assert "no model at" in run("generate", "--model", tmp_path / "none", "--prompt", "x").error()
    arguments = ["generate", "--model", model_folder]
    assert "takes at most 511" in run(*arguments, "--prompt", "x" * 2000).error()
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    assert "not UTF-8" in run(*arguments, "--prompt-file", tmp_path / "bytes").error()
    assert "no release given" in run(*arguments, "--prompt", "x", "--lookup", tmp_path / "no.sock").error()
    ran = run(*arguments, "--prompt", "x", "--system", "y")
    assert ran.status == 2
    assert "--system needs --chat" in ran.err
    assert "no cost curve at" in run(*arguments, "--prompt", "x", "--curve", tmp_path / "none.json").error()


def test_a_measured_curve_plans(
    run: Runner, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = ["generate", "--model", model_folder, "--prompt", "x", "--max-tokens", 4, "--json"]
    assert "`draftstore tune` measures this one" in run(*arguments).json()["effort"]
    ran = run("tune", "--model", model_folder, "--context", 8, "--repeats", 4, "--spread", 99, "--json")
    assert ran.status == 0, ran.err
    planned = "at most 64 nodes per pass, if worth their cost"
    assert run(*arguments).json()["effort"] == planned
    assert (
        run(*arguments, "--fixed-budget").json()["effort"] == "at most 8 nodes per pass, regardless of cost"
    )
    [curve] = (tmp_path / "draftstore" / "curves").iterdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert run(*arguments, "--curve", curve).json()["effort"] == planned


def test_chats_and_raw_text(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    )
    with_template = load_tokenizer(tmp_path)

    def text(tokenizer: TextTokenizer, chat: bool | None, system: str | None = None) -> str:
        ids = encode_conversation(tokenizer, Question(chat=chat, system=system).content(tokenizer, "hi"))
        return tokenizer.decode(ids[1:])  # without BOS

    assert text(with_template, None) == "[user:hi]>"
    assert text(with_template, None, "be brief") == "[system:be brief][user:hi]>"
    assert text(with_template, False) == "hi"
    assert text(small_tokenizer, None) == "hi"
    assert text(small_tokenizer, True) == "USER: hi ASSISTANT:"


def test_answers_end_where_the_model_says(model_folder: Path) -> None:
    loaded = load_model(model_folder)
    assert loaded.ends == [1]
    request = GenerationRequest(np.zeros(500, np.int32), 100)
    assert check_positions(loaded, request).max_tokens == 12
    assert check_positions(loaded, dataclasses.replace(request, max_tokens=12)).max_tokens == 12
    with pytest.raises(DraftstoreError, match="prompt is empty"):
        check_positions(loaded, dataclasses.replace(request, prompt=np.zeros(0, np.int32)))


def step(tokens: list[int], accepted: int) -> Step:
    return Step(DraftTree.empty(), list(range(accepted)), np.array(tokens, np.int32), 1, 2, 3)


def printed(tokenizer: TextTokenizer, steps: list[Step], **options: Any) -> str:
    file = io.StringIO()
    printer = Printer(Console(file=file, **options), Pieces(tokenizer, np.zeros(1, np.int32)))
    for each in steps:
        printer.take(each)
    printer.finish()
    return file.getvalue()


def test_accepted_tokens_stand_out_on_a_terminal_and_control_characters_are_shown(
    small_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    first, *rest = small_tokenizer.encode("xyz", bos=False).tolist()
    steps = [step([first], 0), step(rest, 1)]
    assert printed(small_tokenizer, steps, force_terminal=True) == "x\x1b[32my\x1b[0mz\n"
    said = "a\x1b[31m\x07b\u009b\nc"
    steps = [step(small_tokenizer.encode(said, bos=False).tolist(), 0)]
    assert printed(small_tokenizer, steps, force_terminal=True) == "a␛[31m␇b\\x9b\nc\n"
    printed(small_tokenizer, steps)  # into a pipe
    assert capsys.readouterr().out == said + "\n"


def test_the_prefill_does_not_count_as_a_pass() -> None:
    answer = TimedAnswer()
    for each in (step([5], 0), step([6, 7, 8], 2), step([9], 0)):
        answer.take(each)
    assert answer.tokens == [5, 6, 7, 8, 9]
    assert (answer.tally.passes, answer.tally.tokens, answer.prefill_ns) == (2, 4, 6)
    assert answer.tokens_per_second == pytest.approx(4e9 / 12)
    assert answer.figures()["shares"] == {"draft": 0.1667, "forward": 0.3333, "accept": 0.5}
    assert TimedAnswer().figures()["tokens_per_second"] == 0


def test_models_are_checked(run: Runner, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run("check-model", model_folder)
    assert (ran.status, ran.out.split()[0]) == (0, "exact")
    assert "supports drafts" in ran.out
    found = run("check-model", model_folder, "--json").json()
    assert (found["exact"], found["fault"]) == (True, None)
    assert found["deviation"] < found["tolerance"]
    monkeypatch.setattr(exactness, "unsupported_reason", lambda _model: "reads backwards")
    ran = run("check-model", model_folder)
    assert (ran.status, ran.out.split()[0]) == (1, "refused")
    assert "reads backwards" in ran.out
    ran = run("check-model", model_folder, "--json")
    assert (ran.status, json.loads(ran.out)["fault"]) == (1, "reads backwards")

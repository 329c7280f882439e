"""What a request may say of its drafts: a prediction of the answer, and how many nodes are verified."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.frontier import MAX_BUDGET
from tests.fakes.workers import FakeEngine, Worker, running_worker

CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine(small_tokenizer: TextTokenizer) -> FakeEngine:
    return FakeEngine(small_tokenizer)


@pytest.fixture(scope="module")
def worker(engine: FakeEngine) -> Iterator[Worker]:
    with running_worker(engine) as worker:
        yield worker


@pytest.mark.parametrize(
    "content", [" one two", [{"type": "text", "text": " one"}, {"type": "text", "text": " two"}]]
)
def test_a_prediction_reaches_the_model(worker: Worker, engine: FakeEngine, content: Any) -> None:
    prediction = {"type": "content", "content": content}
    status, reply = worker.ask("completions", prompt=["a", "b"], n=2, prediction=prediction)
    assert status == 200, reply
    for work in engine.works[-4:]:
        assert work.prediction is not None
        assert work.prediction.tolist() == engine.tokenizer.encode(" one two", bos=False).tolist()
    assert worker.ask("completions", prompt="a", prediction=None)[0] == 200
    assert engine.works[-1].prediction is None


def test_the_prediction_of_a_chat_follows_its_prompt(
    worker: Worker, engine: FakeEngine, small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    """Without a template the model begins with a space that is no part of the answer, nor of the prediction."""
    asked: dict[str, Any] = {"messages": CHAT, "prediction": {"type": "content", "content": "one two"}}
    assert worker.ask("chat", **asked)[0] == 200
    assert engine.works[-1].prediction is not None
    assert engine.works[-1].prediction.tolist() == small_tokenizer.encode(" one two", bos=False).tolist()
    small_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}>")
    templated = FakeEngine(load_tokenizer(tmp_path))
    with running_worker(templated) as other:
        assert other.ask("chat", **asked)[0] == 200
    assert templated.works[-1].prediction is not None
    assert templated.works[-1].prediction.tolist() == small_tokenizer.encode("one two", bos=False).tolist()


def test_a_budget_reaches_the_model(worker: Worker, engine: FakeEngine) -> None:
    cases: list[tuple[Any, int | None]] = [
        ({"budget": 0}, 0),
        ({"budget": MAX_BUDGET}, MAX_BUDGET),
        ({"budget": None}, None),
        ({}, None),
        (None, None),
    ]
    for given, expected in cases:
        assert worker.ask("chat", messages=CHAT, draftstore=given)[0] == 200
        assert engine.works[-1].budget == expected


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("prediction", "one two", "prediction"),
        ("prediction", {}, "prediction.type"),
        ("prediction", {"type": "content"}, "prediction.content"),
        ("prediction", {"type": "text", "content": "a"}, "prediction.type"),
        ("prediction", {"type": "content", "content": 5}, "prediction.content"),
        ("prediction", {"type": "content", "content": [{"type": "image_url"}]}, "only text"),
        ("prediction", {"type": "content", "content": "\ud800"}, "surrogate"),
        ("draftstore", 5, "draftstore"),
        ("draftstore", {"budget": -1}, "draftstore.budget"),
        ("draftstore", {"budget": MAX_BUDGET + 1}, "draftstore.budget"),
        ("draftstore", {"budget": True}, "draftstore.budget"),
        ("draftstore", {"budget": "0"}, "draftstore.budget"),
        ("draftstore", {"budgets": 0}, "draftstore.budgets"),
    ],
)
@pytest.mark.parametrize("what", ["completions", "chat"])
def test_what_says_nothing_of_drafts(worker: Worker, what: str, field: str, value: Any, words: str) -> None:
    asked: dict[str, Any] = {"messages": CHAT} if what == "chat" else {"prompt": "a"}
    status, reply = worker.ask(what, **asked, **{field: value})
    assert status == 400, reply
    assert words in reply["error"]["message"]
    assert reply["error"]["param"] == field

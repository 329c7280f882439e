"""How a log is read and split: every conversation once, whole, in one half."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.answers.gain import Conversation, Gain, Row, _interval, read_log, split
from draftstore.answers.picture import draw_gain
from draftstore.errors import CorpusError, ReplayError
from draftstore.storage.report import ReadReport
from draftstore.text.selecting import RecordOptions


def talk(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def read(folder: Path, *records: Any) -> list[Conversation]:
    path = folder / "log.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return read_log([path], ReadReport())


def test_a_log_of_requests_is_read_as_its_conversations(tmp_path: Path) -> None:
    """A later request repeats the turns before it; a client may send a conversation again, or another branch of it."""
    turns = ["hi", "hello", "how?", "well", "bye", "see you"]
    branch = talk("hi", "hello", "other", "answer")
    log: list[Any] = [
        {"messages": talk(*turns[:2])},
        {"messages": talk("else", "what")},
        {"messages": talk(*turns[:4])},
    ]
    log += [{"messages": talk(*turns), "id": "a"}, {"messages": talk(*turns)}, {"messages": branch}]
    other, whole, branched = read(tmp_path, *log)
    assert [turn.output for turn in whole.turns] == ["hello", "well", "see you"]
    assert whole.record == {"id": "a", "messages": talk(*turns)}
    assert whole.key == branched.key != other.key


def test_prompts_with_outputs_are_conversations(tmp_path: Path) -> None:
    first, second, text = read(
        tmp_path,
        {"prompt": talk("hi"), "output": "hello"},
        {"prompt": talk("hi", "hey", "how?"), "output": "well"},
        {"prompt": "def f", "output": "(x)", "id": 7},
    )
    assert [len(each.turns) for each in (first, second, text)] == [1, 2, 1]
    assert second.record["messages"] == talk("hi", "hey", "how?", "well")
    assert text.record == {"id": "7", "prompt": "def f", "output": "(x)", "text": "def f(x)"}


def test_rollouts_are_conversations(tmp_path: Path) -> None:
    path, report = tmp_path / "rollouts.jsonl", ReadReport()
    records: list[Any] = [
        {"input": "def f", "output": "(x)", "score": 1, "id": 7},
        {"input": talk("hi"), "output": talk("", "hello")[1:]},
        {"input": talk("hi", "hey", "how?"), "output": "well"},
        {"input": "def g"},
    ]
    path.write_text("".join(f"{json.dumps(record)}\n" for record in records))
    found = read_log([path], report, RecordOptions(fields="prompt=input,output=output"))
    assert [each.record for each in found] == [
        {"id": "7", "prompt": "def f", "output": "(x)", "text": "def f(x)"},
        {"id": f"{path}:line 2", "messages": talk("hi", "hello")},
        {"id": f"{path}:line 3", "messages": talk("hi", "hey", "how?", "well")},
    ]
    assert [problem.reason for problem in report.problems] == ["has no 'output', only input"]


def test_tool_calls_do_not_hide_that_a_conversation_goes_on(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "a moment", "tool_calls": [{"function": {"name": "f"}}]}
    begun = [*talk("hi"), call]
    goes_on = [*begun, {"role": "tool", "content": "1"}, {"role": "assistant", "content": "one"}]
    found, _ = read(tmp_path, {"messages": begun}, {"messages": goes_on}, {"messages": talk("a", "b")})
    assert found.record["messages"] == goes_on


@given(
    st.lists(st.integers(0, 9), min_size=2, max_size=40).filter(lambda keys: len(set(keys)) > 1),
    st.integers(0, 9),
)
def test_halves_share_no_conversation(keys: list[int], seed: int) -> None:
    log = [Conversation(bytes([key]), {"number": number}, []) for number, key in enumerate(keys)]
    halves = split(log, seed)
    first, second = ({each.key for each in half} for half in halves)
    assert not first & second
    assert 0 <= len(first) - len(second) <= 1
    for half in halves:
        assert half == sorted(half, key=lambda each: each.record["number"])
    assert sorted(each.record["number"] for half in halves for each in half) == list(range(len(keys)))
    assert split(log, seed) == halves


@pytest.mark.parametrize(
    ("records", "found"),
    [
        ([], "found 0 in 0 records"),
        ([{"messages": talk("a", "b")}] * 2, "found 1 in 2 records"),
        ([{"messages": talk("a")}, {"messages": talk("b")}], "found 0 in 2 records"),
        (
            [{"text": "a"}, {"messages": "b"}],
            r"found 0 in 0 records \(2 bad records, the first .*line 1: expected",
        ),
    ],
)
def test_two_conversations_are_needed(tmp_path: Path, records: list[Any], found: str) -> None:
    with pytest.raises(ReplayError, match=f"log.jsonl: a gain needs two conversations .*{found}"):
        read(tmp_path, *records)


def test_a_file_that_is_no_log(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match="no such file"):
        read_log([tmp_path / "absent.jsonl"], ReadReport())


def test_the_interval_holds_its_length_and_shrinks_with_conversations() -> None:
    rng = np.random.default_rng(0)
    counts = np.stack([rng.integers(20, 40, 400), np.full(400, 10)], axis=1).astype(float)
    (low, high), (lower, higher) = _interval(counts), _interval(counts[:20])
    assert low < counts[:, 0].sum() / counts[:, 1].sum() < high
    assert higher - lower > 2 * (high - low)


def test_a_picture_has_a_bar_for_each_row(tmp_path: Path) -> None:
    rows = [
        Row(sources, drafts, length, (length - 0.1, length + 0.2), (), 1.0, {})
        for drafts, (sources, length) in product("xy", zip("<bcd", (1.0, 2.0, 3.0, 4.0), strict=True))
    ]
    draw_gain(tmp_path / "gain.svg", Gain(1, 1, 1, 1, tuple(rows), {}, ReadReport()))
    text = (tmp_path / "gain.svg").read_text()
    assert text.count("<line ") == 8
    assert "&lt;" in text
    assert 'width="0.0"' in text

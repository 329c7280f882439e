"""Tools: they reach the chat template, and calls as JSON between tags come back as calls."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from tests.fakes.workers import CHAT, FakeEngine, refusal, running_worker

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}:{{ message.content }}"
    "{% for call in message.tool_calls %}{{ call.function.name }}={{ call.function.arguments.x }}{% endfor %}|"
    "{% endfor %}"
)
CALLS = 'So: <tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n<tool_call>{"name": "g"}</tool_call>'


@pytest.fixture
def engine(small_tokenizer: TextTokenizer, tmp_path: Path) -> FakeEngine:
    small_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    return FakeEngine(load_tokenizer(tmp_path), CALLS, chunk=3)


def functions(calls: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_tools_and_calls_reach_the_template(engine: FakeEngine) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    turns = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
    ]
    with running_worker(engine) as worker:
        assert worker.ask("chat", messages=turns, tools=TOOLS)[0] == 200
        assert worker.ask("chat", messages=CHAT, tools=TOOLS, tool_choice="none")[0] == 200
        call["function"] = {"name": "f", "arguments": "{"}
        assert refusal(worker.ask("chat", messages=turns), 400)["param"] == "messages"
    assert engine.prompts == ["[f]user:Hi|assistant:f=5|tool:7|", "user:Hi|"]


def test_calls_are_parsed(engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"messages": CHAT, "tools": TOOLS, "max_tokens": 200}
    with running_worker(engine) as worker:
        [choice] = worker.ask("chat", **asked)[1]["choices"]
        events = worker.stream("chat", **asked)
        [text] = worker.ask("chat", **{**asked, "tools": None})[1]["choices"]
    assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", "So: ")
    assert functions(choice["message"]["tool_calls"]) == [("f", {"x": 1}), ("g", {})]
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == "So: "
    assert functions(deltas[-1]["tool_calls"]) == [("f", {"x": 1}), ("g", {})]
    assert [call["index"] for call in deltas[-1]["tool_calls"]] == [0, 1]
    assert events[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert (text["finish_reason"], text["message"]["content"]) == ("stop", CALLS)


@pytest.mark.parametrize("text", ["a <tool_", "<tool_call>{", "<tool_call>[]"])
def test_invalid_calls_stay_text(engine: FakeEngine, text: str) -> None:
    engine.answer = text
    asked: dict[str, Any] = {"messages": CHAT, "tools": TOOLS, "max_tokens": 200}
    with running_worker(engine) as worker:
        [choice] = worker.ask("chat", **asked)[1]["choices"]
        events = worker.stream("chat", **asked)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


def test_a_template_without_tools(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    for tokenizer in (small_tokenizer, load_tokenizer(tmp_path)):
        with running_worker(FakeEngine(tokenizer)) as worker:
            assert refusal(worker.ask("chat", messages=CHAT, tools=TOOLS), 400)["param"] == "tools"

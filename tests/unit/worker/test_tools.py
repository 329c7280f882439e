"""Tools: they reach the chat template or become text, calls come back as calls, and can be forced."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftstore.errors import GrammarError
from draftstore.hf.requests import GenerationRequest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.text.tools import HEAD, RULE
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


@pytest.mark.parametrize("text", ["a <tool_", "a\n<tool_call>{", "<tool_call>[]", "a\n"])
def test_invalid_calls_stay_text(engine: FakeEngine, text: str) -> None:
    engine.answer = text
    asked: dict[str, Any] = {"messages": CHAT, "tools": TOOLS, "max_tokens": 200}
    with running_worker(engine) as worker:
        [choice] = worker.ask("chat", **asked)[1]["choices"]
        events = worker.stream("chat", **asked)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", text)
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


def test_tools_become_text_for_templates_without_them(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path)
    plain = "{% for message in messages %}{{ message.role }}:{{ message.content }}|{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(plain)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 5}'}}
    turns = [
        *CHAT,
        {"role": "assistant", "content": "So", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "7"},
        {"role": "tool", "tool_call_id": "2", "content": "8"},
        {"role": "user", "content": "So?"},
    ]
    prompts = []
    for tokenizer in (load_tokenizer(tmp_path), small_tokenizer):
        engine = FakeEngine(tokenizer, CALLS, positions=2000)
        with running_worker(engine) as worker:
            for messages in (turns, [{"role": "system", "content": "Be short"}, *turns]):
                [choice] = worker.ask("chat", messages=messages, tools=TOOLS, max_tokens=200)[1]["choices"]
                assert functions(choice["message"]["tool_calls"]) == [("f", {"x": 1}), ("g", {})]
        prompts += engine.prompts
    described = HEAD + '{"name": "f", "parameters": {}}' + RULE
    told = 'assistant:So\n<tool_call>\n{"name": "f", "arguments": {"x": 5}}\n</tool_call>|'
    results = "user:" + "\n".join(f"<tool_response>\n{each}\n</tool_response>" for each in (7, 8)) + "\nSo?|"
    assert prompts[0] == f"user:{described}\n\nHi|{told}{results}"
    assert prompts[1] == f"system:Be short\n\n{described}|user:Hi|{told}{results}"
    assert prompts[2].startswith(f"USER: {described}\n\nHi ASSISTANT: So\n<tool_call>")


def test_an_answer_returns_as_the_model_wrote_it(small_tokenizer: TextTokenizer) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    for text in (call, f"So:\n{call}\n{call}"):
        engine = FakeEngine(small_tokenizer, text, positions=2000)
        with running_worker(engine) as worker:
            [choice] = worker.ask("chat", messages=CHAT, tools=TOOLS)[1]["choices"]
            worker.ask("chat", messages=[*CHAT, choice["message"], *CHAT], tools=TOOLS)
        first, second = engine.prompts
        assert second == f"{first} {text} USER: Hi ASSISTANT:"


def test_forced_calls_follow_the_functions(small_tokenizer: TextTokenizer) -> None:
    weather = {"type": "object", "properties": {"city": {"enum": ["Rome"]}}, "required": ["city"]}
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": weather | {"type": "string"}}},
        {"type": "function", "function": {"name": "g"}},
    ]
    schema = {"type": "json_schema", "json_schema": {"schema": weather}}
    named = {"type": "function", "function": {"name": "g"}}
    engine = FakeEngine(small_tokenizer, positions=2000)
    asked: list[dict[str, Any]] = [
        {"tool_choice": "required"},
        {"tool_choice": "required", "parallel_tool_calls": True},
        {"tool_choice": named, "response_format": schema},
        {"response_format": schema},
        {"response_format": schema, "tool_choice": "none"},
        {"tool_choice": "auto"},
    ]
    with running_worker(engine) as worker:
        for each in asked:
            status, reply = worker.ask("chat", messages=CHAT, tools=tools, **each)
            assert status == 200, reply
    one, two = (
        '<tool_call>\n{"name": "f", "arguments": {"city": "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
    )
    texts = [one, two, f"{one}\n{two}", '{"city":"Rome"}']
    allowed = [[text for text in texts if _follows(engine, work, text)] for work in engine.works]
    assert allowed == [[one, two], [one, two, texts[2]], [two], texts, [texts[3]], texts]


def _follows(engine: FakeEngine, work: GenerationRequest, text: str) -> bool:
    """Return True if the grammar of a request allows a text as the whole answer."""
    if work.grammar is None:
        return True
    state = work.grammar.start()
    try:
        state.extend(engine.tokenizer.encode(text, bos=False).tolist())
    except GrammarError:
        return False
    [end] = engine.facts.ends
    return bool(state.allowed()[end])

"""The fields of requests: those that reach the model, those that are ignored, and those that are refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.hf.requests import Sampling
from draftstore.trees.frontier import MAX_BUDGET
from services.worker.bodies import Body, ChatBody, CompletionBody
from tests.fakes.workers import CHAT, FakeEngine, Worker, refusal


@pytest.mark.parametrize("kind", [CompletionBody, ChatBody])
def test_null_passes_for_every_optional_field(worker: Worker, kind: type[Body]) -> None:
    what, needed = ("chat", {"messages": CHAT}) if kind is ChatBody else ("completions", {"prompt": "a"})
    empty = {name: None for name in kind.model_fields if name not in needed}
    assert worker.ask(what, **needed, **empty)[0] == 200


def test_parameters_reach_the_model(worker: Worker, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": 1,
        "frequency_penalty": -0.5, "logit_bias": {"7": -100, "9": 1.5}, "seed": -4, "max_tokens": 5,
        "min_tokens": 3, "ignore_eos": True, "stop_token_ids": [7, 9], "draftstore": {"budget": MAX_BUDGET},
        "logprobs": False,
    }  # fmt: skip
    assert worker.ask("completions", prompt="zero", **asked)[0] == 200
    work = engine.works[-1]
    assert work.sampling == Sampling(0.5, 0.9, 0, 0.1, 1.1, 1.0, -0.5, {7: -100.0, 9: 1.5}, -4)
    assert (work.max_tokens, work.min_tokens, work.ends([1, 2])) == (5, 3, [7, 9])
    assert work.budget == MAX_BUDGET
    assert worker.ask("completions", prompt="zero")[0] == 200
    assert engine.works[-1].sampling == Sampling()
    assert engine.works[-1].budget is None


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": [[1], []]}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [384]}, "prompt", "outside this model's vocabulary"),
    ({"prompt": [10**400]}, "prompt", "outside this model's vocabulary"),
    ({"prompt": "a" * 2000}, "prompt", "context length"),
    ({"max_tokens": 300}, "max_tokens", "limit of 256 tokens"),
    ({"temperature": 2.1}, "temperature", "less"),
    ({"temperature": 1e999}, "temperature", "finite"),
    ({"repetition_penalty": 1e-40}, "repetition_penalty", "greater"),
    ({"min_tokens": 17}, "min_tokens", "of 16 tokens"),
    ({"stop_token_ids": [384]}, "stop_token_ids", "384"),
    ({"logit_bias": {"384": 1}}, "logit_bias", "384"),
    ({"seed": 1 << 63}, "seed", "less"),
    ({"n": 7}, "n", "at most 6 answers"),
    ({"prompt": ["a"] * 7}, "prompt", "at most 6 answers"),
    ({"stop": [""]}, "stop", "at least 1"),
    ({"logprobs": 0}, "logprobs", "only false"),
    ({"echo": 0}, "echo", "only false"),
    ({"best_of": True}, "best_of", "integer"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens: must be greater"),
    ({"prompt": None}, "prompt", "prompt: must be"),
    ({"prompt": ["a", 7]}, "prompt", "prompt.1: must be"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias.x: must be"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format",
        "json_schema.schema: Field",
    ),
    ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
    ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens", "excludes"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 7}}}},
        "response_format",
        "must be a string",
    ),
    ({"guided_json": {}}, "guided_json", "unknown field"),
    ({"prediction": {"type": "text", "content": "a"}}, "prediction", "content"),
    ({"prediction": {"type": "content", "content": [{"type": "image_url"}]}}, "prediction", "only text"),
    ({"draftstore": {"budget": MAX_BUDGET + 1}}, "draftstore", "less"),
]


TOOL = {"type": "function", "function": {"name": "f"}}
BROKEN = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": 7}}}}}
REFUSED_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": ""}]}, "messages", "messages.0.role"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "'image_url'"),
    ({"messages": [{"role": "user", "content": "word " * 400}]}, "messages", "context length"),
    ({"top_logprobs": False}, "top_logprobs", "integer"),
    ({"tool_choice": "required"}, "tool_choice", "tools are required"),
    ({"tool_choice": "required", "tools": [TOOL], "ignore_eos": True}, "ignore_eos", "forced calls"),
    ({"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]}, "tool_choice", "'g'"),
    ({"tools": [TOOL, TOOL]}, "tools", "same name"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools.0.function.name"),
    ({"tools": [BROKEN], "tool_choice": "required"}, "tools", "must be a string"),
    ({"chat_template_kwargs": {"tools": [TOOL]}}, "chat_template_kwargs", "of their own"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "null"),
    ({"chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs", "no chat template"),
]


@pytest.mark.parametrize(
    ("what", "asked", "param", "words"),
    [*(("completions", *row) for row in REFUSED), *(("chat", *row) for row in REFUSED_CHATS)],
)
def test_invalid_requests_are_refused(
    worker: Worker, what: str, asked: dict[str, Any], param: str, words: str
) -> None:
    needed = {"messages": CHAT} if what == "chat" else {"prompt": "a"}
    error = refusal(worker.ask(what, **{**needed, **asked}), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert words in error["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
CALL = st.fixed_dictionaries({"function": st.fixed_dictionaries({"name": JSON, "arguments": JSON})})
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "x"]) | JSON, "content": JSON},
    optional={"tool_calls": st.lists(CALL, max_size=2)},
)


@given(
    what=st.sampled_from(["completions", "chat"]),
    asked=st.dictionaries(
        st.sampled_from([*ChatBody.model_fields, *CompletionBody.model_fields]), JSON, max_size=4
    ),
    prompt=st.text(max_size=5) | st.lists(st.integers(-1, 400), max_size=5),
    messages=st.lists(MESSAGE, max_size=3),
)
def test_every_request_is_answered_or_refused(
    worker: Worker, what: str, asked: dict[str, Any], prompt: Any, messages: Any
) -> None:
    needed = {"messages": messages} if what == "chat" else {"prompt": prompt}
    status, headers, body = worker.post(what, {**needed, **asked})
    assert status in (200, 400, 404)
    if status != 200:
        refusal((status, body), status)
    else:
        assert headers["content-type"].split(";")[0] in ("application/json", "text/event-stream")

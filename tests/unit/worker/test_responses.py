"""The Responses API: its items reach the template as a chat, and replies and events are those of OpenAI's types."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from services.worker.responses_body import ResponsesBody
from tests.fakes.workers import ANSWER, MODEL, FakeEngine, Worker, refusal, running_worker
from tests.unit.worker.test_bodies import JSON
from tests.unit.worker.test_tools import CALLS, TEMPLATE

openai = pytest.importorskip("openai", reason="the package openai is not installed")
pydantic = pytest.importorskip("pydantic")

TOOL = {"type": "function", "name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
SAID = {
    "type": "message", "id": "m", "status": "completed", "role": "assistant",
    "content": [{"type": "output_text", "text": "So", "annotations": [], "logprobs": []}],
}  # fmt: skip
CALLED = {
    "type": "function_call",
    "id": "i",
    "call_id": "c",
    "name": "f",
    "arguments": '{"x": 5}',
    "status": "completed",
}
ITEMS: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
    SAID,
    CALLED,
    {**CALLED, "arguments": '{"x": 6}'},
    {"type": "function_call_output", "call_id": "c", "output": "7"},
]


@pytest.fixture(scope="module")
def calling(small_tokenizer: TextTokenizer, tmp_path_factory: pytest.TempPathFactory) -> FakeEngine:
    """Return an engine whose template knows tools, and whose answers call them."""
    folder: Path = tmp_path_factory.mktemp("calling")
    small_tokenizer.save(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return FakeEngine(load_tokenizer(folder), CALLS, chunk=3)


@pytest.fixture(scope="module")
def other(calling: FakeEngine) -> Iterator[Worker]:
    with running_worker(calling) as worker:
        yield worker


def client(worker: Worker) -> Any:
    return openai.OpenAI(base_url="http://{}:{}/v1".format(*worker.address), api_key="none", max_retries=0)


def checked(kind: Any, found: Any) -> Any:
    """Return what a client has found, parsed again by its own types, strictly."""
    document = found.model_dump(mode="json", exclude_unset=True)
    return pydantic.TypeAdapter(kind).validate_python(document)


def test_a_response(worker: Worker, engine: FakeEngine) -> None:
    with client(worker) as openai_client:
        reply = openai_client.responses.create(
            model=MODEL, input="Hi", instructions="Be short", store=False, include=[], temperature=0,
            reasoning={"effort": None}, text={"verbosity": "medium"}, metadata={"a": "b"}, max_output_tokens=100,
            extra_body={"draftstore": {"live": False}},
        )  # fmt: skip
    checked(openai.types.responses.Response, reply)
    assert (reply.output_text, reply.status, reply.instructions) == (ANSWER[1:], "completed", "Be short")
    assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
    assert reply.usage.draftstore["passes"] > 0
    assert engine.prompts[-1] == "SYSTEM: Be short USER: Hi ASSISTANT:"
    assert not engine.works[-1].live


def test_a_cut_response_is_incomplete(worker: Worker) -> None:
    status, reply = worker.ask("responses", input="Hi", max_output_tokens=2)
    assert (status, reply["status"]) == (200, "incomplete")
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}


def test_items_reach_the_template(other: Worker, calling: FakeEngine) -> None:
    assert other.ask("responses", input=ITEMS, tools=[TOOL])[0] == 200
    assert calling.prompts[-1] == "[f]user:Hi|assistant:So" + "f=5f=6|tool:7|"
    assert other.ask("responses", input=ITEMS, tools=[TOOL], tool_choice="none")[0] == 200
    assert calling.prompts[-1] == "user:Hi|assistant:So" + "f=5f=6|tool:7|"


def test_calls_are_items(other: Worker) -> None:
    with client(other) as openai_client:
        reply = openai_client.responses.create(model=MODEL, input="Hi", tools=[TOOL])
    checked(openai.types.responses.Response, reply)
    message, *calls = reply.output
    assert message.content[0].text == "So: "
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"x": 1}), ("g", {})]
    again = [item.model_dump(exclude_none=True) for item in reply.output]
    assert other.ask("responses", input=[*ITEMS, *again])[0] == 200, "clients send items back"


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_stream_is_what_the_client_expects(other: Worker, tools: list[Any]) -> None:
    asked: dict[str, Any] = {"model": MODEL, "input": "Hi", "tools": tools}
    with client(other) as openai_client:
        whole = openai_client.responses.create(**asked)
        events = list(openai_client.responses.create(**asked, stream=True))
        with openai_client.responses.stream(
            **asked
        ) as stream:  # its helper builds the response from the events
            for _ in stream:
                pass
            built = stream.get_final_response()
    for event in events:
        checked(openai.types.responses.ResponseStreamEvent, event)
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    ended = events[-1].response
    assert (events[-1].type, ended.output_text) == ("response.completed", text)
    for found in (ended, built):
        assert _content(found) == _content(whole)
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in done] == [item.id for item in ended.output]
    assert ended.usage.output_tokens == whole.usage.output_tokens


def _content(response: Any) -> list[Any]:
    """Return the items of a response without their ids."""
    return [
        item.content[0].text if item.type == "message" else (item.name, item.arguments)
        for item in response.output
    ]


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"input": []}, "input", "at least 1"),
    ({"input": None}, "input", "input: must be"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "'item_reference' found using 'type'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text"),
    ({"input": [{**CALLED, "arguments": "{"}]}, "input", "input.0.arguments: Invalid JSON"),
    ({"input": [{**CALLED, "arguments": '"x"'}]}, "input", "input.0.arguments: must be an object"),
    ({"input": "word " * 400}, "input", "context length"),
    ({"store": True}, "store", "keeps no responses"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
    ({"conversation": "c"}, "conversation", "send the whole conversation"),
    ({"background": True}, "background", "only false"),
    ({"include": ["file_search_call.results"]}, "include", "reasoning.encrypted_content"),
    ({"tools": [{"type": "web_search"}]}, "tools", "tools.0"),
    ({"tools": [TOOL, TOOL]}, "tools", "same name"),
    ({"tool_choice": "required"}, "tool_choice", "tools are required"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "named 'g'"),
    ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text", "schema"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 7}}}}, "text", "must be a string"),
    ({"max_output_tokens": 300}, "max_output_tokens", "limit of 256 tokens"),
    ({"truncation": "auto"}, "truncation", "disabled"),
    ({"n": 2}, "n", "unknown field"),
    ({"model": "gpt"}, "model", "not served"),
]


@pytest.mark.parametrize(("asked", "param", "words"), REFUSED)
def test_invalid_responses_are_refused(worker: Worker, asked: dict[str, Any], param: str, words: str) -> None:
    error = refusal(worker.ask("responses", **{"input": "Hi", **asked}), 404 if param == "model" else 400)
    assert error["param"] == param
    assert words in error["message"]


def test_null_passes_for_every_optional_field_of_a_response(worker: Worker) -> None:
    empty = {name: None for name in ResponsesBody.model_fields if name != "input"}
    assert worker.ask("responses", input="Hi", **empty)[0] == 200


ITEM = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output"]) | JSON},
    optional={
        "role": st.sampled_from(["user", "assistant"]) | JSON, "content": st.text(max_size=5) | JSON,
        "call_id": st.text(max_size=3) | JSON, "name": st.text(max_size=3) | JSON,
        "arguments": st.sampled_from(["{}", "[", "7"]) | JSON, "output": st.text(max_size=5) | JSON,
    },
)  # fmt: skip


@given(
    asked=st.dictionaries(st.sampled_from([*ResponsesBody.model_fields]), JSON, max_size=4),
    items=st.lists(st.sampled_from(ITEMS) | ITEM, max_size=3) | st.text(max_size=5),
)
def test_every_response_is_answered_or_refused(worker: Worker, asked: dict[str, Any], items: Any) -> None:
    status, headers, body = worker.post("responses", {"input": items, **asked})
    assert status in (200, 400, 404)
    if status != 200:
        refusal((status, body), status)
    else:
        assert headers["content-type"].split(";")[0] in ("application/json", "text/event-stream")

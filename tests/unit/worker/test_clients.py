"""The clients that people use, asking the worker: OpenAI's own, and LangChain's."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.workers import ANSWER, CHAT, MODEL, FakeEngine, Worker

openai = pytest.importorskip("openai", reason="the package openai is not installed")
langchain_openai = pytest.importorskip("langchain_openai", reason="langchain-openai is not installed")


@pytest.fixture(scope="module")
def client(worker: Worker) -> Iterator[Any]:
    with openai.OpenAI(base_url=base_url(worker), api_key="none", max_retries=0) as client:
        yield client


def base_url(worker: Worker) -> str:
    return "http://{}:{}/v1".format(*worker.address)


def test_openai_chats(client: Any, engine: FakeEngine) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    extra = {"min_tokens": 2, "ignore_eos": False, "stop_token_ids": [7], "top_k": 20}
    reply = client.chat.completions.create(
        model=MODEL,
        messages=CHAT,
        n=2,
        seed=3,
        max_completion_tokens=100,
        user="u",
        store=False,
        extra_body=extra,
    )
    assert [choice.message.content for choice in reply.choices] == [ANSWER[1:]] * 2
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert (engine.works[-1].min_tokens, engine.works[-1].stop_ids) == (2, (7,))
    stream = client.chat.completions.create(
        model=MODEL, messages=CHAT, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == ANSWER[1:]
    assert chunks[-1].usage.completion_tokens == reply.usage.completion_tokens / 2


def test_openai_completions(client: Any) -> None:
    reply = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=-1, stop="")
    assert [(choice.index, choice.text) for choice in reply.choices] == [(0, ANSWER), (1, ANSWER)]
    stream = client.completions.create(model=MODEL, prompt="a", max_tokens=100, stop=[" two"], stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == ANSWER[: ANSWER.index(" two")]


def test_openai_gets_errors_of_its_own_kinds(client: Any) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(model=MODEL, messages=CHAT, extra_body={"guided_json": {}})
    assert raised.value.param == "guided_json"
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.chat.completions.create(model="gpt-4", messages=CHAT)


def test_langchain(worker: Worker, engine: FakeEngine) -> None:
    with openai.DefaultHttpxClient() as http:  # LangChain's own is never closed
        told = {
            "model": MODEL,
            "base_url": base_url(worker),
            "api_key": "none",
            "max_retries": 0,
            "http_client": http,
        }
        chat = langchain_openai.ChatOpenAI(**told, temperature=0, seed=1, stream_usage=True)
        reply = chat.invoke("Hi")
        assert (reply.content, reply.response_metadata["finish_reason"]) == (ANSWER[1:], "stop")
        assert reply.usage_metadata["output_tokens"] > 5
        assert "".join(chunk.content for chunk in chat.stream("Hi")) == ANSWER[1:]
        assert [answer.content for answer in chat.batch(["a", "b"])] == [ANSWER[1:]] * 2
        legacy = langchain_openai.OpenAI(**told, n=2, max_tokens=100)
        answers = legacy.generate(["a", "b"])
        assert [[each.text for each in several] for several in answers.generations] == [[ANSWER] * 2] * 2
    assert engine.works[-1].max_tokens == 100

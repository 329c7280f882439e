"""OpenAI's own client against the worker."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes.workers import ANSWER, CHAT, MODEL, FakeEngine, Worker

openai = pytest.importorskip("openai", reason="the package openai is not installed")


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

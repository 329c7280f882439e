"""The HTTP side of the decoding worker, on a model that says what it is told to."""

import dataclasses
import http.client
import itertools
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftstore.decoding.loop import Step
from draftstore.errors import DraftstoreError, ProbabilityError
from draftstore.hf.requests import Sampling
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from services.worker import answering, app
from services.worker.asking import make_requests
from services.worker.decoder import MAX_FAILURES
from services.worker.messages import CompletionAsk, Prediction
from services.worker.problems import ApiError
from tests.examples import examples
from tests.fakes.sites import grant
from tests.fakes.waiting import until
from tests.fakes.workers import MODEL, FakeEngine, Worker, chain, read_stream, running_worker, text_of

ANSWER = " naïve 東京 😀, one two three"
CHAT = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def engine(small_tokenizer: TextTokenizer) -> FakeEngine:
    return FakeEngine(small_tokenizer, ANSWER, chunk=3)


@pytest.fixture(scope="module")
def worker(engine: FakeEngine) -> Iterator[Worker]:
    with running_worker(engine, max_tokens=256, body=100_000) as worker:
        yield worker


@pytest.fixture
def gated(small_tokenizer: TextTokenizer) -> Iterator[tuple[Worker, FakeEngine]]:
    """Return a worker with room for two, whose model takes a step whenever the gate is released."""
    engine = FakeEngine(small_tokenizer)
    engine.gate = threading.Semaphore(0)
    with running_worker(engine, queue=2) as worker:
        yield worker, engine


def refusal(answer: tuple[int, Any], status: int) -> dict[str, Any]:
    """Check the form that all errors have, and return what it holds."""
    found, document = answer
    assert found == status, document
    assert document.keys() == {"error"}
    error: dict[str, Any] = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


# --- answers ---------------------------------------------------------------------------------------------------


def test_a_completion(worker: Worker, engine: FakeEngine, small_tokenizer: TextTokenizer) -> None:
    status, reply = worker.ask("completions", model=MODEL, prompt="zero", max_tokens=200, temperature=0)
    assert status == 200
    assert reply["object"] == "text_completion"
    assert reply["id"].startswith("cmpl-")
    assert reply["model"] == MODEL
    assert reply["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    work = engine.works[-1]
    assert work.prompt.tolist() == small_tokenizer.encode("zero", bos=True).tolist()
    assert work.sampling == Sampling(temperature=0.0)
    tokens = len(engine.tokens_of(work))
    passes = -(-(tokens - 1) // 3)
    assert reply["usage"] == {
        "prompt_tokens": len(work.prompt),
        "completion_tokens": tokens,
        "total_tokens": len(work.prompt) + tokens,
        "completion_tokens_details": {
            "accepted_prediction_tokens": tokens - 1 - passes,
            "rejected_prediction_tokens": 0,
        },
        "draftstore": {
            "passes": passes,
            "drafted": tokens - 1 - passes,
            "accepted": tokens - 1 - passes,
            "accepted_length": round((tokens - 1) / passes, 3),
            "drafters": ["request"],
        },
    }


def test_a_chat(worker: Worker, engine: FakeEngine, small_tokenizer: TextTokenizer) -> None:
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    status, reply = worker.ask("chat", model=MODEL, messages=turns)
    assert status == 200
    assert reply["object"] == "chat.completion"
    assert reply["id"].startswith("chatcmpl-")
    [choice] = reply["choices"]
    # Conversations without a template are joined by single spaces: that before the answer is none of it.
    assert choice["message"] == {"role": "assistant", "content": ANSWER[1:], "refusal": None}
    assert choice["finish_reason"] == "stop"
    text = "SYSTEM: Be brief. USER: Hi ASSISTANT:"
    assert engine.works[-1].prompt.tolist() == small_tokenizer.encode(text, bos=True).tolist()
    assert engine.works[-1].max_tokens == 256


def test_a_chat_has_the_tokenizers_bos_whatever_the_template_writes(
    small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    expected = [0, *small_tokenizer.encode("Hi>", bos=False).tolist()]
    for name, start in (("without", ""), ("with", "{{ bos_token }}")):
        folder = tmp_path / name
        folder.mkdir()
        small_tokenizer.save(folder)
        template = start + "{% for message in messages %}{{ message.content }}{% endfor %}>"
        (folder / "chat_template.jinja").write_text(template)
        engine = FakeEngine(load_tokenizer(folder))
        with running_worker(engine) as worker:
            assert worker.ask("chat", messages=CHAT)[0] == 200
        assert engine.works[-1].prompt.tolist() == expected, name


@pytest.mark.parametrize("what", ["completions", "chat"])
def test_a_stream_joins_to_the_same_text(worker: Worker, what: str) -> None:
    asked: dict[str, Any] = {"max_tokens": 200} | (
        {"messages": CHAT} if what == "chat" else {"prompt": "zero"}
    )
    events = worker.stream(what, **asked, stream_options={"include_usage": True})
    _, reply = worker.ask(what, **asked)
    whole = reply["choices"][0]
    assert text_of(events) == (whole["message"]["content"] if what == "chat" else whole["text"])
    assert len(events) > 5
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)
    assert {event["id"] for event in events} == {events[0]["id"]}
    kind = "chat.completion.chunk" if what == "chat" else "text_completion"
    assert {event["object"] for event in events} == {kind}
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * (len(events) - 2) + [
        "stop"
    ]
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == reply["usage"]
    assert all(event["usage"] is None for event in events[:-1])


def test_a_stream_without_figures(worker: Worker) -> None:
    events = worker.stream("chat", messages=CHAT)
    assert not any("usage" in event for event in events)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert events[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]


def test_an_answer_at_its_limit(worker: Worker, engine: FakeEngine) -> None:
    _, reply = worker.ask("completions", prompt="zero", max_tokens=5)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 5
    assert ANSWER.startswith(reply["choices"][0]["text"])
    _, reply = worker.ask("completions", prompt="zero")
    assert reply["usage"]["completion_tokens"] == 16
    _, reply = worker.ask("chat", messages=CHAT, max_tokens=9, max_completion_tokens=7)
    assert reply["usage"]["completion_tokens"] == 7


@pytest.mark.parametrize("stop", ["one", ["xyz", "one t", "one two"]])
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_an_answer_and_is_no_part_of_it(worker: Worker, stop: Any, stream: bool) -> None:
    asked = {"prompt": "zero", "max_tokens": 200, "stop": stop}
    if stream:
        events = worker.stream("completions", **asked, stream_options={"include_usage": True})
        text, reason, usage = text_of(events), events[-2]["choices"][0]["finish_reason"], events[-1]["usage"]
    else:
        _, reply = worker.ask("completions", **asked)
        [choice] = reply["choices"]
        text, reason, usage = choice["text"], choice["finish_reason"], reply["usage"]
    assert (text, reason) == (ANSWER[: ANSWER.index("one")], "stop")
    assert usage["completion_tokens"] < 200
    assert usage["draftstore"]["accepted"] <= usage["completion_tokens"]


def test_a_stop_string_that_does_not_come_whole(worker: Worker) -> None:
    _, reply = worker.ask("completions", prompt="zero", max_tokens=200, stop=[" three four", "threefold"])
    assert reply["choices"][0]["text"] == ANSWER


def test_prompts_of_token_ids(worker: Worker, engine: FakeEngine) -> None:
    for prompt in ([5, 6, 7], [[5, 6, 7]]):
        assert worker.ask("completions", prompt=prompt)[0] == 200
        assert engine.works[-1].prompt.tolist() == [5, 6, 7]
    assert worker.ask("completions", prompt=["zero"])[0] == 200


def test_content_in_parts(worker: Worker, engine: FakeEngine, small_tokenizer: TextTokenizer) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    worker.ask("chat", messages=[{"role": "user", "content": parts}, {"role": "assistant", "content": None}])
    assert small_tokenizer.decode(engine.works[-1].prompt).endswith("USER: Hi ASSISTANT:  ASSISTANT:")


def test_parameters_reach_the_model(worker: Worker, engine: FakeEngine) -> None:
    status, _ = worker.ask(
        "completions", prompt="zero", temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=1, frequency_penalty=-0.5, logit_bias={"7": -100, "9": 1.5}, seed=-4,
    )  # fmt: skip
    assert status == 200
    assert engine.works[-1].sampling == Sampling(0.5, 0.9, 0, 0.1, 1.1, 1.0, -0.5, {7: -100.0, 9: 1.5}, -4)


def test_what_clients_send_beside(worker: Worker) -> None:
    """Parameters that change no answer here are passed over, and what is left open is null."""
    status, _ = worker.ask(
        "chat", messages=[{"role": "user", "content": "Hi", "name": "x"}], n=1, logprobs=False, tools=[],
        tool_choice="auto", response_format={"type": "text"}, user="u", store=False, metadata={"a": "b"},
        service_tier="auto", reasoning_effort=None, guided_json=None, length_penalty=1.0, skip_special_tokens=True,
        never_heard_of=None, stop="", stream=None, stream_options=None, seed=None, best_of=1, stop_token_ids=None,
        ignore_eos=False, min_tokens=0,
    )  # fmt: skip
    assert status == 200


def test_what_vllm_takes_beside_reaches_the_model(worker: Worker, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {
        "min_tokens": 3,
        "ignore_eos": True,
        "stop_token_ids": [7, 9],
        "seed": 4.0,
        "max_tokens": 5.0,
    }
    assert worker.ask("completions", prompt="zero", **asked)[0] == 200
    work = engine.works[-1]
    assert (work.min_tokens, work.ignore_eos, work.stop_ids) == (3, True, (7, 9))
    assert (work.max_tokens, work.sampling.seed) == (5, 4)
    assert work.ends([1, 2]) == [7, 9]


def test_as_many_tokens_as_fit(worker: Worker, engine: FakeEngine) -> None:
    for what, asked in (("completions", {"prompt": [5] * 300}), ("chat", {"messages": CHAT})):
        assert worker.ask(what, **asked, max_tokens=-1)[0] == 200
        rest = engine.facts.positions - len(engine.works[-1].prompt)
        assert engine.works[-1].max_tokens == min(rest, 256), what


def test_no_stop_string_ends_an_answer_before_its_least_tokens(worker: Worker, engine: FakeEngine) -> None:
    asked: dict[str, Any] = {"prompt": "zero", "max_tokens": 200, "stop": [" one", "three"]}
    _, reply = worker.ask("completions", **asked, min_tokens=1)
    assert reply["choices"][0]["text"] == ANSWER[: ANSWER.index(" one")]
    least = len(engine.tokenizer.encode(ANSWER[: ANSWER.index(" two")], bos=False))
    _, reply = worker.ask("completions", **asked, min_tokens=least)
    assert reply["choices"][0]["text"] == ANSWER[: ANSWER.index("three")]
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_settings_of_the_chat_template(small_tokenizer: TextTokenizer, tmp_path: Path) -> None:
    small_tokenizer.save(tmp_path)
    template = "{{ messages[0].content }}{% if not thinking %} no{% endif %}>"
    (tmp_path / "chat_template.jinja").write_text(template)
    engine = FakeEngine(load_tokenizer(tmp_path))
    with running_worker(engine) as worker:
        for given, expected in (({"thinking": True}, "Hi>"), ({"thinking": False}, "Hi no>"), ({}, "Hi no>")):
            assert worker.ask("chat", messages=CHAT, chat_template_kwargs=given)[0] == 200
            ids = engine.tokenizer.encode(expected, bos=True).tolist()
            assert engine.works[-1].prompt.tolist() == ids, given
        refused: list[dict[str, Any]] = [
            {"messages": []},
            {"bos_token": "x"},
            {"add_generation_prompt": False},
        ]
        for taken in refused:
            error = refusal(worker.ask("chat", messages=CHAT, chat_template_kwargs=taken), 400)
            assert error["param"] == "chat_template_kwargs"
            assert repr(next(iter(taken))) in error["message"]
        assert refusal(worker.ask("chat", messages=CHAT, chat_template_kwargs=[1]), 400)["param"] == (
            "chat_template_kwargs"
        )


def test_settings_without_a_template(worker: Worker) -> None:
    error = refusal(worker.ask("chat", messages=CHAT, chat_template_kwargs={"thinking": True}), 400)
    assert "no chat template" in error["message"]


# --- how likely tokens are ---


@pytest.mark.parametrize("stop", [None, " two"])
def test_log_probabilities_of_a_completion(worker: Worker, engine: FakeEngine, stop: str | None) -> None:
    asked: dict[str, Any] = {"prompt": "zero", "max_tokens": 200, "logprobs": 3, "stop": stop}
    _, reply = worker.ask("completions", **asked)
    [choice] = reply["choices"]
    found, text = choice["logprobs"], choice["text"]
    assert text == (ANSWER if stop is None else ANSWER[: ANSWER.index(stop)])
    ids = engine.tokenizer.encode(text, bos=False).tolist()
    assert len(found["tokens"]) == len(ids)
    for place, (token, offset, id_) in enumerate(
        zip(found["tokens"], found["text_offset"], ids, strict=True)
    ):
        if (exact := engine.tokenizer.exact_text(id_)) is not None:
            assert token == exact == text[offset : offset + len(exact)]
        assert found["token_logprobs"][place] == -1.5
        assert found["top_logprobs"][place][token] == -1.5
        assert -9999.0 in found["top_logprobs"][place].values()
    events = worker.stream("completions", **asked)
    pieces = [event["choices"][0]["logprobs"] for event in events if event["choices"][0]["logprobs"]]
    assert {key: [each for piece in pieces for each in piece[key]] for key in found} == found
    assert len(pieces) > 2


def test_log_probabilities_of_a_chat(worker: Worker, engine: FakeEngine) -> None:
    _, reply = worker.ask("chat", messages=CHAT, logprobs=True, top_logprobs=2)
    content = reply["choices"][0]["logprobs"]["content"]
    ids = engine.tokenizer.encode(ANSWER, bos=False).tolist()
    assert len(content) == len(ids)  # without the end, which is no text
    assert [len(each["top_logprobs"]) for each in content] == [2] * len(ids)
    whole = [each for each in content if each["bytes"] is not None]
    assert all(bytes(each["bytes"]).decode() == each["token"] for each in whole)
    assert len(whole) > 3
    events = worker.stream("chat", messages=CHAT, logprobs=True)
    told = [
        each for event in events if (found := event["choices"][0]["logprobs"]) for each in found["content"]
    ]
    assert [each["token"] for each in told] == [each["token"] for each in content]
    assert told[0]["top_logprobs"] == []


# --- several answers -------------------------------------------------------------------------------------------


def by_index(events: list[dict[str, Any]]) -> dict[int, str]:
    """Return the texts of a stream with several answers."""
    choices = [choice for event in events for choice in event["choices"]]
    return {
        index: text_of([{"choices": [choice for choice in choices if choice["index"] == index]}])
        for index in sorted({choice["index"] for choice in choices})
    }


def counting(engine: FakeEngine) -> Any:
    """Return an answer that tells its prompt and seed."""
    return lambda work: [*work.prompt[:1], 5 + (work.sampling.seed or 0), *engine.facts.ends]


@pytest.mark.parametrize("what", ["completions", "chat"])
def test_several_answers(small_tokenizer: TextTokenizer, what: str) -> None:
    engine = FakeEngine(small_tokenizer)
    engine._answer = counting(engine)
    asked: dict[str, Any] = {"messages": CHAT} if what == "chat" else {"prompt": [[50, 51], [60], [70]]}
    prompts = 1 if what == "chat" else 3
    with running_worker(engine) as worker:
        status, reply = worker.ask(what, **asked, n=2, seed=40)
        assert status == 200, reply
        choices = reply["choices"]
        assert [choice["index"] for choice in choices] == list(range(2 * prompts))
        assert [work.sampling.seed for work in engine.works] == [40, 41] * prompts
        tokens = [[work.prompt[0], 45 + place % 2] for place, work in enumerate(engine.works)]
        texts = [small_tokenizer.decode(ids).removeprefix(" " * (what == "chat")) for ids in tokens]
        found = [choice["message"]["content"] if what == "chat" else choice["text"] for choice in choices]
        if what == "completions":
            assert found == texts
        assert [choice["finish_reason"] for choice in choices] == ["stop"] * 2 * prompts
        usage = reply["usage"]
        assert usage["prompt_tokens"] == sum(len(work.prompt) for work in engine.works[::2])
        assert usage["completion_tokens"] == 3 * 2 * prompts
        assert usage["draftstore"]["accepted_length"] == 1.0
        events = worker.stream(what, **asked, n=2, seed=40, stream_options={"include_usage": True})
        assert list(by_index(events).values()) == found
        assert events[-1]["usage"] == usage
        reasons = [choice["finish_reason"] for event in events for choice in event["choices"]]
        assert reasons.count("stop") == 2 * prompts
        assert worker.metric("requests_total", endpoint=what, outcome="stop") == 2


def test_too_many_answers(small_tokenizer: TextTokenizer) -> None:
    with running_worker(FakeEngine(small_tokenizer), max_choices=6) as worker:
        for asked, param in (
            ({"prompt": ["a", "b"], "n": 4}, "n"),
            ({"prompt": "a", "n": 7}, "n"),
            ({"prompt": ["a"] * 7}, "prompt"),
        ):
            error = refusal(worker.ask("completions", **asked), 400)
            assert (error["param"], "at most 6 answers" in error["message"]) == (param, True)
        assert refusal(worker.ask("chat", messages=CHAT, n=7), 400)["param"] == "n"
        assert worker.ask("completions", prompt=["a", "b"], n=3)[0] == 200


def test_several_answers_take_turns_with_other_requests(gated: tuple[Worker, FakeEngine]) -> None:
    worker, engine = gated
    many = worker.begin(prompt="a", n=3, max_tokens=2)
    until(lambda: engine.works)
    other = worker.begin(prompt="b c d", max_tokens=2)
    until(lambda: worker.metric("queue_depth") == 1)
    release(engine)
    for connection in (many, other):
        assert connection.getresponse().status == 200
        connection.close()
    sizes = [len(work.prompt) for work in engine.works]
    assert sizes[0] == sizes[2] == sizes[3] < sizes[1]


def test_several_answers_are_given_up_with_their_client(gated: tuple[Worker, FakeEngine]) -> None:
    worker, engine = gated
    many = worker.begin(prompt="a", n=3, max_tokens=2)
    until(lambda: engine.works)
    release(engine, 2)  # the first answer, whole
    until(lambda: len(engine.works) == 2)
    many.close()
    until(lambda: all(answer.job.cancelled for answer in worker.decoder._running))
    release(engine, 1)
    until(lambda: worker.metric("requests_total", endpoint="completions", outcome="cancelled") == 1)
    assert len(engine.works) == 2


def test_several_answers_are_finished_when_the_worker_stops(gated: tuple[Worker, FakeEngine]) -> None:
    worker, engine = gated
    many = worker.begin(prompt="a", n=3, max_tokens=2)
    until(lambda: engine.works)
    other = worker.begin(prompt="b", max_tokens=2)
    until(lambda: worker.metric("queue_depth") == 1)
    release(engine, 2)
    until(lambda: len(engine.works) == 2)  # the other's turn: what has begun waits
    worker.decoder.drain()
    release(engine)
    answers = [connection.getresponse() for connection in (many, other)]
    assert [answer.status for answer in answers] == [200, 200]
    assert len(json.loads(answers[0].read())["choices"]) == 3
    until(lambda: engine.closed)
    many.close()
    other.close()


def test_one_of_several_answers_that_fails(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    with running_worker(engine) as worker:
        said = 0

        def failing(work: Any) -> list[int]:
            nonlocal said
            said += 1
            if said == 2:
                raise RuntimeError("secret detail")
            return [7]

        engine._answer = failing
        refusal(worker.ask("completions", prompt="a", n=3), 500)
        assert worker.metric("requests_total", endpoint="completions", outcome="failed") == 1
        assert said == 2


# --- requests that are refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "param", "words"),
    [
        ({}, "prompt", "Field required"),
        ({"prompt": None}, "prompt", "expected a text"),
        ({"prompt": 5}, "prompt", "expected a text"),
        ({"prompt": {}}, "prompt", "expected a text"),
        ({"prompt": "a", "repetition_penalty": 1e-40}, "repetition_penalty", "greater than or equal to 0.01"),
        ({"prompt": [True]}, "prompt", "expected a text"),
        ({"prompt": ["a", 5]}, "prompt", "expected a text"),
        ({"prompt": [[1], []]}, "prompt", "empty"),
        ({"prompt": [["a"]]}, "prompt", "expected a text"),
        ({"prompt": []}, "prompt", "empty"),
        ({"prompt": [-1]}, "prompt", "-1"),
        ({"prompt": [384]}, "prompt", "384"),
        ({"prompt": [10**400]}, "prompt", "outside this model's vocabulary"),
        ({"prompt": "\ud800"}, "prompt", "surrogate"),
        (
            {"prompt": "a", "prediction": {"type": "content", "content": "\ud800"}},
            "prediction",
            "surrogate",
        ),
        ({"prompt": "a" * 2000}, "prompt", "positions"),
        ({"prompt": "a", "max_tokens": 300}, "max_tokens", "at most 256"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "greater"),
        ({"prompt": "a", "max_tokens": "5"}, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens", "integer"),
        ({"prompt": "a", "temperature": -0.1}, "temperature", "greater"),
        ({"prompt": "a", "temperature": 2.1}, "temperature", "less"),
        ({"prompt": "a", "temperature": 1e999}, "temperature", "not JSON"),
        ({"prompt": "a", "top_p": 1.1}, "top_p", "less"),
        ({"prompt": "a", "max_tokens": -2}, "max_tokens", "greater"),
        ({"prompt": "a", "min_tokens": 17}, "min_tokens", "at most 16 tokens"),
        ({"prompt": "a", "min_tokens": -1}, "min_tokens", "greater"),
        ({"prompt": "a", "ignore_eos": 1}, "ignore_eos", "boolean"),
        ({"prompt": "a", "stop_token_ids": [384]}, "stop_token_ids", "384"),
        ({"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids", "greater"),
        ({"prompt": "a", "stop_token_ids": [3] * 257}, "stop_token_ids", "at most 256"),
        ({"prompt": "a", "seed": 1.5}, "seed", "integer"),
        ({"prompt": "a", "n": 0}, "n", "greater"),
        ({"prompt": "a", "n": True}, "n", "integer"),
        ({"prompt": "a", "best_of": 3}, "best_of", "make it n"),
        ({"prompt": "a", "guided_json": {}}, "guided_json", "not enforced"),
        ({"prompt": "a", "guided_regex": "a*"}, "guided_regex", "not enforced"),
        ({"prompt": "a", "structured_outputs": {"choice": ["a"]}}, "structured_outputs", "not enforced"),
        ({"prompt": "a", "allowed_token_ids": [3]}, "allowed_token_ids", "logit_bias"),
        ({"prompt": "a", "bad_words": ["x"]}, "bad_words", "logit_bias"),
        ({"prompt": "a", "use_beam_search": True}, "use_beam_search", "beam"),
        ({"prompt": "a", "skip_special_tokens": False}, "skip_special_tokens", "special tokens"),
        ({"prompt": "a", "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "only chats"),
        ({"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort", "chat_template_kwargs"),
        ({"prompt": "a", "max_token": 5}, "max_token", "unknown parameter 'max_token'"),
        ({"prompt": "a", "messages": CHAT}, "messages", "unknown parameter"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "integer"),
        ({"prompt": "a", "top_logprobs": 2}, "top_logprobs", "logprobs is their number"),
        ({"prompt": "a", "echo": True}, "echo", "not repeated"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "at the end"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format", "form"),
        ({"prompt": "a", "stop": [""]}, "stop", "at least 1"),
        ({"prompt": "a", "stop": ["a"] * 17}, "stop", "at most 16"),
        ({"prompt": "a", "stop": "a" * 129}, "stop", "at most 128"),
        ({"prompt": "a", "stop": 5}, "stop", "list"),
        ({"prompt": "a", "seed": 1 << 63}, "seed", "less"),
        ({"prompt": "a", "presence_penalty": 3}, "presence_penalty", "less"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias", "'x'"),
        ({"prompt": "a", "logit_bias": {"384": 1}}, "logit_bias", "'384'"),
        ({"prompt": "a", "logit_bias": {"3": 101}}, "logit_bias", "less"),
        ({"prompt": "a", "stream": "yes"}, "stream", "boolean"),
        ({"prompt": "a", "stream_options": 5}, "stream_options", ""),
        ({"prompt": "a", "model": 5}, "model", "string"),
    ],
)  # fmt: skip
def test_completions_that_are_none(worker: Worker, asked: dict[str, Any], param: str, words: str) -> None:
    error = refusal(worker.ask("completions", **asked), 400)
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == (None if words == "not JSON" else param)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        (None, "list"),
        ([], "at least 1"),
        (["hi"], "messages.0"),
        ([{}], "messages.0.role"),
        ([{"role": ""}], "messages.0.role"),
        ([{"role": "user", "content": 5}], "messages.0.content"),
        ([{"role": "user", "content": ["x"]}], "only text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "tools"),
        ([{"role": "user", "content": "\udfff"}], "surrogate"),
    ],
)
def test_chats_that_are_none(worker: Worker, messages: Any, words: str) -> None:
    error = refusal(worker.ask("chat", messages=messages), 400)
    assert words in error["message"]
    assert error["param"] == "messages"


@pytest.mark.parametrize(
    "asked", [{"tools": [{"type": "function"}]}, {"logprobs": 2}, {"top_logprobs": 2}, {"top_logprobs": 21}]
)
def test_chats_that_want_what_is_not_done(worker: Worker, asked: dict[str, Any]) -> None:
    error = refusal(worker.ask("chat", messages=CHAT, **asked), 400)
    assert error["param"] == next(iter(asked))


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b"[" * 90_000, b'{"prompt": "\xff"}', b'{"a": NaN}', b"1" * 5000],
)
def test_bodies_that_are_no_object(worker: Worker, body: bytes) -> None:
    status, headers, found = worker.request("POST", "/v1/completions", body)
    assert refusal((status, json.loads(found)), 400)["type"] == "invalid_request_error"
    assert headers["x-content-type-options"] == "nosniff"


def test_another_model(worker: Worker) -> None:
    for what, asked in (("completions", {"prompt": "a"}), ("chat", {"messages": CHAT})):
        error = refusal(worker.ask(what, model="gpt-4", **asked), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert repr(MODEL) in error["message"]


def test_what_is_too_long_for_the_model(worker: Worker, engine: FakeEngine) -> None:
    fits = [5] * (engine.facts.positions - 1)
    assert worker.ask("completions", prompt=fits)[1]["usage"]["completion_tokens"] == 1
    assert worker.ask("completions", prompt=fits, max_tokens=1)[0] == 200
    for asked in ({"prompt": [*fits, 5]}, {"prompt": fits, "max_tokens": 2}):
        error = refusal(worker.ask("completions", **asked), 400)
        assert error["code"] == "context_length_exceeded"
        assert "512 positions" in error["message"]
    long = [{"role": "user", "content": "word " * 400}]
    assert refusal(worker.ask("chat", messages=long), 400)["param"] == "messages"


def test_bodies_that_are_too_long_or_of_another_type(worker: Worker) -> None:
    status, _, body = worker.request("POST", "/v1/completions", b" " * 100_001)
    assert refusal((status, json.loads(body)), 413)["code"] == "body_too_long"
    connection = worker.connect()
    pieces = (b" " * 50_000 for _ in range(3))  # without a length up front
    connection.request(
        "POST", "/v1/completions", pieces, {"Content-Type": "application/json"}, encode_chunked=True
    )
    assert connection.getresponse().status == 413
    connection.close()
    status, _, body = worker.request("POST", "/v1/completions", b"{}", {"Content-Type": "text/plain"})
    assert "application/json" in refusal((status, json.loads(body)), 415)["message"]


def test_unknown_paths_methods_and_hosts(worker: Worker) -> None:
    for method, path, status in (
        ("GET", "/v1/embeddings", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/v1/models", 405),
    ):
        found, _, body = worker.request(method, path)
        refusal((found, json.loads(body)), status)
    status, _, body = worker.request("GET", "/v1/models", headers={"Host": "evil.example"})
    assert "evil.example" in refusal((status, json.loads(body)), 400)["message"]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = [
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "stop", "stream", "stream_options", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs",
    "min_tokens", "ignore_eos", "stop_token_ids", "chat_template_kwargs", "best_of", "user", "tools",
]  # fmt: skip
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]) | JSON, "content": JSON})


@examples(150)
@given(
    what=st.sampled_from(["completions", "chat"]),
    asked=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4),
    prompt=st.text(max_size=5) | st.lists(st.integers(-1, 400), max_size=5),
    messages=st.lists(MESSAGE, max_size=3),
)
def test_whatever_is_asked_is_answered_or_refused(
    worker: Worker, what: str, asked: dict[str, Any], prompt: Any, messages: Any
) -> None:
    needed = {"messages": messages} if what == "chat" else {"prompt": prompt}
    body = json.dumps({**needed, **asked}).encode()
    path = "/v1/chat/completions" if what == "chat" else "/v1/completions"
    status, headers, found = worker.request("POST", path, body)
    assert status in (200, 400, 404)
    if status == 200:
        assert headers["content-type"].split(";")[0] in ("application/json", "text/event-stream")
    else:
        refusal((status, json.loads(found)), status)


# --- the model, health, metrics --------------------------------------------------------------------------------


def test_the_model_is_listed(worker: Worker) -> None:
    status, _, body = worker.request("GET", "/v1/models")
    assert status == 200
    [entry] = json.loads(body)["data"]
    assert (entry["id"], entry["object"], entry["max_model_len"]) == (MODEL, "model", 512)
    assert json.loads(worker.request("GET", f"/v1/models/{MODEL}")[2]) == entry
    status, _, body = worker.request("GET", "/v1/models/org/other")
    assert refusal((status, json.loads(body)), 404)["code"] == "model_not_found"


def test_figures(small_tokenizer: TextTokenizer) -> None:
    with running_worker(FakeEngine(small_tokenizer, chunk=2)) as worker:
        usage = worker.ask("completions", prompt="a", max_tokens=50)[1]["usage"]
        worker.ask("chat", messages=CHAT, max_tokens=2)
        worker.ask("chat", messages=CHAT, max_tokens=-2)
        samples = worker.samples()
    count = {
        (dict(labels)["endpoint"], dict(labels)["outcome"]): value
        for (name, labels), value in samples.items()
        if name == "draftstore_decoding_requests_total"
    }
    assert {key: value for key, value in count.items() if value} == {
        ("completions", "stop"): 1, ("chat", "length"): 1, ("chat", "refused"): 1,
    }  # fmt: skip
    total = {name: value for (name, labels), value in samples.items() if not labels}
    assert total["draftstore_decoding_completion_tokens_total"] == usage["completion_tokens"] + 2
    assert total["draftstore_decoding_accepted_tokens_total"] == usage["draftstore"]["accepted"]
    assert total["draftstore_decoding_drafted_tokens_total"] == usage["draftstore"]["drafted"]
    assert total["draftstore_decoding_passes_total"] == usage["draftstore"]["passes"] + 1
    assert total["draftstore_decoding_time_to_first_token_seconds_count"] == 2
    assert total["draftstore_decoding_seconds_per_token_count"] == 2
    assert samples["draftstore_decoding_accepted_length_count", (("release", "stories"),)] == 2
    assert total["draftstore_decoding_queue_depth"] == 0
    assert total["draftstore_decoding_ready"] == 1


def test_while_the_model_is_loaded(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    with running_worker(engine) as worker:
        decoder = worker.decoder
        loaded, decoder.engine = decoder.engine, None
        state, decoder.state = decoder.state, type(decoder.state).LOADING
        status, headers, body = worker.request("POST", "/v1/completions", b"{}")
        assert refusal((status, json.loads(body)), 503)["code"] == "model_loading"
        assert int(headers["retry-after"]) >= 1
        assert worker.request("GET", "/readyz")[0] == 503
        assert worker.request("GET", "/healthz")[0] == 200
        assert worker.request("GET", "/v1/models")[0] == 503
        assert worker.metric("ready") == 0
        decoder.engine, decoder.state = loaded, state
        assert worker.request("GET", "/readyz")[0] == 200
    assert engine.closed


# --- who may ask -----------------------------------------------------------------------------------------------


def test_tokens(small_tokenizer: TextTokenizer) -> None:
    tokens = (
        grant("engine", "secret-1", MODEL),
        grant("all", "secret-2", "*"),
        grant("other", "secret-3", "chat"),
    )
    with running_worker(FakeEngine(small_tokenizer), *tokens) as worker:
        for header in (None, "", "Bearer", "Bearer wrong", "Basic secret-1", "secret-1"):
            headers: dict[str, str] = {} if header is None else {"Authorization": header}
            error = refusal(worker.ask("completions", headers, prompt="a"), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/metrics"):
                assert worker.request("GET", path, headers=headers)[0] == 401
        assert worker.request("GET", "/v1/models")[1]["www-authenticate"].startswith("Bearer")
        for token in ("secret-1", "secret-2"):
            headers = {"Authorization": f"Bearer {token}"}
            assert worker.ask("completions", headers, prompt="a")[0] == 200
            assert worker.request("GET", "/metrics", headers=headers)[0] == 200
        error = refusal(worker.ask("chat", {"Authorization": "Bearer secret-3"}, messages=CHAT), 403)
        assert error["type"] == "permission_error"
        assert worker.request("GET", "/healthz")[0] == 200
        assert worker.request("GET", "/readyz")[0] == 200


# --- the queue -------------------------------------------------------------------------------------------------


def release(engine: FakeEngine, steps: int = 1000) -> None:
    assert engine.gate
    engine.gate.release(steps)


def test_a_full_queue(gated: tuple[Worker, FakeEngine], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine = gated
    waiting = [worker.begin(prompt="a", max_tokens=50)]
    until(lambda: engine.works)
    others: list[tuple[str, dict[str, Any]]] = [
        ("completions", {"prompt": "b"}),
        ("chat", {"messages": CHAT}),
    ]
    for place, (what, asked) in enumerate(others, 1):
        waiting.append(worker.begin(what, **asked))  # one after the other: two threads read requests
        until(lambda place=place: worker.metric("queue_depth") == place)  # type: ignore[misc]
    assert worker.metric("running") == 1
    with monkeypatch.context() as patch:
        patch.setattr(app, "_read", None)  # nothing is tokenized for an answer that is not to be had
        status, headers, body = worker.request("POST", "/v1/completions", b'{"prompt": "c"}')
    error = refusal((status, json.loads(body)), 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(headers["retry-after"]) >= 1
    release(engine)
    for connection in waiting:
        assert connection.getresponse().status == 200
        connection.close()
    assert len(engine.works) == 3  # in the order in which they came
    assert [len(work.prompt) for work in engine.works[:2]] == [2, 2]


def test_requests_that_are_being_read_count_as_waiting(gated: tuple[Worker, FakeEngine]) -> None:
    worker, _ = gated
    with ExitStack() as read:
        for _ in range(3):  # one to decode, two to wait
            read.enter_context(worker.decoder.room())
        refusal(worker.ask("completions", prompt="a"), 429)
    with worker.decoder.room():
        pass


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_the_model(gated: tuple[Worker, FakeEngine], stream: bool) -> None:
    worker, engine = gated
    connection = worker.begin(prompt="a", max_tokens=200, stream=stream)
    until(lambda: engine.works)
    release(engine, 3)
    if stream:
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data: ")
        answer.close()
    connection.close()
    until(lambda: all(answer.job.cancelled for answer in worker.decoder._running))
    release(engine, 1)  # the pass in which it is noticed
    until(lambda: worker.metric("requests_total", endpoint="completions", outcome="cancelled") == 1)
    assert worker.metric("completion_tokens_total") <= 4
    release(engine)
    assert worker.ask("completions", prompt="b")[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_while_it_waits(gated: tuple[Worker, FakeEngine], stream: bool) -> None:
    worker, engine = gated
    first = worker.begin(prompt="a")
    until(lambda: engine.works)
    second = worker.begin(prompt="b", stream=stream)
    until(lambda: worker.metric("queue_depth") == 1)
    second.close()
    until(lambda: worker.metric("queue_depth") == 0)
    assert worker.metric("requests_total", endpoint="completions", outcome="cancelled") == 1
    release(engine)
    assert first.getresponse().status == 200
    first.close()
    assert len(engine.works) == 1


def test_a_stream_shows_that_it_is_alive_while_it_waits(
    gated: tuple[Worker, FakeEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "KEEP_ALIVE_SECONDS", 0.05)
    worker, engine = gated
    connection = worker.begin("chat", messages=CHAT, stream=True)
    answer = connection.getresponse()
    assert answer.readline().startswith(b"data: ")
    answer.readline()
    assert answer.readline() == b": the request waits for its turn\n"
    release(engine)
    rest = answer.read()
    connection.close()
    assert rest.endswith(b"data: [DONE]\n\n")


# --- errors inside ---------------------------------------------------------------------------------------------


def broken(error: BaseException, after: int, engine: FakeEngine) -> Any:
    """Have a model fail after some passes."""
    original = engine.passes

    def passes(work: Any) -> Iterator[Step]:
        yield from itertools.islice(original(work), after)
        raise error

    engine.passes = passes  # type: ignore[method-assign]
    return original


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (RuntimeError("secret detail"), 500, "an error inside"),
        (DraftstoreError("a secret path"), 500, "an error inside"),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), 503, "no memory"),
    ],
)
def test_a_model_that_fails(
    small_tokenizer: TextTokenizer, error: Exception, status: int, words: str
) -> None:
    engine = FakeEngine(small_tokenizer)
    with running_worker(engine) as worker:
        original = broken(error, 0, engine)
        for stream in (False, True):  # before anything was said, a stream has a status too
            found = refusal(worker.ask("completions", prompt="a", stream=stream), status)
            assert words in found["message"]
            assert "secret" not in found["message"]
        assert worker.request("GET", "/healthz")[0] == 200
        engine.passes = original  # type: ignore[method-assign]
        assert worker.ask("completions", prompt="a")[0] == 200
        broken(error, 0, engine)
        for _ in range(3):
            worker.ask("completions", prompt="a")
        assert worker.request("GET", "/healthz")[0] == 503


def test_settings_that_leave_no_probabilities_are_the_fault_of_their_request(
    small_tokenizer: TextTokenizer,
) -> None:
    engine = FakeEngine(small_tokenizer)
    broken(ProbabilityError("use milder penalties"), 0, engine)
    with running_worker(engine) as worker:
        for _ in range(MAX_FAILURES + 1):
            assert refusal(worker.ask("completions", prompt="a"), 400)["message"] == "use milder penalties"
        assert worker.request("GET", "/healthz")[0] == 200


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_decoding_thread_that_dies(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    broken(SystemExit(1), 2, engine)
    with running_worker(engine) as worker:
        assert refusal(worker.ask("completions", prompt="a"), 503)["code"] == "stopping"
        assert worker.request("GET", "/healthz")[0] == 503
        assert refusal(worker.ask("completions", prompt="a"), 503)["code"] == "stopping"
    assert engine.closed


def test_a_client_that_does_not_read_is_cut_off(
    small_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(answering, "STALL_SECONDS", 0.2)
    word = small_tokenizer.encode("x" * 500, bos=False).tolist()
    engine = FakeEngine(small_tokenizer, lambda _work: word * 80, positions=1 << 20)
    with running_worker(engine, max_tokens=1 << 20) as worker:
        connection = worker.connect()
        connection.sock = socket.socket()
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sock.connect(worker.address)
        body = json.dumps({"prompt": "a", "max_tokens": len(word) * 80, "stream": True})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        until(lambda: "a client does not read its answer" in caplog.text)  # the buffers of sockets are full
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            answer.read()
        connection.close()
        assert worker.ask("completions", prompt="a")[0] == 200


def test_a_model_that_fails_in_the_middle_of_a_stream(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    broken(RuntimeError("secret detail"), 3, engine)
    with running_worker(engine) as worker:
        events = worker.stream("completions", prompt="a")
    assert text_of(events[:-1])
    assert events[-1]["error"]["message"].startswith("an error inside")


def test_what_is_decoded_when_the_worker_stops(gated: tuple[Worker, FakeEngine]) -> None:
    worker, engine = gated
    first = worker.begin("chat", messages=CHAT, stream=True)
    until(lambda: engine.works)
    second = worker.begin(prompt="b", stream=True)
    until(lambda: worker.metric("queue_depth") == 1)
    worker.decoder.drain()
    answer = second.getresponse()
    assert answer.status == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert json.loads(answer.read())["error"]["code"] == "stopping"
    status, headers, body = worker.request("POST", "/v1/completions", b'{"prompt": "c"}')
    assert refusal((status, json.loads(body)), 503)["code"] == "stopping"
    assert headers["connection"] == "close"
    assert worker.request("GET", "/readyz")[0] == 503
    release(engine)
    assert text_of(read_stream(first.getresponse())) == "one two three"
    until(lambda: engine.closed)
    first.close()
    second.close()


def test_the_fake_drafts_are_trees() -> None:
    chain([1, 2, 3]).validate()


def test_tokenizers_may_have_ids_that_the_model_lacks(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer, positions=20)
    low, high = sorted("ab", key=lambda text: small_tokenizer.encode(text, bos=False).max())
    bound = int(small_tokenizer.encode(high, bos=False).max())
    engine.facts = dataclasses.replace(engine.facts, vocab_size=bound)
    limits = {"most_tokens": 9, "most_choices": 1}
    asked: Any = CompletionAsk
    with pytest.raises(ApiError, match=f"{bound} is outside this model's vocabulary"):
        make_requests(asked(prompt=[high]), engine, **limits)
    told = Prediction(type="content", content=(low + high + low) * 30)
    (request,) = make_requests(asked(prompt=[low], prediction=told), engine, **limits)
    assert request.prediction is not None
    assert len(request.prediction) == 20, "the rest has no place in an answer"
    assert request.prediction.max() < bound

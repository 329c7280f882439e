"""The HTTP side of the decoding worker: replies, streams, errors, access, and interruptions."""

import http.client
import itertools
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftstore.decoding.loop import Step
from draftstore.errors import DraftstoreError, ProbabilityError
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from services.worker import replies
from services.worker.decoder import MAX_FAILURES
from tests.fakes.sites import grant
from tests.fakes.waiting import until
from tests.fakes.workers import ANSWER, CHAT, MODEL, FakeEngine, Worker, refusal, running_worker, text_of

# --- answers ---


def test_a_completion(worker: Worker, engine: FakeEngine) -> None:
    status, reply = worker.ask("completions", model=MODEL, prompt="zero", max_tokens=200, temperature=0)
    assert status == 200
    assert (reply["object"], reply["model"], reply["id"][:5]) == ("text_completion", MODEL, "cmpl-")
    assert reply["choices"] == [{"index": 0, "text": ANSWER, "logprobs": None, "finish_reason": "stop"}]
    work = engine.works[-1]
    assert work.prompt.tolist() == engine.tokenizer.encode("zero", bos=True).tolist()
    tokens = len(engine.tokens_of(work))
    passes, last = -(-(tokens - 1) // 3), (tokens - 1) % 3
    accepted = tokens - 1 - passes
    assert reply["usage"] == {
        "prompt_tokens": len(work.prompt),
        "completion_tokens": tokens,
        "total_tokens": len(work.prompt) + tokens,
        "completion_tokens_details": {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        "draftstore": {
            "passes": passes,
            "accepted_length": round((tokens - 1) / passes, 3),
            "sources": {
                "request": {
                    "drafted": accepted,
                    "matched": accepted,
                    "empty": {"no_match": 1} if last == 1 else {},
                }
            },
        },
    }
    steps = passes - (last == 1)  # a last pass of one token had no draft
    assert reply["metrics"]["speculative_decoding"] == {
        "mean_acceptance_length": pytest.approx(1 + accepted / steps),
        "draft_acceptance_rate": 1.0,
        "acceptance_histogram": [0, int(last == 2), (tokens - 1) // 3],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": accepted,
    }


def test_a_chat(worker: Worker, engine: FakeEngine) -> None:
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    turns = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    status, reply = worker.ask("chat", model=MODEL, messages=turns)
    assert status == 200
    assert (reply["object"], reply["id"][:9]) == ("chat.completion", "chatcmpl-")
    [choice] = reply["choices"]
    # Conversations without a template are joined by single spaces: that before the answer is none of it.
    assert choice["message"] == {"role": "assistant", "content": ANSWER[1:], "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert engine.prompts[-1] == "SYSTEM: Be brief. USER: Hi ASSISTANT:"
    assert engine.works[-1].max_tokens == 256


def test_a_chat_template_gets_the_tokenizers_bos_and_its_settings(
    small_tokenizer: TextTokenizer, tmp_path: Path
) -> None:
    small_tokenizer.save(tmp_path)
    template = "{{ bos_token }}{{ messages[0].content }}{% if not thinking %} no{% endif %}>"
    (tmp_path / "chat_template.jinja").write_text(template)
    engine = FakeEngine(load_tokenizer(tmp_path))
    with running_worker(engine) as worker:
        for given, expected in (({"thinking": True}, "Hi>"), ({}, "Hi no>")):
            assert worker.ask("chat", messages=CHAT, chat_template_kwargs=given)[0] == 200
            assert engine.works[-1].prompt.tolist() == small_tokenizer.encode(expected, bos=True).tolist()
        error = refusal(worker.ask("chat", messages=CHAT, chat_template_kwargs={"bos_token": "x"}), 400)
    assert error["param"] == "chat_template_kwargs"


@pytest.mark.parametrize(
    ("what", "asked"), [("completions", {"prompt": "zero"}), ("chat", {"messages": CHAT})]
)
def test_a_stream_joins_to_the_same_text(worker: Worker, what: str, asked: dict[str, Any]) -> None:
    asked = {**asked, "max_tokens": 200}
    events = worker.stream(what, **asked, stream_options={"include_usage": True})
    _, reply = worker.ask(what, **asked)
    whole = reply["choices"][0]
    assert text_of(events) == (whole["message"]["content"] if what == "chat" else whole["text"])
    assert len(events) > 5
    assert "\ufffd" not in json.dumps(events, ensure_ascii=False)
    assert {event["id"] for event in events} == {events[0]["id"]}
    assert {event["object"] for event in events} == {
        "chat.completion.chunk" if what == "chat" else "text_completion"
    }
    reasons = [event["choices"][0]["finish_reason"] for event in events[:-1]]
    assert reasons == [None] * (len(events) - 2) + ["stop"]
    assert events[-1]["choices"] == []
    assert (events[-1]["usage"], events[-1]["metrics"]) == (reply["usage"], reply["metrics"])
    assert all(event["usage"] is None for event in events[:-1])
    assert not any("usage" in event for event in worker.stream(what, **asked))


def test_every_chunk_has_the_usage_so_far_on_request(worker: Worker) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = worker.stream("completions", prompt="zero", max_tokens=9, stream_options=options)
    spent = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert spent == sorted(spent)
    assert (spent[0] > 0, spent[-1]) == (True, 9)


def test_the_limits_of_an_answer(worker: Worker, engine: FakeEngine) -> None:
    _, reply = worker.ask("completions", prompt="zero", max_tokens=5)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 5
    assert ANSWER.startswith(reply["choices"][0]["text"])
    worker.ask("completions", prompt="zero")
    assert engine.works[-1].max_tokens == 16
    worker.ask("chat", messages=CHAT, max_tokens=9, max_completion_tokens=7)
    assert engine.works[-1].max_tokens == 7
    worker.ask("completions", prompt=[5] * 300, max_tokens=-1)
    assert engine.works[-1].max_tokens == engine.facts.positions - 300


def test_an_answer_ends_before_a_stop_string(worker: Worker) -> None:
    asked: dict[str, Any] = {"prompt": "zero", "max_tokens": 200, "stop": ["xyz", "one t", "one two"]}
    [choice] = worker.ask("completions", **asked)[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER[: ANSWER.index("one")], "stop")
    events = worker.stream("completions", **asked)
    assert text_of(events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_a_stop_string_that_is_a_special_token_is_an_end_id(worker: Worker, engine: FakeEngine) -> None:
    """Such tokens have no text in which it could be found."""
    token = engine.tokenizer.bos_ids[0]
    text = engine.tokenizer.decode([token])
    assert worker.ask("completions", prompt="zero", stop=["xyz", text], max_tokens=9)[0] == 200
    assert engine.works[-1].stop_ids == (token,)
    error = refusal(worker.ask("completions", prompt="zero", stop=f"{text} x"), 400)
    assert (error["param"], repr(text) in error["message"]) == ("stop", True)


def test_no_stop_string_ends_an_answer_before_its_least_tokens(worker: Worker, engine: FakeEngine) -> None:
    least = len(engine.tokenizer.encode(ANSWER[: ANSWER.index(" two")], bos=False))
    asked: dict[str, Any] = {
        "prompt": "zero",
        "max_tokens": 200,
        "stop": [" one", "three"],
        "min_tokens": least,
    }
    [choice] = worker.ask("completions", **asked)[1]["choices"]
    assert (choice["text"], choice["finish_reason"]) == (ANSWER[: ANSWER.index("three")], "stop")


def test_further_tokens_may_end_an_answer(worker: Worker, engine: FakeEngine) -> None:
    first, second, *_ = ids = engine.tokenizer.encode(ANSWER, bos=False).tolist()
    asked: dict[str, Any] = {"prompt": "zero", "max_tokens": len(ids) + 1}
    reply = worker.ask("completions", **asked, stop_token_ids=[first, second])[1]
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == ("stop", 1)
    reply = worker.ask("completions", **asked, ignore_eos=True)[1]
    assert (reply["choices"][0]["finish_reason"], reply["usage"]["completion_tokens"]) == (
        "length",
        len(ids) + 1,
    )


# --- predictions ---


def predicted(worker: Worker, content: str, what: str = "completions", **asked: Any) -> tuple[int, int]:
    """Return how many tokens of a prediction were accepted and rejected."""
    prediction = {"type": "content", "content": content}
    asked = {"messages": CHAT} if what == "chat" else {"prompt": "zero", "max_tokens": 200, **asked}
    status, reply = worker.ask(what, **asked, prediction=prediction)
    assert status == 200, reply
    details = reply["usage"]["completion_tokens_details"]
    return details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]


def test_accepted_tokens_of_a_prediction_are_drafts_that_follow_it(
    worker: Worker, engine: FakeEngine
) -> None:
    """Two of three tokens are drafts of the engine, the third is the model's own."""
    ids = engine.tokenizer.encode(ANSWER, bos=False).tolist()
    drafts = sum((place - 1) % 3 < 2 for place in range(1, len(ids)))
    assert predicted(worker, ANSWER) == (drafts, len(ids) - drafts)
    works = engine.works[-1:]
    assert [work.prediction.tolist() for work in works if work.prediction is not None] == [ids]
    assert predicted(worker, ANSWER[1:], "chat") == (drafts, len(ids) - drafts)  # without the space before it
    other = len(engine.tokenizer.encode("xyz xyz", bos=False))
    assert predicted(worker, "xyz xyz") == (0, other)
    assert predicted(worker, "xyz xyz", n=2) == (0, 2 * other)
    assert predicted(worker, "") == (0, 0)


# --- several answers ---


def test_several_answers(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    engine.answer = lambda work: [*work.prompt[:1], 5 + (work.sampling.seed or 0), *engine.facts.ends]
    asked: dict[str, Any] = {"prompt": [[50, 51], [60], [70]], "n": 2, "seed": 40}
    with running_worker(engine) as worker:
        status, reply = worker.ask("completions", **asked)
        assert status == 200, reply
        choices, usage = reply["choices"], reply["usage"]
        assert [choice["index"] for choice in choices] == list(range(6))
        assert [work.sampling.seed for work in engine.works] == [40, 41] * 3
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 3 * 6)
        found = [choice["text"] for choice in choices]
        tokens = [[work.prompt[0], 45 + place % 2] for place, work in enumerate(engine.works)]
        assert found == [small_tokenizer.decode(ids) for ids in tokens]
        events = worker.stream("completions", **asked, stream_options={"include_usage": True})
    streamed = [choice for event in events for choice in event["choices"]]
    assert found == [
        text_of([{"choices": [choice for choice in streamed if choice["index"] == index]}])
        for index in range(6)
    ]
    assert events[-1]["usage"] == usage
    assert [choice["finish_reason"] for choice in streamed].count("stop") == 6


# --- HTTP ---


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"[" * 90_000, b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}'],
)
def test_bodies_other_than_objects_are_refused(worker: Worker, body: bytes) -> None:
    status, headers, found = worker.request("POST", "/v1/completions", body)
    assert refusal((status, json.loads(found)), 400)["type"] == "invalid_request_error"
    assert headers["x-content-type-options"] == "nosniff"


def test_unknown_models_paths_methods_and_hosts(worker: Worker) -> None:
    for what, asked in (("completions", {"prompt": "a"}), ("chat", {"messages": CHAT})):
        error = refusal(worker.ask(what, model="gpt-4", **asked), 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    for method, path, headers, expected in (
        ("GET", "/v1/models/org/other", {}, 404),
        ("GET", "/v1/embeddings", {}, 404),
        ("GET", "/v1/completions", {}, 405),
        ("GET", "/v1/models", {"Host": "evil.example"}, 400),
    ):
        status, _, body = worker.request(method, path, headers=headers)
        refusal((status, json.loads(body)), expected)


def test_while_the_model_is_loaded(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    with running_worker(engine) as worker:
        decoder = worker.decoder
        loaded, decoder.engine = decoder.engine, None
        state, decoder.state = decoder.state, "loading"
        status, headers, body = worker.post("completions", {})
        error = refusal((status, body), 503)
        assert error["code"] == "model_loading"
        assert "kernels" in error["message"]
        assert int(headers["retry-after"]) >= 1
        for path, expected in (("/readyz", 503), ("/healthz", 200), ("/health", 200), ("/v1/models", 503)):
            assert worker.request("GET", path)[0] == expected
        assert worker.metric("ready") == 0
        decoder.engine, decoder.state = loaded, state
        assert worker.request("GET", "/readyz")[0] == 200
    assert engine.closed


def test_tokens(small_tokenizer: TextTokenizer) -> None:
    tokens = (
        grant("engine", "secret-1", MODEL),
        grant("all", "secret-2", "*"),
        grant("other", "secret-3", "chat"),
    )
    with running_worker(FakeEngine(small_tokenizer), *tokens) as worker:
        for header in (None, "Bearer", "Bearer wrong", "Basic secret-1"):
            headers: dict[str, str] = {} if header is None else {"Authorization": header}
            error = refusal(worker.ask("completions", headers, prompt="a"), 401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            for path in ("/v1/models", f"/v1/models/{MODEL}", "/metrics"):
                assert worker.request("GET", path, headers=headers)[0] == 401
        for token in ("secret-1", "secret-2"):
            headers = {"Authorization": f"Bearer {token}"}
            assert worker.ask("completions", headers, prompt="a")[0] == 200
            assert worker.request("GET", "/metrics", headers=headers)[0] == 200
        error = refusal(worker.ask("chat", {"Authorization": "Bearer secret-3"}, messages=CHAT), 403)
        assert error["type"] == "permission_error"
        assert worker.request("GET", "/healthz")[0] == worker.request("GET", "/readyz")[0] == 200


# --- errors inside ---


def broken(error: BaseException, after: int, engine: FakeEngine) -> None:
    """Have a model fail after some passes."""
    original = engine.passes

    def passes(work: Any) -> Iterator[Step]:
        yield from itertools.islice(original(work), after)
        raise error

    engine.passes = passes  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("error", "status", "words", "health"),
    [
        (DraftstoreError("a secret path"), 500, "internal error", 503),
        (type("OutOfMemoryError", (RuntimeError,), {})("CUDA"), 503, "no memory", 503),
        (ProbabilityError("use milder penalties"), 400, "use milder penalties", 200),  # the request's fault
    ],
)
def test_a_model_that_fails(
    small_tokenizer: TextTokenizer, error: Exception, status: int, words: str, health: int
) -> None:
    engine = FakeEngine(small_tokenizer)
    broken(error, 0, engine)
    with running_worker(engine) as worker:
        for number in range(MAX_FAILURES):
            assert worker.request("GET", "/healthz")[0] == 200
            stream = number == 1  # before the first piece, a stream has a status too
            found = refusal(worker.ask("completions", prompt="a", stream=stream), status)
            assert words in found["message"]
            assert "secret" not in found["message"]
        assert worker.request("GET", "/healthz")[0] == worker.request("GET", "/health")[0] == health


def test_a_model_that_fails_in_the_middle_of_a_stream(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    broken(RuntimeError("secret detail"), 3, engine)
    with running_worker(engine) as worker:
        events = worker.stream("completions", prompt="a")
    assert text_of(events[:-1])
    assert events[-1]["error"]["message"].startswith("internal error")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_decoding_thread_that_dies(small_tokenizer: TextTokenizer) -> None:
    engine = FakeEngine(small_tokenizer)
    broken(SystemExit(1), 2, engine)
    with running_worker(engine) as worker:
        for _ in range(2):
            assert refusal(worker.ask("completions", prompt="a"), 503)["code"] == "stopping"
            assert worker.request("GET", "/healthz")[0] == 503
    assert engine.closed


def test_a_client_that_does_not_read_is_cut_off(
    small_tokenizer: TextTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    monkeypatch.setattr(replies, "STALL_SECONDS", 0.2)
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


def test_tokenizers_may_have_ids_that_the_model_lacks(small_tokenizer: TextTokenizer) -> None:
    low, high = sorted("ab", key=lambda text: small_tokenizer.encode(text, bos=False).max())
    bound = int(small_tokenizer.encode(high, bos=False).max())
    engine = FakeEngine(small_tokenizer, positions=20, vocab_size=bound)
    with running_worker(engine) as worker:
        error = refusal(worker.ask("completions", prompt=[high]), 400)
        assert f"{bound} is outside this model's vocabulary" in error["message"]
        predicted(worker, (low + high + low) * 30, prompt=[low], max_tokens=1)
    prediction = engine.works[-1].prediction
    assert prediction is not None
    assert len(prediction) == 20, "the rest has no place in an answer"
    assert prediction.max() >= bound, "which separates what is before from what follows"

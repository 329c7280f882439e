"""The queue of the decoding worker: answers begin in order, run together, and end one by one."""

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from draftstore.decoding.loop import Step
from draftstore.hf.requests import GenerationRequest
from draftstore.text.tokenizer import TextTokenizer
from services.worker import app, replies
from services.worker.answers import Answer
from services.worker.decoder import MAX_FAILURES
from tests.fakes.waiting import SECONDS, until
from tests.fakes.workers import FakeEngine, Worker, read_stream, refusal, running_worker, text_of

TOKENS = 3
"""Tokens of an answer, unless a test says otherwise; each takes a step."""


class Batched(FakeEngine):
    """A model for four answers, which repeats a token that shows the length of the prompt.

    Attributes:
        steps: steps that it may still take, in each of which all answers get a token.
        sizes: answers in each step so far.
        fails: what the next step raises.
        cannot: lengths of prompts that cannot join.
        breaks: lengths of prompts whose answers fail after a token.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer, lambda work: [45 + len(work.prompt)] * work.max_tokens, most=4)
        self.steps = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.fails: Exception | None = None
        self.cannot: set[int] = set()
        self.breaks: set[int] = set()

    def join(self, answer: Answer) -> None:
        if len(answer.request.prompt) in self.cannot:
            self.works.append(answer.request)
            raise RuntimeError("secret detail")
        super().join(answer)

    def passes(self, work: GenerationRequest) -> Iterator[Step]:
        for number, step in enumerate(super().passes(work)):
            if number and len(work.prompt) in self.breaks:
                raise RuntimeError("secret detail")
            yield step

    def step(self) -> list[tuple[Answer, Exception | None]]:
        assert self.steps.acquire(timeout=SECONDS)
        self.sizes.append(len(self._answers))
        if self.fails is None:
            return super().step()
        failed: list[tuple[Answer, Exception | None]] = [(answer, self.fails) for answer in self._answers]
        self._answers.clear()
        self.fails = None
        return failed

    def echo(self, length: int, tokens: int = TOKENS) -> str:
        """Return the answer to a prompt of some length."""
        return self.tokenizer.decode([45 + length] * tokens)


@pytest.fixture
def pair(small_tokenizer: TextTokenizer) -> Iterator[tuple[Worker, Batched]]:
    """Return a worker and its model."""
    engine = Batched(small_tokenizer)
    with running_worker(engine, queue=4) as worker:
        yield worker, engine
        worker.decoder.hurry()
        engine.steps.release(10_000)


def begin(worker: Worker, length: int, **asked: Any) -> http.client.HTTPConnection:
    """Send a request that is known by the length of its prompt."""
    return worker.begin(**{"prompt": [45] * length, "max_tokens": TOKENS, "temperature": 0, **asked})


def fill(
    worker: Worker, engine: Batched, lengths: Sequence[int], **asked: Any
) -> list[http.client.HTTPConnection]:
    """Send requests one after the other, and have the first take a step, after which the others join."""
    before = len(engine.works)
    connections = [begin(worker, lengths[0], **asked)]
    until(lambda: len(engine.works) == before + 1)
    for place, length in enumerate(lengths[1:], 1):
        connections.append(begin(worker, length, **asked))
        until(lambda place=place: worker.waiting == place)  # type: ignore[misc]
    engine.steps.release()
    until(lambda: len(engine.works) == before + min(4, len(lengths)))
    return connections


def texts_of(connection: http.client.HTTPConnection) -> list[str]:
    """Return the texts of a whole reply, which come in the order of their indices."""
    answer = connection.getresponse()
    choices = json.loads(answer.read())["choices"]
    connection.close()
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["text"] for choice in choices]


def status_of(connection: http.client.HTTPConnection) -> int:
    status = connection.getresponse().status
    connection.close()
    return status


def health(worker: Worker) -> int:
    return worker.request("GET", "/healthz")[0]


def test_requests_join_while_others_run_and_leave_when_they_are_done(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    connections = fill(worker, engine, [1, 2, 3, 4, 5])
    assert worker.metric("vllm:num_requests_running") == 4
    assert worker.waiting == 1
    engine.steps.release(1000)
    assert [texts_of(connection) for connection in connections] == [[engine.echo(n)] for n in range(1, 6)]
    # The first had a step of its own, so the fifth takes its place when the others have one to go.
    assert engine.sizes == [1, 4, 4, 4, 1, 1]
    assert [len(work.prompt) for work in engine.works] == [1, 2, 3, 4, 5]
    assert worker.ended() == {"length": 5}
    assert worker.is_idle


def test_answers_that_cannot_join_or_fail_end_alone(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    engine.cannot, engine.breaks = {2}, {3}
    connections = fill(worker, engine, [1, 2, 3, 4])
    engine.steps.release(1000)
    assert [status_of(connection) for connection in connections] == [200, 500, 500, 200]
    assert worker.ended() == {"length": 2, "error": 2}
    assert worker.is_idle


def test_a_pass_that_fails_is_one_failure_however_many_answers_it_ends(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    for number in range(1, MAX_FAILURES + 1):
        connections = fill(worker, engine, [1, 2, 3, 4])
        engine.fails = RuntimeError("secret detail")
        engine.steps.release()
        assert [status_of(connection) for connection in connections] == [500] * 4
        assert health(worker) == (200 if number < MAX_FAILURES else 503)
    engine.steps.release(TOKENS)
    assert texts_of(begin(worker, 1)) == [engine.echo(1)]
    assert health(worker) == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_frees_the_place_of_an_answer(pair: tuple[Worker, Batched], stream: bool) -> None:
    worker, engine = pair
    connections = fill(worker, engine, [1, 2, 3, 4, 5], max_tokens=6, stream=stream)
    connections[1].close()
    until(lambda: any(answer.cancelled for answer in worker.decoder._running))
    engine.steps.release(1000)
    rest = [connections[0], *connections[2:]]
    if stream:
        found = [text_of(read_stream(connection.getresponse())) for connection in rest]
    else:
        found = [text for connection in rest for text in texts_of(connection)]
    assert found == [engine.echo(length, 6) for length in (1, 3, 4, 5)]
    assert worker.ended() == {"length": 4, "abort": 1}
    for connection in rest:
        connection.close()


def test_a_disconnect_cancels_a_waiting_answer(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    connections = fill(worker, engine, [1, 2, 3, 4, 5])
    connections[4].close()
    until(lambda: worker.waiting == 0)
    assert worker.ended() == {"abort": 1}
    engine.steps.release(1000)
    assert [status_of(connection) for connection in connections[:4]] == [200] * 4
    assert len(engine.works) == 4


def test_an_answer_that_fails_ends_the_others_to_its_request(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    engine.breaks = {2}
    other = begin(worker, 1)
    until(lambda: len(engine.works) == 1)  # and no step has begun: the next request waits for one
    many = begin(worker, 1, n=2, prompt=[[45] * length for length in (2, 3, 3)], max_tokens=100)
    until(lambda: worker.waiting == 6)
    engine.steps.release(20)
    assert status_of(many) == 500
    assert texts_of(other) == [engine.echo(1)]
    engine.steps.release(200)
    until(lambda: worker.is_idle)
    ended = worker.ended()
    assert ended["length"] == 1
    assert ended["error"] + ended["abort"] == 6


def test_a_full_queue(pair: tuple[Worker, Batched], monkeypatch: pytest.MonkeyPatch) -> None:
    worker, engine = pair
    connections = [begin(worker, 1, n=4)]
    until(lambda: len(engine.works) == 4)
    connections.append(begin(worker, 2, n=4))
    until(lambda: worker.waiting == 4)
    monkeypatch.setattr(app, "parse", None)  # nothing is tokenized for an answer that is not to be had
    status, headers, body = worker.post("completions", {"prompt": "c"})
    error = refusal((status, body), 429)
    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
    assert int(headers["retry-after"]) >= 1
    assert worker.metric("requests_refused_total") == 1
    engine.steps.release(1000)
    assert [status_of(connection) for connection in connections] == [200, 200]


def test_requests_that_are_being_read_count_as_waiting(pair: tuple[Worker, Batched]) -> None:
    worker, _ = pair
    worker.site._reading = 8  # four to decode, four to wait
    refusal(worker.ask("completions", prompt="a"), 429)


def test_draining_finishes_accepted_requests(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    many = begin(worker, 1, n=4)
    until(lambda: len(engine.works) == 4)
    waiting = begin(worker, 2)
    until(lambda: worker.waiting == 1)
    worker.decoder.drain()
    status, headers, body = worker.post("completions", {"prompt": "c"})
    assert refusal((status, body), 503)["code"] == "stopping"
    assert headers["connection"] == "close"
    assert int(headers["retry-after"]) >= 1
    assert worker.request("GET", "/readyz")[0] == 503
    engine.steps.release(1000)
    assert texts_of(many) == [engine.echo(1)] * 4
    assert texts_of(waiting) == [engine.echo(2)]
    until(lambda: engine.closed)


def test_a_stream_shows_that_it_is_alive_while_it_waits(
    pair: tuple[Worker, Batched], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "KEEP_ALIVE_SECONDS", 0.05)
    worker, engine = pair
    connection = begin(worker, 1, stream=True)
    answer = connection.getresponse()
    assert answer.readline() == b": the request waits for its turn\n"
    engine.steps.release(1000)
    rest = answer.read()
    connection.close()
    assert rest.endswith(b"data: [DONE]\n\n")

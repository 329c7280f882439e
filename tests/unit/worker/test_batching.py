"""Several answers at a time in the decoding worker, on a model that says what it is told to."""

import http.client
import json
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from draftstore.decoding.loop import Step
from draftstore.hf.requests import GenerationRequest
from draftstore.text.tokenizer import TextTokenizer
from services.worker.decoder import MAX_FAILURES, Decoder
from services.worker.figures import WorkerMetrics
from services.worker.jobs import DecodingJob, Event, Failed
from services.worker.work import Answer
from tests.fakes.waiting import SECONDS, until
from tests.fakes.workers import FakeEngine, Worker, read_stream, running_worker

TOKENS = 3
"""Tokens of an answer, unless a test says otherwise; each takes a step."""


class Batched(FakeEngine):
    """A model for four answers, which repeats a token that tells the length of the prompt.

    Attributes:
        steps: steps that it may still take, in each of which all answers get a token.
        sizes: answers in each step so far.
        fails: what the next step raises.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        super().__init__(tokenizer, lambda work: [45 + len(work.prompt)] * work.max_tokens, most=4)
        self.steps = threading.Semaphore(0)
        self.sizes: list[int] = []
        self.fails: Exception | None = None

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

    @property
    def begun(self) -> list[int]:
        """Return the lengths of the prompts whose answers have begun, in order."""
        return [len(work.prompt) for work in self.works]


@pytest.fixture
def pair(small_tokenizer: TextTokenizer) -> Iterator[tuple[Worker, Batched]]:
    """Return a worker and its model."""
    engine = Batched(small_tokenizer)
    with running_worker(engine, queue=20) as worker:
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
        until(lambda place=place: worker.metric("queue_depth") == place)  # type: ignore[misc]
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


def outcomes(worker: Worker) -> dict[str, float]:
    """Return how many requests had which outcome."""
    return {
        dict(labels)["outcome"]: value
        for (name, labels), value in worker.samples().items()
        if name == "draftstore_decoding_requests_total" and value
    }


def test_requests_join_while_others_run_and_leave_when_they_are_done(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    connections = fill(worker, engine, [1, 2, 3, 4, 5])
    assert worker.metric("running") == 4
    assert worker.metric("queue_depth") == 1
    engine.steps.release(1000)
    assert [texts_of(connection) for connection in connections] == [[engine.echo(n)] for n in range(1, 6)]
    # The first had a step of its own, so the fifth takes its place when the others have one to go.
    assert engine.sizes == [1, 4, 4, 4, 1, 1]
    assert engine.begun == [1, 2, 3, 4, 5]
    assert outcomes(worker) == {"length": 5}
    assert worker.decoder.idle


def test_an_answer_that_fails_ends_alone(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    original = engine.passes

    def passes(work: GenerationRequest) -> Iterator[Step]:
        for number, step in enumerate(original(work)):
            if len(work.prompt) == 2 and number == 1:
                raise RuntimeError("secret detail")
            yield step

    engine.passes = passes  # type: ignore[method-assign]
    connections = fill(worker, engine, [1, 2, 3])
    engine.steps.release(1000)
    answers = [connection.getresponse() for connection in connections]
    assert [answer.status for answer in answers] == [200, 500, 200]
    assert json.loads(answers[2].read())["choices"][0]["text"] == engine.echo(3)
    assert outcomes(worker) == {"length": 2, "failed": 1}
    for connection in connections:
        connection.close()


def test_an_answer_that_cannot_join_ends_alone(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    original = engine.join

    def join(answer: Answer) -> None:
        original(answer)
        if len(answer.request.prompt) == 2:
            engine.leave(answer)
            raise RuntimeError("secret detail")

    engine.join = join  # type: ignore[method-assign]
    connections = fill(worker, engine, [1, 2, 3])
    engine.steps.release(1000)
    assert [status_of(connection) for connection in connections] == [200, 500, 200]
    assert outcomes(worker) == {"length": 2, "failed": 1}
    assert worker.decoder.idle


def test_a_pass_that_fails_ends_those_in_it_and_the_worker_goes_on(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    connections = fill(worker, engine, [1, 2, 3, 4, 5])
    engine.fails = RuntimeError("secret detail")
    engine.steps.release(1 + TOKENS)
    assert [status_of(connection) for connection in connections[:4]] == [500] * 4
    assert texts_of(connections[4]) == [engine.echo(5)]
    assert outcomes(worker) == {"failed": 4, "length": 1}


def test_a_pass_that_fails_is_one_failure_however_many_answers_it_ends(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair

    def health() -> int:
        return worker.request("GET", "/healthz")[0]

    for number in range(1, MAX_FAILURES + 1):
        connections = fill(worker, engine, [1, 2, 3, 4])
        engine.fails = RuntimeError("secret detail")
        engine.steps.release()
        assert [status_of(connection) for connection in connections] == [500] * 4
        until(lambda: worker.decoder.idle)
        assert health() == (200 if number < MAX_FAILURES else 503)
    engine.steps.release(TOKENS)
    assert texts_of(begin(worker, 1)) == [engine.echo(1)]
    until(lambda: health() == 200)


@pytest.mark.parametrize("stream", [False, True])
def test_one_of_several_is_cancelled_and_its_place_is_taken(
    pair: tuple[Worker, Batched], stream: bool
) -> None:
    worker, engine = pair
    connections = fill(worker, engine, [1, 2, 3, 4, 5], max_tokens=6, stream=stream)
    connections[1].close()
    running = worker.decoder._running
    until(lambda: any(answer.job.cancelled for answer in running))
    engine.steps.release(1000)
    rest = [connections[0], *connections[2:]]
    if stream:
        found = ["".join(e["choices"][0]["text"] for e in read_stream(each.getresponse())) for each in rest]
    else:
        found = [text for each in rest for text in texts_of(each)]
    assert found == [engine.echo(length, 6) for length in (1, 3, 4, 5)]
    assert outcomes(worker) == {"length": 4, "cancelled": 1}
    assert max(engine.sizes) == 4
    for connection in rest:
        connection.close()


def test_answers_of_one_request_run_side_by_side_while_nobody_waits(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    many = begin(worker, 1, n=6, seed=0, temperature=1)
    until(lambda: len(engine.works) == 4)
    assert worker.metric("running") == 4
    engine.steps.release(1000)
    assert texts_of(many) == [engine.echo(1)] * 6
    assert engine.sizes == [4] * TOKENS + [2] * TOKENS
    assert [work.sampling.seed for work in engine.works] == list(range(6))
    assert outcomes(worker) == {"length": 1}


def test_answers_of_one_request_take_turns_with_others_that_wait(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    many = begin(worker, 1, n=9)
    until(lambda: len(engine.works) == 4)
    others = []
    for waiting, length in enumerate((2, 3), 1):
        others.append(begin(worker, length))
        until(lambda waiting=waiting: worker.metric("queue_depth") == waiting)  # type: ignore[misc]
    engine.steps.release(1000)
    assert texts_of(many) == [engine.echo(1)] * 9
    assert [texts_of(other) for other in others] == [[engine.echo(2)], [engine.echo(3)]]
    assert engine.begun[:4] == [1] * 4
    assert sorted(engine.begun[4:8]) == [1, 1, 2, 3]  # all places were given up at once: others come first
    assert engine.begun[4:6] == [2, 3]


def test_choices_come_in_order_although_they_end_in_another(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    engine._answer = lambda work: [45 + len(work.prompt)] * (5 - len(work.prompt))
    many = begin(worker, 0, prompt=[[45] * length for length in (1, 2, 3)], max_tokens=5)
    until(lambda: len(engine.works) == 3)
    engine.steps.release(1000)
    assert texts_of(many) == [engine.echo(length, 5 - length) for length in (1, 2, 3)]


def test_one_of_several_answers_of_a_request_that_fails_ends_the_others(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    original = engine.passes

    def passes(work: GenerationRequest) -> Iterator[Step]:
        yield from list(original(work))[:1]
        if work.sampling.seed == 2:
            raise RuntimeError("secret detail")
        yield from list(original(work))[1:]

    engine.passes = passes  # type: ignore[method-assign]
    other = begin(worker, 1)
    until(lambda: len(engine.works) == 1)  # and no step has begun: the next request waits for one
    many = begin(worker, 2, n=8, seed=1)
    until(lambda: worker.metric("queue_depth") == 1)
    engine.steps.release(1000)
    assert status_of(many) == 500
    assert texts_of(other) == [engine.echo(1)]
    until(lambda: worker.decoder.idle)
    assert outcomes(worker) == {"failed": 1, "length": 1}
    assert len(engine.works) < 1 + 8


def test_draining_finishes_what_has_begun_and_refuses_what_has_not(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    many = begin(worker, 1, n=6)
    until(lambda: len(engine.works) == 4)
    late = begin(worker, 2)
    until(lambda: worker.metric("queue_depth") == 1)
    worker.decoder.drain()
    assert status_of(late) == 503
    engine.steps.release(1000)
    assert texts_of(many) == [engine.echo(1)] * 6
    until(lambda: engine.closed)
    assert outcomes(worker) == {"length": 1, "refused": 1}


def test_hurrying_ends_everything_with_an_error(pair: tuple[Worker, Batched]) -> None:
    worker, engine = pair
    connections = fill(worker, engine, [1, 2, 3, 4, 5])
    worker.decoder.drain()
    worker.decoder.hurry()
    engine.steps.release(1000)
    assert [status_of(connection) for connection in connections] == [503] * 5
    until(lambda: engine.closed)
    assert outcomes(worker) == {"cancelled": 4, "refused": 1}


def test_a_request_that_waits_for_its_next_turn_is_told_to_hurry(small_tokenizer: TextTokenizer) -> None:
    """Between two of its answers nothing of it is being decoded, so no pass would end it."""
    engine = Batched(small_tokenizer)
    engine.most = 1
    events: dict[str, list[Event]] = {"many": [], "other": []}
    figures = WorkerMetrics()
    decoder = Decoder(lambda: engine, figures, queue=5)
    decoder.start()
    until(lambda: decoder.ready)

    def submit(name: str, count: int) -> DecodingJob:
        requests = [GenerationRequest(small_tokenizer.encode("a", bos=True), TOKENS)] * count
        job = DecodingJob(name, "completions", requests, events[name].append)
        decoder.submit(job)
        return job

    many = submit("many", 3)
    until(lambda: many.begun == 1)
    other = submit("other", 1)
    engine.steps.release(TOKENS)
    until(lambda: other.begun == 1)
    assert (many.begun, many.done) == (1, 1)
    decoder.drain()
    decoder.hurry()
    last = events["many"][-1]
    assert isinstance(last, Failed)
    assert last.error.code == "stopping"
    engine.steps.release(10)
    assert decoder.join(SECONDS)
    assert isinstance(events["other"][-1], Failed)
    assert sum(isinstance(event, Failed) for event in events["many"]) == 1
    assert b'requests_total{endpoint="completions",outcome="cancelled"} 2.0' in figures.text()
    assert engine.closed

"""Running decoding workers for tests: a model with scripted answers, the HTTP side around it, a plain client.

with running_worker(FakeEngine(tokenizer, " one two")) as worker:
    status, reply = worker.ask("completions", prompt="zero", max_tokens=8)
"""

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
from starlette.datastructures import Headers

from draftstore.cli.options import takes
from draftstore.cli.output import print_json
from draftstore.decoding.grammars import Grammars
from draftstore.decoding.loop import Step
from draftstore.drafting.outcomes import SourceOutcome
from draftstore.errors import DraftstoreError
from draftstore.hf.requests import GenerationRequest
from draftstore.text.tokenizer import TextTokenizer, load_tokenizer
from draftstore.trees.tree import DraftTree
from services.common import logs
from services.common.permissions import Grant, Permissions
from services.worker import running
from services.worker.answers import Answer, Facts
from services.worker.app import WorkerSite, make_app
from services.worker.decoder import Decoder
from services.worker.metrics import WorkerMetrics
from services.worker.response_log import ResponseLog
from services.worker.settings import WorkerSettings
from tests.fakes.served import Samples, Service, launch_module, read_samples, started
from tests.fakes.sites import serving
from tests.fakes.waiting import SECONDS, until

MODEL = "small"
ANSWER = " naïve 東京 😀, one two three"
CHAT = [{"role": "user", "content": "Hi"}]
PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions", "responses": "/v1/responses"}


def chain(tokens: Sequence[int]) -> DraftTree:
    """Return a draft of one path."""
    size = len(tokens)
    return DraftTree(
        np.array(tokens, np.int32), np.arange(-1, size - 1, dtype=np.int16), np.zeros(size, np.uint8)
    )


class FakeEngine:
    """A model that gives scripted answers, several tokens a pass.

    Attributes:
        works: what it was asked for.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        answer: str | Callable[[GenerationRequest], Sequence[int]] = " one two three",
        *,
        chunk: int = 1,
        positions: int = 512,
        vocab_size: int | None = None,
        most: int = 1,
    ) -> None:
        assert tokenizer.eos_id is not None
        self.tokenizer = tokenizer
        ends, vocab_size = frozenset([tokenizer.eos_id]), vocab_size or tokenizer.vocab_size
        self.facts = Facts(MODEL, positions, vocab_size, ends, ("request",))
        self.grammars = Grammars(tokenizer, vocab_size, ends)
        self.works: list[GenerationRequest] = []
        self.remembered: list[tuple[list[int], bytes]] = []
        self.closed = False
        self.most = most
        self._chunk = chunk
        self.answer = answer
        self._answers: dict[Answer, Iterator[Step]] = {}

    @property
    def prompts(self) -> list[str]:
        """Return the texts of the prompts, without BOS."""
        return [self.tokenizer.decode(work.prompt).removeprefix("<s>") for work in self.works]

    def tokens_of(self, work: GenerationRequest) -> list[int]:
        """Return what it says, cut where transformers would cut it."""
        if callable(self.answer):
            tokens = list(self.answer(work))
        else:
            ids = self.tokenizer.encode(self.answer, bos=False).tolist()
            tokens = [*ids, *self.facts.ends]
        return tokens[: work.max_tokens]

    @property
    def room(self) -> int:
        return self.most - len(self._answers)

    def join(self, answer: Answer) -> None:
        self._answers[answer] = self.passes(answer.request)
        answer.sources = self.facts.drafters
        self.works.append(answer.request)  # last: who waits for it finds the room taken

    def leave(self, answer: Answer) -> None:
        self._answers.pop(answer, None)

    def passes(self, work: GenerationRequest) -> Iterator[Step]:
        """Yield the passes of an answer."""
        tokens = self.tokens_of(work)
        for start in [0, *range(1, len(tokens), self._chunk)]:
            come = tokens[start : start + self._chunk] if start else tokens[:1]
            tree = chain(come[:-1])
            source = SourceOutcome(len(tree), len(tree), "" if len(tree) else "no_match")
            yield Step(tree, list(range(len(tree))), np.array(come, np.int32), 1, 1, 1, sources=[source])

    def step(self) -> list[tuple[Answer, Exception | None]]:
        ended: list[tuple[Answer, Exception | None]] = []
        for answer, passes in list(self._answers.items()):
            try:
                answer.take(next(passes))
            except StopIteration:
                ended.append((answer, None))
            except Exception as error:  # noqa: BLE001 (that is how an answer ends)
                ended.append((answer, error))
        for answer, _ in ended:
            self.leave(answer)
        return ended

    def remember(self, answer: Answer, digest: bytes) -> None:
        self.remembered.append((answer.tokens, digest))

    def close(self) -> None:
        self.closed = True


class Worker:
    """A worker with its HTTP side, in threads of this process."""

    def __init__(self, decoder: Decoder, address: tuple[str, int], site: WorkerSite) -> None:
        self.decoder = decoder
        self.address = address
        self.site = site

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=SECONDS)

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, Headers, bytes]:
        """Send a request; return status, headers and body."""
        connection = self.connect()
        try:
            connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, Headers(dict(answer.getheaders())), answer.read()
        finally:
            connection.close()

    def post(
        self, what: str, asked: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> tuple[int, Headers, Any]:
        """Ask for a completion or a chat; return status, headers, and the document if it is one."""
        status, found, body = self.request("POST", PATHS[what], json.dumps(asked).encode(), headers)
        is_json = found["content-type"].startswith("application/json")
        return status, found, json.loads(body) if is_json else body

    def ask(self, what: str, headers: Mapping[str, str] | None = None, **asked: Any) -> tuple[int, Any]:
        """Ask for a completion or a chat; return status and document."""
        status, _, body = self.post(what, asked, headers)
        return status, body

    def begin(self, what: str = "completions", **asked: Any) -> http.client.HTTPConnection:
        """Send a request, and read nothing yet."""
        connection = self.connect()
        connection.request("POST", PATHS[what], json.dumps(asked), {"Content-Type": "application/json"})
        return connection

    def stream(self, what: str, **asked: Any) -> list[dict[str, Any]]:
        """Return the events of a stream, which ends as it should."""
        connection = self.begin(what, **{**asked, "stream": True})
        try:
            return read_stream(connection.getresponse())
        finally:
            connection.close()

    def samples(self) -> Samples:
        """Return all metrics by name and labels."""
        status, _, body = self.request("GET", "/metrics")
        assert status == 200, body
        return read_samples(body)

    def metric(self, name: str, **labels: str) -> float:
        """Return a metric: under vLLM's name one of this model, else one of ours."""
        if name.startswith("vllm:"):
            labels["model_name"] = MODEL
        else:
            name = f"draftstore_decoding_{name}"
        return self.samples()[name, tuple(sorted(labels.items()))]

    @property
    def waiting(self) -> float:
        return self.metric("vllm:num_requests_waiting")

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.metric("vllm:num_requests_running")

    def ended(self) -> dict[str, float]:
        """Return how many answers have ended for which reason."""
        return {
            dict(labels)["finished_reason"]: value
            for (name, labels), value in self.samples().items()
            if name == "vllm:request_success_total" and value
        }


def refusal(answer: tuple[int, Any], status: int) -> dict[str, Any]:
    """Check the form that all errors have, and return what it holds."""
    found, document = answer
    assert found == status, document
    assert document.keys() == {"error"}
    error: dict[str, Any] = document["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


def read_stream(answer: http.client.HTTPResponse) -> list[dict[str, Any]]:
    """Return the documents of a stream of events."""
    assert answer.status == 200, answer.read()
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.read().decode().split("\n\n")
    assert events[-1] == ""
    data = [event.removeprefix("data: ") for event in events[:-1] if event.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(document) for document in data[:-1]]


def text_of(events: Sequence[dict[str, Any]]) -> str:
    """Return the text of a stream's pieces."""
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(
        choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices
    )


@contextmanager
def running_worker(engine: Any, *grants: Grant, log: Path | None = None, **settings: Any) -> Iterator[Worker]:
    """Run a worker; with grants it asks for tokens."""
    chosen = WorkerSettings(port=0, response_log=log, **settings)
    figures = WorkerMetrics()
    responses = ResponseLog(log, 10**6, figures.logged) if log else None
    decoder = Decoder(lambda: engine, figures, queue=chosen.queue, keep=responses.put if responses else None)
    site = WorkerSite(decoder, figures, Permissions(grants or None), chosen)
    with serving(make_app(site, hosts=())) as address:
        decoder.start()
        try:
            until(lambda: decoder.ready)
            yield Worker(decoder, ("127.0.0.1", int(address.rpartition(":")[2])), site)
        finally:
            decoder.drain()
            decoder.hurry()
            assert decoder.join(SECONDS)
    if responses:
        responses.close()


@contextmanager
def served_worker(*arguments: object, folder: Path, module: str = "draftstore") -> Iterator[Service]:
    """Run `draftstore worker` in a process of its own, and wait until it is ready.

    Args:
        arguments: of the command.
        folder: for its log.
        module: that is run instead, with the same output: `tests.fakes.workers` has no model.
    """
    service = Service(launch_worker(*arguments, folder=folder, module=module), folder)
    with started(service):
        yield service


def launch_worker(*arguments: object, folder: Path, module: str = "draftstore") -> "subprocess.Popen[str]":
    """Start a worker on a free port, with JSON on standard output."""
    usual = ("--port", 0, "--log-format", "json")
    return launch_module(module, "worker", *usual, *arguments, folder=folder, OMP_NUM_THREADS="1")


@click.group()
def commands() -> None:
    """Stand in for `draftstore`, without torch."""


@commands.command()
@click.option("--tokenizer", type=click.Path(path_type=Path), required=True)
@click.option("--load-seconds", type=float, default=0.0)
@click.option("--fail", is_flag=True)
@click.option("--pass-seconds", type=float, default=0.0)
@click.option("--hold", type=click.Path(path_type=Path))
@click.option("--cut-seconds", type=float, default=5.0)
@click.option("--json", is_flag=True)
@takes(settings=WorkerSettings, log=logs.LogOptions)
def worker(
    tokenizer: Path, load_seconds: float, fail: bool, pass_seconds: float, hold: Path | None, cut_seconds: float,
    json: bool, settings: WorkerSettings, log: logs.LogOptions,
) -> None:  # fmt: skip
    """Run a worker whose model counts for ever, at its own pace; with `--hold` it stops while that file is there."""

    def load() -> FakeEngine:
        time.sleep(load_seconds)
        if fail:
            raise DraftstoreError("there is no model")
        loaded = load_tokenizer(tokenizer)
        counting = loaded.encode(" " + " ".join(map(str, range(300))), bos=False).tolist()
        return SlowEngine(loaded, lambda _work: counting, pass_seconds, hold)

    running.CUT_SECONDS = cut_seconds
    try:
        logs.configure(log)
        running.run(settings, load, print_json)
    except DraftstoreError as error:
        sys.exit(f"error: {error}")


class SlowEngine(FakeEngine):
    """A model that takes its time."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        answer: Callable[[GenerationRequest], Sequence[int]],
        pass_seconds: float,
        hold: Path | None,
    ) -> None:
        super().__init__(tokenizer, answer, positions=2000)
        self._seconds, self._hold = pass_seconds, hold

    def passes(self, work: GenerationRequest) -> Iterator[Step]:
        for step in super().passes(work):
            yield step
            time.sleep(self._seconds)
            while self._hold and self._hold.exists():
                time.sleep(0.005)


if __name__ == "__main__":
    commands()
